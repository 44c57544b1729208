//! Observers, which receive an event for each operation and cannot make it fail.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::{Error, LossReason, Primitive};

/// A function that is called with every event of what it observes.
///
/// Set it on the builder of a semaphore, a lock or a pool: see
/// [`SemaphoreBuilder::observer`](crate::SemaphoreBuilder::observer). [`Locks::observer`](crate::Locks::observer)
/// observes the calls by key and by lock id.
///
/// The function runs on the thread that performs the operation, so keep it short. If it panics, the panic is caught and
/// logged. An operation never fails because of its observer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Observer};
/// use std::sync::{Arc, Mutex};
///
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let list = seen.clone();
/// let observer = Observer::new(move |event| list.lock().unwrap().push(event.operation));
/// let api = Client::memory().semaphore("api", 5).observer(observer).build()?;
/// drop(api.acquire().await?);
///
/// use leasehold::Operation::{Acquire, Release};
/// assert_eq!(*seen.lock().unwrap(), [Acquire, Release]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Observer {
    function: Arc<dyn Fn(&Event) + Send + Sync>,
    raw: bool,
}

impl Observer {
    /// Creates an observer that calls this function.
    pub fn new(function: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        Self { function: Arc::new(function), raw: false }
    }

    /// Puts the keys and lock ids of locks into the events, and not their hashes.
    ///
    /// A key may be a secret, and anybody who knows a lock id can release the lock. So do not log such events.
    #[must_use]
    pub fn include_raw(self) -> Self {
        Self { raw: true, ..self }
    }

    /// Returns whether the events of this kind of object contain names and ids, or only hashes.
    pub(crate) fn is_raw(&self, primitive: Primitive) -> bool {
        self.raw || primitive != Primitive::Lock
    }

    /// Calls the function, which may panic.
    pub(crate) fn notify(&self, event: &Event) {
        (self.function)(event);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("raw", &self.raw).finish_non_exhaustive()
    }
}

/// The end of one operation on a semaphore, a lock or a pool.
///
/// A lock's key and lock id may be secrets. So an event of a lock contains a part of their hashes, 24 hexadecimal
/// digits each, and its errors do not contain the key, unless the observer was made with
/// [`include_raw`](Observer::include_raw). The names and ids of semaphores and pools are never hashed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Event {
    /// The kind of object.
    pub primitive: Primitive,
    /// The operation.
    pub operation: Operation,
    /// How the operation ended.
    pub outcome: Outcome,
    /// The name of the semaphore or pool, or the key of the lock; `None` for a call by lock id.
    pub name: Option<String>,
    /// The acquisition id, the lock id, or the instance id of a pool; `None` for a lookup by key.
    pub id: Option<String>,
    /// How long the acquire took; `None` for other operations.
    pub waited: Option<Duration>,
    /// How long it was held before its guard was released or lost.
    ///
    /// `None` for other operations, for a release by id, and if it was lost before its acquire returned.
    pub held_for: Option<Duration>,
}

/// The operation that an [`Event`] reports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operation {
    /// An acquire has ended, however often it retried.
    Acquire,
    /// A renewal has ended: one in the background, or a call that extends the lease.
    Renew,
    /// A permit, lock or pool lease was released, by its guard or by its id.
    ///
    /// The store may not have confirmed the release of a guard yet.
    Release,
    /// A guard has lost its permit, lock or pool lease.
    Lose,
    /// A lock was looked up.
    Lookup,
}

/// How an operation ended: see [`Event::outcome`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The operation succeeded.
    ///
    /// A lookup has found a held lock.
    Done,
    /// An acquire that does not wait found nothing free.
    Full,
    /// What was to be renewed, released or looked up is not held.
    NotHeld,
    /// The acquire was cancelled: its future was dropped, or its wait was ended by its id.
    Cancelled,
    /// The permit, lock or pool lease was lost.
    ///
    /// A renewal or release by id ends with [`LossReason::LeaseEnded`] if it finds an expired lease.
    Lost(LossReason),
    /// The operation failed with this error.
    Failed(Error),
}

impl Outcome {
    /// Returns the outcome of a renewal or a release. `Ok(true)` means that the lease was still held.
    pub(crate) fn of(result: Result<bool, &Error>) -> Self {
        match result {
            Ok(true) => Self::Done,
            Ok(false) => Self::NotHeld,
            Err(error) => Self::Failed(error.clone()),
        }
    }
}
