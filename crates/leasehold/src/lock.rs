//! The fenced lock: the public API.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::clock::{Moment, Span};
use crate::engine::driver::Driver;
use crate::engine::timers::Deadline;
use crate::engine::watch::Watch;
use crate::machine::Terms;
use crate::machine::lock::{Holder, NotifyWhen};
use crate::name::{Name, millis, positive};
use crate::semaphore::LEASE;
use crate::{Error, LockId, Observer, Primitive, Retry, process};

mod acquire;
mod guard;
mod info;
mod lease;
mod locks;

pub use acquire::{AcquireLock, TryAcquireLock};
pub use guard::LockGuard;
pub use info::{HeldLock, LockInfo, LockRef};
pub use locks::Locks;

use lease::{LockLease, LockProtocol, lease_in_millis};
use locks::key_of;

/// The shortest pause between two attempts while the record of an expired lock is still in the store.
const SHORTEST_PAUSE: Span = Span::from_millis(5);

/// An exclusive lock with a key.
///
/// The lock is *not fair*: after a release, the first client that asks acquires it. Where order matters, use a
/// [`Semaphore`](crate::Semaphore) of 1. The lock is *fenced*: every holder has a [fence](LockGuard::fence) that is
/// larger than those of all earlier holders. The resource that you protect can check it.
///
/// The client renews the lock in the background while its guard lives.
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
    inner: Arc<LockSpec>,
}

/// The function that is called with the error of a failed release.
type Hook = Arc<dyn Fn(&Error) + Send + Sync>;

/// A lock as it was declared.
pub(crate) struct LockSpec {
    locks: Locks,
    key: Name,
    terms: Terms,
    within: Option<Duration>,
    retry: Retry,
    on_release_error: Option<Hook>,
    /// The description of the holder in the records of this lock.
    holder: Arc<Holder>,
    /// The fence that the next acquire expects, or 0 if the lock was held at the last attempt.
    next_fence: AtomicU64,
    /// The metrics, the observer and the tracing spans of this lock.
    watch: Arc<Watch>,
}

impl Lock {
    /// Returns the key of the lock.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.key.as_str()
    }

    /// Acquires the lock, and waits for it if necessary.
    ///
    /// The wait has no time limit unless [`LockBuilder::within`] or [`AcquireLock::within`] sets
    /// one.
    ///
    /// Nothing happens before the returned future is first polled. When a client of this library releases the lock, the
    /// waiting acquire is notified and asks the store at once. Other programs do not notify it; the acquire notices
    /// their release at its next [retry](LockBuilder::retry). It keeps waiting while the store is unreachable.
    ///
    /// # Errors
    /// - [`Error::TimedOut`] if the time limit passes, or [`Error::Unavailable`] if it passes while the store is
    ///   unreachable.
    /// - [`Error::InvalidArgument`] if the time limit is zero.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Lost`] if the lock was lost after the grant and before the future was polled again.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lock that it may have been granted is released in the background.
    pub fn acquire(&self) -> AcquireLock {
        AcquireLock::new(self.inner.clone())
    }

    /// Acquires the lock if it is free; returns `None` if it is held.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Lost`] if the lock was lost after the grant and before the future was polled again.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lock that it may have been granted is released in the background.
    pub fn try_acquire(&self) -> TryAcquireLock {
        TryAcquireLock::new(self.inner.clone())
    }

    /// Acquires the lock and runs `work` under it. `work` stops if the lock is lost.
    ///
    /// Once the lock is lost, the future of `work` is dropped without being polled again, and this function returns
    /// [`Error::Lost`]. Otherwise it returns the output of `work`. If the release fails afterwards, the output is
    /// still returned, and the error is logged. To set a time limit for one call, see [`AcquireLock::with`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let lock = Client::memory().lock("invoice:42").build()?;
    /// let name = lock.with(async |guard| guard.name().to_owned()).await?;
    /// assert_eq!(name, "invoice:42");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire), and [`Error::Lost`] if the lock is lost while `work` runs.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the lock in the background.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(&LockGuard) -> T) -> Result<T, Error> {
        self.acquire().with(work).await
    }

    /// Renews the lock once by its id, for example one that was [detached](LockGuard::detach).
    ///
    /// Returns `false` if the id no longer holds a lock.
    ///
    /// The lock is then valid for the [lease](LockBuilder::lease) of this handle. If it was valid for longer, it stays
    /// so. [`Locks::extend`] sets another lease.
    ///
    /// # Errors
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock may or may not be renewed.
    pub async fn extend(&self, id: &LockId) -> Result<bool, Error> {
        self.inner.locks.extend_by(*id, lease_in_millis(self.inner.terms), true).await
    }

    /// Releases the lock by its id, for example one that was [detached](LockGuard::detach).
    ///
    /// Returns `true` if it was held until now. It is the same as [`Locks::release`]: a lock id is unique, and the lock
    /// that it holds is released whatever its key.
    ///
    /// # Errors
    /// The same as for [`Locks::release`].
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the release continues in the background.
    pub async fn release(&self, id: &LockId) -> Result<bool, Error> {
        self.inner.locks.release(id).await
    }

    /// Returns who holds the lock, or `None` if it is free.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// let lock = leasehold::Client::memory().lock("invoice:42").label("cron").build()?;
    /// assert!(lock.lookup().await?.is_none());
    /// let id = lock.acquire().await?.detach().id;
    /// assert_eq!(lock.lookup().await?.and_then(|info| info.label).as_deref(), Some("cron"));
    /// assert!(lock.extend(&id).await?);
    /// assert!(lock.release(&id).await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`Locks::lookup`].
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup(&self) -> Result<Option<LockInfo>, Error> {
        self.inner.locks.lookup(self.name()).await
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// A builder for a [`Lock`]: see [`Client::lock`](crate::Client::lock).
#[must_use = "the builder does nothing until `build` is called"]
#[derive(Clone)]
pub struct LockBuilder {
    locks: Locks,
    key: String,
    lease: Duration,
    ttl: Option<Duration>,
    within: Option<Duration>,
    retry: Retry,
    on_release_error: Option<Hook>,
    label: Option<String>,
    observer: Option<Observer>,
    name_in_metrics: bool,
}

impl LockBuilder {
    pub(crate) fn new(locks: Locks, key: &str) -> Self {
        Self {
            observer: locks.observer.clone(),
            locks,
            key: key.to_owned(),
            lease: LEASE,
            ttl: None,
            within: None,
            retry: Retry::default(),
            on_release_error: None,
            label: None,
            name_in_metrics: false,
        }
    }

    /// Sets the lease: how long the holder may be silent before the lock passes on.
    ///
    /// The default is 30 s.
    ///
    /// The client renews the lease in the background, each time a third of it has passed, until the guard is released,
    /// dropped or detached. So the lease does not limit how long the work may take. It limits how long the lock outlives
    /// a holder that died.
    ///
    /// ```
    /// use leasehold::Client;
    /// use std::time::Duration;
    ///
    /// let lock = Client::memory().lock("invoice:42").lease(Duration::from_secs(10)).build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the longest time that the lock may be held.
    ///
    /// After that it is lost and free again. By default there is no TTL.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, LossReason};
    /// use std::time::Duration;
    ///
    /// let lock = Client::memory().lock("invoice:42").ttl(Duration::from_millis(20)).build()?;
    /// let guard = lock.acquire().await?;
    /// assert_eq!(guard.lost().await, LossReason::TtlEnded);
    /// assert!(lock.try_acquire().await?.is_some());
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

    /// Sets the delays after which an acquire asks again while another holder has the lock.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Sets a function that is called with the error if the release fails after the work of [`Lock::with`] is done: see
    /// [`compat`](crate::compat).
    pub(crate) fn release_hook(mut self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.on_release_error = Some(Arc::new(hook));
        self
    }

    /// Sets the label that a [lookup](Locks::lookup) shows beside the host and the process of the holder.
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

    /// Notifies this observer of the operations of this lock and its guards: see [`Event`](crate::Event).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, Observer};
    ///
    /// let observer = Observer::new(|event| println!("{:?}: {:?}", event.operation, event.outcome));
    /// let lock = Client::memory().lock("invoice:42").observer(observer).build()?;
    /// drop(lock.acquire().await?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn observer(mut self, observer: Observer) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Adds the label `name`, with the key as its value, to the [metrics](crate::metrics) of this
    /// lock.
    ///
    /// Without the label they are counted together with those of the client's other locks, because
    /// an exporter keeps every key forever.
    #[cfg(feature = "metrics")]
    pub fn name_in_metrics(mut self) -> Self {
        self.name_in_metrics = true;
        self
    }

    /// Builds the lock.
    ///
    /// Nothing is sent to the store yet.
    ///
    /// # Errors
    /// [`Error::Closed`] after [`Client::close`](crate::Client::close). [`Error::InvalidArgument`] in these cases:
    ///
    /// - The key or the label is empty, longer than 512 bytes (the key after NFC normalisation), or contains control
    ///   characters.
    /// - The key begins with `fence:` or `id:`.
    /// - In a Redis cluster, the key is too long together with the lock prefix, or contains braces that do not form a
    ///   hash tag, or is nothing but a hash tag.
    /// - A duration is zero. The lease is longer than 10¹³ ms (317 years), or not in whole milliseconds.
    /// - The multiplier of the [`Retry`] is below 1 or not finite.
    pub fn build(self) -> Result<Lock, Error> {
        self.locks.engine.core().check_open()?;
        self.retry.check()?;
        self.within.map(|limit| positive("within", limit)).transpose()?;
        let ttl = self.ttl.map(|ttl| positive("ttl", ttl)).transpose()?;
        let lease = Some(Span::from_millis(millis("lease", self.lease)?));
        // The label is stored in each record and shown to people, so the rules for names apply to it.
        let label = self.label.map(|label| Name::new("label", &label)).transpose()?;
        let key = key_of(&self.key, &self.locks.engine)?;
        let core = self.locks.engine.core();
        let inner = LockSpec {
            watch: Watch::new(
                core,
                Primitive::Lock,
                &key,
                self.name_in_metrics,
                self.observer.clone(),
            ),
            key,
            terms: Terms { lease, ttl },
            locks: Locks { observer: self.observer, ..self.locks.clone() },
            within: self.within,
            retry: self.retry,
            on_release_error: self.on_release_error,
            holder: process::holder(label.map(Name::into_text)),
            next_fence: AtomicU64::new(1),
        };
        Ok(Lock { inner: Arc::new(inner) })
    }
}

impl fmt::Debug for LockSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockSpec").field("name", &self.key).finish_non_exhaustive()
    }
}

impl fmt::Debug for LockBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockBuilder")
            .field("key", &self.key)
            .field("lease", &self.lease)
            .field("ttl", &self.ttl)
            .field("within", &self.within)
            .field("retry", &self.retry)
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

impl LockSpec {
    /// Reports that the work of a `with` is done and its lock could not be released.
    fn release_failed(&self, error: &Error) {
        if let Some(hook) = &self.on_release_error {
            hook(error);
        }
    }

    /// Returns the lease of a new lock id, which is not acquired yet.
    fn lease(self: &Arc<Self>, id: LockId) -> Result<Arc<LockLease>, Error> {
        let core = self.locks.engine.core();
        let lease = Driver::new(LockProtocol::new(self.clone(), id), core.clone());
        core.add_lease(&lease)?;
        Ok(lease)
    }

    async fn try_once(self: &Arc<Self>, id: LockId) -> Result<Option<LockGuard>, Error> {
        Ok(self.attempt_once(&self.lease(id)?).await?.ok())
    }

    /// Acquires the lock without a guard, if it is free.
    async fn try_detached(self: &Arc<Self>, id: LockId) -> Result<Option<HeldLock>, Error> {
        let lease = self.lease(id)?;
        match self.attempt_once(&lease).await {
            Ok(attempt) => Ok(attempt.ok().map(LockGuard::detach)),
            // A lease that is shorter than the round trip has ended by now.
            Err(Error::Lost { .. }) => Ok(Some(lease.protocol.held())),
            Err(error) => Err(error),
        }
    }

    async fn attempt_once(&self, lease: &Arc<LockLease>) -> Result<Result<LockGuard, Span>, Error> {
        let core = self.locks.engine.core();
        let waited_for = core.lock_waiters.any(&self.key);
        let notify = if waited_for { NotifyWhen::Always } else { NotifyWhen::Never };
        lease.attempt(notify, core.now() + core.settings.answer_timeout).await
    }

    /// Repeats the attempt when the lock is released, when the holder's lease ends, and after each delay of the retry
    /// policy. Without a limit it never gives up.
    async fn wait(
        self: &Arc<Self>,
        id: LockId,
        within: Option<Duration>,
    ) -> Result<LockGuard, Error> {
        let core = self.locks.engine.core();
        let started = core.now();
        let limit = within.unwrap_or(Duration::MAX);
        let give_up_at = within.map_or(Moment::NEVER, |limit| started + Span::from_duration(limit));
        let lease = self.lease(id)?;
        let mut waiter = core.lock_waiters.join(&self.key);
        let timed_out = |now: Moment| {
            let limit = limit.min(now.saturating_since(started));
            Error::TimedOut {
                primitive: Primitive::Lock,
                name: self.key.to_string(),
                limit,
                held: None,
                capacity: None,
                next_token: None,
            }
        };
        let (mut retried, mut again_at, mut last, mut until) = (0, None, false, give_up_at);
        loop {
            // The other waiters of this client need to be notified of the next release, too.
            let notify =
                if waiter.in_company() { NotifyWhen::Always } else { NotifyWhen::IfLocked };
            // Registered before the attempt, so that a release during the attempt is not missed.
            let woken = waiter.notify.notified();
            let attempt = lease.attempt(notify, until).await?;
            waiter.was_woken = false;
            let remaining = match attempt {
                Ok(guard) => return Ok(guard.waited_since(started)),
                Err(remaining) => remaining,
            };
            core.check_open()?;
            let now = core.now();
            if last || retried >= self.retry.most() {
                return Err(timed_out(now));
            }
            let again = *again_at
                .get_or_insert_with(|| now + Span::from_duration(self.retry.pause(retried)));
            // The record of an expired lock may stay in the store for a while. The shortest pause prevents a busy loop
            // until it is removed.
            let over = now + remaining.max(SHORTEST_PAUSE);
            let deadline = Deadline::new(core, again.min(over).min(give_up_at));
            let woken = deadline.unless(woken).await.is_some();
            waiter.was_woken = woken;
            if let Some(error) = core.stopped() {
                return Err(error);
            }
            let now = core.now();
            if now >= again {
                retried += 1;
                again_at = None;
            }
            last = now >= give_up_at;
            // If the lock was released just now, or its lease has just ended, make one last attempt.
            if last && !woken && now < over {
                return Err(timed_out(now));
            }
            until = core.next_attempt_until(give_up_at);
        }
    }
}
