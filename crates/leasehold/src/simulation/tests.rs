//! Runs of the simulation.
//!
//! `cargo test simulation -- --nocapture` shows how much was simulated. `scripts/simulate` runs it for as long as one
//! likes, on new seeds.

use std::time::{Duration, Instant};

use super::shrink::shrink;
use super::*;

/// The first seed of the tests.
const SEED: u64 = 20_261_118;

/// What a series of runs has covered.
#[derive(Default)]
struct Sum {
    seeds: u64,
    contended: Micros,
    steps: u64,
    grants: usize,
}

impl Sum {
    fn add(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.contended += outcome.contended;
        self.steps += outcome.steps;
        self.grants += outcome.grants;
    }

    fn print(&self, from: u64, passed: Duration) {
        let virtual_hours = self.contended / SECOND / 360;
        let second = passed.as_secs().max(1);
        println!(
            "{} seeds from {from}: {}.{} virtual hours, {} steps, {} grants in {} s: \
             {} virtual seconds and {} steps a second",
            self.seeds,
            virtual_hours / 10,
            virtual_hours % 10,
            self.steps,
            self.grants,
            passed.as_secs(),
            self.contended / SECOND / second,
            self.steps / second,
        );
    }
}

/// Runs a scenario. Panics with the shortest scenario that still fails if it breaks a rule.
fn passes(scenario: &Scenario) -> Outcome {
    let outcome = run(scenario);
    if outcome.violations.is_empty() {
        return outcome;
    }
    println!("seed {} fails: {:?}", scenario.seed, outcome.violations);
    let (shortest, outcome) = shrink(scenario, outcome);
    panic!(
        "the shortest scenario that fails:\n{shortest:#?}\n{}",
        report::story(&shortest, &outcome)
    );
}

#[test]
fn two_days_of_contention() {
    let (started, mut sum) = (Instant::now(), Sum::default());
    let mut seed = SEED;
    while sum.contended < 2 * 24 * 3600 * SECOND {
        sum.add(&passes(&Scenario::new(seed)));
        seed += 1;
    }
    sum.print(SEED, started.elapsed());
}

#[test]
#[ignore = "for scripts/simulate: runs as long as its environment says"]
fn for_a_while() {
    let read = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let minutes: u64 = read("SIMULATE_MINUTES").unwrap_or(1);
    let first = read("SIMULATE_SEED").unwrap_or_else(|| Rng::new().u64(..1 << 48));
    let one = std::env::var("SIMULATE_SEED").is_ok() && std::env::var("SIMULATE_MINUTES").is_err();
    println!("from seed {first} on");
    let (started, mut sum, mut reported) = (Instant::now(), Sum::default(), 0);
    let mut seed = first;
    while started.elapsed().as_secs() < 60 * minutes {
        sum.add(&passes(&Scenario::new(seed)));
        seed += 1;
        if one {
            break;
        }
        if started.elapsed().as_secs() / 60 > reported {
            reported += 1;
            sum.print(first, started.elapsed());
        }
    }
    sum.print(first, started.elapsed());
}

/// The same seed is the same run, to the last line.
#[test]
fn a_seed_replays_exactly() {
    for seed in SEED..SEED + 20 {
        let scenario = Scenario::new(seed);
        assert_eq!(scenario, Scenario::new(seed));
        let [one, other] = [(); 2].map(|()| run(&scenario));
        assert_eq!(one.steps, other.steps, "seed {seed}");
        assert_eq!(one.history.lives, other.history.lives, "seed {seed}");
        assert_eq!(one.history.faults, other.history.faults, "seed {seed}");
        assert_eq!(one.history.listed, other.history.listed, "seed {seed}");
    }
}

/// The rules that the simulation finds, each with the kind of fault that it takes, if it takes one. The other rules need
/// an order of events that is too rare, and are found by the model.
#[test]
fn every_broken_rule_is_found() {
    const MOST: u64 = 400;
    let any = [
        "limit",
        "pause",
        "slots",
        "weights",
        "rate",
        "returned-token",
        "lifo",
        "overtaking",
        "hand-over",
        "resume",
        "fence",
        "idempotence",
        "ownership",
        "expiry",
        "cancel-mark",
        "margin",
        "counted-from-answer",
        "old-wakeup",
        "lost-cancel",
        "released-once",
        "repeated-release",
        "one-command",
        "resent-in-order",
        "resent",
        "queued-again",
        "cancelled",
        "reconnected",
        "taken-over",
    ];
    let focused = [
        ("wakeup", Kind::LoseReply),
        ("missing", Kind::PrimaryKilled),
        ("granted-again", Kind::PrimaryKilled),
    ];
    let any = any.into_iter().map(|rule| (rule, None));
    let focused = focused.into_iter().map(|(rule, kind)| (rule, Some(kind)));
    for (rule, focus) in any.chain(focused) {
        let started = Instant::now();
        let found = (SEED..SEED + MOST).find_map(|seed| {
            let outcome = run(&Scenario::focused(seed, focus).but(rule));
            let first = outcome.violations.into_iter().next();
            first.map(|first| (seed - SEED + 1, first))
        });
        let (seeds, first) = found.unwrap_or_else(|| panic!("{rule} is not found"));
        let (passed, breaks) = (started.elapsed(), first.rule.as_str());
        println!("{rule}: found with {seeds} seeds in {passed:.1?}: {breaks}: {}", first.what);
    }
}
