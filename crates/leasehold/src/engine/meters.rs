//! The metrics of one client. Without the feature `metrics`, all of this is empty.
//!
//! The handles are registered once: for each client, for each kind of object that it declares, and for each semaphore,
//! lock or pool that asked for its name as a label. So recording needs no lookup by name. The names of the metrics are
//! in `crate::metrics`.

use std::time::Duration;

use crate::{Error, LossReason, Primitive};

#[cfg(feature = "metrics")]
mod recorded;
#[cfg(feature = "metrics")]
pub(crate) use recorded::{ClientMeters, Meters, Waiting};

#[cfg(not(feature = "metrics"))]
pub(crate) use off::{ClientMeters, Meters, Waiting};

/// Something that is counted or timed.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
pub(crate) enum Measurement {
    /// An acquire has ended, with one of [`ACQUIRE_OUTCOMES`].
    Acquired {
        outcome: &'static str,
        waited: Duration,
    },
    /// A guard was returned.
    Held,
    /// The guard has ended. `held_for` is `None` if the lease stays held but this client no longer tracks it.
    NoLongerHeld {
        held_for: Option<Duration>,
    },
    Lost(LossReason),
    /// A renewal has ended, with one of [`RENEWAL_OUTCOMES`].
    Renewed {
        outcome: &'static str,
        latency: Duration,
    },
}

/// The outcomes of an acquire, the most frequent first.
#[cfg(feature = "metrics")]
const ACQUIRE_OUTCOMES: [&str; 9] = [
    "acquired",
    // A try found nothing free.
    "full",
    "timed_out",
    "cancelled",
    "closed",
    // Granted, but lost before the caller saw it.
    "lost",
    "unavailable",
    // The store does not permit it.
    "denied",
    "error",
];

/// Returns the outcome of an acquire that failed.
pub(crate) fn failed_outcome(error: &Error) -> &'static str {
    match error {
        Error::TimedOut { .. } => "timed_out",
        Error::Closed => "closed",
        Error::Cancelled { .. } => "cancelled",
        Error::Lost { .. } => "lost",
        Error::Unavailable { .. } => "unavailable",
        Error::Denied { .. } | Error::NoRoom { .. } | Error::Unusable { .. } => "denied",
        _ => "error",
    }
}

/// The outcomes of a renewal: `missing` if the store no longer has the lease, `failed` if the store did not answer, or
/// refused the renewal.
#[cfg(feature = "metrics")]
const RENEWAL_OUTCOMES: [&str; 3] = ["renewed", "missing", "failed"];

#[cfg(not(feature = "metrics"))]
mod off {
    // The same functions as with the feature.
    #![allow(clippy::unused_self)]

    use std::sync::Weak;

    use super::{Measurement, Primitive};
    use crate::clock::Moment;
    use crate::engine::Core;
    use crate::name::Name;

    #[derive(Debug)]
    pub(crate) struct ClientMeters;

    impl ClientMeters {
        pub(crate) fn new(_store: &'static str, _core: Weak<Core>) -> Self {
            Self
        }

        pub(crate) fn of(&self, _primitive: Primitive, _name: Option<&Name>) -> Meters {
            Meters
        }

        pub(crate) fn sent(&self, _ids: usize) {}

        pub(crate) fn reconnected(&self) {}
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Meters;

    impl Meters {
        pub(crate) const ON: bool = false;

        pub(crate) fn waits(&self, _since: Moment) -> Waiting {
            Waiting
        }

        #[inline]
        pub(crate) fn record(&self, _measurement: Measurement) {}
    }

    #[derive(Debug)]
    pub(crate) struct Waiting;
}
