//! The seam: what the engine needs of a store, drawn at the atomic transition.
//!
//! A store either answers at once, under the engine's own lock ([`Store::Here`]), or later, over a
//! connection or a file ([`Store::Away`]). Everything above this line (waiting, batches, renewals,
//! validity, timeouts, guards) is written once, in the engine.

// Without a store that is away, what serves only such stores is not used.
#![cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]

use std::pin::Pin;
use std::sync::Arc;

use crate::clock::Span;
use crate::machine::lock::{Acquired, By, Record, Verdict};
use crate::machine::{Command, Effects, Outcome, Terms, pool};
use crate::name::Name;
use crate::pool::PoolStats;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error, LockId};

#[cfg(test)]
mod differential;
#[cfg(all(feature = "local", target_os = "linux"))]
pub(crate) mod local;
pub(crate) mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(test)]
pub(crate) mod simulated;

/// A future that the engine's thread can run.
pub(crate) type Later<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// Where one client's permits are kept.
#[derive(Clone)]
pub(crate) enum Backend {
    Memory(Arc<memory::Memory>),
    Away(Arc<dyn AwayBackend>),
}

impl Backend {
    /// Whether a holder can die without the store noticing.
    pub(crate) fn wants_heartbeats(&self) -> bool {
        match self {
            Self::Memory(_) => false,
            Self::Away(backend) => !backend.is_on_this_host(),
        }
    }

    /// How much earlier than the store the holder of a lock or a lease ends its own validity, for clocks that do not run
    /// alike. The clock of a store on this host is ours, but locks are kept to whole milliseconds.
    pub(crate) fn margin(&self, valid_for: Span) -> Span {
        if !self.wants_heartbeats() {
            return Span::from_millis(1);
        }
        Terms { heartbeat: Some(valid_for), ttl: None }.margin()
    }

    pub(crate) fn locks(&self, client: ClientId) -> Arc<dyn LockStore> {
        match self {
            Self::Memory(memory) => memory.locks(),
            Self::Away(backend) => backend.locks(client),
        }
    }

    pub(crate) fn pools(&self) -> Arc<dyn PoolStore> {
        match self {
            Self::Memory(memory) => memory.pools(),
            Self::Away(backend) => backend.pools(),
        }
    }

    pub(crate) fn semaphore(&self, name: &Name, client: ClientId) -> Store {
        match self {
            Self::Memory(memory) => Store::Here(Box::new(memory.semaphore(client))),
            Self::Away(backend) => Store::Away(backend.semaphore(name, client)),
        }
    }
}

/// Where one name is kept.
pub(crate) enum Store {
    Here(Box<memory::MemorySemaphore>),
    Away(Arc<dyn AwaySemaphore>),
}

/// A store that other processes share.
pub(crate) trait AwayBackend: Send + Sync {
    /// Called once, in the runtime of the engine's thread, before anything else: where wake-ups go.
    fn start(&self, client: ClientId, wake_ups: WakeUps);

    /// The transitions of one name.
    fn semaphore(&self, name: &Name, client: ClientId) -> Arc<dyn AwaySemaphore>;

    /// What is held and queued, of the names asked for or of all.
    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>>;

    /// All locks.
    fn locks(&self, client: ClientId) -> Arc<dyn LockStore>;

    /// All pools.
    fn pools(&self) -> Arc<dyn PoolStore>;

    /// What kind of store it is, in one word.
    fn kind(&self) -> &'static str;

    /// Whether it is shared by the processes of this host alone. Then its clock is ours, and it knows by itself who is
    /// dead.
    fn is_on_this_host(&self) -> bool {
        false
    }

    /// What the client counts as alive by, for as long as somebody has it open.
    #[cfg(unix)]
    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

/// The transitions of one name in a store that other processes share.
pub(crate) trait AwaySemaphore: Send + Sync {
    /// Applies all commands, atomically one by one, or all at once. The outcomes are in the order of the
    /// commands. After an error any of them may have been applied, or none. If the future is dropped, it was not
    /// answered in time: whatever it went over is not to be trusted.
    fn apply(&self, commands: Vec<Command>) -> Later<Reply>;

    /// How many waiters come before this one.
    fn position(&self, id: AcquisitionId) -> Later<Option<usize>>;
}

/// The locks of a store. Each call is one attempt, and one atomic step.
pub(crate) trait LockStore: Send + Sync {
    /// For so many milliseconds.
    fn acquire(&self, key: &Name, id: LockId, ttl: u64, wake: Wake) -> Later<Acquired>;

    /// Answers the key that came free where the store tells nobody of it.
    fn release(&self, id: LockId) -> Later<Verdict<Option<Name>>>;

    /// Answers the new end, in milliseconds of the store's clock.
    fn extend(&self, id: LockId, ttl: u64) -> Later<Verdict<u64>>;

    fn is_locked(&self, key: &Name, clean_up: bool) -> Later<bool>;

    fn lookup(&self, by: By) -> Later<Option<Record>>;

    /// Locks that are held, by key; no more than so many. Changes nothing.
    fn list(&self, limit: usize) -> Later<Vec<Record>>;
}

/// The pools of a store. Each call is one atomic step.
pub(crate) trait PoolStore: Send + Sync {
    fn ask(&self, ask: pool::Ask) -> Later<pool::Answer>;

    /// Pools that have members, by name; no more than so many. Changes nothing.
    fn list(&self, limit: usize) -> Later<Vec<PoolStats>>;
}

/// When this client wants to be told of the next release of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wake {
    Never,
    /// If this acquire finds it locked.
    IfLocked,
    /// Whatever comes of this acquire: others of the client wait, too.
    Always,
}

/// What a store answers to a batch.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) effects: Effects,
    /// Until somebody's time is up: then a sweep is worth its trip.
    pub(crate) next_expiry: Option<Span>,
}

/// What a store tells the engine unasked.
#[derive(Debug)]
pub(crate) enum WakeUp {
    /// This waiter was granted a permit and has to claim it.
    Granted(Name, AcquisitionId),
    /// Somebody else has released this id. Only where no sign of life would find that out.
    #[cfg_attr(not(all(feature = "local", target_os = "linux")), allow(dead_code))]
    Evicted(Name, AcquisitionId),
    /// The lock with this key came free.
    Released(Name),
    /// The connection is new: wake-ups may have been missed.
    Reconnected,
}

/// Where a store sends its wake-ups. Never blocks.
pub(crate) type WakeUps = Box<dyn Fn(WakeUp) + Send + Sync>;
