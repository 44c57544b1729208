//! Waiting in tests: for something, never just for a while, and never for ever.

use std::panic::Location;
use std::time::Duration;

/// How long anything may take before a test fails. Far more than it should.
pub const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// The future, but not for longer than [`PATIENCE`].
#[track_caller]
pub fn deadline<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        let Ok(output) = tokio::time::timeout(PATIENCE, future).await else { late(caller) };
        output
    }
}

/// Asks again and again until it is so.
#[track_caller]
pub fn eventually(mut condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    deadline(async move {
        while !condition().await {
            tokio::time::sleep(PAUSE).await;
        }
    })
}

/// Fails the test on behalf of whoever waited in vain.
pub(crate) fn late(caller: &Location<'_>) -> ! {
    panic!("what {caller} waits for has not happened within {PATIENCE:?}")
}
