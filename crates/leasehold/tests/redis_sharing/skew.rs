//! Their clock differs from the server's.
//!
//! They write times of their own clock: the places of their waiters, and until when their members are alive. We promise
//! that our waiters keep their order among themselves, and that ours lose neither place nor permit. This holds while
//! the skew is less than what is left of our leases (a third of the heartbeat interval) and, for a granted waiter that
//! has not claimed its permit, less than `claim_within`.

use crate::both::{Both, NAME};

#[tokio::test]
async fn theirs_that_are_ahead_take_nothing_from_ours() {
    let both = Both::start_with_skew(5.0).await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let ours = both.we_queue(&semaphore).await;
    let theirs = both.they_queue().await;
    let ours_too = both.we_queue(&semaphore).await;
    // By its place their waiter comes in five seconds. That is more than a second, so ours does not queue behind it.
    let order = [ours.id.clone(), ours_too.id.clone(), theirs.clone()];
    assert_eq!(both.members("waiting"), order);

    // They sweep by their clock, by which none of our members is dead.
    assert_eq!(both.they_wake(1).await, 0);
    assert_eq!(both.theirs.card(NAME).await.unwrap(), 1);
    assert_eq!(both.members("waiting"), order);
    permit.check().unwrap();

    permit.release().await.unwrap();
    let permit = ours.permit().await;
    permit.release().await.unwrap();
    let permit = ours_too.permit().await;
    assert_eq!(both.they_wake(1).await, 0);
    permit.release().await.unwrap();
    both.they_were_notified(&theirs).await;
    both.they_confirm(&theirs, 1).await;
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    both.theirs.release(NAME, &theirs).await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn theirs_that_are_behind_are_neither_dead_nor_able_to_take_from_ours() {
    let both = Both::start_with_skew(-5.0).await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let ours = both.we_queue(&semaphore).await;
    let ours_too = both.we_queue(&semaphore).await;
    let theirs = both.they_queue().await;
    // By its place their waiter came five seconds ago, so by their rule it is first. Ours keep their order.
    let order = [theirs.clone(), ours.id.clone(), ours_too.id.clone()];
    assert_eq!(both.members("waiting"), order);
    assert_eq!(both.they_wake(1).await, 0);

    permit.release().await.unwrap();
    both.they_were_notified(&theirs).await;
    both.they_confirm(&theirs, 1).await;
    // By the server's clock it has five seconds less, and is still alive.
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(both.members("main"), [theirs.as_str()]);
    assert_eq!(both.members("waiting"), order[1..]);

    both.theirs.release(NAME, &theirs).await.unwrap();
    ours.permit().await.release().await.unwrap();
    ours_too.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}
