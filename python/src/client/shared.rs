//! What all objects of one client share. It opens the store at the first use, and again in a forked child.

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Poll;

use leasehold::{Client as Engine, Error};

use super::opening::Attempt;
use super::registry;
use super::settings::Settings;
use crate::ending::are_we_left_behind;
use crate::failure::Failure;
use crate::pending::{Outcome, Pending};
use crate::process::{PerProcess, generation};
use crate::wake::lock;

pub(crate) struct Shared {
    settings: Settings,
    state: Mutex<ClientState>,
}

struct ClientState {
    /// The process that the phase is about.
    generation: u32,
    phase: Phase,
    /// Stays set in a forked child.
    closed: bool,
}

enum Phase {
    Unopened,
    /// Held by the operations that wait for it.
    Opening(Weak<Attempt>),
    Open(PerProcess<Engine>),
    Closed,
}

impl Shared {
    pub(super) fn new(settings: Settings) -> Arc<Self> {
        let state = ClientState { generation: generation(), phase: Phase::Unopened, closed: false };
        let shared = Arc::new(Self { settings, state: Mutex::new(state) });
        registry::add(&shared);
        shared
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Locks the state. Only with the GIL held, so that it is never locked while the process is forked.
    fn state(&self) -> MutexGuard<'_, ClientState> {
        let mut state = lock(&self.state);
        if state.generation != generation() {
            state.generation = generation();
            state.phase = if state.closed { Phase::Closed } else { Phase::Unopened };
        }
        state
    }

    /// Returns the engine if it is open, or can be opened without waiting.
    pub(crate) fn now(&self) -> Result<Option<Engine>, Failure> {
        let mut state = self.state();
        match &state.phase {
            Phase::Open(engine) => Ok(engine.get().cloned()),
            // The first operation of the thread ends it silently.
            Phase::Closed if are_we_left_behind() => Ok(None),
            Phase::Closed => Err(Error::Closed.into()),
            Phase::Unopened if self.settings.is_memory() => {
                let engine = Engine::memory();
                state.phase = Phase::Open(PerProcess::new(engine.clone()));
                Ok(Some(engine))
            }
            Phase::Unopened | Phase::Opening(_) => Ok(None),
        }
    }

    /// Returns the engine. Opens the store if it is not open; an attempt that is under way is shared, also if it fails.
    pub(crate) async fn opened(self: &Arc<Self>) -> Result<Engine, Failure> {
        if let Some(engine) = self.now()? {
            return Ok(engine);
        }
        let attempt = self.attempt();
        let opened = std::future::poll_fn(|cx| {
            if matches!(self.state().phase, Phase::Closed) {
                return Poll::Ready(Err(Error::Closed.into()));
            }
            attempt.poll(cx)
        });
        let opened = opened.await;
        self.finish_attempt(&attempt, &opened);
        opened
    }

    /// Returns the attempt that is under way, or a new one.
    fn attempt(self: &Arc<Self>) -> Arc<Attempt> {
        let mut state = self.state();
        if let Phase::Opening(attempt) = &state.phase
            && let Some(attempt) = attempt.upgrade()
        {
            return attempt;
        }
        let shared = self.clone();
        let attempt = Attempt::new(async move { shared.settings.open().await });
        state.phase = Phase::Opening(Arc::downgrade(&attempt));
        attempt
    }

    /// Stores the result of an attempt, unless that was done before, or the client was closed in the meantime.
    fn finish_attempt(&self, attempt: &Arc<Attempt>, opened: &Result<Engine, Failure>) {
        let mut state = self.state();
        let is_current = match &state.phase {
            Phase::Opening(current) => std::ptr::eq(current.as_ptr(), Arc::as_ptr(attempt)),
            _ => false,
        };
        if !is_current {
            return;
        }
        state.phase = match opened {
            Ok(engine) => Phase::Open(PerProcess::new(engine.clone())),
            Err(_) => Phase::Unopened,
        };
    }

    /// An operation on the engine, which opens the store if need be.
    pub(crate) fn operation<F: Future<Output = Outcome> + Send + 'static>(
        self: &Arc<Self>,
        name: &'static str,
        work: impl FnOnce(Engine) -> F + Send + 'static,
    ) -> Pending {
        let shared = self.clone();
        Pending::of(name, async move { work(shared.opened().await?).await })
    }

    /// Makes new operations fail. Returns the engine that must be closed, if there is one.
    pub(super) fn begin_close(&self) -> Option<Engine> {
        let mut state = self.state();
        state.closed = true;
        if let Phase::Open(engine) = &state.phase {
            return engine.get().cloned();
        }
        let before = std::mem::replace(&mut state.phase, Phase::Closed);
        drop(state);
        if let Phase::Opening(attempt) = before
            && let Some(attempt) = attempt.upgrade()
        {
            attempt.wake();
        }
        None
    }
}
