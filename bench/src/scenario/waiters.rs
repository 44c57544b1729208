//! The cost of 100,000 waiters of one process while they wait. No peer was made for that.

use std::thread::sleep;
use std::time::{Duration, Instant};

use leasehold::Client;
use testkit::proxy::FaultProxy;

use super::pairs::FEWER;
use super::{BYTES, NANOS};
use crate::bench::Bench;
use crate::contender::SEMAPHORE;
use crate::driver::Driver;
use crate::report::Better;
use crate::sample::{Sample, count};

const WAITERS: usize = 100_000;
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// The lease.
const LEASE: Duration = Duration::from_secs(180);

pub(super) fn run(bench: &mut Bench) {
    if let Err(why) = measure(bench) {
        bench.trouble(SEMAPHORE.name, why);
    }
}

fn measure(bench: &mut Bench) -> Result<(), String> {
    let server = bench.server.as_ref().ok_or("counts on a server of our own only")?;
    let proxy = FaultProxy::start(server.port());
    let name = bench.name();
    bench.step("joining");
    let url = bench.url.clone();
    // This client holds, and reads the number of waiters, without going through the proxy that counts.
    let (client, semaphore, held) = bench.runtime.block_on(async {
        let client = Client::redis(&url).await.expect("the store");
        let semaphore = client.semaphore(&name, 1).build().expect("a valid semaphore");
        let held = semaphore.acquire().await.expect("a permit");
        (client, semaphore, held)
    });
    let mut driver = Driver::start(&SEMAPHORE, &proxy.url())?;
    let (begun, empty) = (Instant::now(), driver.resident()?);
    driver.call(&format!("wait {name} {WAITERS} {} 0", LEASE.as_millis()), TIME_LIMIT)?;
    let waiting = || bench.runtime.block_on(semaphore.stats()).map(|stats| stats.waiting);
    while waiting().map_err(|why| why.to_string())? < WAITERS {
        sleep(Duration::from_millis(20));
    }
    let (joined, full) = (begun.elapsed(), driver.resident()?);
    let each = count(full - empty) / count(WAITERS);
    // Long enough for all of them to be renewed, which happens in the second third of the lease.
    let watched = Duration::from_secs(if bench.quick { 4 } else { 120 });
    bench.step("waiting");
    let (connections, before) = (count(proxy.connections()), proxy.requests());
    sleep(watched);
    let requests = count(proxy.requests() - before) / watched.as_secs_f64();
    drop(driver);
    drop(held);
    bench.runtime.block_on(client.close()).map_err(|why| why.to_string())?;
    let (who, watched) = (SEMAPHORE.name, watched.as_secs());
    bench.add("until all have joined", who, NANOS, count(joined.as_nanos()));
    bench.add("memory, each", who, BYTES, each);
    bench.add("connections", who, FEWER, connections);
    bench.add(&format!("requests, over {watched} s"), who, ("/s", Better::Less), requests);
    bench.report.judge("waiters/connections", &Sample(vec![connections]));
    bench.report.judge("waiters/bytes", &Sample(vec![each]));
    if bench.quick {
        return Err("the bar of requests: renewals come after a minute, in a full run".to_owned());
    }
    bench.report.judge("waiters/requests", &Sample(vec![requests]));
    Ok(())
}
