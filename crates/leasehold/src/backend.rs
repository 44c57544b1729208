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
use crate::machine::{Command, Effects, Outcome};
use crate::name::Name;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

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
        matches!(self, Self::Away(_))
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

    /// A renewal was not answered in time: whatever it went over is not to be trusted.
    fn suspect(&self) {}
}

/// The transitions of one name in a store that other processes share.
pub(crate) trait AwaySemaphore: Send + Sync {
    /// Applies all commands, atomically one by one, or all at once. The outcomes are in the order of the
    /// commands. After an error any of them may have been applied, or none.
    fn apply(&self, commands: Vec<Command>) -> Later<Reply>;

    /// How many waiters come before this one.
    fn position(&self, id: AcquisitionId) -> Later<Option<usize>>;
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
    /// The connection is new: wake-ups may have been missed.
    Reconnected,
}

/// Where a store sends its wake-ups. Never blocks.
pub(crate) type WakeUps = Box<dyn Fn(WakeUp) + Send + Sync>;
