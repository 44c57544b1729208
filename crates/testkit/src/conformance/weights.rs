//! Permits that weigh more than one unit, and permits with numbers.

use leasehold::{Error, Permit, Semaphore, WaitsFor};

use super::{
    SHORT, Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, semaphore,
    try_acquire, unique,
};
use crate::wait::{deadline, eventually};

async fn units(semaphore: &Semaphore) -> (u32, u32) {
    let stats = deadline(semaphore.stats()).await.unwrap();
    (stats.held_units, stats.held)
}

async fn waits_for(semaphore: &Semaphore) -> Option<WaitsFor> {
    deadline(semaphore.stats()).await.unwrap().waits_for
}

pub async fn a_permit_takes_as_many_units_as_it_weighs(store: &impl Store) {
    let semaphore = semaphore(store, "weighed", 5).await;
    let heavy = deadline(semaphore.acquire().weight(3)).await.unwrap();
    assert_eq!(units(&semaphore).await, (3, 1));
    assert!(deadline(semaphore.try_acquire().weight(3)).await.unwrap().is_none());
    let light = deadline(semaphore.try_acquire().weight(2)).await.unwrap().expect("2 are free");
    assert!(try_acquire(&semaphore).await.is_none());
    assert_eq!(units(&semaphore).await, (5, 2));
    assert!(light.fence() > heavy.fence(), "one fence each");
    let stats = deadline(semaphore.stats()).await.unwrap();
    assert_eq!(stats.holders.iter().map(|one| one.weight).collect::<Vec<_>>(), [3, 2]);
    assert!((stats.percent() - 100.0).abs() < 0.1);

    assert!(release(heavy).await);
    assert_eq!(units(&semaphore).await, (2, 1));
    drop(deadline(semaphore.acquire().weight(3)).await.unwrap());
    drop(light);
    all_are_free(&semaphore).await;
}

pub async fn units_may_be_many(store: &impl Store) {
    let semaphore = semaphore(store, "megabytes", u32::MAX).await;
    let most = deadline(semaphore.acquire().weight(u32::MAX - 1)).await.unwrap();
    let last = acquire(&semaphore).await;
    assert!(try_acquire(&semaphore).await.is_none());
    assert_eq!(units(&semaphore).await, (u32::MAX, 2));
    drop((most, last));
    let all = deadline(semaphore.acquire().weight(u32::MAX)).await.unwrap();
    drop(all);
    eventually(async || held_and_waiting(&semaphore).await == (0, 0)).await;
}

pub async fn no_waiter_overtakes_a_heavy_one(store: &impl Store) {
    let semaphore = semaphore(store, "heavy", 3).await;
    let held = [acquire(&semaphore).await, acquire(&semaphore).await];
    let heavy = Waiter::join_with(&semaphore, semaphore.acquire().weight(3)).await;
    assert_eq!(waits_for(&semaphore).await, Some(WaitsFor::Room));
    assert!(try_acquire(&semaphore).await.is_none(), "the free unit is not for a later acquire");
    let light = Waiter::join(&semaphore).await;
    let [first, second] = held;
    release(first).await;
    assert_eq!(held_and_waiting(&semaphore).await, (1, 2));
    release(second).await;
    let heavy = heavy.permit().await;
    assert_eq!(held_and_waiting(&semaphore).await, (1, 1));
    release(heavy).await;
    drop(light.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn a_cancelled_heavy_waiter_lets_light_ones_in(store: &impl Store) {
    let semaphore = semaphore(store, "gives up", 2).await;
    let held = acquire(&semaphore).await;
    let heavy = Waiter::join_with(&semaphore, semaphore.acquire().weight(2)).await;
    let light = Waiter::join(&semaphore).await;
    heavy.leave().await;
    drop((light.permit().await, held));
    all_are_free(&semaphore).await;
}

pub async fn a_weight_above_the_capacity_is_refused_at_once(store: &impl Store) {
    let semaphore = semaphore(store, "too heavy", 2).await;
    let held = acquire(&semaphore).await;
    for error in [
        deadline(semaphore.acquire().weight(3)).await.unwrap_err(),
        deadline(semaphore.try_acquire().weight(3)).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::TooHeavy { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("the weight is 3") && text.contains('2'), "{text}");
    }
    // A refused acquire declares nothing.
    let narrow = declare(&store.client().await, semaphore.name(), 1);
    let error = deadline(narrow.acquire().weight(2)).await.unwrap_err();
    assert!(error.to_string().contains("the weight is 2"), "{error}");
    assert_eq!(deadline(semaphore.stats()).await.unwrap().capacity, 2);
    let error = deadline(semaphore.acquire().weight(0)).await.unwrap_err();
    assert!(error.to_string().contains("weight: it is 0"), "{error}");
    assert_eq!(held_and_waiting(&semaphore).await, (1, 0));
    drop(held);
    all_are_free(&semaphore).await;
}

pub async fn a_limit_that_shrinks_below_a_weight_lets_it_wait(store: &impl Store) {
    let semaphore = semaphore(store, "shrinks", 3).await;
    let held = acquire(&semaphore).await;
    let heavy = Waiter::join_with(&semaphore, semaphore.acquire().weight(3)).await;
    deadline(semaphore.set_capacity(2)).await.unwrap();
    release(held).await;
    assert_eq!(held_and_waiting(&semaphore).await, (0, 1));
    assert_eq!(waits_for(&semaphore).await, Some(WaitsFor::Capacity));
    deadline(semaphore.set_capacity(3)).await.unwrap();
    drop(heavy.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn weights_and_limits_compose(store: &impl Store) {
    let semaphore = semaphore(store, "composed", 4).await;
    let answer = semaphore.acquire().weight(3).within(SHORT).with(async |_| {
        let late = semaphore.acquire().weight(2).within(SHORT).with(async |_| ()).await;
        (units(&semaphore).await, late)
    });
    let (units, late) = deadline(answer).await.unwrap();
    assert_eq!(units, (3, 1));
    assert!(matches!(late, Err(Error::TimedOut { .. })), "{late:?}");
    all_are_free(&semaphore).await;
}

pub async fn slot_numbers_are_the_lowest_that_are_free(store: &impl Store) {
    let name = unique("numbered");
    let numbered =
        || async { store.client().await.semaphore(&name, 3).numbered().build().unwrap() };
    let (here, there) = (numbered().await, numbered().await);
    let mut held = [acquire(&here).await, acquire(&there).await, acquire(&here).await];
    assert_eq!(held.each_ref().map(Permit::slot_number), [Some(1), Some(2), Some(3)]);
    let waiter = Waiter::join(&there).await;
    let [first, second, _] = &mut held;
    release(std::mem::replace(second, {
        // Another name has numbers of its own.
        let other = store.client().await.semaphore(&unique("other"), 1).numbered().build();
        acquire(&other.unwrap()).await
    }))
    .await;
    let next = waiter.permit().await;
    assert_eq!(next.slot_number(), Some(2), "while 1 and 3 are held");
    assert_eq!((first.slot_number(), second.slot_number()), (Some(1), Some(1)));
    let stats = deadline(here.stats()).await.unwrap();
    let mut slots: Vec<_> = stats.holders.iter().map(|one| one.slot_number).collect();
    slots.sort_unstable();
    assert_eq!(slots, [Some(1), Some(2), Some(3)]);
    drop((held, next));
    all_are_free(&here).await;
}

pub async fn an_acquire_without_a_slot_number_takes_none(store: &impl Store) {
    let name = unique("mixed");
    let client = store.client().await;
    let plain = declare(&client, &name, 3);
    let numbered = client.semaphore(&name, 3).numbered().build().unwrap();
    let (without, with) = (acquire(&plain).await, acquire(&numbered).await);
    assert_eq!((without.slot_number(), with.slot_number()), (None, Some(1)));
    // After a shrink a number may be larger than the capacity, until it is released.
    let second = acquire(&numbered).await;
    drop((without, with));
    deadline(numbered.set_capacity(1)).await.unwrap();
    assert_eq!(second.slot_number(), Some(2));
    assert!(release(second).await);
    assert_eq!(acquire(&numbered).await.slot_number(), Some(1));
    all_are_free(&declare(&client, &name, 1)).await;
}
