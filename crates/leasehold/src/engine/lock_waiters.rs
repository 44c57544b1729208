//! The tasks of this client that wait for a lock. A lock is not fair, so there is no queue: the first that is notified of
//! a release and asks has it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::foreign::guarded;
use crate::name::Name;

/// The keys that are waited for, each with the number of its waiters.
#[derive(Debug, Default)]
pub(crate) struct LockWaiters {
    keys: Mutex<HashMap<Name, (Arc<Notify>, usize)>>,
}

impl LockWaiters {
    /// One more waiter, until the result is dropped.
    pub(crate) fn join(self: &Arc<Self>, key: &Name) -> LockWaiter {
        let mut keys = self.keys();
        let (notify, count) = keys.entry(key.clone()).or_default();
        *count += 1;
        LockWaiter { waiters: self.clone(), key: key.clone(), notify: notify.clone() }
    }

    /// The lock was released: one waiter is woken. Should it no longer wait, the next one is.
    pub(crate) fn wake_one(&self, key: &Name) {
        let notify = self.keys().get(key).map(|(notify, _)| notify.clone());
        if let Some(notify) = notify {
            guarded(|| notify.notify_one());
        }
    }

    /// Something has happened that concerns every waiter.
    pub(crate) fn wake_all(&self) {
        let all: Vec<_> = self.keys().values().map(|(notify, _)| notify.clone()).collect();
        for notify in all {
            guarded(|| notify.notify_waiters());
        }
    }

    /// Whether anybody waits for this key.
    pub(crate) fn any(&self, key: &Name) -> bool {
        self.keys().contains_key(key)
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<Name, (Arc<Notify>, usize)>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter.
pub(crate) struct LockWaiter {
    waiters: Arc<LockWaiters>,
    key: Name,
    notify: Arc<Notify>,
}

impl LockWaiter {
    /// Resolves at the next wake-up, counted from this call and not only from the first poll.
    pub(crate) fn woken(&self) -> impl Future<Output = ()> {
        self.notify.notified()
    }

    /// Whether another task of this client waits, too.
    pub(crate) fn in_company(&self) -> bool {
        self.waiters.keys().get(&self.key).is_some_and(|(_, count)| *count > 1)
    }
}

impl Drop for LockWaiter {
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
