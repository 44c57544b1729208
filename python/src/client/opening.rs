//! An attempt to open the store, shared by all operations that need it.
//!
//! Each of them polls the attempt, so each of them drives it. An event loop that is blocked, or was closed, therefore delays no other
//! loop or thread. The attempt is dropped when no operation needs it any more.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use leasehold::Client as Engine;

use crate::failure::Failure;
use crate::wake::lock;

type Opened = Result<Engine, Failure>;

pub(super) struct Attempt {
    /// Only locked with the GIL held.
    progress: Mutex<Progress>,
    waiting: Arc<Waiting>,
}

enum Progress {
    Opening(Pin<Box<dyn Future<Output = Opened> + Send>>),
    Ended(Opened),
}

/// The operations that wait for an attempt.
#[derive(Default)]
struct Waiting {
    wakers: Mutex<Vec<Waker>>,
}

impl Attempt {
    pub(super) fn new(opening: impl Future<Output = Opened> + Send + 'static) -> Arc<Self> {
        let progress = Mutex::new(Progress::Opening(Box::pin(opening)));
        Arc::new(Self { progress, waiting: Arc::default() })
    }

    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<Opened> {
        let mut progress = lock(&self.progress);
        let opening = match &mut *progress {
            Progress::Ended(opened) => return Poll::Ready(opened.clone()),
            Progress::Opening(opening) => opening,
        };
        // Before the poll: a wake-up that comes during the poll must find it.
        self.waiting.add(cx.waker());
        let waker = self.waiting.clone().into();
        let Poll::Ready(opened) = opening.as_mut().poll(&mut Context::from_waker(&waker)) else {
            return Poll::Pending;
        };
        *progress = Progress::Ended(opened.clone());
        drop(progress);
        self.wake();
        Poll::Ready(opened)
    }

    /// Makes all operations that wait poll again.
    pub(super) fn wake(&self) {
        self.waiting.clone().wake();
    }
}

impl Waiting {
    fn add(&self, waker: &Waker) {
        let mut wakers = lock(&self.wakers);
        if !wakers.iter().any(|other| other.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        let wakers = std::mem::take(&mut *lock(&self.wakers));
        wakers.into_iter().for_each(Waker::wake);
    }
}
