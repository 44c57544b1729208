//! Operations that may wait: awaited in asyncio, or waited for in a thread.
//!
//! A `Pending` holds a Rust future and is its own iterator. Each step polls the future once. If it is ready, the result is raised as
//! `StopIteration` at once, without a turn of the event loop. Otherwise the step yields a new asyncio future, which the waker resolves
//! through the loop's [queue](crate::wake).
//!
//! `throw` and `close` drop the Rust future before they return. That makes cancellation safe: a task that is cancelled after the permit
//! was granted, but before the task was resumed, gets the exception through `throw`, and dropping the future releases the permit.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use leasehold::{Acquire, AcquisitionId};
use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning, PyStopIteration};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAny, PyType};

use crate::context::{Context, Exit};
use crate::failure::{Failure, INHERITED};
use crate::guard::Held;
use crate::process::PerProcess;
use crate::semaphore::Declared;
use crate::wake::{Parked, Waiter, lock, queue_of, running_loop};

/// How often a thread that waits looks for signals, such as Ctrl-C. Only the main thread receives them.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(50);

type Make = dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send;

/// What a future resolves to.
pub(crate) enum Value {
    None,
    Bool(bool),
    Position(Option<usize>),
    Text(&'static str),
    /// A permit, a lock or a lease; None if there was none.
    Held(Option<Held>),
    /// Made with the GIL held.
    Made(Box<Make>),
}

impl Value {
    pub(crate) fn made(
        make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> Self {
        Self::Made(Box::new(make))
    }

    fn into_py(self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Ok(match self {
            Self::None | Self::Position(None) | Self::Held(None) => None,
            Self::Bool(value) => Some(value.into_pyobject(py)?.to_owned().into_any().unbind()),
            Self::Position(Some(value)) => Some(value.into_pyobject(py)?.into_any().unbind()),
            Self::Text(value) => Some(value.into_pyobject(py)?.into_any().unbind()),
            Self::Held(Some(held)) => Some(held.into_py(py)?),
            Self::Made(make) => Some(make(py)?),
        })
    }
}

pub(crate) type Outcome = Result<Value, Failure>;

pub(crate) type BoxFuture = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// The future of an operation.
pub(crate) enum Work {
    /// By far the most frequent one, without an allocation of its own.
    Acquire(Acquire, Arc<Declared>),
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
                .map(|permit| Ok(Value::Held(Some(Held::Permit(permit?, declared.clone()))))),
            Self::Boxed(work) => work.as_mut().poll(cx),
        }
    }
}

/// What is done with the result.
pub(crate) enum Then {
    /// It is returned. The name of the operation is for the warning that it was never awaited.
    Return(&'static str),
    /// A context keeps it until it is left.
    Enter(Py<Context>),
    /// A context is left.
    Exit(Exit),
}

struct State {
    /// None once it is done.
    work: Option<PerProcess<Work>>,
    then: Option<Then>,
    /// Whether it was polled, that is, awaited or waited for.
    begun: bool,
    /// What wakes the task that awaits it.
    waiter: Option<Arc<Waiter>>,
}

/// An operation that may wait. Await it in asyncio, or call `wait()` to block the thread. Nothing is sent before that.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Pending {
    state: Mutex<State>,
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
    pub(crate) fn new(work: Work, then: Then, id: Id) -> Self {
        let work = Some(PerProcess::new(work));
        Self { state: Mutex::new(State { work, then: Some(then), begun: false, waiter: None }), id }
    }

    /// An operation whose result is returned.
    pub(crate) fn of(
        name: &'static str,
        work: impl Future<Output = Outcome> + Send + 'static,
    ) -> Self {
        Self::new(Work::boxed(work), Then::Return(name), Id::None)
    }

    /// Polls once. No Python code runs meanwhile, so that nobody else can be here.
    fn poll(&self, waker: &Waker) -> PyResult<Poll<Outcome>> {
        let mut state = lock(&self.state);
        state.begun = true;
        let Some(work) = &mut state.work else { return Err(awaited_twice()) };
        let Some(ours) = work.get_mut() else { return Err(INHERITED.into()) };
        let polled = ours.poll(&mut TaskContext::from_waker(waker));
        if polled.is_ready() {
            state.work = None;
        }
        Ok(polled)
    }

    fn finish(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Option<Py<PyAny>>> {
        let then = lock(&self.state).then.take();
        match then {
            Some(Then::Enter(context)) => Context::entered(&context, py, outcome).map(Some),
            Some(Then::Exit(exit)) => exit.finish(py, outcome),
            Some(Then::Return(_)) | None => outcome?.into_py(py),
        }
    }

    fn step(&self, py: Python<'_>) -> PyResult<Step> {
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

    fn suspend(&self, py: Python<'_>) -> PyResult<Step> {
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

    /// Drops the future: what it waits for, or was granted, is given up.
    fn cancel(&self) {
        let mut state = lock(&self.state);
        state.begun = true;
        let (work, then, waiter) = (state.work.take(), state.then.take(), state.waiter.take());
        drop(state);
        // The waker may outlive this, and must not have to drop a Python object on another thread.
        drop(waiter.and_then(|waiter| waiter.forget()));
        drop(work);
        drop(then);
    }

    /// Blocks the thread. Polls with the GIL held, and releases it to wait.
    pub(crate) fn block(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        if !running_loop(py)?.is_none() {
            self.cancel();
            return Err(PyRuntimeError::new_err(
                "await it instead: .wait() would block the event loop of this thread",
            ));
        }
        if let Poll::Ready(outcome) = self.poll(Waker::noop())? {
            return self.finish(py, outcome);
        }
        let parked = Parked::new();
        let waker = parked.clone().into();
        let limit = is_main_thread(py)?.then_some(LOOK_FOR_SIGNALS);
        loop {
            if let Poll::Ready(outcome) = self.poll(&waker)? {
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
        let name = match &state.then {
            Some(Then::Return(name)) => Some(*name),
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
    let message = format!("leasehold.{name} was never awaited: await it, or call .wait()");
    let Ok(message) = std::ffi::CString::new(message) else { return };
    // The exception that is being handled, if any, is not this one's business.
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
    PyRuntimeError::new_err("it was awaited or waited for already: make another one")
}

/// The main thread, as Python numbers it.
static MAIN_THREAD: AtomicU64 = AtomicU64::new(0);
static GET_IDENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

pub(crate) fn set_main_thread(number: u64) {
    MAIN_THREAD.store(number, Ordering::Relaxed);
}

/// Whether this is the main thread, without running Python code.
///
/// When the interpreter ends, it ends every daemon thread that runs Python code by unwinding its stack, and a stack with frames of Rust
/// must not be unwound like that. So a thread that waits calls only what is written in C.
fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let this: u64 = GET_IDENT.import(py, "_thread", "get_ident")?.call0()?.extract()?;
    Ok(this == MAIN_THREAD.load(Ordering::Relaxed))
}

#[pymethods]
impl Pending {
    fn __await__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        if lock(&slf.get().state).begun {
            return Err(awaited_twice());
        }
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

    /// As of a generator: resumes it.
    fn send(&self, py: Python<'_>, value: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let _ = value;
        match self.step(py)? {
            Step::Suspend(future) => Ok(future),
            Step::Value(value) => Err(PyStopIteration::new_err((value,))),
        }
    }

    /// As of a generator: cancels the operation, and raises the exception.
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

    /// As of a generator: cancels the operation.
    fn close(&self) {
        self.cancel();
    }

    /// Blocks this thread until the operation is done, and returns its result.
    ///
    /// Other threads run meanwhile. Ctrl-C raises KeyboardInterrupt and cancels the operation.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.block(py)
    }

    /// The id of the permit to come; None for other operations, and while the client is not open yet.
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
        if let Some(waiter) = &state.waiter {
            waiter.visit(&visit)?;
        }
        match &state.then {
            Some(Then::Enter(context)) => visit.call(context),
            Some(Then::Exit(_) | Then::Return(_)) | None => Ok(()),
        }
    }

    fn __clear__(&self) {
        self.cancel();
    }
}
