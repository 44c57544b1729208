//! The properties that must hold in every state, and the states that must be possible.

use stateright::Property;

use super::*;

pub(super) fn all(world: &World) -> Vec<Property<World>> {
    let mut all = vec![
        Property::always("1: limit", |world: &World, state: &State| {
            let within = state.store.machine.units() <= world.largest_capacity();
            within && state.saw_nothing_of(Wrong::Limit)
        }),
        Property::always("1: no grant during a pause", |_, state: &State| {
            state.saw_nothing_of(Wrong::Paused)
        }),
        Property::always("1: slot numbers", |_, state: &State| state.saw_nothing_of(Wrong::Slots)),
        Property::always("1: rate", |world: &World, state: &State| state.keeps_the_rate(world)),
        Property::always("2: order", |_, state: &State| state.saw_nothing_of(Wrong::Order)),
        Property::always("2: lost enqueues keep their order", |_, state: &State| {
            state.saw_nothing_of(Wrong::Resent)
        }),
        Property::always("3: no lost wake-up", |_, state: &State| {
            state.saw_nothing_of(Wrong::LostWakeUp)
        }),
        Property::always("4: fence", |_, state: &State| state.saw_nothing_of(Wrong::Fence)),
        Property::always("5: idempotence", |_, state: &State| state.saw_nothing_of(Wrong::Twice)),
        Property::always("5: no command is sent twice in one request", |_, state: &State| {
            state.saw_nothing_of(Wrong::SentTwice)
        }),
        Property::always("6: self-fencing", |world: &World, state: &State| {
            state.relied_on(world) <= world.largest_capacity()
        }),
        Property::always("6: the store has what a client relies on", |_, state: &State| {
            state.agrees()
        }),
        Property::always("7: no leak", |world: &World, state: &State| {
            while_broken(world.broken, || state.leaves_nothing(world))
        }),
        Property::always("a cancelled waiter stays cancelled", |_, state: &State| {
            state.saw_nothing_of(Wrong::CameBack)
        }),
        Property::always("every waiter holds in the end", World::every_waiter_holds),
        Property::sometimes(
            "as many units are relied on as there are",
            |world: &World, state: &State| state.relied_on(world) == world.capacity,
        ),
        Property::sometimes("a holder lost its lease while another holds", |_, state: &State| {
            let held: usize = state.clients.iter().map(|client| client.holders().count()).sum();
            let relying = state.relying().count();
            held > relying && relying > 0
        }),
        Property::sometimes("a wake-up comes too late", |_, state: &State| {
            state.wire.iter().any(|message| match message {
                Message::WakeUp { id, .. } => !state.store.knows(*id),
                _ => false,
            })
        }),
    ];
    all.extend(of_limits(world));
    if world.in_flight.iter().any(|most| *most > 0) {
        all.extend(of_messages());
    }
    if world.stragglers > 0 {
        all.push(Property::sometimes("an enqueue comes after its release", |_, state: &State| {
            let late = |message: &&Message| message.over() == Some(Over::Closed);
            let mut enqueues = state.wire.iter().filter(late).flat_map(Message::enqueues);
            enqueues.any(|id| state.clients[slot(id)].core.repeats_release(id))
        }));
    }
    if world.cancels {
        all.push(Property::sometimes(
            "a query finds that its waiter was cancelled",
            |_, state: &State| {
                let now = state.local();
                let removed = |(id, _): &(AcquisitionId, Time)| {
                    let message = Message::Cancelled { id: *id };
                    state.clients[slot(*id)].usage(*id).is_some_and(|usage| !usage.is_valid(now))
                        && !state.wire.contains(&message)
                };
                state.store.cancelled.iter().any(removed)
            },
        ));
    }
    all
}

fn of_messages() -> [Property<World>; 3] {
    [
        Property::sometimes("an enqueue comes twice", |_, state: &State| {
            let mut enqueues = state.wire.iter().flat_map(Message::enqueues);
            enqueues.any(|id| state.store.knows(id))
        }),
        Property::sometimes(
            "an acquire is dropped while its enqueue is in flight",
            |_, state: &State| {
                let current = |message: &&Message| message.over() == Some(Over::Current);
                let mut enqueues = state.wire.iter().filter(current).flat_map(Message::enqueues);
                enqueues.any(|id| state.clients[slot(id)].usage(id).is_none())
            },
        ),
        Property::sometimes("a lost wake-up is found by a query", |_, state: &State| {
            let woken = |id: AcquisitionId| {
                let is_wake_up = |other: &Message| matches!(other, Message::WakeUp { id: woken, .. } if *woken == id);
                state.wire.iter().any(is_wake_up)
            };
            let found = |(command, outcome): (&Command, &Outcome)| match (command, outcome) {
                (Command::Renew { id, .. }, Outcome::Held(_)) => {
                    state.clients[slot(*id)].core.waits(*id) && !woken(*id)
                }
                _ => false,
            };
            state.wire.iter().any(|message| match message {
                Message::Answer(answer) => {
                    answer.to.commands.iter().zip(&answer.outcomes).any(found)
                }
                _ => false,
            })
        }),
    ]
}

/// The states that must be possible where there are limits other than the capacity.
fn of_limits(world: &World) -> Vec<Property<World>> {
    let mut all = Vec::new();
    if world.operator {
        all.push(Property::sometimes("a waiter waits for a free permit", |_, state: &State| {
            let machine = &state.store.machine;
            let free = machine.units() < machine.limits().capacity();
            free && machine.limits().paused.is_some() && machine.waiting() > 0
        }));
    }
    if world.heavy {
        all.push(Property::sometimes(
            "a heavy waiter waits although a unit is free",
            |_, state: &State| {
                let machine = &state.store.machine;
                let free = machine.units() < machine.limits().capacity();
                let head = machine.waiters().next();
                free && head.is_some_and(|head| head.member.weight() > 1)
            },
        ));
    }
    if world.rate.is_some() {
        all.push(Property::sometimes("a waiter waits for a token", |_, state: &State| {
            let now = state.store_time();
            state.store.machine.next_token(now).is_some()
        }));
    }
    all
}

impl State {
    fn saw_nothing_of(&self, wrong: Wrong) -> bool {
        self.store.wrong != Some(wrong)
    }
}
