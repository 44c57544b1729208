//! Connections that are cut, and servers that are unreachable.

use std::future::pending;
use std::sync::Arc;
use std::sync::Mutex;

use leasehold::compat::sync_guard::Settings;
use leasehold::{Error, LossReason};
use testkit::proxy::FaultProxy;

use super::{
    Client, Duration, Instant, KEY, MINUTES, Server, Waiter, acquire, builder, connect, deadline,
    lock, release, try_acquire,
};

/// Short, but long enough for a busy machine.
const LEASE: Duration = Duration::from_secs(2);

async fn start() -> (Server, FaultProxy, Client, Client) {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    (server, proxy, client, other)
}

fn extending(client: &Client) -> leasehold::Lock {
    client.lock(KEY).lease(LEASE).build().unwrap()
}

#[tokio::test]
async fn a_holder_that_is_cut_off_is_notified_before_another_is_granted() {
    for silent in [false, true] {
        let (server, proxy, client, other) = start().await;
        let guard = acquire(&extending(&client)).await;
        let lost = guard.lost();
        let lost = tokio::spawn(async move { (lost.await, Instant::now()) });
        let waiter = Waiter::join(&server, &other, &lock(&other, MINUTES)).await;
        if silent {
            proxy.half_open();
        } else {
            proxy.refuse(true);
            proxy.cut();
        }
        let (at, next) = waiter.granted().await;
        guard.check().unwrap_err();
        let (reason, notified) = deadline(lost).await.unwrap();
        assert_eq!(reason, LossReason::NotRenewed);
        assert!(notified < at, "notified {:?} too late", notified - at);
        assert!(next.fence() > guard.fence());
        proxy.heal();
        // The old guard does not release the lock of the next holder.
        assert!(!release(guard).await);
        assert!(deadline(other.locks().owns(&next.id())).await.unwrap());
        assert!(release(next).await);
    }
}

#[tokio::test]
async fn a_holder_that_is_connected_again_in_time_keeps_its_lock() {
    let (_server, proxy, client, other) = start().await;
    let guard = acquire(&extending(&client)).await;
    for _ in 0..3 {
        let extended = guard.expires_at();
        proxy.cut();
        testkit::wait::eventually(async || guard.expires_at() > extended).await;
    }
    guard.check().unwrap();
    assert!(try_acquire(&other).await.is_none());
    assert!(release(guard).await);
}

/// Its wake-up was sent to a connection that was cut.
#[tokio::test]
async fn a_waiter_that_is_connected_again_finds_what_it_missed() {
    let (server, proxy, client, other) = start().await;
    let held = acquire(&lock(&other, MINUTES)).await;
    let waiter = Waiter::join(&server, &client, &lock(&client, MINUTES)).await;
    proxy.refuse(true);
    proxy.cut();
    assert!(release(held).await);
    proxy.refuse(false);
    assert!(release(waiter.granted().await.1).await);
}

#[tokio::test]
async fn work_that_is_cut_off_is_told_without_waiting_for_the_release() {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let slow = builder(&proxy.url()).answer_timeout(MINUTES);
    let client = deadline(slow.open()).await.unwrap();
    let lock = extending(&client);
    let work = lock.with(async |_| {
        proxy.refuse(true);
        proxy.cut();
        pending::<()>().await;
    });
    let error = deadline(work).await.unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::NotRenewed, .. }), "{error}");
}

#[tokio::test]
async fn a_release_that_fails_is_told_to_the_hook_and_the_answer_stays() {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let short = builder(&proxy.url()).answer_timeout(Duration::from_millis(300));
    let client = deadline(short.open()).await.unwrap();
    let errors = Arc::new(Mutex::new(Vec::new()));
    let list = errors.clone();
    let hook = move |error: &Error| list.lock().unwrap().push(error.clone());
    let lock = client.lock(KEY).lease(MINUTES).on_release_error(hook).build().unwrap();
    let answer = lock.with(async |_| {
        proxy.refuse(true);
        proxy.cut();
        "the answer"
    });
    assert_eq!(deadline(answer).await.unwrap(), "the answer");
    let errors = errors.lock().unwrap();
    assert!(matches!(errors[..], [Error::Unavailable { timed_out: false, .. }]), "{errors:?}");
    drop(errors);
    assert!(
        server.ask::<bool>(&["EXISTS", "syncguard:invoice:42"]),
        "the lock stays until it expires"
    );
}

#[tokio::test]
async fn a_close_that_cannot_reach_the_server_tells_every_holder() {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let short = builder(&proxy.url()).answer_timeout(Duration::from_millis(300));
    let client = deadline(short.open()).await.unwrap();
    let mut guards = Vec::new();
    for key in ["a", "b", "c"] {
        guards.push(acquire(&client.lock(key).lease(MINUTES).build().unwrap()).await);
    }
    proxy.refuse(true);
    proxy.cut();
    let error = deadline(client.close()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { timed_out: false, .. }), "{error}");
    for guard in guards {
        let error = guard.check().unwrap_err();
        assert!(matches!(error, Error::Lost { reason: LossReason::Closed, .. }), "{error}");
        assert_eq!(deadline(guard.lost()).await, LossReason::Closed);
    }
}

/// The releases are sent as soon as the close has been polled once.
#[tokio::test]
async fn a_close_that_is_dropped_goes_on() {
    let (server, _proxy, client, _) = start().await;
    let mut guards = Vec::new();
    for key in ["a", "b", "c"] {
        guards.push(acquire(&client.lock(key).lease(MINUTES).build().unwrap()).await);
    }
    let mut closing = testkit::by_hand::ByHand::new(client.close());
    let _ = closing.poll();
    drop(closing);
    for guard in &guards {
        guard.check().unwrap_err();
    }
    testkit::wait::eventually(async || server.keys().len() == 3).await;
    assert!(server.keys().iter().all(|key| key.starts_with("syncguard:fence:")));
}

/// An answer time-out shorter than the minimum that an extension gets.
#[tokio::test]
async fn a_short_socket_timeout_does_not_keep_a_holder_in_the_dark() {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let short = builder(&proxy.url()).answer_timeout(Duration::from_millis(8));
    // On a busy machine it is also too short to open and to acquire at the first attempt.
    let guard = deadline(async {
        loop {
            let Ok(client) = short.clone().open().await else { continue };
            if let Ok(Some(guard)) = extending(&client).try_acquire().await {
                break guard;
            }
            let _ = client.close().await;
        }
    })
    .await;
    let lost = tokio::spawn(guard.lost());
    proxy.half_open();
    assert_eq!(deadline(lost).await.unwrap(), LossReason::NotRenewed);
}

/// Other calls share the connection.
#[tokio::test]
async fn a_call_that_is_dropped_does_not_cost_the_connection() {
    let (_server, proxy, client, _other) = start().await;
    let before = proxy.traffic().accepted;
    proxy.delay(Duration::from_millis(20));
    let (lock, pool) = (lock(&client, MINUTES), client.pool("p", 1).build().unwrap());
    for _ in 0..5 {
        let limit = Duration::from_millis(10);
        let _ = tokio::time::timeout(limit, lock.acquire()).await;
        let _ = tokio::time::timeout(limit, lock.try_acquire()).await;
        let _ = tokio::time::timeout(limit, pool.acquire("a")).await;
        let _ = tokio::time::timeout(limit, pool.try_acquire("a")).await;
        let _ = tokio::time::timeout(limit, client.locks().try_acquire(KEY, MINUTES)).await;
    }
    proxy.heal();
    testkit::wait::eventually(async || !client.locks().is_locked(KEY).await.unwrap()).await;
    let calls = leasehold::compat::lua_pool::LuaPool::new(pool);
    testkit::wait::eventually(async || calls.count().await.unwrap().current_count == 0).await;
    assert_eq!(proxy.traffic().accepted, before);
}

/// The client leaves a server that became a replica, although the connection to it stays open.
#[tokio::test]
async fn a_primary_that_became_a_replica_is_left() {
    let (old, new) = (Server::start(), Server::start());
    let proxy = FaultProxy::start(old.port());
    let client = connect(&proxy.url()).await;
    let lock = lock(&client, MINUTES);
    assert!(release(acquire(&lock).await).await);
    proxy.redirect(new.port());
    old.ask::<()>(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
    testkit::wait::eventually(async || match deadline(lock.acquire()).await {
        Ok(guard) => release(guard).await,
        Err(error) => {
            assert!(error.to_string().contains("read-only replica"), "{error}");
            false
        }
    })
    .await;
}
