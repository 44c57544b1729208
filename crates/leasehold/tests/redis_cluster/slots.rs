//! Slots that move from one node to another, with their keys.

use std::time::{Duration, Instant};

use leasehold::Error;
use testkit::redis_cluster::{RedisCluster, slot_of};
use testkit::wait::{blocking, deadline, eventually};

use super::faults::{Load, hands_over, name_on};
use super::{acquire, connect, main_key, semaphore};

/// Nothing is lost when a slot moves: the limit holds throughout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_under_load() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let name = name_on(&cluster, 0, "moved");
    let slot = slot_of(&main_key(&name));
    let load = Load::start(&cluster, &name, 2).await;
    load.goes_on().await;
    for (from, to) in [(0, 1), (1, 2), (2, 0)] {
        cluster.blocking(move |cluster| cluster.move_slot(slot, from, to)).await;
        load.goes_on().await;
    }
    assert_eq!(load.end().await, 2);
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    hands_over(&cluster, &semaphore(&one, &name, 1), &semaphore(&other, &name, 1), &other).await;
}

/// A waiter that queued before the move is granted its permit after it, and listens at the new node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_and_waiters_move_with_their_slot() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let name = name_on(&cluster, 0, "kept");
    let slot = slot_of(&main_key(&name));
    let held = acquire(&semaphore(&one, &name, 1)).await;
    let fence = held.fence();
    let waiters = [&one, &other, &one].map(|client| semaphore(client, &name, 1).acquire());
    let mut waiting = Vec::new();
    for waiter in waiters {
        let id = waiter.id();
        waiting.push(tokio::spawn(waiter));
        let looking = semaphore(&one, &name, 1);
        eventually(async || looking.position(&id).await.unwrap().is_some()).await;
    }
    cluster.blocking(move |cluster| cluster.move_slot(slot, 0, 1)).await;
    held.check().unwrap();
    assert!(deadline(held.release()).await.unwrap());
    let mut last = fence;
    for waiter in waiting {
        let permit = deadline(waiter).await.unwrap().unwrap();
        assert!(permit.fence() > last);
        last = permit.fence();
        assert!(deadline(permit.release()).await.unwrap());
    }
    hands_over(&cluster, &semaphore(&one, &name, 1), &semaphore(&other, &name, 1), &other).await;
}

/// While a slot moves, its names cannot be used. That is an outage and not contention, and other
/// names on the same nodes are not affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_is_on_its_way_is_out_of_reach() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let client = connect(&cluster).await;
    let (name, beside) = (name_on(&cluster, 0, "on its way"), name_on(&cluster, 0, "beside"));
    let slot = slot_of(&main_key(&name));
    let held = acquire(&semaphore(&client, &name, 1)).await;
    let moving = cluster.blocking(move |cluster| cluster.begin_move(slot, 0, 1)).await;
    let some = moving.clone();
    assert_eq!(blocking(move || some.move_keys(1)).await, 1);

    let limit = Duration::from_millis(300);
    let error = semaphore(&client, &name, 1).acquire().within(limit).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    for _ in 0..20 {
        acquire(&semaphore(&client, &beside, 1)).await.release().await.unwrap();
    }
    held.check().unwrap();

    let waiter = tokio::spawn(semaphore(&client, &name, 1).acquire());
    blocking(move || moving.end()).await;
    assert!(deadline(held.release()).await.unwrap());
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();
}

/// A held lock and a held lease are renewed while their slots move, and are found afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_and_leases_move_with_their_slots() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let client = connect(&cluster).await;
    let lease = Duration::from_secs(3);
    let lock = client.lock("moved").lease(lease).build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    let pool = client.pool("moved", 1).lease(lease).build().unwrap();
    let leased = deadline(pool.acquire("one")).await.unwrap();
    let slot = slot_of("{moved}");
    let from = cluster.primary_of(slot);
    cluster.blocking(move |cluster| cluster.move_slot(slot, from, (from + 1) % 3)).await;
    // Both are renewed after the move.
    let moved = Instant::now();
    eventually(async || guard.valid_until().min(leased.valid_until()) > Some(moved + lease)).await;
    guard.check().unwrap();
    leased.check().unwrap();
    assert!(deadline(client.locks().is_locked("moved")).await.unwrap());
    assert!(deadline(guard.release()).await.unwrap());
    assert!(deadline(leased.release()).await.unwrap());
    drop(deadline(lock.acquire()).await.unwrap());
}

/// The first slot of a new node: a lock whose key has arrived there is renewed before the node owns the slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_renewed_while_it_moves_to_a_node_without_slots() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let client = connect(&cluster).await;
    let new = cluster.blocking(RedisCluster::add_node).await;
    let (key, lease) = ("first of a new node", Duration::from_secs(3));
    let slot = slot_of(&format!("{{{key}}}"));
    let from = cluster.primary_of(slot);
    let lock = client.lock(key).lease(lease).build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    let moving = cluster.blocking(move |cluster| cluster.begin_move(slot, from, new)).await;
    let some = moving.clone();
    blocking(move || while some.move_keys(10) > 0 {}).await;
    let count = async || {
        let node = cluster.node(from);
        blocking(move || node.command_count("cluster|slots")).await
    };
    let (began, before) = (Instant::now(), count().await);
    // A renewal that is sent after more than one lease.
    eventually(async || guard.valid_until() > Some(began + 2 * lease)).await;
    guard.check().unwrap();
    let asked = count().await - before;
    assert!(asked < 20, "the map was asked for {asked} times");
    blocking(move || moving.end()).await;
    assert!(deadline(guard.release()).await.unwrap());
}
