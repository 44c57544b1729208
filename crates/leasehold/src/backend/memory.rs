//! The memory store. It runs the machine itself, under the engine's lock for the name.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Answer, Part};
use crate::clock::{self, Moment, Span, Time};
use crate::machine::lock::{LockCommand, LockMachine, LockOutcome, Record};
use crate::machine::pool::PoolQuery;
use crate::machine::pool::{PoolCommand, PoolMachine, PoolOutcome};
use crate::machine::{
    Circumstances, Command, Declared, Effects, Held, InMemory, Machine, Outcome, Reach,
    ReleaseHint, Role, Share, Terms,
};
use crate::manual_clock::Clock;
use crate::stats::PoolStats;
use crate::{AcquisitionId, ClientId, Error};

/// State that all names of one client share, and the client's locks and pools.
#[derive(Debug)]
pub(crate) struct Memory {
    locks: Mutex<LockMachine>,
    pools: Mutex<PoolMachine>,
    /// Not below the last fence of any name that was removed. A name that is used again continues above its last fence
    /// (invariant 4). It starts at the wall clock, so that fences also grow across restarts.
    fence_floor: AtomicU64,
    pub(crate) clock: Clock,
}

impl Memory {
    pub(crate) fn new(clock: Clock) -> Self {
        let floor = clock::wall_micros();
        let locks = Mutex::new(LockMachine::with_fences_above(floor));
        Self { locks, pools: Mutex::default(), fence_floor: AtomicU64::new(floor), clock }
    }

    pub(crate) fn semaphore<T: Clone + Default>(
        self: &Arc<Self>,
        client: ClientId,
    ) -> MemorySemaphore<T> {
        let machine = Machine::new(self.fence_floor.load(Ordering::Relaxed));
        MemorySemaphore { machine, client, memory: self.clone(), ends: false }
    }

    /// Applies one command of a lock or a pool.
    pub(crate) fn apply(&self, part: &Part) -> Result<Answer, Error> {
        match part {
            Part::Lock(command) => Ok(Answer::Lock(self.apply_lock(command))),
            Part::Pool(command) => Ok(Answer::Pool(self.apply_pool(command))),
            Part::Semaphore { .. } => Err(Error::internal("a semaphore has its own machine")),
        }
    }

    fn apply_lock(&self, command: &LockCommand) -> LockOutcome {
        let (mut machine, now) = self.locks();
        let Ok(outcome) = machine.apply(command, now);
        outcome
    }

    pub(crate) fn list_locks(&self, limit: usize) -> Vec<Record> {
        let (machine, now) = self.locks();
        machine.list(limit, now)
    }

    fn locks(&self) -> (MutexGuard<'_, LockMachine>, u64) {
        let mut machine = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.steady_wall_micros() / 1000;
        let Ok(_) = machine.remove_expired(now);
        (machine, now)
    }

    fn apply_pool(&self, command: &PoolCommand) -> PoolOutcome {
        let (mut machine, now) = self.pools();
        machine.apply(command, now)
    }

    pub(crate) fn list_pools(&self, which: &PoolQuery) -> Vec<PoolStats> {
        let (machine, now) = self.pools();
        machine.list(which).into_iter().map(|pool| PoolStats::of(pool, now)).collect()
    }

    fn pools(&self) -> (MutexGuard<'_, PoolMachine>, Time) {
        let machine = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        (machine, Time::from_micros(self.clock.steady_wall_micros()))
    }
}

/// One name. A memory store has one client, so every waiter belongs to the sender. A grant is therefore returned in the
/// reply and is already confirmed; no wake-up is ever sent. `T` is the tag of an acquisition.
#[derive(Debug)]
pub(crate) struct MemorySemaphore<T: Clone + Default> {
    machine: Machine<InMemory<T>>,
    client: ClientId,
    memory: Arc<Memory>,
    /// Whether any acquire of this name ever had a TTL. That acquire may still be waiting: its deadline is set when it
    /// is granted.
    ends: bool,
}

impl<T: Clone + Default> MemorySemaphore<T> {
    #[inline]
    #[allow(clippy::too_many_arguments)] // the fields of the command
    pub(crate) fn enqueue(
        &mut self,
        id: AcquisitionId,
        declared: Declared,
        wait: bool,
        terms: Terms,
        share: Share,
        tag: impl FnOnce(Option<&Held>) -> T,
        effects: &mut Effects<T>,
    ) -> Outcome {
        self.ends |= terms.ttl.is_some();
        let now = self.time(declared.rate.is_some());
        self.call(now, effects, |machine, call| {
            machine.enqueue(id, declared, wait, terms, share, tag, call)
        })
    }

    /// Enqueues `id` if that only adds a holder: see [`Machine::hold_at_once`].
    #[inline]
    pub(crate) fn hold_at_once(
        &mut self,
        id: AcquisitionId,
        capacity: (u32, bool),
    ) -> Option<Held> {
        self.machine.hold_at_once(id, capacity, || self.memory.clock.coarse())
    }

    /// Releases `id` if that only removes a holder: see [`Machine::remove_at_once`].
    #[inline]
    pub(crate) fn remove_at_once(&mut self, id: AcquisitionId) -> Option<(Role, T)> {
        self.machine.remove_at_once(id)
    }

    #[inline]
    pub(crate) fn release(
        &mut self,
        id: AcquisitionId,
        hint: ReleaseHint,
        effects: &mut Effects<T>,
    ) -> (Role, T) {
        // If nobody waits and nothing has a deadline, a release does not depend on the time.
        if let Some(removed) = self.remove_at_once(id) {
            return removed;
        }
        let now = self.time(false);
        let (role, tag) = self.call(now, effects, |machine, call| machine.release(id, hint, call));
        (role, tag.unwrap_or_default())
    }

    /// Changes the limits of the name.
    pub(crate) fn change_limits(&mut self, change: &Command, effects: &mut Effects<T>) -> Outcome {
        let now = self.time(true);
        self.call(now, effects, |machine, call| machine.apply(change, call))
    }

    pub(crate) fn sweep(&mut self, effects: &mut Effects<T>) {
        let now = self.time(true);
        self.call(now, effects, |machine, call| machine.apply(&Command::Sweep, call));
    }

    /// Returns the current time. The coarse clock is enough when no deadline is checked or set.
    #[inline]
    fn time(&self, timed: bool) -> Time {
        if timed || self.ends || self.machine.is_timed() {
            self.now()
        } else {
            self.memory.clock.coarse()
        }
    }

    #[inline]
    fn call<O>(
        &mut self,
        now: Time,
        effects: &mut Effects<T>,
        command: impl FnOnce(
            &mut Machine<InMemory<T>>,
            &mut Circumstances<'_, T>,
        ) -> Result<O, Infallible>,
    ) -> O {
        let (confirm_within, wake) = (Span::from_millis(1), &mut |_, _: &_| Reach::Silent);
        let mut call =
            Circumstances { from: Some(self.client), now, confirm_within, wake, effects };
        let Ok(outcome) = command(&mut self.machine, &mut call);
        outcome
    }

    /// Returns the time until the next deadline, or until the first waiter gets a token, whichever is sooner.
    #[inline]
    pub(crate) fn next_change(&self) -> Option<Span> {
        if !self.machine.is_timed() {
            return None;
        }
        let now = self.now();
        let changes = [self.machine.next_expiry(), self.machine.next_token(now)];
        changes.into_iter().flatten().min().map(|at| at - now)
    }

    pub(crate) fn machine(&self) -> &Machine<InMemory<T>> {
        &self.machine
    }

    /// Replaces the machine with an empty one that continues above the last fence. Returns the tags
    /// of all holders and waiters.
    pub(crate) fn forget_everyone(&mut self) -> Vec<T> {
        let fresh = Machine::new(self.machine.last_fence());
        std::mem::replace(&mut self.machine, fresh).into_tags().collect()
    }

    pub(crate) fn tag_mut(&mut self, id: AcquisitionId) -> Option<&mut T> {
        self.machine.tag_mut(id)
    }

    pub(crate) fn now(&self) -> Time {
        self.memory.clock.fine()
    }

    /// The present on the clock of the engine.
    pub(crate) fn moment(&self) -> Moment {
        self.memory.clock.now()
    }
}

impl<T: Clone + Default> Drop for MemorySemaphore<T> {
    fn drop(&mut self) {
        self.memory.fence_floor.fetch_max(self.machine.last_fence(), Ordering::Relaxed);
    }
}
