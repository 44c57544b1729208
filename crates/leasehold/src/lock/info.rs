//! What is known of a lock that is held, and how much of it anybody may see.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::id::hash;
use crate::machine::lock::{Holder, Record};
use crate::{Fence, LockId};

/// A lock that was acquired.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HeldLock {
    /// What extends and releases it.
    pub id: LockId,
    /// Larger than that of every holder before.
    pub fence: Fence,
    /// When it ends unless it is extended, by the clock of the store.
    pub expires_at: SystemTime,
}

/// What anybody may know of a lock that is held.
///
/// Neither its key nor its id, which may be secrets, but 24 hexadecimal digits of a hash that tell them from others.
/// The raw ones are in [`RawLockInfo`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LockInfo {
    /// What tells the key from others.
    pub key_hash: String,
    /// What tells the lock id from others.
    pub lock_id_hash: String,
    /// When it was acquired, by the clock of the store.
    pub acquired_at: SystemTime,
    /// When it ends unless it is extended, by the clock of the store.
    pub expires_at: SystemTime,
    /// The fence of its holder.
    pub fence: Fence,
    /// The host that its holder runs on; `None` for other programs on Redis.
    pub host: Option<String>,
    /// The process of its holder; `None` for other programs on Redis.
    pub pid: Option<u32>,
    /// The [label](crate::LockBuilder::label) of the lock that acquired it.
    pub label: Option<String>,
}

/// What is known of a lock that is held, with its key and its id.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RawLockInfo {
    /// The key.
    pub key: String,
    /// The lock id, with which anybody can release the lock.
    pub lock_id: LockId,
    /// The rest.
    pub info: LockInfo,
}

pub(super) fn raw(record: &Record) -> RawLockInfo {
    let Holder { host, pid, label } = &*record.holder;
    let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
    RawLockInfo {
        info: LockInfo {
            key_hash: hash(record.key.as_str()),
            lock_id_hash: hash(record.id.as_str()),
            acquired_at: time(record.acquired_at),
            expires_at: time(record.expires_at),
            fence: record.fence,
            host: text(host),
            pid: *pid,
            label: text(label),
        },
        key: record.key.to_string(),
        lock_id: record.id,
    }
}

pub(super) fn time(millis: u64) -> SystemTime {
    // A store is not trusted with what a clock cannot show.
    UNIX_EPOCH + Duration::from_millis(millis.min(100_000_000_000_000))
}
