//! Permits that are granted no more often than a rate allows.

use std::time::{Duration, Instant};

use leasehold::{Error, Semaphore, WaitsFor};

use super::{
    Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, try_acquire, unique,
};
use crate::wait::{deadline, eventually};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

async fn rated(store: &impl Store, name: &str, starts: u64, period: Duration) -> Semaphore {
    store.client().await.semaphore(name, 5).rate(starts, period).build().unwrap()
}

/// Fails unless everything is released. The rate forbids acquiring all permits at once, which [`all_are_free`] does.
async fn nobody_is_left(semaphore: &Semaphore) {
    eventually(async || held_and_waiting(semaphore).await == (0, 0)).await;
}

pub async fn a_start_needs_room_and_a_token(store: &impl Store) {
    let name = unique("rated");
    let client = store.client().await;
    let semaphore = client.semaphore(&name, 3).rate(2, HOUR).burst(2).build().unwrap();
    let first = acquire(&semaphore).await;
    let second = acquire(&semaphore).await;
    assert!(try_acquire(&semaphore).await.is_none(), "there is room, and no token");
    assert!(deadline(semaphore.locked()).await.unwrap());
    drop((first, second));
    nobody_is_left(&semaphore).await;
    assert!(try_acquire(&semaphore).await.is_none(), "it counts starts, not holders");

    // A client that declares no rate is held to the existing one.
    let there = declare(&store.client().await, &name, 3);
    assert!(try_acquire(&there).await.is_none());
    let waiter = Waiter::join(&there).await;
    let stats = deadline(there.stats()).await.unwrap();
    assert_eq!(stats.waits_for, Some(WaitsFor::Rate));
    let rate = stats.rate.expect("there is a rate");
    assert_eq!((rate.starts, rate.period, rate.burst), (2, HOUR, 2));
    assert_eq!((rate.interval(), rate.to_string()), (HOUR, "2 per hour, burst 2".to_owned()));
    let next = stats.next_token.expect("there is no token");
    assert!(next + 60 * SECOND > HOUR && next <= HOUR, "{next:?}");
    // The rate applies until it is removed.
    deadline(there.clear_rate()).await.unwrap();
    drop(waiter.permit().await);
    assert!(deadline(semaphore.stats()).await.unwrap().rate.is_none());
    drop(acquire(&semaphore).await);
    all_are_free(&semaphore).await;
}

pub async fn starts_are_as_far_apart_as_the_rate_says(store: &impl Store) {
    let name = unique("spread");
    let interval = SECOND / 25;
    // Two clients take turns: the client of the first waiter asks for the token.
    let both = [rated(store, &name, 25, SECOND).await, rated(store, &name, 25, SECOND).await];
    let begun = Instant::now();
    let mut waiters = Vec::new();
    for number in 0..8_usize {
        waiters.push(tokio::spawn(both[number % 2].acquire()));
    }
    for waiter in waiters {
        release(deadline(waiter).await.unwrap().unwrap()).await;
    }
    assert!(begun.elapsed() >= 7 * interval, "{:?}", begun.elapsed());
    assert!(begun.elapsed() < 20 * SECOND, "{:?}", begun.elapsed());
    nobody_is_left(&both[0]).await;
}

pub async fn no_period_has_more_starts_than_the_rate_says(store: &impl Store) {
    let (count, name) = (20, unique("any period"));
    let semaphore = store.client().await.semaphore(&name, 5).rate(count, SECOND).burst(5);
    let semaphore = semaphore.build().unwrap();
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for _ in 0..30 {
        sent.push(Instant::now());
        release(acquire(&semaphore).await).await;
        received.push(Instant::now());
    }
    // Each start is between the request and the answer, so all of these starts are within this time.
    let count = usize::try_from(count).unwrap();
    for (first, last) in sent.iter().zip(&received[count..]) {
        let span = last.duration_since(*first);
        assert!(span >= SECOND, "{} starts in {span:?}", count + 1);
    }
    nobody_is_left(&semaphore).await;
}

pub async fn a_change_of_the_rate_adds_no_tokens(store: &impl Store) {
    let (client, name) = (store.client().await, unique("changes"));
    let semaphore = client.semaphore(&name, 20).rate(10, HOUR).burst(5).build().unwrap();
    for _ in 0..5 {
        drop(acquire(&semaphore).await);
    }
    for _ in 0..3 {
        deadline(semaphore.set_rate(10, HOUR, 1)).await.unwrap();
        assert!(try_acquire(&semaphore).await.is_none());
        deadline(semaphore.set_rate(10, HOUR, 5)).await.unwrap();
        assert!(try_acquire(&semaphore).await.is_none());
    }
    nobody_is_left(&semaphore).await;
}

pub async fn an_acquire_that_times_out_names_the_rate(store: &impl Store) {
    let semaphore = rated(store, &unique("timed out"), 1, HOUR).await;
    drop(acquire(&semaphore).await);
    let error = deadline(semaphore.acquire().within(SECOND / 4)).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    let says = error.to_string();
    assert!(says.contains("its rate allows the next start in 359"), "{says}");
    assert!(says.contains("clear_rate"), "{says}");
    // Without a rate there is nothing to name.
    deadline(semaphore.clear_rate()).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(acquire(&semaphore).await);
    }
    let error = deadline(semaphore.acquire().within(SECOND / 4)).await.unwrap_err();
    assert!(!error.to_string().contains("rate"), "{error}");
    drop(held);
    all_are_free(&semaphore).await;
}

pub async fn weights_of_a_rate_alone_are_refused(store: &impl Store) {
    let rate = store.client().await.rate(&unique("weightless"), 1000, HOUR).build().unwrap();
    let within = rate.acquire().weight(3).within(SECOND);
    let tried = deadline(rate.try_acquire().weight(3)).await.map(|_| ());
    for refused in [deadline(within).await.map(|_| ()), tried] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("weight: it is 3"), "{error}");
    }
    drop(deadline(rate.acquire().weight(1)).await.unwrap());
    nobody_is_left(&rate).await;
}

pub async fn order_holds_at_a_rate(store: &impl Store) {
    let semaphore = rated(store, &unique("order"), 20, SECOND).await;
    drop(acquire(&semaphore).await);
    let mut waiters = Vec::new();
    for _ in 0..4 {
        waiters.push(Waiter::join(&semaphore).await);
    }
    let mut last = None;
    for waiter in waiters {
        let permit = waiter.permit().await;
        assert!(last < Some(permit.fence()));
        last = Some(permit.fence());
    }
    nobody_is_left(&semaphore).await;
}

pub async fn a_cancelled_waiter_takes_no_token(store: &impl Store) {
    let name = unique("given up");
    let semaphore = rated(store, &name, 1, 2 * SECOND).await;
    drop(acquire(&semaphore).await);
    let granted = Instant::now();
    for _ in 0..3 {
        Waiter::join(&semaphore).await.leave().await;
    }
    nobody_is_left(&semaphore).await;
    // None of the cancelled waiters has taken this token.
    drop(acquire(&rated(store, &name, 1, 2 * SECOND).await).await);
    assert!(granted.elapsed() < Duration::from_millis(3700), "{:?}", granted.elapsed());
}

pub async fn a_rate_alone_does_not_limit_holders(store: &impl Store) {
    let name = unique("alone");
    let rate = store.client().await.rate(&name, 3, HOUR).burst(3).build().unwrap();
    let held = [acquire(&rate).await, acquire(&rate).await, acquire(&rate).await];
    assert!(try_acquire(&rate).await.is_none());
    let stats = deadline(rate.stats()).await.unwrap();
    assert!(stats.is_unlimited() && stats.limited_to().is_none(), "{stats:?}");
    drop(held);
    // A capacity that another client declares applies.
    let both = store.client().await.semaphore(&name, 1).rate(3_000_000, HOUR).build();
    let held = acquire(&both.unwrap()).await;
    assert!(try_acquire(&rate).await.is_none());
    drop(held);
    nobody_is_left(&rate).await;
}

pub async fn another_rate_counts_at_once(store: &impl Store) {
    let semaphore = rated(store, &unique("another"), 1, HOUR).await;
    drop(acquire(&semaphore).await);
    let waiter = Waiter::join(&semaphore).await;
    deadline(semaphore.set_rate(1000, SECOND, 1)).await.unwrap();
    drop(waiter.permit().await);
    // An acquire does not declare the old rate again.
    drop(acquire(&semaphore).await);
    drop(acquire(&semaphore).await);
    nobody_is_left(&semaphore).await;
}

pub async fn an_acquire_keeps_the_rate_that_was_set(store: &impl Store) {
    let semaphore = rated(store, &unique("set"), 1000, SECOND).await;
    deadline(semaphore.set_rate(1, HOUR, 1)).await.unwrap();
    drop(acquire(&semaphore).await);
    assert!(try_acquire(&semaphore).await.is_none(), "it has declared what it was built with");
    deadline(semaphore.clear_rate()).await.unwrap();
    drop(acquire(&semaphore).await);
    all_are_free(&semaphore).await;
}

pub async fn rates_that_cannot_be_are_refused(store: &impl Store) {
    let (client, name) = (store.client().await, unique("impossible"));
    let semaphore = || client.semaphore(&name, 1);
    let million = 1_000_000_000_000;
    for (builder, says) in [
        (semaphore().rate(0, SECOND), ["rate: it is 0", "pause"]),
        (semaphore().rate(1, Duration::ZERO), ["rate: it is 0s", "longer than zero"]),
        (
            semaphore().rate(million, SECOND),
            ["rate: it is 1000000000000 in 1s", "10000 per second"],
        ),
        (semaphore().rate(10_001, SECOND), ["rate: it is 10001 in 1s", "10000 per second"]),
        (semaphore().rate(1, 1_000_000 * HOUR), ["rate: it is 1 in", "100 years"]),
        (semaphore().rate(1, SECOND).burst(0), ["burst: it is 0", "minimum is 1"]),
        (semaphore().burst(2), ["burst: it is 2", "there is no rate"]),
        (semaphore().rate(2, SECOND).burst(3), ["burst: it is 3", "rate is 2 in 1s"]),
        (semaphore().rate(900, 100_000 * HOUR).burst(900), ["burst of 900", "100 years"]),
    ] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        for part in says {
            assert!(error.to_string().contains(part), "{error} does not say {part:?}");
        }
    }
    let semaphore = declare(&client, &name, 1);
    drop(acquire(&semaphore).await);
    let error = deadline(semaphore.set_rate(0, SECOND, 1)).await.unwrap_err();
    assert!(error.to_string().contains("rate: it is 0"), "{error}");
    all_are_free(&semaphore).await;
}
