//! The lease pool, as users see it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Answer, Part};
use crate::clock::{Moment, Span};
use crate::engine::Engine;
use crate::engine::foreign::event;
use crate::engine::lease::Keep;
use crate::engine::timers::Alarm;
use crate::machine::pool::{PoolAction, PoolCommand, PoolOutcome, Status};
use crate::name::Name;
use crate::{Error, Retry};

mod answer;
mod lease;
mod seat;
mod stats;

pub use answer::{AcquireStatus, PoolAnswer, PoolCount, ReleaseStatus, RenewStatus};
pub use lease::PoolLease;
pub(crate) use seat::Seats;
pub(crate) use stats::Which;
pub use stats::{PoolMember, PoolStats, Pools};

use answer::typed;
use lease::Holding;

/// The lease of an instance, unless another is given.
const LEASE: Duration = Duration::from_secs(30);
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
/// All who share a pool should have the same [lease](PoolBuilder::lease): every call removes the instances that were
/// silent for the *caller's* lease, so that a caller with a shorter one takes the leases of the others away.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Definition>,
}

/// A pool as it was declared.
struct Definition {
    engine: Arc<Engine>,
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
    /// If the future is dropped, the instance may or may not hold a lease: [`release`](Self::release) it.
    pub async fn acquire(&self, instance_id: &str) -> Result<PoolAnswer<AcquireStatus>, Error> {
        let (instance, capacity) = (instance_of(instance_id)?, self.inner.capacity);
        typed(self.inner.ask(PoolAction::Acquire { instance, capacity }).await?)
    }

    /// Renews a lease.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease may or may not be renewed.
    pub async fn renew(&self, instance_id: &str) -> Result<PoolAnswer<RenewStatus>, Error> {
        let instance = instance_of(instance_id)?;
        typed(self.inner.ask(PoolAction::Renew { instance }).await?)
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
        let core = self.inner.engine.core();
        core.check_open()?;
        let part = self.inner.part(PoolAction::Release { instance });
        typed(outcome(core.ask_to_the_end(part).await?)?)
    }

    /// How many leases are held.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks, and removes who is over.
    pub async fn count(&self) -> Result<PoolCount, Error> {
        let PoolOutcome { current, expired, .. } = self.inner.ask(PoolAction::Count).await?;
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
        let instance = instance_of(instance_id)?;
        let until = Moment::now() + self.inner.engine.core().settings.answer_timeout;
        Ok(self.inner.attempt(&instance, until).await?.ok())
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
        self.inner.wait(&instance_of(instance_id)?).await
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
        Self { engine, name: name.to_owned(), capacity, ttl: LEASE, retry: Retry::default() }
    }

    /// How long an instance may be silent before its lease passes on: 30 s by default, at least 1 s, and the same for all
    /// who share the pool. [`Pool::renew`] and the guard of [`Pool::lease`] renew it.
    ///
    /// ```
    /// use leasehold::Client;
    /// use std::time::Duration;
    ///
    /// let encoders = Client::memory().pool("encoders", 4).lease(Duration::from_secs(10)).build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lease(mut self, lease: Duration) -> Self {
        self.ttl = lease;
        self
    }

    /// The same as [`lease`](Self::lease), under the name that other programs use.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.lease(ttl)
    }

    /// How [`Pool::lease`] asks again while the pool is full.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// The pool.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the name is empty, longer than 512 bytes, contains control characters or
    /// begins with `holders:`, if the capacity is zero, and if the TTL is below a second or not in whole milliseconds.
    pub fn build(self) -> Result<Pool, Error> {
        let name = name_of(&self.name)?;
        if self.capacity == 0 {
            return Err(Error::invalid("capacity", "0 leases could never be acquired: at least 1"));
        }
        if self.ttl < MIN_TTL {
            let problem = format!("{:?} is too short to be kept: at least {MIN_TTL:?}", self.ttl);
            return Err(Error::invalid("ttl", problem));
        }
        let ttl = Span::from_millis(crate::name::millis("ttl", self.ttl)?);
        self.retry.check()?;
        let (engine, capacity, retry) = (self.engine, self.capacity, self.retry);
        Ok(Pool { inner: Arc::new(Definition { engine, name, capacity, ttl, retry }) })
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

impl Definition {
    fn part(&self, action: PoolAction) -> Part {
        Part::Pool(PoolCommand { pool: self.name.clone(), ttl: self.ttl, action })
    }

    async fn ask(&self, action: PoolAction) -> Result<PoolOutcome, Error> {
        let core = self.engine.core();
        core.check_open()?;
        let (answer, _) = core.ask_now(self.part(action)).await?;
        let outcome = outcome(answer)?;
        event!(debug, name = self.name.as_str(), ?outcome, "pool");
        Ok(outcome)
    }

    /// One attempt: a lease, or how many others there are.
    async fn attempt(
        self: &Arc<Self>,
        instance: &Name,
        until: Moment,
    ) -> Result<Result<PoolLease, u64>, Error> {
        let core = self.engine.core();
        core.check_open()?;
        let holding = Arc::new(Holding::new(self.clone(), instance.clone()));
        let mut turn = core.until(until, holding.seat.turn()).await?;
        turn.begin();
        let undo = holding.clone();
        let action = PoolAction::Acquire { instance: instance.clone(), capacity: self.capacity };
        let asked =
            core.ask(self.part(action), until, Some(Box::new(move || undo.release_later())));
        let (answer, sent) = asked.await?;
        let outcome = outcome(answer)?;
        if outcome.status != Status::Acquired {
            return Ok(Err(outcome.current));
        }
        turn.succeed();
        let lease = PoolLease::new(holding, sent);
        // A close that came meanwhile may have looked for guards before there was this one.
        core.check_open()?;
        Ok(Ok(lease))
    }

    async fn wait(self: &Arc<Self>, instance: &Name) -> Result<PoolLease, Error> {
        let core = self.engine.core();
        let started = Moment::now();
        let limit = self.retry.limit();
        let give_up_at = started + Span::from_duration(limit);
        for nth in 0.. {
            // From here on: a close while the store is asked must not be missed.
            let closing = core.closing();
            let now = Moment::now();
            let last = now >= give_up_at;
            let until = if last { now + core.settings.answer_timeout } else { give_up_at };
            let held = match self.attempt(instance, until).await? {
                Ok(lease) => return Ok(lease),
                Err(held) => held,
            };
            let so_far = Moment::now().saturating_since(started);
            if nth >= self.retry.max_times() || so_far >= limit {
                return Err(Error::TimedOut {
                    what: "lease",
                    name: self.name.to_string(),
                    limit: so_far,
                    full: Some((held, self.capacity)),
                });
            }
            let pause = self.retry.pause(nth).min(limit.saturating_sub(so_far));
            let alarm = Alarm::new(core, Moment::now() + Span::from_duration(pause));
            alarm.unless(closing).await;
            if let Some(error) = core.stopped() {
                return Err(error);
            }
        }
        Err(Error::internal("there are more numbers than that"))
    }
}

fn outcome(answer: Answer) -> Result<PoolOutcome, Error> {
    match answer {
        Answer::Pool(outcome) => Ok(outcome),
        other => Err(Error::internal(format!("the store answered {other:?} to a pool"))),
    }
}

/// A name that does not collide with what is kept beside the pools.
fn name_of(text: &str) -> Result<Name, Error> {
    let name = Name::new("name", text)?;
    if name.as_str().starts_with("holders:") {
        let problem = format!("{text:?} begins with \"holders:\", where other things are kept");
        return Err(Error::invalid("name", problem + ": choose another beginning"));
    }
    Ok(name)
}
