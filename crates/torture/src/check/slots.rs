//! No two that are certain to hold at one instant have the same slot number; and nobody has one beyond the last.
//!
//! The permits of locks, pools and plain semaphores have none, but another program counts them: that is why the last one is
//! looked at everywhere.

use super::exempt::forgotten;
use super::ops::Op;
use super::{Case, Rule, Verdict};
use crate::clock::Micros;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let known = &case.history.things[thing];
    let ops = || case.ops.iter().filter(|op| op.thing == thing);
    for op in ops() {
        let Some(granted) = op.granted else { continue };
        let (slot, capacity) = (granted.slot, known.capacity);
        if slot > capacity {
            let what = format!("{op} was told that it holds slot {slot} of {capacity}");
            verdict.found(Rule::Limit, known.name, granted.at, what);
        }
        if known.numbered && slot == 0 {
            let what = format!("{op} was told no slot number");
            verdict.found(Rule::Slots, known.name, granted.at, what);
        }
    }
    if !known.numbered {
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
    // Of those of one slot, in the order in which they begin, the one that ends last.
    let mut last: Option<(u32, Micros, &Op)> = None;
    for (slot, from, to, op) in held {
        match last.filter(|(same, _, _)| *same == slot) {
            Some((_, until, other)) => {
                if from < until && !std::ptr::eq(op, other) {
                    let what = format!("{other} and {op} hold slot {slot} at one time");
                    verdict.found(Rule::Slots, known.name, from, what);
                }
                if to > until {
                    last = Some((slot, to, op));
                }
            }
            None => last = Some((slot, to, op)),
        }
    }
}
