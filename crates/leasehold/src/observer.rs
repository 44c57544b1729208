//! Observers, which are notified of each operation and cannot make it fail.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::watch::{Callback, EventResult, Id, ObservedEvent, Operation};
use crate::{AcquisitionId, LockEvent};

/// A function that is called with every event of the locks, the semaphore or the pool that it observes: see
/// [`Locks::observed`](crate::Locks::observed), [`SemaphoreBuilder::observer`](crate::SemaphoreBuilder::observer) and
/// [`PoolBuilder::observer`](crate::PoolBuilder::observer).
///
/// The function runs on the thread that performs the operation, so keep it short. If it panics, the panic is caught and
/// logged. An operation never fails because of its observer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Observer, SemaphoreEvent};
/// use std::sync::{Arc, Mutex};
///
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let list = seen.clone();
/// let observer = Observer::new(move |event: &SemaphoreEvent| list.lock().unwrap().push(event.operation));
/// let api = Client::memory().semaphore("api", 5).observer(observer).build()?;
/// drop(api.acquire().await?);
///
/// use leasehold::SemaphoreOperation::{Acquire, Release};
/// assert_eq!(*seen.lock().unwrap(), [Acquire, Release]);
/// # Ok(())
/// # }
/// ```
pub struct Observer<E = LockEvent> {
    function: Arc<dyn Fn(&E) + Send + Sync>,
    pub(crate) raw: bool,
}

impl<E> Observer<E> {
    /// Creates an observer that calls this function.
    pub fn new(function: impl Fn(&E) + Send + Sync + 'static) -> Self {
        Self { function: Arc::new(function), raw: false }
    }

    /// Calls the function, which may panic.
    pub(crate) fn notify(&self, event: &E) {
        (self.function)(event);
    }
}

impl Observer<LockEvent> {
    /// Also passes the raw keys and lock ids to the function. They may be secrets.
    #[must_use]
    pub fn include_raw(self) -> Self {
        Self { raw: true, ..self }
    }
}

impl<E> Clone for Observer<E> {
    fn clone(&self) -> Self {
        Self { function: self.function.clone(), raw: self.raw }
    }
}

impl<E> fmt::Debug for Observer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("raw", &self.raw).finish_non_exhaustive()
    }
}

/// The operation that a [`SemaphoreEvent`] reports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum SemaphoreOperation {
    /// An acquire has ended.
    Acquire,
    /// A permit was released: its guard was released or dropped. The store may not have confirmed it yet.
    Release,
    /// A permit was lost.
    Lose,
}

/// An event of one acquisition of a semaphore.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SemaphoreEvent {
    /// The operation.
    pub operation: SemaphoreOperation,
    /// The result of the operation.
    pub result: EventResult,
    /// The name of the semaphore, not hashed.
    pub name: String,
    /// The id of the acquisition, not hashed. [`Semaphore::release`](crate::Semaphore::release) releases the permit by
    /// it.
    pub id: AcquisitionId,
    /// How long the acquire took; `None` for other operations.
    pub waited: Option<Duration>,
    /// How long a permit was held before it was released or lost. `None` if it was lost before its acquire returned.
    pub held_for: Option<Duration>,
}

/// An event of one lease of a pool.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolEvent {
    /// The operation.
    pub operation: Operation,
    /// The result of the operation.
    pub result: EventResult,
    /// The name of the pool, not hashed.
    pub name: String,
    /// The instance id, not hashed.
    pub instance_id: String,
    /// How long the acquire took; `None` for other operations.
    pub waited: Option<Duration>,
    /// How long a lease with a guard was held before it was released or lost.
    pub held_for: Option<Duration>,
}

impl Observer<SemaphoreEvent> {
    pub(crate) fn into_callback(self) -> Callback {
        Box::new(move |event: &ObservedEvent<'_>| {
            let ObservedEvent { operation, ref result, name, id, waited, held_for } = *event;
            let result = result.clone();
            let operation = match operation {
                Operation::Acquire => SemaphoreOperation::Acquire,
                Operation::Release => SemaphoreOperation::Release,
                Operation::Lose => SemaphoreOperation::Lose,
                // Renewals of permits are internal to the client.
                Operation::Renew => return,
            };
            let Id::Permit(id) = *id else { return };
            let name = name.to_string();
            self.notify(&SemaphoreEvent { operation, result, name, id, waited, held_for });
        })
    }
}

impl Observer<PoolEvent> {
    pub(crate) fn into_callback(self) -> Callback {
        Box::new(move |event: &ObservedEvent<'_>| {
            let ObservedEvent { operation, ref result, name, id, waited, held_for } = *event;
            let result = result.clone();
            let Id::Instance(id) = id else { return };
            let (name, instance_id) = (name.to_string(), id.to_string());
            self.notify(&PoolEvent { operation, result, name, instance_id, waited, held_for });
        })
    }
}
