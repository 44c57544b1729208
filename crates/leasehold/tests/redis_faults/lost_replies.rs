//! Replies that are lost after their command ran: no double grant, no leak.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use testkit::by_hand::step_aside;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{Waiter, acquire, all_are_free, connect, held_and_waiting, one, release};

const SCRIPT: &[u8] = b"EVALSHA";

/// The client sends the acquire again after the lost reply, and learns that it was granted.
#[tokio::test]
async fn a_permit_whose_reply_was_lost_is_granted_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let other = connect(&server.url()).await;
    for round in 0..4 {
        let client = connect(&proxy.url()).await;
        proxy.lose_reply_to(SCRIPT);
        let permit = acquire(&one(&client)).await;
        assert_eq!(proxy.traffic().lost, 2 * round + 1);
        assert_eq!(held_and_waiting(&one(&other)).await, (1, 0));
        assert!(deadline(one(&other).try_acquire()).await.unwrap().is_none());

        proxy.lose_reply_to(SCRIPT);
        // The result is unknown after a lost reply, but the permit is free.
        release(permit).await;
        assert_eq!(proxy.traffic().lost, 2 * round + 2);
        all_are_free(&one(&other)).await;
    }
}

#[tokio::test]
async fn a_place_in_the_queue_whose_reply_was_lost_is_taken_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&other)).await;

    proxy.lose_reply_to(SCRIPT);
    let first = Waiter::join(&one(&client)).await;
    proxy.until(|traffic| traffic.lost == 1).await;
    let second = Waiter::join(&one(&other)).await;
    assert_eq!(held_and_waiting(&one(&other)).await, (1, 2));

    // The next lost reply is that of the claim, or of a query that happens to come first.
    proxy.lose_reply_to(SCRIPT);
    assert!(release(held).await);
    let permit = first.permit().await;
    assert_eq!(one(&other).position(&second.id).await.unwrap(), Some(0), "one at a time");
    release(permit).await;
    assert!(release(second.permit().await).await);
    all_are_free(&one(&other)).await;
}

#[tokio::test]
async fn a_hand_over_within_a_client_whose_reply_was_lost_is_found_out() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let held = acquire(&one(&client)).await;
    let waiter = Waiter::join(&one(&client)).await;

    proxy.lose_reply_to(SCRIPT);
    release(held).await;
    assert!(release(waiter.permit().await).await);
    assert_eq!(proxy.traffic().lost, 1);
    all_are_free(&one(&client)).await;
}

#[tokio::test]
async fn an_acquire_that_is_given_up_while_its_outcome_is_unknown_leaves_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let other = connect(&server.url()).await;
    let impatient = connect(&proxy.url()).await;

    proxy.refuse(true);
    proxy.lose_reply_to(SCRIPT);
    let limit = Duration::from_millis(300);
    let error = deadline(one(&impatient).acquire().within(limit)).await.unwrap_err();
    assert!(matches!(error, leasehold::Error::Unavailable { timed_out: false, .. }), "{error}");
    assert_eq!(held_and_waiting(&one(&other)).await, (1, 0));
    proxy.refuse(false);
    all_are_free(&one(&other)).await;
}

#[tokio::test]
async fn an_acquire_that_is_dropped_while_its_outcome_is_unknown_leaves_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);

    proxy.refuse(true);
    proxy.lose_reply_to(SCRIPT);
    let waiter = Waiter::begin(&one(&client));
    proxy.until(|traffic| traffic.lost == 1).await;
    assert_eq!(held_and_waiting(&one(&other)).await, (1, 0));
    waiter.task.abort();
    proxy.refuse(false);
    all_are_free(&one(&other)).await;
}

#[tokio::test]
async fn whatever_reply_is_lost_there_are_never_more_holders_than_permits() {
    const CAPACITY: u32 = 2;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let holders = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = [&client, &client, &client, &other, &other, &other]
        .into_iter()
        .map(|client| {
            let semaphore = client.semaphore("x", CAPACITY).build().unwrap();
            let holders = holders.clone();
            tokio::spawn(async move {
                for _ in 0..30 {
                    let permit = semaphore.acquire().await.unwrap();
                    let now = holders.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= CAPACITY, "{now} at once");
                    step_aside(20).await;
                    holders.fetch_sub(1, Ordering::SeqCst);
                    permit.release().await.unwrap();
                }
            })
        })
        .collect();
    for lost in 1..=15 {
        if tasks.iter().all(tokio::task::JoinHandle::is_finished) {
            break;
        }
        proxy.lose_reply_to(SCRIPT);
        eventually(async || {
            proxy.traffic().lost == lost || tasks.iter().all(tokio::task::JoinHandle::is_finished)
        })
        .await;
    }
    proxy.heal();
    for task in tasks {
        deadline(task).await.unwrap();
    }
    assert!(proxy.traffic().lost >= 5, "only {} were lost", proxy.traffic().lost);
    all_are_free(&other.semaphore("x", CAPACITY).build().unwrap()).await;
}
