//! The limit of one request, and the guard that the request holds.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::{
    Acquire, AcquireLock, AcquirePoolLease, Error, Guard, Lock, Lost, Primitive, Semaphore,
    TryAcquire,
};

/// The permit, lock or pool lease that a request acquires before it runs.
///
/// See [`LimitLayer::new`](super::LimitLayer::new) for an example.
///
/// | made from | the request |
/// |---|---|
/// | [`Acquire`], [`Semaphore`] | waits for a permit, in the order of arrival |
/// | [`TryAcquire`] | is refused at once with [`Error::TimedOut`] if no permit is free |
/// | [`AcquireLock`], [`Lock`] | waits for the lock, in no particular order |
/// | [`AcquirePoolLease`] | waits for a pool lease, in no particular order |
/// | [`Limit::none`] | is not limited |
///
/// A rate is a semaphore: see [`Client::rate`](crate::Client::rate). Set a time limit, such as [`Acquire::within`],
/// because clients do not wait forever.
pub struct Limit(Acquiring);

enum Acquiring {
    Nothing,
    Permit(Acquire),
    Try(TryAcquire),
    Lock(AcquireLock),
    Lease(AcquirePoolLease),
}

impl Limit {
    /// Returns a limit that limits nothing, for example for health checks.
    #[must_use]
    pub fn none() -> Self {
        Self(Acquiring::Nothing)
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeldGuard>, Error>> {
        match &mut self.0 {
            Acquiring::Nothing => Poll::Ready(Ok(None)),
            Acquiring::Permit(acquire) => Pin::new(acquire).poll(cx).map_ok(HeldGuard::new),
            Acquiring::Try(acquire) => match ready!(Pin::new(&mut *acquire).poll(cx))? {
                Some(permit) => Poll::Ready(Ok(HeldGuard::new(permit))),
                None => Poll::Ready(Err(full(acquire.0.name()))),
            },
            Acquiring::Lock(acquire) => Pin::new(acquire).poll(cx).map_ok(HeldGuard::new),
            Acquiring::Lease(acquire) => Pin::new(acquire).poll(cx).map_ok(HeldGuard::new),
        }
    }
}

fn full(name: &str) -> Error {
    let (primitive, name) = (Primitive::Semaphore, name.to_owned());
    Error::TimedOut {
        primitive,
        name,
        limit: Duration::ZERO,
        held: None,
        capacity: None,
        next_token: None,
    }
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
        lock.acquire().into()
    }
}

impl From<AcquireLock> for Limit {
    fn from(acquire: AcquireLock) -> Self {
        Self(Acquiring::Lock(acquire))
    }
}

impl From<AcquirePoolLease> for Limit {
    fn from(acquire: AcquirePoolLease) -> Self {
        Self(Acquiring::Lease(acquire))
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
                Acquiring::Lease(_) => "pool lease",
            })
            .finish()
    }
}

/// The guard that a request holds. Dropping it releases it in the background.
#[derive(Debug)]
pub(super) struct HeldGuard {
    lost: Lost,
    _guard: Box<dyn Guard>,
}

impl HeldGuard {
    #[allow(clippy::unnecessary_wraps)] // the output of `Limit::poll`
    fn new(guard: impl Guard + 'static) -> Option<Self> {
        Some(Self { lost: guard.lost(), _guard: Box::new(guard) })
    }

    /// Resolves with an error if the permit, lock or pool lease was lost.
    pub(super) fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        self.lost.poll_error(cx)
    }
}
