//! What excuses whom.
//!
//! From *order* and *progress*: a fault, for the worker that it befell, until its clients can be back.
//!
//! From the *limit*, where a store lost its data, what docs/guarantees.md says, no more:
//!
//! - *Restarted empty:* "Between the restart and that moment two clients may both believe in a permit", that moment being
//!   when the holder's client is connected again, "≤ 1 s once it is up". So whoever was granted by the old server does not
//!   count from its end until a second after the new one is up; or, if its connection, its process or the store suffered
//!   something else meanwhile, until that is over.
//! - *A failover:* "A grant that was not copied yet can be made again: two holders […] until the first one renews", "up to
//!   two thirds of its heartbeat". So whoever was granted just before the failover does not count until then. Whoever was
//!   granted earlier does count, unless it could not renew at the new primary because of something else.
//! - *Locks and pools* have no fence that tells when they were granted, and are renewed, if at all, at a third of their
//!   TTL: whoever asked before the loss was over does not count for a TTL.
//!
//! - *Its clock is set forward:* "leases end early by as much; holders may be told late". So whoever asked before does not count
//!   for as long as it may believe without asking again. *Set back*, nobody is excused, but where another program takes part: what
//!   that writes and removes by its own clock may be on its way while the clocks are set.
//!
//! From *fences* nothing, but for locks, whose counter is lost with the store's data, and for permits, whose fences begin at the
//! clock then, if that was set back before: they are compared only where both were granted between the same two losses
//! (`epoch`).

use std::collections::BTreeMap;

use super::ops::Op;
use super::spans::{Span, Spans};
use super::{Case, History};
use crate::clock::{Micros, SECOND};
use crate::fault::{Fault, Kind, Scope};
use crate::plan::{self, CONFIRM, LONG, STEP};

/// How long a grant may take to be copied to a replica that keeps up.
const COPYING: Micros = SECOND;
/// "≤ 1 s once it is up", and the time until the answer of what is asked first.
const RECONNECT: Micros = SECOND + SECOND / 2;

/// Who was befallen by something when, and may still be busy with it.
pub(super) struct Touched {
    everybody: Spans,
    workers: BTreeMap<usize, Spans>,
}

fn excused(fault: &Fault) -> Span {
    let aftermath = match fault.kind {
        // What a replica had not copied, a release or a cancel, stays in the store for a lease and a confirm.
        Kind::Promote => LONG + CONFIRM,
        // Whoever died before stays for as much longer; and newcomers stand before those who wait already.
        Kind::ClockBack => LONG + CONFIRM + STEP,
        _ => 0,
    };
    (fault.begin, fault.end.saturating_add(fault.settle() + aftermath))
}

impl Touched {
    /// On a `local` store, who is stopped in the middle of a transaction keeps everybody else waiting.
    pub(super) fn by(faults: &[Fault], local: bool) -> Self {
        let everybody =
            |fault: &&Fault| fault.scope == Scope::Everybody || local && fault.kind == Kind::Stop;
        let mut spans: BTreeMap<usize, Vec<Span>> = BTreeMap::new();
        for fault in faults {
            if let Scope::Worker(worker) = fault.scope {
                // Who was killed does not come back; the next life of the worker is another.
                if fault.kind != Kind::Kill {
                    spans.entry(worker).or_default().push(excused(fault));
                }
            }
        }
        let everybody = || faults.iter().filter(everybody).map(excused);
        let workers = spans
            .into_iter()
            .map(|(worker, own)| (worker, own.into_iter().chain(everybody()).collect()))
            .collect();
        Self { everybody: everybody().collect(), workers }
    }

    /// When this worker was busy with a fault.
    pub(super) fn of(&self, worker: usize) -> &Spans {
        self.workers.get(&worker).unwrap_or(&self.everybody)
    }
}

/// From when until when what an operation believes does not count.
pub(super) fn forgotten(case: &Case<'_>, op: &Op) -> Spans {
    let faults = case.history.faults.iter();
    faults
        .filter_map(|fault| match fault.kind {
            Kind::ClockForward | Kind::ClockBack => by_clock(case, op, fault),
            _ if fault.loses_data() => by_loss(case, op, fault),
            _ => None,
        })
        .collect()
}

fn by_clock(case: &Case<'_>, op: &Op, set: &Fault) -> Option<Span> {
    let thing = op.of(case.history);
    let ends_early = set.kind == Kind::ClockForward || thing.shared;
    (ends_early && op.asked < set.end).then(|| (set.begin, set.end.saturating_add(thing.longest())))
}

fn by_loss(case: &Case<'_>, op: &Op, loss: &Fault) -> Option<Span> {
    let history = case.history;
    let (begin, end) = (loss.begin, loss.end);
    let lease = op.of(history).lease;
    let Some(granted) = minted(history, op) else {
        // No fence that is a time.
        let told = op.granted?.at;
        let until = told.max(end).saturating_add(op.of(history).longest() + 3 * SECOND);
        return (op.asked < end).then_some((begin, until));
    };
    if granted > end {
        return None;
    }
    let until = |from: Micros| out_of_reach(history, op.worker, loss, from);
    match loss.kind {
        Kind::RestartEmpty => Some((begin, until(end.saturating_add(RECONNECT)))),
        _ if granted + COPYING > begin => {
            Some((begin, until(end.saturating_add(lease * 2 / 3 + RECONNECT))))
        }
        // Its renewals may not have been copied, and it could not make up for it.
        _ => {
            let wanted = end.saturating_add(RECONNECT);
            let until = until(wanted);
            (until > wanted).then(|| (begin, until.saturating_add(lease)))
        }
    }
}

/// The first instant from `from` on at which nothing but this loss keeps the worker from talking to the store.
fn out_of_reach(history: &History, worker: usize, loss: &Fault, from: Micros) -> Micros {
    let hinders = |fault: &&Fault| {
        let other = *fault != loss && fault.kind != Kind::Kill && fault.kind != Kind::ScriptFlush;
        other && [Scope::Everybody, Scope::Worker(worker)].contains(&fault.scope)
    };
    let mut until = from;
    // Each may reach into the next.
    loop {
        let others = history.faults.iter().filter(hinders).map(excused);
        let later =
            others.filter(|(begin, end)| *begin <= until && loss.begin < *end).map(|(_, end)| end);
        match later.max() {
            Some(later) if later > until => until = later.saturating_add(RECONNECT),
            _ => return until,
        }
    }
}

/// When it was granted, on our clock, if its fence tells: as long as nobody has set the clock that it is a reading of.
fn minted(history: &History, op: &Op) -> Option<Micros> {
    let told = op.granted?.at;
    let mut set = history.faults.iter().filter(|fault| is_clock(fault) && fault.begin < told);
    let tells = op.of(history).kind == plan::Kind::Semaphore && set.next().is_none();
    op.fence().filter(|_| tells).map(|fence| fence.saturating_sub(history.wall_offset))
}

fn is_clock(fault: &Fault) -> bool {
    matches!(fault.kind, Kind::ClockForward | Kind::ClockBack)
}

/// Between which losses of data that cost it its fences it was granted; none if that is not certain.
pub(super) fn epoch(history: &History, op: &Op) -> Option<usize> {
    let is_permit = op.of(history).kind == plan::Kind::Semaphore;
    let mut set_back = history.faults.iter().filter(|fault| fault.kind == Kind::ClockBack);
    let counts_from =
        if is_permit { set_back.next().map_or(Micros::MAX, |set| set.begin) } else { 0 };
    let told = op.granted?.at;
    let mut epoch = 0;
    let costs = |loss: &&Fault| loss.loses_data() && loss.end > counts_from;
    for loss in history.faults.iter().filter(costs) {
        if op.asked > loss.end {
            epoch += 1;
        } else if told > loss.begin {
            return None;
        }
    }
    Some(epoch)
}
