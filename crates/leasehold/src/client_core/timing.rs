//! When to renew a lease, how long to wait for the answer, and what silence means.
//!
//! One pure function, [`plan`], serves permits, locks and pool leases, and [`shortest_lease`] follows from it. Both
//! depend on the round-trip time that the sender measures: the slowest answer that is still normal.
//!
//! A renewal is sent in the second third of the lease, and within eight seconds. The exact moment is spread, so that
//! renewals of leases that were granted together drift apart. It is early enough for the renewal to be answered in
//! time.
//!
//! The client waits for the answer for a third of the validity that is left, so that there is time for two more
//! attempts. Silence makes the connection suspect only if it has lasted for several round trips. Close to the end of
//! the validity there is no time for that, and a late answer proves nothing.

use std::time::Duration;

use crate::clock::Span;

/// Silence shorter than this is never suspect, because servers fork and machines are busy.
const SHORTEST_SILENCE: Duration = Duration::from_millis(100);

/// Silence for this many round trips is suspect.
const SILENT_ROUND_TRIPS: u32 = 8;

/// The round trips that it takes to connect and renew once more.
const RECONNECT_ROUND_TRIPS: u32 = 6;

/// The longest time between two renewals of a permit, however long its lease is. Another program that shares the keys
/// lets them expire ten seconds after its own TTL, which may be short. Only our scripts extend the expiry of the keys.
pub(crate) const LONGEST_INTERVAL: Duration = Duration::from_secs(8);

/// Turns a number that differs from client to client into one that spreads renewals and queries. The engine uses
/// [`scatter`]. The model checker spreads nothing, so that a state does not depend on the absolute time.
pub(crate) type Spread = fn(u64) -> u64;

/// Hashes a number, to spread numbers evenly. Not for secrets.
pub(crate) fn scatter(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Adds a random delay of up to a tenth, but at most 100 ms, so that not all clients query at once.
pub(super) fn jittered(delay: Span, random: u64) -> Span {
    let most = (delay.micros() / 10).clamp(1, 100_000);
    Span::from_micros(delay.micros() + random % most + 1)
}

/// How to renew one lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// The time from now until the renewal is due.
    pub(crate) renew_in: Duration,
    /// The time from the renewal until it is sent again if it has not been answered.
    pub(crate) wait: Duration,
    /// Whether the connection is suspect if the destination did not answer at all for `wait`.
    pub(crate) silence_is_suspect: bool,
}

/// The input of [`plan`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Situation {
    pub(crate) lease: Span,
    /// How much earlier than the store the holder ends its validity.
    pub(crate) margin: Duration,
    /// The rest of the TTL, if there is one.
    pub(crate) ttl_left: Option<Duration>,
    pub(crate) round_trip: Duration,
    /// The rest of the validity, as the holder counts it.
    pub(crate) valid_for: Duration,
    /// The longest time between two renewals.
    pub(crate) longest_interval: Duration,
    /// A number from 0 to 255 that spreads the renewals, or `None` if they are not spread.
    pub(crate) spread: Option<u8>,
}

/// Returns the plan for the next renewal. `None` if no renewal can extend the validity, because the TTL limits it.
pub(crate) fn plan(situation: Situation) -> Option<Plan> {
    let Situation { lease, margin, ttl_left, round_trip, valid_for, .. } = situation;
    let Situation { longest_interval, spread, .. } = situation;
    let lease = lease.duration();
    // A renewal would be answered with the same end.
    if ttl_left.is_some_and(|left| left.saturating_sub(margin) <= valid_for) {
        return None;
    }
    let whole = lease.saturating_sub(margin);
    let passed = whole.saturating_sub(valid_for);
    // A lease that was extended beyond its usual length is not renewed before a renewal makes it longer.
    let beyond = valid_for.saturating_sub(whole);
    let third = lease / 3;
    let longest = match spread {
        Some(spread) => longest_interval * 3 / 4 + longest_interval / 4 * u32::from(spread) / 256,
        None => longest_interval,
    };
    let spread = spread.unwrap_or_default();
    let latest = whole.saturating_sub(3 * round_trip).max(third);
    let due = (third + third * u32::from(spread) / 256).min(latest).min(longest);
    let renew_in = beyond + due.saturating_sub(passed);
    let left = valid_for.saturating_sub(renew_in);
    let silence = silence(round_trip);
    let (wait, silence_is_suspect) = if left / 3 >= silence {
        (left / 3, true)
    } else if left >= silence * 3 / 2 {
        (silence, true)
    } else {
        (left.max(Duration::from_millis(1)), false)
    };
    Some(Plan { renew_in, wait, silence_is_suspect })
}

/// How often a client whose first waiter is at the head of the queue queries whether a wake-up was lost.
///
/// The interval must not be longer, because the answer also says when the next lease ends. A lease that was granted
/// since the last answer may end before all others: for example that of a waiter which never claims its permit. The
/// client learns of such a lease only with its next query.
const ASK_AT_THE_HEAD: Span = Span::from_millis(1000);

/// The delay of a query for each waiter ahead, in microseconds. So only a few clients query often, however many wait.
const ASK_LATER: u64 = 500_000;

/// The delay of a query after the end of a lease, in microseconds, for each waiter ahead. So the waiters that are ahead
/// query first.
const EXPIRY_LATER: u64 = 20_000;

/// What a client knows about the place of its first waiter.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Place {
    /// The number of waiters ahead of it.
    pub(crate) ahead: usize,
    /// By how many places it moved since the previous answer, and how long that took. `None` before the second answer.
    pub(crate) moved: Option<(usize, Duration)>,
}

/// Returns the time until a client sends its next periodic query about its first waiter.
///
/// A wake-up can only be lost for a waiter that has reached the head. Waiters further back query to learn whether they
/// have moved: at the latest when they would be half-way to the head at the current pace. They also query in order to
/// take over if every waiter ahead of them has died. Another program does not wake our clients. So where one takes part
/// (`foreign`), every client queries often.
pub(crate) fn question(place: Place, foreign: bool, next_expiry: Option<Span>) -> Span {
    let ahead = u64::try_from(place.ahead).unwrap_or(u64::MAX);
    let later = ahead.saturating_mul(ASK_LATER);
    let often = match place.moved {
        Some((0, _)) => later,
        Some((moved, passed)) => {
            let passed = u64::try_from(passed.as_micros()).unwrap_or(u64::MAX);
            let half_way =
                passed.saturating_mul(ahead) / 2 / u64::try_from(moved).unwrap_or(u64::MAX);
            later.min(half_way)
        }
        None => 0,
    };
    let often =
        if foreign { ASK_AT_THE_HEAD } else { ASK_AT_THE_HEAD.max(Span::from_micros(often)) };
    let expiry = next_expiry.map(|expiry| {
        expiry + Span::from_micros(ahead.saturating_mul(EXPIRY_LATER).min(expiry.micros()))
    });
    expiry.map_or(often, |expiry| expiry.min(often))
}

/// Returns the shortest silence that makes a connection suspect.
pub(crate) fn silence(round_trip: Duration) -> Duration {
    round_trip.saturating_mul(SILENT_ROUND_TRIPS).max(SHORTEST_SILENCE)
}

/// Returns the shortest lease that survives the loss of one connection at this round-trip time.
///
/// A lease is renewed at the latest after two thirds of its time. The rest is enough to notice the silence, to
/// reconnect and to renew. A shorter lease works while nothing fails, but is lost with its connection.
///
/// `round_trip` is the slowest answer that is still normal, such as the 99th percentile.
///
/// ```
/// use leasehold::shortest_lease;
/// use std::time::Duration;
///
/// // In one data centre.
/// assert!(shortest_lease(Duration::from_millis(1)) < Duration::from_millis(500));
/// // Between continents.
/// assert_eq!(shortest_lease(Duration::from_millis(100)), Duration::from_secs(6));
/// ```
#[must_use]
pub fn shortest_lease(round_trip: Duration) -> Duration {
    let needed =
        silence(round_trip).saturating_add(round_trip.saturating_mul(RECONNECT_ROUND_TRIPS));
    // After two thirds of the lease, minus the margin of a tenth, 7/30 of the lease is left.
    needed.saturating_mul(30) / 7
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::machine::Terms;

    fn situations() -> impl Strategy<Value = Situation> {
        (100..500_000_u64, 300..180_000_u64, any::<u8>(), 0..=1000_u64).prop_map(
            |(round_trip, lease, spread, passed)| {
                let spread = Some(spread);
                let lease = Span::from_millis(lease);
                let margin = Terms { lease: Some(lease), ttl: None }.margin();
                let whole = lease.duration().saturating_sub(margin.duration());
                let round_trip = Duration::from_micros(round_trip);
                let valid_for = whole * u32::try_from(1000 - passed).unwrap() / 1000;
                let (margin, longest_interval) = (margin.duration(), LONGEST_INTERVAL);
                let ttl_left = None;
                Situation {
                    lease,
                    margin,
                    ttl_left,
                    round_trip,
                    valid_for,
                    longest_interval,
                    spread,
                }
            },
        )
    }

    /// The situation right after a grant: the answer took one round trip.
    fn fresh(mut situation: Situation) -> Situation {
        let margin = Terms { lease: Some(situation.lease), ttl: None }.margin();
        let whole = situation.lease.duration().saturating_sub(margin.duration());
        situation.valid_for = whole.saturating_sub(situation.round_trip);
        situation
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn silence_is_suspect_only_after_several_round_trips(situation in situations()) {
            let plan = plan(situation).unwrap();
            if plan.silence_is_suspect {
                prop_assert!(plan.wait >= 8 * situation.round_trip, "{plan:?}");
                prop_assert!(plan.wait >= Duration::from_millis(100), "{plan:?}");
            }
            prop_assert!(!plan.wait.is_zero());
        }

        #[test]
        fn a_renewal_is_due_and_waited_for_within_the_validity(situation in situations()) {
            let plan = plan(situation).unwrap();
            prop_assert!(plan.renew_in + plan.wait <= situation.valid_for.max(Duration::from_millis(1)));
        }

        #[test]
        fn a_renewal_is_answered_in_time_unless_the_lease_is_hopeless(situation in situations()) {
            let situation = fresh(situation);
            if situation.lease.duration() >= 12 * situation.round_trip {
                let plan = plan(situation).unwrap();
                let left = situation.valid_for.saturating_sub(plan.renew_in);
                prop_assert!(left >= situation.round_trip, "{plan:?} leaves {left:?}");
            }
        }

        #[test]
        fn a_lease_that_is_long_enough_survives_a_lost_connection(situation in situations()) {
            let situation = fresh(situation);
            if situation.lease.duration() >= shortest_lease(situation.round_trip) {
                let plan = plan(situation).unwrap();
                prop_assert!(plan.silence_is_suspect, "{plan:?}");
                let again = plan.renew_in + plan.wait + 6 * situation.round_trip;
                prop_assert!(again <= situation.valid_for + Duration::from_micros(50), "{plan:?}");
            }
        }

        #[test]
        fn renewals_are_not_sent_in_a_circle(situation in situations()) {
            let plan = plan(fresh(situation)).unwrap();
            let since_sent = plan.renew_in + situation.round_trip;
            let shortest = (situation.lease.duration() / 3).min(LONGEST_INTERVAL * 3 / 4);
            prop_assert!(since_sent >= shortest, "{plan:?}");
            prop_assert!(plan.renew_in <= LONGEST_INTERVAL, "{plan:?}");
        }

        #[test]
        fn what_its_ttl_limits_is_not_renewed(situation in situations()) {
            let ttl_left = Some(situation.valid_for);
            prop_assert_eq!(plan(Situation { ttl_left, ..situation }), None);
        }
    }

    #[test]
    fn waiters_further_back_query_less_often() {
        let still = |ahead| {
            let place = Place { ahead, moved: Some((0, Duration::from_secs(9))) };
            question(place, false, None).duration().as_millis()
        };
        assert_eq!([0, 1, 2, 3, 100].map(still), [1000, 1000, 1000, 1500, 50_000]);
        // The pace is not known before the second answer.
        let place = Place { ahead: 100, moved: None };
        assert_eq!(question(place, false, None).duration().as_secs(), 1);
        // At ten places in a second, it is half-way after five seconds.
        let place = Place { ahead: 100, moved: Some((10, Duration::from_secs(1))) };
        assert_eq!(question(place, false, None).duration().as_secs(), 5);
        assert_eq!(question(place, true, None).duration().as_secs(), 1);
        // A lease ends before that, and the waiters ahead query first.
        let expiry = Some(Span::from_millis(2500));
        assert_eq!(question(place, false, expiry).duration().as_millis(), 4500);
        let place = Place { ahead: 0, moved: None };
        let expiry = Some(Span::from_millis(250));
        assert_eq!(question(place, false, expiry).duration().as_millis(), 250);
    }

    #[test]
    fn the_shortest_lease_grows_with_the_round_trip() {
        let millis = |millis| shortest_lease(Duration::from_millis(millis)).as_millis();
        assert_eq!([1, 30, 100, 500].map(millis), [454, 1800, 6000, 30_000]);
        assert!(shortest_lease(Duration::MAX) > Duration::from_secs(1 << 60));
    }
}
