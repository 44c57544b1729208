//! A model checker for the machine with several clients around it. It tries every order in which events can happen.
//!
//! Random histories find likely faults. This checker visits *all* histories of a small world instead: a few clients, a
//! store that runs the real [`Machine`], and connections between them that may delay messages and break at any time.
//! Clients repeat commands that were not answered, give up, release, lose their connection, and die. Between any two
//! steps, time passes or stands still. So pauses are covered as well: a paused client is one that does nothing while
//! the clock advances.
//!
//! # What is real, and what is modelled
//!
//! The store is the code of `machine.rs`, under injected time. How long a holder believes that it holds is the engine's
//! own rule, [`Held::valid_until`]. The rest of a client ([`client`]) is written by hand after `engine/remote`. A
//! client has one acquisition at a time and mints its id before it sends anything. It believes a wake-up while the
//! wake-up is young. It repeats commands whose outcome is unknown. It releases every id that was sent, and repeats the
//! release until it is answered.
//!
//! The connection is modelled after `engine/sender.rs` and the remote stores. Over one connection, no request overtakes
//! another; only wake-ups may arrive at any time or be lost. When a connection breaks, everything in flight becomes
//! unknown. In a world with *stragglers* the old connection is not closed before the new one is up. Then requests of
//! the old connection can be applied after those of the new one, whether or not their client still receives the
//! answers. This can happen for at most [`STRAGGLES_FOR`]. A release is repeated for three leases. By then everything
//! that was applied so late has expired: it waited for at most two leases, and then left its permit unclaimed.
//!
//! Every client has the worst clock that the margin allows for: while a permit is valid, the clock falls behind by the
//! whole margin. A client believes a wake-up until the last moment at which the wake-up can be right.
//!
//! # Why the search ends
//!
//! No counter in a state grows forever. States that differ only in the current time, in the numbers of ids and fences,
//! or in which client is which have the same futures, and [`view`] maps them to one. So neither time nor the number of
//! acquisitions needs a bound. Four things have one: the number of clients, the messages of one client that are in
//! flight at once, the messages of its old connections, and its ids that the store, the client or a message still
//! knows.
//!
//! # What is checked
//!
//! In every state, the search checks the invariants of `machine.rs`, by their numbers. It also checks liveness: from
//! every state, if nothing goes wrong any more, every waiter holds in the end ([`liveness`]). A checker that finds
//! nothing may itself be wrong. So it must also find states that are known to be possible, and a fault in each world
//! that is [`Broken`].

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use stateright::{Model, Property};

use super::*;
use crate::ClientId;
use crate::clock::{Moment, Span};

mod client;
mod liveness;
mod properties;
mod state;
mod store;
mod tests;
mod view;

use client::{Client, Life, Stage as ClientStage};
use state::{Answer, Ask, Message, Over, State, slot};
use store::Store;

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
    /// Whether clients die and are replaced by new clients.
    crashes: bool,
    /// Whether connections break, and the store notices it.
    cuts: bool,
    /// Whether an operator pauses and resumes the name, and sets its capacity to 1 or 2.
    operator: bool,
    /// Whether permits of the first client weigh two units, and all permits have slot numbers.
    heavy: bool,
    rate: Option<Rate>,
    broken: Option<Broken>,
    /// The states from which every waiter is known to hold in the end.
    shown_live: Mutex<HashSet<u64>>,
}

/// A rule that is broken on purpose, to see whether the checker notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Broken {
    /// A holder does not subtract the margin.
    NoMargin,
    /// A holder counts its validity from the answer, not from the request.
    CountedFromAnswer,
    /// A woken waiter believes that it holds, however old the wake-up is.
    OldWakeUp,
    /// The release of an unknown id frees another holder's permit.
    NoOwnership,
    /// The store expires nothing.
    NoExpiry,
    /// The last waiter to arrive is granted first.
    Lifo,
    /// Wake-ups are lost, and waiters do not ask.
    NoBackstop,
    /// Fences come from the clock alone.
    FencesByClock,
    /// A holder whose validity has ended believes again when a late answer says that it holds.
    ComesBack,
    /// There is one permit more than declared.
    OneTooMany,
    /// A release does not grant the permit to the next waiter.
    NoHandOver,
    /// A repeated enqueue counts as a new one.
    AskedAnew,
    /// An id that is given up is released only if its enqueue was answered.
    LostCancel,
    /// A release that was not answered is not repeated.
    ReleasedOnce,
    /// If an answer arrives for an id that was given up, no release follows.
    LateAnswer,
    /// If an answer about an id arrives while its release is in flight, the id is not released again.
    NoAgain,
    /// A release is not repeated after its answer, although an earlier request may still be applied.
    NoRepeat,
    /// Two renewals are answered `Gone`, and each of them makes the client enqueue the id again. A holder ignores an
    /// answer that it waits.
    EnqueuedTwice,
    /// A pause has no effect.
    NoPause,
    /// When a name is resumed, free permits are not granted.
    NoGrantOnResume,
    /// A waiter that fits overtakes one that does not.
    Overtaking,
    /// A slot number is taken from the number of holders.
    SlotsByCount,
    /// A rate has no effect.
    NoRate,
    /// The token of every unused grant is returned, even if the bucket has been full since.
    Returns,
    /// A permit that was granted with a wake-up is used before it is claimed, although there is a rate.
    Unclaimed,
}

#[derive(Clone, PartialEq, Debug)]
enum Action {
    Acquire(usize),
    Send(usize, Ask, AcquisitionId),
    /// A request that is sent and served in one step.
    Trip(usize, Ask, AcquisitionId, Fate),
    /// The user releases the permit or gives up waiting, or the permit was lost and the engine releases it.
    End(usize),
    Deliver(Message),
    /// A wake-up or a straggler is lost.
    Lose(Message),
    /// The connection is lost and replaced at once.
    Reconnect(usize),
    /// The client learns that a message of an old connection will not be answered.
    Settle(Message),
    /// The client stops repeating a release, because the store must have expired the id by now.
    Forget(usize, AcquisitionId),
    Cut(usize),
    Restore(usize),
    /// The client dies, and another client takes its place. The store still believes that the dead client is connected.
    Crash(usize),
    /// The store notices that the dead client is disconnected.
    Notice(usize),
    Steer(Steer),
    Tick,
}

/// The fate of a request.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Answered,
    AnswerLost,
    RequestLost,
}

impl World {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn share(&self, slot: usize) -> Share {
        let weight = if self.heavy && slot == 0 { 2 } else { 1 };
        Share { weight, numbered: self.heavy }
    }

    /// The largest capacity that the name can have.
    fn largest_capacity(&self) -> u32 {
        if self.operator { 2 } else { self.capacity }
    }

    /// The changes that an operator may make now.
    fn steers(&self, state: &State) -> Vec<Steer> {
        let limits = state.store.machine.limits();
        if !self.operator || limits.capacity() == 0 {
            return Vec::new();
        }
        let pause = match limits.paused() {
            Some(_) => Steer::Resume,
            None => store::pause(),
        };
        vec![pause, Steer::Declare(3 - limits.capacity())]
    }

    /// Whether a request can be sent while another request of the same client may still be applied.
    fn is_pipelined(&self) -> bool {
        self.stragglers > 0 || self.in_flight.iter().any(|most| *most > 1)
    }

    fn deliver(&self, state: &mut State, message: Message) {
        match message {
            Message::Request { ask, id, sent, over } => {
                let answer = state.serve(self, ask, id, (sent, over));
                if over != Over::Closed {
                    state.put(Message::Answer(answer));
                }
            }
            Message::Answer(answer) => {
                let now = state.now;
                if let Some(client) = state.living(answer.id) {
                    client.answered(self, &answer, now);
                }
            }
            Message::WakeUp { id, held, granted_at } => {
                let now = state.now;
                if let Some(client) = state.living(id) {
                    client.woken(self, id, (held, granted_at), now);
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
        let (store, wire) = (Arc::new(Store::new(self.rate.is_some())), Vec::new());
        let Self { terms, broken, ids, .. } = *self;
        let (stragglers, heavy, starts) = (self.stragglers > 0, self.heavy, Vec::new());
        vec![State { terms, broken, ids, stragglers, heavy, now, store, clients, wire, starts }]
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
                ClientStage::Waiting(_) | ClientStage::Held { .. } => {
                    actions.push(Action::End(slot));
                }
            }
            let current = state.on_the_way(slot, Over::Current);
            if client.connected && client.in_flight == 0 {
                for (ask, id, _) in client.asks(self) {
                    let trip = |fate| Action::Trip(slot, ask, id, fate);
                    actions.extend([Fate::Answered, Fate::AnswerLost].map(trip));
                    if client.is_changed_by_loss(self, ask, id) {
                        actions.push(trip(Fate::RequestLost));
                    }
                }
            } else if client.connected && current < client.in_flight {
                for (ask, id, _) in client.asks(self) {
                    if ask != Ask::Renew || !state.is_being_renewed(id) {
                        actions.push(Action::Send(slot, ask, id));
                    }
                }
            }
            let old = [Over::Old, Over::Closed].map(|over| state.on_the_way(slot, over));
            let room = self.stragglers == 0 || current + old[0] + old[1] <= self.stragglers;
            if current > 0 && room {
                actions.push(Action::Reconnect(slot));
            }
            for release in &client.releases {
                if release.life == Life::Answered && release.until <= state.now {
                    actions.push(Action::Forget(slot, release.id));
                }
            }
            if self.cuts && !client.connected {
                actions.push(Action::Restore(slot));
            } else if self.cuts && room {
                actions.push(Action::Cut(slot));
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
        actions.extend(self.steers(state).into_iter().map(Action::Steer));
        for (at, message) in state.wire.iter().enumerate() {
            if message.over() != Some(Over::Current) || state.is_next(at) {
                actions.push(Action::Deliver(message.clone()));
            }
            match message.over() {
                Some(Over::Current) => {}
                Some(Over::Old) => actions.push(Action::Settle(message.clone())),
                Some(Over::Closed) | None => actions.push(Action::Lose(message.clone())),
            }
        }
        actions.push(Action::Tick);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Acquire(slot) => next.clients[slot].acquire(),
            Action::Send(slot, ask, id) => next.send(slot, ask, id),
            Action::Trip(slot, ask, id, fate) => {
                next.clients[slot].sends(ask, id);
                if fate == Fate::RequestLost {
                    next.clients[slot].unanswered(self, ask, id, state.now);
                } else {
                    let answer = next.serve(self, ask, id, (state.now, Over::Current));
                    if fate == Fate::Answered {
                        self.deliver(&mut next, Message::Answer(answer));
                    } else {
                        next.clients[slot].unanswered(self, ask, id, state.now);
                    }
                }
            }
            Action::End(slot) => next.clients[slot].end(self, state.now),
            Action::Deliver(message) => {
                next.take(&message);
                self.deliver(&mut next, message);
            }
            Action::Lose(message) => next.take(&message),
            Action::Reconnect(slot) => next.disconnect(self, slot),
            Action::Settle(message) => next.settle(self, &message),
            Action::Forget(slot, id) => next.clients[slot].forget(id),
            Action::Cut(slot) => {
                next.disconnect(self, slot);
                next.clients[slot].connected = false;
            }
            Action::Restore(slot) => next.clients[slot].connected = true,
            Action::Crash(slot) => next.crash(slot),
            Action::Notice(slot) => next.clients[slot].half_open = false,
            Action::Steer(steer) => next.steer(self, &steer),
            Action::Tick => next.now = state.now + TICK,
        }
        next.note_starts(self);
        next.tidy(self);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self)
    }
}
