//! The checker: reads all histories and finds the promises that were broken.
//!
//! The checker never guesses. For the limit, a worker counts as holding only between two instants at which it certainly
//! held. So clocks that are read a little late cannot turn one holder into two. For the question whether a permit was
//! free, a worker counts as holding for as long as that is possible. A process hit by a fault is exempt from the order
//! and waiting checks until it can recover. All other exemptions are in `exempt`, which states what docs/guarantees.md
//! says of a store that lost its data or whose clock was set.
//!
//! | rule | what is a violation |
//! |---|---|
//! | `limit` | at one instant, the certain holders have more units than there are; or the store has more holders than that |
//! | `slots` | at one instant, two certain holders have the same slot number; or a slot number is greater than the capacity |
//! | `rate` | in some window, certainly more permits start than the rate and its burst allow |
//! | `operator` | a grant that was certainly made after a capacity was set exceeds that capacity; or a grant is made during a pause |
//! | `fence` | two grants have the same fence; or a fence is not larger than that of a grant that was reported before this one was requested |
//! | `fifo` | A was seen in the queue before B asked; and when B has its permit, A is still queued, or A's fence is larger |
//! | `liveness` | a permit is certainly free, and a waiter waits longer than the periodic query can take |
//! | `leak` | a worker has given an acquisition up, and the store lists it for longer than the release can take |
//! | `record` | an update of the protected record was lost; or a holder that still believes was refused because of a newer one |
//! | here | the store is not empty at the end; a released id releases something; a worker crashes |

use crate::clock::{Micros, SECOND};
use crate::driver::{Change, Crowded, Lifetime, LifetimeEnd, Listed, TIME_LIMIT};
use crate::fault::{Fault, Kind, Scope};
use crate::history::{Event, How, Line};
use crate::plan::Thing;
use crate::record::Contents;
use crate::worker::SIGN_OF_LIFE;

mod exempt;
mod fence;
mod fifo;
mod leak;
mod limit;
mod liveness;
mod operator;
mod ops;
mod rate;
mod record;
mod slots;
mod spans;
#[cfg(test)]
mod tests;

use exempt::Touched;
use ops::Op;
use spans::{Span, Spans};

/// Everything that was seen in a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub things: Vec<Thing>,
    /// By how much the clock of the fences is ahead of the clock of the histories.
    pub wall_offset: Micros,
    /// Whether the store is a file that all processes write to themselves.
    pub local: bool,
    pub faults: Vec<Fault>,
    pub lives: Vec<(Lifetime, Vec<Line>)>,
    /// The changes that an operator made, in order.
    pub changes: Vec<Change>,
    pub crowded: Vec<Crowded>,
    pub listed: Vec<Listed>,
    pub leftovers: Vec<String>,
    /// The protected records at the end.
    pub records: Vec<(usize, Contents)>,
    pub ended: Micros,
}

/// A promise that the checker checks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    Limit,
    Slots,
    Rate,
    Pause,
    Fence,
    Order,
    Waiting,
    Leak,
    Record,
    Ownership,
    Leftovers,
    Crash,
}

impl Rule {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Slots => "slots",
            Self::Rate => "rate",
            Self::Pause => "pause",
            Self::Fence => "fence",
            Self::Order => "order",
            Self::Waiting => "bounded waiting",
            Self::Leak => "no leak",
            Self::Record => "protected record",
            Self::Ownership => "ownership",
            Self::Leftovers => "leftovers",
            Self::Crash => "crash",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    pub rule: Rule,
    pub thing: String,
    pub at: Micros,
    pub what: String,
}

/// How much was checked. A check that had nothing to check has not passed.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub operations: usize,
    pub grants: usize,
    /// The acquisitions that certainly held for some time.
    pub certain: usize,
    /// The moments at which all units were certainly held.
    pub full: usize,
    /// The times for which a numbered slot was certainly held.
    pub numbered: usize,
    /// Grants that a rate limits.
    pub starts: usize,
    /// Grants that were certainly made while a capacity that an operator had set was in force.
    pub operated: usize,
    /// Acquisitions that certainly waited, or were requested, during a pause.
    pub paused: usize,
    pub ordered_pairs: usize,
    /// Waits, or parts of waits, that no fault exempts.
    pub judged_waits: usize,
    pub longest_unexplained: Micros,
    /// Acquisitions that samples of the store listed, and that their workers gave up or released.
    pub given_up: usize,
    /// The longest time for which one of these was still listed, and no fault explains it.
    pub longest_listed: Micros,
    pub writes: usize,
    pub refused: usize,
    pub ends: Vec<(How, usize)>,
    /// How long each worker stood still without being stopped.
    pub slow: Vec<(usize, Micros)>,
}

#[derive(Clone, Debug, Default)]
pub struct Verdict {
    pub violations: Vec<Violation>,
    pub facts: Facts,
    pub doubts: Vec<String>,
}

/// A process that writes no line for this long counts as having stood still.
const SILENCE: Micros = 2 * SIGN_OF_LIFE;
/// At most this many violations of one rule on one thing are listed, because the later ones follow from the first.
const LISTED: usize = 5;

impl Verdict {
    fn found(&mut self, rule: Rule, thing: &str, at: Micros, what: String) {
        let same = |earlier: &&Violation| earlier.rule == rule && earlier.thing == thing;
        if self.violations.iter().filter(same).count() < LISTED {
            self.violations.push(Violation { rule, thing: thing.to_owned(), at, what });
        }
    }
}

/// The input of a rule.
struct Case<'a> {
    history: &'a History,
    ops: Vec<Op>,
    touched: Touched,
    /// For each thing, the losses of data that may reset its fences.
    resets: Vec<Vec<Fault>>,
    foreign: Vec<usize>,
}

/// Checks a run.
#[must_use]
pub fn check(history: &History) -> Verdict {
    let mut verdict = Verdict::default();
    let faults = with_slowness(history, &mut verdict.facts);
    let history = &History { faults, ..history.clone() };
    let ops = match ops::read(history) {
        Ok(ops) => ops,
        Err(why) => {
            verdict.doubts.push(why);
            return verdict;
        }
    };
    let foreign =
        history.lives.iter().filter(|(life, _)| life.foreign).map(|(life, _)| life.worker);
    let foreign = foreign.collect();
    let touched = Touched::by(&history.faults, history.local, history.things.len());
    let things = 0..history.things.len();
    let resets = things.map(|thing| exempt::resets(history, &ops, thing)).collect();
    let case = Case { history, ops, touched, resets, foreign };
    count(&case, &mut verdict);
    for (at, _) in history.things.iter().enumerate() {
        limit::check(&case, at, &mut verdict);
        slots::check(&case, at, &mut verdict);
        rate::check(&case, at, &mut verdict);
        operator::check(&case, at, &mut verdict);
        fence::check(&case, at, &mut verdict);
        fifo::check(&case, at, &mut verdict);
        liveness::check(&case, at, &mut verdict);
        leak::check(&case, at, &mut verdict);
        record::check(&case, at, &mut verdict);
    }
    ownership(&case, &mut verdict);
    lives(history, &mut verdict);
    for left in &history.leftovers {
        verdict.found(Rule::Leftovers, "", history.ended, left.clone());
    }
    verdict.violations.sort_by_key(|found| found.at);
    verdict
}

/// Adds a fault for each time at which a worker did not run, unless it was stopped.
fn with_slowness(history: &History, facts: &mut Facts) -> Vec<Fault> {
    const SLOW: Micros = SECOND * 3 / 10;
    let mut faults = history.faults.clone();
    for (life, lines) in &history.lives {
        let worker = life.worker;
        let stop =
            |fault: &&Fault| fault.kind == Kind::Stop && fault.scope == Scope::Worker(worker);
        let stopped: Spans =
            history.faults.iter().filter(stop).map(|stop| (stop.begin, stop.end)).collect();
        for gap in gaps(history, life, lines).filter(|gap| !stopped.meets(*gap)) {
            let (begin, end) = gap;
            let length = end.min(history.ended.max(begin)) - begin;
            match facts.slow.iter_mut().find(|(entry, _)| *entry == worker) {
                Some((_, sum)) => *sum += length,
                None => facts.slow.push((worker, length)),
            }
            if end - begin > SLOW {
                let (kind, scope) = (Kind::Slow, Scope::Worker(worker));
                faults.push(Fault { kind, scope, begin, end });
            }
        }
    }
    faults
}

/// Returns the times at which a process did not run: those that it recorded itself, and its silence at the end, if it
/// did not finish.
fn gaps<'a>(
    history: &History,
    life: &Lifetime,
    lines: &'a [Line],
) -> impl Iterator<Item = Span> + use<'a> {
    let recorded = lines.iter().filter_map(|line| match line.event {
        Event::Gap { since } => Some((since, line.at)),
        _ => None,
    });
    let end = match life.end {
        LifetimeEnd::Killed(at) => at,
        LifetimeEnd::Stuck(since) => since + TIME_LIMIT,
        LifetimeEnd::Done | LifetimeEnd::Broke(_) => history.ended,
    };
    let signs = lines.iter().any(|line| line.event == Event::Tick);
    let done = lines.last().filter(|line| signs && line.event != Event::Done);
    let silent = done.map(|line| (line.at, end)).filter(|(last, end)| last + SILENCE < *end);
    recorded.chain(silent)
}

fn count(case: &Case<'_>, verdict: &mut Verdict) {
    let facts = &mut verdict.facts;
    facts.operations = case.ops.len();
    facts.grants = case.ops.iter().filter(|op| op.granted.is_some()).count();
    for (_, how) in case.ops.iter().filter_map(|op| op.end) {
        match facts.ends.iter_mut().find(|(entry, _)| *entry == how) {
            Some((_, count)) => *count += 1,
            None => facts.ends.push((how, 1)),
        }
    }
    facts.ends.sort_by_key(|(how, _)| how.as_str());
    for op in &case.ops {
        if let Some((at, How::Internal)) = op.end {
            let what = format!("{op} ended with an internal error");
            verdict.found(Rule::Crash, op.name(case.history), at, what);
        }
    }
}

/// An id that was released belongs to no holder.
fn ownership(case: &Case<'_>, verdict: &mut Verdict) {
    // A release that was not copied to the replica has not happened.
    const FORGOTTEN: Micros = 30 * SECOND;
    let promoted = |at: Micros, thing: &str| {
        let thing = case.history.things.iter().position(|spec| spec.name == thing);
        let concerns = |fault: &Fault| thing.is_none_or(|thing| fault.concerns(thing));
        let faults = case.history.faults.iter();
        let mut faults = faults.filter(|fault| fault.is_failover() && concerns(fault));
        faults.any(|fault| fault.begin < at && at < fault.end.saturating_add(FORGOTTEN))
    };
    for (life, line) in case
        .history
        .lives
        .iter()
        .flat_map(|(life, lines)| lines.iter().map(move |line| (life, line)))
    {
        if let Event::Stale { thing, released: true } = &line.event
            && !promoted(line.at, thing)
        {
            let what = format!(
                "worker {}.{} released an id again, and the store answered that it was held",
                life.worker, life.life
            );
            verdict.found(Rule::Ownership, thing, line.at, what);
        }
    }
}

fn lives(history: &History, verdict: &mut Verdict) {
    for (life, _) in &history.lives {
        let who = format!("worker {}.{}", life.worker, life.life);
        match &life.end {
            LifetimeEnd::Killed(_) | LifetimeEnd::Done => {}
            LifetimeEnd::Broke(how) => {
                let what = format!("{who} ended by itself: {how}");
                verdict.found(Rule::Crash, "", history.ended, what);
            }
            LifetimeEnd::Stuck(since) => {
                let what = format!("{who} did not end when it was asked to");
                let slow = history
                    .faults
                    .iter()
                    .any(|fault| fault.kind == Kind::Slow && fault.end > *since);
                if slow || life.foreign {
                    verdict.doubts.push(what);
                } else {
                    verdict.found(Rule::Waiting, "", *since, what);
                }
            }
        }
    }
}
