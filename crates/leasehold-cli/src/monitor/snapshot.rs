//! The state of the store at one moment.

use std::time::{Duration, Instant, SystemTime};

use leasehold::{Client, ClientInfo, Error, LockInfo, PoolStats, SemaphoreStats};

/// The largest number of semaphores, locks and pools that are read.
pub(crate) const MOST: usize = 10_000;

/// All holders, and the numbers of waiters. The waiters themselves are read for one name at a time.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) at: SystemTime,
    /// How long it took to read.
    pub(crate) took: Duration,
    /// The most used first, including unused ones.
    pub(crate) semaphores: Vec<SemaphoreStats>,
    /// By key. Never show their ids, because a lock id can release its lock.
    pub(crate) locks: Vec<LockInfo>,
    /// By name.
    pub(crate) pools: Vec<PoolStats>,
    /// By id, without read-only clients.
    pub(crate) clients: Vec<ClientInfo>,
    /// The lists to which the store denies access: `locks`, `pools`, `clients`.
    pub(crate) hidden: Vec<&'static str>,
}

impl Snapshot {
    pub(super) async fn take(client: &Client) -> Result<Self, Error> {
        let began = Instant::now();
        let mut hidden = Vec::new();
        let semaphores = client.stats().unused().limit(MOST).await?;
        let locks = permitted("locks", client.locks().list(MOST).await, &mut hidden)?;
        let pools = permitted("pools", client.pools().list(MOST).await, &mut hidden)?;
        let clients = permitted("clients", client.clients(MOST).await, &mut hidden)?;
        let (at, took) = (SystemTime::now(), began.elapsed());
        Ok(Self { at, took, semaphores, locks, pools, clients, hidden })
    }

    pub(crate) fn semaphore(&self, name: &str) -> Option<&SemaphoreStats> {
        self.semaphores.iter().find(|one| one.name == name)
    }
}

/// Reads a list. If permission is missing, the list is empty, and its name is recorded.
fn permitted<T>(
    what: &'static str,
    read: Result<Vec<T>, Error>,
    hidden: &mut Vec<&'static str>,
) -> Result<Vec<T>, Error> {
    match read {
        Err(Error::Denied { .. }) => {
            hidden.push(what);
            Ok(Vec::new())
        }
        read => read,
    }
}
