//! One error for everything, with few variants, each named for what the caller does next.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::AcquisitionId;

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
    /// No permit came free in time. Try again later, or wait longer.
    #[non_exhaustive]
    TimedOut {
        /// The semaphore.
        name: String,
        /// How long the acquire was allowed to wait.
        limit: Duration,
    },
    /// The permit is no longer yours. Stop what you do under it.
    #[non_exhaustive]
    Lost {
        /// The semaphore.
        name: String,
        /// The permit.
        id: AcquisitionId,
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
        /// True if the store was reached but gave no answer in time.
        timed_out: bool,
        /// What the system says.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
    /// The store does not let us in, or not do this. Ask whoever runs it.
    #[non_exhaustive]
    Refused {
        /// What was refused, and what would allow it.
        what: String,
    },
    /// Our own fault. Report it.
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
            Self::Unavailable { .. } => ErrorKind::ServiceUnavailable,
            Self::Refused { .. } => ErrorKind::AuthFailed,
            Self::Internal { .. } => ErrorKind::Internal,
        }
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
            Self::TimedOut { name, limit } => {
                write!(f, "no permit of {name:?} came free within {limit:?}")
            }
            Self::Lost { name, id, reason } => {
                write!(f, "permit {id} of {name:?} was lost: {reason}")
            }
            Self::Closed => f.write_str("the client was closed"),
            Self::Unavailable { what, timed_out: true, .. } => {
                write!(f, "{what}: no answer in time")
            }
            Self::Unavailable { what, .. } => write!(f, "{what}: the store cannot be reached"),
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

/// How a permit was lost.
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
