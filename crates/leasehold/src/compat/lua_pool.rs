//! The calls and words of the Lua scripts of osparc's `DistributedSemaphore`.
//!
//! That program has a loop of its own, and only asks "may I start?", "may I continue?" and "how many are we?". Each
//! question is one call and one round trip, and nothing runs between the calls. A [`LuaPool`] answers them with the same
//! words and counts. It shares its leases with every [`Pool`] of the same name.

use crate::machine::pool::{PoolOutcome, Status};
use crate::{Error, Pool};

/// A [`Pool`] whose calls answer with the statuses and counts of the Lua scripts.
///
/// No lease has a guard.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
/// use leasehold::compat::lua_pool::{AcquireStatus, LuaPool, ReleaseStatus, RenewStatus};
///
/// let encoders = LuaPool::new(Client::memory().pool("encoders", 1).build()?);
/// assert_eq!(encoders.acquire("worker-1").await?.status, AcquireStatus::Acquired);
/// assert_eq!(encoders.acquire("worker-2").await?.status, AcquireStatus::CapacityFull);
/// assert_eq!(encoders.renew("worker-1").await?.status, RenewStatus::Renewed);
/// assert_eq!(encoders.count().await?.current_count, 1);
/// assert_eq!(encoders.release("worker-1").await?.status, ReleaseStatus::Released);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LuaPool {
    pool: Pool,
}

impl LuaPool {
    /// Returns the calls on this pool.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self { pool }
    }

    /// Acquires a pool lease for this instance if one is free, or renews the lease that the instance holds.
    ///
    /// # Errors
    /// The same as for [`Pool::extend`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the instance may or may not hold a lease. To make sure that it holds none, call
    /// [`release`](Self::release).
    pub async fn acquire(&self, instance_id: &str) -> Result<PoolAnswer<AcquireStatus>, Error> {
        typed(self.pool.spec().acquire_detached(instance_id).await?, AcquireStatus::of)
    }

    /// Renews the pool lease of this instance.
    ///
    /// # Errors
    /// The same as for [`Pool::extend`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease may or may not be renewed.
    pub async fn renew(&self, instance_id: &str) -> Result<PoolAnswer<RenewStatus>, Error> {
        typed(self.pool.spec().renew(instance_id).await?, RenewStatus::of)
    }

    /// Releases the pool lease of this instance.
    ///
    /// # Errors
    /// The same as for [`Pool::release`].
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the release continues in the background.
    pub async fn release(&self, instance_id: &str) -> Result<PoolAnswer<ReleaseStatus>, Error> {
        typed(self.pool.spec().release(instance_id).await?, ReleaseStatus::of)
    }

    /// Returns the number of leases that are held, and removes expired leases.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the pool's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    /// - [`Error::Closed`] after [`Client::close`](crate::Client::close).
    ///
    /// # Cancel safety
    /// If the future is dropped, expired leases may or may not be removed. Nothing else changes.
    pub async fn count(&self) -> Result<PoolCount, Error> {
        let PoolOutcome { current, expired, .. } = self.pool.spec().count().await?;
        Ok(PoolCount { current_count: current, expired_count: expired })
    }
}

/// The result of a call, and how full the pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolAnswer<S> {
    /// The result.
    pub status: S,
    /// The number of leases that are held after the call.
    pub current_count: u64,
    /// The number of expired leases that the call removed.
    pub expired_count: u64,
}

/// How full a pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolCount {
    /// The number of leases that are held.
    pub current_count: u64,
    /// The number of expired leases that the call removed.
    pub expired_count: u64,
}

/// The result of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AcquireStatus {
    /// The instance holds a lease, which is valid for its whole duration from now on.
    Acquired,
    /// The pool is full: other instances hold all leases.
    CapacityFull,
}

/// The result of a renewal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RenewStatus {
    /// The instance holds its lease, which is valid for its whole duration from now on.
    Renewed,
    /// The instance holds no lease, or was silent for longer than its lease.
    NotHeld,
    /// The instance was still counted, but its lease had expired.
    ///
    /// It is no longer counted.
    Expired,
}

/// The result of a release.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ReleaseStatus {
    /// The lease was held until now.
    Released,
    /// The instance holds no lease, or was silent for longer than its lease.
    NotHeld,
    /// The instance was still counted, but its lease had expired.
    ///
    /// It is no longer counted.
    AlreadyExpired,
}

impl AcquireStatus {
    fn of(status: Status) -> Option<Self> {
        match status {
            Status::Acquired => Some(Self::Acquired),
            Status::CapacityFull => Some(Self::CapacityFull),
            _ => None,
        }
    }

    /// Returns `acquired` or `capacity_full`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::CapacityFull => "capacity_full",
        }
    }
}

impl RenewStatus {
    fn of(status: Status) -> Option<Self> {
        match status {
            Status::Renewed => Some(Self::Renewed),
            Status::NotHeld => Some(Self::NotHeld),
            Status::Expired => Some(Self::Expired),
            _ => None,
        }
    }

    /// Returns `renewed`, `not_held` or `expired`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Renewed => "renewed",
            Self::NotHeld => "not_held",
            Self::Expired => "expired",
        }
    }
}

impl ReleaseStatus {
    fn of(status: Status) -> Option<Self> {
        match status {
            Status::Released => Some(Self::Released),
            Status::NotHeld => Some(Self::NotHeld),
            Status::AlreadyExpired => Some(Self::AlreadyExpired),
            _ => None,
        }
    }

    /// Returns `released`, `not_held` or `already_expired`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::NotHeld => "not_held",
            Self::AlreadyExpired => "already_expired",
        }
    }
}

/// Converts the answer of the store into the result of the call.
fn typed<S>(
    outcome: PoolOutcome,
    status_of: impl FnOnce(Status) -> Option<S>,
) -> Result<PoolAnswer<S>, Error> {
    let PoolOutcome { status, current, expired } = outcome;
    let status = status_of(status).ok_or_else(|| Error::internal(format!("{status:?}")))?;
    Ok(PoolAnswer { status, current_count: current, expired_count: expired })
}
