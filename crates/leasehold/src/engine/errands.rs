//! What goes on although nobody waits for it: an attempt whose caller has gone away, and the release of what was dropped.
//! A close waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

use super::{Core, Message};
use crate::Error;
use crate::backend::{Backend, Later};

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

    /// Lets an attempt run to its end, also if nobody waits for that any more. Only on the engine's thread.
    pub(crate) async fn to_its_end<T: Send + 'static>(
        &self,
        attempt: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        match &self.backend {
            // It answers at once.
            Backend::Memory(_) => attempt.await,
            Backend::Away(_) => tokio::spawn(attempt).await.unwrap_or_else(|error| {
                Err(Error::internal(format!("an attempt broke off: {error}")))
            }),
        }
    }
}

/// Somebody waits for an answer for as long as this lives.
#[derive(Default)]
pub(crate) struct Interest(Arc<()>);

/// What whoever asks knows of that.
pub(crate) struct Wanted(Weak<()>);

impl Interest {
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted(Arc::downgrade(&self.0))
    }
}

impl Wanted {
    pub(super) fn still(&self) -> bool {
        self.0.strong_count() > 0
    }
}
