//! The fenced lock, and all locks of a store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{Client as Engine, Jitter, Lock as EngineLock, LockId, Retry};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::failure::Failure;
use crate::guard::Held;
use crate::pending::{Id, Pending, Then, Value, Work};
use crate::process::PerProcess;
use crate::seconds::{Seconds, given};
use crate::values;
use crate::wake::lock;

/// How an acquire of a lock or a pool asks again: the attributes of a `leasehold.Retry`.
#[derive(Clone, Copy)]
pub(crate) struct Retrying {
    times: u32,
    delay: Seconds,
    multiplier: f64,
    max_delay: Seconds,
    jitter: Jitter,
}

impl<'py> FromPyObject<'_, 'py> for Retrying {
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

/// How often to ask again. By default until the time is up: a release wakes the waiter, so that asking is only a fallback.
pub(crate) fn retry(retrying: Option<Retrying>, within: Option<Duration>) -> Retry {
    let retry = match retrying {
        Some(retrying) => Retry::default()
            .times(retrying.times)
            .delay(retrying.delay.0)
            .multiplier(retrying.multiplier)
            .max_delay(retrying.max_delay.0)
            .jitter(retrying.jitter),
        None => Retry::default().times(u32::MAX).max_delay(Duration::from_secs(2)),
    };
    retry.within(within.unwrap_or(FOREVER))
}

/// How a lock was declared.
pub(crate) struct LockOptions {
    pub(crate) lease: Option<Duration>,
    pub(crate) auto_extend: bool,
    pub(crate) label: Option<String>,
    pub(crate) within: Option<Duration>,
    pub(crate) retry: Option<Retrying>,
}

/// A lock as it was declared.
pub(crate) struct DeclaredLock {
    client: Arc<Shared>,
    key: String,
    options: LockOptions,
    /// With the limit of the declaration. Only with the GIL held.
    built: Mutex<Option<PerProcess<EngineLock>>>,
}

impl DeclaredLock {
    pub(crate) fn new(
        client: Arc<Shared>,
        key: String,
        options: LockOptions,
    ) -> PyResult<Arc<Self>> {
        let declared = Arc::new(Self { client, key, options, built: Mutex::new(None) });
        match declared.client.now()? {
            Some(engine) => drop(declared.keep(&engine)?),
            None => drop(declared.build(&Engine::memory(), declared.options.within)?),
        }
        Ok(declared)
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) fn client(&self) -> &Arc<Shared> {
        &self.client
    }

    fn build(&self, engine: &Engine, within: Option<Duration>) -> Result<EngineLock, Failure> {
        let options = &self.options;
        let mut builder = engine.lock(&self.key).retry(retry(options.retry, within));
        if let Some(lease) = options.lease {
            builder = builder.lease(lease);
        }
        if options.auto_extend {
            builder = builder.auto_extend();
        }
        if let Some(label) = &options.label {
            builder = builder.label(label);
        }
        Ok(builder.build()?)
    }

    fn keep(&self, engine: &Engine) -> Result<EngineLock, Failure> {
        let built = self.build(engine, self.options.within)?;
        *lock(&self.built) = Some(PerProcess::new(built.clone()));
        Ok(built)
    }

    async fn opened(&self) -> Result<EngineLock, Failure> {
        if let Some(built) = lock(&self.built).as_ref().and_then(PerProcess::get) {
            return Ok(built.clone());
        }
        let engine = self.client.opened().await?;
        self.keep(&engine)
    }

    /// With a limit of its own, or else that of the declaration.
    pub(crate) fn acquire_within(self: &Arc<Self>, within: Option<Duration>) -> Work {
        let declared = self.clone();
        Work::boxed(async move {
            let lock = match within {
                Some(_) => declared.build(&declared.client.opened().await?, within)?,
                None => declared.opened().await?,
            };
            let guard = lock.acquire().await?;
            Ok(Value::Held(Some(Held::Lock(Arc::new(guard), declared))))
        })
    }
}

/// An exclusive lock with a key. Every holder has a fence that is larger than those before. It is not fair: for order use a
/// semaphore with a capacity of 1.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Lock {
    declared: Arc<DeclaredLock>,
    context: Mutex<Option<Py<Context>>>,
}

impl Lock {
    pub(crate) fn new(declared: Arc<DeclaredLock>) -> Self {
        Self { declared, context: Mutex::new(None) }
    }

    fn context(&self, py: Python<'_>) -> PyResult<Py<Context>> {
        if let Some(context) = &*lock(&self.context) {
            return Ok(context.clone_ref(py));
        }
        let context = Py::new(py, Context::new(Source::Lock(self.declared.clone(), None), true))?;
        Ok(lock(&self.context).get_or_insert(context).clone_ref(py))
    }
}

#[pymethods]
impl Lock {
    /// The key.
    #[getter]
    fn key(&self) -> &str {
        self.declared.key()
    }

    /// A block during which the lock is held: `async with lock.guard() as guard`, or `with` in a thread.
    ///
    /// `within` is the longest wait in seconds. For `cancel_on_loss` see `Semaphore.permit`.
    #[pyo3(signature = (*, within=None, cancel_on_loss=true))]
    fn guard(&self, within: Option<Seconds>, cancel_on_loss: bool) -> Context {
        Context::new(Source::Lock(self.declared.clone(), given(within)), cancel_on_loss)
    }

    fn __aenter__(&self, py: Python<'_>) -> PyResult<Pending> {
        Context::enter(self.context(py)?.bind(py))
    }

    #[pyo3(signature = (kind, exception, traceback))]
    fn __aexit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        exception: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        drop(traceback);
        self.context(py)?.get().aexit(py, kind.as_ref(), exception.as_ref())
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Context::enter(self.context(py)?.bind(py))?.block(py)
    }

    #[pyo3(signature = (kind, exception, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        exception: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        drop(traceback);
        self.context(py)?.get().exit_now(py, kind.as_ref(), exception.as_ref())
    }

    /// Waits for the lock, for at most `within` seconds.
    #[pyo3(signature = (*, within=None))]
    fn acquire(&self, within: Option<Seconds>) -> Pending {
        Pending::new(
            self.declared.acquire_within(given(within)),
            Then::Return("Lock.acquire"),
            Id::None,
        )
    }

    /// The lock if it is free; None otherwise.
    fn try_acquire(&self) -> Pending {
        let declared = self.declared.clone();
        Pending::of("Lock.try_acquire", async move {
            let guard = declared.opened().await?.try_acquire().await?;
            Ok(Value::Held(guard.map(|guard| Held::Lock(Arc::new(guard), declared))))
        })
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Lock {:?}>", self.key())
    }
}

/// All locks of a store, by key and by lock id. Each call is a single attempt.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Locks {
    client: Arc<Shared>,
}

impl Locks {
    pub(crate) fn new(client: Arc<Shared>) -> Self {
        Self { client }
    }
}

fn lock_id(id: &str) -> Result<LockId, Failure> {
    Ok(id.parse()?)
}

#[pymethods]
impl Locks {
    /// The lock for so many seconds if it is free; None otherwise. Nothing extends or releases it but its lock id.
    fn acquire(&self, key: String, ttl: Seconds) -> Pending {
        let client = self.client.clone();
        Pending::of("Locks.acquire", async move {
            let held = client.opened().await?.locks().acquire(&key, ttl.0).await?;
            Ok(held.map_or(Value::None, |held| Value::made(move |py| values::held_lock(py, &held))))
        })
    }

    /// Releases a lock by its lock id. True if it was held until now.
    fn release(&self, lock_id: &str) -> PyResult<Pending> {
        let (client, id) = (self.client.clone(), self::lock_id(lock_id)?);
        Ok(Pending::of("Locks.release", async move {
            Ok(Value::Bool(client.opened().await?.locks().release(&id).await?))
        }))
    }

    /// Lets a lock end so many seconds from now. False if it is not held any more.
    fn extend(&self, lock_id: &str, ttl: Seconds) -> PyResult<Pending> {
        let (client, id) = (self.client.clone(), self::lock_id(lock_id)?);
        Ok(Pending::of("Locks.extend", async move {
            Ok(Value::Bool(client.opened().await?.locks().extend(&id, ttl.0).await?))
        }))
    }

    /// Whether somebody holds the lock.
    fn is_locked(&self, key: String) -> Pending {
        let client = self.client.clone();
        Pending::of("Locks.is_locked", async move {
            Ok(Value::Bool(client.opened().await?.locks().is_locked(&key).await?))
        })
    }

    /// Whether this lock id holds its lock.
    fn owns(&self, lock_id: &str) -> PyResult<Pending> {
        let (client, id) = (self.client.clone(), self::lock_id(lock_id)?);
        Ok(Pending::of("Locks.owns", async move {
            Ok(Value::Bool(client.opened().await?.locks().owns(&id).await?))
        }))
    }

    /// What is known of the lock with this key; None if nobody holds it.
    fn lookup(&self, key: String) -> Pending {
        let client = self.client.clone();
        Pending::of("Locks.lookup", async move {
            let info = client.opened().await?.locks().lookup_raw(&key).await?;
            Ok(info.map_or(Value::None, |info| Value::made(move |py| values::lock_info(py, &info))))
        })
    }

    /// What is known of the lock with this lock id; None if it is not held.
    fn lookup_id(&self, lock_id: &str) -> PyResult<Pending> {
        let (client, id) = (self.client.clone(), self::lock_id(lock_id)?);
        Ok(Pending::of("Locks.lookup_id", async move {
            let info = client.opened().await?.locks().lookup_id_raw(&id).await?;
            Ok(info.map_or(Value::None, |info| Value::made(move |py| values::lock_info(py, &info))))
        }))
    }

    /// The locks that are held, by key; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn list(&self, limit: usize) -> Pending {
        let client = self.client.clone();
        Pending::of("Locks.list", async move {
            let all = client.opened().await?.locks().list_raw(limit).await?;
            Ok(Value::made(move |py| values::lock_infos(py, &all)))
        })
    }
}
