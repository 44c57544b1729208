//! Sets wall clocks.

use fastrand::Rng;

use super::{Show, millis};
use crate::clock::{MILLISECOND, SECOND, Wall};
use crate::fault::{Kind, Scope};
use crate::plan::STEP;

/// The lane of the workers' clock, which is set all the time.
pub(super) fn lane(show: &Show) {
    const MOST: i64 = 3600 * SECOND.cast_signed();
    let (mut rng, Some(wall)) = (show.rng(u64::MAX - 1), &show.workers_clock) else { return };
    while show.pause(millis(&mut rng, 200..2000)) {
        let by = rng.i64(-MOST..MOST);
        step(show, wall, Kind::WorkersClock, Scope::Nobody, by);
    }
}

/// Sets the clock of the servers forward or back, by little enough that docs/guarantees.md states the consequences.
pub(super) fn set_the_servers(show: &Show, wall: &Wall, rng: &mut Rng) {
    let by = rng.i64(50 * MILLISECOND.cast_signed()..STEP.cast_signed());
    let (kind, by) = if rng.bool() { (Kind::ClockForward, by) } else { (Kind::ClockBack, -by) };
    step(show, wall, kind, Scope::Everybody, by);
}

fn step(show: &Show, wall: &Wall, kind: Kind, scope: Scope, by: i64) {
    if let Err(error) = show.fault(kind, scope, || wall.step(by)) {
        show.doubt(format!("the clock could not be set: {error}"));
    }
}
