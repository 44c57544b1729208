//! Waiting in tests: for something, never just for a while, and never for ever.

use std::panic::Location;
use std::thread;
use std::time::{Duration, Instant};

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

/// Calls a function that blocks on a thread of its own, and returns its result.
///
/// # Panics
///
/// If the function does.
pub async fn blocking<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let called = tokio::task::spawn_blocking(call).await;
    called.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Calls `probe` until it returns a value, from code that is not async.
///
/// # Panics
///
/// If there is no value `within` that time. The message contains the last error of `probe`, which
/// says what it saw instead.
#[track_caller]
pub fn until<T>(what: &str, within: Duration, mut probe: impl FnMut() -> Result<T, String>) -> T {
    let end = Instant::now() + within;
    loop {
        match probe() {
            Ok(value) => return value,
            Err(seen) if Instant::now() > end => panic!("{what}: not within {within:?}: {seen}"),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Fails the test on behalf of whoever waited in vain.
pub(crate) fn late(caller: &Location<'_>) -> ! {
    panic!("what {caller} waits for has not happened within {PATIENCE:?}")
}
