//! The cost for a server of many clients that wait for one name, each with its own connection.

use std::thread::sleep;
use std::time::{Duration, Instant};

use leasehold::Client;

use crate::bench::Bench;
use crate::contender::SEMAPHORE;
use crate::driver::Driver;
use crate::report::Better;
use crate::sample::Sample;
use crate::server_time::ServerTime;

const CLIENTS: usize = 1000;
/// The number of processes that share the clients.
const PROCESSES: usize = 4;
/// The lease, in milliseconds.
const LEASE_MS: u64 = 180_000;
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// A client asks differently right after joining and while it waits.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) fn run(bench: &mut Bench) {
    if let Err(why) = measure(bench) {
        bench.trouble(SEMAPHORE.name, why);
    }
}

fn measure(bench: &mut Bench) -> Result<(), String> {
    let (name, url) = (bench.name(), bench.url.clone());
    bench.step("joining");
    let (client, semaphore, held) = bench.runtime.block_on(async {
        let client = Client::redis(&url).await.expect("the store");
        let semaphore = client.semaphore(&name, 1).build().expect("a valid semaphore");
        let held = semaphore.acquire().await.expect("a permit");
        (client, semaphore, held)
    });
    let started: Result<Vec<_>, _> =
        (0..PROCESSES).map(|_| Driver::start(&SEMAPHORE, &url)).collect();
    let mut crowd = started?;
    for driver in &mut crowd {
        driver.send(&format!("crowd {name} {} {LEASE_MS}", CLIENTS / PROCESSES))?;
    }
    for driver in &mut crowd {
        driver.answer(TIME_LIMIT)?;
    }
    let begun = Instant::now();
    let waiting = || bench.runtime.block_on(semaphore.stats()).map(|stats| stats.waiting);
    // The store may be too busy to answer while all of them join.
    while waiting().unwrap_or(0) < CLIENTS {
        if begun.elapsed() > TIME_LIMIT {
            return Err(format!("not all of {CLIENTS} had joined after {TIME_LIMIT:?}"));
        }
        sleep(Duration::from_millis(100));
    }
    sleep(SETTLE);
    // The places in the queue are renewed in the second third of the lease.
    let watched = Duration::from_secs(if bench.quick { 4 } else { 120 });
    bench.step("waiting");
    let (begun, before) = (Instant::now(), ServerTime::now(bench)?);
    sleep(watched);
    let (nanos, spent) = (begun.elapsed().as_secs_f64() * 1e9, ServerTime::now(bench)?);
    let spent = spent.since(&before);
    drop(crowd);
    drop(held);
    bench.runtime.block_on(client.close()).map_err(|why| why.to_string())?;
    let questions = spent.scripts() / nanos * 1e9;
    let scripts = spent.nanos(&SEMAPHORE) / nanos * 100.0;
    let process = spent.process_nanos() / nanos * 100.0;
    let who = SEMAPHORE.name;
    bench.add("questions", who, ("/s", Better::Less), questions);
    bench.add("share of a Redis core", who, ("%", Better::Less), process);
    // By the wall clock: more than the processor time if the machine is busy with something else.
    bench.add("share of the time in scripts", who, ("%", Better::Less), scripts);
    bench.report.judge("crowd/questions", &Sample(vec![questions]));
    bench.report.judge("crowd/share", &Sample(vec![process]));
    if bench.quick {
        let note =
            "quick run: places in the queue are renewed after a minute, which only a full run sees";
        bench.report.note("crowd", note.to_owned());
    }
    Ok(())
}
