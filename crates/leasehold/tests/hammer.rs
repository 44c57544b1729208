//! Threads and runtimes that use one name heavily: never more holders than permits, always in
//! order, and nothing left behind, however a runtime ends.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use leasehold::{Client, Error, Fence, Permit, Semaphore};
use testkit::Rng;
use testkit::by_hand::{ByHand, block_on, step_aside, until};
use testkit::counts::{assert_all_are_free, held_and_waiting};
use testkit::wait::deadline;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

const CAPACITY: u32 = 3;
const TASKS: u64 = 30;
const ROUNDS: u32 = 200;

fn semaphore() -> Semaphore {
    Client::memory().semaphore("hammered", CAPACITY).build().unwrap()
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Counts how many hold at the same time.
#[derive(Default)]
struct Counter {
    now: AtomicU32,
    most: AtomicU32,
}

impl Counter {
    fn enter(&self) -> Inside<'_> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(now <= CAPACITY, "{now} hold {CAPACITY} permits");
        self.most.fetch_max(now, Ordering::SeqCst);
        Inside(self)
    }
}

/// Counted as a holder while it exists. It must be dropped before the permit.
struct Inside<'a>(&'a Counter);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Acquires and releases in every possible way.
async fn hammer(semaphore: Semaphore, counter: Arc<Counter>, seed: u64) -> Result<(), Error> {
    let mut rng = Rng::with_seed(seed);
    for _ in 0..ROUNDS {
        let pauses = rng.u32(0..3);
        match rng.u32(0..6) {
            0 => {
                let permit = semaphore.acquire().await?;
                let inside = counter.enter();
                step_aside(pauses).await;
                drop(inside);
                drop(permit);
            }
            1 => {
                let permit = semaphore.acquire().within(Duration::from_secs(20)).await?;
                let inside = counter.enter();
                step_aside(pauses).await;
                drop(inside);
                assert!(permit.release().await?);
            }
            2 => {
                let work = semaphore.with(async |_| {
                    let _inside = counter.enter();
                    step_aside(pauses).await;
                });
                work.await?;
            }
            3 => {
                if let Some(permit) = semaphore.try_acquire().await? {
                    drop(counter.enter());
                    drop(permit);
                }
            }
            4 => {
                let id = semaphore.acquire().await?.detach();
                let inside = counter.enter();
                step_aside(pauses).await;
                drop(inside);
                assert!(semaphore.release(&id).await?);
            }
            // Gives up while it waits, or when it has just been granted the permit.
            _ => once(semaphore.acquire()).await,
        }
    }
    Ok(())
}

/// Polls a future once, and drops it.
async fn once<F: Future>(future: F) {
    let mut future = pin!(future);
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await;
}

/// Runs tasks to their end. Panics if one of them panics or takes too long.
async fn run_all<T: Send + 'static>(
    tasks: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    deadline(tasks.into_iter().collect::<JoinSet<T>>().join_all()).await
}

#[test]
fn never_do_more_hold_than_there_are_permits() {
    let (semaphore, counter) = (semaphore(), Arc::new(Counter::default()));
    let hammers = |seeds: std::ops::Range<u64>| {
        let (semaphore, counter) = (semaphore.clone(), counter.clone());
        seeds.map(move |seed| hammer(semaphore.clone(), counter.clone(), seed))
    };
    thread::scope(|scope| {
        for (number, runtime) in
            [multi_thread(), multi_thread(), current_thread(), current_thread()]
                .into_iter()
                .enumerate()
        {
            let first = TASKS * number as u64;
            let tasks = hammers(first..first + TASKS);
            scope.spawn(move || {
                for result in runtime.block_on(run_all(tasks)) {
                    result.unwrap();
                }
            });
        }
        // Threads without a runtime.
        for task in hammers(1000..1004) {
            scope.spawn(move || block_on(task).unwrap());
        }
    });
    assert_eq!(counter.now.load(Ordering::SeqCst), 0);
    assert_eq!(
        counter.most.load(Ordering::SeqCst),
        CAPACITY,
        "all permits were never in use at once"
    );
    block_on(assert_all_are_free(&semaphore));
}

#[test]
fn permits_are_granted_in_the_order_in_which_they_were_asked_for() {
    /// Draws a ticket and polls for the first time in one step. The fence shows the order of the grants.
    async fn ticketed(semaphore: &Semaphore, tickets: &Mutex<u64>) -> (u64, Permit) {
        let mut acquire = pin!(semaphore.acquire());
        let mut ticket = None;
        let permit = poll_fn(|cx| {
            if ticket.is_some() {
                return acquire.as_mut().poll(cx);
            }
            let mut next = tickets.lock().unwrap();
            ticket = Some(*next);
            *next += 1;
            acquire.as_mut().poll(cx)
        });
        let permit = permit.await.unwrap();
        (ticket.unwrap(), permit)
    }

    async fn queue_up(semaphore: Semaphore, tickets: Arc<Mutex<u64>>) -> Vec<(u64, Fence)> {
        let mut grants = Vec::new();
        for round in 0..ROUNDS {
            let (ticket, permit) = ticketed(&semaphore, &tickets).await;
            grants.push((ticket, permit.fence()));
            step_aside(round % 3).await;
        }
        grants
    }

    let (semaphore, tickets) = (semaphore(), Arc::new(Mutex::new(0)));
    let tasks = || (0..TASKS).map(|_| queue_up(semaphore.clone(), tickets.clone()));
    let (one, two, three) = (multi_thread(), multi_thread(), current_thread());
    let grants = thread::scope(|scope| {
        let threads = [one, two, three].map(|runtime| {
            let tasks: Vec<_> = tasks().collect();
            scope.spawn(move || runtime.block_on(run_all(tasks)))
        });
        threads.map(|thread| thread.join().unwrap())
    });
    let mut grants: Vec<_> = grants.into_iter().flatten().flatten().collect();
    grants.sort_unstable();
    assert_eq!(grants.len() as u64, 3 * TASKS * u64::from(ROUNDS));
    for pair in grants.windows(2) {
        assert!(pair[0].1 < pair[1].1, "the later ticket was served first: {pair:?}");
    }
    block_on(assert_all_are_free(&semaphore));
}

/// Ends a runtime while its tasks hold every permit and more of its tasks wait.
fn check_end_of_runtime(runtime: Runtime, drive: fn(&Runtime), end: fn(Runtime)) {
    let semaphore = semaphore();
    for number in 0..CAPACITY {
        let semaphore = semaphore.clone();
        runtime.spawn(async move {
            if number == 0 {
                return semaphore.with(async |_| pending().await).await;
            }
            let permit = semaphore.acquire().await?;
            permit.lost().await;
            Ok(())
        });
    }
    drive(&runtime);
    until(|| block_on(held_and_waiting(&semaphore)) == (CAPACITY, 0));
    for _ in 0..5 {
        let semaphore = semaphore.clone();
        runtime.spawn(semaphore.acquire());
        runtime.spawn(semaphore.acquire().within(Duration::from_secs(60)));
        runtime.spawn(async move { semaphore.with(async |_| pending::<()>().await).await });
    }
    drive(&runtime);
    until(|| block_on(held_and_waiting(&semaphore)) == (CAPACITY, 15));

    // Behind them all, outside the runtime.
    let mut outsider = ByHand::new(semaphore.acquire());
    assert!(outsider.poll().is_none());
    end(runtime);
    let permit = outsider.finish().unwrap();
    permit.check().unwrap();
    drop(permit);
    until(|| block_on(held_and_waiting(&semaphore)) == (0, 0));
    block_on(assert_all_are_free(&semaphore));
}

/// Drives the tasks: a current-thread runtime runs only inside `block_on`.
fn turn(runtime: &Runtime) {
    runtime.block_on(async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_runtime_that_is_dropped_leaves_nothing_behind() {
    check_end_of_runtime(multi_thread(), |_| {}, drop);
    check_end_of_runtime(current_thread(), turn, drop);
}

#[test]
fn a_runtime_that_is_shut_down_in_the_background_leaves_nothing_behind() {
    check_end_of_runtime(multi_thread(), |_| {}, Runtime::shutdown_background);
    check_end_of_runtime(current_thread(), turn, Runtime::shutdown_background);
}

#[test]
fn a_permit_outlives_the_runtime_that_acquired_it() {
    let semaphore = Client::memory().semaphore("outlives", 1);
    let semaphore = semaphore.ttl(Duration::from_millis(500)).build().unwrap();
    let runtime = current_thread();
    let permit = runtime.block_on(semaphore.acquire()).unwrap();
    drop(runtime);
    permit.check().unwrap();
    // The engine has its own thread: a lease ends without a runtime.
    block_on(permit.lost());
    until(|| block_on(held_and_waiting(&semaphore)) == (0, 0));
    assert!(!block_on(permit.release()).unwrap());
}

#[test]
fn permits_may_be_given_back_by_threads_without_a_runtime() {
    let (semaphore, counter) = (semaphore(), Arc::new(Counter::default()));
    let runtime = multi_thread();
    thread::scope(|scope| {
        let (hand_over, handed_over) = mpsc::channel::<Permit>();
        let handed_over = Arc::new(Mutex::new(handed_over));
        for number in 0..3 {
            let (handed_over, counter) = (handed_over.clone(), counter.clone());
            scope.spawn(move || {
                loop {
                    let Ok(permit) = handed_over.lock().unwrap().recv() else { return };
                    drop(counter.enter());
                    if number == 0 {
                        assert!(block_on(permit.release()).unwrap());
                    } else {
                        drop(permit);
                    }
                }
            });
        }
        let tasks = (0..TASKS).map(|_| {
            let (semaphore, hand_over) = (semaphore.clone(), hand_over.clone());
            async move {
                for _ in 0..ROUNDS {
                    hand_over.send(semaphore.acquire().await.unwrap()).unwrap();
                }
            }
        });
        runtime.block_on(run_all(tasks));
        drop(hand_over);
    });
    block_on(assert_all_are_free(&semaphore));
}
