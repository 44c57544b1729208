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
use crate::machine::pool::{PoolAction, PoolCommand, PoolOutcome, PoolQuery, Status};
use crate::machine::{Subject, Terms};
use crate::name::{Name, millis, positive};
use crate::semaphore::LEASE;
use crate::stats::PoolStats;
use crate::{Error, LossReason, Observer, Outcome, Primitive, Retry};

mod acquire;
mod lease;
mod queries;

pub use acquire::{AcquirePoolLease, TryAcquirePoolLease};
pub use lease::PoolLease;
pub use queries::Pools;

use lease::PoolAcquisition;

/// The shortest lease. Other programs that share a pool count in whole seconds.
const MIN_LEASE: Duration = Duration::from_secs(1);

/// A fixed number of pool leases, each held by an instance id that you choose.
///
/// There is no queue: after a release, the first instance that asks acquires the pool lease. Where order matters, use
/// a [`Semaphore`](crate::Semaphore). The client renews a pool lease in the background while its guard, a
/// [`PoolLease`], lives.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let encoders = Client::memory().pool("encoders", 1).build()?;
/// let lease = encoders.acquire("worker-1").await?;
/// assert!(encoders.try_acquire("worker-2").await?.is_none());
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
///
/// An instance that acquires again while it holds a pool lease does not take a second one: the guards share it. So
/// give every worker its own id, which no other worker can choose: a host name and a process id, or something random.
///
/// All clients that share a pool should use the same [lease](PoolBuilder::lease). Every call removes the instances that
/// were silent for the *caller's* lease, so a caller with a shorter lease removes those of the others.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<PoolSpec>,
}

/// A pool as it was declared.
pub(crate) struct PoolSpec {
    engine: Arc<Engine>,
    name: Name,
    capacity: u32,
    lease: Span,
    ttl: Option<Span>,
    within: Option<Duration>,
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

    /// Returns how many pool leases may be held.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.capacity
    }

    /// Acquires a pool lease for this instance, and waits for it if the pool is full.
    ///
    /// The wait has no time limit unless [`PoolBuilder::within`] or [`AcquirePoolLease::within`] sets
    /// one.
    ///
    /// Nothing happens before the returned future is first polled. While the pool is full, the acquire asks again after
    /// each delay of [`retry`](PoolBuilder::retry). It keeps waiting while the store is unreachable.
    ///
    /// Guards of one client with the same instance id share one pool lease. It is released with the last of them.
    ///
    /// # Errors
    /// - [`Error::TimedOut`] if the time limit passes, or [`Error::Unavailable`] if it passes while the store is
    ///   unreachable. `TimedOut` contains how many leases were held.
    /// - [`Error::InvalidArgument`] if the time limit is zero, or if the instance id is empty, longer than 512 bytes, or
    ///   contains control characters.
    /// - [`Error::ForeignData`] if another program uses the pool's keys on Redis.
    /// - [`Error::Lost`] if the pool lease was lost after the grant and before the future was polled again.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a pool lease that it may have been granted is released in the background.
    pub fn acquire(&self, instance_id: &str) -> AcquirePoolLease {
        AcquirePoolLease::new(self.inner.clone(), instance_id)
    }

    /// Acquires a pool lease for this instance if one is free; returns `None` if the pool is full.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - All errors of [`acquire`](Self::acquire) except `TimedOut`.
    ///
    /// # Cancel safety
    /// If the future is dropped, a pool lease that it may have been granted is released in the background.
    pub fn try_acquire(&self, instance_id: &str) -> TryAcquirePoolLease {
        TryAcquirePoolLease::new(self.inner.clone(), instance_id)
    }

    /// Acquires a pool lease for this instance and runs `work` under it. `work` stops if the pool lease is lost.
    ///
    /// Once the pool lease is lost, the future of `work` is dropped without being polled again, and this function
    /// returns [`Error::Lost`]. Otherwise it returns the output of `work`. If the release fails afterwards, the error
    /// is logged and the output is still returned. To set a time limit for one call, see [`AcquirePoolLease::with`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let encoders = Client::memory().pool("encoders", 4).build()?;
    /// assert_eq!(encoders.with("worker-1", async |_| 42).await?, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire), and [`Error::Lost`] if the pool lease is lost while `work` runs.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the pool lease in the background.
    pub async fn with<T>(
        &self,
        instance_id: &str,
        work: impl AsyncFnOnce(&PoolLease) -> T,
    ) -> Result<T, Error> {
        self.acquire(instance_id).with(work).await
    }

    /// Renews the pool lease of this instance once, for example one that was
    /// [detached](PoolLease::detach).
    ///
    /// Returns `false` if the instance no longer holds a pool lease.
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
    /// If the future is dropped, the pool lease may or may not be renewed.
    pub async fn extend(&self, instance_id: &str) -> Result<bool, Error> {
        Ok(self.inner.renew(instance_id).await?.status == Status::Renewed)
    }

    /// Releases the pool lease of this instance.
    ///
    /// Returns `true` if it was held until now.
    ///
    /// If the pool lease still has guards, they are notified of the loss. In this client that happens before this
    /// function returns. The guards of another client notice the release at their next renewal.
    ///
    /// # Errors
    /// The same as for [`extend`](Self::extend), except `Closed`: a closed client still releases.
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the release continues in the background.
    pub async fn release(&self, instance_id: &str) -> Result<bool, Error> {
        Ok(self.inner.release(instance_id).await?.status == Status::Released)
    }

    /// Returns the members of this pool.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// let encoders = leasehold::Client::memory().pool("encoders", 4).build()?;
    /// let lease = encoders.acquire("worker-1").await?;
    /// let stats = encoders.stats().await?;
    /// assert_eq!((stats.members.len(), stats.members[0].id.as_str()), (1, lease.id()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`Pools::list`].
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn stats(&self) -> Result<PoolStats, Error> {
        let query = PoolQuery::Named(self.inner.name.clone());
        let found = self.inner.engine.core().list_pools(query).await?.pop();
        Ok(found.unwrap_or_else(|| PoolStats { name: self.name().to_owned(), members: Vec::new() }))
    }

    /// How the pool was declared, for [`compat`](crate::compat).
    pub(crate) fn spec(&self) -> &PoolSpec {
        &self.inner
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
    lease: Duration,
    ttl: Option<Duration>,
    within: Option<Duration>,
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
            lease: LEASE,
            ttl: None,
            within: None,
            retry: Retry::default(),
            observer: None,
            name_in_metrics: false,
        }
    }

    /// Sets the lease: how long an instance may be silent before its lease passes on.
    ///
    /// The default is 30 s and the minimum 1 s. All clients that share the pool should use the same
    /// lease.
    ///
    /// The client renews the lease in the background, each time a third of it has passed and at least every 3.3 s, until
    /// the guard is released, dropped or detached.
    ///
    /// ```
    /// use leasehold::Client;
    /// use std::time::Duration;
    ///
    /// let encoders = Client::memory().pool("encoders", 4).lease(Duration::from_secs(10)).build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the longest time that a pool lease may be held.
    ///
    /// After that the client releases it, and the guard is lost. By default there is no TTL.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, LossReason};
    /// use std::time::Duration;
    ///
    /// let encoders = Client::memory().pool("encoders", 1).ttl(Duration::from_millis(20)).build()?;
    /// let lease = encoders.acquire("worker-1").await?;
    /// assert_eq!(lease.lost().await, LossReason::TtlEnded);
    /// assert!(encoders.try_acquire("worker-2").await?.is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets the longest time that an acquire may wait.
    ///
    /// By default there is no limit.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    /// Sets the delays after which an acquire asks again while the pool is full.
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
    /// let lease = encoders.acquire("worker-1").await?;
    /// assert!(encoders.try_acquire("worker-2").await?.is_none());
    /// assert_eq!(full.load(Ordering::Relaxed), 1);
    /// # drop(lease);
    /// # Ok(())
    /// # }
    /// ```
    pub fn observer(mut self, observer: Observer) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Adds the label `name` to the [metrics](crate::metrics) of this pool.
    ///
    /// Without the label they are counted together with those of the client's other pools, because
    /// an exporter keeps every name forever.
    #[cfg(feature = "metrics")]
    pub fn name_in_metrics(mut self) -> Self {
        self.name_in_metrics = true;
        self
    }

    /// Builds the pool.
    ///
    /// Nothing is sent to the store yet.
    ///
    /// # Errors
    /// [`Error::Closed`] after [`Client::close`](crate::Client::close). [`Error::InvalidArgument`] in these cases:
    ///
    /// - The name is empty, longer than 512 bytes, contains control characters, or begins with `holders:`.
    /// - In a Redis cluster, the name has a brace that is not part of a hash tag, or is nothing but a hash tag.
    /// - The capacity is zero.
    /// - The lease is below 1 s.
    /// - A duration is zero. The lease is longer than 10¹³ ms (317 years), or not in whole milliseconds.
    /// - The multiplier of the [`Retry`] is below 1 or not finite.
    pub fn build(self) -> Result<Pool, Error> {
        self.engine.core().check_open()?;
        let name = name_of(&self.name)?;
        self.engine.core().check_name(Subject::Pool(&name))?;
        if self.capacity == 0 {
            return Err(Error::invalid("capacity", "it is 0; the minimum is 1"));
        }
        if self.lease < MIN_LEASE {
            let problem = format!("it is {:?}; the minimum is {MIN_LEASE:?}", self.lease);
            return Err(Error::invalid("lease", problem));
        }
        let lease = Span::from_millis(millis("lease", self.lease)?);
        let ttl = self.ttl.map(|ttl| positive("ttl", ttl)).transpose()?;
        self.within.map(|limit| positive("within", limit)).transpose()?;
        self.retry.check()?;
        let Self { engine, capacity, within, retry, observer, .. } = self;
        let in_metrics = self.name_in_metrics;
        let watch = Watch::new(engine.core(), Primitive::Pool, &name, in_metrics, observer);
        let inner = PoolSpec { engine, name, capacity, lease, ttl, within, retry, watch };
        Ok(Pool { inner: Arc::new(inner) })
    }
}

fn instance_of(text: &str) -> Result<Name, Error> {
    Name::new("instance id", text)
}

impl fmt::Debug for PoolSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolSpec").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PoolSpec {
    fn part(&self, action: PoolAction) -> Part {
        Part::Pool(PoolCommand { pool: self.name.clone(), ttl: self.lease, action })
    }

    fn terms(&self) -> Terms {
        Terms { lease: Some(self.lease), ttl: self.ttl }
    }

    async fn call(&self, action: PoolAction) -> Result<PoolOutcome, Error> {
        let core = self.engine.core();
        core.check_open()?;
        let (answer, _) = core.call(self.part(action)).await?;
        let outcome = outcome_of(answer)?;
        event!(debug, name = self.name.as_str(), ?outcome, "pool");
        Ok(outcome)
    }

    /// Acquires a lease without a guard, or renews the one that the instance has.
    pub(crate) async fn acquire_detached(&self, instance_id: &str) -> Result<PoolOutcome, Error> {
        let instance = instance_of(instance_id)?;
        let (id, capacity) = (instance.clone(), self.capacity);
        let acquire = self.call(PoolAction::Acquire { instance, capacity });
        let end = |outcome: &PoolOutcome, watched: Acquiring| match outcome.status {
            Status::Acquired => watched.acquired_without_guard(),
            _ => watched.refused(),
        };
        self.watch.acquire(|| Id::Instance(id), false, acquire, end).await
    }

    pub(crate) async fn renew(&self, instance_id: &str) -> Result<PoolOutcome, Error> {
        let instance = instance_of(instance_id)?;
        let (id, sent) = (instance.clone(), self.engine.core().now());
        let outcome = self.call(PoolAction::Renew { instance }).await;
        self.watch.renewed(|| Id::Instance(id), || observed(&outcome), sent);
        outcome
    }

    pub(crate) async fn release(&self, instance_id: &str) -> Result<PoolOutcome, Error> {
        let instance = instance_of(instance_id)?;
        let core = self.engine.core();
        let (sent, action) = (core.now(), PoolAction::Release { instance: instance.clone() });
        let outcome = core.call_to_the_end(self.part(action)).await.and_then(outcome_of);
        if matches!(outcome, Ok(PoolOutcome { status: Status::Released, .. })) {
            core.instance_released(&self.name, &instance, sent);
        }
        self.watch.released(|| Id::Instance(instance), || observed(&outcome));
        outcome
    }

    /// Counts the leases, and removes those that have expired.
    pub(crate) async fn count(&self) -> Result<PoolOutcome, Error> {
        self.call(PoolAction::Count).await
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

    /// Repeats the attempt after each delay of the retry policy. Without a limit it never gives up.
    async fn wait(
        self: &Arc<Self>,
        instance: &Name,
        within: Option<Duration>,
    ) -> Result<PoolLease, Error> {
        let core = self.engine.core();
        let started = core.now();
        let limit = within.unwrap_or(Duration::MAX);
        let give_up_at = within.map_or(Moment::NEVER, |limit| started + Span::from_duration(limit));
        let (mut until, mut nth) = (give_up_at, 0);
        loop {
            // Registered before the attempt, so that a close during the attempt is not missed.
            let closing = core.closing();
            let held = match self.attempt(instance, until).await? {
                Ok(lease) => return Ok(lease.waited_since(started)),
                Err(held) => held,
            };
            let so_far = core.now().saturating_since(started);
            if nth >= self.retry.most() || so_far >= limit {
                return Err(Error::TimedOut {
                    primitive: Primitive::Pool,
                    name: self.name.to_string(),
                    limit: limit.min(so_far),
                    held: Some(u32::try_from(held).unwrap_or(u32::MAX)),
                    capacity: Some(self.capacity),
                    next_token: None,
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

/// Returns what an observer learns of a renewal or a release by id.
fn observed(outcome: &Result<PoolOutcome, Error>) -> Outcome {
    match outcome {
        Ok(PoolOutcome { status: Status::Renewed | Status::Released, .. }) => Outcome::Done,
        Ok(PoolOutcome { status: Status::Expired | Status::AlreadyExpired, .. }) => {
            Outcome::Lost(LossReason::LeaseEnded)
        }
        Ok(_) => Outcome::NotHeld,
        Err(error) => Outcome::Failed(error.clone()),
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
