//! The guard of a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::info::{HeldLock, time};
use super::locks::{extended, released};
use super::observer::{LockOperation, report};
use super::{Definition, Locks};
use crate::backend::{Answer, Later, Part};
use crate::clock::{Moment, Span};
use crate::engine::lease::{Keep, Lease};
use crate::machine::lock::{LockCommand, Verdict};
use crate::name::{Name, millis};
use crate::permit::Lost;
use crate::{Error, Fence, LockId, LossReason};

/// A lock that is held until this guard is released or dropped, or its lease ends.
///
/// Dropping it gives the lock back in the background, without blocking, from any thread. To know that it has been given
/// back, [`release`](Self::release) it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
/// use std::time::Duration;
///
/// let lock = Client::memory().lock("invoice:42").lease(Duration::from_secs(10)).build()?;
/// let guard = lock.acquire().await?;
/// guard.extend(Duration::from_secs(60)).await?; // this may take a minute
/// guard.check()?; // still ours?
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a lock is given back when it is dropped"]
pub struct LockGuard {
    lease: Arc<Lease>,
    holding: Arc<Holding>,
    fence: Fence,
}

/// What the store is asked about one lock.
#[derive(Clone)]
pub(super) struct Holding {
    locks: Locks,
    key: Name,
    id: LockId,
    ttl: u64,
    expires_at: Arc<AtomicU64>,
    /// By when the store must have expired it, whatever became of our requests: in microseconds of [`Moment`].
    over_by: Arc<AtomicU64>,
    /// Until when it is held as it was acquired, in microseconds of [`Moment`]; 0 once an extension was asked for.
    held_until: Arc<AtomicU64>,
}

impl LockGuard {
    pub(super) fn new(
        definition: &Definition,
        holding: Arc<Holding>,
        fence: Fence,
        expires_at: u64,
        valid: (Moment, Span),
    ) -> Self {
        holding.expires_at.store(expires_at, Ordering::Release);
        holding.held_until.store((valid.0 + valid.1).micros(), Ordering::Release);
        let (engine, ttl) = (&definition.locks.engine, Span::from_millis(definition.ttl));
        let (key, id) = (definition.key.clone(), holding.id.to_string());
        let lease = Lease::new(engine, "lock", key, id, ttl, holding.clone(), valid);
        if definition.auto_extend {
            lease.keep(true);
        }
        Self { lease, holding, fence }
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &str {
        self.lease.name().as_str()
    }

    /// What names this holding of the lock in the store.
    #[must_use]
    pub fn id(&self) -> LockId {
        self.holding.id
    }

    /// Larger than the fence of every holder of this key before.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// When the lock ends unless it is extended, by the clock of the store.
    #[must_use]
    pub fn expires_at(&self) -> SystemTime {
        time(self.holding.expires_at.load(Ordering::Acquire))
    }

    /// Until when the lock is yours without another extension, less a margin for clocks that do not run alike. It moves
    /// on with every extension.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    /// use std::time::{Duration, Instant};
    ///
    /// let lock = Client::memory().lock("invoice:42").lease(Duration::from_secs(10)).build()?;
    /// let guard = lock.acquire().await?;
    /// assert!(guard.valid_until() > Instant::now() + Duration::from_secs(9));
    /// guard.extend(Duration::from_secs(60)).await?;
    /// assert!(guard.valid_until() > Instant::now() + Duration::from_secs(59));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        Instant::now() + self.lease.valid_until().saturating_since(Moment::now())
    }

    /// Whether the lock is still yours.
    ///
    /// More than "it was, a moment ago" cannot be promised to a thread that may be stopped between two instructions.
    /// Where that matters, let the resource check the [fence](Self::fence).
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        self.lease.check()
    }

    /// Resolves when the lock is lost: its TTL ended, it could not be extended, or it was released by its id. After the
    /// guard was released, dropped or detached it resolves, too, with [`LossReason::Released`].
    ///
    /// # Cancel safety
    /// Only listens.
    pub fn lost(&self) -> Lost {
        Lost::of_lease(self.lease.clone())
    }

    /// From now on the lock is extended by itself, at a third of its TTL: see
    /// [`LockBuilder::auto_extend`](super::LockBuilder::auto_extend).
    pub fn auto_extend(&self) {
        self.lease.keep(true);
    }

    /// Lets the lock end so long from now, whatever was left of its TTL. A lock that extends itself goes on doing so, by
    /// the TTL that it was declared with.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a TTL that cannot be, [`Error::Lost`] if the lock is gone, and what the store has
    /// to say: then the lock ends when it would have.
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may or may not have extended the lock, and the guard does not count on it.
    pub async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let ttl = millis("ttl", ttl)?;
        self.lease.check()?;
        let about = (Some(&self.holding.key), self.holding.id);
        let core = self.holding.locks.engine.core();
        let until = Moment::now() + core.settings.answer_timeout;
        let _turn = core.until(until, self.lease.turn()).await?;
        self.holding.asked_for(ttl);
        self.lease.about_to_extend(Moment::now(), Span::from_millis(ttl));
        let (verdict, sent) = self.holding.locks.extend_to(about, ttl).await?;
        let Verdict::Done(expires_at) = verdict else {
            self.lease.lose(LossReason::Gone);
            return Err(self.lost_error(LossReason::Gone));
        };
        self.lease.extend(sent, Span::from_millis(ttl));
        self.holding.expires_at.store(expires_at, Ordering::Release);
        // Whoever was told meanwhile that the lock is gone is not told otherwise any more.
        self.lease.check()
    }

    /// Gives the lock back and waits until it has been. True if it was held until now, false if it had been lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not answer in time: then the release goes on in the background, and the lock
    /// ends by itself with its TTL. [`Error::Refused`] if the store does not allow it.
    ///
    /// # Cancel safety
    /// The release goes on if the future is dropped, even before it was first polled.
    pub async fn release(self) -> Result<bool, Error> {
        self.lease.clone().release().await
    }

    /// Gives up the guard and keeps the lock, until its TTL ends or somebody
    /// [releases](crate::Locks::release) it by its id. Nobody extends it any more but by its id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::memory();
    /// let held = client.lock("invoice:42").build()?.acquire().await?.detach();
    /// assert!(client.locks().is_locked("invoice:42").await?);
    /// assert!(client.locks().release(&held.id).await?);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "without its id the lock cannot be released"]
    pub fn detach(self) -> HeldLock {
        self.lease.detach();
        HeldLock { id: self.id(), fence: self.fence, expires_at: self.expires_at() }
    }

    pub(super) fn lost_error(&self, reason: LossReason) -> Error {
        self.lease.lost_error(reason)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        self.lease.release_later();
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key", &self.key())
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}

impl Keep for Holding {
    fn renew(&self, until: Moment) -> Later<Option<(Span, Moment)>> {
        let core = self.locks.engine.core();
        self.asked_for(self.ttl);
        let command = LockCommand::Extend { id: self.id, ttl: self.ttl };
        let asked = core.ask(Part::Lock(command), until, None);
        let holding = self.clone();
        Box::pin(async move {
            let (answer, sent) = match asked.await {
                Ok((answer, sent)) => (extended(answer), sent),
                Err(error) => (Err(error), until),
            };
            holding.report(LockOperation::Extend, &answer);
            Ok(match answer? {
                Verdict::Done(expires_at) => {
                    holding.expires_at.store(expires_at, Ordering::Release);
                    Some((Span::from_millis(holding.ttl), sent))
                }
                _ => None,
            })
        })
    }

    fn release(&self) -> Later<bool> {
        let asked = self.locks.engine.core().ask_now(self.release_command());
        let holding = self.clone();
        Box::pin(async move {
            let answer = asked.await.map(|(answer, _)| answer);
            holding.report_release(answer)
        })
    }

    fn release_later(&self) {
        let core = self.locks.engine.core();
        let until = Moment::from_micros(self.over_by.load(Ordering::Acquire));
        let holding = self.clone();
        let done = Box::new(move |answer| drop(holding.report_release(answer)));
        core.ask_in_background(self.release_command(), until, done);
    }
}

impl Holding {
    pub(super) fn new(definition: &Definition, id: LockId) -> Self {
        let (locks, key, ttl) = (definition.locks.clone(), definition.key.clone(), definition.ttl);
        let (expires_at, over_by, held_until) = Default::default();
        let holding = Self { locks, key, id, ttl, expires_at, over_by, held_until };
        holding.asked_for(ttl);
        holding
    }

    /// The store is about to be asked to let it last so many milliseconds. The request may be applied until it is given
    /// up, and the lock lasts that long after that.
    fn asked_for(&self, ttl: u64) {
        let patience = self.locks.engine.core().settings.answer_timeout;
        let over_by = Moment::now() + patience + Span::from_millis(ttl);
        self.over_by.fetch_max(over_by.micros(), Ordering::AcqRel);
        self.held_until.store(0, Ordering::Release);
    }

    fn release_command(&self) -> Part {
        let is_held = Moment::now().micros() < self.held_until.load(Ordering::Acquire);
        Part::Lock(LockCommand::Release { id: self.id, held: is_held.then(|| self.key.clone()) })
    }

    fn report_release(&self, answer: Result<Answer, Error>) -> Result<bool, Error> {
        let answer = answer.and_then(released);
        self.report(LockOperation::Release, &answer);
        Ok(matches!(answer?, Verdict::Done(())))
    }

    fn report<T>(&self, operation: LockOperation, answer: &Result<Verdict<T>, Error>) {
        let about = (Some(self.key.as_str()), Some(self.id));
        report(self.locks.observer.as_ref(), operation, answer, about);
    }
}
