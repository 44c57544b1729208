//! Limits, pins and pauses that change while permits are held and waited for.

use std::time::Duration;

use leasehold::{Error, Semaphore};

use super::{
    SHORT, Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, semaphore,
    try_acquire, unique,
};
use crate::wait::deadline;

/// A handle that declares a capacity only if there is none.
async fn as_it_is(store: &impl Store, name: &str) -> Semaphore {
    store.client().await.semaphore(name, 1).unless_declared().build().unwrap()
}

async fn capacity(semaphore: &Semaphore) -> u32 {
    deadline(semaphore.stats()).await.unwrap().capacity
}

fn assert_refused(result: Result<(), Error>, says: &[&str]) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    for part in says {
        assert!(error.to_string().contains(part), "{error} does not say {part:?}");
    }
}

fn assert_unknown(result: Result<(), Error>, unknown: &str) {
    let error = result.unwrap_err();
    assert!(error.to_string().contains("was never used"), "{error}");
    assert!(matches!(&error, Error::Unknown { name, .. } if name == unknown), "{error:?}");
}

fn assert_in_use(result: Result<(), Error>, holding: u32, queued: usize) {
    let error = result.unwrap_err();
    let says = format!(" is in use: {holding} held, {queued} waiting: drain it first");
    assert!(error.to_string().contains(&says), "{error}");
    let Error::InUse { held, waiting, .. } = error else { panic!("{error}") };
    assert_eq!((held, waiting), (holding, queued));
}

pub async fn a_limit_that_grows_lets_waiters_in_at_once(store: &impl Store) {
    let narrow = semaphore(store, "grows", 1).await;
    let held = acquire(&narrow).await;
    let waiters = [Waiter::join(&narrow).await, Waiter::join(&narrow).await];
    let last = Waiter::join(&narrow).await;
    // Any client that knows the name may change the capacity.
    deadline(as_it_is(store, narrow.name()).await.set_capacity(3)).await.unwrap();
    for waiter in waiters {
        let _ = waiter.permit().await.detach();
    }
    assert_eq!(held_and_waiting(&narrow).await, (3, 1));
    release(held).await;
    drop(last.permit().await);
    deadline(narrow.set_capacity(1)).await.unwrap();
    assert_eq!((capacity(&narrow).await, narrow.capacity()), (1, 1));
    let stats = deadline(narrow.stats()).await.unwrap();
    for holder in &stats.holders {
        assert!(deadline(narrow.release_member(&holder.id)).await.unwrap(), "a holder was evicted");
    }
    all_are_free(&narrow).await;
}

pub async fn an_acquire_that_declares_nothing_new_changes_nothing(store: &impl Store) {
    let here = semaphore(store, "old news", 3).await;
    drop(acquire(&here).await);
    deadline(as_it_is(store, here.name()).await.set_capacity(1)).await.unwrap();
    let held = acquire(&here).await;
    assert!(try_acquire(&here).await.is_none(), "the acquire has declared 3 again");
    assert_eq!(capacity(&here).await, 1);
    drop(held);
    deadline(here.set_capacity(3)).await.unwrap();
    all_are_free(&here).await;
}

pub async fn an_undeclared_capacity_changes_nothing(store: &impl Store) {
    let name = unique("as it is");
    let first = as_it_is(store, &name).await;
    drop(acquire(&first).await);
    assert_eq!(capacity(&first).await, 1, "that of the handle, because there was none");
    let wide = declare(&store.client().await, &name, 3);
    drop(acquire(&wide).await);
    let client = store.client().await;
    let held = acquire(&client.semaphore(&name, 1).unless_declared().build().unwrap()).await;
    assert_eq!(capacity(&wide).await, 3);
    drop(held);
    // The same client may declare a capacity after a handle that declared none.
    drop(acquire(&declare(&client, &name, 1)).await);
    assert_eq!(capacity(&wide).await, 1);
    all_are_free(&declare(&client, &name, 1)).await;
}

pub async fn a_pin_overrides_declared_capacities(store: &impl Store) {
    let name = unique("pinned");
    let here = declare(&store.client().await, &name, 1);
    let held = acquire(&here).await;
    let waiter = Waiter::join(&here).await;
    deadline(here.pin(2)).await.unwrap();
    let second = waiter.permit().await;

    let there = declare(&store.client().await, &name, 5);
    assert!(try_acquire(&there).await.is_none(), "5 are declared, and 2 are pinned");
    let stats = deadline(there.stats()).await.unwrap();
    assert_eq!((stats.capacity, stats.declared, stats.pinned), (2, 5, Some(2)));
    let error = deadline(there.set_capacity(4)).await.unwrap_err();
    assert!(error.to_string().contains("is pinned to 2: unpin it"), "{error}");
    let Error::Pinned { name: pinned, capacity, .. } = error else { panic!("{error}") };
    assert_eq!((&*pinned, capacity), (&*name, 2));

    let next = Waiter::join(&there).await;
    deadline(there.unpin()).await.unwrap();
    drop((next.permit().await, held, second));
    let stats = deadline(there.stats()).await.unwrap();
    assert_eq!((stats.capacity, stats.pinned), (5, None));
    deadline(there.unpin()).await.unwrap();
    all_are_free(&there).await;
}

pub async fn limits_can_be_read_without_the_holders(store: &impl Store) {
    let name = unique("limits");
    let here = declare(&store.client().await, &name, 3);
    let unused = deadline(here.limits()).await.unwrap();
    assert_eq!((unused.capacity, unused.pinned), (3, None), "its own, because there was none");
    assert!(unused.paused.is_none() && unused.rate.is_none());

    let held = acquire(&here).await;
    let there = as_it_is(store, &name).await;
    assert_eq!(deadline(there.limits()).await.unwrap(), unused);
    deadline(here.pin(5)).await.unwrap();
    deadline(here.set_rate(2, Duration::from_secs(60), 2)).await.unwrap();
    deadline(here.pause().by("an operator").reason("a move").into_future()).await.unwrap();
    let limits = deadline(there.limits()).await.unwrap();
    let stats = deadline(there.stats()).await.unwrap();
    assert_eq!((limits.capacity, limits.pinned, limits.rate), (5, Some(5), stats.rate));
    assert!(limits.rate.is_some());
    let paused = limits.paused.expect("it is paused");
    assert_eq!((&*paused.by, paused.reason.as_deref()), ("an operator", Some("a move")));

    deadline(here.resume()).await.unwrap();
    deadline(here.clear_rate()).await.unwrap();
    deadline(here.unpin()).await.unwrap();
    assert_eq!(deadline(there.limits()).await.unwrap(), unused);
    drop(held);
    all_are_free(&here).await;
}

pub async fn limits_can_be_set_before_the_first_use(store: &impl Store) {
    let name = unique("limited first");
    let operator = as_it_is(store, &name).await;
    deadline(operator.set_capacity(2)).await.unwrap();
    let there = as_it_is(store, &name).await;
    let held = [acquire(&there).await, acquire(&there).await];
    assert!(try_acquire(&there).await.is_none(), "2 are declared");
    drop(held);
    all_are_free(&declare(&store.client().await, &name, 2)).await;

    let name = unique("pinned first");
    let operator = as_it_is(store, &name).await;
    deadline(operator.pin(1)).await.unwrap();
    let stats = deadline(operator.stats()).await.unwrap();
    assert_eq!((stats.capacity, stats.declared, stats.pinned), (1, 0, Some(1)));
    let there = declare(&store.client().await, &name, 3);
    let held = acquire(&there).await;
    assert!(try_acquire(&there).await.is_none(), "1 is pinned");
    let stats = deadline(operator.stats()).await.unwrap();
    assert_eq!((stats.capacity, stats.declared, stats.pinned), (1, 3, Some(1)));
    drop(held);
    deadline(operator.unpin()).await.unwrap();
    assert_eq!(capacity(&there).await, 3);
    all_are_free(&there).await;

    let name = unique("paused first");
    let client = store.client().await;
    let operator = client.semaphore(&name, 1).unless_declared().build().unwrap();
    deadline(operator.pause().by("an operator").into_future()).await.unwrap();
    let listed = deadline(client.stats().unused().limit(usize::MAX)).await.unwrap();
    let listed = listed.iter().find(|one| one.name == name).expect("a paused name is listed");
    assert_eq!(listed.capacity, 0);
    assert_eq!(listed.paused.as_ref().unwrap().by, "an operator");
    let there = declare(&store.client().await, &name, 1);
    let waiter = Waiter::join(&there).await;
    deadline(operator.resume()).await.unwrap();
    drop(waiter.permit().await);
    all_are_free(&there).await;

    // What was set before the first use can be removed before it.
    let operator = as_it_is(store, &unique("never used")).await;
    assert_unknown(deadline(operator.resume()).await, operator.name());
    assert_unknown(deadline(operator.unpin()).await, operator.name());
    assert_unknown(deadline(operator.forget()).await, operator.name());
    deadline(operator.set_rate(1, Duration::from_secs(3600), 1)).await.unwrap();
    deadline(operator.pin(4)).await.unwrap();
    deadline(operator.unpin()).await.unwrap();
    assert_eq!(deadline(operator.stats()).await.unwrap().pinned, None);
    drop(acquire(&operator).await);
    assert!(try_acquire(&operator).await.is_none(), "the rate allows one start in an hour");
    assert_eq!(capacity(&operator).await, 1, "that of the acquire");
    deadline(operator.forget()).await.unwrap();
}

pub async fn a_pin_and_a_pause_outlive_all_holders_and_waiters(store: &impl Store) {
    let name = unique("stays");
    {
        let semaphore = declare(&store.client().await, &name, 3);
        drop(acquire(&semaphore).await);
        deadline(semaphore.pin(1)).await.unwrap();
        deadline(semaphore.pause().into_future()).await.unwrap();
    }
    let semaphore = declare(&store.client().await, &name, 3);
    assert!(try_acquire(&semaphore).await.is_none(), "the pause was lost");
    deadline(semaphore.resume()).await.unwrap();
    let held = acquire(&semaphore).await;
    assert!(try_acquire(&semaphore).await.is_none(), "the pin was lost");
    drop(held);
    deadline(semaphore.unpin()).await.unwrap();
    all_are_free(&semaphore).await;
}

pub async fn during_a_pause_nothing_is_granted_and_places_are_kept(store: &impl Store) {
    let semaphore = semaphore(store, "paused", 2).await;
    let held = acquire(&semaphore).await;
    let pause = semaphore.pause().by("an operator").reason("a move");
    deadline(pause.into_future()).await.unwrap();
    held.check().unwrap();
    assert!(try_acquire(&semaphore).await.is_none());
    assert!(deadline(semaphore.locked()).await.unwrap());
    let first = Waiter::join(&semaphore).await;
    let second = Waiter::join(&semaphore).await;
    let third = Waiter::join(&semaphore).await;
    assert!(release(held).await);
    assert_eq!(held_and_waiting(&semaphore).await, (0, 3));

    let stats = deadline(semaphore.stats()).await.unwrap();
    let paused = stats.paused.expect("it is paused");
    assert_eq!((&*paused.by, paused.reason.as_deref()), ("an operator", Some("a move")));
    assert!(paused.lasts < Duration::from_secs(60), "{:?}", paused.lasts);
    // A second pause replaces the author and the reason.
    deadline(semaphore.pause().by("another").into_future()).await.unwrap();
    let stats = deadline(semaphore.stats()).await.unwrap();
    let again = stats.paused.expect("it is paused");
    assert_eq!((&*again.by, again.reason.as_deref()), ("another", None));
    assert!(again.lasts >= paused.lasts, "the second pause restarted the time");

    deadline(semaphore.resume()).await.unwrap();
    let permits = [first.permit().await, second.permit().await];
    assert_eq!(deadline(semaphore.position(&third.id)).await.unwrap(), Some(0));
    assert!(deadline(semaphore.stats()).await.unwrap().paused.is_none());
    drop(permits);
    drop(third.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn a_drain_waits_until_nobody_holds(store: &impl Store) {
    let semaphore = semaphore(store, "drained", 2).await;
    let held = acquire(&semaphore).await;
    let late = deadline(semaphore.drain().reason("a move").within(SHORT).into_future()).await;
    let error = late.unwrap_err();
    assert!(matches!(error, Error::NotDrained { limit: SHORT, .. }), "{error}");
    assert!(try_acquire(&semaphore).await.is_none(), "it stays paused");
    let drain = tokio::spawn(semaphore.drain().into_future());
    let waiter = Waiter::join(&semaphore).await;
    assert!(release(held).await);
    deadline(drain).await.unwrap().unwrap();
    assert_eq!(held_and_waiting(&semaphore).await, (0, 1));
    deadline(semaphore.resume()).await.unwrap();
    drop(waiter.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn a_forgotten_name_starts_anew(store: &impl Store) {
    let name = unique("forgotten");
    let semaphore = declare(&store.client().await, &name, 3);
    let held = acquire(&semaphore).await;
    assert_in_use(deadline(semaphore.forget()).await, 1, 0);
    held.check().unwrap();
    deadline(semaphore.pin(2)).await.unwrap();
    deadline(semaphore.pause().into_future()).await.unwrap();
    let waiter = Waiter::join(&semaphore).await;
    assert!(release(held).await);
    assert_in_use(deadline(semaphore.forget()).await, 0, 1);
    waiter.leave().await;
    crate::wait::eventually(async || semaphore.forget().await.is_ok()).await;
    let listed = deadline(store.client().await.stats().names([&name]).unused()).await;
    assert!(listed.unwrap().iter().all(|one| one.capacity == 0), "it is still known");

    let other = as_it_is(store, &name).await;
    assert_unknown(deadline(other.forget()).await, &name);
    drop(acquire(&other).await);
    let stats = deadline(other.stats()).await.unwrap();
    assert!(stats.pinned.is_none() && stats.paused.is_none());
    all_are_free(&other).await;
}

pub async fn the_first_change_declares_the_capacity_of_its_handle(store: &impl Store) {
    let semaphore = declare(&store.client().await, &unique("unknown"), 3);
    deadline(semaphore.pin(1)).await.unwrap();
    let stats = deadline(semaphore.stats()).await.unwrap();
    assert_eq!((stats.declared, stats.pinned), (3, Some(1)));
    deadline(semaphore.unpin()).await.unwrap();
    all_are_free(&semaphore).await;
}

pub async fn limits_that_cannot_be_are_refused(store: &impl Store) {
    let semaphore = semaphore(store, "impossible", 1).await;
    assert_refused(deadline(semaphore.set_capacity(0)).await, &["capacity", "0", "pause"]);
    assert_refused(deadline(semaphore.pin(0)).await, &["capacity", "0", "pause"]);
    let pause = || semaphore.pause();
    assert_refused(deadline(pause().reason("bell\u{7}").into_future()).await, &["reason", "bell"]);
    assert_refused(deadline(pause().by("").into_future()).await, &["by", "empty"]);
    let drain = semaphore.drain().within(Duration::ZERO).into_future();
    assert_refused(deadline(drain).await, &["within", "longer than zero"]);
    all_are_free(&semaphore).await;
}
