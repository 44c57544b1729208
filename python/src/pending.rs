//! Operations that may wait: awaited in asyncio, or waited for in a thread.
//!
//! A `Pending` holds a Rust future and is its own iterator. Each step polls the future once. If it is ready, the result is raised as
//! `StopIteration` at once, without a turn of the event loop. Otherwise the step yields a new asyncio future, which the waker resolves
//! through the loop's [queue](crate::wake).
//!
//! `throw` and `close` drop the Rust future before they return. That makes cancellation safe: a task that is cancelled after the permit
//! was granted, but before the task was resumed, gets the exception through `throw`, and dropping the future releases the permit.

use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use leasehold::{Acquire, AcquisitionId};
use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning, PyStopIteration, PySystemExit};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyType};

use crate::context::{Context, Exit};
use crate::ending::{Inside, are_we_left_behind};
use crate::failure::{Failure, INHERITED};
use crate::guard::Grant;
use crate::interpreter::{is_main_thread, running_loop};
use crate::process::PerProcess;
use crate::semaphore::DeclaredSemaphore;
use crate::wake::{ParkedThread, Waiter, lock, queue_of};

/// How often a thread that waits looks for signals, such as Ctrl-C. Only the main thread receives them.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(50);

/// How long a task that the end of the interpreter has left behind sleeps at a time.
const UNTIL_THE_END: Duration = Duration::from_millis(50);

type MakeObject = dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send;

/// What a future resolves to.
pub(crate) enum Value {
    None,
    Bool(bool),
    Position(Option<usize>),
    Text(&'static str),
    /// A permit, a lock or a pool lease; None if there was none.
    Grant(Option<Grant>),
    /// Made with the GIL held.
    Made(Box<MakeObject>),
}

impl Value {
    pub(crate) fn made(
        make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> Self {
        Self::Made(Box::new(make))
    }

    fn into_py(self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Ok(match self {
            Self::None | Self::Position(None) | Self::Grant(None) => None,
            Self::Bool(value) => Some(value.into_pyobject(py)?.to_owned().into_any().unbind()),
            Self::Position(Some(value)) => Some(value.into_pyobject(py)?.into_any().unbind()),
            Self::Text(value) => Some(value.into_pyobject(py)?.into_any().unbind()),
            Self::Grant(Some(grant)) => Some(grant.into_py(py)?),
            Self::Made(make) => Some(make(py)?),
        })
    }
}

pub(crate) type Outcome = Result<Value, Failure>;

pub(crate) type BoxFuture = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// The future of an operation.
pub(crate) enum Work {
    /// By far the most frequent operation, so it is not boxed.
    Acquire(Acquire, Arc<DeclaredSemaphore>),
    Boxed(BoxFuture),
}

impl Work {
    pub(crate) fn boxed(work: impl Future<Output = Outcome> + Send + 'static) -> Self {
        Self::Boxed(Box::pin(work))
    }

    fn poll(&mut self, cx: &mut TaskContext<'_>) -> Poll<Outcome> {
        match self {
            Self::Acquire(acquire, declared) => Pin::new(acquire)
                .poll(cx)
                .map(|permit| Ok(Value::Grant(Some(Grant::Permit(permit?, declared.clone()))))),
            Self::Boxed(work) => work.as_mut().poll(cx),
        }
    }
}

/// What is done with the result.
pub(crate) enum Completion {
    /// It is returned. The name of the operation is for the warning that it was never awaited.
    Return(&'static str),
    /// A context keeps it until it is left.
    Enter(Py<Context>),
    /// A context is left.
    Exit(Exit),
}

struct Operation {
    /// None once it is done.
    work: Option<PerProcess<Work>>,
    completion: Option<Completion>,
    /// Whether it was polled, that is, awaited or waited for.
    begun: bool,
    /// What wakes the task that awaits it.
    waiter: Option<Arc<Waiter>>,
}

/// An operation that may wait. Await it in asyncio, or call `wait()` to block the thread.
///
/// Nothing is sent to the store before that. `asyncio.create_task` accepts it, as it accepts a coroutine. It can be awaited once.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Pending {
    state: Mutex<Operation>,
    id: Id,
}

/// The id of an acquire.
pub(crate) enum Id {
    None,
    Known(AcquisitionId),
    /// Known as soon as the client is open.
    Later(Arc<OnceLock<AcquisitionId>>),
}

enum Step {
    Value(Option<Py<PyAny>>),
    Suspend(Py<PyAny>),
}

impl Pending {
    pub(crate) fn new(work: Work, completion: Completion, id: Id) -> Self {
        let work = Some(PerProcess::new(work));
        Self {
            state: Mutex::new(Operation {
                work,
                completion: Some(completion),
                begun: false,
                waiter: None,
            }),
            id,
        }
    }

    /// An operation whose result is returned.
    pub(crate) fn of(
        name: &'static str,
        work: impl Future<Output = Outcome> + Send + 'static,
    ) -> Self {
        Self::new(Work::boxed(work), Completion::Return(name), Id::None)
    }

    /// Polls once. No Python code runs in between, so no other thread can poll at the same time.
    fn poll(&self, waker: &Waker) -> PyResult<Poll<Outcome>> {
        let mut state = lock(&self.state);
        state.begun = true;
        let Some(work) = &mut state.work else { return Err(awaited_twice()) };
        let Some(ours) = work.get_mut() else {
            drop(state);
            return Err(INHERITED.into());
        };
        let polled = ours.poll(&mut TaskContext::from_waker(waker));
        if polled.is_ready() {
            state.work = None;
        }
        Ok(polled)
    }

    fn finish(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Option<Py<PyAny>>> {
        let _inside = Inside::enter();
        let completion = lock(&self.state).completion.take();
        match completion {
            Some(Completion::Enter(context)) => Context::entered(&context, py, outcome).map(Some),
            Some(Completion::Exit(exit)) => exit.finish(py, outcome),
            Some(Completion::Return(_)) | None => outcome?.into_py(py),
        }
    }

    /// Refuses a second use. In a forked child, the poll refuses it for a better reason.
    fn begin(&self) -> PyResult<()> {
        let state = lock(&self.state);
        let is_ours = state.work.as_ref().is_none_or(PerProcess::is_ours);
        if state.begun && is_ours { Err(awaited_twice()) } else { Ok(()) }
    }

    fn step(&self, py: Python<'_>) -> PyResult<Step> {
        // A future has one waker: if a second task took it over, the first would wait forever.
        if lock(&self.state).waiter.as_ref().is_some_and(|waiter| waiter.is_waiting()) {
            return Err(awaited_twice());
        }
        if are_we_left_behind() {
            return Ok(self.never(py));
        }
        // Mostly it is ready, and then needs no waker.
        if let Poll::Ready(outcome) = self.poll(Waker::noop())? {
            return self.finish(py, outcome).map(Step::Value);
        }
        let suspended = self.suspend(py);
        if suspended.is_err() {
            self.cancel();
        }
        suspended
    }

    /// A step of a task that is not resumed any more. None makes the loop ask again: to wait for a future would need Python code.
    fn never(&self, py: Python<'_>) -> Step {
        self.cancel();
        py.detach(|| std::thread::sleep(UNTIL_THE_END));
        Step::Suspend(py.None())
    }

    fn suspend(&self, py: Python<'_>) -> PyResult<Step> {
        let _inside = Inside::enter();
        let event_loop = running_loop(py)?;
        if event_loop.is_none() {
            return Err(PyRuntimeError::new_err(
                "no event loop runs in this thread: call .wait() instead of awaiting it",
            ));
        }
        let queue = queue_of(&event_loop)?;
        let future = event_loop.call_method0(intern!(py, "create_future"))?;
        // As the future's own iterator does: a task takes only a future that says so.
        future.setattr(intern!(py, "_asyncio_future_blocking"), true)?;
        if are_we_left_behind() {
            return Ok(self.never(py));
        }
        let waiter = Waiter::new(queue, future.clone().unbind());
        match self.poll(&waiter.clone().into()) {
            Ok(Poll::Pending) => {
                lock(&self.state).waiter = Some(waiter);
                Ok(Step::Suspend(future.unbind()))
            }
            Ok(Poll::Ready(outcome)) => {
                drop(waiter.forget());
                self.finish(py, outcome).map(Step::Value)
            }
            Err(error) => {
                drop(waiter.forget());
                Err(error)
            }
        }
    }

    /// Drops the future. A waiter leaves the queue, and what was granted is released.
    fn cancel(&self) {
        let mut state = lock(&self.state);
        state.begun = true;
        let (work, completion, waiter) =
            (state.work.take(), state.completion.take(), state.waiter.take());
        drop(state);
        drop(waiter.and_then(|waiter| waiter.forget()));
        drop(work);
        drop(completion);
    }

    /// Polls once, unless the end of the interpreter has left this thread behind.
    fn poll_in_thread(&self, waker: &Waker) -> PyResult<Poll<Outcome>> {
        if are_we_left_behind() {
            self.cancel();
            return Err(PySystemExit::new_err(()));
        }
        self.poll(waker)
    }

    /// Blocks the thread. Polls with the GIL held, and releases it to wait.
    pub(crate) fn block(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.begin()?;
        if !running_loop(py)?.is_none() {
            self.cancel();
            let what = "await it instead: .wait() would block the event loop of this thread";
            return Err(Failure::WrongThread(what).into());
        }
        if let Poll::Ready(outcome) = self.poll_in_thread(Waker::noop())? {
            return self.finish(py, outcome);
        }
        let parked = ParkedThread::new();
        let waker = parked.clone().into();
        let limit = is_main_thread(py)?.then_some(LOOK_FOR_SIGNALS);
        loop {
            if let Poll::Ready(outcome) = self.poll_in_thread(&waker)? {
                return self.finish(py, outcome);
            }
            while !parked.take() {
                py.detach(|| match limit {
                    Some(limit) => std::thread::park_timeout(limit),
                    None => std::thread::park(),
                });
                if limit.is_some()
                    && let Err(error) = py.check_signals()
                {
                    self.cancel();
                    return Err(error);
                }
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let state = lock(&self.state);
        let (begun, ours) = (state.begun, state.work.as_ref().is_some_and(PerProcess::is_ours));
        let name = match &state.completion {
            Some(Completion::Return(name)) => Some(*name),
            _ => None,
        };
        drop(state);
        self.cancel();
        if let (false, true, Some(name)) = (begun, ours, name) {
            Python::attach(|py| warn_never_awaited(py, name));
        }
    }
}

#[cold]
fn warn_never_awaited(py: Python<'_>, name: &str) {
    let _inside = Inside::enter();
    let message = format!("leasehold.{name} was never awaited: await it, or call .wait()");
    let Ok(message) = std::ffi::CString::new(message) else { return };
    // An exception that is being handled must survive the warning.
    let handled = PyErr::take(py);
    let category = py.get_type::<PyRuntimeWarning>();
    if let Err(error) = PyErr::warn(py, &category, &message, 1) {
        error.write_unraisable(py, None);
    }
    if let Some(handled) = handled {
        handled.restore(py);
    }
}

fn awaited_twice() -> PyErr {
    PyRuntimeError::new_err(
        "this operation was awaited or waited for already: call the method again",
    )
}

#[pymethods]
impl Pending {
    fn __await__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().begin()?;
        Ok(slf)
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        match self.step(py)? {
            Step::Suspend(future) => Ok(Some(future)),
            // Without a value, the end of the iteration needs no exception.
            Step::Value(None) => Ok(None),
            Step::Value(Some(value)) => Err(PyStopIteration::new_err((value,))),
        }
    }

    /// Resumes it, as the method of a generator does.
    fn send(&self, py: Python<'_>, value: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        drop(value);
        match self.step(py)? {
            Step::Suspend(future) => Ok(future),
            Step::Value(value) => Err(PyStopIteration::new_err((value,))),
        }
    }

    /// Cancels the operation and raises the exception, as the method of a generator does.
    #[pyo3(signature = (kind, value=None, traceback=None))]
    fn throw(
        &self,
        kind: Bound<'_, PyAny>,
        value: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.cancel();
        let exception = match value {
            Some(value) if value.is_instance_of::<pyo3::exceptions::PyBaseException>() => value,
            Some(value) if kind.is_instance_of::<PyType>() => kind.call1((value,))?,
            _ if kind.is_instance_of::<PyType>() => kind.call0()?,
            _ => kind,
        };
        if let Some(traceback) = traceback {
            exception.call_method1("with_traceback", (traceback,))?;
        }
        Err(PyErr::from_value(exception))
    }

    /// Cancels the operation, as the method of a generator does.
    fn close(&self) {
        self.cancel();
    }

    /// Blocks this thread until the operation is done, and returns its result.
    ///
    /// Other threads run in the meantime. In the main thread, Ctrl-C cancels the operation and raises KeyboardInterrupt.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.block(py)
    }

    /// The id of the permit that an acquire waits for; None for other operations, and until the store is open.
    #[getter]
    fn id(&self) -> Option<String> {
        match &self.id {
            Id::None => None,
            Id::Known(id) => Some(id.to_string()),
            Id::Later(id) => id.get().map(ToString::to_string),
        }
    }

    #[classmethod]
    fn __class_getitem__(class: &Bound<'_, PyType>, item: &Bound<'_, PyAny>) -> Py<PyAny> {
        let _ = item;
        class.clone().into_any().unbind()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(state) = self.state.try_lock() else { return Ok(()) };
        match &state.completion {
            Some(Completion::Enter(context)) => visit.call(context),
            Some(Completion::Exit(_) | Completion::Return(_)) | None => Ok(()),
        }
    }

    fn __clear__(&self) {
        self.cancel();
    }
}
