//! The guard of a lock.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::info::HeldLock;
use super::lease::{LockLease, LockProtocol};
use super::locks::observed;
use crate::clock::{Moment, Span, wall_time};
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::watch::{Acquiring, Id};
use crate::guard::{Declared, LeaseGuard};
use crate::machine::lock::{LockCommand, LockOutcome, Verdict};
use crate::name::millis;
use crate::permit::Lost;
use crate::{Error, Fence, LockId, LossReason};

/// A guard that holds a lock until it is released or dropped.
///
/// The client renews the lock in the background.
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
    lease: LeaseGuard<LockProtocol>,
    fence: Fence,
}

impl LockGuard {
    pub(super) fn new(lease: LeaseGuard<LockProtocol>, fence: Fence) -> Self {
        Self { lease, fence }
    }

    /// Reports the acquire, and observes the lock until it ends.
    pub(super) fn watch(&self, watched: Acquiring) {
        self.lease.ticket.watch(watched.acquired(Some(self.fence), || {}));
    }

    pub(super) fn waited_since(mut self, started: Moment) -> Self {
        self.lease.set_waited_since(started);
        self
    }

    fn driver(&self) -> &LockLease {
        &self.lease.driver
    }

    /// Returns the key of the lock.
    #[must_use]
    pub fn name(&self) -> &str {
        self.driver().name().as_str()
    }

    /// Returns the lock id, which names this holder in the store.
    #[must_use]
    pub fn id(&self) -> LockId {
        self.driver().protocol.id
    }

    /// Returns the fence of this holder.
    ///
    /// It is larger than the fence of every earlier holder of this key.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Returns how long the acquire waited.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.lease.waited()
    }

    /// Returns when the lock expires unless it is extended, by the clock of the store.
    #[must_use]
    pub fn expires_at(&self) -> SystemTime {
        wall_time(self.driver().protocol.expires_at())
    }

    /// Returns the instant until which the lock is valid without another renewal.
    ///
    /// It is never `None`.
    ///
    /// A margin is subtracted, because clocks do not run at the same speed. Every renewal and every extension moves the
    /// instant, up to the TTL.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    /// use std::time::{Duration, Instant};
    ///
    /// let lock = Client::memory().lock("invoice:42").lease(Duration::from_secs(10)).build()?;
    /// let guard = lock.acquire().await?;
    /// assert!(guard.valid_until() > Some(Instant::now() + Duration::from_secs(9)));
    /// guard.extend(Duration::from_secs(60)).await?;
    /// assert!(guard.valid_until() > Some(Instant::now() + Duration::from_secs(59)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn valid_until(&self) -> Option<Instant> {
        Some(self.lease.valid_until())
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

    /// Returns a future that resolves when the lock is lost, with the reason.
    ///
    /// If the guard is released, dropped or detached, the future resolves with
    /// [`LossReason::Released`].
    ///
    /// # Cancel safety
    /// Dropping the future only stops listening. The lock is not affected.
    pub fn lost(&self) -> Lost {
        self.lease.lost()
    }

    /// Lets the lock expire after `lease` from now, whatever was left of its lease.
    ///
    /// Once less is left than the lease that the lock was built with, the client renews it again. A renewal never makes
    /// the lock expire earlier. An extension does not change when its [TTL](super::LockBuilder::ttl) ends.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if `lease` is zero, too long or not in whole milliseconds.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Lost`] if the lock is no longer held.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After `Unavailable`, the store may or may not have extended the lock. The guard then relies on the earlier of
    /// the old and the new end.
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may or may not have extended the lock. The guard then relies on the earlier
    /// of the old and the new end.
    pub async fn extend(&self, lease: Duration) -> Result<(), Error> {
        let ttl = millis("lease", lease)?;
        self.check()?;
        let (driver, id) = (self.driver(), self.id());
        let started = driver.now();
        let (ticket, span) = (self.lease.ticket.id, Span::from_millis(ttl));
        let extension = Extension { guard: self, granted: Cell::new(None) };
        driver.protocol.extension_sent();
        driver.input(|core, now| core.extending(ticket, span, now));
        let key = Some(driver.name().clone());
        let command = LockCommand::Extend { id, key, ttl, only_longer: false };
        let answered = driver.protocol.spec.locks.call(command).await;
        let outcome = || observed(answered.as_ref().map(|(outcome, _)| outcome));
        driver.watch().renewed(|| Id::Lock(id), outcome, started);
        let (LockOutcome::Extend(Verdict::Done(expires_at)), sent) = answered? else {
            driver.input(|core, now| core.lose(ticket, LossReason::Missing, now));
            return Err(self.lease.ticket.lost(LossReason::Missing));
        };
        driver.protocol.extended(expires_at);
        extension.granted.set(Some((span, sent)));
        drop(extension);
        // A loss that was reported meanwhile is final, even if the store has extended the lock.
        self.check()
    }

    /// Releases the lock and waits until the store has confirmed it.
    ///
    /// Returns `true` if the lock was held until now, `false` if it had been lost.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After every error except `Stopped`, the client sends the release once more in the background, and repeats it
    /// while it is not answered. The lock expires with its lease at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped, even before its first poll, the release continues in the background.
    pub async fn release(self) -> Result<bool, Error> {
        self.lease.release().done().await
    }

    /// Drops the guard but keeps the lock.
    ///
    /// The client no longer renews it or ends it with its TTL: it expires with its lease.
    ///
    /// [`Lock::extend`](crate::Lock::extend) and [`Lock::release`](crate::Lock::release) renew and release it by its
    /// id.
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
        self.driver().forget(self.lease.ticket.id);
        self.driver().protocol.held()
    }
}

impl Declared for LockGuard {
    fn spec(&self) -> Option<Arc<dyn LeaseSpec>> {
        Some(self.lease.ticket.spec.clone())
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("name", &self.name())
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}

/// An extension that was requested. When it is dropped, the client relies on what was granted, and renews again.
struct Extension<'a> {
    guard: &'a LockGuard,
    granted: Cell<Option<(Span, Moment)>>,
}

impl Drop for Extension<'_> {
    fn drop(&mut self) {
        let (id, granted) = (self.guard.lease.ticket.id, self.granted.get());
        self.guard.driver().input(|core, now| core.extended(id, granted, now));
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
            let lock = client.lock("k").build().unwrap();
            let guard = lock.acquire().await.unwrap();
            let lease = guard.lease.driver.clone();
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
