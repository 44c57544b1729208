//! Calls into code of the user: wakers, tracing subscribers, metrics recorders and observers.
//!
//! Such code may panic. The panic is caught here and logged. So it affects neither the engine's thread nor other
//! acquisitions that are served in the same step.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of the user, and catches its panic.
pub(crate) fn guarded(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        // The subscriber itself may be the code that panics.
        let report = || {
            tracing::error!("a waker, tracing subscriber, metrics recorder or observer panicked");
        };
        let _ = catch_unwind(AssertUnwindSafe(report));
    }
}

/// A `tracing` event that cannot unwind: `event!(warn, name, "connection lost")`.
macro_rules! event {
    ($level:ident, $($arguments:tt)*) => {
        $crate::callbacks::guarded(|| tracing::$level!($($arguments)*))
    };
}

pub(crate) use event;
