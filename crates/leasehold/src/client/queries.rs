//! Queries about a whole store: statistics and the list of clients.

use std::future::IntoFuture;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use super::Client;
use crate::Error;
use crate::engine::Engine;
use crate::name::Name;
use crate::stats::{ClientInfo, Query, SemaphoreStats};

/// The number of names that a query returns by default.
const LIMIT: usize = 100;

/// A query for statistics that is sent when it is awaited: see [`Client::stats`](crate::Client::stats).
#[must_use = "the query is not sent until it is awaited"]
#[derive(Clone, Debug)]
pub struct Stats {
    engine: Arc<Engine>,
    query: Query,
}

impl Stats {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, query: Query { names: None, limit: LIMIT, unused: false, waiters: 0..0 } }
    }

    /// Queries only these names, instead of all.
    pub fn names<I: IntoIterator<Item: Into<String>>>(mut self, names: I) -> Self {
        self.query.names = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Limits the number of names: 100 by default.
    pub fn limit(mut self, limit: usize) -> Self {
        self.query.limit = limit;
        self
    }

    /// Includes names that nobody holds or waits for now.
    pub fn unused(mut self) -> Self {
        self.query.unused = true;
        self
    }

    /// Includes the waiters, and not only their number: see [`SemaphoreStats::waiters`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// for one in client.stats().names(["api"]).waiters().await? {
    ///     for waiter in one.waiters {
    ///         println!("{} has waited for {:?}", waiter.id, waiter.age);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn waiters(self) -> Self {
        self.waiters_in(0..usize::MAX)
    }

    /// Includes the waiters at these places of the queue: `0..100` are the first hundred.
    ///
    /// [`SemaphoreStats::waiting`] is the number of all waiters in any case.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// let stats = client.stats().names(["api"]).waiters_in(0..100).await?;
    /// assert!(stats.iter().all(|one| one.waiters.len() <= 100));
    /// # Ok(())
    /// # }
    /// ```
    pub fn waiters_in(mut self, places: Range<usize>) -> Self {
        self.query.waiters = places;
        self
    }

    async fn fetch(self) -> Result<Vec<SemaphoreStats>, Error> {
        let Self { engine, mut query } = self;
        if let Some(names) = &mut query.names {
            for name in names {
                *name = Name::new("name", name)?.to_string();
            }
        }
        let mut stats = engine.core().stats(query.clone()).await?;
        query.narrow(&mut stats);
        Ok(stats)
    }
}

impl IntoFuture for Stats {
    type Output = Result<Vec<SemaphoreStats>, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// # Errors
    /// The same as for [`Client::stats`].
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.fetch())
    }
}

impl Client {
    /// Returns the clients that use this store, ordered by id, at most `limit` of them.
    ///
    /// On the local store, these are the clients that are alive. On Redis, a client that died is listed for up to 200
    /// seconds, and a [read-only](crate::RedisBuilder::read_only) client is not listed. In memory, the list contains
    /// only this client.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::memory();
    /// let all = client.clients(100).await?;
    /// assert_eq!(all[0].id, client.id().to_string());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn clients(&self, limit: usize) -> Result<Vec<ClientInfo>, Error> {
        self.engine.core().list_clients(limit).await
    }
}
