//! The futures that acquire a pool lease.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::{PoolLease, PoolSpec, instance_of};
use crate::Error;
use crate::clock::Span;
use crate::engine::watch::{Acquiring, Id};
use crate::guard::{self, OnFirstPoll};
use crate::name::positive;

/// A future that resolves to a [`PoolLease`]: see [`Pool::acquire`](crate::Pool::acquire).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// let encoders = Client::memory().pool("encoders", 1).build()?;
/// let held = encoders.acquire("worker-1").await?;
/// let error = encoders.acquire("worker-2").within(Duration::from_millis(10)).await.unwrap_err();
/// assert!(matches!(error, Error::TimedOut { .. }));
/// # drop(held);
/// # Ok(())
/// # }
/// ```
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct AcquirePoolLease {
    pool: Arc<PoolSpec>,
    instance_id: String,
    within: Option<Duration>,
    acquire: OnFirstPoll<PoolLease>,
}

impl AcquirePoolLease {
    pub(super) fn new(pool: Arc<PoolSpec>, instance_id: &str) -> Self {
        let (instance_id, within) = (instance_id.to_owned(), pool.within);
        Self { pool, instance_id, within, acquire: OnFirstPoll::default() }
    }

    /// Sets the time limit of this acquire, which replaces that of [`PoolBuilder::within`](crate::PoolBuilder::within).
    ///
    /// A limit of zero fails with [`Error::InvalidArgument`]: use [`try_acquire`](crate::Pool::try_acquire) to acquire
    /// without waiting.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    /// Acquires a pool lease and runs `work` under it: [`Pool::with`](crate::Pool::with) for an acquire that has its
    /// own time limit.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// let encoders = leasehold::Client::memory().pool("encoders", 4).build()?;
    /// let acquire = encoders.acquire("worker-1").within(Duration::from_secs(2));
    /// assert_eq!(acquire.with(async |_| 42).await?, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`Pool::with`](crate::Pool::with).
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the pool lease in the background.
    pub async fn with<T>(self, work: impl AsyncFnOnce(&PoolLease) -> T) -> Result<T, Error> {
        guard::with(self.await?, work, |_| ()).await
    }

    /// Returns the instance id that will hold the pool lease.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.instance_id
    }
}

impl Future for AcquirePoolLease {
    type Output = Result<PoolLease, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { pool, instance_id, within, acquire } = self.get_mut();
        acquire.poll(cx, || {
            let within = within.map(|limit| positive("within", limit)).transpose()?;
            let (pool, instance) = (pool.clone(), instance_of(instance_id)?);
            Ok(Box::pin(async move {
                let acquire = pool.wait(&instance, within.map(Span::duration));
                let id = || Id::Instance(instance.clone());
                pool.watch.acquire(id, true, acquire, PoolLease::watch).await
            }))
        })
    }
}

/// A future that resolves to a [`PoolLease`] if one is free now: see [`Pool::try_acquire`](crate::Pool::try_acquire).
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct TryAcquirePoolLease {
    pool: Arc<PoolSpec>,
    instance_id: String,
    acquire: OnFirstPoll<Option<PoolLease>>,
}

impl TryAcquirePoolLease {
    pub(super) fn new(pool: Arc<PoolSpec>, instance_id: &str) -> Self {
        Self { pool, instance_id: instance_id.to_owned(), acquire: OnFirstPoll::default() }
    }

    /// Acquires a pool lease and runs `work` under it, if a pool lease is free now; returns `None` otherwise.
    ///
    /// # Errors
    /// The same as for [`Pool::try_acquire`](crate::Pool::try_acquire), and [`Error::Lost`] if the pool lease is lost
    /// while `work` runs.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the pool lease in the background.
    pub async fn with<T>(
        self,
        work: impl AsyncFnOnce(&PoolLease) -> T,
    ) -> Result<Option<T>, Error> {
        let Some(lease) = self.await? else { return Ok(None) };
        guard::with(lease, work, |_| ()).await.map(Some)
    }
}

impl Future for TryAcquirePoolLease {
    type Output = Result<Option<PoolLease>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { pool, instance_id, acquire } = self.get_mut();
        acquire.poll(cx, || {
            let (pool, instance) = (pool.clone(), instance_of(instance_id)?);
            Ok(Box::pin(async move {
                let end = |lease: &Option<PoolLease>, watched: Acquiring| match lease {
                    Some(lease) => lease.watch(watched),
                    None => watched.refused(),
                };
                let (id, acquire) = (|| Id::Instance(instance.clone()), pool.try_once(&instance));
                pool.watch.acquire(id, false, acquire, end).await
            }))
        })
    }
}
