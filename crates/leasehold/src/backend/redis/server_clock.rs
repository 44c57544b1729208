//! Bounds the age of a wake-up from what is known about the server's clock, without asking the server.
//!
//! A reply carries the server's time *S*. The server read it after the request had been sent, at *L* of our clock. So
//! when our clock shows *L + t*, the server's clock shows at most *S + t*, plus a drift if it runs faster. Conversely,
//! an action of the server at *S + t* did not happen before our clock showed *L + t*, minus the same drift.
//!
//! Of all replies of a connection, the one with the tightest bound is kept. This assumes that nobody sets the server's
//! clock forward. If that happens, the next reply contradicts the known bound and replaces it. Until then a wake-up may
//! be taken for younger than it is, by as much as the clock was set. docs/guarantees.md says what that means.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::clock::{Moment, Time};

/// How much faster or slower one clock may run than the other: by one part in a hundred. Clocks that are slewed differ
/// by one in two thousand.
const DRIFT: u64 = 100;

/// What is known about the server's clock from the replies of one connection.
#[derive(Debug, Default)]
pub(crate) struct ServerClock(Mutex<Option<Sample>>);

/// A reply with the server's time, to a request sent at `sent`.
#[derive(Clone, Copy, Debug)]
struct Sample {
    sent: Moment,
    server: Time,
}

impl Sample {
    /// Returns the latest time that the server's clock can show at this moment, which must not be before the request.
    fn latest(&self, at: Moment) -> u64 {
        let passed = at.micros().saturating_sub(self.sent.micros());
        self.server.micros().saturating_add(passed).saturating_add(passed / DRIFT)
    }

    /// Returns a moment before which the server's clock did not show `time`.
    fn not_before(&self, time: Time) -> Moment {
        let (time, server, sent) = (time.micros(), self.server.micros(), self.sent.micros());
        if let Some(later) = time.checked_sub(server) {
            return Moment::from_micros(sent.saturating_add(later - later.div_ceil(DRIFT)));
        }
        let earlier = server - time;
        Moment::from_micros(sent.saturating_sub(earlier + 2 * earlier.div_ceil(DRIFT)))
    }
}

impl ServerClock {
    /// Records that a request sent at `sent` was answered with this time, and that the answer arrived at `now`.
    pub(crate) fn learn(&self, sent: Moment, server: Time, now: Moment) {
        let mut known = self.known();
        let says_more = known.is_none_or(|known| {
            let contradicts = server.micros() > known.latest(now);
            contradicts || server.micros() <= known.latest(sent)
        });
        if says_more {
            *known = Some(Sample { sent, server });
        }
    }

    /// Returns a moment before which the server's clock did not show `time`, if that is known. A moment after `now`
    /// shows that the clock was set; then the sample is dropped and the answer is `None`.
    pub(crate) fn not_before(&self, time: Time, now: Moment) -> Option<Moment> {
        let mut known = self.known();
        let moment = (*known)?.not_before(time);
        if moment > now {
            *known = None;
            return None;
        }
        Some(moment)
    }

    fn known(&self) -> MutexGuard<'_, Option<Sample>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ORIGIN: u64 = 1_000_000_000_000;

    proptest! {
        /// The server's clock runs up to a hundredth faster or slower, and requests take any time. The age of a wake-up
        /// is never underestimated.
        #[test]
        fn a_wake_up_is_never_taken_for_younger_than_it_is(
            rate in -9_900..=9_900_i64,
            trips in proptest::collection::vec((0..3_000_000_u64, 0..400_000_u64, 0..400_000_u64), 1..20),
            granted in 0..60_000_000_u64,
            offset in 0..1_000_000_000_u64,
        ) {
            let server = |moment: u64| {
                let passed = i64::try_from(moment - ORIGIN).unwrap();
                let shown = i64::try_from(ORIGIN + offset).unwrap() + passed + passed * rate / 1_000_000;
                Time::from_micros(u64::try_from(shown).unwrap())
            };
            let (clock, mut moment) = (ServerClock::default(), ORIGIN);
            for (pause, there, back) in trips {
                let sent = moment + pause;
                moment = sent + there + back;
                let mut known = clock.known();
                let sample = Sample { sent: Moment::from_micros(sent), server: server(sent + there) };
                let worse = known.is_some_and(|known| sample.server.micros() > known.latest(sample.sent));
                if !worse {
                    *known = Some(sample);
                }
            }
            let granted = ORIGIN + granted;
            let bound = clock.known().unwrap().not_before(server(granted));
            prop_assert!(bound.micros() <= granted + 1, "{} too late", bound.micros() - granted);
        }
    }

    #[test]
    fn the_reply_that_says_most_is_kept_until_one_contradicts_it() {
        let clock = ServerClock::default();
        let now = Moment::now().micros();
        let learn = |sent: u64, server: u64| {
            clock.learn(Moment::from_micros(sent), Time::from_micros(server), Moment::now());
        };
        let not_before = |time| {
            let bound = clock.not_before(Time::from_micros(time), Moment::from_micros(now));
            bound.map(|bound| now - bound.micros())
        };
        assert_eq!(not_before(ORIGIN), None);
        // A slow reply: the server may have read its clock 50 ms after the request.
        learn(now - 100_000, ORIGIN + 50_000);
        assert_eq!(not_before(ORIGIN + 50_000), Some(100_000));
        // A fast reply: 1 ms.
        learn(now - 90_000, ORIGIN + 11_000);
        assert_eq!(not_before(ORIGIN + 11_000), Some(90_000));
        // Another slow reply gives a looser bound.
        learn(now - 80_000, ORIGIN + 60_000);
        assert_eq!(not_before(ORIGIN + 11_000), Some(90_000));
        // A clock that was set back is noticed at once, and so is one that was set forward.
        learn(now - 70_000, ORIGIN - 5_000_000);
        assert_eq!(not_before(ORIGIN - 5_000_000), Some(70_000));
        learn(now - 60_000, ORIGIN + 5_000_000);
        assert_eq!(not_before(ORIGIN + 5_000_000), Some(60_000));
        // A wake-up from the future shows it, too.
        assert_eq!(not_before(ORIGIN + 9_000_000), None);
        assert_eq!(not_before(ORIGIN + 5_000_000), None);
    }
}
