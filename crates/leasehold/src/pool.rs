//! The lease pool, as users see it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, PoolStore};
use crate::clock::{Moment, Span};
use crate::engine::Engine;
use crate::engine::errands::{Errand, Wanted};
use crate::engine::lease::Doubt;
use crate::machine::pool::{Answer, Ask, Status, What};
use crate::name::Name;
use crate::{Error, Retry};

mod answer;
mod lease;
mod seat;
mod stats;

pub use answer::{AcquireStatus, PoolAnswer, PoolCount, ReleaseStatus, RenewStatus};
pub use lease::PoolLease;
pub(crate) use seat::Seats;
pub use stats::{PoolMember, PoolStats, Pools};

use answer::typed;
use lease::Kept;

/// How long a lease is held unless it is renewed or released.
const TTL: Duration = Duration::from_secs(30);
/// What other programs that share a pool count in.
const MIN_TTL: Duration = Duration::from_secs(1);

/// A fixed number of leases, each held by an instance id. No queue, and nothing that runs between calls.
///
/// For whoever has a loop of its own and only wants to ask "may I?", "am I still?", "how many are we?". Each of these
/// is one call and one round trip. For a guard that renews by itself, see [`lease`](Self::lease).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{AcquireStatus, Client, ReleaseStatus, RenewStatus};
///
/// let encoders = Client::memory().pool("encoders", 1).build()?;
/// assert_eq!(encoders.acquire("worker-1").await?.status, AcquireStatus::Acquired);
/// assert_eq!(encoders.acquire("worker-2").await?.status, AcquireStatus::CapacityFull);
/// assert_eq!(encoders.renew("worker-1").await?.status, RenewStatus::Renewed);
/// assert_eq!(encoders.count().await?.current_count, 1);
/// assert_eq!(encoders.release("worker-1").await?.status, ReleaseStatus::Released);
/// # Ok(())
/// # }
/// ```
///
/// An instance that acquires again while it holds a lease renews it, and does not take a second one. So give every
/// worker an id of its own, one that nobody else makes up: a host name and a process id, or something random.
///
/// All who share a pool should have the same TTL: every call removes whoever was silent for the *caller's* TTL, so that
/// one with a shorter TTL takes the leases of the others away.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Arc<Engine>,
    store: Arc<dyn PoolStore>,
    name: Name,
    capacity: u32,
    ttl: Span,
    retry: Retry,
}

impl Pool {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.name.as_str()
    }

    /// How many leases there are.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.capacity
    }

    /// Takes a lease, if there is one; renews it, if this instance has one already.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an instance id that cannot be, and what the store has to say.
    ///
    /// # Cancel safety
    /// Goes on if the future is dropped after it was first polled. Whoever does not know whether it got a lease may
    /// [`release`](Self::release) it.
    pub async fn acquire(&self, instance_id: &str) -> Result<PoolAnswer<AcquireStatus>, Error> {
        let (instance, capacity) = (instance_of(instance_id)?, self.inner.capacity);
        typed(self.inner.ask(What::Acquire { instance, capacity }).await?)
    }

    /// Renews a lease.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// Goes on if the future is dropped after it was first polled.
    pub async fn renew(&self, instance_id: &str) -> Result<PoolAnswer<RenewStatus>, Error> {
        let instance = instance_of(instance_id)?;
        typed(self.inner.ask(What::Renew { instance }).await?)
    }

    /// Gives a lease back.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// Goes on if the future is dropped after it was first polled.
    pub async fn release(&self, instance_id: &str) -> Result<PoolAnswer<ReleaseStatus>, Error> {
        let instance = instance_of(instance_id)?;
        typed(self.inner.ask(What::Release { instance }).await?)
    }

    /// How many leases are held.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks, and removes who is over.
    pub async fn count(&self) -> Result<PoolCount, Error> {
        let Answer { current, expired, .. } = self.inner.ask(What::Count).await?;
        Ok(PoolCount { current_count: current, expired_count: expired })
    }

    /// A lease that renews itself, if there is one now; `None` if the pool is full.
    ///
    /// # Errors
    /// As for [`lease`](Self::lease).
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it may have been granted.
    pub async fn try_lease(&self, instance_id: &str) -> Result<Option<PoolLease>, Error> {
        let (inner, instance) = (self.inner.clone(), instance_of(instance_id)?);
        let attempt =
            move |wanted: Wanted| async move { Ok(inner.attempt(&instance, &wanted).await?.ok()) };
        let core = self.inner.engine.core();
        match &core.backend {
            Backend::Memory(_) => attempt(Wanted::default()).await,
            Backend::Away(_) => core.run_while_wanted(|wanted| Box::pin(attempt(wanted))).await,
        }
    }

    /// Waits for a lease that renews itself, by asking again and again as [`retry`](PoolBuilder::retry) says: by default
    /// for at most 5 s. There is no queue: whoever asks at the right moment gets it. Where order matters, use a
    /// [`Semaphore`](crate::Semaphore).
    ///
    /// Guards of one client and one instance id share one lease, and it is given back with the last of them.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when the time or the retries are used up, with how full the pool was, [`Error::Closed`] when
    /// the client is closed, [`Error::InvalidArgument`] for an instance id that cannot be, and what the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it may have been granted.
    pub async fn lease(&self, instance_id: &str) -> Result<PoolLease, Error> {
        let (inner, instance) = (self.inner.clone(), instance_of(instance_id)?);
        let core = self.inner.engine.core();
        core.run_while_wanted(|wanted| Box::pin(wait(inner, instance, wanted))).await
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.name())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

/// Declares a [`Pool`]: see [`Client::pool`](crate::Client::pool).
#[must_use = "a declaration does nothing until it is built"]
#[derive(Clone)]
pub struct PoolBuilder {
    engine: Arc<Engine>,
    name: String,
    capacity: u32,
    ttl: Duration,
    retry: Retry,
}

impl PoolBuilder {
    pub(crate) fn new(engine: Arc<Engine>, name: &str, capacity: u32) -> Self {
        Self { engine, name: name.to_owned(), capacity, ttl: TTL, retry: Retry::default() }
    }

    /// How long a lease is held unless it is renewed or released: 30 s by default. The same for all who share the pool.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How [`Pool::lease`] asks again while the pool is full.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// The pool.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the name is empty, longer than 512 bytes after NFC, contains control characters or
    /// begins with `holders:`, if the capacity is zero, and if the TTL is below a second or not in whole milliseconds.
    pub fn build(self) -> Result<Pool, Error> {
        let name = Name::new("name", &self.name)?;
        if name.as_str().starts_with("holders:") {
            let problem =
                format!("{:?} begins with \"holders:\", where other things are kept", self.name);
            return Err(Error::invalid("name", problem + ": choose another beginning"));
        }
        if self.capacity == 0 {
            return Err(Error::invalid("capacity", "0 leases could never be acquired: at least 1"));
        }
        if self.ttl < MIN_TTL {
            let problem = format!("{:?} is too short to be kept: at least {MIN_TTL:?}", self.ttl);
            return Err(Error::invalid("ttl", problem));
        }
        let ttl = Span::from_millis(crate::name::millis("ttl", self.ttl)?);
        self.retry.check()?;
        let store = self.engine.core().backend.pools();
        let (engine, capacity, retry) = (self.engine, self.capacity, self.retry);
        Ok(Pool { inner: Arc::new(Inner { engine, store, name, capacity, ttl, retry }) })
    }
}

impl fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuilder")
            .field("name", &self.name)
            .field("capacity", &self.capacity)
            .field("ttl", &self.ttl)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}

fn instance_of(text: &str) -> Result<Name, Error> {
    Name::new("instance id", text)
}

impl Inner {
    fn asked(&self, what: What) -> Ask {
        Ask { pool: self.name.clone(), ttl: self.ttl, what }
    }

    async fn ask(&self, what: What) -> Result<Answer, Error> {
        let core = self.engine.core();
        core.check_open()?;
        let (store, ask) = (self.store.clone(), self.asked(what));
        let answer = core.ask(move || store.ask(ask.clone())).await;
        if let Ok(answer) = &answer {
            tracing::debug!(name = self.name.as_str(), ?answer, "pool");
        }
        answer
    }

    /// One attempt: a lease, or how many others there are. It goes on to its end: what comes of it when nobody waits for it
    /// any more is given back.
    async fn attempt(
        self: &Arc<Self>,
        instance: &Name,
        wanted: &Wanted,
    ) -> Result<Result<PoolLease, u64>, Error> {
        let core = self.engine.core();
        core.check_open()?;
        let _errand = Errand::new(core);
        let kept = Arc::new(Kept::new(self.clone(), instance.clone()));
        let mut turn = kept.seat.turn().await;
        let _asking = wanted.asking();
        turn.begin();
        let doubt = Doubt::new(core, Box::new(kept.clone()));
        let what = What::Acquire { instance: instance.clone(), capacity: self.capacity };
        let mut sent = Moment::now();
        let answer = match &core.backend {
            Backend::Memory(_) => self.store.ask(self.asked(what)).await,
            Backend::Away(_) => {
                let ask = || {
                    sent = Moment::now();
                    self.store.ask(self.asked(what.clone()))
                };
                core.settings.retries.persist_while(wanted, ask).await
            }
        }?;
        doubt.resolved();
        if answer.status != Status::Acquired {
            turn.end();
            return Ok(Err(answer.current));
        }
        drop(turn);
        let lease = PoolLease::new(kept, sent);
        // A close that came meanwhile may have looked for guards before there was this one.
        core.check_open()?;
        Ok(Ok(lease))
    }
}

async fn wait(inner: Arc<Inner>, instance: Name, wanted: Wanted) -> Result<PoolLease, Error> {
    let started = Moment::now();
    let limit = inner.retry.limit();
    for nth in 0.. {
        let held = match inner.attempt(&instance, &wanted).await? {
            Ok(lease) => return Ok(lease),
            Err(held) => held,
        };
        let so_far = Moment::now().saturating_since(started);
        if nth >= inner.retry.max_times() || so_far >= limit {
            return Err(Error::TimedOut {
                what: "lease",
                name: inner.name.to_string(),
                limit: so_far,
                full: Some((held, inner.capacity)),
            });
        }
        tokio::time::sleep(inner.retry.pause(nth).min(limit.saturating_sub(so_far))).await;
    }
    Err(Error::internal("there are more numbers than that"))
}
