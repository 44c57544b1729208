//! The timer of a lease: it renews the lease a third of its time after the previous renewal, and ends its validity.
//!
//! A renewal is a future that no task awaits. It is polled when it starts, and whenever its waker is woken. Dropping it
//! withdraws a request that was not sent yet.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::{Lease, LeaseState, Phase};
use crate::backend::Later;
use crate::callbacks::event;
use crate::client_core::timing::{self, Situation};
use crate::clock::{Moment, Span};
use crate::engine::timers::Timed;
use crate::{Error, LossReason};

/// How soon the timer fires again if the lease cannot be renewed, or its end cannot be reported, because the guard
/// extends it just now.
const WHILE_EXTENDED: Span = Span::from_millis(50);

/// The shortest and the longest time from a renewal that failed to the next one.
const SHORTEST_RETRY: Duration = Duration::from_millis(20);
const LONGEST_RETRY: Duration = Duration::from_secs(1);

/// The renewal in flight, if there is one.
#[derive(Default)]
pub(super) enum Renewal {
    #[default]
    None,
    InFlight(InFlight),
    /// A thread polls the renewal. `again` says that its waker was woken meanwhile.
    Polled {
        again: bool,
    },
}

pub(super) struct InFlight {
    answer: Later<Option<(Span, Moment)>>,
    began: Moment,
    /// When to check whether silence makes the connection suspect.
    check_at: Moment,
    silence_is_suspect: bool,
    /// No extension can begin before the renewal has ended.
    _turn: tokio::sync::OwnedMutexGuard<()>,
}

/// Polls the renewal of a lease when it is woken.
struct RenewalWaker(Weak<Lease>);

impl Wake for RenewalWaker {
    fn wake(self: Arc<Self>) {
        if let Some(lease) = self.0.upgrade() {
            lease.poll_renewal();
        }
    }
}

impl Timed for Lease {
    fn fire(&self, now: Moment) {
        let (is_held, must_end, renewal_due) = {
            let mut state = self.state();
            state.timer_at = None;
            let renewal_due = state.renewed.then(|| self.renewal_due(&state));
            (state.phase == Phase::Held, state.awaited || state.renewed, renewal_due)
        };
        if !is_held {
            return;
        }
        // An extension in flight may still save a lease that only observers would see end.
        if now >= self.valid_until() && (must_end || self.turn.try_lock().is_ok()) {
            if self.lose(self.loss_reason()) {
                // The store may not have noticed yet. Releasing the lease lets the next holder in at once.
                self.keep.release_later();
            }
            return;
        }
        if !self.check_renewal(now) && renewal_due.is_some_and(|due| due <= now) {
            self.start_renewal(now);
        }
        self.schedule();
    }
}

impl Lease {
    /// Sets the timer for what is due next, if anything is.
    pub(super) fn schedule(&self) {
        // Both locks stay locked until the timer is set, so that the last thread to set it has seen all changes.
        let renewal = self.renewal();
        let mut state = self.state();
        let has_timer = state.awaited || state.renewed || state.hold.is_some();
        let next = (state.phase == Phase::Held && has_timer).then(|| {
            let (now, valid_until) = (self.core.now(), self.valid_until());
            let next = match &*renewal {
                _ if !state.renewed => valid_until,
                Renewal::None => self.renewal_due(&state).min(valid_until),
                Renewal::InFlight(renewal) => renewal.check_at.min(valid_until),
                Renewal::Polled { .. } => valid_until,
            };
            // What is due already, and was not done, waits for an extension.
            if next <= now { now + WHILE_EXTENDED } else { next }
        });
        let before = std::mem::replace(&mut state.timer_at, next);
        if before != next {
            self.core.timers.set(self.this.clone(), before, next);
            drop((state, renewal));
            // Without the engine's thread, the loss is reported when the guard is dropped.
            let _ = self.core.timer_was_set(next);
        }
    }

    /// Cancels the timer of a lease that no longer exists.
    pub(super) fn cancel_timer(&self) {
        if let Some(at) = self.state().timer_at.take() {
            self.core.timers.set(self.this.clone(), Some(at), None);
        }
    }

    /// Withdraws the renewal in flight, and cancels the timer, because the lease has ended.
    pub(super) fn stop_renewal(&self) {
        let withdrawn = std::mem::take(&mut *self.renewal());
        drop(withdrawn);
        self.schedule();
    }

    /// Returns when to renew the lease. It is early enough for a second attempt. A lease that was extended beyond its
    /// TTL is not renewed before a renewal makes it longer.
    fn renewal_due(&self, state: &LeaseState) -> Moment {
        let LeaseState { asked, retry_at, .. } = *state;
        if let Some(at) = retry_at {
            return at;
        }
        let valid_for = self.valid_until().saturating_since(asked);
        let by_renewal = self.end_of(asked, self.ttl).saturating_since(asked);
        let beyond = valid_for.saturating_sub(by_renewal);
        let half = Span::from_duration(valid_for.saturating_sub(beyond) / 2);
        asked + Span::from_duration(beyond) + self.keep.interval(self.ttl).min(half)
    }

    fn plan(&self, now: Moment) -> Option<timing::Plan> {
        let valid_for = self.valid_until().saturating_since(now);
        let round_trip = self.core.sender.round_trip(self.core.destination(self.slot));
        let (lease, ttl_left, spread) = (self.ttl, None, 0);
        timing::plan(Situation { lease, ttl_left, round_trip, valid_for, spread })
    }

    fn start_renewal(&self, now: Moment) {
        // While the guard extends the lease, it needs no renewal.
        let Ok(turn) = self.turn.clone().try_lock_owned() else { return };
        self.state().retry_at = None;
        let answer = self.keep.renew(self.valid_until());
        let (began, check_at, silence_is_suspect) = (now, now, false);
        let mut renewal = InFlight { answer, began, check_at, silence_is_suspect, _turn: turn };
        self.plan_check(&mut renewal, now);
        *self.renewal() = Renewal::InFlight(renewal);
        let has_ended = self.state().phase != Phase::Held;
        if has_ended {
            return self.stop_renewal();
        }
        self.poll_renewal();
    }

    fn plan_check(&self, renewal: &mut InFlight, now: Moment) {
        let plan = self.plan(now);
        let wait = plan.map_or(LONGEST_RETRY, |plan| plan.wait);
        renewal.check_at = now + Span::from_duration(wait);
        renewal.silence_is_suspect = plan.is_some_and(|plan| plan.silence_is_suspect);
    }

    /// Returns whether a renewal is in flight. If it has not been answered for long, checks whether the store has
    /// answered anything else.
    fn check_renewal(&self, now: Moment) -> bool {
        let mut renewal = self.renewal();
        let Renewal::InFlight(in_flight) = &mut *renewal else {
            return matches!(*renewal, Renewal::Polled { .. });
        };
        if now < in_flight.check_at {
            return true;
        }
        let suspect_since = in_flight.silence_is_suspect.then_some(in_flight.began);
        self.plan_check(in_flight, now);
        drop(renewal);
        let to = self.core.destination(self.slot);
        if suspect_since.is_some_and(|since| self.core.sender.heard_nothing_since(to, since)) {
            self.core.suspect(to);
        }
        true
    }

    /// Polls the renewal in flight, and applies its answer.
    fn poll_renewal(&self) {
        let mut renewal = self.renewal();
        let mut in_flight = match std::mem::take(&mut *renewal) {
            Renewal::InFlight(in_flight) => in_flight,
            Renewal::Polled { .. } => return *renewal = Renewal::Polled { again: true },
            Renewal::None => return,
        };
        *renewal = Renewal::Polled { again: false };
        drop(renewal);
        let waker = Waker::from(Arc::new(RenewalWaker(self.this.clone())));
        let answer = loop {
            // Not under the lock: the answer may run the user's code.
            let polled = in_flight.answer.as_mut().poll(&mut Context::from_waker(&waker));
            let mut renewal = self.renewal();
            match (polled, &mut *renewal) {
                // The lease has ended meanwhile.
                (_, Renewal::None) => {
                    drop(renewal);
                    return drop(in_flight);
                }
                (Poll::Ready(answer), _) => {
                    *renewal = Renewal::None;
                    break answer;
                }
                (Poll::Pending, Renewal::Polled { again: true }) => {
                    *renewal = Renewal::Polled { again: false };
                }
                (Poll::Pending, _) => {
                    *renewal = Renewal::InFlight(in_flight);
                    return;
                }
            }
        };
        let began = in_flight.began;
        self.apply_renewal(answer, began);
        // Only now can the guard extend the lease.
        drop(in_flight);
        self.schedule();
    }

    fn apply_renewal(&self, answer: Result<Option<(Span, Moment)>, Error>, began: Moment) {
        match answer {
            Ok(Some((valid_for, sent))) => {
                self.extend(sent, valid_for);
                self.watch.renewed(|| self.keep.id(), Ok(true), sent);
            }
            Ok(None) => {
                self.watch.renewed(|| self.keep.id(), Ok(false), began);
                self.lose(LossReason::Missing);
            }
            Err(error) => {
                self.watch.renewed(|| self.keep.id(), Err(error.kind()), began);
                let name = self.watch.public_name();
                event!(debug, name = &*name, %error, "a renewal failed; the client tries again");
                let left = self.valid_until().saturating_since(self.core.now());
                let soon = (left / 10).clamp(SHORTEST_RETRY, LONGEST_RETRY);
                self.state().retry_at = Some(self.core.now() + Span::from_duration(soon));
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn has_timer(&self) -> bool {
        self.state().timer_at.is_some()
    }

    fn renewal(&self) -> MutexGuard<'_, Renewal> {
        self.renewal.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
