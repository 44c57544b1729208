//! Who waits for a lock in this client. A lock is not fair, so that there is no queue: whoever is told first that it
//! came free, and asks first, has it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use crate::name::Name;

/// The keys that somebody waits for, each with how many do.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    keys: Mutex<FxHashMap<Name, (Arc<Notify>, usize)>>,
}

impl Waiters {
    /// One more, until the answer is dropped.
    pub(crate) fn join(self: &Arc<Self>, key: &Name) -> Waiting {
        let mut keys = self.keys();
        let (notify, count) = keys.entry(key.clone()).or_default();
        *count += 1;
        Waiting { waiters: self.clone(), key: key.clone(), notify: notify.clone() }
    }

    /// The lock came free: one of them is told, and passes it on should it no longer care.
    pub(crate) fn wake_one(&self, key: &Name) {
        let notify = self.keys().get(key).map(|(notify, _)| notify.clone());
        if let Some(notify) = notify {
            notify.notify_one();
        }
    }

    /// Something has happened that all of them have to know.
    pub(crate) fn wake_all(&self) {
        for (notify, _) in self.keys().values() {
            notify.notify_waiters();
        }
    }

    /// Whether anybody waits for it.
    pub(crate) fn any(&self, key: &Name) -> bool {
        self.keys().contains_key(key)
    }

    fn keys(&self) -> MutexGuard<'_, FxHashMap<Name, (Arc<Notify>, usize)>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who waits.
pub(crate) struct Waiting {
    waiters: Arc<Waiters>,
    key: Name,
    notify: Arc<Notify>,
}

impl Waiting {
    /// Told of what happens from this call on, not only from the first poll.
    pub(crate) fn woken(&self) -> impl Future<Output = ()> {
        self.notify.notified()
    }

    /// Whether somebody else of this client waits, too.
    pub(crate) fn in_company(&self) -> bool {
        self.waiters.keys().get(&self.key).is_some_and(|(_, count)| *count > 1)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut keys = self.waiters.keys();
        if let Some((_, count)) = keys.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                keys.remove(&self.key);
            }
        }
    }
}
