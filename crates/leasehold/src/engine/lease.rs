//! A lease that this process holds: the common part of the guards of locks and pools.
//!
//! The validity follows the same rule as that of a permit. It is counted from before the request was sent, minus a
//! margin, on a clock that runs in suspend. If the lease is renewed, observed, or if a task waits for its loss, it has a
//! timer of the engine, which renews it and ends its validity: see [`renewal`].

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use tokio::sync::OwnedMutexGuard;

use super::ticket::Watchers;
use super::watch::{Hold, Id, Watch};
use super::{Core, Engine};
use crate::backend::{Later, Slot};
use crate::callbacks::{event, guarded};
use crate::clock::{Moment, Span};
use crate::machine::lock::Verdict;
use crate::name::Name;
use crate::{Error, LossReason};

mod renewal;

use renewal::Renewal;

/// The operations of a store on one lease.
pub(crate) trait Keep: Send + Sync {
    /// Renews the lease. Returns how long it is valid after the moment when the request was sent, or `None` if the
    /// store no longer knows it. Repeats the request until it is answered, or until `until`.
    fn renew(&self, until: Moment) -> Later<Option<(Span, Moment)>>;

    /// The time from one renewal to the next.
    fn interval(&self, ttl: Span) -> Span {
        ttl.divided_by(3)
    }

    /// Releases the lease. Returns whether it was held until now.
    fn release(&self) -> Later<bool>;

    /// Releases the lease in the background. Never blocks.
    fn release_later(&self);

    /// The id of the lease, for observers.
    fn id(&self) -> Id;
}

/// One lease, shared by its guard and the client.
pub(crate) struct Lease {
    what: &'static str,
    name: Name,
    slot: Slot,
    keep: Arc<dyn Keep>,
    ttl: Span,
    /// In microseconds of [`Moment`].
    valid_until: AtomicU64,
    state: Mutex<LeaseState>,
    renewal: Mutex<Renewal>,
    /// See [`Self::turn`].
    turn: Arc<tokio::sync::Mutex<()>>,
    core: Arc<Core>,
    watch: Arc<Watch>,
    this: Weak<Self>,
}

struct LeaseState {
    phase: Phase,
    watchers: Watchers,
    /// Whether a task waits, or has waited, for the loss.
    awaited: bool,
    renewed: bool,
    /// When the last request was sent from which the validity counts.
    asked: Moment,
    /// The hold that the observers see, until the lease ends.
    hold: Option<Hold>,
    /// When to try again after a renewal that failed.
    retry_at: Option<Moment>,
    /// When the engine fires the timer of this lease.
    timer_at: Option<Moment>,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Held,
    Lost(LossReason),
    Released,
}

impl Lease {
    /// `sent` is when the request was sent that the store answered with `valid_for`.
    pub(crate) fn new(
        engine: &Engine,
        (what, slot): (&'static str, Slot),
        name: Name,
        ttl: Span,
        (keep, watch): (Arc<dyn Keep>, Arc<Watch>),
        (sent, valid_for): (Moment, Span),
    ) -> Arc<Self> {
        let state = LeaseState {
            phase: Phase::Held,
            watchers: Watchers::default(),
            awaited: false,
            renewed: false,
            asked: sent,
            hold: None,
            retry_at: None,
            timer_at: None,
        };
        let lease = Arc::new_cyclic(|this| Self {
            what,
            name,
            slot,
            keep,
            ttl,
            valid_until: AtomicU64::new(0),
            state: Mutex::new(state),
            renewal: Mutex::default(),
            turn: Arc::default(),
            core: engine.core().clone(),
            watch,
            this: this.clone(),
        });
        lease.extend(sent, valid_for);
        let address = Arc::as_ptr(&lease) as usize;
        lease.core.leases().insert(address, Arc::downgrade(&lease));
        lease
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Returns the present on the client's clock.
    pub(crate) fn now(&self) -> Moment {
        self.core.now()
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_micros(self.valid_until.load(Ordering::Acquire))
    }

    /// The store has answered, to a request sent at `sent`, that the lease is valid for `valid_for`.
    pub(crate) fn extend(&self, sent: Moment, valid_for: Span) {
        let mut state = self.state();
        // One answer may overtake another. The answer to the last request counts.
        if sent >= state.asked {
            state.asked = sent;
            state.retry_at = None;
            let until = self.end_of(sent, valid_for);
            let until = if crate::broken::is("margin") { until + valid_for } else { until };
            self.valid_until.store(until.micros(), Ordering::Release);
            drop(state);
            self.schedule();
        }
    }

    /// Called before the store is asked to let the lease end `valid_for` from now, which may be earlier than its
    /// current end. If the answer never arrives, the holder must not rely on the lease after the new end.
    pub(crate) fn about_to_extend(&self, sent: Moment, valid_for: Span) {
        let until = self.end_of(sent, valid_for);
        if self.valid_until.fetch_min(until.micros(), Ordering::AcqRel) > until.micros() {
            self.schedule();
        }
    }

    fn end_of(&self, sent: Moment, valid_for: Span) -> Moment {
        (sent + valid_for).minus(self.core.profile().margin(valid_for))
    }

    /// Returns the exclusive right to ask the store for an extension. The caller keeps it until the answer arrives. If
    /// one request overtook another, the store would use the last one that it applied, and the client another one.
    pub(crate) async fn turn(&self) -> OwnedMutexGuard<()> {
        self.turn.clone().lock_owned().await
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        // Not in the head of the match, where the mutex would stay locked until the end of the match.
        let phase = self.state().phase;
        match phase {
            Phase::Held if self.core.now() < self.valid_until() => Ok(()),
            Phase::Held => Err(self.lost_error(self.loss_reason())),
            Phase::Lost(reason) => Err(self.lost_error(reason)),
            Phase::Released => Err(self.lost_error(LossReason::Released)),
        }
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        let (name, id) = (self.name.to_string(), self.keep.id().to_string());
        Error::Lost { what: self.what, name, id, reason }
    }

    fn loss_reason(&self) -> LossReason {
        if self.state().renewed { LossReason::NotRenewed } else { LossReason::LeaseEnded }
    }

    /// Ends the lease in this client: it is not renewed any more, and its watchers are notified. Returns `false` if it
    /// had ended before.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        let mut state = self.state();
        if state.phase != Phase::Held {
            return false;
        }
        state.phase = Phase::Lost(reason);
        let (watchers, hold) = (state.watchers.take(), state.hold.take());
        drop(state);
        self.stop_renewal();
        self.report_loss(reason, hold);
        wake(watchers);
        true
    }

    /// Reports the result of an explicit extension.
    pub(crate) fn report_renewal<T>(
        &self,
        extended: &Result<(Verdict<T>, Moment), Error>,
        asked: Moment,
    ) {
        let result = match extended {
            Ok((verdict, _)) => Ok(matches!(verdict, Verdict::Done(_))),
            Err(error) => Err(error.kind()),
        };
        self.watch.renewed(|| self.keep.id(), result, asked);
    }

    fn report_loss(&self, reason: LossReason, hold: Option<Hold>) {
        self.watch.lost(
            || self.keep.id(),
            reason,
            hold,
            || {
                let (name, id) = (self.watch.public_name(), self.keep.id());
                event!(warn, name = &*name, %id, %reason, "{} lost", self.what);
            },
        );
    }

    /// Ends the lease in this client without a release. Returns whether it was still held, and the hold of the
    /// observers.
    fn end(&self) -> (bool, Option<Hold>) {
        let mut state = self.state();
        let was_held = state.phase == Phase::Held;
        if was_held {
            state.phase = Phase::Released;
        }
        let (watchers, hold) = (state.watchers.take(), state.hold.take());
        drop(state);
        self.stop_renewal();
        wake(watchers);
        (was_held, hold)
    }

    /// Ends the lease because it was released. If the validity had ended before, the lease was lost unnoticed, and this
    /// reports the loss.
    fn end_released(&self) -> bool {
        let (was_held, hold) = self.end();
        if hold.is_some() && self.core.now() >= self.valid_until() {
            self.report_loss(self.loss_reason(), hold);
        }
        was_held
    }

    /// Stops tracking the lease, and renewing it. The store keeps it.
    pub(crate) fn detach(&self) {
        if let Some(hold) = self.end().1 {
            hold.detached();
        }
    }

    /// Observes the lease from now on, until it ends. If it has already ended, that has been reported.
    pub(crate) fn watch(&self, hold: Hold) {
        let mut state = self.state();
        match state.phase {
            Phase::Held => state.hold = Some(hold),
            Phase::Lost(reason) => {
                drop(state);
                return hold.lost_before(reason);
            }
            Phase::Released => {
                drop(state);
                return drop(hold);
            }
        }
        drop(state);
        self.schedule();
    }

    /// Releases the lease. Returns whether it was held until now. If the future is dropped, or the store does not
    /// answer in time, the release continues in the background.
    pub(crate) async fn release(self: Arc<Self>) -> Result<bool, Error> {
        let valid = self.check().is_ok();
        self.end_released();
        let unfinished = ReleaseInBackground(Some(self.keep.clone()));
        let held = self.keep.release().await?;
        unfinished.done();
        Ok(held && valid)
    }

    /// Releases the lease in the background, without blocking.
    pub(crate) fn release_later(&self) {
        if self.end_released() {
            self.keep.release_later();
        }
    }

    /// Notifies the holder and releases the lease, because the client is being closed.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.lose(LossReason::Closed) {
            self.keep.release_later();
        }
    }

    /// Renews the lease from now on.
    pub(crate) fn renew(&self) {
        self.state().renewed = true;
        self.schedule();
    }

    /// Polls the loss. Called by every task that waits for it. `key` is `None` at first, and the caller keeps it.
    pub(crate) fn poll_lost(
        &self,
        key: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<LossReason> {
        let waker = cx.waker().clone();
        let mut state = self.state();
        let ended = match state.phase {
            Phase::Lost(reason) => Some(reason),
            Phase::Released => Some(LossReason::Released),
            Phase::Held => None,
        };
        if let Some(reason) = ended {
            drop(state);
            return Poll::Ready(reason);
        }
        let replaced = state.watchers.register(key, waker);
        let over = self.core.now() >= self.valid_until();
        let is_first = !std::mem::replace(&mut state.awaited, true);
        drop(state);
        drop(replaced);
        if is_first {
            self.schedule();
        }
        if over { Poll::Ready(self.loss_reason()) } else { Poll::Pending }
    }

    /// Removes the waker of a task that no longer waits for the loss.
    pub(crate) fn forget_watcher(&self, key: u64) {
        let unused = self.state().watchers.forget(key);
        drop(unused);
    }

    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wake(watchers: impl Iterator<Item = Waker>) {
    for waker in watchers {
        guarded(|| waker.wake());
    }
}

/// A release that continues in the background unless it is done.
struct ReleaseInBackground(Option<Arc<dyn Keep>>);

impl ReleaseInBackground {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for ReleaseInBackground {
    fn drop(&mut self) {
        if let Some(keep) = self.0.take() {
            keep.release_later();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.core.leases().remove(&(std::ptr::from_ref(self) as usize));
        self.cancel_timer();
    }
}
