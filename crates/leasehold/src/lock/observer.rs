//! Telemetry of locks: whoever listens is told what was done, and cannot get in the way.

use std::fmt;
use std::sync::Arc;

use super::id::hash;
use crate::engine::foreign::{event, guarded};
use crate::machine::lock::{Acquired, Verdict};
use crate::{Error, ErrorKind, LockId};

/// What was asked of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[allow(missing_docs)] // each is the method of that name
pub enum LockOperation {
    Acquire,
    Release,
    Extend,
    IsLocked,
    Lookup,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LockResult {
    /// It was done, or found.
    Ok,
    /// It was not, for a reason that is nobody's fault.
    Fail(LockReason),
    /// The store could not be asked, or did not understand.
    Error(ErrorKind),
}

/// Why it was not done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LockReason {
    /// Somebody else has the lock.
    Locked,
    /// The lock was there, and over.
    Expired,
    /// There is no such lock, or it is another's.
    NotFound,
}

impl LockReason {
    /// As other programs spell it: `locked`, `expired`, `not-found`.
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

/// One thing that was asked of a lock, and what came of it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LockEvent {
    /// What was asked.
    pub operation: LockOperation,
    /// What came of it.
    pub result: LockResult,
    /// What tells the key from others: 24 hexadecimal digits.
    pub key_hash: Option<String>,
    /// The same of the lock id.
    pub lock_id_hash: Option<String>,
    /// The key itself, if the observer asked for it.
    pub key: Option<String>,
    /// The lock id itself, if the observer asked for it.
    pub lock_id: Option<LockId>,
}

/// Who is told: see [`Locks::observed`](crate::Locks::observed).
///
/// It is called in the middle of things, and so should be quick. If it panics, that is swallowed: no operation fails
/// because somebody watches.
#[derive(Clone)]
pub struct Observer {
    tell: Arc<dyn Fn(&LockEvent) + Send + Sync>,
    raw: bool,
}

impl Observer {
    /// Tells this function.
    pub fn new(tell: impl Fn(&LockEvent) + Send + Sync + 'static) -> Self {
        Self { tell: Arc::new(tell), raw: false }
    }

    /// Also with raw keys and lock ids, which may be secrets.
    #[must_use]
    pub fn include_raw(self) -> Self {
        Self { raw: true, ..self }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("raw", &self.raw).finish_non_exhaustive()
    }
}

/// What an answer of a store means to an observer.
pub(super) trait Telling {
    fn tell(&self) -> LockResult;
}

impl Telling for Acquired {
    fn tell(&self) -> LockResult {
        match self {
            Self::Held { .. } => LockResult::Ok,
            Self::Locked { .. } => LockResult::Fail(LockReason::Locked),
        }
    }
}

impl<T> Telling for Verdict<T> {
    fn tell(&self) -> LockResult {
        match self {
            Self::Done(_) => LockResult::Ok,
            Self::NotOwner | Self::NotFound => LockResult::Fail(LockReason::NotFound),
            Self::Expired => LockResult::Fail(LockReason::Expired),
        }
    }
}

impl Telling for bool {
    fn tell(&self) -> LockResult {
        LockResult::Ok
    }
}

impl<T> Telling for Option<T> {
    fn tell(&self) -> LockResult {
        self.as_ref().map_or(LockResult::Fail(LockReason::NotFound), |_| LockResult::Ok)
    }
}

/// Tells the observer, if there is one, and whoever listens to `tracing`. Costs two comparisons if nobody does.
pub(super) fn report<T: Telling>(
    observer: Option<&Observer>,
    operation: LockOperation,
    answer: &Result<T, Error>,
    (key, lock_id): (Option<&str>, Option<LockId>),
) {
    if observer.is_none() && !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let result = answer.as_ref().map_or_else(|error| LockResult::Error(error.kind()), T::tell);
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
        guarded(|| (observer.tell)(&event));
    }
}
