//! Renewals and extensions on a link with latency.

use super::*;

/// Sets the time of a round trip.
fn round_trip(store: &Simulated, time: Duration) {
    let mut world = store.world();
    (world.delay, world.linger) = (time / 2, time / 2);
}

/// Every permit is renewed until its TTL ends, some of them shortly before that.
#[tokio::test]
async fn a_ttl_that_ends_does_not_make_the_connection_suspect() {
    let store = Simulated::default();
    let semaphore = client(&store).semaphore("s", 24).ttl(Duration::from_secs(2));
    let semaphore = semaphore.build().unwrap();
    round_trip(&store, Duration::from_millis(30));
    for _ in 0..20 {
        let mut permits = Vec::new();
        for _ in 0..24 {
            permits.push(deadline(semaphore.acquire()).await.unwrap());
        }
        for permit in permits {
            assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
        }
        assert_eq!(store.world().suspected, 0);
    }
}

#[tokio::test]
async fn a_lease_of_300_ms_is_renewed_at_20_ms_a_round_trip() {
    let store = Simulated::default();
    let client = client(&store);
    let shortest = client.semaphore("s", 1).lease(Duration::from_millis(300)).build().unwrap();
    let uninvolved = client.semaphore("uninvolved", 1).build().unwrap();
    round_trip(&store, Duration::from_millis(20));
    let held = deadline(shortest.acquire()).await.unwrap();
    for _ in 0..500 {
        let (took, permit) = timed(uninvolved.acquire()).await;
        drop(permit.unwrap());
        assert!(took < Duration::from_millis(100), "an uninvolved name took {took:?}");
        held.check().unwrap();
        assert_eq!(store.world().suspected, 0);
    }
}

/// Another program that shares the pool considers an instance dead after 10 s.
#[tokio::test]
async fn a_lease_of_a_pool_with_the_defaults_is_renewed_well_within_ten_seconds() {
    let store = Simulated::default();
    let pool = client(&store).pool("p", 1).build().unwrap();
    let lease = deadline(pool.acquire("a")).await.unwrap();
    let mut longest = Duration::ZERO;
    for _ in 0..10 {
        let (requests, begun) = (store.world().requests.len(), Instant::now());
        eventually(async || store.world().requests.len() > requests).await;
        longest = longest.max(begun.elapsed());
    }
    lease.check().unwrap();
    assert!(longest < Duration::from_secs(4), "{longest:?}");
}

/// The renewal in the background is due while the extension is in flight.
#[tokio::test]
async fn a_renewal_that_waits_for_an_extension_does_not_undo_it() {
    let store = Simulated::default();
    let client = client(&store);
    let lease = Duration::from_secs(3);
    let lock = client.lock("k").lease(lease).build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    // The extension is in flight when a third of the lease has passed.
    round_trip(&store, lease / 5);
    tokio::time::sleep(lease / 4).await;
    deadline(guard.extend(MINUTES)).await.unwrap();
    tokio::time::sleep(lease).await;
    guard.check().unwrap();
    assert!(store.left_of_lock() > MINUTES / 2);
}

/// A retry in the background must not undo a later extension.
#[tokio::test]
async fn an_extension_that_was_dropped_does_not_end_a_later_one() {
    let store = Simulated::default();
    let guard = deadline(lock(&client(&store)).acquire()).await.unwrap();
    store.world().lose_answers = 1;
    let dropped = guard.extend(Duration::from_secs(10));
    let _ = tokio::time::timeout(AT_ONCE / 10, dropped).await;
    deadline(guard.extend(2 * MINUTES)).await.unwrap();
    // By now a retry would have been sent.
    tokio::time::sleep(2 * ANSWER).await;
    assert!(store.left_of_lock() > MINUTES);
    guard.check().unwrap();
}

/// Returns when a guard was lost, and why.
async fn lost(guard: &impl crate::Guard) -> (Duration, LossReason) {
    let begun = Instant::now();
    let reason = deadline(guard.lost()).await;
    (begun.elapsed(), reason)
}

/// The TTL caps the hold, whether it is longer or shorter than the lease, and what was held is free then. The client is
/// notified a margin before the TTL ends in the store.
#[tokio::test]
async fn a_ttl_caps_permits_locks_and_pool_leases() {
    let lease = Duration::from_secs(6);
    for ttl in [lease / 3, lease * 2] {
        let store = Simulated::default();
        let (here, there) = (client(&store), client(&store));
        // Locks count in whole milliseconds.
        let margin = lease / 10 + Duration::from_millis(1);
        let in_time = |(after, reason): (Duration, LossReason), what: &str| {
            assert_eq!(reason, LossReason::TtlEnded, "{what}");
            assert!(
                after <= ttl && after + margin >= ttl,
                "{what}: lost after {after:?} of {ttl:?}"
            );
        };
        let semaphore = |client: &Client| client.semaphore("s", 1).lease(lease).ttl(ttl).build();
        let permit = deadline(semaphore(&here).unwrap().acquire()).await.unwrap();
        in_time(lost(&permit).await, "permit");
        let next = deadline(semaphore(&there).unwrap().acquire()).await.unwrap();
        drop((permit, next));

        let lock = |client: &Client| client.lock("k").lease(lease).ttl(ttl).build().unwrap();
        let guard = deadline(lock(&here).acquire()).await.unwrap();
        in_time(lost(&guard).await, "lock");
        let (took, next) = timed(lock(&there).acquire()).await;
        assert!(took < AT_ONCE, "the lock was free after {took:?}");
        drop((guard, next.unwrap()));

        let pool = |client: &Client| client.pool("p", 1).lease(lease).ttl(ttl).build().unwrap();
        let held = deadline(pool(&here).acquire("a")).await.unwrap();
        in_time(lost(&held).await, "pool lease");
        tokio::time::sleep(AT_ONCE).await;
        assert!(deadline(pool(&there).try_acquire("b")).await.unwrap().is_some());
    }
}

/// A client that dies renews nothing, so the lease ends what it held, before the TTL does.
#[tokio::test]
async fn a_lease_ends_what_a_dead_client_held_before_its_ttl() {
    let (lease, ttl) = (Duration::from_secs(3), Duration::from_secs(12));
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let lock = |client: &Client| client.lock("k").lease(lease).ttl(ttl).build().unwrap();
    let pool = |client: &Client| client.pool("p", 1).lease(lease).ttl(ttl).build().unwrap();
    let guard = deadline(lock(&here).acquire()).await.unwrap();
    let held = deadline(pool(&here).acquire("a")).await.unwrap();
    store.cut(here.id());
    assert_eq!(deadline(guard.lost()).await, LossReason::NotRenewed);
    assert_eq!(deadline(held.lost()).await, LossReason::NotRenewed);
    let (took, next) = timed(lock(&there).acquire()).await;
    drop(next.unwrap());
    assert!(took < ttl / 4, "it took {took:?}");
    let (took, next) = timed(pool(&there).acquire("b")).await;
    drop(next.unwrap());
    assert!(took < ttl / 4, "it took {took:?}");
}
