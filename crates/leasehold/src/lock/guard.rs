//! The guard of a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::info::HeldLock;
use super::locks::{extended, released};
use super::observer::{LockOperation, report};
use super::{Definition, Locks};
use crate::backend::{Answer, Later, Part};
use crate::clock::{Moment, Span, wall_time};
use crate::engine::lease::{Keep, Lease};
use crate::engine::watch::{Acquiring, Id};
use crate::machine::Subject;
use crate::machine::lock::{LockCommand, Verdict};
use crate::name::{Name, millis};
use crate::permit::Lost;
use crate::{Error, Fence, LockId, LossReason};

/// A guard that holds a lock until it is released or dropped, or until the lease ends.
///
/// Dropping the guard releases the lock in the background. This never blocks and works on any thread. To wait until the
/// store has confirmed the release, call [`release`](Self::release).
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
/// guard.check()?; // is it still held?
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping the guard releases the lock"]
pub struct LockGuard {
    lease: Arc<Lease>,
    holding: Arc<Holding>,
    fence: Fence,
}

/// One held lock, and the requests to the store that concern it.
#[derive(Clone)]
pub(super) struct Holding {
    locks: Locks,
    key: Name,
    id: LockId,
    ttl: u64,
    expires_at: Arc<AtomicU64>,
    /// The moment by which the store must have expired the lock, whatever happened to our requests, in microseconds of
    /// [`Moment`].
    over_by: Arc<AtomicU64>,
    /// The end of the lease with which the lock was acquired, in microseconds of [`Moment`]; 0 once an extension was
    /// requested.
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
        let key = definition.key.clone();
        let slot = engine.core().slot(Subject::Lock(&key));
        let (keep, watch) = (holding.clone() as Arc<dyn Keep>, definition.watch.clone());
        let lease = Lease::new(engine, ("lock", slot), key, ttl, (keep, watch), valid);
        if definition.auto_extend {
            lease.renew();
        }
        Self { lease, holding, fence }
    }

    /// Reports the acquire, and observes the lock until it ends.
    pub(super) fn watch(&self, watched: Acquiring) {
        self.lease.watch(watched.acquired(Some(self.fence), || {}));
    }

    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.lease.name().as_str()
    }

    /// Returns the lock id, which names this holder in the store.
    #[must_use]
    pub fn id(&self) -> LockId {
        self.holding.id
    }

    /// Returns the fence of this holder. It is larger than the fence of every earlier holder of this key.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Returns when the lock expires unless it is extended, by the clock of the store.
    #[must_use]
    pub fn expires_at(&self) -> SystemTime {
        wall_time(self.holding.expires_at.load(Ordering::Acquire))
    }

    /// Returns the instant until which the lock is valid without another extension. A margin is subtracted, because
    /// clocks do not run at the same speed. Every extension moves the instant.
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
        Instant::now() + self.lease.valid_until().saturating_since(self.lease.now())
    }

    /// Checks that the lock is still held.
    ///
    /// The result describes the past: the thread may be paused right after the check, for longer than the lease. Where
    /// that matters, let the resource compare the [fence](Self::fence).
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock is no longer held.
    pub fn check(&self) -> Result<(), Error> {
        self.lease.check()
    }

    /// Returns a future that resolves when the lock is lost, with the reason: the lease ended, the lock could not be
    /// extended in time, the store no longer knows the lock, or the client was closed. If the guard is released,
    /// dropped or detached, the future resolves with [`LossReason::Released`].
    ///
    /// # Cancel safety
    /// Dropping the future only stops listening. The lock is not affected.
    pub fn lost(&self) -> Lost {
        Lost::of_lease(self.lease.clone())
    }

    /// Starts to renew the lock in the background, each time a third of its lease has passed: see
    /// [`LockBuilder::auto_extend`](super::LockBuilder::auto_extend).
    pub fn auto_extend(&self) {
        self.lease.renew();
    }

    /// Lets the lock expire after `ttl` from now, whatever was left of its lease. A lock that is renewed in the
    /// background continues to be renewed by the lease that it was built with, once less than that lease is left. A
    /// renewal never makes the lock expire earlier.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if `ttl` is zero, too long or not in whole milliseconds, or if another program uses
    ///   the lock's keys on Redis.
    /// - [`Error::Lost`] if the lock is no longer held.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Refused`] if the store denies the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After `Unavailable`, the store may or may not have extended the lock. The guard then relies on the earlier of
    /// the old and the new end.
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may or may not have extended the lock. The guard then relies on the earlier
    /// of the old and the new end.
    pub async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let ttl = millis("ttl", ttl)?;
        self.lease.check()?;
        let about = (&self.holding.key, self.holding.id);
        let core = self.holding.locks.engine.core();
        let until = core.now() + core.settings.answer_timeout;
        let _turn = core.until(until, self.lease.turn()).await?;
        self.holding.asked_for(ttl);
        self.lease.about_to_extend(core.now(), Span::from_millis(ttl));
        let asked = core.now();
        let extended = self.holding.locks.extend_to(about, ttl).await;
        self.lease.report_renewal(&extended, asked);
        let (verdict, sent) = extended?;
        let Verdict::Done(expires_at) = verdict else {
            self.lease.lose(LossReason::Missing);
            return Err(self.lost_error(LossReason::Missing));
        };
        self.lease.extend(sent, Span::from_millis(ttl));
        self.holding.expires_at.store(expires_at, Ordering::Release);
        // A loss that was reported meanwhile is final, even if the store has extended the lock.
        self.lease.check()
    }

    /// Releases the lock and waits until the store has confirmed it. Returns `true` if the lock was held until now,
    /// `false` if it had been lost.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Refused`] if the store denies the request.
    /// - [`Error::InvalidArgument`] if another program uses the lock's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After every error except `Stopped`, the client sends the release once more in the background, and repeats it
    /// while it is not answered. The lock expires with its lease at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped, even before its first poll, the release continues in the background.
    pub async fn release(self) -> Result<bool, Error> {
        self.lease.clone().release().await
    }

    /// Drops the guard but keeps the lock, until its lease ends or until it is [released](crate::Locks::release) by its
    /// id. The client no longer extends the lock in the background; [`Locks::extend`](crate::Locks::extend) extends it
    /// by its id.
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

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
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
    fn id(&self) -> Id {
        Id::Lock(self.id)
    }

    fn renew(&self, until: Moment) -> Later<Option<(Span, Moment)>> {
        let core = self.locks.engine.core();
        self.asked_for(self.ttl);
        let (id, key, ttl) = (self.id, Some(self.key.clone()), self.ttl);
        let command = LockCommand::Extend { id, key, ttl, only_longer: true };
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

    /// Records that the client is about to ask the store to let the lock last `ttl` milliseconds. The store may apply
    /// the request until the client gives up on it, and the lock may last `ttl` from then on.
    fn asked_for(&self, ttl: u64) {
        let core = self.locks.engine.core();
        let over_by = core.now() + core.settings.answer_timeout + Span::from_millis(ttl);
        self.over_by.fetch_max(over_by.micros(), Ordering::AcqRel);
        self.held_until.store(0, Ordering::Release);
    }

    fn release_command(&self) -> Part {
        let held =
            self.locks.engine.core().now().micros() < self.held_until.load(Ordering::Acquire);
        Part::Lock(LockCommand::Release { id: self.id, key: Some(self.key.clone()), held })
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

#[cfg(test)]
mod tests {
    use crate::Client;

    /// A renewed lock has a timer of the engine, and a released one has none.
    #[tokio::test]
    async fn the_renewals_of_a_released_lock_end_at_once() {
        let client = Client::memory();
        for number in 0..4 {
            let lock = client.lock("k").auto_extend().build().unwrap();
            let guard = lock.acquire().await.unwrap();
            let lease = guard.lease.clone();
            assert!(lease.has_timer());
            if number % 2 == 0 {
                guard.release().await.unwrap();
            } else {
                drop(guard);
            }
            assert!(!lease.has_timer());
        }
    }
}
