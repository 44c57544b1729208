//! A model checker for the client core and the machine. It tries every order in which events can happen.
//!
//! Random histories find likely faults. This checker visits *all* histories of a small world instead: a few clients, a
//! store, and connections between them that may delay messages and break at any time. Clients send commands again that
//! were not answered, give up, release, lose their connection, and die. Between any two steps, time passes or stands
//! still. So pauses are covered as well: a paused client is one that does nothing while the clock advances.
//!
//! # What is real, and what is modelled
//!
//! A client is the code that ships, [`NameCore`](crate::client_core::NameCore), and the store is the code of
//! `machine.rs`. Both get their time from the model. Modelled are the users, who acquire and release at any time, and
//! the connections, after `engine/sender.rs` and the remote stores. Over one connection, no request overtakes another.
//! Only wake-ups, and messages about cancelled waiters, may arrive at any time or be lost. When a connection breaks,
//! everything in flight becomes unknown. In a world with *stragglers* the old connection is not closed before the new
//! one is up. Then requests of the old connection can be applied after those of the new one, whether or not their
//! client still receives the answers. This can happen for at most [`STRAGGLES_FOR`]. A release is repeated for three
//! leases. By then everything that was applied so late has expired: it waited for at most two leases, and then left its
//! permit unclaimed.
//!
//! *Clocks.* Every client has the worst clock that the margin allows for: it runs at half the speed of the store's,
//! because the margin is half of every lease of a world. A client knows exactly when a wake-up was sent, so it trusts a
//! wake-up until the last moment at which that can be right.
//!
//! *Timers.* A driver fires a timer of the core when it is due, or later. The model fires it at any moment from when it
//! was set, with one exception: the end of a permit comes when it is due, or later. So a search covers every spread,
//! every round-trip time, every interval of the periodic query and every delay, and a state needs no deadlines. The
//! price: nothing is shown here that depends on *when* a timer is due, such as for how long a waiter misses its wake-up.
//! The simulation covers that: it fires every timer at its time.
//!
//! # Why the search ends
//!
//! No counter in a state grows forever. States that differ only in the current time, in the numbers of ids and fences,
//! or in which client is which have the same futures, and [`view`] maps them to one. So neither time nor the number of
//! acquisitions needs a bound. Five things have one: the number of clients, the acquisitions of one client that wait or
//! hold at once, the messages of one client that are in flight at once, the messages of its old connections, and its
//! ids that the store, the client or a message still knows.
//!
//! # What is checked
//!
//! In every state, the search checks the invariants of `machine.rs`, by their numbers. It also checks liveness: from
//! every state, if nothing goes wrong any more, every waiter holds in the end ([`liveness`]). A checker that finds
//! nothing may itself be wrong. So it must also find states that are known to be possible, and each rule of the core
//! and the machine that is [broken](crate::broken) in a world.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use stateright::{Model, Property};

use crate::broken::while_broken;
use crate::client_core::{Answered, Timer};
use crate::clock::{Moment, Span, Time};
use crate::machine::{
    Circumstances, Command, Declared, Effects, Held, LimitChange, Machine, MemberView, Outcome,
    Rate, ReleaseHint, Role, Share, Terms,
};
use crate::machine::{Reach, Reply, Rows};
use crate::{AcquisitionId, ClientId, Error, Fence};

mod client;
mod liveness;
mod properties;
mod state;
mod store;
mod tests;
mod view;

use client::{Client, Use};
use state::{Answer, Message, Over, Request, Rules, State, slot};
use store::{Store, Wrong};

/// One step of the clock. It equals the margin of a short lease, so that leases and margins are whole numbers of steps.
const TICK: Span = Span::from_millis(50);

const CONFIRM_WITHIN: Span = TICK;

/// How long after it was sent a request of an old connection may still be applied.
const STRAGGLES_FOR: Span = TICK;

/// A small world, and the events that may happen in it.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // each is an event that may happen
struct World {
    capacity: u32,
    terms: Terms,
    /// For each client, the most requests and answers that are in flight at once. With 0, a request is answered at
    /// once, or it is lost, or its answer is lost; then only wake-ups are delayed.
    in_flight: &'static [usize],
    /// The most requests and answers of a client's old connections that are in flight in addition.
    stragglers: usize,
    /// The most ids of one client that are known anywhere at once.
    ids: usize,
    /// The most acquisitions of one client that wait or hold at once.
    acquisitions: usize,
    /// Whether time passes.
    ticks: bool,
    /// Whether clients die and are replaced by new clients.
    crashes: bool,
    /// Whether connections break, and the store notices it.
    cuts: bool,
    /// Whether an operator pauses and resumes the name, and sets its capacity to 1 or 2.
    operator: bool,
    /// Whether an operator removes waiters by their ids.
    cancels: bool,
    /// Whether permits of the first client weigh two units, and all permits have slot numbers.
    heavy: bool,
    rate: Option<Rate>,
    /// The rule that is broken on purpose, to see whether the checker notices.
    broken: Option<&'static str>,
    /// The states from which every waiter is known to hold in the end.
    shown_live: Mutex<HashSet<u64>>,
}

/// A permit that was granted with a wake-up is used before it is claimed, although there is a rate. The stores keep this
/// rule, not the core: under a rate, their wake-ups say nothing about the permit.
const UNCLAIMED: &str = "unclaimed";

/// Which commands of a client a request has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Urgency {
    Ordinary,
    /// Renewals of holders.
    Renewals,
}

#[derive(Clone, PartialEq, Debug)]
enum Action {
    Acquire(usize),
    /// The user releases the permit or gives up waiting.
    End(usize, AcquisitionId),
    Fire(usize, Timer),
    Send(usize, Urgency),
    /// A request that is sent and served in one step.
    Trip(usize, Urgency, Fate),
    /// A timer fires, and the request that follows is sent and served in one step.
    FireAndTrip(usize, Timer, Fate),
    Deliver(Message),
    /// A wake-up, a message about a cancelled waiter, or a straggler is lost.
    Lose(Message),
    /// The connection is lost and replaced at once. The lost requests are reported in the order in which they were
    /// sent, or in the opposite one.
    Reconnect(usize, bool),
    /// The client learns that a message of an old connection will not be answered.
    EndRequest(Message),
    Cut(usize),
    Restore(usize),
    /// The client dies, and another client takes its place. The store still believes that the dead client is connected.
    Crash(usize),
    /// The store notices that the dead client is disconnected.
    Notice(usize),
    ChangeLimits(LimitChange),
    /// An operator removes a waiter.
    Cancel(AcquisitionId),
    Tick,
}

/// The fate of a request.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Answered,
    AnswerLost,
    RequestLost,
}

const FATES: [Fate; 3] = [Fate::Answered, Fate::AnswerLost, Fate::RequestLost];

impl World {
    fn share(&self, slot: usize) -> Share {
        let weight = if self.heavy && slot == 0 { 2 } else { 1 };
        Share { weight, numbered: self.heavy }
    }

    fn declared(&self) -> Declared {
        // An operator's setting stays.
        let declared = Declared::capacity(self.capacity, !self.operator);
        Declared { rate: self.rate, ..declared }
    }

    /// The largest capacity that the name can have.
    fn largest_capacity(&self) -> u32 {
        if self.operator { 2 } else { self.capacity }
    }

    /// The changes that an operator may make now.
    fn limit_changes(&self, state: &State) -> Vec<LimitChange> {
        let limits = state.store.machine.limits();
        if !self.operator || limits.capacity() == 0 {
            return Vec::new();
        }
        let pause = match &limits.paused {
            Some(_) => LimitChange::Resume,
            None => store::pause(),
        };
        vec![pause, LimitChange::Declare(3 - limits.capacity())]
    }

    fn deliver(&self, state: &mut State, message: Message) {
        let now = state.local();
        match message {
            Message::Request(request) => {
                let answer = state.serve(&request);
                if request.over != Over::Closed {
                    state.put(Message::Answer(Arc::new(answer)));
                }
            }
            Message::Answer(answer) => {
                if let Some(client) = state.living(answer.to.from) {
                    let applied = Answered::Applied(answer.reply());
                    client.answered(&answer.to.commands, applied, answer.to.sent, now);
                }
            }
            Message::WakeUp { id, held, granted_at } => {
                let says_more = self.rate.is_none() || self.broken == Some(UNCLAIMED);
                if let Some(client) = state.living(id.client()) {
                    client.woken(id, says_more.then_some((held, granted_at)), now);
                }
            }
            Message::Cancelled { id } => {
                if let Some(client) = state.living(id.client()) {
                    client.cancelled(id, now);
                }
            }
        }
    }

    /// What the connection of a client may do to its requests.
    fn connection_actions(&self, state: &State, slot: usize, actions: &mut Vec<Action>) {
        let client = &state.clients[slot];
        let current = state.on_the_way(slot, Over::Current);
        let urgencies = [
            (client.core.has_commands(), Urgency::Ordinary),
            (client.core.has_renewals(), Urgency::Renewals),
        ];
        let waiting = urgencies.into_iter().filter(|(has, _)| *has).map(|(_, urgency)| urgency);
        if client.connected && client.in_flight == 0 {
            for urgency in waiting {
                actions.extend(FATES.map(|fate| Action::Trip(slot, urgency, fate)));
            }
        } else if client.connected && current < client.in_flight {
            actions.extend(waiting.map(|urgency| Action::Send(slot, urgency)));
        }
        let old = [Over::Old, Over::Closed].map(|over| state.on_the_way(slot, over));
        let room = self.stragglers == 0 || current + old[0] + old[1] <= self.stragglers;
        if current > 0 && room {
            actions.push(Action::Reconnect(slot, false));
            if current > 1 && self.stragglers == 0 {
                actions.push(Action::Reconnect(slot, true));
            }
        }
        if self.cuts && !client.connected {
            actions.push(Action::Restore(slot));
        } else if self.cuts && room {
            actions.push(Action::Cut(slot));
        }
    }

    fn step(&self, state: &State, action: Action) -> State {
        let mut next = state.clone();
        if next.store.wrong.is_some() {
            Arc::make_mut(&mut next.store).wrong = None;
        }
        let now = next.local();
        match action {
            Action::Acquire(slot) => next.client(slot).acquire(self, now),
            Action::End(slot, id) => next.client(slot).end(id, now),
            Action::Fire(slot, timer) => next.client(slot).fire(timer, now),
            Action::Send(slot, urgency) => next.send(self, slot, urgency),
            Action::Trip(slot, urgency, fate) => self.trip(&mut next, slot, urgency, fate),
            Action::FireAndTrip(slot, timer, fate) => {
                next.client(slot).fire(timer, now);
                let has_renewals = next.clients[slot].core.has_renewals();
                let urgency = if has_renewals { Urgency::Renewals } else { Urgency::Ordinary };
                self.trip(&mut next, slot, urgency, fate);
            }
            Action::Deliver(message) => {
                next.take(&message);
                self.deliver(&mut next, message);
            }
            Action::Lose(message) => next.take(&message),
            Action::Reconnect(slot, reversed) => {
                next.disconnect(self, slot, reversed);
                next.reconnected(slot);
            }
            Action::EndRequest(message) => next.end_request(&message),
            Action::Cut(slot) => {
                next.disconnect(self, slot, false);
                next.client(slot).connected = false;
            }
            Action::Restore(slot) => next.reconnected(slot),
            Action::Crash(slot) => next.crash(self, slot),
            Action::Notice(slot) => next.client(slot).half_open = false,
            Action::ChangeLimits(change) => next.change_limits(&change),
            Action::Cancel(id) => next.cancel(self, id),
            Action::Tick => next.now = state.now + TICK,
        }
        next.note_starts(self);
        next.tidy();
        next
    }

    fn trip(&self, state: &mut State, slot: usize, urgency: Urgency, fate: Fate) {
        let Some(request) = state.pack(self, slot, urgency) else { return };
        let now = state.local();
        if fate != Fate::RequestLost {
            let answer = state.serve(&request);
            if fate == Fate::Answered {
                return self.deliver(state, Message::Answer(Arc::new(answer)));
            }
        }
        // A request that is not answered was lost with its connection, which is replaced.
        state.client(slot).unanswered(&request.commands, request.sent, now);
        state.reconnected(slot);
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let has_stragglers = self.stragglers > 0;
        let clients = (1..).zip(self.in_flight);
        let clients = clients.map(|(n, most)| Arc::new(Client::first(n, *most, has_stragglers)));
        let clients = clients.collect();
        let now = Moment::from_micros(1000 * TICK.micros());
        let (store, wire) = (Arc::new(Store::new(self.rate.is_some())), Vec::new());
        let Self { terms, broken, ids, heavy, acquisitions, .. } = *self;
        let stragglers = has_stragglers;
        let is_pipelined = stragglers || self.in_flight.iter().any(|most| *most > 1);
        let is_rated = self.rate.is_some();
        let rules =
            Rules { terms, broken, ids, stragglers, heavy, acquisitions, is_pipelined, is_rated };
        vec![State { rules, now, store, clients, wire, starts: Vec::new() }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let present: Vec<_> = state.present().collect();
        let now = state.local();
        for (slot, client) in state.clients.iter().enumerate() {
            let ids = state.ids_of(slot, &present).len();
            if client.uses.len() < self.acquisitions && ids < self.ids {
                actions.push(Action::Acquire(slot));
            }
            actions.extend(client.uses.iter().map(|usage| Action::End(slot, usage.id)));
            for timer in client.core.useful_timers(now) {
                if client.in_flight > 0 || matches!(timer, Timer::End(_)) {
                    actions.push(Action::Fire(slot, timer));
                } else if client.connected {
                    actions.extend(FATES.map(|fate| Action::FireAndTrip(slot, timer, fate)));
                }
            }
            self.connection_actions(state, slot, actions);
            if self.crashes {
                if !client.is_new() {
                    actions.push(Action::Crash(slot));
                }
                if client.half_open {
                    actions.push(Action::Notice(slot));
                }
            }
        }
        actions.extend(self.limit_changes(state).into_iter().map(Action::ChangeLimits));
        if self.cancels {
            let waiters = state.store.machine.waiters().map(|row| row.id);
            actions.extend(waiters.map(Action::Cancel));
        }
        for (at, message) in state.wire.iter().enumerate() {
            if message.over() != Some(Over::Current) || state.is_next(at) {
                actions.push(Action::Deliver(message.clone()));
            }
            match message.over() {
                Some(Over::Current) => {}
                Some(Over::Old) => actions.push(Action::EndRequest(message.clone())),
                Some(Over::Closed) | None => actions.push(Action::Lose(message.clone())),
            }
        }
        if self.ticks {
            actions.push(Action::Tick);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        Some(while_broken(self.broken, || self.step(state, action)))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self)
    }
}
