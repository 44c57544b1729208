//! First come, first served, among waiters that were not hit by a fault.
//!
//! A was seen in the queue, and after that B asked. So B is behind A. Either of two observations shows that B was
//! served first:
//!
//! - A is seen in the queue again, in answer to a query that was sent when B had its permit.
//! - A's fence is larger than B's. This is checked only if the capacity is 1, and if no loss of data between the two
//!   grants can have reset the fences.
//!
//! A fault that hit B cannot have put B ahead of A. A fault that hit A can: *grant* skips a waiter that is out of
//! reach, and a waiter that expired queues again.

use super::exempt::epoch;
use super::ops::Op;
use super::{Case, Rule, Verdict};
use crate::clock::Micros;
use crate::plan;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    if spec.kind != plan::Kind::Semaphore {
        return;
    }
    let of_thing = || case.ops.iter().filter(|op| op.thing == thing);
    let mut waiters: Vec<_> = of_thing().filter_map(|op| Some((op.waited()?, op))).collect();
    waiters.sort_unstable_by_key(|((seen, _), _)| *seen);
    let longest = waiters.iter().map(|((seen, until), _)| until - seen).max().unwrap_or_default();
    let longest = longest.min(case.history.ended);
    for later in of_thing() {
        let Some(granted) = later.granted else { continue };
        let first = waiters.partition_point(|((seen, _), _)| *seen + longest < later.requested);
        let before = waiters[first..].iter().take_while(|((seen, _), _)| *seen < later.requested);
        for &((seen, until), waiter) in before.filter(|((_, until), _)| *until > later.requested) {
            let same = epoch(case, waiter)
                .is_some_and(|waiter_epoch| epoch(case, later) == Some(waiter_epoch));
            let by_fence = same && spec.capacity == 1;
            let overtook = overtaken(waiter, later, granted.at, by_fence);
            let calm = |until: Micros| {
                // The other program grants by its own clock. So if it does not run, one of our
                // waiters may lose its turn.
                let whose = case.foreign.iter().filter(|_| spec.shared).chain([&waiter.worker]);
                let touched = |worker: &usize| case.touched.of(*worker, thing);
                whose.into_iter().all(|worker| !touched(worker).meets((seen, until)))
            };
            let Some(at) = overtook else {
                let until = until.min(case.history.ended);
                verdict.facts.ordered_pairs += usize::from(seen < until && calm(until));
                continue;
            };
            if calm(at) {
                let what = format!(
                    "{later} was requested after {waiter} was in the queue, but was granted first"
                );
                verdict.found(Rule::Order, spec.name, at, what);
            }
        }
    }
}

/// The time at which it is known that the second was served first.
fn overtaken(waiter: &Op, later: &Op, granted: Micros, by_fence: bool) -> Option<Micros> {
    let still = waiter.queued.iter().find(|(since, _)| *since > granted).map(|(_, at)| *at);
    let by_fence = match (waiter.fence(), later.fence()) {
        (Some(fence), Some(other)) if by_fence && fence > other => {
            waiter.granted.map(|granted| granted.at)
        }
        _ => None,
    };
    still.or(by_fence)
}
