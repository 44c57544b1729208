//! Forks: objects of the parent process in a forked child.
//!
//! A child has none of its parent's threads. A lock of the parent's engine may be held by a thread that the child does not have, so
//! the child must not touch the engine, not even to drop it. [`PerProcess`] holds what belongs to one process: in another one it
//! refuses access, and leaks the value when it is dropped.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::failure::Failure;

/// How often this process and its ancestors were forked since the module was imported.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// Whether this process has opened a store in a file.
static FILE_OPENED: AtomicBool = AtomicBool::new(false);
/// Whether an ancestor had opened a store in a file when this process was forked.
static FILE_INHERITED: AtomicBool = AtomicBool::new(false);

/// Identifies this process among its forks.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// To be called in a forked child, before anything else.
pub(crate) fn forked() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if FILE_OPENED.swap(false, Ordering::Relaxed) {
        FILE_INHERITED.store(true, Ordering::Relaxed);
    }
}

/// Notes that a store in a file is opened.
///
/// SQLite keeps a table of the locks that this process has on files, and a forked child inherits it. A child that opened the file would
/// believe that it has locks that only its parent has.
pub(crate) fn open_file() -> Result<(), Failure> {
    if FILE_INHERITED.load(Ordering::Relaxed) {
        return Err(Failure::Forked(
            "this process was forked from one that had opened a sqlite: store, and SQLite does not survive a fork: \
             start workers with spawn, or create the first client after the fork",
        ));
    }
    FILE_OPENED.store(true, Ordering::Relaxed);
    Ok(())
}

/// A value that belongs to the process that made it.
pub(crate) struct PerProcess<T> {
    generation: u32,
    /// None only while it is dropped or taken out.
    value: Option<T>,
}

impl<T> PerProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { generation: generation(), value: Some(value) }
    }

    /// Whether it belongs to this process.
    pub(crate) fn is_ours(&self) -> bool {
        self.generation == generation()
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_ours())
    }

    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        if self.is_ours() { self.value.as_mut() } else { None }
    }

    pub(crate) fn take(mut self) -> Option<T> {
        if self.is_ours() { self.value.take() } else { None }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if !self.is_ours() {
            std::mem::forget(self.value.take());
        }
    }
}
