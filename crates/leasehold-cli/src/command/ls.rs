//! `leasehold ls`: what is held, and how many wait.
//!
//! Each kind of thing is a [`Section`]: a table for people, and the same as JSON.

use std::io::IsTerminal;
use std::time::{Duration, SystemTime};

use leasehold::{Client, PoolStats, RawLockInfo, SemaphoreStats};
use serde_json::{Value, json};

use super::limit::{paused_json, rate, rate_json, waits_for};
use super::show::pool_member_json;
use crate::args::LsArgs;
use crate::failure::Failure;
use crate::output::{self, ago, or_dash, seconds, table};
use crate::store::{self, Store};

const NOTHING: &str = "nothing is held, and nobody waits";
const REDRAW: Duration = Duration::from_secs(1);
/// Clears the terminal and goes to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

pub(crate) fn run(arguments: &LsArgs) -> Result<u8, Failure> {
    if arguments.watch && !std::io::stdout().is_terminal() {
        return Err(Failure::usage("--watch redraws a terminal, and stdout is none: leave it out"));
    }
    store::block_on(async {
        let client = Store::new(&arguments.store)?.look().await?;
        loop {
            let sections = sections(&client, arguments.all).await?;
            if arguments.json {
                output::print_json(&as_json(sections))?;
            } else if arguments.watch {
                output::print(&format!("{CLEAR}{}", as_text(&sections)))?;
                tokio::time::sleep(REDRAW).await;
                continue;
            } else {
                output::print(&as_text(&sections))?;
            }
            return Ok(0);
        }
    })
}

/// One kind of thing.
struct Section {
    title: &'static str,
    /// None if there is none of it.
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

/// With their keys, but without what releases them.
async fn locks(client: &Client) -> Result<Section, Failure> {
    let locks = client.locks().list_raw(usize::MAX).await?;
    let now = SystemTime::now();
    let held_for =
        |lock: &RawLockInfo| now.duration_since(lock.info.acquired_at).unwrap_or_default();
    let ends_in = |lock: &RawLockInfo| lock.info.expires_at.duration_since(now).unwrap_or_default();
    let row = |lock: &RawLockInfo| {
        [lock.key.clone(), ago(held_for(lock)), ago(ends_in(lock)), lock.info.fence.to_string()]
    };
    let titles = ["LOCK", "FOR", "ENDS IN", "FENCE"];
    let table = (!locks.is_empty()).then(|| table(titles, &[1, 2], locks.iter().map(row)));
    let one = |lock: &RawLockInfo| {
        json!({
            "key": lock.key,
            "lock_id_hash": lock.info.lock_id_hash,
            "for_seconds": seconds(Some(held_for(lock))),
            "ends_in_seconds": seconds(Some(ends_in(lock))),
            "fence": lock.info.fence.to_string(),
        })
    };
    Ok(Section { title: "locks", table, json: locks.iter().map(one).collect() })
}

/// The store does not know how many leases a pool has: those who use it do.
async fn pools(client: &Client) -> Result<Section, Failure> {
    let pools = client.pools().list(usize::MAX).await?;
    let silent_for = |pool: &PoolStats| pool.members.iter().map(|one| one.silent_for).max();
    let row = |pool: &PoolStats| {
        [pool.name.clone(), pool.members.len().to_string(), or_dash(silent_for(pool).map(ago))]
    };
    let titles = ["POOL", "HELD", "LONGEST SILENCE"];
    let table = (!pools.is_empty()).then(|| table(titles, &[1, 2], pools.iter().map(row)));
    let one = |pool: &PoolStats| {
        let members: Value = pool.members.iter().map(pool_member_json).collect();
        json!({ "name": pool.name, "held": pool.members.len(), "members": members })
    };
    Ok(Section { title: "pools", table, json: pools.iter().map(one).collect() })
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

/// How many permits, and how many units if those are more.
fn held(one: &SemaphoreStats) -> String {
    let (held, units) = (one.held(), one.units());
    if held == units { held.to_string() } else { format!("{held} ({units} units)") }
}

/// With what an operator has set, and the rate.
fn capacity(one: &SemaphoreStats) -> String {
    let limited = (1..u32::MAX).contains(&one.capacity());
    let capacity = or_dash(limited.then(|| one.capacity().to_string()));
    let pinned = if one.pinned().is_some() { " pinned" } else { "" };
    let paused = if one.paused().is_some() { " paused" } else { "" };
    let rate = rate(one).map(|rate| format!(", {rate}")).unwrap_or_default();
    format!("{capacity}{pinned}{paused}{rate}")
}

/// The numbers of one semaphore; `show` adds who they are.
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
