//! The protected record: no update is lost, and no holder that rightly believes is refused.

use std::collections::BTreeMap;

use super::exempt::{epoch, forgotten};
use super::ops::{Op, Write};
use super::{Case, Rule, Verdict};

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    if !spec.recorded {
        return;
    }
    let of_thing = || case.ops.iter().filter(|op| op.thing == thing);
    let mut versions: BTreeMap<u64, Vec<(&Op, Write)>> = BTreeMap::new();
    for op in of_thing() {
        verdict.facts.refused += op.refused.len();
        verdict.facts.writes += op.writes.iter().filter(|write| write.done).count();
        for write in &op.writes {
            versions.entry(write.version).or_default().push((op, *write));
        }
        refused(case, op, verdict);
        changed(case, op, verdict);
    }
    let mut before: Option<(&Op, Write)> = None;
    for (version, writes) in &versions {
        let mut done = writes.iter().filter(|(_, write)| write.done);
        let (first, second) = (done.next(), done.next());
        if let (Some((first, _)), Some((second, _))) = (first, second) {
            let what = format!("{first} and {second} both wrote version {version}");
            verdict.found(Rule::Record, spec.name, second.requested, what);
        }
        let Some(&(op, write)) = first else { continue };
        // The version was made from the previous one, whose writer may have died before it recorded that write.
        let made_from = versions.get(&(version - 1)).into_iter().flatten();
        if *version > 1 && !made_from.clone().any(|(_, older)| older.sum == write.before) {
            let what = format!("{op} wrote version {version} over a version that never existed");
            verdict.found(Rule::Record, spec.name, op.requested, what);
        }
        if let Some((older, last)) = before {
            let same = epoch(case, older) == epoch(case, op) && epoch(case, op).is_some();
            if same && last.fence > write.fence {
                let what = format!("{op} wrote after {older}, but has an older fence");
                verdict.found(Rule::Record, spec.name, op.requested, what);
            }
        }
        before = Some((op, write));
    }
    for (_, state) in case.history.records.iter().filter(|(at, _)| *at == thing) {
        let newest = versions.values().flatten().filter(|(_, write)| write.done);
        let newest = newest.map(|(_, write)| write.version).max().unwrap_or_default();
        let intended = versions.get(&state.version).into_iter().flatten();
        let is_known_sum =
            state.version == 0 || intended.clone().any(|(_, write)| write.sum == state.sum);
        if state.version < newest || !is_known_sum {
            let what =
                format!("the record is at version {}, after {newest} was written", state.version);
            verdict.found(Rule::Record, spec.name, case.history.ended, what);
        }
    }
}

/// Checks that no other holder wrote between this holder's read and write without being stopped by a fence.
fn changed(case: &Case<'_>, op: &Op, verdict: &mut Verdict) {
    for (at, version) in &op.conflicts {
        let own_epoch = epoch(case, op);
        let writers = case.ops.iter().filter(|other| {
            other.thing == op.thing && other.writes.iter().any(|write| write.version == *version)
        });
        // After a loss of data, the fences of a lock do not distinguish new holders from old ones.
        let lost =
            own_epoch.is_none() || writers.clone().any(|other| epoch(case, other) != own_epoch);
        if !lost {
            let who: Vec<_> = writers.map(ToString::to_string).collect();
            let what = format!("{op} would have overwritten the write of {}", who.join(" or "));
            verdict.found(Rule::Record, op.name(case.history), *at, what);
        }
    }
}

/// Checks that a holder stops believing after it was refused because of a newer holder.
fn refused(case: &Case<'_>, op: &Op, verdict: &mut Verdict) {
    for (at, floor) in &op.refused {
        let Some((since, _)) = op.holds.iter().find(|(since, _)| since > at) else { continue };
        if forgotten(case, op).meets((*at, *since)) {
            continue;
        }
        // The counter of a lock may have been reset since the newer one was granted.
        let own_epoch = epoch(case, op);
        let newer = case.ops.iter().find(|other| {
            let reported = other.granted.is_some_and(|granted| granted.at <= *at);
            let same = other.thing == op.thing && epoch(case, other) == own_epoch;
            reported && same && other.fence() == Some(*floor)
        });
        if let (Some(newer), Some(_)) = (newer, own_epoch) {
            let what =
                format!("{op} was refused because of {newer}, but still believed that it held");
            verdict.found(Rule::Record, op.name(case.history), *since, what);
        }
    }
}
