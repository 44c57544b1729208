//! Futures without a runtime: polled when the test says so.

use std::panic::Location;
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::wait::{PATIENCE, late};

/// A waker that a thread can wait for.
#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell {
    /// False if it was not rung in that time.
    fn wait(&self, patience: Duration) -> bool {
        let rung = self.rung.lock().unwrap();
        let (mut rung, _) = self.heard.wait_timeout_while(rung, patience, |rung| !*rung).unwrap();
        std::mem::take(&mut rung)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rung.lock().unwrap() = true;
        self.heard.notify_all();
    }
}

/// A future that is polled exactly as often as the test says.
#[must_use]
pub struct ByHand<'a, T> {
    /// None once it is done.
    future: Option<Pin<Box<dyn Future<Output = T> + Send + 'a>>>,
    bell: Arc<Bell>,
}

impl<'a, T> ByHand<'a, T> {
    pub fn new(future: impl Future<Output = T> + Send + 'a) -> Self {
        Self { future: Some(Box::pin(future)), bell: Arc::default() }
    }

    /// None if it is not done yet, and also once it has been done.
    pub fn poll(&mut self) -> Option<T> {
        let waker = Waker::from(self.bell.clone());
        let poll = self.future.as_mut()?.as_mut().poll(&mut Context::from_waker(&waker));
        let Poll::Ready(output) = poll else { return None };
        self.future = None;
        Some(output)
    }

    /// Whether it was woken, or is within that time.
    #[must_use]
    pub fn is_woken_within(&self, patience: Duration) -> bool {
        self.bell.wait(patience)
    }

    /// Polls when it is woken, and only then, until it is done: a wake-up that was lost is not made
    /// good for.
    #[must_use]
    #[track_caller]
    pub fn finish(mut self) -> T {
        loop {
            assert!(self.future.is_some(), "it is done already");
            if let Some(output) = self.poll() {
                return output;
            }
            if !self.bell.wait(PATIENCE) {
                late(Location::caller());
            }
        }
    }
}

impl<T> std::fmt::Debug for ByHand<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ByHand").field("done", &self.future.is_none()).finish_non_exhaustive()
    }
}

/// Runs a future on a thread without a runtime, for no longer than [`PATIENCE`].
#[track_caller]
pub fn block_on<F: Future>(future: F) -> F::Output {
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        if !bell.wait(PATIENCE) {
            late(Location::caller());
        }
    }
}

/// Asks again and again until it is so, on a thread without a runtime.
#[track_caller]
pub fn until(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        if begun.elapsed() > PATIENCE {
            late(Location::caller());
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Lets everybody else go first, so many times.
pub async fn step_aside(times: u32) {
    let mut left = times;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
