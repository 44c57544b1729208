//! The machine with several clients around it, in every order in which things can happen.
//!
//! Random histories are good at finding what is likely. Here a checker goes through *all* histories of a small
//! world instead: a few clients, a store that runs the real [`Machine`], and a wire between them that loses, delays
//! and reorders what it likes. Clients send again what was not answered, give up, let go, are cut off, and die.
//! Time passes or stands still between any two steps, so that every pause of a client is covered too: it is one that
//! does nothing while the clock goes on.
//!
//! # What is real, and what is modelled
//!
//! The store is the code of `machine.rs`, under injected time. How long a holder believes is the engine's own rule,
//! [`Held::valid_until`]. The rest of a client ([`client`]) follows `engine/desk.rs` by hand: one acquisition at a
//! time, an id that is minted before it asks, a confirm before it believes, releases that are repeated until they are
//! answered.
//!
//! Every client has the worst clock that the margin allows for: in the time of one lease it falls behind by all of it.
//!
//! # Why it ends
//!
//! Nothing counts up for ever. Two states that differ only in what the time is, in the numbers of ids and fences, or in
//! which client is which, have the same futures, and [`view`] makes them one. So time and the number of acquisitions
//! have no bound. What has one: the clients, the messages of one client that are on their way at once, and its ids
//! that anybody still knows of.
//!
//! # What is checked
//!
//! The invariants of `machine.rs`, by their numbers, in every state; and that from every state on, if nothing goes wrong
//! any more, everyone who waits holds in the end ([`calm`]). A checker that finds nothing may just be blind: so it must
//! also find states that we know to be possible, and a fault in each world that is [`Broken`].

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use stateright::{Model, Property};

use super::*;
use crate::ClientId;
use crate::clock::Moment;

mod calm;
mod client;
mod properties;
mod state;
mod store;
mod tests;
mod view;

use client::{Client, Stage as ClientStage};
use state::{Answer, Ask, Message, State, slot};
use store::Store;

/// One step of the clock: as long as the margin of a short lease, so that both are whole numbers of steps.
const TICK: Span = Span::from_millis(50);

const CONFIRM_WITHIN: Span = TICK;

/// By how much a client's clock falls behind in the time of one lease.
const DRIFT: Span = TICK;

/// A small world, and what is allowed to happen in it.
#[derive(Debug)]
struct World {
    capacity: u32,
    terms: Terms,
    /// How many requests and answers of each client are on their way at once, at most. With none, a request is
    /// answered at once or its answer is lost, and only wake-ups take their time.
    in_flight: &'static [usize],
    /// How many ids of one client somebody knows of at once, at most.
    ids: usize,
    /// Whether clients die, and start anew as somebody else.
    crashes: bool,
    /// Whether connections break, and the store notices.
    cuts: bool,
    broken: Option<Broken>,
    /// States that are known to calm down.
    calm: Mutex<HashSet<u64>>,
}

/// A rule that is broken, to see whether the checker notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Broken {
    /// A holder does not take the margin off.
    NoMargin,
    /// A holder counts from when it was answered, not from when it asked.
    CountedFromAnswer,
    /// A woken waiter believes that it holds without asking.
    NoConfirm,
    /// Whoever releases an id that is not there frees somebody else's permit.
    NoOwnership,
    /// The store lets nobody expire.
    NoExpiry,
    /// Last come, first served.
    Lifo,
    /// Wake-ups are lost, and nobody asks.
    NoBackstop,
    /// Fences come from the clock alone.
    FencesByClock,
    /// A holder whose time was up believes again when it is told so.
    ComesBack,
    /// There is one permit more than was declared.
    OneTooMany,
    /// A release hands over to nobody.
    NoHandOver,
    /// An enqueue that is sent again is taken for a new one.
    AskedAnew,
}

#[derive(Clone, PartialEq, Debug)]
enum Action {
    Acquire(usize),
    Send(usize, Ask, AcquisitionId),
    /// There and back, or only there.
    Trip(usize, Ask, AcquisitionId, Answered),
    /// The user lets go of what it holds or waits for, or it was lost and the engine does.
    LetGo(usize),
    Deliver(Message),
    Lose(Message),
    Cut(usize),
    Mend(usize),
    /// The client dies, and its successor is another one. The store takes the dead for connected.
    Crash(usize),
    /// The store notices that the dead one is gone.
    Notice(usize),
    Tick,
}

type Answered = bool;

impl World {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn deliver(&self, state: &mut State, message: Message) {
        match message {
            Message::Request { ask, id, sent } => {
                let answer = state.serve(self, ask, id, sent);
                state.put(Message::Answer(answer));
            }
            Message::Answer(answer) => {
                let now = state.now;
                if let Some(client) = state.living(answer.id) {
                    client.answered(self, &answer, now);
                }
            }
            Message::WakeUp(id) => {
                let now = state.now;
                if let Some(client) = state.living(id) {
                    client.woken(self, id, now);
                }
            }
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let clients = (1..).zip(self.in_flight).map(|(n, most)| Client::new(n, *most)).collect();
        let now = Moment::from_micros(1000 * TICK.micros());
        let (store, wire) = (Arc::new(Store::new()), Vec::new());
        vec![State { terms: self.terms, broken: self.broken, now, store, clients, wire }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let present: Vec<_> = state.present().collect();
        for (slot, client) in state.clients.iter().enumerate() {
            match client.stage {
                ClientStage::Idle => {
                    if state.ids_of(slot, &present).len() < self.ids {
                        actions.push(Action::Acquire(slot));
                    }
                }
                ClientStage::Waiting { .. } | ClientStage::Held { .. } => {
                    actions.push(Action::LetGo(slot));
                }
            }
            if client.connected && client.in_flight == 0 {
                for (ask, id) in client.asks(self) {
                    let trip = |answered| Action::Trip(slot, ask, id, answered);
                    actions.extend([true, false].map(trip));
                }
            } else if client.connected && state.on_the_way(slot) < client.in_flight {
                let asks = client.asks(self).into_iter();
                actions.extend(asks.map(|(ask, id)| Action::Send(slot, ask, id)));
            }
            if self.cuts {
                actions.push(if client.connected { Action::Cut(slot) } else { Action::Mend(slot) });
            }
            if self.crashes {
                if !client.is_new() {
                    actions.push(Action::Crash(slot));
                }
                if client.half_open {
                    actions.push(Action::Notice(slot));
                }
            }
        }
        for message in &state.wire {
            actions.push(Action::Deliver(message.clone()));
            actions.push(Action::Lose(message.clone()));
        }
        actions.push(Action::Tick);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Acquire(slot) => next.clients[slot].acquire(),
            Action::Send(_, ask, id) => next.put(Message::Request { ask, id, sent: state.now }),
            Action::Trip(_, ask, id, answered) => {
                let answer = next.serve(self, ask, id, state.now);
                if answered {
                    self.deliver(&mut next, Message::Answer(answer));
                }
            }
            Action::LetGo(slot) => next.clients[slot].let_go(),
            Action::Deliver(message) => {
                next.take(&message);
                self.deliver(&mut next, message);
            }
            Action::Lose(message) => next.take(&message),
            Action::Cut(slot) => next.clients[slot].connected = false,
            Action::Mend(slot) => next.clients[slot].connected = true,
            Action::Crash(slot) => next.clients[slot].crash(),
            Action::Notice(slot) => next.clients[slot].half_open = false,
            Action::Tick => next.now = state.now + TICK,
        }
        next.tidy(self);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self)
    }
}
