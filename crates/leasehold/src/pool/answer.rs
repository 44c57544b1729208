//! What a pool answers.

use crate::Error;
use crate::machine::pool::{PoolOutcome, Status};

/// What came of a call, and how full the pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolAnswer<S> {
    /// What came of it.
    pub status: S,
    /// How many leases are held after it.
    pub current_count: u64,
    /// How many it found to be over, and removed.
    pub expired_count: u64,
}

/// How full a pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolCount {
    /// How many leases are held.
    pub current_count: u64,
    /// How many were found to be over, and removed.
    pub expired_count: u64,
}

/// What came of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AcquireStatus {
    /// The instance holds a lease, for a TTL from now on.
    Acquired,
    /// As many others hold one as there are.
    CapacityFull,
}

/// What came of a renewal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RenewStatus {
    /// The instance holds its lease for a TTL from now on.
    Renewed,
    /// It holds none, or was silent for a TTL.
    NotHeld,
    /// It was still counted, but had ended. Now it is not counted any more.
    Expired,
}

/// What came of a release.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ReleaseStatus {
    /// The lease was held until now.
    Released,
    /// The instance holds none, or was silent for a TTL.
    NotHeld,
    /// It was still counted, but had ended. Now it is not counted any more.
    AlreadyExpired,
}

impl AcquireStatus {
    /// As other programs spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::CapacityFull => "capacity_full",
        }
    }
}

impl RenewStatus {
    /// As other programs spell it.
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
    /// As other programs spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::NotHeld => "not_held",
            Self::AlreadyExpired => "already_expired",
        }
    }
}

/// What a store answered, as an answer to what was asked.
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
