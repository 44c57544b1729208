//! Permits do not start more often than the rate allows.
//!
//! Each permit started between two known instants. If both are in a window, the permit started in that window. No window
//! that is shorter than a second has more starts than the rate says, and no window of any length more than `burst` plus
//! one for each interval. It is enough to check windows that begin at the first possible start of a permit and end when a
//! permit was received: any other window can be made smaller without losing a start.
//!
//! A store that lost its data has lost the record of the tokens that were taken, and a store whose clock was set counts
//! other times. Either fault may allow a whole burst of extra starts, plus one for the interval that is cut in two.

use super::ops::Op;
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros, SECOND};
use crate::fault::{Fault, Kind};

/// How far from a window a fault may be and still affect it.
const NEAR: Micros = SECOND;
/// The clocks of the store and of the histories may differ by one part in this many.
const DRIFT: Micros = 1000;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let spec = &case.history.things[thing];
    let Some(rate) = spec.rate else { return };
    let ops = case.ops.iter().filter(|op| op.thing == thing);
    let mut starts: Vec<_> = ops.filter_map(Op::start).collect();
    starts.sort_unstable();
    verdict.facts.starts += starts.len();
    let faults = |from: Micros, to: Micros| {
        let near = |fault: &&Fault| {
            let reaches = fault.end.saturating_add(NEAR) >= from && fault.begin <= to + NEAR;
            reaches && costs_tokens(fault) && fault.concerns(thing)
        };
        case.history.faults.iter().filter(near).count() as u64
    };
    let burst = u64::from(rate.burst);
    // When the permits were received that did not start before the window.
    let mut received: Vec<Micros> = Vec::with_capacity(starts.len());
    for (from, at) in starts.into_iter().rev() {
        received.insert(received.partition_point(|earlier| *earlier < at), at);
        for (count, to) in (1_u64..).zip(&received) {
            let span = to.saturating_sub(from);
            let span = span + span / DRIFT;
            let mut most = burst + span / rate.interval();
            if span < SECOND {
                most = most.min(u64::from(rate.starts));
            }
            if count > most {
                most += (burst + 1) * faults(from, *to);
            }
            if count > most {
                let millis = span / MILLISECOND;
                let what =
                    format!("{count} permits started within {millis} ms; the limit is {most}");
                verdict.found(Rule::Rate, spec.name, *to, what);
                break;
            }
        }
    }
}

fn costs_tokens(fault: &Fault) -> bool {
    fault.loses_data() || matches!(fault.kind, Kind::ClockForward | Kind::ClockBack)
}
