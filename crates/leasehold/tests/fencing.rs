//! A holder is paused past its lease, and three resources refuse its late writes. Without the fence, each of them would
//! be overwritten. The recipes are those of docs/fencing.md, word for word.

#![cfg(feature = "redis")]

use std::time::Duration;

use leasehold::compat::sync_guard::{LockLayout, StoreSettings};
use leasehold::{Client, Fence, FenceGate, LockGuard};
use rusqlite::{Connection, params};
use testkit::child::{self, Child};
use testkit::redis_server::RedisServer;
use testkit::seed003::{Seed003, TTL_MS};
use testkit::wait::deadline;
use tokio::sync::mpsc::UnboundedReceiver;

const KEY: &str = "invoice:42";
const LEASE: Duration = Duration::from_secs(1);

/// The entry point of the process of the paused holder.
#[test]
fn child() {
    child::play(|resource, arguments| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(hold(resource, arguments));
    });
}

/// In the child: checks its lock, and is paused before it writes.
async fn hold(resource: &str, arguments: &[&str]) {
    let mut from_test = child::lines_from_test();
    let client = Client::redis(arguments[0]).await.unwrap();
    let guard = client.lock(KEY).lease(LEASE).build().unwrap().acquire().await.unwrap();
    guard.check().unwrap();
    child::say(&guard.fence().to_string());
    // Between the check and the write. No lock can help here.
    from_test.recv().await;
    match resource {
        "gate" => child::say(&format!("write {}", guard.fence())),
        "sql" => write_late_to_sql(arguments[1], &guard, &mut from_test).await.unwrap(),
        "redis" => write_late_to_redis(arguments[0], &guard, &mut from_test).await.unwrap(),
        _ => unreachable!("unknown resource {resource:?}"),
    }
    std::future::pending::<()>().await;
}

/// The paused holder, and the one after it.
struct Holders {
    paused: Child,
    paused_fence: Fence,
    next: LockGuard,
}

impl Holders {
    /// Returns when the first holder is paused and the second holds the lock.
    async fn start(server: &RedisServer, resource: &str, path: &str) -> Self {
        let mut paused = Child::start(resource, &[&server.url(), path]);
        let paused_fence = paused.says().await.parse().unwrap();
        paused.stop();
        // The child reads this as soon as it continues.
        paused.tell("write");
        // The lock was not released: it is free because its TTL has ended.
        let client = deadline(Client::redis(&server.url())).await.unwrap();
        let next = deadline(client.lock(KEY).build().unwrap().acquire()).await.unwrap();
        assert!(next.fence() > paused_fence);
        Self { paused, paused_fence, next }
    }
}

#[tokio::test]
async fn a_gate_refuses_a_holder_that_was_paused() {
    let mut holders = Holders::start(&RedisServer::start(), "gate", "").await;
    let next = holders.next.fence();
    let gate = FenceGate::new();
    let (mut value, mut without_fence) = ("nothing", "nothing");
    for again in 1..=2 {
        gate.with(next, || value = "of the next holder").unwrap();
        without_fence = value;
        assert_eq!(gate.newest(), Some(next), "time {again}");
    }

    holders.paused.go_on();
    let arrived = holders.paused.says().await;
    let fence: Fence = arrived.strip_prefix("write ").unwrap().parse().unwrap();
    let refused = gate.with(fence, || value = "of the paused holder").unwrap_err();
    assert_eq!((refused.fence, refused.newest), (holders.paused_fence, next));
    assert_eq!(value, "of the next holder");
    assert_eq!(without_fence, value);
    without_fence = "of the paused holder";
    assert_ne!(without_fence, value, "a plain lock would not have helped");
}

const TABLE: &str = "\
CREATE TABLE invoice (
    id    INTEGER PRIMARY KEY,
    value TEXT NOT NULL,
    fence BIGINT NOT NULL DEFAULT 0
);";

const UPDATE: &str = "\
UPDATE invoice SET value = ?1, fence = ?2
 WHERE id = ?3 AND fence <= ?2";

/// Returns true if the value was written.
fn write_row(db: &Connection, value: &str, fence: Fence) -> rusqlite::Result<bool> {
    // Fences of locks, like the integers of a database, are at most 2^63 - 1.
    let fence = i64::try_from(fence.get()).expect("a fence of a lock");
    Ok(db.execute(UPDATE, params![value, fence, 42])? == 1)
}

async fn write_late_to_sql(
    path: &str,
    guard: &LockGuard,
    from_test: &mut UnboundedReceiver<String>,
) -> rusqlite::Result<()> {
    let db = Connection::open(path)?;
    let written = write_row(&db, "of the paused holder", guard.fence())?;
    child::say(&format!("with its fence: {written}"));
    from_test.recv().await;
    db.execute("UPDATE invoice SET value = 'of the paused holder' WHERE id = 42", [])?;
    child::say("without: true");
    Ok(())
}

#[tokio::test]
async fn an_sql_row_refuses_a_holder_that_was_paused() -> rusqlite::Result<()> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("invoices");
    let db = Connection::open(&path)?;
    db.execute_batch(TABLE)?;
    db.execute("INSERT INTO invoice (id, value) VALUES (42, 'nothing')", [])?;
    let value = || {
        let query = "SELECT value FROM invoice WHERE id = 42";
        db.query_row(query, [], |row| row.get::<_, String>(0))
    };
    let path = path.to_str().unwrap();
    let mut holders = Holders::start(&RedisServer::start(), "sql", path).await;
    let next = holders.next.fence();
    assert!(write_row(&db, "of the next holder", next)?);
    assert!(write_row(&db, "also of the next holder", next)?, "the same fence may write again");

    holders.paused.go_on();
    assert_eq!(holders.paused.says().await, "with its fence: false");
    assert_eq!(value()?, "also of the next holder");
    holders.paused.tell("write without");
    assert_eq!(holders.paused.says().await, "without: true");
    assert_eq!(value()?, "of the paused holder", "a plain lock would not have helped");
    Ok(())
}

const WRITE: &str = "\
-- KEYS  1 the value, 2 the fence of its last writer
-- ARGV  1 the new value, 2 the fence
local function digits(fence) return (string.gsub(fence or '', '^0+', '')) end
local newest, fence = digits(redis.call('GET', KEYS[2])), digits(ARGV[2])
if #newest > #fence or #newest == #fence and newest > fence then return 0 end
redis.call('MSET', KEYS[1], ARGV[1], KEYS[2], ARGV[2])
return 1";

/// Returns true if the value was written.
fn write_value(
    db: &mut redis::Connection,
    value: &str,
    fence: impl std::fmt::Display,
) -> redis::RedisResult<bool> {
    let script = redis::Script::new(WRITE);
    script
        .key("{invoice:42}")
        .key("{invoice:42}:fence")
        .arg(value)
        .arg(format!("{fence}"))
        .invoke(db)
}

async fn write_late_to_redis(
    url: &str,
    guard: &LockGuard,
    from_test: &mut UnboundedReceiver<String>,
) -> redis::RedisResult<()> {
    let mut db = redis::Client::open(url)?.get_connection()?;
    let written = write_value(&mut db, "of the paused holder", guard.fence())?;
    child::say(&format!("with its fence: {written}"));
    from_test.recv().await;
    redis::cmd("SET").arg("{invoice:42}").arg("of the paused holder").exec(&mut db)?;
    child::say("without: true");
    Ok(())
}

#[tokio::test]
async fn a_redis_value_refuses_a_holder_that_was_paused() -> redis::RedisResult<()> {
    let server = RedisServer::start();
    let mut holders = Holders::start(&server, "redis", "").await;
    let (mut db, next) = (server.connection(), holders.next.fence());
    let mut look = server.connection();
    let mut value = || redis::cmd("GET").arg("{invoice:42}").query::<String>(&mut look);
    assert!(write_value(&mut db, "of the next holder", next)?);
    assert!(
        write_value(&mut db, "also of the next holder", next)?,
        "the same fence may write again"
    );

    holders.paused.go_on();
    assert_eq!(holders.paused.says().await, "with its fence: false");
    assert_eq!(value()?, "also of the next holder");
    holders.paused.tell("write without");
    assert_eq!(holders.paused.says().await, "without: true");
    assert_eq!(value()?, "of the paused holder", "a plain lock would not have helped");

    // Fences are compared as text: as Lua numbers, these two would be equal.
    assert!(write_value(&mut db, "newer", Fence::new((1 << 62) + 2))?);
    assert!(!write_value(&mut db, "older", Fence::new((1 << 62) + 1))?);
    assert_eq!(value()?, "newer");
    Ok(())
}

/// `SyncGuard` 2 writes fences of 15 digits, and the shell and Python pass them without leading zeros.
#[tokio::test]
async fn a_redis_value_refuses_a_stale_fence_in_every_form() -> redis::RedisResult<()> {
    let server = RedisServer::start();
    let mut db = server.connection();
    let theirs = Seed003::new(server.async_connection().await, "syncguard").version_2();
    let layout = LockLayout::SyncGuard2;
    let ours = Client::redis_builder(&server.url()).lock_layout(layout).open().await.unwrap();
    let lock = ours.lock("invoice:42").build().unwrap();
    for _ in 0..6 {
        let first = theirs.acquire("invoice:42", TTL_MS).await?.expect("it is free");
        assert_eq!(theirs.release(&first.lock_id).await?, 1);
        let second = lock.acquire().await.unwrap();
        let fence = second.fence();
        second.release().await.unwrap();
        let third = theirs.acquire("invoice:42", TTL_MS).await?.expect("it is free");
        assert_eq!(theirs.release(&third.lock_id).await?, 1);
        let text = fence.to_string();
        assert!(first.fence < text && text < third.fence, "{first:?} {text} {third:?}");
        assert!(write_value(&mut db, "of our holder", fence)?);
        assert!(!write_value(&mut db, "of an older holder", &first.fence)?);
        assert!(write_value(&mut db, "again of our holder", fence.get())?);
        assert!(write_value(&mut db, "of a newer holder", &third.fence)?);
        assert!(!write_value(&mut db, "of our holder, too late", fence)?);
        assert!(!write_value(&mut db, "of our holder, too late", fence.get())?);
    }
    Ok(())
}

#[test]
fn the_recipes_are_those_of_the_documentation() {
    let page = include_str!("../../../docs/fencing.md");
    for recipe in [TABLE, UPDATE, WRITE] {
        assert!(page.contains(recipe), "not in docs/fencing.md: {recipe}");
    }
}
