//! The fenced lock, as users see it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::Part;
use crate::clock::{Moment, Span};
use crate::engine::lease::Keep;
use crate::engine::lock_waiters::LockWaiters;
use crate::engine::timers::Alarm;
use crate::machine::lock::{Acquired, Holder, LockCommand, NotifyWhen};
use crate::name::{Name, millis};
use crate::{Error, Fence, Retry, process};

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

use guard::Holding;
use locks::{acquired, key_of};
use observer::report;

/// The lease of a lock, unless another is given.
const LEASE: Duration = Duration::from_secs(30);

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
    inner: Arc<Definition>,
}

/// Who is told of a release that failed.
type Hook = Arc<dyn Fn(&Error) + Send + Sync>;

/// A lock as it was declared.
struct Definition {
    locks: Locks,
    key: Name,
    ttl: u64,
    retry: Retry,
    auto_extend: bool,
    on_release_error: Option<Hook>,
    /// What its records say about their holder.
    holder: Arc<Holder>,
    /// The fence that is expected next, or 0 if the lock was held when it was last asked for.
    next_fence: AtomicU64,
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
        self.inner.wait().await
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
        let waited_for = core.lock_waiters.any(&self.inner.key);
        let notify = if waited_for { NotifyWhen::Always } else { NotifyWhen::Never };
        let until = Moment::now() + core.settings.answer_timeout;
        Ok(self.inner.attempt(LockId::random(), notify, until).await?.ok())
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
    label: Option<String>,
}

impl LockBuilder {
    pub(crate) fn new(locks: Locks, key: &str) -> Self {
        Self {
            locks,
            key: key.to_owned(),
            ttl: LEASE,
            retry: Retry::default(),
            auto_extend: false,
            on_release_error: None,
            label: None,
        }
    }

    /// How long the holder may be silent before the lock passes on: 30 s by default. With
    /// [`auto_extend`](Self::auto_extend) the client renews it in the background. Without it, the lock ends after this time
    /// unless [`LockGuard::extend`] is called.
    ///
    /// ```
    /// use leasehold::Client;
    /// use std::time::Duration;
    ///
    /// let lock = Client::memory().lock("invoice:42").lease(Duration::from_secs(10)).auto_extend().build()?;
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

    /// How an acquire asks again while somebody else has the lock.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Extends the lock by itself, at a third of the [lease](Self::lease), until its guard is released or dropped. Then the
    /// lease does not limit how long the work may take, but how long the lock outlives a holder that died.
    pub fn auto_extend(mut self) -> Self {
        self.auto_extend = true;
        self
    }

    /// What is told of a release that failed after the work of [`Lock::with`] was done.
    pub fn on_release_error(mut self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.on_release_error = Some(Arc::new(hook));
        self
    }

    /// What a [lookup](Locks::lookup) shows beside the host and the process of the holder.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::memory();
    /// let guard = client.lock("invoice:42").label("nightly").build()?.acquire().await?;
    /// let info = client.locks().lookup("invoice:42").await?.expect("it is held");
    /// assert_eq!(info.label.as_deref(), Some("nightly"));
    /// assert_eq!(info.pid, Some(std::process::id()));
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// The lock.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the key or the label is empty, longer than 512 bytes after NFC or contains control
    /// characters, if the key begins with `fence:` or `id:`, and if a duration is zero, too long or not in whole
    /// milliseconds.
    pub fn build(self) -> Result<Lock, Error> {
        self.retry.check()?;
        // A label is stored in each record and shown to people: it is held to what a name is.
        let label = self.label.map(|label| Name::new("label", &label)).transpose()?;
        let inner = Definition {
            key: key_of(&self.key)?,
            ttl: millis("ttl", self.ttl)?,
            locks: self.locks,
            retry: self.retry,
            auto_extend: self.auto_extend,
            on_release_error: self.on_release_error,
            holder: process::holder(label.map(Name::into_text)),
            next_fence: AtomicU64::new(1),
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
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

impl Definition {
    /// One attempt: a guard, or how long the other's lease still lasts.
    async fn attempt(
        self: &Arc<Self>,
        id: LockId,
        notify: NotifyWhen,
        until: Moment,
    ) -> Result<Result<LockGuard, Duration>, Error> {
        let core = self.locks.engine.core();
        core.check_open()?;
        let holding = Arc::new(Holding::new(self, id));
        let undo = holding.clone();
        let (key, holder) = (self.key.clone(), self.holder.clone());
        let expected = match self.next_fence.load(Ordering::Relaxed) {
            0 => None,
            next => Some(Fence::new(next)),
        };
        let command = LockCommand::Acquire { key, id, ttl: self.ttl, notify, holder, expected };
        let asked =
            core.ask(Part::Lock(command), until, Some(Box::new(move || undo.release_later())));
        let (answer, sent) = match asked.await {
            Ok((answer, sent)) => (acquired(answer), sent),
            Err(error) => (Err(error), Moment::now()),
        };
        let about = (Some(self.key.as_str()), Some(id));
        report(self.locks.observer.as_ref(), LockOperation::Acquire, &answer, about);
        Ok(match answer? {
            Acquired::Held { fence, expires_at, remaining } => {
                self.next_fence.store(fence.get().saturating_add(1), Ordering::Relaxed);
                let valid_for = Span::from_millis(remaining);
                let guard = LockGuard::new(self, holding, fence, expires_at, (sent, valid_for));
                // A close that came meanwhile may have looked for guards before there was this one.
                core.check_open()?;
                Ok(guard)
            }
            Acquired::Locked { remaining } => {
                self.next_fence.store(0, Ordering::Relaxed);
                Err(Duration::from_millis(remaining))
            }
        })
    }

    /// Asks, and asks again when the lock was released, when its lease ends, and now and then besides.
    async fn wait(self: &Arc<Self>) -> Result<LockGuard, Error> {
        let core = self.locks.engine.core();
        let (id, started) = (LockId::random(), Moment::now());
        let limit = self.retry.limit();
        let give_up_at = started + Span::from_duration(limit);
        let waiter = core.lock_waiters.join(&self.key);
        let timed_out = |now: Moment| {
            let limit = limit.min(now.saturating_since(started));
            Error::TimedOut { what: "lock", name: self.key.to_string(), limit, full: None }
        };
        let (mut retried, mut again_at, mut last) = (0, None, false);
        let mut wake_up = WakeUp { waiters: &core.lock_waiters, key: &self.key, used: true };
        loop {
            // The other waiters of this client want to be notified of the next release, too.
            let notify =
                if waiter.in_company() { NotifyWhen::Always } else { NotifyWhen::IfLocked };
            // From here on: what happens while the store is asked must not be missed.
            let woken = waiter.woken();
            // The last attempt is begun at the very end of the wait.
            let until =
                if last { Moment::now() + core.settings.answer_timeout } else { give_up_at };
            let remaining = match self.attempt(id, notify, until).await? {
                Ok(guard) => {
                    wake_up.used = true;
                    return Ok(guard);
                }
                Err(remaining) => remaining,
            };
            wake_up.used = true;
            core.check_open()?;
            let now = Moment::now();
            if last || retried >= self.retry.max_times() {
                return Err(timed_out(now));
            }
            let again = *again_at
                .get_or_insert_with(|| now + Span::from_duration(self.retry.pause(retried)));
            // A record may be found for a while after its end; it is not asked about in a circle.
            let over = now + Span::from_duration(remaining.max(SHORTEST_PAUSE));
            let alarm = Alarm::new(core, again.min(over).min(give_up_at));
            let woken = alarm.unless(woken).await.is_some();
            wake_up.used = !woken;
            if let Some(error) = core.stopped() {
                return Err(error);
            }
            let now = Moment::now();
            if now >= again {
                retried += 1;
                again_at = None;
            }
            last = now >= give_up_at;
            // Not at the very moment when the lock is released: then it is worth asking once more.
            if last && !woken && now < over {
                return Err(timed_out(now));
            }
        }
    }
}

/// A wake-up that a waiter has received. If the waiter is dropped before the store has answered it, the next one is woken.
struct WakeUp<'a> {
    waiters: &'a LockWaiters,
    key: &'a Name,
    used: bool,
}

impl Drop for WakeUp<'_> {
    fn drop(&mut self) {
        if !self.used {
            self.waiters.wake_one(self.key);
        }
    }
}
