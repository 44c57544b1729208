//! First come, first served, among waiters that no fault has befallen.
//!
//! A was seen in the queue; after that, B asked. So B stands behind A. Two things then tell that B was served first:
//!
//! - A is seen in the queue once more, in answer to a question that was asked when B had its permit;
//! - of one permit, A's fence is larger than B's. Only of one: the fence of a waiter that is woken is minted when it claims
//!   its permit, and with a second permit B may be granted that, and be quicker, although A was granted the first before.
//!
//! B's own misfortunes cannot have put it before A. A's can: whoever is out of reach is passed over, and whoever is taken
//! for dead queues again.

use super::ops::Op;
use super::{Case, Rule, Verdict};
use crate::clock::Micros;
use crate::plan;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let known = &case.history.things[thing];
    if known.kind != plan::Kind::Semaphore {
        return;
    }
    let of_thing = || case.ops.iter().filter(|op| op.thing == thing);
    let mut waiters: Vec<_> = of_thing().filter_map(|op| Some((op.waited()?, op))).collect();
    waiters.sort_unstable_by_key(|((seen, _), _)| *seen);
    let longest = waiters.iter().map(|((seen, until), _)| until - seen).max().unwrap_or_default();
    let longest = longest.min(case.history.ended);
    for later in of_thing() {
        let Some(granted) = later.granted else { continue };
        let first = waiters.partition_point(|((seen, _), _)| *seen + longest < later.asked);
        let before = waiters[first..].iter().take_while(|((seen, _), _)| *seen < later.asked);
        for &((seen, until), waiter) in before.filter(|((_, until), _)| *until > later.asked) {
            let overtook = overtaken(waiter, later, granted.at, known.capacity);
            let calm = |until: Micros| {
                // The other program grants by its own clock, so that its standstill may cost one of ours its turn.
                let whose = case.foreign.iter().filter(|_| known.shared).chain([&waiter.worker]);
                whose.into_iter().all(|worker| !case.touched.of(*worker).meets((seen, until)))
            };
            let Some(at) = overtook else {
                let until = until.min(case.history.ended);
                verdict.facts.ordered_pairs += usize::from(seen < until && calm(until));
                continue;
            };
            if calm(at) {
                let what =
                    format!("{later} asked after {waiter} was in the queue, and was served first");
                verdict.found(Rule::Order, known.name, at, what);
            }
        }
    }
}

/// Until when it is known that the second was served first.
fn overtaken(waiter: &Op, later: &Op, granted: Micros, capacity: u32) -> Option<Micros> {
    let still = waiter.queued.iter().find(|(since, _)| *since > granted).map(|(_, at)| *at);
    let by_fence = match (waiter.fence(), later.fence()) {
        (Some(own), Some(other)) if capacity == 1 && own > other => {
            waiter.granted.map(|told| told.at)
        }
        _ => None,
    };
    still.or(by_fence)
}
