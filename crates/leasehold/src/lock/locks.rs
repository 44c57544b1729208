//! The locks of a store, by key and by lock id. Each operation is a single attempt.

use std::sync::Arc;
use std::time::Duration;

use super::info::{HeldLock, LockInfo, RawLockInfo, raw};
use super::{LockBuilder, LockGuard};
use crate::backend::{Answer, Part, Profile, TimeAuthority};
use crate::clock::{Moment, wall_time};
use crate::engine::Engine;
use crate::engine::watch::lock_called;
use crate::machine::Subject;
use crate::machine::lock::{
    Acquired, LockCommand, LockOutcome, LockRef, NotifyWhen, Record, Verdict,
};
use crate::name::{Name, millis};
use crate::{Error, LockId, LossReason, Observer, Operation, Outcome, process};

/// The locks of a store, by key and by lock id, without guards. This API is for callers that have a loop of their own
/// and keep the lock id.
///
/// Each call is a single attempt and one round trip. (In a Redis cluster, a call by lock id looks up the key first.)
/// For a guard that releases the lock when dropped, see [`Client::lock`](crate::Client::lock).
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
#[derive(Clone, Debug)]
pub struct Locks {
    pub(super) engine: Arc<Engine>,
    pub(super) observer: Option<Observer>,
    clean_up: bool,
}

/// What a store can do, for code that checks this at run time. That every lock has a fence is known at compile time:
/// [`LockGuard::fence`](crate::LockGuard::fence) is not optional.
///
/// ```
/// use leasehold::{Client, TimeAuthority};
///
/// let store = Client::memory().locks().capabilities();
/// assert_eq!((store.backend, store.time_authority), ("memory", TimeAuthority::Process));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// The kind of store: `memory`, `local` or `redis`.
    pub backend: &'static str,
    /// Whether locks have fences. In this library they always have.
    pub supports_fencing: bool,
    /// The clock that decides when a lock expires.
    pub time_authority: TimeAuthority,
}

impl Locks {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, observer: None, clean_up: false }
    }

    /// Returns a handle that notifies an observer of every call by key and by lock id.
    ///
    /// The locks that are built from the handle have the same observer, unless
    /// [`LockBuilder::observer`] sets another.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, Observer, Outcome};
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use std::sync::Arc;
    ///
    /// let contended = Arc::new(AtomicU32::new(0));
    /// let counter = contended.clone();
    /// let locks = Client::memory().locks().observer(Observer::new(move |event| {
    ///     if matches!(event.outcome, Outcome::Full) {
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
    pub fn observer(self, observer: Observer) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Sets whether [`is_locked`](Self::is_locked) may remove a lock that expired at least two seconds ago. Off by
    /// default: then `is_locked` only reads. A fence is never removed.
    #[must_use]
    pub fn cleanup_in_is_locked(self, clean_up: bool) -> Self {
        Self { clean_up, ..self }
    }

    /// Returns a builder for the lock with this key, whose holders have guards.
    pub fn lock(&self, key: &str) -> LockBuilder {
        LockBuilder::new(self.clone(), key)
    }

    /// Returns what the store of these locks can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        let Profile { kind, time_authority, .. } = self.engine.core().profile();
        Capabilities { backend: kind, supports_fencing: true, time_authority }
    }

    /// Acquires the lock if it is free; returns `None` if it is held. There is no guard: the lock expires after `ttl`
    /// unless you extend or release it by its id.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the key or the TTL is invalid: see [`LockBuilder::build`].
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lock that it may have been granted is released in the background.
    pub async fn acquire(&self, key: &str, ttl: Duration) -> Result<Option<HeldLock>, Error> {
        // The builder would call it lease.
        millis("ttl", ttl)?;
        Ok(self.lock(key).ttl(ttl).build()?.try_acquire().await?.map(LockGuard::detach))
    }

    /// Acquires the lock with a lock id that the caller provides. If that id already holds the lock, this returns the
    /// same lock again.
    ///
    /// # Errors
    /// The same as for [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock may or may not be acquired. Repeat the call with the same id, or
    /// [`release`](Self::release) the id.
    pub async fn acquire_as(
        &self,
        id: &LockId,
        key: &str,
        ttl: Duration,
    ) -> Result<Option<HeldLock>, Error> {
        let (key, id, ttl) = (key_of(key, &self.engine)?, *id, millis("ttl", ttl)?);
        self.engine.core().check_open()?;
        let notify = NotifyWhen::Never;
        let holder = process::holder(None);
        // The caller may ask repeatedly while the lock is held, so no fence is expected.
        let expected = None;
        let command = LockCommand::Acquire { key: key.clone(), id, ttl, notify, holder, expected };
        let begun = self.engine.core().now();
        let outcome = self.call(command).await.map(|(outcome, _)| outcome);
        let waited = self.engine.core().now().saturating_since(begun);
        let about = (Some(&key), Some(id));
        self.report(Operation::Acquire, outcome.as_ref(), about, Some(waited));
        match outcome? {
            LockOutcome::Acquire(Acquired::Held { fence, expires_at, .. }) => {
                Ok(Some(HeldLock { id, fence, expires_at: wall_time(expires_at) }))
            }
            LockOutcome::Acquire(Acquired::Locked { .. }) => Ok(None),
            other => Err(unexpected(&other)),
        }
    }

    /// Releases a lock by its id. Returns `true` if it was held until now.
    ///
    /// A guard of that lock is not notified. It notices the release at its next request to the store; with
    /// [`auto_extend`](LockBuilder::auto_extend), that is after a third of its lease. Until then its `check` relies on
    /// the lease.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the release continues in the background.
    pub async fn release(&self, id: &LockId) -> Result<bool, Error> {
        let (core, id) = (self.engine.core().clone(), *id);
        let release = move |key| Part::Lock(LockCommand::Release { id, key, held: false });
        let outcome = match core.key_of_lock(id) {
            None => core.call_to_the_end(release(None)).await.and_then(outcome_of),
            // Runs on the engine's thread, where it continues if this future is dropped.
            Some(finding) => {
                let caller = core.clone();
                let releasing = core.run(Box::pin(async move {
                    match finding.await? {
                        Some(key) => {
                            caller.call_to_the_end(release(Some(key))).await.and_then(outcome_of)
                        }
                        None => Ok(LockOutcome::Release(Verdict::NotFound)),
                    }
                }));
                releasing.await
            }
        };
        self.report(Operation::Release, outcome.as_ref(), (None, Some(id)), None);
        Ok(matches!(outcome?, LockOutcome::Release(Verdict::Done(_))))
    }

    /// Lets a held lock expire after `ttl` from now, whatever was left of its lease. Returns `false` if the lock is no
    /// longer held.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if `ttl` is zero, too long or not in whole milliseconds.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may or may not have extended the lock.
    pub async fn extend(&self, id: &LockId, ttl: Duration) -> Result<bool, Error> {
        let (id, ttl) = (*id, millis("ttl", ttl)?);
        let command = |key| LockCommand::Extend { id, key, ttl, only_longer: false };
        let missing = LockOutcome::Extend(Verdict::NotFound);
        let outcome = self.call_by_id(id, command, missing).await;
        self.report(Operation::Renew, outcome.as_ref(), (None, Some(id)), None);
        Ok(matches!(outcome?, LockOutcome::Extend(Verdict::Done(_))))
    }

    /// Returns whether the lock with this key is held.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the key is invalid: see [`LockBuilder::build`].
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time. With
    /// [`cleanup_in_is_locked`](Self::cleanup_in_is_locked), an expired lock may or may not be removed.
    pub async fn is_locked(&self, key: &str) -> Result<bool, Error> {
        let key = key_of(key, &self.engine)?;
        let command = LockCommand::IsLocked { key: key.clone(), clean_up: self.clean_up };
        let outcome = self.call(command).await.map(|(outcome, _)| outcome);
        self.report(Operation::Lookup, outcome.as_ref(), (Some(&key), None), None);
        match outcome? {
            LockOutcome::IsLocked(locked) => Ok(locked),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the information that anybody may see about the lock with this key, or `None` if it is not held.
    ///
    /// # Errors
    /// The same as for [`is_locked`](Self::is_locked).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup(&self, key: &str) -> Result<Option<LockInfo>, Error> {
        Ok(self.lookup_raw(key).await?.map(|raw| raw.info))
    }

    /// Returns the information that anybody may see about the lock with this lock id, or `None` if it is not held.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup_id(&self, id: &LockId) -> Result<Option<LockInfo>, Error> {
        Ok(self.lookup_id_raw(id).await?.map(|raw| raw.info))
    }

    /// Returns the same as [`lookup`](Self::lookup), with the key and the lock id.
    ///
    /// # Errors
    /// The same as for [`is_locked`](Self::is_locked).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup_raw(&self, key: &str) -> Result<Option<RawLockInfo>, Error> {
        let key = key_of(key, &self.engine)?;
        let command = LockCommand::Lookup(LockRef::Key(key.clone()));
        let outcome = self.call(command).await.map(|(outcome, _)| outcome);
        self.report(Operation::Lookup, outcome.as_ref(), (Some(&key), None), None);
        Ok(found(outcome?)?.as_ref().map(raw))
    }

    /// Returns the same as [`lookup_id`](Self::lookup_id), with the key and the lock id.
    ///
    /// # Errors
    /// The same as for [`lookup_id`](Self::lookup_id).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup_id_raw(&self, id: &LockId) -> Result<Option<RawLockInfo>, Error> {
        let by =
            |key: Option<Name>| LockCommand::Lookup(key.map_or(LockRef::Id(*id), LockRef::Key));
        // The key may belong to another holder by now.
        let outcome = self.call_by_id(*id, by, LockOutcome::Lookup(None)).await;
        let record = outcome.and_then(found).map(|found| found.filter(|record| record.id == *id));
        let outcome = record.map(LockOutcome::Lookup);
        self.report(Operation::Lookup, outcome.as_ref(), (None, Some(*id)), None);
        Ok(found(outcome?)?.as_ref().map(raw))
    }

    /// Returns the held locks, ordered by key, at most `limit` of them. On Redis this scans all keys of the server,
    /// step by step.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn list_raw(&self, limit: usize) -> Result<Vec<RawLockInfo>, Error> {
        let records = self.engine.core().list_locks(limit).await?;
        Ok(records.iter().map(raw).collect())
    }

    /// Returns whether this lock id holds its lock.
    ///
    /// # Errors
    /// The same as for [`lookup_id`](Self::lookup_id).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn owns(&self, id: &LockId) -> Result<bool, Error> {
        Ok(self.lookup_id_raw(id).await?.is_some())
    }

    /// Sends one command. Also returns the moment when the answered request was sent.
    pub(super) async fn call(&self, command: LockCommand) -> Result<(LockOutcome, Moment), Error> {
        let (answer, sent) = self.engine.core().call(Part::Lock(command)).await?;
        Ok((outcome_of(answer)?, sent))
    }

    /// Sends one command about a lock of which the caller knows only the id. Some stores have to look up the key first;
    /// if there is no key, this returns `missing`.
    async fn call_by_id(
        &self,
        id: LockId,
        command: impl Fn(Option<Name>) -> LockCommand,
        missing: LockOutcome,
    ) -> Result<LockOutcome, Error> {
        let core = self.engine.core();
        let key = match core.key_of_lock(id) {
            None => None,
            Some(finding) => match core.run(finding).await? {
                None => return Ok(missing),
                found => found,
            },
        };
        let (answer, _) = core.call(Part::Lock(command(key))).await?;
        outcome_of(answer)
    }

    /// Reports one call.
    fn report(
        &self,
        operation: Operation,
        outcome: Result<&LockOutcome, &Error>,
        about: (Option<&Name>, Option<LockId>),
        waited: Option<Duration>,
    ) {
        lock_called(self.observer.as_ref(), operation, || observed(outcome), about, waited);
    }
}

/// Returns what an observer learns of an answer.
pub(super) fn observed(outcome: Result<&LockOutcome, &Error>) -> Outcome {
    match outcome {
        Ok(LockOutcome::Acquire(Acquired::Locked { .. })) => Outcome::Full,
        Ok(LockOutcome::Release(Verdict::Expired) | LockOutcome::Extend(Verdict::Expired)) => {
            Outcome::Lost(LossReason::LeaseEnded)
        }
        Ok(
            LockOutcome::Release(Verdict::NotOwner | Verdict::NotFound)
            | LockOutcome::Extend(Verdict::NotOwner | Verdict::NotFound)
            | LockOutcome::IsLocked(false)
            | LockOutcome::Lookup(None),
        ) => Outcome::NotHeld,
        Ok(_) => Outcome::Done,
        Err(error) => Outcome::Failed(error.clone()),
    }
}

pub(super) fn outcome_of(answer: Answer) -> Result<LockOutcome, Error> {
    match answer {
        Answer::Lock(outcome) => Ok(outcome),
        other => Err(unexpected(&other)),
    }
}

fn found(outcome: LockOutcome) -> Result<Option<Record>, Error> {
    match outcome {
        LockOutcome::Lookup(found) => Ok(found),
        other => Err(unexpected(&other)),
    }
}

pub(super) fn unexpected(answer: &impl std::fmt::Debug) -> Error {
    Error::internal(format!("unexpected answer to a command for a lock: {answer:?}"))
}

/// Returns the key. Fails if it begins with a prefix under which other things are stored.
pub(super) fn key_of(text: &str, engine: &Engine) -> Result<Name, Error> {
    let key = Name::normalised("key", text)?;
    if let Some(taken) = ["fence:", "id:"].into_iter().find(|taken| key.as_str().starts_with(taken))
    {
        let problem = format!("{text:?} begins with {taken:?}, which is reserved");
        return Err(Error::invalid("key", problem + ": choose another key"));
    }
    engine.core().check_name(Subject::Lock(&key))?;
    Ok(key)
}
