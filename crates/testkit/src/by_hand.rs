//! Polls futures without a runtime, only when the test says so.

use std::panic::Location;
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::wait::{TIME_LIMIT, late};

/// A waker that a thread can wait for.
#[derive(Debug, Default)]
struct ThreadWaker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl ThreadWaker {
    /// Waits until the waker is called. Returns false if that does not happen within `time_limit`.
    fn wait(&self, time_limit: Duration) -> bool {
        let woken = self.woken.lock().unwrap();
        let (mut woken, _) =
            self.changed.wait_timeout_while(woken, time_limit, |woken| !*woken).unwrap();
        std::mem::take(&mut woken)
    }
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

/// A future that is polled only when the test says so.
#[must_use]
pub struct ByHand<'a, T> {
    /// `None` once the future is ready.
    future: Option<Pin<Box<dyn Future<Output = T> + Send + 'a>>>,
    waker: Arc<ThreadWaker>,
}

impl<'a, T> ByHand<'a, T> {
    pub fn new(future: impl Future<Output = T> + Send + 'a) -> Self {
        Self { future: Some(Box::pin(future)), waker: Arc::default() }
    }

    /// Polls once. Returns `None` if the future is pending, and after it has been ready.
    pub fn poll(&mut self) -> Option<T> {
        let waker = Waker::from(self.waker.clone());
        let poll = self.future.as_mut()?.as_mut().poll(&mut Context::from_waker(&waker));
        let Poll::Ready(output) = poll else { return None };
        self.future = None;
        Some(output)
    }

    /// Returns whether the future was woken already, or is woken within `time_limit`.
    #[must_use]
    pub fn is_woken_within(&self, time_limit: Duration) -> bool {
        self.waker.wait(time_limit)
    }

    /// Polls until the future is ready, and only when it is woken. A lost wake-up fails the test.
    #[must_use]
    #[track_caller]
    pub fn finish(mut self) -> T {
        loop {
            assert!(self.future.is_some(), "the future has been ready before");
            if let Some(output) = self.poll() {
                return output;
            }
            if !self.waker.wait(TIME_LIMIT) {
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

/// Runs a future on a thread without a runtime, for no longer than [`TIME_LIMIT`].
#[track_caller]
pub fn block_on<F: Future>(future: F) -> F::Output {
    let thread_waker = Arc::new(ThreadWaker::default());
    let waker = Waker::from(thread_waker.clone());
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        if !thread_waker.wait(TIME_LIMIT) {
            late(Location::caller());
        }
    }
}

/// Polls `condition` until it returns true, on a thread without a runtime.
#[track_caller]
pub fn until(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        if begun.elapsed() > TIME_LIMIT {
            late(Location::caller());
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Polls a future once, in the task of the caller. Returns `None` if it is pending.
pub async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Yields to the other tasks this many times.
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
