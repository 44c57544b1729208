//! The lease of one instance id of a pool: what is sent, and what the store has answered.
//!
//! The store knows a lease only by its instance id. So all guards of this client with the same instance id share one
//! lease, and one client core. The core releases the lease with the last of its acquisitions. It withdraws a release
//! that is not in flight when another acquire begins, so no release ends the lease of a task that came later.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Core;
use super::deferred::Deferred;
use super::driver::{Driver, Protocol};
use super::sender::TakenPart;
use crate::backend::{Answer, Part};
use crate::client_core::Rules;
use crate::clock::{Moment, Span};
use crate::machine::pool::{PoolAction, PoolCommand, PoolOutcome, Status};
use crate::machine::{Command, Declared, Held, Outcome, Reply, Role, Subject, Terms};
use crate::name::Name;
use crate::{Error, Fence};

/// A third of the shortest lease that is common. Another program that shares the pool judges our leases by its own
/// setting: for one such program (osparc) the default is 10 s.
const LONGEST_INTERVAL: Span = Span::from_millis(3300);

/// The lease of one instance id.
pub(crate) type PoolInstance = Driver<PoolProtocol>;

/// A pool and an instance id.
type Key = (Name, Name);

/// The instance ids in use.
#[derive(Clone, Default)]
pub(crate) struct PoolInstances(Arc<Mutex<HashMap<Key, Weak<PoolInstance>>>>);

impl PoolInstances {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Weak<PoolInstance>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct PoolProtocol {
    key: Key,
    all: PoolInstances,
    /// The capacity that the newest acquire asks for.
    capacity: AtomicU32,
    /// The lease in the last request, in microseconds.
    ttl: AtomicU64,
    /// The number of members when an acquire was last refused.
    members: AtomicU64,
}

impl PoolProtocol {
    pub(crate) fn instance(&self) -> &Name {
        &self.key.1
    }

    pub(crate) fn members(&self) -> u64 {
        self.members.load(Ordering::Acquire)
    }
}

impl Drop for PoolProtocol {
    fn drop(&mut self) {
        let mut instances = self.all.lock();
        // The id may be in use again, with another entry.
        if instances.get(&self.key).is_some_and(|instance| instance.strong_count() == 0) {
            instances.remove(&self.key);
        }
    }
}

impl Core {
    /// Returns the lease of an instance id. `capacity` is that of its next acquire.
    pub(crate) fn pool_instance(
        self: &Arc<Self>,
        pool: &Name,
        instance: &Name,
        capacity: u32,
    ) -> Result<Arc<PoolInstance>, Error> {
        let (all, key) = (self.pool_instances.clone(), (pool.clone(), instance.clone()));
        let mut instances = self.pool_instances.lock();
        if let Some(instance) = instances.get(&key).and_then(Weak::upgrade) {
            instance.protocol.capacity.store(capacity, Ordering::Release);
            return Ok(instance);
        }
        let capacity = AtomicU32::new(capacity);
        let (ttl, members) = (AtomicU64::new(0), AtomicU64::new(0));
        let lease = Driver::new(
            PoolProtocol { key: key.clone(), all, capacity, ttl, members },
            self.clone(),
        );
        instances.insert(key, Arc::downgrade(&lease));
        drop(instances);
        self.add_lease(&lease)?;
        Ok(lease)
    }
}

impl Core {
    /// Notifies the guards of an instance id that this client has released, in a request that was sent at `sent`.
    pub(crate) fn instance_released(&self, pool: &Name, instance: &Name, sent: Moment) {
        let key = (pool.clone(), instance.clone());
        let guarded = self.pool_instances.lock().get(&key).and_then(Weak::upgrade);
        if let Some(guarded) = guarded {
            guarded.released_by_id(sent);
        }
    }
}

impl Protocol for PoolProtocol {
    const MOST_COMMANDS: usize = 1;

    fn subject(&self) -> Subject<'_> {
        Subject::Pool(&self.key.0)
    }

    fn rules(&self, core: &Core) -> Rules {
        let margin = core.profile().margin_of_leases();
        let longest_interval = LONGEST_INTERVAL.duration();
        // Another program counts the leases of all instances by one setting, so a lease is never shorter.
        let ends_with_ttl = false;
        Rules { is_one_lease: true, ends_with_ttl, spreads: false, longest_interval, margin }
    }

    fn declared(&self) -> Declared {
        Declared::capacity(self.capacity.load(Ordering::Acquire), false)
    }

    fn part(&self, declared: Declared, mut commands: Vec<Command>, _now: Moment) -> TakenPart {
        let (pool, instance) = self.key.clone();
        let action = match commands.first() {
            Some(Command::Enqueue { terms, .. }) => {
                self.set_ttl(*terms);
                PoolAction::Acquire { instance, capacity: declared.capacity }
            }
            Some(Command::Renew { terms, .. }) => {
                self.set_ttl(*terms);
                PoolAction::Renew { instance }
            }
            _ => PoolAction::Release { instance },
        };
        let ttl = Span::from_micros(self.ttl.load(Ordering::Acquire));
        (Part::Pool(PoolCommand { pool, ttl, action }), commands.pop())
    }

    fn reply(&self, part: &Part, answer: Answer, _deferred: &mut Deferred) -> Result<Reply, Error> {
        let (Part::Pool(command), Answer::Pool(PoolOutcome { status, current, .. })) =
            (part, answer)
        else {
            return Err(Error::internal("unexpected answer to a command for a pool"));
        };
        let outcome = match (&command.action, status) {
            (_, Status::Acquired | Status::Renewed) => {
                // Pool leases have no fences.
                let (slot_number, fence) = (None, Fence::new(1));
                Outcome::Held(Held { slot_number, fence, valid_for: Some(command.ttl) })
            }
            (_, Status::CapacityFull) => {
                self.members.store(current, Ordering::Release);
                Outcome::Full
            }
            (PoolAction::Release { .. }, Status::Released) => Outcome::Removed(Role::Holder),
            (PoolAction::Release { .. }, _) => Outcome::Removed(Role::Nobody),
            _ => Outcome::Gone,
        };
        Ok(Reply { outcomes: vec![outcome], ..Reply::default() })
    }
}

impl PoolProtocol {
    fn set_ttl(&self, terms: Terms) {
        self.ttl.store(terms.lease.map_or(0, Span::micros), Ordering::Release);
    }
}
