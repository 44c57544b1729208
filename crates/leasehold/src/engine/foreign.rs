//! Calls into code that is not ours: wakers, tracing subscribers and observers.
//!
//! Such code may panic. A panic is caught here and logged, so that it affects nobody else: neither the engine's thread
//! nor whoever is served in the same step.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code that is not ours.
pub(crate) fn guarded(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        // The subscriber may be the one that panics.
        let report = || tracing::error!("a waker, a subscriber or an observer panicked");
        let _ = catch_unwind(AssertUnwindSafe(report));
    }
}

/// A `tracing` event that cannot unwind: `event!(warn, name, "connection lost")`.
macro_rules! event {
    ($level:ident, $($arguments:tt)*) => {
        $crate::engine::foreign::guarded(|| tracing::$level!($($arguments)*))
    };
}

pub(crate) use event;
