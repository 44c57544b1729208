//! A rate with more demand than it allows: whether it is reached, and what it costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::Client;

use crate::bench::Bench;
use crate::contender::SEMAPHORE;
use crate::report::Better;
use crate::sample::Sample;
use crate::server_time::ServerTime;

const WAITERS: usize = 200;
/// How many starts can be made up for after a late one.
const BURST: u32 = 20;
/// The starts per second in the long run.
const STARTS: u64 = 1000;
/// The most starts in any second, of which the burst is a part.
const MOST: u64 = STARTS + BURST as u64 - 1;
/// After this time the initial tokens are used up, and every task waits.
const SETTLE: Duration = Duration::from_millis(500);

pub(super) fn run(bench: &mut Bench) {
    if let Err(why) = measure(bench) {
        bench.trouble(SEMAPHORE.name, why);
    }
}

fn measure(bench: &mut Bench) -> Result<(), String> {
    let (name, url) = (bench.name(), bench.url.clone());
    let lasting = Duration::from_secs(if bench.quick { 3 } else { 10 });
    let text = |why: leasehold::Error| why.to_string();
    let (client, semaphore) = bench.runtime.block_on(async {
        let client = Client::redis(&url).await.map_err(text)?;
        let capacity = u32::try_from(WAITERS).unwrap_or(u32::MAX);
        let semaphore = client.semaphore(&name, capacity);
        let semaphore = semaphore.rate(MOST, Duration::from_secs(1)).burst(BURST);
        Ok::<_, String>((client.clone(), semaphore.build().map_err(text)?))
    })?;
    let started = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..WAITERS)
        .map(|_| {
            let (semaphore, started) = (semaphore.clone(), started.clone());
            bench.runtime.spawn(async move {
                while let Ok(permit) = semaphore.acquire().await {
                    started.fetch_add(1, Ordering::Relaxed);
                    drop(permit);
                }
            })
        })
        .collect();
    bench.step("starting");
    std::thread::sleep(SETTLE);
    let before = (Instant::now(), started.load(Ordering::Relaxed), ServerTime::now(bench)?);
    std::thread::sleep(lasting);
    let starts = started.load(Ordering::Relaxed) - before.1;
    let seconds = before.0.elapsed().as_secs_f64();
    let spent = ServerTime::now(bench)?.since(&before.2);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    bench.runtime.block_on(client.close()).map_err(text)?;
    #[allow(clippy::cast_precision_loss)] // some thousands
    let (starts, wanted) = (starts as f64, STARTS as f64);
    let (share, requests) = (starts / seconds / wanted, spent.scripts() / starts);
    let who = SEMAPHORE.name;
    bench.add("starts, of 1,000/s", who, ("×", Better::More), share);
    bench.add("requests for a start", who, ("", Better::Less), requests);
    bench.report.judge("rate/kept", &Sample(vec![share]));
    bench.report.judge("rate/requests", &Sample(vec![requests]));
    Ok(())
}
