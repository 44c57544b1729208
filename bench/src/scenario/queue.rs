//! Joining a queue and leaving it again, for several lengths of the queue. No peer has a queue.

use std::time::{Duration, Instant};

use leasehold::{Client, Semaphore};

use super::NANOS;
use crate::bench::Bench;
use crate::contender::SEMAPHORE;

const LENGTHS: [usize; 5] = [10, 100, 1000, 10_000, 100_000];

pub(super) fn run(bench: &mut Bench) {
    let times = if bench.quick { 100 } else { 1000 };
    let names: Vec<_> = LENGTHS.iter().map(|_| bench.name()).collect();
    let url = bench.url.clone();
    let (client, queues) = bench.runtime.block_on(async {
        let client = Client::redis(&url).await.expect("the store");
        let mut queues = Vec::new();
        for (length, name) in LENGTHS.into_iter().zip(&names) {
            let semaphore = client.semaphore(name, 1).build().expect("a valid semaphore");
            let held = semaphore.acquire().await.expect("a permit");
            // They wait behind the holder, and are never granted the permit.
            let others: Vec<_> = (0..length).map(|_| tokio::spawn(semaphore.acquire())).collect();
            while semaphore.stats().await.expect("statistics").waiting < length {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            queues.push((length, semaphore, held, others));
        }
        (client, queues)
    });
    let mut round = 0;
    while bench.again(round) {
        round += 1;
        for (length, semaphore, ..) in &queues {
            bench.step(&format!("{length} queued, round {round}"));
            let nanos = bench.runtime.block_on(cost(semaphore, times));
            bench.add(&what(*length), SEMAPHORE.name, NANOS, nanos);
        }
    }
    let longest = bench.sample(&what(100_000), SEMAPHORE.name);
    let against = longest.over(&bench.sample(&what(10), SEMAPHORE.name));
    bench.report.judge("queue", &against);
    bench.runtime.block_on(async {
        for (_, _, held, others) in queues {
            others.iter().for_each(tokio::task::JoinHandle::abort);
            drop(held);
        }
        client.close().await.expect("closed");
    });
}

pub(crate) fn what(length: usize) -> String {
    format!("{length} queued")
}

/// Returns the nanoseconds of one acquire that is queued and then released by its id. It waits until the server has
/// seen each step.
async fn cost(semaphore: &Semaphore, times: u32) -> f64 {
    let start = Instant::now();
    for _ in 0..times {
        let acquire = semaphore.acquire();
        let id = acquire.id();
        let waiting = tokio::spawn(acquire);
        while semaphore.position(&id).await.expect("a position").is_none() {}
        assert!(!semaphore.release(&id).await.expect("released"), "it was only queued");
        waiting.await.expect("a task").expect_err("taken out of the queue");
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(times)
}
