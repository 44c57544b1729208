//! A lease of one holder in this process: what the guard of a lock and that of a pool have in common.
//!
//! Its validity follows the same rule as a permit's: it is counted from before the request was sent, minus a margin, on a
//! clock that runs in suspend. If it is renewed, or somebody waits for its loss, a *keeper* task on the engine's thread
//! looks after it.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};

use super::foreign::{event, guarded};
use super::ticket::Watchers;
use super::timing::{self, Situation};
use super::{Core, Engine};
use crate::backend::{Destination, Later};
use crate::clock::{Moment, Span};
use crate::name::Name;
use crate::{Error, LossReason};

/// The keeper does not sleep longer than this: tokio's timers stand still while the machine is suspended.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// What a store does for one lease.
pub(crate) trait Keep: Send + Sync {
    /// How long it is valid after the moment when the request was sent; none if the store no longer knows it. Asks until
    /// it is answered or the moment has come.
    fn renew(&self, until: Moment) -> Later<Option<(Span, Moment)>>;

    /// How long after a renewal the next one is due.
    fn interval(&self, ttl: Span) -> Span {
        ttl.divided_by(3)
    }

    /// True if it was held until now.
    fn release(&self) -> Later<bool>;

    /// Releases it in the background. Never blocks.
    fn release_later(&self);
}

/// One lease, shared by its guard, its keeper and the client.
pub(crate) struct Lease {
    what: &'static str,
    name: Name,
    id: String,
    keep: Arc<dyn Keep>,
    ttl: Span,
    /// In microseconds of [`Moment`].
    valid_until: AtomicU64,
    state: Mutex<State>,
    /// Tells the keeper, which may be asleep, that something is due earlier than it was.
    earlier: Arc<Notify>,
    /// See [`Self::turn`].
    turn: Arc<tokio::sync::Mutex<()>>,
    core: Arc<Core>,
}

struct State {
    phase: Phase,
    watchers: Watchers,
    /// Whether a keeper looks after it, and whether it renews it.
    kept: bool,
    renewed: bool,
    /// When the last request was sent that the validity counts from.
    asked: Moment,
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
        what: &'static str,
        name: Name,
        id: String,
        ttl: Span,
        keep: Arc<dyn Keep>,
        (sent, valid_for): (Moment, Span),
    ) -> Arc<Self> {
        let core = engine.core().clone();
        let state = State {
            phase: Phase::Held,
            watchers: Watchers::default(),
            kept: false,
            renewed: false,
            asked: sent,
        };
        let valid_until = AtomicU64::new(0);
        let (state, earlier) = (Mutex::new(state), Arc::default());
        let turn = Arc::default();
        let lease = Self { what, name, id, keep, ttl, valid_until, state, earlier, turn, core };
        lease.extend(sent, valid_for);
        let lease = Arc::new(lease);
        let address = Arc::as_ptr(&lease) as usize;
        lease.core.leases().insert(address, Arc::downgrade(&lease));
        lease
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_micros(self.valid_until.load(Ordering::Acquire))
    }

    /// The store said, to a request sent then, that it is valid for so long.
    pub(crate) fn extend(&self, sent: Moment, valid_for: Span) {
        let mut state = self.state();
        // Two answers may change places on their way here: what was asked last counts.
        if sent >= state.asked {
            state.asked = sent;
            // While it is renewed, a renewal may come to the store after this, and is for its own TTL.
            let valid_for = if state.renewed { valid_for.min(self.ttl) } else { valid_for };
            let until = self.end_of(sent, valid_for);
            #[cfg(feature = "broken")]
            let until = if crate::broken::is("margin") { until + valid_for } else { until };
            self.valid_until.store(until.micros(), Ordering::Release);
            drop(state);
            guarded(|| self.earlier.notify_one());
        }
    }

    /// The store is about to be asked to let it end so long from now. Should that be sooner than we believe, and the
    /// answer never come, we must not go on believing.
    pub(crate) fn about_to_extend(&self, sent: Moment, valid_for: Span) {
        let until = self.end_of(sent, valid_for);
        if self.valid_until.fetch_min(until.micros(), Ordering::AcqRel) > until.micros() {
            guarded(|| self.earlier.notify_one());
        }
    }

    fn end_of(&self, sent: Moment, valid_for: Span) -> Moment {
        (sent + valid_for).minus(self.core.profile().margin(valid_for))
    }

    /// The right to ask the store for an extension. If two requests changed places, the store would follow the last
    /// one to be applied, and we another. It is held until the answer is here.
    pub(crate) async fn turn(&self) -> OwnedMutexGuard<()> {
        self.turn.clone().lock_owned().await
    }

    fn plan(&self, now: Moment) -> Option<timing::Plan> {
        let valid_for = self.valid_until().saturating_since(now);
        let round_trip = self.core.sender.round_trip(Destination::ONLY);
        let (lease, ttl_left, spread) = (self.ttl, None, 0);
        timing::plan(Situation { lease, ttl_left, round_trip, valid_for, spread })
    }

    /// When to renew it, if it is renewed: never so late that there would be no second attempt.
    fn due(&self) -> Moment {
        let asked = self.state().asked;
        let half = Span::from_duration(self.valid_until().saturating_since(asked) / 2);
        asked + self.keep.interval(self.ttl).min(half)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        // Not in the head of the match: the mutex would be held until its end.
        let phase = self.state().phase;
        match phase {
            Phase::Held if Moment::now() < self.valid_until() => Ok(()),
            Phase::Held => Err(self.lost_error(self.why_over())),
            Phase::Lost(reason) => Err(self.lost_error(reason)),
            Phase::Released => Err(self.lost_error(LossReason::Released)),
        }
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost { what: self.what, name: self.name.to_string(), id: self.id.clone(), reason }
    }

    fn why_over(&self) -> LossReason {
        if self.state().renewed { LossReason::NotRenewed } else { LossReason::TtlEnded }
    }

    /// Ends it here: it is not renewed any more, and its watchers are notified. False if it had ended before.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        let mut state = self.state();
        if state.phase != Phase::Held {
            return false;
        }
        state.phase = Phase::Lost(reason);
        let watchers = state.watchers.take();
        drop(state);
        event!(warn, name = self.name.as_str(), id = self.id, %reason, "{} lost", self.what);
        wake(watchers);
        true
    }

    /// Ends it here without a release.
    pub(crate) fn detach(&self) -> bool {
        let mut state = self.state();
        let held = state.phase == Phase::Held;
        if held {
            state.phase = Phase::Released;
        }
        let watchers = state.watchers.take();
        drop(state);
        wake(watchers);
        held
    }

    /// Releases it. True if it was held until now. If the future is dropped, or the store does not answer in time, the
    /// release continues in the background.
    pub(crate) async fn release(self: Arc<Self>) -> Result<bool, Error> {
        let valid = self.check().is_ok();
        self.detach();
        let unfinished = ReleaseInBackground(Some(self.keep.clone()));
        let held = self.keep.release().await?;
        unfinished.done();
        Ok(held && valid)
    }

    /// Releases it in the background, without blocking.
    pub(crate) fn release_later(&self) {
        if self.detach() {
            self.keep.release_later();
        }
    }

    /// The client is being closed: the holder is notified, and the lease released.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.lose(LossReason::Closed) {
            self.keep.release_later();
        }
    }

    /// From now on a keeper looks after it; and renews it, if that is wanted.
    pub(crate) fn keep(self: &Arc<Self>, renew: bool) {
        let mut state = self.state();
        let begins = renew && !std::mem::replace(&mut state.renewed, true);
        let starts = !std::mem::replace(&mut state.kept, true);
        drop(state);
        if starts {
            self.core.spawn(keep(Arc::downgrade(self), self.earlier.clone()));
        } else if begins {
            guarded(|| self.earlier.notify_one());
        }
    }

    /// For everyone who waits for its loss. `key` is none at first, and kept by the caller.
    pub(crate) fn poll_lost(
        self: &Arc<Self>,
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
        let over = Moment::now() >= self.valid_until();
        drop(state);
        drop(replaced);
        self.keep(false);
        if over { Poll::Ready(self.why_over()) } else { Poll::Pending }
    }

    /// Nobody waits for the loss under this key any more.
    pub(crate) fn forget_watcher(&self, key: u64) {
        let unused = self.state().watchers.forget(key);
        drop(unused);
    }

    fn state(&self) -> MutexGuard<'_, State> {
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
    }
}

/// Renews a lease, a third of its TTL after the last time, and notifies its guard when its validity ends.
async fn keep(lease: Weak<Lease>, earlier: Arc<Notify>) {
    let mut again_at = None;
    loop {
        let pause = {
            let Some(lease) = lease.upgrade() else { return };
            let (held, renewed) = {
                let state = lease.state();
                (state.phase == Phase::Held, state.renewed)
            };
            if !held {
                return;
            }
            let (now, valid_until) = (Moment::now(), lease.valid_until());
            if now >= valid_until {
                if lease.lose(lease.why_over()) {
                    // The store may not have noticed: the next one need not wait for that.
                    lease.keep.release_later();
                }
                return;
            }
            let due = again_at.unwrap_or_else(|| lease.due());
            let due = if renewed { due } else { Moment::NEVER };
            if now >= due {
                again_at = renew(&lease, now).await;
                continue;
            }
            due.min(valid_until).saturating_since(now).min(LONGEST_SLEEP)
        };
        let _ = tokio::time::timeout(pause, earlier.notified()).await;
    }
}

/// Renews once, and judges silence meanwhile. Returns when to try again, if it failed.
async fn renew(lease: &Lease, now: Moment) -> Option<Moment> {
    lease.about_to_extend(now, lease.ttl);
    let valid_until = lease.valid_until();
    let mut renewal = pin!(async {
        let _turn = lease.turn().await;
        lease.keep.renew(valid_until).await
    });
    loop {
        let now = Moment::now();
        let plan = lease.plan(now);
        let wait = plan.map_or(LONGEST_SLEEP, |plan| plan.wait).min(LONGEST_SLEEP);
        match tokio::time::timeout(wait, &mut renewal).await {
            Ok(Ok(Some((valid_for, sent)))) => {
                lease.extend(sent, valid_for);
                return None;
            }
            Ok(Ok(None)) => {
                lease.lose(LossReason::Gone);
                return None;
            }
            Ok(Err(error)) => {
                event!(debug, name = lease.name.as_str(), %error, "not renewed");
                let left = lease.valid_until().saturating_since(Moment::now());
                let soon = (left / 10).clamp(Duration::from_millis(20), LONGEST_SLEEP);
                return Some(Moment::now() + Span::from_duration(soon));
            }
            Err(_) => {
                let suspect = plan.is_some_and(|plan| plan.silence_is_suspect);
                if suspect && lease.core.sender.heard_nothing_since(Destination::ONLY, now) {
                    lease.core.suspect(Destination::ONLY);
                }
                if Moment::now() >= lease.valid_until() || lease.check().is_err() {
                    return None;
                }
            }
        }
    }
}
