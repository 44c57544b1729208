//! Looks for the shortest scenario that still fails.
//!
//! It removes faults, processes, names, users and time, one after the other, as long as the run still breaks one of the
//! rules that the first run broke. The random numbers of a process depend on the seed and the process alone, so what
//! remains is done by the same users in the same way.

use torture::check::Rule;

use super::*;

/// The most runs for one search.
const RUNS: usize = 300;

struct Search {
    rules: Vec<Rule>,
    left: usize,
    best: (Scenario, Outcome),
}

/// Returns the shortest scenario that was found, with its run.
pub(super) fn shrink(scenario: &Scenario, outcome: Outcome) -> (Scenario, Outcome) {
    let rules = outcome.violations.iter().map(|violation| violation.rule).collect();
    let mut search = Search { rules, left: RUNS, best: (scenario.clone(), outcome) };
    let mut before = usize::MAX;
    // Again, as long as it gets shorter: without a fault, a process may no longer be needed.
    while search.left > 0 && search.size() < before {
        before = search.size();
        search.cut_the_end();
        search.without_injections();
        search.without(|scenario, at| {
            (at < scenario.processes && scenario.workers & 1 << at != 0)
                .then(|| scenario.workers &= !(1 << at))
        });
        search.without(|scenario, at| {
            (at < scenario.things.len() && scenario.things.len() > 1).then(|| {
                scenario.things.remove(at);
            })
        });
        search.without(|scenario, _| (scenario.users > 1).then(|| scenario.users -= 1));
        search.without(|scenario, _| scenario.operators.then(|| scenario.operators = false));
        search.without(|scenario, _| scenario.stragglers.then(|| scenario.stragglers = false));
    }
    search.best
}

impl Search {
    fn size(&self) -> usize {
        let (scenario, outcome) = &self.best;
        let lines = outcome.history.lives.iter().map(|(_, lines)| lines.len()).sum::<usize>();
        lines + scenario.injections.len()
    }

    /// Runs a shorter scenario, and keeps it if it fails in the same way.
    fn fails(&mut self, scenario: Scenario) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        let outcome = run(&scenario);
        let same = outcome.violations.iter().any(|found| self.rules.contains(&found.rule));
        if same {
            self.best = (scenario, outcome);
        }
        same
    }

    /// The users finish right after the first violation, or earlier.
    fn cut_the_end(&mut self) {
        let first = self.best.1.violations.iter().map(|found| found.at).min().unwrap_or_default();
        for more in [0, SECOND, 5 * SECOND, 20 * SECOND] {
            let finish = first.saturating_add(more);
            if finish < self.best.0.finish && finish > BEGIN + SECOND {
                let scenario = Scenario { finish, ..self.best.0.clone() };
                if self.fails(scenario) {
                    break;
                }
            }
        }
    }

    /// Removes faults: first many at once, then fewer, then one by one (`ddmin`).
    fn without_injections(&mut self) {
        let mut size = self.best.0.injections.len().next_power_of_two();
        while size > 0 {
            let mut at = 0;
            while at < self.best.0.injections.len() {
                let mut scenario = self.best.0.clone();
                let end = (at + size).min(scenario.injections.len());
                scenario.injections.drain(at..end);
                if !self.fails(scenario) {
                    at += size;
                }
            }
            size /= 2;
        }
    }

    /// Tries to make the scenario shorter in up to eight places.
    fn without(&mut self, shorter: impl Fn(&mut Scenario, usize) -> Option<()>) {
        for at in 0..8 {
            let mut scenario = self.best.0.clone();
            if shorter(&mut scenario, at).is_some() {
                self.fails(scenario);
            }
        }
    }
}
