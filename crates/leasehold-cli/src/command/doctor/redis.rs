//! Checks for settings of a Redis or Valkey server that endanger leases.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold::url::ServerSettings;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, FromRedisValue, RedisError, RedisResult, Value, cmd};

use super::Report;
use crate::output::ago;
use crate::store::Store;

const TIME_LIMIT: Duration = Duration::from_secs(5);
/// A larger difference means that a clock is wrong.
const SKEW: Duration = Duration::from_secs(1);
const OLDEST: (u32, u32) = (6, 2);
const OLDEST_IN_CLUSTER: (u32, u32) = (7, 0);
/// The wake-ups of many waiters of one client fit into a buffer of this size, in bytes.
const SMALLEST_BUFFER: u64 = 1 << 20;
/// The default of Redis and Valkey.
const USUAL_BUFFER: &str = "pubsub 33554432 8388608 60";

/// The role of the server in its deployment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ServerRole {
    /// The one server of the store. It may have replicas.
    Alone,
    /// The primary that sentinels name.
    BehindSentinels,
    /// A primary of a cluster.
    InCluster,
}

/// Examines one server.
pub(super) async fn examine(store: &Store, server: &ServerSettings, report: &mut Report) {
    let facts = match store.redis_client(server) {
        Ok(client) => Facts::query(client, &store.trial_channel(), &[]).await,
        Err(error) => Err(why(&error)),
    };
    match facts {
        Ok(facts) => facts.check(ServerRole::Alone, report),
        // The library could connect, so its own findings say what is wrong.
        Err(why) => {
            report.warn("server", why, "the other checks were not possible: see the server's log");
        }
    }
}

/// What a server reports about itself.
#[derive(Debug)]
pub(super) struct Facts {
    /// The server's time and ours, since the epoch.
    clock: Option<(Duration, Duration)>,
    pub(super) round_trip: Duration,
    /// The answer to `INFO`, or the reason why there is none.
    pub(super) info: Result<Info, String>,
    pub(super) settings: Settings,
    /// Those of `PUBLISH` and `SPUBLISH` that the user may not send to the channels of wake-ups.
    denied: Vec<&'static str>,
    /// The answers to further questions.
    pub(super) more: Vec<Value>,
}

impl Facts {
    /// Queries a server, with the additional questions `more`, and publishes to a channel that nobody reads. Fails with
    /// a readable reason if it cannot connect.
    pub(super) async fn query(
        client: Client,
        channel: &str,
        more: &[&[&str]],
    ) -> Result<Self, String> {
        let mut connection = connect(&client).await.map_err(|error| why(&error))?;
        let info = query::<String>(&mut connection, &["INFO"]).await;
        let mut answers = Vec::new();
        for words in more {
            answers.push(query::<Value>(&mut connection, words).await.unwrap_or_default());
        }
        let mut denied = Vec::new();
        for publish in [PUBLISH, SPUBLISH] {
            let answer = query::<Value>(&mut connection, &[publish, channel, ""]).await;
            if answer.is_err_and(|error| error.code() == Some("NOPERM")) {
                denied.push(publish);
            }
        }
        Ok(Self {
            denied,
            clock: clock(&mut connection).await,
            round_trip: round_trip(&mut connection).await.map_err(|error| why(&error))?,
            info: info.map(|info| Info::parse(&info)).map_err(|error| why(&error)),
            settings: Settings::read(&mut connection).await,
            more: answers,
        })
    }

    /// Without wake-ups, a waiter finds its permit only with its next query.
    fn check_wake_ups(&self, place: ServerRole, report: &mut Report) {
        let publish = if place == ServerRole::InCluster { SPUBLISH } else { PUBLISH };
        if !self.denied.contains(&publish) {
            report.ok("wake-ups", "the user may publish them");
            return;
        }
        let says = format!("missing permission for {publish}: a waiter starts up to a second late");
        let allow = format!("let the server's ACL allow it, for {}", report.keys_and_channels);
        report.bad("wake-ups", says, &allow);
    }

    /// Returns a field of `INFO`.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.info.as_ref().ok()?.get(key)
    }

    /// Reports all checks.
    pub(super) fn check(&self, place: ServerRole, report: &mut Report) {
        check_clock(self.clock, report);
        self.check_wake_ups(place, report);
        let info = match &self.info {
            Ok(info) => info,
            Err(why) => {
                let advice = "allow the user +info, and run this again";
                report.warn("server", format!("unknown: {why}"), advice);
                return;
            }
        };
        version(info, place, report);
        memory(info, report);
        persistence(info, &self.settings, report);
        replication(info, &self.settings, place, report);
        if place == ServerRole::InCluster {
            coverage(&self.settings, report);
        }
        output_buffer(&self.settings, report);
    }
}

pub(super) async fn connect(client: &Client) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(TIME_LIMIT))
        .set_response_timeout(Some(TIME_LIMIT));
    client.get_multiplexed_async_connection_with_config(&config).await
}

pub(super) async fn query<T: FromRedisValue>(
    connection: &mut MultiplexedConnection,
    words: &[&str],
) -> RedisResult<T> {
    let mut call = cmd(words[0]);
    call.arg(&words[1..]);
    call.query_async(connection).await
}

/// Returns why a server does not answer, without the server's text, which may quote our credentials.
pub(super) fn why(error: &RedisError) -> String {
    if error.is_timeout() {
        return "no answer in time".to_owned();
    }
    match error.code() {
        Some(code) => code.to_owned(),
        None if error.is_io_error() => error.to_string(),
        None => error.category().to_owned(),
    }
}

/// Returns the median of a few round trips.
async fn round_trip(connection: &mut MultiplexedConnection) -> RedisResult<Duration> {
    let mut trips = [Duration::ZERO; 5];
    for trip in &mut trips {
        let begun = Instant::now();
        query::<Value>(connection, &["PING"]).await?;
        *trip = begun.elapsed();
    }
    trips.sort_unstable();
    Ok(trips[trips.len() / 2])
}

/// Returns the server's time and ours, or `None` if the server does not answer.
async fn clock(connection: &mut MultiplexedConnection) -> Option<(Duration, Duration)> {
    let since_epoch = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let before = since_epoch();
    let (seconds, micros) = query::<(u64, u64)>(connection, &["TIME"]).await.ok()?;
    let ours = (before + since_epoch()) / 2;
    Some((Duration::from_secs(seconds) + Duration::from_micros(micros), ours))
}

fn check_clock(clock: Option<(Duration, Duration)>, report: &mut Report) {
    let Some((theirs, ours)) = clock else {
        report.bad("clock", "unknown: no answer to TIME", "allow the user +time");
        return;
    };
    let (apart, which) = if theirs > ours {
        (theirs.saturating_sub(ours), "ahead of")
    } else {
        (ours.saturating_sub(theirs), "behind")
    };
    if apart < SKEW {
        report.ok("clock", format!("the server's clock is within {SKEW:?} of this host's"));
    } else {
        report.warn(
            "clock",
            format!("the server's clock is {} {which} this host's", ago(apart)),
            "leasehold uses only the server's clock, but other programs may use their own: run NTP on both",
        );
    }
}

fn version(info: &Info, place: ServerRole, report: &mut Report) {
    let (product, version) = match info.get("valkey_version") {
        Some(version) => ("Valkey", version),
        None => ("Redis", info.get("redis_version").unwrap_or("unknown")),
    };
    let mut parts = version.split('.').map_while(|part| part.parse().ok());
    let release = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let (oldest, advice) = match place {
        ServerRole::InCluster => {
            (OLDEST_IN_CLUSTER, "at least 7.0 is needed in a cluster: upgrade it")
        }
        _ => (OLDEST, "at least 6.2 is needed: upgrade it"),
    };
    if release >= oldest {
        report.ok("version", format!("{product} {version}"));
    } else {
        report.bad("version", format!("{product} {version}"), advice);
    }
}

fn memory(info: &Info, report: &mut Report) {
    let policy = info.get("maxmemory_policy").unwrap_or("unknown");
    let limited = info.get("maxmemory").is_some_and(|limit| limit != "0");
    let says = format!("maxmemory-policy {policy}");
    if policy == "noeviction" {
        report.ok("memory", says);
    } else if limited {
        report.bad(
            "memory",
            says + ": leases may be evicted, and then granted twice",
            "CONFIG SET maxmemory-policy noeviction, or use a separate server for leases",
        );
    } else {
        report.warn(
            "memory",
            says + "; maxmemory is not set, but if it is set later, leases may be evicted",
            "CONFIG SET maxmemory-policy noeviction",
        );
    }
}

fn persistence(info: &Info, settings: &Settings, report: &mut Report) {
    let says = |key: &str| info.get(key).unwrap_or("unknown");
    if says("rdb_last_bgsave_status") == "err" || says("aof_last_write_status") == "err" {
        report.bad(
            "persistence",
            "the last write failed",
            "see the server's log: its disk may be full",
        );
        return;
    }
    let advice = "CONFIG SET appendonly yes, if a restart must not grant held leases twice";
    match (says("aof_enabled"), settings.get("appendfsync"), settings.get("save")) {
        ("1", Some("always"), _) => report.ok("persistence", "append-only file, synced always"),
        ("1", fsync, _) => {
            let fsync = fsync.unwrap_or("unknown");
            report.ok(
                "persistence",
                format!(
                    "append-only file, appendfsync {fsync}: a crash of \
                the machine may forget the last second"
                ),
            );
        }
        (_, _, Some("")) => {
            report.warn("persistence", "none: a restart forgets all leases and fences", advice);
        }
        _ => report.warn(
            "persistence",
            "snapshots: a restart forgets the newest leases and fences",
            advice,
        ),
    }
}

fn replication(info: &Info, settings: &Settings, place: ServerRole, report: &mut Report) {
    if info.get("role") == Some("slave") {
        report.bad("replication", "this is a replica", "connect to the primary");
        return;
    }
    let number = |value: Option<&str>| value.and_then(|value| value.parse::<u64>().ok());
    let replicas = number(info.get("connected_slaves")).unwrap_or_default();
    let least = number(settings.get(MIN_REPLICAS)).unwrap_or_default();
    let plural = if replicas == 1 { "replica" } else { "replicas" };
    // A replica that lags is connected, but not good.
    if number(info.get("min_slaves_good_slaves")).is_some_and(|good| good < least) {
        let says = format!("{replicas} {plural}, and {MIN_REPLICAS} is {least}: it refuses writes");
        report.bad("replication", says, "start the replicas that are missing");
        return;
    }
    if replicas == 0 {
        match place {
            ServerRole::Alone => report.ok("replication", "a primary without replicas"),
            ServerRole::BehindSentinels => report.warn(
                "replication",
                "a primary without replicas: if it fails, no server takes over",
                "start a replica of it",
            ),
            ServerRole::InCluster => report.warn(
                "replication",
                "a primary without replicas: if it fails, no node serves its slots",
                "add one: redis-cli --cluster add-node NEW NODE --cluster-slave",
            ),
        }
        return;
    }
    let says =
        format!("{replicas} {plural}, asynchronous: a failover may forget the newest leases");
    if least > 0 {
        report.ok("replication", format!("{says}; {MIN_REPLICAS} {least} limits how many"));
    } else {
        let every = if place == ServerRole::Alone { "" } else { " on every server" };
        let advice = format!("CONFIG SET {MIN_REPLICAS} 1{every}, and let resources check fences");
        report.warn("replication", says, &advice);
    }
}

/// Reports what happens to the other names when a primary is lost and no replica takes over.
fn coverage(settings: &Settings, report: &mut Report) {
    match settings.get(FULL_COVERAGE) {
        Some("yes") => report.warn(
            "coverage",
            format!("{FULL_COVERAGE} yes: while the slots of one primary are not served, every name stops"),
            &format!("CONFIG SET {FULL_COVERAGE} no on every node, if the other names must continue"),
        ),
        Some(value) => report.ok(
            "coverage",
            format!("{FULL_COVERAGE} {value}: if a primary is lost, the names of the others continue"),
        ),
        None => {}
    }
}

/// Checks the output buffer. If more wake-ups are due than the buffer of a connection holds, the server closes it.
fn output_buffer(settings: &Settings, report: &mut Report) {
    let Some(limits) = settings.get(OUTPUT_BUFFER).and_then(pubsub_limits) else { return };
    let [hard, soft, seconds] = limits;
    let says = format!("{OUTPUT_BUFFER} pubsub {hard} {soft} {seconds}");
    if [hard, soft].iter().all(|limit| *limit == 0 || *limit >= SMALLEST_BUFFER) {
        report.ok("buffer", says);
    } else {
        report.warn(
            "buffer",
            says + ": the server closes a client's connection when many permits are granted to it at once",
            &format!("CONFIG SET {OUTPUT_BUFFER} \"{USUAL_BUFFER}\", and the same in its configuration file"),
        );
    }
}

/// Returns the hard limit, the soft limit and the seconds of the class `pubsub`. Each class has four words.
fn pubsub_limits(setting: &str) -> Option<[u64; 3]> {
    let words: Vec<_> = setting.split_whitespace().collect();
    let class = words.chunks_exact(4).find(|class| class[0] == "pubsub")?;
    let number = |word: &str| word.parse().ok();
    Some([number(class[1])?, number(class[2])?, number(class[3])?])
}

/// The fields of `INFO`.
#[derive(Debug)]
pub(super) struct Info(BTreeMap<String, String>);

impl Info {
    pub(super) fn parse(text: &str) -> Self {
        let pair = |line: &str| {
            let (key, value) = line.trim_end().split_once(':')?;
            Some((key.to_owned(), value.to_owned()))
        };
        Self(text.lines().filter_map(pair).collect())
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }
}

const PUBLISH: &str = "PUBLISH";
/// The same in a cluster.
const SPUBLISH: &str = "SPUBLISH";

const OUTPUT_BUFFER: &str = "client-output-buffer-limit";
const MIN_REPLICAS: &str = "min-replicas-to-write";
const FULL_COVERAGE: &str = "cluster-require-full-coverage";
const POLICY: &str = "maxmemory-policy";
const SETTINGS: [&str; 6] =
    ["appendfsync", "save", OUTPUT_BUFFER, POLICY, MIN_REPLICAS, FULL_COVERAGE];

/// The settings from `CONFIG GET`, as far as that is allowed.
#[derive(Debug)]
pub(super) struct Settings(BTreeMap<&'static str, String>);

impl Settings {
    async fn read(connection: &mut MultiplexedConnection) -> Self {
        let mut settings = BTreeMap::new();
        for key in SETTINGS {
            let answer =
                query::<BTreeMap<String, String>>(connection, &["CONFIG", "GET", key]).await;
            if let Some(value) = answer.ok().and_then(|mut answer| answer.remove(key)) {
                settings.insert(key, value);
            }
        }
        Self(settings)
    }

    /// Returns the differing settings that matter for the safety of leases: name, this value, the other value.
    pub(super) fn differences<'a>(
        &'a self,
        other: &'a Self,
    ) -> Vec<(&'static str, &'a str, &'a str)> {
        let differing = |key: &'static str| {
            let (value, other) = (self.get(key)?, other.get(key)?);
            (value != other).then_some((key, value, other))
        };
        [POLICY, MIN_REPLICAS, FULL_COVERAGE].into_iter().filter_map(differing).collect()
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }
}
