//! The pool of leases.

use std::sync::Arc;
use std::time::Duration;

use leasehold::compat::lua_pool::{LuaPool as EngineLuaPool, PoolAnswer};
use leasehold::{Client as Engine, Pool as EnginePool};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::declared::{Declared, Options};
use crate::failure::Failure;
use crate::guard::Grant;
use crate::lock::RetryPolicy;
use crate::pending::{Completion, Id, Pending, Value, Work};
use crate::seconds::{Seconds, given};
use crate::values;

/// How a pool was declared.
#[derive(Clone)]
pub(crate) struct PoolOptions {
    pub(crate) capacity: u32,
    pub(crate) lease: Option<Duration>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) within: Option<Duration>,
    pub(crate) retry: Option<RetryPolicy>,
}

impl Options for PoolOptions {
    type Built = EnginePool;

    fn build(&self, engine: &Engine, name: &str) -> Result<EnginePool, Failure> {
        let mut builder = engine.pool(name, self.capacity);
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
        Ok(builder.build()?)
    }
}

pub(crate) type DeclaredPool = Declared<PoolOptions>;

impl DeclaredPool {
    /// With a limit of its own, or else that of the declaration.
    pub(crate) fn acquire_within(
        self: &Arc<Self>,
        instance: String,
        within: Option<Duration>,
    ) -> Work {
        let declared = self.clone();
        Work::boxed(async move {
            let mut acquire = declared.opened().await?.acquire(&instance);
            if let Some(within) = within {
                acquire = acquire.within(within);
            }
            Ok(Value::Grant(Some(Grant::Lease(acquire.await?, declared))))
        })
    }
}

/// A fixed number of pool leases, each held by an instance with an id. There is no queue.
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

    /// Waits for a pool lease of the instance and returns it. The client renews it in the background.
    ///
    /// `within` is the longest wait, in seconds. By default it is that of the pool.
    #[pyo3(signature = (instance_id, *, within=None))]
    fn acquire(&self, instance_id: String, within: Option<Seconds>) -> Pending {
        let work = self.declared.acquire_within(instance_id, given(within));
        Pending::new(work, Completion::Return("Pool.acquire"), Id::None)
    }

    /// Returns a pool lease of the instance if one is free; otherwise None. The client renews it in the background.
    fn try_acquire(&self, instance_id: String) -> Pending {
        let declared = self.declared.clone();
        self.declared.operation("Pool.try_acquire", move |pool| async move {
            let lease = pool.try_acquire(&instance_id).await?;
            Ok(Value::Grant(lease.map(|lease| Grant::Lease(lease, declared))))
        })
    }

    /// Returns a context manager that holds a pool lease: `async with pool.guard("worker-1") as lease`, or `with` in a thread.
    ///
    /// The client renews the lease in the background.
    ///
    /// - `within`: the longest wait, in seconds. By default it is that of the pool.
    /// - `cancel_on_loss`: see `Semaphore.guard`.
    #[pyo3(signature = (instance_id, *, within=None, cancel_on_loss=true))]
    fn guard(&self, instance_id: String, within: Option<Seconds>, cancel_on_loss: bool) -> Context {
        Context::new(
            Source::Pool(self.declared.clone(), instance_id, given(within)),
            cancel_on_loss,
        )
    }

    /// Renews the pool lease of the instance once, such as one that was detached. Returns whether it was held.
    fn extend(&self, instance_id: String) -> Pending {
        self.declared.operation("Pool.extend", move |pool| async move {
            Ok(Value::Bool(pool.extend(&instance_id).await?))
        })
    }

    /// Releases the pool lease of the instance. Returns whether it was held.
    fn release(&self, instance_id: String) -> Pending {
        self.declared.operation("Pool.release", move |pool| async move {
            Ok(Value::Bool(pool.release(&instance_id).await?))
        })
    }

    /// Returns the members of the pool.
    fn stats(&self) -> Pending {
        self.declared.operation("Pool.stats", |pool| async move {
            let stats = pool.stats().await?;
            Ok(Value::made(move |py| values::pool(py, &stats)))
        })
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Pool {:?} capacity={}>", self.name(), self.capacity())
    }
}

/// A pool whose calls answer with the statuses and counts of the Lua scripts of osparc's `DistributedSemaphore`.
///
/// No lease has a guard, and nothing runs between the calls. It shares its leases with the pool that it is made of.
#[pyclass(frozen, weakref, module = "leasehold.compat.lua_pool")]
pub(crate) struct LuaPool {
    declared: Arc<DeclaredPool>,
}

#[pymethods]
impl LuaPool {
    #[new]
    fn new(pool: &Bound<'_, Pool>) -> Self {
        Self { declared: pool.get().declared.clone() }
    }

    /// Acquires a lease for the instance if one is free, or renews the lease that it holds.
    fn acquire(&self, instance_id: String) -> Pending {
        self.declared.operation("LuaPool.acquire", move |pool| async move {
            let answer = EngineLuaPool::new(pool).acquire(&instance_id).await?;
            Ok(answered(answer.status.as_str(), &answer))
        })
    }

    /// Renews the lease of the instance.
    fn renew(&self, instance_id: String) -> Pending {
        self.declared.operation("LuaPool.renew", move |pool| async move {
            let answer = EngineLuaPool::new(pool).renew(&instance_id).await?;
            Ok(answered(answer.status.as_str(), &answer))
        })
    }

    /// Releases the lease of the instance.
    fn release(&self, instance_id: String) -> Pending {
        self.declared.operation("LuaPool.release", move |pool| async move {
            let answer = EngineLuaPool::new(pool).release(&instance_id).await?;
            Ok(answered(answer.status.as_str(), &answer))
        })
    }

    /// Removes expired leases, and returns how many leases are held and how many were removed.
    fn count(&self) -> Pending {
        self.declared.operation("LuaPool.count", move |pool| async move {
            let count = EngineLuaPool::new(pool).count().await?;
            Ok(Value::made(move |py| {
                values::pool_count(py, count.current_count, count.expired_count)
            }))
        })
    }
}
