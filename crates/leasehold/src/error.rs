//! The error type of the whole library. It has one variant for each way in which a caller can react.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Primitive;

/// An error of this library.
///
/// Contention is not an error: while another holder has the permit, [`try_acquire`](crate::Semaphore::try_acquire)
/// returns `None`, and an acquire waits.
///
/// The `# Errors` section of each function lists the variants that it can return. [`Error::Internal`] is not listed
/// there: it reports a bug, and any function may return it.
///
/// ```
/// use leasehold::{Client, Error};
///
/// let error = Client::memory().semaphore("", 5).build().unwrap_err();
/// assert!(matches!(error, Error::InvalidArgument { argument: "name", .. }));
/// assert_eq!(error.to_string(), "invalid name: it is empty; the minimum is one character");
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// An argument is invalid.
    ///
    /// Nothing was changed. Correct the call.
    #[non_exhaustive]
    InvalidArgument {
        /// The name of the argument.
        argument: &'static str,
        /// What is wrong with the argument, and which values are allowed.
        problem: String,
    },
    /// What the store contains under this name belongs to another program, or cannot be read.
    ///
    /// Choose another name or namespace.
    #[non_exhaustive]
    ForeignData {
        /// The semaphore's or pool's name, or the lock's key.
        ///
        /// Empty if it is not known.
        name: String,
        /// What the store contains, and what to do about it.
        problem: String,
    },
    /// An operator has pinned the capacity of the semaphore, so it was not set.
    ///
    /// Unpin it, or pin another capacity.
    #[non_exhaustive]
    Pinned {
        /// The semaphore's name.
        name: String,
        /// The capacity to which it is pinned.
        capacity: u32,
    },
    /// The semaphore is held or waited for, so it was not forgotten.
    ///
    /// Drain it first, and cancel the waiters.
    #[non_exhaustive]
    InUse {
        /// The semaphore's name.
        name: String,
        /// The number of permits that are held.
        held: u32,
        /// The number of waiters.
        waiting: usize,
    },
    /// The store knows no semaphore of this name, so there was nothing to change.
    ///
    /// It was never used, or it was forgotten. Correct the name.
    #[non_exhaustive]
    Unknown {
        /// The semaphore's name.
        name: String,
    },
    /// The permit weighs more than the capacity, so it cannot be granted.
    ///
    /// Ask for less, or raise the capacity.
    #[non_exhaustive]
    TooHeavy {
        /// The semaphore's name.
        name: String,
        /// The weight of the permit.
        weight: u32,
        /// The capacity of the semaphore.
        capacity: u32,
    },
    /// A call that blocks its thread was made on a thread of a runtime.
    ///
    /// It would stop the tasks of the runtime, so nothing was done. Await the future, or make the call on another thread.
    #[non_exhaustive]
    WrongThread {
        /// Which thread it is, and what to do instead.
        problem: String,
    },
    /// Nothing became free within the time limit, or before the retries were used up.
    ///
    /// Try again later, or wait longer.
    #[non_exhaustive]
    TimedOut {
        /// What the call tried to acquire.
        primitive: Primitive,
        /// The semaphore's or pool's name, or the lock's key.
        name: String,
        /// How long the call was allowed to wait, or how long it waited if it used up its retries before.
        limit: Duration,
        /// For a pool: how many pool leases were held at the end.
        held: Option<u32>,
        /// For a pool: its capacity.
        capacity: Option<u32>,
        /// For a permit: how long after the time limit the [rate](crate::SemaphoreBuilder::rate) allows the next start,
        /// if the rate is known to be the reason.
        next_token: Option<Duration>,
    },
    /// Permits were still held when the time limit of a [drain](crate::Semaphore::drain) passed.
    ///
    /// The semaphore stays paused. Drain it again, or resume it.
    #[non_exhaustive]
    NotDrained {
        /// The semaphore's name.
        name: String,
        /// How long the drain was allowed to wait.
        limit: Duration,
    },
    /// The wait was cancelled, because a client released its id with
    /// [`Semaphore::release`](crate::Semaphore::release).
    #[non_exhaustive]
    Cancelled {
        /// The semaphore's name.
        name: String,
        /// The id of the acquire that waited.
        id: String,
    },
    /// The permit, lock or pool lease is no longer held.
    ///
    /// Stop the work that depends on it.
    #[non_exhaustive]
    Lost {
        /// What was held.
        primitive: Primitive,
        /// The semaphore's or pool's name, or the lock's key.
        name: String,
        /// The id of the permit or pool lease in the store.
        ///
        /// For a lock, a hash of its id: see
        /// [`LockInfo::id_hash`](crate::LockInfo::id_hash).
        id: String,
        /// Why it was lost.
        reason: LossReason,
    },
    /// The client was closed.
    ///
    /// Open another one.
    Closed,
    /// The store cannot be reached, or does not answer in time.
    ///
    /// Try again later.
    #[non_exhaustive]
    Unavailable {
        /// What was tried, and on which store.
        ///
        /// It never contains a secret.
        attempt: String,
        /// True if the store did not answer in time; false if connecting failed or the connection was lost.
        timed_out: bool,
        /// How long the store has not answered, if that is known.
        silent_for: Option<Duration>,
        /// The underlying error, if there is one: an [`io::Error`](std::io::Error) if a connection failed.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
    /// The store denied access, or the client is read-only.
    ///
    /// Correct the credentials, obtain the permission, or open another client.
    #[non_exhaustive]
    Denied {
        /// What was denied, and what would allow it.
        problem: String,
    },
    /// The disk or the memory of the store is full, or the server cannot save its data.
    ///
    /// Make room, and try again.
    #[non_exhaustive]
    NoRoom {
        /// What is full, and what would make room.
        problem: String,
    },
    /// The file or server cannot be used as a store.
    ///
    /// For example, it is damaged, of an unsupported version, on a network file system, a read-only replica, or of
    /// another kind than the URL says. Repair it, or choose another store.
    #[non_exhaustive]
    Unusable {
        /// Why it cannot be used, and what to do about it.
        problem: String,
    },
    /// The client's background thread is not running: it could not be started, it has ended, or the process was forked.
    ///
    /// Open another client.
    #[non_exhaustive]
    Stopped {
        /// Why the thread is not running.
        problem: String,
    },
    /// A bug in this library.
    ///
    /// Please report it.
    #[non_exhaustive]
    Internal {
        /// What was found.
        problem: String,
    },
}

impl Error {
    /// Returns whether a retry may succeed, because the store was unreachable or not ready.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    pub(crate) fn unavailable(
        attempt: impl Into<String>,
        timed_out: bool,
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Unavailable { attempt: attempt.into(), timed_out, silent_for: None, source }
    }

    pub(crate) fn invalid(argument: &'static str, problem: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, problem: problem.into() }
    }

    /// `problem` names the key or file. A caller that knows the name adds it with [`in_name`](Self::in_name).
    pub(crate) fn foreign(problem: impl Into<String>) -> Self {
        Self::ForeignData { name: String::new(), problem: problem.into() }
    }

    /// Returns the error with this name, if it is about what the store contains.
    pub(crate) fn in_name(mut self, about: &str) -> Self {
        if let Self::ForeignData { name, .. } = &mut self {
            about.clone_into(name);
        }
        self
    }

    pub(crate) fn internal(problem: impl Into<String>) -> Self {
        Self::Internal { problem: problem.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument { argument, problem } => {
                write!(f, "invalid {argument}: {problem}")
            }
            Self::ForeignData { name, problem } if name.is_empty() => f.write_str(problem),
            Self::ForeignData { name, problem } => write!(f, "{name:?}: {problem}"),
            Self::Pinned { name, capacity } => {
                write!(f, "{name:?} is pinned to {capacity}: unpin it, or pin another capacity")
            }
            Self::InUse { name, held, waiting } => {
                write!(f, "{name:?} is in use: {held} held, {waiting} waiting: ")?;
                f.write_str("drain it first, and cancel the waiters")
            }
            Self::Unknown { name } => write!(f, "{name:?} was never used, and has no limits"),
            Self::TooHeavy { name, weight, capacity } => {
                write!(f, "the weight is {weight}; the capacity of {name:?} is {capacity}: ")?;
                f.write_str("ask for less, or raise the capacity")
            }
            Self::TimedOut { primitive: Primitive::Lock, name, limit: Duration::ZERO, .. } => {
                write!(f, "the lock {name:?} is held")
            }
            Self::TimedOut { primitive: Primitive::Lock, name, limit, .. } => {
                write!(f, "the lock {name:?} was not acquired within {limit:?}")
            }
            Self::TimedOut { primitive, name, limit: Duration::ZERO, held: None, .. } => {
                write!(f, "no {} of {name:?} is free", primitive.grant())
            }
            Self::TimedOut { primitive, name, limit, held, capacity, next_token } => {
                write!(f, "no {} of {name:?} was acquired within {limit:?}", primitive.grant())?;
                if let (Some(held), Some(capacity)) = (held, capacity) {
                    write!(f, ": {held} of {capacity} are held")?;
                }
                if let Some(next) = next_token {
                    let advice =
                        "a rate stays until it is changed or removed, for example with clear_rate";
                    write!(f, ": its rate allows the next start in {next:.1?}; {advice}")?;
                }
                Ok(())
            }
            Self::NotDrained { name, limit } => {
                write!(f, "{name:?} was not drained within {limit:?}: permits are still held")
            }
            Self::Cancelled { name, id } => {
                write!(f, "the wait for {name:?} was cancelled: {id} was released by its id")
            }
            Self::Lost { primitive: Primitive::Lock, name, reason, .. } => {
                write!(f, "the lock {name:?} was lost: {reason}")
            }
            Self::Lost { primitive, name, id, reason } => {
                write!(f, "{} {id} of {name:?} was lost: {reason}", primitive.grant())
            }
            Self::Closed => f.write_str("the client was closed: open another one"),
            Self::Unavailable { attempt, timed_out, silent_for, .. } => {
                match (silent_for, timed_out) {
                    (Some(span), true) => write!(f, "{attempt}: no answer for {span:.1?}"),
                    (Some(span), false) => write!(f, "{attempt}: unreachable for {span:.1?}"),
                    (None, true) => write!(f, "{attempt}: no answer in time"),
                    (None, false) => write!(f, "{attempt}: the store cannot be reached"),
                }
            }
            Self::WrongThread { problem }
            | Self::Stopped { problem }
            | Self::Denied { problem }
            | Self::NoRoom { problem }
            | Self::Unusable { problem } => f.write_str(problem),
            Self::Internal { problem } => write!(f, "internal error: {problem}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unavailable { source: Some(source), .. } => Some(source),
            _ => None,
        }
    }
}

/// Why a permit, a lock or a pool lease was lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LossReason {
    /// It was held for as long as its TTL allows.
    TtlEnded,
    /// It has no guard, and its lease had ended when it was renewed or released by its id.
    LeaseEnded,
    /// It could not be renewed in time, so the store may have granted it to another holder.
    NotRenewed,
    /// The store no longer has it.
    ///
    /// Another client or an operator released it by its id, it expired there, or the store lost its data.
    Missing,
    /// Its guard was released, dropped or detached, or this client released it by its id.
    Released,
    /// Its client was closed.
    Closed,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TtlEnded => "its TTL ended",
            Self::LeaseEnded => "its lease ended",
            Self::NotRenewed => "it could not be renewed in time",
            Self::Missing => "it is no longer in the store",
            Self::Released => "it was released",
            Self::Closed => "its client was closed",
        })
    }
}
