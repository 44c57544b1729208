//! One acquisition, shared by its future or guard and the engine.
//!
//! The engine moves a ticket forward, under the ticket's own lock, and never back:
//!
//! ```text
//! Waiting ──► Granted ──► Held ──► Releasing ──► Released
//!    │           │          │
//!    └─► Failed  └──────────┴─► Lost
//! ```
//!
//! The first side to take the lock decides a race. A grant that finds a failed ticket (a time-out, a cancel) is
//! refused, and the side that failed the ticket sends the release.
//!
//! Wakers are the user's code. They are cloned before the lock is taken, and woken or dropped after it is released
//! ([`Deferred`]). A waker may run anything, even a release of a permit of the same name.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::deferred::Deferred;
use super::lease_spec::LeaseSpec;
use super::watch::HoldWatch;
use crate::callbacks::event;
use crate::client_core::why_ended;
use crate::clock::{Moment, Span};
use crate::machine::{Held, Share};
use crate::name::Name;
use crate::{AcquisitionId, Error, Fence, LossReason};

/// What a holder learns from the grant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) slot_number: Option<NonZeroU32>,
    pub(crate) fence: Fence,
    pub(crate) waited_micros: u64,
}

impl Grant {
    pub(crate) fn new(held: &Held) -> Self {
        Self { slot_number: held.slot_number, fence: held.fence, waited_micros: 0 }
    }
}

#[derive(Debug)]
enum TicketState {
    Waiting(Option<Waker>),
    /// Granted, but the future has not been polled since.
    Granted {
        slot_number: Option<NonZeroU32>,
        fence: Fence,
    },
    /// Contains the hold that the observers of the semaphore see.
    Held(Watchers, Option<HoldWatch>),
    Releasing(Watchers),
    Released(Result<bool, Box<Error>>),
    Failed(Box<Error>),
    /// No permit was free, and the acquire does not wait.
    Full,
    Lost(LossReason),
}

/// Wakers, each with the key under which it is removed again. They are in a box because most tickets have none.
#[derive(Debug, Default)]
pub(super) struct Watchers(Option<Box<Registered>>);

#[derive(Debug, Default)]
struct Registered(Vec<(u64, Waker)>);

impl Watchers {
    /// Whether `waker` is already registered under this key.
    pub(super) fn has(&self, key: Option<u64>, waker: &Waker) -> bool {
        self.iter().any(|(registered, other)| Some(*registered) == key && other.will_wake(waker))
    }

    /// Registers a waker. `key` is `None` at first, and the caller keeps it. Returns a waker to drop after all locks
    /// are released.
    pub(super) fn register(&mut self, key: &mut Option<u64>, waker: Waker) -> Option<Waker> {
        let Registered(wakers) = &mut **self.0.get_or_insert_default();
        let registered = key.and_then(|key| wakers.iter_mut().find(|(other, _)| *other == key));
        if let Some((_, registered)) = registered {
            return Some(std::mem::replace(registered, waker));
        }
        let new = wakers.last().map_or(0, |(last, _)| last + 1);
        wakers.push((new, waker));
        *key = Some(new);
        None
    }

    /// Removes a waker. Returns it, to be dropped after all locks are released.
    pub(super) fn forget(&mut self, key: u64) -> Option<Waker> {
        let Registered(wakers) = &mut **self.0.as_mut()?;
        let at = wakers.iter().position(|(other, _)| *other == key)?;
        Some(wakers.remove(at).1)
    }

    fn wake(&mut self, deferred: &mut Deferred) {
        let wakers = self.0.take().into_iter().flat_map(|registered| registered.0);
        wakers.for_each(|(_, waker)| deferred.wake(Some(waker)));
    }

    fn iter(&self) -> impl Iterator<Item = &(u64, Waker)> {
        self.0.iter().flat_map(|registered| &registered.0)
    }
}

/// One acquisition of this client.
pub(crate) struct Ticket {
    pub(crate) id: AcquisitionId,
    pub(crate) spec: Arc<dyn LeaseSpec>,
    pub(crate) share: Share,
    pub(crate) queued_at: Moment,
    /// When the acquire gives up.
    pub(crate) gives_up_at: Option<Moment>,
    /// Until when the holder may rely on the permit, in microseconds of [`Moment`].
    valid_until: AtomicU64,
    /// Whether `valid_until` is limited by the TTL.
    limited_by_ttl: AtomicBool,
    state: Mutex<TicketState>,
}

impl Ticket {
    pub(crate) fn waiting(
        id: AcquisitionId,
        spec: Arc<dyn LeaseSpec>,
        share: Share,
        within: Option<Span>,
    ) -> Arc<Self> {
        Self::new_waiting(id, spec, share, within, None)
    }

    /// Creates the ticket of an acquire that waits and whose waker is known.
    pub(crate) fn registered(
        id: AcquisitionId,
        spec: Arc<dyn LeaseSpec>,
        share: Share,
        within: Option<Span>,
        waker: Waker,
    ) -> Arc<Self> {
        Self::new_waiting(id, spec, share, within, Some(waker))
    }

    #[inline]
    fn new_waiting(
        id: AcquisitionId,
        spec: Arc<dyn LeaseSpec>,
        share: Share,
        within: Option<Span>,
        waker: Option<Waker>,
    ) -> Arc<Self> {
        let queued_at = spec.now();
        Arc::new(Self {
            id,
            spec,
            share,
            queued_at,
            gives_up_at: within.map(|within| queued_at + within),
            valid_until: AtomicU64::new(0),
            limited_by_ttl: AtomicBool::new(false),
            state: Mutex::new(TicketState::Waiting(waker)),
        })
    }

    /// Creates the ticket of a permit that was granted without waiting.
    pub(crate) fn held(
        id: AcquisitionId,
        spec: Arc<dyn LeaseSpec>,
        valid_until: Moment,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            spec,
            // The store knows the weight by now.
            share: Share::ONE,
            queued_at: Moment::from_micros(0),
            gives_up_at: None,
            valid_until: AtomicU64::new(valid_until.micros()),
            limited_by_ttl: AtomicBool::new(false),
            state: Mutex::new(TicketState::Held(Watchers::default(), None)),
        })
    }

    /// Creates the ticket for the release of an id without a guard in this client.
    pub(crate) fn releasing(id: AcquisitionId, spec: Arc<dyn LeaseSpec>) -> Arc<Self> {
        let ticket = Self::held(id, spec, Moment::from_micros(0));
        *ticket.state() = TicketState::Releasing(Watchers::default());
        ticket
    }

    /// Returns whether the caller may have seen the permit. Also `true` if that is no longer known.
    pub(crate) fn was_seen(&self) -> bool {
        let state = self.state();
        !matches!(
            *state,
            TicketState::Waiting(_)
                | TicketState::Granted { .. }
                | TicketState::Failed(_)
                | TicketState::Full
        )
    }

    /// Grants the permit to the waiting future. Returns `false` if it no longer waits.
    pub(crate) fn grant(&self, grant: Grant, valid_until: Moment, deferred: &mut Deferred) -> bool {
        let mut state = self.state();
        let TicketState::Waiting(waker) = &mut *state else { return false };
        self.valid_until.store(valid_until.micros(), Ordering::Release);
        deferred.wake(waker.take());
        *state = TicketState::Granted { slot_number: grant.slot_number, fence: grant.fence };
        true
    }

    /// Ends the wait with an error. Returns `false` if it has ended already.
    pub(crate) fn fail(&self, error: Error, deferred: &mut Deferred) -> bool {
        let mut state = self.state();
        let TicketState::Waiting(waker) = &mut *state else { return false };
        deferred.wake(waker.take());
        *state = TicketState::Failed(Box::new(error));
        true
    }

    /// Handles a future or guard that was dropped. From now on nothing is granted or lost, but an earlier loss stays.
    pub(crate) fn cancel(&self, deferred: &mut Deferred) {
        let mut state = self.state();
        match &mut *state {
            TicketState::Waiting(waker) => {
                if let Some(waker) = waker.take() {
                    deferred.add(move || drop(waker));
                }
                *state = TicketState::Failed(Box::new(Error::Closed));
                return;
            }
            TicketState::Held(watchers, hold) => {
                watchers.wake(deferred);
                if let Some(hold) = hold.take() {
                    self.end_hold(hold, deferred);
                }
            }
            TicketState::Granted { .. } => {}
            _ => return,
        }
        self.valid_until.store(0, Ordering::Release);
        *state = TicketState::Releasing(Watchers::default());
    }

    /// Ends a try for which no permit was free.
    pub(crate) fn full(&self, deferred: &mut Deferred) {
        let mut state = self.state();
        if let TicketState::Waiting(waker) = &mut *state {
            deferred.wake(waker.take());
            *state = TicketState::Full;
        }
    }

    /// Ends the permit and notifies its watchers. Returns `false` if there is no permit to lose.
    pub(crate) fn lose(&self, reason: LossReason, deferred: &mut Deferred) -> bool {
        let mut state = self.state();
        let hold = match &mut *state {
            TicketState::Held(watchers, hold) => {
                watchers.wake(deferred);
                hold.take()
            }
            TicketState::Granted { .. } => None,
            _ => return false,
        };
        self.valid_until.store(0, Ordering::Release);
        *state = TicketState::Lost(reason);
        self.report_loss(reason, hold, deferred);
        true
    }

    fn report_loss(&self, reason: LossReason, hold: Option<HoldWatch>, deferred: &mut Deferred) {
        let (spec, id) = (self.spec.clone(), self.id);
        deferred.add(move || {
            let log = || {
                let (name, id) = (spec.watch().public_name(), spec.id(id));
                event!(warn, name = &*name, %id, %reason, "{} lost", spec.primitive().grant());
            };
            spec.watch().lost(|| spec.id(id), reason, hold, log);
        });
    }

    /// Ends the hold of a guard that was released or dropped. If the validity had ended before, the permit was lost
    /// unnoticed, and this reports the loss.
    fn end_hold(&self, hold: HoldWatch, deferred: &mut Deferred) {
        let valid_until = self.valid_until();
        if valid_until == Moment::NEVER || self.now() < valid_until {
            deferred.add(move || drop(hold));
        } else {
            self.report_loss(self.why_ended(), Some(hold), deferred);
        }
    }

    /// Observes the permit from now on, until it ends. If it has already ended, the loss has been reported.
    pub(crate) fn watch(&self, hold: HoldWatch) {
        let mut state = self.state();
        if let TicketState::Held(_, slot) = &mut *state {
            *slot = Some(hold);
            return;
        }
        drop(state);
        hold.lost(self.loss());
    }

    /// Extends the validity until `valid_until`, because a renewal was answered. One answer may overtake another, and
    /// the latest time counts.
    ///
    /// A permit whose validity has ended stays lost, even if the holder has not noticed yet. The answer may belong to
    /// an enqueue that was sent twice and granted again, and then another client may have held the permit in between.
    /// Returns `false` in that case: the holder may have noticed after the engine last looked at the clock.
    pub(crate) fn extend(&self, valid_until: Moment) -> bool {
        let state = self.state();
        if !matches!(*state, TicketState::Granted { .. } | TicketState::Held(..)) {
            return true;
        }
        let is_valid = self.now() < self.valid_until();
        if is_valid {
            self.valid_until.fetch_max(valid_until.micros(), Ordering::AcqRel);
        }
        is_valid
    }

    /// Ends the validity at `valid_until`, if that is earlier.
    pub(crate) fn limit(&self, valid_until: Moment) {
        self.valid_until.fetch_min(valid_until.micros(), Ordering::AcqRel);
    }

    /// Stops tracking the lease. The store keeps it.
    pub(crate) fn detach(&self, deferred: &mut Deferred) {
        if let TicketState::Held(_, hold) = &mut *self.state()
            && let Some(hold) = hold.take()
        {
            deferred.add(move || hold.detached());
        }
        self.cancel(deferred);
    }

    /// Sets the outcome of the release.
    pub(crate) fn finish_release(&self, outcome: Result<bool, Error>, deferred: &mut Deferred) {
        let mut state = self.state();
        if let TicketState::Releasing(wakers) = &mut *state {
            wakers.wake(deferred);
            *state = TicketState::Released(outcome.map_err(Box::new));
        }
    }

    fn now(&self) -> Moment {
        self.spec.now()
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_micros(self.valid_until.load(Ordering::Acquire))
    }

    /// Checks whether the holder may still rely on the permit.
    pub(crate) fn check(&self) -> Result<(), LossReason> {
        let valid_until = self.valid_until();
        if valid_until == Moment::NEVER || self.now() < valid_until {
            return Ok(());
        }
        Err(self.loss())
    }

    fn loss(&self) -> LossReason {
        match *self.state() {
            TicketState::Lost(reason) => reason,
            TicketState::Releasing(_) | TicketState::Released(_) => LossReason::Released,
            // The validity has ended, but the engine has not noticed yet.
            _ => self.why_ended(),
        }
    }

    /// Records whether the TTL ends before the lease would. Then no renewal extends the permit.
    pub(crate) fn set_limited_by_ttl(&self, limited: bool) {
        self.limited_by_ttl.store(limited, Ordering::Release);
    }

    /// Returns which of the two deadlines ended the permit.
    fn why_ended(&self) -> LossReason {
        let limited = self.limited_by_ttl.load(Ordering::Acquire);
        why_ended(self.spec.terms(), limited)
    }

    /// Polls the grant. Called by the future of the acquire.
    pub(crate) fn poll_granted(&self, cx: &mut Context<'_>) -> Poll<Result<Option<Grant>, Error>> {
        let mut state = self.state();
        match &*state {
            TicketState::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => {
                return Poll::Pending;
            }
            TicketState::Waiting(_) => {
                drop(state);
                if self.register(cx.waker().clone()) {
                    return Poll::Pending;
                }
                state = self.state();
            }
            _ => {}
        }
        Poll::Ready(self.take_result(state))
    }

    /// Registers the waker of the acquire. Returns `false` if it no longer waits.
    pub(crate) fn register(&self, waker: Waker) -> bool {
        // Dropped after the lock is released: the previous waker, or this one if it comes too late.
        let mut unused = Some(waker);
        let mut state = self.state();
        let TicketState::Waiting(slot) = &mut *state else { return false };
        std::mem::swap(slot, &mut unused);
        drop(state);
        true
    }

    /// Returns the result of an acquire that no longer waits.
    fn take_result(&self, mut state: MutexGuard<'_, TicketState>) -> Result<Option<Grant>, Error> {
        match &mut *state {
            TicketState::Granted { slot_number, fence } => {
                let (slot_number, fence) = (*slot_number, *fence);
                *state = TicketState::Held(Watchers::default(), None);
                drop(state);
                let waited_micros = self.now().micros().saturating_sub(self.queued_at.micros());
                Ok(Some(Grant { slot_number, fence, waited_micros }))
            }
            TicketState::Full => Ok(None),
            TicketState::Failed(error) => Err(*error.clone()),
            TicketState::Lost(LossReason::Closed) => Err(Error::Closed),
            TicketState::Lost(reason) => Err(self.lost(*reason)),
            TicketState::Waiting(_)
            | TicketState::Held(..)
            | TicketState::Releasing(_)
            | TicketState::Released(_) => {
                Err(Error::internal("an acquire was polled after it had completed"))
            }
        }
    }

    /// Polls the loss. Called by every task that waits for it. `key` is `None` at first, and the caller keeps it.
    pub(crate) fn poll_lost(
        &self,
        key: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<LossReason> {
        if let Err(reason) = self.check() {
            return Poll::Ready(reason);
        }
        if let TicketState::Held(watchers, _) = &*self.state()
            && watchers.has(*key, cx.waker())
        {
            return Poll::Pending;
        }
        let waker = cx.waker().clone();
        let mut state = self.state();
        let TicketState::Held(watchers, _) = &mut *state else {
            drop(state);
            return Poll::Ready(self.loss());
        };
        let replaced = watchers.register(key, waker);
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    /// Removes the waker of a task that no longer waits for the loss.
    pub(crate) fn forget_watcher(&self, key: u64) {
        let unused = match &mut *self.state() {
            TicketState::Held(watchers, _) => watchers.forget(key),
            _ => None,
        };
        drop(unused);
    }

    /// Polls the outcome of the release. Called by its future.
    pub(crate) fn poll_released(&self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let released = |state: &TicketState| match state {
            TicketState::Released(outcome) => outcome.clone().map_err(|error| *error),
            // The permit was lost before the release.
            _ => Ok(false),
        };
        match &*self.state() {
            TicketState::Releasing(wakers)
                if wakers.iter().any(|(_, waker)| waker.will_wake(cx.waker())) =>
            {
                return Poll::Pending;
            }
            TicketState::Releasing(_) => {}
            state => return Poll::Ready(released(state)),
        }
        let waker = cx.waker().clone();
        let mut state = self.state();
        if let TicketState::Releasing(wakers) = &mut *state {
            // The key is new, so no waker is replaced.
            wakers.register(&mut None, waker);
            return Poll::Pending;
        }
        let result = released(&state);
        drop(state);
        drop(waker);
        Poll::Ready(result)
    }

    pub(crate) fn lost(&self, reason: LossReason) -> Error {
        let (name, id) = (self.spec.name().to_string(), self.spec.id(self.id).to_string());
        Error::Lost { primitive: self.spec.primitive(), name, id, reason }
    }

    /// Returns the error of an acquire that has reached its time limit. `next_token` is the time until the rate allows
    /// the next start, if that is what the acquire waits for.
    pub(crate) fn timed_out(&self, next_token: Option<Duration>) -> Error {
        let limit = self.gives_up_at.unwrap_or(Moment::NEVER).saturating_since(self.queued_at);
        let (primitive, name) = (self.spec.primitive(), self.spec.name().to_string());
        Error::TimedOut { primitive, name, limit, held: None, capacity: None, next_token }
    }

    /// Returns the error of an acquire that weighs more than the capacity.
    pub(crate) fn too_heavy(&self, capacity: u32) -> Error {
        too_heavy(self.spec.name(), self.share.weight, capacity)
    }

    /// Returns the error of a wait that somebody has ended by its id.
    pub(crate) fn cancelled(&self) -> Error {
        let (name, id) = (self.spec.name().to_string(), self.spec.id(self.id).to_string());
        Error::Cancelled { name, id }
    }

    fn state(&self) -> MutexGuard<'_, TicketState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error of an acquire that weighs more than the capacity.
pub(crate) fn too_heavy(name: &Name, weight: u32, capacity: u32) -> Error {
    Error::TooHeavy { name: name.to_string(), weight, capacity }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("id", &self.id).finish_non_exhaustive()
    }
}
