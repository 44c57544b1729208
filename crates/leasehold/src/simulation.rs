//! A deterministic simulation of clients, stores and networks, judged by the checker of the torture test.
//!
//! A run follows from a [`Scenario`], and a scenario from one number, its seed. There are no threads, no sockets and no
//! clock: events wait in one queue, ordered by virtual time. So a run is fast, and a seed that fails fails again in the
//! same way. When a run fails, [`shrink`] looks for the shortest scenario that still fails, and [`report`] prints its
//! history.
//!
//! # What is real, and what is simulated
//!
//! - *Clients* run the shipped core ([`NameCore`](crate::client_core::NameCore)), several names each. Its timers fire at
//!   their time, with the spread that ships. Around it, [`process`] sends as `engine/sender.rs` does: two requests in
//!   flight and one more for renewals, with commands for several names each. The age of a wake-up is bounded as
//!   `backend/redis/socket.rs` does it.
//! - *The store* runs the shipped machine. Wake-ups travel over the connection that carries the replies.
//! - *The network* delays and loses messages, and cuts, stalls and silently drops connections. Over one connection, no
//!   message overtakes another. With *stragglers*, requests of a lost connection are applied after those of the next.
//! - *Processes* are stopped, and die. Sometimes the store notices late that a process has died, as if a forked copy
//!   of it kept the connection open. The copy itself sends nothing.
//! - *Clocks* of processes run up to one part in a hundred faster or slower than the store's, as the margin of a
//!   validity allows. The store's clock is set forward and back, as docs/guarantees.md allows.
//! - *Stores* restart with and without their data, freeze, and are replaced by a replica that lacks the last second.
//! - *Users* acquire, try, cancel at any moment, hold, release, drop, and release ids a second time. *Operators* pause,
//!   resume, resize, pin, set rates, and remove waiters by their ids.
//!
//! # What is checked
//!
//! A run writes the same [`History`] as a run of the torture test, and its checker judges it with the same exemptions.
//! But the history is exact: what a worker of the torture test has to ask for, the simulation knows at every instant.
//! In addition, [`watch`] checks that no permit is lost and no acquire misses its time limit unless a fault explains
//! it; that a command leaves no free permit to nobody; that a client answers for every id of its own that the store
//! knows; that lost enqueues are sent again in their order; and that a waiter that an operator has removed does not
//! come back.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use fastrand::Rng;
use torture::check::{History, Violation};
use torture::driver::{Change, Lifetime, LifetimeEnd};
use torture::fault::{Fault, Kind, Scope};
use torture::history::{Event as Noted, How, Line};
use torture::plan::{Rate as ThingRate, Thing};

use crate::broken::while_broken;
use crate::clock::{Span, Time};
use crate::{AcquisitionId, ClientId};

mod faults;
mod process;
mod report;
mod scenario;
mod shrink;
mod store;
mod tests;
mod users;
mod watch;

use process::{Packet, Process};
use scenario::{Injection, Scenario};
use store::Store;

type Micros = u64;
const MILLISECOND: Micros = 1000;
const SECOND: Micros = 1_000_000;

/// By how much the clock of the store is ahead of the virtual time, before it is set.
const STORE_AHEAD: Micros = 1_700_000_000 * SECOND;
/// The virtual time at which a run begins, so that an earlier time can be expressed.
const BEGIN: Micros = 100 * SECOND;
/// How long a run goes on after its users have finished: until the last lease of a dead process has ended.
const TAIL: Micros = 45 * SECOND;
/// How often the store is inspected.
const SAMPLE: Micros = 400 * MILLISECOND;

/// The semaphores of all runs. A scenario uses some of them.
const THINGS: [Thing; 7] = [
    Thing::semaphore("solo", 1, 3 * SECOND),
    Thing::semaphore("pair", 2, 2 * SECOND),
    Thing::semaphore("slow", 1, 10 * SECOND),
    Thing { ttl: Some(4 * SECOND), ..Thing::semaphore("limited", 2, 3 * SECOND) },
    Thing::semaphore("weighed", 4, 3 * SECOND).weighed(4).numbered(),
    Thing::semaphore("paced", 3, 3 * SECOND).paced(10, 2),
    Thing::semaphore("operated", 3, 3 * SECOND).operated(),
];

/// What can happen at a time.
#[derive(Clone, Debug)]
enum Event {
    /// A message arrives, at the store or at a process.
    Arrives {
        worker: usize,
        connection: u64,
        packet: Packet,
    },
    /// A timer of a process may be due.
    Timer {
        worker: usize,
        life: u32,
    },
    User {
        worker: usize,
        life: u32,
        user: usize,
        turn: u64,
    },
    /// A request was not answered for too long.
    Overdue {
        worker: usize,
        connection: u64,
        request: u64,
    },
    Connect {
        worker: usize,
        life: u32,
    },
    Starts {
        worker: usize,
    },
    /// The store notices that a connection has ended.
    Noticed {
        client: ClientId,
        connection: u64,
    },
    Injected(usize),
    Ends(usize),
    Snapshot,
    Operator,
    Sample,
    Finish,
}

/// One run.
struct Simulation<'a> {
    scenario: &'a Scenario,
    now: Micros,
    steps: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(Micros, u64)>>,
    events: BTreeMap<(Micros, u64), Event>,
    store: Store,
    processes: Vec<Process>,
    /// The random numbers of the network, apart from those of each process, so that removing one process leaves the
    /// users of the others as they are.
    network: Rng,
    operator: Rng,
    faults: Vec<Fault>,
    /// For each injection that has begun, when.
    begun: BTreeMap<usize, Micros>,
    connections: u64,
    lives: Vec<(Lifetime, Vec<Line>)>,
    changes: Vec<Change>,
    /// The acquisition that an id belongs to: its worker, its life, and its number.
    ids: BTreeMap<AcquisitionId, (usize, u32, u64)>,
    /// Violations that the simulation itself has seen.
    seen: Vec<Violation>,
    losses: Vec<users::Loss>,
    watch: watch::Watch,
    finishing: bool,
    /// Whether the store has lost data, and whether its clock was set, so far.
    lost_data: bool,
    clock_was_set: bool,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
struct Outcome {
    violations: Vec<Violation>,
    history: History,
    steps: u64,
    /// How long the users were at work.
    contended: Micros,
    grants: usize,
}

/// Runs a scenario.
fn run(scenario: &Scenario) -> Outcome {
    while_broken(scenario.broken, || Simulation::new(scenario).run())
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let mut simulation = Self {
            scenario,
            now: BEGIN,
            steps: 0,
            order: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            store: Store::new(),
            processes: Vec::new(),
            network: Rng::with_seed(scenario.seed ^ 0x6e65_7477_6f72_6b00),
            operator: Rng::with_seed(scenario.seed ^ 0x6f70_6572_6174_6f72),
            faults: Vec::new(),
            begun: BTreeMap::new(),
            connections: 0,
            lives: Vec::new(),
            changes: Vec::new(),
            ids: BTreeMap::new(),
            seen: Vec::new(),
            losses: Vec::new(),
            watch: watch::Watch::default(),
            finishing: false,
            lost_data: false,
            clock_was_set: false,
        };
        for worker in 0..scenario.processes {
            let process = Process::new(scenario, worker, 0);
            simulation.processes.push(process);
            if scenario.workers & 1 << worker != 0 {
                simulation.at(BEGIN, Event::Starts { worker });
            }
        }
        for (at, injection) in scenario.injections.iter().enumerate() {
            simulation.at(injection.at, Event::Injected(at));
            if faults::is_failover(injection.kind) {
                simulation.at(injection.at - injection.lag, Event::Snapshot);
            }
        }
        simulation.at(BEGIN + SAMPLE, Event::Sample);
        simulation.at(BEGIN + SECOND, Event::Operator);
        simulation.at(scenario.finish, Event::Finish);
        simulation
    }

    fn run(mut self) -> Outcome {
        let end = self.scenario.finish + TAIL;
        while let Some(Reverse((at, order))) = self.queue.pop() {
            if at > end {
                break;
            }
            let Some(event) = self.events.remove(&(at, order)) else { continue };
            self.now = at.max(self.now);
            self.steps += 1;
            self.happens(event);
        }
        self.now = end;
        report::judge(self)
    }

    fn at(&mut self, at: Micros, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order)));
        self.events.insert((at, self.order), event);
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrives { worker, connection, packet } => {
                self.arrives(worker, connection, packet);
            }
            Event::Timer { worker, life } => self.timer(worker, life),
            Event::User { worker, life, user, turn } => self.user(worker, life, user, turn),
            Event::Overdue { worker, connection, request } => {
                self.overdue(worker, connection, request);
            }
            Event::Connect { worker, life } => self.connect(worker, life),
            Event::Starts { worker } => self.starts(worker),
            Event::Noticed { client, connection } => self.store.forget(client, connection),
            Event::Injected(at) => self.inject(at),
            Event::Ends(at) => self.injection_ends(at),
            Event::Snapshot => self.store.snapshot(),
            Event::Operator => self.operate(),
            Event::Sample => self.sample(),
            Event::Finish => self.finish(),
        }
    }

    fn starts(&mut self, worker: usize) {
        self.lives.push((self.processes[worker].life_line(), Vec::new()));
        self.processes[worker].history = self.lives.len() - 1;
        self.processes[worker].alive = true;
        let life = self.processes[worker].life;
        self.at(self.now, Event::Connect { worker, life });
        for user in 0..self.scenario.users {
            let later = self.processes[worker].rng.u64(0..SECOND);
            self.next_turn(worker, user, later);
        }
    }

    fn sample(&mut self) {
        let lists = self.store.list(self.store_time());
        for id in self.store.waiters() {
            self.note_for(id, |op, now| Noted::Queue { op, since: now, position: 0 });
        }
        self.store.listing.add(lists, self.now);
        self.inspect();
        if self.now < self.scenario.finish + 5 * SECOND {
            self.at(self.now + SAMPLE, Event::Sample);
        }
    }

    /// Writes a line into the history of the process that an id belongs to.
    fn note_for(&mut self, id: AcquisitionId, event: impl FnOnce(u64, Micros) -> Noted) {
        let Some(&(worker, life, op)) = self.ids.get(&id) else { return };
        let process = &self.processes[worker];
        if process.life == life && process.alive {
            let (history, now) = (process.history, self.now);
            self.lives[history].1.push(Line { at: now, event: event(op, now) });
        }
    }

    fn note(&mut self, worker: usize, at: Micros, event: Noted) {
        let history = self.processes[worker].history;
        self.lives[history].1.push(Line { at, event });
    }

    fn store_time(&self) -> Time {
        Time::from_micros((STORE_AHEAD + self.now).saturating_add_signed(self.store.ahead))
    }
}
