//! Explains in a sentence why the first waiter waits.

use leasehold::{SemaphoreStats, WaitsFor};

use crate::output::{ago, counted};

/// Returns `None` if there is no waiter. The sentence contains text of other programs.
pub(super) fn why(stats: &SemaphoreStats) -> Option<String> {
    let (capacity, units) = (stats.capacity, stats.held_units);
    let weight = stats.waiters.first().map(|one| one.weight);
    let needs = |weight| counted(weight, "unit");
    Some(match stats.waits_for? {
        WaitsFor::Room => {
            let free = capacity.saturating_sub(units);
            let free = match (free, free == 1) {
                (0, _) if units > capacity => {
                    format!("{units} are held, and the limit is {capacity}")
                }
                (0, _) if capacity == 1 => "the only one is held".to_owned(),
                (0, _) => format!("all {capacity} are held"),
                (free, true) => format!("{free} of {capacity} is free"),
                (free, false) => format!("{free} of {capacity} are free"),
            };
            match weight {
                Some(weight) => format!("The first waiter needs {}; {free}.", needs(weight)),
                None => format!("The first waiter needs more room; {free}."),
            }
        }
        WaitsFor::Rate => match stats.next_token {
            Some(next) => format!("The rate allows the next start in {}.", ago(next)),
            None => "The rate allows the next start soon.".to_owned(),
        },
        WaitsFor::Resume => match &stats.paused {
            Some(paused) => {
                let reason = paused.reason.as_ref().map(|reason| format!(": {reason}"));
                let reason = reason.unwrap_or_default();
                format!("Paused for {} by {}{reason}.", ago(paused.lasts), paused.by)
            }
            None => "Paused.".to_owned(),
        },
        WaitsFor::Capacity => match weight {
            Some(weight) => format!(
                "The first waiter needs {}, but the limit is {capacity}: raise the limit.",
                needs(weight)
            ),
            None => format!(
                "The first waiter needs more than the limit of {capacity}: raise the limit."
            ),
        },
        WaitsFor::Client => {
            "The client of the first waiter cannot be reached; others are granted before it."
                .to_owned()
        }
        _ => "The reason is not known to this version.".to_owned(),
    })
}
