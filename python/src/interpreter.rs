//! What this module asks of the interpreter: the event loop, the task and the thread that run, and weak references.
//!
//! When the interpreter ends, it ends every daemon thread that runs Python code by unwinding its stack, and a stack with frames of Rust
//! must not be unwound like that. So all that is called here is written in C.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static CURRENT_TASK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static CURRENT_TASKS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static GET_IDENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static GET_RUNNING_LOOP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static WEAKREF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The main thread, as Python numbers it.
static MAIN_THREAD: AtomicU64 = AtomicU64::new(0);

/// The 11 of Python 3.11.
pub(crate) fn minor_version(py: Python<'_>) -> u8 {
    static MINOR: OnceLock<u8> = OnceLock::new();
    *MINOR.get_or_init(|| py.version_info().minor)
}

/// The event loop that runs in this thread, or None.
pub(crate) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    GET_RUNNING_LOOP.import(py, "asyncio", "_get_running_loop")?.call0()
}

/// The task that runs in this event loop, or None.
pub(crate) fn current_task<'py>(event_loop: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = event_loop.py();
    if minor_version(py) >= 12 {
        return CURRENT_TASK.import(py, "asyncio", "current_task")?.call1((event_loop,));
    }
    // Before 3.12 `current_task` is written in Python. This is the dictionary that it looks into.
    let tasks = CURRENT_TASKS.import(py, "asyncio.tasks", "_current_tasks")?;
    tasks.call_method1(intern!(py, "get"), (event_loop,))
}

/// Identifies the task that runs, or the thread if no task does. It is only compared.
pub(crate) fn current_owner(py: Python<'_>) -> PyResult<usize> {
    let event_loop = running_loop(py)?;
    if event_loop.is_none() {
        return thread_number(py)?.extract();
    }
    Ok(current_task(&event_loop)?.as_ptr() as usize)
}

fn thread_number(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    GET_IDENT.import(py, "_thread", "get_ident")?.call0()
}

pub(crate) fn set_main_thread(number: u64) {
    MAIN_THREAD.store(number, Ordering::Relaxed);
}

/// Whether this is the main thread, which is the only one that receives signals.
pub(crate) fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let this: u64 = thread_number(py)?.extract()?;
    Ok(this == MAIN_THREAD.load(Ordering::Relaxed))
}

/// A weak reference. Calling it returns the object, or None.
pub(crate) fn weak_reference(object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    let weakref = WEAKREF.import(object.py(), "weakref", "ref")?;
    Ok(weakref.call1((object,))?.unbind())
}
