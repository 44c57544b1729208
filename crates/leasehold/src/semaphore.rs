//! The fair counting semaphore: the public API.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::{Acquire, TryAcquire};
use crate::clock::Span;
use crate::engine::Engine;
use crate::engine::name_state::ReleasedBy;
use crate::engine::semaphore_spec::SemaphoreSpec;
use crate::engine::watch::{Id, Watch};
use crate::machine::Subject;
use crate::machine::{Rate, Terms};
use crate::name::{Name, positive};
use crate::stats::{self, SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, Error, Observer, Outcome, Permit, Primitive};

/// The default lease of permits, locks and pools: how long a holder or waiter may be silent before it is considered dead.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// The shortest lease. With a shorter one, a renewal that is slightly late would lose the permit.
const MIN_LEASE: Duration = Duration::from_millis(300);
/// The shortest TTL on a store that is not on this host. A shorter one could end before the holder learns of its
/// permit.
const MIN_TTL: Duration = Duration::from_millis(100);

/// A fair counting semaphore with a name.
///
/// Permits are granted in the order in which they were requested. Semaphores with the same name in the same store share
/// their permits. A permit is released when its guard, a [`Permit`], is dropped. Any task or thread may drop it, inside
/// or outside a runtime.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let api = Client::memory().semaphore("api", 2).build()?;
/// let first = api.acquire().await?;
/// let second = api.acquire().await?;
/// assert!(api.try_acquire().await?.is_none());
///
/// first.release().await?;
/// assert!(api.try_acquire().await?.is_some());
/// # drop(second);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Semaphore {
    pub(crate) inner: Arc<SemaphoreInner>,
}

/// The settings of a semaphore handle, and the client that made it. Every handle, future and guard has one.
#[derive(Debug)]
pub(crate) struct SemaphoreInner {
    pub(crate) spec: Arc<SemaphoreSpec>,
    /// Keeps the client's names and its thread alive.
    pub(crate) engine: Arc<Engine>,
}

impl Semaphore {
    /// The capacity of a semaphore that limits only a [rate](crate::Client::rate): any number of permits may be held.
    pub const UNLIMITED: u32 = stats::UNLIMITED;

    /// Returns the name of the semaphore.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.spec.named.name().as_str()
    }

    /// Returns the capacity that this client declared last, in units, or [`UNLIMITED`](Self::UNLIMITED).
    ///
    /// The store may have another: see [`stats`](Self::stats).
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.spec.named.capacity()
    }

    /// Acquires a permit, and waits for it if necessary.
    ///
    /// The wait has no time limit unless [`SemaphoreBuilder::within`] or [`Acquire::within`] sets
    /// one.
    ///
    /// Nothing happens before the returned future is first polled. The acquire keeps waiting while the store is
    /// unreachable.
    ///
    /// # Errors
    /// - [`Error::TimedOut`] if the time limit passes, or [`Error::Unavailable`] if it passes while the store is
    ///   unreachable.
    /// - [`Error::InvalidArgument`] if the time limit or the weight is zero.
    /// - [`Error::TooHeavy`] if the weight exceeds the capacity.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Cancelled`] if its id was [released](Self::release) during the wait.
    /// - [`Error::Lost`] if the permit was lost after the grant and before the future was polled again.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// Dropping the future cancels the wait. If the permit has already been granted, it is released in the background.
    #[inline]
    pub fn acquire(&self) -> Acquire {
        Acquire::new(self.inner.clone(), true, self.inner.spec.within)
    }

    /// Acquires a permit if one is free and nobody is waiting for it; returns `None` otherwise.
    ///
    /// [`TryAcquire::weight`] asks for more than one unit.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::InvalidArgument`] if the weight is zero.
    /// - [`Error::TooHeavy`] if the weight exceeds the capacity.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Lost`] if the permit was lost after the grant and before the future was polled again.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a permit that it may have been granted is released in the background.
    pub fn try_acquire(&self) -> TryAcquire {
        TryAcquire(Acquire::new(self.inner.clone(), false, None))
    }

    /// Acquires a permit and runs `work` under it. `work` stops if the permit is lost.
    ///
    /// Once the permit is lost, the future of `work` is dropped without being polled again, and this function returns
    /// [`Error::Lost`]. Otherwise it returns the output of `work`. If the release fails afterwards, the error is logged
    /// and the output is still returned. To set a time limit or a weight for one call, see [`Acquire::with`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, Error};
    /// use std::time::Duration;
    ///
    /// let client = Client::memory();
    /// let api = client.semaphore("api", 5).ttl(Duration::from_millis(20)).build()?;
    ///
    /// assert_eq!(api.with(async |_| 42).await?, 42);
    ///
    /// let hung = api.with(async |_| std::future::pending::<()>().await).await;
    /// assert!(matches!(hung, Err(Error::Lost { .. })));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire), and [`Error::Lost`] if the permit is lost while `work` runs.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the permit in the background.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(&Permit) -> T) -> Result<T, Error> {
        self.acquire().with(work).await
    }

    /// Renews a permit once by its id, for example one that was [detached](Permit::detach).
    ///
    /// Returns `false` if the id holds no permit.
    ///
    /// The permit is then valid for the [lease](SemaphoreBuilder::lease) of this semaphore, up to its TTL. In memory and
    /// on one host, where permits need no renewal, this only checks whether the permit is held.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the permit may or may not be renewed.
    pub async fn extend(&self, id: &AcquisitionId) -> Result<bool, Error> {
        let SemaphoreInner { spec, engine } = &*self.inner;
        engine.core().check_open()?;
        spec.named.extend(*id, spec.terms).await
    }

    /// Releases a permit by its id, for example one that was [detached](Permit::detach), or cancels
    /// an acquire that waits.
    ///
    /// Returns `true` if the id held a permit or waited until now. Returns `false` for an unknown
    /// id, which is not an error.
    ///
    /// If the permit still has a guard, the guard is notified of the loss. In this client that happens at once. Another
    /// client notifies its guard when it learns of the release from the store.
    ///
    /// An id that is still waiting is removed from the queue, and its acquire fails with [`Error::Cancelled`]. In this
    /// client that happens at once. Another client is notified by the store; if it misses that, it learns with its next
    /// query.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After every error except `Stopped`, the client repeats the release in the background.
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the release continues in the background.
    pub async fn release(&self, id: &AcquisitionId) -> Result<bool, Error> {
        let SemaphoreInner { spec, .. } = &*self.inner;
        let released = spec.named.release(*id, spec, ReleasedBy::Id).done().await;
        let outcome = || Outcome::of(released.as_ref().map(|held| *held));
        spec.watch.released(|| Id::Permit(*id), outcome);
        released
    }

    /// Releases a holder or waiter by the id that [`stats`](Self::stats) shows.
    ///
    /// It may belong to another program that shares the semaphore on Redis. Returns `true` if a
    /// holder was released or a waiter was removed.
    ///
    /// An id of this library is released as by [`release`](Self::release). Another program is not notified of the
    /// release; it notices by itself.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time. The id may have been
    ///   released.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the id may or may not be released.
    pub async fn release_member(&self, id: &str) -> Result<bool, Error> {
        self.inner.engine.core().check_open()?;
        match id.parse() {
            Ok(id) => self.release(&id).await,
            Err(_) => self.inner.spec.named.release_member(id).await,
        }
    }

    /// Returns whether an acquire of one unit would have to wait now.
    ///
    /// # Errors
    /// The same as for [`stats`](Self::stats).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn locked(&self) -> Result<bool, Error> {
        let stats = self.stats().await?;
        let full = stats.held_units >= stats.capacity || stats.waiting > 0;
        Ok(full || stats.paused.is_some() || stats.next_token.is_some())
    }

    /// Returns the number of waiters ahead of `id`, or `None` if `id` is not waiting.
    ///
    /// [`Acquire::id`] returns the id of an acquire.
    ///
    /// # Errors
    /// The same as for [`stats`](Self::stats).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn position(&self, id: &AcquisitionId) -> Result<Option<usize>, Error> {
        self.inner.spec.named.position(*id).await
    }

    /// Returns the capacity, the rate, and whether the semaphore is pinned or paused.
    ///
    /// The answer does not depend on the number of holders and waiters, so it is faster than
    /// [`stats`](Self::stats). If no client has declared a capacity yet, the capacity is that of
    /// this handle.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let api = client.semaphore("api", 5).build()?;
    /// api.pin(2).await?;
    ///
    /// let limits = api.limits().await?;
    /// assert_eq!((limits.capacity, limits.pinned), (2, Some(2)));
    /// assert!(limits.paused.is_none() && limits.rate.is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`stats`](Self::stats).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn limits(&self) -> Result<SemaphoreLimits, Error> {
        let mut limits = self.inner.spec.named.limits().await?;
        if limits.capacity == 0 {
            limits.capacity = self.capacity();
        }
        Ok(limits)
    }

    /// Returns the capacity, the holders and the number of waiters of this semaphore.
    ///
    /// To list the waiters, use [`Client::stats`](crate::Client::stats).
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn stats(&self) -> Result<SemaphoreStats, Error> {
        let mut stats = self.inner.spec.named.stats(0..0).await?;
        if stats.capacity == 0 {
            // No acquire has declared a capacity in the store yet.
            (stats.declared, stats.capacity) = (self.capacity(), self.capacity());
        }
        Ok(stats)
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("name", &self.name())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SemaphoreSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphoreSpec").field("name", self.named.name()).finish_non_exhaustive()
    }
}

/// A builder for a [`Semaphore`]: see [`Client::semaphore`](crate::Client::semaphore).
#[must_use = "the builder does nothing until `build` is called"]
#[derive(Clone, Debug)]
pub struct SemaphoreBuilder {
    engine: Arc<Engine>,
    name: String,
    capacity: u32,
    options: SemaphoreOptions,
}

/// What a builder may set.
#[derive(Clone, Default, Debug)]
#[allow(clippy::struct_excessive_bools)] // independent settings
struct SemaphoreOptions {
    unless_declared: bool,
    ttl: Option<Duration>,
    within: Option<Duration>,
    lease: Option<Duration>,
    label: Option<String>,
    numbered: bool,
    claims_first: bool,
    rate: Option<(u64, Duration)>,
    burst: Option<u32>,
    rate_only: bool,
    observer: Option<Observer>,
    name_in_metrics: bool,
}

impl SemaphoreBuilder {
    pub(crate) fn new(engine: Arc<Engine>, name: &str, capacity: u32) -> Self {
        Self { engine, name: name.to_owned(), capacity, options: SemaphoreOptions::default() }
    }

    /// Uses the capacity that the semaphore already has in the store.
    ///
    /// The capacity that was passed to [`Client::semaphore`](crate::Client::semaphore) applies only
    /// if the semaphore has none yet.
    pub fn unless_declared(mut self) -> Self {
        self.options.unless_declared = true;
        self
    }

    /// Sets the longest time that a permit may be held.
    ///
    /// After that the permit is lost and passes to the next waiter. By default there is no TTL. On
    /// one host and on Redis the minimum is 100 ms, because part of the TTL passes before the
    /// client receives the grant.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = Some(ttl);
        self
    }

    /// Sets the longest time that an acquire may wait.
    ///
    /// By default there is no limit.
    pub fn within(mut self, limit: Duration) -> Self {
        self.options.within = Some(limit);
        self
    }

    /// Sets the lease: how long a holder or waiter may be silent before its permit or its place in
    /// the queue passes on.
    ///
    /// The default is 30 s and the minimum 300 ms; a lease longer than the TTL is lowered to the
    /// TTL. The client renews the lease in the background.
    ///
    /// The lease has an effect only on Redis. In memory no holder can die alone, and on one host the kernel reports
    /// dead processes.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = Some(lease);
        self
    }

    /// Sets the label that statistics show beside the holders and waiters of this semaphore.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.options.label = Some(label.into());
        self
    }

    /// Gives each permit a [slot number](Permit::slot_number) that no other live permit has, for
    /// example to choose one of four GPUs.
    ///
    /// Permits of the same name that were acquired without this setting have no number.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let gpus = client.semaphore("gpus", 4).numbered().build()?;
    /// let (first, second) = (gpus.acquire().await?, gpus.acquire().await?);
    /// assert_eq!((first.slot_number(), second.slot_number()), (Some(1), Some(2)));
    /// drop(first);
    /// assert_eq!(gpus.acquire().await?.slot_number(), Some(1));
    /// # drop(second);
    /// # Ok(())
    /// # }
    /// ```
    pub fn numbered(mut self) -> Self {
        self.options.numbered = true;
        self
    }

    /// Makes an acquire that had to wait return its permit only after the store has renewed it, so that the permit is
    /// valid for its whole lease.
    ///
    /// Without this setting, an acquire on Redis returns as soon as it is woken, and the permit is claimed a moment
    /// later. Until then the permit is valid only for the [time to claim it](crate::RedisBuilder::claim_within) of
    /// the client that released the previous one. Use this setting for work that needs a certain
    /// [validity](Permit::valid_until) from the start. It costs one round trip for each acquire that had to wait.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let builds = client.semaphore("builds", 4).claim_first().build()?;
    /// let permit = builds.acquire().await?;
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    pub fn claim_first(mut self) -> Self {
        self.options.claims_first = true;
        self
    }

    /// Limits the rate of grants: **no more than `starts` permits start in any `period`**, evenly
    /// spread.
    ///
    /// A permit then needs enough free units *and* a token, and one token arrives every `period /
    /// starts`.
    ///
    /// *Any period* is any window `[t, t + period)` of the store's clock. A [`burst`](Self::burst) is a part of
    /// `starts`, so it slows the other starts down. Example: 100 per minute with a burst of 10 allows 10 starts at once,
    /// 91 per minute in the long run, and never more than 100 in any minute.
    ///
    /// Like the capacity, the rate belongs to the semaphore, so the newest declaration applies to all clients. A
    /// semaphore that is built without a rate declares none, and follows the rate that already exists. **A rate stays**
    /// until another one is declared or set, or it is removed with [`clear_rate`](Semaphore::clear_rate), even if no
    /// program declares it any more. In a period in which the rate changes, the starts of the old rate and of the new
    /// one may add up.
    ///
    /// The rate counts grants, whatever their weight. An acquire that gives up takes no token. If a permit was granted
    /// but no caller received it, its token is returned.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// # let client = leasehold::Client::memory();
    /// // At most 5 at a time, at most 100 in any minute, and at most 10 of these at once.
    /// let api = client.semaphore("api", 5).rate(100, Duration::from_secs(60)).burst(10).build()?;
    /// for _ in 0..10 {
    ///     drop(api.acquire().await?);
    /// }
    /// assert!(api.try_acquire().await?.is_none(), "the next one starts after 660 ms");
    /// # Ok(())
    /// # }
    /// ```
    pub fn rate(mut self, starts: u64, period: Duration) -> Self {
        self.options.rate = Some((starts, period));
        self
    }

    /// Sets how many permits of a [`rate`](Self::rate) may be granted at once after a quiet period:
    /// from 1, the default, to the number of starts of the rate.
    ///
    /// This is the number of unused tokens that are kept; further ones are dropped. With a burst of
    /// 1, two grants are always at least one interval apart.
    ///
    /// The burst is not added to the rate. Because `burst` starts may come at once, a token arrives only every
    /// `period / (starts − burst + 1)`, so that no period has more than `starts`. The long-term rate is
    /// `starts − burst + 1` per period. With a burst of `starts`, that is one start per period: choose a burst that is
    /// small compared to `starts`.
    pub fn burst(mut self, starts: u32) -> Self {
        self.options.burst = Some(starts);
        self
    }

    /// Refuses weights: see [`Client::rate`](crate::Client::rate).
    pub(crate) fn rate_only(mut self) -> Self {
        self.options.rate_only = true;
        self
    }

    /// Notifies this observer of the operations of this semaphore and its permits: see [`Event`](crate::Event).
    ///
    /// Other handles of the same name are observed only if they were built with an observer, too.
    pub fn observer(mut self, observer: Observer) -> Self {
        self.options.observer = Some(observer);
        self
    }

    /// Adds the label `name` to the [metrics](crate::metrics) of this semaphore.
    ///
    /// Without the label they are counted together with those of the client's other semaphores,
    /// because an exporter keeps every name forever.
    #[cfg(feature = "metrics")]
    pub fn name_in_metrics(mut self) -> Self {
        self.options.name_in_metrics = true;
        self
    }

    /// Builds the semaphore.
    ///
    /// Nothing is sent to the store yet.
    ///
    /// The first acquire declares the capacity in the store, where the newest declaration wins. A client declares the
    /// same capacity only once, so its later acquires do not overwrite what other clients have declared since. After
    /// the capacity shrinks, no permit is granted until enough units are free.
    ///
    /// # Errors
    /// [`Error::Closed`] after [`Client::close`](crate::Client::close). [`Error::InvalidArgument`] in these cases:
    ///
    /// - The name or the label is empty, longer than 512 bytes, or contains control characters.
    /// - In a Redis cluster, the name has a brace that is not part of a hash tag, or is nothing but a hash tag.
    /// - The capacity, a duration, the rate or the burst is zero.
    /// - The lease is below 300 ms, or the TTL on one host or on Redis is below 100 ms.
    /// - The rate is above 10,000 per second.
    /// - The burst is larger than the number of starts of the rate, or there is a burst but no rate.
    /// - The time in which all tokens of the burst arrive is more than 100 years.
    pub fn build(self) -> Result<Semaphore, Error> {
        let Self { engine, name, capacity, options } = self;
        let (name, core) = (Name::new("name", &name)?, engine.core());
        core.check_name(Subject::Semaphore(&name))?;
        if capacity == 0 {
            return Err(Error::invalid("capacity", "it is 0; the minimum is 1"));
        }
        let ttl = options.ttl.map(|ttl| positive("ttl", ttl)).transpose()?;
        if let Some(ttl) = options.ttl.filter(|ttl| !core.is_in_process() && *ttl < MIN_TTL) {
            let problem = format!("it is {ttl:?}; the minimum on this store is {MIN_TTL:?}");
            let why = "a shorter TTL may end before the store has answered";
            return Err(Error::invalid("ttl", format!("{problem}: {why}")));
        }
        let within = options.within;
        within.map(|limit| positive("within", limit)).transpose()?;
        let lease = options.lease.unwrap_or(LEASE);
        if lease < MIN_LEASE {
            let problem = format!("it is {lease:?}; the minimum is {MIN_LEASE:?}");
            return Err(Error::invalid("lease", problem));
        }
        let lease = Span::from_duration(lease);
        let lease = ttl.map_or(lease, |ttl| ttl.min(lease));
        let terms = Terms { lease: core.profile().needs_renewals.then_some(lease), ttl };
        // The label is stored beside each permit and shown to people, so the rules for names apply to it.
        let label = options.label.map(|label| Name::new("label", &label)).transpose()?;
        let label = label.map(Name::into_text);
        let rate = match (options.rate, options.burst) {
            (Some((starts, period)), burst) => Some(Rate::new(starts, period, burst.unwrap_or(1))?),
            (None, Some(burst)) => {
                let problem = format!("it is {burst}, but there is no rate: set a rate as well");
                return Err(Error::invalid("burst", problem));
            }
            (None, None) => None,
        };
        let named = core.named(&name)?;
        if let Some(rate) = rate {
            named.common().declare_rate(rate);
        }
        if options.unless_declared {
            named.common().assume(capacity);
        } else {
            named.common().declare(capacity);
        }
        let (in_metrics, observer) = (options.name_in_metrics, options.observer);
        let watch = Watch::new(core, Primitive::Semaphore, &name, in_metrics, observer);
        let spec = Arc::new(SemaphoreSpec {
            named,
            terms,
            declares: !options.unless_declared,
            is_plain: terms == Terms::default() && label.is_none() && !options.numbered,
            label,
            numbered: options.numbered,
            claims_first: options.claims_first,
            rate_only: options.rate_only,
            within,
            watch,
        });
        let inner = SemaphoreInner { spec, engine };
        Ok(Semaphore { inner: Arc::new(inner) })
    }
}
