//! No leak: what a worker has given up does not stay in the store.
//!
//! Whenever a worker drops the future of an acquire, or a guard, its client releases what the store may have of it. The
//! client does so even if the request is in flight, or its outcome is unknown. This takes a moment. If a fault hit the
//! worker, it takes until its client is connected again. So while no fault hits a worker, the store lists what that
//! worker has given up for a moment only, however long the lease is. If it is listed for longer, that is a violation,
//! whether or not another client has to wait for it.
//!
//! Not judged are
//!
//! - acquisitions of a process that was killed, from then on: their leases have to end;
//! - an instance id of a pool, from its next use on;
//! - leases without a guard whose release has failed: nobody repeats it;
//! - after a failover, everything that the new primary may still list because it lacks the release: a waiter for two
//!   leases, and then a permit that nobody claims.

use std::collections::HashMap;

use super::liveness::stood_still;
use super::ops::Op;
use super::spans::{Span, Spans};
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros, SECOND};
use crate::fault::Fault;
use crate::history::How;

/// How long the release may take, on a busy machine. Where a request of an earlier connection may still be applied, the
/// release is repeated every second.
const BOUND: Micros = 3 * SECOND / 2;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    let mut ops: HashMap<&str, Vec<&Op>> = HashMap::new();
    for op in case.ops.iter().filter(|op| op.thing == thing) {
        if let Some(id) = &op.listed_as {
            ops.entry(id).or_default().push(op);
        }
    }
    let failovers = failovers(case, thing);
    for listed in case.history.listed.iter().filter(|listed| listed.thing == thing) {
        let same_id = ops.get(listed.id.as_str()).map(Vec::as_slice).unwrap_or_default();
        let next_uses =
            same_id.iter().skip(1).map(|next| next.requested).chain([case.history.ended]);
        for (op, next_use) in same_id.iter().zip(next_uses) {
            let Some(over) = given_up(case, op) else { continue };
            verdict.facts.given_up += usize::from(listed.from < next_use);
            let until = next_use.min(op.killed.unwrap_or(next_use));
            let lists = (over.max(listed.from), listed.to.min(until));
            let calm = case.touched.of(op.worker, thing).without(lists).into_iter();
            for calm in calm.flat_map(|calm| failovers.without(calm)) {
                let listed_for = (calm.1 - calm.0).saturating_sub(slowness(case, op, calm));
                let facts = &mut verdict.facts;
                facts.longest_listed = facts.longest_listed.max(listed_for);
                if listed_for > BOUND {
                    let ago = (calm.1 - over) / MILLISECOND;
                    let what = format!("{op} ended {ago} ms ago, and the store still lists it");
                    verdict.found(Rule::Leak, spec.name, calm.1, what);
                }
            }
        }
    }
}

/// When the worker gave the acquisition up, if its client then releases it, or has released it.
fn given_up(case: &Case<'_>, op: &Op) -> Option<Micros> {
    let (over, how) = op.end?;
    let is_released = how == How::Released || op.is_released_later(case.history, how);
    is_released.then_some(over)
}

/// Returns how long the worker stood still in this time.
fn slowness(case: &Case<'_>, op: &Op, span: Span) -> Micros {
    let lives = case.history.lives.iter().filter(|(life, _)| life.worker == op.worker);
    lives.map(|(_, lines)| stood_still(lines, span)).sum()
}

/// The times in which a new primary may lack releases that the old one had confirmed.
fn failovers(case: &Case<'_>, thing: usize) -> Spans {
    let spec = &case.history.things[thing];
    let faults = case.history.faults.iter();
    let faults = faults.filter(|fault| fault.is_failover() && fault.concerns(thing));
    let aftermath = |fault: &Fault| -> Span {
        let left = fault.recovery_time() + spec.lease + spec.aftermath();
        (fault.begin, fault.end.saturating_add(left))
    };
    faults.map(aftermath).collect()
}
