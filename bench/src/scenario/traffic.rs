//! The work of the server: requests, bytes, calls and connections, for a grant and for waiters.
//!
//! On our own server, the contenders connect through a proxy that counts requests and bytes. On a given server there
//! are only the counters of `INFO`, which also count the calls of scripts and the commands of other clients.

use std::time::Duration;

use testkit::proxy::FaultProxy;

use super::pairs::FEWER;
use super::{BYTES, contention};
use crate::bench::Bench;
use crate::contender::{Contender, LOCK, SEMAPHORE, WAITING};
use crate::driver::Driver;
use crate::sample::count;

const WAITERS: u64 = 20;
const PAIRS: u64 = 100;

pub(super) fn run(bench: &mut Bench) {
    let mut rounds = 0;
    while bench.again(rounds) {
        rounds += 1;
        for contender in WAITING {
            bench.step(contender.name);
            let waiting = waiting(bench, contender);
            if let Err(why) = waiting.and_then(|()| granting(bench, contender)) {
                bench.trouble(contender.name, why);
            }
        }
    }
    for (bar, what, contender) in [
        ("traffic/pair", "uncontended pair, requests", &SEMAPHORE),
        ("traffic/calls", "uncontended pair, calls in Redis", &SEMAPHORE),
        ("traffic/calls/lock", "uncontended pair, calls in Redis", &LOCK),
    ] {
        let ours = bench.sample(what, contender.name);
        bench.report.judge(bar, &ours);
    }
}

/// The counts up to a moment.
#[derive(Clone, Copy)]
struct Counts {
    requests: Option<u64>,
    bytes: u64,
    /// Calls of commands, including those by scripts.
    calls: u64,
    connections: u64,
}

/// The source of the counts.
struct Counter<'a> {
    bench: &'a Bench,
    proxy: Option<FaultProxy>,
}

impl<'a> Counter<'a> {
    fn new(bench: &'a Bench) -> Self {
        let proxy = bench.server.as_ref().map(|server| FaultProxy::start(server.port()));
        Self { bench, proxy }
    }

    fn url(&self) -> String {
        self.proxy.as_ref().map_or_else(|| self.bench.url.clone(), FaultProxy::url)
    }

    fn now(&self) -> Result<Counts, String> {
        let text = |why: redis::RedisError| why.to_string();
        let client = redis::Client::open(self.bench.url.as_str()).map_err(text)?;
        let mut connection = client.get_connection().map_err(text)?;
        let info: String = redis::cmd("INFO").query(&mut connection).map_err(text)?;
        let field = |name: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        let on_the_wire = self.proxy.as_ref().map(FaultProxy::traffic);
        Ok(Counts {
            requests: on_the_wire.map(|wire| wire.requests),
            bytes: on_the_wire.map_or_else(
                || field("total_net_input_bytes") + field("total_net_output_bytes"),
                |wire| wire.bytes_to_server + wire.bytes_to_client,
            ),
            calls: field("total_commands_processed"),
            connections: on_the_wire
                .map_or_else(|| field("connected_clients"), |wire| wire.connections as u64),
        })
    }
}

/// One process holds, and twenty waiters of another process wait for longer than the measurement.
fn waiting(bench: &mut Bench, contender: &'static Contender) -> Result<(), String> {
    let (name, time_limit) = (bench.name(), Duration::from_secs(5));
    let counter = Counter::new(bench);
    let [mut holder, mut others] = contention::two(contender, &counter.url())?;
    holder.call(&format!("hold {name} 10000"), time_limit)?;
    let alone = counter.now()?;
    others.call(&format!("wait {name} {WAITERS} 10000 9000"), time_limit)?;
    std::thread::sleep(contention::SETTLE);
    let (begun, before) = (std::time::Instant::now(), counter.now()?);
    std::thread::sleep(bench.window() * 3);
    let (seconds, after) = (begun.elapsed().as_secs_f64(), counter.now()?);
    drop((holder, others));
    let each = |many: u64| count(many) / seconds / count(WAITERS);
    let what = format!("a second of waiting, of {WAITERS}");
    let who = contender.name;
    // INFO itself is one call. Its bytes are not subtracted.
    let calls = each((after.calls - before.calls).saturating_sub(1));
    if let (Some(after), Some(before)) = (after.requests, before.requests) {
        bench.add(&format!("{what}, requests"), who, FEWER, each(after - before));
    }
    bench.add(&format!("{what}, calls in Redis"), who, FEWER, calls);
    bench.add(&format!("{what}, bytes"), who, BYTES, each(after.bytes - before.bytes));
    let opened = count(after.connections.saturating_sub(alone.connections)) / count(WAITERS);
    bench.add(&format!("connections for each of {WAITERS} that wait"), who, FEWER, opened);
    Ok(())
}

/// One task without contention, and twenty that compete.
fn granting(bench: &mut Bench, contender: &'static Contender) -> Result<(), String> {
    let (name, wanted) = (bench.name(), bench.name());
    let time_limit = Duration::from_secs(20);
    let counter = Counter::new(bench);
    let mut driver = Driver::start(contender, &counter.url())?;
    // A few pairs first, so that it is connected and its scripts are loaded.
    driver.call(&format!("repeat {name} 10"), time_limit)?;
    let before = counter.now()?;
    driver.call(&format!("repeat {name} {PAIRS}"), time_limit)?;
    let after = counter.now()?;
    let starts_at = crate::host::nanos() + 10_000_000;
    let ends_at = starts_at + u64::try_from((bench.window() * 2).as_nanos()).expect("short");
    let step = 1_000_000;
    driver.send(&format!("contend {wanted} {WAITERS} {starts_at} {step} 2000000 {ends_at}"))?;
    let waits = driver.waits(time_limit)?;
    let then = counter.now()?;
    drop(driver);
    let who = contender.name;
    let grants = count(waits.iter().filter(|wait| wait.granted.is_some()).count().max(1));
    if let (Some(before), Some(after), Some(then)) =
        (before.requests, after.requests, then.requests)
    {
        let each = count(after - before) / count(PAIRS);
        bench.add("uncontended pair, requests", who, FEWER, each);
        let what = format!("a grant with {WAITERS} that want it, held for 2 ms, requests");
        bench.add(&what, who, FEWER, count(then - after) / grants);
    }
    let calls = count((after.calls - before.calls).saturating_sub(1)) / count(PAIRS);
    bench.add("uncontended pair, calls in Redis", who, FEWER, calls);
    let bytes = count(after.bytes - before.bytes) / count(PAIRS);
    bench.add("uncontended pair, bytes", who, BYTES, bytes);
    Ok(())
}
