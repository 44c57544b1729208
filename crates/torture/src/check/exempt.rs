//! Exemptions: which faults exempt which acquisitions from which checks.
//!
//! *Order* and *progress*: a worker that was hit by a fault is exempt until its clients can have recovered.
//!
//! *Limit*: where a store lost its data or its clock was set, exactly what docs/guarantees.md says:
//!
//! - *Restarted empty.* Two clients may both believe in a permit until the first one's client is connected again, at
//!   most a second after the server is up. So a permit that the old server granted does not count from the restart
//!   until that moment. If its connection, its process or the store was hit by another fault in the meantime, it does
//!   not count until that fault is over.
//! - *A failover.* A grant that was not copied yet can be made again. Then there are two holders until the first one
//!   renews, which takes up to two thirds of its lease. So a permit that was granted just before the failover does not
//!   count until then. A permit that was granted earlier counts, unless another fault kept its holder from renewing at
//!   the new primary.
//! - *Two primaries.* If the old primary accepts commands for longer than a moment, its renewals are not copied, and
//!   other sentinels or nodes may still name it. So no permit counts until every client can be connected to the new
//!   primary.
//! - *Locks and pools* have no fence that tells when they were granted, and are renewed, if at all, at a third of their
//!   TTL. So a lock or pool lease that was requested before the loss was over does not count for one TTL and some seconds.
//! - *The server's clock is set forward.* Leases end early by the same time, and holders may be notified late. So a
//!   permit that was requested before does not count for as long as its holder may believe without asking again.
//! - *The server's clock is set back.* Nothing is exempt, except where another program takes part: its writes and
//!   removals by its own clock may be in flight while the clocks are set.
//!
//! In a cluster, all of this applies only to the names of the node that failed.
//!
//! *Fences*: nothing is exempt, except that two fences are compared only if both were granted between the same two
//! losses of data that reset them (`epoch`). The counter of a lock is lost with the store's data. The fences of permits
//! then start at the clock, which may have been set back before the first grant that follows.

use std::collections::BTreeMap;

use super::ops::Op;
use super::spans::{Span, Spans};
use super::{Case, History};
use crate::clock::{Micros, SECOND};
use crate::fault::{Fault, Kind, Scope};
use crate::plan::{self, CONFIRM, LONG, STEP};

/// How long a grant may take to be copied to a replica that keeps up.
const COPYING: Micros = SECOND;
/// At most one second after the server is up, plus the time until the first answer.
const RECONNECT: Micros = SECOND + SECOND / 2;

/// For each thing, when each worker was hit by a fault or may still have been recovering from it.
pub(super) struct Touched {
    everybody: Vec<Spans>,
    workers: BTreeMap<usize, Vec<Spans>>,
}

fn excused(fault: &Fault) -> Span {
    let aftermath = match fault.kind {
        // A release or cancel that the replica had not copied leaves a member in the store for a lease and a confirm
        // time.
        _ if fault.is_failover() => LONG + CONFIRM,
        // Members that died before stay for longer by the step. And new waiters are ahead of those that wait already.
        Kind::ClockBack => LONG + CONFIRM + STEP,
        _ => 0,
    };
    (fault.begin, fault.end.saturating_add(fault.recovery_time() + aftermath))
}

impl Touched {
    /// On a `local` store, a process that is stopped in the middle of a transaction blocks all others.
    pub(super) fn by(faults: &[Fault], local: bool, things: usize) -> Self {
        let everybody = |fault: &Fault| {
            let all = matches!(fault.scope, Scope::Everybody | Scope::Things(_));
            all || local && fault.kind == Kind::Stop
        };
        // A process that was killed does not come back. The next life of the worker is another process.
        let of = |worker: usize, fault: &Fault| {
            fault.scope == Scope::Worker(worker) && fault.kind != Kind::Kill
        };
        let touched = |befell: &dyn Fn(&Fault) -> bool| {
            let on = |thing: usize| {
                let affecting =
                    faults.iter().filter(|fault| befell(fault) && fault.concerns(thing));
                affecting.map(excused).collect()
            };
            (0..things).map(on).collect()
        };
        let mut workers = BTreeMap::new();
        for fault in faults {
            if let Scope::Worker(worker) = fault.scope {
                let affects = |fault: &Fault| everybody(fault) || of(worker, fault);
                workers.entry(worker).or_insert_with(|| touched(&affects));
            }
        }
        Self { everybody: touched(&everybody), workers }
    }

    /// The times at which this worker was recovering from a fault that can affect this thing.
    pub(super) fn of(&self, worker: usize, thing: usize) -> &Spans {
        &self.workers.get(&worker).unwrap_or(&self.everybody)[thing]
    }
}

/// The times at which it does not count that an operation believes that it holds.
pub(super) fn forgotten(case: &Case<'_>, op: &Op) -> Spans {
    let faults = case.history.faults.iter().filter(|fault| fault.concerns(op.thing));
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
    (ends_early && op.requested < set.end)
        .then(|| (set.begin, set.end.saturating_add(thing.longest())))
}

fn by_loss(case: &Case<'_>, op: &Op, loss: &Fault) -> Option<Span> {
    let history = case.history;
    let (begin, end) = (loss.begin, loss.end);
    let lease = op.of(history).lease;
    let Some(granted) = minted(history, op) else {
        // It has no fence that is a time.
        let granted_at = op.granted?.at;
        let until = granted_at.max(end).saturating_add(op.of(history).longest() + 3 * SECOND);
        return (op.requested < end).then_some((begin, until));
    };
    if granted > end {
        return None;
    }
    let until = |from: Micros| out_of_reach(history, op, loss, from);
    match loss.kind {
        Kind::RestartEmpty => Some((begin, until(end.saturating_add(RECONNECT)))),
        // The old primary was dead or stopped by then, so the new one made this grant.
        Kind::PrimaryKilled | Kind::PrimaryPaused if granted > begin + COPYING => None,
        _ if granted + COPYING > begin => {
            Some((begin, until(end.saturating_add(lease * 2 / 3 + RECONNECT))))
        }
        // If the old primary renewed it, the renewals were not copied either.
        _ if loss.has_two_primaries() => Some((begin, until(end.saturating_add(RECONNECT)))),
        // Its renewals may not have been copied, and it could not repeat them.
        _ => {
            let wanted = end.saturating_add(RECONNECT);
            let until = until(wanted);
            (until > wanted).then(|| (begin, until.saturating_add(lease)))
        }
    }
}

/// Returns the first instant from `from` on at which no other fault keeps the worker from reaching the store.
fn out_of_reach(history: &History, op: &Op, loss: &Fault, from: Micros) -> Micros {
    let hinders = |fault: &&Fault| {
        let other = *fault != loss && fault.kind != Kind::Kill && fault.kind != Kind::ScriptFlush;
        let befell = match fault.scope {
            Scope::Worker(worker) => worker == op.worker,
            Scope::Everybody | Scope::Things(_) => true,
            Scope::Nobody => false,
        };
        other && befell && fault.concerns(op.thing)
    };
    let mut until = from;
    // Each fault may overlap the next one.
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

/// Returns when the permit was granted, on the clock of the histories, if its fence tells. It does so unless the wall
/// clock, of which the fence is a reading, has been set.
fn minted(history: &History, op: &Op) -> Option<Micros> {
    let granted_at = op.granted?.at;
    let mut set = history.faults.iter().filter(|fault| is_clock(fault) && fault.begin < granted_at);
    let tells = op.of(history).kind == plan::Kind::Semaphore && set.next().is_none();
    op.fence().filter(|_| tells).map(|fence| fence.saturating_sub(history.wall_offset))
}

fn is_clock(fault: &Fault) -> bool {
    matches!(fault.kind, Kind::ClockForward | Kind::ClockBack)
}

/// Returns the losses of data that may reset the fences of a thing.
pub(super) fn resets(history: &History, ops: &[Op], thing: usize) -> Vec<Fault> {
    let is_permit = history.things[thing].kind == plan::Kind::Semaphore;
    let set_back = history.faults.iter().filter(|fault| fault.kind == Kind::ClockBack);
    let set_back = set_back.map(|set| set.begin).min().unwrap_or(Micros::MAX);
    // A grant between the loss and the first time that the clock was set back continued the old fences.
    let continued = |loss: &Fault| {
        let mut granted = ops.iter().filter(|op| op.thing == thing && op.requested > loss.end);
        set_back == Micros::MAX
            || granted.any(|op| op.granted.is_some_and(|granted| granted.at < set_back))
    };
    let losses = history.faults.iter().filter(|fault| fault.loses_data() && fault.concerns(thing));
    losses.filter(|loss| !is_permit || !continued(loss)).copied().collect()
}

/// Returns the number of losses of data before this grant that reset its fences. `None` if that is not certain.
pub(super) fn epoch(case: &Case<'_>, op: &Op) -> Option<usize> {
    let granted_at = op.granted?.at;
    let mut epoch = 0;
    for loss in &case.resets[op.thing] {
        if op.requested > loss.end {
            epoch += 1;
        } else if granted_at > loss.begin {
            return None;
        }
    }
    Some(epoch)
}
