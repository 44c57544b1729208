//! What endangers leases on a Redis or Valkey server.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, FromRedisValue, RedisResult, cmd};

use super::Report;
use crate::output::ago;
use crate::store::Store;

const PATIENCE: Duration = Duration::from_secs(10);
/// Beyond this somebody's clock is wrong.
const SKEW: Duration = Duration::from_secs(1);
const OLDEST: (u32, u32) = (6, 2);
/// Wake-ups of many waiters of one client have to fit into less than this, in bytes.
const SMALLEST_BUFFER: u64 = 1 << 20;
/// What Redis and Valkey have by default.
const USUAL_BUFFER: &str = "pubsub 33554432 8388608 60";

pub(super) async fn examine(store: &Store, report: &mut Report) {
    let mut connection = match connect(store).await {
        Ok(connection) => connection,
        // The library was let in: it has said, or not said, what is wrong.
        Err(error) => {
            let says = error.category().to_owned();
            report.warn("server", says, "the rest could not be examined: see the server's log");
            return;
        }
    };
    clock(&mut connection, report).await;
    let info = match ask::<String>(&mut connection, &["INFO"]).await {
        Ok(info) => Info::parse(&info),
        Err(error) => {
            let says = format!("unknown: {}", error.code().unwrap_or("no answer"));
            report.warn("server", says, "allow the user +info, and run this again");
            return;
        }
    };
    version(&info, report);
    memory(&info, report);
    let settings = Settings::read(&mut connection).await;
    persistence(&info, &settings, report);
    replication(&info, &settings, report);
    output_buffer(&settings, report);
}

async fn connect(store: &Store) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    store.redis_client()?.get_multiplexed_async_connection_with_config(&config).await
}

async fn ask<T: FromRedisValue>(
    connection: &mut MultiplexedConnection,
    words: &[&str],
) -> RedisResult<T> {
    let mut call = cmd(words[0]);
    call.arg(&words[1..]);
    call.query_async(connection).await
}

async fn clock(connection: &mut MultiplexedConnection, report: &mut Report) {
    let since_epoch = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let before = since_epoch();
    let Ok((seconds, micros)) = ask::<(u64, u64)>(connection, &["TIME"]).await else {
        report.bad("clock", "unknown: no answer to TIME", "allow the user +time");
        return;
    };
    let ours = (before + since_epoch()) / 2;
    let theirs = Duration::from_secs(seconds) + Duration::from_micros(micros);
    let (apart, which) = if theirs > ours {
        (theirs.saturating_sub(ours), "ahead")
    } else {
        (ours.saturating_sub(theirs), "behind")
    };
    if apart < SKEW {
        report.ok("clock", format!("the server's is within {SKEW:?} of ours"));
    } else {
        report.warn(
            "clock",
            format!("the server's is {} {which}", ago(apart)),
            "leases go by the server's clock alone, but other programs may not: run NTP on both",
        );
    }
}

fn version(info: &Info, report: &mut Report) {
    let (product, version) = match info.get("valkey_version") {
        Some(version) => ("Valkey", version),
        None => ("Redis", info.get("redis_version").unwrap_or("unknown")),
    };
    let mut parts = version.split('.').map_while(|part| part.parse().ok());
    let known = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if known >= OLDEST {
        report.ok("version", format!("{product} {version}"));
    } else {
        report.bad("version", format!("{product} {version}"), "at least 6.2 is needed: upgrade it");
    }
    if info.get("redis_mode") == Some("cluster") {
        report.bad("mode", "cluster", "clusters are not supported: use a single server");
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
            says + ": leases may be evicted, and then handed out twice",
            "CONFIG SET maxmemory-policy noeviction, or a server of its own",
        );
    } else {
        report.warn(
            "memory",
            says + ", with no limit now: once there is one, leases may be evicted",
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
            "see the server's log: is its disk full?",
        );
        return;
    }
    let advice = "CONFIG SET appendonly yes, if a restart must not hand out twice what is held";
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

fn replication(info: &Info, settings: &Settings, report: &mut Report) {
    if info.get("role") == Some("slave") {
        report.bad("replication", "this is a replica", "connect to the primary");
        return;
    }
    let replicas = info.get("connected_slaves").unwrap_or("0");
    if replicas == "0" {
        report.ok("replication", "a primary without replicas");
        return;
    }
    let enough = settings.get("min-replicas-to-write").is_some_and(|least| least != "0");
    let says =
        format!("{replicas} replicas, asynchronous: a failover may forget the newest leases");
    if enough {
        report.ok("replication", says + ", min-replicas-to-write bounds how many");
    } else {
        report.warn(
            "replication",
            says,
            "CONFIG SET min-replicas-to-write 1, and let resources check fences",
        );
    }
}

/// Wake-ups are pushed: if more of them are due than the buffer of the connection holds, the server closes it.
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

/// The hard limit, the soft limit and the seconds of the class `pubsub`, in a list of four words for each class.
fn pubsub_limits(setting: &str) -> Option<[u64; 3]> {
    let words: Vec<_> = setting.split_whitespace().collect();
    let class = words.chunks_exact(4).find(|class| class[0] == "pubsub")?;
    let number = |word: &str| word.parse().ok();
    Some([number(class[1])?, number(class[2])?, number(class[3])?])
}

/// What `INFO` says.
struct Info(BTreeMap<String, String>);

impl Info {
    fn parse(text: &str) -> Self {
        let pair = |line: &str| {
            let (key, value) = line.trim_end().split_once(':')?;
            Some((key.to_owned(), value.to_owned()))
        };
        Self(text.lines().filter_map(pair).collect())
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }
}

const OUTPUT_BUFFER: &str = "client-output-buffer-limit";

/// What `CONFIG GET` says, where that is allowed.
struct Settings(BTreeMap<&'static str, String>);

impl Settings {
    async fn read(connection: &mut MultiplexedConnection) -> Self {
        let mut settings = BTreeMap::new();
        for key in ["appendfsync", "save", "min-replicas-to-write", OUTPUT_BUFFER] {
            let answer = ask::<BTreeMap<String, String>>(connection, &["CONFIG", "GET", key]).await;
            if let Some(value) = answer.ok().and_then(|mut answer| answer.remove(key)) {
                settings.insert(key, value);
            }
        }
        Self(settings)
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }
}
