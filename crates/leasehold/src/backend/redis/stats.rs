//! What is held and queued on Redis, read in pipelines: exact for each name, not across names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use redis::{Cmd, FromRedisValue, Value, cmd};

use super::link::Link;
use super::scripts::KINDS;
use crate::Error;
use crate::clock::{Span, Time};
use crate::engine::foreign::event;
use crate::machine::{Meter, Rate};
use crate::stats::{Limits, Member, Paused, Query, RateLimit, SemaphoreStats};

/// How many names are asked about at once, and how many members: no answer is long, so that it neither fills the output
/// buffer of the server nor keeps the engine's thread.
const AT_ONCE: usize = 100;
const PAGE: usize = 500;

/// In seconds.
const A_HUNDRED_YEARS: f64 = 100.0 * 365.25 * 86_400.0;

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
                let problem = misplaced(link, name).await?.unwrap_or(problem);
                return Err(Error::invalid("name", format!("{name:?}: {problem}")));
            }
            Err(error @ Error::InvalidArgument { .. }) => {
                event!(warn, name, %error, "left out of the statistics");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(stats)
}

/// Redis does not say which key has another type than ours.
async fn misplaced(link: &Link, name: &str) -> Result<Option<String>, Error> {
    for (kind, expected) in KINDS {
        let found: String = one(link, call(link, "TYPE", kind, name)).await?;
        if found != expected && found != "none" {
            let key = key(link, kind, name);
            return Ok(Some(format!(
                "the key {key:?} is not ours: choose another name or namespace"
            )));
        }
    }
    Ok(None)
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
        let (next, keys): (u64, Vec<Vec<u8>>) = one(link, scan).await?;
        for key in keys {
            match String::from_utf8(key) {
                Ok(key) => _ = found.insert(key),
                // No name of ours can be spelled like that.
                Err(error) => {
                    let key = String::from_utf8_lossy(error.as_bytes()).into_owned();
                    event!(warn, key, "left out: the key is not UTF-8");
                }
            }
        }
        if next == 0 {
            return Ok(found);
        }
        cursor = next;
    }
}

async fn of(link: &Link, names: &[String], waiters: bool) -> Result<Vec<SemaphoreStats>, Error> {
    let mut calls = vec![cmd("TIME")];
    for name in names {
        calls.push(call(link, "GET", "max", name));
        calls.push(call(link, "GET", "limits", name));
        calls.push(call(link, "ZCARD", "waiting", name));
        let mut head = call(link, "ZRANGE", "waiting", name);
        head.arg(0).arg(0).arg("WITHSCORES");
        calls.push(head);
    }
    let mut answers = link.send(calls).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Value::Nil);
    let now = seconds(read(next())?);
    let (mut stats, mut heads) = (Vec::new(), Vec::new());
    for name in names {
        let capacity: Option<Vec<u8>> = read(next())?;
        let capacity = capacity.map(|text| {
            let text = String::from_utf8_lossy(&text);
            let key = key(link, "max", name);
            let problem = || format!("the key {key:?} holds {text:?}, which is not a capacity: declare one, or remove it");
            text.parse().map_err(|_| Error::invalid("name", problem()))
        });
        let capacity: Option<u32> = capacity.transpose()?;
        let limits: Option<Vec<u8>> = read(next())?;
        let limits = limits.map(|text| limits_of(&String::from_utf8_lossy(&text), now));
        let mut limits = limits.unwrap_or_default();
        if limits.pinned.is_none() {
            limits.declared = capacity.unwrap_or_default();
        }
        let waiting = read(next())?;
        let head: Scores = read(next())?;
        heads.push(head.0.first().map(|(id, _)| id.clone()));
        stats.push(SemaphoreStats {
            limits,
            waiting,
            oldest_wait: head.0.first().map(|(_, since)| seconds_between(*since, now)),
            ..SemaphoreStats::unused(name.clone())
        });
    }
    let mut clients = BTreeMap::new();
    for (one, head) in stats.iter_mut().zip(heads) {
        one.holders = members(link, &one.name, Role::Holder, now, &mut clients).await?;
        one.holders.sort_by_key(|member| std::cmp::Reverse(member.age));
        one.units = one.holders.iter().map(Member::weight).fold(0, u32::saturating_add);
        if let Some(head) = head {
            let mut info = call(link, "HGET", "info", &one.name);
            info.arg(head);
            let info: Option<Vec<u8>> = self::one(link, info).await?;
            let info = info.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
            let weight = describe(unknown(String::new()), &info, now).weight;
            one.waits_for = Some(one.limits.waits_for(one.units, weight));
        }
        if waiters {
            one.waiters = members(link, &one.name, Role::Waiter, now, &mut clients).await?;
        }
    }
    Ok(stats)
}

/// What is not ordinary of the limits, as `read_capacity` in Lua describes it.
fn limits_of(text: &str, now: f64) -> Limits {
    let mut lines = text.splitn(3, '\n');
    let mut numbers = lines.next().unwrap_or_default().split(' ');
    let mut number = || numbers.next().and_then(|number| number.parse::<u64>().ok());
    let (pinned, declared, paused, _extra) = (number(), number(), number(), number());
    let rate = (number().filter(|interval| *interval > 0), number(), number(), number());
    let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let mut line = || lines.next().filter(|line| !line.is_empty()).map(str::to_owned);
    let (by, reason) = (line().unwrap_or_default(), line());
    #[allow(clippy::cast_precision_loss)] // to the millisecond is enough
    let since = |micros: u64| seconds_between(micros as f64 / 1e6, now);
    let meter = match rate {
        (Some(interval), burst, full_at, returns_from) => Some(Meter {
            rate: Rate {
                interval: Span::from_micros(interval),
                burst: burst.map_or(1, |burst| small(burst).max(1)),
            },
            full_at: Time::from_micros(full_at.unwrap_or_default()),
            returns_from: returns_from.unwrap_or_default(),
        }),
        _ => None,
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // it is a time of day
    let at = Time::from_micros((now * 1e6) as u64);
    Limits {
        rate: meter.map(|meter| RateLimit::new(meter.rate)),
        next_token: meter.and_then(|meter| meter.next_in(at)).map(Span::duration),
        declared: declared.map(small).unwrap_or_default(),
        pinned: pinned.map(small),
        paused: paused.map(|micros| Paused { since: since(micros), by, reason }),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Holder,
    Waiter,
}

/// The host and the process of a client, as far as they are known.
type Clients = BTreeMap<String, (Option<String>, Option<u32>)>;

/// Everybody who holds or waits, page by page. Whoever moves in the queue between two pages is listed once.
async fn members(
    link: &Link,
    name: &str,
    role: Role,
    now: f64,
    clients: &mut Clients,
) -> Result<Vec<Member>, Error> {
    let (mut all, mut seen, mut from) = (Vec::new(), BTreeSet::new(), 0);
    loop {
        let page = page(link, name, role, (from, now), clients).await?;
        from += PAGE;
        let last = page.is_none();
        let page = page.unwrap_or_default();
        all.extend(page.into_iter().filter(|member: &Member| seen.insert(member.id.clone())));
        if last {
            return Ok(all);
        }
    }
}

/// Members from one rank on, as of `now`. None after the last.
async fn page(
    link: &Link,
    name: &str,
    role: Role,
    (from, now): (usize, f64),
    clients: &mut Clients,
) -> Result<Option<Vec<Member>>, Error> {
    let kind = if role == Role::Holder { "main" } else { "waiting" };
    let mut range = call(link, "ZRANGE", kind, name);
    range.arg(from).arg(from + PAGE - 1).arg("WITHSCORES");
    let ranked: Scores = one(link, range).await?;
    let ids: Vec<&[u8]> = ranked.0.iter().map(|(id, _)| id.as_slice()).collect();
    if ids.is_empty() {
        return Ok(None);
    }
    let other = if role == Role::Holder { "ttl" } else { "waiting_heartbeat" };
    let mut ends = call(link, "ZMSCORE", other, name);
    ends.arg(&ids);
    let mut info = call(link, "HMGET", "info", name);
    info.arg(&ids);
    let mut calls = vec![ends, info];
    let known: BTreeSet<_> =
        ids.iter().filter_map(|id| client_of(str::from_utf8(id).ok()?)).collect();
    let new: Vec<_> = known.into_iter().filter(|client| !clients.contains_key(*client)).collect();
    for client in &new {
        let mut who = cmd("HMGET");
        who.arg(format!("{}:client:{client}", link.settings.namespace)).arg("host").arg("pid");
        calls.push(who);
    }
    let mut answers = link.send(calls).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Value::Nil);
    let ends: Vec<Option<f64>> = read(next())?;
    let infos: Vec<Option<Vec<u8>>> = read(next())?;
    for client in new {
        // Another program may have put anything there.
        let (host, pid): (Option<Vec<u8>>, Option<Vec<u8>>) = read(next()).unwrap_or_default();
        let host = host.map(|host| String::from_utf8_lossy(&host).into_owned());
        let pid = pid.and_then(|pid| str::from_utf8(&pid).ok()?.parse().ok());
        clients.insert(client.to_owned(), (host, pid));
    }
    let described = ranked.0.iter().zip(ends).zip(infos);
    let members = described.filter_map(|(((id, score), other), info)| {
        let id = String::from_utf8_lossy(id);
        let info = info.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
        let (age, ends) = match role {
            Role::Holder => (None, Some(other.map_or(*score, |ttl| ttl.min(*score)))),
            Role::Waiter => (Some(seconds_between(*score, now)), other),
        };
        // A holder whose lease is over is one no more, though nobody has removed it.
        if role == Role::Holder && ends.is_some_and(|ends| ends <= now) {
            return None;
        }
        let known = client_of(&id).and_then(|client| clients.get(client));
        let (host, pid) = known.cloned().unwrap_or_default();
        let ends_in = ends.map(|ends| seconds_between(now, ends));
        let member = Member { host, pid, age, ends_in, ..unknown(id.into_owned()) };
        Some(describe(member, &info, now))
    });
    Ok(Some(members.collect()))
}

fn call(link: &Link, command: &str, kind: &str, name: &str) -> Cmd {
    let mut call = cmd(command);
    call.arg(key(link, kind, name));
    call
}

fn key(link: &Link, kind: &str, name: &str) -> String {
    format!("{}:semaphore_{kind}:{name}", link.settings.namespace)
}

fn seconds((seconds, micros): (f64, f64)) -> f64 {
    seconds + micros / 1e6
}

/// All that is known of an id by itself.
fn unknown(id: String) -> Member {
    let (label, host, pid, age, ends_in, fence) = (None, None, None, None, None, None);
    Member { id, label, host, pid, age, ends_in, fence, weight: 1, slot_number: None }
}

fn client_of(id: &str) -> Option<&str> {
    Some(id.split_once('-')?.0)
}

/// Adds its fence, weight, slot number, age and label, from "fence since lease ttl label". After the fence may follow
/// "/weight/slot number/unclaimed".
fn describe(mut member: Member, info: &str, now: f64) -> Member {
    let mut fields = info.splitn(5, ' ');
    let mut permit = fields.next().unwrap_or_default().split('/');
    member.fence = permit.next().and_then(|fence| fence.parse().ok());
    let mut number = || permit.next().and_then(|number| number.parse::<u32>().ok());
    member.weight = number().unwrap_or(1);
    // A waiter only says that it wants one.
    member.slot_number = number().filter(|number| *number > 0 && member.fence.is_some());
    let since = fields.next().and_then(|since| since.parse::<f64>().ok());
    // A waiter's place says more exactly since when.
    member.age = member.age.or(since.map(|since| seconds_between(since / 1e6, now)));
    member.label = fields.nth(2).filter(|label| !label.is_empty()).map(str::to_owned);
    member
}

/// Members with their scores. RESP2 and RESP3 shape them differently.
struct Scores(Vec<(Vec<u8>, f64)>);

impl FromRedisValue for Scores {
    fn from_redis_value(value: Value) -> Result<Self, redis::ParsingError> {
        Vec::<(Vec<u8>, f64)>::from_redis_value(value).map(Self)
    }
}

async fn one<T: FromRedisValue>(link: &Link, call: Cmd) -> Result<T, Error> {
    read(link.send(vec![call]).await?.pop().unwrap_or(Value::Nil))
}

pub(super) fn read<T: FromRedisValue>(value: Value) -> Result<T, Error> {
    redis::from_redis_value(value).map_err(|error| Error::internal(error.to_string()))
}

pub(super) fn seconds_between(earlier: f64, now: f64) -> Duration {
    // Another program may have written any score, also an infinite one.
    Duration::from_secs_f64((now - earlier).clamp(0.0, A_HUNDRED_YEARS))
}
