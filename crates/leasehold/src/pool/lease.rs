//! The guard of a pool's lease.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use super::seat::Use;
use super::{Definition, outcome};
use crate::Error;
use crate::backend::Later;
use crate::clock::{Moment, Span};
use crate::engine::background::UnderWay;
use crate::engine::lease::{Keep, Lease};
use crate::machine::pool::{PoolAction, Status};
use crate::name::Name;
use crate::permit::Lost;

/// A lease of a [`Pool`](crate::Pool) that renews itself, at a third of its [lease](crate::PoolBuilder::lease) and at least every 3.3 s, until it is released or dropped.
///
/// Dropping it gives the lease back in the background, without blocking, from any thread.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
/// use std::time::Duration;
///
/// let encoders = Client::memory().pool("encoders", 4).lease(Duration::from_secs(10)).build()?;
/// let lease = encoders.lease("worker-1").await?;
/// lease.check()?; // still ours?
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a lease is given back when it is dropped"]
pub struct PoolLease {
    lease: Arc<Lease>,
    holding: Arc<Holding>,
}

/// What the store is asked about one lease.
#[derive(Clone)]
pub(super) struct Holding {
    pool: Arc<Definition>,
    instance: Name,
    pub(super) seat: Arc<Use>,
}

impl Holding {
    pub(super) fn new(pool: Arc<Definition>, instance: Name) -> Self {
        let seat = Arc::new(Use::of(pool.engine.core().seats.seat(&pool.name, &instance)));
        Self { pool, instance, seat }
    }
}

impl PoolLease {
    pub(super) fn new(holding: Arc<Holding>, sent: Moment) -> Self {
        let (pool, keep) = (&holding.pool, holding.clone());
        let (name, id) = (pool.name.clone(), holding.instance.to_string());
        let lease = Lease::new(&pool.engine, "lease", name, id, pool.ttl, keep, (sent, pool.ttl));
        lease.keep(true);
        Self { lease, holding }
    }

    /// Who holds it.
    #[must_use]
    pub fn instance_id(&self) -> &str {
        self.holding.instance.as_str()
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

    /// Resolves when the lease is lost: it could not be renewed in time, or the store no longer knows it. After the guard
    /// was released or dropped it resolves, too, with [`LossReason::Released`](crate::LossReason::Released).
    ///
    /// # Cancel safety
    /// Only listens.
    pub fn lost(&self) -> Lost {
        Lost::of_lease(self.lease.clone())
    }

    /// Gives the lease back and waits until it has been. True if it was held until now, false if it had been lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not answer in time: then the release goes on in the background, and the
    /// lease ends by itself with its TTL. [`Error::Refused`] if the store does not allow it.
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

/// A third of the shortest TTL that is common. Another program that shares the pool judges our leases by its own TTL: one
/// such program (osparc) has 10 s by default.
const LONGEST_INTERVAL: Span = Span::from_millis(3300);

impl Keep for Holding {
    fn interval(&self, ttl: Span) -> Span {
        ttl.divided_by(3).min(LONGEST_INTERVAL)
    }

    fn renew(&self, until: Moment) -> Later<Option<(Span, Moment)>> {
        let (ttl, instance) = (self.pool.ttl, self.instance.clone());
        let part = self.pool.part(PoolAction::Renew { instance });
        let asked = self.pool.engine.core().ask(part, until, None);
        Box::pin(async move {
            let (answer, sent) = asked.await?;
            Ok((outcome(answer)?.status == Status::Renewed).then_some((ttl, sent)))
        })
    }

    fn release(&self) -> Later<bool> {
        let core = self.pool.engine.core();
        let until = Moment::now() + core.settings.answer_timeout;
        Box::pin(self.clone().release_until(until))
    }

    fn release_later(&self) {
        let core = self.pool.engine.core().clone();
        let under_way = UnderWay::new(&core);
        // By then the store must have expired it.
        let until = Moment::now() + self.pool.ttl;
        let release = self.clone().release_until(until);
        let mut release = Box::pin(async move {
            if let Err(error) = release.await {
                core.background_failed(&error);
            }
            drop(under_way);
        });
        // A store in this process answers at once, unless another task is about the same.
        if release.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            self.pool.engine.core().spawn(release);
        }
    }
}

impl Holding {
    async fn release_until(self, until: Moment) -> Result<bool, Error> {
        let mut turn = self.pool.engine.core().until(until, self.seat.turn()).await?;
        if !turn.end() {
            // Another guard goes on with it.
            return Ok(true);
        }
        let part = self.pool.part(PoolAction::Release { instance: self.instance.clone() });
        let (answer, _) = self.pool.engine.core().ask(part, until, None).await?;
        Ok(outcome(answer)?.status == Status::Released)
    }
}
