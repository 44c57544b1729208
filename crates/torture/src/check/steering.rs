//! What an operator has set counts: of grants that are certain to have been made while it did.
//!
//! A change counts for certain from when it was answered until the next one of its kind was asked for; or until the store
//! lost its data, and with them, perhaps, the change. A grant is certain to have been made in that time if all of the time
//! in which it may have been made lies in it.
//!
//! - *Capacity.* A process that is certain to hold for all that time held when the permit was granted. So the units of these and
//!   its own are no more than the capacity. (After a shrink older holders stay. That is why it is asked of a grant, and not of
//!   an instant.)
//! - *Pause.* No grant is made at all.

use super::exempt::forgotten;
use super::ops::Op;
use super::spans::Span;
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros};
use crate::driver::{Change, Steering};

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    if !case.history.things[thing].steered {
        return;
    }
    let changes = || case.history.changes.iter().filter(|change| change.thing == thing);
    let (capacities, pauses): (Vec<_>, Vec<_>) =
        changes().partition(|change| matches!(change.to, Steering::Capacity(_)));
    let ops: Vec<_> = case.ops.iter().filter(|op| op.thing == thing).collect();
    for (to, span) in certain(case, &capacities) {
        if let Steering::Capacity(capacity) = to {
            check_capacity(case, &ops, capacity, span, verdict);
        }
    }
    for (to, span) in certain(case, &pauses) {
        if to == Steering::Pause {
            check_pause(case, &ops, span, verdict);
        }
    }
}

/// What was set, and from when until when that counted for certain.
fn certain(case: &Case<'_>, changes: &[&Change]) -> Vec<(Steering, Span)> {
    let counts = |(at, change): (usize, &&Change)| {
        let next = changes.get(at + 1).map_or(case.history.ended, |next| next.asked);
        let losses = case.history.faults.iter().filter(|fault| fault.loses_data());
        let lost = losses.filter(|loss| loss.end > change.asked).map(|loss| loss.begin).min();
        let span = (change.answered?, next.min(lost.unwrap_or(Micros::MAX)));
        (span.0 < span.1).then_some((change.to, span))
    };
    changes.iter().enumerate().filter_map(counts).collect()
}

/// Those that were granted in this time for certain, with the times in which that may have been.
fn granted<'a>(
    ops: &'a [&'a Op],
    (from, to): Span,
) -> impl Iterator<Item = (&'a Op, Span)> + use<'a> {
    let starts = ops.iter().filter_map(|op| Some((*op, op.start()?)));
    starts.filter(move |(_, (first, last))| from < *first && *last < to)
}

fn check_capacity(case: &Case<'_>, ops: &[&Op], capacity: u32, span: Span, verdict: &mut Verdict) {
    for (op, (first, last)) in granted(ops, span) {
        verdict.facts.steered += 1;
        let all_the_time = |other: &&&Op| {
            let holds = other.certain().is_some_and(|(from, to)| from < first && last < to);
            holds && !forgotten(case, other).meets((first, last + 1))
        };
        let others: Vec<_> = ops.iter().filter(all_the_time).collect();
        let units = op.weight() + others.iter().map(|other| other.weight()).sum::<u32>();
        if units > capacity {
            let who: Vec<_> = others.iter().map(ToString::to_string).collect();
            let what = format!(
                "{op} was granted {units} units of {capacity} while these held: {}",
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
        seen || from < op.asked && op.asked < to
    };
    verdict.facts.paused += ops.iter().filter(waits).count();
    for (op, (_, told)) in granted(ops, span) {
        let since = (told - from) / MILLISECOND;
        let what = format!("{op} was granted a permit during a pause, {since} ms after it began");
        verdict.found(Rule::Pause, op.name(case.history), told, what);
    }
}
