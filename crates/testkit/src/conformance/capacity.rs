//! Capacities change while permits are held.

use super::{
    Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, try_acquire, unique,
};
use crate::wait::deadline;

pub async fn the_newest_capacity_wins(store: &impl Store) {
    let (client, name) = (store.client().await, unique("newest"));
    let old = declare(&client, &name, 1);
    let first = acquire(&old).await;
    let new = declare(&client, &name, 2);
    assert_eq!((old.capacity(), new.capacity()), (2, 2));

    // The new capacity also applies to the handle that declared the old one.
    let second = try_acquire(&old).await.expect("there are two now");
    assert!(try_acquire(&new).await.is_none());
    assert_eq!(deadline(old.stats()).await.unwrap().capacity, 2);
    drop((first, second));
    all_are_free(&old).await;
}

pub async fn shrinking_drains(store: &impl Store) {
    let (client, name) = (store.client().await, unique("shrinking"));
    let wide = declare(&client, &name, 3);
    let mut held = vec![acquire(&wide).await, acquire(&wide).await, acquire(&wide).await];
    let narrow = declare(&client, &name, 1);
    let waiter = Waiter::join(&narrow).await;
    let stats = deadline(narrow.stats()).await.unwrap();
    assert_eq!((stats.capacity, stats.held), (1, 3), "no holder loses its permit");

    while let Some(permit) = held.pop() {
        permit.check().unwrap();
        assert!(try_acquire(&narrow).await.is_none(), "{} still hold", held.len() + 1);
        assert_eq!(held_and_waiting(&narrow).await.1, 1);
        assert!(release(permit).await);
    }
    let permit = waiter.permit().await;
    assert_eq!(held_and_waiting(&narrow).await, (1, 0));
    assert!(try_acquire(&narrow).await.is_none());
    release(permit).await;
    all_are_free(&narrow).await;
}

pub async fn growing_lets_waiters_in_before_newcomers(store: &impl Store) {
    let (client, name) = (store.client().await, unique("growing"));
    let narrow = declare(&client, &name, 1);
    let held = acquire(&narrow).await;
    let first = Waiter::join(&narrow).await;
    let second = Waiter::join(&narrow).await;

    let wide = declare(&client, &name, 3);
    let newcomer = Waiter::join(&wide).await;
    let permits = [first.permit().await, second.permit().await];
    assert_eq!(held_and_waiting(&wide).await, (3, 1));
    release(held).await;
    drop((newcomer.permit().await, permits));
    all_are_free(&wide).await;
}

pub async fn clients_need_not_agree_on_a_capacity(store: &impl Store) {
    let name = unique("disagreeing");
    let here = declare(&store.client().await, &name, 1);
    let first = acquire(&here).await;
    let there = declare(&store.client().await, &name, 2);
    let second = acquire(&there).await;
    assert_eq!(held_and_waiting(&here).await, (2, 0));
    drop((first, second));
    all_are_free(&there).await;
}
