//! Permits, locks and pool leases that are held, as Python sees them.

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use leasehold::{
    Guard, LockGuard as EngineGuard, LossReason, Lost, Permit as EnginePermit,
    PoolLease as EngineLease, Primitive,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::failure::{Failure, INHERITED, reason};
use crate::lock::DeclaredLock;
use crate::pending::{BoxFuture, Pending, Value};
use crate::pool::DeclaredPool;
use crate::process::PerProcess;
use crate::seconds::Seconds;
use crate::semaphore::DeclaredSemaphore;
use crate::values;
use crate::wake::lock;
use crate::watch::Watch;

/// A permit, lock or pool lease of the engine, with the declaration that it was acquired by.
pub(crate) enum Grant {
    Permit(EnginePermit, Arc<DeclaredSemaphore>),
    /// Shared with an extension that is under way.
    Lock(Arc<EngineGuard>, Arc<DeclaredLock>),
    Lease(EngineLease, Arc<DeclaredPool>),
}

impl Grant {
    fn engine(&self) -> &dyn Guard {
        match self {
            Self::Permit(permit, _) => permit,
            Self::Lock(guard, _) => &**guard,
            Self::Lease(lease, _) => lease,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Failure> {
        Ok(self.engine().check()?)
    }

    pub(crate) fn lost(&self) -> Lost {
        self.engine().lost()
    }

    /// Resolves to whether it was held. The release continues if the future is dropped.
    pub(crate) fn release(self) -> BoxFuture {
        // The declaration keeps the client until then.
        match self {
            Self::Permit(permit, declared) => Box::pin(async move {
                let released = permit.release().await?;
                drop(declared);
                Ok(Value::Bool(released))
            }),
            Self::Lock(guard, declared) => Box::pin(async move {
                let released = match Arc::try_unwrap(guard) {
                    Ok(guard) => guard.release().await?,
                    // It is being extended. The extension drops the guard, which holds nothing by then.
                    Err(guard) => {
                        declared.client().opened().await?.locks().release(&guard.id()).await?
                    }
                };
                drop(declared);
                Ok(Value::Bool(released))
            }),
            Self::Lease(lease, declared) => Box::pin(async move {
                let released = lease.release().await?;
                drop(declared);
                Ok(Value::Bool(released))
            }),
        }
    }

    pub(crate) fn into_py(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match self.guard(py)? {
            GuardObject::Permit(permit) => permit.into_any(),
            GuardObject::Lock(guard) => guard.into_any(),
            GuardObject::Lease(lease) => lease.into_any(),
        })
    }

    /// The Python object that holds it.
    pub(crate) fn guard(self, py: Python<'_>) -> PyResult<GuardObject> {
        Ok(match self {
            Self::Permit(permit, declared) => {
                GuardObject::Permit(Py::new(py, Permit::new(permit, declared))?)
            }
            Self::Lock(guard, declared) => {
                GuardObject::Lock(Py::new(py, LockGuard::new(guard, declared))?)
            }
            Self::Lease(lease, declared) => {
                GuardObject::Lease(Py::new(py, PoolLease::new(lease, declared))?)
            }
        })
    }
}

/// The Python object of a permit, lock or pool lease.
pub(crate) enum GuardObject {
    Permit(Py<Permit>),
    Lock(Py<LockGuard>),
    Lease(Py<PoolLease>),
}

impl GuardObject {
    pub(crate) fn slot(&self) -> &Slot {
        match self {
            Self::Permit(permit) => &permit.get().slot,
            Self::Lock(guard) => &guard.get().slot,
            Self::Lease(lease) => &lease.get().slot,
        }
    }

    pub(crate) fn object(&self, py: Python<'_>) -> Py<PyAny> {
        match self {
            Self::Permit(permit) => permit.clone_ref(py).into_any(),
            Self::Lock(guard) => guard.clone_ref(py).into_any(),
            Self::Lease(lease) => lease.clone_ref(py).into_any(),
        }
    }

    /// The error of a block that has lost this, and has released or detached it since.
    pub(crate) fn lost(&self, reason: LossReason) -> Failure {
        let (primitive, name, id) = match self {
            Self::Permit(permit) => {
                let permit = permit.get();
                (Primitive::Semaphore, permit.declared.name(), permit.id.to_string())
            }
            // A lock id releases the lock, so no error contains it.
            Self::Lock(guard) => (Primitive::Lock, guard.get().declared.name(), String::new()),
            Self::Lease(lease) => {
                let lease = lease.get();
                (Primitive::Pool, lease.declared.name(), lease.instance_id.clone())
            }
        };
        Failure::Lost { primitive, name: name.to_owned(), id, reason }
    }
}

/// The permit, lock or pool lease of a Python object, until it is released or detached.
pub(crate) struct Slot {
    grant: Mutex<Option<PerProcess<Grant>>>,
    /// Cancels the body of a block when this is lost.
    watch: OnceLock<Weak<Watch>>,
}

impl Slot {
    fn new(grant: Grant) -> Self {
        Self { grant: Mutex::new(Some(PerProcess::new(grant))), watch: OnceLock::new() }
    }

    pub(crate) fn watched_by(&self, watch: &Arc<Watch>) {
        let _ = self.watch.set(Arc::downgrade(watch));
    }

    /// Calls `read` with it; None if it was released or detached.
    pub(crate) fn with<T>(&self, read: impl FnOnce(&Grant) -> T) -> Result<Option<T>, Failure> {
        match &*lock(&self.grant) {
            None => Ok(None),
            Some(grant) => grant.get().map(read).map(Some).ok_or(INHERITED),
        }
    }

    /// None if it was released or detached.
    pub(crate) fn take(&self) -> Result<Option<Grant>, Failure> {
        let mut slot = lock(&self.grant);
        if slot.as_ref().is_some_and(|grant| !grant.is_ours()) {
            return Err(INHERITED);
        }
        let grant = slot.take().and_then(PerProcess::take);
        drop(slot);
        // A release by the holder is not a loss.
        if let Some(watch) = self.watch.get().and_then(Weak::upgrade) {
            watch.stop();
        }
        Ok(grant)
    }

    fn check(&self, primitive: Primitive, name: &str) -> Result<(), Failure> {
        match self.with(Grant::check)? {
            Some(checked) => checked,
            None => Err(released(primitive, name)),
        }
    }

    fn lost(&self, name: &'static str) -> Result<Pending, Failure> {
        let lost = self.with(Grant::lost)?;
        Ok(Pending::of(name, async move {
            Ok(Value::Text(match lost {
                Some(lost) => reason(lost.await),
                None => "released",
            }))
        }))
    }

    /// Returns for how many seconds it stays valid without another renewal; None if it does not expire.
    fn valid_for(&self) -> Result<Option<f64>, Failure> {
        let valid_until = |grant: &Grant| grant.engine().valid_until().map(seconds_until);
        Ok(self.with(valid_until)?.unwrap_or(Some(0.0)))
    }

    /// The release is sent when it is awaited, or else when it is dropped.
    fn release(&self, name: &'static str) -> Result<Pending, Failure> {
        let grant = self.take()?;
        Ok(Pending::of(name, async move {
            match grant {
                Some(grant) => grant.release().await,
                None => Ok(Value::Bool(false)),
            }
        }))
    }
}

fn released(primitive: Primitive, name: &str) -> Failure {
    Failure::Released { primitive, name: name.to_owned() }
}

/// Returns the seconds from now until this moment; 0 if it has passed.
fn seconds_until(moment: Instant) -> f64 {
    moment.saturating_duration_since(Instant::now()).as_secs_f64()
}

/// A permit of a semaphore. It is held until it is released, garbage-collected or lost.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Permit {
    slot: Slot,
    id: leasehold::AcquisitionId,
    fence: u64,
    slot_number: Option<u32>,
    weight: u32,
    waited: Duration,
    declared: Arc<DeclaredSemaphore>,
}

impl Permit {
    fn new(permit: EnginePermit, declared: Arc<DeclaredSemaphore>) -> Self {
        let (id, fence, slot_number) = (permit.id(), permit.fence().get(), permit.slot_number());
        let (weight, waited) = (permit.weight(), permit.waited());
        let slot = Slot::new(Grant::Permit(permit, declared.clone()));
        Self { slot, id, fence, slot_number, weight, waited, declared }
    }
}

#[pymethods]
impl Permit {
    /// The id of the permit in the store. `Semaphore.release` takes it.
    #[getter]
    fn id(&self) -> String {
        self.id.to_string()
    }

    /// A number that is larger than the fence of every permit of this name that was granted before.
    ///
    /// A resource that stores the largest fence it has seen can reject a write of an earlier holder.
    #[getter]
    fn fence(&self) -> u64 {
        self.fence
    }

    /// The lowest number from 1 that was free at the grant; None unless the semaphore is numbered.
    ///
    /// No other live permit of the semaphore has it.
    #[getter]
    fn slot_number(&self) -> Option<u32> {
        self.slot_number
    }

    /// How many units the permit takes.
    #[getter]
    fn weight(&self) -> u32 {
        self.weight
    }

    /// How long the acquire waited, in seconds.
    #[getter]
    fn waited(&self) -> f64 {
        self.waited.as_secs_f64()
    }

    /// The name of the semaphore.
    #[getter]
    fn name(&self) -> &str {
        self.declared.name()
    }

    /// How many seconds the permit stays valid without another renewal; None if it does not expire.
    #[getter]
    fn valid_for(&self) -> PyResult<Option<f64>> {
        Ok(self.slot.valid_for()?)
    }

    /// Raises Lost if the permit was lost or released.
    fn check(&self) -> PyResult<()> {
        Ok(self.slot.check(Primitive::Semaphore, self.declared.name())?)
    }

    /// Waits until the permit is lost or released, and returns the reason.
    fn lost(&self) -> PyResult<Pending> {
        Ok(self.slot.lost("Permit.lost")?)
    }

    /// Releases the permit. Returns True once the store has released it; False if it was lost or released before.
    ///
    /// If this is never awaited, the permit is released in the background, with a RuntimeWarning.
    fn release(&self) -> PyResult<Pending> {
        Ok(self.slot.release("Permit.release")?)
    }

    /// Detaches the permit from this object, and returns its id.
    ///
    /// The client no longer renews it. On Redis it stays held until its lease ends, or until `Semaphore.release` releases it.
    /// `Semaphore.extend` renews it. On other stores, where permits need no renewal, it ends with its client. Its TTL ends it everywhere.
    fn detach(&self) -> PyResult<String> {
        match self.slot.take()? {
            Some(Grant::Permit(permit, _)) => Ok(permit.detach().to_string()),
            _ => Err(released(Primitive::Semaphore, self.declared.name()).into()),
        }
    }

    fn __repr__(&self) -> String {
        let slot =
            self.slot_number.map(|number| format!(" slot_number={number}")).unwrap_or_default();
        format!(
            "<leasehold.Permit {} of {:?} fence={}{slot}>",
            self.id,
            self.declared.name(),
            self.fence
        )
    }
}

/// A guard that holds a lock until it is released, garbage-collected or lost.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct LockGuard {
    slot: Slot,
    id: leasehold::LockId,
    fence: u64,
    waited: Duration,
    declared: Arc<DeclaredLock>,
}

impl LockGuard {
    fn new(guard: Arc<EngineGuard>, declared: Arc<DeclaredLock>) -> Self {
        let (id, fence, waited) = (guard.id(), guard.fence().get(), guard.waited());
        Self { slot: Slot::new(Grant::Lock(guard, declared.clone())), id, fence, waited, declared }
    }

    fn guard<T>(&self, with: impl FnOnce(&Arc<EngineGuard>) -> T) -> Result<T, Failure> {
        let guard = self.slot.with(|grant| match grant {
            Grant::Lock(guard, _) => Some(with(guard)),
            _ => None,
        })?;
        guard.flatten().ok_or_else(|| released(Primitive::Lock, self.declared.name()))
    }
}

#[pymethods]
impl LockGuard {
    /// The key of the lock.
    #[getter]
    fn name(&self) -> &str {
        self.declared.name()
    }

    /// The lock id. It is enough to extend and release the lock, so do not log it.
    #[getter]
    fn id(&self) -> String {
        self.id.to_string()
    }

    /// A number that is larger than the fence of every earlier holder of this key. For its use see `Permit.fence`.
    #[getter]
    fn fence(&self) -> u64 {
        self.fence
    }

    /// How long the acquire waited, in seconds.
    #[getter]
    fn waited(&self) -> f64 {
        self.waited.as_secs_f64()
    }

    /// When the lock expires unless it is extended, in seconds since 1970 by the clock of the store.
    #[getter]
    fn expires_at(&self) -> PyResult<f64> {
        Ok(self.guard(|guard| values::timestamp(guard.expires_at()))?)
    }

    /// How many seconds the lock stays valid without another renewal. It is never None.
    #[getter]
    fn valid_for(&self) -> PyResult<Option<f64>> {
        Ok(self.slot.valid_for()?)
    }

    /// Raises Lost if the lock was lost or released.
    fn check(&self) -> PyResult<()> {
        Ok(self.slot.check(Primitive::Lock, self.declared.name())?)
    }

    /// Waits until the lock is lost or released, and returns the reason.
    fn lost(&self) -> PyResult<Pending> {
        Ok(self.slot.lost("LockGuard.lost")?)
    }

    /// Lets the lock expire `lease` seconds from now, whatever was left of its lease. Raises Lost if the lock was lost.
    ///
    /// Once less is left than the lease that the lock was declared with, the client renews it again.
    fn extend(&self, lease: Seconds) -> PyResult<Pending> {
        let guard = self.guard(Arc::clone)?;
        Ok(Pending::of("LockGuard.extend", async move {
            guard.extend(lease.0).await?;
            Ok(Value::None)
        }))
    }

    /// Releases the lock. Returns True once the store has released it; False if it was lost or released before.
    ///
    /// If this is never awaited, the lock is released in the background, with a RuntimeWarning.
    fn release(&self) -> PyResult<Pending> {
        Ok(self.slot.release("LockGuard.release")?)
    }

    /// Detaches the lock from this object, and returns its lock id.
    ///
    /// The client no longer renews it or ends it with its TTL: it stays held until its lease ends, or until `Locks.release`
    /// releases it. `Locks.extend` extends it.
    fn detach(&self) -> PyResult<String> {
        // Before it is taken: a lock that cannot be detached stays held.
        if self.guard(Arc::strong_count)? > 1 {
            return Err(PyRuntimeError::new_err(
                "the lock is being extended: await that before you detach it",
            ));
        }
        match self.slot.take()? {
            Some(Grant::Lock(guard, _)) => match Arc::into_inner(guard) {
                Some(guard) => Ok(guard.detach().id.to_string()),
                None => Err(released(Primitive::Lock, self.declared.name()).into()),
            },
            _ => Err(released(Primitive::Lock, self.declared.name()).into()),
        }
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.LockGuard of {:?} fence={}>", self.declared.name(), self.fence)
    }
}

/// A pool lease, which the client renews. It is held until it is released, garbage-collected or lost.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct PoolLease {
    slot: Slot,
    instance_id: String,
    waited: Duration,
    declared: Arc<DeclaredPool>,
}

impl PoolLease {
    fn new(lease: EngineLease, declared: Arc<DeclaredPool>) -> Self {
        let (instance_id, waited) = (lease.id().to_owned(), lease.waited());
        let slot = Slot::new(Grant::Lease(lease, declared.clone()));
        Self { slot, instance_id, waited, declared }
    }
}

#[pymethods]
impl PoolLease {
    /// The name of the pool.
    #[getter]
    fn name(&self) -> &str {
        self.declared.name()
    }

    /// The instance that holds the lease.
    #[getter]
    fn id(&self) -> &str {
        &self.instance_id
    }

    /// How long the acquire waited, in seconds.
    #[getter]
    fn waited(&self) -> f64 {
        self.waited.as_secs_f64()
    }

    /// How many seconds the lease stays valid without another renewal. It is never None.
    #[getter]
    fn valid_for(&self) -> PyResult<Option<f64>> {
        Ok(self.slot.valid_for()?)
    }

    /// Raises Lost if the lease was lost or released.
    fn check(&self) -> PyResult<()> {
        Ok(self.slot.check(Primitive::Pool, self.declared.name())?)
    }

    /// Waits until the lease is lost or released, and returns the reason.
    fn lost(&self) -> PyResult<Pending> {
        Ok(self.slot.lost("PoolLease.lost")?)
    }

    /// Releases the lease. Returns True once the store has released it; False if it was lost or released before.
    ///
    /// If this is never awaited, the lease is released in the background, with a RuntimeWarning.
    fn release(&self) -> PyResult<Pending> {
        Ok(self.slot.release("PoolLease.release")?)
    }

    /// Detaches the lease from this object, and returns its instance id.
    ///
    /// The client no longer renews it or ends it with its TTL: it stays held until it expires, or until `Pool.release`
    /// releases it. `Pool.extend` renews it.
    fn detach(&self) -> PyResult<String> {
        match self.slot.take()? {
            Some(Grant::Lease(lease, _)) => Ok(lease.detach()),
            _ => Err(released(Primitive::Pool, self.declared.name()).into()),
        }
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.PoolLease of {:?} by {:?}>", self.declared.name(), self.instance_id)
    }
}
