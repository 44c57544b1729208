//! The settings and words of `SyncGuard`.
//!
//! | `SyncGuard` | here |
//! |---|---|
//! | `ttlMs`, `timeoutMs`, `maxRetries` | [`Settings`] |
//! | `retryDelayMs`, `backoff`, `jitter` | [`Retry`] |
//! | `onReleaseError` | [`Settings::on_release_error`] |
//! | `keyPrefix` | [`RedisBuilder::lock_prefix`](crate::RedisBuilder::lock_prefix) |
//! | `cleanupInIsLocked`, `capabilities`, `acquire` | [`Backend`] |
//! | `"locked"`, `"expired"`, `"not-found"` | [`reason`] |
//! | `LockError.code` | [`ErrorCode`] |
//! | `keyHash`, `lockIdHash` | `key_hash`, `id_hash` of [`LockInfo`](crate::LockInfo) |
//! | the records of versions 1 and 2 | [`LockLayout`], set by [`StoreSettings`] |

use std::fmt;
use std::time::Duration;

pub use crate::backend::TimeAuthority;
#[cfg(feature = "redis")]
pub use crate::backend::redis::LockLayout;
use crate::guard::Sealed;
use crate::{Error, Event, HeldLock, LockBuilder, LockId, Locks, LossReason, Outcome, Retry};

/// Adds the settings to a [`LockBuilder`].
///
/// ```
/// use leasehold::compat::sync_guard::Settings;
/// use leasehold::{Client, Retry};
///
/// let lock = Client::memory()
///     .lock("invoice:42")
///     .ttl_ms(30_000)
///     .timeout_ms(5000)
///     .max_retries(10, Retry::default())
///     .build()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
pub trait Settings: Sealed + Sized {
    /// Sets how long the holder may be silent, `ttlMs`: [`LockBuilder::lease`].
    #[must_use]
    fn ttl_ms(self, millis: u64) -> Self;

    /// Sets the longest time that an acquire may wait, `timeoutMs`: [`LockBuilder::within`].
    #[must_use]
    fn timeout_ms(self, millis: u64) -> Self;

    /// Sets the most retries of an acquire, `maxRetries`, and the delays between them: [`LockBuilder::retry`].
    ///
    /// Attempts after a release, or at the end of the holder's lease, do not count.
    #[must_use]
    fn max_retries(self, retries: u32, delays: Retry) -> Self;

    /// Sets a function that is called with the error if the release fails after the work of
    /// [`Lock::with`](crate::Lock::with) is done, `onReleaseError`.
    #[must_use]
    fn on_release_error(self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Self;
}

impl Settings for LockBuilder {
    fn ttl_ms(self, millis: u64) -> Self {
        self.lease(Duration::from_millis(millis))
    }

    fn timeout_ms(self, millis: u64) -> Self {
        self.within(Duration::from_millis(millis))
    }

    fn max_retries(self, retries: u32, delays: Retry) -> Self {
        self.retry(delays.at_most(retries))
    }

    fn on_release_error(self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.release_hook(hook)
    }
}

/// Adds the layout of locks to a [`RedisBuilder`](crate::RedisBuilder).
///
/// ```
/// use leasehold::Client;
/// use leasehold::compat::sync_guard::{LockLayout, StoreSettings};
///
/// let builder = Client::redis_builder("redis://localhost").lock_layout(LockLayout::SyncGuard2);
/// ```
#[cfg(feature = "redis")]
pub trait StoreSettings: Sealed + Sized {
    /// Sets how locks are stored, for programs that share them: as `SyncGuard` 1 does by default.
    #[must_use]
    fn lock_layout(self, layout: LockLayout) -> Self;
}

#[cfg(feature = "redis")]
impl StoreSettings for crate::RedisBuilder {
    fn lock_layout(self, layout: LockLayout) -> Self {
        self.layout(layout)
    }
}

/// Adds what `SyncGuard` calls a backend has to [`Locks`].
pub trait Backend: Sealed + Sized {
    /// Sets whether [`Locks::is_locked`] may remove a lock that expired at least two seconds ago,
    /// `cleanupInIsLocked`.
    ///
    /// Off by default: then it only reads. A fence is never removed.
    #[must_use]
    fn cleanup_in_is_locked(self, clean_up: bool) -> Self;

    /// Returns what the store can do.
    fn capabilities(&self) -> Capabilities;

    /// Acquires the lock if it is free, `acquire`: [`Locks::try_acquire`].
    ///
    /// # Errors
    /// The same as for [`Locks::try_acquire`].
    ///
    /// # Cancel safety
    /// The same as for [`Locks::try_acquire`].
    fn acquire(
        &self,
        key: &str,
        lease: Duration,
    ) -> impl Future<Output = Result<Option<HeldLock>, Error>> + Send;

    /// Acquires the lock with a lock id that the caller provides: [`Locks::try_acquire_as`].
    ///
    /// # Errors
    /// The same as for [`Locks::try_acquire`].
    ///
    /// # Cancel safety
    /// The same as for [`Locks::try_acquire_as`].
    fn acquire_as(
        &self,
        id: &LockId,
        key: &str,
        lease: Duration,
    ) -> impl Future<Output = Result<Option<HeldLock>, Error>> + Send;
}

impl Backend for Locks {
    fn cleanup_in_is_locked(self, clean_up: bool) -> Self {
        self.clean_up(clean_up)
    }

    fn capabilities(&self) -> Capabilities {
        let profile = self.profile();
        Capabilities {
            backend: profile.kind,
            supports_fencing: true,
            time_authority: profile.time_authority,
        }
    }

    async fn acquire(&self, key: &str, lease: Duration) -> Result<Option<HeldLock>, Error> {
        self.try_acquire(key, lease).await
    }

    async fn acquire_as(
        &self,
        id: &LockId,
        key: &str,
        lease: Duration,
    ) -> Result<Option<HeldLock>, Error> {
        self.try_acquire_as(key, lease, id).await
    }
}

/// What a store can do, for code that checks this at run time.
///
/// That every lock has a fence is known at compile time:
/// [`LockGuard::fence`](crate::LockGuard::fence) is not optional.
///
/// ```
/// use leasehold::Client;
/// use leasehold::compat::sync_guard::{Backend, TimeAuthority};
///
/// let store = Client::memory().locks().capabilities();
/// assert_eq!((store.backend, store.time_authority), ("memory", TimeAuthority::Process));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// The kind of store: `memory`, `local` or `redis`.
    pub backend: &'static str,
    /// Whether locks have fences.
    ///
    /// In this library they always have.
    pub supports_fencing: bool,
    /// The clock that decides when a lock expires.
    pub time_authority: TimeAuthority,
}

/// The code of an [`Error`] in the lock interface of `SyncGuard`.
///
/// ```
/// use leasehold::Client;
/// use leasehold::compat::sync_guard::ErrorCode;
///
/// let error = Client::memory().lock("").build().unwrap_err();
/// assert_eq!(ErrorCode::from(&error), ErrorCode::InvalidArgument);
/// assert_eq!(ErrorCode::from(&error).as_str(), "InvalidArgument");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorCode {
    /// The store cannot be reached, is full or cannot be used, or the client's background thread is not running.
    ServiceUnavailable,
    /// The store denied access.
    AuthFailed,
    /// An argument is invalid, or does not fit what the store contains.
    InvalidArgument,
    /// The store did not answer in time.
    NetworkTimeout,
    /// Nothing became free within the time limit.
    AcquisitionTimeout,
    /// The operation ended early: the lock was lost, the wait was cancelled, or the client was closed.
    Aborted,
    /// A bug in this library.
    Internal,
}

impl ErrorCode {
    /// Returns the code as `SyncGuard` spells it, for example `NetworkTimeout`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ServiceUnavailable => "ServiceUnavailable",
            Self::AuthFailed => "AuthFailed",
            Self::InvalidArgument => "InvalidArgument",
            Self::NetworkTimeout => "NetworkTimeout",
            Self::AcquisitionTimeout => "AcquisitionTimeout",
            Self::Aborted => "Aborted",
            Self::Internal => "Internal",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl From<&Error> for ErrorCode {
    fn from(error: &Error) -> Self {
        match error {
            Error::InvalidArgument { .. }
            | Error::ForeignData { .. }
            | Error::Pinned { .. }
            | Error::InUse { .. }
            | Error::Unknown { .. }
            | Error::TooHeavy { .. }
            | Error::WrongThread { .. } => Self::InvalidArgument,
            Error::TimedOut { .. } | Error::NotDrained { .. } => Self::AcquisitionTimeout,
            Error::Cancelled { .. } | Error::Lost { .. } | Error::Closed => Self::Aborted,
            Error::Unavailable { timed_out: true, .. } => Self::NetworkTimeout,
            Error::Unavailable { .. }
            | Error::Stopped { .. }
            | Error::NoRoom { .. }
            | Error::Unusable { .. } => Self::ServiceUnavailable,
            Error::Denied { .. } => Self::AuthFailed,
            Error::Internal { .. } => Self::Internal,
        }
    }
}

/// Returns why an operation on a lock did not succeed: `locked`, `expired` or `not-found`.
///
/// Returns `None` if the operation succeeded or failed with an error.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::compat::sync_guard::{self, Backend};
/// use leasehold::{Client, Observer};
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
///
/// let reasons = Arc::new(Mutex::new(Vec::new()));
/// let list = reasons.clone();
/// let observer = Observer::new(move |event| list.lock().unwrap().push(sync_guard::reason(event)));
/// let locks = Client::memory().locks().observer(observer);
/// let held = locks.acquire("invoice:42", Duration::from_secs(30)).await?.expect("it was free");
/// locks.acquire("invoice:42", Duration::from_secs(30)).await?;
/// locks.release(&held.id).await?;
/// locks.release(&held.id).await?;
/// assert_eq!(*reasons.lock().unwrap(), [None, Some("locked"), None, Some("not-found")]);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn reason(event: &Event) -> Option<&'static str> {
    match event.outcome {
        Outcome::Full => Some("locked"),
        Outcome::Lost(LossReason::LeaseEnded) => Some("expired"),
        Outcome::NotHeld => Some("not-found"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{LossReason, Primitive};

    #[test]
    fn every_error_has_a_code() {
        let (what, name) = (String::new, || "job".to_owned());
        let (limit, primitive) = (Duration::from_secs(1), Primitive::Lock);
        let lost = Error::Lost { primitive, name: name(), id: what(), reason: LossReason::Missing };
        let timed_out = Error::TimedOut {
            primitive,
            name: name(),
            limit,
            held: None,
            capacity: None,
            next_token: None,
        };
        for (error, code) in [
            (Error::invalid("key", ""), "InvalidArgument"),
            (Error::foreign(""), "InvalidArgument"),
            (Error::Pinned { name: name(), capacity: 1 }, "InvalidArgument"),
            (Error::InUse { name: name(), held: 1, waiting: 0 }, "InvalidArgument"),
            (Error::Unknown { name: name() }, "InvalidArgument"),
            (Error::TooHeavy { name: name(), weight: 2, capacity: 1 }, "InvalidArgument"),
            (Error::WrongThread { problem: what() }, "InvalidArgument"),
            (timed_out, "AcquisitionTimeout"),
            (Error::NotDrained { name: name(), limit }, "AcquisitionTimeout"),
            (Error::Cancelled { name: name(), id: what() }, "Aborted"),
            (lost, "Aborted"),
            (Error::Closed, "Aborted"),
            (Error::unavailable("", true, None), "NetworkTimeout"),
            (Error::unavailable("", false, None), "ServiceUnavailable"),
            (Error::Stopped { problem: what() }, "ServiceUnavailable"),
            (Error::NoRoom { problem: what() }, "ServiceUnavailable"),
            (Error::Unusable { problem: what() }, "ServiceUnavailable"),
            (Error::Denied { problem: what() }, "AuthFailed"),
            (Error::internal(""), "Internal"),
        ] {
            assert_eq!(ErrorCode::from(&error).to_string(), code, "{error:?}");
        }
    }
}
