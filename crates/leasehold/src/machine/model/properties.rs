//! The properties that must hold in every state, and the states that must be possible.

use stateright::Property;

use super::store::Wrong;
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
        Property::always("3: no lost wake-up", |_, state: &State| {
            state.saw_nothing_of(Wrong::LostWakeUp)
        }),
        Property::always("4: fence", |_, state: &State| state.saw_nothing_of(Wrong::Fence)),
        Property::always("5: idempotence", |_, state: &State| state.saw_nothing_of(Wrong::Twice)),
        Property::always("6: self-fencing", |world: &World, state: &State| {
            state.believed(world) <= world.largest_capacity()
        }),
        Property::always("6: a client that believes holds", |_, state: &State| {
            state.believers().all(|client| client.agrees_with(state))
        }),
        Property::always("7: no leak", |world, state: &State| state.leaves_nothing(world)),
        Property::always("every waiter holds in the end", World::every_waiter_holds),
        Property::sometimes(
            "as many clients believe as there are permits",
            |world: &World, state: &State| state.believed(world) == world.capacity,
        ),
        Property::sometimes("a holder lost its lease while another holds", |_, state: &State| {
            let late = |client: &&Client| matches!(client.stage, ClientStage::Held { .. });
            let held = state.clients.iter().filter(late).count();
            held > state.believers().count() && state.believers().count() > 0
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
        all.extend([
            Property::sometimes("an enqueue comes twice", |_, state: &State| {
                state.wire.iter().any(|message| match message {
                    Message::Request { ask: Ask::Enqueue, id, .. } => state.store.knows(*id),
                    _ => false,
                })
            }),
            Property::sometimes(
                "an acquire is dropped while its enqueue is in flight",
                |_, state: &State| {
                    state.wire.iter().any(|message| match message {
                        Message::Request { ask: Ask::Enqueue, id, over: Over::Current, .. } => {
                            state.clients[slot(*id)].id() != Some(*id)
                        }
                        _ => false,
                    })
                },
            ),
            Property::sometimes("a lost wake-up is found by a renewal", |_, state: &State| {
                state.wire.iter().any(|message| match message {
                    Message::Answer(Answer { ask: Ask::Renew, id, outcome, .. }) => {
                        let waits = |stage: ClientStage| matches!(stage, ClientStage::Waiting(_));
                        let woken = |other: &Message| matches!(other, Message::WakeUp { id: other, .. } if other == id);
                        matches!(outcome, Outcome::Held(_))
                            && waits(state.clients[slot(*id)].stage)
                            && !state.wire.iter().any(woken)
                    }
                    _ => false,
                })
            }),
        ]);
    }
    if world.stragglers > 0 {
        all.push(Property::sometimes("an enqueue comes after its release", |_, state: &State| {
            state.wire.iter().any(|message| match message {
                Message::Request { ask: Ask::Enqueue, id, over: Over::Closed, .. } => {
                    let releases = &state.clients[slot(*id)].releases;
                    releases.iter().any(|own| own.id == *id && own.life == Life::Answered)
                }
                _ => false,
            })
        }));
    }
    all
}

/// The states that must be possible where there are limits other than the capacity.
fn of_limits(world: &World) -> Vec<Property<World>> {
    let mut all = Vec::new();
    if world.operator {
        all.push(Property::sometimes("a waiter waits for a free permit", |_, state: &State| {
            let machine = &state.store.machine;
            let free = machine.units() < machine.limits().capacity();
            free && machine.limits().paused().is_some() && machine.waiting() > 0
        }));
    }
    if world.heavy {
        all.push(Property::sometimes(
            "a heavy waiter waits although a unit is free",
            |_, state: &State| {
                let machine = &state.store.machine;
                let free = machine.units() < machine.limits().capacity();
                let head = machine.waiters().next();
                free && head.is_some_and(|head| head.weight > 1)
            },
        ));
    }
    if world.rate.is_some() {
        all.push(Property::sometimes("a waiter waits for a token", |_, state: &State| {
            let now = state.store_time(state.now);
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
