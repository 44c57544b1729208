//! Every call is bounded, whatever other calls are in flight. A grant that no caller receives is released.

use std::time::{Duration, Instant};

use testkit::by_hand::ByHand;
use testkit::local_store::LocalStore;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{PROMPT, acquire, ask, connect, one, only_when_notified};

const LOCK: &str = "syncguard:k";

/// Makes the server unreachable: the proxy refuses new connections and cuts the current ones.
fn out_of_reach(proxy: &FaultProxy) {
    proxy.refuse(true);
    proxy.cut();
}

#[tokio::test]
async fn a_release_of_an_instance_goes_on_if_it_is_dropped() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let pool = client.pool("p", 1).build().unwrap();
    for _ in 0..5 {
        let _id = deadline(pool.acquire("a")).await.unwrap().detach();
        let mut release = ByHand::new(pool.release("a"));
        let _ = release.poll();
        drop(release);
        eventually(async || !pool.extend("a").await.unwrap()).await;
    }
}

#[tokio::test]
async fn a_wake_up_passes_on_if_the_woken_waiter_is_dropped() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    for _ in 0..5 {
        let held = deadline(other.lock("k").build().unwrap().acquire()).await.unwrap();
        let lock = client.lock("k").retry(only_when_notified()).build().unwrap();
        let mut first = ByHand::new(lock.acquire());
        assert!(first.poll().is_none());
        let waiting = || ask::<u32>(&server, &["SCARD", &format!("adv-sem:lock_waiting:{LOCK}")]);
        eventually(async || first.poll().is_none() && waiting() == 1).await;
        let rival = lock.clone();
        let second = tokio::spawn(async move { rival.acquire().await });
        let asked = || server.command_count("evalsha");
        let before = asked();
        eventually(async || asked() > before).await;
        assert!(deadline(held.release()).await.unwrap());
        // The first waiter learns of the release, and is dropped before it asks; or the second was quicker.
        eventually(async || second.is_finished() || first.poll().is_some() || waiting() == 0).await;
        let _ = first.poll();
        drop(first);
        let guard = deadline(second).await.unwrap().unwrap();
        assert!(deadline(guard.release()).await.unwrap());
    }
}

/// A caller that stops waiting for a reply says nothing about the health of the connection.
#[tokio::test]
async fn questions_that_are_given_up_do_not_cost_the_connection() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one(&client);
    let held = acquire(&semaphore).await;
    // Statistics have their own connection.
    deadline(semaphore.stats()).await.unwrap();
    let before = proxy.traffic().accepted;
    proxy.delay(Duration::from_millis(25));
    for _ in 0..20 {
        let _ = tokio::time::timeout(Duration::from_millis(10), semaphore.stats()).await;
    }
    proxy.heal();
    deadline(semaphore.stats()).await.unwrap();
    assert_eq!(proxy.traffic().accepted, before);
    assert!(deadline(held.release()).await.unwrap());
}

/// Thousands of waiters, and as many cancelled ones, do not delay an unrelated permit.
#[tokio::test]
async fn a_crowd_that_waits_for_locks_during_an_outage_holds_up_nobody() {
    const CROWD: usize = 10_000;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one(&client);
    out_of_reach(&proxy);
    eventually(async || client.outage().is_some()).await;
    let wait = |number: usize| {
        let lock = client.lock(&format!("k{number}")).retry(only_when_notified()).build().unwrap();
        let mut waits = ByHand::new(async move { lock.acquire().await });
        assert!(waits.poll().is_none());
        waits
    };
    let waiting: Vec<_> = (0..CROWD).map(wait).collect();
    drop((CROWD..2 * CROWD).map(wait).collect::<Vec<_>>());
    let begun = Instant::now();
    let limit = Duration::from_millis(50);
    deadline(semaphore.acquire().within(limit)).await.unwrap_err();
    assert!(begun.elapsed() < limit + PROMPT, "it took {:?}", begun.elapsed());
    proxy.refuse(false);
    let begun = Instant::now();
    drop(waiting);
    acquire(&semaphore).await.check().unwrap();
    assert!(begun.elapsed() < 3 * PROMPT, "it took {:?}", begun.elapsed());
}

/// A damaged row affects only its own name.
#[tokio::test]
async fn a_name_that_cannot_be_read_on_one_host_leaves_the_others_alone() {
    let store = LocalStore::new();
    let client = leasehold::Client::local(store.path()).await.unwrap();
    let good: Vec<_> = (0..10).map(|n| client.semaphore(&format!("good {n}"), 1)).collect();
    let good: Vec<_> = good.into_iter().map(|builder| builder.build().unwrap()).collect();
    let bad = client.semaphore("bad", 1).build().unwrap();
    for semaphore in good.iter().chain([&bad]) {
        assert!(deadline(acquire(semaphore).await.release()).await.unwrap());
    }
    let database = rusqlite::Connection::open(store.path()).unwrap();
    database.execute("UPDATE semaphores SET held = -1 WHERE name = 'bad'", []).unwrap();
    for _ in 0..20 {
        let mut wrong = ByHand::new(bad.acquire());
        let _ = wrong.poll();
        let mut waits: Vec<_> = good.iter().map(|wait| ByHand::new(wait.acquire())).collect();
        for wait in &mut waits {
            let _ = wait.poll();
        }
        drop(waits);
        for semaphore in &good {
            assert!(deadline(acquire(semaphore).await.release()).await.unwrap());
        }
    }
    deadline(bad.acquire()).await.unwrap_err();
}
