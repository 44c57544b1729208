//! The result of a run, for people.

use std::fmt::Write as _;
use std::process::ExitCode;

use crate::check::{Facts, Verdict};
use crate::clock::{MILLISECOND, Micros, SECOND};
use crate::driver::{Log, by_kind};

/// The outcome of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Passed,
    Violated,
    Inconclusive,
}

impl Outcome {
    #[must_use]
    pub fn code(self) -> ExitCode {
        ExitCode::from(match self {
            Self::Passed => 0,
            Self::Violated => 1,
            Self::Inconclusive => 2,
        })
    }
}

/// If a worker stood still for more than this share of a run, the machine was too slow to judge delays.
const TOO_SLOW_PERCENT: Micros = 15;

/// Decides the outcome. If that is not possible, the reasons are added to `doubts`.
#[must_use]
pub fn judge(log: &Log, verdict: &mut Verdict) -> Outcome {
    let ran = log.ended.saturating_sub(log.began);
    verdict.doubts.extend(log.doubts.iter().cloned());
    for (worker, slow) in &verdict.facts.slow {
        if slow * 100 > ran * TOO_SLOW_PERCENT {
            let (slow, ran) = (slow / SECOND, ran / SECOND);
            let why = format!(
                "the machine is too slow: worker {worker} stood still for {slow} of {ran} s"
            );
            verdict.doubts.push(why);
        }
    }
    let Facts { grants, full, ordered_pairs, judged_waits, writes, .. } = verdict.facts;
    let Facts { numbered, starts, operated, paused, given_up, .. } = verdict.facts;
    let minutes = usize::try_from(ran / (60 * SECOND)).unwrap_or_default().max(1);
    let seen = [
        ("grants", grants, 100 * minutes),
        ("moments at which every permit was held", full, 50 * minutes),
        ("pairs of waiters whose order could be judged", ordered_pairs, 20 * minutes),
        ("waits that could be judged", judged_waits, 20 * minutes),
        ("acquisitions that were given up and were listed", given_up, 50 * minutes),
        ("numbered permits", numbered, 10 * minutes),
        ("starts that a rate limits", starts, 20 * minutes),
        ("grants within a capacity that an operator set", operated, 10 * minutes),
        ("acquires during a pause", paused, 5 * minutes),
        ("writes of the protected records", writes, 10 * minutes),
    ];
    for (what, count, least) in seen {
        if count < least {
            verdict
                .doubts
                .push(format!("too little was observed: {count} {what}; the minimum is {least}"));
        }
    }
    if !verdict.violations.is_empty() {
        Outcome::Violated
    } else if verdict.doubts.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Inconclusive
    }
}

/// Writes the report as Markdown that also reads well on a terminal.
#[must_use]
pub fn write(title: &str, log: &Log, verdict: &Verdict, outcome: Outcome) -> String {
    let facts = &verdict.facts;
    let millis = |span: Micros| format!("{} ms", span / MILLISECOND);
    let mut text = format!("### {title}\n\n");
    let mut table = Table::default();
    table.row("seconds", &(log.ended.saturating_sub(log.began) / SECOND).to_string());
    table.row("processes, restarts included", &log.lives.len().to_string());
    table.row("operations", &facts.operations.to_string());
    table.row("grants", &facts.grants.to_string());
    let ends: Vec<_> =
        facts.ends.iter().map(|(how, count)| format!("{} {count}", how.as_str())).collect();
    table.row("how operations ended", &ends.join(", "));
    let kinds = by_kind(&log.faults);
    let kinds: Vec<_> =
        kinds.iter().map(|(kind, count)| format!("{} {count}", kind.as_str())).collect();
    table.row("faults", &kinds.join(", "));
    table.row("moments at which every permit was held", &facts.full.to_string());
    let operated = [facts.numbered, facts.starts, facts.operated, facts.paused];
    let operated = operated.map(|count| count.to_string()).join(", ");
    table.row("numbered, paced, operated grants; acquires during a pause", &operated);
    table.row("pairs of waiters judged for order", &facts.ordered_pairs.to_string());
    table.row("waits judged", &facts.judged_waits.to_string());
    table.row("longest unexplained wait", &millis(facts.longest_unexplained));
    table.row("acquisitions judged for leaks", &facts.given_up.to_string());
    table.row("longest time listed after the end", &millis(facts.longest_listed));
    table
        .row("protected record: writes, refusals", &format!("{}, {}", facts.writes, facts.refused));
    table.row("**violations**", &format!("**{}**", verdict.violations.len()));
    text.push_str(&table.0);
    for found in &verdict.violations {
        let at = found.at.saturating_sub(log.began);
        let (rule, thing) = (found.rule.as_str(), &found.thing);
        let _ = write!(text, "\n- {rule} {thing}, at {} ms: {}", at / MILLISECOND, found.what);
    }
    for doubt in &verdict.doubts {
        let _ = write!(text, "\n- doubt: {doubt}");
    }
    let word = match outcome {
        Outcome::Passed => "passed",
        Outcome::Violated => "VIOLATED",
        Outcome::Inconclusive => "inconclusive",
    };
    let _ = write!(text, "\n\n{word}\n");
    text
}

struct Table(String);

impl Default for Table {
    fn default() -> Self {
        Self("| | |\n|---|---|\n".to_owned())
    }
}

impl Table {
    fn row(&mut self, what: &str, value: &str) {
        let _ = writeln!(self.0, "| {what} | {value} |");
    }
}
