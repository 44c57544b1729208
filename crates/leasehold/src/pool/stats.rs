//! Who holds leases of which pools.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::engine::Engine;
use crate::name::Name;

/// All pools of a client's store, to look at.
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

/// One pool that has members. Neither its capacity nor its TTL is kept in the store: those who use it know them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// What it is called.
    pub name: String,
    /// Who is counted, the most silent first.
    pub members: Vec<PoolMember>,
}

/// Who is counted.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolMember {
    /// Who it is.
    pub instance_id: String,
    /// How long ago it acquired or renewed.
    pub silent_for: Duration,
    /// How long it is good for without another renewal. None if it is over, and will be removed at the next call.
    pub ends_in: Option<Duration>,
}

/// Which pools are asked about.
#[derive(Clone, Debug)]
pub(crate) enum Which {
    /// All, by name; no more than so many.
    First(usize),
    Named(Name),
}

impl Pools {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine }
    }

    /// The pools that have members, by name; no more than the limit. It changes nothing.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn list(&self, limit: usize) -> Result<Vec<PoolStats>, Error> {
        self.engine.core().list_pools(Which::First(limit)).await
    }

    /// The members of the pool with this name; `None` if it has none. It changes nothing.
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
    /// [`Error::InvalidArgument`] for a name that cannot be a pool's; otherwise as for [`list`](Self::list).
    ///
    /// # Cancel safety
    /// Only asks.
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
