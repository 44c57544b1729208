//! Never more holders than the capacity, however our clients and theirs are mixed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

use leasehold::Semaphore;
use testkit::by_hand::step_aside;
use testkit::seed000::Seed000;
use testkit::wait::deadline;
use tokio::task::JoinSet;

use crate::both::{Both, HEARTBEAT, NAME, key};

const CAPACITY: u32 = 3;

/// Counts the holders, as they know it themselves.
#[derive(Default)]
struct Crowd {
    inside: AtomicU64,
    most: AtomicU64,
    of_ours: AtomicU64,
    of_theirs: AtomicU64,
}

impl Crowd {
    async fn work(&self, count: &AtomicU64) {
        self.most.fetch_max(self.inside.fetch_add(1, SeqCst) + 1, SeqCst);
        count.fetch_add(1, SeqCst);
        step_aside(20).await;
        self.inside.fetch_sub(1, SeqCst);
    }
}

async fn we_work(semaphore: Semaphore, crowd: Arc<Crowd>) {
    for _ in 0..40 {
        let permit = semaphore.acquire().await.unwrap();
        crowd.work(&crowd.of_ours).await;
        permit.check().expect("the permit is still valid");
        assert!(permit.release().await.unwrap());
    }
}

async fn they_work(theirs: Seed000, crowd: Arc<Crowd>) {
    for _ in 0..8 {
        let acquired =
            theirs.acquire(NAME, CAPACITY.into(), HEARTBEAT, None, None).await.expect("a slot");
        assert!(acquired.slot_number <= CAPACITY.into());
        crowd.work(&crowd.of_theirs).await;
        assert_eq!(theirs.release(NAME, &acquired.id).await.unwrap(), 1);
    }
}

async fn the_limit_holds(skew: f64) {
    let both = Both::start_with_skew(skew).await;
    the_limit_holds_among(&both).await;
    both.is_left_clean().await;
}

async fn the_limit_holds_among(both: &Both) {
    let crowd = Arc::new(Crowd::default());
    let done = Arc::new(AtomicBool::new(false));
    let watcher = thread::spawn({
        let (mut look, done) = (both.server.connection(), done.clone());
        move || {
            let (mut most, mut looks) = (0_u32, 0_u32);
            while !done.load(SeqCst) {
                let held = redis::cmd("ZCARD").arg(key("main")).query(&mut look).unwrap();
                most = most.max(held);
                looks += 1;
            }
            (most, looks)
        }
    });

    let mut workers = JoinSet::new();
    for client in [both.ours.clone(), both.another().await] {
        for _ in 0..4 {
            let semaphore = client.semaphore(NAME, CAPACITY).build().unwrap();
            workers.spawn(we_work(semaphore, crowd.clone()));
        }
    }
    for _ in 0..3 {
        workers.spawn(they_work(both.theirs.clone(), crowd.clone()));
    }
    deadline(workers.join_all()).await;
    done.store(true, SeqCst);

    let (most, looks) = watcher.join().unwrap();
    assert!(most <= CAPACITY, "{most} members of semaphore_main at once");
    assert!(looks > 100, "only {looks} looks, which is too few");
    assert!(crowd.most.load(SeqCst) <= CAPACITY.into(), "{} at once", crowd.most.load(SeqCst));
    assert_eq!((crowd.of_ours.load(SeqCst), crowd.of_theirs.load(SeqCst)), (2 * 4 * 40, 3 * 8));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ours_and_theirs_together_never_hold_more_than_the_capacity() {
    the_limit_holds(0.0).await;
}

/// Ahead by less than the claim time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_theirs_that_is_ahead_lets_in_nobody_too_many() {
    the_limit_holds(4.0).await;
}

/// Ahead by the claim time. While one of theirs holds, our clients query the store before they trust a wake-up. If none
/// of theirs held or waited at the time of a grant, one that arrives just after it could remove the permit before our
/// client has claimed it: docs/guarantees.md describes that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_theirs_that_is_far_ahead_lets_in_nobody_too_many_beside_a_holder_of_theirs() {
    let both = Both::start_with_skew(5.0).await;
    let holder = both.they_hold(CAPACITY.into()).await;
    the_limit_holds_among(&both).await;
    assert_eq!(both.theirs.release(NAME, &holder).await.unwrap(), 1);
    both.is_left_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_theirs_that_is_behind_lets_in_nobody_too_many() {
    the_limit_holds(-5.0).await;
}
