//! Pools on Redis: keys, and one script an operation.

use std::time::Duration;

use redis::{Cmd, Value};

use super::link::Link;
use super::scripts::Scripts;
use super::stats;
use crate::Error;
use crate::machine::pool::{PoolAction, PoolCommand, PoolOutcome, Status};
use crate::pool::{PoolMember, PoolStats, Which};

#[cfg(test)]
mod tests;

pub(super) const PRELUDE: &str = include_str!("lua/pool/prelude.lua");

/// What follows the prelude.
pub(super) const BODIES: [&str; 4] = [
    include_str!("lua/pool/acquire.lua"),
    include_str!("lua/pool/renew.lua"),
    include_str!("lua/pool/release.lua"),
    include_str!("lua/pool/count.lua"),
];

/// The call of the script that this asks for: the one place that knows the order of its KEYS and ARGV.
pub(super) fn call(scripts: &Scripts, ask: &PoolCommand) -> Cmd {
    let (at, instance) = match &ask.action {
        PoolAction::Acquire { instance, .. } => (0, Some(instance)),
        PoolAction::Renew { instance } => (1, Some(instance)),
        PoolAction::Release { instance } => (2, Some(instance)),
        PoolAction::Count => (3, None),
    };
    let mut cmd = redis::cmd("EVALSHA");
    cmd.arg(&scripts.pools[at].hash).arg(if instance.is_some() { 2 } else { 1 });
    cmd.arg(format!("semaphores:{}", ask.pool));
    if let Some(instance) = instance {
        cmd.arg(format!("semaphores:holders:{}:{instance}", ask.pool));
    }
    cmd.arg(ask.ttl.micros() / 1000);
    if let Some(instance) = instance {
        cmd.arg(instance.as_str());
    }
    if let PoolAction::Acquire { capacity, .. } = &ask.action {
        cmd.arg(*capacity);
    }
    cmd
}

/// Redis does not say which key had the wrong type.
pub(super) fn misplaced(link: &Link, command: &PoolCommand) -> Error {
    let key = format!("semaphores:{}", command.pool);
    let problem = format!("the key {key:?} on {} is not a pool", link.settings.address);
    Error::invalid("name", problem + ": choose another name")
}

/// The pools that have members, by name.
pub(super) async fn list(link: &Link, which: Which) -> Result<Vec<PoolStats>, Error> {
    let limit = match which {
        Which::First(limit) => limit,
        Which::Named(name) => return Ok(look(link, name.as_str()).await?.into_iter().collect()),
    };
    let mut keys = stats::scan(link, "semaphores:*").await?;
    keys.retain(|key| !key.starts_with(HOLDERS));
    let mut pools = Vec::new();
    for key in keys {
        if pools.len() < limit
            && let Some(name) = key.strip_prefix("semaphores:")
        {
            pools.extend(look(link, name).await?);
        }
    }
    Ok(pools)
}

const HOLDERS: &str = "semaphores:holders:";

/// One pool. None if it is gone, or is none of ours.
async fn look(link: &Link, name: &str) -> Result<Option<PoolStats>, Error> {
    let mut range = redis::cmd("ZRANGE");
    range.arg(format!("semaphores:{name}")).arg(&["0", "-1", "WITHSCORES"]);
    let mut answers = link.send_each(vec![redis::cmd("TIME"), range]).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
    let (seconds, micros): (f64, f64) = stats::read(next()?)?;
    let Ok(members) = next() else { return Ok(None) };
    let members: Vec<(String, f64)> = stats::read(members)?;
    if members.is_empty() {
        // Nothing is asked about nobody: no answer would come.
        return Ok(None);
    }
    let left = members.iter().map(|(instance, _)| {
        let mut left = redis::cmd("PTTL");
        left.arg(format!("{HOLDERS}{name}:{instance}"));
        left
    });
    let left = link.send(left.collect()).await?;
    let member = |((instance_id, last), left): ((String, f64), Value)| PoolMember {
        instance_id,
        silent_for: stats::seconds_between(last, seconds + micros / 1e6),
        ends_in: stats::read(left)
            .ok()
            .and_then(|left: i64| u64::try_from(left).ok())
            .map(Duration::from_millis),
    };
    let members: Vec<_> = members.into_iter().zip(left).map(member).collect();
    Ok(Some(PoolStats { name: name.to_owned(), members }))
}

/// Reads an answer, once and for all: no status travels further in as text.
pub(super) fn decode(value: &Value) -> Result<PoolOutcome, String> {
    let unexpected = || format!("a pool answered {value:?}");
    let Value::Array(fields) = value else { return Err(unexpected()) };
    let (status, current, expired) = match &fields[..] {
        [Value::Int(current), Value::Int(expired)] => (Status::Counted, current, expired),
        [Value::Int(_), Value::BulkString(status), Value::Int(current), Value::Int(expired)] => {
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
