//! The store of a run: a machine for each name, the clients that listen, and what it lists.

use std::collections::HashMap;

use torture::driver::{Crowded, Listed};

use super::*;
use crate::client_core::timing::scatter;
use crate::machine::Reply;
use crate::machine::{Circumstances, Command, Effects, Held, Machine, MemberView, Outcome, Rate};

/// The time that a woken waiter has to claim its permit.
const CONFIRM_WITHIN: Span = Span::from_micros(torture::plan::CONFIRM);

pub(super) const OPERATOR: ClientId = ClientId::from_bits(u64::MAX);

#[derive(Default)]
pub(super) struct Store {
    pub(super) machines: Vec<Machine>,
    /// What the replica has, once it was needed.
    copy: Option<Vec<Machine>>,
    /// The connection over which each client receives wake-ups.
    pub(super) listening: BTreeMap<ClientId, (usize, u64)>,
    /// By how much its clock was set forward, or back.
    pub(super) ahead: i64,
    /// The number of requests that it has served, by which it refuses some.
    requests: u64,
    /// Until when it serves nobody.
    pub(super) frozen_until: Micros,
    pub(super) down: bool,
    pub(super) crowded: Vec<Crowded>,
    pub(super) listing: Listing,
    /// Waiters that an operator has removed, each until its client may take it for lost.
    pub(super) removed: BTreeMap<AcquisitionId, Micros>,
}

/// What one command of a client or an operator has caused.
pub(super) struct Applied {
    pub(super) reply: Reply,
    /// Waiters that were granted a permit with a wake-up.
    pub(super) woken: Vec<(AcquisitionId, Held)>,
}

/// The ids that samples listed, without gaps.
#[derive(Default)]
pub(super) struct Listing {
    pub(super) listed: Vec<Listed>,
    current: HashMap<(usize, AcquisitionId), usize>,
}

impl Listing {
    pub(super) fn add(&mut self, ids: Vec<(usize, AcquisitionId)>, now: Micros) {
        let mut before = std::mem::take(&mut self.current);
        for (thing, id) in ids {
            let at = before.remove(&(thing, id)).unwrap_or_else(|| {
                self.listed.push(Listed { thing, id: id.to_string(), from: now, to: now });
                self.listed.len() - 1
            });
            self.listed[at].to = now;
            self.current.insert((thing, id), at);
        }
    }
}

impl Store {
    pub(super) fn new() -> Self {
        Self { machines: empty(), ..Self::default() }
    }

    pub(super) fn forget(&mut self, client: ClientId, connection: u64) {
        if self.listening.get(&client).is_some_and(|(_, current)| *current == connection) {
            self.listening.remove(&client);
        }
    }

    pub(super) fn snapshot(&mut self) {
        self.copy = Some(self.machines.clone());
    }

    /// Loses all data.
    pub(super) fn restart_empty(&mut self) {
        self.machines = empty();
        self.copy = None;
    }

    /// A replica takes over, which lacks what happened since its copy.
    pub(super) fn fail_over(&mut self) {
        if let Some(copy) = self.copy.take() {
            self.machines = copy;
        }
    }

    pub(super) fn apply(
        &mut self,
        (thing, from): (usize, ClientId),
        commands: &[Command],
        now: Time,
        at: Micros,
    ) -> Applied {
        self.requests += 1;
        let chance = scatter(self.requests);
        // The small scripts of Redis refuse commands of one kind, and leave them to a later request.
        let is_refused = |command: &Command| match command {
            Command::Enqueue { .. } => chance.is_multiple_of(8),
            Command::Release { .. } => (chance / 8).is_multiple_of(8),
            Command::Renew { .. } => (chance / 64).is_multiple_of(8),
            Command::ChangeLimits { .. } | Command::Sweep => false,
        };
        let machine = &mut self.machines[thing];
        let listening = &self.listening;
        let mut woken = Vec::new();
        let mut effects = Effects::default();
        let mut call = Circumstances {
            from: Some(from),
            now,
            confirm_within: CONFIRM_WITHIN,
            wake: &mut |id, held| {
                let is_reached = listening.contains_key(&id.client());
                woken.extend(is_reached.then_some((id, *held)));
                is_reached.into()
            },
            effects: &mut effects,
        };
        let mut apply = |command: &Command| {
            if from != OPERATOR && is_refused(command) {
                return Outcome::Unapplied;
            }
            let Ok(outcome) = machine.apply(command, &mut call);
            outcome
        };
        let outcomes: Vec<Outcome> = commands.iter().map(&mut apply).collect();
        let next_expiry = machine.next_expiry().map(|expiry| expiry - now);
        let head = machine.waiters().next().map(|row| row.id);
        let of_the_sender = head.is_some_and(|head| head.client() == from);
        let next_token = machine.next_token(now).filter(|_| of_the_sender).map(|token| token - now);
        let units = machine.holders().iter().map(|row| u64::from(row.member.weight())).sum();
        if units > u64::from(THINGS[thing].capacity) {
            self.crowded.push(Crowded { at, thing, held: units });
        }
        let reply = if outcomes.iter().all(|outcome| *outcome == Outcome::Unapplied) {
            Reply { outcomes, ..Reply::default() }
        } else {
            Reply { outcomes, effects, next_expiry, next_token, ..Reply::default() }
        };
        Applied { reply, woken }
    }

    /// The client of the first waiter, if that waits for a token, and the time until it arrives.
    pub(super) fn token(&self, thing: usize, now: Time) -> Option<(ClientId, Span)> {
        let machine = &self.machines[thing];
        let at = machine.next_token(now)?;
        let mut waiters = machine.waiters().map(|row| row.id.client());
        let client = waiters.find(|client| self.listening.contains_key(client))?;
        Some((client, at - now))
    }

    /// Lists the members whose leases last. One that has ended is no leak: it is in nobody's way, and whichever command
    /// looks for expired members first removes it.
    pub(super) fn list(&self, now: Time) -> Vec<(usize, AcquisitionId)> {
        let lasts = |member: &MemberView| member.ends().is_none_or(|ends| now < ends);
        let machines = self.machines.iter().enumerate();
        let members = machines.flat_map(|(thing, machine)| {
            let members = machine.members().filter(lasts);
            let mut ids: Vec<_> = members.map(|member| (thing, member.id)).collect();
            ids.sort_unstable();
            ids
        });
        members.collect()
    }

    pub(super) fn waiters(&self) -> Vec<AcquisitionId> {
        self.machines.iter().flat_map(|machine| machine.waiters().map(|row| row.id)).collect()
    }
}

fn empty() -> Vec<Machine> {
    THINGS.iter().map(|_| Machine::new(0)).collect()
}

/// The rate of a thing, as clients declare it.
pub(super) fn rate(ThingRate { starts, burst }: ThingRate) -> Rate {
    Rate { count: u64::from(starts), period: Span::from_micros(SECOND), burst }
}
