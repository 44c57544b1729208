//! The seam between the engine and the stores, drawn at the atomic transition.
//!
//! A store in this process answers at once, under the engine's own lock ([`memory`]). A store that other processes
//! share implements [`RemoteBackend`]: the engine's sender packs commands into a request, and the store answers it
//! later. Everything above this line (waiting, packing, renewals, validity, time-outs, guards) is written once, in the
//! engine. What a store can do is a value, [`Profile`].

// Without a remote store, what serves only such stores is not used.
#![cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]

use std::pin::Pin;
use std::sync::Arc;

use crate::clock::{Moment, Span};
use crate::lock::TimeAuthority;
use crate::machine::lock::{LockCommand, LockOutcome, Record};
use crate::machine::pool::{PoolCommand, PoolOutcome};
use crate::machine::{Command, Declared, Effects, Held, Outcome, Steered, Terms};
use crate::name::Name;
use crate::pool::{PoolStats, Which};
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

#[cfg(test)]
mod differential;
#[cfg(all(feature = "local", target_os = "linux"))]
pub(crate) mod local;
pub(crate) mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(test)]
pub(crate) mod simulated;

/// A future that any thread can poll.
pub(crate) type Later<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// What a store is, and what it can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    /// In one word, for users.
    pub(crate) kind: &'static str,
    /// Whether a holder can die without the store noticing, so that its lease has to be renewed.
    pub(crate) needs_renewals: bool,
    /// Whose clock decides.
    pub(crate) time_authority: TimeAuthority,
}

impl Profile {
    /// By how much the holder of a lock or a pool lease ends its own validity before the store does, for clocks that
    /// run at different speeds. A store on this host reads the same clock, but keeps locks to whole milliseconds.
    pub(crate) fn margin(&self, valid_for: Span) -> Span {
        if self.time_authority != TimeAuthority::Server {
            return Span::from_millis(1);
        }
        Terms { lease: Some(valid_for), ttl: None }.margin()
    }
}

/// The server that a request goes to. There is one, until a store has several primaries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Destination(u16);

impl Destination {
    pub(crate) const ONLY: Self = Self(0);
}

/// One part of a request: some commands of one name, or one command of a lock or a pool.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    Semaphore {
        name: Name,
        /// What the client declared last; a capacity of 0 if it never did.
        declared: Declared,
        commands: Vec<Command>,
    },
    Lock(LockCommand),
    Pool(PoolCommand),
}

impl Part {
    /// How many ids it is about.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Semaphore { commands, .. } => commands.len(),
            Self::Lock(_) | Self::Pool(_) => 1,
        }
    }
}

/// What a store answers to one part.
#[derive(Debug)]
pub(crate) enum Answer {
    Semaphore(Reply),
    Lock(LockOutcome),
    Pool(PoolOutcome),
}

/// What a store answers to a request: part by part, in the order of the parts.
pub(crate) type Answers = Vec<Result<Answer, Error>>;

/// What a store answers to the commands of one name.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    /// In the order of the commands.
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) effects: Effects,
    /// If anybody waits: the time until the next lease ends in the store. It is worth asking again then.
    pub(crate) next_expiry: Option<Span>,
    /// If the first in the queue is the sender's own, and waits for a token and nothing else: the time until it comes.
    pub(crate) next_token: Option<Span>,
    /// Whether another program has members here. It hands permits on without waking this client.
    pub(crate) foreign: bool,
}

/// A store that other processes share.
pub(crate) trait RemoteBackend: Send + Sync {
    fn profile(&self) -> Profile;

    /// Where it is, without secrets.
    fn address(&self) -> &str;

    /// Called once, in the runtime of the engine's thread, before anything else. The store reports to `report`.
    fn start(&self, client: ClientId, report: Report);

    /// Where commands about this name or key go.
    fn destination(&self, _name: &Name) -> Destination {
        Destination::ONLY
    }

    /// Applies every command of every part, in order. An error of the whole request is [`Error::Unavailable`], and
    /// then any of its commands may have been applied, or none. An error of one part leaves the other parts alone.
    ///
    /// Two requests to one destination are applied in the order in which their answers were first polled, unless the
    /// connection is replaced in between.
    fn apply(&self, to: Destination, request: &Arc<[Part]>) -> Later<Answers>;

    /// Whether any thread may call [`apply`](Self::apply) and poll its result for the first time, which sends the request.
    /// Otherwise only the engine's thread does.
    fn sends_from_any_thread(&self) -> bool {
        false
    }

    /// The destination has been silent for longer than it should be: replace the connection, if there is one.
    fn suspect(&self, _destination: Destination) {}

    /// The number of waiters ahead of `id`. This question, like those that follow, fails with
    /// [`Error::Unavailable`] when one of its steps was not answered within the answer time-out.
    fn position(&self, name: &Name, id: AcquisitionId) -> Later<Option<usize>>;

    /// Removes a holder or waiter whose id is not one of ours, because another program shares the name. True if it was
    /// there.
    fn release_member(&self, _name: &Name, _id: &str) -> Later<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Changes the limits of a name, by [`Command::Steer`]. Nobody in particular is the sender: waiters of this client that
    /// are granted a permit by it are woken like others.
    fn steer(&self, name: &Name, steer: Command) -> Later<Steered>;

    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>>;

    /// The locks that are held, by key, at most `limit` of them. Changes nothing.
    fn list_locks(&self, limit: usize) -> Later<Vec<Record>>;

    /// The pools that have members, by name. Changes nothing.
    fn list_pools(&self, which: Which) -> Later<Vec<PoolStats>>;

    /// The file descriptor whose lock proves that this client is alive (local store only).
    #[cfg(unix)]
    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

/// What a store reports without being asked.
#[derive(Debug)]
pub(crate) enum Event {
    /// This waiter was granted a permit: what it was granted, at this moment or later. If the store cannot tell how long
    /// ago that was, the waiter has to ask.
    Granted(Name, AcquisitionId, Option<(Held, Moment)>),
    /// The first in the queue is this client's, and waits for a token: it comes after this time.
    Token(Name, Span),
    /// Another client has released this id. Only where no renewal would find that out.
    #[cfg_attr(not(all(feature = "local", target_os = "linux")), allow(dead_code))]
    Evicted(Name, AcquisitionId),
    /// The lock with this key was released.
    Unlocked(Name),
    /// Requests can be sent.
    Connected {
        to: Destination,
        /// It was connected before, so that wake-ups may have been missed.
        again: bool,
        /// A request that was sent over an earlier connection may still be applied.
        stragglers: bool,
    },
    /// Requests cannot be sent until [`Connected`](Self::Connected).
    Disconnected(Destination, Error),
}

/// Where a store reports events. Never blocks.
pub(crate) type Report = Box<dyn Fn(Event) + Send + Sync>;
