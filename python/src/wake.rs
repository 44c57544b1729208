//! How a Rust future wakes an asyncio task or a thread.
//!
//! Each event loop has a queue and a socket that the loop watches. A waker appends to the queue and, if the queue was empty, writes one
//! byte. The loop then takes all that is queued in one step. So the engine's thread never needs the interpreter: it does not wait for
//! the GIL, and nothing depends on whether the interpreter, or the loop, still runs.
//!
//! The queue's lock is never held while Python code runs.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;
use std::thread::Thread;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::context::Watch;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an event loop has to do.
enum Item {
    /// Resume a task.
    Resume(Arc<Waiter>),
    /// Look whether a permit, a lock or a lease was lost.
    Loss(Arc<Watch>),
}

/// The wake-ups of one event loop.
pub(crate) struct Queue {
    items: Mutex<Vec<Item>>,
    bell: UnixStream,
}

impl Queue {
    fn push(&self, item: Item) {
        let mut items = lock(&self.items);
        let first = items.is_empty();
        items.push(item);
        drop(items);
        if first {
            // It fails only if the loop is gone, or has not yet read what rings already.
            let _ = (&self.bell).write(&[1]);
        }
    }

    pub(crate) fn push_loss(&self, watch: Arc<Watch>) {
        self.push(Item::Loss(watch));
    }
}

/// What the event loop calls when its socket is readable.
#[pyclass(frozen, module = "leasehold._leasehold", name = "_WakeUps")]
pub(crate) struct WakeUps {
    queue: Arc<Queue>,
    bell: UnixStream,
}

#[pymethods]
impl WakeUps {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        // First: who queues something after this rings again.
        let _ = (&self.bell).read(&mut [0; 64]);
        let items = std::mem::take(&mut *lock(&self.queue.items));
        for item in items {
            match item {
                Item::Resume(waiter) => waiter.resume(py)?,
                Item::Loss(watch) => watch.look(py),
            }
        }
        Ok(())
    }
}

static LOOPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static GET_RUNNING_LOOP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The event loop that runs in this thread, or None.
pub(crate) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    GET_RUNNING_LOOP.import(py, "asyncio", "_get_running_loop")?.call0()
}

/// The loop that was asked for last, by a weak reference. Only used with the GIL held.
static LAST: Mutex<Option<(Py<PyAny>, Arc<Queue>)>> = Mutex::new(None);
static WEAKREF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The queue of an event loop, which watches it from now on.
pub(crate) fn queue_of(event_loop: &Bound<'_, PyAny>) -> PyResult<Arc<Queue>> {
    let py = event_loop.py();
    let last = lock(&LAST).as_ref().map(|(last, queue)| (last.clone_ref(py), queue.clone()));
    if let Some((last, queue)) = last
        && last.bind(py).call0()?.is(event_loop)
    {
        return Ok(queue);
    }
    let queue = known_queue(event_loop)?;
    let weak = WEAKREF.import(py, "weakref", "ref")?.call1((event_loop,))?.unbind();
    let replaced = lock(&LAST).replace((weak, queue.clone()));
    drop(replaced);
    Ok(queue)
}

fn known_queue(event_loop: &Bound<'_, PyAny>) -> PyResult<Arc<Queue>> {
    let py = event_loop.py();
    let loops = LOOPS
        .get_or_try_init(py, || {
            let loops = py.import("weakref")?.getattr("WeakKeyDictionary")?.call0()?;
            Ok::<_, PyErr>(loops.unbind())
        })?
        .bind(py);
    let known = loops.call_method1(intern!(py, "get"), (event_loop,))?;
    if let Ok(known) = known.cast::<WakeUps>() {
        return Ok(known.get().queue.clone());
    }
    let (ring, bell) = UnixStream::pair()?;
    ring.set_nonblocking(true)?;
    bell.set_nonblocking(true)?;
    let fd = bell.as_raw_fd();
    let queue = Arc::new(Queue { items: Mutex::default(), bell: ring });
    let wake_ups = Bound::new(py, WakeUps { queue: queue.clone(), bell })?;
    event_loop.call_method1(intern!(py, "add_reader"), (fd, &wake_ups))?;
    loops.set_item(event_loop, wake_ups)?;
    Ok(queue)
}

/// In a forked child: the sockets are shared with the parent.
pub(crate) fn forget_loops(py: Python<'_>) {
    let last = lock(&LAST).take();
    drop(last);
    if let Some(loops) = LOOPS.get(py) {
        let _ = loops.call_method0(py, "clear");
    }
}

/// Wakes the task that awaits an asyncio future.
pub(crate) struct Waiter {
    woken: AtomicBool,
    queue: Arc<Queue>,
    /// Taken out with the GIL held, so that the engine's thread never drops it.
    future: Mutex<Option<Py<PyAny>>>,
}

impl Waiter {
    pub(crate) fn new(queue: Arc<Queue>, future: Py<PyAny>) -> Arc<Self> {
        Arc::new(Self { woken: AtomicBool::new(false), queue, future: Mutex::new(Some(future)) })
    }

    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        let Some(future) = self.forget() else { return Ok(()) };
        let future = future.bind(py);
        // A task that was cancelled meanwhile has cancelled it.
        if !future.call_method0(intern!(py, "done"))?.is_truthy()? {
            future.call_method1(intern!(py, "set_result"), (py.None(),))?;
        }
        Ok(())
    }

    /// Nobody awaits it any more.
    pub(crate) fn forget(&self) -> Option<Py<PyAny>> {
        lock(&self.future).take()
    }

    /// For the garbage collector.
    pub(crate) fn visit(
        &self,
        visit: &pyo3::gc::PyVisit<'_>,
    ) -> Result<(), pyo3::gc::PyTraverseError> {
        match self.future.try_lock() {
            Ok(future) => future.as_ref().map_or(Ok(()), |future| visit.call(future)),
            Err(_) => Ok(()),
        }
    }
}

impl Wake for Waiter {
    fn wake(self: Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.queue.clone().push(Item::Resume(self));
        }
    }
}

/// Wakes a thread that is parked.
pub(crate) struct Parked {
    thread: Thread,
    woken: AtomicBool,
}

impl Parked {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { thread: std::thread::current(), woken: AtomicBool::new(false) })
    }

    /// Whether it was woken since the last call.
    pub(crate) fn take(&self) -> bool {
        self.woken.swap(false, Ordering::AcqRel)
    }
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
