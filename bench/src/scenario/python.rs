//! The Python package against other Python libraries.
//!
//! Pairs are measured twice: with a name for each task, which locks can do as well, and with one
//! name for all, which is what semaphores are for. No task has to wait in either.

use super::footprint::each;
use super::handoff::{note_few, ring};
use super::pairs::{pair_rate, pair_rate_during};
use super::{BYTES, NANOS, RATE};
use crate::bench::Bench;
use crate::contender::{
    ADVANCED_MEMORY, ADVANCED_SEMAPHORES, ASYNCIO, Contender, FOR_PYTHON, FOR_PYTHON_MEMORY,
    FOR_PYTHON_THREADS, POTTERY, PYTHON_REDIS_LOCK, REDIS_PY,
};
use crate::contender_set::ContenderSet;
use crate::sample::Sample;

const ALL: [&Contender; 6] = [
    &FOR_PYTHON,
    &FOR_PYTHON_THREADS,
    &ADVANCED_SEMAPHORES,
    &REDIS_PY,
    &PYTHON_REDIS_LOCK,
    &POTTERY,
];
/// These poll until they acquire. python-redis-lock is woken up.
const POLLING: [&Contender; 3] = [&ADVANCED_SEMAPHORES, &REDIS_PY, &POTTERY];
/// More than the number of tasks, so that no task has to wait.
const CAPACITY: usize = 256;

pub(super) fn run(bench: &mut Bench) {
    memory(bench);
    pairs(bench);
    hand_off(bench);
    footprint(bench);
}

fn memory(bench: &mut Bench) {
    let what = "in memory, 1 task: uncontended pairs";
    let mut set = ContenderSet::new(&[&FOR_PYTHON_MEMORY, &ASYNCIO, &ADVANCED_MEMORY]);
    set.measure(bench, what, RATE, |driver, bench| pair_rate(driver, bench, 1, 1, CAPACITY));
    bench.judge_ratio("python/memory/pair", what, ASYNCIO.name, FOR_PYTHON_MEMORY.name);
}

fn pairs(bench: &mut Bench) {
    let mut locks = ContenderSet::new(&ALL);
    for (what, tasks) in
        [("1 task", 1), ("50 tasks, a name each", 50), ("200 tasks, a name each", 200)]
    {
        let window = bench.window() * longer(tasks);
        locks.measure(bench, what, RATE, |driver, bench| {
            pair_rate_during(driver, bench, (tasks, tasks, 1), window)
        });
    }
    let mut semaphores = ContenderSet::new(&[&FOR_PYTHON, &ADVANCED_SEMAPHORES]);
    for (what, tasks) in [("50 tasks, one name", 50), ("200 tasks, one name", 200)] {
        let window = bench.window() * longer(tasks);
        semaphores.measure(bench, what, RATE, |driver, bench| {
            pair_rate_during(driver, bench, (tasks, 1, CAPACITY), window)
        });
    }
    for (bar, what) in [
        ("python/pairs/50", "50 tasks, a name each"),
        ("python/pairs/50/one", "50 tasks, one name"),
    ] {
        // The only one of the peers that is fair.
        bench.judge_ratio(bar, what, FOR_PYTHON.name, ADVANCED_SEMAPHORES.name);
    }
}

/// Returns the factor by which the window is longer. The tasks of the slowest peer take turns, and
/// 200 of them need most of a second for one pair each.
fn longer(tasks: usize) -> u32 {
    if tasks > 50 { 4 } else { 1 }
}

fn hand_off(bench: &mut Bench) {
    let (waiters, p99) = (20, "hand-off, 20 waiters, p99");
    let mut connection = bench.connection();
    let mut failed = Vec::new();
    for round in 1..=bench.repetitions() {
        if round > 1 && !bench.in_time() {
            break;
        }
        for contender in ALL.iter().copied().filter(|one| **one != FOR_PYTHON_THREADS) {
            bench.step(&format!("hand-off, {}, round {round}", contender.name));
            if failed.contains(&contender.name) {
                continue;
            }
            let url = bench.url.clone();
            match ring(bench, contender, &url, waiters, &mut connection) {
                Ok(ring) => {
                    let p50 = ring.delays.quantile(0.5);
                    bench.add("hand-off, 20 waiters, p50", contender.name, NANOS, p50);
                    bench.add(p99, contender.name, NANOS, ring.delays.quantile(0.99));
                    note_few(bench, "python", contender, waiters, &ring);
                }
                Err(why) => {
                    bench.trouble(contender.name, format!("hand-off: {why}"));
                    failed.push(contender.name);
                }
            }
        }
    }
    let ours = bench.sample(p99, FOR_PYTHON.name);
    let ratios = POLLING.map(|peer| bench.sample(p99, peer.name).over(&ours));
    let nearest = ratios.into_iter().filter(|ratio| !ratio.is_empty());
    let nearest = nearest.min_by(|a, b| a.median().total_cmp(&b.median()));
    bench.report.judge("python/handoff/p99", &nearest.unwrap_or_else(Sample::default));
}

fn footprint(bench: &mut Bench) {
    for round in 1..=bench.repetitions() {
        if round > 1 && !bench.in_time() {
            break;
        }
        for contender in ALL {
            waiting(bench, contender, 200);
        }
        // Two hundred of our waiters hardly show among the pages that a process has anyway.
        waiting(bench, &FOR_PYTHON, 10_000);
    }
}

fn waiting(bench: &mut Bench, contender: &'static Contender, waiters: u64) {
    bench.step(&format!("{waiters} that wait, {}", contender.name));
    match each(bench, contender, waiters) {
        Ok(bytes) => {
            bench.add(
                &format!("memory of one of {waiters} that wait"),
                contender.name,
                BYTES,
                bytes,
            );
        }
        Err(why) => bench.trouble(contender.name, why),
    }
}
