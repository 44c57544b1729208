//! The guard of a pool lease.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::PoolSpec;
use crate::clock::Moment;
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::pool_instance::{PoolInstance, PoolProtocol};
use crate::engine::watch::{Acquiring, Id, Watch};
use crate::guard::{Declared, LeaseGuard};
use crate::machine::{ReleaseHint, Terms};
use crate::permit::Lost;
use crate::{AcquisitionId, Error};

/// A guard that holds a lease of a [`Pool`](crate::Pool), a pool lease, until it is released or dropped.
///
/// The client renews the pool lease in the background.
///
/// Dropping the guard releases the pool lease in the background. This never blocks and works on any thread. To wait
/// until the store has confirmed the release, call [`release`](Self::release).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
/// use std::time::Duration;
///
/// let encoders = Client::memory().pool("encoders", 4).lease(Duration::from_secs(10)).build()?;
/// let lease = encoders.acquire("worker-1").await?;
/// lease.check()?; // is it still held?
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping the guard releases the lease"]
pub struct PoolLease {
    // Dropped before the client, whose engine sends the release.
    lease: LeaseGuard<PoolProtocol>,
    pool: Arc<PoolSpec>,
}

/// One acquisition of an instance id, by one handle of the pool.
pub(super) struct PoolAcquisition {
    instance: Arc<PoolInstance>,
    terms: Terms,
    watch: Arc<Watch>,
}

impl PoolAcquisition {
    pub(super) fn new(pool: &PoolSpec, instance: Arc<PoolInstance>) -> Self {
        Self { instance, terms: pool.terms(), watch: pool.watch.clone() }
    }
}

impl LeaseSpec for PoolAcquisition {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn terms(&self) -> Terms {
        self.terms
    }

    fn id(&self, _id: AcquisitionId) -> Id {
        Id::Instance(self.instance.protocol.instance().clone())
    }

    fn end(&self, id: AcquisitionId, _known: ReleaseHint) {
        self.instance.end(id);
    }
}

impl PoolLease {
    pub(super) fn new(lease: LeaseGuard<PoolProtocol>, pool: Arc<PoolSpec>) -> Self {
        Self { lease, pool }
    }

    pub(super) fn waited_since(mut self, started: Moment) -> Self {
        self.lease.set_waited_since(started);
        self
    }

    /// Reports the acquire, and observes the pool lease until it ends.
    pub(super) fn watch(&self, watched: Acquiring) {
        self.lease.ticket.watch(watched.acquired(None, || {}));
    }

    /// Returns the name of the pool.
    #[must_use]
    pub fn name(&self) -> &str {
        self.pool.name.as_str()
    }

    /// Returns the instance id that holds the pool lease.
    #[must_use]
    pub fn id(&self) -> &str {
        self.lease.driver.protocol.instance().as_str()
    }

    /// Returns how long the acquire waited.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.lease.waited()
    }

    /// Returns the instant until which this pool lease is valid without another renewal.
    ///
    /// It is never `None`.
    ///
    /// Every renewal moves the instant, up to the TTL.
    #[must_use]
    pub fn valid_until(&self) -> Option<Instant> {
        Some(self.lease.valid_until())
    }

    /// Checks that the pool lease is still held.
    ///
    /// # Errors
    /// [`Error::Lost`] if the pool lease is no longer held.
    pub fn check(&self) -> Result<(), Error> {
        self.lease.check()
    }

    /// Returns a future that resolves when the pool lease is lost, with the reason.
    ///
    /// If the guard is released, dropped or detached, the future resolves with
    /// [`LossReason::Released`](crate::LossReason::Released).
    ///
    /// # Cancel safety
    /// Dropping the future only stops listening. The pool lease is not affected.
    pub fn lost(&self) -> Lost {
        self.lease.lost()
    }

    /// Releases the pool lease and waits until the store has confirmed it.
    ///
    /// Returns `true` if the pool lease was held until now, `false` if it had been lost. If other guards
    /// of this client share the pool lease, it stays held until the last of them is released.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the pool's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After every error except `Stopped`, the client repeats the release in the background. The pool lease expires by
    /// itself at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped, even before its first poll, the release continues in the background.
    pub async fn release(self) -> Result<bool, Error> {
        self.lease.release().done().await
    }

    /// Drops the guard but keeps the pool lease, and returns its instance id.
    ///
    /// The client no longer renews it or ends it with its TTL: it expires unless it is renewed by
    /// hand.
    ///
    /// [`Pool::extend`](crate::Pool::extend) and [`Pool::release`](crate::Pool::release) renew and release it by its
    /// instance id. If other guards of this client share the pool lease, they continue to renew it, and the last of
    /// them releases it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// let encoders = leasehold::Client::memory().pool("encoders", 4).build()?;
    /// let id = encoders.acquire("worker-1").await?.detach();
    /// assert!(encoders.extend(&id).await?);
    /// assert!(encoders.release(&id).await?);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "without its id the lease cannot be released"]
    pub fn detach(self) -> String {
        self.lease.driver.forget(self.lease.ticket.id);
        self.id().to_owned()
    }
}

impl Declared for PoolLease {
    fn spec(&self) -> Option<Arc<dyn LeaseSpec>> {
        Some(self.lease.ticket.spec.clone())
    }
}

impl fmt::Debug for PoolLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolLease")
            .field("name", &self.name())
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}
