//! Common parts of the scenarios with two processes of one contender.

use std::time::Duration;

use crate::contender::Contender;
use crate::driver::Driver;
use crate::host;

/// The starts of the waiters are spread over this time. Otherwise all waiters that poll would poll at the same moment.
const SPREAD: Duration = Duration::from_millis(250);
/// The time from the last start until every task waits.
pub(super) const SETTLE: Duration = Duration::from_millis(300);

/// Starts two processes of one contender.
pub(super) fn two(contender: &'static Contender, url: &str) -> Result<[Driver; 2], String> {
    // The second process starts at the same time, on another core.
    let (a, b) = std::thread::scope(|scope| {
        let other = scope.spawn(|| Driver::start(contender, url));
        (Driver::start(contender, url), other.join().expect("it does not panic"))
    });
    Ok([a?, b?])
}

/// Returns for both sides the time of the first start, and the time between two starts, so that the sides alternate.
pub(super) fn staggered(waiters: u64) -> [(usize, u64, u64); 2] {
    let step = u64::try_from(SPREAD.as_nanos()).expect("a short time") / waiters * 2;
    // Late enough that the second side has received its request.
    let soon = host::nanos() + 20_000_000;
    [(0, soon, step), (1, soon + step / 2, step)]
}

/// Returns the nanoseconds from one moment to another. Returns zero if their order is reversed, which can happen
/// because clocks are read before the action.
pub(super) fn between(from: u64, to: u64) -> f64 {
    crate::sample::count(to.saturating_sub(from))
}
