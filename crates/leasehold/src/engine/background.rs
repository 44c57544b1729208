//! Background work that outlives its caller: calls whose future was dropped, and releases of guards that were dropped.
//! [`Core::close`] waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::Core;
use crate::Error;
use crate::callbacks::guarded;

#[derive(Default)]
pub(super) struct Background {
    state: Mutex<BackgroundState>,
    done: Notify,
}

#[derive(Default)]
struct BackgroundState {
    under_way: usize,
    /// An error that no caller has received. The next close reports it.
    failed: Option<Error>,
}

impl Background {
    fn state(&self) -> MutexGuard<'_, BackgroundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves when no background work is left.
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

    pub(super) fn failed(&self, error: Error) {
        self.state().failed.get_or_insert(error);
    }
}

/// Background work that lasts until this is dropped. It keeps the client and the engine's thread alive.
pub(crate) struct UnderWay(Arc<Core>);

impl UnderWay {
    pub(crate) fn new(core: &Arc<Core>) -> Self {
        core.background.state().under_way += 1;
        Self(core.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let left = {
            let mut state = self.0.background.state();
            state.under_way -= 1;
            state.under_way
        };
        if left == 0 {
            guarded(|| self.0.background.done.notify_waiters());
        }
    }
}
