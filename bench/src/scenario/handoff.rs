//! The time from the release in one process until the next waiter runs in another.
//!
//! Two processes of the contender have half of the waiters each. A waiter that is granted the permit holds it until the
//! bench tells it to release. It asks again only after the next waiter was granted the permit. So the number of waiters
//! never changes, no waiter takes back what it has just released, and nothing else happens at the moment of the
//! release. Right before each release the bench sends a `PING`, when nothing else happens either.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;

use super::limits::ping;
use super::{NANOS, contention};
use crate::bench::Bench;
use crate::contender::{Contender, ETCD, LOCK, PING, PYTHON_REDIS_LOCK, SEMAPHORE, WAITING};
use crate::driver::Driver;
use crate::sample::Sample;

/// How long a waiter holds: long enough for the previous holder to have joined the queue again.
const HOLD: Duration = Duration::from_millis(2);
/// A library that polls ten times a second may need this long for the next grant.
const TIME_LIMIT: Duration = Duration::from_secs(5);

const MEASURES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("max", 1.0)];

pub(super) fn run(bench: &mut Bench) {
    let mut connection = bench.connection();
    let mut failed = Vec::new();
    let mut rounds = 0;
    while bench.again(rounds) {
        rounds += 1;
        // The bars are for 20 waiters.
        let numbers: &[u64] = if bench.quick { &[20] } else { &[20, 2, 200] };
        for waiters in numbers.iter().copied() {
            for contender in WAITING.iter().chain(&[&ETCD]) {
                bench.step(&format!("{waiters} waiters, {}, round {rounds}", contender.name));
                if failed.contains(&(waiters, contender.name)) {
                    continue;
                }
                let ring = bench
                    .url_of(contender)
                    .and_then(|url| ring(bench, contender, &url, waiters, &mut connection));
                match ring {
                    Ok(ring) => add(bench, contender, waiters, &ring),
                    Err(why) => {
                        bench.trouble(contender.name, format!("{waiters} waiters: {why}"));
                        failed.push((waiters, contender.name));
                    }
                }
            }
        }
    }
    let (p50, p99) = ("20 waiters, p50", "20 waiters, p99");
    for (bar, what, first, second) in [
        ("handoff/p50", p50, SEMAPHORE.name, PING),
        ("handoff/p99", p99, SEMAPHORE.name, PING),
        ("handoff/lock", p99, LOCK.name, PING),
        // The peer with the fastest hand-off.
        ("handoff/p50/peer", p50, PYTHON_REDIS_LOCK.name, SEMAPHORE.name),
        ("handoff/p99/peer", p99, PYTHON_REDIS_LOCK.name, SEMAPHORE.name),
    ] {
        bench.judge_ratio(bar, what, first, second);
    }
}

/// With fewer hand-offs, the p99 is the longest.
const FEW: usize = 100;

fn add(bench: &mut Bench, contender: &'static Contender, waiters: u64, ring: &Ring) {
    for (measure, share) in MEASURES {
        let what = format!("{waiters} waiters, {measure}");
        bench.add(&what, contender.name, NANOS, ring.delays.quantile(share));
        if *contender == SEMAPHORE {
            bench.add(&what, PING, NANOS, ring.pings.quantile(share));
        }
    }
    note_few(bench, "handoff", contender, waiters, ring);
}

/// Adds a note if there were too few hand-offs.
pub(super) fn note_few(
    bench: &mut Bench,
    scenario: &'static str,
    contender: &'static Contender,
    waiters: u64,
    ring: &Ring,
) {
    let (name, many) = (contender.name, ring.delays.0.len());
    if many < FEW {
        bench.report.note(scenario, format!("{name}, {waiters} waiters: {many} hand-offs in a round, so that its p99 is its longest"));
    }
}

pub(super) struct Ring {
    pub(super) delays: Sample,
    pings: Sample,
}

/// Measures hand-offs among the waiters of two processes, on the store at this URL.
pub(super) fn ring(
    bench: &mut Bench,
    contender: &'static Contender,
    url: &str,
    waiters: u64,
    connection: &mut MultiplexedConnection,
) -> Result<Ring, String> {
    let name = bench.name();
    let mut sides = contention::two(contender, url)?;
    // One more than wait, because one of them always holds.
    for (side, starts_at, step) in contention::staggered(waiters) {
        let many = if side == 0 { waiters / 2 + 1 } else { waiters - waiters / 2 };
        sides[side].send(&format!("ring {name} {many} {starts_at} {step}"))?;
    }
    let mut holder = next(&mut sides, "granted")?.0;
    std::thread::sleep(contention::SETTLE);
    let (mut delays, mut pings) = (Sample::default(), Sample::default());
    let until = Instant::now() + if bench.quick { bench.window() * 2 } else { bench.window() * 3 };
    loop {
        pings.0.push(bench.runtime.block_on(ping(connection)));
        sides[holder].send("release")?;
        let (mut released, mut granted) = (None, None);
        while released.is_none() || granted.is_none() {
            let (side, word, at) = next_of(&mut sides)?;
            match word.as_str() {
                "released" => released = Some(at),
                "granted" => granted = Some((side, at)),
                _ => return Err(format!("line {word:?}")),
            }
        }
        let (Some(released), Some((side, granted))) = (released, granted) else { continue };
        // Hand-offs within one process do not count: a library may avoid the network for them.
        if side != holder {
            delays.0.push(contention::between(released, granted));
        }
        // A slow contender has more time for its first hand-off that counts.
        if Instant::now() > until && (!delays.is_empty() || until.elapsed() > TIME_LIMIT) {
            break;
        }
        sides[holder].send("rejoin")?;
        holder = side;
        std::thread::sleep(HOLD);
    }
    if delays.is_empty() {
        return Err("never handed over to the other process".to_owned());
    }
    Ok(Ring { delays, pings })
}

fn next(sides: &mut [Driver; 2], expected: &str) -> Result<(usize, u64), String> {
    let (side, word, at) = next_of(sides)?;
    if word == expected { Ok((side, at)) } else { Err(format!("line {word:?}")) }
}

/// Returns the next line of either process.
fn next_of(sides: &mut [Driver; 2]) -> Result<(usize, String, u64), String> {
    let begun = Instant::now();
    while begun.elapsed() < TIME_LIMIT {
        for (index, side) in sides.iter_mut().enumerate() {
            let Some(line) = side.line_by_now() else { continue };
            let (word, at) = line.split_once(' ').unwrap_or((&line, ""));
            return match at.parse() {
                Ok(at) => Ok((index, word.to_owned(), at)),
                Err(_) => Err(line),
            };
        }
        // The lines contain their times, so it does not matter when they are read.
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(format!("no waiter was granted the permit within {TIME_LIMIT:?}"))
}
