//! `leasehold ls`: lists semaphores, locks and pools.
//!
//! Each kind is a [`Section`]: a table, and the same content as JSON.

use leasehold::{Client, LockInfo, PoolStats, SemaphoreStats};
use serde_json::Value;

use super::limit::rate;
use crate::args::LsArgs;
use crate::failure::Failure;
use crate::output::{self, ago, counted, or_dash, table};
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
    let stats = if all { query.unused().await? } else { query.await? };
    let titles = ["SEMAPHORE", "HELD", "OF", "USE", "WAITING", "OLDEST HOLD", "OLDEST WAIT"];
    let rows = stats.iter().map(row);
    let table = (!stats.is_empty()).then(|| table(titles, &[1, 2, 3, 4, 5, 6], rows));
    let json = stats.iter().map(output::summary).collect();
    Ok(Section { title: "semaphores", table, json })
}

/// Lists locks with their keys, but without their ids, because a lock id can release its lock.
async fn locks(client: &Client) -> Result<Section, Failure> {
    let locks = client.locks().list(usize::MAX).await?;
    let row = |lock: &LockInfo| {
        [lock.key.clone(), ago(lock.age()), ago(lock.expires_in()), lock.fence.to_string()]
    };
    let titles = ["LOCK", "FOR", "LEASE LEFT", "FENCE"];
    let table = (!locks.is_empty()).then(|| table(titles, &[1, 2], locks.iter().map(row)));
    Ok(Section { title: "locks", table, json: output::json(&locks) })
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
    Ok(Section { title: "pools", table, json: output::json(&pools) })
}

fn row(one: &SemaphoreStats) -> [String; 7] {
    [
        one.name.clone(),
        held(one),
        capacity(one),
        or_dash((!one.is_unlimited()).then(|| format!("{:.0}%", one.percent()))),
        one.waiting.to_string(),
        or_dash(one.oldest_hold().map(ago)),
        or_dash(one.oldest_wait.map(ago)),
    ]
}

/// Returns the number of permits, and the number of units if it differs.
fn held(one: &SemaphoreStats) -> String {
    let (held, units) = (one.held, one.held_units);
    if held == units { held.to_string() } else { format!("{held} ({})", counted(units, "unit")) }
}

/// Returns the capacity with pin, pause and rate.
fn capacity(one: &SemaphoreStats) -> String {
    let capacity = or_dash(one.limited_to().map(|limit| limit.to_string()));
    let pinned = if one.pinned.is_some() { " pinned" } else { "" };
    let paused = if one.paused.is_some() { " paused" } else { "" };
    let rate = rate(one).map(|rate| format!(", {rate}")).unwrap_or_default();
    format!("{capacity}{pinned}{paused}{rate}")
}
