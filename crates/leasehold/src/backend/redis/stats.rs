//! Statistics on Redis, read in pipelines. A member that exists throughout is always listed. A change during the read
//! may or may not be visible.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::vec;

use super::command::RedisCommand;
use super::connection::Connection;
use super::scripts::{misplaced, storage_keys, types};
use super::slots::KeyTag;
use super::topology::Topology;
use super::value::{FromValue, Value};
use crate::backend::Slot;
use crate::callbacks::event;
use crate::clock::{Span, Time, wall_time};
use crate::machine::{self, Pace, Pause, Rate, TokenBucket};
use crate::stats::{Query, SemaphoreLimits, SemaphoreMember as Member, SemaphoreStats};
use crate::{ClientInfo, Error, Fence};

/// How many names are read at once, and how many members of each in the first page and in later ones. Replies are
/// short, so that none fills the output buffer of the server.
const AT_ONCE: usize = 100;
const FIRST_PAGE: usize = 50;
pub(super) const PAGE: usize = 500;

/// The length of the longest field of a hash, limits of a name and key that can be ours, in bytes. Other programs may
/// have stored anything, so longer values are not read.
const LONGEST_FIELD: usize = 4096;
/// The length of the longest text of another program that is shown, in characters.
const LONGEST_SHOWN: usize = 1000;

const A_HUNDRED_YEARS: Span = Span::from_millis(3_155_760_000_000);

/// Members of a sorted set with their scores, in the order of the set.
type Scores = Vec<(Vec<u8>, f64)>;

/// The host and the pid of a client, where they are known.
type Clients = BTreeMap<String, (Option<String>, Option<u32>)>;

/// A query in progress.
struct StatsQuery<'a> {
    topology: &'a Topology,
    /// How names are written in keys.
    key_tag: KeyTag,
    /// The slot of one of the names that are being read, and their server's time.
    home: Slot,
    now: Time,
    clients: Clients,
}

pub(super) async fn fetch(
    topology: &Topology,
    key_tag: KeyTag,
    mut query: Query,
) -> Result<Vec<SemaphoreStats>, Error> {
    let (home, now, clients) = (Slot::ONLY, Time::from_micros(0), Clients::new());
    let mut reading = StatsQuery { topology, key_tag, home, now, clients };
    let is_listing = query.names.is_none();
    let names = match query.names.take() {
        Some(names) => names,
        None => reading.all_names().await?.into_iter().collect(),
    };
    let mut stats = Vec::new();
    for (home, names) in by_server(topology, names, |name| reading.key("main", name)) {
        reading.home = home;
        match reading.of(&names, &query.waiters).await {
            // Another program uses a key of one of these names.
            Err(Error::ForeignData { .. }) => {
                for name in names {
                    match reading.of(std::slice::from_ref(&name), &query.waiters).await {
                        Err(error @ Error::ForeignData { .. }) if is_listing => {
                            event!(warn, name, %error, "a semaphore was left out of the statistics");
                        }
                        Err(Error::ForeignData { problem, .. }) => {
                            return Err(reading.foreign(&name, problem).await);
                        }
                        one => stats.extend(one?),
                    }
                }
            }
            some => stats.extend(some?),
        }
        query.narrow(&mut stats);
    }
    Ok(stats)
}

/// Returns the limits of a name. It reads two keys, however many holders and waiters the name has.
pub(super) async fn limits(
    topology: &Topology,
    key_tag: KeyTag,
    home: Slot,
    name: &str,
) -> Result<SemaphoreLimits, Error> {
    let (now, clients) = (Time::from_micros(0), Clients::new());
    let reading = StatsQuery { topology, key_tag, home, now, clients };
    let calls = reading.limits_calls(name).into_iter();
    let (now, mut answers) = ask_with_time(topology, home, calls).await?;
    let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
    match reading.limits(name, [next(), next()]) {
        Err(Error::ForeignData { problem, .. }) => Err(reading.foreign(name, problem).await),
        limits => Ok(SemaphoreLimits::of(&limits?, now)),
    }
}

impl StatsQuery<'_> {
    fn key(&self, kind: &str, name: &str) -> String {
        let written = self.key_tag.write(name);
        format!("{}:semaphore_{kind}:{written}", self.topology.settings().namespace)
    }

    fn call(&self, command: &str, kind: &str, name: &str) -> RedisCommand {
        RedisCommand::new(command).arg(self.key(kind, name))
    }

    /// Finds the key whose type is wrong. Redis does not say which one it is.
    async fn misplaced(&self, name: &str) -> Result<Option<String>, Error> {
        let namespace = &self.topology.settings().namespace;
        let keys = storage_keys(namespace, &self.key_tag.write(name));
        let types = self.topology.query(self.home, types(&keys).collect()).await?;
        Ok(misplaced(&keys, types).map(|key| {
            format!(
                "the key {key:?} does not belong to leasehold: choose another name or namespace"
            )
        }))
    }

    /// Returns the error if another program uses a key of this name.
    async fn foreign(&self, name: &str, problem: String) -> Error {
        match self.misplaced(name).await {
            Ok(found) => Error::foreign(found.unwrap_or(problem)).in_name(name),
            Err(error) => error,
        }
    }

    /// Returns the calls that read the limits of a name: see [`limits`](Self::limits).
    fn limits_calls(&self, name: &str) -> [RedisCommand; 2] {
        [("max", LONGEST_SHOWN), ("limits", LONGEST_FIELD)]
            .map(|(kind, bytes)| beginning(&self.key(kind, name), bytes))
    }

    /// Decodes the answers to [`limits_calls`](Self::limits_calls).
    fn limits(
        &self,
        name: &str,
        [max, limits]: [Result<Value, Error>; 2],
    ) -> Result<machine::Limits, Error> {
        let max: Vec<u8> = read(max?)?;
        let max = match &*String::from_utf8_lossy(&max) {
            "" => 0,
            text => text.parse().map_err(|_| {
                let key = self.key("max", name);
                let problem = format!("the key {key:?} holds {text:?}, which is not a capacity");
                Error::foreign(problem + ": declare a capacity, or remove the key")
            })?,
        };
        let limits: Vec<u8> = read(limits?)?;
        Ok(limits_of(&String::from_utf8_lossy(&limits), max))
    }

    /// Returns every name that has holders, waiters, a capacity or other limits. All four are needed: another program
    /// declares a capacity only when it holds, and a name can be paused before its first use. One scan finds them all,
    /// because a scan goes through all keys of the server.
    async fn all_names(&self) -> Result<BTreeSet<String>, Error> {
        let ns = &self.topology.settings().namespace;
        let kinds = ["main", "max", "waiting", "limits"];
        let prefixes = kinds.map(|kind| format!("{ns}:semaphore_{kind}:"));
        // The pattern also matches `waiting_heartbeat`, but no other kind.
        let keys = scan(self.topology, &format!("{}:semaphore_[lmw][ai]*:*", escaped(ns))).await?;
        let name_of = |key: &String| {
            let written = prefixes.iter().find_map(|prefix| key.strip_prefix(prefix))?;
            Some(self.key_tag.read(written).to_owned())
        };
        Ok(keys.iter().filter_map(name_of).collect())
    }

    /// Reads the statistics of some names of one server: the numbers in a first pipeline, and the members in a second one.
    async fn of(
        &mut self,
        names: &[String],
        waiters: &Range<usize>,
    ) -> Result<Vec<SemaphoreStats>, Error> {
        let calls = names.iter().flat_map(|name| {
            let [max, limits] = self.limits_calls(name);
            [
                max,
                limits,
                self.call("ZCARD", "waiting", name),
                ranks(&self.key("waiting", name), 0, 1),
                ranks(&self.key("main", name), 0, FIRST_PAGE),
            ]
        });
        let (now, mut answers) = ask_with_time(self.topology, self.home, calls).await?;
        self.now = now;
        let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
        let (mut stats, mut pages) = (Vec::new(), Vec::new());
        for name in names {
            let limits = self.limits(name, [next(), next()])?;
            let waiting = read(next()?)?;
            let (head, holders): (Scores, Scores) = (read(next()?)?, read(next()?)?);
            stats.push(SemaphoreStats {
                waiting,
                oldest_wait: head.first().map(|(_, since)| now.since(time_of(*since, now))),
                ..SemaphoreStats::new(name.clone(), &limits, now)
            });
            pages.push(Page { name, role: Role::Waiter, ranked: head });
            // More holders than that are read in pages of their own.
            if holders.len() < FIRST_PAGE {
                pages.push(Page { name, role: Role::Holder, ranked: holders });
            }
        }
        let described = self.describe(&pages).await?;
        let mut described = pages.iter().zip(described).peekable();
        for one in &mut stats {
            let (name, head) = (&one.name, described.next());
            let mut holders = match described.next_if(|(page, _)| page.role == Role::Holder) {
                Some((_, holders)) => holders,
                None => self.members(name, Role::Holder, 0..usize::MAX).await?,
            };
            one.waiters = self.members(name, Role::Waiter, waiters.clone()).await?;
            // One script may grant several permits, in the order of their fences.
            holders.sort_by_key(|member| (std::cmp::Reverse(member.age), member.fence));
            one.set_holders(holders);
            if let Some(head) = head.and_then(|(_, head)| head.into_iter().next()) {
                one.set_head(head.weight);
            }
        }
        Ok(stats)
    }

    /// Reads the members at these places, page by page.
    async fn members(
        &mut self,
        name: &str,
        role: Role,
        places: Range<usize>,
    ) -> Result<Vec<Member>, Error> {
        let kind = if role == Role::Holder { "main" } else { "waiting" };
        let (mut all, mut pages) = (Vec::new(), Pages::new(self.key(kind, name), places));
        while let Some(ranked) = pages.next(self.topology).await? {
            let described = self.describe(&[Page { name, role, ranked }]).await?;
            all.extend(described.into_iter().flatten());
        }
        Ok(all)
    }

    /// Reads the details of the members of all pages, in one pipeline.
    async fn describe(&mut self, pages: &[Page<'_>]) -> Result<Vec<Vec<Member>>, Error> {
        let used = pages.iter().filter(|page| !page.ranked.is_empty());
        let others = used.map(|page| {
            let other = if page.role == Role::Holder { "ttl" } else { "waiting_heartbeat" };
            self.call("ZMSCORE", other, page.name).args(page.ids())
        });
        let others: Vec<_> = others.collect();
        if others.is_empty() {
            return Ok(pages.iter().map(|_| Vec::new()).collect());
        }
        let mut others = self.topology.query(self.home, others).await?.into_iter();
        let clients =
            pages.iter().flat_map(Page::ids).filter_map(|id| client_of(str::from_utf8(id).ok()?));
        let new: BTreeSet<_> =
            clients.filter(|client| !self.clients.contains_key(*client)).collect();
        let record = |client| format!("{}:client:{client}", self.topology.settings().namespace);
        let records: Vec<_> = new.iter().map(record).collect();
        let infos: Vec<_> = pages.iter().map(|page| self.key("info", page.name)).collect();
        let infos =
            pages.iter().zip(&infos).flat_map(|(page, key)| page.ids().map(|id| (&key[..], id)));
        let of_records = records.iter().flat_map(|key| [(&key[..], &b"host"[..]), (key, b"pid")]);
        let wanted = infos.chain(of_records).collect();
        let mut infos = fields(self.topology, self.home, wanted).await?;
        let mut of_records = infos.split_off(infos.len() - 2 * new.len()).into_iter();
        for client in new {
            let (host, pid) = (client_field(&mut of_records)?, client_field(&mut of_records)?);
            self.clients.insert(client.to_owned(), (host, pid.and_then(|pid| pid.parse().ok())));
        }
        let mut infos = infos.into_iter();
        let mut described = Vec::with_capacity(pages.len());
        for page in pages {
            let others: Vec<Option<f64>> = match &page.ranked[..] {
                [] => Vec::new(),
                _ => read(others.next().unwrap_or(Value::Nil))?,
            };
            let members = page.ranked.iter().zip(others).zip(infos.by_ref());
            let members = members.map(|(((id, score), other), info)| {
                let (scores, info) = ((*score, other), info?);
                Ok(member(page.role, id, scores, info.as_deref(), self.now, &self.clients))
            });
            described.push(members.filter_map(Result::transpose).collect::<Result<_, Error>>()?);
        }
        Ok(described)
    }
}

/// Splits names into those that are read together, each with the slot of one of them. They are on one server, because
/// ages are measured by that server's clock.
pub(super) fn by_server(
    topology: &Topology,
    names: Vec<String>,
    key_of: impl Fn(&str) -> String,
) -> Vec<(Slot, Vec<String>)> {
    let slot = |name: &String| topology.slot(&key_of(name));
    let mut by_server: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for name in names {
        by_server.entry(topology.destination(slot(&name))).or_default().push(name);
    }
    let parts = by_server.values().flat_map(|names| names.chunks(AT_ONCE));
    parts.map(|names| (slot(&names[0]), names.to_vec())).collect()
}

/// Returns the answer to a query. The first argument of the query is its key.
pub(super) async fn ask_one<T: FromValue>(
    topology: &Topology,
    query: RedisCommand,
) -> Result<T, Error> {
    read(topology.query(Slot::ONLY, vec![query]).await?.pop().unwrap_or(Value::Nil))
}

/// Returns the server's time, and the answer to each query.
pub(super) async fn ask_with_time(
    topology: &Topology,
    home: Slot,
    queries: impl Iterator<Item = RedisCommand>,
) -> Result<(Time, vec::IntoIter<Result<Value, Error>>), Error> {
    let queries = std::iter::once(RedisCommand::new("TIME")).chain(queries).collect();
    let mut answers = topology.query_each(home, queries).await?.into_iter();
    let (seconds, micros): (u64, u64) = read(answers.next().unwrap_or(Ok(Value::Nil))?)?;
    Ok((Time::from_micros(seconds * 1_000_000 + micros), answers))
}

/// Returns the clients whose record has not expired, ordered by id.
pub(super) async fn clients(topology: &Topology, limit: usize) -> Result<Vec<ClientInfo>, Error> {
    let prefix = format!("{}:client:", topology.settings().namespace);
    let keys = scan(topology, &format!("{}*", escaped(&prefix))).await?;
    let keys: Vec<_> = keys.into_iter().take(limit).collect();
    let mut clients = Vec::with_capacity(keys.len());
    for keys in keys.chunks(AT_ONCE) {
        let names = ["host", "pid", "program", "since"];
        let wanted = keys.iter().flat_map(|key| names.map(|name| (&key[..], name.as_bytes())));
        let mut found = fields(topology, Slot::ONLY, wanted.collect()).await?.into_iter();
        for key in keys {
            let mut next = || client_field(&mut found);
            let (host, pid, program, since) = (next()?, next()?, next()?, next()?);
            let since = since.and_then(|since| since.parse::<u64>().ok());
            clients.push(ClientInfo {
                id: key.strip_prefix(&prefix).unwrap_or(key).to_owned(),
                host,
                pid: pid.and_then(|pid| pid.parse().ok()),
                program,
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

/// A field of a hash: an error if the key is no hash, and `None` if the field is missing or empty.
type Field = Result<Option<Vec<u8>>, Error>;

/// Returns these fields, each given by its key and its name. A field that is longer than one of ours can be counts as
/// missing.
async fn fields(
    topology: &Topology,
    home: Slot,
    wanted: Vec<(&str, &[u8])>,
) -> Result<Vec<Field>, Error> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let length = |(key, name): &(_, _)| RedisCommand::new("HSTRLEN").arg(key).arg(name);
    let lengths = topology.query_each(home, wanted.iter().map(length).collect()).await?;
    let (mut found, mut short) = (Vec::with_capacity(wanted.len()), Vec::new());
    for (field, length) in wanted.into_iter().zip(lengths) {
        let length = length.and_then(read::<usize>);
        if matches!(length, Ok(1..=LONGEST_FIELD)) {
            short.push((found.len(), field));
        }
        found.push(length.map(|_| None));
    }
    let of_one_hash = short.chunk_by(|(_, (key, _)), (_, (other, _))| key == other);
    let get = |fields: &[(usize, (&str, _))]| {
        let names = fields.iter().map(|(_, (_, name))| name);
        RedisCommand::new("HMGET").arg(fields[0].1.0).args(names)
    };
    let calls: Vec<_> = of_one_hash.clone().map(get).collect();
    if calls.is_empty() {
        return Ok(found);
    }
    for (fields, values) in of_one_hash.zip(topology.query_each(home, calls).await?) {
        match values.and_then(read::<Vec<Option<Vec<u8>>>>) {
            Ok(values) => {
                for ((at, _), value) in fields.iter().zip(values) {
                    found[*at] = Ok(value);
                }
            }
            Err(error) => {
                for (at, _) in fields {
                    found[*at] = Err(error.clone());
                }
            }
        }
    }
    Ok(found)
}

/// Returns the next of these fields of client records. It is missing if another program uses the key of the record.
fn client_field(fields: &mut impl Iterator<Item = Field>) -> Result<Option<String>, Error> {
    match fields.next() {
        None | Some(Err(Error::ForeignData { .. })) => Ok(None),
        Some(field) => Ok(field?.map(|text| String::from_utf8_lossy(&text).into_owned())),
    }
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
        let answer = topology.query_at(server, scan).await?;
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

/// Reads the limits that are not the default, in the format that `read_capacity` in Lua describes. `max` is the stored
/// capacity, or 0.
fn limits_of(text: &str, max: u32) -> machine::Limits {
    let mut lines = text.splitn(3, '\n');
    let numbers = lines.next().unwrap_or_default().split(' ');
    let mut numbers: Vec<Option<u64>> = numbers.map(|number| number.parse().ok()).collect();
    if numbers.len() == 8 {
        // An earlier version stored an interval and a burst: see `read_capacity`.
        let count = if numbers[4] == Some(0) { Some(0) } else { numbers[5] };
        numbers.insert(4, count);
    }
    let number = |at: usize| numbers.get(at).copied().flatten();
    let small = |at| number(at).map(|number| u32::try_from(number).unwrap_or(u32::MAX));
    let (pinned, declared) = (small(0), small(1).unwrap_or_default());
    let mut line = || lines.next().filter(|line| !line.is_empty());
    let (by, reason) = (line().unwrap_or_default().into(), line().map(Into::into));
    let paused = number(2).map(|since| Pause { since: Time::from_micros(since), by, reason });
    let rate = number(4).zip(number(5));
    let rate = rate.and_then(|(count, period)| Rate::stored(count, period, number(6).unwrap_or(1)));
    let pace = rate.map_or(Pace::Undeclared, |rate| {
        let full_at = Time::from_micros(number(7).unwrap_or_default());
        Pace::Metered(TokenBucket { rate, full_at, returns_from: number(8).unwrap_or_default() })
    });
    let declared = if pinned.is_some() { declared } else { max };
    machine::Limits { declared, pinned, paused, pace }
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Holder,
    Waiter,
}

/// Some members of a name.
struct Page<'a> {
    name: &'a str,
    role: Role,
    ranked: Scores,
}

impl Page<'_> {
    fn ids(&self) -> impl Iterator<Item = &[u8]> {
        self.ranked.iter().map(|(id, _)| &id[..])
    }
}

/// Returns the call that reads at most `most` members of a sorted set from this place on, with their scores.
fn ranks(key: &str, place: usize, most: usize) -> RedisCommand {
    let last = place.saturating_add(most).saturating_sub(1);
    RedisCommand::new("ZRANGE").arg(key).arg_fmt(place).arg_fmt(last).arg("WITHSCORES")
}

/// A sorted set that is read page by page.
///
/// Each page starts at the last score of the page before, not at a place. Places change when an earlier member ends or
/// is renewed, and then the members that move up would be left out. Scores of members only grow. A member that is
/// renewed between two pages is returned once.
pub(super) struct Pages {
    key: String,
    places: Range<usize>,
    /// The scores of all members, as they were read.
    scores: Vec<f64>,
    seen: BTreeSet<Vec<u8>>,
    is_complete: bool,
}

impl Pages {
    pub(super) fn new(key: String, places: Range<usize>) -> Self {
        let is_complete = places.is_empty();
        Self { key, places, scores: Vec::new(), seen: BTreeSet::new(), is_complete }
    }

    fn size(&self) -> usize {
        PAGE.min(self.places.len() - self.seen.len())
    }

    /// Returns the call that reads the next page.
    pub(super) fn call(&self) -> RedisCommand {
        let Some(last) = self.scores.last() else {
            return ranks(&self.key, self.places.start, self.size());
        };
        // Several members may have the last score.
        let read = self.scores.iter().rev().take_while(|score| score.total_cmp(last).is_eq());
        let call = RedisCommand::new("ZRANGEBYSCORE").arg(&self.key).arg_fmt(last);
        let call = call.args(["+inf", "WITHSCORES", "LIMIT"]).arg_fmt(read.count());
        call.arg_fmt(self.size())
    }

    /// Adds the page that the [call](Self::call) returned. Returns its members that were not in an earlier page.
    pub(super) fn add(&mut self, mut page: Scores) -> Scores {
        let is_last = page.len() < self.size();
        self.scores.extend(page.iter().map(|(_, score)| score));
        page.retain(|(member, _)| self.seen.insert(member.clone()));
        self.is_complete = is_last || self.seen.len() >= self.places.len();
        page
    }

    /// Reads the next page. `None` after the last one.
    pub(super) async fn next(&mut self, topology: &Topology) -> Result<Option<Scores>, Error> {
        if self.is_complete {
            return Ok(None);
        }
        let page = ask_one(topology, self.call()).await?;
        Ok(Some(self.add(page)))
    }
}

/// Builds one member from its id, its scores in the two sets of its role, and its info: "fence since lease ttl label".
/// The fence may be followed by "/weight/slot number/unclaimed". `None` if the member no longer holds.
fn member(
    role: Role,
    id: &[u8],
    (score, other): (f64, Option<f64>),
    info: Option<&[u8]>,
    now: Time,
    clients: &Clients,
) -> Option<Member> {
    let id = String::from_utf8_lossy(id);
    let info = info.map(String::from_utf8_lossy).unwrap_or_default();
    let mut fields = info.splitn(5, ' ');
    let mut permit = fields.next().unwrap_or_default().split('/');
    let fence = permit.next().and_then(|fence| fence.parse().map(Fence::new).ok());
    let mut number = || permit.next().and_then(|number| number.parse::<u32>().ok());
    let mut micros = || fields.next().and_then(|micros| micros.parse::<u64>().ok());
    let (since, lease) = (micros().map(Time::from_micros), micros());
    let (score, other) = (time_of(score, now), other.map(|other| time_of(other, now)));
    let (since, ends, ttl, renewed) = match role {
        Role::Holder => {
            let ends = other.map_or(score, |ttl| ttl.min(score));
            // An expired holder no longer counts, even if it has not been removed yet.
            if ends <= now {
                return None;
            }
            (since, Some(ends), other, Some((score, 1)))
        }
        // A waiter may be silent for two leases. Its score gives its age more exactly than its info.
        Role::Waiter => (Some(score), other, None, other.map(|alive_by| (alive_by, 2))),
    };
    let age = since.map(|since| now.since(since));
    let silent_for = renewed.zip(lease).map(|((until, leases), lease)| {
        let renewed = until.micros().saturating_sub(lease.saturating_mul(leases));
        let silent_for = now.since(Time::from_micros(renewed));
        // A permit that is not claimed yet has less than a lease.
        age.map_or(silent_for, |age| age.min(silent_for))
    });
    let (host, pid) = client_of(&id).and_then(|id| clients.get(id)).cloned().unwrap_or_default();
    let left = |until: Time| until.since(now);
    Some(Member {
        id: cut(&id),
        label: fields.nth(1).filter(|label| !label.is_empty()).map(str::to_owned),
        host,
        pid,
        age,
        expires_in: ends.map(left),
        ttl_ends_in: ttl.map(left),
        silent_for,
        fence,
        weight: number().unwrap_or(1),
        // For a waiter this only says that it wants a slot number.
        slot_number: number().filter(|number| *number > 0 && fence.is_some()),
    })
}

fn client_of(id: &str) -> Option<&str> {
    Some(id.split_once('-')?.0)
}

pub(super) fn read<T: FromValue>(value: Value) -> Result<T, Error> {
    value.read().map_err(Error::internal)
}

/// Returns the time of a score. Another program may have written any score, even an infinite one, so a time is at most
/// a hundred years from now.
pub(super) fn time_of(score: f64, now: Time) -> Time {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the conversion saturates
    let micros = (score * 1e6).round() as u64;
    Time::from_micros(micros).min(now + A_HUNDRED_YEARS)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOW: f64 = 1000.0;

    fn read(role: Role, score: f64, other: Option<f64>, info: Option<&str>) -> Member {
        let (info, now) = (info.map(str::as_bytes), Time::from_micros(1_000_000_000));
        member(role, b"AccamwoTXWA-0", (score, other), info, now, &Clients::new()).unwrap()
    }

    fn seconds(duration: Option<Duration>) -> Option<u64> {
        duration.map(|duration| (duration + Duration::from_millis(500)).as_secs())
    }

    #[test]
    fn a_member_is_silent_since_its_last_renewal() {
        let held = "5 900000000 30000000 - nightly";
        let renewed = read(Role::Holder, NOW + 18.0, None, Some(held));
        assert_eq!(seconds(renewed.silent_for), Some(12));
        assert_eq!((seconds(renewed.expires_in), renewed.ttl_ends_in), (Some(18), None));
        let limited = read(Role::Holder, NOW + 18.0, Some(NOW + 7.0), Some(held));
        assert_eq!(seconds(limited.silent_for), Some(12));
        assert_eq!((seconds(limited.expires_in), seconds(limited.ttl_ends_in)), (Some(7), Some(7)));
        // Granted two seconds ago with a wake-up: three of five seconds are left to claim it.
        let unclaimed = "5/1/0/1 998000000 30000000 - nightly";
        let unclaimed = read(Role::Holder, NOW + 3.0, None, Some(unclaimed));
        assert_eq!(seconds(unclaimed.silent_for), Some(2));
        // A waiter may be silent for two leases.
        let waits = "- 900000000 30000000 - nightly";
        let waiter = read(Role::Waiter, 900.0, Some(NOW + 45.0), Some(waits));
        assert_eq!((seconds(waiter.silent_for), waiter.ttl_ends_in), (Some(15), None));
        let foreign = read(Role::Holder, NOW + 18.0, None, None);
        assert_eq!((foreign.silent_for, seconds(foreign.expires_in)), (None, Some(18)));
        for odd in [f64::INFINITY, 1e300] {
            let odd = read(Role::Holder, odd, None, Some("5 1 18446744073709551615 - x"));
            assert!(odd.silent_for.is_some());
        }
    }
}
