//! Threads for blocking work. Tokio's `spawn_blocking` and its `lookup_host` panic if the system cannot start another
//! thread. Here that is an error.

use tokio::sync::oneshot;

use crate::Error;

/// Starts a thread. Fails with [`Error::Stopped`] if the system cannot start another one.
pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    let what = |error| format!("the thread {name} could not be started: {error}");
    spawned.map(drop).map_err(|error| Error::Stopped { problem: what(error) })
}

/// Runs `work` on its own thread. If the future is dropped, the work continues.
pub(super) async fn run<T: Send + 'static>(
    name: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = oneshot::channel();
    spawn(name, move || drop(done.send(work())))?;
    result.await.map_err(|_| Error::internal(format!("the thread {name} panicked")))
}
