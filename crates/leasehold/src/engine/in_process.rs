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
use std::time::Duration;

use super::Core;
use super::call::{Asked, Done, Undo};
use super::name_state::{Common, Entered, NameState, Release, ReleasedBy};
use super::semaphore_spec::SemaphoreSpec;
use super::store::Store;
use super::ticket::{After, Grant, Ticket};
use super::timers::Timed;
use crate::backend::TimeAuthority;
use crate::backend::memory::{Memory, MemorySemaphore};
use crate::backend::{Answer, Later, Part, Profile};
use crate::clock::{Moment, Span};
use crate::machine::lock::{LockOutcome, Record, Verdict};
use crate::machine::pool::PoolQuery;
use crate::machine::{
    Command, Declared, Effects, Held, Known, Outcome, Role, Share, Steer, Steered,
};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientInfo, Error, LossReason};

/// The memory store, as the engine sees it.
pub(crate) struct InProcess(pub(crate) Arc<Memory>);

fn ready<T: Send + 'static>(result: Result<T, Error>) -> Later<T> {
    Box::pin(std::future::ready(result))
}

impl InProcess {
    fn apply(&self, core: &Core, part: &Part) -> Result<Answer, Error> {
        match part {
            Part::Lock(command) => {
                let outcome = self.0.apply_lock(command);
                // The store has only this client, which sees every release.
                if let LockOutcome::Release(Verdict::Done(Some(key))) = &outcome {
                    core.lock_waiters.wake_one(key);
                }
                Ok(Answer::Lock(outcome))
            }
            Part::Pool(command) => Ok(Answer::Pool(self.0.apply_pool(command))),
            Part::Semaphore { .. } => {
                Err(Error::internal("a command for a semaphore was sent as a lock or pool command"))
            }
        }
    }
}

impl Store for InProcess {
    fn profile(&self) -> Profile {
        let time_authority = TimeAuthority::Process;
        Profile { kind: "memory", needs_renewals: false, time_authority }
    }

    fn open(&self, name: Name, core: Arc<Core>) -> Arc<dyn NameState> {
        let store = self.0.semaphore(core.client);
        Arc::new_cyclic(|this| InProcessName {
            common: Common::new(name, core),
            state: Mutex::new(State {
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

    fn ask(&self, core: &Arc<Core>, part: Part, _until: Moment, _undo: Option<Undo>) -> Asked {
        Asked::at_once(core.now(), || self.apply(core, &part))
    }

    fn ask_in_background(&self, core: &Arc<Core>, part: Part, _until: Moment, done: Done) {
        done(self.apply(core, &part));
    }

    fn stats(&self, core: &Arc<Core>, query: Query) -> Later<Vec<SemaphoreStats>> {
        let names = core.all().into_iter().filter(|named| {
            let name = named.name().as_str();
            query.names.as_ref().is_none_or(|names| names.iter().any(|wanted| wanted == name))
        });
        let all: Vec<_> = names.map(|named| named.stats(query.waiters.clone())).collect();
        Box::pin(async move {
            let mut stats = Vec::with_capacity(all.len());
            for one in all {
                stats.push(one.await?);
            }
            Ok(stats)
        })
    }

    fn list_locks(&self, _core: &Arc<Core>, limit: usize) -> Later<Vec<Record>> {
        ready(Ok(self.0.list_locks(limit)))
    }

    fn list_pools(&self, _core: &Arc<Core>, which: PoolQuery) -> Later<Vec<PoolStats>> {
        ready(Ok(self.0.list_pools(&which)))
    }

    fn list_clients(&self, core: &Arc<Core>, limit: usize) -> Later<Vec<ClientInfo>> {
        ready(Ok([ClientInfo::here(core.client)].into_iter().take(limit).collect()))
    }
}

/// One name of the memory store.
struct InProcessName {
    common: Common,
    state: Mutex<State>,
    /// Whether there were waiters after the last acquire that was not granted at once. This is a guess that is read
    /// without the lock. If it is wrong, an acquire creates a ticket that it does not need, or takes the lock twice.
    queued: AtomicBool,
    this: Weak<Self>,
}

/// The ticket of an acquisition, if it needs one.
type Kept = Option<Arc<Ticket>>;

struct State {
    store: MemorySemaphore<Kept>,
    /// What the last command did to other acquisitions. Empty between commands.
    effects: Effects<Kept>,
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

impl State {
    /// Applies what the last command did to other acquisitions. Losses come before grants, so that two holders never
    /// believe in the same permit.
    #[inline]
    fn settle(&mut self, after: &mut After) {
        if !self.effects.is_empty() {
            self.settle_effects(after);
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

    fn settle_effects(&mut self, after: &mut After) {
        for ticket in self.effects.expired.iter().filter_map(|(_, ticket)| ticket.as_ref()) {
            ticket.lose(LossReason::TtlEnded, after);
        }
        for (id, held, ticket) in &self.effects.granted {
            if let Some(ticket) = ticket {
                if let Some(at) = ticket.gives_up_at {
                    self.timers.remove(&(at, Timer::GiveUp(*id)));
                }
                let now = self.store.moment();
                let until = held.valid_for.map_or(Moment::NEVER, |span| now + span);
                ticket.grant(Grant::new(held), until, after);
            }
        }
        self.effects.expired.clear();
        self.effects.granted.clear();
    }

    #[inline]
    fn remove(&mut self, id: AcquisitionId, known: Known, after: &mut After) -> (Role, Kept) {
        let (role, ticket) = self.store.release(id, known, &mut self.effects);
        if let Some(at) = ticket.as_ref().and_then(|ticket| ticket.gives_up_at) {
            self.timers.remove(&(at, Timer::GiveUp(id)));
        }
        self.settle(after);
        (role, ticket)
    }

    fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        match self.store.machine().holds(id) {
            true => Ok(()),
            false if self.closed => Err(LossReason::Closed),
            false => Err(LossReason::Released),
        }
    }

    fn give_up(&mut self, id: AcquisitionId, after: &mut After) {
        let Some(ticket) = self.store.machine().kept(id).cloned().flatten() else { return };
        let now = self.store.now();
        let token_at = self.store.machine().next_token(now);
        let next_start = token_at.map(|token_at| token_at.since(now));
        if ticket.fail(timed_out(&ticket, next_start), after) {
            self.remove(id, Known::Nothing, after);
        }
    }
}

/// Returns the error of an acquire that has reached its time limit. `next_start` is the time until the rate allows the
/// next start, if that is what the acquire waits for.
pub(super) fn timed_out(ticket: &Ticket, next_start: Option<Duration>) -> Error {
    let limit = ticket.gives_up_at.unwrap_or(Moment::NEVER).saturating_since(ticket.queued_at);
    let name = ticket.semaphore.named.name().to_string();
    Error::TimedOut { what: "permit", name, limit, full: None, next_start }
}

/// The error for an acquire that weighs more than the capacity.
pub(super) fn too_heavy(name: &Name, weight: u32, capacity: u32) -> Error {
    let problem = format!("it is {weight}; the capacity of {name:?} is {capacity}");
    Error::invalid("weight", problem + ": ask for less, or raise the capacity")
}

impl InProcessName {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` under the lock, and then sets the timer and wakes the tasks that `work` has notified.
    #[inline]
    fn locked<T>(&self, work: impl FnOnce(&mut State, &mut After) -> T) -> T {
        self.go_on(self.state(), work)
    }

    /// Like [`locked`](Self::locked), with a lock that is already held.
    #[inline]
    fn go_on<T>(
        &self,
        mut state: MutexGuard<'_, State>,
        work: impl FnOnce(&mut State, &mut After) -> T,
    ) -> T {
        let mut after = After::default();
        let result = work(&mut state, &mut after);
        if state.timers.is_empty() && state.timer_at.is_none() {
            drop(state);
        } else {
            self.set_timer(state);
        }
        after.run();
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
        let entered = self.locked(|state, after| {
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
            let State { store, effects, .. } = state;
            let wait = waiting.is_some();
            let outcome = store.enqueue(id, declared, wait, terms, share, keep, effects);
            // A refused acquire has declared nothing.
            if !matches!(outcome, Outcome::TooHeavy { .. }) {
                self.common.heard(declared);
            }
            state.settle(after);
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
    fn set_timer(&self, mut state: MutexGuard<'_, State>) {
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
        self.locked(|state, after| {
            state.timer_at = None;
            while let Some(&(at, timer)) = state.timers.first().filter(|(at, _)| *at <= now) {
                state.timers.remove(&(at, timer));
                match timer {
                    Timer::GiveUp(id) => state.give_up(id, after),
                    Timer::Sweep => {
                        state.sweep_at = None;
                        state.store.sweep(&mut state.effects);
                        state.settle(after);
                    }
                }
            }
        });
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
                    self.common.heard(Declared::capacity(capacity, is_new));
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
    fn end(&self, id: AcquisitionId, known: Known) {
        let mut state = self.state();
        let (_, ticket) = match state.store.remove_at_once(id) {
            Some(removed) => {
                drop(state);
                removed
            }
            None => self.go_on(state, |state, after| state.remove(id, known, after)),
        };
        // If no other owner has the ticket, there is no task to notify.
        if let Some(ticket) = ticket.filter(|ticket| Arc::strong_count(ticket) > 1) {
            let mut after = After::default();
            ticket.cancel(&mut after);
            after.run();
        }
    }

    fn release(&self, id: AcquisitionId, _of: &Arc<SemaphoreSpec>, by: ReleasedBy) -> Release {
        self.locked(|state, after| {
            let (role, ticket) = state.remove(id, Known::Nothing, after);
            if let Some(ticket) = ticket {
                by.notify(&ticket, after);
            }
            Release::Done(role != Role::Nobody)
        })
    }

    fn attach(&self, id: AcquisitionId, semaphore: &Arc<SemaphoreSpec>) -> Arc<Ticket> {
        self.locked(|state, after| {
            if let Some(Some(ticket)) = state.store.machine().kept(id) {
                return ticket.clone();
            }
            let ticket = Ticket::held(id, semaphore.clone(), Moment::NEVER);
            match state.check(id) {
                Ok(()) => {
                    if let Some(kept) = state.store.kept_mut(id) {
                        *kept = Some(ticket.clone());
                    }
                }
                Err(reason) => drop(ticket.lose(reason, after)),
            }
            ticket
        })
    }

    fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        self.state().check(id)
    }

    fn close(&self) {
        self.locked(|state, after| {
            state.closed = true;
            let machine = state.store.machine();
            // Waiters first, and among them the last one first, so that no waiter is granted a permit only to lose it.
            let mut ids: Vec<_> = machine.waiters().map(|row| row.id).collect();
            ids.reverse();
            ids.extend(machine.holders().iter().map(|row| row.id));
            for id in ids {
                if let (_, Some(ticket)) = state.remove(id, Known::Nothing, after) {
                    ticket.fail(Error::Closed, after);
                    ticket.lose(LossReason::Closed, after);
                }
            }
        });
    }

    fn drained(self: Arc<Self>, _until: Moment) -> Later<()> {
        ready(Ok(()))
    }

    fn abandon(&self) {
        let mut after = After::default();
        let abandoned = self.state().store.forget_everyone();
        for ticket in abandoned.into_iter().flatten() {
            ticket.cancel(&mut after);
        }
        after.run();
    }

    /// Ends everything that depends on time. The rest continues to work.
    fn stop(&self, error: &Error) {
        let mut after = After::default();
        let mut state = self.state();
        let limited = state.timers.iter().filter_map(|(_, timer)| match timer {
            Timer::GiveUp(id) => Some(*id),
            Timer::Sweep => None,
        });
        let limited: Vec<_> = limited.collect();
        for id in limited {
            if let (_, Some(ticket)) = state.remove(id, Known::Nothing, &mut after) {
                ticket.fail(error.clone(), &mut after);
            }
        }
        for row in state.store.machine().holders() {
            // A permit that never expires stays valid.
            if let Some(ticket) = row.kept.as_ref().filter(|own| own.valid_until() != Moment::NEVER)
            {
                ticket.lose(LossReason::NotRenewed, &mut after);
            }
        }
        drop(state);
        after.run();
    }

    fn is_idle(&self) -> bool {
        let state = self.state();
        let (machine, limits) = (state.store.machine(), state.store.machine().limits());
        machine.is_empty() && limits.can_be_forgotten(state.store.now())
    }

    fn steer(&self, steer: Steer, declares: bool) -> Later<Steered> {
        let declares = declares && steer != Steer::Forget;
        let capacity = declares.then(|| self.common.capacity());
        ready(self.locked(|state, after| {
            if state.closed {
                return Err(Error::Closed);
            }
            let State { store, effects, .. } = state;
            let outcome = store.steer(&Command::Steer { capacity, steer }, effects);
            state.settle(after);
            match outcome {
                Outcome::Steered(steered) => Ok(steered),
                other => Err(Error::internal(format!(
                    "unexpected answer to a change of limits: {other:?}"
                ))),
            }
        }))
    }

    fn position(&self, id: AcquisitionId) -> Later<Option<usize>> {
        ready(Ok(self.state().store.machine().position(id)))
    }

    fn stats(&self, waiters: Range<usize>) -> Later<SemaphoreStats> {
        let state = self.state();
        let now = state.store.now();
        let label = |kept: &Kept| kept.as_ref().and_then(|ticket| ticket.semaphore.label.clone());
        let machine = state.store.machine();
        ready(Ok(SemaphoreStats::of(&self.common.name, machine, now, waiters, label)))
    }
}

impl fmt::Debug for InProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcessName").field("name", &self.common.name).finish_non_exhaustive()
    }
}
