//! The machine of the fenced lock.
//!
//! # State
//!
//! - `records`: for each key, `{id, acquired_at, expires_at, fence, holder}`.
//! - `index`: `id → key`. It finds a lock of which only the id is known.
//! - `fences`: the last fence of each key, or one last fence for all keys. It outlives every record.
//!
//! Time is the store's, in milliseconds since the epoch. A store removes a record when its TTL ends
//! ([`remove_expired`](LockMachine::remove_expired)). If a command still finds a record past its TTL, [`is_live`]
//! decides whether it counts.
//!
//! # Transitions
//!
//! - *acquire* creates a record, unless the key has one that is live.
//! - *release* removes the record of an id, and *extend* sets a new expiry. A renewal in the background never sets an
//!   earlier one.
//! - *is locked* and *lookup* only read. With `clean_up`, *is locked* also removes a record that has expired long
//!   enough ago.
//!
//! There is no queue: a lock is not fair.
//!
//! # Why it is safe
//!
//! - *Exclusive:* a key has one record, and an acquire replaces only a record that is not [live](is_live).
//! - *Owned:* a release or an extension names the id of a lock, and the record must have the same id. So a stale index
//!   entry cannot affect another holder's lock.
//! - *Fenced:* every new record increments the fence of its key, and nothing ever decrements it.
//! - *Idempotent:* an acquire that is repeated with the same id returns the same lock.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::name::Name;
use crate::{Fence, LockId};

mod command;

pub(crate) use command::{LockCommand, LockOutcome, NotifyWhen};

/// How long a record that is found may be past its expiry and still count, because two clocks never agree exactly.
pub(crate) const TOLERANCE_MS: u64 = 1000;

/// How long a record must have expired before a query removes it.
pub(crate) const CLEAN_UP_AFTER_MS: u64 = 2000;

/// Returns whether a record that was found still holds its lock. Every store uses this predicate.
pub(crate) fn is_live(expires_at: u64, now: u64) -> bool {
    expires_at > now.saturating_sub(TOLERANCE_MS)
}

/// The process that acquired a lock. It is for people to read; no transition looks at it. Records of other programs
/// have none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Holder {
    pub(crate) host: Option<Arc<str>>,
    pub(crate) pid: Option<u32>,
    pub(crate) label: Option<Arc<str>>,
}

/// A lock, as the store has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub(crate) key: Name,
    pub(crate) id: LockId,
    pub(crate) acquired_at: u64,
    pub(crate) expires_at: u64,
    pub(crate) fence: Fence,
    pub(crate) holder: Arc<Holder>,
}

/// The result of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Acquired {
    /// The caller holds the lock, for `remaining` milliseconds.
    Held { fence: Fence, expires_at: u64, remaining: u64 },
    /// Another holder has the lock, for `remaining` milliseconds unless it extends or releases it.
    Locked { remaining: u64 },
}

/// The result of a release or an extension. Other programs use the same codes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict<T> {
    /// 1: the lock was released or extended.
    Done(T),
    /// 0: the index of the id points to a lock that another id holds.
    NotOwner,
    /// -1: no lock has this id.
    NotFound,
    /// -2: the lock existed, but had expired.
    Expired,
}

impl<T> Verdict<T> {
    pub(crate) fn map<U>(self, done: impl FnOnce(T) -> U) -> Verdict<U> {
        match self {
            Self::Done(value) => Verdict::Done(done(value)),
            Self::NotOwner => Verdict::NotOwner,
            Self::NotFound => Verdict::NotFound,
            Self::Expired => Verdict::Expired,
        }
    }
}

/// What identifies the lock in a lookup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum By {
    Key(Name),
    Id(LockId),
}

/// All locks of one store.
#[derive(Debug, Default)]
pub(crate) struct LockMachine {
    records: HashMap<Name, Record>,
    index: HashMap<LockId, Name>,
    fences: Fences,
    /// When each record is removed.
    timetable: BTreeSet<(u64, Name)>,
}

/// How fences are counted.
#[derive(Debug)]
enum Fences {
    /// Each key has its own fence, which is kept as long as the store.
    EachKey(HashMap<Name, u64>),
    /// All keys share one fence, so that nothing is kept for a key that is not held.
    Together(u64),
}

impl Default for Fences {
    fn default() -> Self {
        Self::EachKey(HashMap::default())
    }
}

impl Fences {
    fn next(&mut self, key: &Name) -> Fence {
        let last = match self {
            Self::EachKey(fences) => fences.entry(key.clone()).or_default(),
            Self::Together(last) => last,
        };
        *last += 1;
        Fence::new(*last)
    }
}

impl LockMachine {
    /// Creates a machine whose fences are all greater than `floor`.
    pub(crate) fn with_fences_above(floor: u64) -> Self {
        Self { fences: Fences::Together(floor), ..Self::default() }
    }

    pub(crate) fn acquire(
        &mut self,
        key: &Name,
        id: LockId,
        ttl: u64,
        holder: &Arc<Holder>,
        now: u64,
    ) -> Acquired {
        if let Some(record) = self.records.get(key) {
            let remaining = record.expires_at.saturating_sub(now);
            match is_live(record.expires_at, now) {
                true if record.id == id => {
                    let Record { fence, expires_at, .. } = *record;
                    return Acquired::Held { fence, expires_at, remaining };
                }
                true => return Acquired::Locked { remaining },
                false => self.remove(&key.clone()),
            }
        }
        let (fence, expires_at) = (self.fences.next(key), now + ttl);
        let holder = holder.clone();
        let record = Record { key: key.clone(), id, acquired_at: now, expires_at, fence, holder };
        self.timetable.insert((expires_at, key.clone()));
        self.records.insert(key.clone(), record);
        self.index.insert(id, key.clone());
        Acquired::Held { fence, expires_at, remaining: ttl }
    }

    /// Returns the key that was unlocked.
    pub(crate) fn release(&mut self, id: LockId, now: u64) -> Verdict<Name> {
        self.owned(id, now, |machine, key| {
            machine.remove(&key);
            key
        })
    }

    /// Replaces the remaining time with `ttl`. With `only_longer`, a later end stays as it is. Returns the new expiry.
    pub(crate) fn extend(
        &mut self,
        id: LockId,
        ttl: u64,
        only_longer: bool,
        now: u64,
    ) -> Verdict<u64> {
        self.owned(id, now, |machine, key| {
            let mut expires_at = now + ttl;
            if let Some(record) = machine.records.get_mut(&key) {
                if only_longer {
                    expires_at = expires_at.max(record.expires_at);
                }
                machine.timetable.remove(&(record.expires_at, key.clone()));
                record.expires_at = expires_at;
                machine.timetable.insert((expires_at, key));
            }
            expires_at
        })
    }

    fn owned<T>(
        &mut self,
        id: LockId,
        now: u64,
        act: impl FnOnce(&mut Self, Name) -> T,
    ) -> Verdict<T> {
        let Some(key) = self.index.get(&id).cloned() else { return Verdict::NotFound };
        let Some(record) = self.records.get(&key) else { return Verdict::NotFound };
        if !is_live(record.expires_at, now) {
            self.remove(&key);
            self.index.remove(&id);
            return Verdict::Expired;
        }
        if record.id != id {
            return Verdict::NotOwner;
        }
        Verdict::Done(act(self, key))
    }

    /// Returns whether the key is locked. The query changes something only with `clean_up`, and never a fence.
    pub(crate) fn is_locked(&mut self, key: &Name, clean_up: bool, now: u64) -> bool {
        let Some(record) = self.records.get(key) else { return false };
        let expires_at = record.expires_at;
        if clean_up && expires_at + CLEAN_UP_AFTER_MS <= now {
            self.remove(key);
        }
        is_live(expires_at, now)
    }

    pub(crate) fn lookup(&self, by: &By, now: u64) -> Option<&Record> {
        let key = match by {
            By::Key(key) => key,
            By::Id(id) => self.index.get(id)?,
        };
        let record = self.records.get(key)?;
        let owned = match by {
            By::Key(_) => true,
            By::Id(id) => record.id == *id,
        };
        Some(record).filter(|record| owned && is_live(record.expires_at, now))
    }

    /// Returns at most `limit` locks that are held, ordered by key.
    pub(crate) fn list(&self, limit: usize, now: u64) -> Vec<Record> {
        let live = self.records.values().filter(|record| is_live(record.expires_at, now));
        let mut live: Vec<_> = live.cloned().collect();
        live.sort_by(|a, b| a.key.cmp(&b.key));
        live.truncate(limit);
        live
    }

    /// Removes every record whose TTL has ended.
    pub(crate) fn remove_expired(&mut self, now: u64) {
        while let Some((expires_at, key)) = self.timetable.first().cloned()
            && expires_at <= now
        {
            self.remove(&key);
        }
    }

    /// Removes the record and its index entry, but never the fence.
    fn remove(&mut self, key: &Name) {
        if let Some(record) = self.records.remove(key) {
            self.index.remove(&record.id);
            self.timetable.remove(&(record.expires_at, key.clone()));
        }
    }

    /// Makes the index of an id point to a key, whatever id holds that key. A store that has lost one of its two
    /// entries can be in this state.
    #[cfg(test)]
    pub(crate) fn mislead(&mut self, id: LockId, key: &Name) {
        self.index.insert(id, key.clone());
    }

    #[cfg(test)]
    pub(crate) fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }
}
