//! Changing the limits of a semaphore while it is in use.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

use crate::clock::{Moment, Span};
use crate::engine::timers::Alarm;
use crate::machine::{Steer, Steered};
use crate::name::{Name, positive};
use crate::semaphore::rate_of;
use crate::{Error, Semaphore, process};

/// How often a drain asks whether somebody still holds a permit.
const ASK_AGAIN: Span = Span::from_millis(200);

/// Limits can be changed while permits are held and waited for. Everything here concerns everybody who shares the semaphore.
impl Semaphore {
    /// Declares another capacity, for everybody.
    ///
    /// If it grows, those who wait are granted the new permits at once. If it shrinks, nobody loses a permit, and none is
    /// granted until there is room. The next declaration of another capacity replaces this one: to keep it, [`pin`] it.
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
    /// [`Error::InvalidArgument`] if the capacity is 0, or if the semaphore is pinned; [`Error::Unavailable`] if the store
    /// does not answer: then the change may have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    ///
    /// [`pin`]: Self::pin
    pub async fn set_capacity(&self, capacity: u32) -> Result<(), Error> {
        self.steer(Steer::Declare(at_least_one(capacity)?)).await?;
        self.inner.named.common().declare_as_heard(capacity);
        Ok(())
    }

    /// Sets the capacity, for everybody, until [`unpin`](Self::unpin): what programs declare meanwhile is recorded, shown by
    /// [`stats`](Self::stats), and has no effect. A pin stays when nobody uses the semaphore.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the capacity is 0; [`Error::Unavailable`] if the store does not answer: then the change
    /// may have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn pin(&self, capacity: u32) -> Result<(), Error> {
        self.steer(Steer::Pin(at_least_one(capacity)?)).await
    }

    /// Ends a [`pin`](Self::pin): the newest declaration counts again, also one that was made meanwhile. Nothing happens if
    /// the semaphore is not pinned.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not answer: then the change may have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn unpin(&self) -> Result<(), Error> {
        self.steer(Steer::Unpin).await
    }

    /// Sets the [rate](crate::SemaphoreBuilder::rate), for everybody. The next declaration of another rate replaces it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rate that could not be declared; [`Error::Unavailable`] if the store does not answer:
    /// then the change may have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn set_rate(&self, starts: u64, period: Duration, burst: u32) -> Result<(), Error> {
        let rate = Some(rate_of(starts, period, burst)?);
        self.steer(Steer::Rate(rate)).await?;
        self.inner.named.common().set_rate_as_heard(rate);
        Ok(())
    }

    /// Removes the rate, for everybody, until somebody declares another one.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not answer: then the change may have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn clear_rate(&self) -> Result<(), Error> {
        self.steer(Steer::Rate(None)).await?;
        self.inner.named.common().set_rate_as_heard(None);
        Ok(())
    }

    /// Grants no more permits, until [`resume`](Self::resume). Holders keep theirs, and waiters keep their places. A try
    /// answers `None`. A pause stays when nobody uses the semaphore.
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
    pub fn pause(&self) -> Pause {
        Pause { semaphore: self.clone(), by: None, reason: None }
    }

    /// Ends a [`pause`](Self::pause): those who wait are granted the free permits at once, in their order.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not answer: then the change may have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may or may not be made.
    pub async fn resume(&self) -> Result<(), Error> {
        self.steer(Steer::Resume).await
    }

    /// [Pauses](Self::pause) the semaphore, and waits until nobody holds a permit. It stays paused after that, also if the
    /// wait ends without success.
    pub fn drain(&self) -> Drain {
        Drain { pause: self.pause(), within: None }
    }

    /// Removes everything that the store knows of the semaphore, if nobody holds a permit or waits for one: its capacity, its
    /// rate, a pin, a pause, and its last fence.
    ///
    /// Without its last fence, the next one comes from the store's clock alone. It is larger than those before as long as that
    /// clock was not set back: forget only what no [`FenceGate`](crate::FenceGate) guards any more.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if somebody holds a permit or waits, or if the store does not know the semaphore;
    /// [`Error::Unavailable`] if the store does not answer: then it may have been forgotten.
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be forgotten.
    pub async fn forget(&self) -> Result<(), Error> {
        self.steer(Steer::Forget).await
    }

    async fn steer(&self, steer: Steer) -> Result<(), Error> {
        let name = self.name();
        let declares = self.inner.declaration.declares;
        match self.inner.named.steer(steer, declares).await? {
            Steered::Done => Ok(()),
            Steered::Unknown => {
                let problem = "has no capacity: nobody has acquired it yet, or it was forgotten";
                Err(Error::invalid("name", format!("{name:?} {problem}")))
            }
            Steered::Pinned(capacity) => {
                let problem = format!("{name:?} is pinned to {capacity}");
                Err(Error::invalid("capacity", problem + ": unpin it, or pin another capacity"))
            }
            Steered::InUse { holding, waiting } => {
                let problem = format!("{name:?} is in use: {holding} held, {waiting} waiting");
                Err(Error::invalid("name", problem + ": drain it first, and end those who wait"))
            }
        }
    }
}

fn at_least_one(capacity: u32) -> Result<u32, Error> {
    if capacity == 0 {
        let problem = "0 permits could never be acquired: at least 1, or pause it";
        return Err(Error::invalid("capacity", problem));
    }
    Ok(capacity)
}

/// A pause to be: see [`Semaphore::pause`].
#[must_use = "nothing is paused until it is awaited"]
#[derive(Clone, Debug)]
pub struct Pause {
    semaphore: Semaphore,
    by: Option<String>,
    reason: Option<String>,
}

impl Pause {
    /// Why: [`SemaphoreStats::paused`](crate::SemaphoreStats::paused) shows it to those who wait.
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Who pauses it: by default the host and the process.
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
        self.semaphore.steer(Steer::Pause { by, reason }).await
    }
}

impl IntoFuture for Pause {
    type Output = Result<(), Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// # Errors
    /// [`Error::InvalidArgument`] if `by` or the reason is empty, longer than 512 bytes or contains control characters;
    /// [`Error::Unavailable`] if the store does not answer: then it may have been paused.
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may or may not be paused.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.begin().await })
    }
}

/// A drain to be: see [`Semaphore::drain`].
#[must_use = "nothing is drained until it is awaited"]
#[derive(Clone, Debug)]
pub struct Drain {
    pause: Pause,
    within: Option<Duration>,
}

impl Drain {
    /// Why: see [`Pause::reason`].
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.pause = self.pause.reason(reason);
        self
    }

    /// Who drains it: see [`Pause::by`].
    pub fn by(mut self, by: impl Into<String>) -> Self {
        self.pause = self.pause.by(by);
        self
    }

    /// Waits no longer than this.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    async fn run(self) -> Result<(), Error> {
        let limit = self.within.map(|limit| positive("within", limit)).transpose()?;
        let until = limit.map_or(Moment::NEVER, |limit| Moment::now() + limit);
        let semaphore = &self.pause.semaphore;
        self.pause.begin().await?;
        while semaphore.stats().await?.held() > 0 {
            let now = Moment::now();
            if until <= now {
                let (what, name) = ("drain", semaphore.name().to_owned());
                let limit = self.within.unwrap_or_default();
                return Err(Error::TimedOut { what, name, limit, full: None });
            }
            let alarm = Alarm::new(semaphore.inner.engine.core(), until.min(now + ASK_AGAIN));
            let _ = alarm.unless(std::future::pending::<()>()).await;
        }
        Ok(())
    }
}

impl IntoFuture for Drain {
    type Output = Result<(), Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// # Errors
    /// As for [`Pause`], and [`Error::TimedOut`] if somebody still holds a permit when the time is up.
    ///
    /// # Cancel safety
    /// If the future is dropped, the semaphore may be paused.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
