//! The fair semaphore.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use leasehold::{AcquisitionId, Client as Engine, Semaphore as EngineSemaphore};
use pyo3::prelude::*;

use crate::client::Shared;
use crate::context::{Context, Source};
use crate::failure::Failure;
use crate::guard::Held;
use crate::pending::{Id, Outcome, Pending, Then, Value, Work};
use crate::process::PerProcess;
use crate::seconds::{Seconds, given};
use crate::values;
use crate::wake::lock;

/// How a semaphore was declared.
pub(crate) struct SemaphoreOptions {
    pub(crate) capacity: u32,
    pub(crate) declares: bool,
    pub(crate) ttl: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_acquire_time: Option<Duration>,
    pub(crate) label: Option<String>,
    pub(crate) numbered: bool,
    pub(crate) rate: Option<(u64, Duration)>,
    pub(crate) burst: Option<u32>,
}

/// A semaphore as it was declared. It is built when the client is open, in each process anew.
pub(crate) struct Declared {
    client: Arc<Shared>,
    name: String,
    options: SemaphoreOptions,
    /// Only with the GIL held.
    built: Mutex<Option<PerProcess<EngineSemaphore>>>,
}

impl Declared {
    pub(crate) fn new(
        client: Arc<Shared>,
        name: String,
        options: SemaphoreOptions,
    ) -> PyResult<Arc<Self>> {
        let declared = Arc::new(Self { client, name, options, built: Mutex::new(None) });
        if declared.now()?.is_none() {
            // What does not depend on the store is checked at once.
            declared.build(&Engine::memory())?;
        }
        Ok(declared)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn build(&self, engine: &Engine) -> Result<EngineSemaphore, Failure> {
        let options = &self.options;
        let mut builder = engine.semaphore(&self.name, options.capacity);
        if !options.declares {
            builder = builder.unless_declared();
        }
        if let Some(ttl) = options.ttl {
            builder = builder.ttl(ttl);
        }
        if let Some(lease) = options.lease {
            builder = builder.lease(lease);
        }
        if let Some(limit) = options.max_acquire_time {
            builder = builder.max_acquire_time(limit);
        }
        if let Some(label) = &options.label {
            builder = builder.label(label);
        }
        if options.numbered {
            builder = builder.numbered();
        }
        if let Some((starts, period)) = options.rate {
            builder = builder.rate(starts, period);
        }
        if let Some(burst) = options.burst {
            builder = builder.burst(burst);
        }
        Ok(builder.build()?)
    }

    /// None while the client is not open.
    fn now(&self) -> Result<Option<EngineSemaphore>, Failure> {
        if let Some(built) = lock(&self.built).as_ref().and_then(PerProcess::get) {
            return Ok(Some(built.clone()));
        }
        self.client.now()?.map(|engine| self.keep(&engine)).transpose()
    }

    fn keep(&self, engine: &Engine) -> Result<EngineSemaphore, Failure> {
        let built = self.build(engine)?;
        *lock(&self.built) = Some(PerProcess::new(built.clone()));
        Ok(built)
    }

    /// Opens the client if need be.
    async fn opened(&self) -> Result<EngineSemaphore, Failure> {
        if let Some(built) = self.now()? {
            return Ok(built);
        }
        let engine = self.client.opened().await?;
        self.keep(&engine)
    }

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
        let known = id.clone();
        let work = Work::boxed(async move {
            let acquire = acquire(&declared.opened().await?);
            let _ = known.set(acquire.id());
            Ok(Value::Held(Some(Held::Permit(acquire.await?, declared))))
        });
        Ok((work, Id::Later(id)))
    }
}

/// A fair counting semaphore: first come, first served.
///
/// Semaphores with the same name share their permits, in all programs that use the same store.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Semaphore {
    declared: Arc<Declared>,
    /// For `async with semaphore`.
    context: Mutex<Option<Py<Context>>>,
}

impl Semaphore {
    pub(crate) fn new(declared: Arc<Declared>) -> Self {
        Self { declared, context: Mutex::new(None) }
    }

    /// An operation on the semaphore, which opens the client if need be.
    fn operation<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce(EngineSemaphore) -> F + Send + 'static,
    ) -> Pending {
        let declared = self.declared.clone();
        Pending::of(name, async move { work(declared.opened().await?).await })
    }

    fn context(&self, py: Python<'_>) -> PyResult<Py<Context>> {
        if let Some(context) = &*lock(&self.context) {
            return Ok(context.clone_ref(py));
        }
        let source = Source::Semaphore { declared: self.declared.clone(), within: None, weight: 1 };
        let context = Py::new(py, Context::new(source, true))?;
        Ok(lock(&self.context).get_or_insert(context).clone_ref(py))
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

    /// The capacity by the newest declaration in this client.
    #[getter]
    fn capacity(&self) -> u32 {
        let built = self.declared.now().ok().flatten();
        built.map_or(self.declared.options.capacity, |semaphore| semaphore.capacity())
    }

    /// A block during which a permit is held: `async with semaphore.permit() as permit`, or `with` in a thread.
    ///
    /// `within` is the longest wait in seconds, and `weight` the number of units. When the permit is lost, the body of an `async with`
    /// is cancelled, and the block raises Lost. A body that cannot be cancelled, as that of a `with`, runs to its end, and then the
    /// block raises Lost. With `cancel_on_loss=False` neither happens.
    #[pyo3(signature = (*, within=None, weight=1, cancel_on_loss=true))]
    fn permit(&self, within: Option<Seconds>, weight: u32, cancel_on_loss: bool) -> Context {
        let source =
            Source::Semaphore { declared: self.declared.clone(), within: given(within), weight };
        Context::new(source, cancel_on_loss)
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

    /// Waits for a permit. `within` is the longest wait in seconds, and `weight` the number of units.
    #[pyo3(signature = (*, within=None, weight=1))]
    fn acquire(&self, within: Option<Seconds>, weight: u32) -> PyResult<Pending> {
        let (work, id) = self.declared.acquire(given(within), weight)?;
        Ok(Pending::new(work, Then::Return("Semaphore.acquire"), id))
    }

    /// A permit if one is free and nobody waits for it; None otherwise.
    #[pyo3(signature = (*, weight=1))]
    fn try_acquire(&self, weight: u32) -> Pending {
        let declared = self.declared.clone();
        self.operation("Semaphore.try_acquire", move |semaphore| async move {
            let permit = semaphore.try_acquire().weight(weight).await?;
            Ok(Value::Held(permit.map(|permit| Held::Permit(permit, declared))))
        })
    }

    /// Releases a permit by its id. True if it was held until now.
    fn release(&self, id: &str) -> PyResult<Pending> {
        let id = acquisition_id(id)?;
        Ok(self.operation("Semaphore.release", move |semaphore| async move {
            Ok(Value::Bool(semaphore.release(&id).await?))
        }))
    }

    /// Releases a holder or a waiter by the id that the statistics show, also one of another program. True if it was there.
    fn release_member(&self, id: String) -> Pending {
        self.operation("Semaphore.release_member", move |semaphore| async move {
            Ok(Value::Bool(semaphore.release_member(&id).await?))
        })
    }

    /// How many waiters come before this one; None if it does not wait. The id is that of an acquire.
    fn position(&self, id: &str) -> PyResult<Pending> {
        let id = acquisition_id(id)?;
        Ok(self.operation("Semaphore.position", move |semaphore| async move {
            Ok(Value::Position(semaphore.position(&id).await?))
        }))
    }

    /// Whether an acquire would have to wait now.
    fn locked(&self) -> Pending {
        self.operation("Semaphore.locked", |semaphore| async move {
            Ok(Value::Bool(semaphore.locked().await?))
        })
    }

    /// What is held, and how many wait.
    fn stats(&self) -> Pending {
        self.operation("Semaphore.stats", |semaphore| async move {
            let stats = semaphore.stats().await?;
            Ok(Value::made(move |py| values::stats(py, &stats)))
        })
    }

    /// Declares another capacity, for everybody.
    fn set_capacity(&self, capacity: u32) -> Pending {
        self.operation("Semaphore.set_capacity", move |semaphore| async move {
            semaphore.set_capacity(capacity).await?;
            Ok(Value::None)
        })
    }

    /// Sets the capacity, for everybody, until `unpin`, whatever programs declare.
    fn pin(&self, capacity: u32) -> Pending {
        self.operation("Semaphore.pin", move |semaphore| async move {
            semaphore.pin(capacity).await?;
            Ok(Value::None)
        })
    }

    /// Ends a `pin`: the newest declaration counts again.
    fn unpin(&self) -> Pending {
        self.operation("Semaphore.unpin", |semaphore| async move {
            semaphore.unpin().await?;
            Ok(Value::None)
        })
    }

    /// Sets the rate, for everybody: so many starts in a period of so many seconds.
    #[pyo3(signature = (starts, period, burst=1))]
    fn set_rate(&self, starts: u64, period: Seconds, burst: u32) -> Pending {
        self.operation("Semaphore.set_rate", move |semaphore| async move {
            semaphore.set_rate(starts, period.0, burst).await?;
            Ok(Value::None)
        })
    }

    /// Removes the rate, for everybody.
    fn clear_rate(&self) -> Pending {
        self.operation("Semaphore.clear_rate", |semaphore| async move {
            semaphore.clear_rate().await?;
            Ok(Value::None)
        })
    }

    /// Grants no more permits until `resume`. Holders keep theirs, and waiters their places.
    #[pyo3(signature = (*, by=None, reason=None))]
    fn pause(&self, by: Option<String>, reason: Option<String>) -> Pending {
        self.operation("Semaphore.pause", move |semaphore| async move {
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

    /// Ends a `pause`.
    fn resume(&self) -> Pending {
        self.operation("Semaphore.resume", |semaphore| async move {
            semaphore.resume().await?;
            Ok(Value::None)
        })
    }

    /// Pauses the semaphore, and waits until nobody holds a permit, for at most `within` seconds. It stays paused.
    #[pyo3(signature = (*, within=None, by=None, reason=None))]
    fn drain(
        &self,
        within: Option<Seconds>,
        by: Option<String>,
        reason: Option<String>,
    ) -> Pending {
        self.operation("Semaphore.drain", move |semaphore| async move {
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

    /// Removes all that the store knows of the semaphore, if nobody holds a permit or waits for one.
    fn forget(&self) -> Pending {
        self.operation("Semaphore.forget", |semaphore| async move {
            semaphore.forget().await?;
            Ok(Value::None)
        })
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Semaphore {:?} capacity={}>", self.name(), self.capacity())
    }
}
