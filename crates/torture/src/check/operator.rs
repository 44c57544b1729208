//! What an operator has set is respected by every grant that was certainly made while it was in force.
//!
//! A change is certainly in force from when it was answered until the next change of its kind was requested, or until
//! the store lost its data, and with it perhaps the change. A grant was certainly made in that time if the whole span
//! in which it may have been made lies within it.
//!
//! - *Capacity.* A process that certainly held for that whole span held when the permit was granted. So the units of
//!   all such processes plus those of the grant are at most the capacity. (After a shrink, older holders stay. That is
//!   why the rule checks grants, not instants.)
//! - *Pause.* No grant is made at all.

use super::exempt::forgotten;
use super::ops::Op;
use super::spans::Span;
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros};
use crate::driver::{Change, LimitChange};
use crate::fault::Fault;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    if !case.history.things[thing].operated {
        return;
    }
    let changes = || case.history.changes.iter().filter(|change| change.thing == thing);
    let (capacities, pauses): (Vec<_>, Vec<_>) =
        changes().partition(|change| matches!(change.to, LimitChange::Capacity(_)));
    let ops: Vec<_> = case.ops.iter().filter(|op| op.thing == thing).collect();
    for (to, span) in certain(case, &capacities) {
        if let LimitChange::Capacity(capacity) = to {
            check_capacity(case, &ops, capacity, span, verdict);
        }
    }
    for (to, span) in certain(case, &pauses) {
        if to == LimitChange::Pause {
            check_pause(case, &ops, span, verdict);
        }
    }
}

/// The settings, each with the time for which it was certainly in force.
fn certain(case: &Case<'_>, changes: &[&Change]) -> Vec<(LimitChange, Span)> {
    let counts = |(at, change): (usize, &&Change)| {
        let next = changes.get(at + 1).map_or(case.history.ended, |next| next.requested);
        let costs = |fault: &&Fault| fault.loses_data() && fault.concerns(change.thing);
        let losses = case.history.faults.iter().filter(costs);
        let lost = losses.filter(|loss| loss.end > change.requested).map(|loss| loss.begin).min();
        let span = (change.answered?, next.min(lost.unwrap_or(Micros::MAX)));
        (span.0 < span.1).then_some((change.to, span))
    };
    changes.iter().enumerate().filter_map(counts).collect()
}

/// The acquisitions that were certainly granted in this time, each with the span in which that may have happened.
fn granted<'a>(
    ops: &'a [&'a Op],
    (from, to): Span,
) -> impl Iterator<Item = (&'a Op, Span)> + use<'a> {
    let starts = ops.iter().filter_map(|op| Some((*op, op.start()?)));
    starts.filter(move |(_, (first, last))| from < *first && *last < to)
}

fn check_capacity(case: &Case<'_>, ops: &[&Op], capacity: u32, span: Span, verdict: &mut Verdict) {
    for (op, (first, last)) in granted(ops, span) {
        verdict.facts.operated += 1;
        let all_the_time = |other: &&&Op| {
            let holds = other.certain().is_some_and(|(from, to)| from < first && last < to);
            holds && !forgotten(case, other).meets((first, last + 1))
        };
        let others: Vec<_> = ops.iter().filter(all_the_time).collect();
        let units = op.weight() + others.iter().map(|other| other.weight()).sum::<u32>();
        if units > capacity {
            let who: Vec<_> = others.iter().map(ToString::to_string).collect();
            let what = format!(
                "with {op}, {units} units are held; the capacity is {capacity}; the others are {}",
                who.join(", ")
            );
            verdict.found(Rule::Limit, op.name(case.history), last, what);
        }
    }
}

fn check_pause(case: &Case<'_>, ops: &[&Op], span: Span, verdict: &mut Verdict) {
    let (from, to) = span;
    let waits = |op: &&&Op| {
        let seen = op.queued.iter().any(|(since, at)| from < *since && *at < to);
        seen || from < op.requested && op.requested < to
    };
    verdict.facts.paused += ops.iter().filter(waits).count();
    for (op, (_, granted_at)) in granted(ops, span) {
        let since = (granted_at - from) / MILLISECOND;
        let what = format!("{op} was granted a permit during a pause, {since} ms after it began");
        verdict.found(Rule::Pause, op.name(case.history), granted_at, what);
    }
}
