//! What goes on although nobody waits for it: an attempt whose caller has gone away, and the release of what was dropped.
//! A close waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::{Core, Message};
use crate::Error;
use crate::backend::Later;

#[derive(Default)]
pub(super) struct Errands {
    state: Mutex<State>,
    done: Notify,
}

#[derive(Default)]
struct State {
    under_way: usize,
    /// What went wrong, until a close says so.
    failed: Option<Error>,
}

impl Errands {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until none is under way.
    pub(super) async fn done(&self) -> Result<(), Error> {
        loop {
            let done = self.done.notified();
            {
                let mut state = self.state();
                if state.under_way == 0 {
                    return state.failed.take().map_or(Ok(()), Err);
                }
            }
            done.await;
        }
    }
}

/// Is under way until it is dropped, wherever that happens. With it the client, and so the engine's thread, stay.
pub(crate) struct Errand(Arc<Core>);

impl Errand {
    pub(crate) fn new(core: &Arc<Core>) -> Self {
        core.errands.state().under_way += 1;
        Self(core.clone())
    }

    fn failed(&self, error: Error) {
        self.0.errands.state().failed.get_or_insert(error);
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        self.0.errands.state().under_way -= 1;
        self.0.errands.done.notify_waiters();
    }
}

impl Core {
    /// Gives something back, and tries for as long as the settings say. Never blocks.
    pub(crate) fn give_back(
        self: &Arc<Self>,
        release: impl FnMut() -> Later<bool> + Send + 'static,
    ) {
        let errand = Errand::new(self);
        self.tell(Message::Run(Box::pin(async move {
            if let Err(error) = errand.0.settings.retries.persist(release).await {
                tracing::warn!(%error, "not given back: it ends with its TTL");
                errand.failed(error);
            }
        })));
    }
}

/// Whether anybody waits for an answer, and whether a store is being asked for it.
///
/// Nothing that has asked a store is broken off: nobody could tell what it has done, and the connection would be
/// suspected of not answering.
#[derive(Clone, Default)]
pub(crate) struct Wanted(Arc<Flags>);

#[derive(Default)]
struct Flags {
    gone: AtomicBool,
    asking: AtomicBool,
}

impl Wanted {
    /// Nobody waits any more.
    pub(super) fn no_more(&self) {
        self.0.gone.store(true, Ordering::Release);
    }

    pub(super) fn still(&self) -> bool {
        !self.0.gone.load(Ordering::Acquire)
    }

    /// Whether it has to go on.
    pub(super) fn goes_on(&self) -> bool {
        self.still() || self.0.asking.load(Ordering::Acquire)
    }

    /// A store is asked until that is dropped.
    pub(crate) fn asking(&self) -> Asking {
        self.0.asking.store(true, Ordering::Release);
        Asking(self.clone())
    }
}

pub(crate) struct Asking(Wanted);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.0.asking.store(false, Ordering::Release);
    }
}
