//! The events that observers of locks receive.

use std::fmt;

use crate::machine::lock::{Acquired, LockOutcome, Verdict};
use crate::{Error, LockId};

/// An operation on a lock.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LockOperation {
    /// One attempt to acquire the lock.
    Acquire,
    /// A release, by a guard or by an id.
    Release,
    /// An extension, by a guard, in the background or by an id.
    Extend,
    /// A query whether the lock is held.
    IsLocked,
    /// A lookup, by a key or by an id.
    Lookup,
}

/// The result of an operation on a lock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockResult {
    /// The operation succeeded.
    Ok,
    /// The operation did not succeed, for a reason that is not an error.
    Fail(LockReason),
    /// The operation failed with this error.
    Error(Error),
}

/// The reason for which an operation did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LockReason {
    /// Another holder has the lock.
    Locked,
    /// The lock was found, but it had expired.
    Expired,
    /// There is no such lock, or another holder has it.
    NotFound,
}

impl LockReason {
    /// Returns `locked`, `expired` or `not-found`, the words of `SyncGuard`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Locked => "locked",
            Self::Expired => "expired",
            Self::NotFound => "not-found",
        }
    }
}

impl fmt::Display for LockReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One operation on a lock, and its result.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LockEvent {
    /// The operation.
    pub operation: LockOperation,
    /// The result of the operation.
    pub result: LockResult,
    /// The hash of the key: 24 hexadecimal digits.
    pub key_hash: Option<String>,
    /// The hash of the lock id: 24 hexadecimal digits.
    pub lock_id_hash: Option<String>,
    /// The key itself, if the observer was made with [`include_raw`](crate::Observer::include_raw).
    pub key: Option<String>,
    /// The lock id itself, if the observer was made with [`include_raw`](crate::Observer::include_raw).
    pub lock_id: Option<LockId>,
}

/// Two errors are equal if their messages are.
impl PartialEq for LockResult {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Fail(reason), Self::Fail(other)) => reason == other,
            (Self::Error(error), Self::Error(other)) => error.to_string() == other.to_string(),
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

impl LockResult {
    /// Returns the result in one word. The message of an error may contain the key.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Fail(reason) => reason.as_str(),
            Self::Error(_) => "failed",
        }
    }

    pub(super) fn of(outcome: Result<&LockOutcome, &Error>) -> Self {
        match outcome {
            Ok(LockOutcome::Acquire(Acquired::Locked { .. })) => Self::Fail(LockReason::Locked),
            Ok(LockOutcome::Release(Verdict::Expired) | LockOutcome::Extend(Verdict::Expired)) => {
                Self::Fail(LockReason::Expired)
            }
            Ok(
                LockOutcome::Release(Verdict::NotOwner | Verdict::NotFound)
                | LockOutcome::Extend(Verdict::NotOwner | Verdict::NotFound)
                | LockOutcome::Lookup(None),
            ) => Self::Fail(LockReason::NotFound),
            Ok(_) => Self::Ok,
            Err(error) => Self::Error(error.clone()),
        }
    }
}
