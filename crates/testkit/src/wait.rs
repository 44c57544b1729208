//! Waiting in tests: always for an event, never for a fixed time, and never forever.

use std::panic::Location;
use std::thread;
use std::time::{Duration, Instant};

/// How long anything may take before a test fails. Far more than it should take.
pub const TIME_LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// Awaits the future, but fails the test after [`TIME_LIMIT`].
#[track_caller]
pub fn deadline<F: IntoFuture>(future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        let Ok(output) = tokio::time::timeout(TIME_LIMIT, future.into_future()).await else {
            late(caller)
        };
        output
    }
}

/// Calls `condition` until it returns true.
#[track_caller]
pub fn eventually(mut condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    deadline(async move {
        while !condition().await {
            tokio::time::sleep(PAUSE).await;
        }
    })
}

/// Calls a blocking function on its own thread, and returns its result.
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

/// Fails the test, naming the caller that waited.
pub(crate) fn late(caller: &Location<'_>) -> ! {
    panic!("the condition at {caller} did not hold within {TIME_LIMIT:?}")
}
