//! Locks in memory: the machine itself, behind a lock of ours.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::LockId;
use crate::backend::{Later, LockStore, Wake};
use crate::clock;
use crate::machine::lock::{Acquired, By, LockMachine, Record, Verdict};
use crate::name::Name;

#[derive(Debug)]
pub(crate) struct MemoryLocks {
    machine: Mutex<LockMachine>,
}

impl MemoryLocks {
    pub(super) fn new(fence_floor: u64) -> Self {
        Self { machine: Mutex::new(LockMachine::with_fences_above(fence_floor)) }
    }

    fn machine(&self) -> (MutexGuard<'_, LockMachine>, u64) {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let now = clock::steady_wall_micros() / 1000;
        machine.let_go(now);
        (machine, now)
    }
}

fn ready<T: Send + 'static>(answer: T) -> Later<T> {
    Box::pin(std::future::ready(Ok(answer)))
}

impl LockStore for MemoryLocks {
    /// Whoever waits is woken by the engine: there is one client here, and it sees every release.
    fn acquire(&self, key: &Name, id: LockId, ttl: u64, _wake: Wake) -> Later<Acquired> {
        let (mut machine, now) = self.machine();
        ready(machine.acquire(key, id, ttl, now))
    }

    fn release(&self, id: LockId) -> Later<Verdict<Option<Name>>> {
        let (mut machine, now) = self.machine();
        ready(machine.release(id, now).map(Some))
    }

    fn extend(&self, id: LockId, ttl: u64) -> Later<Verdict<u64>> {
        let (mut machine, now) = self.machine();
        ready(machine.extend(id, ttl, now))
    }

    fn is_locked(&self, key: &Name, clean_up: bool) -> Later<bool> {
        let (mut machine, now) = self.machine();
        ready(machine.is_locked(key, clean_up, now))
    }

    fn lookup(&self, by: By) -> Later<Option<Record>> {
        let (machine, now) = self.machine();
        ready(machine.lookup(&by, now).cloned())
    }

    fn list(&self, limit: usize) -> Later<Vec<Record>> {
        let (machine, now) = self.machine();
        ready(machine.list(limit, now))
    }
}
