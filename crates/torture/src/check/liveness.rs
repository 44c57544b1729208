//! No waiter waits while a permit is free.
//!
//! A permit is *certainly free* while fewer acquisitions can possibly hold than there are permits. An acquisition can
//! possibly hold in these times:
//!
//! - from when it was granted until the store has confirmed its release;
//! - if it was dropped or cancelled, a little longer, or until its client is connected again;
//! - if its process was killed, for a whole lease;
//! - if it waits, for as long as a fault may have kept it from learning of its grant.
//!
//! A waiter that no fault hit learns of its grant within milliseconds. If it does not, that is what this rule finds.
//!
//! While a permit is certainly free and a waiter that no fault hit waits, the wait is *unexplained*, except for the
//! moment that a hand-over takes. A release grants the permit to the next waiter at once. If the wake-up is lost, the
//! periodic query finds the permit within a second. So an unexplained wait of much more than a second is a violation.
//!
//! If permits weigh more than one unit, it is not known whether the first waiter fits, unless no permit is held at all:
//! then it fits. Where a rate or an operator may be the reason for a wait, the wait is not checked.
//!
//! Locks and pools have no queue, but a waiting task asks again several times a second.

use super::ops::Op;
use super::spans::{Span, Spans};
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros, SECOND};
use crate::history::{Event, How, Line};
use crate::plan::{self, BACKSTOP, CONFIRM};

/// The longest unexplained wait that is accepted, on a busy machine.
const BOUND: Micros = BACKSTOP + 3 * SECOND / 2;
/// The time that each hand-over may take.
const MOMENT: Micros = 100 * MILLISECOND;
/// The same for things without a queue, where a waiter asks again: the delay that the workers set in
/// [`Retry`](leasehold::Retry), plus a moment.
const ASKED_AGAIN: Micros = 500 * MILLISECOND;
/// How long a release in the background may take.
const UNDER_WAY: Micros = 300 * MILLISECOND;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    if spec.rate.is_some() || spec.operated {
        return;
    }
    let queues = spec.kind == plan::Kind::Semaphore;
    let moment = if queues { MOMENT } else { ASKED_AGAIN };
    let of_thing = || case.ops.iter().filter(|op| op.thing == thing);
    let capacity = if spec.heaviest > 1 { 1 } else { spec.capacity as usize };
    let free = free(of_thing().map(|op| possible(case, op)), capacity);
    for op in of_thing().filter(|op| !op.foreign) {
        let waited = if queues { op.waited() } else { op.requested_span() };
        let Some((from, until)) = waited else { continue };
        for calm in case.touched.of(op.worker, thing).without((from, until.min(case.history.ended)))
        {
            verdict.facts.judged_waits += 1;
            // Between two such times another worker may have held the permit. But each one that is ahead and leaves
            // again explains only a moment of waiting, not seconds.
            let free = free.within(calm).into_iter();
            let moments = free.map(|(from, to)| (to - from).saturating_sub(moment));
            let unexplained = moments.sum::<Micros>();
            let unexplained = unexplained.saturating_sub(slowness(case, calm, unexplained));
            let facts = &mut verdict.facts;
            facts.longest_unexplained = facts.longest_unexplained.max(unexplained);
            if unexplained > BOUND {
                let millis = unexplained / MILLISECOND;
                let what = format!("{op} waited for {millis} ms while a permit was free");
                verdict.found(Rule::Waiting, spec.name, calm.1, what);
            }
        }
    }
}

/// The times at which this acquisition may have held a permit.
fn possible(case: &Case<'_>, op: &Op) -> Vec<Span> {
    let touched = case.touched.of(op.worker, op.thing);
    let (over, granted_at) = (op.over(), op.granted.map(|granted| granted.at));
    // The permit may have been granted while a fault kept the worker from learning of it. By the end of the fault the
    // client has queried.
    let unreachable = touched.within((op.requested, granted_at.unwrap_or(over)));
    let waiting = waiting(op, op.of(case.history).lease);
    let mut spans: Vec<_> =
        unreachable.into_iter().flat_map(|span| waiting.without(span)).collect();
    let ended = op.end.map(|(_, how)| how);
    if granted_at.is_none() && ended.is_none() && op.killed.is_none() {
        // A waiter that still waits, and that no fault hit, does not count as holding.
        return spans;
    }
    let around = (over.saturating_sub(SECOND), over.saturating_add(UNDER_WAY));
    let calm = !touched.meets(around);
    let (aftermath, lease) = (op.of(case.history).aftermath(), op.of(case.history).lease);
    let after = match ended {
        Some(How::Released) => 0,
        // Unless it failed, the store has confirmed that nothing of the other program is left. Otherwise it holds for
        // its heartbeat. That includes requests that it sent during a fault and that arrive after it.
        Some(how) if op.foreign && how != How::Failed => 0,
        _ if op.foreign => {
            let arrives = touched.end_of(around).unwrap_or(over).saturating_sub(over);
            arrives + if granted_at.is_some() { lease + BACKSTOP + SECOND / 2 } else { aftermath }
        }
        Some(How::Dropped | How::Lost | How::Cancelled | How::TimedOut | How::Full) if calm => {
            UNDER_WAY
        }
        // A worker that was killed while it waited is out of reach: a permit that was granted before is not claimed. An
        // acquisition that was never seen in the queue may have been granted a permit at once, for a whole lease. So may
        // one that was next when the same client released: it is granted in the reply, which claims the permit.
        None if calm && granted_at.is_none() && !op.queued.is_empty() && !follows(case, op) => {
            CONFIRM.min(lease) + BACKSTOP + SECOND / 2
        }
        Some(how) if op.is_released_later(case.history, how) => {
            // By the end of the fault the client is connected again and has released it, unless its process was killed
            // before.
            let back = touched.end_of(around).unwrap_or(over);
            let lived = op.killed.is_none_or(|killed| killed > back);
            let released = back.saturating_sub(over).saturating_add(UNDER_WAY);
            if lived { aftermath.min(released) } else { aftermath }
        }
        _ => aftermath,
    };
    let from = if op.by_command { op.requested } else { granted_at.unwrap_or(over) };
    spans.push((from, over.saturating_add(after)));
    spans
}

/// Whether its client ended another acquisition of the same thing just before it was killed.
fn follows(case: &Case<'_>, op: &Op) -> bool {
    let just_before = (op.over().saturating_sub(UNDER_WAY), op.over());
    case.ops.iter().any(|other| {
        let is_of_the_client = (other.worker, other.thing) == (op.worker, op.thing);
        let ended = other.end.map(|(at, _)| at);
        is_of_the_client && ended.is_some_and(|at| just_before.0 <= at && at <= just_before.1)
    })
}

/// The times at which it was certainly in the queue: between two sightings that are too close for a permit to have been
/// granted, not claimed, and lost in between.
fn waiting(op: &Op, lease: Micros) -> Spans {
    let confirm = CONFIRM.min(lease) - 2 * MOMENT;
    let pairs = op.queued.windows(2).map(|pair| (pair[0].0, pair[1].1));
    pairs.filter(|(from, to)| to - from < confirm).collect()
}

/// The times at which fewer than `capacity` acquisitions could possibly hold.
fn free(possible: impl Iterator<Item = Vec<Span>>, capacity: usize) -> Spans {
    let mut steps: Vec<(Micros, bool)> = Vec::new();
    for spans in possible {
        // An acquisition counts once, however many reasons there are to believe that it holds.
        for (from, to) in spans.into_iter().collect::<Spans>().iter() {
            steps.push((from, true));
            steps.push((to, false));
        }
    }
    // At the same instant, beginnings sort before ends: rather one holder too many.
    steps.sort_unstable_by_key(|(at, begins)| (*at, !begins));
    let (mut count, mut since, mut spans) = (0_usize, Some(0), Vec::new());
    for (at, begins) in steps {
        if begins {
            count += 1;
        } else {
            count -= 1;
        }
        match since {
            Some(from) if count >= capacity => {
                spans.push((from, at));
                since = None;
            }
            None if count < capacity => since = Some(at),
            _ => {}
        }
    }
    spans.extend(since.map(|from| (from, Micros::MAX)));
    spans.into_iter().collect()
}

/// Returns how long workers stood still in this time. All workers count, because each one may have been the next in the
/// queue.
fn slowness(case: &Case<'_>, span: Span, unexplained: Micros) -> Micros {
    if unexplained < BACKSTOP {
        return 0;
    }
    case.history.lives.iter().map(|(_, lines)| stood_still(lines, span)).sum()
}

/// Returns how long a process stood still in this time, by its own lines.
pub(super) fn stood_still(lines: &[Line], (from, to): Span) -> Micros {
    let gaps = lines.iter().filter_map(|line| match line.event {
        Event::Gap { since } if since < to && line.at > from => {
            Some(line.at.min(to) - since.max(from))
        }
        _ => None,
    });
    gaps.sum()
}
