//! The tasks of this client that wait for a lock. Locks are not fair, so there is no queue: after a release, the first
//! task that asks gets the lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::callbacks::guarded;
use crate::name::Name;

/// The keys that tasks wait for, each with the number of its waiters.
#[derive(Debug, Default)]
pub(crate) struct LockWaiters {
    keys: Mutex<HashMap<Name, (Arc<Notify>, usize)>>,
}

impl LockWaiters {
    /// Adds a waiter, until the returned value is dropped.
    pub(crate) fn join(self: &Arc<Self>, key: &Name) -> LockWaiter {
        let mut keys = self.keys();
        let (notify, count) = keys.entry(key.clone()).or_default();
        *count += 1;
        let (waiters, key, notify) = (self.clone(), key.clone(), notify.clone());
        LockWaiter { waiters, key, notify, was_woken: false }
    }

    /// Wakes one waiter, because the lock was released. If that one no longer waits, the next one is woken.
    pub(crate) fn wake_one(&self, key: &Name) {
        let notify = self.keys().get(key).map(|(notify, _)| notify.clone());
        if let Some(notify) = notify {
            guarded(|| notify.notify_one());
        }
    }

    /// Wakes every waiter.
    pub(crate) fn wake_all(&self) {
        let all: Vec<_> = self.keys().values().map(|(notify, _)| notify.clone()).collect();
        for notify in all {
            guarded(|| notify.notify_waiters());
        }
    }

    /// Whether any task waits for this key.
    pub(crate) fn any(&self, key: &Name) -> bool {
        self.keys().contains_key(key)
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<Name, (Arc<Notify>, usize)>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One task that waits for a lock.
pub(crate) struct LockWaiter {
    waiters: Arc<LockWaiters>,
    key: Name,
    /// Notified when this waiter is woken.
    pub(crate) notify: Arc<Notify>,
    /// Whether this waiter was woken and the store has not answered its next attempt. If it is dropped now, the next
    /// waiter is woken.
    pub(crate) was_woken: bool,
}

impl LockWaiter {
    /// Whether another task of this client waits for the same key.
    pub(crate) fn in_company(&self) -> bool {
        self.waiters.keys().get(&self.key).is_some_and(|(_, count)| *count > 1)
    }
}

impl Drop for LockWaiter {
    fn drop(&mut self) {
        if self.was_woken {
            self.waiters.wake_one(&self.key);
        }
        let mut keys = self.waiters.keys();
        if let Some((_, count)) = keys.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                keys.remove(&self.key);
            }
        }
    }
}
