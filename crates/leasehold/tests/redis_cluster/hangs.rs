//! Nodes that hang: they accept bytes and answer nothing. Names on other nodes must not notice.

use std::time::{Duration, Instant};

use leasehold::Client;
use testkit::redis_cluster::{RedisCluster, slot_of};
use testkit::wait::{blocking, deadline};
use tokio::task::JoinSet;

use super::faults::name_on;
use super::recovery::lock_on;
use super::{acquire, connect, semaphore};

/// The slot of a lock moves to a node that hangs. Calls about the lock share requests with other
/// names of the source node, and these names are not delayed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_on_its_way_to_a_node_that_hangs_holds_up_no_other_name() {
    let cluster = RedisCluster::start_with(60_000, &[]);
    let client = connect(&cluster).await;
    let key = lock_on(&cluster, 0);
    let slot = slot_of(&format!("{{{key}}}"));
    let lease = Duration::from_secs(4);
    let lock = client.lock(&key).lease(lease).build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    let beside = client.semaphore(&name_on(&cluster, 0, "beside"), 1).lease(lease).build().unwrap();
    let permit = acquire(&beside).await;
    let load = semaphore(&client, &name_on(&cluster, 0, "load"), 1);
    let moving = cluster.blocking(move |cluster| cluster.begin_move(slot, 0, 1)).await;
    let some = moving.clone();
    blocking(move || while some.move_keys(10) > 0 {}).await;
    cluster.pause(1);
    let mut asking = JoinSet::new();
    for _ in 0..4 {
        let (locks, key) = (client.locks(), key.clone());
        asking.spawn(async move {
            loop {
                let _ = locks.is_locked(&key).await;
            }
        });
    }
    let (began, mut slowest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < lease * 3 / 2 {
        let asked = Instant::now();
        acquire(&load).await.release().await.unwrap();
        slowest = slowest.max(asked.elapsed());
        permit.check().unwrap();
    }
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    asking.shutdown().await;
    cluster.resume(1);
    blocking(move || moving.end()).await;
    assert!(!deadline(client.locks().is_locked("none")).await.unwrap());
    drop(guard);
}

/// The client writes the index of a lock to another node than the lock. If that node hangs, one
/// acquire waits for it, and the later ones do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_on_a_node_that_hangs_delays_few_locks() {
    let cluster = RedisCluster::start_with(60_000, &[]);
    let client = connect(&cluster).await;
    let lock = client.lock(&lock_on(&cluster, 0)).build().unwrap();
    cluster.pause(2);
    let mut slow = Vec::new();
    // Each acquire has a new lock id, so a third of the indexes are on the node that hangs.
    for _ in 0..60 {
        let asked = Instant::now();
        let guard = deadline(lock.acquire()).await.unwrap();
        if asked.elapsed() > Duration::from_millis(150) {
            slow.push(asked.elapsed());
        }
        guard.release().await.unwrap();
    }
    cluster.resume(2);
    assert!(slow.len() <= 5, "{slow:?}");
}

/// A client that only waits for a permit notices the failover of a primary that hangs long before the answer time-out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failover_of_a_primary_that_hangs_is_noticed() {
    let cluster = RedisCluster::start();
    let builder = Client::redis_builder(&cluster.url()).answer_timeout(Duration::from_secs(18));
    let client = deadline(builder.open()).await.unwrap();
    let semaphore = semaphore(&client, &name_on(&cluster, 0, "hangs"), 1);
    acquire(&semaphore).await.release().await.unwrap();
    cluster.pause(0);
    let waiter = tokio::spawn(semaphore.acquire());
    let _ = cluster.blocking(|cluster| cluster.wait_failover(0, Duration::from_secs(30))).await;
    let failed_over = Instant::now();
    drop(deadline(waiter).await.unwrap().unwrap());
    let took = failed_over.elapsed();
    cluster.resume(0);
    assert!(took < Duration::from_secs(2), "{took:?} after the failover");
}
