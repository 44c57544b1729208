//! The fenced lock, and all locks of a store.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{
    Client as Engine, Jitter, Lock as EngineLock, LockId, LockInfo, Locks as EngineLocks, Retry,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::declared::{Declared, Options};
use crate::failure::Failure;
use crate::guard::Grant;
use crate::numbers::whole;
use crate::pending::{Completion, Id, Outcome, Pending, Value, Work};
use crate::seconds::{Seconds, given};
use crate::values;

/// The attributes of a `leasehold.Retry`.
#[derive(Clone, Copy)]
pub(crate) struct RetryPolicy(pub(crate) Retry);

impl<'py> FromPyObject<'_, 'py> for RetryPolicy {
    type Error = PyErr;

    fn extract(retry: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (delay, max_delay): (Seconds, Seconds) =
            (retry.getattr("delay")?.extract()?, retry.getattr("max_delay")?.extract()?);
        let jitter: String = retry.getattr("jitter")?.extract()?;
        let jitter = match &*jitter {
            "equal" => Jitter::Equal,
            "full" => Jitter::Full,
            "none" => Jitter::None,
            _ => {
                let expected = "expected \"equal\", \"full\" or \"none\"";
                let problem = format!("invalid jitter: {jitter:?}: {expected}");
                return Err(Failure::Invalid(problem).into());
            }
        };
        let delays = Retry::default().delay(delay.0).max_delay(max_delay.0).jitter(jitter);
        Ok(Self(delays.multiplier(retry.getattr("multiplier")?.extract()?)))
    }
}

/// How a lock was declared.
#[derive(Clone)]
pub(crate) struct LockOptions {
    pub(crate) lease: Option<Duration>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) label: Option<String>,
    pub(crate) within: Option<Duration>,
    pub(crate) retry: Option<RetryPolicy>,
}

impl Options for LockOptions {
    type Built = EngineLock;

    fn build(&self, engine: &Engine, name: &str) -> Result<EngineLock, Failure> {
        let mut builder = engine.lock(name);
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        if let Some(ttl) = self.ttl {
            builder = builder.ttl(ttl);
        }
        if let Some(within) = self.within {
            builder = builder.within(within);
        }
        if let Some(RetryPolicy(retry)) = self.retry {
            builder = builder.retry(retry);
        }
        if let Some(label) = &self.label {
            builder = builder.label(label);
        }
        Ok(builder.build()?)
    }
}

pub(crate) type DeclaredLock = Declared<LockOptions>;

impl DeclaredLock {
    /// With a limit of its own, or else that of the declaration.
    pub(crate) fn acquire_within(self: &Arc<Self>, within: Option<Duration>) -> Work {
        let declared = self.clone();
        Work::boxed(async move {
            let mut acquire = declared.opened().await?.acquire();
            if let Some(within) = within {
                acquire = acquire.within(within);
            }
            Ok(Value::Grant(Some(Grant::Lock(Arc::new(acquire.await?), declared))))
        })
    }
}

/// An exclusive lock with a key. Every holder has a larger fence than all earlier holders.
///
/// It is not fair: after a release, the first client that asks acquires it. If the order matters, use a semaphore with a capacity of 1.
#[pyclass(frozen, extends = Context, module = "leasehold")]
pub(crate) struct Lock {
    declared: Arc<DeclaredLock>,
}

impl Lock {
    pub(crate) fn declared(
        py: Python<'_>,
        client: Arc<Shared>,
        key: String,
        options: LockOptions,
    ) -> PyResult<Py<Self>> {
        let declared = Declared::new(client, key, options)?;
        let context = Context::new(Source::Lock(declared.clone(), None), true);
        Py::new(py, PyClassInitializer::from(context).add_subclass(Self { declared }))
    }
}

#[pymethods]
impl Lock {
    /// The key.
    #[getter]
    fn name(&self) -> &str {
        self.declared.name()
    }

    /// Returns a context manager that holds the lock: `async with lock.guard() as guard`, or `with` in a thread.
    ///
    /// - `within`: the longest wait, in seconds. By default it is that of the lock.
    /// - `cancel_on_loss`: see `Semaphore.guard`.
    #[pyo3(signature = (*, within=None, cancel_on_loss=true))]
    fn guard(&self, within: Option<Seconds>, cancel_on_loss: bool) -> Context {
        Context::new(Source::Lock(self.declared.clone(), given(within)), cancel_on_loss)
    }

    /// Waits for the lock and returns a guard. `within` is the longest wait, in seconds. By default it is that of the lock.
    #[pyo3(signature = (*, within=None))]
    fn acquire(&self, within: Option<Seconds>) -> Pending {
        Pending::new(
            self.declared.acquire_within(given(within)),
            Completion::Return("Lock.acquire"),
            Id::None,
        )
    }

    /// Returns a guard if the lock is free; otherwise None.
    fn try_acquire(&self) -> Pending {
        let declared = self.declared.clone();
        self.declared.operation("Lock.try_acquire", |lock| async move {
            let guard = lock.try_acquire().await?;
            Ok(Value::Grant(guard.map(|guard| Grant::Lock(Arc::new(guard), declared))))
        })
    }

    /// Renews the lock with this lock id once, such as one that was detached. Returns whether it was held.
    fn extend(&self, lock_id: &str) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.declared.operation("Lock.extend", move |lock| async move {
            Ok(Value::Bool(lock.extend(&id).await?))
        }))
    }

    /// Releases the lock with this lock id. Returns whether it was held.
    fn release(&self, lock_id: &str) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.declared.operation("Lock.release", move |lock| async move {
            Ok(Value::Bool(lock.release(&id).await?))
        }))
    }

    /// Returns who holds the lock; None if it is free.
    fn lookup(&self) -> Pending {
        self.declared
            .operation("Lock.lookup", |lock| async move { Ok(found(lock.lookup().await?)) })
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Lock {:?}>", self.name())
    }
}

/// All locks of a store, by key and by lock id. No call waits for a lock to become free.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Locks {
    client: Arc<Shared>,
}

impl Locks {
    pub(crate) fn new(client: Arc<Shared>) -> Self {
        Self { client }
    }

    fn operation<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce(EngineLocks) -> F + Send + 'static,
    ) -> Pending {
        self.client.operation(name, move |engine| work(engine.locks()))
    }
}

fn found(info: Option<LockInfo>) -> Value {
    info.map_or(Value::None, |info| Value::made(move |py| values::lock_info(py, &info)))
}

fn lock_id(id: &str) -> Result<LockId, Failure> {
    Ok(id.parse()?)
}

#[pymethods]
impl Locks {
    /// Acquires the lock with this key if it is free; otherwise returns None.
    ///
    /// There is no guard: the lock expires after `lease` seconds unless it is extended or released by its lock id.
    fn try_acquire(&self, key: String, lease: Seconds) -> Pending {
        self.operation("Locks.try_acquire", move |locks| async move {
            let held = locks.try_acquire(&key, lease.0).await?;
            Ok(held.map_or(Value::None, |held| Value::made(move |py| values::held_lock(py, &held))))
        })
    }

    /// Releases the lock with this lock id. Returns whether it was held.
    fn release(&self, lock_id: &str) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.operation("Locks.release", move |locks| async move {
            Ok(Value::Bool(locks.release(&id).await?))
        }))
    }

    /// Lets the lock with this lock id expire `lease` seconds from now. Returns whether it was held.
    fn extend(&self, lock_id: &str, lease: Seconds) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.operation("Locks.extend", move |locks| async move {
            Ok(Value::Bool(locks.extend(&id, lease.0).await?))
        }))
    }

    /// Returns whether the lock with this key is held.
    fn is_locked(&self, key: String) -> Pending {
        self.operation("Locks.is_locked", move |locks| async move {
            Ok(Value::Bool(locks.is_locked(&key).await?))
        })
    }

    /// Returns whether the lock with this lock id is held.
    fn owns(&self, lock_id: &str) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.operation("Locks.owns", move |locks| async move {
            Ok(Value::Bool(locks.owns(&id).await?))
        }))
    }

    /// Returns the lock with this key, or with this lock id: `lookup("invoice:42")`, `lookup(id=guard.id)`. None if it is not held.
    #[pyo3(signature = (key=None, *, id=None))]
    fn lookup(&self, key: Option<String>, id: Option<&str>) -> PyResult<Pending> {
        let lock = match (key, id) {
            (Some(key), None) => Ok(key),
            (None, Some(id)) => Err(lock_id(id)?),
            _ => return Err(PyTypeError::new_err("lookup takes either a key or an id")),
        };
        Ok(self.operation("Locks.lookup", move |locks| async move {
            let info = match lock {
                Ok(key) => locks.lookup(&key).await?,
                Err(id) => locks.lookup(&id).await?,
            };
            Ok(found(info))
        }))
    }

    /// Returns the locks that are held, sorted by key; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn list(&self, #[pyo3(from_py_with = whole)] limit: usize) -> Pending {
        self.operation("Locks.list", move |locks| async move {
            let all = locks.list(limit).await?;
            Ok(Value::made(move |py| values::lock_infos(py, &all)))
        })
    }
}
