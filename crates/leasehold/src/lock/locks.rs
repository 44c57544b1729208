//! All locks of a store, by key and by lock id: single attempts, each one round trip.

use std::sync::Arc;
use std::time::Duration;

use super::info::{HeldLock, LockInfo, RawLockInfo, raw, time};
use super::observer::{LockOperation, Observer, report};
use super::{LockBuilder, LockGuard};
use crate::backend::{Answer, Part, Profile};
use crate::clock::Moment;
use crate::engine::Engine;
use crate::machine::lock::{Acquired, By, LockCommand, LockOutcome, NotifyWhen, Record, Verdict};
use crate::name::{Name, millis};
use crate::{Error, LockId, process};

/// The locks of a client, without guards: who calls these has a loop of his own, and keeps the lock id.
///
/// Each call is a single attempt and one round trip. For a guard that ends by itself, see
/// [`Client::lock`](crate::Client::lock).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
/// use std::time::Duration;
///
/// let locks = Client::memory().locks();
/// let held = locks.acquire("invoice:42", Duration::from_secs(30)).await?.expect("it was free");
/// assert!(locks.acquire("invoice:42", Duration::from_secs(30)).await?.is_none());
/// assert!(locks.is_locked("invoice:42").await?);
/// assert!(locks.extend(&held.id, Duration::from_secs(60)).await?);
/// assert!(locks.release(&held.id).await?);
/// assert!(!locks.owns(&held.id).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Locks {
    pub(super) engine: Arc<Engine>,
    pub(super) observer: Option<Observer>,
    clean_up: bool,
}

/// What a store can do, known when the program runs. That every lock has a fence is known when it is compiled:
/// [`LockGuard::fence`](crate::LockGuard::fence) is not optional.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// Where the locks are kept: `memory`, `local` or `redis`.
    pub backend: &'static str,
    /// Whether locks have fences. Ours always have.
    pub supports_fencing: bool,
    /// Whose clock decides.
    pub time_authority: TimeAuthority,
}

/// Whose clock decides when a lock ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum TimeAuthority {
    /// The server's, for all clients.
    Server,
    /// The host's, for all of its processes.
    Host,
    /// This process's: there is no other.
    Process,
}

impl Locks {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, observer: None, clean_up: false }
    }

    /// The same locks, with somebody told of every operation.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, LockReason, LockResult, Observer};
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use std::sync::Arc;
    ///
    /// let contended = Arc::new(AtomicU32::new(0));
    /// let counter = contended.clone();
    /// let locks = Client::memory().locks().observed(Observer::new(move |event| {
    ///     if event.result == LockResult::Fail(LockReason::Locked) {
    ///         counter.fetch_add(1, Ordering::Relaxed);
    ///     }
    /// }));
    /// let guard = locks.lock("invoice:42").build()?.try_acquire().await?;
    /// assert!(locks.lock("invoice:42").build()?.try_acquire().await?.is_none());
    /// assert_eq!(contended.load(Ordering::Relaxed), 1);
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn observed(self, observer: Observer) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Whether [`is_locked`](Self::is_locked) may remove a lock that has been over for two seconds. Off by default:
    /// then it only reads. A fence is never removed.
    #[must_use]
    pub fn cleanup_in_is_locked(self, clean_up: bool) -> Self {
        Self { clean_up, ..self }
    }

    /// Declares a lock with guards.
    pub fn lock(&self, key: &str) -> LockBuilder {
        LockBuilder::new(self.clone(), key)
    }

    /// What the store of these locks can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        let Profile { kind, time_authority, .. } = self.engine.core().profile();
        Capabilities { backend: kind, supports_fencing: true, time_authority }
    }

    /// The lock if it is free; `None` if somebody has it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a key or TTL that cannot be, [`Error::Closed`] when the client is closed, and what
    /// the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it may have been granted.
    pub async fn acquire(&self, key: &str, ttl: Duration) -> Result<Option<HeldLock>, Error> {
        Ok(self.lock(key).ttl(ttl).build()?.try_acquire().await?.map(LockGuard::detach))
    }

    /// The same with a lock id that the caller has: acquiring again what that id holds answers the same lock.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// The caller has the id, and can release it.
    pub async fn acquire_as(
        &self,
        id: &LockId,
        key: &str,
        ttl: Duration,
    ) -> Result<Option<HeldLock>, Error> {
        let (key, id, ttl) = (key_of(key)?, *id, millis("ttl", ttl)?);
        self.engine.core().check_open()?;
        let notify = NotifyWhen::Never;
        let holder = process::holder(None);
        // The caller may ask again and again while the lock is held.
        let expected = None;
        let command = LockCommand::Acquire { key: key.clone(), id, ttl, notify, holder, expected };
        let about = (Some(&key), Some(id));
        let acquired = self.ask(LockOperation::Acquire, about, command, acquired).await?.0;
        Ok(match acquired {
            Acquired::Held { fence, expires_at, .. } => {
                Some(HeldLock { id, fence, expires_at: time(expires_at) })
            }
            Acquired::Locked { .. } => None,
        })
    }

    /// Releases a lock by its id. True if it was held until now.
    ///
    /// A guard of that lock is not told: it learns of it when it next asks the store, which one with
    /// [`auto_extend`](LockBuilder::auto_extend) does at a third of its TTL. Until then its `check` goes by the TTL.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// The release goes on if the future is dropped after it was first polled.
    pub async fn release(&self, id: &LockId) -> Result<bool, Error> {
        let part = Part::Lock(LockCommand::Release { id: *id, held: None });
        let answer = self.engine.core().ask_to_the_end(part).await.and_then(released);
        report(self.observer.as_ref(), LockOperation::Release, &answer, (None, Some(*id)));
        Ok(matches!(answer?, Verdict::Done(())))
    }

    /// Lets a lock that is held end so long from now, whatever was left of its TTL. False if it is not held any more.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a TTL that cannot be, and what the store has to say.
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may or may not have extended the lock.
    pub async fn extend(&self, id: &LockId, ttl: Duration) -> Result<bool, Error> {
        let (verdict, _) = self.extend_to((None, *id), millis("ttl", ttl)?).await?;
        Ok(matches!(verdict, Verdict::Done(_)))
    }

    /// With the moment when the request that was answered was sent.
    pub(super) async fn extend_to(
        &self,
        (key, id): (Option<&Name>, LockId),
        ttl: u64,
    ) -> Result<(Verdict<u64>, Moment), Error> {
        let command = LockCommand::Extend { id, ttl };
        self.ask(LockOperation::Extend, (key, Some(id)), command, extended).await
    }

    /// Whether somebody has the lock.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a key that cannot be, and what the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn is_locked(&self, key: &str) -> Result<bool, Error> {
        let key = key_of(key)?;
        let command = LockCommand::IsLocked { key: key.clone(), clean_up: self.clean_up };
        let about = (Some(&key), None);
        Ok(self.ask(LockOperation::IsLocked, about, command, is_locked).await?.0)
    }

    /// What is known of the lock with this key, if somebody has it.
    ///
    /// # Errors
    /// As for [`is_locked`](Self::is_locked).
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn lookup(&self, key: &str) -> Result<Option<LockInfo>, Error> {
        Ok(self.lookup_raw(key).await?.map(|raw| raw.info))
    }

    /// What is known of the lock with this lock id, if it is held.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn lookup_id(&self, id: &LockId) -> Result<Option<LockInfo>, Error> {
        Ok(self.lookup_id_raw(id).await?.map(|raw| raw.info))
    }

    /// As [`lookup`](Self::lookup), with the key and the lock id.
    ///
    /// # Errors
    /// As for [`is_locked`](Self::is_locked).
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn lookup_raw(&self, key: &str) -> Result<Option<RawLockInfo>, Error> {
        let key = key_of(key)?;
        self.find((Some(&key), None), By::Key(key.clone())).await
    }

    /// As [`lookup_id`](Self::lookup_id), with the key and the lock id.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn lookup_id_raw(&self, id: &LockId) -> Result<Option<RawLockInfo>, Error> {
        self.find((None, Some(*id)), By::Id(*id)).await
    }

    /// The locks that are held, by key; no more than the limit. On Redis this looks at all keys, step by step.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn list_raw(&self, limit: usize) -> Result<Vec<RawLockInfo>, Error> {
        let records = self.engine.core().list_locks(limit).await?;
        Ok(records.iter().map(raw).collect())
    }

    /// Whether this lock id holds its lock.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn owns(&self, id: &LockId) -> Result<bool, Error> {
        Ok(self.lookup_id_raw(id).await?.is_some())
    }

    async fn find(
        &self,
        about: (Option<&Name>, Option<LockId>),
        by: By,
    ) -> Result<Option<RawLockInfo>, Error> {
        let (found, _) =
            self.ask(LockOperation::Lookup, about, LockCommand::Lookup(by), found).await?;
        Ok(found.as_ref().map(raw))
    }

    /// Asks once, and tells the observer. With the moment when the request that was answered was sent.
    async fn ask<T: super::observer::Telling>(
        &self,
        operation: LockOperation,
        (key, id): (Option<&Name>, Option<LockId>),
        command: LockCommand,
        read: impl Fn(Answer) -> Result<T, Error>,
    ) -> Result<(T, Moment), Error> {
        let answer = self.engine.core().ask_now(Part::Lock(command)).await;
        let (answer, sent) = match answer {
            Ok((answer, sent)) => (read(answer), sent),
            Err(error) => (Err(error), Moment::now()),
        };
        report(self.observer.as_ref(), operation, &answer, (key.map(Name::as_str), id));
        Ok((answer?, sent))
    }
}

fn unexpected(answer: &Answer) -> Error {
    Error::internal(format!("the store answered {answer:?} to another command"))
}

pub(super) fn acquired(answer: Answer) -> Result<Acquired, Error> {
    match answer {
        Answer::Lock(LockOutcome::Acquire(acquired)) => Ok(acquired),
        other => Err(unexpected(&other)),
    }
}

pub(super) fn released(answer: Answer) -> Result<Verdict<()>, Error> {
    match answer {
        Answer::Lock(LockOutcome::Release(verdict)) => Ok(verdict.map(drop)),
        other => Err(unexpected(&other)),
    }
}

pub(super) fn extended(answer: Answer) -> Result<Verdict<u64>, Error> {
    match answer {
        Answer::Lock(LockOutcome::Extend(verdict)) => Ok(verdict),
        other => Err(unexpected(&other)),
    }
}

fn is_locked(answer: Answer) -> Result<bool, Error> {
    match answer {
        Answer::Lock(LockOutcome::IsLocked(locked)) => Ok(locked),
        other => Err(unexpected(&other)),
    }
}

fn found(answer: Answer) -> Result<Option<Record>, Error> {
    match answer {
        Answer::Lock(LockOutcome::Lookup(found)) => Ok(found),
        other => Err(unexpected(&other)),
    }
}

/// A key that does not collide with what is kept beside the locks.
pub(super) fn key_of(text: &str) -> Result<Name, Error> {
    let key = Name::normalised("key", text)?;
    if let Some(taken) = ["fence:", "id:"].into_iter().find(|taken| key.as_str().starts_with(taken))
    {
        let problem = format!("{text:?} begins with {taken:?}, where other things are kept");
        return Err(Error::invalid("key", problem + ": choose another beginning"));
    }
    Ok(key)
}

impl std::fmt::Debug for Locks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Locks").field("observer", &self.observer).finish_non_exhaustive()
    }
}
