//! The machine of the fenced lock.
//!
//! It is written over [`LockRows`], which the memory store keeps in collections, and the store on one host in SQLite.
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
use std::convert::Infallible;
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
pub(crate) enum LockRef {
    Key(Name),
    Id(LockId),
}

/// The rows of all locks, in memory or in one transaction of a store.
pub(crate) trait LockRows {
    type Error;

    /// Returns the record of a key, unless the store has removed it.
    fn record(&self, key: &Name) -> Result<Option<Record>, Self::Error>;

    /// Returns the key that the index of an id points to.
    fn key_of(&self, id: LockId) -> Result<Option<Name>, Self::Error>;

    /// Adds a record and its index, and returns its fence, the next one of the key. The key has no record.
    fn insert(
        &mut self,
        key: &Name,
        id: LockId,
        acquired_at: u64,
        expires_at: u64,
        holder: &Arc<Holder>,
    ) -> Result<Fence, Self::Error>;

    fn set_expiry(&mut self, record: &Record, expires_at: u64) -> Result<(), Self::Error>;

    /// Removes a record, but not its index, and never the fence of its key.
    fn remove(&mut self, record: &Record) -> Result<(), Self::Error>;

    /// Removes an id from the index.
    fn remove_id(&mut self, id: LockId) -> Result<(), Self::Error>;

    /// Returns records whose TTL has ended.
    fn expired(&self, now: u64) -> Result<Vec<Record>, Self::Error>;
}

/// All locks of one store.
#[derive(Debug, Default)]
pub(crate) struct LockMachine<R = LocksInMemory> {
    pub(crate) rows: R,
}

impl<R: LockRows> LockMachine<R> {
    pub(crate) fn acquire(
        &mut self,
        key: &Name,
        id: LockId,
        ttl: u64,
        holder: &Arc<Holder>,
        now: u64,
    ) -> Result<Acquired, R::Error> {
        if let Some(record) = self.rows.record(key)? {
            let Record { fence, expires_at, .. } = record;
            let remaining = expires_at.saturating_sub(now);
            match is_live(expires_at, now) {
                true if record.id == id => {
                    return Ok(Acquired::Held { fence, expires_at, remaining });
                }
                true => return Ok(Acquired::Locked { remaining }),
                false => self.remove(&record)?,
            }
        }
        let expires_at = now + ttl;
        let fence = self.rows.insert(key, id, now, expires_at, holder)?;
        Ok(Acquired::Held { fence, expires_at, remaining: ttl })
    }

    /// Returns the key that was unlocked.
    pub(crate) fn release(&mut self, id: LockId, now: u64) -> Result<Verdict<Name>, R::Error> {
        self.owned(id, now, |machine, record| {
            machine.remove(&record)?;
            Ok(record.key)
        })
    }

    /// Replaces the remaining time with `ttl`. With `only_longer`, a later end stays as it is. Returns the new expiry.
    pub(crate) fn extend(
        &mut self,
        id: LockId,
        ttl: u64,
        only_longer: bool,
        now: u64,
    ) -> Result<Verdict<u64>, R::Error> {
        self.owned(id, now, |machine, record| {
            let at_least = if only_longer { record.expires_at } else { 0 };
            let expires_at = at_least.max(now + ttl);
            machine.rows.set_expiry(&record, expires_at)?;
            Ok(expires_at)
        })
    }

    fn owned<T>(
        &mut self,
        id: LockId,
        now: u64,
        act: impl FnOnce(&mut Self, Record) -> Result<T, R::Error>,
    ) -> Result<Verdict<T>, R::Error> {
        let Some(key) = self.rows.key_of(id)? else { return Ok(Verdict::NotFound) };
        let Some(record) = self.rows.record(&key)? else { return Ok(Verdict::NotFound) };
        if !is_live(record.expires_at, now) {
            self.remove(&record)?;
            self.rows.remove_id(id)?;
            return Ok(Verdict::Expired);
        }
        if record.id != id {
            return Ok(Verdict::NotOwner);
        }
        act(self, record).map(Verdict::Done)
    }

    /// Returns whether the key is locked. The query changes something only with `clean_up`, and never a fence.
    pub(crate) fn is_locked(
        &mut self,
        key: &Name,
        clean_up: bool,
        now: u64,
    ) -> Result<bool, R::Error> {
        let Some(record) = self.rows.record(key)? else { return Ok(false) };
        if clean_up && record.expires_at + CLEAN_UP_AFTER_MS <= now {
            self.remove(&record)?;
        }
        Ok(is_live(record.expires_at, now))
    }

    pub(crate) fn lookup(&self, by: &LockRef, now: u64) -> Result<Option<Record>, R::Error> {
        let record = match by {
            LockRef::Key(key) => self.rows.record(key)?,
            LockRef::Id(id) => {
                let Some(key) = self.rows.key_of(*id)? else { return Ok(None) };
                self.rows.record(&key)?.filter(|record| record.id == *id)
            }
        };
        Ok(record.filter(|record| is_live(record.expires_at, now)))
    }

    /// Removes records whose TTL has ended. Returns their keys.
    pub(crate) fn remove_expired(&mut self, now: u64) -> Result<Vec<Name>, R::Error> {
        let expired = self.rows.expired(now)?.into_iter();
        expired.map(|record| self.remove(&record).map(|()| record.key)).collect()
    }

    /// Removes the record and its index entry, but never the fence.
    fn remove(&mut self, record: &Record) -> Result<(), R::Error> {
        self.rows.remove_id(record.id)?;
        self.rows.remove(record)
    }
}

/// The rows of all locks in memory.
#[derive(Debug, Default)]
pub(crate) struct LocksInMemory {
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

impl LockRows for LocksInMemory {
    type Error = Infallible;

    fn record(&self, key: &Name) -> Result<Option<Record>, Infallible> {
        Ok(self.records.get(key).cloned())
    }

    fn key_of(&self, id: LockId) -> Result<Option<Name>, Infallible> {
        Ok(self.index.get(&id).cloned())
    }

    fn insert(
        &mut self,
        key: &Name,
        id: LockId,
        acquired_at: u64,
        expires_at: u64,
        holder: &Arc<Holder>,
    ) -> Result<Fence, Infallible> {
        let last = match &mut self.fences {
            Fences::EachKey(fences) => fences.entry(key.clone()).or_default(),
            Fences::Together(last) => last,
        };
        *last += 1;
        let (fence, holder, key) = (Fence::new(*last), holder.clone(), key.clone());
        self.timetable.insert((expires_at, key.clone()));
        self.index.insert(id, key.clone());
        let record = Record { key: key.clone(), id, acquired_at, expires_at, fence, holder };
        self.records.insert(key, record);
        Ok(fence)
    }

    fn set_expiry(&mut self, record: &Record, expires_at: u64) -> Result<(), Infallible> {
        if let Some(stored) = self.records.get_mut(&record.key) {
            stored.expires_at = expires_at;
        }
        self.timetable.remove(&(record.expires_at, record.key.clone()));
        self.timetable.insert((expires_at, record.key.clone()));
        Ok(())
    }

    fn remove(&mut self, record: &Record) -> Result<(), Infallible> {
        self.records.remove(&record.key);
        self.timetable.remove(&(record.expires_at, record.key.clone()));
        Ok(())
    }

    fn remove_id(&mut self, id: LockId) -> Result<(), Infallible> {
        self.index.remove(&id);
        Ok(())
    }

    fn expired(&self, now: u64) -> Result<Vec<Record>, Infallible> {
        let due = self.timetable.iter().take_while(|(expires_at, _)| *expires_at <= now);
        Ok(due.filter_map(|(_, key)| self.records.get(key).cloned()).collect())
    }
}

impl LockMachine {
    /// Creates a machine whose fences are all greater than `floor`.
    pub(crate) fn with_fences_above(floor: u64) -> Self {
        let fences = Fences::Together(floor);
        Self { rows: LocksInMemory { fences, ..LocksInMemory::default() } }
    }

    /// Returns at most `limit` locks that are held, ordered by key.
    pub(crate) fn list(&self, limit: usize, now: u64) -> Vec<Record> {
        let records = self.rows.records.values();
        let live = records.filter(|record| is_live(record.expires_at, now));
        let mut live: Vec<_> = live.cloned().collect();
        live.sort_by(|a, b| a.key.cmp(&b.key));
        live.truncate(limit);
        live
    }

    /// Makes the index of an id point to a key, whatever id holds that key. A store that has lost one of its two
    /// entries can be in this state.
    #[cfg(test)]
    pub(crate) fn mislead(&mut self, id: LockId, key: &Name) {
        self.rows.index.insert(id, key.clone());
    }

    #[cfg(test)]
    pub(crate) fn records(&self) -> impl Iterator<Item = &Record> {
        self.rows.records.values()
    }
}
