//! Acquires by outcome, losses by reason, times, and labels.

use std::time::Duration;

use leasehold::Error;
use leasehold::compat::lua_pool::LuaPool;
use leasehold::metrics as names;
use testkit::wait::{deadline, eventually};

use super::{NAME, Recorded, SHORT, Store};

#[tokio::test]
async fn every_outcome_is_counted() {
    for store in Store::all() {
        let recorded = Recorded::new();
        let client = store.client().await;
        let semaphore = recorded.declare(|| client.semaphore(NAME, 1).build().unwrap());
        let lock = recorded.declare(|| client.lock(NAME).build().unwrap());
        let impatient = Duration::from_millis(20);
        let pool = recorded.declare(|| client.pool(NAME, 1).within(impatient).build().unwrap());

        let permit = deadline(semaphore.acquire()).await.unwrap();
        assert!(deadline(semaphore.try_acquire()).await.unwrap().is_none());
        let timed_out = deadline(semaphore.acquire().within(Duration::from_millis(20))).await;
        assert!(matches!(timed_out, Err(Error::TimedOut { .. })));
        deadline(semaphore.acquire().weight(2)).await.expect_err("the weight is refused");
        let guard = deadline(lock.try_acquire()).await.unwrap().unwrap();
        assert!(deadline(lock.try_acquire()).await.unwrap().is_none());
        let lease = deadline(pool.try_acquire("one")).await.unwrap().unwrap();
        assert!(deadline(pool.try_acquire("two")).await.unwrap().is_none());
        deadline(pool.acquire("two")).await.expect_err("the pool is full");
        // Calls without a guard are counted, but do not change the gauges.
        deadline(LuaPool::new(pool.clone()).acquire("two")).await.unwrap();
        assert!(!deadline(pool.extend("two")).await.unwrap());
        assert_eq!(recorded.gauges("pool"), (1, 0));
        deadline(client.close()).await.unwrap();
        deadline(semaphore.acquire()).await.expect_err("the client is closed");

        for (kind, outcome, times) in [
            ("semaphore", "acquired", 1),
            ("semaphore", "full", 1),
            ("semaphore", "timed_out", 1),
            ("semaphore", "error", 1),
            ("semaphore", "closed", 1),
            ("lock", "acquired", 1),
            ("lock", "full", 1),
            ("pool", "acquired", 1),
            ("pool", "full", 2),
            ("pool", "timed_out", 1),
        ] {
            assert_eq!(
                recorded.acquires(kind, outcome),
                times,
                "{} {kind} {outcome}",
                store.label()
            );
        }
        let missing = [("kind", "pool"), ("outcome", "missing")];
        assert_eq!(recorded.count(names::RENEWALS, &missing), 1);
        let here = [("store", store.label())];
        assert_eq!(recorded.count("leasehold_acquires_total", &here), 11, "{}", store.label());
        assert_eq!(recorded.count("leasehold_wait_seconds_count", &here), 3);
        // What was held when the client was closed is counted as lost, and its hold time is recorded.
        assert_eq!(recorded.count("leasehold_hold_seconds_count", &here), 3);
        drop((permit, guard, lease));
        assert_eq!(recorded.count("leasehold_losses_total", &[("reason", "closed")]), 3);
        assert_eq!(recorded.count("leasehold_losses_total", &here), 3);
    }
}

#[tokio::test]
async fn every_metric_is_described_with_its_type() {
    let store = Store::redis();
    let (recorded, client) = (Recorded::new(), store.client().await);
    let semaphore = recorded.declare(|| client.semaphore(NAME, 1).lease(SHORT).build().unwrap());
    let permit = deadline(semaphore.acquire()).await.unwrap();
    eventually(async || recorded.count("leasehold_renewal_seconds_count", &[]) > 0).await;
    drop(permit);
    let rendered = recorded.handle.render();
    for (name, kind) in [
        (names::ACQUIRES, "counter"),
        (names::WAIT_SECONDS, "histogram"),
        (names::HOLD_SECONDS, "histogram"),
        (names::LOSSES, "counter"),
        (names::HELD, "gauge"),
        (names::WAITING, "gauge"),
        (names::OLDEST_WAIT_SECONDS, "gauge"),
        (names::RENEWALS, "counter"),
        (names::RENEWAL_SECONDS, "histogram"),
        (names::REQUESTS, "counter"),
        (names::BATCH_SIZE, "histogram"),
        (names::RECONNECTS, "counter"),
    ] {
        assert!(rendered.contains(&format!("# HELP {name} ")), "{name} is not described");
        assert!(rendered.contains(&format!("# TYPE {name} {kind}\n")), "{name} is no {kind}");
    }
}

#[tokio::test]
async fn a_name_is_a_label_only_if_it_is_asked_for() {
    for store in Store::all() {
        let (recorded, client) = (Recorded::new(), store.client().await);
        let (named, plain) = recorded.declare(|| {
            let named = client.semaphore("named", 1).name_in_metrics().build().unwrap();
            (named, client.semaphore("plain", 1).build().unwrap())
        });
        let locks = recorded.declare(|| {
            let named = client.lock("named").name_in_metrics().build().unwrap();
            (named, client.lock("plain").build().unwrap())
        });
        let pools = recorded.declare(|| {
            let named = client.pool("named", 1).name_in_metrics().build().unwrap();
            (named, client.pool("plain", 1).build().unwrap())
        });
        for semaphore in [&named, &plain] {
            drop(deadline(semaphore.acquire()).await.unwrap());
        }
        for lock in [&locks.0, &locks.1] {
            deadline(deadline(lock.acquire()).await.unwrap().release()).await.unwrap();
        }
        for pool in [&pools.0, &pools.1] {
            deadline(deadline(pool.acquire("i")).await.unwrap().release()).await.unwrap();
        }
        for kind in ["semaphore", "lock", "pool"] {
            let labels = [("kind", kind), ("outcome", "acquired"), ("name", "named")];
            assert_eq!(recorded.count("leasehold_acquires_total", &labels), 1, "{kind}");
            assert_eq!(recorded.count("leasehold_acquires_total", &labels[..2]), 2, "{kind}");
        }
        assert!(!recorded.handle.render().contains("plain"), "{}", store.label());
    }
}
