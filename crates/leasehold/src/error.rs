//! One error for everything, with few variants, each named for what the caller does next.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What can go wrong.
///
/// That somebody else has the permit is not an error:
/// [`try_acquire`](crate::Semaphore::try_acquire) answers `None`, and an acquire waits.
///
/// ```
/// use leasehold::{Client, ErrorKind};
///
/// let error = Client::memory().semaphore("", 5).build().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
/// assert_eq!(error.to_string(), "invalid name: it is empty: give it at least one character");
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The call itself was wrong; nothing has happened. Correct it.
    #[non_exhaustive]
    InvalidArgument {
        /// Which argument.
        what: &'static str,
        /// What is wrong with it, and the bound it broke.
        problem: String,
    },
    /// Nothing came free in time. Try again later, or wait longer.
    #[non_exhaustive]
    TimedOut {
        /// What was waited for: a permit, a lock or a lease.
        what: &'static str,
        /// The semaphore's or pool's name, or the lock's key.
        name: String,
        /// How long the acquire was allowed to wait, or did wait if its retries were used up before.
        limit: Duration,
        /// Of a pool: how many leases were held at the end, and how many there are.
        full: Option<(u64, u32)>,
    },
    /// The permit, lock or lease is no longer yours. Stop what you do under it.
    #[non_exhaustive]
    Lost {
        /// What was lost: a permit, a lock or a lease.
        what: &'static str,
        /// The semaphore's or pool's name, or the lock's key.
        name: String,
        /// What named it in the store.
        id: String,
        /// How it was lost.
        reason: LossReason,
    },
    /// The client was closed. Make another one.
    Closed,
    /// The store cannot be reached, or does not answer. Try again later.
    #[non_exhaustive]
    Unavailable {
        /// What was tried, and on which store (never with its secrets).
        what: String,
        /// True if the store was reached but did not answer in time.
        timed_out: bool,
        /// How long the store has not answered, where that is known.
        silent_for: Option<Duration>,
        /// What the system says.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
    /// The store does not let us in, or not do this. Ask whoever runs it.
    #[non_exhaustive]
    Refused {
        /// What was refused, and what would allow it.
        what: String,
    },
    /// The client's background thread does not run: it could not be started, or the process was forked. Make another client.
    #[non_exhaustive]
    Stopped {
        /// Why not.
        what: String,
    },
    /// A bug in this library. Report it.
    #[non_exhaustive]
    Internal {
        /// What was found.
        what: String,
    },
}

impl Error {
    /// The code under which other programs know this error.
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

    /// Whether asking again may help, because the store was not reached or is not ready.
    pub(crate) fn may_pass(&self) -> bool {
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
            Self::TimedOut { what: "lock", name, limit, .. } => {
                write!(f, "the lock {name:?} did not come free within {limit:?}")
            }
            Self::TimedOut { what, name, limit, full } => {
                write!(f, "no {what} of {name:?} came free within {limit:?}")?;
                match full {
                    Some((held, capacity)) => write!(f, ": {held} of {capacity} are held"),
                    None => Ok(()),
                }
            }
            // A lock id releases its lock, and so does not belong into a log.
            Self::Lost { what: "lock", name, reason, .. } => {
                write!(f, "the lock {name:?} was lost: {reason}")
            }
            Self::Lost { what, name, id, reason } => {
                write!(f, "{what} {id} of {name:?} was lost: {reason}")
            }
            Self::Closed => f.write_str("the client was closed"),
            Self::Unavailable { what, timed_out, silent_for, .. } => {
                match (silent_for, timed_out) {
                    (Some(span), true) => write!(f, "{what}: no answer for {span:.1?}"),
                    (Some(span), false) => write!(f, "{what}: not reachable for {span:.1?}"),
                    (None, true) => write!(f, "{what}: no answer in time"),
                    (None, false) => write!(f, "{what}: the store cannot be reached"),
                }
            }
            Self::Stopped { what } => f.write_str(what),
            Self::Refused { what } => write!(f, "the store refused: {what}"),
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

/// The codes of [`Error`], shared with other programs that follow the same lock interface.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store cannot be reached.
    ServiceUnavailable,
    /// The store refuses us.
    AuthFailed,
    /// The call was wrong.
    InvalidArgument,
    /// The store did not answer in time.
    NetworkTimeout,
    /// Nothing came free in time.
    AcquisitionTimeout,
    /// What was under way was ended: the permit was lost, or the client closed.
    Aborted,
    /// Our own fault.
    Internal,
}

/// How a permit, a lock or a lease was lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LossReason {
    /// It was held for as long as its TTL allows.
    TtlEnded,
    /// It could not be renewed in time, so that the store may have given it to somebody else.
    NotRenewed,
    /// The store no longer knows it.
    Gone,
    /// It was released by its id, or released before.
    Released,
    /// Its client was closed.
    Closed,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TtlEnded => "its TTL ended",
            Self::NotRenewed => "it could not be renewed in time",
            Self::Gone => "the store no longer knows it",
            Self::Released => "it was released by its id",
            Self::Closed => "its client was closed",
        })
    }
}
