//! `leasehold show`: shows the holders and waiters of everything that has this name.

use std::ops::Range;

use leasehold::{
    Client, Error, LockInfo, PoolMember, PoolStats, SemaphoreMember, SemaphoreStats, WaitsFor,
};
use serde_json::{Value, json};

use super::limit::{paused, rate};
use crate::args::ShowArgs;
use crate::failure::{Failure, NOTHING_THERE, log_line};
use crate::output::{self, Style, ago, counted, one_line, or_dash, styled, table};
use crate::store::{self, Store};

pub(crate) fn run(arguments: &ShowArgs) -> Result<u8, Failure> {
    if arguments.watch {
        return super::top::watch(&arguments.store, &arguments.name);
    }
    store::block_on(async {
        let client = Store::new(&arguments.store)?.open_read_only().await?;
        let found = find_named(&client, &arguments.name).await?;
        if found.is_empty() {
            return Err(nothing(&arguments.name));
        }
        if arguments.json {
            output::print_json(&as_json(found))?;
        } else {
            output::print(&as_text(&found))?;
        }
        Ok(0)
    })
}

pub(super) fn nothing(name: &str) -> Failure {
    let message = format!("there is no semaphore, lock or pool {name:?}");
    Failure::new(NOTHING_THERE, message + ": see `leasehold ls --all`")
}

/// The semaphore, lock or pool of that name.
struct NamedResource {
    kind: &'static str,
    heading: &'static str,
    text: String,
    json: Value,
}

/// Returns everything that has the name. If the store denies access to one kind, the others are still shown.
async fn find_named(client: &Client, name: &str) -> Result<Vec<NamedResource>, Failure> {
    let (mut found, mut refused) = (Vec::new(), None);
    let semaphore = find(client, name).await.map(|one| one.as_ref().map(NamedResource::semaphore));
    let lock = client.locks().lookup(name).await.map(|one| one.as_ref().map(NamedResource::lock));
    let pool = client.pools().lookup(name).await.map(|one| one.as_ref().map(NamedResource::pool));
    for (kind, answer) in [("semaphore", semaphore), ("lock", lock), ("pool", pool)] {
        match answer {
            Ok(one) => found.extend(one),
            // A name that is invalid for a lock or a pool cannot be one, which is not an error here.
            Err(Error::InvalidArgument { .. }) if kind != "semaphore" => {}
            Err(
                error @ (Error::InvalidArgument { .. }
                | Error::ForeignData { .. }
                | Error::Denied { .. }),
            ) => {
                refused.get_or_insert((kind, error));
            }
            Err(error) => return Err(error.into()),
        }
    }
    match refused {
        Some((_, error)) if found.is_empty() => Err(error.into()),
        Some((kind, error)) => {
            log_line(&format!("could not check for a {kind} {name:?}: {error}"));
            Ok(found)
        }
        None => Ok(found),
    }
}

/// Returns the semaphore, or `None` if it was never used and has no limits.
pub(super) async fn find(client: &Client, name: &str) -> Result<Option<SemaphoreStats>, Error> {
    find_with(client, name, 0..usize::MAX).await
}

/// Returns the semaphore with the waiters at these places.
pub(super) async fn find_with(
    client: &Client,
    name: &str,
    places: Range<usize>,
) -> Result<Option<SemaphoreStats>, Error> {
    let stats = client.stats().names([name]).unused().waiters_in(places).await?;
    Ok(stats.into_iter().find(|one| {
        let is_limited = one.capacity > 0 || one.paused.is_some() || one.rate.is_some();
        is_limited || one.held > 0 || one.waiting > 0
    }))
}

fn as_text(found: &[NamedResource]) -> String {
    if let [only] = found {
        return only.text.clone();
    }
    let part = |one: &NamedResource| format!("{}\n{}", styled(one.heading, Style::Bold), one.text);
    found.iter().map(part).collect::<Vec<_>>().join("\n")
}

/// Returns the first kind found, with the other kinds in `also`. The fields of a semaphore stay at the top level.
fn as_json(found: Vec<NamedResource>) -> Value {
    let mut all = found.into_iter().map(|one| {
        let mut value = one.json;
        value["kind"] = one.kind.into();
        value
    });
    let mut first = all.next().unwrap_or_default();
    first["also"] = all
        .map(|mut one| {
            one["also"] = json!([]);
            one
        })
        .collect();
    first
}

/// Returns a summary line and a table of the members.
fn summed_up(name: &str, summary: &str, table: Option<String>) -> String {
    let line = format!("{}: {summary}\n", styled(&one_line(name), Style::Bold));
    table.map_or(line.clone(), |table| format!("{line}\n{table}"))
}

impl NamedResource {
    fn semaphore(stats: &SemaphoreStats) -> Self {
        let (held, limit, waiting) = (stats.held, stats.limited_to(), stats.waiting);
        let pinned = if stats.pinned.is_some() { " (pinned)" } else { "" };
        let paused = paused(stats).map(|paused| format!("; {paused}")).unwrap_or_default();
        let of = limit.map(|limit| format!(" of {limit}")).unwrap_or_default();
        let used = if stats.held_units == held {
            format!("{held}{of}{pinned} held")
        } else {
            let unit = if stats.held_units == 1 && limit.is_none() { "unit" } else { "units" };
            let permits = counted(held, "permit");
            format!("{}{of}{pinned} {unit} held by {permits}", stats.held_units)
        };
        // Waiting for room or for the end of a pause needs no explanation here.
        let waits =
            stats.waits_for.filter(|waits| !matches!(waits, WaitsFor::Room | WaitsFor::Resume));
        let waits = waits.map(|waits| format!("; the first waits for {waits}"));
        let waits = waits.unwrap_or_default();
        let rate = rate(stats).map(|rate| format!("; rate: {rate}")).unwrap_or_default();
        let summary = format!("{used}, {waiting} waiting{waits}{rate}{paused}");
        let places = stats.waiters.iter().enumerate();
        let waiters = places.map(|(at, waiter)| row(&format!("{}.", at + 1), waiter));
        let members: Vec<_> =
            stats.holders.iter().map(|holder| row("held", holder)).chain(waiters).collect();
        let titles = [
            "PLACE",
            "ID",
            "HOST",
            "PID",
            "LABEL",
            "FOR",
            "SILENT FOR",
            "TTL LEFT",
            "SLOT",
            "UNITS",
            "FENCE",
        ];
        let table = (!members.is_empty()).then(|| table(titles, &[3, 5, 6, 7, 8, 9], members));
        let text = summed_up(&stats.name, &summary, table);
        Self { kind: "semaphore", heading: "Semaphore", text, json: output::json(stats) }
    }

    /// Describes a lock without its id, because a lock id can release its lock.
    fn lock(info: &LockInfo) -> Self {
        let row = [
            or_dash(info.host.clone()),
            or_dash(info.pid.map(|pid| pid.to_string())),
            or_dash(info.label.clone()),
            ago(info.age()),
            ago(info.expires_in()),
            info.fence.to_string(),
        ];
        let titles = ["HOST", "PID", "LABEL", "FOR", "LEASE LEFT", "FENCE"];
        let text = summed_up(&info.key, "locked", Some(table(titles, &[1, 3, 4], [row])));
        let json = json!({ "name": info.key, "held": 1, "holders": [info] });
        Self { kind: "lock", heading: "Lock", text, json }
    }

    fn pool(pool: &PoolStats) -> Self {
        let row = |one: &PoolMember| {
            [one.id.clone(), ago(one.silent_for), or_dash(one.expires_in.map(ago))]
        };
        let titles = ["INSTANCE", "SILENT FOR", "LEASE LEFT"];
        let table = table(titles, &[1, 2], pool.members.iter().map(row));
        // The store does not know the capacity of a pool; only its users do.
        let text = summed_up(&pool.name, &format!("{} held", pool.members.len()), Some(table));
        let json =
            json!({ "name": pool.name, "held": pool.members.len(), "holders": pool.members });
        Self { kind: "pool", heading: "Pool", text, json }
    }
}

fn row(place: &str, member: &SemaphoreMember) -> [String; 11] {
    [
        place.to_owned(),
        member.id.clone(),
        or_dash(member.host.clone()),
        or_dash(member.pid.map(|pid| pid.to_string())),
        or_dash(member.label.clone()),
        or_dash(member.age.map(ago)),
        or_dash(member.silent_for.map(ago)),
        or_dash(member.ttl_ends_in.map(ago)),
        or_dash(member.slot_number.map(|slot| slot.to_string())),
        member.weight.to_string(),
        or_dash(member.fence.map(|fence| fence.to_string())),
    ]
}
