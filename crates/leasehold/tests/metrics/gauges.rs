//! `leasehold_held` and `leasehold_waiting` are exact, however an acquire or a hold ends.

use leasehold::{Client, LossReason, Semaphore};
use testkit::by_hand::ByHand;
use testkit::wait::{deadline, eventually};

use super::{NAME, Recorded, SHORT, Store};

const KIND: &str = "semaphore";

async fn one(store: &Store, recorded: &Recorded) -> (Client, Semaphore) {
    let client = store.client().await;
    let semaphore = recorded.declare(|| client.semaphore(NAME, 1).build().unwrap());
    (client, semaphore)
}

#[tokio::test]
async fn a_permit_that_is_released_or_dropped_is_not_held_any_more() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (_client, semaphore) = one(&store, &recorded).await;
        for drops in [true, false] {
            let permit = deadline(semaphore.acquire()).await.unwrap();
            assert_eq!(recorded.gauges(KIND), (1, 0), "{}", store.label());
            if drops {
                drop(permit);
            } else {
                deadline(permit.release()).await.unwrap();
            }
            assert_eq!(recorded.gauges(KIND), (0, 0), "{}", store.label());
        }
        assert_eq!(recorded.losses(KIND), 0);
        assert_eq!(recorded.count("leasehold_hold_seconds_count", &[]), 2);
    }
}

#[tokio::test]
async fn an_acquire_that_is_cancelled_in_the_queue_waits_no_more() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (_client, semaphore) = one(&store, &recorded).await;
        let held = deadline(semaphore.acquire()).await.unwrap();
        // An acquire that was never polled is not counted.
        drop(semaphore.acquire());
        let acquire = semaphore.acquire();
        let id = acquire.id();
        let mut waiting = ByHand::new(acquire);
        assert!(waiting.poll().is_none());
        eventually(async || semaphore.position(&id).await.unwrap().is_some()).await;
        assert_eq!(recorded.gauges(KIND), (1, 1), "{}", store.label());
        drop(waiting);
        assert_eq!(recorded.gauges(KIND), (1, 0), "{}", store.label());
        drop(held);
        assert_eq!(recorded.gauges(KIND), (0, 0), "{}", store.label());
        assert_eq!(recorded.acquires(KIND, "cancelled"), 1);
        assert_eq!(recorded.acquires(KIND, "acquired"), 1);
    }
}

#[tokio::test]
async fn an_acquire_that_is_cancelled_when_it_was_granted_holds_nothing() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (_client, semaphore) = one(&store, &recorded).await;
        let held = deadline(semaphore.acquire()).await.unwrap();
        let mut waiting = ByHand::new(semaphore.acquire());
        assert!(waiting.poll().is_none());
        deadline(held.release()).await.unwrap();
        // Woken: the waiter was granted the permit, and has not received it.
        eventually(async || waiting.is_woken_within(SHORT)).await;
        assert_eq!(recorded.gauges(KIND), (0, 1), "{}", store.label());
        drop(waiting);
        assert_eq!(recorded.gauges(KIND), (0, 0), "{}", store.label());
        assert_eq!(recorded.acquires(KIND, "cancelled"), 1);
        assert_eq!(recorded.losses(KIND), 0);
    }
}

#[tokio::test]
async fn a_permit_whose_ttl_ends_is_lost_once_and_not_held_any_more() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let client = store.client().await;
        let declare = || client.semaphore(NAME, 1).ttl(SHORT).build().unwrap();
        let semaphore = recorded.declare(declare);
        let permit = deadline(semaphore.acquire()).await.unwrap();
        recorded.come_to(KIND, 0, 0).await;
        assert_eq!(recorded.lost(KIND, "ttl_ended"), 1, "{}", store.label());
        assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
        drop(permit);
        deadline(client.close()).await.unwrap();
        assert_eq!((recorded.losses(KIND), recorded.gauges(KIND)), (1, (0, 0)));
        assert_eq!(recorded.count("leasehold_hold_seconds_count", &[]), 1);
    }
}

#[tokio::test]
async fn closing_the_client_ends_what_is_held_and_what_waits() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (client, semaphore) = one(&store, &recorded).await;
        let permit = deadline(semaphore.acquire()).await.unwrap();
        let waiting = tokio::spawn(semaphore.acquire());
        recorded.come_to(KIND, 1, 1).await;
        deadline(client.close()).await.unwrap();
        assert!(deadline(waiting).await.unwrap().is_err());
        assert_eq!(recorded.gauges(KIND), (0, 0), "{}", store.label());
        assert_eq!(recorded.lost(KIND, "closed"), 1, "{}", store.label());
        assert_eq!(recorded.acquires(KIND, "closed"), 1);
        drop(permit);
        assert_eq!((recorded.losses(KIND), recorded.gauges(KIND)), (1, (0, 0)));
    }
}

#[tokio::test]
async fn a_detached_permit_does_not_count_as_held() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (client, semaphore) = one(&store, &recorded).await;
        let permit = deadline(semaphore.acquire()).await.unwrap();
        assert_eq!(recorded.gauges(KIND), (1, 0), "{}", store.label());
        let id = permit.detach();
        assert_eq!(recorded.gauges(KIND), (0, 0), "{}", store.label());
        assert!(deadline(semaphore.release(&id)).await.unwrap());
        assert_eq!((recorded.losses(KIND), recorded.gauges(KIND)), (0, (0, 0)));
        drop(client);
    }
}

#[tokio::test]
async fn a_permit_that_is_released_by_its_id_is_lost_to_its_guard() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (_client, semaphore) = one(&store, &recorded).await;
        let permit = deadline(semaphore.acquire()).await.unwrap();
        assert!(deadline(semaphore.release(&permit.id())).await.unwrap());
        recorded.come_to(KIND, 0, 0).await;
        assert_eq!(recorded.lost(KIND, "released"), 1, "{}", store.label());
        drop(permit);
        assert_eq!((recorded.losses(KIND), recorded.gauges(KIND)), (1, (0, 0)));
    }
}

#[tokio::test]
async fn clients_with_the_same_labels_add_up() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (first, second) = (store.client().await, store.client().await);
        let [one, two] = [(&first, "one"), (&second, "two")]
            .map(|(client, name)| recorded.declare(|| client.semaphore(name, 1).build().unwrap()));
        let (one, two) =
            (deadline(one.acquire()).await.unwrap(), deadline(two.acquire()).await.unwrap());
        assert_eq!(recorded.gauges(KIND), (2, 0), "{}", store.label());
        drop((one, first));
        assert_eq!(recorded.gauges(KIND), (1, 0), "{}", store.label());
        drop(two);
        assert_eq!(recorded.gauges(KIND), (0, 0), "{}", store.label());
    }
}

#[tokio::test]
async fn the_age_of_the_oldest_waiter_grows_and_is_zero_in_the_end() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let (_client, semaphore) = one(&store, &recorded).await;
        let age = || recorded.sum("leasehold_oldest_wait_seconds", &[("kind", KIND)]);
        let held = deadline(semaphore.acquire()).await.unwrap();
        let waiting = tokio::spawn(semaphore.acquire());
        eventually(async || age() > 0.9).await;
        let seen = age();
        eventually(async || age() > seen).await;
        drop(held);
        let permit = deadline(waiting).await.unwrap().unwrap();
        assert!(age() < 1e-9, "{}", store.label());
        drop(permit);
    }
}

#[tokio::test]
async fn locks_and_leases_are_counted_as_permits_are() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let client = store.client().await;
        let lock = recorded.declare(|| client.lock(NAME).build().unwrap());
        let pool = recorded.declare(|| client.pool(NAME, 1).build().unwrap());

        let guard = deadline(lock.acquire()).await.unwrap();
        let mut waiting = ByHand::new(lock.acquire());
        assert!(waiting.poll().is_none());
        assert_eq!(recorded.gauges("lock"), (1, 1), "{}", store.label());
        drop(waiting);
        assert_eq!(recorded.gauges("lock"), (1, 0), "{}", store.label());
        drop(guard);
        assert_eq!(recorded.gauges("lock"), (0, 0), "{}", store.label());
        let _held = deadline(lock.acquire()).await.unwrap().detach();
        assert_eq!(recorded.gauges("lock"), (0, 0), "{}", store.label());

        let lease = deadline(pool.acquire("one")).await.unwrap();
        let mut waiting = ByHand::new(pool.acquire("two"));
        assert!(waiting.poll().is_none());
        assert_eq!(recorded.gauges("pool"), (1, 1), "{}", store.label());
        drop(waiting);
        deadline(lease.release()).await.unwrap();
        assert_eq!(recorded.gauges("pool"), (0, 0), "{}", store.label());
        let lease = deadline(pool.acquire("three")).await.unwrap();
        deadline(client.close()).await.unwrap();
        assert_eq!(recorded.gauges("pool"), (0, 0), "{}", store.label());
        assert_eq!(recorded.lost("pool", "closed"), 1);
        drop(lease);
        assert_eq!((recorded.losses("pool"), recorded.gauges("pool")), (1, (0, 0)));
    }
}

/// No task waits for the loss, none checks, and the guard is kept.
#[tokio::test]
async fn a_lock_whose_ttl_ends_is_lost_once_and_not_held_any_more() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let client = store.client().await;
        let lock =
            recorded.declare(|| client.lock(NAME).lease(SHORT).ttl(SHORT * 2).build().unwrap());
        let guard = deadline(lock.acquire()).await.unwrap();
        assert_eq!(recorded.gauges("lock"), (1, 0), "{}", store.label());
        recorded.come_to("lock", 0, 0).await;
        assert_eq!(recorded.lost("lock", "ttl_ended"), 1, "{}", store.label());
        assert!(guard.check().is_err(), "{}: the lock is still valid", store.label());
        drop(guard);
        assert_eq!((recorded.losses("lock"), recorded.gauges("lock")), (1, (0, 0)));
    }
}
