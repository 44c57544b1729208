//! Requests, batches, renewals and reconnects.

use leasehold::Client;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{NAME, Recorded, SHORT, Store};

#[tokio::test]
async fn requests_and_their_sizes_are_counted() {
    for store in Store::all() {
        let (recorded, client) = (Recorded::new(), store.client().await);
        let semaphore = recorded.declare(|| client.semaphore(NAME, 100).build().unwrap());
        let acquires: Vec<_> = (0..100).map(|_| tokio::spawn(semaphore.acquire())).collect();
        for acquire in acquires {
            drop(deadline(acquire).await.unwrap().unwrap());
        }
        deadline(client.close()).await.unwrap();
        let here = [("store", store.label())];
        let (requests, ids) = (
            recorded.count("leasehold_requests_total", &here),
            recorded.count("leasehold_batch_size_sum", &here),
        );
        assert_eq!(recorded.count("leasehold_batch_size_count", &here), requests);
        if matches!(store, Store::Memory) {
            assert_eq!((requests, ids), (0, 0));
        } else {
            // Each permit is enqueued and released, and many of them share a request.
            assert!(requests > 0 && requests < 100, "{requests} on {}", store.label());
            assert!(ids >= 200, "{ids} on {}", store.label());
        }
    }
}

#[tokio::test]
async fn renewals_are_counted_with_their_latency() {
    let store = Store::redis();
    let (recorded, client) = (Recorded::new(), store.client().await);
    let semaphore = recorded.declare(|| client.semaphore(NAME, 1).lease(SHORT).build().unwrap());
    let lock = recorded.declare(|| client.lock(NAME).lease(SHORT).build().unwrap());
    let guards =
        (deadline(semaphore.acquire()).await.unwrap(), deadline(lock.acquire()).await.unwrap());
    for kind in ["semaphore", "lock"] {
        let renewed = [("kind", kind), ("outcome", "renewed")];
        eventually(async || recorded.count("leasehold_renewals_total", &renewed) >= 2).await;
        let measured = recorded.count("leasehold_renewal_seconds_count", &[("kind", kind)]);
        assert!(measured >= 2, "{kind}: {measured}");
    }
    // The server loses all data.
    let Store::Redis(server) = &store else { unreachable!() };
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).unwrap();
    for kind in ["semaphore", "lock"] {
        eventually(async || recorded.lost(kind, "missing") == 1).await;
        recorded.come_to(kind, 0, 0).await;
        let missing = [("kind", kind), ("outcome", "missing")];
        assert_eq!(recorded.count("leasehold_renewals_total", &missing), 1, "{kind}");
    }
    drop(guards);
    assert_eq!(recorded.count("leasehold_losses_total", &[]), 2);
}

#[tokio::test]
async fn a_reconnect_is_counted() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = deadline(Client::redis(&proxy.url())).await.unwrap();
    let recorded = Recorded::new();
    let semaphore = recorded.declare(|| client.semaphore(NAME, 1).build().unwrap());
    let permit = deadline(semaphore.acquire()).await.unwrap();
    let reconnects = || recorded.count("leasehold_reconnects_total", &[("store", "redis")]);
    assert_eq!(reconnects(), 0);
    proxy.cut();
    eventually(async || reconnects() == 1).await;
    assert_eq!(recorded.gauges("semaphore"), (1, 0));
    deadline(permit.release()).await.unwrap();
    assert_eq!(reconnects(), 1);
    assert_eq!(recorded.losses("semaphore"), 0);
}

/// The holder cannot renew, and is notified before another client is granted the permit.
#[tokio::test]
async fn a_permit_that_cannot_be_renewed_is_lost_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = deadline(Client::redis(&proxy.url())).await.unwrap();
    let recorded = Recorded::new();
    let semaphore = recorded.declare(|| client.semaphore(NAME, 1).lease(SHORT).build().unwrap());
    let permit = deadline(semaphore.acquire()).await.unwrap();
    proxy.refuse(true);
    proxy.cut();
    recorded.come_to("semaphore", 0, 0).await;
    assert_eq!(recorded.lost("semaphore", "not_renewed"), 1);
    drop(permit);
    assert_eq!((recorded.losses("semaphore"), recorded.gauges("semaphore")), (1, (0, 0)));
}
