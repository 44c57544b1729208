//! Permits: their number, their release, and what they report.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{AcquisitionId, Error, LossReason};

use super::{
    Store, Waiter, acquire, all_are_free, declare, held_and_waiting, release, release_by_id,
    semaphore, try_acquire, unique,
};
use crate::wait::deadline;

pub async fn there_are_as_many_permits_as_the_capacity_says(store: &impl Store) {
    let semaphore = semaphore(store, "as many", 3).await;
    let mut held = vec![acquire(&semaphore).await, acquire(&semaphore).await];
    held.push(try_acquire(&semaphore).await.expect("one is free"));
    assert!(try_acquire(&semaphore).await.is_none());
    assert_eq!(held_and_waiting(&semaphore).await, (3, 0));

    assert!(release(held.swap_remove(1)).await);
    held.push(try_acquire(&semaphore).await.expect("one was released"));
    assert!(try_acquire(&semaphore).await.is_none());

    drop(held);
    all_are_free(&semaphore).await;
}

pub async fn semaphores_of_one_name_share_their_permits(store: &impl Store) {
    let (here, there, name) = (store.client().await, store.client().await, unique("shared"));
    let one = declare(&here, &name, 2);
    let same_client = declare(&here, &name, 2);
    let other_client = declare(&there, &name, 2);

    let _first = acquire(&one).await;
    let _second = acquire(&other_client).await;
    for handle in [&one, &one.clone(), &same_client, &other_client] {
        assert!(try_acquire(handle).await.is_none());
        assert_eq!(held_and_waiting(handle).await, (2, 0));
    }
}

pub async fn a_permit_may_be_dropped_on_a_thread_without_a_runtime(store: &impl Store) {
    let semaphore = semaphore(store, "dropped elsewhere", 1).await;
    let permit = acquire(&semaphore).await;
    let waiter = Waiter::join(&semaphore).await;
    std::thread::spawn(move || drop(permit)).join().unwrap();
    drop(waiter.permit().await);
    all_are_free(&semaphore).await;
}

pub async fn a_permit_may_be_released_by_another_task(store: &impl Store) {
    let semaphore = semaphore(store, "released elsewhere", 1).await;
    let permit = acquire(&semaphore).await;
    assert!(deadline(tokio::spawn(permit.release())).await.unwrap().unwrap());
    all_are_free(&semaphore).await;
}

pub async fn a_permit_is_released_once(store: &impl Store) {
    let semaphore = semaphore(store, "released once", 1).await;
    let permit = acquire(&semaphore).await;
    let id = permit.id();
    assert!(release(permit).await);
    assert!(!release_by_id(&semaphore, id).await);
    all_are_free(&semaphore).await;
}

pub async fn an_unknown_id_is_not_an_error(store: &impl Store) {
    let semaphore = semaphore(store, "unknown id", 1).await;
    let unknown: AcquisitionId = "7Vd3kQ0aZx1-42".parse().unwrap();
    assert!(!release_by_id(&semaphore, unknown).await);

    let _held = acquire(&semaphore).await;
    assert!(!release_by_id(&semaphore, unknown).await);
    assert_eq!(held_and_waiting(&semaphore).await, (1, 0));
    assert_eq!(deadline(semaphore.position(&unknown)).await.unwrap(), None);
}

pub async fn a_detached_permit_is_held_until_its_id_is_released(store: &impl Store) {
    let (here, there, name) = (store.client().await, store.client().await, unique("detached"));
    let semaphore = declare(&here, &name, 1);
    let id = acquire(&semaphore).await.detach();
    assert!(try_acquire(&semaphore).await.is_none());
    assert_eq!(held_and_waiting(&semaphore).await, (1, 0));

    // The id may be stored as text.
    let id: AcquisitionId = id.to_string().parse().unwrap();
    let waiter = Waiter::join(&semaphore).await;
    assert!(release_by_id(&declare(&there, &name, 1), id).await);
    drop(waiter.permit().await);
    all_are_free(&semaphore).await;
}

/// Both permits are the first of their clients, so their ids have the same sequence number.
pub async fn a_release_of_another_id_keeps_our_permit(store: &impl Store) {
    let (here, there, name) = (store.client().await, store.client().await, unique("same number"));
    let id = acquire(&declare(&here, &name, 1)).await.detach();
    let semaphore = declare(&there, &name, 1);
    let waiter = Waiter::join(&semaphore).await;
    assert!(release_by_id(&semaphore, id).await);
    let permit = waiter.permit().await;
    assert!(!release_by_id(&semaphore, id).await);
    permit.check().unwrap();
    assert!(release(permit).await);
    all_are_free(&semaphore).await;
}

pub async fn a_guard_is_notified_when_its_id_is_released_by_hand(store: &impl Store) {
    let semaphore = semaphore(store, "released by hand", 2).await;
    let asked_before = acquire(&semaphore).await;
    let asked_after = acquire(&semaphore).await;
    let lost = tokio::spawn(asked_before.lost());

    for permit in [&asked_before, &asked_after] {
        permit.check().unwrap();
        assert!(release_by_id(&semaphore, permit.id()).await);
        assert!(!release_by_id(&semaphore, permit.id()).await);
    }
    assert_eq!(deadline(lost).await.unwrap(), LossReason::Released);
    for permit in [asked_before, asked_after] {
        assert_eq!(deadline(permit.lost()).await, LossReason::Released);
        let error = permit.check().unwrap_err();
        let Error::Lost { name, id, reason, .. } = error else { panic!("{error}") };
        assert_eq!((name.as_str(), id), (semaphore.name(), permit.id().to_string()));
        assert_eq!(reason, LossReason::Released);
        assert!(!release(permit).await);
    }
    all_are_free(&semaphore).await;
}

pub async fn a_guard_is_notified_when_another_client_releases_its_id(store: &impl Store) {
    let (here, there, name) = (store.client().await, store.client().await, unique("taken"));
    // The guard learns of the release at its next renewal at the latest.
    let heartbeat = Duration::from_millis(600);
    let mine = here.semaphore(&name, 1).lease(heartbeat).build().unwrap();
    let permit = acquire(&mine).await;
    assert!(release_by_id(&declare(&there, &name, 1), permit.id()).await);

    let reason = deadline(permit.lost()).await;
    assert!(matches!(reason, LossReason::Released | LossReason::Missing), "{reason:?}");
    permit.check().unwrap_err();
    assert!(!release(permit).await);
    all_are_free(&mine).await;
}

pub async fn a_stale_release_does_not_end_another_permit(store: &impl Store) {
    let semaphore = semaphore(store, "not mine", 1).await;
    let stale = acquire(&semaphore).await;
    assert!(release_by_id(&semaphore, stale.id()).await);
    let fresh = acquire(&semaphore).await;

    assert!(!release(stale).await);
    fresh.check().unwrap();
    assert!(try_acquire(&semaphore).await.is_none());
    assert!(release(fresh).await);
}

pub async fn fences_grow_from_permit_to_permit(store: &impl Store) {
    let (here, there, name) = (store.client().await, store.client().await, unique("fences"));
    let handles = [declare(&here, &name, 2), declare(&there, &name, 2)];
    let mut last = acquire(&handles[0]).await;
    for handle in handles.iter().cycle().take(10) {
        let next = acquire(handle).await;
        assert!(next.fence() > last.fence(), "{} after {}", next.fence(), last.fence());
        release(last).await;
        last = next;
    }
}

pub async fn fences_grow_under_contention(store: &impl Store) {
    let (here, there, name) = (store.client().await, store.client().await, unique("crowd"));
    let handles = [declare(&here, &name, 1), declare(&there, &name, 1)];
    let fences = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..20)
        .map(|turn| {
            let (handle, fences) = (handles[turn % 2].clone(), fences.clone());
            tokio::spawn(async move {
                for _ in 0..3 {
                    let permit = acquire(&handle).await;
                    fences.lock().unwrap().push(permit.fence());
                    release(permit).await;
                }
            })
        })
        .collect();
    for task in tasks {
        deadline(task).await.unwrap();
    }
    let fences = fences.lock().unwrap();
    assert_eq!(fences.len(), 60);
    assert!(fences.is_sorted_by(|earlier, later| earlier < later), "{fences:?}");
}

pub async fn a_semaphore_is_locked_when_an_acquire_would_wait(store: &impl Store) {
    let semaphore = semaphore(store, "locked", 2).await;
    let locked = async || deadline(semaphore.locked()).await.unwrap();
    assert!(!locked().await);
    let first = acquire(&semaphore).await;
    assert!(!locked().await);
    let _second = acquire(&semaphore).await;
    assert!(locked().await);
    release(first).await;
    assert!(!locked().await);
}
