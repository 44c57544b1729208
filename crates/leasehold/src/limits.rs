//! Changes to the limits of a semaphore while it is in use.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

use crate::clock::{Moment, Span};
use crate::engine::timers::Deadline;
use crate::machine::{LimitChange, LimitsChanged, Rate};
use crate::name::{Name, positive};
use crate::{Error, Semaphore, process};

/// How often a drain queries whether permits are still held.
const QUERY_INTERVAL: Span = Span::from_millis(200);

/// Limits can be changed while permits are held and waited for, and before the first use.
///
/// Every change here applies to all clients that share the semaphore.
impl Semaphore {
    /// Sets the capacity for all clients, until a client declares another one.
    ///
    /// To keep the capacity, [`pin`] it.
    ///
    /// If the capacity grows, waiters are granted the new permits at once. If it shrinks, no holder loses its permit,
    /// and nothing is granted until enough units are free.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let api = client.semaphore("api", 1).build()?;
    /// let first = api.acquire().await?;
    /// assert!(api.try_acquire().await?.is_none());
    ///
    /// api.set_capacity(2).await?;
    /// assert!(api.try_acquire().await?.is_some());
    /// # drop(first);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the capacity is zero.
    /// - [`Error::Pinned`] if the semaphore is pinned.
    /// - All errors of [`unpin`](Self::unpin).
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    ///
    /// [`pin`]: Self::pin
    pub async fn set_capacity(&self, capacity: u32) -> Result<(), Error> {
        self.change_limits(LimitChange::Declare(at_least_one(capacity)?)).await?;
        self.inner.spec.named.common().declare_acknowledged(capacity);
        Ok(())
    }

    /// Sets the capacity for all clients, until [`unpin`](Self::unpin).
    ///
    /// Capacities that programs declare meanwhile are recorded, and shown by
    /// [`stats`](Self::stats), but have no effect. The pin remains when nobody uses the semaphore.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the capacity is zero.
    /// - All errors of [`unpin`](Self::unpin).
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn pin(&self, capacity: u32) -> Result<(), Error> {
        self.change_limits(LimitChange::Pin(at_least_one(capacity)?)).await
    }

    /// Ends a [`pin`](Self::pin).
    ///
    /// The newest declaration applies again, even if it was made during the pin. If the semaphore
    /// is not pinned, nothing changes.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time. The change may have been
    ///   made.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Unknown`] if the semaphore was never used and has no limits, and this handle was built with
    ///   [`unless_declared`](crate::SemaphoreBuilder::unless_declared).
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn unpin(&self) -> Result<(), Error> {
        self.change_limits(LimitChange::Unpin).await
    }

    /// Sets the [rate](crate::SemaphoreBuilder::rate) for all clients: no more than `starts`
    /// permits in any `period`, and no more than `burst` of them at once.
    ///
    /// It stays until another rate is declared or set, or it is [removed](Self::clear_rate).
    ///
    /// The change applies at once. It adds no token: as many are available as before, or `burst` if that is less. In a
    /// period in which the rate changes, the starts of the old rate and of the new one may add up.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the rate is one that [`SemaphoreBuilder::build`](crate::SemaphoreBuilder::build)
    ///   does not accept.
    /// - All errors of [`unpin`](Self::unpin).
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn set_rate(&self, starts: u64, period: Duration, burst: u32) -> Result<(), Error> {
        self.change_rate(Some(Rate::new(starts, period, burst)?)).await
    }

    /// Removes the rate for all clients, until a client declares another rate.
    ///
    /// # Errors
    /// The same as for [`unpin`](Self::unpin).
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn clear_rate(&self) -> Result<(), Error> {
        self.change_rate(None).await
    }

    /// Stops granting permits, until [`resume`](Self::resume).
    ///
    /// Nothing happens before the returned [`Pause`] is awaited. Holders keep their permits, and
    /// waiters keep their places. [`try_acquire`](Self::try_acquire) returns `None`. The pause
    /// remains when nobody uses the semaphore.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let api = client.semaphore("api", 5).build()?;
    /// api.pause().reason("the provider is down").await?;
    /// assert!(api.try_acquire().await?.is_none());
    ///
    /// api.resume().await?;
    /// assert!(api.try_acquire().await?.is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the text of [`Pause::reason`] or [`Pause::by`] is empty, longer than 512 bytes,
    ///   or contains control characters.
    /// - All errors of [`unpin`](Self::unpin).
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be paused.
    pub fn pause(&self) -> Pause {
        Pause { semaphore: self.clone(), by: None, reason: None }
    }

    /// Ends a [`pause`](Self::pause).
    ///
    /// Waiters are granted the free permits at once, in their order.
    ///
    /// # Errors
    /// The same as for [`unpin`](Self::unpin).
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn resume(&self) -> Result<(), Error> {
        self.change_limits(LimitChange::Resume).await
    }

    /// [Pauses](Self::pause) the semaphore, and waits until nobody holds a permit.
    ///
    /// The semaphore stays paused after that, even if the wait fails. Nothing happens before the
    /// returned [`Drain`] is awaited.
    ///
    /// The client queries the store every 200 ms. If another client resumes the semaphore in the meantime, the drain
    /// still waits for a moment at which no permit is held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// # let client = leasehold::Client::memory();
    /// let api = client.semaphore("api", 5).build()?;
    /// api.drain().reason("an upgrade").within(Duration::from_secs(60)).await?;
    /// // No permit is held now, and none is granted before this:
    /// api.resume().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::NotDrained`] if permits are still held when the time limit of [`Drain::within`] passes.
    /// - [`Error::InvalidArgument`] if that limit is zero.
    /// - All errors of [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be paused.
    pub fn drain(&self) -> Drain {
        Drain { pause: self.pause(), within: None }
    }

    /// Removes everything that the store knows about the semaphore: its capacity, its rate, a pin,
    /// a pause, and its last fence.
    ///
    /// This fails if anybody holds a permit or waits for one.
    ///
    /// Without the last fence, the next fence comes from the store's clock alone. It is larger than the earlier ones
    /// only if that clock was not set back. So forget a semaphore only if no [`FenceGate`](crate::FenceGate) depends on
    /// its fences any more.
    ///
    /// # Errors
    /// - [`Error::InUse`] if anybody holds a permit or waits for one.
    /// - [`Error::Unknown`] if the store does not know the semaphore.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time. The semaphore may have been
    ///   forgotten.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be forgotten.
    pub async fn forget(&self) -> Result<(), Error> {
        self.change_limits(LimitChange::Forget).await
    }

    async fn change_rate(&self, rate: Option<Rate>) -> Result<(), Error> {
        self.change_limits(LimitChange::Rate(rate)).await?;
        self.inner.spec.named.common().set_acknowledged_rate(rate);
        Ok(())
    }

    async fn change_limits(&self, change: LimitChange) -> Result<(), Error> {
        self.inner.engine.core().check_open()?;
        let name = self.name();
        let declares = self.inner.spec.declares;
        match self.inner.spec.named.change_limits(change, declares).await? {
            LimitsChanged::Done => Ok(()),
            LimitsChanged::Unknown => Err(Error::Unknown { name: name.to_owned() }),
            LimitsChanged::Pinned(capacity) => {
                Err(Error::Pinned { name: name.to_owned(), capacity })
            }
            LimitsChanged::InUse { holding, waiting } => {
                let held = u32::try_from(holding).unwrap_or(u32::MAX);
                Err(Error::InUse { name: name.to_owned(), held, waiting })
            }
        }
    }
}

fn at_least_one(capacity: u32) -> Result<u32, Error> {
    if capacity == 0 {
        let problem = "it is 0; the minimum is 1: to grant no permits, pause the semaphore";
        return Err(Error::invalid("capacity", problem));
    }
    Ok(capacity)
}

/// A pause that begins when it is awaited: see [`Semaphore::pause`].
#[must_use = "the pause does not begin until it is awaited"]
#[derive(Clone, Debug)]
pub struct Pause {
    semaphore: Semaphore,
    by: Option<String>,
    reason: Option<String>,
}

impl Pause {
    /// Sets the reason, which [`SemaphoreStats::paused`](crate::SemaphoreStats::paused) shows.
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Sets the name of the person or program that pauses the semaphore, which
    /// [`SemaphoreStats::paused`](crate::SemaphoreStats::paused) shows: by default the host and the process id.
    pub fn by(mut self, by: impl Into<String>) -> Self {
        self.by = Some(by.into());
        self
    }

    async fn begin(&self) -> Result<(), Error> {
        let text = |what, text: &str| Ok(Name::new(what, text)?.into_text());
        let by = if let Some(by) = &self.by {
            text("by", by)?
        } else {
            let host = process::host().unwrap_or_else(|| "an unknown host".into());
            format!("{host} pid {}", std::process::id()).into()
        };
        let reason = self.reason.as_deref().map(|reason| text("reason", reason)).transpose()?;
        self.semaphore.change_limits(LimitChange::Pause { by, reason }).await
    }
}

impl IntoFuture for Pause {
    type Output = Result<(), Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// # Errors
    /// The same as for [`Semaphore::pause`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be paused.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.begin().await })
    }
}

/// A drain that begins when it is awaited: see [`Semaphore::drain`].
#[must_use = "the drain does not begin until it is awaited"]
#[derive(Clone, Debug)]
pub struct Drain {
    pause: Pause,
    within: Option<Duration>,
}

impl Drain {
    /// Sets the reason: see [`Pause::reason`].
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.pause = self.pause.reason(reason);
        self
    }

    /// Sets the name of the person or program that drains the semaphore: see [`Pause::by`].
    pub fn by(mut self, by: impl Into<String>) -> Self {
        self.pause = self.pause.by(by);
        self
    }

    /// Sets how long to wait for the holders.
    ///
    /// By default there is no limit.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    async fn run(self) -> Result<(), Error> {
        let limit = self.within.map(|limit| positive("within", limit)).transpose()?;
        let semaphore = &self.pause.semaphore;
        let core = semaphore.inner.engine.core();
        let until = limit.map_or(Moment::NEVER, |limit| core.now() + limit);
        self.pause.begin().await?;
        while semaphore.stats().await?.held > 0 {
            let now = core.now();
            if until <= now {
                let (name, limit) = (semaphore.name().to_owned(), self.within.unwrap_or_default());
                return Err(Error::NotDrained { name, limit });
            }
            let deadline = Deadline::new(core, until.min(now + QUERY_INTERVAL));
            let _ = deadline.unless(std::future::pending::<()>()).await;
        }
        Ok(())
    }
}

impl IntoFuture for Drain {
    type Output = Result<(), Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// # Errors
    /// The same as for [`Semaphore::drain`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be paused.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
