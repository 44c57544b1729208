//! The events that observers of locks receive.

use std::fmt;

use crate::callbacks::{event, guarded};
use crate::id::hash;
use crate::machine::lock::{Acquired, Verdict};
use crate::{Error, ErrorKind, LockId, Observer};

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
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LockResult {
    /// The operation succeeded.
    Ok,
    /// The operation did not succeed, for a reason that is not an error.
    Fail(LockReason),
    /// The operation failed with an error.
    Error(ErrorKind),
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
    /// The key itself, if the observer was made with [`include_raw`](Observer::include_raw).
    pub key: Option<String>,
    /// The lock id itself, if the observer was made with [`include_raw`](Observer::include_raw).
    pub lock_id: Option<LockId>,
}

/// An answer of the store that can be reported to an observer.
pub(super) trait Reportable {
    fn result(&self) -> LockResult;
}

impl Reportable for Acquired {
    fn result(&self) -> LockResult {
        match self {
            Self::Held { .. } => LockResult::Ok,
            Self::Locked { .. } => LockResult::Fail(LockReason::Locked),
        }
    }
}

impl<T> Reportable for Verdict<T> {
    fn result(&self) -> LockResult {
        match self {
            Self::Done(_) => LockResult::Ok,
            Self::NotOwner | Self::NotFound => LockResult::Fail(LockReason::NotFound),
            Self::Expired => LockResult::Fail(LockReason::Expired),
        }
    }
}

impl Reportable for bool {
    fn result(&self) -> LockResult {
        LockResult::Ok
    }
}

impl<T> Reportable for Option<T> {
    fn result(&self) -> LockResult {
        self.as_ref().map_or(LockResult::Fail(LockReason::NotFound), |_| LockResult::Ok)
    }
}

/// Notifies the observer, if there is one, and emits a `tracing` event. If nobody listens, this costs two comparisons.
pub(super) fn report<T: Reportable>(
    observer: Option<&Observer>,
    operation: LockOperation,
    answer: &Result<T, Error>,
    (key, lock_id): (Option<&str>, Option<LockId>),
) {
    if observer.is_none() && !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let result = answer.as_ref().map_or_else(|error| LockResult::Error(error.kind()), T::result);
    let raw = observer.is_some_and(|observer| observer.raw);
    let event = LockEvent {
        operation,
        result,
        key_hash: key.map(hash),
        lock_id_hash: lock_id.map(|id| hash(id.as_str())),
        key: key.filter(|_| raw).map(str::to_owned),
        lock_id: lock_id.filter(|_| raw),
    };
    let (key_hash, lock_id_hash) = (event.key_hash.as_deref(), event.lock_id_hash.as_deref());
    event!(debug, ?operation, ?result, key_hash, lock_id_hash, "lock");
    if let Some(observer) = observer {
        guarded(|| observer.notify(&event));
    }
}
