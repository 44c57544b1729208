//! The filtered and sorted rows of a list.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime};

use leasehold::{LockInfo, PoolStats};

use crate::monitor::{Kind, Monitor, Snapshot};

/// The sort keys. All of them sort by name last, so that equal rows keep their places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    Use,
    Waiting,
    OldestWait,
    Grants,
    Name,
    Age,
    Ends,
    Held,
    Silence,
}

impl Sort {
    /// Returns the sort keys of this kind, the default first.
    pub(super) fn all(kind: Kind) -> &'static [Self] {
        match kind {
            Kind::Semaphore => {
                &[Self::Use, Self::Waiting, Self::OldestWait, Self::Grants, Self::Name]
            }
            Kind::Lock => &[Self::Name, Self::Age, Self::Ends],
            Kind::Pool => &[Self::Name, Self::Held, Self::Silence],
        }
    }

    pub(super) fn next(self, kind: Kind) -> Self {
        let all = Self::all(kind);
        let at = all.iter().position(|sort| *sort == self).unwrap_or_default();
        all[(at + 1) % all.len()]
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Use => "use",
            Self::Waiting => "waiting",
            Self::OldestWait => "oldest wait",
            Self::Grants => "grants/s",
            Self::Name => "name",
            Self::Age => "held for",
            Self::Ends => "ends in",
            Self::Held => "held",
            Self::Silence => "longest silence",
        }
    }
}

/// The rows of one kind: positions in the snapshot.
pub(super) fn rows(monitor: &Monitor, kind: Kind, sort: Sort, filter: &str) -> Vec<usize> {
    let Some(snapshot) = monitor.latest() else { return Vec::new() };
    let filter = filter.to_lowercase();
    let matches = |at: &usize| {
        filter.is_empty() || name(snapshot, kind, *at).to_lowercase().contains(&filter)
    };
    let mut rows: Vec<_> = (0..count(snapshot, kind)).filter(matches).collect();
    let name_of = |at: usize| name(snapshot, kind, at);
    match (kind, sort) {
        (_, Sort::Name) => rows.sort_by_key(|at| name_of(*at)),
        (Kind::Semaphore, sort) => {
            let all = &snapshot.semaphores;
            match sort {
                Sort::Waiting => {
                    rows.sort_by_key(|at| (Reverse(all[*at].waiting), name_of(*at)));
                }
                Sort::OldestWait => {
                    rows.sort_by_key(|at| (Reverse(all[*at].oldest_wait), name_of(*at)));
                }
                Sort::Grants => {
                    let grants = |at: usize| {
                        let history = monitor.history(&all[at].name);
                        history.map_or(0.0, crate::monitor::History::grants_per_second)
                    };
                    let mut keyed: Vec<_> = rows.iter().map(|at| (grants(*at), *at)).collect();
                    keyed.sort_by(|a, b| {
                        b.0.total_cmp(&a.0).then_with(|| name_of(a.1).cmp(name_of(b.1)))
                    });
                    rows = keyed.into_iter().map(|(_, at)| at).collect();
                }
                // The snapshot is in this order.
                _ => {}
            }
        }
        (Kind::Lock, sort) => rows.sort_by_key(|at| {
            let info = &snapshot.locks[*at];
            let time = if sort == Sort::Ends { info.expires_at } else { info.acquired_at };
            (time, name_of(*at))
        }),
        (Kind::Pool, Sort::Held) => {
            rows.sort_by_key(|at| (Reverse(snapshot.pools[*at].members.len()), name_of(*at)));
        }
        (Kind::Pool, _) => {
            rows.sort_by_key(|at| (Reverse(longest_silence(&snapshot.pools[*at])), name_of(*at)));
        }
    }
    rows
}

pub(super) fn count(snapshot: &Snapshot, kind: Kind) -> usize {
    match kind {
        Kind::Semaphore => snapshot.semaphores.len(),
        Kind::Lock => snapshot.locks.len(),
        Kind::Pool => snapshot.pools.len(),
    }
}

pub(super) fn name(snapshot: &Snapshot, kind: Kind, at: usize) -> &str {
    match kind {
        Kind::Semaphore => &snapshot.semaphores[at].name,
        Kind::Lock => &snapshot.locks[at].key,
        Kind::Pool => &snapshot.pools[at].name,
    }
}

pub(super) fn longest_silence(pool: &PoolStats) -> Option<Duration> {
    pool.members.iter().map(|one| one.silent_for).max()
}

/// Returns how long a lock has been held, and how long it is still valid.
pub(super) fn spans(lock: &LockInfo, now: SystemTime) -> (Duration, Duration) {
    let held_for = now.duration_since(lock.acquired_at).unwrap_or_default();
    let expires_in = lock.expires_at.duration_since(now).unwrap_or_default();
    (held_for, expires_in)
}
