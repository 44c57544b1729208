//! The clients of a store.

use std::time::SystemTime;

use crate::{ClientId, process};

/// A client of a store: see [`Client::clients`](crate::Client::clients).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ClientInfo {
    /// The client id.
    ///
    /// The ids of its permits begin with it.
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
