//! A process of a run: a client with its cores, its sender and its connection, after `engine/remote.rs` and
//! `engine/sender.rs`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::store::{OPERATOR, rate};
use super::users::{Owner, User};
use super::*;
use crate::backend::redis::server_clock::ServerClock;
use crate::client_core::{Answered, NameCore, timing};
use crate::clock::Moment;
use crate::machine::Reply;
use crate::machine::{Command, Declared, Held, Outcome, Terms};
use crate::{Error, engine};

/// How long a client waits for an answer before it replaces the connection.
const SILENT: Micros = torture::plan::SOCKET_TIMEOUT;
const ANSWER_TIMEOUT: Span = Span::from_millis(5000);
/// How long a request of a lost connection may still be on its way.
const STRAGGLES_FOR: Micros = SECOND;

/// What a connection carries.
#[derive(Clone, Debug)]
pub(super) enum Packet {
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
        server: Time,
    },
    /// Under a rate, a wake-up says nothing about the permit.
    WakeUp {
        thing: usize,
        id: AcquisitionId,
        grant: Option<(Held, Time)>,
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

/// The commands for one name.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) thing: usize,
    commands: Vec<Command>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Urgency {
    Ordinary,
    Renewals,
}

impl Urgency {
    fn in_flight(self) -> usize {
        match self {
            Self::Ordinary => 2,
            Self::Renewals => 1,
        }
    }
}

struct InFlight {
    number: u64,
    urgency: Urgency,
    parts: Arc<[Part]>,
    sent: Moment,
}

#[allow(clippy::struct_excessive_bools)] // each is a fault of its own
pub(super) struct Process {
    pub(super) worker: usize,
    pub(super) life: u32,
    pub(super) alive: bool,
    pub(super) client: ClientId,
    pub(super) sequence: u64,
    pub(super) history: usize,
    pub(super) rng: Rng,
    pub(super) users: Vec<User>,
    pub(super) last_op: u64,
    /// By how many parts in a million its clock is faster than the store's.
    drift: i64,
    cores: Vec<Option<NameCore<Owner>>>,
    /// Whether the store has received what this client declares.
    declared: Vec<bool>,
    /// The names in line, for ordinary commands and for renewals.
    lines: [VecDeque<usize>; 2],
    in_flight: Vec<InFlight>,
    last_request: u64,
    /// The current connection. `None` while it is down.
    pub(super) connection: Option<u64>,
    was_connected: bool,
    to_another: bool,
    clock: ServerClock,
    heard: Moment,
    smoothed: Duration,
    timer_at: Option<Micros>,
    /// When the last message on the current connection arrives, in each direction.
    last_arrival: [Micros; 2],
    /// Events that wait until the process is continued.
    pub(super) stopped: Option<Vec<Event>>,
    /// Faults of its connection.
    pub(super) silent: Option<u64>,
    pub(super) refused_until: Micros,
    pub(super) stalled_until: Micros,
    pub(super) slow_until: Micros,
    pub(super) loses_reply: bool,
    pub(super) loses_request: bool,
    /// Whether the next wake-up or other message of the store is lost, although the connection works.
    pub(super) loses_message: bool,
    connected_at: Micros,
    /// Until when requests of earlier connections may still be applied.
    straggles_until: Micros,
    last_straggler: Micros,
}

impl Process {
    pub(super) fn new(scenario: &Scenario, worker: usize, life: u32) -> Self {
        let own = (worker as u64) << 32 | u64::from(life) << 8;
        let mut rng = Rng::with_seed(scenario.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ own);
        let client = ClientId::from_bits(own + 1);
        let drift = rng.i64(-9_900..=9_900);
        Self {
            worker,
            life,
            alive: false,
            client,
            sequence: 0,
            history: 0,
            users: (0..scenario.users).map(|_| User::default()).collect(),
            last_op: 0,
            drift,
            cores: THINGS.iter().map(|_| None).collect(),
            declared: vec![false; THINGS.len()],
            lines: [VecDeque::new(), VecDeque::new()],
            in_flight: Vec::new(),
            last_request: 0,
            connection: None,
            was_connected: false,
            to_another: false,
            clock: ServerClock::default(),
            heard: Moment::from_micros(0),
            smoothed: Duration::from_millis(1),
            timer_at: None,
            last_arrival: [0; 2],
            stopped: None,
            silent: None,
            refused_until: 0,
            stalled_until: 0,
            slow_until: 0,
            loses_reply: false,
            loses_request: false,
            loses_message: false,
            connected_at: 0,
            straggles_until: 0,
            last_straggler: 0,
            rng,
        }
    }

    pub(super) fn life_line(&self) -> Life {
        Life { worker: self.worker, life: self.life, foreign: false, end: LifeEnd::Done }
    }

    /// The clock of the process at this time.
    pub(super) fn local(&self, at: Micros) -> Moment {
        let drift = i64::try_from(at).unwrap_or(i64::MAX) / 1000 * self.drift / 1000;
        Moment::from_micros(at.saturating_add_signed(drift))
    }

    /// The first time at which the clock of the process shows this moment.
    pub(super) fn time_of(&self, moment: Moment) -> Micros {
        let mut at = i128::from(moment.micros()) * 1_000_000 / i128::from(1_000_000 + self.drift);
        at -= 2 * i128::from(MILLISECOND);
        let mut at = u64::try_from(at.max(0)).unwrap_or(u64::MAX);
        // The clock moves in small steps, so look for the exact one.
        let mut step = 4 * MILLISECOND;
        while step > 0 {
            while self.local(at + step) < moment {
                at += step;
            }
            step /= 2;
        }
        if self.local(at) < moment { at + 1 } else { at }
    }

    pub(super) fn core(&mut self, thing: usize, stragglers: bool) -> &mut NameCore<Owner> {
        let client = self.client;
        self.cores[thing].get_or_insert_with(|| {
            NameCore::new(client, ANSWER_TIMEOUT, timing::scatter, stragglers)
        })
    }

    pub(super) fn known_core(&mut self, thing: usize) -> Option<&mut NameCore<Owner>> {
        self.cores[thing].as_mut()
    }

    /// Whether the process runs, and its connection has worked for this long.
    pub(super) fn is_settled(&self, now: Micros, since: Micros) -> bool {
        let is_up = self.connection.is_some() && self.silent != self.connection;
        let is_calm = self.stalled_until.max(self.slow_until) + since < now;
        is_up && is_calm && self.alive && self.stopped.is_none() && self.connected_at + since < now
    }

    /// Whether a request of this id is on its way.
    pub(super) fn mentions(&self, id: AcquisitionId) -> bool {
        let parts = self.in_flight.iter().flat_map(|request| &*request.parts);
        parts.flat_map(|part| &part.commands).any(|command| command.id() == Some(id))
    }

    fn declares(&self, thing: usize) -> Declared {
        let known = &THINGS[thing];
        let is_new = !self.declared[thing];
        let rate = known.rate.map(rate);
        // As `unless_declared`: otherwise the client would undo what an operator has set.
        Declared {
            capacity: known.capacity,
            is_new: is_new && !known.steered,
            rate,
            rate_is_new: is_new,
        }
    }
}

pub(super) fn terms(thing: usize) -> Terms {
    let known = &THINGS[thing];
    Terms { lease: Some(Span::from_micros(known.lease)), ttl: known.ttl.map(Span::from_micros) }
}

fn unanswered() -> Answered {
    Answered::Unknown(Error::unavailable("request to the simulated store", true, None))
}

impl Simulation<'_> {
    fn is_current(&self, worker: usize, life: u32) -> bool {
        let process = &self.processes[worker];
        process.life == life && process.alive
    }

    /// Does something with a core of a process, and then all that follows from it.
    pub(super) fn with_core<R>(
        &mut self,
        worker: usize,
        thing: usize,
        work: impl FnOnce(&mut NameCore<Owner>, Moment) -> R,
    ) -> R {
        let stragglers = self.scenario.stragglers;
        let now = self.processes[worker].local(self.now);
        let result = work(self.processes[worker].core(thing, stragglers), now);
        self.follow_up(worker, thing);
        result
    }

    fn follow_up(&mut self, worker: usize, thing: usize) {
        self.apply_notices(worker, thing);
        let process = &mut self.processes[worker];
        let Some(core) = process.cores[thing].as_ref() else { return };
        for (has, line) in [(core.has_commands(), 0), (core.has_renewals(), 1)] {
            if has && !process.lines[line].contains(&thing) {
                process.lines[line].push_back(thing);
            }
        }
        self.set_timer(worker);
        self.send_all(worker);
    }

    fn set_timer(&mut self, worker: usize) {
        let process = &self.processes[worker];
        let next = process.cores.iter().flatten().filter_map(NameCore::next_timeout).min();
        let Some(next) = next else { return };
        let at = process.time_of(next).max(self.now);
        if process.timer_at.is_none_or(|earlier| at < earlier || earlier < self.now) {
            let life = process.life;
            self.processes[worker].timer_at = Some(at);
            self.at(at, Event::Timer { worker, life });
        }
    }

    pub(super) fn timer(&mut self, worker: usize, life: u32) {
        if !self.is_current(worker, life) || self.defer(worker, Event::Timer { worker, life }) {
            return;
        }
        self.processes[worker].timer_at = None;
        let now = self.processes[worker].local(self.now);
        for thing in 0..THINGS.len() {
            let core = self.processes[worker].cores[thing].as_ref();
            if core.and_then(NameCore::next_timeout).is_some_and(|at| at <= now) {
                self.with_core(worker, thing, NameCore::timeout);
            }
        }
        self.set_timer(worker);
    }

    /// Keeps an event for later if the process is stopped.
    pub(super) fn defer(&mut self, worker: usize, event: Event) -> bool {
        let Some(waiting) = &mut self.processes[worker].stopped else { return false };
        waiting.push(event);
        true
    }

    /// Sends whatever may be sent.
    fn send_all(&mut self, worker: usize) {
        for urgency in [Urgency::Renewals, Urgency::Ordinary] {
            loop {
                let process = &self.processes[worker];
                let in_flight = process.in_flight.iter().filter(|own| own.urgency == urgency);
                let is_free = in_flight.count() < urgency.in_flight();
                if process.connection.is_none() || !is_free || process.stopped.is_some() {
                    break;
                }
                if !self.send(worker, urgency) {
                    break;
                }
            }
        }
    }

    /// Packs and sends one request, with commands of all names in line. Returns whether there were any.
    fn send(&mut self, worker: usize, urgency: Urgency) -> bool {
        let process = &mut self.processes[worker];
        let (now, mut room) = (process.local(self.now), engine::sender::MAX_IDS);
        let line = usize::from(urgency == Urgency::Renewals);
        let mut parts = Vec::new();
        for _ in 0..process.lines[line].len() {
            let Some(thing) = process.lines[line].pop_front() else { break };
            let declared = process.declares(thing);
            let Some(core) = process.cores[thing].as_mut() else { continue };
            let commands = match urgency {
                Urgency::Ordinary => core.take(room, declared, now),
                Urgency::Renewals => core.take_renewals(room),
            };
            room = room.saturating_sub(commands.len());
            let more = if line == 0 { core.has_commands() } else { core.has_renewals() };
            if more {
                process.lines[line].push_back(thing);
            }
            if !commands.is_empty() {
                parts.push(Part { thing, commands });
            }
        }
        if parts.is_empty() {
            return false;
        }
        process.last_request += 1;
        let (number, parts): (_, Arc<[Part]>) = (process.last_request, parts.into());
        let own = InFlight { number, urgency, parts: parts.clone(), sent: now };
        process.in_flight.push(own);
        let from = process.client;
        let (connection, is_lost) =
            (process.connection.unwrap_or_default(), std::mem::take(&mut process.loses_request));
        for part in &*parts {
            self.check_commands(worker, part);
        }
        if is_lost {
            // The connection is lost with the request.
            self.lose_connection(worker);
            return true;
        }
        let packet = Packet::Request { number, from, parts, is_late: false };
        self.transmit(worker, connection, 0, packet);
        let silent = self.processes[worker].time_of(now + Span::from_micros(SILENT));
        self.at(silent, Event::Overdue { worker, connection, request: number });
        true
    }

    /// A script decides about all ids of a request together, so no command must be in it twice.
    fn check_commands(&mut self, worker: usize, part: &Part) {
        let same = |one: &Command, other: &Command| {
            one.id() == other.id() && std::mem::discriminant(one) == std::mem::discriminant(other)
        };
        let commands = &part.commands;
        let twice = commands
            .iter()
            .enumerate()
            .any(|(at, command)| commands[..at].iter().any(|other| same(other, command)));
        if twice {
            let what = format!("worker {worker} sends a command twice: {commands:?}");
            self.saw(torture::check::Rule::Crash, part.thing, what);
        }
    }

    pub(super) fn saw(&mut self, rule: torture::check::Rule, thing: usize, what: String) {
        if self.seen.len() < 5 {
            let (thing, at) = (THINGS[thing].name.to_owned(), self.now);
            self.seen.push(Violation { rule, thing, at, what });
        }
    }

    /// Puts a message on a connection: to the store (0) or to the process (1).
    pub(super) fn transmit(&mut self, worker: usize, connection: u64, to: usize, packet: Packet) {
        let mut latency = match self.network.u32(..20) {
            0 => self.network.u64(2 * MILLISECOND..20 * MILLISECOND),
            _ => self.network.u64(100..1500),
        };
        let process = &mut self.processes[worker];
        if self.now < process.slow_until {
            latency += 20 * MILLISECOND + self.network.u64(0..150 * MILLISECOND);
        }
        let at = (self.now + latency).max(process.last_arrival[to]).max(process.stalled_until);
        process.last_arrival[to] = at;
        self.at(at, Event::Arrives { worker, connection, packet });
    }

    pub(super) fn arrives(&mut self, worker: usize, connection: u64, packet: Packet) {
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
        let server = self.store_time();
        let mut replies = Vec::new();
        for part in &**parts {
            replies.push(self.apply(part.thing, from, &part.commands));
        }
        let process = &mut self.processes[worker];
        if process.connection != Some(connection) || process.client != from {
            return;
        }
        if std::mem::take(&mut process.loses_reply) {
            return self.lose_connection(worker);
        }
        self.transmit(worker, connection, 1, Packet::Reply { number, replies, server });
    }

    /// Applies commands at the store, and sends the wake-ups.
    pub(super) fn apply(&mut self, thing: usize, from: ClientId, commands: &[Command]) -> Reply {
        let now = self.store_time();
        let known: Vec<_> = commands.iter().map(|command| self.before(thing, command)).collect();
        let applied = self.store.apply((thing, from), commands, now, self.now);
        for (command, known) in commands.iter().zip(known) {
            self.after(thing, command, known);
        }
        self.no_permit_is_kept_back(thing);
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
            let grant = (!rated).then_some((held, now));
            self.publish(id.client(), Packet::WakeUp { thing, id, grant });
        }
        if let Some((client, after)) = self.store.token(thing, now)
            && client != from
        {
            self.publish(client, Packet::Token { thing, after });
        }
        applied.reply
    }

    /// Sends a message to a client that listens.
    pub(super) fn publish(&mut self, client: ClientId, packet: Packet) {
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
            Packet::Reply { number, replies, server } => {
                let Some(at) = process.in_flight.iter().position(|own| own.number == number) else {
                    return;
                };
                let InFlight { parts, sent, .. } = process.in_flight.remove(at);
                process.heard = now;
                process.clock.learn(sent, server, now);
                process.smoothed = (process.smoothed * 7 + now.saturating_since(sent)) / 8;
                let round_trip = process.smoothed * 2;
                for (part, reply) in parts.iter().zip(replies) {
                    let declares = |(command, outcome): (&Command, &Outcome)| {
                        matches!(command, Command::Enqueue { .. })
                            && !matches!(outcome, Outcome::TooHeavy { .. })
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
                let grant = grant.and_then(|(held, granted_at)| {
                    Some((held, process.clock.not_before(granted_at, now)?))
                });
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
    pub(super) fn overdue(&mut self, worker: usize, connection: u64, request: u64) {
        let event = Event::Overdue { worker, connection, request };
        let process = &self.processes[worker];
        if process.connection != Some(connection) || self.defer(worker, event) {
            return;
        }
        let process = &self.processes[worker];
        let late = process.in_flight.iter().any(|own| own.number == request);
        if late {
            self.lose_connection(worker);
        }
    }

    /// A renewal is overdue.
    pub(super) fn suspect(&mut self, worker: usize, since: Moment) {
        if self.processes[worker].heard < since {
            self.lose_connection(worker);
        }
    }

    /// The connection is lost, and everything in flight becomes unknown.
    pub(super) fn lose_connection(&mut self, worker: usize) {
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

    pub(super) fn connect(&mut self, worker: usize, life: u32) {
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
        process.clock = ServerClock::default();
        process.last_arrival = [0; 2];
        process.heard = process.local(self.now);
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
    pub(super) fn lose_connections(&mut self, other: bool) {
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
            if !self.processes.iter().any(|own| own.client == client && own.connection.is_some()) {
                self.store.listening.remove(&client);
            }
        }
    }

    /// The process ends. What it has sent arrives; nothing else is left of it.
    pub(super) fn kill(&mut self, worker: usize, noticed_after: Micros) {
        self.uses_end(worker);
        let process = &mut self.processes[worker];
        let (client, connection) = (process.client, process.connection.take());
        process.alive = false;
        let history = process.history;
        self.lives[history].0.end = LifeEnd::Killed(self.now);
        if let Some(connection) = connection {
            self.at(self.now + noticed_after, Event::Noticed { client, connection });
        }
        let life = process_life(&self.processes[worker]);
        self.processes[worker] = Process::new(self.scenario, worker, life);
    }

    /// The process continues. Timers and messages that waited are handled in any order.
    pub(super) fn continues(&mut self, worker: usize) {
        let mut waiting = self.processes[worker].stopped.take().unwrap_or_default();
        if self.network.bool() {
            waiting.sort_by_key(|event| matches!(event, Event::Arrives { .. }));
        }
        for event in waiting {
            self.at(self.now, event);
        }
        let process = &self.processes[worker];
        if process.connection.is_some() && process.silent == process.connection {
            self.lose_connection(worker);
        }
        self.send_all(worker);
    }
}

fn process_life(process: &Process) -> u32 {
    process.life + 1
}
