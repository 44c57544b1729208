//! What is left in the store after all workers have ended: only fences and capacities.

use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::compat::lua_pool::LuaPool;
use redis::Connection;
use testkit::redis_server::RedisServer;

use super::stage::{Stage, redis_command};
use super::{LifetimeEnd, Log};
use crate::plan::{self, THINGS, Thing};

/// Dead processes keep their leases until these end.
const LEASES: Duration = Duration::from_secs(25);
/// A waiter may be silent for two leases, and the keys of a dead one live ten seconds longer.
const KEYS: Duration = Duration::from_secs(35);

pub(super) fn find(stage: &Stage, log: &Log) -> Result<Vec<String>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(async {
        let client = Client::open(&stage.direct_url()).await.map_err(|error| error.to_string())?;
        let begun = Instant::now();
        let missing = loop {
            let missing = sweep(&client).await.map_err(|error| error.to_string())?;
            if missing.is_empty() || begun.elapsed() > LEASES {
                break missing;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        };
        if stage.is_local() {
            let left = members(&client).await.map_err(|error| error.to_string())?;
            client.close().await.map_err(|error| error.to_string())?;
            return Ok(missing.into_iter().chain(left).collect());
        }
        client.close().await.map_err(|error| error.to_string())?;
        let begun = Instant::now();
        loop {
            let left = keys(stage, log);
            if left.is_empty() || begun.elapsed() > KEYS {
                return Ok(missing.into_iter().chain(left).collect());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
}

/// Acquires and releases every permit, so that everything that has expired is removed. Returns what is not available.
async fn sweep(client: &Client) -> Result<Vec<String>, leasehold::Error> {
    let mut missing = Vec::new();
    for thing in &THINGS {
        match thing.kind {
            plan::Kind::Semaphore => missing.extend(take_all(client, thing).await?),
            plan::Kind::Lock => {
                if client.locks().is_locked(thing.name).await? {
                    missing.push(format!("{}: the lock", thing.name));
                }
            }
            plan::Kind::Pool => {
                let pool = client.pool(thing.name, thing.capacity);
                let pool = LuaPool::new(pool.lease(thing.lease_time()).build()?);
                let held = pool.count().await?.current_count;
                if held > 0 {
                    missing.push(format!("{}: {held} leases are held", thing.name));
                }
            }
        }
    }
    Ok(missing)
}

/// The remaining members, by the library's own lists.
async fn members(client: &Client) -> Result<Vec<String>, leasehold::Error> {
    let mut left = Vec::new();
    for one in client.stats().waiters().await? {
        left.push(format!("{}: {} hold, {} wait", one.name, one.held, one.waiting));
    }
    for lock in client.locks().list(100).await? {
        left.push(format!("the lock {}", lock.key));
    }
    for pool in client.pools().list(100).await? {
        left.push(format!("leases of {pool:?}"));
    }
    Ok(left)
}

async fn take_all(client: &Client, thing: &Thing) -> Result<Option<String>, leasehold::Error> {
    let semaphore = client.semaphore(thing.name, thing.capacity);
    let semaphore = semaphore.lease(thing.lease_time()).build()?;
    if thing.rate.is_some() {
        // Otherwise no more permits than tokens would be available.
        semaphore.clear_rate().await?;
    }
    let mut permits = Vec::new();
    for _ in 0..thing.capacity {
        permits.extend(semaphore.try_acquire().await?);
    }
    let had = permits.len();
    for permit in permits {
        permit.release().await?;
    }
    let all = had == thing.capacity as usize;
    Ok((!all).then(|| format!("{}: {had} of {} permits", thing.name, thing.capacity)))
}

/// Keys that should not exist.
fn keys(stage: &Stage, log: &Log) -> Vec<String> {
    match stage {
        Stage::Redis(redis) => keys_of(redis.primary(), stage, log),
        Stage::Sentinel(sentinel) => keys_of(sentinel.primary(), stage, log),
        Stage::Cluster(cluster) => {
            let primaries = cluster.primaries().into_iter();
            primaries.flat_map(|node| keys_of(&cluster.nodes.node(node), stage, log)).collect()
        }
        Stage::Local(_) => Vec::new(),
    }
}

fn keys_of(server: &RedisServer, stage: &Stage, log: &Log) -> Vec<String> {
    let mut connection = server.connection();
    let keys: Vec<String> = redis_command(&mut connection, &["KEYS", "*"]);
    let killed = log.lives.iter().any(|life| matches!(life.end, LifetimeEnd::Killed(_)));
    let stays = |key: &String| {
        let lasting = ["adv-sem:semaphore_fence:", "adv-sem:semaphore_max:", "syncguard:fence:"];
        // Describes a client, for statistics. The client renews this key every minute, and it expires soon after the
        // client ends.
        let who = key.starts_with("adv-sem:client:");
        // A notification of the other program whose receiver died before it read it. It expires.
        let unread = killed && key.starts_with("adv-sem:acquisition_notification:");
        // The sweep of the other program removes members from one key and leaves their data in others: its own in
        // `ttl`, ours in `info`. All of these expire.
        let shared = THINGS.iter().filter(|thing| thing.shared).map(|thing| thing.name);
        let swept = killed
            && ["ttl", "info"].into_iter().any(|kind| {
                let of = |name| *key == format!("adv-sem:semaphore_{kind}:{}", stage.spell(name));
                shared.clone().any(of)
            });
        // Records that the other program was seen. It expires.
        let seen = key.starts_with("adv-sem:semaphore_foreign:");
        // The rate of a semaphore is kept as long as its capacity.
        let mut paced = THINGS.iter().filter(|thing| thing.rate.is_some());
        let pace = |name| format!("adv-sem:semaphore_limits:{}", stage.spell(name));
        let pace = paced.any(|thing| *key == pace(thing.name));
        lasting.iter().any(|prefix| key.starts_with(prefix))
            || who
            || unread
            || swept
            || seen
            || pace
    };
    let mut left: Vec<_> = keys.into_iter().filter(|key| !stays(key)).collect();
    left.sort();
    left.iter().map(|key| format!("the key {key} {}", contents(&mut connection, key))).collect()
}

/// The contents of a key, to find the cause.
fn contents(connection: &mut Connection, key: &str) -> String {
    let kind: String = redis_command(connection, &["TYPE", key]);
    let expiry: i64 = redis_command(connection, &["PTTL", key]);
    let rest: Vec<String> = match kind.as_str() {
        "hash" => redis_command(connection, &["HGETALL", key]),
        "zset" => redis_command(connection, &["ZRANGE", key, "0", "5", "WITHSCORES"]),
        _ => Vec::new(),
    };
    format!("({kind}, for {expiry} ms: {})", rest.join(" "))
}
