//! The checker: reads all histories and says which promise was broken, if any.
//!
//! It never guesses. A worker is taken to hold only between two instants at which it was certain to, so that clocks that
//! are read a little late cannot make two holders out of one. It is taken to be able to hold for as long as anybody
//! could say so, when the question is whether a permit was free. Whoever a fault has befallen is excused from order and
//! from progress until it can be back, and nobody is excused from anything else but by `exempt`, which spells out what
//! docs/guarantees.md says of a store that lost its data.
//!
//! | rule | what is a violation |
//! |---|---|
//! | `limit` | at one instant, those who are certain to hold have more units than there are; or the store has more holders than that |
//! | `slots` | at one instant, two who are certain to hold have one slot number; or a slot number is beyond the capacity |
//! | `rate` | in some window, more start for certain than the rate and its burst allow |
//! | `steering` | a grant that was made for certain after a capacity was set is one too many for it; one is made during a pause |
//! | `fence` | two grants with one fence; a fence that is not larger than that of a grant which was over before it was asked for |
//! | `fifo` | one who was seen in the queue before another asked, is still there, or has a larger fence, when that one has its permit |
//! | `liveness` | a permit is free for certain, and somebody waits for longer than the backstop can take |
//! | `record` | an update of the protected record was lost, or a holder that still believes was refused for a newer one |
//! | here | a store that is not empty at the end; a spent id that releases something; a worker that breaks |

use crate::clock::{Micros, SECOND};
use crate::driver::{Change, Crowded, Life, LifeEnd, PATIENCE};
use crate::fault::{Fault, Kind, Scope};
use crate::history::{Event, How, Line};
use crate::plan::Thing;
use crate::record::State;
use crate::worker::SIGN_OF_LIFE;

mod exempt;
mod fence;
mod fifo;
mod limit;
mod liveness;
mod ops;
mod rate;
mod record;
mod slots;
mod spans;
mod steering;
#[cfg(test)]
mod tests;

use exempt::Touched;
use ops::Op;
use spans::{Span, Spans};

/// Everything that was seen.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub things: Vec<Thing>,
    /// By how much the clock of fences is ahead of that of the histories.
    pub wall_offset: Micros,
    /// Whether the store is one that all processes write to themselves.
    pub local: bool,
    pub faults: Vec<Fault>,
    pub lives: Vec<(Life, Vec<Line>)>,
    /// What an operator changed, in order.
    pub changes: Vec<Change>,
    pub crowded: Vec<Crowded>,
    pub leftovers: Vec<String>,
    /// What the protected records said at the end.
    pub records: Vec<(usize, State)>,
    pub ended: Micros,
}

/// Which promise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    Limit,
    Slots,
    Rate,
    Pause,
    Fence,
    Order,
    Waiting,
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
            Self::Record => "protected record",
            Self::Ownership => "ownership",
            Self::Leftovers => "nothing left",
            Self::Crash => "no crash",
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

/// How much was looked at: a check that had nothing to look at has not passed.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub operations: usize,
    pub grants: usize,
    /// Times for which somebody was certain to hold.
    pub certain: usize,
    /// Times at which as many were certain to hold as there are permits, at least.
    pub full: usize,
    /// Times for which somebody was certain to hold a numbered slot.
    pub numbered: usize,
    /// Grants that a rate limits.
    pub starts: usize,
    /// Grants that were made for certain while the capacity was what an operator had set.
    pub steered: usize,
    /// Acquisitions that were certain to wait, or to be asked for, during a pause.
    pub paused: usize,
    pub ordered_pairs: usize,
    /// Waits, or pieces of waits, that no fault excused.
    pub judged_waits: usize,
    pub longest_unexplained: Micros,
    pub writes: usize,
    pub refused: usize,
    pub ends: Vec<(How, usize)>,
    /// How long each worker stood still without anybody's doing.
    pub slow: Vec<(usize, Micros)>,
}

#[derive(Clone, Debug, Default)]
pub struct Verdict {
    pub violations: Vec<Violation>,
    pub facts: Facts,
    pub doubts: Vec<String>,
}

/// After how long without a sign of life a process is taken to have stood still.
const SILENCE: Micros = 2 * SIGN_OF_LIFE;
/// At most so many violations of one rule on one thing are listed: after the first, others follow from it.
const LISTED: usize = 5;

impl Verdict {
    fn found(&mut self, rule: Rule, thing: &str, at: Micros, what: String) {
        let same = |known: &&Violation| known.rule == rule && known.thing == thing;
        if self.violations.iter().filter(same).count() < LISTED {
            self.violations.push(Violation { rule, thing: thing.to_owned(), at, what });
        }
    }
}

/// What a rule looks at.
struct Case<'a> {
    history: &'a History,
    ops: Vec<Op>,
    touched: Touched,
    foreign: Vec<usize>,
}

/// Judges a run.
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
    let case = Case { touched: Touched::by(&history.faults, history.local), history, ops, foreign };
    count(&case, &mut verdict);
    for (at, _) in history.things.iter().enumerate() {
        limit::check(&case, at, &mut verdict);
        slots::check(&case, at, &mut verdict);
        rate::check(&case, at, &mut verdict);
        steering::check(&case, at, &mut verdict);
        fence::check(&case, at, &mut verdict);
        fifo::check(&case, at, &mut verdict);
        liveness::check(&case, at, &mut verdict);
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

/// Times at which a worker did not run are faults, too, unless it was stopped.
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
            match facts.slow.iter_mut().find(|(known, _)| *known == worker) {
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

/// When a process did not run: as it says itself, and at the end, if it is not there to say so.
fn gaps<'a>(
    history: &History,
    life: &Life,
    lines: &'a [Line],
) -> impl Iterator<Item = Span> + use<'a> {
    let told = lines.iter().filter_map(|line| match line.event {
        Event::Gap { since } => Some((since, line.at)),
        _ => None,
    });
    let end = match life.end {
        LifeEnd::Killed(at) => at,
        LifeEnd::Stuck(told) => told + PATIENCE,
        LifeEnd::Done | LifeEnd::Broke(_) => history.ended,
    };
    let signs = lines.iter().any(|line| line.event == Event::Tick);
    let done = lines.last().filter(|line| signs && line.event != Event::Done);
    let silent = done.map(|line| (line.at, end)).filter(|(last, end)| last + SILENCE < *end);
    told.chain(silent)
}

fn count(case: &Case<'_>, verdict: &mut Verdict) {
    let facts = &mut verdict.facts;
    facts.operations = case.ops.len();
    facts.grants = case.ops.iter().filter(|op| op.granted.is_some()).count();
    for (_, how) in case.ops.iter().filter_map(|op| op.end) {
        match facts.ends.iter_mut().find(|(known, _)| *known == how) {
            Some((_, count)) => *count += 1,
            None => facts.ends.push((how, 1)),
        }
    }
    facts.ends.sort_by_key(|(how, _)| how.as_str());
    for op in &case.ops {
        if let Some((at, How::Internal)) = op.end {
            let what = format!("{op} was told that something happened which cannot happen");
            verdict.found(Rule::Crash, op.name(case.history), at, what);
        }
    }
}

/// An id that was given back is nobody's.
fn ownership(case: &Case<'_>, verdict: &mut Verdict) {
    // A release that was not copied has not happened.
    const FORGOTTEN: Micros = 30 * SECOND;
    let promoted = |at: Micros| {
        let mut faults = case.history.faults.iter().filter(|fault| fault.kind == Kind::Promote);
        faults.any(|fault| fault.begin < at && at < fault.end.saturating_add(FORGOTTEN))
    };
    for (life, line) in case
        .history
        .lives
        .iter()
        .flat_map(|(life, lines)| lines.iter().map(move |line| (life, line)))
    {
        if let Event::Stale { thing, released: true } = &line.event
            && !promoted(line.at)
        {
            let what = format!(
                "worker {}.{} released an id again, and was told that it was held",
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
            LifeEnd::Killed(_) | LifeEnd::Done => {}
            LifeEnd::Broke(how) => {
                let what = format!("{who} ended by itself: {how}");
                verdict.found(Rule::Crash, "", history.ended, what);
            }
            LifeEnd::Stuck(told) => {
                let what = format!("{who} did not end when it was told to");
                let slow = history
                    .faults
                    .iter()
                    .any(|fault| fault.kind == Kind::Slow && fault.end > *told);
                if slow || life.foreign {
                    verdict.doubts.push(what);
                } else {
                    verdict.found(Rule::Waiting, "", *told, what);
                }
            }
        }
    }
}
