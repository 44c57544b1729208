//! At no instant do the certain holders have more units than there are. A permit takes its weight in units, usually
//! one.

use super::exempt::forgotten;
use super::{Case, Rule, Verdict};
use crate::clock::Micros;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    let capacity = spec.capacity;
    // At the same instant, ends sort before beginnings: a holder that begins then begins after the other has ended.
    let mut steps: Vec<(Micros, bool, usize)> = Vec::new();
    for (index, op) in case.ops.iter().enumerate().filter(|(_, op)| op.thing == thing) {
        let Some(certain) = op.certain() else { continue };
        verdict.facts.certain += 1;
        for (from, to) in forgotten(case, op).without(certain) {
            steps.push((from, true, index));
            steps.push((to, false, index));
        }
    }
    steps.sort_unstable();
    let mut holding: Vec<usize> = Vec::new();
    for (at, begins, index) in steps {
        if !begins {
            holding.retain(|spec| *spec != index);
            continue;
        }
        holding.push(index);
        let units: u32 = holding.iter().map(|index| case.ops[*index].weight()).sum();
        verdict.facts.full += usize::from(units >= capacity);
        if units > capacity {
            let who: Vec<_> = holding.iter().map(|index| case.ops[*index].to_string()).collect();
            let what = format!(
                "{units} units are certainly held; the capacity is {capacity}; the holders are {}",
                who.join(", ")
            );
            verdict.found(Rule::Limit, spec.name, at, what);
        }
    }
    for crowded in case.history.crowded.iter().filter(|crowded| crowded.thing == thing) {
        let what = format!("the store has {} holders; the capacity is {capacity}", crowded.held);
        verdict.found(Rule::Limit, spec.name, crowded.at, what);
    }
}
