//! The machine with several clients around it, in every order in which things can happen.
//!
//! Random histories are good at finding what is likely. Here a checker goes through *all* histories of a small
//! world instead: a few clients, a store that runs the real [`Machine`], and connections between them that delay what
//! they like and break when they like. Clients send again what was not answered, give up, let go, are cut off, and die.
//! Time passes or stands still between any two steps, so that every pause of a client is covered too: it is one that
//! does nothing while the clock goes on.
//!
//! # What is real, and what is modelled
//!
//! The store is the code of `machine.rs`, under injected time. How long a holder believes is the engine's own rule,
//! [`Held::valid_until`]. The rest of a client ([`client`]) follows `engine/remote` by hand: one acquisition at a
//! time, an id that is minted before it asks, a wake-up that is believed while it is young, commands that are sent again if
//! their outcome is unknown, and a release of whatever was sent, repeated until it is answered.
//!
//! The connection follows `engine/sender.rs` and its stores. Over one connection nothing overtakes anything; only wake-ups
//! come and are lost as they like. When it breaks, all that is in flight becomes unknown. In a world with *stragglers* the
//! old connection is not closed before the new one is up: its requests can be applied after those of the new one, whether
//! their client still hears of it or not. That takes [`STRAGGLES_FOR`] at most. A release is repeated for three leases: in that
//! time, whatever was applied so late has waited for two leases and left its permit unclaimed.
//!
//! Every client has the worst clock that the margin allows for: in the time that it may believe it falls behind by all of
//! it. And it believes a wake-up up to the last moment at which that could be right.
//!
//! # Why it ends
//!
//! Nothing counts up for ever. Two states that differ only in what the time is, in the numbers of ids and fences, or in
//! which client is which, have the same futures, and [`view`] makes them one. So time and the number of acquisitions
//! have no bound. What has one: the clients, the messages of one client that are on their way at once, those of its old
//! connections, and its ids that anybody still knows of.
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
use crate::clock::{Moment, Span};

mod calm;
mod client;
mod properties;
mod state;
mod store;
mod tests;
mod view;

use client::{Client, Life, Stage as ClientStage};
use state::{Answer, Ask, Message, Over, State, slot};
use store::Store;

/// One step of the clock: as long as the margin of a short lease, so that both are whole numbers of steps.
const TICK: Span = Span::from_millis(50);

const CONFIRM_WITHIN: Span = TICK;

/// For how long after it was sent a request of an old connection may be applied.
const STRAGGLES_FOR: Span = TICK;

/// A small world, and what is allowed to happen in it.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // each is something that may happen
struct World {
    capacity: u32,
    terms: Terms,
    /// How many requests and answers of each client are on their way at once, at most. With none, a request is
    /// answered at once or is lost or its answer is, and only wake-ups take their time.
    in_flight: &'static [usize],
    /// How many requests and answers of its old connections are on their way beside those, at most.
    stragglers: usize,
    /// How many ids of one client somebody knows of at once, at most.
    ids: usize,
    /// Whether clients die, and start anew as somebody else.
    crashes: bool,
    /// Whether connections break, and the store notices.
    cuts: bool,
    /// Whether an operator pauses and resumes the name, and sets its capacity to 1 or 2.
    operator: bool,
    /// Whether the permits of the first client weigh two units, and those of all have numbers.
    heavy: bool,
    rate: Option<Rate>,
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
    /// A woken waiter believes that it holds, however old the wake-up is.
    OldWakeUp,
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
    /// What is let go is released only if its command was answered.
    LostCancel,
    /// A release is not sent again if it was not answered.
    ReleasedOnce,
    /// Whatever is heard of an id that was let go, no release follows.
    LateAnswer,
    /// Something is heard of an id while its release is in flight, and it is not released again.
    NoAgain,
    /// A release ends with its answer, whatever may still be applied.
    NoRepeat,
    /// Two questions are told that the id is gone, and each of them has it enqueued again. A holder that is told that it waits
    /// thinks nothing of it.
    EnqueuedTwice,
    /// A pause has no effect.
    NoPause,
    /// When a name is resumed, nobody is granted what is free.
    NoGrantOnResume,
    /// A waiter that fits overtakes one that does not.
    Overtaking,
    /// A slot number is the number of holders.
    SlotsByCount,
    /// A rate has no effect.
    NoRate,
    /// Every token that was taken for nothing goes back, whatever happened since.
    Returns,
    /// A permit that was granted with a wake-up is used before it is claimed, though there is a rate.
    Unclaimed,
}

#[derive(Clone, PartialEq, Debug)]
enum Action {
    Acquire(usize),
    Send(usize, Ask, AcquisitionId),
    /// A request in a step of its own.
    Trip(usize, Ask, AcquisitionId, Fate),
    /// The user lets go of what it holds or waits for, or it was lost and the engine does.
    LetGo(usize),
    Deliver(Message),
    /// A wake-up or a straggler is lost.
    Lose(Message),
    /// The connection is lost, and replaced at once.
    Reconnect(usize),
    /// The client learns that a message of an old connection will not be answered.
    Settle(Message),
    /// By now the store must have expired an id whose release was repeated.
    Forget(usize, AcquisitionId),
    Cut(usize),
    Mend(usize),
    /// The client dies, and its successor is another one. The store takes the dead for connected.
    Crash(usize),
    /// The store notices that the dead one is gone.
    Notice(usize),
    Steer(Steer),
    Tick,
}

/// What becomes of a request.
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

    /// The largest capacity that the name ever has.
    fn largest_capacity(&self) -> u32 {
        if self.operator { 2 } else { self.capacity }
    }

    /// What an operator may change now.
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

    /// Whether a request can be sent while another one of the same client may still be applied.
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
                    actions.push(Action::LetGo(slot));
                }
            }
            let current = state.on_the_way(slot, Over::Current);
            if client.connected && client.in_flight == 0 {
                for (ask, id, _) in client.asks(self) {
                    let trip = |fate| Action::Trip(slot, ask, id, fate);
                    actions.extend([Fate::Answered, Fate::AnswerLost].map(trip));
                    if client.minds_loss(self, ask, id) {
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
                actions.push(Action::Mend(slot));
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
            Action::LetGo(slot) => next.clients[slot].let_go(self, state.now),
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
            Action::Mend(slot) => next.clients[slot].connected = true,
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
