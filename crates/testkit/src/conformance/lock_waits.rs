//! Waiting for a lock: a release or the end of a TTL ends the wait, and a cancelled wait leaves nothing behind.

use std::time::{Duration, Instant};

use leasehold::compat::sync_guard::Settings;
use leasehold::{Error, Jitter, Retry};

use super::locks::{
    MINUTES, Waiter, acquire, is_free, lock, lock_of, only_when_told, release, try_acquire,
};
use super::{SHORT, Store, unique};
use crate::Rng;
use crate::by_hand::{block_on, step_aside};
use crate::wait::{deadline, eventually};

pub async fn a_release_ends_a_wait(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("released"));
    let mut held = acquire(&lock(&here, &key)).await;
    for client in [&here, &there, &here] {
        let waiter = Waiter::join(client, &key).await;
        assert!(!waiter.task.is_finished());
        assert!(release(held).await);
        let next = waiter.guard().await;
        next.check().unwrap();
        held = next;
    }
    assert!(release(held).await);
    is_free(&here, &key).await;
}

pub async fn a_drop_ends_a_wait(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("drops"));
    for client in [&here, &there] {
        let held = acquire(&lock(&here, &key)).await;
        let waiter = Waiter::join(client, &key).await;
        std::thread::spawn(move || drop(held)).join().unwrap();
        assert!(release(waiter.guard().await).await);
    }
    is_free(&here, &key).await;
}

pub async fn a_release_by_id_ends_a_wait(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("id released"));
    for (holder, waiting) in [(&here, &here), (&here, &there)] {
        let held = deadline(holder.locks().try_acquire(&key, MINUTES)).await.unwrap().unwrap();
        let waiter = Waiter::join(waiting, &key).await;
        assert!(deadline(there.locks().release(&held.id)).await.unwrap());
        assert!(release(waiter.guard().await).await);
    }
    is_free(&here, &key).await;
}

/// The holder is silent: it neither releases nor extends, as if it had died.
pub async fn the_end_of_a_ttl_ends_a_wait(store: &impl Store) {
    let (client, key) = (store.client().await, unique("silent"));
    let begun = Instant::now();
    let held = deadline(client.locks().try_acquire(&key, SHORT)).await.unwrap().unwrap();
    let waiters = [Waiter::join(&client, &key).await, Waiter::join(&client, &key).await];
    let granted = waiters.map(|waiter| async {
        let (at, guard) = waiter.granted().await;
        assert!(guard.fence() > held.fence);
        assert!(release(guard).await);
        at
    });
    let [first, second] = granted;
    let (first, second) = tokio::join!(first, second);
    let (took, early) = (first.min(second) - begun, Duration::from_millis(2));
    assert!(took + early >= SHORT, "granted after {took:?}");
    is_free(&client, &key).await;
}

pub async fn a_wait_goes_on_while_the_holder_extends(store: &impl Store) {
    let (client, key) = (store.client().await, unique("goes on"));
    let locks = client.locks();
    let held = deadline(locks.try_acquire(&key, SHORT)).await.unwrap().unwrap();
    let waiter = Waiter::join(&client, &key).await;
    assert!(deadline(locks.extend(&held.id, SHORT * 3)).await.unwrap());
    let extended = Instant::now();
    let (at, guard) = waiter.granted().await;
    assert!(at - extended + Duration::from_millis(5) >= SHORT * 3, "{:?}", at - extended);
    assert!(release(guard).await);
}

pub async fn a_lock_that_stays_locked_is_an_error(store: &impl Store) {
    let (client, key) = (store.client().await, unique("in vain"));
    let held = acquire(&lock(&client, &key)).await;
    let waiting = client.lock(&key).retry(only_when_told()).within(SHORT).build().unwrap();
    let begun = Instant::now();
    let error = deadline(waiting.acquire()).await.unwrap_err();
    assert!(begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
    assert_eq!(error.to_string(), format!("the lock {key:?} was not acquired within 400ms"));
    assert!(matches!(error, Error::TimedOut { limit: SHORT, .. }), "{error:?}");
    held.check().unwrap();
    assert!(release(held).await);
    is_free(&client, &key).await;
}

pub async fn a_lock_is_retried_as_often_as_the_policy_allows(store: &impl Store) {
    let (client, key) = (store.client().await, unique("retries"));
    let held = acquire(&lock(&client, &key)).await;
    let delay = Duration::from_millis(10);
    let retry = Retry::default().delay(delay).multiplier(10.0).jitter(Jitter::None);
    for (times, whole) in [(0, 0), (1, 10), (2, 10 + 100)] {
        let waiting = client.lock(&key).max_retries(times, retry).build().unwrap();
        let (begun, whole) = (Instant::now(), Duration::from_millis(whole));
        let error = deadline(waiting.acquire()).await.unwrap_err();
        let took = begun.elapsed();
        assert!(took >= whole && took < whole + SHORT, "{times} retries took {took:?}");
        // The error reports how long the acquire waited, not how long it was allowed to wait.
        let Error::TimedOut { limit, .. } = error else { panic!("{error}") };
        assert!(limit >= whole && limit <= took, "{limit:?} of {took:?}");
    }
    assert!(release(held).await);
}

/// Every release wakes one waiter. If its wake-up were lost, the others would wait for minutes.
pub async fn a_crowd_is_served_one_after_the_other(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("crowd"));
    for clients in [[&here, &here], [&here, &there]] {
        let held = acquire(&lock(&there, &key)).await;
        let mut crowd = Vec::new();
        for turn in 0..12 {
            crowd.push(Waiter::join(clients[turn % 2], &key).await);
        }
        let served = crowd.into_iter().enumerate().map(|(turn, waiter)| {
            tokio::spawn(async move {
                let guard = waiter.guard().await;
                step_aside(2).await;
                if turn % 3 == 0 { drop(guard) } else { assert!(release(guard).await) }
            })
        });
        let served: Vec<_> = served.collect();
        assert!(release(held).await);
        for task in served {
            deadline(task).await.unwrap();
        }
        is_free(&here, &key).await;
    }
}

/// A waiter that is cancelled after its wake-up leaves the lock to the others.
pub async fn a_waiter_that_leaves_takes_no_wake_up_with_it(store: &impl Store) {
    let (client, key, mut random) = (store.client().await, unique("leaves"), Rng::with_seed(4));
    for _ in 0..20 {
        let held = acquire(&lock(&client, &key)).await;
        let leaving = Waiter::join(&client, &key).await;
        let staying = Waiter::join(&client, &key).await;
        let task = tokio::spawn(held.release());
        step_aside(random.u32(0..20)).await;
        leaving.task.abort();
        deadline(task).await.unwrap().unwrap();
        drop(deadline(leaving.task).await);
        assert!(release(staying.guard().await).await);
    }
    is_free(&client, &key).await;
}

pub async fn an_acquire_that_is_dropped_leaves_nothing(store: &impl Store) {
    let (client, other) = (store.client().await, store.client().await);
    let (key, mut random) = (unique("cancelled"), Rng::with_seed(3));
    for round in 0..150 {
        let held = if round % 2 == 0 { try_acquire(&lock(&other, &key)).await } else { None };
        let lock = lock(&client, &key);
        let pause = Duration::from_micros(random.u64(0..800));
        let given_up = if round % 3 == 0 {
            tokio::time::timeout(pause, lock.try_acquire()).await.map(drop).is_err()
        } else {
            let acquire = tokio::spawn(async move { lock.acquire().await.map(drop) });
            step_aside(random.u32(0..30)).await;
            acquire.abort();
            deadline(acquire).await.is_err()
        };
        if let Some(held) = held {
            release(held).await;
        }
        if given_up && round % 10 == 0 {
            is_free(&other, &key).await;
        }
    }
    is_free(&other, &key).await;
}

/// The caller may use another executor than tokio's.
pub async fn locks_work_without_a_runtime(store: &impl Store) {
    let (client, key) = (store.client().await, unique("no runtime"));
    let lock = lock_of(&client, &key, MINUTES);
    let thread = std::thread::spawn(move || {
        block_on(async {
            let guard = lock.acquire().await.unwrap();
            assert!(lock.try_acquire().await.unwrap().is_none());
            guard.extend(MINUTES).await.unwrap();
            let mut waiting = crate::by_hand::ByHand::new(lock.acquire());
            assert!(waiting.poll().is_none());
            assert!(guard.release().await.unwrap());
            drop(waiting.finish().unwrap());
            lock.with(async |guard| guard.check()).await.unwrap().unwrap();
        });
    });
    eventually(async || thread.is_finished()).await;
    thread.join().unwrap();
    is_free(&client, &key).await;
}
