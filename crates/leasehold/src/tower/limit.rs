//! The limit of one request, and the guard that the request holds.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::{Acquire, Error, Lock, LockGuard, Lost, Permit, Primitive, Semaphore, TryAcquire};

/// The permit or lock that a request acquires before it runs. See [`LimitLayer::new`](super::LimitLayer::new) for an
/// example.
///
/// | made from | the request |
/// |---|---|
/// | [`Acquire`], [`Semaphore`] | waits for a permit, in the order of arrival |
/// | [`TryAcquire`] | is refused at once with [`Error::TimedOut`] if no permit is free |
/// | [`Lock`] | waits for the lock, in no particular order |
/// | [`Limit::none`] | is not limited |
///
/// A rate is a semaphore: see [`Client::rate`](crate::Client::rate). Set a time limit, such as [`Acquire::within`],
/// because clients do not wait forever. Build a lock with [`auto_extend`](crate::LockBuilder::auto_extend): otherwise a
/// request that takes longer than the lease loses its lock.
pub struct Limit(Acquiring);

enum Acquiring {
    Nothing,
    Permit(Acquire),
    Try(TryAcquire),
    Lock(Pin<Box<dyn Future<Output = Result<LockGuard, Error>> + Send>>),
}

impl Limit {
    /// Returns a limit that limits nothing, for example for health checks.
    #[must_use]
    pub fn none() -> Self {
        Self(Acquiring::Nothing)
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeldPermit>, Error>> {
        let guard = match &mut self.0 {
            Acquiring::Nothing => return Poll::Ready(Ok(None)),
            Acquiring::Permit(acquire) => Guard::Permit(ready!(Pin::new(acquire).poll(cx))?),
            Acquiring::Try(acquire) => match ready!(Pin::new(&mut *acquire).poll(cx))? {
                Some(permit) => Guard::Permit(permit),
                None => return Poll::Ready(Err(full(acquire.0.name()))),
            },
            Acquiring::Lock(acquire) => Guard::Lock(ready!(acquire.as_mut().poll(cx))?),
        };
        let lost = match &guard {
            Guard::Permit(permit) => permit.lost(),
            Guard::Lock(guard) => guard.lost(),
        };
        Poll::Ready(Ok(Some(HeldPermit { lost, _guard: guard })))
    }
}

fn full(name: &str) -> Error {
    let (primitive, name) = (Primitive::Semaphore, name.to_owned());
    Error::TimedOut { primitive, name, limit: Duration::ZERO, full: None, next_start: None }
}

impl From<Acquire> for Limit {
    fn from(acquire: Acquire) -> Self {
        Self(Acquiring::Permit(acquire))
    }
}

impl From<TryAcquire> for Limit {
    fn from(acquire: TryAcquire) -> Self {
        Self(Acquiring::Try(acquire))
    }
}

impl From<Semaphore> for Limit {
    fn from(semaphore: Semaphore) -> Self {
        semaphore.acquire().into()
    }
}

impl From<Lock> for Limit {
    fn from(lock: Lock) -> Self {
        Self(Acquiring::Lock(Box::pin(async move { lock.acquire().await })))
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Limit")
            .field(&match &self.0 {
                Acquiring::Nothing => "none",
                Acquiring::Permit(_) => "permit",
                Acquiring::Try(_) => "permit, without waiting",
                Acquiring::Lock(_) => "lock",
            })
            .finish()
    }
}

/// A permit or a lock that a request holds. Dropping it releases it in the background.
#[derive(Debug)]
pub(super) struct HeldPermit {
    lost: Lost,
    _guard: Guard,
}

#[derive(Debug)]
enum Guard {
    Permit(Permit),
    Lock(LockGuard),
}

impl HeldPermit {
    /// Resolves with an error if the permit or lock was lost.
    pub(super) fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        self.lost.poll_error(cx)
    }
}
