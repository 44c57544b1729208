//! Serialises what this client does with one instance id of one pool.
//!
//! The store knows a lease only by its instance id. Suppose one task of this client releases an id (a dropped guard, an
//! abandoned attempt or a repeated release) while another task has acquired it again meanwhile. The release would then
//! end the other task's lease. So all tasks that share an id share its lease, and it is released with the last of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::name::Name;

/// A pool and an instance id.
type Key = (Name, Name);

/// The instance ids in use, each with the tasks of this client that share its lease.
#[derive(Default)]
pub(crate) struct SharedInstances(Arc<Mutex<HashMap<Key, Weak<SharedInstance>>>>);

pub(crate) struct SharedInstance {
    key: Key,
    /// The number of tasks that share the lease. A task holds this lock while it asks the store to change the lease.
    users: tokio::sync::Mutex<usize>,
    all: Arc<Mutex<HashMap<Key, Weak<Self>>>>,
}

impl SharedInstances {
    pub(crate) fn get(&self, pool: &Name, instance: &Name) -> Arc<SharedInstance> {
        let key = (pool.clone(), instance.clone());
        let mut instances = lock(&self.0);
        if let Some(instance) = instances.get(&key).and_then(Weak::upgrade) {
            return instance;
        }
        let (users, all) = (tokio::sync::Mutex::new(0), self.0.clone());
        let instance = Arc::new(SharedInstance { key: key.clone(), users, all });
        instances.insert(key, Arc::downgrade(&instance));
        instance
    }
}

impl Drop for SharedInstance {
    fn drop(&mut self) {
        let mut instances = lock(&self.all);
        // The id may be in use again, with another entry.
        if instances.get(&self.key).is_some_and(|instance| instance.strong_count() == 0) {
            instances.remove(&self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One user of an instance id: an attempt, and the guard that results from it.
pub(crate) struct InstanceUser {
    instance: Arc<SharedInstance>,
    over: AtomicBool,
}

/// The exclusive right to ask the store about an instance id.
pub(crate) struct Turn<'a> {
    users: tokio::sync::MutexGuard<'a, usize>,
    over: &'a AtomicBool,
    /// Whether this is an attempt that has not ended yet. It shares the lease only if it succeeds.
    attempt: bool,
}

impl InstanceUser {
    /// Creates a user that does not share the lease yet: see [`Turn::begin`].
    pub(crate) fn of(instance: Arc<SharedInstance>) -> Self {
        Self { instance, over: AtomicBool::new(true) }
    }

    pub(crate) async fn turn(&self) -> Turn<'_> {
        Turn { users: self.instance.users.lock().await, over: &self.over, attempt: false }
    }
}

impl Turn<'_> {
    /// Begins an attempt, which ends with this turn unless it succeeds.
    pub(crate) fn begin(&mut self) {
        self.attempt = true;
        *self.users += usize::from(self.over.swap(false, Ordering::AcqRel));
    }

    pub(crate) fn succeed(mut self) {
        self.attempt = false;
    }

    /// Stops sharing the lease. Repeating it is harmless. Returns whether no task shares the lease any more.
    pub(crate) fn end(&mut self) -> bool {
        *self.users -= usize::from(!self.over.swap(true, Ordering::AcqRel));
        *self.users == 0
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.attempt {
            self.end();
        }
    }
}
