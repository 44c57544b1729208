//! Requests on their way. Any thread may send one; the engine's thread applies the answers.
//!
//! Sending from the thread that asks saves waking the engine's thread, which is half of what an uncontended acquire
//! waits for. One thread at a time sends, so that a request cannot overtake another. Nobody waits for its turn: a thread
//! that finds another one sending leaves its commands in line, and the other one looks again when it is done.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};

use super::sender::{Request, Sender};
use crate::Error;
use crate::backend::{Answers, Later, RemoteBackend};
use crate::clock::Moment;

/// A request that is not answered yet.
pub(super) struct InFlight {
    pub(super) request: Request,
    answers: Later<Answers>,
}

impl InFlight {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Answers, Error>> {
        self.answers.as_mut().poll(cx)
    }
}

/// The requests that were sent since the engine's thread last looked.
#[derive(Default)]
pub(super) struct Outbox {
    sending: Mutex<()>,
    sent: Mutex<Vec<InFlight>>,
    /// Wakes the engine's thread when a request is answered.
    thread: OnceLock<Waker>,
}

impl Outbox {
    pub(super) fn set_thread(&self, waker: &Waker) {
        self.thread.get_or_init(|| waker.clone());
    }

    /// Sends whatever may be sent. True if that was anything.
    pub(super) fn send_all(&self, sender: &Sender, backend: &dyn RemoteBackend) -> bool {
        let mut any = false;
        // Once more after its turn: another thread may have found it taken.
        while sender.can_send(Moment::now()) {
            let _turn = match self.sending.try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
                Err(TryLockError::WouldBlock) => return any,
            };
            while let Some(request) = sender.next_request(Moment::now()) {
                let answers = backend.apply(request.to, &request.parts);
                self.add(InFlight { request, answers });
                any = true;
            }
        }
        any
    }

    /// The first poll sends it. The list is locked meanwhile, so that the thread, which the answer wakes, finds it there.
    fn add(&self, mut own: InFlight) {
        let waker = self.thread.get().map_or(Waker::noop(), |waker| waker);
        let mut sent = self.sent();
        if let Poll::Ready(answers) = own.poll(&mut Context::from_waker(waker)) {
            own.answers = Box::pin(std::future::ready(answers));
            waker.wake_by_ref();
        }
        sent.push(own);
    }

    pub(super) fn take(&self) -> Vec<InFlight> {
        std::mem::take(&mut self.sent())
    }

    fn sent(&self) -> MutexGuard<'_, Vec<InFlight>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
