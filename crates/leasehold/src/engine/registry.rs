//! The semaphore names, locks and pool instances that this client uses.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;

use super::Core;
use super::driver::{Driver, Protocol};
use super::name_state::NameState;
use super::thread::Message;
use crate::backend::Destination;
use crate::clock::{Moment, Span};
use crate::name::Name;
use crate::{Error, LockId};

/// A name, or the lease of a lock or a pool instance, that learns what happens to the client and its connections.
pub(crate) trait Listener: Send + Sync {
    /// Ends everything that waits or holds, because the client is being closed.
    fn close(&self);

    /// Fails every wait with this error, because the engine's thread has stopped.
    fn stop(&self, error: &Error);

    /// Called when this client has released a lock by its id, in a request that was sent at `sent`.
    fn lock_released(&self, _id: LockId, _sent: Moment) {}

    /// Called when the connection to this destination is new, so that answers and wake-ups may have been missed.
    /// `other` says whether the server may be another one than before.
    fn reconnected(&self, _to: Destination, _other: bool) {}

    /// Called when another destination may serve the name.
    fn rerouted(&self) {}

    /// Called when this destination refuses all requests, and waiting does not help.
    fn refused(&self, _from: Destination, _error: &Error) {}
}

#[derive(Default)]
pub(crate) struct Registry {
    names: Mutex<Names>,
    leases: Mutex<Leases>,
}

/// The names in use, each with the moment since which it has been unused.
type Names = HashMap<Name, (Arc<dyn NameState>, Option<Moment>)>;

/// The drivers of locks and pool instances, each by its address. Their guards keep them alive.
type Leases = FxHashMap<usize, Weak<dyn Listener>>;

impl Registry {
    fn lock_names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state of this name, if this client uses it.
    pub(super) fn find(&self, name: &Name) -> Option<Arc<dyn NameState>> {
        self.lock_names().get(name).map(|(named, _)| named.clone())
    }

    /// Returns every name that is in use, or was in use recently.
    pub(crate) fn names(&self) -> Vec<Arc<dyn NameState>> {
        self.lock_names().values().map(|(named, _)| named.clone()).collect()
    }

    /// Returns everything in use: names first, then leases.
    pub(super) fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        let names = self.names().into_iter().map(|named| named as Arc<dyn Listener>);
        let leases = self.lock_leases();
        names.chain(leases.values().filter_map(Weak::upgrade)).collect()
    }

    /// Runs `close` while no name can be added. Names that are added later see its effect.
    pub(super) fn refuse_new(&self, close: impl FnOnce()) {
        let names = self.lock_names();
        close();
        drop(names);
    }

    /// Removes the names that have been unused for `idle`. Returns whether any name is left.
    pub(super) fn remove_unused(&self, idle: Span, now: Moment) -> bool {
        let mut names = self.lock_names();
        names.retain(|_, (named, unused_since)| {
            // Nobody can begin to use the name while the lock is held.
            let unused = Arc::strong_count(named) == 1 && named.is_idle();
            let since = *unused_since.get_or_insert(now);
            if !unused {
                *unused_since = None;
            }
            !unused || now < since + idle
        });
        !names.is_empty()
    }

    pub(super) fn has_names(&self) -> bool {
        !self.lock_names().is_empty()
    }

    /// Forgets all names, because the client no longer exists.
    pub(super) fn abandon_names(&self) {
        // Taken out of the lock first, because dropping a name may run the user's code.
        let names = std::mem::take(&mut *self.lock_names());
        for (named, _) in names.into_values() {
            named.abandon();
        }
    }
}

impl Core {
    /// Returns the state of this name, and creates it if necessary.
    pub(crate) fn named(&self, name: &Name) -> Result<Arc<dyn NameState>, Error> {
        let mut names = self.registry.lock_names();
        self.check_open()?;
        if let Some((named, unused_since)) = names.get_mut(name) {
            *unused_since = None;
            return Ok(named.clone());
        }
        let this = self.this.upgrade().ok_or(Error::Closed)?;
        let new = self.store.open(name.clone(), this);
        names.insert(name.clone(), (new.clone(), None));
        let is_first = names.len() == 1;
        drop(names);
        if is_first && !self.clock.is_manual() {
            // The thread removes names that are no longer used. Without a thread, they stay.
            let _ = self.send_message(Message::WakeUp);
        }
        Ok(new)
    }

    /// Registers the lease of a lock or of a pool instance, until it is dropped. Fails if the client is closed.
    pub(crate) fn add_lease<P: Protocol>(&self, lease: &Arc<Driver<P>>) -> Result<(), Error> {
        let weak = Arc::downgrade(lease) as Weak<dyn Listener>;
        self.registry.lock_leases().insert(Arc::as_ptr(lease) as usize, weak);
        // After the insertion: a close that begins now finds this lease.
        self.check_open()
    }

    /// Notifies the guard of a lock that this client has released by its id, in a request that was sent at `sent`.
    pub(crate) fn lock_released(&self, id: LockId, sent: Moment) {
        let leases: Vec<_> =
            self.registry.lock_leases().values().filter_map(Weak::upgrade).collect();
        for lease in leases {
            lease.lock_released(id, sent);
        }
    }

    /// Called when a driver is dropped.
    pub(super) fn remove_lease<P: Protocol>(&self, lease: &Driver<P>) {
        self.registry.lock_leases().remove(&(std::ptr::from_ref(lease) as usize));
    }
}
