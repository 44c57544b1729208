//! One permit and many waiters that acquire it repeatedly: how many grants there are, and how they are distributed.

use std::collections::BTreeSet;
use std::time::Duration;

use super::pairs::FEWER;
use super::{NANOS, RATE, contention};
use crate::bench::Bench;
use crate::contender::{Contender, WAITING};
use crate::driver::Wait;
use crate::report::Better;
use crate::sample::{Sample, count};

/// A waiter that asked at least this much earlier and is served later was passed over. Below that, the network may have
/// changed the order. In nanoseconds.
const LATER: u64 = 2_000_000;

pub(super) fn run(bench: &mut Bench) {
    let mut failed = Vec::new();
    let mut rounds = 0;
    let numbers: &[u64] = if bench.quick { &[20] } else { &[2, 20, 200] };
    while bench.again(rounds) {
        rounds += 1;
        for waiters in numbers.iter().copied() {
            for contender in WAITING {
                bench.step(&format!("{waiters} waiters, {}, round {rounds}", contender.name));
                if failed.contains(&(waiters, contender.name)) {
                    continue;
                }
                if let Err(why) = measure(bench, contender, waiters) {
                    bench.trouble(contender.name, format!("{waiters} waiters: {why}"));
                    failed.push((waiters, contender.name));
                }
            }
        }
    }
}

fn measure(bench: &mut Bench, contender: &'static Contender, waiters: u64) -> Result<(), String> {
    let (name, window) = (bench.name(), bench.window() * 3);
    let mut sides = contention::two(contender, &bench.url)?;
    let starts = contention::staggered(waiters);
    let ends_at =
        starts[0].1 + u64::try_from((contention::SETTLE + window).as_nanos()).expect("short");
    for (side, starts_at, step) in starts {
        let many = if side == 0 { waiters - waiters / 2 } else { waiters / 2 };
        sides[side].send(&format!("contend {name} {many} {starts_at} {step} 0 {ends_at}"))?;
    }
    let mut waits = Vec::new();
    for (side, driver) in (0_u64..).zip(&mut sides) {
        let mut side_waits = driver.waits(window * 2 + Duration::from_secs(15))?;
        for wait in &mut side_waits {
            wait.waiter = wait.waiter * 2 + side;
        }
        waits.extend(side_waits);
    }
    let begins_at = ends_at - u64::try_from(window.as_nanos()).expect("short");
    let totals = Totals::of(&mut waits, begins_at, ends_at);
    if totals.grants < 1.0 {
        return Err("granted nothing".to_owned());
    }
    let named = |measure: &str| format!("{waiters} waiters, {measure}");
    let (who, seconds) = (contender.name, window.as_secs_f64());
    bench.add(&named("grants"), who, RATE, totals.grants / seconds);
    bench.add(&named("grants to another than before"), who, RATE, totals.handed_over / seconds);
    bench.add(&named("median wait"), who, NANOS, totals.waited.median());
    bench.add(&named("longest wait"), who, NANOS, totals.waited.max());
    bench.add(&named("passed over at a grant"), who, FEWER, totals.passed_over);
    let served = totals.served / count(waiters) * 100.0;
    bench.add(&named("were served at all"), who, ("%", Better::More), served);
    Ok(())
}

/// What happened within the window.
struct Totals {
    grants: f64,
    /// Grants that did not go to the waiter that had just released.
    handed_over: f64,
    waited: Sample,
    /// How many waiters had asked earlier than the one that was granted: the mean over all grants.
    passed_over: f64,
    /// How many of the waiters were granted the permit at least once.
    served: f64,
}

impl Totals {
    /// A waiter that still waits at the end counts with the time that it has waited by then. Otherwise the unluckiest
    /// waiters would not be counted at all.
    fn of(waits: &mut Vec<Wait>, begins_at: u64, ends_at: u64) -> Self {
        let granted = |wait: &Wait| wait.granted.unwrap_or(u64::MAX);
        waits.retain(|wait| granted(wait) >= begins_at && wait.requested < ends_at);
        waits.sort_by_key(granted);
        let waited = waits
            .iter()
            .map(|wait| contention::between(wait.requested, granted(wait).min(ends_at)));
        let waited = Sample(waited.collect());
        let passed_over = passed_over(waits);
        waits.retain(|wait| granted(wait) < ends_at);
        let grants = count(waits.len());
        let handed_over = waits.windows(2).filter(|two| two[0].waiter != two[1].waiter).count();
        let served: BTreeSet<_> = waits.iter().map(|wait| wait.waiter).collect();
        Self {
            grants,
            handed_over: count(handed_over),
            waited,
            passed_over: count(passed_over) / grants.max(1.0),
            served: count(served.len()),
        }
    }
}

/// Returns how often a waiter was granted the permit although another had asked earlier and still waited. The waits are
/// in the order of their grants.
fn passed_over(waits: &[Wait]) -> u64 {
    let mut requested: Vec<_> = waits.iter().map(|wait| wait.requested).collect();
    requested.sort_unstable();
    // Going back from the last grant, a Fenwick tree counts how many of those granted later had asked before a moment.
    let mut later = vec![0_u64; requested.len() + 1];
    let mut passed = 0;
    for wait in waits.iter().rev() {
        let mut earlier = requested.partition_point(|at| *at + LATER < wait.requested);
        while wait.granted.is_some() && earlier > 0 {
            passed += later[earlier];
            earlier &= earlier - 1;
        }
        let mut node = requested.partition_point(|at| *at < wait.requested) + 1;
        while node < later.len() {
            later[node] += 1;
            node += node & node.wrapping_neg();
        }
    }
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(all: &[(u64, Option<u64>)]) -> Vec<Wait> {
        let wait = |(waiter, (requested, granted)): (u64, &(u64, Option<u64>))| Wait {
            waiter,
            requested: requested * LATER * 2,
            granted: granted.map(|at| at * LATER * 2),
        };
        (0..).zip(all).map(wait).collect()
    }

    #[test]
    fn in_arrival_order_no_waiter_is_passed_over() {
        assert_eq!(passed_over(&waits(&[(1, Some(4)), (2, Some(5)), (3, Some(6))])), 0);
    }

    #[test]
    fn all_earlier_requests_that_still_wait_count() {
        // The last one is served first, and passes over two. Then the second is served before the first, which makes
        // one more.
        assert_eq!(passed_over(&waits(&[(3, Some(4)), (2, Some(5)), (1, Some(6))])), 3);
        assert_eq!(passed_over(&waits(&[(3, Some(4)), (1, None), (2, None)])), 2);
    }
}
