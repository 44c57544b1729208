//! The end of the interpreter, and the daemon threads that it leaves behind.
//!
//! When the clients are closed, only daemon threads run besides the thread that ends the interpreter. They would print a traceback for
//! each operation that fails. So tasks in such a thread are not resumed any more, and blocking calls raise `SystemExit`, which ends a
//! thread silently.
//!
//! Later the interpreter ends every daemon thread that runs Python code by unwinding its stack, and a stack with frames of Rust must
//! not be unwound like that. So code of this crate that may call Python code is [`Inside`], and the end waits until no thread is.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::process::generation;

/// The thread that ends the interpreter.
static ENDED_BY: OnceLock<ThreadId> = OnceLock::new();

/// How many threads run Python code that this crate has called.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// Counts this thread as one that runs Python code.
pub(crate) struct Inside {
    generation: u32,
}

impl Inside {
    pub(crate) fn enter() -> Self {
        INSIDE.fetch_add(1, Ordering::Relaxed);
        Self { generation: generation() }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // A forked child starts from zero.
        if self.generation == generation() {
            INSIDE.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// To be called in a forked child, which has no other threads.
pub(crate) fn forked() {
    INSIDE.store(0, Ordering::Relaxed);
}

/// Notes that this thread ends the interpreter. Returns when no thread is inside, or after `limit`.
pub(crate) fn begin_exit(py: Python<'_>, limit: Duration) {
    let _ = ENDED_BY.set(std::thread::current().id());
    let until = Instant::now() + limit;
    while INSIDE.load(Ordering::Relaxed) > 0 && Instant::now() < until {
        py.detach(|| std::thread::sleep(Duration::from_millis(1)));
    }
}

/// Whether the interpreter is being ended.
pub(crate) fn is_ending() -> bool {
    ENDED_BY.get().is_some()
}

/// Whether the interpreter is being ended by another thread than this one.
pub(crate) fn is_left_behind(thread: ThreadId) -> bool {
    ENDED_BY.get().is_some_and(|by| *by != thread)
}

/// Whether the interpreter is being ended by another thread than the caller's.
pub(crate) fn are_we_left_behind() -> bool {
    is_ending() && is_left_behind(std::thread::current().id())
}
