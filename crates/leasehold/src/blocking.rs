//! The same API for threads without a runtime: [`Wait::wait`] blocks the thread where `await` would suspend the task.
//!
//! Every function of this library that returns a future works here, on every store. Add `.wait()` where async code has
//! `.await`:
//!
//! ```
//! use leasehold::Client;
//! use leasehold::blocking::Wait;
//! use std::time::Duration;
//!
//! fn main() -> Result<(), leasehold::Error> {
//!     let client = Client::open("memory:").wait()?;
//!     let api = client.semaphore("api", 5).build()?;
//!
//!     let permit = api.acquire().within(Duration::from_secs(1)).weight(2).wait()?;
//!     assert!(api.try_acquire().weight(4).wait()?.is_none());
//!     permit.release().wait()?;
//!
//!     // The function holds a permit while it runs.
//!     let answer = api.blocking_with(|_permit| 42)?;
//!     assert_eq!(answer, 42);
//!
//!     let guard = client.lock("invoice:42").build()?.acquire().wait()?;
//!     println!("write with fence {}", guard.fence());
//!     guard.release().wait()?;
//!
//!     api.pause().reason("maintenance").wait()?;
//!     assert!(api.stats().wait()?.paused.is_some());
//!     client.close().wait()
//! }
//! ```
//!
//! A waiting thread sleeps. It needs no runtime, because each client renews and sends on a background thread of its
//! own.
//!
//! # Inside a runtime
//!
//! A thread of a Tokio runtime must not block, because the tasks of the runtime would stop. If one of them held the
//! permit, they would stop forever. So on such a thread `wait` fails with [`Error::WrongThread`] and sends nothing.
//!
//! The threads of [`tokio::task::spawn_blocking`] may block, but Tokio offers no way to distinguish them from the
//! others. So `wait` fails there, too, unless the call is inside [`allow`]. The same holds for
//! `tokio::task::block_in_place`, and for a thread on which [`tokio::runtime::Handle::enter`] was called. Threads of
//! other runtimes are not recognised.

use std::cell::Cell;
use std::future::IntoFuture;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tokio::runtime::Handle;

use crate::{
    Acquire, AcquireLock, AcquirePoolLease, Error, Lock, LockGuard, Permit, Pool, PoolLease,
    Semaphore,
};

/// Waits for a future of this library on a thread without a runtime.
///
/// Every future, and everything that can be awaited, implements this trait if its output is a [`Result`] with an
/// [`Error`] of this library. See the [module](self) for an example.
///
/// If you wait for a future of your own, it must not use Tokio's I/O or timers: they need a runtime, and panic without
/// one.
pub trait Wait<T>: IntoFuture<Output = Result<T, Error>> + Sized {
    /// Blocks the thread until the future is done, and returns its output.
    ///
    /// # Errors
    /// - The errors of the future.
    /// - [`Error::WrongThread`] if the thread belongs to a Tokio runtime and the call is not inside [`allow`]. The
    ///   future is dropped without being polled: nothing was acquired, and a release by a guard continues in the
    ///   background.
    fn wait(self) -> Result<T, Error> {
        if Handle::try_current().is_ok() && !ALLOWED.get() {
            return Err(in_a_runtime());
        }
        block_on(self.into_future())
    }
}

impl<T, F: IntoFuture<Output = Result<T, Error>>> Wait<T> for F {}

thread_local! {
    /// Whether [`allow`] is on the stack of this thread.
    static ALLOWED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, in which [`Wait::wait`] blocks even if the thread belongs to a Tokio runtime.
///
/// Use it in [`tokio::task::spawn_blocking`] and `tokio::task::block_in_place`, where a thread may block:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold::Client;
/// use leasehold::blocking::{self, Wait};
///
/// let api = Client::memory().semaphore("api", 5).build()?;
/// let refused = api.acquire().wait().unwrap_err();
/// assert!(refused.to_string().contains("this thread belongs to a Tokio runtime"));
///
/// let import = move || api.blocking_with(|_permit| "imported");
/// let done = tokio::task::spawn_blocking(|| blocking::allow(import)).await??;
/// assert_eq!(done, "imported");
/// # Ok(())
/// # }
/// ```
///
/// In an async function, `allow` blocks the runtime's thread. If the permit that you wait for is held by a task of the
/// same thread, neither ever continues.
pub fn allow<T>(work: impl FnOnce() -> T) -> T {
    /// Restores the value, also if `work` panics.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            ALLOWED.set(self.0);
        }
    }
    let _before = Before(ALLOWED.replace(true));
    work()
}

impl Semaphore {
    /// Acquires a permit, blocks the thread until it is granted, and runs `work` under it:
    /// [`with`](Self::with) for threads without a runtime.
    ///
    /// See [`blocking`](self).
    ///
    /// A function cannot be stopped from outside. If the permit is lost, `work` runs to its end, and its output is
    /// dropped. Call [`Permit::check`] in `work` to end earlier.
    ///
    /// # Errors
    /// - The same as for [`acquire`](Self::acquire), and [`Error::Lost`] if the permit was lost while `work` ran.
    /// - [`Error::WrongThread`] inside a runtime: see [`Wait::wait`]. Then `work` did not run.
    ///
    /// # Panics
    /// If `work` panics. The permit is released.
    pub fn blocking_with<T>(&self, work: impl FnOnce(&Permit) -> T) -> Result<T, Error> {
        self.acquire().blocking_with(work)
    }
}

impl Acquire {
    /// Acquires a permit, blocks the thread until it is granted, and runs `work` under it:
    /// [`Semaphore::blocking_with`] for an acquire that has its own time limit or weight.
    ///
    /// ```
    /// use leasehold::Client;
    /// use std::time::Duration;
    ///
    /// let api = Client::memory().semaphore("api", 5).build()?;
    /// let answer = api.acquire().within(Duration::from_secs(2)).weight(3).blocking_with(|_permit| 42)?;
    /// assert_eq!(answer, 42);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as for [`Semaphore::blocking_with`].
    ///
    /// # Panics
    /// If `work` panics. The permit is released.
    pub fn blocking_with<T>(self, work: impl FnOnce(&Permit) -> T) -> Result<T, Error> {
        let work = async |permit: &Permit| {
            let done = work(permit);
            permit.check().map(|()| done)
        };
        self.with(work).wait().flatten()
    }
}

impl Lock {
    /// Acquires the lock, blocks the thread until it is free, and runs `work` under it:
    /// [`with`](Self::with) for threads without a runtime.
    ///
    /// See [`blocking`](self).
    ///
    /// A function cannot be stopped from outside. If the lock is lost, `work` runs to its end, and its output is
    /// dropped. Call [`LockGuard::check`] in `work` to end earlier.
    ///
    /// ```
    /// use leasehold::Client;
    ///
    /// let lock = Client::memory().lock("invoice:42").build()?;
    /// let fence = lock.blocking_with(|guard| guard.fence())?;
    /// println!("written with fence {fence}");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// - The same as for [`acquire`](Self::acquire), and [`Error::Lost`] if the lock was lost while `work` ran.
    /// - [`Error::WrongThread`] inside a runtime: see [`Wait::wait`]. Then `work` did not run.
    ///
    /// # Panics
    /// If `work` panics. The lock is released.
    pub fn blocking_with<T>(&self, work: impl FnOnce(&LockGuard) -> T) -> Result<T, Error> {
        self.acquire().blocking_with(work)
    }
}

impl AcquireLock {
    /// Acquires the lock, blocks the thread until it is free, and runs `work` under it: [`Lock::blocking_with`] for an
    /// acquire that has its own time limit.
    ///
    /// # Errors
    /// The same as for [`Lock::blocking_with`].
    ///
    /// # Panics
    /// If `work` panics. The lock is released.
    pub fn blocking_with<T>(self, work: impl FnOnce(&LockGuard) -> T) -> Result<T, Error> {
        let work = async |guard: &LockGuard| {
            let done = work(guard);
            guard.check().map(|()| done)
        };
        self.with(work).wait().flatten()
    }
}

impl Pool {
    /// Acquires a pool lease for this instance, blocks the thread until one is free, and runs `work`
    /// under it: [`with`](Self::with) for threads without a runtime.
    ///
    /// See [`blocking`](self).
    ///
    /// A function cannot be stopped from outside. If the pool lease is lost, `work` runs to its end, and its output is
    /// dropped. Call [`PoolLease::check`] in `work` to end earlier.
    ///
    /// ```
    /// use leasehold::Client;
    ///
    /// let encoders = Client::memory().pool("encoders", 4).build()?;
    /// assert_eq!(encoders.blocking_with("worker-1", |_lease| 42)?, 42);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// - The same as for [`acquire`](Self::acquire), and [`Error::Lost`] if the pool lease was lost while `work` ran.
    /// - [`Error::WrongThread`] inside a runtime: see [`Wait::wait`]. Then `work` did not run.
    ///
    /// # Panics
    /// If `work` panics. The pool lease is released.
    pub fn blocking_with<T>(
        &self,
        instance_id: &str,
        work: impl FnOnce(&PoolLease) -> T,
    ) -> Result<T, Error> {
        self.acquire(instance_id).blocking_with(work)
    }
}

impl AcquirePoolLease {
    /// Acquires a pool lease, blocks the thread until one is free, and runs `work` under it: [`Pool::blocking_with`] for an
    /// acquire that has its own time limit.
    ///
    /// # Errors
    /// The same as for [`Pool::blocking_with`].
    ///
    /// # Panics
    /// If `work` panics. The pool lease is released.
    pub fn blocking_with<T>(self, work: impl FnOnce(&PoolLease) -> T) -> Result<T, Error> {
        let work = async |lease: &PoolLease| {
            let done = work(lease);
            lease.check().map(|()| done)
        };
        self.with(work).wait().flatten()
    }
}

#[cold]
fn in_a_runtime() -> Error {
    let what = "this thread belongs to a Tokio runtime, and blocking it would stop its tasks: \
                await the future, or wait in spawn_blocking inside leasehold::blocking::allow";
    Error::WrongThread { problem: what.to_owned() }
}

/// Polls the future on this thread, and parks the thread while the future is pending.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let parked = Arc::new(Parked { thread: thread::current(), woken: AtomicBool::new(false) });
    let waker = Waker::from(parked.clone());
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        // Check the flag, because the thread's park token is not enough: code that the future calls may park this
        // thread, too, and use up the token.
        while !parked.woken.swap(false, Ordering::Acquire) {
            thread::park();
        }
    }
}

struct Parked {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Set the flag before unparking, because the thread checks the flag whenever it is unparked.
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
