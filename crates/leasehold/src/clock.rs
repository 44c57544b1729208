//! The two clocks, kept apart by their types.
//!
//! [`Time`] is the *store's* clock. Only a store makes one, and every deadline that decides who holds what is a `Time`.
//! [`Moment`] is *this process's* clock. The engine uses it for its timers, and to judge how long a lease is still
//! valid. The only bridge between the two is a [`Span`], a length of time, which means the same on both.

use std::num::NonZeroU64;
use std::ops::{Add, Sub};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A length of time in whole microseconds, never zero. It takes eight bytes, even inside an `Option`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Span(NonZeroU64);

impl Span {
    /// Rounds up to a microsecond, so that a span is never zero and never shorter than the duration.
    pub(crate) fn from_duration(duration: Duration) -> Self {
        let micros = duration.as_nanos().div_ceil(1000).min(u128::from(u64::MAX / 4));
        Self(NonZeroU64::new(u64::try_from(micros).unwrap_or(u64::MAX)).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) const fn from_micros(micros: u64) -> Self {
        match NonZeroU64::new(micros) {
            Some(micros) => Self(micros),
            None => Self(NonZeroU64::MIN),
        }
    }

    pub(crate) const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis * 1000)
    }

    pub(crate) const fn micros(self) -> u64 {
        self.0.get()
    }

    pub(crate) const fn duration(self) -> Duration {
        Duration::from_micros(self.micros())
    }

    pub(crate) fn divided_by(self, parts: u64) -> Self {
        Self::from_micros(self.micros() / parts)
    }
}

impl Add for Span {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self::from_micros(self.micros().saturating_add(other.micros()))
    }
}

/// An instant of a store's clock, in microseconds since an origin that each store chooses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Time(NonZeroU64);

impl Time {
    /// The origin itself becomes the microsecond after it, which keeps `Option<Time>` small.
    pub(crate) fn from_micros(micros: u64) -> Self {
        Self(NonZeroU64::new(micros).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn micros(self) -> u64 {
        self.0.get()
    }

    pub(crate) fn minus(self, span: Span) -> Self {
        Self::from_micros(self.micros().saturating_sub(span.micros()))
    }

    /// Returns the time from `earlier` until `self`; zero if the clock was set back in between.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.micros().saturating_sub(earlier.micros()))
    }
}

impl Add<Span> for Time {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self::from_micros(self.micros().saturating_add(span.micros()))
    }
}

impl Sub for Time {
    type Output = Span;
    /// Returns the time from `now` until `self`, at least one microsecond: callers have checked that `self` is not
    /// past.
    fn sub(self, now: Self) -> Span {
        Span(NonZeroU64::new(self.micros().saturating_sub(now.micros())).unwrap_or(NonZeroU64::MIN))
    }
}

/// An instant of this process's clock, in microseconds. The clock continues while the machine is suspended. The origin
/// itself becomes the microsecond after it, which keeps `Option<Moment>` small.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Moment(NonZeroU64);

impl Moment {
    /// Later than every deadline.
    pub(crate) const NEVER: Self = Self(NonZeroU64::MAX);

    pub(crate) fn now() -> Self {
        #[cfg(test)]
        if let Some(now) = crate::virtual_time::now() {
            return now;
        }
        Self::from_micros(source::boottime_micros())
    }

    pub(crate) fn from_micros(micros: u64) -> Self {
        Self(NonZeroU64::new(micros).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn micros(self) -> u64 {
        self.0.get()
    }

    /// Returns the time from `earlier` until `self`; zero if `self` is not later.
    pub(crate) fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.micros().saturating_sub(earlier.micros()))
    }

    pub(crate) fn minus(self, span: Span) -> Self {
        Self::from_micros(self.micros().saturating_sub(span.micros()))
    }
}

impl Add<Span> for Moment {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.micros()))
    }
}

/// The clock of the memory store. Deadlines are compared with the fine reading. Where there is no deadline, the coarse
/// reading is enough for the ages that statistics show. It is a few milliseconds behind, on the same scale, and costs a
/// fifth of the time.
pub(crate) mod memory {
    use super::{Time, source};

    pub(crate) fn fine() -> Time {
        Time::from_micros(source::monotonic_micros())
    }

    pub(crate) fn coarse() -> Time {
        Time::from_micros(source::coarse_micros())
    }
}

/// Returns a time of day from milliseconds since 1970. The value is limited, because a store may contain one that
/// `SystemTime` cannot represent.
pub(crate) fn wall_time(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.min(100_000_000_000_000))
}

/// Returns the microseconds since the Unix epoch, by the wall clock. Fences start there, so that they grow across
/// restarts. No deadline is compared with it, because the wall clock can be set.
pub(crate) fn wall_micros() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

/// Returns the microseconds since the Unix epoch, by a clock that runs evenly: the wall clock is read only once, so
/// setting it later has no effect.
pub(crate) fn steady_wall_micros() -> u64 {
    static ORIGIN: LazyLock<u64> =
        LazyLock::new(|| wall_micros().saturating_sub(source::boottime_micros()));
    *ORIGIN + source::boottime_micros()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod source {
    use rustix::time::{ClockId, Timespec, clock_gettime};

    #[allow(clippy::cast_sign_loss)] // these clocks count up from boot
    fn micros(time: Timespec) -> u64 {
        time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
    }

    pub(super) fn boottime_micros() -> u64 {
        if crate::broken::is("clock") {
            return super::wall_micros();
        }
        micros(clock_gettime(ClockId::Boottime))
    }

    pub(super) fn monotonic_micros() -> u64 {
        micros(clock_gettime(ClockId::Monotonic))
    }

    pub(super) fn coarse_micros() -> u64 {
        micros(clock_gettime(ClockId::MonotonicCoarse))
    }
}

/// On Apple's systems `CLOCK_MONOTONIC` continues during sleep. `Instant` does not.
#[cfg(target_vendor = "apple")]
mod source {
    use rustix::time::{ClockId, clock_gettime};

    #[allow(clippy::cast_sign_loss)] // this clock counts up from boot
    pub(super) fn boottime_micros() -> u64 {
        let time = clock_gettime(ClockId::Monotonic);
        time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
    }

    pub(super) fn monotonic_micros() -> u64 {
        boottime_micros()
    }

    pub(super) fn coarse_micros() -> u64 {
        boottime_micros()
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
mod source {
    use std::sync::LazyLock;
    use std::time::Instant;

    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

    pub(super) fn boottime_micros() -> u64 {
        u64::try_from(ORIGIN.elapsed().as_micros()).unwrap_or(u64::MAX).saturating_add(1)
    }

    pub(super) fn monotonic_micros() -> u64 {
        boottime_micros()
    }

    pub(super) fn coarse_micros() -> u64 {
        boottime_micros()
    }
}
