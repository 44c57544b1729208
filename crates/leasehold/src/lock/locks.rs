//! The locks of a store, by key and by lock id. Each operation is a single attempt.

use std::sync::Arc;
use std::time::Duration;

use super::LockBuilder;
use super::info::{HeldLock, LockInfo, LockRef, info};
use crate::backend::{Answer, Part, Profile};
use crate::clock::{Moment, wall_time};
use crate::engine::Engine;
use crate::engine::watch::{Acquiring, Id, lock_called};
use crate::machine::lock::{Acquired, LockCommand, LockOutcome, NotifyWhen, Record, Verdict};
use crate::machine::{self, Subject};
use crate::name::{Name, millis};
use crate::{Error, LockId, LossReason, Observer, Operation, Outcome, process};

/// The locks of a store, by key and by lock id, without guards.
///
/// This API is for callers that have a loop of their own and keep the lock id.
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
/// let held = locks.try_acquire("invoice:42", Duration::from_secs(30)).await?.expect("it was free");
/// assert!(locks.try_acquire("invoice:42", Duration::from_secs(30)).await?.is_none());
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
    pub(super) clean_up: bool,
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

    /// Sets whether [`is_locked`](Self::is_locked) may remove a lock that expired at least two seconds ago.
    pub(crate) fn clean_up(self, clean_up: bool) -> Self {
        Self { clean_up, ..self }
    }

    /// Returns a builder for the lock with this key, whose holders have guards.
    pub fn lock(&self, key: &str) -> LockBuilder {
        LockBuilder::new(self.clone(), key)
    }

    pub(crate) fn profile(&self) -> Profile {
        self.engine.core().profile()
    }

    /// Acquires the lock if it is free; returns `None` if it is held.
    ///
    /// There is no guard: the lock expires after `lease` unless you extend or release it by its id.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the key or the lease is invalid: see [`LockBuilder::build`].
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lock that it may have been granted is released in the background.
    pub async fn try_acquire(&self, key: &str, lease: Duration) -> Result<Option<HeldLock>, Error> {
        let (lock, id) = (self.lock(key).lease(lease).build()?.inner, LockId::random());
        let end = |held: &Option<HeldLock>, watched: Acquiring| match held {
            Some(_) => watched.acquired_without_guard(),
            None => watched.refused(),
        };
        lock.watch.acquire(|| Id::Lock(id), false, lock.try_detached(id), end).await
    }

    /// Acquires the lock with a lock id that the caller provides; returns `None` if another id holds it.
    ///
    /// If that id already holds the lock, this returns the same lock again.
    ///
    /// # Errors
    /// The same as for [`try_acquire`](Self::try_acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock may or may not be acquired. Repeat the call with the same id, or
    /// [`release`](Self::release) the id.
    pub async fn try_acquire_as(
        &self,
        key: &str,
        lease: Duration,
        id: &LockId,
    ) -> Result<Option<HeldLock>, Error> {
        let (key, id, ttl) = (key_of(key, &self.engine)?, *id, millis("lease", lease)?);
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

    /// Releases a lock by its id.
    ///
    /// Returns `true` if it was held until now.
    ///
    /// If the lock still has a guard, the guard is notified of the loss. In this client that happens before this
    /// function returns. The guard of another client notices the release at its next renewal, after a third of its
    /// lease. Until then its `check` relies on the lease.
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
        let (core, id, sent) = (self.engine.core().clone(), *id, self.engine.core().now());
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
        let was_held = matches!(outcome, Ok(LockOutcome::Release(Verdict::Done(_))));
        if was_held {
            self.engine.core().lock_released(id, sent);
        }
        self.report(Operation::Release, outcome.as_ref(), (None, Some(id)), None);
        outcome.map(|_| was_held)
    }

    /// Lets a held lock expire after `lease` from now, whatever was left of its lease.
    ///
    /// Returns `false` if the lock is no longer held.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if `lease` is zero, too long or not in whole milliseconds.
    /// - [`Error::ForeignData`] if another program uses the lock's keys on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, the store may or may not have extended the lock.
    pub async fn extend(&self, id: &LockId, lease: Duration) -> Result<bool, Error> {
        self.extend_by(*id, millis("lease", lease)?, false).await
    }

    /// Lets a held lock expire in `ttl` milliseconds. If it is `only_longer`, a later end stays as it is.
    pub(super) async fn extend_by(
        &self,
        id: LockId,
        ttl: u64,
        only_longer: bool,
    ) -> Result<bool, Error> {
        self.engine.core().check_open()?;
        let command = |key| LockCommand::Extend { id, key, ttl, only_longer };
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
    /// The query changes nothing in the store, so the future can be dropped at any time.
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

    /// Returns information about a lock, found by its key or by its lock id, or `None` if it is not held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let locks = client.locks();
    /// let guard = client.lock("invoice:42").build()?.acquire().await?;
    /// let by_key = locks.lookup("invoice:42").await?.expect("it is held");
    /// let by_id = locks.lookup(guard.id()).await?.expect("it is held");
    /// assert_eq!(by_key, by_id);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`is_locked`](Self::is_locked).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup<'a>(
        &self,
        lock: impl Into<LockRef<'a>>,
    ) -> Result<Option<LockInfo>, Error> {
        let found = match lock.into() {
            LockRef::Key(key) => self.lookup_key(key_of(key, &self.engine)?).await?,
            LockRef::Id(id) => self.lookup_id(id).await?,
        };
        Ok(found.as_ref().map(info))
    }

    async fn lookup_key(&self, key: Name) -> Result<Option<Record>, Error> {
        let command = LockCommand::Lookup(machine::lock::LockRef::Key(key.clone()));
        let outcome = self.call(command).await.map(|(outcome, _)| outcome);
        self.report(Operation::Lookup, outcome.as_ref(), (Some(&key), None), None);
        found(outcome?)
    }

    async fn lookup_id(&self, id: LockId) -> Result<Option<Record>, Error> {
        use machine::lock::LockRef;
        let by = |key: Option<Name>| LockCommand::Lookup(key.map_or(LockRef::Id(id), LockRef::Key));
        // The key may belong to another holder by now.
        let outcome = self.call_by_id(id, by, LockOutcome::Lookup(None)).await;
        let record = outcome.and_then(found).map(|found| found.filter(|record| record.id == id));
        let outcome = record.map(LockOutcome::Lookup);
        self.report(Operation::Lookup, outcome.as_ref(), (None, Some(id)), None);
        found(outcome?)
    }

    /// Returns the held locks, ordered by key, at most `limit` of them.
    ///
    /// On Redis this scans all keys of the server, step by step.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn list(&self, limit: usize) -> Result<Vec<LockInfo>, Error> {
        let records = self.engine.core().list_locks(limit).await?;
        Ok(records.iter().map(info).collect())
    }

    /// Returns whether this lock id holds its lock.
    ///
    /// # Errors
    /// The same as for [`lookup`](Self::lookup).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn owns(&self, id: &LockId) -> Result<bool, Error> {
        Ok(self.lookup_id(*id).await?.is_some())
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
