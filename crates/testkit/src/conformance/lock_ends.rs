//! Closing a client that holds locks or waits for them.

use std::sync::Arc;

use leasehold::{Error, LossReason};

use super::locks::{Waiter, acquire, is_locked, lock, release, try_acquire};
use super::{Store, unique};
use crate::by_hand::step_aside;
use crate::wait::{deadline, eventually};

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
