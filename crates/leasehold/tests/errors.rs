//! How each variant of `Error` is provoked on a real store, and what its fields say.
//!
//! `Stopped` needs a fork or a process without room for a thread: see `local_faults` and `client_core`. A full disk
//! needs a small one: see the tests of the local store and of the command.

#![cfg(all(feature = "local", feature = "redis", target_os = "linux"))]

use std::fmt::Debug;
use std::future::IntoFuture;
use std::time::Duration;

use leasehold::blocking::Wait;
use leasehold::{Client, Error, LossReason, Primitive};
use testkit::local_store::LocalStore;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

const SHORT: Duration = Duration::from_millis(20);

/// Returns the error of an operation that must fail.
async fn failure<T: Debug, F: IntoFuture<Output = Result<T, Error>>>(operation: F) -> Error {
    deadline(operation.into_future()).await.expect_err("it fails")
}

/// Matches the error, and fails with its text if it is another variant.
macro_rules! expect {
    ($error:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $error;
        assert!(matches!(&error, $pattern $(if $guard)?), "{error:?}");
        error.to_string()
    }};
}

#[tokio::test]
async fn an_argument_is_wrong() {
    let client = Client::memory();
    let pool = client.pool("encoders", 1).build().unwrap();
    expect!(
        client.semaphore("api", 0).build().unwrap_err(),
        Error::InvalidArgument { argument: "capacity", .. }
    );
    expect!(client.lock("").build().unwrap_err(), Error::InvalidArgument { argument: "key", .. });
    expect!(
        failure(pool.acquire("")).await,
        Error::InvalidArgument { argument: "instance id", .. }
    );
    expect!(
        failure(Client::open("mysql://host")).await,
        Error::InvalidArgument { argument: "store", .. }
    );
    let nowhere = failure(Client::local("/nowhere/store")).await;
    expect!(nowhere, Error::InvalidArgument { argument: "store", .. });
}

#[tokio::test]
async fn another_program_uses_the_name() {
    let server = RedisServer::start();
    let client = deadline(Client::redis(&server.url())).await.unwrap();
    let mut redis = server.connection();
    for key in ["adv-sem:semaphore_main:api", "semaphores:api"] {
        redis::cmd("RPUSH").arg(key).arg("theirs").exec(&mut redis).unwrap();
    }
    redis::cmd("SET").arg("syncguard:api").arg("theirs").exec(&mut redis).unwrap();
    let semaphore = client.semaphore("api", 1).build().unwrap();
    let lock = client.lock("api").build().unwrap();
    let pool = client.pool("api", 1).build().unwrap();
    for (error, key) in [
        (failure(semaphore.acquire()).await, "adv-sem:semaphore_main:api"),
        (failure(semaphore.pin(2)).await, ""),
        (failure(semaphore.stats()).await, "adv-sem:semaphore_main:api"),
        (failure(client.stats().names(["api"])).await, "adv-sem:semaphore_main:api"),
        (failure(lock.acquire()).await, "syncguard:api"),
        (failure(client.locks().lookup("api")).await, "syncguard:api"),
        (failure(pool.acquire("a")).await, "semaphores:api"),
    ] {
        let text = expect!(error, Error::ForeignData { name, .. } if name == "api");
        assert!(text.starts_with("\"api\": ") && text.contains(key), "{text}");
    }
}

#[tokio::test]
async fn a_value_cannot_be_read() {
    let store = LocalStore::new();
    let client = deadline(Client::local(store.path())).await.unwrap();
    let _guard = deadline(client.lock("invoice").build().unwrap().acquire()).await.unwrap();
    let file = rusqlite::Connection::open(store.path()).unwrap();
    file.execute("UPDATE locks SET id = 'no lock id'", []).unwrap();
    let error = failure(client.locks().lookup("invoice")).await;
    expect!(error, Error::ForeignData { name, .. } if name == "invoice");
}

#[tokio::test]
async fn a_semaphore_is_pinned_or_in_use_or_too_small() {
    let semaphore = Client::memory().semaphore("api", 2).build().unwrap();
    let held = deadline(semaphore.acquire()).await.unwrap();
    deadline(semaphore.pin(3)).await.unwrap();
    let text = expect!(failure(semaphore.set_capacity(1)).await, Error::Pinned { capacity: 3, .. });
    assert_eq!(text, "\"api\" is pinned to 3: unpin it, or pin another capacity");
    let in_use = failure(semaphore.forget()).await;
    let text = expect!(in_use, Error::InUse { held: 1, waiting: 0, .. });
    let expected = "\"api\" is in use: 1 held, 0 waiting: drain it first, and cancel the waiters";
    assert_eq!(text, expected);
    let unknown = Client::memory().semaphore("apy", 2).unless_declared().build().unwrap();
    expect!(failure(unknown.forget()).await, Error::Unknown { name, .. } if name == "apy");
    let heavy = failure(semaphore.acquire().weight(4)).await;
    let text = expect!(heavy, Error::TooHeavy { weight: 4, capacity: 3, .. });
    let expected =
        "the weight is 4; the capacity of \"api\" is 3: ask for less, or raise the capacity";
    assert_eq!(text, expected);
    let late = failure(semaphore.drain().within(SHORT)).await;
    let text = expect!(late, Error::NotDrained { limit: SHORT, .. });
    assert_eq!(text, "\"api\" was not drained within 20ms: permits are still held");
    drop(held);
}

#[tokio::test]
async fn a_thread_of_a_runtime_is_blocked() {
    let semaphore = Client::memory().semaphore("api", 1).build().unwrap();
    let text = expect!(semaphore.acquire().wait().unwrap_err(), Error::WrongThread { .. });
    assert!(text.contains("await the future"), "{text}");
}

#[tokio::test]
async fn a_wait_ends() {
    let client = Client::memory();
    let semaphore = client.semaphore("api", 1).build().unwrap();
    let lock = client.lock("key").within(SHORT).build().unwrap();
    let pool = client.pool("encoders", 1).within(SHORT).build().unwrap();
    let permit = deadline(semaphore.acquire()).await.unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    let lease = deadline(pool.acquire("a")).await.unwrap();
    for (error, acquired) in [
        (failure(semaphore.acquire().within(SHORT)).await, Primitive::Semaphore),
        (failure(lock.acquire()).await, Primitive::Lock),
        (failure(pool.acquire("b")).await, Primitive::Pool),
    ] {
        expect!(error, Error::TimedOut { primitive, .. } if *primitive == acquired);
    }
    let waiting = semaphore.acquire();
    let cancelled = waiting.id();
    let waiting = tokio::spawn(waiting);
    eventually(async || semaphore.release(&cancelled).await.unwrap()).await;
    let error = deadline(waiting).await.unwrap().unwrap_err();
    let text = expect!(error, Error::Cancelled { id, .. } if *id == cancelled.to_string());
    assert!(text.starts_with("the wait for \"api\" was cancelled: "), "{text}");

    deadline(client.close()).await.unwrap();
    for (error, held) in [
        (permit.check().unwrap_err(), Primitive::Semaphore),
        (guard.check().unwrap_err(), Primitive::Lock),
        (lease.check().unwrap_err(), Primitive::Pool),
    ] {
        let closed = LossReason::Closed;
        expect!(error, Error::Lost { primitive, reason, .. } if (*primitive, *reason) == (held, closed));
    }
    expect!(failure(semaphore.acquire()).await, Error::Closed);
}

#[tokio::test]
async fn a_store_cannot_be_reached() {
    let refused = failure(Client::redis("redis://127.0.0.1:1")).await;
    expect!(refused, Error::Unavailable { timed_out: false, .. });
    let server = RedisServer::start();
    let client = deadline(Client::redis(&server.url())).await.unwrap();
    server.pause();
    let silent = failure(client.semaphore("api", 1).build().unwrap().acquire().within(SHORT)).await;
    expect!(silent, Error::Unavailable { timed_out: true, .. });
}

#[tokio::test]
async fn a_store_denies_access() {
    let users = ["--requirepass secret", "--user reader on >pw ~* +@read +@connection +info"];
    let server = RedisServer::start_with(&users);
    expect!(failure(Client::redis(&server.url())).await, Error::Denied { .. });
    expect!(failure(Client::redis(&server.url_with("", "wrong"))).await, Error::Denied { .. });
    expect!(failure(Client::redis(&server.url_with("reader", "pw"))).await, Error::Denied { .. });
    let reader = Client::redis_builder(&server.url_with("reader", "pw")).read_only().open();
    let reader = deadline(reader).await.unwrap();
    let semaphore = reader.semaphore("api", 1).build().unwrap();
    expect!(failure(semaphore.acquire()).await, Error::Denied { .. });

    let store = LocalStore::new();
    let _writer = deadline(Client::local(store.path())).await.unwrap();
    let reader = deadline(Client::local_builder(store.path()).read_only().open()).await.unwrap();
    let semaphore = reader.semaphore("api", 1).build().unwrap();
    expect!(failure(semaphore.acquire()).await, Error::Denied { .. });
}

#[tokio::test]
async fn a_store_has_no_room() {
    let server = RedisServer::start();
    let client = deadline(Client::redis(&server.url())).await.unwrap();
    let mut redis = server.connection();
    for (setting, value) in [("maxmemory-policy", "noeviction"), ("maxmemory", "1")] {
        redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).exec(&mut redis).unwrap();
    }
    let full = failure(client.lock("key").build().unwrap().acquire()).await;
    let text = expect!(full, Error::NoRoom { .. });
    assert!(text.ends_with("out of memory: raise maxmemory, or free memory"), "{text}");
}

#[tokio::test]
async fn a_store_cannot_be_used() {
    let server = RedisServer::start();
    let cluster = server.url().replace("redis://", "redis-cluster://");
    let text = expect!(failure(Client::redis(&cluster)).await, Error::Unusable { .. });
    assert!(text.contains("is not a cluster node: use redis://"), "{text}");
    let replica = RedisServer::start_with(&["--replicaof 127.0.0.1 1"]);
    let text = expect!(failure(Client::redis(&replica.url())).await, Error::Unusable { .. });
    assert!(text.ends_with("a read-only replica: connect to the primary"), "{text}");
    let store = LocalStore::new();
    std::fs::write(store.path(), "not a database").unwrap();
    let text = expect!(failure(Client::local(store.path())).await, Error::Unusable { .. });
    assert!(text.ends_with("is not a leasehold store: choose another path"), "{text}");
}
