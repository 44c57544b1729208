//! The error type of the whole library. It has few variants, one for each way in which a caller can react.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An error of this library.
///
/// Contention is not an error: while another holder has the permit, [`try_acquire`](crate::Semaphore::try_acquire)
/// returns `None`, and an acquire waits.
///
/// The `# Errors` section of each function lists the variants that it can return. [`Error::Internal`] is not listed
/// there: it reports a bug, and any function may return it.
///
/// ```
/// use leasehold::{Client, ErrorKind};
///
/// let error = Client::memory().semaphore("", 5).build().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
/// assert_eq!(error.to_string(), "invalid name: it is empty; the minimum is one character");
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// An argument is invalid, or does not fit what the store contains: for example, another program uses the same keys
    /// on Redis. Nothing was changed. Correct the call.
    #[non_exhaustive]
    InvalidArgument {
        /// The name of the argument.
        what: &'static str,
        /// What is wrong with the argument, and which values are allowed.
        problem: String,
    },
    /// Nothing became free within the time limit, or before the retries were used up. Try again later, or wait longer.
    #[non_exhaustive]
    TimedOut {
        /// What the call waited for: `permit`, `lock`, `lease` or `drain`.
        what: &'static str,
        /// The semaphore's or pool's name, or the lock's key.
        name: String,
        /// How long the call was allowed to wait, or how long it waited if it used up its retries before.
        limit: Duration,
        /// For a pool: how many leases were held at the end, and the capacity.
        full: Option<(u64, u32)>,
        /// For a permit: how long after the time limit the [rate](crate::SemaphoreBuilder::rate) allows the next start,
        /// if the rate is known to be the reason.
        next_start: Option<Duration>,
    },
    /// The permit, lock or lease is no longer held. Stop the work that depends on it. Or the place in the queue was
    /// lost, because somebody cancelled the wait with [`Semaphore::release`](crate::Semaphore::release).
    #[non_exhaustive]
    Lost {
        /// What was lost: `permit`, `lock`, `lease`, or `place` for an acquire that waited.
        what: &'static str,
        /// The semaphore's or pool's name, or the lock's key.
        name: String,
        /// The id of the permit or lease in the store. For a lock, a hash of its id: see
        /// [`LockInfo::lock_id_hash`](crate::LockInfo::lock_id_hash).
        id: String,
        /// Why it was lost.
        reason: LossReason,
    },
    /// The client was closed. Open another one.
    Closed,
    /// The store cannot be reached, or does not answer in time. Try again later.
    #[non_exhaustive]
    Unavailable {
        /// What was tried, and on which store. It never contains a secret.
        what: String,
        /// True if the store did not answer in time; false if connecting failed or the connection was lost.
        timed_out: bool,
        /// How long the store has not answered, if that is known.
        silent_for: Option<Duration>,
        /// The underlying error, if there is one.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
    /// The store denied access or refused the request: for example because of wrong credentials, a missing permission,
    /// a full disk, or a read-only client. The message says what would allow it.
    #[non_exhaustive]
    Refused {
        /// What was refused, and what would allow it.
        what: String,
    },
    /// The client's background thread is not running: it could not be started, it has ended, or the process was forked.
    /// Open another client.
    #[non_exhaustive]
    Stopped {
        /// Why the thread is not running.
        what: String,
    },
    /// A bug in this library. Please report it.
    #[non_exhaustive]
    Internal {
        /// What was found.
        what: String,
    },
}

impl Error {
    /// Returns the kind of this error, named as in the lock interface of `SyncGuard`.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidArgument { .. } => ErrorKind::InvalidArgument,
            Self::TimedOut { .. } => ErrorKind::AcquisitionTimeout,
            Self::Lost { .. } | Self::Closed => ErrorKind::Aborted,
            Self::Unavailable { timed_out: true, .. } => ErrorKind::NetworkTimeout,
            Self::Unavailable { .. } | Self::Stopped { .. } => ErrorKind::ServiceUnavailable,
            Self::Refused { .. } => ErrorKind::AuthFailed,
            Self::Internal { .. } => ErrorKind::Internal,
        }
    }

    /// Returns whether a retry may succeed, because the store was unreachable or not ready.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    pub(crate) fn unavailable(
        what: impl Into<String>,
        timed_out: bool,
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Unavailable { what: what.into(), timed_out, silent_for: None, source }
    }

    pub(crate) fn invalid(what: &'static str, problem: impl Into<String>) -> Self {
        Self::InvalidArgument { what, problem: problem.into() }
    }

    pub(crate) fn internal(what: impl Into<String>) -> Self {
        Self::Internal { what: what.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument { what, problem } => write!(f, "invalid {what}: {problem}"),
            Self::TimedOut { what: "lock", name, limit: Duration::ZERO, .. } => {
                write!(f, "the lock {name:?} is held")
            }
            Self::TimedOut { what: "lock", name, limit, .. } => {
                write!(f, "the lock {name:?} was not acquired within {limit:?}")
            }
            Self::TimedOut { what: "drain", name, limit, .. } => {
                write!(f, "{name:?} was not drained within {limit:?}: permits are still held")
            }
            Self::TimedOut { what, name, limit: Duration::ZERO, full: None, .. } => {
                write!(f, "no {what} of {name:?} is free")
            }
            Self::TimedOut { what, name, limit, full, next_start } => {
                write!(f, "no {what} of {name:?} was acquired within {limit:?}")?;
                if let Some((held, capacity)) = full {
                    write!(f, ": {held} of {capacity} are held")?;
                }
                if let Some(next) = next_start {
                    let advice =
                        "a rate stays until it is changed or removed, for example with clear_rate";
                    write!(f, ": its rate allows the next start in {next:.1?}; {advice}")?;
                }
                Ok(())
            }
            Self::Lost { what: "lock", name, reason, .. } => {
                write!(f, "the lock {name:?} was lost: {reason}")
            }
            Self::Lost { what: "place", name, id, .. } => {
                write!(f, "the wait for {name:?} was cancelled: {id} was released by its id")
            }
            Self::Lost { what, name, id, reason } => {
                write!(f, "{what} {id} of {name:?} was lost: {reason}")
            }
            Self::Closed => f.write_str("the client was closed: open another one"),
            Self::Unavailable { what, timed_out, silent_for, .. } => {
                match (silent_for, timed_out) {
                    (Some(span), true) => write!(f, "{what}: no answer for {span:.1?}"),
                    (Some(span), false) => write!(f, "{what}: unreachable for {span:.1?}"),
                    (None, true) => write!(f, "{what}: no answer in time"),
                    (None, false) => write!(f, "{what}: the store cannot be reached"),
                }
            }
            Self::Stopped { what } | Self::Refused { what } => f.write_str(what),
            Self::Internal { what } => write!(f, "internal error: {what}"),
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

/// The code of an [`Error`]. Other programs that follow the same lock interface use the same codes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store cannot be reached, or the client's background thread is not running.
    ServiceUnavailable,
    /// The store denied access or refused the request.
    AuthFailed,
    /// An argument is invalid.
    InvalidArgument,
    /// The store did not answer in time.
    NetworkTimeout,
    /// Nothing became free within the time limit.
    AcquisitionTimeout,
    /// The operation ended early: the permit, lock or lease was lost, or the client was closed.
    Aborted,
    /// A bug in this library.
    Internal,
}

/// Why a permit, a lock or a lease was lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LossReason {
    /// It was held for as long as its TTL allows.
    TtlEnded,
    /// It could not be renewed in time, so the store may have granted it to another holder.
    NotRenewed,
    /// The store no longer has it: an operator or another client released it by its id, it expired there, or the store
    /// lost its data.
    Missing,
    /// This client released it, by its id or through its guard. For a place in the queue: any client, by its id.
    Released,
    /// Its client was closed.
    Closed,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TtlEnded => "its TTL ended",
            Self::NotRenewed => "it could not be renewed in time",
            Self::Missing => "it is no longer in the store",
            Self::Released => "it was released",
            Self::Closed => "its client was closed",
        })
    }
}
