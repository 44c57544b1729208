//! How often permits are granted: the generic cell rate algorithm.
//!
//! A rate promises that **no half-open window as long as its period has more than `count` starts**. The burst is a part
//! of the count: up to `burst` permits start at once, so the others are spread over the period.
//!
//! One token arrives in every interval, and up to `burst` tokens are kept. A grant takes one. The whole state is one
//! time, `full_at`: the time when no token will be missing any more. Missing tokens arrive one after the other until
//! then, so `full_at` also tells how many are missing now.
//!
//! *Why it is safe:* each grant moves `full_at` forward by one interval, and no grant is made while `full_at` is more
//! than `burst` − 1 intervals ahead. So `burst` + *m* starts take at least *m* intervals, not counting those whose
//! token is returned. The interval is at least `period` / (`count` − `burst` + 1). So `count` + 1 starts, which are
//! `burst` + (`count` − `burst` + 1), take at least one period: no window `[t, t + period)` contains them all.
//!
//! The token of a grant that was never used is returned, but only if every later grant would have happened in the same
//! way without it. [`TokenBucket::return_token`] explains when that is known.

use std::time::Duration;

use crate::clock::{Span, Time};
use crate::name::positive;
use crate::{Error, Fence};

/// A rate limit: at most `count` permits start in any `period`, and at most `burst` of them at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate {
    /// The most starts in a period, at least one.
    pub(crate) count: u64,
    pub(crate) period: Span,
    /// How many tokens are kept, from one to `count`.
    pub(crate) burst: u32,
}

impl Rate {
    /// Returns the rate of at most `starts` grants in any `period`, of which at most `burst` at once.
    pub(crate) fn new(starts: u64, period: Duration, burst: u32) -> Result<Self, Error> {
        let span = positive("rate", period)?;
        if starts == 0 {
            let problem =
                "it is 0 starts; the minimum is 1: to grant no permits, pause the semaphore";
            return Err(Error::invalid("rate", problem));
        }
        if burst == 0 {
            return Err(Error::invalid("burst", "it is 0; the minimum is 1"));
        }
        if u64::from(burst) > starts {
            let problem = format!("it is {burst}, but the rate is {starts} in {period:?}");
            let advice =
                "the burst is a part of these starts: choose a smaller burst or a higher rate";
            return Err(Error::invalid("burst", format!("{problem}, and {advice}")));
        }
        if starts.saturating_mul(MIN_INTERVAL.micros()) > span.micros() {
            let problem = format!("it is {starts} in {period:?}; the limit is 10000 per second");
            return Err(Error::invalid("rate", problem));
        }
        if span > MAX_PERIOD {
            let problem = format!("it is {starts} in {period:?}; the longest period is 100 years");
            return Err(Error::invalid("rate", problem));
        }
        let rate = Self { count: starts, period: span, burst };
        if rate.all() > MAX_PERIOD {
            let problem = format!(
                "a burst of {burst}, at {starts} in {period:?}, takes more than 100 years to refill"
            );
            return Err(Error::invalid("burst", problem + ": choose a smaller burst"));
        }
        Ok(rate)
    }

    /// Returns the rate that a store has recorded, or `None` if these numbers are no rate.
    pub(crate) fn stored(count: u64, period: u64, burst: u64) -> Option<Self> {
        if count == 0 || period == 0 || period > MAX_PERIOD.micros() {
            return None;
        }
        let burst = u32::try_from(burst.clamp(1, count)).unwrap_or(u32::MAX);
        Some(Self { count, period: Span::from_micros(period), burst })
    }

    /// Returns the time in which one token arrives. Rounded up, so that a window never has more starts than `count`.
    pub(crate) fn interval(self) -> Span {
        let others = self.count.saturating_sub(u64::from(self.burst)) + 1;
        Span::from_micros(self.period.micros().div_ceil(others))
    }

    /// Returns the time in which an empty bucket becomes full.
    pub(crate) fn all(self) -> Span {
        Span::from_micros(self.interval().micros().saturating_mul(u64::from(self.burst)))
    }

    /// Returns how many tokens beyond the next one a sweep may wait for. At a fast rate, this avoids one request for
    /// each token.
    fn worth_waiting_for(self, waiting: usize) -> u64 {
        let in_time = TOGETHER.micros() / self.interval().micros();
        let half_of_the_rest = u64::from(self.burst - 1) / 2;
        in_time.min(half_of_the_rest).min(waiting.saturating_sub(1) as u64)
    }
}

/// The shortest average time between two starts of a rate. Intervals are rounded up to a microsecond, so the error is
/// at most one percent.
const MIN_INTERVAL: Span = Span::from_micros(100);

/// The longest period, and the longest time in which all tokens may be refilled: a hundred years.
pub(crate) const MAX_PERIOD: Span = Span::from_micros(100 * 31_557_600 * 1_000_000);

/// Tokens that arrive within this time are granted together, if enough of them can be kept.
const TOGETHER: Span = Span::from_millis(4);

/// A rate, and the tokens that have been taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TokenBucket {
    pub(crate) rate: Rate,
    /// When no token is missing any more. In the past if none is missing now.
    pub(crate) full_at: Time,
    /// The first fence whose token can be returned.
    pub(crate) returns_from: u64,
}

impl TokenBucket {
    pub(crate) fn new(rate: Rate, last_fence: u64) -> Self {
        Self { rate, full_at: Time::from_micros(0), returns_from: last_fence + 1 }
    }

    /// Changes the rate. A change adds no token: as many are available as before, or `burst` if that is less. The next
    /// one arrives when it would have arrived before, or one new interval from now if that is earlier. So programs that
    /// declare different rates in turns never start more often than the faster of the two allows.
    pub(crate) fn change(&mut self, rate: Rate, now: Time, last_fence: u64) {
        if self.rate == rate {
            return;
        }
        let (all, interval) = (self.rate.all().micros(), self.rate.interval().micros());
        let arrived = all - self.full_at(now).micros().saturating_sub(now.micros()).min(all);
        let (available, wait) = (arrived / interval, interval - arrived % interval);
        let was_full = arrived == all;
        let missing = u64::from(rate.burst).saturating_sub(available);
        let next = rate.interval().micros();
        let first = if was_full { next } else { wait.min(next) };
        let missing_for = if missing == 0 { 0 } else { (missing - 1) * next + first };
        let full_at = Time::from_micros(now.micros() + missing_for);
        *self = Self { rate, full_at, returns_from: last_fence + 1 };
    }

    /// Limits the missing tokens to all tokens. More could be missing if the clock was set back.
    pub(crate) fn limit_missing(&mut self, now: Time) {
        self.full_at = self.full_at(now);
    }

    fn full_at(&self, now: Time) -> Time {
        self.full_at.min(now + self.rate.all())
    }

    /// Returns whether no token is missing.
    pub(crate) fn is_full(&self, now: Time) -> bool {
        self.full_at <= now
    }

    #[cold]
    pub(crate) fn is_free(&self, now: Time) -> bool {
        let is_free = self.full_at(now) + self.rate.interval() <= now + self.rate.all();
        is_free || crate::broken::is("rate")
    }

    /// Returns when the next token arrives, or when enough of them have arrived to be worth a sweep.
    pub(crate) fn next_at(&self, now: Time, waiting: usize) -> Time {
        let interval = self.rate.interval();
        let first = (self.full_at(now) + interval).minus(self.rate.all());
        let more = interval.micros() * self.rate.worth_waiting_for(waiting);
        Time::from_micros(first.micros() + more)
    }

    /// Returns the time until a token is available. `None` if one is available now.
    pub(crate) fn next_in(&self, now: Time) -> Option<Span> {
        (!self.is_free(now)).then(|| self.next_at(now, 1) - now)
    }

    /// Takes a token for a grant with this fence.
    #[cold]
    pub(crate) fn take(&mut self, now: Time, fence: Fence) {
        let full_at = self.full_at(now);
        // Less than one token is missing. So the token of the previous grant has been replaced already, at least in
        // part. It and all earlier ones can no longer be returned.
        if full_at < now + self.rate.interval() {
            self.returns_from = fence.get();
        }
        self.full_at = full_at.max(now) + self.rate.interval();
    }

    /// Returns the token of a grant that was never used.
    ///
    /// Afterwards the meter is as if the grant had never been made, so no period has more starts than without the
    /// grant. That is possible only while the token has not been replaced. Example: the burst is 2. The grants A and B
    /// take both tokens, two more arrive, and C takes one of them. If A's token were returned now, two starts could
    /// follow C at once: three in all. `returns_from` is the first fence whose token may still be returned.
    ///
    /// `full_at` is one number for all tokens. If the token of an older grant is returned, it no longer shows which of
    /// the other older tokens have been replaced. So after that, only the token of the last grant can be returned.
    #[cold]
    pub(crate) fn return_token(&mut self, fence: Fence, last_fence: u64) {
        if fence.get() >= self.returns_from || crate::broken::is("returned-token") {
            self.full_at = self.full_at.minus(self.rate.interval());
            if fence.get() != last_fence {
                self.returns_from = last_fence;
            }
        }
    }

    /// Returns several tokens. It starts with the last one, because that order returns the most tokens.
    pub(crate) fn return_tokens(&mut self, mut unused: Vec<Fence>, last_fence: u64) {
        unused.sort_unstable();
        for fence in unused.into_iter().rev() {
            self.return_token(fence, last_fence);
        }
    }
}
