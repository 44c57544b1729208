//! Information about a held lock.

use std::fmt;
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
    /// The fence.
    ///
    /// It is larger than that of every earlier holder.
    pub fence: Fence,
    /// When the lock expires unless it is extended, by the clock of the store.
    pub expires_at: SystemTime,
}

/// What identifies a lock in [`Locks::lookup`](crate::Locks::lookup): its key or its lock id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LockRef<'a> {
    /// The key.
    Key(&'a str),
    /// The id of its holder.
    Id(LockId),
}

impl<'a> From<&'a str> for LockRef<'a> {
    fn from(key: &'a str) -> Self {
        Self::Key(key)
    }
}

impl<'a> From<&'a String> for LockRef<'a> {
    fn from(key: &'a String) -> Self {
        Self::Key(key)
    }
}

impl From<LockId> for LockRef<'_> {
    fn from(id: LockId) -> Self {
        Self::Id(id)
    }
}

impl From<&LockId> for LockRef<'_> {
    fn from(id: &LockId) -> Self {
        Self::Id(*id)
    }
}

/// Information about a held lock.
///
/// The key and the lock id may be secrets. `Debug` shows only a part of their hashes, 24 hexadecimal digits each.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// # let client = leasehold::Client::memory();
/// let guard = client.lock("nightly").label("cron").build()?.acquire().await?;
///
/// // An operator releases a lock whose holder hangs.
/// let locks = client.locks();
/// let found = locks.lookup("nightly").await?.expect("it is held");
/// assert_eq!((found.label.as_deref(), found.id), (Some("cron"), guard.id()));
/// assert!(locks.release(&found.id).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    /// The key.
    pub key: String,
    /// The lock id.
    ///
    /// Anybody who knows it can release the lock.
    pub id: LockId,
    /// The hash of the key.
    pub key_hash: String,
    /// The hash of the lock id.
    pub id_hash: String,
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
    pub fn expires_in(&self) -> Duration {
        self.expires_at.duration_since(SystemTime::now()).unwrap_or_default()
    }
}

impl fmt::Debug for LockInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockInfo")
            .field("key_hash", &self.key_hash)
            .field("id_hash", &self.id_hash)
            .field("acquired_at", &self.acquired_at)
            .field("expires_at", &self.expires_at)
            .field("fence", &self.fence)
            .field("host", &self.host)
            .field("pid", &self.pid)
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

pub(super) fn info(record: &Record) -> LockInfo {
    let Holder { host, pid, label } = &*record.holder;
    let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
    LockInfo {
        key: record.key.to_string(),
        id: record.id,
        key_hash: hash(record.key.as_str()),
        id_hash: hash(record.id.as_str()),
        acquired_at: wall_time(record.acquired_at),
        expires_at: wall_time(record.expires_at),
        fence: record.fence,
        host: text(host),
        pid: *pid,
        label: text(label),
    }
}
