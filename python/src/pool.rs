//! The pool of leases.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Client as Engine, Pool as EnginePool, PoolAnswer};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::declared::{Declared, Options};
use crate::failure::Failure;
use crate::guard::Grant;
use crate::lock::{RetryPolicy, retry};
use crate::pending::{Pending, Value, Work};
use crate::seconds::{Seconds, given};
use crate::values;

/// How a pool was declared.
#[derive(Clone)]
pub(crate) struct PoolOptions {
    pub(crate) capacity: u32,
    pub(crate) lease: Option<Duration>,
    pub(crate) within: Option<Duration>,
    pub(crate) retry: Option<RetryPolicy>,
}

impl Options for PoolOptions {
    type Built = EnginePool;

    fn build(&self, engine: &Engine, name: &str) -> Result<EnginePool, Failure> {
        let mut builder = engine.pool(name, self.capacity).retry(retry(self.retry, self.within));
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        Ok(builder.build()?)
    }
}

pub(crate) type DeclaredPool = Declared<PoolOptions>;

impl DeclaredPool {
    /// With a limit of its own, or else that of the declaration.
    pub(crate) fn lease_within(
        self: &Arc<Self>,
        instance: String,
        within: Option<Duration>,
    ) -> Work {
        let declared = self.clone();
        Work::boxed(async move {
            let pool = match within {
                Some(_) => {
                    let options = PoolOptions { within, ..declared.options().clone() };
                    declared.opened_with(options).await?
                }
                None => declared.opened().await?,
            };
            let lease = pool.lease(&instance).await?;
            Ok(Value::Grant(Some(Grant::Lease(lease, declared))))
        })
    }
}

/// A fixed number of leases, each held by an instance with an id. There is no queue.
///
/// An instance that acquires again renews its lease, and does not take a second one. So each worker needs an id of its own.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Pool {
    declared: Arc<DeclaredPool>,
}

impl Pool {
    pub(crate) fn declared(
        client: Arc<Shared>,
        name: String,
        options: PoolOptions,
    ) -> PyResult<Self> {
        Ok(Self { declared: Declared::new(client, name, options)? })
    }
}

fn answered<S>(status: &'static str, answer: &PoolAnswer<S>) -> Value {
    let (current, expired) = (answer.current_count, answer.expired_count);
    Value::made(move |py| values::pool_answer(py, status, current, expired))
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
        self.declared.options().capacity
    }

    /// Acquires a lease for the instance if one is free, or renews the lease that it holds.
    ///
    /// The client does not renew this lease in the background: call `renew` before it expires, or use `lease`.
    fn acquire(&self, instance_id: String) -> Pending {
        self.declared.operation("Pool.acquire", move |pool| async move {
            let answer = pool.acquire(&instance_id).await?;
            Ok(answered(answer.status.as_str(), &answer))
        })
    }

    /// Renews the lease of the instance.
    fn renew(&self, instance_id: String) -> Pending {
        self.declared.operation("Pool.renew", move |pool| async move {
            let answer = pool.renew(&instance_id).await?;
            Ok(answered(answer.status.as_str(), &answer))
        })
    }

    /// Releases the lease of the instance.
    fn release(&self, instance_id: String) -> Pending {
        self.declared.operation("Pool.release", move |pool| async move {
            let answer = pool.release(&instance_id).await?;
            Ok(answered(answer.status.as_str(), &answer))
        })
    }

    /// Removes expired leases, and returns how many leases are held and how many were removed.
    fn count(&self) -> Pending {
        self.declared.operation("Pool.count", move |pool| async move {
            let count = pool.count().await?;
            Ok(Value::made(move |py| {
                values::pool_count(py, count.current_count, count.expired_count)
            }))
        })
    }

    /// Returns a context manager that holds a lease: `async with pool.lease("worker-1") as lease`, or `with` in a thread.
    ///
    /// The client renews the lease in the background.
    ///
    /// - `within`: the longest wait, in seconds. By default it is that of the pool.
    /// - `cancel_on_loss`: see `Semaphore.permit`.
    #[pyo3(signature = (instance_id, *, within=None, cancel_on_loss=true))]
    fn lease(&self, instance_id: String, within: Option<Seconds>, cancel_on_loss: bool) -> Context {
        Context::new(
            Source::Pool(self.declared.clone(), instance_id, given(within)),
            cancel_on_loss,
        )
    }

    /// Returns a lease if one is free; otherwise None. The client renews the lease in the background.
    fn try_lease(&self, instance_id: String) -> Pending {
        let declared = self.declared.clone();
        self.declared.operation("Pool.try_lease", move |pool| async move {
            let lease = pool.try_lease(&instance_id).await?;
            Ok(Value::Grant(lease.map(|lease| Grant::Lease(lease, declared))))
        })
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Pool {:?} capacity={}>", self.name(), self.capacity())
    }
}
