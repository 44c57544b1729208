//! What the simulation checks itself, because it sees more than the workers of a torture test do.

use std::collections::{BTreeMap, BTreeSet};

use torture::check::Rule;

use super::*;
use crate::machine::{Command, Machine, MemberView};

/// How long after a connection is up everything that was lost with the last one has been sent again, and answered.
const SETTLED: Micros = 3 * SECOND;

/// How long the first waiter may take to query after a lease has ended. It may have been further back when it last
/// queried.
const OVERLOOKED: Micros = 6 * SECOND;

/// What was seen of ids so far.
#[derive(Default)]
pub(super) struct Watch {
    /// Ids of which the store has applied an enqueue.
    applied: BTreeSet<AcquisitionId>,
    /// Waiters about which a message was lost.
    pub(super) lost: BTreeSet<AcquisitionId>,
    /// Ids that the store did not know any more when a request of a lost connection enqueued them.
    pub(super) brought_back: BTreeSet<AcquisitionId>,
    /// Waiters that the store does not know, since when.
    unknown: BTreeMap<AcquisitionId, Micros>,
}

impl Simulation<'_> {
    /// Checks a command before it is applied. Returns the permit or the place that its id has, which it must keep.
    pub(super) fn before(&mut self, thing: usize, command: &Command) -> Option<MemberView> {
        let Command::Enqueue { id, .. } = *command else { return None };
        if self.store.removed.get(&id).is_some_and(|until| self.now < *until) {
            let what = format!("{id} is enqueued again, although an operator has removed it");
            self.saw(Rule::Ownership, thing, what);
        }
        if self.watch.applied.insert(id)
            && let Some(&(worker, ..)) = self.ids.get(&id)
            && let Some(earlier) = self.processes[worker]
                .waits_for(thing)
                .into_iter()
                .find(|other| *other < id && !self.watch.applied.contains(other))
        {
            let what = format!("{id} is enqueued before {earlier}, which was requested first");
            self.saw(Rule::Order, thing, what);
        }
        let now = self.store_time();
        let member = self.store.machines[thing].member(id)?;
        member.ends().is_none_or(|ends| now < ends).then_some(member)
    }

    /// Records what a request of a lost connection is about to undo: it may have been sent before the client learned
    /// that an operator has removed the id, or before the client released it.
    pub(super) fn before_straggler(&mut self, thing: usize, commands: &[Command]) {
        for command in commands {
            if let Command::Enqueue { id, .. } = *command
                && self.store.machines[thing].member(id).is_none()
            {
                self.store.removed.remove(&id);
                self.watch.brought_back.insert(id);
            }
        }
    }

    /// Checks the state of a name after a command.
    pub(super) fn after(&mut self, thing: usize, command: &Command, before: Option<MemberView>) {
        let machine = &self.store.machines[thing];
        if let (Some(before), Some(id)) = (before, command.id())
            && before.is_holder()
            && machine.member(id).and_then(|member| member.fence) != before.fence
        {
            let what = format!("a second enqueue of {id} has changed its permit");
            self.saw(Rule::Ownership, thing, what);
        }
    }

    /// Checks that no reachable waiter that fits is left in front of the first waiter that does not fit.
    pub(super) fn no_permit_is_kept_back(&mut self, thing: usize) {
        let now = self.store_time();
        let machine = &self.store.machines[thing];
        let listens = |id: &AcquisitionId| self.store.listening.contains_key(&id.client());
        let left = machine.waiters().take_while(|row| fits(machine, row.member.weight(), now));
        let left = left.map(|row| row.id).find(listens);
        if let Some(id) = left {
            let what = format!("{id} waits at the end of a command, although its permit is free");
            self.saw(Rule::Waiting, thing, what);
        }
    }

    /// Checks every client that has been connected for a while: it answers for every id of its own that the store
    /// knows, and the store knows every id for which it waits.
    pub(super) fn inspect(&mut self) {
        let now = self.store_time();
        let mut unknown = BTreeMap::new();
        for thing in self.scenario.things.clone() {
            let lasts = |member: &MemberView| member.ends().is_none_or(|ends| now < ends);
            let members = self.store.machines[thing].members().filter(lasts);
            let mut ids: Vec<_> = members.map(|member| member.id).collect();
            ids.sort_unstable();
            for worker in 0..self.processes.len() {
                let process = &mut self.processes[worker];
                if !process.is_settled(self.now, SETTLED) {
                    continue;
                }
                let client = process.client;
                for id in ids.iter().filter(|id| id.client() == client) {
                    let answers =
                        process.existing_core(thing).is_some_and(|core| core.answers_for(*id));
                    if !answers && !process.mentions(*id) {
                        let what = format!("the store knows {id}, and its client does not");
                        self.saw(Rule::Leak, thing, what);
                        break;
                    }
                }
                self.relies_on_what_the_store_has(worker, thing);
                // If a message about a waiter is lost, or its place ends early because the clock was set, its client
                // learns it with the next query. That is soon only for the first waiter of the client, and only unless
                // an operator has removed it.
                let (removed, lost) = (&self.store.removed, &self.watch.lost);
                let ends_early = self.clock_was_set;
                let mut waits = self.processes[worker].waits_for(thing);
                let first = waits.iter().min().copied();
                waits.retain(|id| {
                    let is_soon = Some(*id) == first || !ends_early && !lost.contains(id);
                    is_soon && !removed.contains_key(id)
                });
                for id in waits {
                    if ids.binary_search(&id).is_err() && !self.processes[worker].mentions(id) {
                        unknown
                            .insert(id, self.watch.unknown.get(&id).copied().unwrap_or(self.now));
                    }
                }
            }
            self.nobody_overlooks_the_dead(thing);
            if let Some((id, _)) = unknown.iter().find(|(_, since)| **since + SETTLED < self.now) {
                let what = format!("{id} waits, and the store does not know it");
                self.saw(Rule::Waiting, thing, what);
                unknown.clear();
            }
        }
        self.watch.unknown = unknown;
    }

    /// A client that has been connected for a while has renewed everything that it holds, even if another server has
    /// taken over.
    fn relies_on_what_the_store_has(&mut self, worker: usize, thing: usize) {
        if self.clock_was_set {
            return;
        }
        let (process, now) = (&self.processes[worker], self.store_time());
        let local = process.local(self.now);
        let valid = process.relies_on(thing).into_iter().filter(|(_, _, until)| local < *until);
        let machine = &self.store.machines[thing];
        let has = |id: AcquisitionId, fence| {
            machine.member(id).is_some_and(|member| {
                member.fence == Some(fence) && member.ends().is_none_or(|ends| now < ends)
            })
        };
        let missing = valid.into_iter().find(|(id, fence, _)| !has(*id, *fence));
        if let Some((id, ..)) = missing {
            let what =
                format!("the client of {id} relies on a permit that the store does not have");
            self.saw(Rule::Limit, thing, what);
        }
    }

    /// The client of the first waiter queries when a lease has ended, so that a dead holder is removed.
    fn nobody_overlooks_the_dead(&mut self, thing: usize) {
        let now = self.store_time();
        let machine = &self.store.machines[thing];
        let client = machine.waiters().next().map(|row| row.id.client());
        let is_settled = |process: &Process| {
            Some(process.client) == client && process.is_settled(self.now, OVERLOOKED)
        };
        let late = |member: &MemberView| {
            member.ends().is_some_and(|ends| ends + Span::from_micros(OVERLOOKED) < now)
        };
        if self.processes.iter().any(is_settled) && !self.clock_was_set {
            let Some(dead) = machine.members().filter(late).min_by_key(|member| member.id) else {
                return;
            };
            let what = format!("the lease of {} has ended, and nobody asks", dead.id);
            self.saw(Rule::Waiting, thing, what);
        }
    }
}

fn fits(machine: &Machine, weight: u32, now: Time) -> bool {
    let limits = machine.limits();
    let room = limits.capacity().saturating_sub(machine.units());
    let has_token = limits.meter().is_none_or(|meter| meter.is_free(now));
    limits.paused.is_none() && weight <= room && has_token
}
