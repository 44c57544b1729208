//! Work under a lock, and closing a client that holds locks.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use leasehold::{Error, Lock, LockGuard, LossReason};

use super::locks::{
    MINUTES, Waiter, acquire, declare, is_free, is_locked, lock, lock_of, release, try_acquire,
};
use super::{SHORT, Store, unique};
use crate::by_hand::step_aside;
use crate::wait::{deadline, eventually};

pub async fn with_returns_the_value_of_the_work(store: &impl Store) {
    let (client, key) = (store.client().await, unique("answer"));
    let lock = lock(&client, &key);
    let mut borrowed = String::from("what the work");
    let answer = deadline(lock.with(async |guard| {
        borrowed.push_str(" borrows");
        assert!(is_locked(&client, &key).await);
        guard.fence()
    }));
    let fence = answer.await.unwrap();
    assert_eq!(borrowed, "what the work borrows");
    // Without waiting: `with` returns after the release.
    assert!(!is_locked(&client, &key).await);
    assert!(acquire(&lock).await.fence() > fence);
}

/// Work that never ends, and must not be polled after its lock is lost.
async fn endless(guard: &LockGuard, stray: &AtomicBool) {
    poll_fn(|_| {
        stray.fetch_or(guard.check().is_err(), Ordering::Relaxed);
        Poll::<()>::Pending
    })
    .await;
}

pub async fn work_stops_when_the_ttl_ends(store: &impl Store) {
    let (client, key) = (store.client().await, unique("work and ttl"));
    let (lock, stray) = (lock_of(&client, &key, SHORT), AtomicBool::new(false));
    let work = lock.with(async |guard| endless(guard, &stray).await);
    let error = deadline(work).await.unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::TtlEnded, .. }), "{error}");
    assert!(!stray.into_inner(), "the work was polled after its lock was lost");
    is_free(&client, &key).await;
}

pub async fn work_stops_when_its_lock_is_released_by_id(store: &impl Store) {
    let (client, other) = (store.client().await, store.client().await);
    let (key, stray) = (unique("work and release"), AtomicBool::new(false));
    let lock = declare(&client, &key).lease(SHORT).build().unwrap();
    let work = lock.with(async |guard| endless(guard, &stray).await);
    let take_away = async {
        eventually(async || is_locked(&other, &key).await).await;
        let raw = deadline(other.locks().lookup(&key)).await.unwrap().unwrap();
        assert!(deadline(other.locks().release(&raw.lock_id)).await.unwrap());
    };
    let (result, ()) = deadline(async { tokio::join!(work, take_away) }).await;
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::Missing, .. }), "{error}");
    assert!(!stray.into_inner(), "the work was polled after its lock was lost");
    is_free(&client, &key).await;
}

pub async fn cancelled_or_panicking_work_releases_its_lock(store: &impl Store) {
    let (client, key) = (store.client().await, unique("given up"));
    let with = |work: fn()| {
        let lock = lock(&client, &key);
        tokio::spawn(async move {
            lock.with(async |_| {
                work();
                std::future::pending::<()>().await;
            })
            .await
        })
    };
    let given_up = with(|| {});
    eventually(async || is_locked(&client, &key).await).await;
    given_up.abort();
    is_free(&client, &key).await;

    let panicked = deadline(with(|| std::panic::resume_unwind(Box::new("on purpose")))).await;
    assert!(panicked.unwrap_err().is_panic());
    is_free(&client, &key).await;
}

pub async fn a_close_notifies_waiters(store: &impl Store) {
    let (client, key) = (store.client().await, unique("closed waiters"));
    let held = acquire(&lock(&client, &key)).await;
    let waiters = [Waiter::join(&client, &key).await, Waiter::join(&client, &key).await];
    let worker = lock(&client, &key);
    let work = tokio::spawn(async move { worker.with(async |_| ()).await });
    deadline(client.close()).await.unwrap();
    for waiter in waiters {
        let error = waiter.error().await;
        assert!(matches!(error, Error::Closed), "{error}");
    }
    let error = deadline(work).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed), "{error}");
    held.check().unwrap_err();
}

/// In whatever state an acquire is when its client closes, it does not wait on, and no lock stays held.
pub async fn a_close_ends_acquires_in_every_state(store: &impl Store) {
    for round in 0..15 {
        let (client, other) = (store.client().await, store.client().await);
        let (held, free) = (unique("closed held"), unique("closed free"));
        let holder = acquire(&lock(&client, &held)).await;
        let acquire = |key: &str| {
            let lock = lock(&client, key);
            tokio::spawn(async move { lock.acquire().await })
        };
        let tasks: Vec<_> = (0..6).flat_map(|_| [acquire(&held), acquire(&free)]).collect();
        step_aside(round * 2).await;
        deadline(client.close()).await.unwrap();
        for task in tasks {
            match deadline(task).await.unwrap() {
                Ok(guard) => {
                    let error = guard.check().unwrap_err();
                    let closed = matches!(error, Error::Lost { reason: LossReason::Closed, .. });
                    assert!(closed, "{error}");
                }
                Err(error) => assert!(matches!(error, Error::Closed), "{error}"),
            }
        }
        holder.check().unwrap_err();
        for key in [&held, &free] {
            eventually(async || !is_locked(&other, key).await).await;
        }
        if other.id() == client.id() {
            // In memory both clients are the same, and the first round has closed it.
            return;
        }
    }
}

pub async fn a_close_notifies_holders(store: &impl Store) {
    let client = store.client().await;
    let keys = [unique("closed"), unique("closed"), unique("closed")];
    let plain = acquire(&lock(&client, &keys[0])).await;
    let asked_before = acquire(&lock(&client, &keys[1])).await;
    let lost = tokio::spawn(asked_before.lost());
    let extended = declare(&client, &keys[2]).lease(SHORT).build().unwrap();
    let extended = acquire(&extended).await;
    deadline(client.close()).await.unwrap();
    assert_eq!(deadline(lost).await.unwrap(), LossReason::Closed);
    for guard in [plain, asked_before, extended] {
        let error = guard.check().unwrap_err();
        assert!(matches!(error, Error::Lost { reason: LossReason::Closed, .. }), "{error}");
        assert_eq!(deadline(guard.lost()).await, LossReason::Closed);
        // Without waiting: the close has released the locks in the store.
        assert!(!is_locked(&client, guard.name()).await);
        assert!(!release(guard).await);
    }
}

pub async fn a_closed_client_acquires_no_lock(store: &impl Store) {
    let (client, key) = (store.client().await, unique("closed"));
    let declared: Lock = lock(&client, &key);
    let not_polled = declared.acquire();
    deadline(client.close()).await.unwrap();
    deadline(client.close()).await.unwrap();
    for error in [
        deadline(not_polled).await.unwrap_err(),
        deadline(declared.acquire()).await.unwrap_err(),
        deadline(declared.try_acquire()).await.unwrap_err(),
        deadline(declared.with(async |_| ())).await.unwrap_err(),
        client.lock(&key).build().unwrap_err(),
        deadline(client.locks().try_acquire(&key, MINUTES)).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Closed), "{error}");
    }
    assert!(!is_locked(&client, &key).await);
}

pub async fn a_close_frees_permits_for_other_clients(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("left"));
    let held = Arc::new(acquire(&lock(&client, &key)).await);
    if other.id() == client.id() {
        // In memory both clients are the same.
        deadline(client.close()).await.unwrap();
        assert!(!is_locked(&client, &key).await);
    } else {
        let waiter = Waiter::join(&other, &key).await;
        deadline(client.close()).await.unwrap();
        let next = waiter.guard().await;
        drop(held);
        next.check().unwrap();
        assert!(try_acquire(&lock(&other, &key)).await.is_none());
        assert!(release(next).await);
    }
}
