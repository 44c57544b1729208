//! `async with` and `with`: a permit, a lock or a pool lease for the time of a block.
//!
//! A context may be entered many times, also by several tasks or threads at once. An exit does not say which entry it
//! ends. So each entry records its owner, the task or thread that made it, except for one that is alone: to ask for the
//! owner costs time. An exit ends the newest entry of its own task or thread, or else the entry without an owner.
//!
//! A semaphore and a lock are contexts, too: their classes inherit this one.

use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use pyo3::exceptions::{PyGeneratorExit, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::ending::Inside;
use crate::failure::Failure;
use crate::guard::GuardObject;
use crate::interpreter::{current_owner, running_loop};
use crate::lock::DeclaredLock;
use crate::pending::{Completion, Id, Outcome, Pending, Value, Work};
use crate::pool::DeclaredPool;
use crate::semaphore::DeclaredSemaphore;
use crate::wake::lock;
use crate::watch::Watch;

/// What a context acquires.
pub(crate) enum Source {
    Semaphore { declared: Arc<DeclaredSemaphore>, within: Option<Duration>, weight: u32 },
    Lock(Arc<DeclaredLock>, Option<Duration>),
    Pool(Arc<DeclaredPool>, String, Option<Duration>),
}

/// A context manager that holds a permit, a lock or a pool lease during its block. Use it with `async with` or `with`.
///
/// It may be entered many times, also by several tasks or threads at once.
#[pyclass(frozen, subclass, weakref, module = "leasehold", name = "HeldContext")]
pub(crate) struct Context {
    source: Source,
    cancel_on_loss: bool,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// Made while there was no other entry.
    unowned: Option<Entry>,
    owned: Vec<(usize, Entry)>,
}

/// One block.
struct Entry {
    guard: GuardObject,
    watch: Option<Arc<Watch>>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.end();
        }
    }
}

impl Context {
    pub(crate) fn new(source: Source, cancel_on_loss: bool) -> Self {
        Self { source, cancel_on_loss, entries: Mutex::default() }
    }

    fn work(&self) -> PyResult<Work> {
        Ok(match &self.source {
            Source::Semaphore { declared, within, weight } => declared.acquire(*within, *weight)?.0,
            Source::Lock(declared, within) => declared.acquire_within(*within),
            Source::Pool(declared, instance, within) => {
                declared.acquire_within(instance.clone(), *within)
            }
        })
    }

    fn enter(slf: Bound<'_, Self>) -> PyResult<Pending> {
        let work = slf.get().work()?;
        Ok(Pending::new(work, Completion::Enter(slf.unbind()), Id::None))
    }

    /// Keeps the permit, lock or pool lease until the block is left.
    pub(crate) fn entered(slf: &Py<Self>, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
        let Value::Grant(Some(grant)) = outcome? else {
            return Err(PyRuntimeError::new_err("an acquire returned nothing"));
        };
        let this = slf.get();
        let watch = if this.cancel_on_loss { Watch::begin(py, &grant)? } else { None };
        let guard = grant.guard(py)?;
        if let Some(watch) = &watch {
            guard.slot().watched_by(watch);
        }
        let object = guard.object(py);
        let entry = Entry { guard, watch };
        let mut entries = lock(&this.entries);
        if entries.unowned.is_none() && entries.owned.is_empty() {
            entries.unowned = Some(entry);
            return Ok(object);
        }
        drop(entries);
        let owner = current_owner(py)?;
        lock(&this.entries).owned.push((owner, entry));
        Ok(object)
    }

    fn leave(&self, py: Python<'_>) -> PyResult<Entry> {
        let mut entries = lock(&self.entries);
        if entries.owned.is_empty() {
            return entries.unowned.take().ok_or_else(never_entered);
        }
        drop(entries);
        let owner = current_owner(py)?;
        let mut entries = lock(&self.entries);
        let index = entries.owned.iter().rposition(|(by, _)| *by == owner);
        match index {
            Some(index) => Ok(entries.owned.remove(index).1),
            // Entered in one task and left in another, as fixtures of pytest are.
            None => match entries.unowned.take() {
                Some(entry) => Ok(entry),
                None if entries.owned.len() == 1 => Ok(entries.owned.remove(0).1),
                None => Err(PyRuntimeError::new_err(
                    "several tasks or threads are inside this context, and this one is not: make a context for each of them",
                )),
            },
        }
    }

    /// Returns the release, or None if there is nothing to wait for.
    fn exit(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        exception: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Pending>> {
        let mut entry = self.leave(py)?;
        let cancelled = entry.watch.take().and_then(|watch| watch.end());
        let grant = match entry.guard.slot().take() {
            Ok(grant) => grant,
            // The parent process has entered the block, and the permit is the parent's.
            Err(Failure::Forked(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let lost = if self.cancel_on_loss {
            grant.as_ref().and_then(|grant| grant.check().err()).filter(|lost| !lost.is_the_end())
        } else {
            None
        };
        if let Some(cancelled) = cancelled {
            // The release continues in the background: the store may be unreachable, and the caller must learn of the loss now.
            drop(grant);
            // A block that ends normally has swallowed the cancellation.
            if cancelled.ends(py, exception)? || exception.is_none() {
                // The body may have released or detached it. Then nothing was left to check.
                let lost = lost.unwrap_or_else(|| entry.guard.lost(cancelled.reason()));
                let raised = PyErr::from(lost);
                if let Some(exception) = exception {
                    raised.set_cause(py, Some(PyErr::from_value(exception.clone())));
                }
                return Err(raised);
            }
            return Ok(None);
        }
        drop(entry);
        if let Some(lost) = lost
            && exception.is_none()
            && kind.is_none()
        {
            return Err(lost.into());
        }
        let Some(grant) = grant else { return Ok(None) };
        if kind.is_some_and(|kind| kind.is(py.get_type::<PyGeneratorExit>())) {
            // A coroutine that is being closed must not wait.
            drop(grant);
            return Ok(None);
        }
        let mut release = grant.release();
        match release.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())) {
            Poll::Ready(Ok(_)) => Ok(None),
            Poll::Ready(outcome) => Exit.finish(py, outcome).map(|_| None),
            Poll::Pending => {
                Ok(Some(Pending::new(Work::Boxed(release), Completion::Exit(Exit), Id::None)))
            }
        }
    }
}

fn never_entered() -> PyErr {
    PyRuntimeError::new_err("this context was left more often than it was entered")
}

#[pymethods]
impl Context {
    #[classmethod]
    fn __class_getitem__(class: &Bound<'_, PyType>, item: &Bound<'_, PyAny>) -> Py<PyAny> {
        let _ = item;
        class.clone().into_any().unbind()
    }

    fn __aenter__(slf: Bound<'_, Self>) -> PyResult<Pending> {
        Self::enter(slf)
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
        match self.exit(py, kind.as_ref(), exception.as_ref())? {
            Some(pending) => Ok(Py::new(py, pending)?.into_any()),
            None => Completed::get(py),
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Option<Py<PyAny>>> {
        let py = slf.py();
        if !running_loop(py)?.is_none() {
            return Err(Failure::WrongThread(
                "use `async with` instead of `with`: this thread runs an event loop, which `with` would block",
            )
            .into());
        }
        Self::enter(slf)?.block(py)
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
        match self.exit(py, kind.as_ref(), exception.as_ref())? {
            Some(pending) => pending.block(py).map(drop),
            None => Ok(()),
        }
    }
}

/// The end of a block, after the release.
pub(crate) struct Exit;

impl Exit {
    /// A release that fails does not replace the result of the block.
    #[allow(clippy::unused_self)]
    pub(crate) fn finish(self, py: Python<'_>, outcome: Outcome) -> PyResult<Option<Py<PyAny>>> {
        if let Err(failure) = outcome
            && !failure.is_the_end()
        {
            let _inside = Inside::enter();
            let message = PyErr::from(failure).value(py).to_string();
            let logger = py.import("logging")?.call_method1("getLogger", ("leasehold",))?;
            logger.call_method1(
                "warning",
                (
                    "release failed after the block was left; it continues in the background: %s",
                    message,
                ),
            )?;
        }
        Ok(None)
    }
}

/// An awaitable that is done.
#[pyclass(frozen, module = "leasehold._leasehold", name = "_Nothing")]
pub(crate) struct Completed;

static COMPLETED: PyOnceLock<Py<Completed>> = PyOnceLock::new();

impl Completed {
    fn get(py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(COMPLETED.get_or_try_init(py, || Py::new(py, Self))?.clone_ref(py).into_any())
    }
}

#[pymethods]
impl Completed {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[allow(clippy::unused_self)]
    fn __next__(&self) -> Option<Py<PyAny>> {
        None
    }
}
