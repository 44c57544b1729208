//! Pools on Redis: their keys, and one script for each operation.

use std::collections::BTreeMap;
use std::time::Duration;

use super::command::RedisCommand;
use super::connection::Connection;
use super::scripts::Scripts;
use super::slots::KeyTag;
use super::stats;
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
pub(super) fn call(scripts: &Scripts, pool: &str, ask: &PoolCommand) -> RedisCommand {
    let (at, instance) = match &ask.action {
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
    call.push_fmt(ask.ttl.micros() / 1000);
    if let Some(instance) = instance {
        call.push(instance.as_str());
    }
    if let PoolAction::Acquire { capacity, .. } = &ask.action {
        call.push_fmt(capacity);
    }
    call
}

/// The error for a key of the wrong type. Redis does not say which key it is.
pub(super) fn misplaced(connection: &Connection, command: &PoolCommand) -> Error {
    let key = format!("semaphores:{}", command.pool);
    let problem = format!("the key {key:?} on {} is not a pool", connection.address);
    Error::invalid("name", problem + ": choose another name")
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
        PoolQuery::Named(name) => (vec![key_tag.write(name.as_str())], 1),
    };
    // Pools of one server are read together, because silence is measured by that server's clock.
    let mut by_server: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for name in names {
        let to = topology.destination(topology.slot(&key_of(&name)));
        by_server.entry(to).or_default().push(name);
    }
    let mut pools = Vec::new();
    for names in by_server.values().flat_map(|names| names.chunks(AT_ONCE)) {
        pools.extend(look(topology, key_tag, names).await?);
        pools.sort_by(|a: &PoolStats, b| a.name.cmp(&b.name));
        pools.truncate(limit);
    }
    Ok(pools)
}

const HOLDERS: &str = "semaphores:holders:";

/// How many pools are read at once, and how many members in one reply.
const AT_ONCE: usize = 100;
const PAGE: usize = 500;

fn key_of(written: &str) -> String {
    format!("semaphores:{written}")
}

/// Instances, as Redis stores them, each with the time of its last renewal.
type Instances = Vec<(Vec<u8>, f64)>;

/// Reads some pools of one server, by their names as they are written in keys. Pools without members, and keys of other
/// programs, are left out.
async fn look(
    topology: &Topology,
    key_tag: KeyTag,
    names: &[String],
) -> Result<Vec<PoolStats>, Error> {
    let home = names.first().map_or(Slot::ONLY, |name| topology.slot(&key_of(name)));
    let page = |name: &String, from: usize| {
        let range = RedisCommand::new("ZRANGE").arg(key_of(name));
        range.arg_fmt(from).arg_fmt(from + PAGE - 1).arg("WITHSCORES")
    };
    let first = names.iter().map(|name| page(name, 0));
    let calls = [RedisCommand::new("TIME")].into_iter().chain(first).collect();
    let mut answers = topology.ask_each(home, calls).await?.into_iter();
    let (seconds, micros): (f64, f64) = stats::read(answers.next().unwrap_or(Ok(Value::Nil))?)?;
    // Another program may use any bytes as an instance id.
    let mut found: Vec<(&String, Instances)> = Vec::new();
    for (name, answer) in names.iter().zip(answers) {
        let mut members: Instances = match answer {
            Err(Error::InvalidArgument { .. }) => continue,
            answer => stats::read(answer?)?,
        };
        let mut last = members.len();
        while last == PAGE {
            let more = topology.ask(home, vec![page(name, members.len())]).await?;
            let more: Instances = stats::read(more.into_iter().next().unwrap_or(Value::Nil))?;
            last = more.len();
            members.extend(more);
        }
        if !members.is_empty() {
            found.push((name, members));
        }
    }
    let left = found.iter().flat_map(|(name, members)| {
        members.iter().map(move |(instance, _)| {
            let key = [format!("{HOLDERS}{name}:").as_bytes(), instance].concat();
            RedisCommand::new("PTTL").arg(key)
        })
    });
    let left: Vec<_> = left.collect();
    let mut ends = Vec::with_capacity(left.len());
    for left in left.chunks(PAGE) {
        ends.extend(topology.ask(home, left.to_vec()).await?);
    }
    let mut ends = ends.into_iter();
    let mut pools = Vec::with_capacity(found.len());
    for (name, members) in found {
        let member = |(instance, last): (Vec<u8>, f64)| PoolMember {
            instance_id: String::from_utf8_lossy(&instance).into_owned(),
            silent_for: stats::seconds_between(last, seconds + micros / 1e6),
            ends_in: ends
                .next()
                .and_then(|left| stats::read::<i64>(left).ok())
                .and_then(|left| u64::try_from(left).ok())
                .map(Duration::from_millis),
        };
        let members = members.into_iter().map(member).collect();
        pools.push(PoolStats { name: key_tag.read(name).to_owned(), members });
    }
    Ok(pools)
}

/// Decodes an answer. No status travels further inward as text.
pub(super) fn decode(value: &Value) -> Result<PoolOutcome, String> {
    let unexpected = || format!("unexpected answer to a command for a pool: {value:?}");
    let Value::Array(fields) = value else { return Err(unexpected()) };
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
                _ => return Err(unexpected()),
            };
            (status, current, expired)
        }
        _ => return Err(unexpected()),
    };
    let count = |number: &i64| u64::try_from(*number).map_err(|error| error.to_string());
    Ok(PoolOutcome { status, current: count(current)?, expired: count(expired)? })
}
