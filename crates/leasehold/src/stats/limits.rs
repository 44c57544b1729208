//! The limits of one semaphore.

use super::{Paused, RateLimit};
use crate::clock::Time;
use crate::machine;

/// The limits of one semaphore at one moment: see [`Semaphore::limits`](crate::Semaphore::limits).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SemaphoreLimits {
    /// The capacity, in units.
    pub capacity: u32,
    /// The capacity that was set with [`Semaphore::pin`](crate::Semaphore::pin), if the semaphore is pinned.
    pub pinned: Option<u32>,
    /// Since when, by whom and why the semaphore is paused; `None` if it is not paused.
    pub paused: Option<Paused>,
    /// The limit on the rate of grants; `None` if there is no rate.
    pub rate: Option<RateLimit>,
}

impl SemaphoreLimits {
    pub(crate) fn of(limits: &machine::Limits, now: Time) -> Self {
        let paused = limits.paused.as_ref().map(|paused| Paused {
            lasts: now.since(paused.since),
            by: paused.by.to_string(),
            reason: paused.reason.as_deref().map(str::to_owned),
        });
        let rate = limits.meter().map(|meter| RateLimit::of(meter.rate));
        Self { capacity: limits.capacity(), pinned: limits.pinned, paused, rate }
    }
}
