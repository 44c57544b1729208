//! Small worlds that are searched completely, and broken worlds. `cargo test model -- --nocapture` shows how many
//! states each world has. `cargo test --release model -- --ignored --nocapture` searches larger worlds, which takes
//! minutes.

use std::collections::BTreeSet;
use std::time::Instant;

use stateright::{Checker, Expectation, HasDiscoveries};

use super::*;

fn world(capacity: u32, in_flight: &'static [usize]) -> World {
    let lease = Some(Span::from_micros(2 * TICK.micros()));
    World {
        capacity,
        in_flight,
        terms: Terms { lease, ttl: None },
        ids: 1,
        acquisitions: 1,
        stragglers: 0,
        ticks: true,
        crashes: false,
        cuts: false,
        operator: false,
        cancels: false,
        heavy: false,
        rate: None,
        broken: None,
        shown_live: Mutex::default(),
    }
}

impl World {
    fn with_lease(self, ticks: u64) -> Self {
        let lease = Some(Span::from_micros(ticks * TICK.micros()));
        Self { terms: Terms { lease, ..self.terms }, ..self }
    }

    fn where_time_stands_still(self) -> Self {
        Self { ticks: false, ..self }
    }

    fn with_crashes(self) -> Self {
        Self { crashes: true, ..self }
    }

    fn with_cuts(self) -> Self {
        Self { cuts: true, ..self }
    }

    fn with_operator(self) -> Self {
        Self { operator: true, ..self }
    }

    fn with_cancels(self) -> Self {
        Self { cancels: true, ..self }
    }

    /// Each client makes this many acquisitions at once.
    fn with_acquisitions(self, acquisitions: usize) -> Self {
        Self { acquisitions, ids: self.ids.max(acquisitions), ..self }
    }

    fn with_a_heavy_client(self) -> Self {
        Self { heavy: true, ..self }
    }

    /// A token arrives in each of these many ticks.
    fn with_rate(self, ticks: u64, burst: u32) -> Self {
        // One more than the burst in two intervals.
        let period = Span::from_micros(2 * ticks * TICK.micros());
        Self { rate: Some(Rate { count: u64::from(burst) + 1, period, burst }), ..self }
    }

    fn with_stragglers(self, stragglers: usize) -> Self {
        Self { stragglers, ..self }
    }

    fn with_ids(self, ids: usize) -> Self {
        Self { ids, ..self }
    }

    fn with_ttl(self, ticks: u64) -> Self {
        let ttl = Some(Span::from_micros(ticks * TICK.micros()));
        Self { terms: Terms { ttl, ..self.terms }, ..self }
    }

    fn describe(&self) -> String {
        let Self { capacity, in_flight, ids, terms, crashes, cuts, operator, stragglers, .. } =
            self;
        let extras = [
            (*crashes, "crashes"),
            (*cuts, "cuts"),
            (*operator, "an operator"),
            (self.cancels, "cancelled waiters"),
            (self.acquisitions > 1, "several acquisitions"),
            (terms.ttl.is_some(), "a TTL"),
            (*stragglers > 0, "stragglers"),
            (self.heavy, "a heavy client"),
            (self.rate.is_some(), "a rate"),
        ];
        let extras: Vec<_> = extras.iter().filter(|(is, _)| *is).map(|(_, what)| *what).collect();
        format!("capacity {capacity}, in flight {in_flight:?}, ids {ids}, {}", extras.join(", "))
    }

    fn but(self, broken: &'static str) -> Self {
        Self { broken: Some(broken), ..self }
    }
}

/// Searches all states of a world.
fn holds_in(world: World) {
    let what = world.describe();
    // A single client never meets another one, so some states are impossible.
    let alone = world.in_flight.len() == 1;
    let started = Instant::now();
    let checker = world.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (states, steps) = (checker.unique_state_count(), checker.state_count());
    println!("{what}: {states} states, {steps} steps, {:.1?}", started.elapsed());
    for property in checker.model().properties() {
        let found = checker.discovery(property.name).map(stateright::Path::into_actions);
        match (property.expectation, found) {
            (Expectation::Sometimes, None) if !alone => {
                panic!("{what}: never seen: {}", property.name)
            }
            (Expectation::Always, Some(how)) => {
                panic!("{what}: not so: {}: {how:#?}", property.name);
            }
            _ => {}
        }
    }
}

#[test]
fn three_clients_share_one_permit() {
    holds_in(world(1, &[0, 0, 0]).with_lease(1));
}

#[test]
fn three_clients_share_two_permits() {
    holds_in(world(2, &[0, 0, 0]).with_lease(1));
}

#[test]
fn an_operator_pauses_and_resizes() {
    holds_in(world(1, &[0, 0]).with_cuts().with_operator());
}

#[test]
fn a_heavy_client_and_light_ones() {
    holds_in(world(2, &[0, 0, 0]).with_lease(1).with_a_heavy_client());
    holds_in(world(2, &[0, 0]).with_crashes().with_cuts().with_a_heavy_client());
}

#[test]
fn tokens_are_taken_and_go_back() {
    holds_in(world(1, &[0, 0]).with_lease(1).with_rate(2, 1).with_crashes());
    holds_in(world(2, &[0, 0]).with_lease(1).with_rate(1, 2));
}

#[test]
fn a_wire_that_delays_everything() {
    holds_in(world(1, &[1, 0]));
}

#[test]
fn two_requests_of_one_client_in_flight() {
    holds_in(world(1, &[2]).with_lease(1).with_ids(2));
}

#[test]
fn permits_that_end_over_connections_that_break() {
    holds_in(world(1, &[0, 0]).with_crashes().with_cuts().with_ttl(3));
}

/// A server that could not be asked to close the old connection may still apply the requests that it carried.
#[test]
fn requests_of_an_earlier_connection_are_applied_late() {
    holds_in(world(1, &[1]).with_stragglers(1));
    holds_in(world(1, &[1]).with_stragglers(1).with_ttl(1));
}

#[test]
#[ignore = "takes minutes, and hours without optimization"]
fn larger_worlds() {
    holds_in(world(1, &[0, 0, 0]));
    holds_in(world(2, &[0, 0, 0]));
    holds_in(world(1, &[0, 0]).with_crashes().with_cuts().with_ids(2));
    holds_in(world(1, &[0, 0]).with_crashes().with_cuts().with_operator());
    holds_in(world(1, &[0, 0]).with_crashes().with_cuts().with_cancels());
    holds_in(world(1, &[1, 0]).with_crashes());
    holds_in(world(1, &[1, 0]).with_cancels());
    holds_in(world(1, &[1, 1]).with_lease(1));
    holds_in(world(1, &[1, 1]).with_crashes());
    holds_in(world(1, &[2]).with_acquisitions(2).with_lease(1));
    holds_in(world(1, &[2, 0]).with_lease(1));
    holds_in(world(1, &[2, 0]));
    holds_in(world(1, &[0, 0, 0]).with_lease(1).with_operator());
    holds_in(world(1, &[1, 0]).with_stragglers(1));
    holds_in(world(1, &[1, 0]).with_stragglers(1).with_ttl(1));
}

#[test]
#[ignore = "takes minutes, and hours without optimization"]
fn larger_worlds_with_weights_and_rates() {
    holds_in(world(2, &[0, 0, 0]).with_lease(1).with_a_heavy_client().with_operator());
    holds_in(world(1, &[1, 0]).with_lease(1).with_rate(2, 1).with_crashes());
    holds_in(world(2, &[0, 0, 0]).with_lease(1).with_rate(1, 2).with_crashes());
    holds_in(world(2, &[1, 0]).with_lease(1).with_a_heavy_client());
}

#[test]
fn two_lost_requests_of_one_client_are_sent_again_in_their_order() {
    holds_in(world(1, &[2]).with_acquisitions(2).where_time_stands_still());
}

/// Its client learns it from a message, which may be lost, or from its next query.
#[test]
fn an_operator_removes_waiters() {
    holds_in(world(1, &[0, 0]).with_cancels());
}

#[test]
fn every_broken_world_is_detected() {
    let two = || world(1, &[0, 0]);
    let table = [
        // Rules of the machine.
        ("limit", two(), "1: limit"),
        ("pause", two().with_operator(), "1: no grant during a pause"),
        ("slots", world(2, &[0, 0, 0]).with_a_heavy_client(), "1: slot numbers"),
        ("weights", world(2, &[0, 0, 0]).with_a_heavy_client(), "6: self-fencing"),
        ("rate", two().with_rate(2, 1), "1: rate"),
        ("returned-token", world(2, &[0, 0]).with_rate(2, 1), "1: rate"),
        ("lifo", world(1, &[0, 0, 0]), "2: order"),
        ("overtaking", world(2, &[0, 0, 0]).with_a_heavy_client(), "2: order"),
        ("hand-over", two(), "3: no lost wake-up"),
        ("resume", two().with_operator(), "3: no lost wake-up"),
        ("fence", two(), "4: fence"),
        ("idempotence", two(), "5: idempotence"),
        ("ownership", two(), "6: self-fencing"),
        ("expiry", two(), "7: no leak"),
        ("cancel-mark", two().with_cancels(), "a cancelled waiter stays cancelled"),
        // Rules of the client core.
        ("margin", two(), "6: self-fencing"),
        ("counted-from-answer", world(1, &[1, 0]), "6: self-fencing"),
        ("old-wakeup", two(), "6: self-fencing"),
        ("stays-lost", world(1, &[2, 0]), "6: the store has what a client relies on"),
        ("lost-cancel", two(), "7: no leak"),
        ("released-once", two(), "7: no leak"),
        ("late-answer", world(1, &[1, 0]).with_stragglers(1), "7: no leak"),
        ("released-again", world(1, &[1, 0]).with_stragglers(1), "7: no leak"),
        ("repeated-release", world(1, &[1, 0]).with_stragglers(1), "7: no leak"),
        ("one-command", two(), "5: no command is sent twice in one request"),
        (
            "resent-in-order",
            world(1, &[2]).with_acquisitions(2),
            "2: lost enqueues keep their order",
        ),
        ("resent", two(), "every waiter holds in the end"),
        ("queued-again", two(), "every waiter holds in the end"),
        ("cancelled", two().with_cancels(), "a cancelled waiter stays cancelled"),
        // A rule of the stores.
        (UNCLAIMED, two().with_rate(2, 1).with_crashes(), "1: rate"),
    ];
    let always = |property: &Property<World>| property.expectation == Expectation::Always;
    let properties = two().properties().into_iter().filter(always);
    let properties: BTreeSet<_> = properties.map(|property| property.name).collect();
    assert_eq!(properties, table.iter().map(|(_, _, property)| *property).collect());
    for (broken, world, property) in table {
        let wanted = HasDiscoveries::AllOf(BTreeSet::from([property]));
        let checker = world.but(broken).checker().finish_when(wanted).spawn_bfs().join();
        let states = checker.unique_state_count();
        let found = checker.discovery(property).map(stateright::Path::into_actions);
        let found = found.unwrap_or_else(|| panic!("{broken} is not detected"));
        println!("{broken}: not so: {property}: after {} steps, {states} states", found.len());
    }
}
