//! Closing a client.

use leasehold::{Client, Error, LossReason};
use tokio::task::yield_now;

use super::{
    SHORT, Store, Waiter, acquire, all_are_free, declare, release, release_by_id, try_acquire,
    unique,
};
use crate::wait::{TIME_LIMIT, deadline};

async fn close(client: &Client) {
    deadline(client.close()).await.unwrap();
}

pub async fn a_close_notifies_waiters(store: &impl Store) {
    let (client, name) = (store.client().await, unique("closed waiters"));
    let semaphore = declare(&client, &name, 1);
    let _held = acquire(&semaphore).await;
    let limited = semaphore.acquire().within(TIME_LIMIT);
    let mut waiters = vec![Waiter::join_with(&semaphore, limited).await];
    for _ in 0..3 {
        waiters.push(Waiter::join(&semaphore).await);
    }
    let worker = semaphore.clone();
    let work = tokio::spawn(async move { worker.with(async |_| ()).await });
    // One turn, so that the work usually waits already. It gets the same error if it does not wait yet.
    yield_now().await;

    close(&client).await;
    for waiter in waiters {
        let error = waiter.error().await;
        assert!(matches!(error, Error::Closed), "{error}");
    }
    let error = deadline(work).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed), "{error}");
}

pub async fn a_close_notifies_waiters_in_any_order(store: &impl Store) {
    let (client, name) = (store.client().await, unique("closed in order"));
    let semaphore = declare(&client, &name, 1);
    // Created first and polled last, so that the order of the ids is not that of the queue.
    let [last, middle, first] = [(); 3].map(|()| semaphore.acquire());
    let held = deadline(first).await.unwrap();
    let middle = Waiter::join_with(&semaphore, middle).await;
    let last = Waiter::join_with(&semaphore, last).await;

    close(&client).await;
    for waiter in [middle, last] {
        let error = waiter.error().await;
        assert!(matches!(error, Error::Closed), "a waiter got {error}");
    }
    held.check().unwrap_err();
}

pub async fn a_close_notifies_holders(store: &impl Store) {
    let (client, name) = (store.client().await, unique("closed holders"));
    let plain = declare(&client, &name, 4);
    let timed = client.semaphore(&name, 4).ttl(SHORT * 100).build().unwrap();
    let labelled = client.semaphore(&name, 4).label("mine").build().unwrap();
    let asked_before = acquire(&plain).await;
    let lost = tokio::spawn(asked_before.lost());
    let held =
        [asked_before, acquire(&plain).await, acquire(&timed).await, acquire(&labelled).await];

    close(&client).await;
    assert_eq!(deadline(lost).await.unwrap(), LossReason::Closed);
    for permit in held {
        let error = permit.check().unwrap_err();
        assert!(matches!(error, Error::Lost { reason: LossReason::Closed, .. }), "{error}");
        assert_eq!(deadline(permit.lost()).await, LossReason::Closed);
        assert!(!release(permit).await);
    }
}

pub async fn a_closed_client_refuses_new_calls(store: &impl Store) {
    let (client, name) = (store.client().await, unique("closed"));
    let semaphore = declare(&client, &name, 1);
    let not_polled = semaphore.acquire();
    close(&client).await;

    let errors = [
        deadline(semaphore.acquire()).await.unwrap_err(),
        deadline(semaphore.acquire().within(SHORT)).await.unwrap_err(),
        deadline(not_polled).await.unwrap_err(),
        deadline(semaphore.try_acquire()).await.unwrap_err(),
        deadline(semaphore.with(async |_| ())).await.unwrap_err(),
        client.semaphore(&name, 1).build().unwrap_err(),
        client.semaphore(&unique("new"), 1).build().unwrap_err(),
        client.clone().semaphore(&name, 1).build().unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Closed), "{error}");
    }
}

pub async fn a_closed_client_only_releases_by_id(store: &impl Store) {
    let (client, name) = (store.client().await, unique("closed ids"));
    let (semaphore, locks) = (declare(&client, &name, 1), client.locks());
    let pool = client.pool(&name, 1).build().unwrap();
    let permit = acquire(&semaphore).await.detach();
    let lock = deadline(locks.try_acquire(&name, TIME_LIMIT)).await.unwrap().unwrap();
    let lease = deadline(pool.acquire("instance")).await.unwrap().detach();
    close(&client).await;

    for error in [
        deadline(semaphore.extend(&permit)).await.unwrap_err(),
        deadline(locks.extend(&lock.id, TIME_LIMIT)).await.unwrap_err(),
        deadline(pool.extend(&lease)).await.unwrap_err(),
        deadline(locks.try_acquire(&name, TIME_LIMIT)).await.unwrap_err(),
        deadline(locks.try_acquire_as(&name, TIME_LIMIT, &lock.id)).await.unwrap_err(),
        client.semaphore(&name, 1).build().unwrap_err(),
        client.lock(&name).build().unwrap_err(),
        client.pool(&name, 1).build().unwrap_err(),
    ] {
        assert!(matches!(error, Error::Closed), "{error}");
    }
    // In memory the close has released the permit.
    let released = deadline(semaphore.release(&permit)).await.unwrap();
    assert!(released || store.client().await.id() == client.id());
    assert!(deadline(locks.release(&lock.id)).await.unwrap());
    assert!(deadline(pool.release(&lease)).await.unwrap());
}

pub async fn a_closed_client_changes_no_limits(store: &impl Store) {
    let (client, other) = (store.client().await, store.client().await);
    let name = unique("closed limits");
    let (closed, theirs) = (declare(&client, &name, 2), declare(&other, &name, 2));
    let held = acquire(&theirs).await;
    close(&client).await;

    let errors = [
        deadline(closed.set_capacity(1)).await.unwrap_err(),
        deadline(closed.pin(1)).await.unwrap_err(),
        deadline(closed.unpin()).await.unwrap_err(),
        deadline(closed.set_rate(1, TIME_LIMIT, 1)).await.unwrap_err(),
        deadline(closed.clear_rate()).await.unwrap_err(),
        deadline(closed.pause().into_future()).await.unwrap_err(),
        deadline(closed.resume()).await.unwrap_err(),
        deadline(closed.drain().into_future()).await.unwrap_err(),
        deadline(closed.forget()).await.unwrap_err(),
        deadline(closed.release_member(&held.id().to_string())).await.unwrap_err(),
        deadline(closed.release_member("an id of another program")).await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Closed), "{error}");
    }
    // In memory both clients are the one that was closed.
    if other.id() != client.id() {
        held.check().unwrap();
        let stats = deadline(theirs.stats()).await.unwrap();
        assert_eq!((stats.held, stats.capacity, stats.pinned), (1, 2, None));
        assert!(stats.paused.is_none() && stats.rate.is_none(), "{stats:?}");
        release(held).await;
        all_are_free(&theirs).await;
    }
}

pub async fn closing_twice_is_harmless(store: &impl Store) {
    let client = store.client().await;
    let semaphore = declare(&client, &unique("closed twice"), 1);
    let permit = acquire(&semaphore).await;
    close(&client).await;
    close(&client).await;
    assert!(!release_by_id(&semaphore, permit.id()).await);
    drop(permit);
    close(&client.clone()).await;
}

pub async fn a_close_frees_permits_for_other_clients(store: &impl Store) {
    let (client, other) = (store.client().await, store.client().await);
    let name = unique("left behind");
    let semaphore = declare(&client, &name, 2);
    let theirs = declare(&other, &name, 2);
    let held = (acquire(&semaphore).await, acquire(&semaphore).await);
    let waiter = Waiter::join(&semaphore).await;
    close(&client).await;
    waiter.error().await;

    if other.id() == client.id() {
        // In memory both clients are the one that was closed.
        let stats = deadline(semaphore.stats()).await.unwrap();
        assert_eq!((stats.held, stats.waiting), (0, 0));
    } else {
        assert!(!release_by_id(&theirs, held.0.id()).await);
        assert!(try_acquire(&theirs).await.is_some());
        all_are_free(&theirs).await;
    }
    drop(held);
}

pub async fn a_close_waits_for_what_was_dropped(store: &impl Store) {
    let (client, looking) = (store.client().await, store.client().await);
    let (key, pool) = (unique("dropped lock"), unique("dropped lease"));
    let lock = client.lock(&key).build().unwrap();
    let (guard, lease) = (lock.acquire(), client.pool(&pool, 1).build().unwrap());
    let (guard, lease) = (deadline(guard).await.unwrap(), deadline(lease.acquire("a")).await);
    let permit = acquire(&declare(&client, &key, 1)).await;
    drop((guard, lease.unwrap(), permit));
    close(&client).await;
    assert!(!deadline(looking.locks().is_locked(&key)).await.unwrap());
    let pools = deadline(looking.pools().list(1000)).await.unwrap();
    assert!(pools.iter().all(|stats| stats.name != pool), "{pools:?}");
}

pub async fn acquires_during_a_close_leave_nothing_held(store: &impl Store) {
    let (client, looking) = (store.client().await, store.client().await);
    let (key, name) = (unique("late lock"), unique("late lease"));
    let (lock, pool) = (client.lock(&key).build(), client.pool(&name, 1).build());
    let (lock, pool) = (lock.unwrap(), pool.unwrap());
    let guard = tokio::spawn(async move { lock.try_acquire().await });
    let lease = tokio::spawn(async move { pool.try_acquire("a").await });
    yield_now().await;
    close(&client).await;
    if let Ok(Some(guard)) = deadline(guard).await.unwrap() {
        guard.check().unwrap_err();
    }
    if let Ok(Some(lease)) = deadline(lease).await.unwrap() {
        lease.check().unwrap_err();
    }
    assert!(!deadline(looking.locks().is_locked(&key)).await.unwrap());
    let pools = deadline(looking.pools().list(1000)).await.unwrap();
    assert!(pools.iter().all(|stats| stats.name != name), "{pools:?}");
}
