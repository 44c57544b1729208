//! Replies that are lost after their command ran: no second grant, no second fence, no leak.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold::Error;
use testkit::by_hand::step_aside;
use testkit::proxy::FaultProxy;
use testkit::wait::eventually;

use super::{
    Client, Duration, KEY, MINUTES, Server, Waiter, acquire, builder, connect, deadline, lock,
    release, try_acquire,
};

const SCRIPT: &[u8] = b"EVALSHA";

async fn start() -> (Server, FaultProxy, Client, Client) {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    (server, proxy, client, other)
}

/// Fails unless the lock becomes free, and only its fence counter is left.
async fn is_free(server: &Server, other: &Client) {
    eventually(async || server.keys().iter().all(|key| key.starts_with("syncguard:fence:"))).await;
    assert!(release(try_acquire(other).await.expect("it is free")).await);
}

#[tokio::test]
async fn a_lock_whose_reply_was_lost_is_granted_once() {
    let (server, proxy, client, other) = start().await;
    for round in 0..4 {
        proxy.lose_reply_to(SCRIPT);
        let guard = if round % 2 == 0 {
            acquire(&lock(&client, MINUTES)).await
        } else {
            try_acquire(&client).await.expect("the second attempt finds it granted")
        };
        assert_eq!(proxy.traffic().lost, 3 * round + 1);
        // One fence was counted, and it is the one in the reply.
        assert_eq!(server.ask::<u64>(&["GET", "syncguard:fence:invoice:42"]), 2 * round + 1);
        assert_eq!(guard.fence().get(), 2 * round + 1);
        assert!(try_acquire(&other).await.is_none());

        proxy.lose_reply_to(SCRIPT);
        deadline(guard.extend(2 * MINUTES)).await.unwrap();
        assert_eq!(proxy.traffic().lost, 3 * round + 2);
        let info = deadline(other.locks().lookup(KEY)).await.unwrap().unwrap();
        assert_eq!((info.expires_at, info.fence), (guard.expires_at(), guard.fence()));

        proxy.lose_reply_to(SCRIPT);
        // The result is unknown after a lost reply, but the lock is free.
        release(guard).await;
        assert_eq!(proxy.traffic().lost, 3 * round + 3);
        is_free(&server, &other).await;
    }
}

#[tokio::test]
async fn a_lock_outlives_the_replies_to_its_extensions() {
    let (_server, proxy, client, other) = start().await;
    let ttl = Duration::from_secs(2);
    let guard = acquire(&client.lock(KEY).lease(ttl).build().unwrap()).await;
    for lost in 1..=4 {
        proxy.lose_reply_to(SCRIPT);
        proxy.until(|traffic| traffic.lost == lost).await;
    }
    guard.check().unwrap();
    assert!(try_acquire(&other).await.is_none());
    assert!(release(guard).await);
}

#[tokio::test]
async fn an_acquire_that_is_given_up_while_its_outcome_is_unknown_leaves_nothing() {
    let (server, proxy, _, other) = start().await;
    let limit = Duration::from_millis(300);
    let impatient = builder(&proxy.url()).answer_timeout(limit).open().await.unwrap();
    for waits in [true, false] {
        proxy.refuse(true);
        proxy.lose_reply_to(SCRIPT);
        let lock = impatient.lock(KEY).lease(MINUTES).within(limit).build().unwrap();
        let error = if waits {
            deadline(lock.acquire()).await.unwrap_err()
        } else {
            deadline(lock.try_acquire()).await.unwrap_err()
        };
        assert!(matches!(error, Error::Unavailable { timed_out: false, .. }), "{error}");
        proxy.refuse(false);
        is_free(&server, &other).await;
    }
}

/// The server has granted the lock, and the reply is still under way when the acquire is dropped.
#[tokio::test]
async fn an_acquire_that_is_dropped_while_its_reply_is_held_back_leaves_nothing() {
    let (server, proxy, client, other) = start().await;
    for waits in [true, false] {
        proxy.delay(Duration::from_millis(300));
        let lock = lock(&client, MINUTES);
        let task = tokio::spawn(async move {
            if waits { lock.acquire().await.map(Some) } else { lock.try_acquire().await }
        });
        eventually(async || server.ask::<bool>(&["EXISTS", "syncguard:invoice:42"])).await;
        task.abort();
        assert!(deadline(task).await.unwrap_err().is_cancelled(), "its reply was not held back");
        proxy.heal();
        is_free(&server, &other).await;
    }
}

#[tokio::test]
async fn an_acquire_that_is_dropped_while_the_server_is_away_leaves_nothing() {
    let (server, proxy, client, other) = start().await;
    proxy.refuse(true);
    proxy.lose_reply_to(SCRIPT);
    let waiter = Waiter::begin(&lock(&client, MINUTES));
    proxy.until(|traffic| traffic.lost == 1).await;
    assert!(try_acquire(&other).await.is_none());
    waiter.task.abort();
    proxy.refuse(false);
    is_free(&server, &other).await;
}

#[tokio::test]
async fn whatever_reply_is_lost_there_is_one_holder() {
    let (server, proxy, client, other) = start().await;
    let holders = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = [&client, &client, &client, &other, &other]
        .into_iter()
        .map(|client| {
            let (lock, holders) = (lock(client, MINUTES), holders.clone());
            tokio::spawn(async move {
                let mut fences = Vec::new();
                for round in 0..20 {
                    let guard = lock.acquire().await.unwrap();
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                    fences.push(guard.fence());
                    step_aside(10).await;
                    assert_eq!(holders.fetch_sub(1, Ordering::SeqCst), 1, "two at once");
                    if round % 2 == 0 {
                        guard.release().await.unwrap();
                    }
                }
                fences
            })
        })
        .collect();
    let done = || tasks.iter().all(tokio::task::JoinHandle::is_finished);
    for lost in 1..=15 {
        if done() {
            break;
        }
        proxy.lose_reply_to(SCRIPT);
        eventually(async || proxy.traffic().lost == lost || done()).await;
    }
    proxy.heal();
    let mut fences = Vec::new();
    for task in tasks {
        let granted = deadline(task).await.unwrap();
        assert!(granted.is_sorted(), "{granted:?}");
        fences.extend(granted);
    }
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), 100, "every holder has its own fence");
    assert!(proxy.traffic().lost >= 3, "only {} were lost", proxy.traffic().lost);
    is_free(&server, &other).await;
}
