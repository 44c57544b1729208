//! No two certain holders have the same slot number at one instant, and no slot number is greater than the capacity.
//!
//! Locks, pools and plain semaphores have no slot numbers. But the other program reports the number of holders as its
//! slot, so the upper bound is checked for every thing.

use super::exempt::forgotten;
use super::ops::Op;
use super::{Case, Rule, Verdict};
use crate::clock::Micros;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    let ops = || case.ops.iter().filter(|op| op.thing == thing);
    for op in ops() {
        let Some(granted) = op.granted else { continue };
        let (slot, capacity) = (granted.slot, spec.capacity);
        if slot > capacity {
            let what = format!("{op} was granted slot {slot}; the capacity is {capacity}");
            verdict.found(Rule::Limit, spec.name, granted.at, what);
        }
        if spec.numbered && slot == 0 {
            let what = format!("{op} was granted no slot number");
            verdict.found(Rule::Slots, spec.name, granted.at, what);
        }
    }
    if !spec.numbered {
        return;
    }
    let mut held: Vec<(u32, Micros, Micros, &Op)> = Vec::new();
    for op in ops() {
        let (Some(granted), Some(certain)) = (op.granted, op.certain()) else { continue };
        let counts = forgotten(case, op).without(certain);
        held.extend(counts.into_iter().map(|(from, to)| (granted.slot, from, to, op)));
    }
    held.sort_unstable_by_key(|(slot, from, to, _)| (*slot, *from, *to));
    verdict.facts.numbered += held.len();
    // Of the holders of one slot that have begun so far, the one that ends last.
    let mut last: Option<(u32, Micros, &Op)> = None;
    for (slot, from, to, op) in held {
        match last.filter(|(same, _, _)| *same == slot) {
            Some((_, until, other)) => {
                if from < until && !std::ptr::eq(op, other) {
                    let what = format!("{other} and {op} hold slot {slot} at the same time");
                    verdict.found(Rule::Slots, spec.name, from, what);
                }
                if to > until {
                    last = Some((slot, to, op));
                }
            }
            None => last = Some((slot, to, op)),
        }
    }
}
