//! The settings and words of `SyncGuard`.
//!
//! | `SyncGuard` | here |
//! |---|---|
//! | `ttlMs`, `timeoutMs`, `maxRetries` | [`Settings`] |
//! | `retryDelayMs`, `backoff`, `jitter` | [`Retry`] |
//! | `keyPrefix` | [`RedisBuilder::lock_prefix`](crate::RedisBuilder::lock_prefix) |
//! | `cleanupInIsLocked`, `capabilities` | [`Backend`] |
//! | `"locked"`, `"expired"`, `"not-found"` | [`LockReason::as_str`](crate::LockReason::as_str) |
//! | `LockError.code` | [`Error::kind`](crate::Error::kind) |
//! | the records of versions 1 and 2 | [`LockLayout`] |

use std::time::Duration;

pub use crate::backend::TimeAuthority;
#[cfg(feature = "redis")]
pub use crate::backend::redis::LockLayout;
use crate::{LockBuilder, Locks, Retry};

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
pub trait Settings: Sized {
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
}

/// Adds what `SyncGuard` calls a backend has to [`Locks`].
pub trait Backend: Sized {
    /// Sets whether [`Locks::is_locked`] may remove a lock that expired at least two seconds ago, `cleanupInIsLocked`.
    /// Off by default: then it only reads. A fence is never removed.
    #[must_use]
    fn cleanup_in_is_locked(self, clean_up: bool) -> Self;

    /// Returns what the store can do.
    fn capabilities(&self) -> Capabilities;
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
}

/// What a store can do, for code that checks this at run time. That every lock has a fence is known at compile time:
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
    /// Whether locks have fences. In this library they always have.
    pub supports_fencing: bool,
    /// The clock that decides when a lock expires.
    pub time_authority: TimeAuthority,
}
