//! Pools on Redis: keys, and one script an operation.

use std::sync::Arc;

use redis::{Cmd, Value};

use super::link::Link;
use super::scripts::Scripts;
use crate::Error;
use crate::backend::{Later, PoolStore};
use crate::machine::pool::{Answer, Ask, Status, What};

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
pub(super) fn call(scripts: &Scripts, ask: &Ask) -> Cmd {
    let (at, instance) = match &ask.what {
        What::Acquire { instance, .. } => (0, Some(instance)),
        What::Renew { instance } => (1, Some(instance)),
        What::Release { instance } => (2, Some(instance)),
        What::Count => (3, None),
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
    if let What::Acquire { capacity, .. } = &ask.what {
        cmd.arg(*capacity);
    }
    cmd
}

/// The pools of one server.
pub(super) struct RedisPools(pub(super) Arc<Link>);

impl PoolStore for RedisPools {
    fn ask(&self, ask: Ask) -> Later<Answer> {
        let link = self.0.clone();
        let cmd = call(&link.scripts, &ask);
        Box::pin(async move {
            let answer = match link.send(vec![cmd]).await {
                Err(Error::InvalidArgument { .. }) => {
                    let (pool, address) = (&ask.pool, &link.settings.address);
                    let key = format!("semaphores:{pool}");
                    let problem = format!("the key {key:?} on {address} is not a pool");
                    return Err(Error::invalid("name", problem + ": choose another name"));
                }
                answer => answer?.pop().unwrap_or(Value::Nil),
            };
            decode(&answer).map_err(Error::internal)
        })
    }
}

/// Reads an answer, once and for all: no status travels further in as text.
pub(super) fn decode(value: &Value) -> Result<Answer, String> {
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
    Ok(Answer { status, current: count(current)?, expired: count(expired)? })
}
