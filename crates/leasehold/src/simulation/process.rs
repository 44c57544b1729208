//! A process of a run: a client with its cores, its sender and its connection, after `engine/remote.rs` and
//! `engine/sender.rs`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::store::{OPERATOR, rate};
use super::users::{Owner, User};
use super::*;
use crate::client_core::{Answered, NameCore, timing};
use crate::clock::Moment;
use crate::machine::Reply;
use crate::machine::{Command, Declared, Held, Outcome, Terms};
use crate::{Error, engine};

mod connection;

pub(super) use connection::Packet;

/// How long a client waits for an answer before it replaces the connection.
const SILENT: Micros = torture::plan::SOCKET_TIMEOUT;
const ANSWER_TIMEOUT: Span = Span::from_millis(5000);

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
    /// When the last request that was answered over this connection was sent.
    answered: Option<Moment>,
    last_message_at: Moment,
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
        let number = (worker as u64) << 32 | u64::from(life) << 8;
        let mut rng = Rng::with_seed(scenario.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
        let client = ClientId::from_bits(number + 1);
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
            answered: None,
            last_message_at: Moment::from_micros(0),
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

    pub(super) fn life_line(&self) -> Lifetime {
        Lifetime { worker: self.worker, life: self.life, foreign: false, end: LifetimeEnd::Done }
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

    pub(super) fn existing_core(&mut self, thing: usize) -> Option<&mut NameCore<Owner>> {
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
        let semaphore = &THINGS[thing];
        let is_new = !self.declared[thing];
        let rate = semaphore.rate.map(rate);
        // As `unless_declared`: otherwise the client would undo what an operator has set.
        Declared {
            capacity: semaphore.capacity,
            is_new: is_new && !semaphore.operated,
            rate,
            rate_is_new: is_new,
        }
    }
}

pub(super) fn terms(thing: usize) -> Terms {
    let semaphore = &THINGS[thing];
    Terms {
        lease: Some(Span::from_micros(semaphore.lease)),
        ttl: semaphore.ttl.map(Span::from_micros),
    }
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
                let in_flight =
                    process.in_flight.iter().filter(|request| request.urgency == urgency);
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
                Urgency::Renewals => core.take_renewals(room, now),
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
        let request = InFlight { number, urgency, parts: parts.clone(), sent: now };
        process.in_flight.push(request);
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

    /// The process ends. What it has sent arrives; nothing else is left of it.
    pub(super) fn kill(&mut self, worker: usize, noticed_after: Micros) {
        self.uses_end(worker);
        let process = &mut self.processes[worker];
        let (client, connection) = (process.client, process.connection.take());
        process.alive = false;
        let history = process.history;
        self.lives[history].0.end = LifetimeEnd::Killed(self.now);
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
