//! The one clock of a run.
//!
//! All processes of a run are on one host, and `CLOCK_BOOTTIME` is the kernel's own: what two of them read can be
//! compared to the microsecond. It neither stops nor steps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Microseconds.
pub type Micros = u64;

pub const MILLISECOND: Micros = 1000;
pub const SECOND: Micros = 1_000_000;

/// Since the host was started.
#[must_use]
pub fn now() -> Micros {
    let time = clock_gettime(ClockId::Boottime);
    let part = |number: i64| u64::try_from(number).unwrap_or_default();
    part(time.tv_sec) * SECOND + part(time.tv_nsec) / 1000
}

/// By how much the wall clock is ahead of ours: Redis counts on that one, and the fence of a semaphore is a reading of it.
#[must_use]
pub fn wall_offset() -> Micros {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    micros(wall).saturating_sub(now())
}

#[must_use]
pub fn micros(duration: Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
