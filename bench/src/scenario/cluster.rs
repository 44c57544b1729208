//! A cluster of three primaries against one server, all on this machine.
//!
//! Both use the same cores. So this does not show how a cluster scales. It shows how much more a request costs if each
//! slot needs its own script call, and whether a hand-off takes longer.

use testkit::redis_cluster::RedisCluster;

use super::handoff::ring;
use super::pairs::pair_rate;
use super::{NANOS, RATE};
use crate::bench::Bench;
use crate::contender::SEMAPHORE;
use crate::driver::Driver;

const CLUSTER: &str = "leasehold on a cluster";
const PRIMARIES: usize = 3;
const WAITERS: u64 = 20;

pub(super) fn run(bench: &mut Bench) {
    let cluster = RedisCluster::start_primaries(PRIMARIES);
    if let Err(why) = pairs(bench, &cluster.url()).and_then(|()| handoff(bench, &cluster.url())) {
        bench.trouble(CLUSTER, why);
    }
}

/// Returns the two stores, each with its name in the tables.
fn places(bench: &Bench, cluster: &str) -> [(&'static str, String); 2] {
    [(SEMAPHORE.name, bench.url.clone()), (CLUSTER, cluster.to_owned())]
}

fn pairs(bench: &mut Bench, cluster: &str) -> Result<(), String> {
    let mut drivers = Vec::new();
    for (place, url) in places(bench, cluster) {
        drivers.push((place, Driver::start(&SEMAPHORE, &url)?));
    }
    for (what, tasks, names) in [
        ("1 task, 1 name", 1, 1),
        ("256 tasks, 1 name", 256, 1),
        ("256 tasks, 1,000 names", 256, 1000),
    ] {
        bench.step(what);
        for _ in 0..bench.repetitions() {
            for (place, driver) in &mut drivers {
                let rate = pair_rate(driver, bench, tasks, names, 256)?;
                bench.add(what, place, RATE, rate);
            }
        }
    }
    bench.judge_ratio("cluster/1000", "256 tasks, 1,000 names", CLUSTER, SEMAPHORE.name);
    Ok(())
}

fn handoff(bench: &mut Bench, cluster: &str) -> Result<(), String> {
    let mut connection = bench.connection();
    for round in 0..bench.repetitions() {
        for (place, url) in places(bench, cluster) {
            bench.step(&format!("hand-off, {place}, round {}", round + 1));
            let ring = ring(bench, &SEMAPHORE, &url, WAITERS, &mut connection)?;
            for (measure, share) in [("p50", 0.5), ("p99", 0.99)] {
                let what = format!("hand-off, {WAITERS} waiters, {measure}");
                bench.add(&what, place, NANOS, ring.delays.quantile(share));
            }
        }
    }
    for (bar, measure) in [("cluster/handoff/p50", "p50"), ("cluster/handoff/p99", "p99")] {
        let what = format!("hand-off, {WAITERS} waiters, {measure}");
        bench.judge_ratio(bar, &what, CLUSTER, SEMAPHORE.name);
    }
    Ok(())
}
