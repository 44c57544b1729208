//! Answers that are late or never come, and what a client sends while nothing happens.

use super::*;

/// Longer than the answer time-out.
const LIMIT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn an_acquire_that_is_not_answered_is_unavailable_at_its_limit() {
    let store = Simulated::default();
    let semaphore = semaphore(&client(&store), 1);
    store.world().delay = MINUTES;
    let (took, result) = timed(semaphore.acquire().within(LIMIT)).await;
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(took >= LIMIT && took < LIMIT + AT_ONCE, "it took {took:?}");
}

#[tokio::test]
async fn a_try_that_is_not_answered_is_unavailable_after_the_answer_time_out() {
    let store = Simulated::default();
    let semaphore = semaphore(&client(&store), 1);
    store.world().delay = MINUTES;
    let (took, result) = timed(semaphore.try_acquire()).await;
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(is_answer_time_out(took), "it took {took:?}");
}

/// The reply has arrived, but the acquire has not been polled since.
#[tokio::test]
async fn a_close_that_crosses_a_grant_leaves_no_lock() {
    let store = Simulated::default();
    let client = client(&store);
    let lock = client.lock("k").lease(MINUTES).build().unwrap();
    let mut acquire = Box::pin(lock.acquire());
    start(acquire.as_mut()).await;
    tokio::time::sleep(AT_ONCE).await;
    assert_eq!(store.world().held_locks().len(), 1);
    let (took, closed) = timed(client.close()).await;
    closed.unwrap();
    assert!(took < AT_ONCE, "it took {took:?}");
    assert!(store.world().held_locks().is_empty(), "the close is reported after the release");
    assert!(matches!(deadline(acquire).await, Err(Error::Closed)));
}

#[tokio::test]
async fn a_close_waits_for_the_releases_in_flight() {
    let store = Simulated::default();
    let client = client(&store);
    let pool = client.pool("p", 2).build().unwrap();
    let guard = deadline(lock(&client).acquire()).await.unwrap();
    let lease = deadline(pool.acquire("a")).await.unwrap();
    let delay = ANSWER / 3;
    store.world().delay = delay;
    drop((guard, lease));
    let late = tokio::spawn(async move { pool.try_acquire("b").await });
    tokio::task::yield_now().await;
    let (took, closed) = timed(client.close()).await;
    closed.unwrap();
    assert!(took >= delay, "the releases had not arrived after {took:?}");
    assert!(store.world().held_locks().is_empty());
    if let Ok(Some(lease)) = deadline(late).await.unwrap() {
        lease.check().unwrap_err();
    }
    assert!(deadline(super::client(&store).pools().lookup("p")).await.unwrap().is_none());
}

/// The next attempt would follow after minutes.
#[tokio::test]
async fn a_close_ends_the_wait_for_a_lease_of_a_pool() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let memory = Client::memory_builder().manual_clock(&crate::ManualClock::new());
    let memory = memory.build().unwrap();
    // In memory only clones share a pool, so the close also ends the holder's lease.
    for (here, there) in [(here, there), (memory.clone(), memory)] {
        let [ours, theirs] = [&here, &there].map(|client| {
            client.pool("p", 1).lease(MINUTES).retry(only_when_notified()).build().unwrap()
        });
        let held = deadline(theirs.acquire("holder")).await.unwrap();
        let waiter = tokio::spawn(async move { ours.acquire("waiter").await });
        tokio::time::sleep(AT_ONCE).await;
        assert!(!waiter.is_finished(), "the other client holds the lease");
        let (took, closed) = timed(here.close()).await;
        closed.unwrap();
        let error = deadline(waiter).await.unwrap().map(drop).unwrap_err();
        assert!(matches!(error, Error::Closed), "{error}");
        assert!(took < AT_ONCE, "it took {took:?}");
        drop(held);
    }
}

/// Its client can tell a reply that was lost from a claim that is refused, and the others cannot.
#[tokio::test]
async fn a_waiter_that_misses_its_wake_up_costs_others_no_more_than_the_time_to_claim() {
    // More than the second after which every waiter queries by itself.
    let claim = Duration::from_millis(1500);
    let store = Simulated::default();
    store.world().confirm_within = Some(Span::from_duration(claim));
    let clients = [client(&store), client(&store), client(&store)];
    let semaphores =
        clients.each_ref().map(|client| client.semaphore("s", 1).lease(MINUTES).build().unwrap());
    let held = deadline(semaphores[0].acquire()).await.unwrap();
    let _missing = tokio::spawn(semaphores[1].acquire());
    eventually(async || store.world().count("s") == (1, 1)).await;
    let waiter = tokio::spawn(semaphores[2].acquire());
    eventually(async || store.world().count("s") == (1, 2)).await;
    store.world().lose_wake_ups = 1;
    store.world().mute.push(clients[1].id());
    assert!(deadline(held.release()).await.unwrap());
    let (took, permit) = timed(waiter).await;
    permit.unwrap().unwrap().check().unwrap();
    // At the end of the time to claim, a query follows after 20 ms and a random delay of up to 100 ms.
    let latest = claim + Duration::from_millis(120) + AT_ONCE;
    assert!(took + AT_ONCE >= claim && took < latest, "it took {took:?}");
}

#[tokio::test]
async fn a_thousand_waiters_hardly_send_anything() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let [ours, theirs] =
        [&here, &there].map(|client| client.semaphore("s", 1).lease(MINUTES).build().unwrap());
    let held = deadline(theirs.acquire()).await.unwrap();
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        waiters.spawn(ours.acquire());
    }
    eventually(async || store.world().count("s") == (1, 1000)).await;
    let before = store.world().asked.len();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let sent = store.world().asked.len() - before;
    assert!((50..=80).contains(&sent), "{sent} commands in a minute");
    assert!(deadline(held.release()).await.unwrap());
    deadline(waiters.join_next()).await.unwrap().unwrap().unwrap().check().unwrap();
}

#[tokio::test]
async fn waiting_for_a_lock_sends_nothing() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let held = deadline(lock(&there).acquire()).await.unwrap();
    let waiters = [(); 2].map(|()| {
        let lock = lock(&here);
        tokio::spawn(async move { lock.acquire().await.unwrap().release().await.unwrap() })
    });
    tokio::time::sleep(AT_ONCE).await;
    let before = store.world().requests.len();
    tokio::time::sleep(MINUTES / 4).await;
    assert_eq!(store.world().requests.len(), before, "nothing happened");
    assert!(deadline(held.release()).await.unwrap());
    for waiter in waiters {
        assert!(deadline(waiter).await.unwrap());
    }
}
