//! `fork`, for processes that have a single thread.
//!
//! A forked process has only the thread that called `fork`. Another thread may have held a lock at that moment, for example
//! the allocator's, and nobody releases it in the copy: this is why `fork` is unsafe. In a process with a single
//! thread there is no such lock, and the copy may do whatever the original may do.

use std::io;

/// In which of the two processes [`fork`] has returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fork {
    /// In the original, with the process id of the copy, which is to be reaped.
    Original(i32),
    /// In the copy.
    Copy,
}

/// Copies this process, and returns in both.
///
/// # Errors
/// If this process has more than one thread, or the system has no room for another process. On systems other than Linux
/// the threads are not counted: the caller has to know that it is the only one.
pub fn fork() -> io::Result<Fork> {
    if !has_a_single_thread()? {
        return Err(io::Error::other("this process has more than one thread"));
    }
    // SAFETY: the only thread is this one, and it is here: no other thread holds a lock, or starts one.
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
#[allow(clippy::unnecessary_wraps)] // elsewhere it can fail
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
