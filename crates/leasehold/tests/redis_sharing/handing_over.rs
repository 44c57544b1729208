//! Permits handed from theirs to ours and from ours to theirs, with their steps run one by one.

use std::time::Duration;

use leasehold::Semaphore;
use testkit::wait::{deadline, eventually};

use crate::both::{Both, HEARTBEAT, NAME, SOON, Waiter, notification};

/// Returns their holder of the only permit, and our waiter behind it.
async fn ours_behind_theirs(both: &Both, semaphore: &Semaphore) -> (String, Waiter) {
    let holder = both.they_hold(1).await;
    let waiter = both.we_queue(semaphore).await;
    (holder, waiter)
}

/// Lets their script grant a permit to our waiter. If our backstop comes between their release and
/// their script, the round is repeated.
async fn granted_by_theirs(both: &Both, semaphore: &Semaphore, heartbeat: Duration) -> Waiter {
    for _ in 0..10 {
        let (holder, waiter) = ours_behind_theirs(both, semaphore).await;
        assert_eq!(both.theirs.release(NAME, &holder).await.unwrap(), 1);
        if both.theirs.wake_up_nexts(NAME, 1, heartbeat, None).await.unwrap() == 1 {
            return waiter;
        }
        waiter.permit().await.release().await.unwrap();
    }
    panic!("our backstop came first ten times")
}

#[tokio::test]
async fn a_release_of_theirs_is_found_by_a_periodic_query() {
    let both = Both::start().await;
    let (holder, waiter) = ours_behind_theirs(&both, &both.semaphore(1)).await;
    assert_eq!(both.theirs.release(NAME, &holder).await.unwrap(), 1);
    let permit = waiter.permit().await;
    assert_eq!(both.members("main"), [permit.id().to_string()]);
    permit.release().await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_release_of_ours_grants_to_their_waiter_at_once() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let theirs = both.they_queue().await;
    assert_eq!(both.they_wake(1).await, 0);

    // They block on their list before it exists.
    let (client, id) = (both.theirs.clone(), theirs.clone());
    let blocked = tokio::spawn(async move { client.wait_notification(&id, SOON).await });
    eventually(async || both.ask::<String>(&["CLIENT", "LIST"]).contains("cmd=blpop")).await;
    assert!(permit.release().await.unwrap());
    assert!(deadline(blocked).await.unwrap().unwrap(), "the list stayed empty");

    assert!(both.holds(&theirs));
    assert_eq!(both.place(&theirs), None);
    both.they_confirm(&theirs, 1).await;
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(both.theirs.release(NAME, &theirs).await.unwrap(), 1);
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_holder_and_a_waiter_of_theirs_are_released_by_their_ids() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let holder = both.they_hold(1).await;
    let waiting = both.they_queue().await;
    let ours = both.we_queue(&semaphore).await;
    assert!(semaphore.release_member(&waiting).await.unwrap());
    assert_eq!(both.place(&waiting), None);
    assert!(!semaphore.release_member(&waiting).await.unwrap());
    assert!(semaphore.release_member(&holder).await.unwrap());
    ours.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn their_notification_is_a_one_in_a_list_that_does_not_stay_for_ever() {
    let both = Both::start().await;
    let permit = both.semaphore(1).acquire().await.unwrap();
    let theirs = both.they_queue().await;
    permit.release().await.unwrap();

    let list = notification(&theirs);
    assert_eq!(both.ask::<String>(&["TYPE", &list]), "list");
    assert_eq!(both.ask::<Vec<String>>(&["LRANGE", &list, "0", "-1"]), ["1"]);
    let left: i64 = both.ask(&["PTTL", &list]);
    assert!((1..=190_000).contains(&left), "{left} ms");
    // Until they confirm, the grant lasts for the rest of their own heartbeat interval.
    let given = both.score("main", &theirs).unwrap() - both.now();
    let heartbeat = HEARTBEAT.as_secs_f64();
    assert!((heartbeat - 10.0..=heartbeat).contains(&given), "{given} s");
    // `LPOP` finds it as well.
    assert!(both.theirs.wait_notification(&theirs, Duration::ZERO).await.unwrap());
    both.they_confirm(&theirs, 1).await;
}

#[tokio::test]
async fn a_grant_by_their_script_is_confirmed_with_a_fence() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let fence_before = semaphore.acquire().await.unwrap().fence();
    both.is_left_clean().await;

    let rung = both.server.command_count("rpush");
    let waiter = granted_by_theirs(&both, &semaphore, HEARTBEAT).await;
    assert!(both.server.command_count("rpush") > rung, "they notified no waiter");
    assert!(both.holds(&waiter.id) && both.place(&waiter.id).is_none());
    let id = waiter.id.clone();
    let permit = waiter.permit().await;

    assert_eq!(permit.id().to_string(), id);
    assert!(permit.fence() > fence_before);
    assert!(!both.exists(&notification(&id)), "the list is still there");
    // Confirmed for our lease, not for theirs.
    let given = both.score("main", &id).unwrap() - both.now();
    assert!((25.0..=30.0).contains(&given), "{given} s");
    assert!(permit.release().await.unwrap());
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_grant_by_their_script_passes_on_when_our_waiter_is_cancelled() {
    let both = Both::start().await;
    let waiter = granted_by_theirs(&both, &both.semaphore(1), HEARTBEAT).await;
    let next = both.they_queue().await;
    let list = notification(&waiter.id);
    waiter.cancel();
    both.they_were_notified(&next).await;
    both.they_confirm(&next, 1).await;
    assert!(!both.exists(&list), "the list is still there");
    assert_eq!(both.members("main"), [next.as_str()]);
    both.theirs.release(NAME, &next).await.unwrap();
    both.is_left_clean().await;
}

/// They grant our waiter a permit for less time than we need to notice: it expires, and the waiter queues again.
#[tokio::test]
async fn a_notification_of_ours_that_nobody_read_in_time_does_not_stay() {
    let both = Both::start().await;
    let waiter = granted_by_theirs(&both, &both.semaphore(1), Duration::from_millis(1)).await;
    let list = notification(&waiter.id);
    let permit = waiter.permit().await;
    assert!(permit.release().await.unwrap());
    assert!(!both.exists(&list), "the list is still there");
}

#[tokio::test]
async fn a_notification_of_ours_that_was_cancelled_too_late_does_not_stay() {
    let both = Both::start().await;
    let waiter = granted_by_theirs(&both, &both.semaphore(1), Duration::from_millis(1)).await;
    let list = notification(&waiter.id);
    // Their sweep removes the grant, so that our cancel finds nothing, unless our backstop came first.
    let swept = async || both.theirs.card(NAME).await.unwrap() == 0;
    eventually(async || swept().await || !both.exists(&list)).await;
    waiter.cancel();
    eventually(async || !both.exists(&list)).await;
}

/// The backstop asks about our first waiter in the queue, which need not be the oldest acquire.
#[tokio::test]
async fn a_grant_by_their_script_is_found_although_an_older_waiter_had_to_queue_again() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let holder = both.they_hold(1).await;
    let older = both.we_queue(&semaphore).await;
    let younger = both.we_queue(&semaphore).await;
    // They consider it dead, and it moves to the end of the queue.
    both.theirs.release(NAME, &older.id).await.unwrap();
    eventually(async || both.place(&older.id) == Some(1)).await;
    // If our backstop comes between these two, our script grants the permit.
    assert_eq!(both.theirs.release(NAME, &holder).await.unwrap(), 1);
    both.they_wake(1).await;
    let permit = younger.permit().await;
    assert!(!both.exists(&notification(&permit.id().to_string())), "the list is still there");
    permit.release().await.unwrap();
}
