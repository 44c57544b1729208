//! The members of pools.

use std::time::Duration;

use crate::clock::Time;
use crate::machine::pool::PoolRow;

/// The members of one pool.
///
/// The store keeps neither its capacity nor its lease: each client knows its own.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// The name of the pool.
    pub name: String,
    /// The members.
    ///
    /// The one that has been silent for the longest time comes first.
    pub members: Vec<PoolMember>,
}

/// An instance that counts as a member of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolMember {
    /// The instance id.
    pub id: String,
    /// How long ago the instance acquired or renewed its pool lease.
    pub silent_for: Duration,
    /// How long the pool lease is valid without another renewal.
    ///
    /// `None` if it has expired; the next call on the pool removes it.
    pub expires_in: Option<Duration>,
}

impl PoolStats {
    /// Returns the statistics of a pool at the time `now`.
    pub(crate) fn of(pool: PoolRow, now: Time) -> Self {
        let members = pool.members.into_iter().map(|(id, member)| PoolMember {
            id,
            silent_for: now.since(member.last),
            expires_in: member.holder_until.filter(|at| now < *at).map(|at| at.since(now)),
        });
        Self { name: pool.name, members: members.collect() }
    }
}
