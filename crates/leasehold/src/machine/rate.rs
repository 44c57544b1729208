//! How often permits are granted: the generic cell rate algorithm.
//!
//! One token comes in every interval, and up to `burst` of them are kept. A grant takes one. All that is to be known for that
//! is when the last of them will have come back: the tokens that are missing come one after the other until then.
//!
//! A token that was taken for nothing goes back, if nothing happened since that would have happened otherwise without
//! it. See [`Meter::give_back`].

use crate::Fence;
use crate::clock::{Span, Time};

/// So many starts, evenly spread, and so many at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate {
    /// In which one token comes.
    pub(crate) interval: Span,
    /// How many tokens are kept, at least one.
    pub(crate) burst: u32,
}

impl Rate {
    /// How long it takes until all tokens are back.
    fn all(self) -> Span {
        Span::from_micros(self.interval.micros().saturating_mul(u64::from(self.burst)))
    }

    /// So many tokens a sweep may wait for that could come sooner: a fast rate does not cost a request for each token.
    fn worth_waiting_for(self, waiting: usize) -> u64 {
        let in_time = TOGETHER.micros() / self.interval.micros();
        let kept = u64::from(self.burst - 1) / 2;
        in_time.min(kept).min(waiting.saturating_sub(1) as u64)
    }
}

/// Tokens that come within this time are granted together, if enough of them are kept.
const TOGETHER: Span = Span::from_millis(4);

/// A rate, and what has been taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Meter {
    pub(crate) rate: Rate,
    /// When all tokens are there again. In the past if they are.
    pub(crate) full_at: Time,
    /// The first fence whose token can go back.
    pub(crate) returns_from: u64,
}

impl Meter {
    pub(crate) fn new(rate: Rate, last_fence: u64) -> Self {
        Self { rate, full_at: Time::from_micros(0), returns_from: last_fence + 1 }
    }

    /// From now on another rate counts. What was taken stays taken.
    pub(crate) fn change(&mut self, rate: Rate, now: Time, last_fence: u64) {
        if self.rate != rate {
            *self = Self { rate, returns_from: last_fence + 1, ..*self };
            self.settle(now);
        }
    }

    /// No more than all tokens can be missing: not after a change of the rate, nor if the clock was set back.
    pub(crate) fn settle(&mut self, now: Time) {
        self.full_at = self.full_at(now);
    }

    fn full_at(&self, now: Time) -> Time {
        self.full_at.min(now + self.rate.all())
    }

    /// Whether no token is missing.
    pub(crate) fn is_full(&self, now: Time) -> bool {
        self.full_at <= now
    }

    #[cold]
    pub(crate) fn is_free(&self, now: Time) -> bool {
        self.full_at(now) + self.rate.interval <= now + self.rate.all()
    }

    /// When the next token comes, or so many that it is worth a sweep.
    pub(crate) fn next_at(&self, now: Time, waiting: usize) -> Time {
        let Rate { interval, .. } = self.rate;
        let first = (self.full_at(now) + interval).minus(self.rate.all());
        let more = interval.micros() * self.rate.worth_waiting_for(waiting);
        Time::from_micros(first.micros() + more)
    }

    /// How long until there is a token; none if there is one now.
    pub(crate) fn next_in(&self, now: Time) -> Option<Span> {
        (!self.is_free(now)).then(|| self.next_at(now, 1) - now)
    }

    /// Takes a token for a grant with this fence.
    #[cold]
    pub(crate) fn take(&mut self, now: Time, fence: Fence) {
        let full_at = self.full_at(now);
        // This grant would be the same if the one before it had not been: then the token of that one has come back already.
        if full_at < now + self.rate.interval {
            self.returns_from = fence.get();
        }
        self.full_at = full_at.max(now) + self.rate.interval;
    }

    /// The token of this grant was taken for nothing.
    ///
    /// It is as if the grant had never been, so that in no time there are more starts than without it. That can be said only
    /// if every later grant found at least one more token missing: otherwise the bucket has overflowed since, and the token
    /// would be one too many. After one went back, this is not known of the others, but for the last.
    #[cold]
    pub(crate) fn give_back(&mut self, fence: Fence, last_fence: u64) {
        if fence.get() >= self.returns_from {
            self.full_at = self.full_at.minus(self.rate.interval);
            if fence.get() != last_fence {
                self.returns_from = last_fence;
            }
        }
    }

    /// The same for several. The last first: then the most of them go back.
    pub(crate) fn give_all_back(&mut self, mut unused: Vec<Fence>, last_fence: u64) {
        unused.sort_unstable();
        for fence in unused.into_iter().rev() {
            self.give_back(fence, last_fence);
        }
    }
}
