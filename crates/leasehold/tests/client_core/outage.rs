//! Outages: calls that began during one, and what happens when it ends.

use std::time::{Duration, Instant};

use leasehold::{Error, LossReason, Permit};
use testkit::by_hand::ByHand;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{
    NAME, PROMPT, Waiter, acquire, connect, held_and_waiting, one, persistent, release, within,
};

/// How soon after the reconnect everything that waited for it must be done.
const SOON: Duration = Duration::from_millis(1500);

fn begin(proxy: &FaultProxy) {
    proxy.refuse(true);
    proxy.cut();
}

/// Ends the outage, and returns when the client has connected again.
async fn end(proxy: &FaultProxy) -> Instant {
    proxy.heal();
    proxy.until(|traffic| traffic.connections > 0).await;
    Instant::now()
}

/// The releases begin one after the other. How long the outage lasts afterwards must not matter to any of them.
#[tokio::test]
async fn releases_begun_during_an_outage_are_done_as_soon_as_it_ends() {
    const BEGUN_EVERY: Duration = Duration::from_millis(350);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let (mut held, mut seen) = (Vec::new(), Vec::new());
    for nth in 0..14 {
        let name = format!("{NAME} {nth}");
        held.push(acquire(&client.semaphore(&name, 1).build().unwrap()).await);
        seen.push(other.semaphore(&name, 1).build().unwrap());
    }

    begin(&proxy);
    for (nth, permit) in held.into_iter().enumerate() {
        // The outage lasts for a while, and releases begin throughout it.
        tokio::time::sleep(BEGUN_EVERY).await;
        if nth % 2 == 0 {
            drop(permit);
        } else {
            tokio::spawn(permit.release());
        }
    }
    let up = end(&proxy).await;
    let mut took = Vec::new();
    for semaphore in &seen {
        eventually(async || held_and_waiting(semaphore).await == (0, 0)).await;
        took.push(up.elapsed());
    }
    assert!(took.iter().all(|took| *took < SOON), "they took {took:?}");
}

#[tokio::test]
async fn a_release_that_is_awaited_during_an_outage_succeeds_as_soon_as_it_ends() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let permit = acquire(&one(&client)).await;
    begin(&proxy);
    let released = tokio::spawn(async move {
        let outcome = permit.release().await;
        (Instant::now(), outcome)
    });
    tokio::time::sleep(Duration::from_millis(3500)).await;
    let up = end(&proxy).await;
    let (at, outcome) = deadline(released).await.unwrap();
    assert!(outcome.unwrap(), "the permit was held until the release");
    let took = at.saturating_duration_since(up);
    assert!(took < SOON, "it took {took:?}");
}

/// Each waiter is granted a permit and woken, but cannot claim it. It holds for the time to claim,
/// and is notified before the store grants the permit to another client.
#[tokio::test]
async fn who_is_woken_just_before_an_outage_is_notified_in_time() {
    const WAITERS: usize = 4;
    let claim = Duration::from_secs(5);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let (mut held, mut waiters, mut seen): (Vec<Permit>, _, _) =
        (Vec::new(), Vec::new(), Vec::new());
    for nth in 0..WAITERS {
        let name = format!("{NAME} {nth}");
        let theirs = other.semaphore(&name, 1).build().unwrap();
        held.push(acquire(&theirs).await);
        seen.push(theirs);
        waiters.push(Waiter::join(&client.semaphore(&name, 1).build().unwrap()).await);
    }

    // Current connections stay open, so that the waiters are woken. Their next request is lost, and
    // new connections are refused.
    proxy.refuse(true);
    proxy.lose_request(b"EVALSHA");
    let released = Instant::now();
    for permit in held {
        assert!(release(permit).await);
    }
    for waiter in waiters {
        let (at, permit) = waiter.answered().await;
        let permit = permit.expect("a wake-up is enough");
        assert!(at.saturating_duration_since(released) < SOON);
        assert_eq!(deadline(permit.lost()).await, LossReason::NotRenewed);
        assert!(released.elapsed() < claim, "{:?}", released.elapsed());
    }
    end(&proxy).await;
    for semaphore in &seen {
        let next = acquire(semaphore).await;
        assert_eq!(held_and_waiting(semaphore).await, (1, 0));
        assert!(release(next).await);
    }
}

#[tokio::test]
async fn a_waiter_for_a_lock_outlives_an_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let declare = |lock: leasehold::LockBuilder| {
        lock.ttl(super::MINUTES).retry(persistent().within(Duration::from_secs(60))).build()
    };
    let held = deadline(declare(other.lock(NAME)).unwrap().acquire()).await.unwrap();
    let lock = declare(client.lock(NAME)).unwrap();
    let waiter = tokio::spawn(async move { lock.acquire().await });
    let waiting = ["SISMEMBER", "adv-sem:lock_waiting:syncguard:x", &client.id().to_string()];
    eventually(async || super::ask::<bool>(&server, &waiting)).await;

    begin(&proxy);
    tokio::time::sleep(Duration::from_secs(8)).await;
    end(&proxy).await;
    assert!(deadline(held.release()).await.unwrap());
    let guard = deadline(waiter).await.unwrap().expect("the waiter keeps waiting");
    assert!(deadline(guard.release()).await.unwrap());
}

/// An acquire that was never sent need not be released.
#[tokio::test]
async fn acquires_that_end_during_an_outage_do_not_delay_what_comes_after_it() {
    const ENDED: usize = 20_000;
    /// Far less than one id per acquire.
    const FEW_BYTES: u64 = 200_000;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let semaphore = one(&client);
    begin(&proxy);
    let refused = proxy.traffic().refused;
    proxy.until(|traffic| traffic.refused > refused).await;

    let limit = Duration::from_millis(500);
    let mut failing = tokio::task::JoinSet::new();
    for nth in 0..ENDED {
        if nth % 2 == 0 {
            assert!(ByHand::new(semaphore.acquire()).poll().is_none());
        } else {
            failing.spawn(semaphore.acquire().within(limit));
        }
    }
    for result in deadline(failing.join_all()).await {
        let error = result.map(drop).expect_err("there is no connection");
        assert!(matches!(error, Error::TimedOut { .. } | Error::Unavailable { .. }), "{error}");
    }

    let before = proxy.traffic().bytes_to_server;
    let up = end(&proxy).await;
    let permit = within(15 * PROMPT, semaphore.acquire()).await.unwrap();
    let took = up.elapsed();
    let elsewhere = client.semaphore("elsewhere", 1).build().unwrap();
    drop(within(PROMPT, elsewhere.acquire()).await.unwrap());
    assert!(release(permit).await);
    eventually(async || held_and_waiting(&one(&other)).await == (0, 0)).await;
    let sent = proxy.traffic().bytes_to_server - before;
    let few = took < PROMPT && sent < FEW_BYTES;
    assert!(few, "the first acquire took {took:?}, and {sent} bytes were sent until then");
}
