//! The job that runs under a lease, and how long a lease it needs so that there is time to stop the child.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use leasehold::{Guard, LockGuard, Permit, shortest_lease};

use crate::failure::Failure;

/// The default time between SIGTERM and SIGKILL.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// The command to run, and its limits.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) command: Vec<OsString>,
    pub(crate) grace: Duration,
    /// How long before the end of the lease's validity the child must have ended. Zero where the library keeps a margin.
    pub(crate) margin: Duration,
    /// The longest time that the child may run.
    pub(crate) ttl: Option<Duration>,
    /// The lease in messages, as in `permit of "api"`.
    pub(crate) what: String,
    pub(crate) name: String,
    pub(crate) verbose: bool,
    /// The shortest time for which the lease is held, even if the child ends sooner.
    pub(crate) at_least: Option<Duration>,
}

/// What happened to a lease at the end of its job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Released {
    Yes,
    /// It had expired before.
    Expired,
    /// It stays locked for this long, for `--once-per`.
    Kept(Duration),
}

impl From<bool> for Released {
    fn from(released: bool) -> Self {
        if released { Self::Yes } else { Self::Expired }
    }
}

/// The lease under which a job runs.
pub(crate) trait JobLease {
    type Guard: Guard;
    fn guard(&self) -> &Self::Guard;
    /// Its slot number, if it has one.
    fn slot(&self) -> Option<u32> {
        None
    }
    /// Whether it stays locked after the job, for `--once-per`. `ran` tells whether the child was started.
    fn outlives_job(&self, _ran: bool) -> bool {
        false
    }
    /// Releases it, or lets it stay locked. If the future is dropped, even before its first poll, a lease that stays
    /// locked is not released.
    fn release(self, ran: bool) -> impl Future<Output = Result<Released, leasehold::Error>>;
}

impl JobLease for Permit {
    type Guard = Self;

    fn guard(&self) -> &Self {
        self
    }

    fn slot(&self) -> Option<u32> {
        self.slot_number()
    }

    async fn release(self, _ran: bool) -> Result<Released, leasehold::Error> {
        Ok(Released::from(self.release().await?))
    }
}

/// A lock under which a job runs, and for how long it stays locked after that.
#[derive(Debug)]
pub(crate) struct HeldLock {
    pub(crate) guard: LockGuard,
    /// The time until which no other process may run the job: see `--once-per`.
    pub(crate) kept_until: Option<Instant>,
}

/// A shorter rest of `--once-per` is not worth a request to the store.
const SHORTEST_REST: Duration = Duration::from_millis(100);

impl JobLease for HeldLock {
    type Guard = LockGuard;

    fn guard(&self) -> &LockGuard {
        &self.guard
    }

    fn outlives_job(&self, ran: bool) -> bool {
        self.rest(ran).is_some()
    }

    fn release(self, ran: bool) -> impl Future<Output = Result<Released, leasehold::Error>> {
        let rest = self.rest(ran);
        let (guard, remaining) = match rest {
            Some(_) => (None, Remaining(Some(self.guard))),
            None => (Some(self.guard), Remaining(None)),
        };
        async move {
            if let (Some(rest), Some(guard)) = (rest, &remaining.0) {
                guard.extend(rest).await?;
                return Ok(Released::Kept(rest));
            }
            let Some(guard) = guard else { return Ok(Released::Expired) };
            Ok(Released::from(guard.release().await?))
        }
    }
}

impl HeldLock {
    /// Returns for how long it stays locked after the job, if it does.
    fn rest(&self, ran: bool) -> Option<Duration> {
        let end = self.kept_until.filter(|_| ran)?;
        let rest = whole_millis(end.saturating_duration_since(Instant::now()));
        (rest >= SHORTEST_REST).then_some(rest)
    }
}

/// A lock that outlives this process: dropping it does not release it. It expires in the store.
struct Remaining(Option<LockGuard>);

impl Drop for Remaining {
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            let _ = guard.detach();
        }
    }
}

/// Returns the grace of a child that may run for `given` without a renewal. The grace is at most `given` / `times`, so that
/// renewals are in time: the lease in the store is longer than `given`, and the library renews according to the lease.
///
/// A permit is renewed, at the latest, after two thirds of its lease, which is (`given` + grace) / 0.9. If `given` is six
/// times the grace, a tenth of the lease is left for a slow answer. A lock is renewed after a third of its lease, so twice
/// the grace is enough.
pub(crate) fn grace(
    requested: Option<Duration>,
    given: Duration,
    times: u32,
) -> Result<Duration, Failure> {
    let most = given / times;
    match requested {
        None => Ok(GRACE.min(most)),
        Some(grace) if grace <= most => Ok(grace),
        Some(grace) => Err(Failure::usage(format!(
            "--grace {} is too long for --lease {}: at most {}, or give --lease {}",
            humantime::format_duration(grace),
            humantime::format_duration(given),
            humantime::format_duration(whole_millis(most)),
            humantime::format_duration(grace * times),
        ))),
    }
}

/// Returns the lease to request for a child that may run for `given` without a renewal. It is longer by the grace and a
/// margin. On Redis the library keeps that margin.
pub(crate) fn lease_to_request(given: Duration, grace: Duration) -> Duration {
    let requested = given.saturating_add(grace).saturating_add(margin(given, grace));
    whole_millis(requested).saturating_add(Duration::from_millis(1))
}

/// Returns how long before the end of its lease the child must have ended.
pub(crate) fn margin(given: Duration, grace: Duration) -> Duration {
    // A tenth of the whole is a ninth of the rest.
    (given.saturating_add(grace) / 9).clamp(Duration::from_millis(50), Duration::from_secs(5))
}

/// Returns the shortest `--lease` of `run` that survives the loss of one connection at this round-trip time. It is longer
/// than the shortest lease of the library, because the child ends before the lease by the grace, and renewals are not sent
/// earlier for that.
pub(crate) fn shortest_option(round_trip: Duration) -> Duration {
    // With a grace of a sixth, 2/3 · 7/6 / 0.9 of it have passed at the latest renewal. The rest must be 7/30 of the
    // shortest lease.
    shortest_lease(round_trip).saturating_mul(9) / 5
}

fn whole_millis(duration: Duration) -> Duration {
    Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_grace_leaves_time_for_renewals() {
        let grace_of = |requested, given| grace(requested, given, 6).map_err(|_| ());
        assert_eq!(grace_of(None, 30 * SECOND), Ok(2 * SECOND));
        assert_eq!(grace_of(None, 3 * SECOND), Ok(SECOND / 2));
        assert_eq!(grace_of(Some(SECOND), 6 * SECOND), Ok(SECOND));
        assert_eq!(grace_of(Some(SECOND), 5 * SECOND), Err(()));
        assert_eq!(grace_of(Some(Duration::ZERO), SECOND), Ok(Duration::ZERO));
    }

    #[test]
    fn the_shortest_lease_leaves_time_to_connect_and_renew_before_the_child_is_stopped() {
        for millis in [0, 1, 10, 100, 1000] {
            let round_trip = Duration::from_millis(millis);
            let given = shortest_option(round_trip);
            let grace = grace(None, given, 6).unwrap();
            let latest_renewal = lease_to_request(given, grace) * 2 / 3;
            // The time until a silent connection is noticed, and six round trips.
            let needed = (8 * round_trip).max(SECOND / 10) + 6 * round_trip;
            assert!(latest_renewal + needed <= given, "{round_trip:?}: {given:?}");
            assert!(shortest_lease(round_trip) < given);
        }
    }

    #[test]
    fn the_lease_in_the_store_includes_grace_and_margin() {
        for given in [SECOND / 10, SECOND, 30 * SECOND, 180 * SECOND, 86400 * SECOND] {
            for grace in [Duration::ZERO, SECOND / 2, 2 * SECOND] {
                let requested = lease_to_request(given, grace);
                let margin = (requested / 10).clamp(Duration::from_millis(50), 5 * SECOND);
                let left = requested.saturating_sub(margin + grace);
                assert!(left >= given, "{given:?} and {grace:?}: {requested:?}");
                assert!(left <= given + Duration::from_millis(2));
            }
        }
    }
}
