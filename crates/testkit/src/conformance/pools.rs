//! Pools: a fixed number of pool leases, each held by an instance id.

use std::time::Duration;

use leasehold::compat::lua_pool::{AcquireStatus, LuaPool, ReleaseStatus, RenewStatus};
use leasehold::{Client, Error, Jitter, Pool, PoolLease, Retry};

use super::{Store, unique};
use crate::wait::{deadline, eventually};

/// The shortest TTL that is allowed.
const TTL: Duration = Duration::from_secs(1);

fn declare(client: &Client, name: &str, capacity: u32) -> Pool {
    client.pool(name, capacity).build().unwrap()
}

async fn pool(store: &impl Store, about: &str, capacity: u32) -> Pool {
    declare(&store.client().await, &unique(about), capacity)
}

async fn acquire(pool: &Pool, instance: &str) -> (AcquireStatus, u64, u64) {
    let answer = deadline(LuaPool::new(pool.clone()).acquire(instance)).await.unwrap();
    (answer.status, answer.current_count, answer.expired_count)
}

async fn renew(pool: &Pool, instance: &str) -> (RenewStatus, u64, u64) {
    let answer = deadline(LuaPool::new(pool.clone()).renew(instance)).await.unwrap();
    (answer.status, answer.current_count, answer.expired_count)
}

async fn release(pool: &Pool, instance: &str) -> (ReleaseStatus, u64, u64) {
    let answer = deadline(LuaPool::new(pool.clone()).release(instance)).await.unwrap();
    (answer.status, answer.current_count, answer.expired_count)
}

async fn held(pool: &Pool) -> u64 {
    deadline(LuaPool::new(pool.clone()).count()).await.unwrap().current_count
}

async fn lease(pool: &Pool, instance: &str) -> PoolLease {
    deadline(pool.acquire(instance)).await.unwrap()
}

pub async fn there_are_as_many_leases_as_the_capacity_says(store: &impl Store) {
    let pool = pool(store, "as many", 2).await;
    assert_eq!(acquire(&pool, "a").await, (AcquireStatus::Acquired, 1, 0));
    assert_eq!(acquire(&pool, "b").await, (AcquireStatus::Acquired, 2, 0));
    assert_eq!(acquire(&pool, "c").await, (AcquireStatus::CapacityFull, 2, 0));
    assert_eq!(release(&pool, "a").await, (ReleaseStatus::Released, 1, 0));
    assert_eq!(acquire(&pool, "c").await, (AcquireStatus::Acquired, 2, 0));
}

pub async fn pools_of_one_name_share_their_leases(store: &impl Store) {
    let name = unique("shared");
    let (here, there) = (store.client().await, store.client().await);
    let (here, there) = (declare(&here, &name, 1), declare(&there, &name, 1));
    assert_eq!(acquire(&here, "a").await.0, AcquireStatus::Acquired);
    assert_eq!(acquire(&there, "b").await.0, AcquireStatus::CapacityFull);
    assert_eq!(renew(&there, "a").await, (RenewStatus::Renewed, 1, 0));
    assert_eq!(release(&there, "a").await, (ReleaseStatus::Released, 0, 0));
    assert_eq!(renew(&here, "a").await, (RenewStatus::NotHeld, 0, 0));
}

pub async fn an_instance_that_acquires_again_takes_no_second_lease(store: &impl Store) {
    let pool = pool(store, "again", 2).await;
    assert_eq!(acquire(&pool, "a").await, (AcquireStatus::Acquired, 1, 0));
    assert_eq!(acquire(&pool, "a").await, (AcquireStatus::Acquired, 1, 0));
    assert_eq!(acquire(&pool, "b").await, (AcquireStatus::Acquired, 2, 0));
    // The same holds in a full pool.
    assert_eq!(acquire(&pool, "a").await, (AcquireStatus::Acquired, 2, 0));
    assert_eq!(release(&pool, "a").await, (ReleaseStatus::Released, 1, 0));
    assert_eq!(release(&pool, "a").await, (ReleaseStatus::NotHeld, 1, 0));
}

pub async fn a_missing_lease_is_reported(store: &impl Store) {
    let pool = pool(store, "nobody", 1).await;
    assert_eq!(renew(&pool, "a").await, (RenewStatus::NotHeld, 0, 0));
    assert_eq!(release(&pool, "a").await, (ReleaseStatus::NotHeld, 0, 0));
    assert_eq!(held(&pool).await, 0);
}

pub async fn a_lease_ends_with_its_ttl(store: &impl Store) {
    let client = store.client().await;
    let pool = client.pool(&unique("ttl"), 1).lease(TTL).build().unwrap();
    assert_eq!(acquire(&pool, "a").await.0, AcquireStatus::Acquired);
    let mut taken = None;
    eventually(async || {
        let answer = LuaPool::new(pool.clone()).acquire("b").await.unwrap();
        taken = Some(answer.expired_count).filter(|_| answer.status == AcquireStatus::Acquired);
        taken.is_some()
    })
    .await;
    // The acquire that found the expired lease removed it.
    assert_eq!(taken, Some(1));
    assert_eq!(renew(&pool, "a").await, (RenewStatus::NotHeld, 1, 0));
}

pub async fn a_renewed_lease_stays_held(store: &impl Store) {
    let client = store.client().await;
    let pool = client.pool(&unique("renewed"), 1).lease(TTL * 2).build().unwrap();
    assert_eq!(acquire(&pool, "a").await.0, AcquireStatus::Acquired);
    let begun = std::time::Instant::now();
    let mut renewed = 0;
    // Renew for longer than the TTL.
    eventually(async || {
        assert_eq!(renew(&pool, "a").await.0, RenewStatus::Renewed);
        renewed += 1;
        begun.elapsed() > TTL * 3
    })
    .await;
    assert!(renewed > 1);
    assert_eq!(acquire(&pool, "b").await.0, AcquireStatus::CapacityFull);
}

pub async fn a_waiting_acquire_gets_the_next_lease(store: &impl Store) {
    let client = store.client().await;
    let retry = Retry::default().delay(Duration::from_millis(20));
    let retry = retry.max_delay(Duration::from_millis(50));
    let pool = client.pool(&unique("waiting"), 1).retry(retry).build().unwrap();
    let first = lease(&pool, "a").await;
    assert!(deadline(pool.try_acquire("b")).await.unwrap().is_none());
    let waiter = tokio::spawn({
        let pool = pool.clone();
        async move { pool.acquire("b").await }
    });
    assert!(deadline(first.release()).await.unwrap());
    let second = deadline(waiter).await.unwrap().unwrap();
    assert_eq!((second.id(), second.name()), ("b", pool.name()));
    assert!(second.valid_until() > Some(std::time::Instant::now()));
}

pub async fn a_wait_that_was_too_long_says_how_full_it_was(store: &impl Store) {
    let client = store.client().await;
    let retry = Retry::default().delay(Duration::from_millis(10)).jitter(Jitter::None);
    let name = unique("full");
    let limit = Duration::from_millis(100);
    let pool = client.pool(&name, 2).retry(retry).build().unwrap();
    let limited = client.pool(&name, 2).retry(retry).within(limit).build().unwrap();
    let (_a, _b) = (lease(&pool, "a").await, lease(&pool, "b").await);
    for acquire in [pool.acquire("c").within(limit), limited.acquire("c")] {
        let error = deadline(acquire).await.unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        assert!(error.to_string().ends_with(": 2 of 2 are held"), "{error}");
        let Error::TimedOut { limit, held, capacity, .. } = error else { panic!("{error}") };
        assert_eq!((held, capacity), (Some(2), Some(2)));
        assert!(limit >= Duration::from_millis(30), "{limit:?}");
    }
}

pub async fn pools_that_cannot_be_are_refused(store: &impl Store) {
    let client = store.client().await;
    let refused = |builder: leasehold::PoolBuilder, expected: &str| {
        assert_eq!(builder.build().unwrap_err().to_string(), expected);
    };
    refused(client.pool("", 1), "invalid name: it is empty; the minimum is one character");
    refused(client.pool("a", 0), "invalid capacity: it is 0; the minimum is 1");
    let long = "x".repeat(513);
    refused(client.pool(&long, 1), "invalid name: it is 513 bytes; the limit is 512");
    refused(
        client.pool("holders:a", 1),
        "invalid name: \"holders:a\" begins with \"holders:\", which is reserved: choose another name",
    );
    refused(
        client.pool("a", 1).lease(Duration::from_millis(999)),
        "invalid lease: it is 999ms; the minimum is 1s",
    );
    refused(
        client.pool("a", 1).lease(Duration::from_micros(1_000_500)),
        "invalid lease: it is 1.0005s; it must be a whole number of milliseconds",
    );
    refused(
        client.pool("a", 1).ttl(Duration::ZERO),
        "invalid ttl: it is 0s; it must be longer than zero",
    );
    refused(
        client.pool("a", 1).retry(Retry::default().multiplier(0.5)),
        "invalid retry multiplier: it is 0.5; it must be finite, and at least 1",
    );
}

pub async fn instance_ids_that_cannot_be_are_refused(store: &impl Store) {
    let pool = pool(store, "ids", 1).await;
    for id in ["", "a\nb", &"x".repeat(513)] {
        for error in [
            deadline(pool.acquire(id)).await.unwrap_err(),
            deadline(pool.try_acquire(id)).await.unwrap_err(),
            deadline(pool.extend(id)).await.unwrap_err(),
            deadline(pool.release(id)).await.unwrap_err(),
            deadline(LuaPool::new(pool.clone()).acquire(id)).await.unwrap_err(),
        ] {
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().starts_with("invalid instance id: "), "{error}");
        }
    }
    assert_eq!(acquire(&pool, "worker 7: ü @ {x} %").await.0, AcquireStatus::Acquired);
}

pub async fn a_stale_release_does_not_end_a_newer_lease(store: &impl Store) {
    let (here, there) = (store.client().await, store.client().await);
    let name = unique("given up");
    let (here, there) = (declare(&here, &name, 1), declare(&there, &name, 1));
    for round in 0..40 {
        let given_up = here.acquire("w");
        if round % 2 == 0 {
            // Dropped while its request is under way.
            let _ = tokio::time::timeout(Duration::ZERO, given_up).await;
        } else {
            drop(deadline(given_up).await.unwrap());
        }
        let lease_of_w = lease(&here, "w").await;
        // This lease comes after every pending release of the instance, so those have been sent by now.
        drop(lease(&here, "w").await);
        assert_eq!(acquire(&there, "x").await, (AcquireStatus::CapacityFull, 1, 0), "{round}");
        lease_of_w.check().unwrap();
        assert!(deadline(lease_of_w.release()).await.unwrap());
    }
}

pub async fn a_shared_lease_is_released_with_its_last_guard(store: &impl Store) {
    let pool = pool(store, "two guards", 1).await;
    let (first, second) = (lease(&pool, "a").await, lease(&pool, "a").await);
    assert!(deadline(first.release()).await.unwrap());
    assert_eq!(held(&pool).await, 1);
    second.check().unwrap();
    assert!(deadline(second.release()).await.unwrap());
    assert_eq!(held(&pool).await, 0);
}
