//! The results of calls on a pool.

use crate::Error;
use crate::machine::pool::{PoolOutcome, Status};

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
    /// The instance was still counted, but its lease had expired. It is no longer counted.
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
    /// The instance was still counted, but its lease had expired. It is no longer counted.
    AlreadyExpired,
}

impl AcquireStatus {
    /// Returns `acquired` or `capacity_full`, the words of other programs with such a pool.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::CapacityFull => "capacity_full",
        }
    }
}

impl RenewStatus {
    /// Returns `renewed`, `not_held` or `expired`, the words of other programs with such a pool.
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
    /// Returns `released`, `not_held` or `already_expired`, the words of other programs with such a pool.
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
pub(super) fn typed<S: TryFrom<Status>>(answer: PoolOutcome) -> Result<PoolAnswer<S>, Error> {
    let PoolOutcome { status, current, expired } = answer;
    let known = S::try_from(status).map_err(|_| Error::internal(format!("{status:?}")))?;
    Ok(PoolAnswer { status: known, current_count: current, expired_count: expired })
}

impl TryFrom<Status> for AcquireStatus {
    type Error = ();

    fn try_from(status: Status) -> Result<Self, ()> {
        match status {
            Status::Acquired => Ok(Self::Acquired),
            Status::CapacityFull => Ok(Self::CapacityFull),
            _ => Err(()),
        }
    }
}

impl TryFrom<Status> for RenewStatus {
    type Error = ();

    fn try_from(status: Status) -> Result<Self, ()> {
        match status {
            Status::Renewed => Ok(Self::Renewed),
            Status::NotHeld => Ok(Self::NotHeld),
            Status::Expired => Ok(Self::Expired),
            _ => Err(()),
        }
    }
}

impl TryFrom<Status> for ReleaseStatus {
    type Error = ();

    fn try_from(status: Status) -> Result<Self, ()> {
        match status {
            Status::Released => Ok(Self::Released),
            Status::NotHeld => Ok(Self::NotHeld),
            Status::AlreadyExpired => Ok(Self::AlreadyExpired),
            _ => Err(()),
        }
    }
}
