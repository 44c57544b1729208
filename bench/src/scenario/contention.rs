//! What the scenarios with two processes of one contender have in common.

use std::time::Duration;

use crate::contender::Contender;
use crate::driver::Driver;
use crate::host;

/// The starts of the waiters are spread over this time: those who poll would otherwise all look at the same moment.
const SPREAD: Duration = Duration::from_millis(250);
/// From the last start until everyone waits.
pub(super) const SETTLE: Duration = Duration::from_millis(300);

/// Two processes of one contender.
pub(super) fn two(contender: &'static Contender, url: &str) -> Result<[Driver; 2], String> {
    // A second core starts the second.
    let (a, b) = std::thread::scope(|scope| {
        let other = scope.spawn(|| Driver::start(contender, url));
        (Driver::start(contender, url), other.join().expect("it does not panic"))
    });
    Ok([a?, b?])
}

/// For both sides: the first start, and the time between two, so that the sides take turns.
pub(super) fn staggered(waiters: u64) -> [(usize, u64, u64); 2] {
    let step = u64::try_from(SPREAD.as_nanos()).expect("a short time") / waiters * 2;
    // Until the second has been told.
    let soon = host::nanos() + 20_000_000;
    [(0, soon, step), (1, soon + step / 2, step)]
}

/// Nanoseconds from one to the other; none if they came the other way round, as clocks are read before things are done.
pub(super) fn between(from: u64, to: u64) -> f64 {
    crate::sample::count(to.saturating_sub(from))
}
