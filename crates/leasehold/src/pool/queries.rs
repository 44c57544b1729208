//! Lists the members of pools.

use std::sync::Arc;

use crate::Error;
use crate::engine::Engine;
use crate::machine::pool::PoolQuery;
use crate::stats::PoolStats;

/// A handle to the pools of a store, to list their members.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let client = Client::memory();
/// let lease = client.pool("encoders", 4).build()?.acquire("worker-1").await?;
/// for pool in client.pools().list(100).await? {
///     assert_eq!((pool.name.as_str(), pool.members[0].id.as_str()), ("encoders", "worker-1"));
/// }
/// # drop(lease);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pools {
    engine: Arc<Engine>,
}

impl Pools {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine }
    }

    /// Returns the pools that have members, ordered by name, at most `limit` of them.
    ///
    /// Changes nothing.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn list(&self, limit: usize) -> Result<Vec<PoolStats>, Error> {
        self.engine.core().list_pools(PoolQuery::First(limit)).await
    }

    /// Returns the members of the pool with this name, or `None` if it has none.
    ///
    /// Changes nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::memory();
    /// let lease = client.pool("encoders", 4).build()?.acquire("worker-1").await?;
    /// let pool = client.pools().lookup("encoders").await?.expect("it has a member");
    /// assert_eq!(pool.members[0].id, "worker-1");
    /// assert!(client.pools().lookup("decoders").await?.is_none());
    /// # drop(lease);
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
        let query = PoolQuery::Named(super::name_of(name)?);
        Ok(self.engine.core().list_pools(query).await?.pop())
    }
}
