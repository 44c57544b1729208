//! The queue: first in, first out, and cancelled waiters leave it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{Error, Semaphore};

use super::{
    SHORT, Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, release_by_id,
    semaphore, try_acquire, unique,
};
use crate::wait::{deadline, eventually};

/// Queues waiters behind a held permit, at each of the handles in turn, and checks the order in which they are granted.
async fn check_order(handles: &[Semaphore], waiters: usize) {
    let held = acquire(&handles[0]).await;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (number, handle) in handles.iter().cycle().take(waiters).enumerate() {
        let (acquire, served) = (handle.acquire(), served.clone());
        let id = acquire.id();
        tasks.push(tokio::spawn(async move {
            let permit = acquire.await.unwrap();
            // There is one permit, so only its holder writes.
            served.lock().unwrap().push(number);
            release(permit).await;
        }));
        eventually(async || handle.position(&id).await.unwrap() == Some(number)).await;
    }
    release(held).await;
    for task in tasks {
        deadline(task).await.unwrap();
    }
    let in_order: Vec<_> = (0..waiters).collect();
    assert_eq!(*served.lock().unwrap(), in_order);
    all_are_free(&handles[0]).await;
}

pub async fn waiters_are_served_in_order(store: &impl Store) {
    let (client, name) = (store.client().await, unique("order"));
    let handles = [declare(&client, &name, 1), declare(&client, &name, 1)];
    check_order(&handles, 30).await;
}

pub async fn waiters_of_two_clients_are_served_in_order(store: &impl Store) {
    let name = unique("order of clients");
    let here = declare(&store.client().await, &name, 1);
    let there = declare(&store.client().await, &name, 1);
    check_order(&[here, there], 12).await;
}

pub async fn try_acquire_gets_nothing_while_others_wait(store: &impl Store) {
    let (client, name) = (store.client().await, unique("overtaking"));
    let one = declare(&client, &name, 1);
    let held = acquire(&one).await;
    let waiter = Waiter::join(&one).await;
    assert!(try_acquire(&one).await.is_none());

    // There is room for one more permit, and it is for the waiter, not for a later `try_acquire`.
    let two = declare(&client, &name, 2);
    assert!(try_acquire(&two).await.is_none());
    let second = waiter.permit().await;
    release(held).await;
    assert!(try_acquire(&two).await.is_some());
    drop(second);
}

pub async fn an_acquire_that_nobody_polls_does_not_wait(store: &impl Store) {
    let semaphore = semaphore(store, "not polled", 1).await;
    let not_polled = semaphore.acquire();
    let held = acquire(&semaphore).await;
    assert_eq!(held_and_waiting(&semaphore).await, (1, 0));
    assert_eq!(deadline(semaphore.position(&not_polled.id())).await.unwrap(), None);
    release(held).await;
    drop(not_polled);
    all_are_free(&semaphore).await;
}

#[track_caller]
fn assert_timed_out(error: &Error, semaphore: &Semaphore, after: Duration) {
    let Error::TimedOut { name, limit, .. } = error else { panic!("{error}") };
    assert_eq!((name.as_str(), *limit), (semaphore.name(), after));
}

pub async fn a_wait_ends_when_its_time_is_up(store: &impl Store) {
    let semaphore = semaphore(store, "timeout", 1).await;
    let held = acquire(&semaphore).await;
    let begun = Instant::now();
    let impatient = Waiter::join_with(&semaphore, semaphore.acquire().within(SHORT)).await;
    let patient = Waiter::join(&semaphore).await;

    assert_timed_out(&impatient.error().await, &semaphore, SHORT);
    assert!(begun.elapsed() >= SHORT, "after {:?}", begun.elapsed());
    eventually(async || held_and_waiting(&semaphore).await == (1, 1)).await;
    release(held).await;
    drop(patient.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn a_semaphore_may_limit_every_wait(store: &impl Store) {
    let (client, name) = (store.client().await, unique("limited"));
    let semaphore = client.semaphore(&name, 1).within(SHORT).build().unwrap();
    let held = acquire(&semaphore).await;
    let error = deadline(semaphore.acquire()).await.unwrap_err();
    assert_timed_out(&error, &semaphore, SHORT);
    let error = deadline(semaphore.with(async |_| ())).await.unwrap_err();
    assert_timed_out(&error, &semaphore, SHORT);

    eventually(async || held_and_waiting(&semaphore).await == (1, 0)).await;
    release(held).await;
    // The limit applies to waiting, not to holding.
    let permit = acquire(&semaphore).await;
    deadline(semaphore.acquire()).await.unwrap_err();
    permit.check().unwrap();
}

pub async fn a_limit_of_one_wait_overrides_that_of_the_semaphore(store: &impl Store) {
    let (client, name) = (store.client().await, unique("own limit"));
    let semaphore = client.semaphore(&name, 1).within(SHORT).build().unwrap();
    let held = acquire(&semaphore).await;
    let longer = semaphore.acquire().within(crate::wait::TIME_LIMIT);
    let longer = Waiter::join_with(&semaphore, longer).await;
    let shorter = deadline(semaphore.acquire().within(SHORT / 2)).await.unwrap_err();
    assert_timed_out(&shorter, &semaphore, SHORT / 2);

    // This waiter has the semaphore's limit. It comes after `longer`, and gives up before it.
    let usual = deadline(semaphore.acquire()).await.unwrap_err();
    assert_timed_out(&usual, &semaphore, SHORT);
    release(held).await;
    longer.permit().await.check().unwrap();
}

pub async fn a_limit_of_zero_is_refused(store: &impl Store) {
    let semaphore = semaphore(store, "zero limit", 1).await;
    let error = deadline(semaphore.acquire().within(Duration::ZERO)).await.unwrap_err();
    let Error::InvalidArgument { argument, problem, .. } = &error else { panic!("{error}") };
    assert_eq!(*argument, "within");
    assert!(problem.contains("0s"), "{problem}");
    all_are_free(&semaphore).await;
}

pub async fn a_cancelled_wait_unblocks_the_next_waiter(store: &impl Store) {
    let semaphore = semaphore(store, "cancelled", 1).await;
    let held = acquire(&semaphore).await;
    let first = Waiter::join(&semaphore).await;
    let second = Waiter::join(&semaphore).await;
    first.leave().await;
    eventually(async || held_and_waiting(&semaphore).await == (1, 1)).await;

    release(held).await;
    drop(second.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn positions_change_as_others_leave(store: &impl Store) {
    let semaphore = semaphore(store, "positions", 1).await;
    let held = acquire(&semaphore).await;
    let position = async |id| deadline(semaphore.position(&id)).await.unwrap();
    assert_eq!(position(held.id()).await, None);

    let first = Waiter::join(&semaphore).await;
    let second = Waiter::join(&semaphore).await;
    let third = Waiter::join(&semaphore).await;
    let (first_id, third_id) = (first.id, third.id);
    assert_eq!(position(first_id).await, Some(0));
    assert_eq!(position(second.id).await, Some(1));
    assert_eq!(position(third_id).await, Some(2));

    second.leave().await;
    eventually(async || position(third_id).await == Some(1)).await;
    release(held).await;
    let first = first.permit().await;
    assert_eq!(first.id(), first_id);
    assert_eq!(position(first_id).await, None);
    assert_eq!(position(third_id).await, Some(0));
    release(first).await;
    drop(third.permit().await);
}

pub async fn a_waiter_is_notified_when_its_id_is_released_by_hand(store: &impl Store) {
    let semaphore = semaphore(store, "evicted", 1).await;
    let _held = acquire(&semaphore).await;
    let waiter = Waiter::join(&semaphore).await;
    let evicted = waiter.id;
    assert!(release_by_id(&semaphore, evicted).await, "it waited");
    let error = waiter.error().await;
    let Error::Cancelled { name, id, .. } = error else { panic!("{error}") };
    assert_eq!((&*name, id), (semaphore.name(), evicted.to_string()));
    assert_eq!(held_and_waiting(&semaphore).await, (1, 0));
}

pub async fn a_waiter_is_cancelled_by_its_id(store: &impl Store) {
    let name = unique("cancelled");
    let (here, there) =
        (declare(&store.client().await, &name, 1), declare(&store.client().await, &name, 1));
    let held = acquire(&here).await;
    let (cancelled, next) = (Waiter::join(&there).await, Waiter::join(&there).await);
    let id = cancelled.id;
    assert!(deadline(here.release(&id)).await.unwrap());
    let error = cancelled.error().await;
    let is_cancelled = matches!(error, Error::Cancelled { .. });
    assert!(is_cancelled && error.to_string().contains(&id.to_string()), "{error}");
    assert_eq!(held_and_waiting(&here).await, (1, 1), "it does not queue again");
    assert!(!deadline(here.release(&id)).await.unwrap(), "once");
    release(held).await;
    release(next.permit().await).await;
    all_are_free(&here).await;
}
