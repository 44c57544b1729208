//! The engine's events, as records of Python's `logging`.
//!
//! An event never waits for the interpreter. It is queued, and a thread hands the records to Python. The thread is started for the first
//! record and ends when the queue is empty. So neither the GIL nor a slow handler delays a renewal, and a handler may use this package itself.
//!
//! Warnings are always handed over, and Python's levels decide. Below that, the level is read when a client, semaphore, lock or
//! pool is declared: an event that is disabled costs one load.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::ending::is_ending;
use crate::wake::lock;

/// How long the end of the interpreter waits for the handlers.
const FLUSHING: Duration = Duration::from_secs(5);

/// How many records wait at most. More are counted and dropped.
const ROOM: usize = 10_000;

/// The records of this process. Replaced in a forked child: a thread that the child does not have may hold the lock of the old one.
static RECORDS: LazyLock<ArcSwap<Records>> = LazyLock::new(ArcSwap::default);

/// The lowest level, as Python has it, of the events that are handed over.
static LEVEL: AtomicU8 = AtomicU8::new(WARNING);

const WARNING: u8 = 30;

#[derive(Default)]
struct Records {
    state: Mutex<LogQueue>,
    /// Notified when everything was handed over.
    done: Condvar,
}

#[derive(Default)]
struct LogQueue {
    queue: VecDeque<Entry>,
    dropped: usize,
    /// Whether a thread runs that hands them over.
    has_thread: bool,
}

struct Entry {
    target: String,
    level: u8,
    message: String,
    file: &'static str,
    line: u32,
}

/// Events of the engine. Spans are not recorded.
struct Logger;

impl Subscriber for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_ours = metadata.target().starts_with("leasehold") && !metadata.is_span();
        is_ours && number(*metadata.level()) >= LEVEL.load(Ordering::Relaxed)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match LEVEL.load(Ordering::Relaxed) {
            0..=5 => LevelFilter::TRACE,
            6..=10 => LevelFilter::DEBUG,
            11..=20 => LevelFilter::INFO,
            _ => LevelFilter::WARN,
        })
    }

    fn event(&self, event: &Event<'_>) {
        if is_ending() {
            return;
        }
        let mut text = EventText::default();
        event.record(&mut text);
        let metadata = event.metadata();
        queue(Entry {
            target: metadata.target().replace("::", "."),
            level: number(*metadata.level()),
            message: text.message + &text.fields,
            file: metadata.file().unwrap_or_default(),
            line: metadata.line().unwrap_or_default(),
        });
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its fields after it.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

fn queue(entry: Entry) {
    let records = RECORDS.load_full();
    let mut state = lock(&records.state);
    if state.queue.len() == ROOM {
        state.dropped += 1;
        return;
    }
    state.queue.push_back(entry);
    let start = !std::mem::replace(&mut state.has_thread, true);
    drop(state);
    if start {
        let thread = std::thread::Builder::new().name("leasehold-log".into());
        let handing = records.clone();
        if thread.spawn(move || hand_over(&handing)).is_err() {
            lock(&records.state).has_thread = false;
        }
    }
}

fn hand_over(records: &Records) {
    loop {
        let mut state = lock(&records.state);
        let entries = std::mem::take(&mut state.queue);
        let dropped = std::mem::take(&mut state.dropped);
        if entries.is_empty() {
            state.has_thread = false;
            records.done.notify_all();
            return;
        }
        drop(state);
        let handed = Python::try_attach(|py| {
            for entry in entries {
                if let Err(error) = entry.hand_over(py) {
                    error.write_unraisable(py, None);
                }
            }
            if dropped > 0 {
                tracing::warn!(target: "leasehold", "{dropped} log records were dropped");
            }
        });
        if handed.is_none() {
            // The interpreter ends.
            return;
        }
    }
}

impl Entry {
    fn hand_over(self, py: Python<'_>) -> PyResult<()> {
        let logger =
            py.import("logging")?.call_method1(intern!(py, "getLogger"), (&self.target,))?;
        if !logger.call_method1(intern!(py, "isEnabledFor"), (self.level,))?.is_truthy()? {
            return Ok(());
        }
        let arguments = (
            self.target,
            self.level,
            self.file,
            self.line,
            self.message,
            PyTuple::empty(py),
            py.None(),
        );
        let record = logger.call_method1(intern!(py, "makeRecord"), arguments)?;
        logger.call_method1(intern!(py, "handle"), (record,))?;
        Ok(())
    }
}

/// The level as Python has it.
fn number(level: tracing::Level) -> u8 {
    match level {
        tracing::Level::ERROR => 40,
        tracing::Level::WARN => WARNING,
        tracing::Level::INFO => 20,
        tracing::Level::DEBUG => 10,
        tracing::Level::TRACE => 5,
    }
}

static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Reads the level of the logger `leasehold`.
pub(crate) fn refresh(py: Python<'_>) {
    let level = effective_level(py).map_or(WARNING, |level| level.min(WARNING));
    if LEVEL.swap(level, Ordering::Relaxed) != level {
        tracing::callsite::rebuild_interest_cache();
    }
}

/// As `Logger.getEffectiveLevel`, but without running Python code, so that the end of the interpreter cannot find a daemon thread there.
fn effective_level(py: Python<'_>) -> PyResult<u8> {
    let logger = LOGGER.get_or_try_init(py, || {
        let logger = py.import("logging")?.call_method1("getLogger", ("leasehold",))?;
        Ok::<_, PyErr>(logger.unbind())
    })?;
    let mut logger = logger.bind(py).clone();
    while !logger.is_none() {
        let level = logger.getattr(intern!(py, "level"))?;
        if level.is_truthy()? {
            return level.extract();
        }
        logger = logger.getattr(intern!(py, "parent"))?;
    }
    Ok(0)
}

pub(crate) fn install(py: Python<'_>) {
    // A child that was forked while another thread makes it would wait forever.
    LazyLock::force(&RECORDS);
    // Elsewhere in this process there may be one already.
    if tracing::subscriber::set_global_default(Logger).is_ok() {
        refresh(py);
    }
}

pub(crate) fn forked() {
    RECORDS.store(Arc::default());
}

/// Stops recording. Returns when all records were handed over, or after [`FLUSHING`].
///
/// When the interpreter ends, it unwinds the stack of every other thread that runs Python code. The thread that hands records over must
/// not be one of them, because a stack with frames of Rust must not be unwound like that.
pub(crate) fn stop(py: Python<'_>) {
    py.detach(|| {
        let records = RECORDS.load_full();
        let state = lock(&records.state);
        drop(records.done.wait_timeout_while(state, FLUSHING, |state| state.has_thread));
    });
}
