//! The verdict on a run, and its history for people.

use std::fmt::Write;

use torture::check::{Rule, check};

use super::store::OPERATOR;
use super::*;
use crate::machine::Command;

/// How long before a loss a fault may have begun that explains it: the longest lease, and the time to recover.
const EXPLAINS: Micros = 5 * SECOND;

/// Judges a run.
pub(super) fn judge(mut run: Simulation<'_>) -> Outcome {
    run.end_faults();
    run.store.down = false;
    let mut leftovers = Vec::new();
    for thing in run.scenario.things.clone() {
        run.apply(thing, OPERATOR, &[Command::Sweep]);
        for member in run.store.machines[thing].members() {
            leftovers.push(format!("{}: {}", THINGS[thing].name, member.id));
        }
    }
    let history = History {
        things: THINGS.to_vec(),
        wall_offset: STORE_AHEAD,
        local: false,
        faults: std::mem::take(&mut run.faults),
        lives: std::mem::take(&mut run.lives),
        changes: std::mem::take(&mut run.changes),
        crowded: std::mem::take(&mut run.store.crowded),
        listed: std::mem::take(&mut run.store.listing.listed),
        leftovers,
        records: Vec::new(),
        ended: run.now,
    };
    let verdict = check(&history);
    assert_eq!(verdict.doubts, [""; 0], "the history of seed {} is incomplete", run.scenario.seed);
    let mut violations = std::mem::take(&mut run.seen);
    violations.extend(verdict.violations);
    for loss in &run.losses {
        let explains = |fault: &Fault| {
            let concerns =
                fault.scope == Scope::Everybody || fault.scope == Scope::Worker(loss.worker);
            let until = fault.end.saturating_add(fault.recovery_time() + EXPLAINS);
            concerns && fault.begin <= loss.at && until >= loss.from
        };
        if !history.faults.iter().any(explains) {
            let (name, at) = (THINGS[loss.thing].name.to_owned(), loss.at);
            let what =
                format!("worker {} op {} lost its permit without a fault", loss.worker, loss.op);
            violations.push(Violation { rule: Rule::Ownership, thing: name, at, what });
        }
    }
    let contended = run.scenario.finish - BEGIN;
    let grants = verdict.facts.grants;
    Outcome { violations, history, steps: run.steps, contended, grants }
}

/// Returns the history of what led to the first violation, for people.
pub(super) fn story(scenario: &Scenario, outcome: &Outcome) -> String {
    let mut story = String::new();
    let workers: Vec<_> =
        (0..scenario.processes).filter(|worker| scenario.workers & 1 << worker != 0).collect();
    let names: Vec<_> = scenario.things.iter().map(|thing| THINGS[*thing].name).collect();
    let seconds = (scenario.finish - BEGIN) / SECOND;
    let _ = writeln!(
        story,
        "seed {}: workers {workers:?} with {} users each, on {names:?}, for {seconds} s{}{}",
        scenario.seed,
        scenario.users,
        if scenario.stragglers { ", with stragglers" } else { "" },
        if scenario.operators { ", with operators" } else { "" },
    );
    for violation in &outcome.violations {
        let _ = writeln!(
            story,
            "  {} VIOLATION of {} on {}: {}",
            time(violation.at),
            violation.rule.as_str(),
            violation.thing,
            violation.what
        );
    }
    let first = outcome.violations.first();
    let (thing, until) =
        first.map_or(("", Micros::MAX), |violation| (violation.thing.as_str(), violation.at));
    let mut lines: Vec<(Micros, String)> = Vec::new();
    for (life, events) in &outcome.history.lives {
        let mut ops = Vec::new();
        for line in events {
            if let Noted::Ask { op, thing: other, .. } = &line.event
                && (other == thing || thing.is_empty())
            {
                ops.push(*op);
            }
            let text = line.to_string();
            let event = text.split_once(' ').map_or("", |(_, event)| event);
            let op = event.split(' ').nth(1).and_then(|op| op.parse::<u64>().ok());
            if op.is_none_or(|op| ops.contains(&op)) {
                lines.push((line.at, format!("worker {}.{} {event}", life.worker, life.life)));
            }
        }
        if let LifetimeEnd::Killed(at) = life.end {
            lines.push((at, format!("worker {}.{} is killed", life.worker, life.life)));
        }
    }
    for fault in &outcome.history.faults {
        lines.push((
            fault.begin,
            format!("FAULT {} begins, {:?}", fault.kind.as_str(), fault.scope),
        ));
        lines.push((fault.end, format!("FAULT {} ends, {:?}", fault.kind.as_str(), fault.scope)));
    }
    for change in &outcome.history.changes {
        lines.push((change.requested, format!("OPERATOR {:?}", change.to)));
    }
    lines.sort_by_key(|(at, _)| *at);
    lines.retain(|(at, _)| *at <= until.saturating_add(SECOND));
    let from = lines.len().saturating_sub(120);
    if from > 0 {
        let _ = writeln!(story, "  ({from} earlier lines are left out)");
    }
    for (at, line) in &lines[from..] {
        let _ = writeln!(story, "  {} {line}", time(*at));
    }
    story
}

fn time(at: Micros) -> String {
    let at = at.saturating_sub(BEGIN);
    format!("{:>4}.{:06}", at / SECOND, at % SECOND)
}
