//! A lease of one holder in this process: what the guard of a lock and that of a pool have in common.
//!
//! Its validity follows the same rule as a permit's: it is counted from before the request was sent, less a margin,
//! on a clock that does not stop while the machine is suspended. If it is to be renewed, or somebody wants to be told
//! of its end, a *keeper* on the engine's thread sees to it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};

use super::errands::Errand;
use super::ticket::Watchers;
use super::{Core, Engine, Message};
use crate::backend::{Backend, Later};
use crate::clock::{Moment, Span};
use crate::name::Name;
use crate::{Error, LossReason};

/// The keeper does not sleep longer than this: see the driver's own `LONGEST_SLEEP`.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// What a store does for one lease.
pub(crate) trait Keep: Send + Sync {
    /// How long it is good for from now on; none if the store no longer knows it.
    fn renew(&self) -> Later<Option<Span>>;

    /// True if it was held until now.
    fn release(&self) -> Later<bool>;
}

/// A lease that the store may have granted, and nobody knows yet. Unless that becomes known, it is given back.
pub(crate) struct Doubt {
    core: Arc<Core>,
    keep: Option<Box<dyn Keep>>,
}

impl Doubt {
    pub(crate) fn new(core: &Arc<Core>, keep: Box<dyn Keep>) -> Self {
        Self { core: core.clone(), keep: Some(keep) }
    }

    /// Now it is known.
    pub(crate) fn resolved(mut self) {
        self.keep = None;
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            self.core.give_back(move || keep.release());
        }
    }
}

/// One lease, shared by its guard, its keeper and the client.
pub(crate) struct Lease {
    what: &'static str,
    name: Name,
    id: String,
    keep: Box<dyn Keep>,
    ttl: Span,
    /// In microseconds of [`Moment`].
    valid_until: AtomicU64,
    state: Mutex<State>,
    /// Tells the keeper, who may be asleep, that something is due earlier than it was.
    earlier: Arc<Notify>,
    /// See [`Self::turn`].
    turn: Arc<tokio::sync::Mutex<()>>,
    core: Arc<Core>,
}

struct State {
    phase: Phase,
    watchers: Watchers,
    /// Whether somebody on the engine's thread sees to it, and whether he renews it.
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
        keep: Box<dyn Keep>,
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
        lease.core.enroll(&lease);
        lease
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_micros(self.valid_until.load(Ordering::Acquire))
    }

    /// The store said, to a request sent then, that it is good for so long.
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
            self.earlier.notify_one();
        }
    }

    /// The store is about to be asked to let it end so long from now. Should that be sooner than we believe, and the answer
    /// never come, we must not go on believing.
    pub(crate) fn about_to_extend(&self, sent: Moment, valid_for: Span) {
        let until = self.end_of(sent, valid_for);
        if self.valid_until.fetch_min(until.micros(), Ordering::AcqRel) > until.micros() {
            self.earlier.notify_one();
        }
    }

    fn end_of(&self, sent: Moment, valid_for: Span) -> Moment {
        (sent + valid_for).minus(self.core.backend.margin(valid_for))
    }

    /// Whoever asks the store to extend it has this meanwhile: of two that change places, the last one to be executed
    /// would count there, and another one here. It goes where the asking goes on, not with whoever waits for it.
    pub(crate) async fn turn(&self) -> OwnedMutexGuard<()> {
        self.turn.clone().lock_owned().await
    }

    /// When to renew it, if it is renewed: a third of the TTL after the last time, and never so late that there would be
    /// no second try.
    fn due(&self) -> Moment {
        let asked = self.state().asked;
        let half = Span::from_duration(self.valid_until().saturating_since(asked) / 2);
        asked + self.ttl.divided_by(3).min(half)
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

    /// Ends it here: nobody renews it any more, and whoever asked is told. False if it had ended before.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        let mut state = self.state();
        if state.phase != Phase::Held {
            return false;
        }
        state.phase = Phase::Lost(reason);
        let watchers = state.watchers.take();
        drop(state);
        tracing::warn!(name = self.name.as_str(), id = self.id, %reason, "{} lost", self.what);
        watchers.for_each(Waker::wake);
        true
    }

    fn finish(&self) -> bool {
        let mut state = self.state();
        let held = state.phase == Phase::Held;
        if held {
            state.phase = Phase::Released;
        }
        let watchers = state.watchers.take();
        drop(state);
        watchers.for_each(Waker::wake);
        held
    }

    /// Gives it back, and says whether it was held until now.
    pub(crate) async fn release(self: Arc<Self>) -> Result<bool, Error> {
        let valid = self.check().is_ok();
        self.finish();
        Ok(self.give_back().await? && valid)
    }

    async fn give_back(self: Arc<Self>) -> Result<bool, Error> {
        let (lease, errand) = (self.clone(), Errand::new(&self.core));
        let release = move || {
            let _under_way = &errand;
            lease.keep.release()
        };
        self.core.ask(release).await
    }

    /// Ends it here without giving it back.
    pub(crate) fn detach(&self) {
        self.finish();
    }

    /// Gives it back in the background, without blocking.
    pub(crate) fn release_later(self: &Arc<Self>) {
        if self.finish() {
            self.give_back_later();
        }
    }

    /// The client is closing: whoever holds it is told, and the store as well.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.lose(LossReason::Closed) {
            self.give_back_later();
        }
    }

    fn give_back_later(self: &Arc<Self>) {
        let lease = self.clone();
        if let Backend::Away(_) = &self.core.backend {
            return self.core.give_back(move || lease.keep.release());
        }
        // It answers at once, unless another thread is about the same.
        let mut release = self.keep.release();
        if release.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            let errand = Errand::new(&self.core);
            self.core.tell(Message::Run(Box::pin(async move {
                let _ = release.await;
                drop(errand);
            })));
        }
    }

    /// From now on somebody sees to it; and renews it, if that is wanted.
    pub(crate) fn keep(self: &Arc<Self>, renew: bool) {
        let mut state = self.state();
        let begins = renew && !std::mem::replace(&mut state.renewed, true);
        if !std::mem::replace(&mut state.kept, true) {
            drop(state);
            let (earlier, timeout) = (self.earlier.clone(), self.core.settings.retries.timeout);
            let keeper = keep(Arc::downgrade(self), earlier, timeout);
            self.core.tell(Message::Run(Box::pin(keeper)));
        } else if begins {
            self.earlier.notify_one();
        }
    }

    /// For everyone who wants to be told of its end. `key` is none at first, and kept by the caller.
    pub(crate) fn poll_lost(
        self: &Arc<Self>,
        key: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<LossReason> {
        let mut state = self.state();
        match state.phase {
            Phase::Lost(reason) => return Poll::Ready(reason),
            Phase::Released => return Poll::Ready(LossReason::Released),
            Phase::Held => {}
        }
        state.watchers.register(key, cx);
        let over = Moment::now() >= self.valid_until();
        drop(state);
        self.keep(false);
        if over { Poll::Ready(self.why_over()) } else { Poll::Pending }
    }

    /// Nobody wants to be told under this key any more.
    pub(crate) fn forget_watcher(&self, key: u64) {
        self.state().watchers.forget(key);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.core.dismiss(std::ptr::from_ref(self) as usize);
    }
}

/// Renews a lease, a third of its TTL after the last time, and tells its guard when its time is up.
async fn keep(lease: Weak<Lease>, earlier: Arc<Notify>, patience: Duration) {
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
                lease.lose(lease.why_over());
                // The store may not have noticed: whoever comes next need not wait for that.
                let _ = tokio::time::timeout(patience, lease.keep.release()).await;
                return;
            }
            let due = again_at.unwrap_or_else(|| lease.due());
            let due = if renewed { due } else { Moment::NEVER };
            if now >= due {
                again_at = renew(&lease, now, patience).await;
                continue;
            }
            due.min(valid_until).saturating_since(now).min(LONGEST_SLEEP)
        };
        let _ = tokio::time::timeout(pause, earlier.notified()).await;
    }
}

/// One try. Whoever is not answered is asked again soon, for as long as the validity lasts: then it says when.
async fn renew(lease: &Lease, sent: Moment, patience: Duration) -> Option<Moment> {
    let left = lease.valid_until().saturating_since(sent);
    let limit = (left / 3).max(Duration::from_millis(10)).min(patience);
    lease.about_to_extend(sent, lease.ttl);
    let renewal = async {
        let _turn = lease.turn().await;
        lease.keep.renew().await
    };
    match tokio::time::timeout(limit, renewal).await {
        Ok(Ok(Some(valid_for))) => lease.extend(sent, valid_for),
        Ok(Ok(None)) => {
            lease.lose(LossReason::Gone);
        }
        Ok(Err(error)) => {
            tracing::debug!(name = lease.name.as_str(), %error, "renewal not answered");
            let soon = (left / 10).clamp(Duration::from_millis(20), LONGEST_SLEEP);
            return Some(Moment::now() + Span::from_duration(soon));
        }
        // Whoever is given up on suspects the connection by that.
        Err(_) => return Some(Moment::now()),
    }
    None
}
