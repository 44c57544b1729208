//! Leases: they are renewed, they expire, and their holders are notified.

use std::time::{Duration, Instant};

use leasehold::{Client, Error, LossReason, Semaphore};

use super::{
    SHORT, Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, unique,
};
use crate::wait::{deadline, eventually};

/// How much earlier than the store a holder may consider its permit lost.
const MARGIN: Duration = Duration::from_millis(150);

fn with_ttl(client: &Client, name: &str, capacity: u32) -> Semaphore {
    client.semaphore(name, capacity).ttl(SHORT).build().unwrap()
}

pub async fn a_permit_ends_with_its_ttl_and_is_granted_to_the_next_waiter(store: &impl Store) {
    let (client, name) = (store.client().await, unique("ttl"));
    let semaphore = with_ttl(&client, &name, 1);
    let begun = Instant::now();
    let permit = acquire(&semaphore).await;
    let lost = tokio::spawn(permit.lost());
    permit.check().unwrap();
    let waiter = Waiter::join(&declare(&client, &name, 1)).await;
    let queued = Instant::now();

    let next = waiter.permit().await;
    // The next holder gets the permit only after the previous one considers it lost.
    let error = permit.check().unwrap_err();
    assert!(begun.elapsed() + MARGIN >= SHORT, "granted after {:?}", begun.elapsed());
    assert!(matches!(error, Error::Lost { reason: LossReason::TtlEnded, .. }), "{error}");
    assert_eq!(deadline(lost).await.unwrap(), LossReason::TtlEnded);
    assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
    assert!(next.fence() > permit.fence());
    let least = SHORT.saturating_sub(MARGIN + (queued - begun));
    assert!(next.waited() >= least, "{:?} is less than {least:?}", next.waited());
    assert!(next.waited() <= begun.elapsed());

    // Releasing the lost permit does nothing, and does not release the permit of the next holder.
    assert!(!release(permit).await);
    next.check().unwrap();
    assert!(release(next).await);
    all_are_free(&semaphore).await;
}

pub async fn a_permit_that_was_waited_for_has_its_whole_ttl(store: &impl Store) {
    let (client, name) = (store.client().await, unique("ttl after waiting"));
    let held = acquire(&declare(&client, &name, 1)).await;
    let semaphore = with_ttl(&client, &name, 1);
    let waiter = Waiter::join(&semaphore).await;
    // The time spent waiting does not count.
    deadline(semaphore.acquire().within(SHORT)).await.unwrap_err();
    let begun = Instant::now();
    release(held).await;
    let permit = waiter.permit().await;
    assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
    assert!(begun.elapsed() + MARGIN >= SHORT, "lost after {:?}", begun.elapsed());
    all_are_free(&semaphore).await;
}

pub async fn a_detached_permit_ends_with_its_ttl(store: &impl Store) {
    let (client, name) = (store.client().await, unique("detached ttl"));
    let semaphore = with_ttl(&client, &name, 1);
    let id = acquire(&semaphore).await.detach();
    let next = acquire(&declare(&client, &name, 1)).await;
    assert!(!deadline(semaphore.release(&id)).await.unwrap());
    assert!(release(next).await);
    all_are_free(&semaphore).await;
}

pub async fn all_futures_of_a_loss_resolve(store: &impl Store) {
    let semaphore = with_ttl(&store.client().await, &unique("told"), 1);
    let permit = acquire(&semaphore).await;
    let forgotten = permit.lost();
    let watchers: Vec<_> = (0..3).map(|_| tokio::spawn(permit.lost())).collect();
    drop(forgotten);
    for lost in watchers {
        assert_eq!(deadline(lost).await.unwrap(), LossReason::TtlEnded);
    }
    // The guard still exists, but its permit has expired.
    eventually(async || held_and_waiting(&semaphore).await == (0, 0)).await;
    drop(permit);
    all_are_free(&semaphore).await;
}

pub async fn a_permit_knows_until_when_it_is_valid(store: &impl Store) {
    let semaphore = with_ttl(&store.client().await, &unique("valid"), 1);
    let permit = acquire(&semaphore).await;
    let until = permit.valid_until().expect("it ends with its TTL");
    assert!(until > Instant::now());
    assert!(until <= Instant::now() + SHORT);

    deadline(permit.lost()).await;
    assert!(Instant::now() + MARGIN >= until, "lost too early");
    assert!(permit.valid_until().is_some_and(|until| until <= Instant::now()));
}

pub async fn a_holder_and_a_waiter_outlive_their_heartbeats(store: &impl Store) {
    let (client, name) = (store.client().await, unique("heartbeats"));
    let heartbeat = Duration::from_millis(900);
    let semaphore = client.semaphore(&name, 1).lease(heartbeat).build().unwrap();
    let held = acquire(&semaphore).await;
    let patient = Waiter::join(&semaphore).await;

    // Long enough for a holder or waiter that is not renewed to expire.
    deadline(semaphore.acquire().within(heartbeat * 4)).await.unwrap_err();
    held.check().unwrap();
    assert_eq!(deadline(semaphore.position(&patient.id)).await.unwrap(), Some(0));
    assert!(release(held).await);
    drop(patient.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn renewals_do_not_extend_a_ttl(store: &impl Store) {
    let (client, name) = (store.client().await, unique("renewed"));
    // Long enough that a machine that pauses for half a second loses no renewal.
    let (heartbeat, ttl) = (Duration::from_millis(900), Duration::from_millis(2500));
    let builder = client.semaphore(&name, 1).lease(heartbeat).ttl(ttl);
    let semaphore = builder.build().unwrap();
    let begun = Instant::now();
    let permit = acquire(&semaphore).await;
    let granted = Instant::now();
    assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
    assert!(begun.elapsed() + MARGIN >= ttl, "lost after {:?}", begun.elapsed());
    // Generous: the machine that runs the tests may be busy, but not for as long as one more TTL.
    assert!(granted.elapsed() < ttl * 2, "lost after {:?}", granted.elapsed());
}
