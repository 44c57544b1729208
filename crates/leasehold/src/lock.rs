//! The fenced lock, as users see it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, Wake};
use crate::clock::{Moment, Span};
use crate::engine::errands::{Errand, Wanted};
use crate::engine::lease::Doubt;
use crate::machine::lock::Acquired;
use crate::name::{Name, millis};
use crate::{Error, Retry};

mod guard;
mod id;
mod info;
mod locks;
mod observer;

pub use guard::LockGuard;
pub use id::LockId;
pub use info::{HeldLock, LockInfo, RawLockInfo};
pub use locks::{Capabilities, Locks, TimeAuthority};
pub use observer::{LockEvent, LockOperation, LockReason, LockResult, Observer};

use guard::Kept;
use locks::key_of;
use observer::report;

/// How long a lock is held unless it is extended or released.
const TTL: Duration = Duration::from_secs(30);

/// How soon after each other a lock that is over, but still there, is asked for.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// An exclusive lock with a key.
///
/// It is *not fair*: when it comes free, whoever asks first has it. Where order matters, use a
/// [`Semaphore`](crate::Semaphore) of 1. It is *fenced*: every holder has a [fence](LockGuard::fence) that is larger than
/// those before, which the thing you protect can check.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let lock = Client::memory().lock("invoice:42").build()?;
/// let guard = lock.acquire().await?;
/// assert!(lock.try_acquire().await?.is_none());
/// println!("write with fence {}", guard.fence());
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Lock {
    inner: Arc<Inner>,
}

/// Who is told of a release that failed.
type Hook = Arc<dyn Fn(&Error) + Send + Sync>;

struct Inner {
    locks: Locks,
    key: Name,
    ttl: u64,
    retry: Retry,
    auto_extend: bool,
    on_release_error: Option<Hook>,
}

impl Lock {
    /// What it is called.
    #[must_use]
    pub fn key(&self) -> &str {
        self.inner.key.as_str()
    }

    /// Waits for the lock, as [`retry`](LockBuilder::retry) says: by default for at most 5 s.
    ///
    /// A release ends the wait at once, or rather after a round trip to the store, if it is one of ours; a program
    /// that does not tell us is found out by asking again.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when the time or the retries are used up, [`Error::Closed`] when the client is closed, and
    /// what the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it may have been granted.
    pub async fn acquire(&self) -> Result<LockGuard, Error> {
        let inner = self.inner.clone();
        let core = self.inner.locks.engine.core();
        core.run_while_wanted(|wanted| Box::pin(wait(inner, wanted))).await
    }

    /// The lock if it is free; `None` if somebody has it.
    ///
    /// # Errors
    /// [`Error::Closed`] when the client is closed, and what the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it may have been granted.
    pub async fn try_acquire(&self) -> Result<Option<LockGuard>, Error> {
        let core = self.inner.locks.engine.core();
        let wake = if core.waiters.any(&self.inner.key) { Wake::Always } else { Wake::Never };
        let (inner, id) = (self.inner.clone(), LockId::random());
        let attempt =
            move |wanted: Wanted| async move { Ok(inner.attempt(id, wake, &wanted).await?.ok()) };
        match &core.backend {
            Backend::Memory(_) => attempt(Wanted::default()).await,
            Backend::Away(_) => core.run_while_wanted(|wanted| Box::pin(attempt(wanted))).await,
        }
    }

    /// Runs `work` under the lock, and stops it when the lock is gone.
    ///
    /// The future of `work` is not polled again once the lock is lost: it is dropped, and the answer is
    /// [`Error::Lost`]. Otherwise the answer is what `work` answers. A release that fails afterwards is told to
    /// [`on_release_error`](LockBuilder::on_release_error), and does not replace that answer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let lock = Client::memory().lock("invoice:42").auto_extend().build()?;
    /// let key = lock.with(async |guard| guard.key().to_owned()).await?;
    /// assert_eq!(key, "invoice:42");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire), and [`Error::Lost`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then gives the lock back.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(&LockGuard) -> T) -> Result<T, Error> {
        let guard = self.acquire().await?;
        let result = guard.lost().or(work(&guard)).await;
        let result = result.map_err(|reason| guard.lost_error(reason));
        if result.is_err() {
            // Given back in the background: the store may be out of reach, and the caller has to know now.
            drop(guard);
        } else if let Err(error) = guard.release().await {
            tracing::warn!(key = self.key(), %error, "release failed after the work was done");
            if let Some(hook) = &self.inner.on_release_error {
                hook(&error);
            }
        }
        result
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("key", &self.key()).finish_non_exhaustive()
    }
}

/// Declares a [`Lock`]: see [`Client::lock`](crate::Client::lock).
#[must_use = "a declaration does nothing until it is built"]
#[derive(Clone)]
pub struct LockBuilder {
    locks: Locks,
    key: String,
    ttl: Duration,
    retry: Retry,
    auto_extend: bool,
    on_release_error: Option<Hook>,
}

impl LockBuilder {
    pub(crate) fn new(locks: Locks, key: &str) -> Self {
        Self {
            locks,
            key: key.to_owned(),
            ttl: TTL,
            retry: Retry::default(),
            auto_extend: false,
            on_release_error: None,
        }
    }

    /// How long the lock is held unless it is extended or released: 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How an acquire asks again while somebody else has the lock.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Extends the lock by itself, at a third of the TTL, until its guard is released or dropped. Then the TTL is not
    /// how long the work may take, but how long the lock outlives a holder that died.
    pub fn auto_extend(mut self) -> Self {
        self.auto_extend = true;
        self
    }

    /// What is told of a release that failed after the work of [`Lock::with`] was done.
    pub fn on_release_error(mut self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.on_release_error = Some(Arc::new(hook));
        self
    }

    /// The lock.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the key is empty, longer than 512 bytes after NFC, contains control characters or
    /// begins with `fence:` or `id:`, and if a duration is zero, too long or not in whole milliseconds.
    pub fn build(self) -> Result<Lock, Error> {
        self.retry.check()?;
        let inner = Inner {
            key: key_of(&self.key)?,
            ttl: millis("ttl", self.ttl)?,
            locks: self.locks,
            retry: self.retry,
            auto_extend: self.auto_extend,
            on_release_error: self.on_release_error,
        };
        Ok(Lock { inner: Arc::new(inner) })
    }
}

impl fmt::Debug for LockBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockBuilder")
            .field("key", &self.key)
            .field("ttl", &self.ttl)
            .field("retry", &self.retry)
            .field("auto_extend", &self.auto_extend)
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// One attempt: a guard, or how long the other's lease still lasts. It goes on to its end: what comes of it when nobody
    /// waits for it any more is given back.
    async fn attempt(
        self: &Arc<Self>,
        id: LockId,
        wake: Wake,
        wanted: &Wanted,
    ) -> Result<Result<LockGuard, Duration>, Error> {
        let core = self.locks.engine.core();
        core.check_open()?;
        let (_errand, _asking) = (Errand::new(core), wanted.asking());
        let kept = Arc::new(Kept::new(self, id));
        let doubt = Doubt::new(core, Box::new(kept.clone()));
        let mut sent = Moment::now();
        let answer = match &core.backend {
            Backend::Memory(_) => self.locks.store.acquire(&self.key, id, self.ttl, wake).await,
            Backend::Away(_) => {
                let ask = || {
                    sent = Moment::now();
                    self.locks.store.acquire(&self.key, id, self.ttl, wake)
                };
                core.settings.retries.persist_while(wanted, ask).await
            }
        };
        let about = (Some(self.key.as_str()), Some(id));
        report(self.locks.observer.as_ref(), LockOperation::Acquire, &answer, about);
        let answer = answer?;
        doubt.resolved();
        Ok(match answer {
            Acquired::Held { fence, expires_at, remaining } => {
                let valid_for = Span::from_millis(remaining);
                let guard = LockGuard::new(self, kept, fence, expires_at, (sent, valid_for));
                // A close that came meanwhile may have looked for guards before there was this one.
                core.check_open()?;
                Ok(guard)
            }
            Acquired::Locked { remaining } => Err(Duration::from_millis(remaining)),
        })
    }
}

/// Asks, and asks again when the lock came free, when its lease ends, and now and then besides.
async fn wait(inner: Arc<Inner>, wanted: Wanted) -> Result<LockGuard, Error> {
    let core = inner.locks.engine.core();
    let (id, started) = (LockId::random(), Moment::now());
    let limit = inner.retry.limit();
    let give_up_at = started + Span::from_duration(limit);
    let waiting = core.waiters.join(&inner.key);
    let timed_out = |now: Moment| {
        let limit = limit.min(now.saturating_since(started));
        Error::TimedOut { what: "lock", name: inner.key.to_string(), limit, full: None }
    };
    let (mut retried, mut again_at, mut last) = (0, None, false);
    loop {
        // The others of ours want to be told of the next release as well.
        let wake = if waiting.in_company() { Wake::Always } else { Wake::IfLocked };
        // From here on: what happens while the store is asked must not be missed.
        let woken = waiting.woken();
        let remaining = match inner.attempt(id, wake, &wanted).await? {
            Ok(guard) => return Ok(guard),
            Err(remaining) => remaining,
        };
        core.check_open()?;
        let now = Moment::now();
        if last || retried >= inner.retry.max_times() {
            return Err(timed_out(now));
        }
        let again =
            *again_at.get_or_insert_with(|| now + Span::from_duration(inner.retry.pause(retried)));
        // A record may be found for a while after its end; it is not asked about in a circle.
        let over = now + Span::from_duration(remaining.max(SHORTEST_PAUSE));
        let until = again.min(over).min(give_up_at).saturating_since(now);
        let woken = tokio::time::timeout(until, woken).await.is_ok();
        let now = Moment::now();
        if now >= again {
            retried += 1;
            again_at = None;
        }
        last = now >= give_up_at;
        // Not at the very moment when the lock comes free: then it is worth asking once more.
        if last && !woken && now < over {
            return Err(timed_out(now));
        }
    }
}
