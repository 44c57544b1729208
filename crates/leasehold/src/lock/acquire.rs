//! The futures that acquire a lock.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::{LockGuard, LockSpec};
use crate::clock::Span;
use crate::engine::watch::{Acquiring, Id};
use crate::guard::{self, OnFirstPoll};
use crate::name::positive;
use crate::{Error, LockId};

/// A future that resolves to a [`LockGuard`]: see [`Lock::acquire`](crate::Lock::acquire).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// let lock = Client::memory().lock("invoice:42").build()?;
/// let held = lock.acquire().await?;
/// let error = lock.acquire().within(Duration::from_millis(10)).await.unwrap_err();
/// assert!(matches!(error, Error::TimedOut { .. }));
/// # drop(held);
/// # Ok(())
/// # }
/// ```
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct AcquireLock {
    lock: Arc<LockSpec>,
    id: LockId,
    within: Option<Duration>,
    acquire: OnFirstPoll<LockGuard>,
}

impl AcquireLock {
    pub(super) fn new(lock: Arc<LockSpec>) -> Self {
        let (id, within) = (LockId::random(), lock.within);
        Self { lock, id, within, acquire: OnFirstPoll::default() }
    }

    /// Sets the time limit of this acquire, which replaces that of [`LockBuilder::within`](crate::LockBuilder::within).
    ///
    /// A limit of zero fails with [`Error::InvalidArgument`]: use [`try_acquire`](crate::Lock::try_acquire) to acquire
    /// without waiting.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    /// Acquires the lock and runs `work` under it: [`Lock::with`](crate::Lock::with) for an acquire that has its own
    /// time limit.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// let lock = leasehold::Client::memory().lock("invoice:42").build()?;
    /// let answer = lock.acquire().within(Duration::from_secs(2)).with(async |_| 42).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`Lock::with`](crate::Lock::with).
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the lock in the background.
    pub async fn with<T>(self, work: impl AsyncFnOnce(&LockGuard) -> T) -> Result<T, Error> {
        let lock = self.lock.clone();
        guard::with(self.await?, work, |error| lock.release_failed(error)).await
    }

    /// Returns the id with which the lock will be held.
    ///
    /// Anybody who knows it can release the lock.
    #[must_use]
    pub fn id(&self) -> LockId {
        self.id
    }
}

impl Future for AcquireLock {
    type Output = Result<LockGuard, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { lock, id, within, acquire } = self.get_mut();
        acquire.poll(cx, || {
            let within = within.map(|limit| positive("within", limit)).transpose()?;
            let (lock, id) = (lock.clone(), *id);
            Ok(Box::pin(async move {
                let acquire = lock.wait(id, within.map(Span::duration));
                lock.watch.acquire(|| Id::Lock(id), true, acquire, LockGuard::watch).await
            }))
        })
    }
}

/// A future that resolves to a [`LockGuard`] if the lock is free now: see
/// [`Lock::try_acquire`](crate::Lock::try_acquire).
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct TryAcquireLock {
    lock: Arc<LockSpec>,
    acquire: OnFirstPoll<Option<LockGuard>>,
}

impl TryAcquireLock {
    pub(super) fn new(lock: Arc<LockSpec>) -> Self {
        Self { lock, acquire: OnFirstPoll::default() }
    }

    /// Acquires the lock and runs `work` under it, if the lock is free now; returns `None` otherwise.
    ///
    /// # Errors
    /// The same as for [`Lock::try_acquire`](crate::Lock::try_acquire), and [`Error::Lost`] if the lock is lost while
    /// `work` runs.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the lock in the background.
    pub async fn with<T>(
        self,
        work: impl AsyncFnOnce(&LockGuard) -> T,
    ) -> Result<Option<T>, Error> {
        let lock = self.lock.clone();
        let Some(guard) = self.await? else { return Ok(None) };
        guard::with(guard, work, |error| lock.release_failed(error)).await.map(Some)
    }
}

impl Future for TryAcquireLock {
    type Output = Result<Option<LockGuard>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { lock, acquire } = self.get_mut();
        acquire.poll(cx, || {
            let lock = lock.clone();
            Ok(Box::pin(async move {
                let id = LockId::random();
                let end = |guard: &Option<LockGuard>, watched: Acquiring| match guard {
                    Some(guard) => guard.watch(watched),
                    None => watched.refused(),
                };
                let acquire = lock.try_once(id);
                lock.watch.acquire(|| Id::Lock(id), false, acquire, end).await
            }))
        })
    }
}
