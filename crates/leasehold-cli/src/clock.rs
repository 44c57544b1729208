//! The clock of deadlines. It continues while the machine is suspended, and it is the same for all processes of this
//! host.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// An instant of that clock, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Moment(u64);

impl Moment {
    /// A moment after every deadline.
    pub(crate) const NEVER: Self = Self(u64::MAX);

    pub(crate) fn now() -> Self {
        let time = clock_gettime(CLOCK);
        let (seconds, nanos) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
        // The clock counts from boot, so its time is not negative.
        Self(seconds.unwrap_or_default() * 1_000_000 + nanos.unwrap_or_default() / 1000)
    }

    pub(crate) fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    pub(crate) fn micros(self) -> u64 {
        self.0
    }

    pub(crate) fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros(duration)))
    }

    pub(crate) fn minus(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(micros(duration)))
    }

    /// Returns the time until `self`, or zero if it has passed.
    pub(crate) fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Converts an `Instant` to this clock.
///
/// The library returns the validity of a lease as an `Instant`, whose clock may stop while the machine is suspended. The
/// two clocks are compared *before* the library is called, and ours is read first. So if this process is stopped in
/// between, the result can only be too early, never too late.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bridge {
    moment: Moment,
    instant: Instant,
}

impl Bridge {
    pub(crate) fn now() -> Self {
        let moment = Moment::now();
        Self { moment, instant: Instant::now() }
    }

    pub(crate) fn moment(self, instant: Instant) -> Moment {
        match instant.checked_duration_since(self.instant) {
            Some(ahead) => self.moment.plus(ahead),
            None => self.moment.minus(self.instant.duration_since(instant)),
        }
    }
}
