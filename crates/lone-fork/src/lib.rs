//! `fork`, for processes that have a single thread.
//!
//! A forked process has only the thread that called `fork`. Another thread may have held a lock at that moment, for
//! example that of the allocator, and nothing releases that lock in the copy. That is why `fork` is unsafe. In a
//! process with a single thread there is no such lock, so the copy may do whatever the original may do.

use std::io;

/// The process in which [`fork`] has returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fork {
    /// The original process, with the process id of the copy. The original must reap the copy.
    Original(i32),
    /// The copied process.
    Copy,
}

/// Copies this process, and returns in both processes.
///
/// # Errors
/// An [`io::Error`] if this process has more than one thread, or if the system cannot create another process. On
/// systems other than Linux and Android the threads are not counted: there the caller must make sure that its thread is
/// the only one.
pub fn fork() -> io::Result<Fork> {
    if !has_a_single_thread()? {
        return Err(io::Error::other("this process has more than one thread"));
    }
    // SAFETY: this is the only thread, so no other thread can hold a lock, or start another thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Copy),
        pid => Ok(Fork::Original(pid)),
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn has_a_single_thread() -> io::Result<bool> {
    Ok(std::fs::read_dir("/proc/self/task")?.count() == 1)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
#[allow(clippy::unnecessary_wraps)] // the other implementation can fail
fn has_a_single_thread() -> io::Result<bool> {
    Ok(true)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_not_copied() {
        let forked = std::thread::spawn(fork).join().unwrap();
        assert_eq!(forked.unwrap_err().to_string(), "this process has more than one thread");
    }
}
