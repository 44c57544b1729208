//! The list of the clients of a store.

use std::time::SystemTime;

use super::Client;
use crate::{ClientId, Error, process};

/// A client of a store: see [`Client::clients`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ClientInfo {
    /// The client id. The ids of its permits begin with it.
    pub id: String,
    /// The host that the client runs on.
    pub host: Option<String>,
    /// The process id of the client.
    pub pid: Option<u32>,
    /// The name of the program.
    pub program: Option<String>,
    /// When the client was opened, by its own clock; `None` for a client in memory.
    pub since: Option<SystemTime>,
}

impl ClientInfo {
    /// Returns the description of the client with this id, which runs in this process.
    pub(crate) fn here(id: ClientId) -> Self {
        let program = std::env::args().next();
        let name = |path: String| path.rsplit(['/', '\\']).next().map(str::to_owned);
        Self {
            id: id.to_string(),
            host: process::host().map(|host| host.to_string()),
            pid: Some(std::process::id()),
            program: program.and_then(name),
            since: None,
        }
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
    /// - [`Error::Refused`] if the store denies the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub async fn clients(&self, limit: usize) -> Result<Vec<ClientInfo>, Error> {
        self.engine.core().list_clients(limit).await
    }
}
