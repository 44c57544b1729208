//! The delays between the attempts of an acquire.

use std::time::Duration;

use crate::Error;
use crate::name::positive;

/// The delays between the attempts of an acquire of a [`Lock`](crate::Lock) or a [`Pool`](crate::Pool), while another
/// holder has it.
///
/// By default the first delay is 100 ms and each further one is twice as long, up to 5 s, with jitter. The attempts end
/// when the acquire does: see `within` of the builders and the futures.
///
/// ```
/// use leasehold::{Client, Jitter, Retry};
/// use std::time::Duration;
///
/// let eager = Retry::default()
///     .delay(Duration::from_millis(50))
///     .multiplier(1.5)
///     .max_delay(Duration::from_secs(2))
///     .jitter(Jitter::Full);
/// let lock = Client::memory().lock("invoice:42").retry(eager).build()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Retry {
    delay: Duration,
    multiplier: f64,
    max_delay: Duration,
    jitter: Jitter,
    /// The most retries: see [`compat::sync_guard`](crate::compat::sync_guard).
    most: u32,
}

/// How much of a delay is random.
///
/// Randomness keeps callers that were refused together from retrying together.
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
            delay: Duration::from_millis(100),
            multiplier: 2.0,
            max_delay: Duration::from_secs(5),
            jitter: Jitter::Equal,
            most: u32::MAX,
        }
    }
}

impl Retry {
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

    /// Sets the longest delay: 5 s by default.
    #[must_use]
    pub fn max_delay(self, max_delay: Duration) -> Self {
        Self { max_delay, ..self }
    }

    /// Sets how much of a delay is random: half by default.
    #[must_use]
    pub fn jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    pub(crate) fn at_most(self, retries: u32) -> Self {
        Self { most: retries, ..self }
    }

    pub(crate) fn most(&self) -> u32 {
        self.most
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        positive("retry delay", self.delay)?;
        positive("retry max_delay", self.max_delay)?;
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
