//! The policy by which an acquire retries: how often, and after which delays.

use std::time::Duration;

use crate::Error;
use crate::name::positive;

/// How an acquire of a [`Lock`](crate::Lock) or a [`Pool`](crate::Pool) retries while another holder has it. By default
/// it retries 10 times, first after 100 ms and then each time after twice as long, with jitter, for at most 5 s in all.
///
/// ```
/// use leasehold::{Client, Jitter, Retry};
/// use std::time::Duration;
///
/// let patient = Retry::default()
///     .times(1000)
///     .delay(Duration::from_millis(50))
///     .multiplier(1.5)
///     .max_delay(Duration::from_secs(2))
///     .jitter(Jitter::Full)
///     .within(Duration::from_secs(60));
/// let lock = Client::memory().lock("invoice:42").retry(patient).build()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Retry {
    times: u32,
    delay: Duration,
    multiplier: f64,
    max_delay: Duration,
    jitter: Jitter,
    within: Duration,
}

/// How much of a delay is random. Randomness keeps callers that were refused together from retrying together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Jitter {
    /// Half of the delay is random: the result is between half the delay and the whole delay.
    Equal,
    /// All of the delay is random: the result is between zero and the whole delay.
    Full,
    /// Nothing is random: the result is always the whole delay.
    None,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            times: 10,
            delay: Duration::from_millis(100),
            multiplier: 2.0,
            max_delay: Duration::from_secs(60),
            jitter: Jitter::Equal,
            within: Duration::from_secs(5),
        }
    }
}

impl Retry {
    /// Sets how often to retry before giving up: 10 times by default. Attempts after a release, or at the end of the
    /// holder's lease, do not count.
    #[must_use]
    pub fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }

    /// Sets the delay before the first retry: 100 ms by default.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// Sets the factor by which each delay is longer than the one before: 2 by default.
    #[must_use]
    pub fn multiplier(self, multiplier: f64) -> Self {
        Self { multiplier, ..self }
    }

    /// Sets the longest delay: a minute by default.
    #[must_use]
    pub fn max_delay(self, max_delay: Duration) -> Self {
        Self { max_delay, ..self }
    }

    /// Sets how much of a delay is random: half by default.
    #[must_use]
    pub fn jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    /// Sets how long to retry in all: 5 s by default. For a much longer time, raise [`times`](Self::times) as well: ten
    /// retries are used up after 51 to 102 s.
    #[must_use]
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    pub(crate) fn limit(&self) -> Duration {
        self.within
    }

    pub(crate) fn max_times(&self) -> u32 {
        self.times
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        positive("retry delay", self.delay)?;
        positive("retry max_delay", self.max_delay)?;
        positive("retry within", self.within)?;
        if !(self.multiplier.is_finite() && self.multiplier >= 1.0) {
            let problem = format!("it is {}; it must be finite, and at least 1", self.multiplier);
            return Err(Error::invalid("retry multiplier", problem));
        }
        Ok(())
    }

    /// Returns the delay before the nth retry, counted from 0.
    pub(crate) fn pause(&self, nth: u32) -> Duration {
        let factor = self.multiplier.powi(i32::try_from(nth).unwrap_or(i32::MAX));
        let seconds = (self.delay.as_secs_f64() * factor).min(self.max_delay.as_secs_f64());
        let share = match self.jitter {
            Jitter::Equal => 0.5 + chance() / 2.0,
            Jitter::Full => chance(),
            Jitter::None => 1.0,
        };
        // The longest `Duration` is rounded up as a floating-point number, and then cannot be converted back.
        Duration::try_from_secs_f64(seconds * share).unwrap_or(self.max_delay)
    }
}

/// Returns a random number between 0 and 1. It need not be secret, so it is 0.5 if the source of randomness fails.
fn chance() -> f64 {
    getrandom::u32().map_or(0.5, |bits| f64::from(bits) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_and_stay_within_their_jitter() {
        let retry = Retry::default().max_delay(Duration::from_secs(1));
        for (nth, whole) in [(0, 100), (1, 200), (2, 400), (3, 800), (4, 1000), (40, 1000)] {
            let whole = Duration::from_millis(whole);
            for _ in 0..100 {
                let pause = retry.pause(nth);
                assert!(pause >= whole / 2 && pause <= whole, "{nth}: {pause:?}");
                assert!(retry.jitter(Jitter::Full).pause(nth) <= whole);
            }
            assert_eq!(retry.jitter(Jitter::None).pause(nth), whole);
        }
    }

    #[test]
    fn the_longest_delay_is_one() {
        let retry = Retry::default().delay(Duration::MAX).max_delay(Duration::MAX);
        let retry = retry.multiplier(f64::MAX);
        assert_eq!(retry.jitter(Jitter::None).pause(1000), Duration::MAX);
        assert!(retry.pause(1000) >= Duration::MAX / 2);
    }
}
