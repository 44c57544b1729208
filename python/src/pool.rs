//! The pool of leases.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{Client as Engine, Pool as EnginePool};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::failure::Failure;
use crate::guard::Held;
use crate::lock::{Retrying, retry};
use crate::pending::{Pending, Value, Work};
use crate::process::PerProcess;
use crate::seconds::{Seconds, given};
use crate::values;
use crate::wake::lock;

/// How a pool was declared.
pub(crate) struct PoolOptions {
    pub(crate) capacity: u32,
    pub(crate) lease: Option<Duration>,
    pub(crate) within: Option<Duration>,
    pub(crate) retry: Option<Retrying>,
}

/// A pool as it was declared.
pub(crate) struct DeclaredPool {
    client: Arc<Shared>,
    name: String,
    options: PoolOptions,
    /// With the limit of the declaration. Only with the GIL held.
    built: Mutex<Option<PerProcess<EnginePool>>>,
}

impl DeclaredPool {
    pub(crate) fn new(
        client: Arc<Shared>,
        name: String,
        options: PoolOptions,
    ) -> PyResult<Arc<Self>> {
        let declared = Arc::new(Self { client, name, options, built: Mutex::new(None) });
        match declared.client.now()? {
            Some(engine) => drop(declared.keep(&engine)?),
            None => drop(declared.build(&Engine::memory(), declared.options.within)?),
        }
        Ok(declared)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn build(&self, engine: &Engine, within: Option<Duration>) -> Result<EnginePool, Failure> {
        let options = &self.options;
        let mut builder =
            engine.pool(&self.name, options.capacity).retry(retry(options.retry, within));
        if let Some(lease) = options.lease {
            builder = builder.lease(lease);
        }
        Ok(builder.build()?)
    }

    fn keep(&self, engine: &Engine) -> Result<EnginePool, Failure> {
        let built = self.build(engine, self.options.within)?;
        *lock(&self.built) = Some(PerProcess::new(built.clone()));
        Ok(built)
    }

    async fn opened(&self) -> Result<EnginePool, Failure> {
        if let Some(built) = lock(&self.built).as_ref().and_then(PerProcess::get) {
            return Ok(built.clone());
        }
        let engine = self.client.opened().await?;
        self.keep(&engine)
    }

    pub(crate) fn lease_within(
        self: &Arc<Self>,
        instance: String,
        within: Option<Duration>,
    ) -> Work {
        let declared = self.clone();
        Work::boxed(async move {
            let pool = match within {
                Some(_) => declared.build(&declared.client.opened().await?, within)?,
                None => declared.opened().await?,
            };
            let lease = pool.lease(&instance).await?;
            Ok(Value::Held(Some(Held::Lease(lease, declared))))
        })
    }
}

/// A fixed number of leases, each held by an instance id. There is no queue.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Pool {
    declared: Arc<DeclaredPool>,
}

impl Pool {
    pub(crate) fn new(declared: Arc<DeclaredPool>) -> Self {
        Self { declared }
    }
}

#[pymethods]
impl Pool {
    /// The name.
    #[getter]
    fn name(&self) -> &str {
        self.declared.name()
    }

    /// The number of leases.
    #[getter]
    fn capacity(&self) -> u32 {
        self.declared.options.capacity
    }

    /// Takes a lease if there is one, or renews the lease that the instance has. Nothing renews it but `renew`.
    fn acquire(&self, instance_id: String) -> Pending {
        let declared = self.declared.clone();
        Pending::of("Pool.acquire", async move {
            let answer = declared.opened().await?.acquire(&instance_id).await?;
            let (status, current, expired) =
                (answer.status.as_str(), answer.current_count, answer.expired_count);
            Ok(Value::made(move |py| values::pool_answer(py, status, current, expired)))
        })
    }

    /// Renews the lease of an instance.
    fn renew(&self, instance_id: String) -> Pending {
        let declared = self.declared.clone();
        Pending::of("Pool.renew", async move {
            let answer = declared.opened().await?.renew(&instance_id).await?;
            let (status, current, expired) =
                (answer.status.as_str(), answer.current_count, answer.expired_count);
            Ok(Value::made(move |py| values::pool_answer(py, status, current, expired)))
        })
    }

    /// Releases the lease of an instance.
    fn release(&self, instance_id: String) -> Pending {
        let declared = self.declared.clone();
        Pending::of("Pool.release", async move {
            let answer = declared.opened().await?.release(&instance_id).await?;
            let (status, current, expired) =
                (answer.status.as_str(), answer.current_count, answer.expired_count);
            Ok(Value::made(move |py| values::pool_answer(py, status, current, expired)))
        })
    }

    /// How many leases are held, and how many were found to have expired.
    fn count(&self) -> Pending {
        let declared = self.declared.clone();
        Pending::of("Pool.count", async move {
            let count = declared.opened().await?.count().await?;
            Ok(Value::made(move |py| {
                values::pool_count(py, count.current_count, count.expired_count)
            }))
        })
    }

    /// A block during which the instance holds a lease that renews itself: `async with pool.lease("worker-1") as lease`, or `with`
    /// in a thread.
    ///
    /// `within` is the longest wait in seconds. For `cancel_on_loss` see `Semaphore.permit`.
    #[pyo3(signature = (instance_id, *, within=None, cancel_on_loss=true))]
    fn lease(&self, instance_id: String, within: Option<Seconds>, cancel_on_loss: bool) -> Context {
        Context::new(
            Source::Pool(self.declared.clone(), instance_id, given(within)),
            cancel_on_loss,
        )
    }

    /// A lease that renews itself, if there is one now; None otherwise.
    fn try_lease(&self, instance_id: String) -> Pending {
        let declared = self.declared.clone();
        Pending::of("Pool.try_lease", async move {
            let lease = declared.opened().await?.try_lease(&instance_id).await?;
            Ok(Value::Held(lease.map(|lease| Held::Lease(lease, declared))))
        })
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Pool {:?} capacity={}>", self.name(), self.capacity())
    }
}
