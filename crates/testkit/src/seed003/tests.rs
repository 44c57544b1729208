use std::ops::RangeInclusive;

use redis::Connection;
use tokio::task::JoinSet;

use super::*;
use crate::query::query;
use crate::redis_server::{RedisServer, expires_at};

/// Long enough that nothing expires unless a test makes it expire.
const TTL: u64 = 1_000_000;
/// Lock ids for keys that a test writes itself.
const A: &str = "AAAAAAAAAAAAAAAAAAAAAA";
const B: &str = "BBBBBBBBBBBBBBBBBBBBBB";

async fn start() -> (RedisServer, Connection, Seed003) {
    let server = RedisServer::start();
    let (connection, seed) =
        (server.connection(), Seed003::new(server.async_connection().await, "p"));
    (server, connection, seed)
}

/// The server's clock, in milliseconds.
fn now(connection: &mut Connection) -> u64 {
    let (seconds, micros): (u64, u64) = query(connection, "TIME");
    seconds * 1000 + micros / 1000
}

/// Each key's expiry is set from its own reading of the clock, between the readings before and after the script.
#[track_caller]
fn end_within(connection: &mut Connection, keys: &[&str], expected: &RangeInclusive<u64>) {
    for key in keys {
        let end = expires_at(connection, key).cast_unsigned();
        assert!(expected.contains(&end), "{key} ends at {end}, not in {expected:?}");
    }
}

/// Writes the record of a lock on `k` that expired `ago_ms` ago but still exists.
fn write_ended(connection: &mut Connection, lock_id: &str, ago_ms: u64) {
    let ended = now(connection) - ago_ms;
    let times = format!(r#""acquiredAtMs":{},"expiresAtMs":{ended}"#, ended - TTL);
    let record = format!(r#"{{"lockId":"{lock_id}",{times},"key":"k","fence":"{:019}"}}"#, 7);
    query::<()>(connection, &format!("SET p:k {record}"));
}

#[tokio::test]
async fn the_scripts_write_the_documented_keys() {
    let (server, mut connection, seed) = start().await;
    let before = now(&mut connection);
    let acquired = seed.acquire("k", TTL).await.unwrap().unwrap();
    let after = now(&mut connection);
    let index = format!("p:id:{}", acquired.lock_id);
    assert_eq!(server.keys(), ["p:fence:k", &index, "p:k"]);
    assert_eq!(acquired.fence, "0000000000000000001");
    assert!((before + TTL..=after + TTL).contains(&acquired.expires_at_ms), "{acquired:?}");

    let stored = LockData::parse(&query::<String>(&mut connection, "GET p:k"));
    let Acquired { lock_id, fence, expires_at_ms } = acquired;
    let (acquired_at_ms, key) = (expires_at_ms - TTL, "k".to_owned());
    assert_eq!(stored, LockData { lock_id, expires_at_ms, acquired_at_ms, key, fence });
    assert_eq!(query::<String>(&mut connection, &format!("GET {index}")), "k");
    assert_eq!(query::<String>(&mut connection, "GET p:fence:k"), "1");
    assert_eq!(query::<i64>(&mut connection, "PTTL p:fence:k"), -1);
    end_within(&mut connection, &["p:k", &index], &(before + TTL..=after + TTL));

    assert_eq!(seed.release(&stored.lock_id).await.unwrap(), 1);
    assert_eq!(server.keys(), ["p:fence:k"]);
}

#[tokio::test]
async fn one_holds_at_a_time_and_every_fence_is_the_next() {
    let (_server, _, seed) = start().await;
    for turn in 1..=12 {
        let held = seed.acquire("k", TTL).await.unwrap().unwrap();
        assert_eq!(held.fence, format!("{turn:019}"));
        assert_eq!(seed.acquire("k", TTL).await.unwrap(), None);
        assert_eq!(seed.acquire_as(&held.lock_id, "k", TTL).await.unwrap(), None);
        assert_eq!(seed.release(&held.lock_id).await.unwrap(), 1);
        assert_eq!(seed.release(&held.lock_id).await.unwrap(), -1);
    }
    let other = seed.acquire("other", TTL).await.unwrap().unwrap();
    assert_eq!(other.fence, format!("{:019}", 1));
}

#[tokio::test]
async fn one_of_concurrent_acquires_gets_the_lock() {
    let (_server, _, seed) = start().await;
    let mut crowd = JoinSet::new();
    for _ in 0..20 {
        let seed = seed.clone();
        crowd.spawn(async move { seed.acquire("k", TTL).await.unwrap() });
    }
    let acquired: Vec<_> = crowd.join_all().await.into_iter().flatten().collect();
    assert_eq!(acquired.len(), 1, "{acquired:?}");
    let found = seed.lookup_by_key("k").await.unwrap().unwrap();
    assert_eq!((found.lock_id, found.fence), (acquired[0].lock_id.clone(), format!("{:019}", 1)));
}

#[tokio::test]
async fn an_extension_replaces_what_was_left() {
    let (_server, mut connection, seed) = start().await;
    let held = seed.acquire_as(A, "k", TTL).await.unwrap().unwrap();
    let first = seed.lookup_by_id(A).await.unwrap().unwrap();
    for ttl in [3 * TTL, TTL / 2] {
        let before = now(&mut connection);
        assert_eq!(seed.extend(A, ttl).await.unwrap(), 1);
        let after = now(&mut connection);
        let extended = seed.lookup_by_id(A).await.unwrap().unwrap();
        let expires_at_ms = extended.expires_at_ms;
        assert!((before + ttl..=after + ttl).contains(&expires_at_ms), "{extended:?}");
        assert_eq!(extended, LockData { expires_at_ms, ..first.clone() });
        end_within(&mut connection, &["p:k", &format!("p:id:{A}")], &(before + ttl..=after + ttl));
    }
    assert_eq!(first.fence, held.fence);
}

#[tokio::test]
async fn release_and_extend_of_a_foreign_lock_give_the_reason() {
    let (server, mut connection, seed) = start().await;
    for release in [true, false] {
        let code = async |lock_id| {
            let code =
                if release { seed.release(lock_id).await } else { seed.extend(lock_id, TTL).await };
            code.unwrap()
        };
        assert_eq!(code(A).await, -1, "there is no index");
        query::<()>(&mut connection, &format!("SET p:id:{A} k"));
        assert_eq!(code(A).await, -1, "there is no lock");

        seed.acquire_as(B, "k", TTL).await.unwrap().unwrap();
        assert_eq!(code(A).await, 0, "the index leads to another id's lock");
        assert_eq!(seed.lookup_by_id(A).await.unwrap(), None);
        assert_eq!(seed.lookup_by_id(B).await.unwrap(), seed.lookup_by_key("k").await.unwrap());

        query::<()>(&mut connection, &format!("SET p:id:{A} k"));
        write_ended(&mut connection, A, 30_000);
        assert_eq!(code(A).await, -2, "it has expired");
        assert_eq!(server.keys(), ["p:fence:k".to_owned(), format!("p:id:{B}")]);
        assert_eq!(code(A).await, -1, "it was cleaned up");
        query::<()>(&mut connection, &format!("DEL p:id:{B}"));
    }
}

#[tokio::test]
async fn a_record_expires_with_its_ttl() {
    let (_server, mut connection, seed) = start().await;
    for key in ["p:k".to_owned(), format!("p:id:{A}")] {
        seed.acquire_as(A, "k", TTL).await.unwrap().unwrap();
        assert!(seed.is_locked("k").await.unwrap());
        assert_eq!(query::<u64>(&mut connection, &format!("PEXPIREAT {key} 1")), 1);
        assert_eq!(seed.is_locked("k").await.unwrap(), key != "p:k");
        assert_eq!(seed.lookup_by_id(A).await.unwrap(), None);
        assert_eq!((seed.extend(A, TTL).await.unwrap(), seed.release(A).await.unwrap()), (-1, -1));
        query::<()>(&mut connection, "DEL p:k");
    }
}

#[tokio::test]
async fn a_record_outlives_its_end_by_the_tolerance() {
    let (server, mut connection, seed) = start().await;
    let patient = seed.clone().with_tolerance_ms(60_000);
    query::<()>(&mut connection, &format!("SET p:id:{A} k"));
    write_ended(&mut connection, A, 30_000);

    assert!(patient.is_locked("k").await.unwrap());
    let found = patient.lookup_by_key("k").await.unwrap();
    assert_eq!(found.as_ref().map(|found| found.lock_id.as_str()), Some(A));
    assert_eq!(patient.lookup_by_id(A).await.unwrap(), found);
    assert_eq!(patient.acquire("k", TTL).await.unwrap(), None);

    assert!(!seed.is_locked("k").await.unwrap());
    assert_eq!(seed.lookup_by_key("k").await.unwrap(), None);
    assert_eq!(seed.lookup_by_id(A).await.unwrap(), None);
    assert_eq!(server.keys(), [format!("p:id:{A}"), "p:k".to_owned()], "looking changes nothing");
    assert_eq!(patient.extend(A, TTL).await.unwrap(), 1);
    assert!(seed.is_locked("k").await.unwrap());
}

#[tokio::test]
async fn an_expired_record_is_taken_over() {
    let (server, mut connection, seed) = start().await;
    query::<()>(&mut connection, &format!("SET p:id:{A} k"));
    query::<()>(&mut connection, "SET p:fence:k 7");
    write_ended(&mut connection, A, 30_000);
    let acquired = seed.acquire_as(B, "k", TTL).await.unwrap().unwrap();
    assert_eq!(acquired.fence, format!("{:019}", 8));
    // The document leaves the old index until it expires. It is of no use to its owner.
    let all = ["p:fence:k".to_owned(), format!("p:id:{A}"), format!("p:id:{B}"), "p:k".to_owned()];
    assert_eq!(server.keys(), all);
    assert_eq!((seed.release(A).await.unwrap(), seed.release(B).await.unwrap()), (0, 1));
}

#[tokio::test]
async fn keys_and_prefixes_keep_locks_apart() {
    let (server, _, seed) = start().await;
    let other = Seed003::new(server.async_connection().await, "q");
    let odd = "a:b \"\\ ü";
    let ids: Vec<_> = [A, B].into_iter().zip([&seed, &other]).collect();
    for (id, seed) in &ids {
        seed.acquire_as(id, odd, TTL).await.unwrap().unwrap();
        assert_eq!(seed.lookup_by_id(id).await.unwrap().unwrap().key, odd);
        assert!(seed.is_locked(odd).await.unwrap() && !seed.is_locked("a").await.unwrap());
    }
    assert_eq!((seed.release(B).await.unwrap(), other.release(A).await.unwrap()), (-1, -1));
    assert_eq!((seed.release(A).await.unwrap(), other.release(B).await.unwrap()), (1, 1));
}

#[test]
fn a_lock_id_is_22_characters_and_new() {
    let ids: Vec<_> = (0..100).map(|_| new_lock_id()).collect();
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    assert!(ids.iter().all(|id| id.len() == 22 && id.bytes().all(good)), "{ids:?}");
    let different: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(different.len(), ids.len());
}

#[test]
#[should_panic(expected = "lacks a good fence")]
fn a_fence_that_is_a_number_is_no_fence() {
    let times = r#""acquiredAtMs":1,"expiresAtMs":2"#;
    let _ = LockData::parse(&format!(r#"{{"lockId":"{A}",{times},"key":"k","fence":1}}"#));
}
