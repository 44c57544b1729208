//! The interface between the engine and the stores. Its unit is the atomic transition.
//!
//! A store in this process answers at once, under the engine's own lock ([`memory`]). A store that other processes
//! share implements [`RemoteBackend`]: the engine's sender packs commands into a request, and the store answers it
//! later. Everything above this interface (waiting, packing, renewals, validity, timeouts, guards) is written once, in
//! the engine. What a store can do is a value, [`Profile`].

// Without a remote store, the code that serves only such stores is unused.
#![cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]

use std::pin::Pin;
use std::sync::Arc;

use crate::clock::{Moment, Span};

use crate::machine::lock::{LockCommand, LockOutcome, Record};
use crate::machine::pool::PoolQuery;
use crate::machine::pool::{PoolCommand, PoolOutcome};
use crate::machine::{Command, Declared, Held, LimitsChanged, Outlook, Reply, Subject};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error, LockId};

#[cfg(test)]
mod differential;
#[cfg(all(feature = "local", target_os = "linux"))]
pub(crate) mod local;
pub(crate) mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(test)]
pub(crate) mod simulated;
mod threads;

/// A future that any thread can poll.
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// The clock that decides when a lock expires.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum TimeAuthority {
    /// The server's clock, for all clients.
    Server,
    /// The host's clock, for all of its processes.
    Host,
    /// The clock of this process, because there is no other.
    Process,
}

/// The properties of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    /// The kind of store in one word, for users.
    pub(crate) kind: &'static str,
    /// Whether a holder can die without the store noticing. If so, leases have to be renewed.
    pub(crate) needs_renewals: bool,
    /// The clock that decides when something expires.
    pub(crate) time_authority: TimeAuthority,
}

impl Profile {
    /// How much earlier than the store the holder of a lock or a pool lease ends its own validity, because clocks run
    /// at different speeds. A store on this host reads the same clock, but stores the times of locks in whole
    /// milliseconds.
    ///
    /// `None` if the margin follows from the lease.
    pub(crate) fn margin_of_leases(&self) -> Option<Span> {
        (self.time_authority != TimeAuthority::Server).then(|| Span::from_millis(1))
    }
}

/// The server that a request goes to. A store without several primaries has only one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Destination(pub(crate) u32);

impl Destination {
    pub(crate) const ONLY: Self = Self(0);
}

/// The part of a store that keeps a name, a key or an id. The slot never changes, but the server that serves it may.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Slot(pub(crate) u16);

impl Slot {
    pub(crate) const ONLY: Self = Self(0);
}

/// One part of a request: several commands for one name, or one command for a lock or a pool.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    Semaphore {
        name: Name,
        /// The client's newest declaration. The capacity is 0 if the client never declared one.
        declared: Declared,
        commands: Vec<Command>,
        /// What the client expects of the name.
        outlook: Outlook,
    },
    Lock(LockCommand),
    Pool(PoolCommand),
}

impl Part {
    /// The number of ids that the part concerns.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Semaphore { commands, .. } => commands.len(),
            Self::Lock(_) | Self::Pool(_) => 1,
        }
    }

    pub(crate) fn subject(&self) -> Subject<'_> {
        match self {
            Self::Semaphore { name, .. } => Subject::Semaphore(name),
            Self::Lock(command) => command.subject(),
            Self::Pool(command) => Subject::Pool(&command.pool),
        }
    }

    /// Returns the error with the name or key that the part is about, if the client knows it.
    pub(crate) fn named_in(&self, error: Error) -> Error {
        match self.subject() {
            Subject::Semaphore(name) | Subject::Lock(name) | Subject::Pool(name) => {
                error.in_name(name.as_str())
            }
            Subject::LockId(_) => error,
        }
    }
}

/// The answer of a store to one part.
#[derive(Debug)]
pub(crate) enum Answer {
    Semaphore(Reply),
    Lock(LockOutcome),
    Pool(PoolOutcome),
    /// Nothing was applied, because another destination serves this part now.
    Elsewhere,
    /// Nothing was applied. The destination serves other parts, but cannot serve this one at the moment.
    NotNow,
}

/// The answers of a store to a request, in the order of the parts.
pub(crate) type Answers = Vec<Result<Answer, Error>>;

/// A store that other processes share.
pub(crate) trait RemoteBackend: Send + Sync {
    fn profile(&self) -> Profile;

    /// The address of the store, without secrets.
    fn address(&self) -> &str;

    /// Starts the store. The engine calls this once, in the runtime of its thread, before anything else. The store
    /// sends its events to `report`.
    fn start(&self, client: ClientId, report: Report);

    /// Returns the slot in which the store keeps this name, key or id.
    fn slot(&self, _subject: Subject<'_>) -> Slot {
        Slot::ONLY
    }

    /// Returns the server that serves a slot now. It changes only before [`Event::Rerouted`], or with
    /// [`Answer::Elsewhere`].
    fn destination(&self, _slot: Slot) -> Destination {
        Destination::ONLY
    }

    /// Returns [`Error::InvalidArgument`] if the store cannot keep anything under this name.
    fn check(&self, _subject: Subject<'_>) -> Result<(), Error> {
        Ok(())
    }

    /// Applies every command of every part, in order. If the whole request fails, the error is [`Error::Unavailable`],
    /// and any number of its commands may have been applied. If one part fails, the other parts are not affected.
    ///
    /// Two requests to one destination are applied in the order in which their futures were first polled, unless the
    /// connection is replaced in between.
    fn apply(&self, to: Destination, request: &Arc<[Part]>) -> BoxFuture<Answers>;

    /// Returns whether any thread may call [`apply`](Self::apply) and poll its future for the first time, which sends
    /// the request. Otherwise only the engine's thread may do that.
    fn sends_from_any_thread(&self) -> bool {
        false
    }

    /// Reports that the destination has been silent for too long. The store replaces the connection, if there is one.
    fn suspect(&self, _destination: Destination) {}

    /// Reports that the destination is unusually silent. The store checks whether another server has taken its place,
    /// if that is possible, and keeps the connection. Called again and again while the silence lasts.
    fn doubt(&self, _destination: Destination) {}

    /// Returns the number of waiters ahead of `id`. This query, like those that follow, fails with
    /// [`Error::Unavailable`] if one of its steps is not answered within the answer timeout.
    fn position(&self, name: &Name, id: AcquisitionId) -> BoxFuture<Option<usize>>;

    /// Returns the limits of a name. The capacity is 0 if no client has declared one.
    fn limits(&self, name: &Name) -> BoxFuture<SemaphoreLimits>;

    /// Removes a holder or waiter of another program that shares the name. Returns whether it was found.
    fn release_member(&self, _name: &Name, _id: &str) -> BoxFuture<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Changes the limits of a name, by [`Command::ChangeLimits`]. The command has no sender, so waiters of this client that
    /// are granted a permit by it are woken like all others.
    fn change_limits(&self, name: &Name, change: Command) -> BoxFuture<LimitsChanged>;

    /// Looks up the key of the lock that this id holds. Returns `None` if no lookup is needed, because the store finds
    /// the key when it applies the command.
    fn key_of_lock(&self, _id: LockId) -> Option<BoxFuture<Option<Name>>> {
        None
    }

    fn stats(&self, query: Query) -> BoxFuture<Vec<SemaphoreStats>>;

    /// Returns the held locks, ordered by key, at most `limit` of them. Changes nothing.
    fn list_locks(&self, limit: usize) -> BoxFuture<Vec<Record>>;

    /// Returns the pools that have members, ordered by name. Changes nothing.
    fn list_pools(&self, which: PoolQuery) -> BoxFuture<Vec<PoolStats>>;

    /// Returns the clients of the store, ordered by id. Changes nothing.
    fn list_clients(&self, limit: usize) -> BoxFuture<Vec<ClientInfo>>;

    /// The file descriptor whose lock proves that this client is alive (local store only).
    #[cfg(unix)]
    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

/// An event that a store reports by itself.
#[derive(Debug)]
pub(crate) enum Event {
    /// This waiter was granted this permit, at this moment or later. Without the permit and the moment, the age of the
    /// grant is unknown, and the client has to query the store.
    Granted(Name, AcquisitionId, Option<(Held, Moment)>),
    /// The first waiter belongs to this client and waits for a token, which arrives after this time.
    Token(Name, Span),
    /// Another client has released this id.
    Evicted(Name, AcquisitionId),
    /// The lock with this key was released.
    Unlocked(Name),
    /// Requests can be sent to this destination.
    Connected {
        to: Destination,
        /// Whether it was connected before, so that wake-ups may have been missed.
        again: bool,
        /// Whether the server may be another one than before, or may have restarted, so that it may lack what the
        /// former server has answered.
        other: bool,
        /// Whether a request that was sent over an earlier connection may still be applied.
        stragglers: bool,
    },
    /// Requests cannot be sent to this destination until [`Connected`](Self::Connected).
    Disconnected(Destination, Error),
    /// Wake-ups for this slot may have been missed.
    Missed(Slot),
    /// Some slots may have another destination. The store has closed its connections to the destinations in `gone`.
    Rerouted { gone: Vec<Destination> },
}

/// The function that a store calls with its events. It never blocks.
pub(crate) type Report = Arc<dyn Fn(Event) + Send + Sync>;
