//! The semaphore in memory against `tokio::sync::Semaphore`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use leasehold::{Acquire, Client, Permit, Semaphore};
use tokio::runtime::Runtime;

use crate::measure::{Times, in_turn, report, resident, timed};

const REPETITIONS: usize = 9;

/// All of it, or one part by its name.
pub(crate) fn run(part: Option<&str>) {
    let parts: [(&str, fn()); 4] = [
        ("uncontended", uncontended),
        ("contended", contended),
        ("queue", queue_length),
        ("bytes", bytes_per_waiter),
    ];
    println!("{:<46} {:>17}  {:>17}", "in memory", "leasehold", "tokio");
    for (name, measure) in parts {
        if part.is_none_or(|part| part == name) {
            measure();
        }
    }
}

fn semaphore(name: &str, capacity: u32) -> Semaphore {
    Client::memory().semaphore(name, capacity).build().expect("a valid semaphore")
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime")
}

/// One task that acquires and gives back, over and over, and never has to wait.
fn uncontended() {
    const PAIRS: usize = 500_000;
    let ours = semaphore("uncontended", 5);
    let theirs = tokio::sync::Semaphore::new(5);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let (a, b) = in_turn(
        REPETITIONS,
        || {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..PAIRS {
                    drop(ours.acquire().await);
                }
                (start.elapsed(), PAIRS)
            })
        },
        || {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..PAIRS {
                    drop(theirs.acquire().await);
                }
                (start.elapsed(), PAIRS)
            })
        },
    );
    report("uncontended acquire + release", &a, &b, 4.0);
}

/// One permit, many tasks. Every task yields while it holds, so that the others have to queue.
fn contended() {
    let runtime = runtime();
    let one_thread = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let (a, b) = contended_by(&one_thread, 100);
    report("1 permit, 100 tasks on one thread, per grant", &a, &b, 1.5);
    let (a100, b100) = contended_by(&runtime, 100);
    report("1 permit, 100 tasks, per grant", &a100, &b100, 1.5);
    let (a, b) = contended_by(&runtime, 10_000);
    report("1 permit, 10,000 tasks, per grant", &a, &b, 1.5);
    report("leasehold: 10,000 tasks against 100, per grant", &a, &a100, 1.0);
    report("tokio:     10,000 tasks against 100, per grant", &b, &b100, 1.0);
}

fn contended_by(runtime: &Runtime, tasks: usize) -> (Times, Times) {
    const GRANTS: usize = 1_000_000;
    let rounds = GRANTS / tasks;
    in_turn(
        REPETITIONS,
        || {
            let semaphore = semaphore("contended", 1);
            race(runtime, tasks, rounds, || {
                let semaphore = semaphore.clone();
                async move {
                    for _ in 0..rounds {
                        let permit = semaphore.acquire().await.expect("a permit");
                        tokio::task::yield_now().await;
                        drop(permit);
                    }
                }
            })
        },
        || {
            let semaphore = Arc::new(tokio::sync::Semaphore::new(1));
            race(runtime, tasks, rounds, || {
                let semaphore = semaphore.clone();
                async move {
                    for _ in 0..rounds {
                        let permit = semaphore.acquire().await.expect("a permit");
                        tokio::task::yield_now().await;
                        drop(permit);
                    }
                }
            })
        },
    )
}

/// Runs that many tasks at once, each so many rounds.
fn race<F: Future<Output = ()> + Send + 'static>(
    runtime: &Runtime,
    tasks: usize,
    rounds: usize,
    work: impl Fn() -> F,
) -> (Duration, usize) {
    timed(tasks * rounds, || {
        runtime.block_on(async {
            let running: Vec<_> = (0..tasks).map(|_| tokio::spawn(work())).collect();
            for task in running {
                task.await.expect("the task ends");
            }
        });
    })
}

/// A release that hands over to the next of many.
fn queue_length() {
    let mut long = Queue::new(100_000);
    let mut short = Queue::new(10);
    let (a, b) = in_turn(REPETITIONS, || long.hand_over(2000), || short.hand_over(2000));
    report("release, 100,000 in the queue against 10", &a, &b, 2.0);
}

/// A semaphore of one permit with a queue that is kept at its length.
struct Queue {
    semaphore: Semaphore,
    waiting: std::collections::VecDeque<Pin<Box<Acquire>>>,
    held: Option<Permit>,
}

impl Queue {
    fn new(length: usize) -> Self {
        let semaphore = semaphore("queue", 1);
        let Poll::Ready(Ok(held)) = poll(Box::pin(semaphore.acquire()).as_mut()) else {
            panic!("a free permit was not granted")
        };
        let mut queue = Self { semaphore, waiting: [].into(), held: Some(held) };
        (0..length).for_each(|_| queue.join());
        queue
    }

    fn join(&mut self) {
        let mut acquire = Box::pin(self.semaphore.acquire());
        assert!(poll(acquire.as_mut()).is_pending());
        self.waiting.push_back(acquire);
    }

    /// Five releases are timed together, then five join, so that reading the clock does not count and
    /// the queue stays as long as it is.
    fn hand_over(&mut self, rounds: usize) -> (Duration, usize) {
        let mut time = Duration::ZERO;
        for _ in 0..rounds {
            let mut heads: Vec<_> = self.waiting.drain(..5).collect();
            let start = Instant::now();
            for head in &mut heads {
                drop(self.held.take());
                let Poll::Ready(Ok(permit)) = poll(head.as_mut()) else {
                    panic!("the head of the queue was not granted the permit")
                };
                self.held = Some(permit);
            }
            time += start.elapsed();
            (0..5).for_each(|_| self.join());
        }
        (time, rounds * 5)
    }
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// What a waiting task costs, with the task itself.
fn bytes_per_waiter() {
    const WAITERS: usize = 100_000;
    let bar = 600;
    let runtime = runtime();
    let ours = semaphore("bytes", 1);
    let held = runtime.block_on(ours.acquire());
    let before = resident();
    let tasks: Vec<_> = (0..WAITERS)
        .map(|_| {
            let ours = ours.clone();
            runtime.spawn(async move { drop(ours.acquire().await) })
        })
        .collect();
    while runtime.block_on(ours.stats()).expect("statistics").waiting() < WAITERS {
        std::thread::yield_now();
    }
    let each = (resident() - before) / WAITERS;
    let verdict = if each <= bar { "met" } else { "MISSED" };
    println!(
        "bytes a waiter, with its tokio task and join handle: {each} (at most {bar}) {verdict}"
    );
    drop(held);
    for task in tasks {
        runtime.block_on(task).expect("every waiter gets its turn");
    }
}
