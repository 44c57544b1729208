//! `leasehold ls`: lists semaphores, locks and pools.
//!
//! Each kind is a [`Section`]: a table, and the same content as JSON.

use std::time::SystemTime;

use leasehold::{Client, LockInfo, PoolStats, SemaphoreStats};
use serde_json::{Value, json};

use super::limit::{paused_json, rate, rate_json, waits_for};
use super::show::pool_member_json;
use crate::args::LsArgs;
use crate::failure::Failure;
use crate::output::{self, ago, counted, or_dash, seconds, table};
use crate::store::{self, Store};

const NOTHING: &str = "no holders and no waiters";

pub(crate) fn run(arguments: &LsArgs) -> Result<u8, Failure> {
    if arguments.watch {
        let advice = "use `leasehold top`, or `leasehold show --watch NAME` for one name";
        return Err(Failure::usage(format!("ls --watch was replaced: {advice}")));
    }
    store::block_on(async {
        let client = Store::new(&arguments.store)?.open_read_only().await?;
        let sections = sections(&client, arguments.all).await?;
        if arguments.json {
            output::print_json(&as_json(sections))?;
        } else {
            output::print(&as_text(&sections))?;
        }
        Ok(0)
    })
}

/// One kind: semaphores, locks or pools.
struct Section {
    title: &'static str,
    /// `None` if the list is empty.
    table: Option<String>,
    json: Value,
}

async fn sections(client: &Client, all: bool) -> Result<Vec<Section>, Failure> {
    Ok(vec![semaphores(client, all).await?, locks(client).await?, pools(client).await?])
}

fn as_json(sections: Vec<Section>) -> Value {
    sections.into_iter().map(|section| (section.title, section.json)).collect()
}

fn as_text(sections: &[Section]) -> String {
    let tables: Vec<_> = sections.iter().filter_map(|section| section.table.as_deref()).collect();
    if tables.is_empty() { format!("{NOTHING}\n") } else { tables.join("\n") }
}

async fn semaphores(client: &Client, all: bool) -> Result<Section, Failure> {
    let query = client.stats().limit(usize::MAX);
    let stats = if all { query.unused() } else { query }.fetch().await?;
    let titles = ["SEMAPHORE", "HELD", "OF", "USE", "WAITING", "OLDEST HOLD", "OLDEST WAIT"];
    let rows = stats.iter().map(row);
    let table = (!stats.is_empty()).then(|| table(titles, &[1, 2, 3, 4, 5, 6], rows));
    let json = stats.iter().map(semaphore_json).collect();
    Ok(Section { title: "semaphores", table, json })
}

/// Lists locks with their keys, but without their ids, because a lock id can release its lock.
async fn locks(client: &Client) -> Result<Section, Failure> {
    let locks = client.locks().list(usize::MAX).await?;
    let now = SystemTime::now();
    let held_for = |lock: &LockInfo| now.duration_since(lock.acquired_at).unwrap_or_default();
    let ends_in = |lock: &LockInfo| lock.expires_at.duration_since(now).unwrap_or_default();
    let row = |lock: &LockInfo| {
        [lock.key.clone(), ago(held_for(lock)), ago(ends_in(lock)), lock.fence.to_string()]
    };
    let titles = ["LOCK", "FOR", "LEASE LEFT", "FENCE"];
    let table = (!locks.is_empty()).then(|| table(titles, &[1, 2], locks.iter().map(row)));
    Ok(Section { title: "locks", table, json: locks.iter().map(lock_json).collect() })
}

/// Returns a lock as JSON, without its id, which could release it.
pub(super) fn lock_json(lock: &LockInfo) -> Value {
    let now = SystemTime::now();
    let held_for = now.duration_since(lock.acquired_at).unwrap_or_default();
    let ends_in = lock.expires_at.duration_since(now).unwrap_or_default();
    json!({
        "key": lock.key,
        "lock_id_hash": lock.lock_id_hash,
        "for_seconds": seconds(Some(held_for)),
        "ends_in_seconds": seconds(Some(ends_in)),
        "fence": lock.fence.to_string(),
    })
}

/// Lists pools. The store does not know the capacity of a pool; only its users do.
async fn pools(client: &Client) -> Result<Section, Failure> {
    let pools = client.pools().list(usize::MAX).await?;
    let silent_for = |pool: &PoolStats| pool.members.iter().map(|one| one.silent_for).max();
    let row = |pool: &PoolStats| {
        [pool.name.clone(), pool.members.len().to_string(), or_dash(silent_for(pool).map(ago))]
    };
    let titles = ["POOL", "HELD", "LONGEST SILENCE"];
    let table = (!pools.is_empty()).then(|| table(titles, &[1, 2], pools.iter().map(row)));
    Ok(Section { title: "pools", table, json: pools.iter().map(pool_json).collect() })
}

pub(super) fn pool_json(pool: &PoolStats) -> Value {
    let members: Value = pool.members.iter().map(pool_member_json).collect();
    json!({ "name": pool.name, "held": pool.members.len(), "members": members })
}

fn row(one: &SemaphoreStats) -> [String; 7] {
    [
        one.name().to_owned(),
        held(one),
        capacity(one),
        or_dash((one.capacity() < u32::MAX).then(|| format!("{:.0}%", one.percent()))),
        one.waiting().to_string(),
        or_dash(one.oldest_hold().map(ago)),
        or_dash(one.oldest_wait().map(ago)),
    ]
}

/// Returns the number of permits, and the number of units if it differs.
fn held(one: &SemaphoreStats) -> String {
    let (held, units) = (one.held(), one.units());
    if held == units { held.to_string() } else { format!("{held} ({})", counted(units, "unit")) }
}

/// Returns the capacity with pin, pause and rate.
fn capacity(one: &SemaphoreStats) -> String {
    let limited = (1..u32::MAX).contains(&one.capacity());
    let capacity = or_dash(limited.then(|| one.capacity().to_string()));
    let pinned = if one.pinned().is_some() { " pinned" } else { "" };
    let paused = if one.paused().is_some() { " paused" } else { "" };
    let rate = rate(one).map(|rate| format!(", {rate}")).unwrap_or_default();
    format!("{capacity}{pinned}{paused}{rate}")
}

/// Returns the numbers of one semaphore as JSON. `show` adds its holders and waiters.
pub(super) fn semaphore_json(one: &SemaphoreStats) -> Value {
    json!({
        "name": one.name(),
        "capacity": one.capacity(),
        "declared": one.declared(),
        "pinned": one.pinned(),
        "paused": paused_json(one),
        "rate": rate_json(one),
        "held": one.held(),
        "units": one.units(),
        "waiting": one.waiting(),
        "waits_for": waits_for(one),
        "oldest_hold_seconds": seconds(one.oldest_hold()),
        "oldest_wait_seconds": seconds(one.oldest_wait()),
    })
}
