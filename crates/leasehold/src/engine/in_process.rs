//! Names, locks and pools of the memory store. The machine of a name runs under the name's own lock. So a grant and its
//! ticket cannot miss each other, and every command is answered at once.
//!
//! The engine's thread is needed only for time: a TTL, or a limit of the wait.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use super::Core;
use super::deferred::Deferred;
use super::name_state::{Common, Entered, NameState, Release, ReleasedBy};
use super::registry::Listener;
use super::semaphore_spec::SemaphoreSpec;
use super::ticket::{Grant, Ticket, too_heavy};
use super::timers::Timed;
use crate::backend::BoxFuture;
use crate::backend::memory::{Memory, MemorySemaphore};
use crate::clock::{Moment, Span};
use crate::machine::{
    Command, Declared, Effects, Held, LimitChange, LimitsChanged, Outcome, ReleaseHint, Role,
    Share, Terms,
};
use crate::name::Name;
use crate::stats::{SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, Error, LossReason};

/// One name of the memory store.
pub(super) struct InProcessName {
    common: Common,
    state: Mutex<InProcessState>,
    /// Whether there were waiters after the last acquire that was not granted at once. This is a guess that is read
    /// without the lock. If it is wrong, an acquire creates a ticket that it does not need, or takes the lock twice.
    queued: AtomicBool,
    this: Weak<Self>,
}

/// The ticket of an acquisition, if it needs one.
type OptionalTicket = Option<Arc<Ticket>>;

struct InProcessState {
    store: MemorySemaphore<OptionalTicket>,
    /// What the last command did to other acquisitions. Empty between commands.
    effects: Effects<OptionalTicket>,
    closed: bool,
    timers: BTreeSet<(Moment, Timer)>,
    sweep_at: Option<Moment>,
    /// When the engine's thread fires the timer of this name.
    timer_at: Option<Moment>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Timer {
    /// The acquire has reached its time limit.
    GiveUp(AcquisitionId),
    /// A TTL ends, or a token arrives.
    Sweep,
}

impl InProcessState {
    /// Applies what the last command did to other acquisitions. Losses come before grants, so that two holders never
    /// believe in the same permit.
    #[inline]
    fn apply_effects(&mut self, deferred: &mut Deferred) {
        if !self.effects.is_empty() {
            self.apply_effects_now(deferred);
        }
        if let Some(delay) = self.store.next_change() {
            let at = self.store.moment() + delay;
            if self.sweep_at.is_none_or(|earlier| at < earlier) {
                if let Some(later) = self.sweep_at.replace(at) {
                    self.timers.remove(&(later, Timer::Sweep));
                }
                self.timers.insert((at, Timer::Sweep));
            }
        }
    }

    fn apply_effects_now(&mut self, deferred: &mut Deferred) {
        for ticket in self.effects.expired.iter().filter_map(|(_, ticket)| ticket.as_ref()) {
            ticket.lose(LossReason::TtlEnded, deferred);
        }
        for (id, held, ticket) in &self.effects.granted {
            if let Some(ticket) = ticket {
                if let Some(at) = ticket.gives_up_at {
                    self.timers.remove(&(at, Timer::GiveUp(*id)));
                }
                let now = self.store.moment();
                let until = held.valid_for.map_or(Moment::NEVER, |span| now + span);
                ticket.grant(Grant::new(held), until, deferred);
            }
        }
        self.effects.expired.clear();
        self.effects.granted.clear();
    }

    #[inline]
    fn remove(
        &mut self,
        id: AcquisitionId,
        hint: ReleaseHint,
        deferred: &mut Deferred,
    ) -> (Role, OptionalTicket) {
        let (role, ticket) = self.store.release(id, hint, &mut self.effects);
        if let Some(at) = ticket.as_ref().and_then(|ticket| ticket.gives_up_at) {
            self.timers.remove(&(at, Timer::GiveUp(id)));
        }
        self.apply_effects(deferred);
        (role, ticket)
    }

    fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        match self.store.machine().holds(id) {
            true => Ok(()),
            false if self.closed => Err(LossReason::Closed),
            false => Err(LossReason::Released),
        }
    }

    fn give_up(&mut self, id: AcquisitionId, deferred: &mut Deferred) {
        let Some(ticket) = self.store.machine().tag(id).cloned().flatten() else { return };
        let now = self.store.now();
        let token_at = self.store.machine().next_token(now);
        let next_token = token_at.map(|token_at| token_at.since(now));
        if ticket.fail(ticket.timed_out(next_token), deferred) {
            self.remove(id, ReleaseHint::Nothing, deferred);
        }
    }
}

impl InProcessName {
    pub(super) fn open(name: Name, core: Arc<Core>, memory: &Arc<Memory>) -> Arc<dyn NameState> {
        let store = memory.semaphore(core.client);
        Arc::new_cyclic(|this| Self {
            common: Common::new(name, core),
            state: Mutex::new(InProcessState {
                store,
                effects: Effects::default(),
                closed: false,
                timers: BTreeSet::new(),
                sweep_at: None,
                timer_at: None,
            }),
            queued: AtomicBool::new(false),
            this: this.clone(),
        })
    }

    fn state(&self) -> MutexGuard<'_, InProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` under the lock, and then sets the timer and wakes the tasks that `work` has notified.
    #[inline]
    fn locked<T>(&self, work: impl FnOnce(&mut InProcessState, &mut Deferred) -> T) -> T {
        self.go_on(self.state(), work)
    }

    /// Like [`locked`](Self::locked), with a lock that is already held.
    #[inline]
    fn go_on<T>(
        &self,
        mut state: MutexGuard<'_, InProcessState>,
        work: impl FnOnce(&mut InProcessState, &mut Deferred) -> T,
    ) -> T {
        let mut deferred = Deferred::default();
        let result = work(&mut state, &mut deferred);
        if state.timers.is_empty() && state.timer_at.is_none() {
            drop(state);
        } else {
            self.set_timer(state);
        }
        deferred.run();
        result
    }

    /// `waiting` is the ticket to wait with, or `None` for an acquire that does not wait.
    fn enter_or_wait(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<SemaphoreSpec>,
        share: Share,
        waiting: Option<Arc<Ticket>>,
    ) -> Entered {
        let entered = self.locked(|state, deferred| {
            if state.closed {
                return Some(Entered::Failed(Box::new(Error::Closed)));
            }
            // A permit that is granted at once has a ticket only if it can be lost, or if it has a label to show.
            let mut holding = None;
            let keep = |held: Option<&Held>| match held {
                None => waiting.clone(),
                Some(Held { valid_for: None, .. }) if semaphore.label.is_none() => None,
                Some(held) => {
                    let now = self.common.core.now();
                    let until = held.valid_for.map_or(Moment::NEVER, |span| now + span);
                    holding = Some(Ticket::held(id, semaphore.clone(), until));
                    holding.clone()
                }
            };
            let (declared, terms) = (self.common.declared(), semaphore.terms);
            let InProcessState { store, effects, .. } = state;
            let wait = waiting.is_some();
            let outcome = store.enqueue(id, declared, wait, terms, share, keep, effects);
            // A refused acquire has declared nothing.
            if !matches!(outcome, Outcome::TooHeavy { .. }) {
                self.common.acknowledged(declared);
            }
            state.apply_effects(deferred);
            self.queued.store(state.store.machine().waiting() > 0, Ordering::Relaxed);
            match outcome {
                Outcome::Held(held) => {
                    return Some(Entered::Held(Grant::new(&held), holding));
                }
                Outcome::TooHeavy { capacity } => {
                    let error = too_heavy(&self.common.name, share.weight, capacity);
                    return Some(Entered::Failed(Box::new(error)));
                }
                _ => {}
            }
            if let Some(at) = waiting.as_ref().and_then(|ticket| ticket.gives_up_at) {
                state.timers.insert((at, Timer::GiveUp(id)));
            }
            None
        });
        entered.unwrap_or_else(|| waiting.map_or(Entered::Full, Entered::Registered))
    }

    #[cold]
    fn set_timer(&self, mut state: MutexGuard<'_, InProcessState>) {
        let next = state.timers.first().map(|(at, _)| *at);
        let before = std::mem::replace(&mut state.timer_at, next);
        drop(state);
        if before != next
            && let Err(error) = self.common.core.set_timer(self.this.clone(), before, next)
        {
            self.stop(&error);
        }
    }
}

impl Timed for InProcessName {
    fn fire(&self, now: Moment) {
        self.locked(|state, deferred| {
            state.timer_at = None;
            while let Some(&(at, timer)) = state.timers.first().filter(|(at, _)| *at <= now) {
                state.timers.remove(&(at, timer));
                match timer {
                    Timer::GiveUp(id) => state.give_up(id, deferred),
                    Timer::Sweep => {
                        state.sweep_at = None;
                        state.store.sweep(&mut state.effects);
                        state.apply_effects(deferred);
                    }
                }
            }
        });
    }
}

impl Listener for InProcessName {
    fn close(&self) {
        self.locked(|state, deferred| {
            state.closed = true;
            let machine = state.store.machine();
            // Waiters first, and among them the last one first, so that no waiter is granted a permit only to lose it.
            let mut ids: Vec<_> = machine.waiters().map(|row| row.id).collect();
            ids.reverse();
            ids.extend(machine.holders().iter().map(|row| row.id));
            for id in ids {
                if let (_, Some(ticket)) = state.remove(id, ReleaseHint::Nothing, deferred) {
                    ticket.fail(Error::Closed, deferred);
                    ticket.lose(LossReason::Closed, deferred);
                }
            }
        });
    }

    /// Ends everything that depends on time. The rest continues to work.
    fn stop(&self, error: &Error) {
        let mut deferred = Deferred::default();
        let mut state = self.state();
        let limited = state.timers.iter().filter_map(|(_, timer)| match timer {
            Timer::GiveUp(id) => Some(*id),
            Timer::Sweep => None,
        });
        let limited: Vec<_> = limited.collect();
        for id in limited {
            if let (_, Some(ticket)) = state.remove(id, ReleaseHint::Nothing, &mut deferred) {
                ticket.fail(error.clone(), &mut deferred);
            }
        }
        for row in state.store.machine().holders() {
            // A permit that never expires stays valid.
            if let Some(ticket) =
                row.tag.as_ref().filter(|ticket| ticket.valid_until() != Moment::NEVER)
            {
                ticket.lose(LossReason::NotRenewed, &mut deferred);
            }
        }
        drop(state);
        deferred.run();
    }
}

impl NameState for InProcessName {
    fn common(&self) -> &Common {
        &self.common
    }

    #[inline]
    fn enter(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<SemaphoreSpec>,
        weight: u32,
        wait: bool,
        within: Option<Span>,
        waker: &Waker,
    ) -> Entered {
        // Usually a permit is free, and then the acquire needs neither a waker nor a ticket.
        let queued = self.queued.load(Ordering::Relaxed);
        if !semaphore.is_plain || weight != 1 {
            if !wait || !queued {
                let share = Share { weight, numbered: semaphore.numbered };
                let entered = self.enter_or_wait(id, semaphore, share, None);
                if !wait || !matches!(entered, Entered::Full) {
                    return entered;
                }
            }
        } else if !queued && !self.common.has_rate() {
            let mut state = self.state();
            if !state.closed
                && let (capacity, is_new) = self.common.declared_capacity()
                && let Some(held) = state.store.hold_at_once(id, (capacity, is_new))
            {
                if is_new {
                    self.common.acknowledged(Declared::capacity(capacity, is_new));
                }
                return Entered::Held(Grant::new(&held), None);
            }
        }
        let share = Share { weight, numbered: semaphore.numbered };
        // Created outside the lock, and dropped outside it if it is not needed, because a waker is the user's code.
        let waiting =
            wait.then(|| Ticket::registered(id, semaphore.clone(), share, within, waker.clone()));
        self.enter_or_wait(id, semaphore, share, waiting)
    }

    #[inline]
    fn end(&self, id: AcquisitionId, hint: ReleaseHint) {
        let mut state = self.state();
        let (_, ticket) = match state.store.remove_at_once(id) {
            Some(removed) => {
                drop(state);
                removed
            }
            None => self.go_on(state, |state, deferred| state.remove(id, hint, deferred)),
        };
        // If no other owner has the ticket, there is no task to notify.
        if let Some(ticket) = ticket.filter(|ticket| Arc::strong_count(ticket) > 1) {
            let mut deferred = Deferred::default();
            ticket.cancel(&mut deferred);
            deferred.run();
        }
    }

    fn release(&self, id: AcquisitionId, _of: &Arc<SemaphoreSpec>, by: ReleasedBy) -> Release {
        self.locked(|state, deferred| {
            let (role, ticket) = state.remove(id, ReleaseHint::Nothing, deferred);
            if let Some(ticket) = ticket {
                by.notify(&ticket, deferred);
            }
            Release::Done(role != Role::Nobody)
        })
    }

    fn detach(&self, id: AcquisitionId) {
        self.locked(|state, deferred| {
            if let Some(Some(ticket)) = state.store.machine().tag(id) {
                ticket.detach(deferred);
            }
        });
    }

    /// In memory no permit has a lease.
    fn extend(&self, id: AcquisitionId, _terms: Terms) -> BoxFuture<bool> {
        let state = self.state();
        let held = state.store.machine().holds(id);
        at_once(if state.closed { Err(Error::Closed) } else { Ok(held) })
    }

    fn attach(&self, id: AcquisitionId, semaphore: &Arc<SemaphoreSpec>) -> Arc<Ticket> {
        self.locked(|state, deferred| {
            if let Some(Some(ticket)) = state.store.machine().tag(id) {
                return ticket.clone();
            }
            let ticket = Ticket::held(id, semaphore.clone(), Moment::NEVER);
            match state.check(id) {
                Ok(()) => {
                    if let Some(tag) = state.store.tag_mut(id) {
                        *tag = Some(ticket.clone());
                    }
                }
                Err(reason) => drop(ticket.lose(reason, deferred)),
            }
            ticket
        })
    }

    fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        self.state().check(id)
    }

    fn abandon(&self) {
        let mut deferred = Deferred::default();
        let abandoned = self.state().store.forget_everyone();
        for ticket in abandoned.into_iter().flatten() {
            ticket.cancel(&mut deferred);
        }
        deferred.run();
    }

    fn is_idle(&self) -> bool {
        let state = self.state();
        let (machine, limits) = (state.store.machine(), state.store.machine().limits());
        machine.is_empty() && limits.can_be_forgotten(state.store.now())
    }

    fn change_limits(&self, change: LimitChange, declares: bool) -> BoxFuture<LimitsChanged> {
        let declares = declares && change != LimitChange::Forget;
        let capacity = declares.then(|| self.common.capacity());
        at_once(self.locked(|state, deferred| {
            if state.closed {
                return Err(Error::Closed);
            }
            let InProcessState { store, effects, .. } = state;
            let outcome = store.change_limits(&Command::ChangeLimits { capacity, change }, effects);
            state.apply_effects(deferred);
            match outcome {
                Outcome::LimitsChanged(changed) => Ok(changed),
                other => Err(Error::internal(format!(
                    "unexpected answer to a change of limits: {other:?}"
                ))),
            }
        }))
    }

    fn position(&self, id: AcquisitionId) -> BoxFuture<Option<usize>> {
        at_once(Ok(self.state().store.machine().position(id)))
    }

    fn limits(&self) -> BoxFuture<SemaphoreLimits> {
        let state = self.state();
        let limits = state.store.machine().limits();
        at_once(Ok(SemaphoreLimits::of(limits, state.store.now())))
    }

    fn stats(&self, waiters: Range<usize>) -> BoxFuture<SemaphoreStats> {
        let state = self.state();
        let now = state.store.now();
        let label = |ticket: &OptionalTicket| {
            ticket.as_ref().and_then(|ticket| ticket.spec.label().cloned())
        };
        let machine = state.store.machine();
        at_once(Ok(SemaphoreStats::of(&self.common.name, machine, now, waiters, label)))
    }
}

fn at_once<T: Send + 'static>(result: Result<T, Error>) -> BoxFuture<T> {
    Box::pin(std::future::ready(result))
}

impl fmt::Debug for InProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcessName").field("name", &self.common.name).finish_non_exhaustive()
    }
}
