//! Nobody waits while a permit is free.
//!
//! A permit is free *for certain* while fewer can possibly hold than there are permits. Who was told that it holds can,
//! until the store has said that it was given back; who dropped it, or cancelled its acquire, can a little longer, or until
//! it is connected again; who was killed can for a whole lease; and whoever waits can for as long as a fault may have
//! kept it from hearing of its permit. Who waits in the best of health is told within milliseconds if it is granted one:
//! that it is not is what is looked for here.
//!
//! While a permit is free for certain and somebody waits, whom no fault has befallen, the wait is *unexplained*, but for the
//! moment that handing over takes. A release hands over at once; should the wake-up be lost, the backstop finds out within
//! a second. So an unexplained wait of much more than that is a violation.
//!
//! Of permits that weigh more than one, nobody knows whether the first in the queue fits, unless nobody holds at all: then it
//! does. Where a rate or an operator may be the reason for a wait, nothing is said of it.
//!
//! Locks and pools have no queue, but whoever waits for one asks again several times a second.

use super::ops::Op;
use super::spans::{Span, Spans};
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros, SECOND};
use crate::history::{Event, How};
use crate::plan::{self, BACKSTOP, CONFIRM};

/// What an unexplained wait may take, on a machine that has other things to do.
const BOUND: Micros = BACKSTOP + 3 * SECOND / 2;
/// What handing over may take each time.
const MOMENT: Micros = 100 * MILLISECOND;
/// The same where a waiter finds out by asking again: what the workers tell [`Retry`](leasehold::Retry), and that moment.
const ASKED_AGAIN: Micros = 500 * MILLISECOND;
/// How long a release in the background may be on its way.
const UNDER_WAY: Micros = 300 * MILLISECOND;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let known = &case.history.things[thing];
    if known.rate.is_some() || known.steered {
        return;
    }
    let queues = known.kind == plan::Kind::Semaphore;
    let moment = if queues { MOMENT } else { ASKED_AGAIN };
    let of_thing = || case.ops.iter().filter(|op| op.thing == thing);
    let capacity = if known.heaviest > 1 { 1 } else { known.capacity as usize };
    let free = free(of_thing().map(|op| possible(case, op)), capacity);
    for op in of_thing().filter(|op| !op.foreign) {
        let waited = if queues { op.waited() } else { op.asked_for() };
        let Some((from, until)) = waited else { continue };
        for calm in case.touched.of(op.worker).without((from, until.min(case.history.ended))) {
            verdict.facts.judged_waits += 1;
            // Between two such times somebody else may have held. But whoever comes before us and goes away again makes
            // us wait for a moment, not for seconds.
            let free = free.within(calm).into_iter();
            let moments = free.map(|(from, to)| (to - from).saturating_sub(moment));
            let unexplained = moments.sum::<Micros>();
            let unexplained = unexplained.saturating_sub(slowness(case, calm, unexplained));
            let facts = &mut verdict.facts;
            facts.longest_unexplained = facts.longest_unexplained.max(unexplained);
            if unexplained > BOUND {
                let millis = unexplained / MILLISECOND;
                let what = format!("{op} waited for {millis} ms while a permit was free");
                verdict.found(Rule::Waiting, known.name, calm.1, what);
            }
        }
    }
}

/// When this one may have held a permit, as far as anybody can say.
fn possible(case: &Case<'_>, op: &Op) -> Vec<Span> {
    let touched = case.touched.of(op.worker);
    let (over, told) = (op.over(), op.granted.map(|granted| granted.at));
    // Granted while a fault kept it from hearing of it. By the end of that it has asked.
    let unheard = touched.within((op.asked, told.unwrap_or(over)));
    let waiting = waiting(op, op.of(case.history).lease);
    let mut spans: Vec<_> = unheard.into_iter().flat_map(|span| waiting.without(span)).collect();
    let ended = op.end.map(|(_, how)| how);
    if told.is_none() && ended.is_none() && op.killed.is_none() {
        // Whoever still waits, unharmed, is not taken to hold.
        return spans;
    }
    let around = (over.saturating_sub(SECOND), over.saturating_add(UNDER_WAY));
    let calm = !touched.meets(around);
    let (aftermath, lease) = (op.of(case.history).aftermath(), op.of(case.history).lease);
    let after = match ended {
        Some(How::Released) => 0,
        // Unless it failed, the store has said that nothing of the other program's is left. Else it holds for its heartbeat,
        // also what it sent during a fault and what arrives after that.
        Some(how) if op.foreign && how != How::Failed => 0,
        _ if op.foreign => {
            let arrives = touched.end_of(around).unwrap_or(over).saturating_sub(over);
            arrives + if told.is_some() { lease + BACKSTOP + SECOND / 2 } else { aftermath }
        }
        Some(How::Dropped | How::Lost | How::Cancelled | How::TimedOut | How::Full) if calm => {
            UNDER_WAY
        }
        // Who was killed while it waited is out of reach: if it was granted a permit before, it has not claimed it. One that
        // was never seen in the queue may have been granted a permit at once, for a whole lease.
        None if calm && told.is_none() && !op.queued.is_empty() => {
            CONFIRM.min(lease) + BACKSTOP + SECOND / 2
        }
        Some(how) if op.is_released_later(case.history, how) => {
            // By the end of the fault it is connected again, and what it gave up is released; unless it was killed before.
            let back = touched.end_of(around).unwrap_or(over);
            let lived = op.killed.is_none_or(|killed| killed > back);
            let released = back.saturating_sub(over).saturating_add(UNDER_WAY);
            if lived { aftermath.min(released) } else { aftermath }
        }
        _ => aftermath,
    };
    let from = if op.by_command { op.asked } else { told.unwrap_or(over) };
    spans.push((from, over.saturating_add(after)));
    spans
}

/// When it was certain to be in the queue: between two times that it was seen there, too close to each other for a permit
/// that was granted, not claimed, and lost again.
fn waiting(op: &Op, lease: Micros) -> Spans {
    let confirm = CONFIRM.min(lease) - 2 * MOMENT;
    let pairs = op.queued.windows(2).map(|pair| (pair[0].0, pair[1].1));
    pairs.filter(|(from, to)| to - from < confirm).collect()
}

/// When fewer than `capacity` could possibly hold.
fn free(possible: impl Iterator<Item = Vec<Span>>, capacity: usize) -> Spans {
    let mut steps: Vec<(Micros, bool)> = Vec::new();
    for spans in possible {
        // One holds once, however many reasons there are to think so.
        for (from, to) in spans.into_iter().collect::<Spans>().iter() {
            steps.push((from, true));
            steps.push((to, false));
        }
    }
    // Who begins counts before who ends: rather one too many.
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

/// How long workers stood still then, whoever they are: each may have been the next in line.
fn slowness(case: &Case<'_>, (from, to): Span, unexplained: Micros) -> Micros {
    if unexplained < BACKSTOP {
        return 0;
    }
    let lines = case.history.lives.iter().flat_map(|(_, lines)| lines);
    let gaps = lines.filter_map(|line| match line.event {
        Event::Gap { since } if since < to && line.at > from => {
            Some(line.at.min(to) - since.max(from))
        }
        _ => None,
    });
    gaps.sum()
}
