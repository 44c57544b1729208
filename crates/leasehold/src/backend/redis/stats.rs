//! Statistics on Redis, read in pipelines. A member that exists throughout is always listed. A change during the read
//! may or may not be visible.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use super::command::RedisCommand;
use super::connection::Connection;
use super::scripts::KINDS;
use super::slots::KeyTag;
use super::topology::Topology;
use super::value::{FromValue, Value};
use crate::backend::Slot;
use crate::callbacks::event;
use crate::clock::{Span, Time, wall_time};
use crate::machine::{Rate, TokenBucket};
use crate::stats::{Limits, Member, Paused, Query, RateLimit, SemaphoreStats};
use crate::{ClientInfo, Error, Fence};

/// How many names are read at once, and how many members of each in the first page and in later ones. Replies are
/// short, so that none fills the output buffer of the server.
const AT_ONCE: usize = 100;
const FIRST_PAGE: usize = 50;
const PAGE: usize = 500;

/// The length of the longest field of a hash, limits of a name and key that can be ours, in bytes. Other programs may
/// have stored anything, so longer values are not read.
const LONGEST_FIELD: usize = 4096;
/// The length of the longest text of another program that is shown, in characters.
const LONGEST_SHOWN: usize = 1000;

/// In seconds.
const A_HUNDRED_YEARS: f64 = 100.0 * 365.25 * 86_400.0;

/// Where semaphores are stored, and how their names are written in keys.
#[derive(Clone, Copy)]
struct Semaphores<'a> {
    topology: &'a Topology,
    key_tag: KeyTag,
}

impl Semaphores<'_> {
    fn key(&self, kind: &str, name: &str) -> String {
        let written = self.key_tag.write(name);
        format!("{}:semaphore_{kind}:{written}", self.topology.settings().namespace)
    }

    fn call(&self, command: &str, kind: &str, name: &str) -> RedisCommand {
        RedisCommand::new(command).arg(self.key(kind, name))
    }

    /// The call that returns the members at these places, with their scores.
    fn ranks(&self, kind: &str, name: &str, places: Range<usize>) -> RedisCommand {
        let last = places.end.saturating_sub(1);
        let call = self.call("ZRANGE", kind, name);
        call.arg_fmt(places.start).arg_fmt(last).arg("WITHSCORES")
    }

    /// The call that returns at most `most` members, with their scores, that follow `after`.
    fn scored(&self, kind: &str, name: &str, after: Deferred, most: usize) -> RedisCommand {
        let call = self.call("ZRANGEBYSCORE", kind, name).arg_fmt(after.score);
        call.args(["+inf", "WITHSCORES", "LIMIT"]).arg_fmt(after.skipped).arg_fmt(most)
    }

    /// Returns the slot of the keys of a name.
    fn slot(&self, name: &str) -> Slot {
        self.topology.slot(&self.key("main", name))
    }

    async fn one<T: FromValue>(&self, call: RedisCommand) -> Result<T, Error> {
        let answers = self.topology.ask(Slot::ONLY, vec![call]).await;
        read(answers?.pop().unwrap_or(Value::Nil))
    }
}

pub(super) async fn fetch(
    topology: &Topology,
    key_tag: KeyTag,
    mut query: Query,
) -> Result<Vec<SemaphoreStats>, Error> {
    let semaphores = Semaphores { topology, key_tag };
    let asked_for = query.names.is_some();
    let names = match query.names.take() {
        Some(names) => names,
        None => all_names(semaphores).await?.into_iter().collect(),
    };
    // Names of one server are read together, because ages are measured by that server's clock.
    let mut by_server: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for name in names {
        let to = semaphores.topology.destination(semaphores.slot(&name));
        by_server.entry(to).or_default().push(name);
    }
    let (mut stats, mut clients) = (Vec::new(), Clients::new());
    for names in by_server.values().flat_map(|names| names.chunks(AT_ONCE)) {
        match of(semaphores, names, &query.waiters, &mut clients).await {
            Ok(some) => stats.extend(some),
            Err(Error::InvalidArgument { .. }) => {
                stats.extend(
                    one_by_one(semaphores, names, (&query, asked_for), &mut clients).await?,
                );
            }
            Err(error) => return Err(error),
        }
        query.narrow(&mut stats);
    }
    Ok(stats)
}

/// Reads the names one by one, because another program uses a key of one of them. A query by name then fails; a listing
/// skips the name.
async fn one_by_one(
    semaphores: Semaphores<'_>,
    names: &[String],
    (query, asked_for): (&Query, bool),
    clients: &mut Clients,
) -> Result<Vec<SemaphoreStats>, Error> {
    let mut stats = Vec::new();
    for name in names {
        match of(semaphores, std::slice::from_ref(name), &query.waiters, clients).await {
            Ok(one) => stats.extend(one),
            Err(Error::InvalidArgument { problem, .. }) if asked_for => {
                let problem = misplaced(semaphores, name).await?.unwrap_or(problem);
                return Err(Error::invalid("name", format!("{name:?}: {problem}")));
            }
            Err(error @ Error::InvalidArgument { .. }) => {
                event!(warn, name, %error, "a semaphore was left out of the statistics");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(stats)
}

/// Finds the key whose type is wrong. Redis does not say which one it is.
async fn misplaced(semaphores: Semaphores<'_>, name: &str) -> Result<Option<String>, Error> {
    for (kind, expected) in KINDS {
        let found: String = semaphores.one(semaphores.call("TYPE", kind, name)).await?;
        if found != expected && found != "none" {
            let key = semaphores.key(kind, name);
            return Ok(Some(format!(
                "the key {key:?} does not belong to leasehold: choose another name or namespace"
            )));
        }
    }
    Ok(None)
}

/// Returns every name that has holders, waiters, a capacity or other limits. All four are needed: another program
/// declares a capacity only when it holds, and a name can be paused before its first use. One scan finds them all,
/// because a scan goes through all keys of the server.
async fn all_names(semaphores: Semaphores<'_>) -> Result<BTreeSet<String>, Error> {
    let ns = &semaphores.topology.settings().namespace;
    let kinds = ["main", "max", "waiting", "limits"];
    let prefixes = kinds.map(|kind| format!("{ns}:semaphore_{kind}:"));
    // The pattern also matches `waiting_heartbeat`, but no other kind.
    let keys =
        scan(semaphores.topology, &format!("{}:semaphore_[lmw][ai]*:*", escaped(ns))).await?;
    let name_of = |key: &String| {
        let written = prefixes.iter().find_map(|prefix| key.strip_prefix(prefix))?;
        Some(semaphores.key_tag.read(written).to_owned())
    };
    Ok(keys.iter().filter_map(name_of).collect())
}

/// Returns the clients whose record has not expired, ordered by id.
pub(super) async fn clients(topology: &Topology, limit: usize) -> Result<Vec<ClientInfo>, Error> {
    let prefix = format!("{}:client:", topology.settings().namespace);
    let keys = scan(topology, &format!("{}*", escaped(&prefix))).await?;
    let keys: Vec<_> = keys.into_iter().take(limit).collect();
    let mut clients = Vec::with_capacity(keys.len());
    for keys in keys.chunks(AT_ONCE) {
        let fields = ["host", "pid", "program", "since"].map(|field| field.as_bytes().to_vec());
        let hashes = keys.iter().map(|key| (key.clone(), fields.to_vec())).collect();
        let answers = fields_of(topology, Slot::ONLY, hashes).await?;
        for (key, answer) in keys.iter().zip(answers) {
            let fields = match answer {
                Err(refused @ Error::Refused { .. }) => return Err(refused),
                // Another program may have written anything there.
                fields => fields.unwrap_or_default(),
            };
            let text = |at: usize| {
                let text = String::from_utf8_lossy(fields.get(at)?.as_deref()?).into_owned();
                Some(text).filter(|text| !text.is_empty())
            };
            let since = text(3).and_then(|since| since.parse::<u64>().ok());
            clients.push(ClientInfo {
                id: key.strip_prefix(&prefix).unwrap_or(key).to_owned(),
                host: text(0),
                pid: text(1).and_then(|pid| pid.parse().ok()),
                program: text(2),
                since: since.map(|seconds| wall_time(seconds.saturating_mul(1000))),
            });
        }
    }
    Ok(clients)
}

/// Returns the call that reads the first bytes of a string. If there is no such key, it returns an empty string.
pub(super) fn beginning(key: &str, bytes: usize) -> RedisCommand {
    RedisCommand::new("GETRANGE").arg(key).arg("0").arg_fmt(bytes.saturating_sub(1))
}

/// Returns the text, or its beginning with a mark if it is too long to be shown.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(LONGEST_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns these fields of each hash. A field that is longer than one of ours can be counts as missing.
async fn fields_of(
    topology: &Topology,
    home: Slot,
    hashes: Vec<(String, Vec<Vec<u8>>)>,
) -> Result<Vec<Result<Vec<Option<Vec<u8>>>, Error>>, Error> {
    if hashes.is_empty() {
        return Ok(Vec::new());
    }
    let length =
        |(key, field): (&String, &Vec<u8>)| RedisCommand::new("HSTRLEN").arg(key).arg(field);
    let all = hashes.iter().flat_map(|(key, fields)| fields.iter().map(move |field| (key, field)));
    let mut lengths = topology.ask_each(home, all.map(length).collect()).await?.into_iter();
    let (mut calls, mut wanted) = (Vec::new(), Vec::new());
    for (key, fields) in &hashes {
        let lengths: Vec<_> = lengths.by_ref().take(fields.len()).collect();
        let lengths: Result<Vec<usize>, Error> =
            lengths.into_iter().map(|length| read(length?)).collect();
        let is_wanted = lengths.map(|lengths| {
            lengths.iter().map(|bytes| (1..=LONGEST_FIELD).contains(bytes)).collect::<Vec<_>>()
        });
        if let Ok(is_wanted) = &is_wanted
            && is_wanted.contains(&true)
        {
            let fields = fields.iter().zip(is_wanted).filter(|(_, is_wanted)| **is_wanted);
            let fields = fields.map(|(field, _)| field);
            calls.push(RedisCommand::new("HMGET").arg(key).args(fields));
        }
        wanted.push(is_wanted);
    }
    let answers =
        if calls.is_empty() { Vec::new() } else { topology.ask_each(home, calls).await? };
    let mut answers = answers.into_iter();
    let found = wanted.into_iter().map(|is_wanted| {
        let is_wanted = is_wanted?;
        let mut values = Vec::new();
        if is_wanted.contains(&true) {
            values = read::<Vec<Option<Vec<u8>>>>(answers.next().unwrap_or(Ok(Value::Nil))?)?;
        }
        let mut values = values.into_iter();
        let value = |is_wanted| if is_wanted { values.next().flatten() } else { None };
        Ok(is_wanted.into_iter().map(value).collect())
    });
    Ok(found.collect())
}

/// Escapes a text, so that a pattern of `SCAN` matches it literally.
pub(super) fn escaped(text: &str) -> String {
    let special = |c| matches!(c, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// Returns the keys that match, on every server.
pub(super) async fn scan(topology: &Topology, pattern: &str) -> Result<BTreeSet<String>, Error> {
    let mut found = BTreeSet::new();
    for connection in topology.primaries().await? {
        found.append(&mut scan_one(topology, &connection, pattern).await?);
    }
    Ok(found)
}

/// Returns the keys that match on one server. Uses `SCAN`, so that the server can serve other clients meanwhile.
async fn scan_one(
    topology: &Topology,
    server: &Connection,
    pattern: &str,
) -> Result<BTreeSet<String>, Error> {
    let (mut found, mut cursor) = (BTreeSet::new(), 0_u64);
    loop {
        let scan = RedisCommand::new("SCAN").arg_fmt(cursor);
        let scan = scan.args(["MATCH", pattern, "COUNT", "1000"]);
        let answer = topology.ask_at(server, scan).await?;
        let (next, keys): (u64, Vec<Vec<u8>>) = read(answer)?;
        for key in keys {
            match String::from_utf8(key) {
                Ok(key) if key.len() > LONGEST_FIELD => {
                    let key = cut(&key);
                    event!(warn, key, "a key was left out of the statistics: it is too long");
                }
                Ok(key) => _ = found.insert(key),
                // No name of ours has such a key.
                Err(error) => {
                    let key = cut(&String::from_utf8_lossy(error.as_bytes()));
                    event!(warn, key, "a key was left out of the statistics: it is not UTF-8");
                }
            }
        }
        if next == 0 {
            return Ok(found);
        }
        cursor = next;
    }
}

/// Reads the statistics of some names of one server: the numbers in a first pipeline, and the members in a second one.
async fn of(
    semaphores: Semaphores<'_>,
    names: &[String],
    waiters: &Range<usize>,
    clients: &mut Clients,
) -> Result<Vec<SemaphoreStats>, Error> {
    let home = names.first().map_or(Slot::ONLY, |name| semaphores.slot(name));
    let mut calls = vec![RedisCommand::new("TIME")];
    for name in names {
        calls.push(beginning(&semaphores.key("max", name), LONGEST_SHOWN));
        calls.push(beginning(&semaphores.key("limits", name), LONGEST_FIELD));
        calls.push(semaphores.call("ZCARD", "waiting", name));
        calls.push(semaphores.ranks("waiting", name, 0..1));
        calls.push(semaphores.ranks("main", name, 0..FIRST_PAGE));
    }
    let mut answers = semaphores.topology.ask(home, calls).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Value::Nil);
    let now = seconds(read(next())?);
    let (mut stats, mut pages) = (Vec::new(), Vec::new());
    for name in names {
        let capacity: Vec<u8> = read(next())?;
        let capacity = Some(capacity).filter(|text| !text.is_empty()).map(|text| {
            let text = String::from_utf8_lossy(&text);
            let key = semaphores.key("max", name);
            let problem = || {
                let problem = format!("the key {key:?} holds {text:?}, which is not a capacity");
                problem + ": declare a capacity, or remove the key"
            };
            text.parse().map_err(|_| Error::invalid("name", problem()))
        });
        let capacity: Option<u32> = capacity.transpose()?;
        let limits: Vec<u8> = read(next())?;
        let mut limits = limits_of(&String::from_utf8_lossy(&limits), now);
        if limits.pinned.is_none() {
            limits.declared = capacity.unwrap_or_default();
        }
        let waiting = read(next())?;
        let head: Scores = read(next())?;
        let holders: Scores = read(next())?;
        stats.push(SemaphoreStats {
            limits,
            waiting,
            oldest_wait: head.first().map(|(_, since)| seconds_between(*since, now)),
            ..SemaphoreStats::unused(name.clone())
        });
        pages.push(Page { name, role: Role::Holder, ranked: holders });
        pages.push(Page { name, role: Role::Waiter, ranked: head });
    }
    let full = |page: &Page<'_>| page.ranked.len() == FIRST_PAGE;
    let more: Vec<_> = pages
        .iter()
        .map(|page| if full(page) { Deferred::page(&page.ranked, None) } else { None })
        .collect();
    let mut described = describe_all(semaphores, home, pages, now, clients).await?.into_iter();
    for (at, one) in stats.iter_mut().enumerate() {
        let (holders, head) = (described.next(), described.next());
        one.holders = holders.unwrap_or_default();
        if let Some(after) = more[2 * at] {
            let rest = (Start::Deferred(after), usize::MAX);
            let rest = members(semaphores, &one.name, Role::Holder, (rest, now), clients).await?;
            let known: BTreeSet<_> = one.holders.iter().map(|holder| holder.id.clone()).collect();
            one.holders.extend(rest.into_iter().filter(|holder| !known.contains(&holder.id)));
        }
        // One script may grant several permits, in the order of their fences.
        one.holders.sort_by_key(|member| (std::cmp::Reverse(member.age), member.fence));
        one.units = one.holders.iter().map(Member::weight).fold(0, u32::saturating_add);
        let head = head.and_then(|head| head.into_iter().next());
        one.waits_for = head.map(|head| one.limits.waits_for(one.units, head.weight));
        if !waiters.is_empty() {
            let part = (Start::Place(waiters.start), waiters.len());
            one.waiters =
                members(semaphores, &one.name, Role::Waiter, (part, now), clients).await?;
        }
    }
    Ok(stats)
}

/// Reads the limits that are not the default, in the format that `read_capacity` in Lua describes.
fn limits_of(text: &str, now: f64) -> Limits {
    let mut lines = text.splitn(3, '\n');
    let numbers = lines.next().unwrap_or_default().split(' ');
    let mut numbers: Vec<Option<u64>> = numbers.map(|number| number.parse().ok()).collect();
    if numbers.len() == 8 {
        // An earlier version stored an interval and a burst: see `read_capacity`.
        let count = if numbers[4] == Some(0) { Some(0) } else { numbers[5] };
        numbers.insert(4, count);
    }
    let number = |at: usize| numbers.get(at).copied().flatten();
    let (pinned, declared, paused) = (number(0), number(1), number(2));
    let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let mut line = || lines.next().filter(|line| !line.is_empty()).map(str::to_owned);
    let (by, reason) = (line().unwrap_or_default(), line());
    #[allow(clippy::cast_precision_loss)] // a millisecond is exact enough
    let since = |micros: u64| seconds_between(micros as f64 / 1e6, now);
    let rate = number(4).zip(number(5));
    let rate = rate.and_then(|(count, period)| Rate::stored(count, period, number(6).unwrap_or(1)));
    let meter = rate.map(|rate| TokenBucket {
        rate,
        full_at: Time::from_micros(number(7).unwrap_or_default()),
        returns_from: number(8).unwrap_or_default(),
    });
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // it is a time of day
    let at = Time::from_micros((now * 1e6) as u64);
    Limits {
        rate: meter.map(|meter| RateLimit::of(meter.rate)),
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

/// The host and the pid of a client, where they are known.
type Clients = BTreeMap<String, (Option<String>, Option<u32>)>;

/// Some members of a name, in the order in which Redis returns them.
struct Page<'a> {
    name: &'a str,
    role: Role,
    ranked: Scores,
}

/// Where a listing continues: at a score, after the first `skipped` members that have it.
#[derive(Clone, Copy)]
struct Deferred {
    score: f64,
    skipped: usize,
}

impl Deferred {
    /// Returns the position after this page, which followed `before`. `None` if the page is empty.
    fn page(page: &[(Vec<u8>, f64)], before: Option<Self>) -> Option<Self> {
        let (_, score) = *page.last()?;
        let same = |other: f64| other.total_cmp(&score).is_eq();
        let before = before.filter(|before| same(before.score)).map_or(0, |before| before.skipped);
        let skipped = before + page.iter().rev().take_while(|(_, other)| same(*other)).count();
        Some(Self { score, skipped })
    }
}

/// Where a listing starts.
enum Start {
    Place(usize),
    Deferred(Deferred),
}

/// Reads at most `most` members, page by page.
///
/// Each page starts at the last score of the page before, not at a place. Places change when an earlier member ends or
/// is renewed, and then the members that move up would be left out. Scores of members only grow. A member that is
/// renewed between two pages is listed once.
async fn members(
    semaphores: Semaphores<'_>,
    name: &str,
    role: Role,
    ((start, most), now): ((Start, usize), f64),
    clients: &mut Clients,
) -> Result<Vec<Member>, Error> {
    let kind = if role == Role::Holder { "main" } else { "waiting" };
    let (mut all, mut seen, mut start) = (Vec::new(), BTreeSet::new(), start);
    while seen.len() < most {
        let size = PAGE.min(most - seen.len());
        let (call, before) = match start {
            Start::Place(from) => {
                (semaphores.ranks(kind, name, from..from.saturating_add(size)), None)
            }
            Start::Deferred(after) => (semaphores.scored(kind, name, after, size), Some(after)),
        };
        let mut ranked: Scores = semaphores.one(call).await?;
        let Some(after) = Deferred::page(&ranked, before) else { break };
        let full = ranked.len() == size;
        ranked.retain(|(id, _)| seen.insert(id.clone()));
        let page = vec![Page { name, role, ranked }];
        let page = describe_all(semaphores, semaphores.slot(name), page, now, clients).await?;
        all.extend(page.into_iter().flatten());
        if !full {
            break;
        }
        start = Start::Deferred(after);
    }
    Ok(all)
}

/// Reads the details of the members of all pages as of `now`, in one pipeline.
async fn describe_all(
    semaphores: Semaphores<'_>,
    home: Slot,
    pages: Vec<Page<'_>>,
    now: f64,
    clients: &mut Clients,
) -> Result<Vec<Vec<Member>>, Error> {
    let (mut calls, mut hashes, mut new) = (Vec::new(), Vec::new(), BTreeSet::new());
    for Page { name, role, ranked } in &pages {
        let ids: Vec<&[u8]> = ranked.iter().map(|(id, _)| id.as_slice()).collect();
        if ids.is_empty() {
            continue;
        }
        let other = if *role == Role::Holder { "ttl" } else { "waiting_heartbeat" };
        calls.push(semaphores.call("ZMSCORE", other, name).args(&ids));
        hashes.push((semaphores.key("info", name), ids.iter().map(|id| id.to_vec()).collect()));
        let of = ids.iter().filter_map(|id| client_of(str::from_utf8(id).ok()?));
        new.extend(of.filter(|client| !clients.contains_key(*client)).map(str::to_owned));
    }
    if calls.is_empty() {
        return Ok(pages.iter().map(|_| Vec::new()).collect());
    }
    let answers = semaphores.topology.ask_each(home, calls).await?;
    for client in &new {
        let key = format!("{}:client:{client}", semaphores.topology.settings().namespace);
        hashes.push((key, ["host", "pid"].map(|field| field.as_bytes().to_vec()).to_vec()));
    }
    let mut infos = fields_of(semaphores.topology, home, hashes).await?;
    for (client, answer) in new.iter().zip(infos.split_off(infos.len() - new.len())) {
        let fields = match answer {
            // Another program may have written anything there.
            Err(Error::InvalidArgument { .. }) => Vec::new(),
            answer => answer?,
        };
        let mut fields = fields.into_iter();
        let (host, pid) = (fields.next().flatten(), fields.next().flatten());
        let host = host.map(|host| String::from_utf8_lossy(&host).into_owned());
        let pid = pid.and_then(|pid| str::from_utf8(&pid).ok()?.parse().ok());
        clients.insert(client.clone(), (host, pid));
    }
    let answers: Result<Vec<_>, Error> = answers.into_iter().collect();
    let (mut answers, mut infos) = (answers?.into_iter(), infos.into_iter());
    let mut described = Vec::with_capacity(pages.len());
    for Page { role, ranked, .. } in pages {
        let mut members = Vec::with_capacity(ranked.len());
        if !ranked.is_empty() {
            let mut next = || answers.next().unwrap_or(Value::Nil);
            let ends: Vec<Option<f64>> = read(next())?;
            let infos = infos.next().unwrap_or(Ok(Vec::new()))?;
            let known = ranked.iter().zip(ends).zip(infos);
            members.extend(known.filter_map(|(((id, score), other), info)| {
                member(role, (id, *score), (other, info.as_deref()), now, clients)
            }));
        }
        described.push(members);
    }
    Ok(described)
}

/// Builds one member from its id and score, its score in the other set of its role, and its info. `None` if it no
/// longer holds.
fn member(
    role: Role,
    (id, score): (&[u8], f64),
    (other, info): (Option<f64>, Option<&[u8]>),
    now: f64,
    clients: &Clients,
) -> Option<Member> {
    let id = String::from_utf8_lossy(id);
    let info = info.map(String::from_utf8_lossy).unwrap_or_default();
    let (age, ends) = match role {
        Role::Holder => (None, Some(other.map_or(score, |ttl| ttl.min(score)))),
        Role::Waiter => (Some(seconds_between(score, now)), other),
    };
    // An expired holder no longer counts, even if it has not been removed yet.
    if role == Role::Holder && ends.is_some_and(|ends| ends <= now) {
        return None;
    }
    let known = client_of(&id).and_then(|client| clients.get(client));
    let (host, pid) = known.cloned().unwrap_or_default();
    let ends_in = ends.map(|ends| seconds_between(now, ends));
    let ttl_left = other.filter(|_| role == Role::Holder).map(|ttl| seconds_between(now, ttl));
    let member = Member { host, pid, age, ends_in, ttl_left, ..unknown(cut(&id)) };
    let renewed_until = match role {
        Role::Holder => Some((score, 1)),
        // A waiter may be silent for two leases.
        Role::Waiter => other.map(|alive_by| (alive_by, 2)),
    };
    Some(describe(member, renewed_until, &info, now))
}

fn seconds((seconds, micros): (f64, f64)) -> f64 {
    seconds + micros / 1e6
}

/// A member of which only the id is known.
fn unknown(id: String) -> Member {
    Member {
        id,
        label: None,
        host: None,
        pid: None,
        age: None,
        ends_in: None,
        ttl_left: None,
        silent_for: None,
        fence: None,
        weight: 1,
        slot_number: None,
    }
}

fn client_of(id: &str) -> Option<&str> {
    Some(id.split_once('-')?.0)
}

/// Adds the fence, weight, slot number, age, silence and label from "fence since lease ttl label". The fence may be
/// followed by "/weight/slot number/unclaimed". `renewed_until` is when the last renewal ends, and the number of leases
/// that it lasts.
fn describe(mut member: Member, renewed_until: Option<(f64, u32)>, info: &str, now: f64) -> Member {
    let mut fields = info.splitn(5, ' ');
    let mut permit = fields.next().unwrap_or_default().split('/');
    member.fence = permit.next().and_then(|fence| fence.parse().map(Fence::new).ok());
    let mut number = || permit.next().and_then(|number| number.parse::<u32>().ok());
    member.weight = number().unwrap_or(1);
    // For a waiter this only says that it wants a slot number.
    member.slot_number = number().filter(|number| *number > 0 && member.fence.is_some());
    let since = fields.next().and_then(|since| since.parse::<f64>().ok());
    // A waiter's score gives its age more exactly.
    member.age = member.age.or(since.map(|since| seconds_between(since / 1e6, now)));
    let lease = fields.next().and_then(|lease| lease.parse::<u64>().ok());
    member.silent_for = renewed_until.zip(lease).map(|((until, leases), lease)| {
        let lease = Duration::from_micros(lease).as_secs_f64();
        let silent_for = seconds_between(until - f64::from(leases) * lease, now);
        // A permit that is not claimed yet has less than a lease.
        member.age.map_or(silent_for, |age| age.min(silent_for))
    });
    member.label = fields.nth(1).filter(|label| !label.is_empty()).map(str::to_owned);
    member
}

/// Members with their scores.
type Scores = Vec<(Vec<u8>, f64)>;

pub(super) fn read<T: FromValue>(value: Value) -> Result<T, Error> {
    value.read().map_err(Error::internal)
}

pub(super) fn seconds_between(earlier: f64, now: f64) -> Duration {
    // Another program may have written any score, even an infinite one.
    Duration::from_secs_f64((now - earlier).clamp(0.0, A_HUNDRED_YEARS))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: f64 = 1000.0;

    fn read(role: Role, score: f64, other: Option<f64>, info: Option<&str>) -> Member {
        let info = info.map(str::as_bytes);
        member(role, (b"AccamwoTXWA-0", score), (other, info), NOW, &Clients::new()).unwrap()
    }

    fn seconds(duration: Option<Duration>) -> Option<u64> {
        duration.map(|duration| (duration + Duration::from_millis(500)).as_secs())
    }

    #[test]
    fn a_member_is_silent_since_its_last_renewal() {
        let held = "5 900000000 30000000 - nightly";
        let renewed = read(Role::Holder, NOW + 18.0, None, Some(held));
        assert_eq!(seconds(renewed.silent_for()), Some(12));
        assert_eq!((seconds(renewed.ends_in()), renewed.ttl_left()), (Some(18), None));
        let limited = read(Role::Holder, NOW + 18.0, Some(NOW + 7.0), Some(held));
        assert_eq!(seconds(limited.silent_for()), Some(12));
        assert_eq!((seconds(limited.ends_in()), seconds(limited.ttl_left())), (Some(7), Some(7)));
        // Granted two seconds ago with a wake-up: three of five seconds are left to claim it.
        let unclaimed = "5/1/0/1 998000000 30000000 - nightly";
        let unclaimed = read(Role::Holder, NOW + 3.0, None, Some(unclaimed));
        assert_eq!(seconds(unclaimed.silent_for()), Some(2));
        // A waiter may be silent for two leases.
        let waits = "- 900000000 30000000 - nightly";
        let waiter = read(Role::Waiter, 900.0, Some(NOW + 45.0), Some(waits));
        assert_eq!((seconds(waiter.silent_for()), waiter.ttl_left()), (Some(15), None));
        let foreign = read(Role::Holder, NOW + 18.0, None, None);
        assert_eq!((foreign.silent_for(), seconds(foreign.ends_in())), (None, Some(18)));
        for odd in [f64::INFINITY, 1e300] {
            let odd = read(Role::Holder, odd, None, Some("5 1 18446744073709551615 - x"));
            assert!(odd.silent_for().is_some());
        }
    }
}
