//! The machine of the fenced lock.
//!
//! State: `records`, one a key, `{id, acquired_at, expires_at, fence, holder}`; `index`, `id → key`, by which a lock is found
//! when only its id is known; `fences`, the last fence of each key, or of all, which outlives every record.
//!
//! *Exclusive:* a key has one record, and only a record that is not [live](is_live) is replaced. *Owned:* whoever
//! ends or extends a lock names its id, and the record must name it too; an index that has gone stale hits nobody
//! else's lock. *Fenced:* every acquire counts the key's fence up, and nothing ever counts it down. *Safe to repeat:*
//! acquiring again with the same id answers the same lock.
//!
//! Time is the store's, in milliseconds since the epoch. A store lets a record cease to exist at its TTL
//! ([`let_go`](LockMachine::let_go)); should it find one that is older, the predicate decides.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::name::Name;
use crate::{Fence, LockId};

mod command;

pub(crate) use command::{LockCommand, LockOutcome, NotifyWhen};

/// By how much a record that is found may have outlived its time, because two clocks are never alike.
pub(crate) const TOLERANCE_MS: u64 = 1000;

/// How long a record must have been over before a mere question removes it.
pub(crate) const CLEAN_UP_AFTER_MS: u64 = 2000;

/// The one predicate of every store: whether a record that was found still holds its lock.
pub(crate) fn is_live(expires_at: u64, now: u64) -> bool {
    expires_at > now.saturating_sub(TOLERANCE_MS)
}

/// The process that acquired a lock, for people to see: no transition looks at it. A record of another program has none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Holder {
    pub(crate) host: Option<Arc<str>>,
    pub(crate) pid: Option<u32>,
    pub(crate) label: Option<Arc<str>>,
}

/// What is known of a lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub(crate) key: Name,
    pub(crate) id: LockId,
    pub(crate) acquired_at: u64,
    pub(crate) expires_at: u64,
    pub(crate) fence: Fence,
    pub(crate) holder: Arc<Holder>,
}

/// What becomes of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Acquired {
    /// It is the caller's, for so many milliseconds.
    Held { fence: Fence, expires_at: u64, remaining: u64 },
    /// Somebody else has it, for so many milliseconds if nothing is done about it.
    Locked { remaining: u64 },
}

/// What becomes of a release or an extend. The codes are those that other programs use for the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict<T> {
    /// 1
    Done(T),
    /// 0: the id points at a lock that is another's.
    NotOwner,
    /// -1
    NotFound,
    /// -2: it was there, and over.
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

/// By what a lock is looked up.
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
    /// When which record ceases to exist.
    timetable: BTreeSet<(u64, Name)>,
}

/// How fences are counted.
#[derive(Debug)]
enum Fences {
    /// Key by key, for as long as there is a store.
    EachKey(HashMap<Name, u64>),
    /// All keys together: nothing is kept of a key that nobody holds.
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
    /// One whose fences are all above this.
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

    /// Answers the key that has come free.
    pub(crate) fn release(&mut self, id: LockId, now: u64) -> Verdict<Name> {
        self.owned(id, now, |machine, key| {
            machine.remove(&key);
            key
        })
    }

    /// Replaces what is left of the TTL. Answers the new end.
    pub(crate) fn extend(&mut self, id: LockId, ttl: u64, now: u64) -> Verdict<u64> {
        self.owned(id, now, |machine, key| {
            let expires_at = now + ttl;
            if let Some(record) = machine.records.get_mut(&key) {
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

    /// Whether the key is locked. Only with `clean_up` does asking change anything, and never a fence.
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

    /// Who holds what, by key; no more than so many.
    pub(crate) fn list(&self, limit: usize, now: u64) -> Vec<Record> {
        let live = self.records.values().filter(|record| is_live(record.expires_at, now));
        let mut live: Vec<_> = live.cloned().collect();
        live.sort_by(|a, b| a.key.cmp(&b.key));
        live.truncate(limit);
        live
    }

    /// Lets every record whose TTL is over cease to exist.
    pub(crate) fn let_go(&mut self, now: u64) {
        while let Some((expires_at, key)) = self.timetable.first().cloned()
            && expires_at <= now
        {
            self.remove(&key);
        }
    }

    /// With its index, but never its fence.
    fn remove(&mut self, key: &Name) {
        if let Some(record) = self.records.remove(key) {
            self.index.remove(&record.id);
            self.timetable.remove(&(record.expires_at, key.clone()));
        }
    }

    /// Points an id at a key, whoever has that: as a store may that lost one of its two keys.
    #[cfg(test)]
    pub(crate) fn mislead(&mut self, id: LockId, key: &Name) {
        self.index.insert(id, key.clone());
    }

    #[cfg(test)]
    pub(crate) fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }
}
