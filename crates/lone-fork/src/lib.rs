//! `fork`, for processes that have a single thread, and descriptors that no forked copy keeps.
//!
//! A forked process has only the thread that called `fork`. Another thread may have held a lock at that moment, for
//! example that of the allocator, and nothing releases that lock in the copy. That is why `fork` is unsafe. In a
//! process with a single thread there is no such lock, so the copy may do whatever the original may do.

#[cfg(unix)]
use std::io;

#[cfg(unix)]
mod close_on_fork;
/// Without `fork` there is nothing to do.
#[cfg(not(unix))]
mod close_on_fork {
    use std::io;
    use std::ops::Deref;

    /// A value with a descriptor that a forked copy of this process does not keep.
    #[derive(Debug)]
    pub struct CloseOnFork<T>(T);

    impl<T> CloseOnFork<T> {
        /// Opens a descriptor with `open`.
        ///
        /// # Errors
        /// The error of `open`.
        pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
            open().map(Self)
        }

        /// Converts the value.
        ///
        /// # Errors
        /// The error of `convert`.
        pub fn try_map<U>(
            self,
            convert: impl FnOnce(T) -> io::Result<U>,
        ) -> io::Result<CloseOnFork<U>> {
            convert(self.0).map(CloseOnFork)
        }
    }

    impl<T> Deref for CloseOnFork<T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.0
        }
    }
}

pub use close_on_fork::CloseOnFork;

/// The process in which [`fork`] has returned.
#[cfg(unix)]
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
#[cfg(unix)]
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

/// Copies this process, which may have any number of threads, and returns the process id of the copy. The copy sleeps
/// for this many seconds, and exits. It is for tests of what a copy inherits.
///
/// # Errors
/// An [`io::Error`] if the system cannot create another process.
#[cfg(unix)]
pub fn fork_idle(seconds: u32) -> io::Result<i32> {
    // SAFETY: the copy calls only async-signal-safe functions.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: as above. `_exit` runs no handler of this program.
            unsafe {
                libc::sleep(seconds);
                libc::_exit(0)
            }
        }
        pid => Ok(pid),
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn has_a_single_thread() -> io::Result<bool> {
    Ok(std::fs::read_dir("/proc/self/task")?.count() == 1)
}

#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
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
