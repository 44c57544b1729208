//! The connection of a process: what travels on it, and how it is lost and made.

use std::sync::Arc;

use super::*;

/// How long a request of a lost connection may still be on its way.
const STRAGGLES_FOR: Micros = SECOND;

/// What a connection carries.
#[derive(Clone, Debug)]
pub(in crate::simulation) enum Packet {
    Request {
        number: u64,
        from: ClientId,
        parts: Arc<[Part]>,
        /// Whether it has been delayed because its connection was replaced.
        is_late: bool,
    },
    Reply {
        number: u64,
        replies: Vec<Reply>,
    },
    /// Under a rate, a wake-up says nothing about the permit.
    WakeUp {
        thing: usize,
        id: AcquisitionId,
        grant: Option<Held>,
    },
    Token {
        thing: usize,
        after: Span,
    },
    Removed {
        thing: usize,
        id: AcquisitionId,
    },
}

fn unanswered() -> Answered {
    Answered::Unknown(Error::unavailable("request to the simulated store", true, None))
}

impl Simulation<'_> {
    /// Puts a message on a connection: to the store (0) or to the process (1).
    pub(in crate::simulation) fn transmit(
        &mut self,
        worker: usize,
        connection: u64,
        to: usize,
        packet: Packet,
    ) {
        let mut latency = match self.network.u32(..20) {
            0 => self.network.u64(2 * MILLISECOND..20 * MILLISECOND),
            _ => self.network.u64(100..1500),
        };
        let process = &mut self.processes[worker];
        if self.now < process.slow_until {
            latency += 20 * MILLISECOND + self.network.u64(0..150 * MILLISECOND);
        }
        // What is under way arrives when the stall ends, and this a moment later.
        let stalled = process.stalled_until + 1;
        let at = (self.now + latency).max(process.last_arrival[to]).max(stalled);
        process.last_arrival[to] = at;
        self.at(at, Event::Arrives { worker, connection, packet });
    }

    pub(in crate::simulation) fn arrives(
        &mut self,
        worker: usize,
        connection: u64,
        packet: Packet,
    ) {
        let process = &self.processes[worker];
        let is_current = process.connection == Some(connection);
        if process.silent == Some(connection) {
            return;
        }
        if self.now < process.stalled_until && is_current {
            let at = process.stalled_until;
            return self.at(at, Event::Arrives { worker, connection, packet });
        }
        match packet {
            Packet::Request { number, from, parts, is_late } => {
                let of_the_dead = from != process.client;
                let straggles = !of_the_dead && self.now < process.straggles_until;
                if self.store.down || !(is_current || of_the_dead || straggles) {
                    return;
                }
                if straggles && !is_current && !is_late {
                    // It arrives after the requests of the next connection.
                    let later = self.now + self.network.u64(0..800 * MILLISECOND);
                    let process = &mut self.processes[worker];
                    let at = later.max(process.last_straggler);
                    process.last_straggler = at;
                    let packet = Packet::Request { number, from, parts, is_late: true };
                    return self.at(at, Event::Arrives { worker, connection, packet });
                }
                if self.now < self.store.frozen_until {
                    let at = self.store.frozen_until;
                    let packet = Packet::Request { number, from, parts, is_late };
                    return self.at(at, Event::Arrives { worker, connection, packet });
                }
                self.serve(worker, (connection, number), from, &parts);
            }
            packet if is_current => {
                let event = Event::Arrives { worker, connection, packet: packet.clone() };
                if !self.defer(worker, event) {
                    self.receive(worker, packet);
                }
            }
            _ => {}
        }
    }

    /// The store applies a request and replies.
    fn serve(
        &mut self,
        worker: usize,
        (connection, number): (u64, u64),
        from: ClientId,
        parts: &Arc<[Part]>,
    ) {
        let process = &self.processes[worker];
        let straggles = process.client == from && process.connection != Some(connection);
        let mut replies = Vec::new();
        for part in &**parts {
            if straggles {
                self.before_straggler(part.thing, &part.commands);
            }
            replies.push(self.apply(part.thing, from, &part.commands));
        }
        let process = &mut self.processes[worker];
        if process.connection != Some(connection) || process.client != from {
            return;
        }
        if std::mem::take(&mut process.loses_reply) {
            return self.lose_connection(worker);
        }
        self.transmit(worker, connection, 1, Packet::Reply { number, replies });
    }

    /// Applies commands at the store, and sends the wake-ups.
    pub(in crate::simulation) fn apply(
        &mut self,
        thing: usize,
        from: ClientId,
        commands: &[Command],
    ) -> Reply {
        let now = self.store_time();
        let before: Vec<_> = commands.iter().map(|command| self.before(thing, command)).collect();
        let applied = self.store.apply((thing, from), commands, now, self.now);
        for (command, before) in commands.iter().zip(before) {
            self.after(thing, command, before);
        }
        // A request of which nothing was applied does not pass a token on that has arrived in the meantime.
        let is_applied =
            applied.reply.outcomes.iter().any(|outcome| *outcome != Outcome::Unapplied);
        if is_applied {
            self.no_permit_is_kept_back(thing);
        }
        for (command, outcome) in commands.iter().zip(&applied.reply.outcomes) {
            if let (Some(id), Outcome::Waiting { .. }) = (command.id(), outcome) {
                self.note_for(id, |op, now| Noted::Queue { op, since: now, position: 0 });
            }
        }
        let by_reply = applied.reply.effects.granted.iter().map(|(id, ..)| *id);
        let granted: Vec<_> = by_reply.chain(applied.woken.iter().map(|(id, _)| *id)).collect();
        for id in granted {
            // Until now it was in the queue.
            self.note_for(id, |op, now| Noted::Queue { op, since: now, position: 0 });
        }
        let rated = self.store.machines[thing].limits().meter().is_some();
        for (id, held) in applied.woken {
            let grant = (!rated).then_some(held);
            self.publish(id.client(), Packet::WakeUp { thing, id, grant });
        }
        if is_applied
            && let Some((client, after)) = self.store.token(thing, now)
            && client != from
        {
            self.publish(client, Packet::Token { thing, after });
        }
        applied.reply
    }

    /// Sends a message to a client that listens.
    pub(in crate::simulation) fn publish(&mut self, client: ClientId, packet: Packet) {
        if let Some(&(worker, connection)) = self.store.listening.get(&client)
            && self.processes[worker].connection == Some(connection)
        {
            if std::mem::take(&mut self.processes[worker].loses_message) {
                if let Packet::WakeUp { id, .. } | Packet::Removed { id, .. } = packet {
                    self.watch.lost.insert(id);
                }
                return;
            }
            self.transmit(worker, connection, 1, packet);
        }
    }

    fn receive(&mut self, worker: usize, packet: Packet) {
        let process = &mut self.processes[worker];
        let now = process.local(self.now);
        match packet {
            Packet::Reply { number, replies } => {
                let Some(at) =
                    process.in_flight.iter().position(|request| request.number == number)
                else {
                    return;
                };
                let InFlight { parts, sent, .. } = process.in_flight.remove(at);
                process.last_message_at = now;
                process.answered = Some(sent);
                process.smoothed = (process.smoothed * 7 + now.saturating_since(sent)) / 8;
                let round_trip = process.smoothed * 2;
                for (part, reply) in parts.iter().zip(replies) {
                    let declares = |(command, outcome): (&Command, &Outcome)| {
                        matches!(command, Command::Enqueue { .. })
                            && !matches!(outcome, Outcome::TooHeavy { .. } | Outcome::Unapplied)
                    };
                    if part.commands.iter().zip(&reply.outcomes).any(declares) {
                        self.processes[worker].declared[part.thing] = true;
                    }
                    self.with_core(worker, part.thing, |core, now| {
                        core.set_round_trip(round_trip);
                        core.answered(&part.commands, Answered::Applied(reply), sent, now);
                    });
                }
                self.send_all(worker);
            }
            Packet::WakeUp { thing, id, grant } => {
                // The store granted it after it had replied to that request.
                let grant = grant.zip(process.answered);
                self.with_core(worker, thing, |core, now| core.woken(id, grant, now));
            }
            Packet::Token { thing, after } => {
                self.with_core(worker, thing, |core, now| core.token_arrives(after, now));
            }
            Packet::Removed { thing, id } => {
                self.with_core(worker, thing, |core, now| core.cancelled_elsewhere(id, now));
            }
            Packet::Request { .. } => {}
        }
    }

    /// The connection is suspect if a request was not answered, and nothing else was either.
    pub(in crate::simulation) fn overdue(&mut self, worker: usize, connection: u64, request: u64) {
        let event = Event::Overdue { worker, connection, request };
        let process = &self.processes[worker];
        if process.connection != Some(connection) || self.defer(worker, event) {
            return;
        }
        let process = &self.processes[worker];
        let late = process.in_flight.iter().any(|sent| sent.number == request);
        if late {
            self.lose_connection(worker);
        }
    }

    /// A renewal is overdue.
    pub(in crate::simulation) fn suspect(&mut self, worker: usize, since: Moment) {
        if self.processes[worker].last_message_at < since {
            self.lose_connection(worker);
        }
    }

    /// The connection is lost, and everything in flight becomes unknown.
    pub(in crate::simulation) fn lose_connection(&mut self, worker: usize) {
        let process = &mut self.processes[worker];
        let Some(connection) = process.connection.take() else { return };
        let client = process.client;
        let mut lost = std::mem::take(&mut process.in_flight);
        // Without stragglers, the store closes the old connection before the new one is up.
        let stragglers = self.scenario.stragglers;
        process.straggles_until = if stragglers { self.now + STRAGGLES_FOR } else { 0 };
        if process.silent == Some(connection) {
            // The store does not notice.
            self.at(self.now + 10 * SECOND, Event::Noticed { client, connection });
        } else {
            self.store.forget(client, connection);
        }
        if self.network.bool() {
            lost.reverse();
        }
        self.users_lose_patience(worker);
        for InFlight { parts, sent, .. } in lost {
            for part in &*parts {
                self.with_core(worker, part.thing, |core, now| {
                    core.answered(&part.commands, unanswered(), sent, now);
                });
            }
        }
        let life = self.processes[worker].life;
        let later = self.network.u64(MILLISECOND..100 * MILLISECOND);
        self.at(self.now + later, Event::Connect { worker, life });
    }

    pub(in crate::simulation) fn connect(&mut self, worker: usize, life: u32) {
        let event = Event::Connect { worker, life };
        if !self.is_current(worker, life) || self.defer(worker, event.clone()) {
            return;
        }
        let process = &self.processes[worker];
        if process.connection.is_some() {
            return;
        }
        let is_frozen = self.now < self.store.frozen_until;
        if self.store.down || is_frozen || self.now < process.refused_until {
            let later = self.network.u64(20 * MILLISECOND..150 * MILLISECOND);
            return self.at(self.now + later, event);
        }
        self.connections += 1;
        let connection = self.connections;
        let process = &mut self.processes[worker];
        process.connection = Some(connection);
        process.connected_at = self.now;
        process.answered = None;
        process.last_arrival = [0; 2];
        process.last_message_at = process.local(self.now);
        process.silent = None;
        let (again, other) = (process.was_connected, std::mem::take(&mut process.to_another));
        process.was_connected = true;
        let stragglers = self.scenario.stragglers;
        let client = process.client;
        self.store.listening.insert(client, (worker, connection));
        self.reconnected(worker);
        for thing in 0..THINGS.len() {
            if self.processes[worker].cores[thing].is_some() {
                self.with_core(worker, thing, |core, now| {
                    if stragglers {
                        core.expect_stragglers();
                    }
                    if again {
                        core.connected(other, now);
                    }
                });
            }
        }
        self.send_all(worker);
    }

    /// Every connection breaks. `other` says that the next server may lack what this one has answered.
    pub(in crate::simulation) fn lose_connections(&mut self, other: bool) {
        for worker in 0..self.processes.len() {
            self.processes[worker].to_another |= other;
            if self.processes[worker].stopped.is_some() {
                // It notices when it continues.
                if let Some(connection) = self.processes[worker].connection {
                    let client = self.processes[worker].client;
                    self.store.forget(client, connection);
                    self.processes[worker].silent = Some(connection);
                }
            } else {
                self.lose_connection(worker);
            }
        }
        let waits: Vec<_> = self.store.listening.keys().copied().collect();
        for client in waits.into_iter().filter(|client| *client != OPERATOR) {
            if !self
                .processes
                .iter()
                .any(|process| process.client == client && process.connection.is_some())
            {
                self.store.listening.remove(&client);
            }
        }
    }
}
