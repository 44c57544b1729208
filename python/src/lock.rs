//! The fenced lock, and all locks of a store.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{
    Client as Engine, Jitter, Lock as EngineLock, LockId, Locks as EngineLocks, Retry,
};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::declared::{Declared, Options};
use crate::failure::Failure;
use crate::guard::Grant;
use crate::numbers::{Number, whole};
use crate::pending::{Completion, Id, Outcome, Pending, Value, Work};
use crate::seconds::{Seconds, given};
use crate::values;

/// The retry policy of an acquire of a lock or a pool: the attributes of a `leasehold.Retry`.
#[derive(Clone, Copy)]
pub(crate) struct RetryPolicy {
    times: Number<u32>,
    delay: Seconds,
    multiplier: f64,
    max_delay: Seconds,
    jitter: Jitter,
}

impl<'py> FromPyObject<'_, 'py> for RetryPolicy {
    type Error = PyErr;

    fn extract(retry: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let jitter: String = retry.getattr("jitter")?.extract()?;
        Ok(Self {
            times: retry.getattr("times")?.extract()?,
            delay: retry.getattr("delay")?.extract()?,
            multiplier: retry.getattr("multiplier")?.extract()?,
            max_delay: retry.getattr("max_delay")?.extract()?,
            jitter: match &*jitter {
                "equal" => Jitter::Equal,
                "full" => Jitter::Full,
                "none" => Jitter::None,
                _ => {
                    let expected = "expected \"equal\", \"full\" or \"none\"";
                    return Err(Failure::Invalid(format!(
                        "invalid jitter: {jitter:?}: {expected}"
                    ))
                    .into());
                }
            },
        })
    }
}

/// Without a limit: more than a hundred years.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Returns the retry policy. By default an acquire retries until its time limit, at most 2 s apart.
pub(crate) fn retry(retrying: Option<RetryPolicy>, within: Option<Duration>) -> Retry {
    let retry = match retrying {
        Some(retrying) => Retry::default()
            .times(retrying.times.0)
            .delay(retrying.delay.0)
            .multiplier(retrying.multiplier)
            .max_delay(retrying.max_delay.0)
            .jitter(retrying.jitter),
        None => Retry::default().times(u32::MAX).max_delay(Duration::from_secs(2)),
    };
    retry.within(within.unwrap_or(FOREVER))
}

/// How a lock was declared.
#[derive(Clone)]
pub(crate) struct LockOptions {
    pub(crate) lease: Option<Duration>,
    pub(crate) auto_extend: bool,
    pub(crate) label: Option<String>,
    pub(crate) within: Option<Duration>,
    pub(crate) retry: Option<RetryPolicy>,
}

impl Options for LockOptions {
    type Built = EngineLock;

    fn build(&self, engine: &Engine, name: &str) -> Result<EngineLock, Failure> {
        let mut builder = engine.lock(name).retry(retry(self.retry, self.within));
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        if self.auto_extend {
            builder = builder.auto_extend();
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
            let lock = match within {
                Some(_) => {
                    let options = LockOptions { within, ..declared.options().clone() };
                    declared.opened_with(options).await?
                }
                None => declared.opened().await?,
            };
            let guard = lock.acquire().await?;
            Ok(Value::Grant(Some(Grant::Lock(Arc::new(guard), declared))))
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
    fn key(&self) -> &str {
        self.declared.name()
    }

    /// Returns a context manager that holds the lock: `async with lock.guard() as guard`, or `with` in a thread.
    ///
    /// - `within`: the longest wait, in seconds. By default it is that of the lock.
    /// - `cancel_on_loss`: see `Semaphore.permit`.
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

    fn __repr__(&self) -> String {
        format!("<leasehold.Lock {:?}>", self.key())
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

fn lock_id(id: &str) -> Result<LockId, Failure> {
    Ok(id.parse()?)
}

#[pymethods]
impl Locks {
    /// Acquires the lock with this key if it is free; otherwise returns None.
    ///
    /// There is no guard: the lock expires after `ttl` seconds unless it is extended or released by its lock id.
    fn acquire(&self, key: String, ttl: Seconds) -> Pending {
        self.operation("Locks.acquire", move |locks| async move {
            let held = locks.acquire(&key, ttl.0).await?;
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

    /// Lets the lock with this lock id expire `ttl` seconds from now. Returns whether it was held.
    fn extend(&self, lock_id: &str, ttl: Seconds) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.operation("Locks.extend", move |locks| async move {
            Ok(Value::Bool(locks.extend(&id, ttl.0).await?))
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

    /// Returns the lock with this key; None if it is not held.
    fn lookup(&self, key: String) -> Pending {
        self.operation("Locks.lookup", move |locks| async move {
            let info = locks.lookup_raw(&key).await?;
            Ok(info.map_or(Value::None, |info| Value::made(move |py| values::lock_info(py, &info))))
        })
    }

    /// Returns the lock with this lock id; None if it is not held.
    fn lookup_id(&self, lock_id: &str) -> PyResult<Pending> {
        let id = self::lock_id(lock_id)?;
        Ok(self.operation("Locks.lookup_id", move |locks| async move {
            let info = locks.lookup_id_raw(&id).await?;
            Ok(info.map_or(Value::None, |info| Value::made(move |py| values::lock_info(py, &info))))
        }))
    }

    /// Returns the locks that are held, sorted by key; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn list(&self, #[pyo3(from_py_with = whole)] limit: usize) -> Pending {
        self.operation("Locks.list", move |locks| async move {
            let all = locks.list_raw(limit).await?;
            Ok(Value::made(move |py| values::lock_infos(py, &all)))
        })
    }
}
