//! A lease that this process holds: the common part of the guards of locks and pools.
//!
//! The validity follows the same rule as that of a permit. It is counted from before the request was sent, minus a
//! margin, on a clock that runs in suspend. If the lease is renewed, or if a task waits for its loss, a task on the
//! engine's thread renews it and watches its validity: its *keeper*.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};

use super::callbacks::{event, guarded};
use super::ticket::Watchers;
use super::timers::Timed;
use super::watch::{Hold, Id, Watch};
use super::{Core, Engine};
use crate::backend::{Later, Slot};
use crate::client_core::timing::{self, Situation};
use crate::clock::{Moment, Span};
use crate::machine::lock::Verdict;
use crate::name::Name;
use crate::{Error, LossReason};

mod manual;

/// The longest sleep of the keeper, because tokio's timers stop while the machine is suspended.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

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

/// One lease, shared by its guard, its keeper and the client.
pub(crate) struct Lease {
    what: &'static str,
    name: Name,
    slot: Slot,
    keep: Arc<dyn Keep>,
    ttl: Span,
    /// In microseconds of [`Moment`].
    valid_until: AtomicU64,
    state: Mutex<State>,
    /// Wakes the keeper, because something is due earlier than before.
    earlier: Arc<Notify>,
    /// The keeper, if the client has a manual clock.
    keeper: OnceLock<Arc<manual::Keeper>>,
    /// See [`Self::turn`].
    turn: Arc<tokio::sync::Mutex<()>>,
    core: Arc<Core>,
    watch: Arc<Watch>,
}

struct State {
    phase: Phase,
    watchers: Watchers,
    /// Whether the lease has a keeper, and whether the keeper renews it.
    kept: bool,
    renewed: bool,
    /// When the last request was sent from which the validity counts.
    asked: Moment,
    /// The hold that the observers see, until the lease ends.
    hold: Option<Hold>,
    /// When a timer checks whether the lease has ended. Set only if it is observed and has no keeper.
    look_at: Option<(Moment, Weak<dyn Timed>)>,
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
        let core = engine.core().clone();
        let state = State {
            phase: Phase::Held,
            watchers: Watchers::default(),
            kept: false,
            renewed: false,
            asked: sent,
            hold: None,
            look_at: None,
        };
        let valid_until = AtomicU64::new(0);
        let (state, earlier) = (Mutex::new(state), Arc::default());
        let turn = Arc::default();
        let lease = Self {
            what,
            name,
            slot,
            keep,
            ttl,
            valid_until,
            state,
            earlier,
            keeper: OnceLock::new(),
            turn,
            core,
            watch,
        };
        lease.extend(sent, valid_for);
        let lease = Arc::new(lease);
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
            let until = self.end_of(sent, valid_for);
            #[cfg(feature = "broken")]
            let until = if crate::broken::is("margin") { until + valid_for } else { until };
            self.valid_until.store(until.micros(), Ordering::Release);
            drop(state);
            self.wake_keeper();
        }
    }

    /// Called before the store is asked to let the lease end `valid_for` from now, which may be earlier than its
    /// current end. If the answer never arrives, the holder must not rely on the lease after the new end.
    pub(crate) fn about_to_extend(&self, sent: Moment, valid_for: Span) {
        let until = self.end_of(sent, valid_for);
        if self.valid_until.fetch_min(until.micros(), Ordering::AcqRel) > until.micros() {
            self.wake_keeper();
        }
    }

    /// Whether a keeper exists, or has existed a moment ago.
    #[cfg(test)]
    pub(crate) fn has_keeper(&self) -> bool {
        Arc::strong_count(&self.earlier) > 1
    }

    /// Wakes the keeper, if there is one, because something may be due at another moment than before, or because the
    /// lease has ended.
    fn wake_keeper(&self) {
        guarded(|| self.earlier.notify_one());
        if let Some(keeper) = self.keeper.get() {
            keeper.look(self);
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

    fn plan(&self, now: Moment) -> Option<timing::Plan> {
        let valid_for = self.valid_until().saturating_since(now);
        let round_trip = self.core.sender.round_trip(self.core.destination(self.slot));
        let (lease, ttl_left, spread) = (self.ttl, None, 0);
        timing::plan(Situation { lease, ttl_left, round_trip, valid_for, spread })
    }

    /// Returns when to renew the lease, if it is renewed. It is early enough for a second attempt. A lease that was
    /// extended beyond its TTL is not renewed before a renewal makes it longer.
    fn due(&self) -> Moment {
        let asked = self.state().asked;
        let valid_for = self.valid_until().saturating_since(asked);
        let by_renewal = self.end_of(asked, self.ttl).saturating_since(asked);
        let beyond = valid_for.saturating_sub(by_renewal);
        let half = Span::from_duration(valid_for.saturating_sub(beyond) / 2);
        asked + Span::from_duration(beyond) + self.keep.interval(self.ttl).min(half)
    }

    fn is_held(&self) -> bool {
        self.state().phase == Phase::Held
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
        let watchers = state.watchers.take();
        let hold = self.take_hold(&mut state);
        drop(state);
        self.wake_keeper();
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
        let held = state.phase == Phase::Held;
        if held {
            state.phase = Phase::Released;
        }
        let watchers = state.watchers.take();
        let watched = self.take_hold(&mut state);
        drop(state);
        // The keeper ends, and so does a renewal that it has not sent yet.
        self.wake_keeper();
        wake(watchers);
        (held, watched)
    }

    /// Ends the lease because it was released. If the validity had ended before, the lease was lost unnoticed, and this
    /// reports the loss.
    fn end_released(&self) -> bool {
        let (held, watched) = self.end();
        if watched.is_some() && self.core.now() >= self.valid_until() {
            self.report_loss(self.loss_reason(), watched);
        }
        held
    }

    /// Stops tracking the lease, and renewing it. The store keeps it.
    pub(crate) fn detach(&self) {
        if let Some(hold) = self.end().1 {
            hold.detached();
        }
    }

    /// Observes the lease from now on, until it ends. If it has already ended, that has been reported.
    pub(crate) fn watch(self: &Arc<Self>, hold: Hold) {
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
        self.look_at(self.valid_until());
    }

    /// Sets the timer that reports the end of an observed lease without a keeper.
    fn look_at(self: &Arc<Self>, at: Moment) {
        let target: Weak<dyn Timed> = Arc::downgrade(self) as Weak<Self>;
        let mut state = self.state();
        if state.kept || state.hold.is_none() || state.look_at.is_some() {
            return;
        }
        state.look_at = Some((at, target.clone()));
        drop(state);
        // Without the engine's thread, the loss is reported when the guard is dropped.
        let _ = self.core.set_timer(target, None, Some(at));
    }

    fn take_hold(&self, state: &mut State) -> Option<Hold> {
        if let Some((at, target)) = state.look_at.take() {
            self.core.timers.set(target, Some(at), None);
        }
        state.hold.take()
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

    /// Starts a keeper, if there is none yet. With `renew`, the keeper also renews the lease.
    pub(crate) fn keep(self: &Arc<Self>, renew: bool) {
        let mut state = self.state();
        let begins = renew && !std::mem::replace(&mut state.renewed, true);
        let starts = !std::mem::replace(&mut state.kept, true);
        drop(state);
        if starts {
            if self.core.clock.is_manual() {
                manual::start(self);
            } else {
                self.core.spawn(keep(Arc::downgrade(self), self.earlier.clone()));
            }
        } else if begins {
            self.wake_keeper();
        }
    }

    /// Polls the loss. Called by every task that waits for it. `key` is `None` at first, and the caller keeps it.
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
        let over = self.core.now() >= self.valid_until();
        drop(state);
        drop(replaced);
        self.keep(false);
        if over { Poll::Ready(self.loss_reason()) } else { Poll::Pending }
    }

    /// Removes the waker of a task that no longer waits for the loss.
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

/// How soon the timer checks again if the lease ends while an extension is in flight.
const LOOK_AGAIN: Span = Span::from_millis(50);

impl Timed for Lease {
    /// Reports the end of a lease to its observers. The guard notices the end itself, at its next check.
    fn fire(&self, now: Moment) {
        let over = now >= self.valid_until();
        let extending = self.turn.try_lock().is_err();
        let mut state = self.state();
        let Some((_, target)) = state.look_at.take() else { return };
        if over && !extending {
            let hold = state.hold.take();
            drop(state);
            if hold.is_some() {
                self.report_loss(self.loss_reason(), hold);
            }
        } else if !state.kept {
            let at = if over { now + LOOK_AGAIN } else { self.valid_until() };
            state.look_at = Some((at, target.clone()));
            drop(state);
            let _ = self.core.set_timer(target, None, Some(at));
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
        if let Some(keeper) = self.keeper.get() {
            keeper.stop(self);
        }
    }
}

/// Renews a lease a third of its TTL after the previous renewal, and notifies its guard when its validity ends.
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
            let (now, valid_until) = (lease.core.now(), lease.valid_until());
            if is_lost(&lease, now) {
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

/// Returns whether the validity of the lease has ended. If it has, the guard is notified.
fn is_lost(lease: &Lease, now: Moment) -> bool {
    if now < lease.valid_until() {
        return false;
    }
    if lease.lose(lease.loss_reason()) {
        // The store may not have noticed yet. Releasing the lease lets the next holder in at once.
        lease.keep.release_later();
    }
    true
}

/// Renews the lease once, and decides meanwhile whether silence makes the connection suspect. Returns when to try
/// again, if it failed.
async fn renew(lease: &Lease, asked: Moment) -> Option<Moment> {
    let mut renewal = pin!(async {
        let _turn = lease.turn().await;
        // Meanwhile the guard may have extended or detached the lease.
        if !lease.is_held() || lease.core.now() < lease.due() {
            return None;
        }
        Some(lease.keep.renew(lease.valid_until()).await)
    });
    loop {
        let now = lease.core.now();
        let plan = lease.plan(now);
        let wait = plan.map_or(LONGEST_SLEEP, |plan| plan.wait).min(LONGEST_SLEEP);
        let mut changed = pin!(lease.earlier.notified());
        let answered_or_changed = poll_fn(|cx| match renewal.as_mut().poll(cx) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending => changed.as_mut().poll(cx).map(|()| None),
        });
        match tokio::time::timeout(wait, answered_or_changed).await {
            Ok(Some(Some(answer))) => return settle_renewal(lease, answer, asked),
            Ok(Some(None)) => return None,
            // After the end of the lease, a renewal that was not sent yet is not sent.
            Ok(None) if !lease.is_held() => return None,
            Ok(None) => continue,
            Err(_) => {}
        }
        let suspect = plan.is_some_and(|plan| plan.silence_is_suspect);
        let to = lease.core.destination(lease.slot);
        if suspect && lease.core.sender.heard_nothing_since(to, now) {
            lease.core.suspect(to);
        }
        if lease.core.now() >= lease.valid_until() || lease.check().is_err() {
            return None;
        }
    }
}

/// Applies the answer to a renewal. Returns when to try again, if it failed.
fn settle_renewal(
    lease: &Lease,
    answer: Result<Option<(Span, Moment)>, Error>,
    asked: Moment,
) -> Option<Moment> {
    match answer {
        Ok(Some((valid_for, sent))) => {
            lease.extend(sent, valid_for);
            lease.watch.renewed(|| lease.keep.id(), Ok(true), sent);
            None
        }
        Ok(None) => {
            lease.watch.renewed(|| lease.keep.id(), Ok(false), asked);
            lease.lose(LossReason::Missing);
            None
        }
        Err(error) => {
            lease.watch.renewed(|| lease.keep.id(), Err(error.kind()), asked);
            let name = lease.watch.public_name();
            event!(debug, name = &*name, %error, "a renewal failed; the client tries again");
            let left = lease.valid_until().saturating_since(lease.core.now());
            let soon = (left / 10).clamp(Duration::from_millis(20), LONGEST_SLEEP);
            Some(lease.core.now() + Span::from_duration(soon))
        }
    }
}
