//! What is held and queued on Redis, read in pipelines: exact for each name, not across names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use redis::{Cmd, FromRedisValue, Value, cmd};

use super::link::Link;
use crate::Error;
use crate::stats::{Member, Query, SemaphoreStats};

/// How many names are asked about at once.
const AT_ONCE: usize = 100;

pub(super) async fn fetch(link: &Link, query: Query) -> Result<Vec<SemaphoreStats>, Error> {
    let asked_for = query.names.is_some();
    let names = match query.names {
        Some(names) => names,
        None => all_names(link).await?.into_iter().collect(),
    };
    let mut stats = Vec::with_capacity(names.len());
    for names in names.chunks(AT_ONCE) {
        match of(link, names, query.waiters).await {
            Ok(some) => stats.extend(some),
            Err(Error::InvalidArgument { .. }) => {
                stats.extend(one_by_one(link, names, query.waiters, asked_for).await?);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(stats)
}

/// Somebody else has put something in the place of one of them. Who asked for that one is told; for who asked for all, it
/// is none of ours.
async fn one_by_one(
    link: &Link,
    names: &[String],
    waiters: bool,
    asked_for: bool,
) -> Result<Vec<SemaphoreStats>, Error> {
    let mut stats = Vec::new();
    for name in names {
        match of(link, std::slice::from_ref(name), waiters).await {
            Ok(one) => stats.extend(one),
            Err(Error::InvalidArgument { problem, .. }) if asked_for => {
                return Err(Error::invalid("name", format!("{name:?}: {problem}")));
            }
            Err(error @ Error::InvalidArgument { .. }) => {
                tracing::warn!(name, %error, "left out of the statistics");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(stats)
}

/// Every name that is held, queued for, or has a capacity: another program declares one only when it holds.
/// Once for all three, because a scan goes through all keys there are.
async fn all_names(link: &Link) -> Result<BTreeSet<String>, Error> {
    let ns = &link.settings.namespace;
    let prefixes = ["main", "max", "waiting"].map(|kind| format!("{ns}:semaphore_{kind}:"));
    // Also `waiting_heartbeat`, but none of the others.
    let keys = scan(link, &format!("{}:semaphore_[mw]a*:*", escaped(ns))).await?;
    let name_of = |key: &String| {
        prefixes.iter().find_map(|prefix| key.strip_prefix(prefix)).map(str::to_owned)
    };
    Ok(keys.iter().filter_map(name_of).collect())
}

/// A text that a pattern of `SCAN` takes for itself.
pub(super) fn escaped(text: &str) -> String {
    let special = |c| matches!(c, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// The keys that match. `SCAN`, so that the server goes on serving.
pub(super) async fn scan(link: &Link, pattern: &str) -> Result<BTreeSet<String>, Error> {
    let (mut found, mut cursor) = (BTreeSet::new(), 0_u64);
    loop {
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1000);
        let (next, keys): (u64, Vec<String>) = one(link, scan).await?;
        found.extend(keys);
        if next == 0 {
            return Ok(found);
        }
        cursor = next;
    }
}

async fn of(link: &Link, names: &[String], waiters: bool) -> Result<Vec<SemaphoreStats>, Error> {
    let ns = &link.settings.namespace;
    let mut calls = vec![cmd("TIME")];
    for name in names {
        let key = |kind: &str| format!("{ns}:semaphore_{kind}:{name}");
        let call = |command: &str, kind: &str, arguments: &[&str]| {
            let mut call = cmd(command);
            call.arg(key(kind)).arg(arguments);
            call
        };
        calls.push(call("GET", "max", &[]));
        calls.push(call("ZRANGE", "main", &["0", "-1", "WITHSCORES"]));
        calls.push(call("ZRANGE", "ttl", &["0", "-1", "WITHSCORES"]));
        calls.push(call("ZCARD", "waiting", &[]));
        // Only the head, unless everybody is asked for.
        let last = if waiters { "-1" } else { "0" };
        calls.push(call("ZRANGE", "waiting", &["0", last, "WITHSCORES"]));
        calls.push(call("ZRANGE", "waiting_heartbeat", &["0", last, "WITHSCORES"]));
    }
    let mut answers = link.send(calls).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Value::Nil);
    let (seconds, micros): (f64, f64) = read(next())?;
    let now = seconds + micros / 1e6;
    let mut stats = Vec::new();
    for name in names {
        let capacity: Option<String> = read(next())?;
        let capacity = capacity.map(|text| {
            let problem = || format!("its capacity is {text:?}, which is not a number");
            text.parse().map_err(|_| Error::invalid("name", problem()))
        });
        let capacity: Option<u32> = capacity.transpose()?;
        let main: Scores = read(next())?;
        let ttl: BTreeMap<String, f64> = read::<Scores>(next())?.0.into_iter().collect();
        let waiting = read(next())?;
        let queue: Scores = read(next())?;
        let alive: BTreeMap<String, f64> = read::<Scores>(next())?.0.into_iter().collect();
        let holder = |(id, renew_by): (String, f64)| {
            let ends = ttl.get(&id).map_or(renew_by, |hold_until| hold_until.min(renew_by));
            (ends > now)
                .then(|| Member { ends_in: Some(seconds_between(now, ends)), ..unknown(id) })
        };
        let waiter = |(id, since): (String, f64)| Member {
            age: Some(seconds_between(since, now)),
            ends_in: alive.get(&id).map(|alive_by| seconds_between(now, *alive_by)),
            ..unknown(id)
        };
        stats.push(SemaphoreStats {
            name: name.clone(),
            capacity: capacity.unwrap_or_default(),
            holders: main.0.into_iter().filter_map(holder).collect(),
            waiting,
            oldest_wait: queue.0.first().map(|(_, since)| seconds_between(*since, now)),
            waiters: queue.0.into_iter().filter(|_| waiters).map(waiter).collect(),
        });
    }
    describe(link, &mut stats, now).await?;
    Ok(stats)
}

/// All that is known of an id by itself.
fn unknown(id: String) -> Member {
    let (label, host, pid, age, ends_in, fence) = (None, None, None, None, None, None);
    Member { id, label, host, pid, age, ends_in, fence }
}

fn client_of(member: &Member) -> Option<&str> {
    Some(member.id.split_once('-')?.0)
}

/// Adds what is known of each member: its label, fence and age, and the host and process of its client.
async fn describe(link: &Link, stats: &mut [SemaphoreStats], now: f64) -> Result<(), Error> {
    let ns = &link.settings.namespace;
    let mut calls = Vec::new();
    let mut clients = BTreeSet::new();
    for one in &*stats {
        let members = || one.holders.iter().chain(&one.waiters);
        if members().next().is_some() {
            let mut info = cmd("HMGET");
            info.arg(format!("{ns}:semaphore_info:{}", one.name));
            info.arg(members().map(|member| member.id.as_str()).collect::<Vec<_>>());
            calls.push(info);
        }
        clients.extend(members().filter_map(client_of).map(str::to_owned));
    }
    for client in &clients {
        let mut who = cmd("HMGET");
        who.arg(format!("{ns}:client:{client}")).arg("host").arg("pid");
        calls.push(who);
    }
    if calls.is_empty() {
        return Ok(());
    }
    let mut answers = link.send(calls).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Value::Nil);
    let mut described: Vec<&mut Member> = Vec::new();
    for one in &mut *stats {
        let mut members: Vec<_> = one.holders.iter_mut().chain(&mut one.waiters).collect();
        if members.is_empty() {
            continue;
        }
        let infos: Vec<Option<String>> = read(next())?;
        for (member, info) in members.iter_mut().zip(infos) {
            let info = info.unwrap_or_default();
            let mut fields = info.splitn(5, ' ');
            member.fence = fields.next().and_then(|fence| fence.parse().ok());
            let since = fields.next().and_then(|since| since.parse::<f64>().ok());
            // A waiter's place says more exactly since when.
            member.age = member.age.or(since.map(|since| seconds_between(since / 1e6, now)));
            member.label = fields.nth(2).filter(|label| !label.is_empty()).map(str::to_owned);
        }
        described.append(&mut members);
    }
    let mut known = BTreeMap::new();
    for client in clients {
        known.insert(client, read::<(Option<String>, Option<u32>)>(next())?);
    }
    for member in described {
        if let Some((host, pid)) = client_of(member).and_then(|client| known.get(client)) {
            member.host.clone_from(host);
            member.pid = *pid;
        }
    }
    for one in stats {
        one.holders.sort_by_key(|member| std::cmp::Reverse(member.age));
    }
    Ok(())
}

/// Members with their scores. RESP2 and RESP3 shape them differently.
struct Scores(Vec<(String, f64)>);

impl FromRedisValue for Scores {
    fn from_redis_value(value: Value) -> Result<Self, redis::ParsingError> {
        Vec::<(String, f64)>::from_redis_value(value).map(Self)
    }
}

async fn one<T: FromRedisValue>(link: &Link, call: Cmd) -> Result<T, Error> {
    read(link.send(vec![call]).await?.pop().unwrap_or(Value::Nil))
}

pub(super) fn read<T: FromRedisValue>(value: Value) -> Result<T, Error> {
    redis::from_redis_value(value).map_err(|error| Error::internal(error.to_string()))
}

pub(super) fn seconds_between(earlier: f64, now: f64) -> Duration {
    Duration::from_secs_f64((now - earlier).max(0.0))
}
