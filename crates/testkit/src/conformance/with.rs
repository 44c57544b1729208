//! Work under a permit.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use leasehold::{Error, LossReason, Permit, Semaphore};

use super::{
    SHORT, Store, acquire, all_are_free, held_and_waiting, release, release_by_id, semaphore,
    unique,
};
use crate::wait::{deadline, eventually};

pub async fn with_returns_the_value_of_the_work(store: &impl Store) {
    let semaphore = semaphore(store, "answer", 1).await;
    let mut borrowed = String::from("what the work");
    let answer = deadline(semaphore.with(async |permit| {
        borrowed.push_str(" borrows");
        permit.fence().get() > 0
    }));
    assert!(answer.await.unwrap());
    assert_eq!(borrowed, "what the work borrows");
}

pub async fn the_permit_is_free_when_the_work_is_done(store: &impl Store) {
    let semaphore = semaphore(store, "done", 1).await;
    let during =
        deadline(semaphore.with(async |_| held_and_waiting(&semaphore).await)).await.unwrap();
    assert_eq!(during, (1, 0));
    // Without waiting: `with` returns after the release.
    assert_eq!(held_and_waiting(&semaphore).await, (0, 0));
    all_are_free(&semaphore).await;
}

/// Sets the flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Work that never ends, and must not be polled after its permit is lost.
async fn endless(permit: &Permit, ended: &AtomicBool, stray: &AtomicBool) {
    let _set_on_drop = SetOnDrop(ended);
    poll_fn(|_| {
        stray.fetch_or(permit.check().is_err(), Ordering::Relaxed);
        Poll::<()>::Pending
    })
    .await;
}

pub async fn work_stops_when_the_ttl_ends(store: &impl Store) {
    let (client, name) = (store.client().await, unique("work and ttl"));
    let semaphore = client.semaphore(&name, 1).ttl(SHORT).build().unwrap();
    let (ended, stray) = (AtomicBool::new(false), AtomicBool::new(false));
    let work = semaphore.with(async |permit| endless(permit, &ended, &stray).await);

    let error = deadline(work).await.unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::TtlEnded, .. }), "{error}");
    assert!(ended.into_inner(), "the work was not dropped");
    assert!(!stray.into_inner(), "the work was polled after its permit was lost");
    all_are_free(&semaphore).await;
}

pub async fn work_stops_when_its_permit_is_released_by_hand(store: &impl Store) {
    let semaphore = semaphore(store, "work and release", 1).await;
    let (ended, stray) = (AtomicBool::new(false), AtomicBool::new(false));
    let (send_id, id) = tokio::sync::oneshot::channel();
    let work = semaphore.with(async |permit| {
        send_id.send(permit.id()).unwrap();
        endless(permit, &ended, &stray).await;
    });
    let by_hand = async {
        let id = id.await.unwrap();
        assert!(release_by_id(&semaphore, id).await);
    };
    let (result, ()) = deadline(async { tokio::join!(work, by_hand) }).await;
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::Released, .. }), "{error}");
    assert!(ended.into_inner() && !stray.into_inner());
    all_are_free(&semaphore).await;
}

pub async fn cancelled_work_ends_before_its_permit(store: &impl Store) {
    /// Records whether the permit was still valid when the work was dropped.
    struct CheckOnDrop<'a>(&'a Permit, &'a AtomicBool);
    impl Drop for CheckOnDrop<'_> {
        fn drop(&mut self) {
            self.1.store(self.0.check().is_ok(), Ordering::Relaxed);
        }
    }

    let semaphore = semaphore(store, "given up", 1).await;
    let ended_under_permit = AtomicBool::new(false);
    {
        let mut work = pin!(semaphore.with(async |permit| {
            let _check_on_drop = CheckOnDrop(permit, &ended_under_permit);
            pending::<()>().await;
        }));
        let begun = eventually(async || held_and_waiting(&semaphore).await == (1, 0));
        tokio::select! {
            biased;
            done = &mut work => unreachable!("{done:?}"),
            () = begun => {}
        }
    }
    assert!(ended_under_permit.into_inner());
    all_are_free(&semaphore).await;
}

pub async fn panicking_work_releases_its_permit(store: &impl Store) {
    let semaphore = semaphore(store, "panics", 1).await;
    let worker = semaphore.clone();
    let task =
        tokio::spawn(async move { worker.with(async |_| panic!("on purpose, in a test")).await });
    assert!(deadline(task).await.unwrap_err().is_panic());
    all_are_free(&semaphore).await;
}

pub async fn work_does_not_begin_without_a_permit(store: &impl Store) {
    let semaphore = semaphore(store, "not begun", 1).await;
    let begun = Arc::new(AtomicBool::new(false));
    let held = acquire(&semaphore).await;
    let task = tokio::spawn(set_under_permit(semaphore.clone(), begun.clone()));
    eventually(async || held_and_waiting(&semaphore).await == (1, 1)).await;
    assert!(!begun.load(Ordering::Relaxed));
    release(held).await;
    deadline(task).await.unwrap().unwrap();
    assert!(begun.load(Ordering::Relaxed));
}

async fn set_under_permit(semaphore: Semaphore, flag: Arc<AtomicBool>) -> Result<(), Error> {
    semaphore.with(async |_| flag.store(true, Ordering::Relaxed)).await
}
