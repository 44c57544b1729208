//! The details of one name: its limits, holders and queue.

use std::time::{Duration, Instant, SystemTime};

use leasehold::{
    Client, Error, LockInfo, PoolMember, PoolStats, Semaphore, SemaphoreMember, SemaphoreStats,
    WaitsFor,
};

use super::list;
use crate::action::Action;
use crate::command::limit::{paused, rate};
use crate::command::show::find_with;
use crate::monitor::{self, Kind};
use crate::output::{ago, counted, or_dash};

/// The number of holders, and of waiters, that are listed.
const LISTED: usize = 500;

/// The details of one name.
#[derive(Debug)]
pub(super) enum Detail {
    Semaphore(Box<SemaphoreStats>),
    Lock(Box<LockInfo>),
    Pool(PoolStats),
}

/// A holder or a waiter. The cells are not escaped.
#[derive(Debug)]
pub(super) struct Entry {
    /// The id that distinguishes it from the others.
    pub(super) id: String,
    pub(super) cells: Vec<String>,
    /// The action that releases or cancels it, and its description.
    pub(super) release: (Action, String),
}

impl Detail {
    /// Reads one name. Returns `None` if it does not exist, and how long to wait before the next read.
    pub(super) async fn fetch(
        client: &Client,
        kind: Kind,
        name: &str,
    ) -> (Result<Option<Self>, Error>, Duration) {
        let began = Instant::now();
        let read = monitor::unless_lost(client, Self::read(client, kind, name)).await;
        let rest = match &read {
            Ok(_) => monitor::rest(began.elapsed()),
            Err(_) => monitor::SHORTEST_REST,
        };
        (read.map_err(|failure| failure.error), rest)
    }

    async fn read(client: &Client, kind: Kind, name: &str) -> Result<Option<Self>, Error> {
        Ok(match kind {
            Kind::Semaphore => {
                find_with(client, name, 0..LISTED).await?.map(Box::new).map(Self::Semaphore)
            }
            Kind::Lock => client.locks().lookup(name).await?.map(Box::new).map(Self::Lock),
            Kind::Pool => client.pools().lookup(name).await?.map(Self::Pool),
        })
    }

    /// Returns the summary, line by line. The lines are not escaped.
    pub(super) fn summary(&self) -> Vec<String> {
        match self {
            Self::Semaphore(stats) => semaphore_summary(stats),
            Self::Lock(_) => vec!["locked by one holder".to_owned()],
            Self::Pool(pool) => vec![format!("{} held", pool.members.len())],
        }
    }

    /// Returns the holders, and then the waiters in the order of the queue.
    pub(super) fn entries(&self) -> Vec<Entry> {
        match self {
            Self::Semaphore(stats) => {
                let holders = stats.holders.iter().take(LISTED).map(holder);
                let waiters = stats.waiters.iter().take(LISTED).enumerate();
                holders.chain(waiters.map(|(at, member)| waiter(at, member))).collect()
            }
            Self::Lock(lock) => vec![lock_holder(lock)],
            Self::Pool(pool) => pool.members.iter().take(LISTED).map(pool_member).collect(),
        }
    }

    /// Returns how many members are not listed.
    pub(super) fn unlisted(&self) -> Option<String> {
        let more = |all: usize, what: &str| {
            all.checked_sub(LISTED)
                .filter(|more| *more > 0)
                .map(|more| format!("{more} more {what}"))
        };
        let more = match self {
            Self::Semaphore(stats) => {
                let hold = more(stats.holders.len(), "hold");
                hold.into_iter().chain(more(stats.waiting, "wait")).collect::<Vec<_>>()
            }
            Self::Lock(_) => Vec::new(),
            Self::Pool(pool) => more(pool.members.len(), "hold").into_iter().collect(),
        };
        (!more.is_empty()).then(|| more.join(", "))
    }
}

fn semaphore_summary(stats: &SemaphoreStats) -> Vec<String> {
    let (held, units, capacity) = (stats.held, stats.held_units, stats.capacity);
    let limit = match capacity {
        Semaphore::UNLIMITED => "no limit".to_owned(),
        0 => "no limit declared".to_owned(),
        capacity => format!("limit {capacity}"),
    };
    let pinned = match stats.pinned {
        Some(_) if stats.declared == capacity => " pinned".to_owned(),
        Some(_) => format!(" pinned ({} declared)", stats.declared),
        None => String::new(),
    };
    let held = if held == units {
        format!("{held} held")
    } else {
        format!("{} held by {}", counted(units, "unit"), counted(held, "permit"))
    };
    let oldest = stats.oldest_wait.map(|wait| format!(" for up to {}", ago(wait)));
    let waiting = format!("{} waiting{}", stats.waiting, oldest.unwrap_or_default());
    let mut lines = vec![format!("{limit}{pinned}; {held}; {waiting}")];
    if let Some(rate) = rate(stats) {
        let next = stats.next_token.filter(|next| !next.is_zero());
        let next = next.map(|next| format!("; the next in {}", ago(next))).unwrap_or_default();
        lines.push(format!("rate: {rate}{next}"));
    }
    lines.extend(paused(stats));
    lines.extend(stats.waits_for.map(|waits_for| first_waits(stats, waits_for)));
    lines
}

fn first_waits(stats: &SemaphoreStats, waits_for: WaitsFor) -> String {
    let weight = stats.waiters.first().map_or(1, |one| one.weight);
    let units = counted(weight, "unit");
    let (held, capacity) = (stats.held_units, stats.capacity);
    match waits_for {
        WaitsFor::Room => {
            let are = if held == 1 { "is" } else { "are" };
            format!("the first in the queue needs {units}: {held} of {capacity} {are} held")
        }
        WaitsFor::Rate => "the first in the queue waits for the rate".to_owned(),
        WaitsFor::Resume => "the first in the queue waits until it is resumed".to_owned(),
        WaitsFor::Capacity => {
            format!("the first in the queue needs {units}, and the limit is {capacity}: raise it")
        }
        WaitsFor::Client => {
            "the first in the queue cannot be reached; others are granted before it".to_owned()
        }
        other => format!("the first in the queue waits for {other}"),
    }
}

fn holder(member: &SemaphoreMember) -> Entry {
    let action = Action::Release { id: member.id.clone() };
    entry("held".to_owned(), member, action)
}

fn waiter(at: usize, member: &SemaphoreMember) -> Entry {
    entry(format!("{}.", at + 1), member, Action::Cancel { id: member.id.clone() })
}

fn entry(place: String, member: &SemaphoreMember, action: Action) -> Entry {
    let cells = vec![
        place,
        text(member.label.as_deref()),
        text(member.host.as_deref()),
        or_dash(member.pid.map(|pid| pid.to_string())),
        or_dash(member.age.map(ago)),
        or_dash(member.silent_for.map(ago)),
        or_dash(member.ttl_ends_in.map(ago)),
        or_dash(member.fence.map(|fence| fence.to_string())),
        member.weight.to_string(),
        or_dash(member.slot_number.map(|slot| slot.to_string())),
        member.id.clone(),
    ];
    Entry { id: member.id.clone(), cells, release: (action, monitor::who(member)) }
}

fn lock_holder(lock: &LockInfo) -> Entry {
    let info = &lock;
    let (held_for, expires_in) = list::spans(lock, SystemTime::now());
    let cells = vec![
        text(info.label.as_deref()),
        text(info.host.as_deref()),
        or_dash(info.pid.map(|pid| pid.to_string())),
        ago(held_for),
        ago(expires_in),
        info.fence.to_string(),
    ];
    let fence = info.fence.to_string();
    let who = info.label.clone().unwrap_or_else(|| format!("fence {}", info.fence));
    Entry { id: fence.clone(), cells, release: (Action::ReleaseLock { fence }, who) }
}

fn pool_member(one: &PoolMember) -> Entry {
    let instance = one.id.clone();
    let cells = vec![
        instance.clone(),
        ago(one.silent_for),
        one.expires_in.map_or("expired".to_owned(), ago),
    ];
    let action = Action::ReleaseLease { instance: instance.clone() };
    Entry { id: instance.clone(), cells, release: (action, instance) }
}

/// Returns the text, or a dash. An empty label is shown differently from a missing one.
pub(super) fn text(text: Option<&str>) -> String {
    match text {
        None => "-".to_owned(),
        Some("") => "\"\"".to_owned(),
        Some(text) => text.to_owned(),
    }
}
