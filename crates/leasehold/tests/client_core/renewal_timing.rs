//! Renewals on a link with latency: a deadline that is near does not cost the connection.

use std::time::{Duration, Instant};

use leasehold::LossReason;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::deadline;

use super::{NAME, acquire, connect};

/// Every permit is renewed until its TTL ends, some of them shortly before that.
#[tokio::test]
async fn a_ttl_that_ends_does_not_cost_the_connection() {
    const PERMITS: u32 = 24;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    proxy.delay(Duration::from_millis(15));
    let semaphore = client.semaphore(NAME, PERMITS).ttl(Duration::from_secs(2)).build().unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(8) {
        let mut permits = Vec::new();
        for _ in 0..PERMITS {
            permits.push(acquire(&semaphore).await);
        }
        for permit in permits {
            assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
        }
        assert_eq!(proxy.traffic().accepted, 1, "the client has reconnected");
    }
}

/// On a machine too busy to renew in time the permit may be lost, but not the connection.
#[tokio::test]
async fn the_shortest_heartbeat_is_kept_at_twenty_milliseconds_a_round_trip() {
    const ATTEMPTS: u32 = 3;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    proxy.delay(Duration::from_millis(10));
    let shortest = client.semaphore(NAME, 1).heartbeat_max_interval(Duration::from_millis(300));
    let shortest = shortest.build().unwrap();
    let uninvolved = client.semaphore("uninvolved", 1).build().unwrap();
    let mut lost = Vec::new();
    for attempt in 1..=ATTEMPTS {
        let held = acquire(&shortest).await;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) && held.check().is_ok() {
            let asked = Instant::now();
            let permit = acquire(&uninvolved).await;
            let took = asked.elapsed();
            assert_eq!(proxy.traffic().accepted, 1, "the client has reconnected");
            assert!(took < Duration::from_millis(500), "an uninvolved name took {took:?}");
            drop(permit);
        }
        if held.check().is_ok() {
            drop(held);
            return;
        }
        lost.push(begun.elapsed());
        assert!(attempt < ATTEMPTS, "lost after {lost:?}");
    }
}
