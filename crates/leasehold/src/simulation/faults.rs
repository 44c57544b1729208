//! The faults of a run, and its operators.

use torture::driver;

use super::store::{OPERATOR, rate};
use super::*;
use crate::machine::{Command, LimitChange, LimitsChanged, Outcome, Rate, ReleaseHint};

pub(super) fn is_failover(kind: Kind) -> bool {
    kind == Kind::PrimaryKilled
}

impl Simulation<'_> {
    pub(super) fn inject(&mut self, at: usize) {
        let injection = self.scenario.injections[at];
        let Injection { kind, worker, lasts, lag, .. } = injection;
        let is_of_the_store = scenario_scope(&injection) == Scope::Everybody;
        // One fault of each kind of a process at a time, and one of the store.
        let overlaps = self.begun.keys().any(|other| {
            let other = &self.scenario.injections[*other];
            let both = scenario_scope(other) == Scope::Everybody && is_of_the_store;
            both || !is_of_the_store && other.worker == worker && other.kind == kind
        });
        if overlaps || !is_of_the_store && !self.processes[worker].alive {
            return;
        }
        self.begun.insert(at, self.now);
        let end = self.now + lasts;
        self.lost_data |= matches!(kind, Kind::RestartEmpty | Kind::PrimaryKilled);
        self.clock_was_set |= matches!(kind, Kind::ClockForward | Kind::ClockBack);
        let process = &mut self.processes[worker];
        match kind {
            Kind::Kill => {
                let noticed_after = if lag.is_multiple_of(4) { lag } else { 0 };
                self.kill(worker, noticed_after);
            }
            Kind::Stop => process.stopped = Some(Vec::new()),
            Kind::Cut | Kind::Reset => self.lose_connection(worker),
            Kind::Flap => {
                process.refused_until = self.now + lasts.min(900 * MILLISECOND);
                process.loses_reply = true;
            }
            Kind::Delay => process.slow_until = end,
            Kind::Stall => process.stalled_until = end,
            Kind::Forget => process.silent = process.connection,
            // Half of the time a wake-up, which is lost alone.
            Kind::LoseReply if lag.is_multiple_of(2) => process.loses_message = true,
            Kind::LoseReply => process.loses_reply = true,
            Kind::LoseRequest => process.loses_request = true,
            Kind::Restart | Kind::Crash => self.goes_down(false),
            Kind::RestartEmpty => {
                self.goes_down(true);
                self.store.restart_empty();
                self.forget_removals();
            }
            Kind::PrimaryKilled => {
                self.goes_down(true);
                self.store.fail_over();
                self.forget_removals();
            }
            Kind::Freeze => self.store.frozen_until = end,
            Kind::ClientKill => {
                for other in 0..self.processes.len() {
                    if self.network.bool() && self.processes[other].stopped.is_none() {
                        self.lose_connection(other);
                    }
                }
            }
            Kind::ClockForward => self.store.ahead += lag.cast_signed(),
            Kind::ClockBack => self.store.ahead -= lag.cast_signed(),
            other => unreachable!("{other:?} is not injected"),
        }
        let lasts = match kind {
            Kind::Cut | Kind::Reset | Kind::ClientKill | Kind::ClockForward | Kind::ClockBack => 1,
            // Until the next message is lost, at the latest then.
            _ => lasts,
        };
        self.at(self.now + lasts, Event::Ends(at));
    }

    /// The store has lost data. A client that has not learned yet that its waiter was removed takes it for lost with
    /// the rest, and enqueues it again.
    fn forget_removals(&mut self) {
        let mut removed = std::mem::take(&mut self.store.removed);
        removed.retain(|id, _| {
            let waits = |process: &Process| {
                (0..THINGS.len()).any(|thing| process.waits_for(thing).contains(id))
            };
            !self.processes.iter().any(waits)
        });
        self.store.removed = removed;
    }

    fn goes_down(&mut self, other: bool) {
        self.store.down = true;
        self.lose_connections(other);
    }

    pub(super) fn injection_ends(&mut self, at: usize) {
        let injection = self.scenario.injections[at];
        let Injection { kind, worker, .. } = injection;
        match kind {
            Kind::Kill => self.at(self.now, Event::Starts { worker }),
            Kind::Stop => self.continues(worker),
            Kind::Flap | Kind::LoseReply | Kind::LoseRequest => {
                let process = &mut self.processes[worker];
                (process.loses_reply, process.loses_request) = (false, false);
                process.loses_message = false;
            }
            Kind::Restart | Kind::Crash | Kind::RestartEmpty | Kind::PrimaryKilled => {
                self.store.down = false;
            }
            // It lasts until the client has found out.
            Kind::Forget => {
                let process = &self.processes[worker];
                if process.silent.is_some() && process.silent == process.connection {
                    return;
                }
            }
            _ => {}
        }
        self.ended(at);
    }

    fn ended(&mut self, at: usize) {
        let injection = self.scenario.injections[at];
        if let Some(begin) = self.begun.remove(&at) {
            let (kind, scope, end) = (injection.kind, scenario_scope(&injection), self.now);
            self.faults.push(Fault { kind, scope, begin, end });
        }
    }

    /// A client has replaced its connection, and with it one that was silent.
    pub(super) fn reconnected(&mut self, worker: usize) {
        let of = |at: &usize| {
            let injection = &self.scenario.injections[*at];
            injection.kind == Kind::Forget && injection.worker == worker
        };
        let silent: Vec<_> = self.begun.keys().copied().filter(of).collect();
        for at in silent {
            self.ended(at);
        }
    }

    /// Ends the faults that have not ended yet.
    pub(super) fn end_faults(&mut self) {
        let begun: Vec<_> = self.begun.keys().copied().collect();
        for at in begun {
            self.ended(at);
        }
    }

    /// An operator makes a change.
    pub(super) fn operate(&mut self) {
        if self.finishing || !self.scenario.operators {
            return;
        }
        let later = self.operator.u64(SECOND..4 * SECOND);
        self.at(self.now + later, Event::Operator);
        if self.store.down || self.now < self.store.frozen_until {
            return;
        }
        let things = &self.scenario.things;
        let thing = things[self.operator.usize(..things.len())];
        let semaphore = &THINGS[thing];
        if semaphore.operated {
            let limits = self.store.machines[thing].limits();
            let any = self.operator.u32(1..=semaphore.capacity);
            let change = match self.operator.u32(..10) {
                0..4 if limits.paused.is_some() => LimitChange::Resume,
                0..4 => LimitChange::Pause { by: "an operator".into(), reason: None },
                4..6 => LimitChange::Pin(any),
                6..8 => LimitChange::Unpin,
                _ => LimitChange::Declare(any),
            };
            self.change_limits(thing, &change);
        } else if let (Some(declared), true) = (semaphore.rate, self.operator.bool()) {
            // Never faster than the checker expects.
            let slower = Rate { count: rate(declared).count - 2, ..rate(declared) };
            let to = if self.operator.bool() { slower } else { rate(declared) };
            self.change_limits(thing, &LimitChange::Rate(Some(to)));
        } else if self.operator.u32(..3) == 0 {
            self.remove_a_waiter(thing);
        }
    }

    fn change_limits(&mut self, thing: usize, change: &LimitChange) {
        let before = self.store.machines[thing].limits().capacity();
        let command = Command::ChangeLimits { capacity: None, change: change.clone() };
        let requested = self.now;
        let reply = self.apply(thing, OPERATOR, &[command]);
        let is_done = matches!(reply.outcomes[..], [Outcome::LimitsChanged(LimitsChanged::Done)]);
        // If the name has no capacity any more, its next client declares that of the semaphore.
        let capacity = match self.store.machines[thing].limits().capacity() {
            0 => THINGS[thing].capacity,
            capacity => capacity,
        };
        let to = match change {
            LimitChange::Pause { .. } => driver::LimitChange::Pause,
            LimitChange::Resume => driver::LimitChange::Resume,
            _ if is_done || capacity != before => driver::LimitChange::Capacity(capacity),
            _ => return,
        };
        if is_done && THINGS[thing].operated {
            self.changes.push(Change { thing, to, requested, answered: Some(requested + 1) });
        }
    }

    fn remove_a_waiter(&mut self, thing: usize) {
        let waiters: Vec<_> =
            self.store.machines[thing].waiters().map(|row| (row.id, row.member.ends())).collect();
        if waiters.is_empty() {
            return;
        }
        let (id, ends) = waiters[self.operator.usize(..waiters.len())];
        // If the outcome of an enqueue is not known, the waiter may be in the queue once more.
        let owner = self.ids.get(&id).map(|(worker, ..)| *worker);
        let is_certain = owner.is_some_and(|worker| {
            let process = &mut self.processes[worker];
            let is_connected = process.connection.is_some() && process.silent.is_none();
            let calm = is_connected && process.stopped.is_none();
            calm && process.existing_core(thing).is_some_and(|core| core.is_answered(id))
        });
        self.apply(thing, OPERATOR, &[Command::Release { id, hint: ReleaseHint::Nothing }]);
        if let (true, Some(ends)) = (is_certain, ends) {
            let left = ends.since(self.store_time()).as_micros();
            let until = self.now + u64::try_from(left).unwrap_or(0);
            self.store.removed.insert(id, until);
        }
        self.publish(id.client(), Packet::Removed { thing, id });
    }

    /// Ends what operators have set.
    pub(super) fn reset_limits(&mut self) {
        for thing in self.scenario.things.clone() {
            if THINGS[thing].operated {
                self.change_limits(thing, &LimitChange::Resume);
                self.change_limits(thing, &LimitChange::Unpin);
                self.change_limits(thing, &LimitChange::Declare(THINGS[thing].capacity));
            }
        }
    }
}

fn scenario_scope(injection: &Injection) -> Scope {
    let of_the_store = matches!(
        injection.kind,
        Kind::Restart
            | Kind::Crash
            | Kind::RestartEmpty
            | Kind::Freeze
            | Kind::ClientKill
            | Kind::PrimaryKilled
            | Kind::ClockForward
            | Kind::ClockBack
    );
    if of_the_store { Scope::Everybody } else { Scope::Worker(injection.worker) }
}
