//! The guard of a pool lease.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use super::{Definition, outcome};
use crate::Error;
use crate::backend::Later;
use crate::clock::{Moment, Span};
use crate::engine::background::UnderWay;
use crate::engine::lease::{Keep, Lease};
use crate::engine::pool_instances::InstanceUser;
use crate::engine::watch::{Hold, Id};
use crate::machine::Subject;
use crate::machine::pool::{PoolAction, Status};
use crate::name::Name;
use crate::permit::Lost;

/// A guard that holds a lease of a [`Pool`](crate::Pool) until it is released or dropped. The client renews the lease
/// in the background, each time a third of the [lease](crate::PoolBuilder::lease) has passed and at least every 3.3 s.
///
/// Dropping the guard releases the lease in the background. This never blocks and works on any thread. To wait until
/// the store has confirmed the release, call [`release`](Self::release).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
/// use std::time::Duration;
///
/// let encoders = Client::memory().pool("encoders", 4).lease(Duration::from_secs(10)).build()?;
/// let lease = encoders.lease("worker-1").await?;
/// lease.check()?; // is it still held?
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping the guard releases the lease"]
pub struct PoolLease {
    lease: Arc<Lease>,
    holding: Arc<Holding>,
}

/// One lease, and the requests to the store that concern it.
#[derive(Clone)]
pub(super) struct Holding {
    pool: Arc<Definition>,
    instance: Name,
    pub(super) user: Arc<InstanceUser>,
}

impl Holding {
    pub(super) fn new(pool: Arc<Definition>, instance: Name) -> Self {
        let user = Arc::new(InstanceUser::of(
            pool.engine.core().pool_instances.get(&pool.name, &instance),
        ));
        Self { pool, instance, user }
    }
}

impl PoolLease {
    pub(super) fn new(holding: Arc<Holding>, sent: Moment) -> Self {
        let (pool, keep) = (&holding.pool, holding.clone());
        let name = pool.name.clone();
        let slot = pool.engine.core().slot(Subject::Pool(&name));
        let lease = Lease::new(
            &pool.engine,
            ("lease", slot),
            name,
            pool.ttl,
            (keep, pool.watch.clone()),
            (sent, pool.ttl),
        );
        lease.renew();
        Self { lease, holding }
    }

    pub(super) fn watch(&self, hold: Hold) {
        self.lease.watch(hold);
    }

    /// Returns the instance id that holds the lease.
    #[must_use]
    pub fn instance_id(&self) -> &str {
        self.holding.instance.as_str()
    }

    /// Returns the name of the pool.
    #[must_use]
    pub fn pool(&self) -> &str {
        self.lease.name().as_str()
    }

    /// Returns the instant until which this lease is valid without another renewal.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        Instant::now() + self.lease.valid_until().saturating_since(self.lease.now())
    }

    /// Checks that the lease is still held.
    ///
    /// # Errors
    /// [`Error::Lost`] if the lease is no longer held.
    pub fn check(&self) -> Result<(), Error> {
        self.lease.check()
    }

    /// Returns a future that resolves when the lease is lost, with the reason: it could not be renewed in time, the
    /// store no longer knows it, or the client was closed. If the guard is released or dropped, the future resolves
    /// with [`LossReason::Released`](crate::LossReason::Released).
    ///
    /// # Cancel safety
    /// Dropping the future only stops listening. The lease is not affected.
    pub fn lost(&self) -> Lost {
        Lost::of_lease(self.lease.clone())
    }

    /// Releases the lease and waits until the store has confirmed it. Returns `true` if the lease was held until now,
    /// `false` if it had been lost. If other guards of this client share the lease, it stays held until the last of
    /// them is released.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Refused`] if the store denies the request.
    /// - [`Error::InvalidArgument`] if another program uses the pool's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After every error except `Stopped`, the client repeats the release in the background. The lease expires by
    /// itself at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped, even before its first poll, the release continues in the background.
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

/// A third of the shortest lease that is common. Another program that shares the pool judges our leases by its own
/// setting: for one such program (osparc) the default is 10 s.
const LONGEST_INTERVAL: Span = Span::from_millis(3300);

impl Keep for Holding {
    fn id(&self) -> Id {
        Id::Instance(self.instance.clone())
    }

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
        let until = core.now() + core.settings.answer_timeout;
        Box::pin(self.clone().release_until(until))
    }

    fn release_later(&self) {
        let core = self.pool.engine.core().clone();
        let under_way = UnderWay::new(&core);
        // By then the store must have expired the lease.
        let until = core.now() + self.pool.ttl;
        let release = self.clone().release_until(until);
        let mut release = Box::pin(async move {
            if let Err(error) = release.await {
                core.background_failed(&error);
            }
            drop(under_way);
        });
        // A store in this process answers at once, unless another task is changing the same lease.
        if release.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            self.pool.engine.core().spawn(release);
        }
    }
}

impl Holding {
    async fn release_until(self, until: Moment) -> Result<bool, Error> {
        let mut turn = self.pool.engine.core().until(until, self.user.turn()).await?;
        if !turn.end() {
            // Another guard still holds the lease.
            return Ok(true);
        }
        let part = self.pool.part(PoolAction::Release { instance: self.instance.clone() });
        let (answer, _) = self.pool.engine.core().ask(part, until, None).await?;
        Ok(outcome(answer)?.status == Status::Released)
    }
}
