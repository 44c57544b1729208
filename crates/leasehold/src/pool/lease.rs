//! The guard of a pool's lease.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::Inner;
use super::seat::Use;
use crate::Error;
use crate::backend::Later;
use crate::clock::{Moment, Span};
use crate::engine::lease::{Keep, Lease};
use crate::machine::pool::{Status, What};
use crate::name::Name;
use crate::permit::Lost;

/// A lease of a [`Pool`](crate::Pool) that renews itself, at a third of its TTL, until it is released or dropped.
///
/// Dropping it gives the lease back in the background, without blocking, from any thread.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let encoders = Client::memory().pool("encoders", 4).build()?;
/// let lease = encoders.lease("worker-1").await?;
/// lease.check()?; // still ours?
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a lease is given back when it is dropped"]
pub struct PoolLease {
    lease: Arc<Lease>,
    kept: Arc<Kept>,
}

/// What the store is asked about one lease.
pub(super) struct Kept {
    pool: Arc<Inner>,
    instance: Name,
    pub(super) seat: Use,
}

impl Kept {
    pub(super) fn new(pool: Arc<Inner>, instance: Name) -> Self {
        let seat = Use::of(pool.engine.core().seats.seat(&pool.name, &instance));
        Self { pool, instance, seat }
    }
}

impl PoolLease {
    pub(super) fn new(kept: Arc<Kept>, sent: Moment) -> Self {
        let (pool, keep) = (&kept.pool, Box::new(kept.clone()));
        let (name, id) = (pool.name.clone(), kept.instance.to_string());
        let lease = Lease::new(&pool.engine, "lease", name, id, pool.ttl, keep, (sent, pool.ttl));
        lease.keep(true);
        Self { lease, kept }
    }

    /// Who holds it.
    #[must_use]
    pub fn instance_id(&self) -> &str {
        self.kept.instance.as_str()
    }

    /// The pool it is from.
    #[must_use]
    pub fn pool(&self) -> &str {
        self.lease.name().as_str()
    }

    /// Until when this lease is good without another renewal.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        Instant::now() + self.lease.valid_until().saturating_since(Moment::now())
    }

    /// Whether the lease is still yours.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        self.lease.check()
    }

    /// Resolves when the lease is lost: it could not be renewed in time, or the store no longer knows it. Never, if it is
    /// not.
    ///
    /// # Cancel safety
    /// Only listens.
    pub fn lost(&self) -> Lost {
        Lost::of_lease(self.lease.clone())
    }

    /// Gives the lease back and waits until it has been. True if it was held until now, false if it had been lost.
    ///
    /// # Errors
    /// What the store has to say. The lease is no longer renewed then, and ends by itself when its TTL does.
    ///
    /// # Cancel safety
    /// The release goes on if the future is dropped, even before it was first polled.
    pub async fn release(self) -> Result<bool, Error> {
        self.lease.clone().release().await
    }
}

impl Drop for PoolLease {
    fn drop(&mut self) {
        self.lease.release_later();
    }
}

impl fmt::Debug for PoolLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolLease")
            .field("pool", &self.pool())
            .field("instance_id", &self.instance_id())
            .finish_non_exhaustive()
    }
}

impl Keep for Arc<Kept> {
    fn renew(&self) -> Later<Option<Span>> {
        let (ttl, instance) = (self.pool.ttl, self.instance.clone());
        let answer = self.pool.store.ask(self.pool.asked(What::Renew { instance }));
        Box::pin(async move { Ok((answer.await?.status == Status::Renewed).then_some(ttl)) })
    }

    fn release(&self) -> Later<bool> {
        let kept = self.clone();
        Box::pin(async move {
            let mut turn = kept.seat.turn().await;
            if !turn.end() {
                // Another guard goes on with it.
                return Ok(true);
            }
            let what = What::Release { instance: kept.instance.clone() };
            let answer = kept.pool.store.ask(kept.pool.asked(what)).await?;
            Ok(answer.status == Status::Released)
        })
    }
}
