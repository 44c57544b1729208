//! The semaphore in memory, compared with those of tokio and async-lock.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use leasehold::{Acquire, Client, Permit, Semaphore};
use tokio::runtime::Runtime;

use super::{BYTES, NANOS, footprint};
use crate::bench::Bench;
use crate::contender::{IDLE, MEMORY, SEMAPHORE, TOKIO};
use crate::sample::count;

const ASYNC_LOCK: &str = "async-lock";
/// These measurements are short, so there are more repetitions.
const MORE: usize = 3;

pub(super) fn run(bench: &mut Bench) {
    uncontended(bench);
    contended(bench);
    queue_length(bench);
    bytes_per_waiter(bench);
}

fn semaphore(name: &str, capacity: u32) -> Semaphore {
    Client::memory().semaphore(name, capacity).build().expect("a valid semaphore")
}

fn threads() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime")
}

fn one_thread() -> Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

/// Runs all contenders in turn, so that other load on the machine affects them alike. The first round only warms up.
fn in_turn(bench: &mut Bench, what: &str, contenders: &mut [(&str, &mut dyn FnMut() -> f64)]) {
    bench.step(what);
    for round in 0..=bench.repetitions() * MORE {
        if round > MORE && !bench.in_time() {
            break;
        }
        for (name, run) in &mut *contenders {
            let nanos = run();
            if round > 0 {
                bench.add(what, name, NANOS, nanos);
            }
        }
    }
}

fn each(begun: Instant, operations: usize) -> f64 {
    begun.elapsed().as_secs_f64() * 1e9 / count(operations)
}

/// One task that acquires and releases in a loop, and never has to wait.
fn uncontended(bench: &mut Bench) {
    let pairs = if bench.quick { 100_000 } else { 500_000 };
    let (ours, runtime) = (semaphore("uncontended", 5), one_thread());
    let (tokios, async_locks) = (tokio::sync::Semaphore::new(5), async_lock::Semaphore::new(5));
    macro_rules! pairs_of {
        ($semaphore:expr) => {
            &mut || {
                runtime.block_on(async {
                    let begun = Instant::now();
                    for _ in 0..pairs {
                        drop($semaphore.acquire().await);
                    }
                    each(begun, pairs)
                })
            }
        };
    }
    let what = "uncontended acquire + release";
    in_turn(
        bench,
        what,
        &mut [
            (SEMAPHORE.name, pairs_of!(ours)),
            (TOKIO.name, pairs_of!(tokios)),
            (ASYNC_LOCK, pairs_of!(async_locks)),
        ],
    );
    bench.judge_ratio("memory/pair", what, SEMAPHORE.name, TOKIO.name);
}

/// One permit, many tasks. Every task yields while it holds, so that the others have to queue.
fn contended(bench: &mut Bench) {
    let grants = if bench.quick { 60_000 } else { 1_000_000 };
    for (tasks, runtime, on) in
        [(100, one_thread(), ", one thread"), (100, threads(), ""), (10_000, threads(), "")]
    {
        let rounds = grants / tasks;
        macro_rules! race_for {
            ($make:expr) => {
                &mut || {
                    let semaphore = $make;
                    race(&runtime, tasks, rounds, || {
                        let semaphore = semaphore.clone();
                        async move {
                            for _ in 0..rounds {
                                let permit = semaphore.acquire().await;
                                tokio::task::yield_now().await;
                                drop(permit);
                            }
                        }
                    })
                }
            };
        }
        let what = format!("1 permit, {tasks} tasks{on}, a grant");
        in_turn(
            bench,
            &what,
            &mut [
                (SEMAPHORE.name, race_for!(semaphore("contended", 1))),
                (TOKIO.name, race_for!(Arc::new(tokio::sync::Semaphore::new(1)))),
                (ASYNC_LOCK, race_for!(Arc::new(async_lock::Semaphore::new(1)))),
            ],
        );
    }
    let [one_thread, few, many] = ["100 tasks, one thread", "100 tasks", "10000 tasks"]
        .map(|of| format!("1 permit, {of}, a grant"));
    bench.judge_ratio("memory/100/one", &one_thread, SEMAPHORE.name, TOKIO.name);
    bench.judge_ratio("memory/100", &few, SEMAPHORE.name, TOKIO.name);
    // How much more a grant costs among many tasks, compared with how much more tokio's costs.
    let against =
        |what: &str| bench.sample(what, SEMAPHORE.name).over(&bench.sample(what, TOKIO.name));
    let growth = against(&many).over(&against(&few));
    bench.report.judge("memory/10000", &growth);
}

/// Runs this many tasks at once, each for this many rounds. Returns the nanoseconds per grant.
fn race<F: Future<Output = ()> + Send + 'static>(
    runtime: &Runtime,
    tasks: usize,
    rounds: usize,
    work: impl Fn() -> F,
) -> f64 {
    let begun = Instant::now();
    runtime.block_on(async {
        let running: Vec<_> = (0..tasks).map(|_| tokio::spawn(work())).collect();
        for task in running {
            task.await.expect("the task ends");
        }
    });
    each(begun, tasks * rounds)
}

/// A release that hands the permit to the next of many waiters.
fn queue_length(bench: &mut Bench) {
    let rounds = if bench.quick { 500 } else { 2000 };
    let (mut long, mut short) = (Queue::new(100_000), Queue::new(10));
    let (name, of_ten) = ("a release, 100,000 queued", "a release, 10 queued");
    bench.step(name);
    for round in 0..=bench.repetitions() * MORE {
        if round > MORE && !bench.in_time() {
            break;
        }
        for (what, queue) in [(name, &mut long), (of_ten, &mut short)] {
            let nanos = queue.hand_over(rounds);
            if round > 0 {
                bench.add(what, SEMAPHORE.name, NANOS, nanos);
            }
        }
    }
    let against = bench.sample(name, SEMAPHORE.name).over(&bench.sample(of_ten, SEMAPHORE.name));
    bench.report.judge("memory/queue", &against);
}

/// A semaphore of one permit, with a queue of constant length.
struct Queue {
    semaphore: Semaphore,
    waiting: VecDeque<Pin<Box<Acquire>>>,
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

    /// Times five releases together and then lets five tasks join. So reading the clock does not count, and the queue
    /// keeps its length.
    fn hand_over(&mut self, rounds: usize) -> f64 {
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
        time.as_secs_f64() * 1e9 / count(rounds * 5)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.waiting.clear();
    }
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Measures the memory of 100,000 waiters in separate processes, because this one has allocated and freed a lot by now.
fn bytes_per_waiter(bench: &mut Bench) {
    let what = "memory of a waiter of 100,000, without its task";
    bench.step(what);
    for _ in 0..bench.repetitions() {
        let idle = match footprint::each(bench, &IDLE, 100_000) {
            Ok(bytes) => bytes,
            Err(why) => return bench.trouble(IDLE.name, why),
        };
        bench.add("memory of a task that does nothing", TOKIO.name, BYTES, idle);
        for (name, contender) in [(SEMAPHORE.name, &MEMORY), (TOKIO.name, &TOKIO)] {
            match footprint::each(bench, contender, 100_000) {
                Ok(bytes) => bench.add(what, name, BYTES, bytes - idle),
                Err(why) => bench.trouble(name, why),
            }
        }
    }
    let ours = bench.sample(what, SEMAPHORE.name);
    bench.report.judge("memory/bytes", &ours);
}
