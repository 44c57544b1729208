//! Pools on Redis: sharing them with another program, their keys, and their behaviour under faults.

#![cfg(feature = "redis")]

use std::time::{Duration, Instant};

use leasehold::compat::lua_pool::{AcquireStatus, LuaPool, ReleaseStatus, RenewStatus};
use leasehold::{Client, Error, LossReason, Pool};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::seed002::{Outcome, Seed002};
use testkit::wait::{deadline, eventually};

const TTL: Duration = Duration::from_secs(30);

async fn connect(url: &str) -> Client {
    let builder = Client::redis_builder(url);
    deadline(builder.open()).await.expect("the server that was just started")
}

async fn encoders(url: &str, capacity: u32) -> Pool {
    connect(url).await.pool("encoders", capacity).lease(TTL).build().unwrap()
}

async fn held(pool: &Pool) -> u64 {
    LuaPool::new(pool.clone()).count().await.unwrap().current_count
}

fn outcome(success: bool, status: &str, current_count: i64, expired_count: i64) -> Outcome {
    Outcome { success, status: status.to_owned(), current_count, expired_count }
}

#[tokio::test]
async fn another_program_shares_a_pool_with_us() {
    let server = RedisServer::start();
    let ours = LuaPool::new(encoders(&server.url(), 2).await);
    let theirs = Seed002::new(server.async_connection().await);
    assert_eq!(ours.acquire("a").await.unwrap().status, AcquireStatus::Acquired);
    assert_eq!(
        theirs.acquire("encoders", "b", 2, 30).await.unwrap(),
        outcome(true, "acquired", 2, 0)
    );
    // The pool is full for either program.
    assert_eq!(ours.acquire("c").await.unwrap().status, AcquireStatus::CapacityFull);
    let full = outcome(false, "capacity_full", 2, 0);
    assert_eq!(theirs.acquire("encoders", "c", 2, 30).await.unwrap(), full);
    // Each renews and counts what the other holds.
    assert_eq!(theirs.renew("encoders", "a", 30).await.unwrap(), outcome(true, "renewed", 2, 0));
    assert_eq!(ours.renew("b").await.unwrap().status, RenewStatus::Renewed);
    assert_eq!(theirs.count("encoders", 30).await.unwrap(), (2, 0));
    assert_eq!(ours.count().await.unwrap().current_count, 2);
    // Each releases what the other holds.
    assert_eq!(theirs.release("encoders", "a", 30).await.unwrap(), outcome(true, "released", 1, 0));
    assert_eq!(ours.release("a").await.unwrap().status, ReleaseStatus::NotHeld);
    assert_eq!(ours.release("b").await.unwrap().status, ReleaseStatus::Released);
    assert_eq!(theirs.renew("encoders", "b", 30).await.unwrap(), outcome(false, "not_held", 0, 0));
}

#[tokio::test]
async fn both_mean_the_same_by_expired() {
    let server = RedisServer::start();
    let ours = LuaPool::new(encoders(&server.url(), 4).await);
    let theirs = Seed002::new(server.async_connection().await);
    let mut redis = server.connection();
    for instance in ["a", "b"] {
        assert_eq!(ours.acquire(instance).await.unwrap().status, AcquireStatus::Acquired);
        theirs.acquire("encoders", &format!("their {instance}"), 4, 30).await.unwrap();
    }
    for holder in ["a", "b", "their a", "their b"] {
        let key = format!("semaphores:holders:encoders:{holder}");
        assert_eq!(redis::cmd("DEL").arg(key).query(&mut redis), Ok(1), "{holder}");
    }
    // The holder key is gone before the member: the call reports the expiry, and removes the member.
    let answer = ours.renew("their a").await.unwrap();
    assert_eq!((answer.status, answer.current_count), (RenewStatus::Expired, 3));
    assert_eq!(theirs.renew("encoders", "a", 30).await.unwrap().status, "expired");
    let answer = ours.release("their b").await.unwrap();
    assert_eq!((answer.status, answer.current_count), (ReleaseStatus::AlreadyExpired, 1));
    let answer = theirs.release("encoders", "b", 30).await.unwrap();
    assert_eq!((answer.status.as_str(), answer.current_count), ("already_expired", 0));
}

#[tokio::test]
async fn it_is_kept_in_the_keys_that_others_know() {
    let server = RedisServer::start();
    let pool = encoders(&server.url(), 4).await;
    let _id = pool.acquire("worker 1").await.unwrap().detach();
    let mut redis = server.connection();
    let time: (f64, f64) = redis::cmd("TIME").query(&mut redis).unwrap();
    let members: Vec<(String, f64)> = redis::cmd("ZRANGE")
        .arg(&["semaphores:encoders", "0", "-1", "WITHSCORES"])
        .query(&mut redis)
        .unwrap();
    assert_eq!(members.len(), 1);
    assert_eq!(members[0].0, "worker 1");
    let age = time.0 + time.1 / 1e6 - members[0].1;
    assert!((0.0..20.0).contains(&age), "the score is {age} s ago");
    let holder = "semaphores:holders:encoders:worker 1";
    let left: u64 = redis::cmd("PTTL").arg(holder).query(&mut redis).unwrap();
    assert!((10_000..=30_000).contains(&left), "{left} ms");
    pool.release("worker 1").await.unwrap();
    assert_eq!(keys(&mut redis), [""; 0]);
}

/// Returns all keys except the records of clients, which are written in the background.
fn keys(redis: &mut redis::Connection) -> Vec<String> {
    let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(redis).unwrap();
    keys.retain(|key| !key.contains(":client:"));
    keys
}

#[tokio::test]
async fn a_call_is_one_command() {
    let server = RedisServer::start();
    let pool = encoders(&server.url(), 4).await;
    // All requests of the connect have been sent.
    LuaPool::new(pool.clone()).count().await.unwrap();
    let before = server.command_count("evalsha");
    let _id = pool.acquire("a").await.unwrap().detach();
    pool.extend("a").await.unwrap();
    pool.release("a").await.unwrap();
    assert_eq!(server.command_count("evalsha") - before, 3);
}

#[tokio::test]
async fn a_key_that_is_not_ours_is_left_alone() {
    let server = RedisServer::start();
    let pool = encoders(&server.url(), 4).await;
    let mut redis = server.connection();
    redis::cmd("SET").arg("semaphores:encoders").arg("mine").exec(&mut redis).unwrap();
    let error = pool.acquire("a").await.unwrap_err();
    assert!(matches!(error, Error::ForeignData { .. }), "{error}");
    assert!(error.to_string().contains("\"semaphores:encoders\""), "{error}");
    let value: String = redis::cmd("GET").arg("semaphores:encoders").query(&mut redis).unwrap();
    assert_eq!(value, "mine");
    assert_eq!(keys(&mut redis), ["semaphores:encoders"]);
}

#[tokio::test]
async fn a_lease_whose_reply_was_lost_is_taken_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (pool, other) = (encoders(&proxy.url(), 2).await, encoders(&server.url(), 2).await);
    proxy.lose_reply_to(b"EVALSHA");
    let lease = deadline(pool.acquire("a")).await.unwrap();
    assert_eq!(proxy.traffic().lost, 1);
    assert_eq!(held(&other).await, 1);
    proxy.lose_reply_to(b"EVALSHA");
    deadline(lease.release()).await.unwrap();
    assert_eq!(held(&other).await, 0);
}

/// The holder is notified before another instance gets its lease.
#[tokio::test]
async fn a_holder_that_is_cut_off_is_notified_in_time() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let ttl = Duration::from_secs(2);
    let pool = connect(&proxy.url()).await.pool("encoders", 1).lease(ttl).build().unwrap();
    let other = connect(&server.url()).await.pool("encoders", 1).lease(ttl).build().unwrap();
    let lease = deadline(pool.acquire("a")).await.unwrap();
    proxy.refuse(true);
    proxy.cut();
    let lost = tokio::spawn({
        let lost = lease.lost();
        async move { (lost.await, Instant::now()) }
    });
    eventually(async || other.try_acquire("b").await.unwrap().is_some()).await;
    let next_at = Instant::now();
    let (reason, lost_at) = deadline(lost).await.unwrap();
    assert_eq!(reason, LossReason::NotRenewed);
    assert!(lease.check().is_err());
    assert!(lost_at < next_at);
}

#[tokio::test]
async fn an_acquire_that_is_dropped_while_its_reply_is_in_flight_leaves_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (pool, other) = (encoders(&proxy.url(), 1).await, encoders(&server.url(), 1).await);
    proxy.delay(Duration::from_millis(50));
    let wait = tokio::spawn(async move { pool.acquire("a").await });
    eventually(async || held(&other).await == 1).await;
    wait.abort();
    assert!(wait.await.unwrap_err().is_cancelled());
    eventually(async || held(&other).await == 0).await;
}

/// The client leaves a server that became a replica, although the connection to it stays open.
#[tokio::test]
async fn a_primary_that_became_a_replica_is_left() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::start(old.port());
    let pool = encoders(&proxy.url(), 1).await;
    let _id = pool.acquire("a").await.unwrap().detach();
    proxy.redirect(new.port());
    let mut redis = old.connection();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(new.port()).exec(&mut redis).unwrap();
    eventually(async || match deadline(pool.acquire("a")).await {
        Ok(_) => true,
        Err(error) => {
            assert!(error.to_string().contains("read-only replica"), "{error}");
            false
        }
    })
    .await;
}
