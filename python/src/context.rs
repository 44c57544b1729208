//! `async with` and `with`: a permit, a lock or a lease for the time of a block.
//!
//! A context may be entered many times, also by several tasks or threads at once. Leaving it names nobody, so each entry but the first
//! remembers which task or thread made it; an exit that finds no entry of its own takes the one that nobody has signed.
//!
//! # Loss
//! The engine wakes a [`Watch`] when a lease is lost. The event loop of the body then cancels the body's task, and leaving the
//! block turns exactly that cancellation into `leasehold.Lost`, as `asyncio.timeout` does for `TimeoutError`. A body is always
//! suspended while the event loop does this, so that it does not run a step further than the one during which the lease was lost.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

use leasehold::{LossReason, Lost};
use pyo3::exceptions::{PyGeneratorExit, PyRuntimeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::failure::{Failure, reason};
use crate::guard::{Guarded, Held};
use crate::lock::DeclaredLock;
use crate::pending::{Id, Outcome, Pending, Then, Value, Work};
use crate::pool::DeclaredPool;
use crate::process::PerProcess;
use crate::semaphore::Declared;
use crate::wake::{Queue, lock, queue_of, running_loop};

/// What tells our cancellation from others before Python 3.11, which has no other means.
const MESSAGE: &str = "leasehold: what this block held was lost";

/// What a context acquires.
pub(crate) enum Source {
    Semaphore { declared: Arc<Declared>, within: Option<Duration>, weight: u32 },
    Lock(Arc<DeclaredLock>, Option<Duration>),
    Pool(Arc<DeclaredPool>, String, Option<Duration>),
}

/// A block during which a permit, a lock or a lease is held. Use it with `async with` or `with`.
#[pyclass(frozen, weakref, module = "leasehold", name = "HeldContext")]
pub(crate) struct Context {
    source: Source,
    cancel_on_loss: bool,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// Made while there was no other entry. Nobody has asked who made it.
    unsigned: Option<Entry>,
    signed: Vec<(usize, Entry)>,
}

/// One block.
struct Entry {
    guard: Guarded,
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
                declared.lease_within(instance.clone(), *within)
            }
        })
    }

    pub(crate) fn enter(slf: &Bound<'_, Self>) -> PyResult<Pending> {
        let work = slf.get().work()?;
        Ok(Pending::new(work, Then::Enter(slf.clone().unbind()), Id::None))
    }

    /// Keeps what was acquired.
    pub(crate) fn entered(slf: &Py<Self>, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
        let Value::Held(Some(held)) = outcome? else {
            return Err(PyRuntimeError::new_err("an acquire returned nothing"));
        };
        let this = slf.get();
        let watch = if this.cancel_on_loss { Watch::begin(py, &held)? } else { None };
        let guard = held.guard(py)?;
        if let Some(watch) = &watch {
            guard.slot().watched_by(watch);
        }
        let object = guard.object(py);
        let entry = Entry { guard, watch };
        let mut entries = lock(&this.entries);
        if entries.unsigned.is_none() && entries.signed.is_empty() {
            entries.unsigned = Some(entry);
            return Ok(object);
        }
        drop(entries);
        let owner = current_owner(py)?;
        lock(&this.entries).signed.push((owner, entry));
        Ok(object)
    }

    fn leave(&self, py: Python<'_>) -> PyResult<Entry> {
        let mut entries = lock(&self.entries);
        if entries.signed.is_empty() {
            return entries.unsigned.take().ok_or_else(never_entered);
        }
        drop(entries);
        let owner = current_owner(py)?;
        let mut entries = lock(&self.entries);
        let own = entries.signed.iter().rposition(|(signed, _)| *signed == owner);
        match own {
            Some(own) => Ok(entries.signed.remove(own).1),
            // Entered in one task and left in another, as fixtures of pytest are.
            None => match entries.unsigned.take() {
                Some(entry) => Ok(entry),
                None if entries.signed.len() == 1 => Ok(entries.signed.remove(0).1),
                None => Err(PyRuntimeError::new_err(
                    "several tasks or threads are inside this context, and this one is not: give each its own .permit()",
                )),
            },
        }
    }

    /// The release, or what is raised instead. None if there is nothing to wait for.
    pub(crate) fn exit(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        exception: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Pending>> {
        let mut entry = self.leave(py)?;
        let watch = entry.watch.take();
        let cancelled = watch.as_ref().and_then(|watch| watch.end());
        let held = match entry.guard.slot().take() {
            Ok(held) => held,
            // A block that the parent process has entered: the permit is the parent's.
            Err(Failure::Forked(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        drop(entry);
        let lost = if self.cancel_on_loss {
            held.as_ref().and_then(|held| held.check().err())
        } else {
            None
        };
        if let (Some(cancelled), Some(watch)) = (cancelled, &watch) {
            // The release goes on in the background: the store may be unreachable, and the caller must know now.
            drop(held);
            // A block that ends normally has swallowed the cancellation.
            if watch.is_ours(py, &cancelled, exception)? || exception.is_none() {
                let raised = PyErr::from(lost.unwrap_or(Failure::Lost(cancelled.reason)));
                if let Some(exception) = exception {
                    raised.set_cause(py, Some(PyErr::from_value(exception.clone())));
                }
                return Err(raised);
            }
            return Ok(None);
        }
        if let Some(lost) = lost
            && exception.is_none()
            && kind.is_none()
        {
            return Err(lost.into());
        }
        let Some(held) = held else { return Ok(None) };
        if kind.is_some_and(|kind| kind.is(py.get_type::<PyGeneratorExit>())) {
            // A coroutine that is being closed must not wait.
            drop(held);
            return Ok(None);
        }
        let mut release = held.release();
        match release.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())) {
            Poll::Ready(Ok(_)) => Ok(None),
            Poll::Ready(outcome) => Exit.finish(py, outcome).map(|_| None),
            Poll::Pending => {
                Ok(Some(Pending::new(Work::Boxed(release), Then::Exit(Exit), Id::None)))
            }
        }
    }

    pub(crate) fn aexit(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        exception: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        match self.exit(py, kind, exception)? {
            Some(pending) => Ok(Py::new(py, pending)?.into_any()),
            None => Nothing::get(py),
        }
    }

    pub(crate) fn exit_now(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        exception: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        match self.exit(py, kind, exception)? {
            Some(pending) => pending.block(py).map(drop),
            None => Ok(()),
        }
    }
}

fn never_entered() -> PyErr {
    PyRuntimeError::new_err("this context was left more often than it was entered")
}

#[pymethods]
impl Context {
    fn __aenter__(slf: Bound<'_, Self>) -> PyResult<Pending> {
        Self::enter(&slf)
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
        self.aexit(py, kind.as_ref(), exception.as_ref())
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Option<Py<PyAny>>> {
        Self::enter(&slf)?.block(slf.py())
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
        self.exit_now(py, kind.as_ref(), exception.as_ref())
    }
}

/// The end of a block, after the release.
pub(crate) struct Exit;

impl Exit {
    /// A release that fails does not replace the result of the block.
    #[allow(clippy::unused_self)]
    pub(crate) fn finish(self, py: Python<'_>, outcome: Outcome) -> PyResult<Option<Py<PyAny>>> {
        if let Err(failure) = outcome {
            let message = PyErr::from(failure).value(py).to_string();
            let logger = py.import("logging")?.call_method1("getLogger", ("leasehold",))?;
            logger.call_method1(
                "warning",
                (
                    "release failed after the block was left, and goes on in the background: %s",
                    message,
                ),
            )?;
        }
        Ok(None)
    }
}

/// An awaitable that is done.
#[pyclass(frozen, module = "leasehold._leasehold", name = "_Nothing")]
pub(crate) struct Nothing;

static NOTHING: PyOnceLock<Py<Nothing>> = PyOnceLock::new();

impl Nothing {
    fn get(py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(NOTHING.get_or_try_init(py, || Py::new(py, Self))?.clone_ref(py).into_any())
    }
}

#[pymethods]
impl Nothing {
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

static CURRENT_TASK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static CURRENT_TASKS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static GET_IDENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static WEAKREF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static CANCELLED: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The 11 of Python 3.11.
fn minor_version(py: Python<'_>) -> u8 {
    static MINOR: OnceLock<u8> = OnceLock::new();
    *MINOR.get_or_init(|| py.version_info().minor)
}

/// The task that runs in this event loop, or None.
fn current_task<'py>(event_loop: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = event_loop.py();
    if minor_version(py) >= 12 {
        return CURRENT_TASK.import(py, "asyncio", "current_task")?.call1((event_loop,));
    }
    // What `current_task` looks at there, and it is not written in C.
    let tasks = CURRENT_TASKS.import(py, "asyncio.tasks", "_current_tasks")?;
    tasks.call_method1(intern!(py, "get"), (event_loop,))
}

/// The task that runs, or else the thread. Only compared.
fn current_owner(py: Python<'_>) -> PyResult<usize> {
    let event_loop = running_loop(py)?;
    if !event_loop.is_none() {
        return Ok(current_task(&event_loop)?.as_ptr() as usize);
    }
    GET_IDENT.import(py, "threading", "get_ident")?.call0()?.extract()
}

/// Cancels a task when a permit, a lock or a lease is lost.
pub(crate) struct Watch {
    queue: Arc<Queue>,
    state: Mutex<Watching>,
    queued: AtomicBool,
}

struct Watching {
    /// None once the loss was seen, or the block was left.
    lost: Option<PerProcess<Lost>>,
    /// A weak reference: the task refers to the block.
    task: Option<Py<PyAny>>,
    /// How often the task was asked to cancel when the block was entered.
    cancelling: Option<usize>,
    /// Set when this has cancelled the task.
    reason: Option<&'static str>,
}

/// A cancellation that a [`Watch`] has asked for.
pub(crate) struct Cancelled {
    task: Option<Py<PyAny>>,
    cancelling: Option<usize>,
    reason: &'static str,
}

impl Watch {
    /// None outside of a task: then there is nothing to cancel.
    fn begin(py: Python<'_>, held: &Held) -> PyResult<Option<Arc<Self>>> {
        let event_loop = running_loop(py)?;
        if event_loop.is_none() {
            return Ok(None);
        }
        let task = current_task(&event_loop)?;
        if task.is_none() {
            return Ok(None);
        }
        let cancelling = if minor_version(py) >= 11 {
            Some(task.call_method0(intern!(py, "cancelling"))?.extract()?)
        } else {
            None
        };
        let task = WEAKREF.import(py, "weakref", "ref")?.call1((task,))?.unbind();
        let state = Watching {
            lost: Some(PerProcess::new(held.lost())),
            task: Some(task),
            cancelling,
            reason: None,
        };
        let watch = Arc::new(Self {
            queue: queue_of(&event_loop)?,
            state: Mutex::new(state),
            queued: AtomicBool::new(false),
        });
        // If it is lost already, the body is cancelled at its first await.
        if watch.poll().is_some() {
            watch.clone().wake();
        }
        Ok(Some(watch))
    }

    /// Why it was lost, if it was.
    fn poll(self: &Arc<Self>) -> Option<LossReason> {
        let waker = self.clone().into();
        let mut state = lock(&self.state);
        let lost = state.lost.as_mut().and_then(PerProcess::get_mut)?;
        match Pin::new(lost).poll(&mut TaskContext::from_waker(&waker)) {
            Poll::Ready(reason) => Some(reason),
            Poll::Pending => None,
        }
    }

    /// On the loop's thread: cancels the task if it is lost.
    pub(crate) fn look(self: &Arc<Self>, py: Python<'_>) {
        self.queued.store(false, Ordering::Release);
        let Some(why) = self.poll() else { return };
        let mut state = lock(&self.state);
        let lost = state.lost.take();
        state.reason = Some(reason(why));
        let task = state.task.as_ref().map(|task| task.clone_ref(py));
        drop(state);
        drop(lost);
        let cancel = || -> PyResult<()> {
            let Some(task) = task else { return Ok(()) };
            let task = task.bind(py).call0()?;
            if !task.is_none() {
                task.call_method1(intern!(py, "cancel"), (MESSAGE,))?;
            }
            Ok(())
        };
        if let Err(error) = cancel() {
            error.write_unraisable(py, None);
        }
    }

    /// Stops watching: a loss from now on is none.
    pub(crate) fn stop(&self) {
        let lost = lock(&self.state).lost.take();
        drop(lost);
    }

    /// Ends the block. Returns what it has cancelled.
    fn end(&self) -> Option<Cancelled> {
        let mut state = lock(&self.state);
        let (lost, task) = (state.lost.take(), state.task.take());
        let (reason, cancelling) = (state.reason.take(), state.cancelling);
        drop(state);
        drop(lost);
        reason.map(|reason| Cancelled { task, cancelling, reason })
    }

    /// Whether the block ends by the cancellation that this has asked for, and no other.
    #[allow(clippy::unused_self)]
    fn is_ours(
        &self,
        py: Python<'_>,
        cancelled: &Cancelled,
        exception: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let class = CANCELLED.import(py, "asyncio", "CancelledError")?;
        let by_cancellation = match exception {
            Some(exception) => exception.is_instance(class)?,
            None => false,
        };
        let task = match &cancelled.task {
            Some(task) => task.bind(py).call0()?,
            None => return Ok(by_cancellation),
        };
        match cancelled.cancelling {
            Some(before) if !task.is_none() => {
                let now: usize = task.call_method0(intern!(py, "uncancel"))?.extract()?;
                Ok(by_cancellation && now <= before)
            }
            _ => {
                let Some(exception) = exception.filter(|_| by_cancellation) else {
                    return Ok(false);
                };
                let first = exception.getattr(intern!(py, "args"))?.get_item(0);
                Ok(first.is_ok_and(|first| first.eq(MESSAGE).unwrap_or(false)))
            }
        }
    }
}

impl Wake for Watch {
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.queue.clone().push_loss(self);
        }
    }
}
