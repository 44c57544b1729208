//! One acquisition, as its future or guard and the engine see it together.
//!
//! The engine moves a ticket on, under its own small lock, and never back:
//!
//! ```text
//! Waiting ──► Granted ──► Held ──► Releasing ──► Released
//!    │           │          │
//!    └─► Failed  └──────────┴─► Lost
//! ```
//!
//! Whoever gets the lock first decides a race. A grant that meets a failed ticket (a timeout, a cancel)
//! is refused; whoever failed the ticket has sent, or is about to send, the release.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::clock::{Moment, Span};
use crate::machine::{Held, Terms};
use crate::semaphore::Declaration;
use crate::{AcquisitionId, Error, Fence, LossReason};

/// What is done once no lock is held, because it runs code that is not ours: wakers, and whoever listens
/// to events.
#[derive(Debug, Default)]
pub(crate) struct After {
    /// Mostly there is one waker or none: no allocation for that.
    waker: Option<Waker>,
    wakers: Vec<Waker>,
    losses: Vec<(Arc<Declaration>, AcquisitionId, LossReason)>,
}

impl After {
    fn wake(&mut self, waker: Option<Waker>) {
        match waker {
            Some(waker) if self.waker.is_none() => self.waker = Some(waker),
            waker => self.wakers.extend(waker),
        }
    }

    #[inline]
    pub(crate) fn run(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
        if !self.wakers.is_empty() || !self.losses.is_empty() {
            self.run_the_rest();
        }
    }

    #[cold]
    fn run_the_rest(&mut self) {
        for (semaphore, id, reason) in self.losses.drain(..) {
            let name = semaphore.named.name().as_str();
            tracing::warn!(name, %id, %reason, "permit lost");
        }
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

/// What a holder is told, once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) slot_number: u32,
    pub(crate) fence: Fence,
    pub(crate) waited_micros: u64,
}

impl Grant {
    pub(crate) fn new(held: &Held, fence: Fence) -> Self {
        Self { slot_number: held.slot_number, fence, waited_micros: 0 }
    }
}

#[derive(Debug)]
enum State {
    Waiting(Option<Waker>),
    /// Granted, and not yet seen by the future.
    Granted(Grant),
    Held(Watchers),
    Releasing(Vec<Waker>),
    Released(Result<bool, Box<Error>>),
    Failed(Box<Error>),
    /// No permit was free, and the acquire did not want to wait.
    Full,
    Lost(LossReason),
}

/// Everyone who wants to be told of the loss, each with the key under which it goes away again.
#[derive(Debug, Default)]
pub(super) struct Watchers(Vec<(u64, Waker)>);

impl Watchers {
    /// `key` is none at first, and kept by the caller.
    pub(super) fn register(&mut self, key: &mut Option<u64>, cx: &Context<'_>) {
        let known = key.and_then(|key| self.0.iter_mut().find(|(known, _)| *known == key));
        if let Some((_, waker)) = known {
            waker.clone_from(cx.waker());
        } else {
            let new = self.0.last().map_or(0, |(last, _)| last + 1);
            self.0.push((new, cx.waker().clone()));
            *key = Some(new);
        }
    }

    pub(super) fn forget(&mut self, key: u64) {
        self.0.retain(|(known, _)| *known != key);
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Waker> + use<> {
        std::mem::take(&mut self.0).into_iter().map(|(_, waker)| waker)
    }
}

/// One acquisition of this client.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) id: AcquisitionId,
    pub(crate) semaphore: Arc<Declaration>,
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
        queues: bool,
        within: Option<Span>,
        waker: Waker,
    ) -> Arc<Self> {
        let queued_at = Moment::now();
        Arc::new(Self {
            id,
            semaphore,
            queued_at,
            queues,
            gives_up_at: within.map(|within| queued_at + within),
            valid_until: AtomicU64::new(0),
            limited_by_ttl: AtomicBool::new(false),
            state: Mutex::new(State::Waiting(Some(waker))),
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
        *ticket.state() = State::Releasing(Vec::new());
        ticket
    }

    pub(crate) fn is_releasing(&self) -> bool {
        matches!(*self.state(), State::Releasing(_))
    }

    pub(crate) fn is_waiting(&self) -> bool {
        matches!(*self.state(), State::Waiting(_))
    }

    pub(crate) fn is_held(&self) -> bool {
        matches!(*self.state(), State::Granted(_) | State::Held(_))
    }

    /// Hands the permit to whoever waits. False if nobody does any more.
    pub(crate) fn grant(&self, grant: Grant, valid_until: Moment, after: &mut After) -> bool {
        let mut state = self.state();
        let State::Waiting(waker) = &mut *state else { return false };
        self.valid_until.store(valid_until.micros(), Ordering::Release);
        after.wake(waker.take());
        *state = State::Granted(grant);
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

    /// Ends a try: no permit was free.
    pub(crate) fn full(&self, after: &mut After) {
        let mut state = self.state();
        if let State::Waiting(waker) = &mut *state {
            after.wake(waker.take());
            *state = State::Full;
        }
    }

    /// Takes the permit away, and tells everyone who asked to be told. False if there is none to take.
    pub(crate) fn lose(&self, reason: LossReason, after: &mut After) -> bool {
        let mut state = self.state();
        match &mut *state {
            State::Held(watchers) => {
                after.wakers.extend(watchers.take());
            }
            State::Granted(_) => {}
            _ => return false,
        }
        self.valid_until.store(0, Ordering::Release);
        *state = State::Lost(reason);
        after.losses.push((self.semaphore.clone(), self.id, reason));
        true
    }

    /// Renewed: the holder may go on until then. Answers may overtake each other; the latest counts.
    ///
    /// What has ended stays ended, also if nobody has come round to say so: somebody else may have held the
    /// permit since, if this answer is to an enqueue that was sent twice and granted anew.
    pub(crate) fn extend(&self, valid_until: Moment) {
        let state = self.state();
        if matches!(*state, State::Granted(_) | State::Held(_))
            && Moment::now() < self.valid_until()
        {
            self.valid_until.fetch_max(valid_until.micros(), Ordering::AcqRel);
        }
    }

    /// The guard is ending: nothing is lost any more. What was lost before stays lost.
    pub(crate) fn start_release(&self, after: &mut After) {
        let mut state = self.state();
        if let State::Held(watchers) = &mut *state {
            after.wakers.extend(watchers.take());
        }
        if matches!(*state, State::Held(_) | State::Granted(_)) {
            self.valid_until.store(0, Ordering::Release);
            *state = State::Releasing(Vec::new());
        }
    }

    /// What became of the release.
    pub(crate) fn finish_release(&self, outcome: Result<bool, Error>, after: &mut After) {
        let mut state = self.state();
        if let State::Releasing(wakers) = &mut *state {
            after.wakers.append(wakers);
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
            // Its time is up, and the engine has not come round to say so.
            _ => self.why_ended(),
        }
    }

    /// The store has granted less than it was asked for: the TTL ends before the heartbeat would.
    pub(crate) fn limited_by_ttl(&self) {
        self.limited_by_ttl.store(true, Ordering::Release);
    }

    /// Which of its two deadlines ended it.
    pub(crate) fn why_ended(&self) -> LossReason {
        let Terms { heartbeat, ttl } = self.semaphore.terms;
        let limited = || self.limited_by_ttl.load(Ordering::Acquire);
        match (ttl, heartbeat) {
            (Some(ttl), Some(heartbeat)) if ttl > heartbeat && !limited() => LossReason::NotRenewed,
            (Some(_), _) => LossReason::TtlEnded,
            (None, _) => LossReason::NotRenewed,
        }
    }

    /// For the acquire.
    pub(crate) fn poll_granted(&self, cx: &mut Context<'_>) -> Poll<Result<Option<Grant>, Error>> {
        let mut state = self.state();
        match &mut *state {
            State::Waiting(waker) => {
                register(waker, cx);
                Poll::Pending
            }
            State::Granted(grant) => {
                let mut grant = *grant;
                *state = State::Held(Watchers::default());
                grant.waited_micros =
                    Moment::now().micros().saturating_sub(self.queued_at.micros());
                Poll::Ready(Ok(Some(grant)))
            }
            State::Full => Poll::Ready(Ok(None)),
            State::Failed(error) => Poll::Ready(Err(*error.clone())),
            State::Lost(reason) => {
                let reason = *reason;
                drop(state);
                Poll::Ready(Err(self.lost(reason)))
            }
            State::Held(_) | State::Releasing(_) | State::Released(_) => {
                Poll::Ready(Err(Error::internal("an acquire was polled after it was done")))
            }
        }
    }

    /// For everyone who wants to be told of the loss. `key` is none at first, and kept by the caller.
    pub(crate) fn poll_lost(
        &self,
        key: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<LossReason> {
        if let Err(reason) = self.check() {
            return Poll::Ready(reason);
        }
        let mut state = self.state();
        let State::Held(watchers) = &mut *state else {
            drop(state);
            return Poll::Ready(self.loss());
        };
        watchers.register(key, cx);
        Poll::Pending
    }

    /// Nobody wants to be told under this key any more.
    pub(crate) fn forget_watcher(&self, key: u64) {
        if let State::Held(watchers) = &mut *self.state() {
            watchers.forget(key);
        }
    }

    /// For the release.
    pub(crate) fn poll_released(&self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        match &mut *self.state() {
            State::Releasing(wakers) => {
                if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
            State::Released(outcome) => Poll::Ready(outcome.clone().map_err(|error| *error)),
            // Lost before the release came.
            _ => Poll::Ready(Ok(false)),
        }
    }

    pub(crate) fn lost(&self, reason: LossReason) -> Error {
        let name = self.semaphore.named.name().to_string();
        Error::Lost { what: "permit", name, id: self.id.to_string(), reason }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn register(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}
