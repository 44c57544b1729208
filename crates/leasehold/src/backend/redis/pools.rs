//! Pools on Redis: their keys, and one script for each operation.

use std::time::Duration;

use super::command::RedisCommand;
use super::connection::Connection;
use super::scripts::{Scripts, unexpected};
use super::slots::KeyTag;
use super::stats::{self, Pages};
use super::topology::Topology;
use super::value::Value;
use crate::Error;
use crate::backend::Slot;
use crate::machine::pool::PoolQuery;
use crate::machine::pool::{PoolAction, PoolCommand, PoolOutcome, Status};
use crate::stats::{PoolMember, PoolStats};

#[cfg(test)]
mod tests;

pub(super) const PRELUDE: &str = include_str!("lua/pool/prelude.lua");

/// The scripts after the prelude.
pub(super) const BODIES: [&str; 4] = [
    include_str!("lua/pool/acquire.lua"),
    include_str!("lua/pool/renew.lua"),
    include_str!("lua/pool/release.lua"),
    include_str!("lua/pool/count.lua"),
];

/// Returns the script call for a command: the only place that knows the order of its KEYS and ARGV. `pool` is the name
/// as it is written in a key.
pub(super) fn call(scripts: &Scripts, pool: &str, command: &PoolCommand) -> RedisCommand {
    let (at, instance) = match &command.action {
        PoolAction::Acquire { instance, .. } => (0, Some(instance)),
        PoolAction::Renew { instance } => (1, Some(instance)),
        PoolAction::Release { instance } => (2, Some(instance)),
        PoolAction::Count => (3, None),
    };
    let mut call = RedisCommand::script_call(&scripts.pools[at].hash);
    call.push(if instance.is_some() { "2" } else { "1" });
    call.push_fmt(format_args!("semaphores:{pool}"));
    if let Some(instance) = instance {
        call.push_fmt(format_args!("{HOLDERS}{pool}:{instance}"));
    }
    call.push_fmt(command.ttl.micros() / 1000);
    if let Some(instance) = instance {
        call.push(instance.as_str());
    }
    if let PoolAction::Acquire { capacity, .. } = &command.action {
        call.push_fmt(capacity);
    }
    call
}

/// The error for a key of the wrong type. Redis does not say which key it is.
pub(super) fn misplaced(connection: &Connection, command: &PoolCommand) -> Error {
    let key = format!("semaphores:{}", command.pool);
    let problem = format!("the key {key:?} on {} is not a pool", connection.address);
    Error::foreign(problem + ": choose another name")
}

/// Returns the pools that have members, ordered by name.
pub(super) async fn list(
    topology: &Topology,
    key_tag: KeyTag,
    which: PoolQuery,
) -> Result<Vec<PoolStats>, Error> {
    let (names, limit) = match which {
        PoolQuery::First(limit) => {
            let mut keys = stats::scan(topology, "semaphores:*").await?;
            keys.retain(|key| !key.starts_with(HOLDERS));
            let name = |key: &String| key.strip_prefix("semaphores:").map(str::to_owned);
            (keys.iter().filter_map(name).collect(), limit)
        }
        PoolQuery::Named(name) => (vec![key_tag.write(name.as_str()).into_owned()], 1),
    };
    let mut pools = Vec::new();
    for (home, names) in stats::by_server(topology, names, key_of) {
        pools.extend(members_of(topology, home, key_tag, &names).await?);
        pools.sort_by(|a: &PoolStats, b| a.name.cmp(&b.name));
        pools.truncate(limit);
    }
    Ok(pools)
}

const HOLDERS: &str = "semaphores:holders:";

fn key_of(written: &str) -> String {
    format!("semaphores:{written}")
}

/// Reads some pools of one server, by their names as they are written in keys. Pools without members, and keys of other
/// programs, are left out.
async fn members_of(
    topology: &Topology,
    home: Slot,
    key_tag: KeyTag,
    names: &[String],
) -> Result<Vec<PoolStats>, Error> {
    let pages = names.iter().map(|name| Pages::new(key_of(name), 0..usize::MAX));
    let pages: Vec<_> = pages.collect();
    let first = pages.iter().map(Pages::call);
    let (now, first) = stats::ask_with_time(topology, home, first).await?;
    // The members of all pools, each with the index of its pool.
    let (mut pools, mut all) = (Vec::new(), Vec::new());
    for ((name, mut pages), first) in names.iter().zip(pages).zip(first) {
        let mut members = match first {
            Err(Error::ForeignData { .. }) => continue,
            first => pages.add(stats::read(first?)?),
        };
        while let Some(page) = pages.next(topology).await? {
            members.extend(page);
        }
        if !members.is_empty() {
            all.extend(members.into_iter().map(|(instance, last)| (pools.len(), instance, last)));
            pools.push((name, Vec::new()));
        }
    }
    for members in all.chunks(stats::PAGE) {
        let left = members.iter().map(|(pool, instance, _)| {
            // Another program may use any bytes as an instance id.
            let key = [format!("{HOLDERS}{}:", pools[*pool].0).as_bytes(), instance].concat();
            RedisCommand::new("PTTL").arg(key)
        });
        let left = topology.query(home, left.collect()).await?;
        for ((pool, instance, last), left) in members.iter().zip(left) {
            pools[*pool].1.push(PoolMember {
                id: String::from_utf8_lossy(instance).into_owned(),
                silent_for: now.since(stats::time_of(*last, now)),
                expires_in: stats::read(left).ok().map(Duration::from_millis),
            });
        }
    }
    let found = pools.into_iter().map(|(name, members)| {
        let name = key_tag.read(name).to_owned();
        PoolStats { name, members }
    });
    Ok(found.collect())
}

/// Decodes an answer. No status travels further inward as text.
pub(super) fn decode(value: &Value) -> Result<PoolOutcome, String> {
    let Value::Array(fields) = value else { return Err(unexpected(value)) };
    let (status, current, expired) = match &fields[..] {
        [Value::Int(current), Value::Int(expired)] => (Status::Counted, current, expired),
        [Value::Int(_), Value::Text(status), Value::Int(current), Value::Int(expired)] => {
            let status = match &status[..] {
                b"acquired" => Status::Acquired,
                b"capacity_full" => Status::CapacityFull,
                b"renewed" => Status::Renewed,
                b"not_held" => Status::NotHeld,
                b"expired" => Status::Expired,
                b"released" => Status::Released,
                b"already_expired" => Status::AlreadyExpired,
                _ => return Err(unexpected(value)),
            };
            (status, current, expired)
        }
        _ => return Err(unexpected(value)),
    };
    let count = |number: &i64| u64::try_from(*number).map_err(|error| error.to_string());
    Ok(PoolOutcome { status, current: count(current)?, expired: count(expired)? })
}
