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
    pub(super) fn of(status: Status) -> Option<Self> {
        match status {
            Status::Acquired => Some(Self::Acquired),
            Status::CapacityFull => Some(Self::CapacityFull),
            _ => None,
        }
    }

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
    pub(super) fn of(status: Status) -> Option<Self> {
        match status {
            Status::Renewed => Some(Self::Renewed),
            Status::NotHeld => Some(Self::NotHeld),
            Status::Expired => Some(Self::Expired),
            _ => None,
        }
    }

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
    pub(super) fn of(status: Status) -> Option<Self> {
        match status {
            Status::Released => Some(Self::Released),
            Status::NotHeld => Some(Self::NotHeld),
            Status::AlreadyExpired => Some(Self::AlreadyExpired),
            _ => None,
        }
    }

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
pub(super) fn typed<S>(
    outcome: PoolOutcome,
    status_of: impl FnOnce(Status) -> Option<S>,
) -> Result<PoolAnswer<S>, Error> {
    let PoolOutcome { status, current, expired } = outcome;
    let status = status_of(status).ok_or_else(|| Error::internal(format!("{status:?}")))?;
    Ok(PoolAnswer { status, current_count: current, expired_count: expired })
}
