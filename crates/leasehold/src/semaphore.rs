//! The fair counting semaphore, as users see it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::{Acquire, TryAcquire};
use crate::clock::Span;
use crate::engine::Engine;
use crate::engine::name_state::{NameState, ReleasedBy};
use crate::machine::{Rate, Terms};
use crate::name::{Name, positive};
use crate::stats::SemaphoreStats;
use crate::{AcquisitionId, Error, Permit};

/// The default lease: how long a holder or waiter may be silent before it counts as dead.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// Below this a renewal that is a little late would lose the permit.
const MIN_LEASE: Duration = Duration::from_millis(300);
/// Where the store is not on this host: below this a permit may be over before its holder knows of it.
const MIN_TTL: Duration = Duration::from_millis(100);

/// The shortest time between two tokens of a rate: it is rounded up to a microsecond, which is then one percent at most.
const MIN_INTERVAL: Span = Span::from_micros(100);
/// The longest time in which all tokens of a rate come back: a hundred years.
const MAX_PERIOD: Span = Span::from_micros(100 * 31_557_600 * 1_000_000);

/// A fair counting semaphore with a name.
///
/// Whoever asks first is served first. Semaphores of one client with the same name share their
/// permits, and so do clones. A permit is given back when its guard, a [`Permit`], is dropped, from
/// whatever task or thread, in a runtime or outside of one.
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
    pub(crate) inner: Arc<Handle>,
}

/// What every handle, future and guard holds: the declaration, and the client that it was made with.
pub(crate) struct Handle {
    pub(crate) declaration: Arc<Declaration>,
    /// Keeps the names and the thread alive.
    pub(crate) engine: Arc<Engine>,
}

/// A semaphore as it was declared. Tickets hold on to this alone, and not to the client: whoever is
/// known to the engine only, as a detached permit is, does not keep it.
pub(crate) struct Declaration {
    pub(crate) named: Arc<dyn NameState>,
    pub(crate) terms: Terms,
    /// Whether it declares a capacity, or has one to fall back on.
    pub(crate) declares: bool,
    /// What statistics show beside its permits.
    pub(crate) label: Option<Arc<str>>,
    /// Whether its permits have slot numbers.
    pub(crate) numbered: bool,
    /// Whether its permits do not end by themselves, have no label and no number.
    pub(crate) is_plain: bool,
    max_acquire_time: Option<Duration>,
}

impl Deref for Handle {
    type Target = Declaration;

    fn deref(&self) -> &Declaration {
        &self.declaration
    }
}

impl Semaphore {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.named.name().as_str()
    }

    /// How many permits there are, by the newest declaration in this client.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.named.capacity()
    }

    /// Waits for a permit, for as long as it takes, or as [`max_acquire_time`] or
    /// [`within`](Acquire::within) allow.
    ///
    /// Nothing happens before the returned future is first polled.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when the time is up, [`Error::Closed`] when the client is closed,
    /// [`Error::Lost`] when the permit was granted but had ended before the future was polled again, and
    /// what the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the queue, or the permit if it has just been granted.
    ///
    /// [`max_acquire_time`]: SemaphoreBuilder::max_acquire_time
    #[inline]
    pub fn acquire(&self) -> Acquire {
        Acquire::new(self.inner.clone(), true, self.inner.max_acquire_time)
    }

    /// A permit if one is free and nobody waits for it; `None` otherwise. [`TryAcquire::weight`] asks for more than one unit.
    ///
    /// # Errors
    /// [`Error::Closed`] when the client is closed, and what the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it may have been granted.
    pub fn try_acquire(&self) -> TryAcquire {
        TryAcquire(Acquire::new(self.inner.clone(), false, None))
    }

    /// Runs `work` under a permit, and stops it when the permit is gone.
    ///
    /// The future of `work` is not polled again once the permit is lost or its TTL has ended: it is
    /// dropped, and the answer is [`Error::Lost`]. Otherwise the answer is what `work` answers. A
    /// release that fails afterwards is logged, and does not replace that answer. For a limit or a weight of one call, see
    /// [`Acquire::with`].
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
    /// As for [`acquire`](Self::acquire), and [`Error::Lost`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then gives the permit back.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(&Permit) -> T) -> Result<T, Error> {
        self.acquire().with(work).await
    }

    /// Releases a permit by its id, for example one that was [detached](Permit::detach). True if it
    /// was held until now; that an id is not known is a normal outcome.
    ///
    /// Its guard, if there is still one, is told that the permit is lost.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// The release goes on if the future is dropped after it was first polled.
    pub async fn release(&self, id: &AcquisitionId) -> Result<bool, Error> {
        let Handle { declaration, .. } = &*self.inner;
        declaration.named.release(*id, declaration, ReleasedBy::Id).done().await
    }

    /// Releases a holder or waiter by the id that [`stats`](Self::stats) shows, also one of another program that shares the
    /// semaphore. True if it was there.
    ///
    /// An id of ours is released as by [`release`](Self::release), and only if it holds. Another program is not notified: it
    /// finds out by itself.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store cannot be reached; [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the id may or may not be released.
    pub async fn release_member(&self, id: &str) -> Result<bool, Error> {
        match id.parse() {
            Ok(own) => self.release(&own).await,
            Err(_) => self.inner.declaration.named.release_member(id).await,
        }
    }

    /// Whether an acquire would have to wait now.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn locked(&self) -> Result<bool, Error> {
        let stats = self.stats().await?;
        let full = stats.units() >= stats.capacity() || stats.waiting() > 0;
        Ok(full || stats.paused().is_some() || stats.next_token().is_some())
    }

    /// How many waiters come before this one; `None` if it does not wait (any more). The id is that of
    /// an [`Acquire`]: see [`Acquire::id`].
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn position(&self, id: &AcquisitionId) -> Result<Option<usize>, Error> {
        self.inner.named.position(*id).await
    }

    /// What is held and who waits.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn stats(&self) -> Result<SemaphoreStats, Error> {
        let mut stats = self.inner.named.stats(false).await?;
        if stats.capacity() == 0 {
            // Nobody has used it yet.
            stats.limits.declared = self.capacity();
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

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.declaration.fmt(f)
    }
}

impl fmt::Debug for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Declaration").field("name", self.named.name()).finish_non_exhaustive()
    }
}

/// Declares a [`Semaphore`]: see [`Client::semaphore`](crate::Client::semaphore).
#[must_use = "a declaration does nothing until it is built"]
#[derive(Clone)]
pub struct SemaphoreBuilder {
    engine: Arc<Engine>,
    name: String,
    capacity: u32,
    declares: bool,
    ttl: Option<Duration>,
    max_acquire_time: Option<Duration>,
    lease: Option<Duration>,
    label: Option<String>,
    numbered: bool,
    rate: Option<(u64, Duration)>,
    burst: Option<u32>,
}

impl SemaphoreBuilder {
    pub(crate) fn new(engine: Arc<Engine>, name: &str, capacity: u32) -> Self {
        Self {
            engine,
            name: name.to_owned(),
            capacity,
            declares: true,
            ttl: None,
            max_acquire_time: None,
            lease: None,
            label: None,
            numbered: false,
            rate: None,
            burst: None,
        }
    }

    /// Takes the capacity that the semaphore has, whoever declared it. The one that was given here counts only if there is
    /// none yet.
    pub fn unless_declared(mut self) -> Self {
        self.declares = false;
        self
    }

    /// The longest a permit may be held: then it is lost, and goes to the next. None by default. At least 100 ms on Redis,
    /// because part of it is over before the answer is here.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// The longest an acquire waits. None by default.
    pub fn max_acquire_time(mut self, limit: Duration) -> Self {
        self.max_acquire_time = Some(limit);
        self
    }

    /// How long a holder or waiter may be silent before its permit or its place passes on: 30 s by default, at least
    /// 300 ms, lowered to the TTL if that is shorter. The client renews it in the background. In memory no holder dies
    /// alone, and on one host the kernel reports dead processes: there this has no effect.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// The same as [`lease`](Self::lease), under the name that other programs use.
    pub fn heartbeat_max_interval(self, interval: Duration) -> Self {
        self.lease(interval)
    }

    /// What statistics show beside the holders and waiters of this semaphore.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Gives each permit a [slot number](Permit::slot_number) that no other live permit has: which of four GPUs is yours.
    /// Permits of the same name that are not numbered take no number.
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
        self.numbered = true;
        self
    }

    /// Grants no more than `starts` permits a period, evenly spread: a permit needs room *and* a token, and one token comes every
    /// `period / starts`. Like the capacity, the rate is of the semaphore: the newest declaration counts for everybody. A
    /// semaphore that is built without a rate says nothing of it, and is held to the one that there is.
    ///
    /// It counts starts, whatever they weigh. An acquire that gives up takes no token, and a permit that was granted and that
    /// nobody has seen gives its token back.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// # let client = leasehold::Client::memory();
    /// // 5 at a time, and 100 a minute.
    /// let api = client.semaphore("api", 5).rate(100, Duration::from_secs(60)).burst(10).build()?;
    /// for _ in 0..10 {
    ///     drop(api.acquire().await?);
    /// }
    /// assert!(api.try_acquire().await?.is_none(), "the next one starts after 600 ms");
    /// # Ok(())
    /// # }
    /// ```
    pub fn rate(mut self, starts: u64, period: Duration) -> Self {
        self.rate = Some((starts, period));
        self
    }

    /// How many may start at once after a quiet time, with a [`rate`](Self::rate): 1 by default. In any time there are no more
    /// starts than the rate allows, and this many more. A token that comes while nobody is there to take it is kept up to
    /// this number; with 1 a start that is late is not made up for.
    pub fn burst(mut self, starts: u32) -> Self {
        self.burst = Some(starts);
        self
    }

    /// The semaphore.
    ///
    /// The first acquire declares the capacity in the store, where the newest declaration wins. A capacity that this client
    /// has declared already is no news: it does not undo what others have declared since. After a shrink no permit is granted
    /// until there is room.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the name is empty, longer than 512 bytes or contains control
    /// characters, if the capacity, a duration, the rate or the burst is zero, if the rate is above 10,000 a second,
    /// if all tokens would take more than 100 years to come back, if there is a burst without a rate, if the lease or the TTL is too short to be kept;
    /// [`Error::Closed`] when the client is closed.
    pub fn build(self) -> Result<Semaphore, Error> {
        let name = Name::new("name", &self.name)?;
        if self.capacity == 0 {
            return Err(Error::invalid(
                "capacity",
                "0 permits could never be acquired: at least 1",
            ));
        }
        let ttl = self.ttl.map(|ttl| positive("ttl", ttl)).transpose()?;
        let needs_renewals = self.engine.core().profile().needs_renewals;
        if let Some(ttl) = self.ttl.filter(|ttl| needs_renewals && *ttl < MIN_TTL) {
            let problem = format!("{ttl:?} may be over before the store has said that it began");
            return Err(Error::invalid("ttl", format!("{problem}: at least {MIN_TTL:?}")));
        }
        self.max_acquire_time.map(|limit| positive("max_acquire_time", limit)).transpose()?;
        let lease = self.lease.unwrap_or(LEASE);
        if lease < MIN_LEASE {
            let problem = format!("{lease:?} is too short to be kept: at least {MIN_LEASE:?}");
            return Err(Error::invalid("lease", problem));
        }
        let lease = Span::from_duration(lease);
        let lease = needs_renewals.then(|| ttl.map_or(lease, |ttl| ttl.min(lease)));
        // A label is stored beside each permit and shown to people: it is held to what a name is.
        let label = self.label.map(|label| Name::new("label", &label)).transpose()?;
        let rate = match (self.rate, self.burst) {
            (Some((starts, period)), burst) => Some(rate_of(starts, period, burst.unwrap_or(1))?),
            (None, Some(_)) => {
                return Err(Error::invalid(
                    "burst",
                    "there is no rate that it belongs to: give one",
                ));
            }
            (None, None) => None,
        };
        let core = self.engine.core();
        let named = core.named(&name)?;
        if let Some(rate) = rate {
            named.common().declare_rate(rate);
        }
        if self.declares {
            named.common().declare(self.capacity);
        } else {
            named.common().assume(self.capacity);
        }
        let terms = Terms { lease, ttl };
        let label = label.map(Name::into_text);
        let max_acquire_time = self.max_acquire_time;
        let (declares, numbered) = (self.declares, self.numbered);
        let is_plain = terms == Terms::default() && label.is_none() && !numbered;
        let declaration =
            Declaration { named, terms, declares, label, numbered, is_plain, max_acquire_time };
        let declaration = Arc::new(declaration);
        let inner = Handle { declaration, engine: self.engine };
        Ok(Semaphore { inner: Arc::new(inner) })
    }
}

/// So many starts a period, and so many at once.
pub(crate) fn rate_of(starts: u64, period: Duration, burst: u32) -> Result<Rate, Error> {
    let span = positive("rate", period)?;
    if starts == 0 {
        let problem = "0 starts are no rate: at least 1, or pause the semaphore";
        return Err(Error::invalid("rate", problem));
    }
    if burst == 0 {
        return Err(Error::invalid("burst", "0 at once are none at all: at least 1"));
    }
    // Rounded up: never more often than was asked for.
    let interval = span.micros().div_ceil(starts);
    if starts.saturating_mul(MIN_INTERVAL.micros()) > span.micros() {
        let problem = format!("{starts} in {period:?} is more than a store can count");
        return Err(Error::invalid("rate", problem + ": at most 10000 per second"));
    }
    if interval > MAX_PERIOD.micros() {
        let problem = format!("{starts} in {period:?} is less than one in 100 years");
        return Err(Error::invalid("rate", problem + ": choose more"));
    }
    if interval.saturating_mul(u64::from(burst)) > MAX_PERIOD.micros() {
        let problem = format!(
            "a burst of {burst}, at {starts} in {period:?}, takes more than 100 years to come back"
        );
        return Err(Error::invalid("burst", problem + ": choose less"));
    }
    Ok(Rate { interval: Span::from_micros(interval), burst })
}

impl fmt::Debug for SemaphoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphoreBuilder")
            .field("name", &self.name)
            .field("capacity", &self.capacity)
            .field("ttl", &self.ttl)
            .field("max_acquire_time", &self.max_acquire_time)
            .field("lease", &self.lease)
            .field("label", &self.label)
            .field("numbered", &self.numbered)
            .field("rate", &self.rate)
            .field("burst", &self.burst)
            .finish_non_exhaustive()
    }
}
