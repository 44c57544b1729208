//! Fences are unique and increase: an acquisition that was requested after another was granted has a larger fence.

use std::collections::HashMap;

use super::exempt::epoch;
use super::ops::Op;
use super::{Case, Rule, Verdict};

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let name = case.history.things[thing].name;
    let mut epochs: HashMap<usize, Vec<(u64, &Op)>> = HashMap::new();
    for op in case.ops.iter().filter(|op| op.thing == thing) {
        if let (Some(fence), Some(epoch)) = (op.fence(), epoch(case, op)) {
            epochs.entry(epoch).or_default().push((fence, op));
        }
    }
    for mut granted in epochs.into_values() {
        granted.sort_unstable_by_key(|(fence, op)| (*fence, op.requested));
        for pair in granted.windows(2) {
            let [(one, first), (other, second)] = pair else { continue };
            if one == other {
                let what = format!("{first} and {second} have the same fence");
                verdict.found(Rule::Fence, name, second.requested, what);
            }
        }
        let mut by_grant = granted.clone();
        by_grant.sort_unstable_by_key(|(_, op)| op.granted.map(|granted| granted.at));
        granted.sort_unstable_by_key(|(_, op)| op.requested);
        let mut by_grant = by_grant.into_iter().peekable();
        let mut newest: Option<(u64, &Op)> = None;
        for (fence, op) in granted {
            while let Some(before) = by_grant.next_if(|(_, before)| {
                before.granted.is_some_and(|granted| granted.at < op.requested)
            }) {
                if newest.is_none_or(|(largest, _)| before.0 > largest) {
                    newest = Some(before);
                }
            }
            if let Some((largest, before)) = newest.filter(|(largest, _)| *largest > fence) {
                let what = format!(
                    "{op} was requested after {before} was reported, but {fence} < {largest}"
                );
                verdict.found(Rule::Fence, name, op.requested, what);
            }
        }
    }
}
