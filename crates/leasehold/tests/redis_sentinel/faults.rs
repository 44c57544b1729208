//! Primaries and sentinels that die, hang and change their roles.

use std::time::{Duration, Instant};

use leasehold::{Client, LossReason};
use testkit::redis_sentinel::RedisSentinel;
use testkit::wait::{blocking, deadline, eventually};

use super::{acquire, connect, one};

/// Far longer than a failover takes, even if the sentinels vote twice.
const WITHIN: Duration = Duration::from_secs(30);

/// Waits until a replica has everything written so far.
async fn replicated(servers: &RedisSentinel) {
    let servers = servers.clone();
    blocking(move || {
        let mut connection = servers.server(servers.primary()).connection();
        let count: u32 = redis::cmd("WAIT").arg(2).arg(10_000).query(&mut connection).unwrap();
        assert_eq!(count, 2);
    })
    .await;
}

/// One client holds, another waits, and the permit is handed over.
async fn hands_over(one_client: &Client, other: &Client) {
    let held = acquire(&one(one_client)).await;
    let waiter = one(other).acquire();
    let id = waiter.id();
    let waiter = tokio::spawn(waiter);
    let looking = one(one_client);
    eventually(async || looking.position(&id).await.unwrap().is_some()).await;
    assert!(deadline(held.release()).await.unwrap());
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_and_a_waiter_outlive_their_primary() {
    let servers = RedisSentinel::start();
    let (holder, other) = (connect(&servers.url()).await, connect(&servers.url()).await);
    let held = acquire(&one(&holder)).await;
    let fence = held.fence();
    let waiter = one(&other).acquire();
    let id = waiter.id();
    let waiter = tokio::spawn(waiter);
    let looking = one(&holder);
    eventually(async || looking.position(&id).await.unwrap().is_some()).await;
    replicated(&servers).await;

    let (died, old) = (Instant::now(), servers.kill_primary());
    let (_, sentinels) =
        servers.blocking(move |servers| servers.wait_failover(old, died, WITHIN)).await;
    held.check().unwrap();
    assert!(deadline(held.release()).await.unwrap());
    let permit = deadline(waiter).await.unwrap().unwrap();
    println!("next grant {:?} after the death, sentinels {sentinels:?}", died.elapsed());
    assert!(permit.fence() > fence);
    permit.release().await.unwrap();
    hands_over(&holder, &other).await;
    // The old primary comes back as a replica, and is not mistaken for the primary.
    servers.blocking(move |servers| servers.revive(old)).await;
    servers.blocking(RedisSentinel::wait_ready).await;
    hands_over(&connect(&servers.url()).await, &other).await;
}

/// The holder of a permit that was not replicated learns that it has lost it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_no_replica_has_copied_is_lost() {
    let servers = RedisSentinel::start();
    let client = connect(&servers.url()).await;
    let cut_off = |servers: &RedisSentinel| {
        let primary = servers.primary();
        for replica in (0..3).filter(|server| *server != primary) {
            let mut connection = servers.server(replica).connection();
            redis::cmd("CONFIG")
                .arg(&["SET", "masterauth", "wrong"])
                .exec(&mut connection)
                .unwrap();
            redis::cmd("CLIENT").arg(&["KILL", "TYPE", "master"]).exec(&mut connection).unwrap();
        }
    };
    servers.blocking(cut_off).await;
    let held = acquire(&one(&client)).await;
    let waiter = tokio::spawn(one(&client).acquire());
    let (died, old) = (Instant::now(), servers.kill_primary());
    servers.blocking(move |servers| servers.wait_failover(old, died, WITHIN)).await;
    assert_eq!(deadline(held.lost()).await, LossReason::Missing);
    let permit = deadline(waiter).await.unwrap().unwrap();
    assert!(permit.fence() > held.fence());
}

/// The old primary keeps answering for a while, and accepts writes that will be lost. The
/// sentinels' announcement ends that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announcement_is_enough_to_leave_a_primary() {
    let servers = RedisSentinel::start();
    let (holder, other) = (connect(&servers.url()).await, connect(&servers.url()).await);
    hands_over(&holder, &other).await;
    for _ in 0..2 {
        servers.blocking(RedisSentinel::failover).await;
        let primary = servers.primary();
        hands_over(&holder, &other).await;
        let there = servers.server(primary).connected_clients();
        assert!(there >= 2, "{there} clients are connected to the new primary");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_stands_still_is_left() {
    let servers = RedisSentinel::start();
    let (holder, other) = (connect(&servers.url()).await, connect(&servers.url()).await);
    hands_over(&holder, &other).await;
    replicated(&servers).await;
    let (paused, old) = (Instant::now(), servers.pause_primary());
    servers.blocking(move |servers| servers.wait_failover(old, paused, WITHIN)).await;
    // Nothing closes the old connections, and nothing answers on them.
    hands_over(&holder, &other).await;
    servers.resume(old);
    hands_over(&holder, &other).await;
}

/// The sentinels die one after the other. The last one suffices for connected clients and for new ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_may_die_one_by_one() {
    let servers = RedisSentinel::start();
    let (holder, other) = (connect(&servers.url()).await, connect(&servers.url()).await);
    for sentinel in [0, 1] {
        servers.kill_sentinel(sentinel);
        hands_over(&holder, &connect(&servers.url()).await).await;
    }
    servers.kill_sentinel(2);
    hands_over(&holder, &other).await;
    let error = deadline(Client::redis(&servers.url())).await.unwrap_err();
    assert!(error.to_string().contains("request to the sentinel"), "{error}");
    for sentinel in 0..3 {
        servers.revive_sentinel(sentinel);
    }
    servers.blocking(RedisSentinel::wait_ready).await;
    // Clients subscribe to one of them again, and follow it.
    servers.blocking(RedisSentinel::failover).await;
    hands_over(&holder, &other).await;
}

/// A sentinel that names an old primary is not believed: that server says that it is a replica, or does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_with_stale_information_is_not_believed() {
    let servers = RedisSentinel::start();
    let old = servers.primary();
    let stale = servers.blocking(move |servers| servers.stale_sentinel(old)).await;
    servers.blocking(RedisSentinel::failover).await;
    let alone = servers.url_of(&[stale]);
    let (url, first) = (servers.url_of(&[0, stale]), servers.url_of(&[stale, 0]));
    for url in [&url, &first] {
        hands_over(&connect(url).await, &connect(&servers.url()).await).await;
    }
    let error = deadline(Client::redis(&alone)).await.unwrap_err();
    assert!(error.to_string().contains("the server is a read-only replica"), "{error}");
}

/// A client that knows one sentinel learns of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_sentinels_are_learnt() {
    let servers = RedisSentinel::start();
    let (holder, other) = (connect(&servers.url_of(&[0])).await, connect(&servers.url()).await);
    servers.blocking(RedisSentinel::add_sentinel).await;
    servers.kill_sentinel(0);
    replicated(&servers).await;
    let (died, old) = (Instant::now(), servers.kill_primary());
    servers.blocking(move |servers| servers.wait_failover(old, died, WITHIN)).await;
    hands_over(&holder, &other).await;
}
