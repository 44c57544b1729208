//! Acquires that are dropped while the client reconnects.

use std::time::{Duration, Instant};

use testkit::Rng;
use testkit::by_hand::ByHand;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::eventually;

use super::{connect, held_and_waiting};

const NAMES: usize = 24;
const ROUNDS: usize = 12;
/// How soon a name must be free after the client has reconnected. The lease is 30 s.
const FREE_WITHIN: Duration = Duration::from_secs(3);
/// Part of every acquire request, and of no other request.
const LABEL: &str = "acquires-of-this-test";

/// An acquire and its release are sent over the new connection. The acquire runs, and its reply is
/// lost with that connection as well. In whatever order the two ran, the permit is not held.
#[tokio::test]
async fn acquires_dropped_while_reconnecting_leave_nothing_held() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let name = |nth: usize| format!("name-{nth}");
    let declare = |nth| client.semaphore(&name(nth), 1).label(LABEL).build().unwrap();
    let semaphores: Vec<_> = (0..NAMES).map(declare).collect();
    let seen: Vec<_> =
        (0..NAMES).map(|nth| other.semaphore(&name(nth), 1).build().unwrap()).collect();
    let mut rng = Rng::with_seed(0x5eed);
    for round in 0..ROUNDS {
        // Connecting takes several round trips, about 80 ms: acquires begin and end in that time.
        proxy.delay(Duration::from_millis(10));
        proxy.lose_reply_to(LABEL.as_bytes());
        let before = proxy.traffic();
        proxy.cut();
        proxy.until(|traffic| traffic.accepted > before.accepted).await;
        let mut order: Vec<_> = (0..NAMES).collect();
        rng.shuffle(&mut order);
        for nth in order {
            let mut acquire = ByHand::new(semaphores[nth].acquire());
            assert!(acquire.poll().is_none(), "there is no connection");
            // The random pauses vary which requests have reached the connection at each drop.
            tokio::time::sleep(Duration::from_micros(rng.u64(0..1500))).await;
            drop(acquire);
            if rng.bool() {
                tokio::time::sleep(Duration::from_micros(rng.u64(0..1500))).await;
            }
        }
        // This acquire waits until a reply is lost, so that every round loses one.
        let acquiring = tokio::spawn(semaphores[round].acquire());
        eventually(async || proxy.traffic().lost > before.lost).await;
        acquiring.abort();
        proxy.heal();
        proxy.until(|traffic| traffic.connections > 0).await;

        let healed = Instant::now();
        for (nth, semaphore) in seen.iter().enumerate() {
            while held_and_waiting(semaphore).await != (0, 0) {
                let late = healed.elapsed() > FREE_WITHIN;
                assert!(!late, "round {round}: {} is held without a holder", name(nth));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    drop(client);
}
