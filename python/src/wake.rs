//! How a Rust future wakes an asyncio task or a thread.
//!
//! Each event loop has a queue and a socket that the loop watches. A waker appends to the queue and, if the queue was empty, writes one
//! byte. The loop then takes all that is queued in one step. So the engine's thread never needs the interpreter: it does not wait for
//! the GIL, and nothing depends on whether the interpreter, or the loop, still runs.
//!
//! The loop also holds the futures that its tasks wait for, as it holds its timers. Otherwise the garbage collector would take a task
//! that nothing else refers to while it waits. When the loop is closed, it lets go of them.
//!
//! The locks of a queue are never held while Python code runs.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;
use std::thread::{Thread, ThreadId};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::ending::{Inside, is_left_behind};
use crate::interpreter::weak_reference;
use crate::watch::Watch;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A piece of work for an event loop.
enum Item {
    /// Resume a task.
    Resume(Arc<Waiter>),
    /// Look whether a permit, a lock or a pool lease was lost.
    Loss(Arc<Watch>),
}

/// The wake-ups of one event loop.
pub(crate) struct Queue {
    items: Mutex<Vec<Item>>,
    /// The other end of the socket that the loop watches.
    writer: UnixStream,
    /// The thread of the loop.
    thread: ThreadId,
    /// Only locked with the GIL held, so that the engine's thread never drops a future.
    waiting: Mutex<Waiting>,
}

/// The futures that the tasks of one event loop wait for.
#[derive(Default)]
struct Waiting {
    next: u64,
    futures: HashMap<u64, Py<PyAny>>,
}

impl Queue {
    fn push(&self, item: Item) {
        if is_left_behind(self.thread) {
            return;
        }
        let mut items = lock(&self.items);
        let first = items.is_empty();
        items.push(item);
        drop(items);
        if first {
            // It fails only if the loop was closed, or has not yet read the bytes before.
            let _ = (&self.writer).write(&[1]);
        }
    }

    pub(crate) fn push_loss(&self, watch: Arc<Watch>) {
        self.push(Item::Loss(watch));
    }

    /// Drops the futures. The lock is free by then, because that may run Python code.
    fn let_go(&self) {
        let futures = std::mem::take(&mut lock(&self.waiting).futures);
        drop(futures);
    }
}

/// What the event loop calls when its socket is readable. Only the loop refers to it, until it is closed.
#[pyclass(frozen, weakref, module = "leasehold._leasehold", name = "_WakeUps")]
pub(crate) struct WakeUps {
    queue: Arc<Queue>,
    reader: UnixStream,
}

impl Drop for WakeUps {
    fn drop(&mut self) {
        self.queue.let_go();
    }
}

#[pymethods]
impl WakeUps {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let _inside = Inside::enter();
        // First: a waker that comes after this writes another byte.
        let _ = (&self.reader).read(&mut [0; 64]);
        let items = std::mem::take(&mut *lock(&self.queue.items));
        let mut outcome = Ok(());
        for item in items {
            match item {
                // A signal handler may raise here. The others must be resumed all the same: they are not woken again.
                Item::Resume(waiter) => outcome = outcome.and(waiter.resume(py)),
                Item::Loss(watch) => watch.check_loss(py),
            }
        }
        outcome
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(waiting) = self.queue.waiting.try_lock() else { return Ok(()) };
        waiting.futures.values().try_for_each(|future| visit.call(future))
    }

    fn __clear__(&self) {
        self.queue.let_go();
    }
}

/// A weak reference to the [`WakeUps`] of each loop.
static LOOPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
/// The loop that was asked for last, by a weak reference. Only locked with the GIL held.
static LAST: Mutex<Option<(Py<PyAny>, Arc<Queue>)>> = Mutex::new(None);

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
    // Before the lock is taken, because it may run Python code.
    let weak = weak_reference(event_loop)?;
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
    let entry = loops.call_method1(intern!(py, "get"), (event_loop,))?;
    if !entry.is_none()
        && let Ok(entry) = entry.call0()?.cast::<WakeUps>()
    {
        return Ok(entry.get().queue.clone());
    }
    let (writer, reader) = UnixStream::pair()?;
    writer.set_nonblocking(true)?;
    reader.set_nonblocking(true)?;
    let fd = reader.as_raw_fd();
    let thread = std::thread::current().id();
    let (items, waiting) = (Mutex::default(), Mutex::default());
    let queue = Arc::new(Queue { items, writer, thread, waiting });
    let wake_ups = Bound::new(py, WakeUps { queue: queue.clone(), reader })?;
    event_loop.call_method1(intern!(py, "add_reader"), (fd, &wake_ups))?;
    loops.set_item(event_loop, weak_reference(&wake_ups)?)?;
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
    /// The future's number in the queue.
    number: u64,
}

impl Waiter {
    pub(crate) fn new(queue: Arc<Queue>, future: Py<PyAny>) -> Arc<Self> {
        let mut waiting = lock(&queue.waiting);
        let number = waiting.next;
        waiting.next += 1;
        waiting.futures.insert(number, future);
        drop(waiting);
        Arc::new(Self { woken: AtomicBool::new(false), queue, number })
    }

    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        let Some(future) = self.forget() else { return Ok(()) };
        let future = future.bind(py);
        // If the task was cancelled in the meantime, so was the future.
        if !future.call_method0(intern!(py, "done"))?.is_truthy()? {
            future.call_method1(intern!(py, "set_result"), (py.None(),))?;
        }
        Ok(())
    }

    /// Whether a task awaits the future, and was not resumed yet.
    pub(crate) fn is_waiting(&self) -> bool {
        lock(&self.queue.waiting).futures.contains_key(&self.number)
    }

    /// Takes the future out: the task does not wait any more.
    pub(crate) fn forget(&self) -> Option<Py<PyAny>> {
        lock(&self.queue.waiting).futures.remove(&self.number)
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
pub(crate) struct ParkedThread {
    thread: Thread,
    woken: AtomicBool,
}

impl ParkedThread {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { thread: std::thread::current(), woken: AtomicBool::new(false) })
    }

    /// Whether it was woken since the last call.
    pub(crate) fn take(&self) -> bool {
        self.woken.swap(false, Ordering::AcqRel)
    }
}

impl Wake for ParkedThread {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
