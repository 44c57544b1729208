//! Outages: how soon a call ends that begins during one, and what happens when it ends.

use super::*;

/// Opens a client and cuts it off.
async fn cut_off(store: &Simulated, client: &Client) {
    drop(deadline(client.semaphore("first", 1).build().unwrap().acquire()).await.unwrap());
    eventually(async || store.world().count("first") == (0, 0)).await;
    store.cut(client.id());
    eventually(async || client.outage().is_some()).await;
}

#[tokio::test]
async fn a_close_does_not_wait_for_what_was_never_sent() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 1);
    cut_off(&store, &client).await;
    let mut waiting = pin!(semaphore.acquire());
    start(waiting.as_mut()).await;
    let (took, closed) = timed(client.close()).await;
    closed.unwrap();
    assert!(took < AT_ONCE, "it took {took:?}");
    assert!(matches!(waiting.await, Err(Error::Closed)));
}

/// The releases begin one after the other. How long the outage lasts afterwards must not matter to any of them.
#[tokio::test]
async fn releases_begun_during_an_outage_are_done_as_soon_as_it_ends() {
    let store = Simulated::default();
    let client = client(&store);
    let names: Vec<_> = (0..14).map(|nth| format!("name {nth}")).collect();
    let mut held = Vec::new();
    for name in &names {
        let semaphore = client.semaphore(name, 1).build().unwrap();
        held.push(deadline(semaphore.acquire()).await.unwrap());
    }
    store.cut(client.id());
    for (nth, permit) in held.into_iter().enumerate() {
        // The outage lasts for a while, and releases begin throughout it.
        tokio::time::sleep(Duration::from_millis(350)).await;
        if nth % 2 == 0 {
            drop(permit);
        } else {
            tokio::spawn(permit.release());
        }
    }
    assert!(names.iter().all(|name| store.world().count(name) == (1, 0)));
    store.heal(client.id());
    tokio::time::sleep(AT_ONCE).await;
    assert!(names.iter().all(|name| store.world().count(name) == (0, 0)));
}

#[tokio::test]
async fn a_release_that_is_awaited_during_an_outage_succeeds_as_soon_as_it_ends() {
    let store = Simulated::default();
    let client = client(&store);
    let permit = deadline(semaphore(&client, 1).acquire()).await.unwrap();
    store.cut(client.id());
    let release = tokio::spawn(permit.release());
    tokio::time::sleep(ANSWER * 2 / 3).await;
    store.heal(client.id());
    let (took, released) = timed(release).await;
    assert!(released.unwrap().unwrap(), "the permit was held until the release");
    assert!(took < AT_ONCE, "it took {took:?}");
}

/// Each waiter is granted a permit and woken, but cannot claim it. It holds for the time to claim, and is notified
/// before the store grants the permit to another client.
#[tokio::test]
async fn a_waiter_that_is_woken_just_before_an_outage_is_notified_in_time() {
    let claim = Duration::from_secs(5);
    let store = Simulated::default();
    store.world().confirm_within = Some(Span::from_duration(claim));
    let (here, there) = (client(&store), client(&store));
    let mut waiting = Vec::new();
    for nth in 0..4 {
        let name = format!("name {nth}");
        let [theirs, ours] =
            [&there, &here].map(|client| client.semaphore(&name, 1).build().unwrap());
        let held = deadline(theirs.acquire()).await.unwrap();
        let waiter = tokio::spawn(ours.acquire());
        eventually(async || store.world().count(&name) == (1, 1)).await;
        waiting.push((theirs, held, waiter));
    }
    store.world().mute.push(here.id());
    for (theirs, held, waiter) in waiting {
        assert!(deadline(held.release()).await.unwrap());
        let released = Instant::now();
        let (took, permit) = timed(waiter).await;
        let permit = permit.unwrap().expect("a wake-up is enough");
        assert!(took < AT_ONCE, "it took {took:?}");
        assert_eq!(deadline(permit.lost()).await, LossReason::NotRenewed);
        let lost = released.elapsed();
        assert!(lost > claim / 2 && lost < claim, "{lost:?}");
        drop(deadline(theirs.acquire()).await.unwrap());
        assert!(released.elapsed() >= claim);
    }
}

#[tokio::test]
async fn a_waiter_for_a_lock_outlives_an_outage() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let held = deadline(lock(&there).acquire()).await.unwrap();
    let lock = lock(&here);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    eventually(async || store.world().requests.len() == 2).await;
    store.cut(here.id());
    tokio::time::sleep(Duration::from_secs(8)).await;
    store.heal(here.id());
    assert!(deadline(held.release()).await.unwrap());
    let (took, guard) = timed(waiter).await;
    assert!(took < AT_ONCE, "it took {took:?}");
    assert!(deadline(guard.unwrap().expect("it keeps waiting").release()).await.unwrap());
}

/// However many acquires end during an outage, an acquire that was never sent needs no release.
#[tokio::test]
async fn an_acquire_that_ends_during_an_outage_was_never_sent() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 1);
    cut_off(&store, &client).await;
    let mut failing = tokio::task::JoinSet::new();
    for _ in 0..2500 {
        start(pin!(semaphore.acquire())).await;
        failing.spawn(semaphore.acquire().within(Duration::from_millis(500)));
    }
    for result in deadline(failing.join_all()).await {
        let error = result.map(drop).unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    }
    let sent_before = store.world().asked.len();
    store.heal(client.id());
    let (took, permit) = timed(semaphore.acquire()).await;
    permit.unwrap().check().unwrap();
    assert!(took < AT_ONCE, "it took {took:?}");
    let sent = store.world().asked.len() - sent_before;
    assert!(sent < 10, "{sent} commands were sent before the first new one was answered");
}

/// Callers that share an instance id share its lease, which is released with the last of them.
#[tokio::test]
async fn a_lease_is_released_with_the_last_task_that_shares_it() {
    let store = Simulated::default();
    let client = client(&store);
    let pool = client.pool("p", 5).build().unwrap();
    let held = deadline(pool.acquire("a")).await.unwrap();
    store.cut(client.id());
    let mut waiting = Box::pin(pool.acquire("a"));
    start(waiting.as_mut()).await;
    let (took, result) = timed(pool.try_acquire("a")).await;
    let error = result.map(drop).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(is_answer_time_out(took), "it took {took:?}");
    // The task that still waits shares the lease, although its request was never sent.
    assert!(deadline(held.release()).await.unwrap());
    drop(waiting);
    store.heal(client.id());
    let calls = crate::compat::lua_pool::LuaPool::new(pool);
    eventually(async || calls.count().await.is_ok_and(|count| count.current_count == 0)).await;
}

#[tokio::test]
async fn an_extension_is_bounded_while_the_lock_extends_itself() {
    let store = Simulated::default();
    let client = client(&store);
    let lock = client.lock("k").lease(Duration::from_secs(9)).build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    store.cut(client.id());
    // The automatic extension is due after a third of the lease.
    tokio::time::sleep(Duration::from_millis(3200)).await;
    let (took, extended) = timed(guard.extend(MINUTES)).await;
    extended.unwrap_err();
    assert!(is_answer_time_out(took), "it took {took:?}");
}

#[tokio::test]
async fn an_extended_lock_that_is_dropped_during_an_outage_is_released_after_it() {
    let store = Simulated::default();
    let client = client(&store);
    let lock = client.lock("k").lease(Duration::from_millis(500)).build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    deadline(guard.extend(MINUTES)).await.unwrap();
    store.cut(client.id());
    drop(guard);
    // Longer than the declared lease.
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(store.world().held_locks().len(), 1);
    store.heal(client.id());
    eventually(async || store.world().held_locks().is_empty()).await;
}
