//! The changes in a store, newest last: grants, releases, losses, and changed limits.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, SystemTime};

use leasehold::{LockInfo, PoolMember, PoolStats, SemaphoreMember, SemaphoreStats};

use super::Snapshot;

/// The number of events that are kept.
const KEPT: usize = 1000;
/// The number of grants and releases of one poll that become events. A fast semaphore has thousands, which would displace
/// all other events.
const MOST_PER_POLL: usize = 100;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Semaphore,
    Lock,
    Pool,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Semaphore => "semaphore",
            Self::Lock => "lock",
            Self::Pool => "pool",
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Grows by one with each event.
    pub(crate) number: u64,
    pub(crate) at: SystemTime,
    /// The name that it is about; `None` for the store.
    pub(crate) subject: Option<(Kind, String)>,
    pub(crate) change: Change,
}

/// What happened. `who` describes a holder: label, host, process, as far as known, or its id.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Granted {
        who: String,
    },
    Released {
        who: String,
        held_for: Option<Duration>,
    },
    /// Its lease or TTL ended without a release.
    Expired {
        who: String,
        held_for: Option<Duration>,
    },
    /// The capacity in force changed, by a declaration, a pin or the end of one.
    Capacity {
        from: u32,
        to: u32,
        pinned: bool,
    },
    RateChanged,
    Paused {
        by: String,
        reason: Option<String>,
    },
    Resumed,
    /// An operator acted in this console: what was done and by whom.
    Acted {
        what: String,
        by: String,
    },
    StoreUnreachable {
        problem: String,
    },
    StoreBack {
        after: Duration,
    },
}

impl Change {
    /// Returns the kind of event as one word, for scripts and for colours.
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            Self::Granted { .. } => "granted",
            Self::Released { .. } => "released",
            Self::Expired { .. } => "expired",
            Self::Capacity { .. } => "capacity",
            Self::RateChanged => "rate",
            Self::Paused { .. } => "paused",
            Self::Resumed => "resumed",
            Self::Acted { .. } => "action",
            Self::StoreUnreachable { .. } => "unreachable",
            Self::StoreBack { .. } => "reachable",
        }
    }

    /// Describes the event in a sentence without its subject. It contains text of other programs: escape it.
    pub(crate) fn describe(&self) -> String {
        let after = |held_for: &Option<Duration>| {
            held_for.map(|span| format!(" after {}", crate::output::ago(span))).unwrap_or_default()
        };
        match self {
            Self::Granted { who } => format!("granted to {who}"),
            Self::Released { who, held_for } => format!("released by {who}{}", after(held_for)),
            Self::Expired { who, held_for } => {
                format!("lost by {who}{}: it expired", after(held_for))
            }
            Self::Capacity { from, to, pinned } => {
                let pinned = if *pinned { ", pinned" } else { "" };
                format!("limit changed from {from} to {to}{pinned}")
            }
            Self::RateChanged => "rate changed".to_owned(),
            Self::Paused { by, reason } => {
                let reason = reason.as_ref().map(|reason| format!(": {reason}"));
                format!("paused by {by}{}", reason.unwrap_or_default())
            }
            Self::Resumed => "resumed".to_owned(),
            Self::Acted { what, by } => format!("{what} (by {by})"),
            Self::StoreUnreachable { problem } => format!("store unreachable: {problem}"),
            Self::StoreBack { after } => {
                format!("store reachable again after {}", crate::output::ago(*after))
            }
        }
    }
}

/// The newest events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    newest: VecDeque<Event>,
    next: u64,
}

impl Events {
    /// The newest last.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Event> + ExactSizeIterator {
        self.newest.iter()
    }

    pub(crate) fn add(&mut self, kind: Kind, name: &str, change: Change) {
        self.push(Some((kind, name.to_owned())), change);
    }

    pub(super) fn add_store(&mut self, change: Change) {
        self.push(None, change);
    }

    fn push(&mut self, subject: Option<(Kind, String)>, change: Change) {
        let (number, at) = (self.next, SystemTime::now());
        self.next += 1;
        self.newest.push_back(Event { number, at, subject, change });
        if self.newest.len() > KEPT {
            self.newest.pop_front();
        }
    }

    /// Adds the differences between two snapshots. Returns how many permits of each semaphore were granted in between.
    pub(super) fn compare(&mut self, before: &Snapshot, after: &Snapshot) -> HashMap<String, u32> {
        let between = after.at.duration_since(before.at).unwrap_or_default();
        let mut comparison = Comparison { events: self, between, left: MOST_PER_POLL };
        let mut grants = HashMap::new();
        let earlier: HashMap<_, _> =
            before.semaphores.iter().map(|one| (&*one.name, one)).collect();
        for one in &after.semaphores {
            if let Some(before) = earlier.get(&*one.name) {
                comparison.limits(before, one);
            }
            let count = comparison.semaphore(earlier.get(&*one.name).copied(), one);
            if count > 0 {
                grants.insert(one.name.clone(), count);
            }
        }
        let names: HashSet<_> = after.semaphores.iter().map(|one| &*one.name).collect();
        for gone in before.semaphores.iter().filter(|one| !names.contains(&*one.name)) {
            comparison.ended(&gone.name, gone.holders.iter());
        }
        if after.hidden.is_empty() && before.hidden.is_empty() {
            comparison.locks(&before.locks, &after.locks);
            comparison.pools(&before.pools, &after.pools);
        }
        grants
    }
}

struct Comparison<'a> {
    events: &'a mut Events,
    /// The time between the two snapshots.
    between: Duration,
    /// How many more grants and releases may become events.
    left: usize,
}

impl Comparison<'_> {
    fn add(&mut self, kind: Kind, name: &str, change: Change) {
        if self.left > 0 {
            self.left -= 1;
            self.events.add(kind, name, change);
        }
    }

    fn limits(&mut self, before: &SemaphoreStats, after: &SemaphoreStats) {
        let (name, pinned) = (&*after.name, after.pinned.is_some());
        let (from, to) = (before.capacity, after.capacity);
        if from > 0 && to > 0 && (from != to || before.pinned.is_some() != pinned) {
            self.events.add(Kind::Semaphore, name, Change::Capacity { from, to, pinned });
        }
        if before.rate != after.rate {
            self.events.add(Kind::Semaphore, name, Change::RateChanged);
        }
        match (&before.paused, &after.paused) {
            (None, Some(paused)) => {
                let (by, reason) = (paused.by.clone(), paused.reason.clone());
                self.events.add(Kind::Semaphore, name, Change::Paused { by, reason });
            }
            (Some(_), None) => self.events.add(Kind::Semaphore, name, Change::Resumed),
            _ => {}
        }
    }

    /// The number of new holders.
    fn semaphore(&mut self, before: Option<&SemaphoreStats>, after: &SemaphoreStats) -> u32 {
        let held: &[SemaphoreMember] = before.map_or(&[], |before| &before.holders);
        let earlier: HashSet<_> = held.iter().map(|one| &*one.id).collect();
        let now: HashSet<_> = after.holders.iter().map(|one| &*one.id).collect();
        self.ended(&after.name, held.iter().filter(|one| !now.contains(&*one.id)));
        let mut grants = 0;
        for new in after.holders.iter().filter(|one| !earlier.contains(&*one.id)) {
            grants += 1;
            self.add(Kind::Semaphore, &after.name, Change::Granted { who: who(new) });
        }
        grants
    }

    fn ended<'m>(&mut self, name: &str, holders: impl Iterator<Item = &'m SemaphoreMember>) {
        for one in holders {
            let held_for = one.age.map(|age| age + self.between);
            let change = self.end(who(one), one.expires_in, held_for);
            self.add(Kind::Semaphore, name, change);
        }
    }

    fn locks(&mut self, before: &[LockInfo], after: &[LockInfo]) {
        let earlier: HashSet<_> = before.iter().map(|lock| (&lock.key, lock.fence)).collect();
        let now: HashSet<_> = after.iter().map(|lock| (&lock.key, lock.fence)).collect();
        for lock in before.iter().filter(|lock| !now.contains(&(&lock.key, lock.fence))) {
            let at = SystemTime::now();
            let left = lock.expires_at.duration_since(at).unwrap_or_default() + self.between;
            let held_for = at.duration_since(lock.acquired_at).ok();
            let change = self.end(holder(lock), Some(left), held_for);
            self.add(Kind::Lock, &lock.key, change);
        }
        for lock in after.iter().filter(|lock| !earlier.contains(&(&lock.key, lock.fence))) {
            self.add(Kind::Lock, &lock.key, Change::Granted { who: holder(lock) });
        }
    }

    fn pools(&mut self, before: &[PoolStats], after: &[PoolStats]) {
        let (before, after) = (members(before), members(after));
        for (member, one) in before.iter().filter(|(member, _)| !after.contains_key(*member)) {
            let change = self.end(one.id.clone(), one.expires_in, None);
            self.add(Kind::Pool, member.0, change);
        }
        for (member, one) in after.iter().filter(|(member, _)| !before.contains_key(*member)) {
            let who = one.id.clone();
            self.add(Kind::Pool, member.0, Change::Granted { who });
        }
    }

    /// Describes the end of a lease. If it had less time left than has passed, it expired.
    fn end(&self, who: String, left: Option<Duration>, held_for: Option<Duration>) -> Change {
        if left.is_some_and(|left| left <= self.between) {
            Change::Expired { who, held_for }
        } else {
            Change::Released { who, held_for }
        }
    }
}

/// The members of all pools, by pool and instance.
fn members(pools: &[PoolStats]) -> BTreeMap<(&str, &str), &PoolMember> {
    let mut all = BTreeMap::new();
    for pool in pools {
        for one in &pool.members {
            all.insert((pool.name.as_str(), one.id.as_str()), one);
        }
    }
    all
}

/// Returns the known ones of label, host and process, or the id.
pub(crate) fn who(member: &SemaphoreMember) -> String {
    describe(member.label.as_deref(), member.host.as_deref(), member.pid)
        .unwrap_or_else(|| member.id.clone())
}

fn holder(lock: &LockInfo) -> String {
    let info = &lock;
    describe(info.label.as_deref(), info.host.as_deref(), info.pid)
        .unwrap_or_else(|| format!("fence {}", info.fence))
}

fn describe(label: Option<&str>, host: Option<&str>, pid: Option<u32>) -> Option<String> {
    let place = match (host, pid) {
        (Some(host), Some(pid)) => Some(format!("{host} pid {pid}")),
        (Some(host), None) => Some(host.to_owned()),
        (None, Some(pid)) => Some(format!("pid {pid}")),
        (None, None) => None,
    };
    match (label, place) {
        (Some(label), Some(place)) => Some(format!("{label} ({place})")),
        (Some(label), None) => Some(label.to_owned()),
        (None, place) => place,
    }
}
