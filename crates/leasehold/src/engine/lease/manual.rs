//! The keeper of a lease whose client has a manual clock. It is a timer instead of a task, so that every renewal and
//! loss is applied when [`ManualClock::advance`](crate::ManualClock::advance) returns.
//!
//! Only the memory store has such a clock, and it answers at once. So a renewal is polled only once.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use super::{Lease, Phase, is_lost, settle_renewal};
use crate::Error;
use crate::clock::Moment;
use crate::engine::timers::Timed;

/// The timer of one lease.
pub(super) struct Keeper {
    lease: Weak<Lease>,
    /// When the timer fires.
    at: Mutex<Option<Moment>>,
    this: Weak<Self>,
}

/// Starts the keeper of a lease. The lease owns it.
pub(super) fn start(lease: &Arc<Lease>) {
    let keeper = lease.keeper.get_or_init(|| {
        let lease = Arc::downgrade(lease);
        Arc::new_cyclic(|this| Keeper { lease, at: Mutex::default(), this: this.clone() })
    });
    keeper.look(lease);
}

impl Keeper {
    /// Sets the timer for what is due next.
    pub(super) fn look(&self, lease: &Lease) {
        let (held, renewed) = {
            let state = lease.state();
            (state.phase == Phase::Held, state.renewed)
        };
        let valid_until = lease.valid_until();
        let due = if renewed { lease.due().min(valid_until) } else { valid_until };
        self.set(lease, held.then_some(due));
    }

    /// Cancels the timer.
    pub(super) fn stop(&self, lease: &Lease) {
        self.set(lease, None);
    }

    fn set(&self, lease: &Lease, at: Option<Moment>) {
        let before = {
            let mut set_for = self.at.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *set_for, at)
        };
        if before != at {
            let _ = lease.core.set_timer(self.this.clone(), before, at);
        }
    }
}

impl Timed for Keeper {
    fn fire(&self, now: Moment) {
        let Some(lease) = self.lease.upgrade() else { return };
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let held = lease.state().phase == Phase::Held;
        if !held || is_lost(&lease, now) {
            return;
        }
        if lease.state().renewed && now >= lease.due() {
            let mut renewal = lease.keep.renew(lease.valid_until());
            let answer = match renewal.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(answer) => answer,
                Poll::Pending => Err(Error::internal("the memory store did not answer at once")),
            };
            if let Some(again) = settle_renewal(&lease, answer, now) {
                return self.set(&lease, Some(again));
            }
        }
        self.look(&lease);
    }
}
