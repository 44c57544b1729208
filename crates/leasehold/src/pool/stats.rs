//! The members of pools.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::engine::Engine;
use crate::name::Name;

/// A handle to the pools of a store, to list their members.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let client = Client::memory();
/// client.pool("encoders", 4).build()?.acquire("worker-1").await?;
/// for pool in client.pools().list(100).await? {
///     assert_eq!((pool.name.as_str(), pool.members[0].instance_id.as_str()), ("encoders", "worker-1"));
/// }
/// # Ok(())
/// # }
/// ```
pub struct Pools {
    engine: Arc<Engine>,
}

/// The members of one pool. The store keeps neither its capacity nor its lease: each client knows its own.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// The name of the pool.
    pub name: String,
    /// The members. The one that has been silent for the longest time comes first.
    pub members: Vec<PoolMember>,
}

/// An instance that counts as a member of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolMember {
    /// The instance id.
    pub instance_id: String,
    /// How long ago the instance acquired or renewed its lease.
    pub silent_for: Duration,
    /// How long the lease is valid without another renewal. `None` if it has expired; the next call on the pool removes
    /// it.
    pub ends_in: Option<Duration>,
}

/// The pools that a query asks for.
#[derive(Clone, Debug)]
pub(crate) enum Which {
    /// All pools, ordered by name, at most this many.
    First(usize),
    Named(Name),
}

impl Pools {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine }
    }

    /// Returns the pools that have members, ordered by name, at most `limit` of them. Changes nothing.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Refused`] if the store denies the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn list(&self, limit: usize) -> Result<Vec<PoolStats>, Error> {
        self.engine.core().list_pools(Which::First(limit)).await
    }

    /// Returns the members of the pool with this name, or `None` if it has none. Changes nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::memory();
    /// client.pool("encoders", 4).build()?.acquire("worker-1").await?;
    /// let pool = client.pools().lookup("encoders").await?.expect("it has a member");
    /// assert_eq!(pool.members[0].instance_id, "worker-1");
    /// assert!(client.pools().lookup("decoders").await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the name is empty, longer than 512 bytes, contains control characters, or begins
    ///   with `holders:`.
    /// - All errors of [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn lookup(&self, name: &str) -> Result<Option<PoolStats>, Error> {
        let which = Which::Named(super::name_of(name)?);
        Ok(self.engine.core().list_pools(which).await?.pop())
    }
}

impl fmt::Debug for Pools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pools").finish_non_exhaustive()
    }
}
