//! One acquisition, shared by its future or guard and the engine.
//!
//! The engine moves a ticket forward, under the ticket's own small lock, and never back:
//!
//! ```text
//! Waiting ──► Granted ──► Held ──► Releasing ──► Released
//!    │           │          │
//!    └─► Failed  └──────────┴─► Lost
//! ```
//!
//! The first to take the lock decides a race. A grant that meets a failed ticket (a time-out, a cancel) is refused;
//! the side that failed the ticket sends the release.
//!
//! Wakers are foreign code: they are cloned before the lock is taken, and woken or dropped after it is released
//! ([`After`]). A waker may run anything, even release a permit of the same name.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::foreign::{event, guarded};
use crate::clock::{Moment, Span};
use crate::machine::{Held, Share, Terms};
use crate::semaphore::Declaration;
use crate::{AcquisitionId, Error, Fence, LossReason};

/// What is done once no lock is held, because it runs foreign code: wakers are woken or dropped, losses are logged.
///
/// Mostly it is one waker or nothing, which is neither allocated nor costs anything to drop.
#[derive(Default)]
pub(crate) struct After {
    waker: Option<Waker>,
    rest: Option<Box<Rest>>,
}

#[derive(Default)]
struct Rest {
    wakers: Vec<Waker>,
    /// Only to be dropped.
    unused: Vec<Waker>,
    losses: Vec<(Arc<Declaration>, AcquisitionId, LossReason)>,
    reports: Vec<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("After").finish_non_exhaustive()
    }
}

impl After {
    /// Logs something.
    pub(crate) fn report(&mut self, report: impl FnOnce() + Send + 'static) {
        self.rest().reports.push(Box::new(report));
    }

    #[inline]
    fn wake(&mut self, waker: Option<Waker>) {
        match waker {
            None => {}
            Some(waker) if self.waker.is_none() => self.waker = Some(waker),
            Some(waker) => self.rest().wakers.push(waker),
        }
    }

    fn wake_all(&mut self, wakers: impl Iterator<Item = Waker>) {
        wakers.for_each(|waker| self.wake(Some(waker)));
    }

    fn rest(&mut self) -> &mut Rest {
        self.rest.get_or_insert_default()
    }

    #[inline]
    pub(crate) fn run(self) {
        if let Some(waker) = self.waker {
            guarded(|| waker.wake());
        }
        if let Some(rest) = self.rest {
            rest.run();
        }
    }
}

impl Rest {
    #[cold]
    fn run(self) {
        for (semaphore, id, reason) in self.losses {
            let name = semaphore.named.name().as_str();
            event!(warn, name, %id, %reason, "permit lost");
        }
        self.reports.into_iter().for_each(|report| report());
        for waker in self.wakers {
            guarded(|| waker.wake());
        }
        for waker in self.unused {
            guarded(|| drop(waker));
        }
    }
}

/// What a holder learns at the grant.
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
enum State {
    Waiting(Option<Waker>),
    /// Granted, and not yet seen by the future.
    Granted {
        slot_number: Option<NonZeroU32>,
        fence: Fence,
    },
    Held(Watchers),
    Releasing(Watchers),
    Released(Result<bool, Box<Error>>),
    Failed(Box<Error>),
    /// No permit was free, and the acquire did not want to wait.
    Full,
    Lost(LossReason),
}

/// Wakers, each with the key under which it is removed again. In a box, because most tickets have none.
#[derive(Debug, Default)]
pub(super) struct Watchers(Option<Box<Registered>>);

#[derive(Debug, Default)]
struct Registered(Vec<(u64, Waker)>);

impl Watchers {
    /// Whether `waker` is registered under this key already.
    pub(super) fn has(&self, key: Option<u64>, waker: &Waker) -> bool {
        self.iter().any(|(known, other)| Some(*known) == key && other.will_wake(waker))
    }

    /// `key` is none at first, and kept by the caller. Returns a waker to drop once no lock is held.
    pub(super) fn register(&mut self, key: &mut Option<u64>, waker: Waker) -> Option<Waker> {
        let Registered(wakers) = &mut **self.0.get_or_insert_default();
        let known = key.and_then(|key| wakers.iter_mut().find(|(known, _)| *known == key));
        if let Some((_, known)) = known {
            return Some(std::mem::replace(known, waker));
        }
        let new = wakers.last().map_or(0, |(last, _)| last + 1);
        wakers.push((new, waker));
        *key = Some(new);
        None
    }

    /// Returns a waker to drop once no lock is held.
    pub(super) fn forget(&mut self, key: u64) -> Option<Waker> {
        let Registered(wakers) = &mut **self.0.as_mut()?;
        let at = wakers.iter().position(|(known, _)| *known == key)?;
        Some(wakers.remove(at).1)
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Waker> + use<> {
        let wakers = self.0.take().into_iter().flat_map(|registered| registered.0);
        wakers.map(|(_, waker)| waker)
    }

    fn iter(&self) -> impl Iterator<Item = &(u64, Waker)> {
        self.0.iter().flat_map(|registered| &registered.0)
    }
}

/// One acquisition of this client.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) id: AcquisitionId,
    pub(crate) semaphore: Arc<Declaration>,
    pub(crate) share: Share,
    pub(crate) queued_at: Moment,
    /// Whether it would queue, or only tries.
    pub(crate) queues: bool,
    /// When the acquire gives up.
    pub(crate) gives_up_at: Option<Moment>,
    /// Until when the holder may believe that it holds, in microseconds of [`Moment`].
    valid_until: AtomicU64,
    /// Whether that is because of its TTL.
    limited_by_ttl: AtomicBool,
    state: Mutex<State>,
}

impl Ticket {
    pub(crate) fn waiting(
        id: AcquisitionId,
        semaphore: Arc<Declaration>,
        share: Share,
        queues: bool,
        within: Option<Span>,
    ) -> Arc<Self> {
        Self::new_waiting(id, semaphore, share, queues, within, None)
    }

    /// For an acquire that would queue, and whose waker is known.
    pub(crate) fn registered(
        id: AcquisitionId,
        semaphore: Arc<Declaration>,
        share: Share,
        within: Option<Span>,
        waker: Waker,
    ) -> Arc<Self> {
        Self::new_waiting(id, semaphore, share, true, within, Some(waker))
    }

    #[inline]
    fn new_waiting(
        id: AcquisitionId,
        semaphore: Arc<Declaration>,
        share: Share,
        queues: bool,
        within: Option<Span>,
        waker: Option<Waker>,
    ) -> Arc<Self> {
        let queued_at = Moment::now();
        Arc::new(Self {
            id,
            semaphore,
            share,
            queued_at,
            queues,
            gives_up_at: within.map(|within| queued_at + within),
            valid_until: AtomicU64::new(0),
            limited_by_ttl: AtomicBool::new(false),
            state: Mutex::new(State::Waiting(waker)),
        })
    }

    /// For a permit that did not have to wait.
    pub(crate) fn held(
        id: AcquisitionId,
        semaphore: Arc<Declaration>,
        valid_until: Moment,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            semaphore,
            // Its weight is known to the store by now.
            share: Share::ONE,
            queued_at: Moment::from_micros(0),
            queues: false,
            gives_up_at: None,
            valid_until: AtomicU64::new(valid_until.micros()),
            limited_by_ttl: AtomicBool::new(false),
            state: Mutex::new(State::Held(Watchers::default())),
        })
    }

    /// For the release of an id that this client holds no guard of.
    pub(crate) fn releasing(id: AcquisitionId, semaphore: Arc<Declaration>) -> Arc<Self> {
        let ticket = Self::held(id, semaphore, Moment::from_micros(0));
        *ticket.state() = State::Releasing(Watchers::default());
        ticket
    }

    pub(crate) fn is_waiting(&self) -> bool {
        matches!(*self.state(), State::Waiting(_))
    }

    pub(crate) fn is_held(&self) -> bool {
        matches!(*self.state(), State::Granted { .. } | State::Held(_))
    }

    /// Whether the permit, if it was ever granted one, was handed to anybody. If that is not known any more, it was.
    pub(crate) fn was_seen(&self) -> bool {
        let state = self.state();
        !matches!(
            *state,
            State::Waiting(_) | State::Granted { .. } | State::Failed(_) | State::Full
        )
    }

    /// Hands the permit to the waiting future. False if it no longer waits.
    pub(crate) fn grant(&self, grant: Grant, valid_until: Moment, after: &mut After) -> bool {
        let mut state = self.state();
        let State::Waiting(waker) = &mut *state else { return false };
        self.valid_until.store(valid_until.micros(), Ordering::Release);
        after.wake(waker.take());
        *state = State::Granted { slot_number: grant.slot_number, fence: grant.fence };
        true
    }

    /// Ends the wait with an error. False if it has ended already.
    pub(crate) fn fail(&self, error: Error, after: &mut After) -> bool {
        let mut state = self.state();
        let State::Waiting(waker) = &mut *state else { return false };
        after.wake(waker.take());
        *state = State::Failed(Box::new(error));
        true
    }

    /// The future or guard was dropped: nothing is granted or lost any more. What was lost before stays lost.
    pub(crate) fn cancel(&self, after: &mut After) {
        let mut state = self.state();
        match &mut *state {
            State::Waiting(waker) => {
                if let Some(waker) = waker.take() {
                    after.rest().unused.push(waker);
                }
                *state = State::Failed(Box::new(Error::Closed));
                return;
            }
            State::Held(watchers) => after.wake_all(watchers.take()),
            State::Granted { .. } => {}
            _ => return,
        }
        self.valid_until.store(0, Ordering::Release);
        *state = State::Releasing(Watchers::default());
    }

    /// Ends a try: no permit was free.
    pub(crate) fn full(&self, after: &mut After) {
        let mut state = self.state();
        if let State::Waiting(waker) = &mut *state {
            after.wake(waker.take());
            *state = State::Full;
        }
    }

    /// Ends the permit and notifies its watchers. False if there is none to lose.
    pub(crate) fn lose(&self, reason: LossReason, after: &mut After) -> bool {
        let mut state = self.state();
        match &mut *state {
            State::Held(watchers) => {
                after.wake_all(watchers.take());
            }
            State::Granted { .. } => {}
            _ => return false,
        }
        self.valid_until.store(0, Ordering::Release);
        *state = State::Lost(reason);
        after.rest().losses.push((self.semaphore.clone(), self.id, reason));
        true
    }

    /// Renewed: the holder may go on until then. Answers may overtake each other; the latest counts.
    ///
    /// What has ended stays ended, even if nobody has noticed yet: another client may have held the permit since, if
    /// this answers an enqueue that was sent twice and granted anew.
    pub(crate) fn extend(&self, valid_until: Moment) {
        let state = self.state();
        if matches!(*state, State::Granted { .. } | State::Held(_))
            && Moment::now() < self.valid_until()
        {
            self.valid_until.fetch_max(valid_until.micros(), Ordering::AcqRel);
        }
    }

    /// The outcome of the release.
    pub(crate) fn finish_release(&self, outcome: Result<bool, Error>, after: &mut After) {
        let mut state = self.state();
        if let State::Releasing(wakers) = &mut *state {
            after.wake_all(wakers.take());
            *state = State::Released(outcome.map_err(Box::new));
        }
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_micros(self.valid_until.load(Ordering::Acquire))
    }

    /// Whether the holder may still believe that it holds.
    pub(crate) fn check(&self) -> Result<(), LossReason> {
        let valid_until = self.valid_until();
        if valid_until == Moment::NEVER || Moment::now() < valid_until {
            return Ok(());
        }
        Err(self.loss())
    }

    fn loss(&self) -> LossReason {
        match *self.state() {
            State::Lost(reason) => reason,
            State::Releasing(_) | State::Released(_) => LossReason::Released,
            // The validity has ended, and the engine has not noticed yet.
            _ => self.why_ended(),
        }
    }

    /// Whether the TTL ends before the lease would. Then no renewal extends the permit.
    pub(crate) fn set_limited_by_ttl(&self) {
        self.limited_by_ttl.store(true, Ordering::Release);
    }

    pub(crate) fn is_limited_by_ttl(&self) -> bool {
        self.limited_by_ttl.load(Ordering::Acquire)
    }

    /// Which of its two deadlines ended it.
    pub(crate) fn why_ended(&self) -> LossReason {
        let Terms { lease, ttl } = self.semaphore.terms;
        match (ttl, lease) {
            (Some(ttl), Some(lease)) if ttl > lease && !self.is_limited_by_ttl() => {
                LossReason::NotRenewed
            }
            (Some(_), _) => LossReason::TtlEnded,
            (None, _) => LossReason::NotRenewed,
        }
    }

    /// For the acquire.
    pub(crate) fn poll_granted(&self, cx: &mut Context<'_>) -> Poll<Result<Option<Grant>, Error>> {
        let mut state = self.state();
        match &*state {
            State::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => return Poll::Pending,
            State::Waiting(_) => {
                drop(state);
                if self.register(cx.waker().clone()) {
                    return Poll::Pending;
                }
                state = self.state();
            }
            _ => {}
        }
        Poll::Ready(self.settled(state))
    }

    /// Registers the waker of the acquire. False if it no longer waits.
    pub(crate) fn register(&self, waker: Waker) -> bool {
        // Dropped after the lock: the waker that was registered before, or this one if it comes too late.
        let mut unused = Some(waker);
        let mut state = self.state();
        let State::Waiting(slot) = &mut *state else { return false };
        std::mem::swap(slot, &mut unused);
        drop(state);
        true
    }

    /// The result of an acquire that no longer waits.
    fn settled(&self, mut state: MutexGuard<'_, State>) -> Result<Option<Grant>, Error> {
        match &mut *state {
            State::Granted { slot_number, fence } => {
                let (slot_number, fence) = (*slot_number, *fence);
                *state = State::Held(Watchers::default());
                drop(state);
                let waited_micros = Moment::now().micros().saturating_sub(self.queued_at.micros());
                Ok(Some(Grant { slot_number, fence, waited_micros }))
            }
            State::Full => Ok(None),
            State::Failed(error) => Err(*error.clone()),
            State::Lost(reason) => Err(self.lost(*reason)),
            State::Waiting(_) | State::Held(_) | State::Releasing(_) | State::Released(_) => {
                Err(Error::internal("an acquire was polled after it was done"))
            }
        }
    }

    /// For everyone who waits for the loss. `key` is none at first, and kept by the caller.
    pub(crate) fn poll_lost(
        &self,
        key: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<LossReason> {
        if let Err(reason) = self.check() {
            return Poll::Ready(reason);
        }
        if let State::Held(watchers) = &*self.state()
            && watchers.has(*key, cx.waker())
        {
            return Poll::Pending;
        }
        let waker = cx.waker().clone();
        let mut state = self.state();
        let State::Held(watchers) = &mut *state else {
            drop(state);
            return Poll::Ready(self.loss());
        };
        let replaced = watchers.register(key, waker);
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    /// Nobody waits for the loss under this key any more.
    pub(crate) fn forget_watcher(&self, key: u64) {
        let unused = match &mut *self.state() {
            State::Held(watchers) => watchers.forget(key),
            _ => None,
        };
        drop(unused);
    }

    /// For the release.
    pub(crate) fn poll_released(&self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let released = |state: &State| match state {
            State::Released(outcome) => outcome.clone().map_err(|error| *error),
            // Lost before the release came.
            _ => Ok(false),
        };
        match &*self.state() {
            State::Releasing(wakers)
                if wakers.iter().any(|(_, known)| known.will_wake(cx.waker())) =>
            {
                return Poll::Pending;
            }
            State::Releasing(_) => {}
            state => return Poll::Ready(released(state)),
        }
        let waker = cx.waker().clone();
        let mut state = self.state();
        if let State::Releasing(wakers) = &mut *state {
            // It is new, so that none is replaced.
            wakers.register(&mut None, waker);
            return Poll::Pending;
        }
        let result = released(&state);
        drop(state);
        drop(waker);
        Poll::Ready(result)
    }

    pub(crate) fn lost(&self, reason: LossReason) -> Error {
        let name = self.semaphore.named.name().to_string();
        Error::Lost { what: "permit", name, id: self.id.to_string(), reason }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
