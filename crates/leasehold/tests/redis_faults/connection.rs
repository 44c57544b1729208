//! Connections that are cut, killed or half open.

use std::time::{Duration, Instant};

use leasehold::LossReason;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{
    AT_ONCE, Keys, LEASE, NAME, Waiter, acquire, all_are_free, builder, connect, held_and_waiting,
    one, one_beating, release,
};

#[tokio::test]
async fn a_holder_that_was_cut_off_is_notified_before_another_is_granted() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (cut_off, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let held = acquire(&one_beating(&cut_off, LEASE)).await;
    let semaphore = one_beating(&other, LEASE);
    let waiter = Waiter::join(&semaphore).await;

    proxy.refuse(true);
    proxy.cut();
    let asked = Instant::now();
    let believed = held.valid_until().expect("a lease").saturating_duration_since(asked);
    let mut keys = Keys::of(&server);
    let renew_by = keys.renew_by(held.id()).expect("the permit is still held");
    let left = Duration::from_secs_f64(renew_by - keys.now()) + asked.elapsed();
    // The margin is a tenth of the heartbeat interval, for clocks that run at different speeds.
    assert!(
        left + Duration::from_millis(1) >= believed + LEASE / 10,
        "{left:?} in the store, {believed:?} here"
    );

    let lost = held.lost();
    let notified = tokio::spawn(async move { (lost.await, Instant::now()) });
    let (granted, permit) = waiter.granted().await;
    held.check().expect_err("another holds");
    let (reason, notified) = deadline(notified).await.unwrap();
    assert_eq!(reason, LossReason::NotRenewed);
    assert!(notified < granted, "notified {:?} too late", notified - granted);

    // After it reconnects, the client does not disturb the new holder.
    drop(held);
    proxy.heal();
    proxy.until(|traffic| traffic.connections > 0).await;
    deadline(one_beating(&cut_off, LEASE).try_acquire()).await.unwrap().ok_or(()).unwrap_err();
    permit.check().unwrap();
    assert!(release(permit).await);
    all_are_free(&semaphore).await;
}

#[tokio::test]
async fn a_holder_that_was_cut_off_for_a_moment_keeps_its_permit() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one_beating(&client, LEASE);
    let held = acquire(&semaphore).await;
    let mut keys = Keys::of(&server);
    for _ in 0..3 {
        proxy.cut();
        let renew_by = keys.renew_by(held.id()).expect("the permit is still held");
        eventually(async || keys.renew_by(held.id()).expect("the permit is still held") > renew_by)
            .await;
    }
    held.check().unwrap();
    assert!(release(held).await);
    all_are_free(&semaphore).await;
}

#[tokio::test]
async fn a_half_open_waiter_costs_no_more_than_the_time_to_confirm() {
    // More than the second after which every waiter asks on its own.
    let limit = Duration::from_millis(1500);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holder = builder(&server.url()).claim_within(limit).open().await.unwrap();
    let (half_open, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&holder)).await;
    let unheard = Waiter::join(&one(&half_open)).await;
    let waiter = Waiter::join(&one(&other)).await;

    proxy.half_open();
    let released = Instant::now();
    assert!(release(held).await);
    let (at, permit) = waiter.granted().await;
    let took = at - released;
    assert!(took >= limit, "it had {took:?} to confirm");

    // After it reconnects, the waiter is behind the others, and loses nothing else.
    proxy.heal();
    proxy.cut();
    eventually(async || one(&other).position(&unheard.id).await.unwrap().is_some()).await;
    assert!(release(permit).await);
    assert!(release(unheard.permit().await).await);
    all_are_free(&one(&other)).await;
}

/// A wake-up that arrives after the time to claim has passed grants nothing: by then another client holds the permit.
#[tokio::test]
async fn a_wake_up_that_comes_too_late_is_not_believed() {
    // Less than the time after which the client would suspect the connection.
    let limit = Duration::from_secs(1);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holder = builder(&server.url()).claim_within(limit).open().await.unwrap();
    let (slow, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&holder)).await;
    let late = Waiter::join(&one(&slow)).await;
    let waiter = Waiter::join(&one(&other)).await;

    proxy.stall();
    assert!(release(held).await);
    let (_, permit) = waiter.granted().await;
    // Now the wake-up arrives. The position below is asked for after it.
    proxy.heal();
    eventually(async || one(&other).position(&late.id).await.unwrap().is_some()).await;
    assert!(!late.task.is_finished(), "two hold one permit");
    permit.check().unwrap();
    assert!(release(permit).await);
    assert!(release(late.permit().await).await);
    all_are_free(&one(&other)).await;
}

/// Neither side notices a half-open connection. Only the missing reply reveals it.
#[tokio::test]
async fn a_half_open_connection_heals_and_leaves_nothing_on_the_server() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = builder(&proxy.url()).answer_timeout(AT_ONCE).open().await.unwrap();
    let mut keys = Keys::of(&server);
    let before: Vec<u64> = keys.connections().into_keys().collect();
    assert_eq!(before.len(), 1);

    proxy.forget_connections();
    let permit = acquire(&one(&client)).await;
    // Otherwise the old connection would receive wake-ups that nobody reads, until the server gives it up.
    eventually(async || !keys.connections().contains_key(&before[0])).await;
    assert_eq!(keys.connections().len(), 1);
    assert!(release(permit).await);
    all_are_free(&one(&client)).await;
}

/// Renewals of several names are under way, and none of them is answered. They time out one after
/// the other, but the connection is replaced once.
#[tokio::test]
async fn a_half_open_connection_is_replaced_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    // Long enough that a third of the rest suffices on a busy machine.
    let lease = 2 * LEASE;
    let mut held = Vec::new();
    for number in 0..12 {
        let name = format!("{NAME} {number}");
        let semaphore = client.semaphore(&name, 1).lease(lease).build().unwrap();
        held.push(acquire(&semaphore).await);
    }

    proxy.forget_connections();
    let begun = Instant::now();
    for permit in &held {
        // A renewal over the old connection is not valid for that long.
        let renewed = || permit.valid_until().is_some_and(|until| until > begun + lease);
        eventually(async || renewed()).await;
    }
    // Watches for a while, until no request waits for a reply over the old connection.
    tokio::time::sleep(lease / 3).await;
    assert_eq!(proxy.traffic().accepted, 2);
    for permit in held {
        permit.check().unwrap();
        assert!(release(permit).await);
    }
}

#[tokio::test]
async fn killed_connections_cost_neither_the_permit_nor_the_place_in_the_queue() {
    let server = RedisServer::start();
    let (holder, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one_beating(&holder, LEASE)).await;
    let first = Waiter::join(&one(&other)).await;
    let second = Waiter::join(&one(&holder)).await;

    let mut keys = Keys::of(&server);
    for _ in 0..3 {
        let before = keys.connections();
        for id in before.keys() {
            let _: u64 = keys.ask("CLIENT", &["KILL", "ID", &id.to_string()]);
        }
        eventually(async || {
            let now = keys.connections();
            now.len() == 2 && now.iter().all(|(id, listens)| *listens && !before.contains_key(id))
        })
        .await;
        held.check().unwrap();
    }
    // Renewed over the new connection.
    let renew_by = keys.renew_by(held.id()).expect("the permit is still held");
    eventually(async || keys.renew_by(held.id()).expect("the permit is still held") > renew_by)
        .await;
    assert_eq!(one(&other).position(&first.id).await.unwrap(), Some(0));

    let released = Instant::now();
    assert!(release(held).await);
    let (at, permit) = first.granted().await;
    assert!(at - released < AT_ONCE, "it took {:?}", at - released);
    assert!(release(permit).await);
    assert!(release(second.permit().await).await);
    all_are_free(&one(&other)).await;
}

#[tokio::test]
async fn a_waiter_whose_wake_up_was_lost_with_its_connection_is_granted_over_the_next() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (holder, other) = (connect(&server.url()).await, connect(&proxy.url()).await);
    let held = acquire(&one(&holder)).await;
    let waiter = Waiter::join(&one(&other)).await;

    // The server sends the wake-up, and it never arrives.
    proxy.forget_connections();
    assert!(release(held).await);
    assert_eq!(held_and_waiting(&one(&holder)).await, (1, 0), "granted to the waiter");
    let cut = Instant::now();
    proxy.cut();
    let (at, permit) = waiter.granted().await;
    assert!(at - cut < AT_ONCE, "it took {:?}", at - cut);
    assert!(release(permit).await);
    all_are_free(&one(&holder)).await;
}

/// Retrying without a pause would keep a core busy during the whole outage.
#[tokio::test]
async fn waiters_do_not_spin_while_the_server_is_away() {
    let name = "waiters do not spin";
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (holder, other) = (connect(&server.url()).await, connect(&proxy.url()).await);
    let held = acquire(&holder.semaphore(name, 1).build().unwrap()).await;
    let semaphore = other.semaphore(name, 1).build().unwrap();
    let waiter = Waiter::join(&semaphore).await;

    proxy.refuse(true);
    proxy.cut();
    eventually(async || other.outage().is_some()).await;
    let before = proxy.traffic().refused;
    // Watches for a while.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let tried = proxy.traffic().refused - before;
    assert!((1..=20).contains(&tried), "tried to connect {tried} times within a second");

    proxy.heal();
    assert!(release(held).await);
    assert!(release(waiter.permit().await).await);
}

/// The TTL had an hour left; only the connection was lost.
#[tokio::test]
async fn a_holder_that_was_cut_off_did_not_reach_the_end_of_its_ttl() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = client.semaphore(NAME, 1).ttl(Duration::from_secs(3600));
    let semaphore = semaphore.lease(LEASE).build().unwrap();
    let held = acquire(&semaphore).await;
    proxy.refuse(true);
    proxy.cut();
    assert_eq!(deadline(held.lost()).await, LossReason::NotRenewed);
}

#[tokio::test]
async fn a_waiter_that_was_cut_off_learns_that_it_was_cancelled() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (cut_off, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let semaphore = one(&other);
    let held = acquire(&semaphore).await;
    let waiter = Waiter::join(&one(&cut_off)).await;
    // The server sends the message to a connection that delivers nothing.
    proxy.refuse(true);
    proxy.stall();
    assert!(deadline(semaphore.release(&waiter.id)).await.unwrap());
    proxy.cut();
    proxy.heal();
    let (_, result) = deadline(waiter.task).await.unwrap();
    let error = result.expect_err("it was cancelled");
    assert!(matches!(error, leasehold::Error::Cancelled { .. }), "{error}");
    assert_eq!(held_and_waiting(&semaphore).await, (1, 0), "it does not queue again");
    assert!(release(held).await);
    all_are_free(&semaphore).await;
}
