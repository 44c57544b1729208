//! The lease pool: the public API.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Answer, Part};
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::engine::Engine;
use crate::engine::timers::Deadline;
use crate::engine::watch::{Acquiring, Id, Watch};
use crate::guard::LeaseGuard;
use crate::machine::Subject;
use crate::machine::pool::{PoolAction, PoolCommand, PoolOutcome, Status};
use crate::name::Name;
use crate::semaphore::LEASE;
use crate::{Error, LossReason, Observer, Outcome, Primitive, Retry};

mod answer;
mod lease;
mod queries;

pub use answer::{AcquireStatus, PoolAnswer, PoolCount, ReleaseStatus, RenewStatus};
pub use lease::PoolLease;
pub use queries::Pools;

use answer::typed;
use lease::PoolAcquisition;

/// The shortest lease. Other programs that share a pool count in whole seconds.
const MIN_TTL: Duration = Duration::from_secs(1);

/// A fixed number of leases, each held by an instance id. There is no queue.
///
/// This API is for callers that have a loop of their own and only ask "may I start?", "may I continue?" and "how many
/// are we?". Each question is one call and one round trip, and nothing runs between the calls. For a guard that renews
/// the lease in the background, see
/// [`lease`](Self::lease).
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
/// An instance that acquires again while it holds a lease renews that lease, and does not take a second one. So give
/// every worker its own id, which no other worker can choose: a host name and a process id, or something random.
///
/// All clients that share a pool should use the same [lease](PoolBuilder::lease). Every call removes the instances that
/// were silent for the *caller's* lease, so a caller with a shorter lease removes the leases of the others.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<PoolSpec>,
}

/// A pool as it was declared.
struct PoolSpec {
    engine: Arc<Engine>,
    name: Name,
    capacity: u32,
    ttl: Span,
    retry: Retry,
    /// The metrics, the observer and the tracing spans of this pool.
    watch: Arc<Watch>,
}

impl Pool {
    /// Returns the name of the pool.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.name.as_str()
    }

    /// Returns the number of leases in the pool.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.capacity
    }

    /// Acquires a lease for this instance, if one is free. If the instance already holds a lease, the lease is renewed.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the instance id is empty, longer than 512 bytes, or contains control characters.
    /// - [`Error::ForeignData`] if another program uses the pool's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the instance may or may not hold a lease. To make sure that it holds none, call
    /// [`release`](Self::release).
    pub async fn acquire(&self, instance_id: &str) -> Result<PoolAnswer<AcquireStatus>, Error> {
        let (instance, capacity) = (instance_of(instance_id)?, self.inner.capacity);
        let id = instance.clone();
        let action = PoolAction::Acquire { instance, capacity };
        let acquire = self.inner.call(action, AcquireStatus::of);
        let end = |answer: &PoolAnswer<AcquireStatus>, watched: Acquiring| match answer.status {
            AcquireStatus::Acquired => watched.acquired_without_guard(),
            AcquireStatus::CapacityFull => watched.refused(),
        };
        self.inner.watch.acquire(|| Id::Instance(id), false, acquire, end).await
    }

    /// Renews the lease of this instance.
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease may or may not be renewed.
    pub async fn renew(&self, instance_id: &str) -> Result<PoolAnswer<RenewStatus>, Error> {
        let instance = instance_of(instance_id)?;
        let (id, sent) = (instance.clone(), self.inner.engine.core().now());
        let answer = self.inner.call(PoolAction::Renew { instance }, RenewStatus::of).await;
        let outcome = || match &answer {
            Ok(PoolAnswer { status: RenewStatus::Renewed, .. }) => Outcome::Done,
            Ok(PoolAnswer { status: RenewStatus::Expired, .. }) => {
                Outcome::Lost(LossReason::LeaseEnded)
            }
            Ok(_) => Outcome::NotHeld,
            Err(error) => Outcome::Failed(error.clone()),
        };
        self.inner.watch.renewed(|| Id::Instance(id), outcome, sent);
        answer
    }

    /// Releases the lease of this instance.
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the release continues in the background.
    pub async fn release(&self, instance_id: &str) -> Result<PoolAnswer<ReleaseStatus>, Error> {
        let instance = instance_of(instance_id)?;
        let core = self.inner.engine.core();
        core.check_open()?;
        let part = self.inner.part(PoolAction::Release { instance: instance.clone() });
        let answer = core.call_to_the_end(part).await.and_then(outcome_of);
        let answer = answer.and_then(|outcome| typed(outcome, ReleaseStatus::of));
        let outcome = || match &answer {
            Ok(PoolAnswer { status: ReleaseStatus::Released, .. }) => Outcome::Done,
            Ok(PoolAnswer { status: ReleaseStatus::AlreadyExpired, .. }) => {
                Outcome::Lost(LossReason::LeaseEnded)
            }
            Ok(_) => Outcome::NotHeld,
            Err(error) => Outcome::Failed(error.clone()),
        };
        self.inner.watch.released(|| Id::Instance(instance), outcome);
        answer
    }

    /// Returns the number of leases that are held, and removes expired leases.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the pool's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, expired leases may or may not be removed. Nothing else changes.
    pub async fn count(&self) -> Result<PoolCount, Error> {
        let PoolAnswer { current_count, expired_count, .. } =
            self.inner.call(PoolAction::Count, Some).await?;
        Ok(PoolCount { current_count, expired_count })
    }

    /// Acquires a lease that is renewed in the background, if one is free; returns `None` if the pool is full.
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lease that it may have been granted is released in the background.
    pub async fn try_lease(&self, instance_id: &str) -> Result<Option<PoolLease>, Error> {
        let instance = instance_of(instance_id)?;
        let end = |lease: &Option<PoolLease>, watched: Acquiring| match lease {
            Some(lease) => lease.watch(watched),
            None => watched.refused(),
        };
        let (id, acquire) = (|| Id::Instance(instance.clone()), self.inner.try_once(&instance));
        self.inner.watch.acquire(id, false, acquire, end).await
    }

    /// Acquires a lease that is renewed in the background. While the pool is full, the call retries up to the limits of
    /// [`retry`](PoolBuilder::retry): by default for at most 5 s. There is no queue: the first caller that asks after a
    /// release acquires the lease. Where order matters, use a [`Semaphore`](crate::Semaphore).
    ///
    /// Guards of one client with the same instance id share one lease. It is released with the last of them.
    ///
    /// # Errors
    /// - [`Error::TimedOut`] if the time limit passes or the retries are used up, or [`Error::Unavailable`] if the time
    ///   limit passes while the store is unreachable. `TimedOut` contains how many leases were held.
    /// - [`Error::InvalidArgument`] if the instance id is empty, longer than 512 bytes, or contains control characters.
    /// - [`Error::ForeignData`] if another program uses the pool's keys on Redis.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lease that it may have been granted is released in the background.
    pub async fn lease(&self, instance_id: &str) -> Result<PoolLease, Error> {
        let instance = instance_of(instance_id)?;
        let (id, acquire) = (|| Id::Instance(instance.clone()), self.inner.wait(&instance));
        self.inner.watch.acquire(id, true, acquire, PoolLease::watch).await
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

/// A builder for a [`Pool`]: see [`Client::pool`](crate::Client::pool).
#[must_use = "the builder does nothing until `build` is called"]
#[derive(Clone, Debug)]
pub struct PoolBuilder {
    engine: Arc<Engine>,
    name: String,
    capacity: u32,
    ttl: Duration,
    retry: Retry,
    observer: Option<Observer>,
    name_in_metrics: bool,
}

impl PoolBuilder {
    pub(crate) fn new(engine: Arc<Engine>, name: &str, capacity: u32) -> Self {
        Self {
            engine,
            name: name.to_owned(),
            capacity,
            ttl: LEASE,
            retry: Retry::default(),
            observer: None,
            name_in_metrics: false,
        }
    }

    /// Sets the lease: how long an instance may be silent before its lease passes on. The default is 30 s and the
    /// minimum 1 s. All clients that share the pool should use the same lease. [`Pool::renew`] and the guard of
    /// [`Pool::lease`] renew it.
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

    /// Sets the [`lease`](Self::lease), under the name that other programs with such a pool use for it. It does not
    /// limit how long a lease that is renewed may be held.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.lease(ttl)
    }

    /// Sets how [`Pool::lease`] retries while the pool is full.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Notifies this observer of the operations of this pool and its leases: see [`Event`](crate::Event).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, Observer, Outcome};
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use std::sync::Arc;
    ///
    /// let full = Arc::new(AtomicU32::new(0));
    /// let counter = full.clone();
    /// let observer = Observer::new(move |event| {
    ///     counter.fetch_add(u32::from(matches!(event.outcome, Outcome::Full)), Ordering::Relaxed);
    /// });
    /// let encoders = Client::memory().pool("encoders", 1).observer(observer).build()?;
    /// encoders.acquire("worker-1").await?;
    /// encoders.acquire("worker-2").await?;
    /// assert_eq!(full.load(Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn observer(mut self, observer: Observer) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Adds the label `name` to the [metrics](crate::metrics) of this pool. Without the label they are counted together
    /// with those of the client's other pools, because an exporter keeps every name forever.
    #[cfg(feature = "metrics")]
    pub fn name_in_metrics(mut self) -> Self {
        self.name_in_metrics = true;
        self
    }

    /// Builds the pool. Nothing is sent to the store yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in these cases:
    ///
    /// - The name is empty, longer than 512 bytes, contains control characters, or begins with `holders:`.
    /// - In a Redis cluster, the name has a brace that is not part of a hash tag, or is nothing but a hash tag.
    /// - The capacity is zero.
    /// - The lease is below 1 s, longer than 10¹³ ms (317 years), or not in whole milliseconds.
    /// - A duration of the [`Retry`] is zero, or its multiplier is below 1 or not finite.
    pub fn build(self) -> Result<Pool, Error> {
        let name = name_of(&self.name)?;
        self.engine.core().check_name(Subject::Pool(&name))?;
        if self.capacity == 0 {
            return Err(Error::invalid("capacity", "it is 0; the minimum is 1"));
        }
        if self.ttl < MIN_TTL {
            let problem = format!("it is {:?}; the minimum is {MIN_TTL:?}", self.ttl);
            return Err(Error::invalid("lease", problem));
        }
        let ttl = Span::from_millis(crate::name::millis("lease", self.ttl)?);
        self.retry.check()?;
        let (engine, capacity, retry) = (self.engine, self.capacity, self.retry);
        let (in_metrics, observer) = (self.name_in_metrics, self.observer);
        let watch = Watch::new(engine.core(), Primitive::Pool, &name, in_metrics, observer);
        Ok(Pool { inner: Arc::new(PoolSpec { engine, name, capacity, ttl, retry, watch }) })
    }
}

fn instance_of(text: &str) -> Result<Name, Error> {
    Name::new("instance id", text)
}

impl PoolSpec {
    fn part(&self, action: PoolAction) -> Part {
        Part::Pool(PoolCommand { pool: self.name.clone(), ttl: self.ttl, action })
    }

    async fn call<S>(
        &self,
        action: PoolAction,
        status_of: impl FnOnce(Status) -> Option<S>,
    ) -> Result<PoolAnswer<S>, Error> {
        let core = self.engine.core();
        core.check_open()?;
        let (answer, _) = core.call(self.part(action)).await?;
        let outcome = outcome_of(answer)?;
        event!(debug, name = self.name.as_str(), ?outcome, "pool");
        typed(outcome, status_of)
    }

    /// Makes one attempt. Returns a lease, or the number of leases that are held.
    async fn attempt(
        self: &Arc<Self>,
        instance: &Name,
        until: Moment,
    ) -> Result<Result<PoolLease, u64>, Error> {
        let core = self.engine.core();
        let instance = core.pool_instance(&self.name, instance, self.capacity)?;
        let spec = PoolAcquisition::new(self, instance.clone());
        let acquired = LeaseGuard::acquire(instance.clone(), Arc::new(spec), until).await?;
        let lease = acquired.map(|(guard, _)| PoolLease::new(guard, self.clone()));
        Ok(lease.ok_or_else(|| instance.protocol.members()))
    }

    async fn try_once(self: &Arc<Self>, instance: &Name) -> Result<Option<PoolLease>, Error> {
        let core = self.engine.core();
        let until = core.now() + core.settings.answer_timeout;
        Ok(self.attempt(instance, until).await?.ok())
    }

    async fn wait(self: &Arc<Self>, instance: &Name) -> Result<PoolLease, Error> {
        let core = self.engine.core();
        let started = core.now();
        let limit = self.retry.limit();
        let give_up_at = started + Span::from_duration(limit);
        let (mut until, mut nth) = (give_up_at, 0);
        loop {
            // Registered before the attempt, so that a close during the attempt is not missed.
            let closing = core.closing();
            let held = match self.attempt(instance, until).await? {
                Ok(lease) => return Ok(lease),
                Err(held) => held,
            };
            let so_far = core.now().saturating_since(started);
            if nth >= self.retry.max_times() || so_far >= limit {
                return Err(Error::TimedOut {
                    primitive: Primitive::Pool,
                    name: self.name.to_string(),
                    limit: limit.min(so_far),
                    full: Some((held, self.capacity)),
                    next_start: None,
                });
            }
            let pause = self.retry.pause(nth).min(limit.saturating_sub(so_far));
            let deadline = Deadline::new(core, core.now() + Span::from_duration(pause));
            deadline.unless(closing).await;
            if let Some(error) = core.stopped() {
                return Err(error);
            }
            until = core.next_attempt_until(give_up_at);
            nth += 1;
        }
    }
}

fn outcome_of(answer: Answer) -> Result<PoolOutcome, Error> {
    match answer {
        Answer::Pool(outcome) => Ok(outcome),
        other => {
            Err(Error::internal(format!("unexpected answer to a command for a pool: {other:?}")))
        }
    }
}

/// Returns the name. Fails if it begins with a prefix under which other things are stored.
fn name_of(text: &str) -> Result<Name, Error> {
    let name = Name::new("name", text)?;
    if name.as_str().starts_with("holders:") {
        let problem = format!("{text:?} begins with \"holders:\", which is reserved");
        return Err(Error::invalid("name", problem + ": choose another name"));
    }
    Ok(name)
}
