//! The fair semaphore.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold::{AcquisitionId, Client as Engine, Semaphore as EngineSemaphore};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::declared::{Declared, Options};
use crate::failure::Failure;
use crate::guard::Grant;
use crate::numbers::{Number, whole};
use crate::pending::{Completion, Id, Pending, Value, Work};
use crate::seconds::{Seconds, given};
use crate::values;

/// How a semaphore was declared.
pub(crate) struct SemaphoreOptions {
    pub(crate) capacity: u32,
    pub(crate) declares: bool,
    pub(crate) ttl: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) within: Option<Duration>,
    pub(crate) label: Option<String>,
    pub(crate) numbered: bool,
    pub(crate) rate: Option<(u64, Duration)>,
    pub(crate) burst: Option<u32>,
    pub(crate) rate_only: bool,
}

impl Options for SemaphoreOptions {
    type Built = EngineSemaphore;

    fn build(&self, engine: &Engine, name: &str) -> Result<EngineSemaphore, Failure> {
        let mut builder = match self.rate {
            Some((starts, period)) if self.rate_only => engine.rate(name, starts, period),
            Some((starts, period)) => engine.semaphore(name, self.capacity).rate(starts, period),
            None => engine.semaphore(name, self.capacity),
        };
        if !self.declares {
            builder = builder.unless_declared();
        }
        if let Some(ttl) = self.ttl {
            builder = builder.ttl(ttl);
        }
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        if let Some(limit) = self.within {
            builder = builder.within(limit);
        }
        if let Some(label) = &self.label {
            builder = builder.label(label);
        }
        if self.numbered {
            builder = builder.numbered();
        }
        if let Some(burst) = self.burst {
            builder = builder.burst(burst);
        }
        Ok(builder.build()?)
    }
}

pub(crate) type DeclaredSemaphore = Declared<SemaphoreOptions>;

impl DeclaredSemaphore {
    pub(crate) fn acquire(
        self: &Arc<Self>,
        within: Option<Duration>,
        weight: u32,
    ) -> Result<(Work, Id), Failure> {
        let acquire = move |semaphore: &EngineSemaphore| {
            let mut acquire = semaphore.acquire().weight(weight);
            if let Some(within) = within {
                acquire = acquire.within(within);
            }
            acquire
        };
        if let Some(semaphore) = self.now()? {
            let acquire = acquire(&semaphore);
            let id = acquire.id();
            return Ok((Work::Acquire(acquire, self.clone()), Id::Known(id)));
        }
        let (declared, id) = (self.clone(), Arc::new(OnceLock::new()));
        let sent_id = id.clone();
        let work = Work::boxed(async move {
            let acquire = acquire(&declared.opened().await?);
            let _ = sent_id.set(acquire.id());
            Ok(Value::Grant(Some(Grant::Permit(acquire.await?, declared))))
        });
        Ok((work, Id::Later(id)))
    }
}

/// A fair counting semaphore: permits are granted in the order in which they were requested.
///
/// Semaphores with the same name share their permits, in all programs that use the same store. `async with semaphore` and
/// `with semaphore` hold one permit, as `semaphore.guard()` does.
#[pyclass(frozen, extends = Context, module = "leasehold")]
pub(crate) struct Semaphore {
    declared: Arc<DeclaredSemaphore>,
}

impl Semaphore {
    pub(crate) fn declared(
        py: Python<'_>,
        client: Arc<Shared>,
        name: String,
        options: SemaphoreOptions,
    ) -> PyResult<Py<Self>> {
        let declared = Declared::new(client, name, options)?;
        let source = Source::Semaphore { declared: declared.clone(), within: None, weight: 1 };
        let context = PyClassInitializer::from(Context::new(source, true));
        Py::new(py, context.add_subclass(Self { declared }))
    }
}

fn acquisition_id(id: &str) -> Result<AcquisitionId, Failure> {
    Ok(id.parse()?)
}

#[pymethods]
impl Semaphore {
    /// The name.
    #[getter]
    fn name(&self) -> &str {
        self.declared.name()
    }

    /// The capacity that this client declared last. The store may have another: see `stats`.
    #[getter]
    fn capacity(&self) -> u32 {
        let built = self.declared.now().ok().flatten();
        built.map_or(self.declared.options().capacity, |semaphore| semaphore.capacity())
    }

    /// Returns a context manager that holds a permit: `async with semaphore.guard() as permit`, or `with` in a thread.
    ///
    /// - `within`: the longest wait, in seconds. After that the block raises TimedOut.
    /// - `weight`: how many units of the capacity the permit takes.
    /// - `cancel_on_loss`: whether the loss of the permit cancels the body of an `async with`. The block then raises Lost. The body of
    ///   a `with` cannot be cancelled: it runs to its end, and then the block raises Lost. With False, neither happens.
    #[pyo3(signature = (*, within=None, weight=1, cancel_on_loss=true))]
    fn guard(
        &self,
        within: Option<Seconds>,
        #[pyo3(from_py_with = whole)] weight: u32,
        cancel_on_loss: bool,
    ) -> Context {
        let source =
            Source::Semaphore { declared: self.declared.clone(), within: given(within), weight };
        Context::new(source, cancel_on_loss)
    }

    /// Waits for a permit and returns it.
    ///
    /// - `within`: the longest wait, in seconds. After that the acquire raises TimedOut.
    /// - `weight`: how many units of the capacity the permit takes.
    #[pyo3(signature = (*, within=None, weight=1))]
    fn acquire(
        &self,
        within: Option<Seconds>,
        #[pyo3(from_py_with = whole)] weight: u32,
    ) -> PyResult<Pending> {
        let (work, id) = self.declared.acquire(given(within), weight)?;
        Ok(Pending::new(work, Completion::Return("Semaphore.acquire"), id))
    }

    /// Returns a permit if one is free and no acquire waits; otherwise None. `weight` is how many units the permit takes.
    #[pyo3(signature = (*, weight=1))]
    fn try_acquire(&self, #[pyo3(from_py_with = whole)] weight: u32) -> Pending {
        let declared = self.declared.clone();
        self.declared.operation("Semaphore.try_acquire", move |semaphore| async move {
            let permit = semaphore.try_acquire().weight(weight).await?;
            Ok(Value::Grant(permit.map(|permit| Grant::Permit(permit, declared))))
        })
    }

    /// Renews the permit with this id once, such as one that was detached. Returns whether it was held.
    fn extend(&self, id: &str) -> PyResult<Pending> {
        let id = acquisition_id(id)?;
        Ok(self.declared.operation("Semaphore.extend", move |semaphore| async move {
            Ok(Value::Bool(semaphore.extend(&id).await?))
        }))
    }

    /// Releases the permit with this id, or cancels the acquire that waits with it. Returns whether it held or waited.
    fn release(&self, id: &str) -> PyResult<Pending> {
        let id = acquisition_id(id)?;
        Ok(self.declared.operation("Semaphore.release", move |semaphore| async move {
            Ok(Value::Bool(semaphore.release(&id).await?))
        }))
    }

    /// Releases the holder, or removes the waiter, with this id of the statistics. It may belong to another program.
    ///
    /// Returns True if a holder was released or a waiter was removed.
    fn release_member(&self, id: String) -> Pending {
        self.declared.operation("Semaphore.release_member", move |semaphore| async move {
            Ok(Value::Bool(semaphore.release_member(&id).await?))
        })
    }

    /// Returns the number of waiters ahead of the acquire with this id; None if it does not wait.
    fn position(&self, id: &str) -> PyResult<Pending> {
        let id = acquisition_id(id)?;
        Ok(self.declared.operation("Semaphore.position", move |semaphore| async move {
            Ok(Value::Position(semaphore.position(&id).await?))
        }))
    }

    /// Returns whether an acquire of one unit would have to wait now.
    fn locked(&self) -> Pending {
        self.declared.operation("Semaphore.locked", |semaphore| async move {
            Ok(Value::Bool(semaphore.locked().await?))
        })
    }

    /// Returns the limits, the holders and the number of waiters. `Client.stats` also lists the waiters.
    fn stats(&self) -> Pending {
        self.declared.operation("Semaphore.stats", |semaphore| async move {
            let stats = semaphore.stats().await?;
            Ok(Value::made(move |py| values::stats(py, &stats)))
        })
    }

    /// Sets the capacity for all programs, until one declares another. Raises InvalidArgument if the semaphore is pinned.
    fn set_capacity(&self, capacity: Number<u32>) -> Pending {
        self.declared.operation("Semaphore.set_capacity", move |semaphore| async move {
            semaphore.set_capacity(capacity.0).await?;
            Ok(Value::None)
        })
    }

    /// Sets the capacity for all programs until `unpin`. Until then, declarations have no effect.
    fn pin(&self, capacity: Number<u32>) -> Pending {
        self.declared.operation("Semaphore.pin", move |semaphore| async move {
            semaphore.pin(capacity.0).await?;
            Ok(Value::None)
        })
    }

    /// Ends a `pin`. The newest declaration applies again.
    fn unpin(&self) -> Pending {
        self.declared.operation("Semaphore.unpin", |semaphore| async move {
            semaphore.unpin().await?;
            Ok(Value::None)
        })
    }

    /// Sets the rate for all programs, until one declares another: never more than `starts` permits in any `period` of seconds.
    ///
    /// `burst` is how many of these permits start at once after a quiet time.
    #[pyo3(signature = (starts, period, burst=1))]
    fn set_rate(
        &self,
        starts: Number<u64>,
        period: Seconds,
        #[pyo3(from_py_with = whole)] burst: u32,
    ) -> Pending {
        self.declared.operation("Semaphore.set_rate", move |semaphore| async move {
            semaphore.set_rate(starts.0, period.0, burst).await?;
            Ok(Value::None)
        })
    }

    /// Removes the rate for all programs, until one declares another.
    fn clear_rate(&self) -> Pending {
        self.declared.operation("Semaphore.clear_rate", |semaphore| async move {
            semaphore.clear_rate().await?;
            Ok(Value::None)
        })
    }

    /// Stops granting permits until `resume`. Holders keep their permits, and waiters keep their places.
    ///
    /// Statistics show `reason`, and `by`: who pauses the semaphore, by default the host and the process id.
    #[pyo3(signature = (*, by=None, reason=None))]
    fn pause(&self, by: Option<String>, reason: Option<String>) -> Pending {
        self.declared.operation("Semaphore.pause", move |semaphore| async move {
            let mut pause = semaphore.pause();
            if let Some(by) = by {
                pause = pause.by(by);
            }
            if let Some(reason) = reason {
                pause = pause.reason(reason);
            }
            pause.await?;
            Ok(Value::None)
        })
    }

    /// Ends a `pause`. Waiters are granted the free permits in their order.
    fn resume(&self) -> Pending {
        self.declared.operation("Semaphore.resume", |semaphore| async move {
            semaphore.resume().await?;
            Ok(Value::None)
        })
    }

    /// Pauses the semaphore, and waits until no permit is held. The semaphore stays paused.
    ///
    /// `within` is the longest wait, in seconds. After that the drain raises TimedOut. For `by` and `reason` see `pause`.
    #[pyo3(signature = (*, within=None, by=None, reason=None))]
    fn drain(
        &self,
        within: Option<Seconds>,
        by: Option<String>,
        reason: Option<String>,
    ) -> Pending {
        self.declared.operation("Semaphore.drain", move |semaphore| async move {
            let mut drain = semaphore.drain();
            if let Some(within) = given(within) {
                drain = drain.within(within);
            }
            if let Some(by) = by {
                drain = drain.by(by);
            }
            if let Some(reason) = reason {
                drain = drain.reason(reason);
            }
            drain.await?;
            Ok(Value::None)
        })
    }

    /// Removes the semaphore with its limits and its last fence from the store.
    ///
    /// Raises InUse if it has holders or waiters, and Unknown if the store does not know it.
    fn forget(&self) -> Pending {
        self.declared.operation("Semaphore.forget", |semaphore| async move {
            semaphore.forget().await?;
            Ok(Value::None)
        })
    }

    fn __repr__(&self) -> String {
        // Without a declaration, the capacity in the store applies, whatever it is.
        let capacity = if self.declared.options().declares {
            format!(" capacity={}", self.capacity())
        } else {
            String::new()
        };
        format!("<leasehold.Semaphore {:?}{capacity}>", self.name())
    }
}
