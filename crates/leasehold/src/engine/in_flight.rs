//! Requests in flight. Any thread may send a request; the engine's thread applies the answers.
//!
//! A thread that sends its own request saves the time to wake the engine's thread, which would be half of the time of
//! an uncontended acquire. Only one thread at a time has the turn to send, so that no request overtakes another. No thread
//! waits for it. A thread that finds another one sending leaves its commands in line, and the other thread sends them.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

use super::Core;
use super::sender::{Request, Turn};
use crate::Error;
use crate::backend::{Answers, BoxFuture, RemoteBackend};

/// A request that is not answered yet.
pub(super) struct InFlight {
    pub(super) request: Request,
    answers: BoxFuture<Answers>,
}

impl InFlight {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Answers, Error>> {
        self.answers.as_mut().poll(cx)
    }
}

/// The requests that were sent since the engine's thread last took them.
#[derive(Default)]
pub(super) struct Outbox {
    sent: Mutex<Vec<InFlight>>,
    /// Wakes the engine's thread when a request is answered.
    thread: OnceLock<Waker>,
}

impl Outbox {
    pub(super) fn set_thread(&self, waker: &Waker) {
        self.thread.get_or_init(|| waker.clone());
    }

    /// Sends everything that may be sent.
    pub(super) fn send_all(&self, core: &Core, backend: &dyn RemoteBackend, turn: Turn<'_>) {
        turn.send_all(|request| {
            let answers = backend.apply(request.to, &request.parts);
            let ids = request.ids();
            self.add(InFlight { request, answers });
            core.meters.sent(ids);
        });
    }

    /// Sends the request by polling it for the first time. The list is locked in the meantime, so that the engine's
    /// thread finds the request there when the answer wakes it.
    fn add(&self, mut new: InFlight) {
        let waker = self.thread.get().map_or(Waker::noop(), |waker| waker);
        let mut sent = self.sent();
        if let Poll::Ready(answers) = new.poll(&mut Context::from_waker(waker)) {
            new.answers = Box::pin(std::future::ready(answers));
            waker.wake_by_ref();
        }
        sent.push(new);
    }

    pub(super) fn take(&self) -> Vec<InFlight> {
        std::mem::take(&mut self.sent())
    }

    fn sent(&self) -> MutexGuard<'_, Vec<InFlight>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
