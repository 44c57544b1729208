//! Permits start no more often than the rate says.
//!
//! Of each it is known between which two instants it started. Those for which both lie in a window started in it. In a window
//! of any length no more start than the burst, and one for each interval of it. It is enough to look at windows that begin
//! when one could have started first, and end when one was told: any other can be made smaller without losing any.
//!
//! A store that lost its data has lost what was taken, and one whose clock was set counts other times. Either may cost as
//! many tokens as are kept, and one for the interval that is cut in two.

use super::ops::Op;
use super::{Case, Rule, Verdict};
use crate::clock::{MILLISECOND, Micros, SECOND};
use crate::fault::{Fault, Kind};

/// How far from a window a fault may be that has to do with it.
const NEAR: Micros = SECOND;
/// The clocks of the store and of the histories may differ by one in so many.
const DRIFT: Micros = 1000;

pub(super) fn check(case: &Case<'_>, thing: usize, verdict: &mut Verdict) {
    let known = &case.history.things[thing];
    let Some(rate) = known.rate else { return };
    let ops = case.ops.iter().filter(|op| op.thing == thing);
    let mut starts: Vec<_> = ops.filter_map(Op::start).collect();
    starts.sort_unstable();
    verdict.facts.starts += starts.len();
    let faults = |from: Micros, to: Micros| {
        let near = |fault: &&Fault| {
            let reaches = fault.end.saturating_add(NEAR) >= from && fault.begin <= to + NEAR;
            reaches && costs_tokens(fault)
        };
        case.history.faults.iter().filter(near).count() as u64
    };
    let burst = u64::from(rate.burst);
    // When those were told that did not start before the window.
    let mut told: Vec<Micros> = Vec::with_capacity(starts.len());
    for (from, at) in starts.into_iter().rev() {
        told.insert(told.partition_point(|known| *known < at), at);
        for (count, to) in (1_u64..).zip(&told) {
            let span = to.saturating_sub(from);
            let mut most = burst + (span + span / DRIFT) / rate.interval();
            if count > most {
                most += (burst + 1) * faults(from, *to);
            }
            if count > most {
                let millis = span / MILLISECOND;
                let what = format!("{count} started within {millis} ms, at most {most} may");
                verdict.found(Rule::Rate, known.name, *to, what);
                break;
            }
        }
    }
}

fn costs_tokens(fault: &Fault) -> bool {
    fault.loses_data() || matches!(fault.kind, Kind::ClockForward | Kind::ClockBack)
}
