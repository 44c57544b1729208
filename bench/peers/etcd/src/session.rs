//! A session of etcd, and the locks that are acquired in it.

use std::time::Duration;

use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper, LockOptions};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// A lease with its renewals. Its locks are held until they are released, or until the lease ends.
///
/// etcd's Go client and `etcdctl lock` use a session in the same way. To etcd, two acquires of one lock in one session
/// are the same acquire, so every task has a session of its own.
pub(crate) struct Session {
    client: Client,
    lease: i64,
    renewals: JoinHandle<()>,
}

/// The key of a lock that is held.
pub(crate) struct Lock(Vec<u8>);

impl Session {
    /// etcd counts leases in whole seconds.
    pub(crate) async fn open(client: &Client, lease: Duration) -> Result<Self, String> {
        let (mut client, seconds) = (client.clone(), lease.as_secs().max(1));
        let ttl = i64::try_from(seconds).map_err(|why| why.to_string())?;
        let lease = client.lease_grant(ttl, None).await.map_err(|why| why.to_string())?.id();
        let (keeper, answers) =
            client.lease_keep_alive(lease).await.map_err(|why| why.to_string())?;
        // The Go client renews as often.
        let renewals = tokio::spawn(renew(keeper, answers, Duration::from_secs(seconds) / 3));
        Ok(Self { client, lease, renewals })
    }

    /// Waits for the lock. Returns `None` if it was not acquired within that time.
    pub(crate) async fn acquire(
        &mut self,
        name: &str,
        within: Duration,
    ) -> Result<Option<Lock>, String> {
        let options = LockOptions::new().with_lease(self.lease);
        match timeout(within, self.client.lock(name, Some(options))).await {
            Ok(Ok(answer)) => Ok(Some(Lock(answer.key().to_vec()))),
            Ok(Err(why)) => Err(why.to_string()),
            Err(_) => Ok(None),
        }
    }

    pub(crate) async fn release(&mut self, lock: Lock) -> Result<(), String> {
        self.client.unlock(lock.0).await.map(drop).map_err(|why| why.to_string())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.renewals.abort();
    }
}

/// Renews the lease until that fails.
async fn renew(mut keeper: LeaseKeeper, mut answers: LeaseKeepAliveStream, every: Duration) {
    while keeper.keep_alive().await.is_ok() && matches!(answers.message().await, Ok(Some(_))) {
        sleep(every).await;
    }
}
