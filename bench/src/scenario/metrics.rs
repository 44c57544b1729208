//! The cost of the feature `metrics`: pairs without it, with it but without a recorder, and with an exporter.

use super::RATE;
use super::pairs::pair_rate;
use crate::bench::Bench;
use crate::contender::{
    Contender, MEMORY, MEMORY_EXPORTED, MEMORY_METERED, SEMAPHORE, SEMAPHORE_EXPORTED,
    SEMAPHORE_METERED,
};
use crate::contender_set::ContenderSet;
use crate::report::Better;

pub(super) fn run(bench: &mut Bench) {
    let memory = [&MEMORY, &MEMORY_METERED, &MEMORY_EXPORTED];
    let redis = [&SEMAPHORE, &SEMAPHORE_METERED, &SEMAPHORE_EXPORTED];
    compare(bench, "in memory, 1 task", memory, 1);
    compare(bench, "on Redis, 1 task", redis, 1);
    compare(bench, "on Redis, 256 tasks", redis, 256);
}

/// Measures all three, and reports those with the feature as a share of the one without, round by round.
fn compare(bench: &mut Bench, what: &str, contenders: [&'static Contender; 3], tasks: usize) {
    let mut set = ContenderSet::new(&contenders);
    set.measure(bench, what, RATE, |driver, bench| pair_rate(driver, bench, tasks, 1, 256));
    let [without, with @ ..] = contenders;
    for contender in with {
        let share = bench.sample(what, contender.name).over(&bench.sample(what, without.name));
        for ratio in share.0 {
            let what = format!("{what}: of those without the feature");
            bench.add(&what, contender.name, ("×", Better::More), ratio);
        }
    }
}
