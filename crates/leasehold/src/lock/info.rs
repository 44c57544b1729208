//! Information about a held lock, with and without its secrets.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::clock::wall_time;
use crate::id::hash;
use crate::machine::lock::{Holder, Record};
use crate::{Fence, LockId};

/// A lock that was acquired without a guard, or detached from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HeldLock {
    /// The lock id, by which the lock is extended and released.
    pub id: LockId,
    /// The fence. It is larger than that of every earlier holder.
    pub fence: Fence,
    /// When the lock expires unless it is extended, by the clock of the store.
    pub expires_at: SystemTime,
}

/// Information about a held lock that anybody may see.
///
/// The key and the lock id may be secrets. So this contains only a part of their hashes, 24 hexadecimal digits each.
/// [`RawLockInfo`] contains the raw values.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LockInfo {
    /// The hash of the key.
    pub key_hash: String,
    /// The hash of the lock id.
    pub lock_id_hash: String,
    /// When the lock was acquired, by the clock of the store.
    pub acquired_at: SystemTime,
    /// When the lock expires unless it is extended, by the clock of the store.
    pub expires_at: SystemTime,
    /// The fence of its holder.
    pub fence: Fence,
    /// The host that the holder runs on; `None` for other programs on Redis.
    pub host: Option<String>,
    /// The process id of the holder; `None` for other programs on Redis.
    pub pid: Option<u32>,
    /// The [label](crate::LockBuilder::label) of the holder, if it has one.
    pub label: Option<String>,
}

impl LockInfo {
    /// Returns how long the lock has been held, if the clocks of this host and the store agree.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.acquired_at.elapsed().unwrap_or_default()
    }

    /// Returns the time until the lock expires unless it is extended, if the clocks of this host and the store agree.
    #[must_use]
    pub fn ends_in(&self) -> Duration {
        self.expires_at.duration_since(SystemTime::now()).unwrap_or_default()
    }
}

/// Information about a held lock, with its key and its lock id.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// # let client = leasehold::Client::memory();
/// let guard = client.lock("nightly").label("cron").build()?.acquire().await?;
///
/// // An operator releases a lock whose holder hangs.
/// let locks = client.locks();
/// let found = locks.lookup_raw("nightly").await?.expect("it is held");
/// assert_eq!((found.info.label.as_deref(), found.lock_id), (Some("cron"), guard.id()));
/// assert!(locks.release(&found.lock_id).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RawLockInfo {
    /// The key.
    pub key: String,
    /// The lock id. Anybody who knows it can release the lock.
    pub lock_id: LockId,
    /// The information that anybody may see.
    pub info: LockInfo,
}

pub(super) fn raw(record: &Record) -> RawLockInfo {
    let Holder { host, pid, label } = &*record.holder;
    let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
    RawLockInfo {
        info: LockInfo {
            key_hash: hash(record.key.as_str()),
            lock_id_hash: hash(record.id.as_str()),
            acquired_at: wall_time(record.acquired_at),
            expires_at: wall_time(record.expires_at),
            fence: record.fence,
            host: text(host),
            pid: *pid,
            label: text(label),
        },
        key: record.key.to_string(),
        lock_id: record.id,
    }
}
