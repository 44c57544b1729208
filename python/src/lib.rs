//! The Python package of leasehold: the extension module `leasehold._leasehold`.
//!
//! - `pending`: operations that may wait, as awaitables and as blocking calls; `wake`: how they are woken.
//! - `client`, `semaphore`, `lock`, `pool`: what is declared, and `declared` what they have in common.
//! - `guard`: what is held. `context`: `async with` and `with`. `watch`: what happens to a block whose lease is lost.
//! - `process`: forks. `ending`: the end of the interpreter. `interpreter`: the event loop, the task and the thread that run.
//! - `failure`: exceptions. `values`: statistics. `log`: logging. `seconds`, `numbers`: arguments.
//!
//! # Locks and the GIL
//! A lock of this crate is held for a few instructions, and no Python code runs in between. The engine calls wakers outside of its own
//! locks, and a waker takes only the lock of a loop's queue. So no thread waits for the GIL while it holds a lock.
//!
//! Futures are polled with the GIL held. A fork, which happens with the GIL held too, therefore never finds a lock of a client or a
//! declaration taken.

// Python calls these functions, and its users read their documentation.
#![allow(clippy::doc_markdown, clippy::needless_pass_by_value)]

use std::time::Duration;

use pyo3::prelude::*;

mod client;
mod context;
mod declared;
mod ending;
mod failure;
mod guard;
mod interpreter;
mod lock;
mod log;
mod numbers;
mod pending;
mod pool;
mod process;
mod seconds;
mod semaphore;
mod values;
mod wake;
mod watch;

/// How long the end of the interpreter waits for Python code that other threads run.
const OTHER_THREADS: Duration = Duration::from_secs(1);

/// How long the end of the interpreter waits for the store.
const CLOSING: Duration = Duration::from_secs(5);

/// To be called when the package was imported, and in a forked child, with the number of the main thread.
#[pyfunction]
fn _begin(py: Python<'_>, main_thread: u64) -> PyResult<()> {
    interpreter::set_main_thread(main_thread);
    failure::prepare(py)
}

/// To be called in a forked child. The engine's descriptors are closed there already.
#[pyfunction]
fn _after_fork_in_child(py: Python<'_>) {
    process::forked();
    ending::forked();
    log::forked();
    wake::forget_loops(py);
}

/// To be called when the interpreter ends: releases what this process holds.
#[pyfunction]
fn _at_exit(py: Python<'_>) {
    ending::begin_exit(py, OTHER_THREADS);
    // Before the clients are closed: leases that end with the interpreter are not worth a record.
    log::stop(py);
    client::close_all(py, CLOSING);
}

#[pymodule]
fn _leasehold(py: Python<'_>, module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::install(py);
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<client::Client>()?;
    module.add_class::<context::Context>()?;
    module.add_class::<guard::LockGuard>()?;
    module.add_class::<guard::Permit>()?;
    module.add_class::<guard::PoolLease>()?;
    module.add_class::<lock::Lock>()?;
    module.add_class::<lock::Locks>()?;
    module.add_class::<pending::Pending>()?;
    module.add_class::<pool::LuaPool>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<semaphore::Semaphore>()?;
    module.add_function(wrap_pyfunction!(_after_fork_in_child, module)?)?;
    module.add_function(wrap_pyfunction!(_begin, module)?)?;
    module.add_function(wrap_pyfunction!(_at_exit, module)?)?;
    Ok(())
}
