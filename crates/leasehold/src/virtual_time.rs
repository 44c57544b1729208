//! Virtual time for tests of the engine: the paused clock of a Tokio runtime.
//!
//! After [`begin`], clients that a test opens run as tasks of its runtime instead of on threads, and read its clock.
//! While every task waits, the runtime moves the clock to the next timer. So a test takes no longer than its work, and
//! measures exactly what the client decided, however busy the machine is.

use std::cell::Cell;

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

use crate::clock::{Moment, Span};

thread_local! {
    /// The runtime whose clock is paused, and when that began on both clocks.
    static PAUSED: Cell<Option<(Id, Moment, Instant)>> = const { Cell::new(None) };
}

/// Pauses the clock of the current runtime, unless it is paused already.
///
/// # Panics
///
/// If the runtime is not a `current_thread` runtime.
pub(crate) fn begin() {
    let runtime = Handle::current().id();
    if !is_on() {
        tokio::time::pause();
        let now = Moment::now();
        PAUSED.set(Some((runtime, now, Instant::now())));
    }
}

/// Returns whether the current runtime has a paused clock.
pub(crate) fn is_on() -> bool {
    paused().is_some()
}

/// Returns the current virtual time, if there is any.
pub(crate) fn now() -> Option<Moment> {
    let (began, instant) = paused()?;
    let elapsed = instant.elapsed();
    Some(if elapsed.is_zero() { began } else { began + Span::from_duration(elapsed) })
}

fn paused() -> Option<(Moment, Instant)> {
    let (runtime, began, instant) = PAUSED.get()?;
    // The thread may have run another test before.
    let is_current = Handle::try_current().is_ok_and(|current| current.id() == runtime);
    is_current.then_some((began, instant))
}
