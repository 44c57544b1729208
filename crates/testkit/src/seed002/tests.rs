use tokio::task::JoinSet;

use super::*;
use crate::query::query;
use crate::redis_server::RedisServer;

/// Long enough that nothing expires unless a test makes it expire.
const TTL: u64 = 1000;

async fn start() -> (RedisServer, redis::Connection, Seed002) {
    let server = RedisServer::start();
    let (connection, seed) = (server.connection(), Seed002::new(server.async_connection().await));
    (server, connection, seed)
}

fn is(outcome: &Outcome, status: &str, current_count: i64, expired_count: i64) {
    let success = ["acquired", "renewed", "released"].contains(&status);
    let status = status.to_owned();
    assert_eq!(*outcome, Outcome { success, status, current_count, expired_count });
}

/// The server's clock, in seconds.
fn now(connection: &mut redis::Connection) -> f64 {
    let (seconds, micros): (f64, f64) = query(connection, "TIME");
    seconds + micros / 1e6
}

/// Moves the last renewal of an instance into the past by so many seconds.
fn age(connection: &mut redis::Connection, id: &str, seconds: u32) {
    let score = now(connection) - f64::from(seconds);
    assert_eq!(query::<u64>(connection, &format!("ZADD semaphores:k XX CH {score} {id}")), 1);
}

fn score(connection: &mut redis::Connection, id: &str) -> f64 {
    query(connection, &format!("ZSCORE semaphores:k {id}"))
}

#[tokio::test]
async fn the_scripts_write_the_documented_keys() {
    let (server, mut connection, seed) = start().await;
    let before = now(&mut connection);
    is(&seed.acquire("k", "a", 2, TTL).await.unwrap(), "acquired", 1, 0);
    let after = now(&mut connection);
    assert_eq!(server.keys(), ["semaphores:holders:k:a", "semaphores:k"]);
    let acquired = score(&mut connection, "a");
    assert!((before..=after).contains(&acquired), "{acquired} is not in {before}..={after}");
    let left: u64 = query(&mut connection, "TTL semaphores:holders:k:a");
    assert!((TTL - 20..=TTL).contains(&left), "expires in {left}");
    assert_eq!(query::<i64>(&mut connection, "TTL semaphores:k"), -1);

    is(&seed.renew("k", "a", 2 * TTL).await.unwrap(), "renewed", 1, 0);
    assert!(score(&mut connection, "a") > acquired);
    assert!(query::<u64>(&mut connection, "TTL semaphores:holders:k:a") > TTL);
    assert_eq!(seed.count("k", TTL).await.unwrap(), (1, 0));
    is(&seed.release("k", "a", TTL).await.unwrap(), "released", 0, 0);
    assert_eq!(server.keys(), Vec::<String>::new());
    assert_eq!(seed.count("k", TTL).await.unwrap(), (0, 0));
}

#[tokio::test]
async fn a_full_pool_refuses_leases() {
    let (server, _, seed) = start().await;
    is(&seed.acquire("k", "a", 2, TTL).await.unwrap(), "acquired", 1, 0);
    is(&seed.acquire("k", "b", 2, TTL).await.unwrap(), "acquired", 2, 0);
    is(&seed.acquire("k", "c", 2, TTL).await.unwrap(), "capacity_full", 2, 0);
    assert!(!server.keys().contains(&"semaphores:holders:k:c".to_owned()));
    is(&seed.acquire("other", "c", 2, TTL).await.unwrap(), "acquired", 1, 0);
    is(&seed.release("k", "a", TTL).await.unwrap(), "released", 1, 0);
    is(&seed.acquire("k", "c", 2, TTL).await.unwrap(), "acquired", 2, 0);
    is(&seed.acquire("k", "d", 1, TTL).await.unwrap(), "capacity_full", 2, 0);
}

#[tokio::test]
async fn concurrent_acquires_share_the_capacity() {
    let (_server, _, seed) = start().await;
    let mut crowd = JoinSet::new();
    for number in 0..20 {
        let seed = seed.clone();
        crowd.spawn(async move { seed.acquire("k", &number.to_string(), 3, TTL).await.unwrap() });
    }
    let outcomes = crowd.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.success).count(), 3);
    assert!(outcomes.iter().all(|outcome| outcome.current_count <= 3), "{outcomes:?}");
    assert_eq!(seed.count("k", TTL).await.unwrap(), (3, 0));
}

#[tokio::test]
async fn an_instance_that_acquires_again_is_renewed() {
    let (_server, mut connection, seed) = start().await;
    is(&seed.acquire("k", "a", 1, TTL).await.unwrap(), "acquired", 1, 0);
    age(&mut connection, "a", 500);
    let aged = score(&mut connection, "a");
    is(&seed.acquire("k", "a", 1, 2 * TTL).await.unwrap(), "acquired", 1, 0);
    assert!(score(&mut connection, "a") > aged + 400.0);
    assert!(query::<u64>(&mut connection, "TTL semaphores:holders:k:a") > TTL);

    query::<()>(&mut connection, "DEL semaphores:holders:k:a");
    is(&seed.acquire("k", "a", 1, TTL).await.unwrap(), "acquired", 1, 0);
    is(&seed.renew("k", "a", TTL).await.unwrap(), "renewed", 1, 0);
}

#[tokio::test]
async fn every_script_first_removes_expired_holders() {
    let (_server, mut connection, seed) = start().await;
    for id in ["a", "b"] {
        seed.acquire("k", id, 3, TTL).await.unwrap();
    }
    let mut dead = async |id: &str| {
        seed.acquire("k", id, 3, TTL).await.unwrap();
        // Old, but not expired.
        age(&mut connection, "a", 900);
        age(&mut connection, id, 1001);
    };
    dead("x").await;
    assert_eq!(seed.count("k", TTL).await.unwrap(), (2, 1));
    dead("x").await;
    is(&seed.acquire("k", "c", 3, TTL).await.unwrap(), "acquired", 3, 1);
    is(&seed.release("k", "c", TTL).await.unwrap(), "released", 2, 0);
    dead("x").await;
    is(&seed.renew("k", "b", TTL).await.unwrap(), "renewed", 2, 1);
    dead("x").await;
    is(&seed.release("k", "b", TTL).await.unwrap(), "released", 1, 1);
    // The expired instance itself no longer holds, though its holder key still exists.
    dead("x").await;
    is(&seed.renew("k", "x", TTL).await.unwrap(), "not_held", 1, 1);
    dead("x").await;
    is(&seed.release("k", "x", TTL).await.unwrap(), "not_held", 1, 1);
}

#[tokio::test]
async fn renew_and_release_of_a_missing_lease_give_the_reason() {
    let (server, mut connection, seed) = start().await;
    is(&seed.renew("k", "a", TTL).await.unwrap(), "not_held", 0, 0);
    is(&seed.release("k", "a", TTL).await.unwrap(), "not_held", 0, 0);
    assert_eq!(server.keys(), Vec::<String>::new());

    seed.acquire("k", "b", 2, TTL).await.unwrap();
    for past in ["DEL semaphores:holders:k:a", "PEXPIREAT semaphores:holders:k:a 1"] {
        seed.acquire("k", "a", 2, TTL).await.unwrap();
        assert_eq!(query::<u64>(&mut connection, past), 1);
        is(&seed.renew("k", "a", TTL).await.unwrap(), "expired", 1, 1);
        is(&seed.renew("k", "a", TTL).await.unwrap(), "not_held", 1, 0);

        seed.acquire("k", "a", 2, TTL).await.unwrap();
        assert_eq!(query::<u64>(&mut connection, past), 1);
        is(&seed.release("k", "a", TTL).await.unwrap(), "already_expired", 1, 1);
        is(&seed.release("k", "a", TTL).await.unwrap(), "not_held", 1, 0);
    }
    assert_eq!(server.keys(), ["semaphores:holders:k:b", "semaphores:k"]);
}

/// The document's rule, kept with its flaw: every caller sweeps with its own TTL.
#[tokio::test]
async fn a_caller_with_a_short_ttl_evicts_others() {
    let (_server, mut connection, seed) = start().await;
    seed.acquire("k", "a", 1, TTL).await.unwrap();
    age(&mut connection, "a", 100);
    is(&seed.acquire("k", "b", 1, TTL).await.unwrap(), "capacity_full", 1, 0);
    is(&seed.acquire("k", "b", 1, 10).await.unwrap(), "acquired", 1, 1);
    is(&seed.renew("k", "a", TTL).await.unwrap(), "not_held", 1, 0);
}

#[tokio::test]
async fn scripts_are_loaded_once_and_again_when_the_server_has_lost_them() {
    let (server, mut connection, seed) = start().await;
    // Redis 6.2 does not count SCRIPT LOAD apart from SCRIPT FLUSH.
    for loads_and_flushes in [1, 1, 3] {
        if loads_and_flushes == 3 {
            query::<()>(&mut connection, "SCRIPT FLUSH");
        }
        assert_eq!(seed.count("k", TTL).await.unwrap(), (0, 0));
        assert_eq!(server.command_count("script"), loads_and_flushes);
    }
}
