//! What is run under a lease, and how long the store is asked for so that there is time to stop it.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use leasehold::{LockGuard, Lost, Permit, shortest_lease};

use crate::failure::Failure;

/// How long a child has to end after SIGTERM, unless told otherwise.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// The command to run, and what it is told.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) command: Vec<OsString>,
    pub(crate) grace: Duration,
    /// How long before the validity of its lease ends the child has to be gone. Nothing where the library keeps a margin.
    pub(crate) margin: Duration,
    /// The longest it may run.
    pub(crate) ttl: Option<Duration>,
    /// What the lease is called, in messages: `permit of "api"`.
    pub(crate) what: String,
    pub(crate) name: String,
    pub(crate) verbose: bool,
}

/// What a job runs under.
pub(crate) trait Held {
    /// Until when it is good without another renewal; none if it does not end by itself.
    fn valid_until(&self) -> Option<Instant>;
    /// Resolves when it is lost.
    fn lost(&self) -> Lost;
    fn id(&self) -> String;
    fn fence(&self) -> String;
    /// Its slot number, if it has one.
    fn slot(&self) -> Option<u32> {
        None
    }
    /// Gives it back.
    async fn release(self) -> Result<bool, leasehold::Error>;
}

impl Held for Permit {
    fn valid_until(&self) -> Option<Instant> {
        self.valid_until()
    }

    fn lost(&self) -> Lost {
        self.lost()
    }

    fn id(&self) -> String {
        self.id().to_string()
    }

    fn fence(&self) -> String {
        self.fence().to_string()
    }

    fn slot(&self) -> Option<u32> {
        self.slot_number()
    }

    async fn release(self) -> Result<bool, leasehold::Error> {
        self.release().await
    }
}

impl Held for LockGuard {
    fn valid_until(&self) -> Option<Instant> {
        Some(self.valid_until())
    }

    fn lost(&self) -> Lost {
        self.lost()
    }

    fn id(&self) -> String {
        self.id().to_string()
    }

    fn fence(&self) -> String {
        self.fence().to_string()
    }

    async fn release(self) -> Result<bool, leasehold::Error> {
        self.release().await
    }
}

/// The grace, for a child that is given `given` from one renewal to the next, and needs `times` the grace of it so
/// that the renewals come in time: the store is asked for more than the child is given, and the library renews by what
/// the store was asked for.
///
/// A permit is renewed, at the latest, after two thirds of what was asked for, that is (`given` + grace) / 0.9; six
/// times the grace leaves a tenth of that for a slow answer. A lock is renewed after a third, and twice is enough.
pub(crate) fn grace(
    asked: Option<Duration>,
    given: Duration,
    times: u32,
) -> Result<Duration, Failure> {
    let most = given / times;
    match asked {
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

/// How long the store is asked for, for a child that is given less: the grace, and a margin. On Redis the library keeps that margin.
pub(crate) fn asked_for(given: Duration, grace: Duration) -> Duration {
    let asked = given.saturating_add(grace).saturating_add(margin(given, grace));
    whole_millis(asked).saturating_add(Duration::from_millis(1))
}

/// How much sooner than its lease the child ends.
pub(crate) fn margin(given: Duration, grace: Duration) -> Duration {
    // A tenth of the whole is a ninth of the rest.
    (given.saturating_add(grace) / 9).clamp(Duration::from_millis(50), Duration::from_secs(5))
}

/// The shortest `--lease` of `run` that survives the loss of one connection at this round-trip time. It is longer than the
/// shortest lease of the library: the child ends the grace before the lease does, and a renewal is not sent sooner for that.
pub(crate) fn shortest_option(round_trip: Duration) -> Duration {
    // With a grace of a sixth, 2/3 · 7/6 / 0.9 of it have passed at the latest renewal. What is left has to be 7/30 of the
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
        let grace_of = |asked, given| grace(asked, given, 6).map_err(|_| ());
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
            let latest_renewal = asked_for(given, grace) * 2 / 3;
            // The silence that is noticed, and six round trips.
            let needed = (8 * round_trip).max(SECOND / 10) + 6 * round_trip;
            assert!(latest_renewal + needed <= given, "{round_trip:?}: {given:?}");
            assert!(shortest_lease(round_trip) < given);
        }
    }

    #[test]
    fn the_store_is_asked_for_grace_and_margin_more() {
        for given in [SECOND / 10, SECOND, 30 * SECOND, 180 * SECOND, 86400 * SECOND] {
            for grace in [Duration::ZERO, SECOND / 2, 2 * SECOND] {
                let asked = asked_for(given, grace);
                let margin = (asked / 10).clamp(Duration::from_millis(50), 5 * SECOND);
                let left = asked.saturating_sub(margin + grace);
                assert!(left >= given, "{given:?} and {grace:?}: {asked:?}");
                assert!(left <= given + Duration::from_millis(2));
            }
        }
    }
}
