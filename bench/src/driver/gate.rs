//! The common interface of the contenders in Rust: something that can be acquired and released.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Client, LockGuard, Permit, Semaphore};
use redis::aio::MultiplexedConnection;
use rslock::{LockError, LockManager};

/// The default delay of rslock. Only the number of attempts is computed from it.
const RSLOCK_DELAY: Duration = Duration::from_millis(200);

/// A contender that is connected.
pub(super) enum Contact {
    Semaphore(Client),
    Lock(Client),
    Rslock(LockManager),
    Tokio(Arc<tokio::sync::Semaphore>),
    Idle,
    Evalsha(MultiplexedConnection, redis::Cmd),
}

/// One name of a contender, ready to be acquired.
#[derive(Clone)]
pub(super) enum Gate {
    Semaphore(Semaphore),
    Lock(leasehold::Lock),
    Rslock {
        manager: LockManager,
        key: String,
        lease: Duration,
    },
    /// A semaphore of one permit, whatever its name is.
    Tokio(Arc<tokio::sync::Semaphore>),
    /// Nothing to wait for, although tasks wait.
    Idle,
    Evalsha(MultiplexedConnection, redis::Cmd),
}

/// A permit or lock of a contender.
pub(super) enum Grant {
    Permit(Permit),
    Guard(LockGuard),
    Rslock(rslock::Lock),
    Tokio(tokio::sync::OwnedSemaphorePermit),
    Nothing,
}

impl Contact {
    pub(super) async fn connect(contender: &str, url: &str) -> Result<Self, String> {
        let client = async || Client::redis(url).await.map_err(|why| why.to_string());
        match contender {
            "leasehold" => Ok(Self::Semaphore(client().await?)),
            "leasehold lock" => Ok(Self::Lock(client().await?)),
            "leasehold in memory" => Ok(Self::Semaphore(Client::memory())),
            "tokio" => Ok(Self::Tokio(Arc::new(tokio::sync::Semaphore::new(1)))),
            "an idle task" => Ok(Self::Idle),
            "rslock" => Ok(Self::Rslock(LockManager::new(vec![url]))),
            "EVALSHA" => {
                let (connection, call) = evalsha(url).await.map_err(|why| why.to_string())?;
                Ok(Self::Evalsha(connection, call))
            }
            other => Err(format!("no contender is called {other:?}")),
        }
    }

    /// `lease` is how long a dead holder blocks others. The holder renews it if the library can.
    pub(super) fn open(&self, name: &str, capacity: u32, lease: Duration) -> Result<Gate, String> {
        let text = |why: leasehold::Error| why.to_string();
        Ok(match self {
            Self::Semaphore(client) => {
                let builder = client.semaphore(name, capacity).lease(lease);
                Gate::Semaphore(builder.build().map_err(text)?)
            }
            Self::Lock(client) => Gate::Lock(client.lock(name).lease(lease).build().map_err(text)?),
            Self::Rslock(manager) => {
                Gate::Rslock { manager: manager.clone(), key: name.to_owned(), lease }
            }
            Self::Tokio(semaphore) => Gate::Tokio(semaphore.clone()),
            Self::Idle => Gate::Idle,
            Self::Evalsha(connection, call) => Gate::Evalsha(connection.clone(), call.clone()),
        })
    }
}

async fn evalsha(url: &str) -> redis::RedisResult<(MultiplexedConnection, redis::Cmd)> {
    let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    let load = redis::cmd("SCRIPT").arg("LOAD").arg("return 1").to_owned();
    let sha: String = load.query_async(&mut connection).await?;
    let mut call = redis::cmd("EVALSHA");
    call.arg(sha).arg(0);
    Ok((connection, call))
}

impl Gate {
    /// Acquires it without contention.
    pub(super) async fn take(&mut self) -> Result<Grant, String> {
        match self {
            // A lock that is free needs none of the code for waiting.
            Self::Lock(lock) => match lock.try_acquire().await {
                Ok(Some(guard)) => Ok(Grant::Guard(guard)),
                Ok(None) => Err("an uncontended lock was not acquired".to_owned()),
                Err(why) => Err(why.to_string()),
            },
            _ => self
                .acquire(Duration::from_secs(10))
                .await?
                .ok_or_else(|| "was not acquired in 10 s".to_owned()),
        }
    }

    /// Waits for it. Returns `None` if it was not acquired within that time.
    pub(super) async fn acquire(&mut self, within: Duration) -> Result<Option<Grant>, String> {
        match self {
            Self::Semaphore(semaphore) => match semaphore.acquire().within(within).await {
                Ok(permit) => Ok(Some(Grant::Permit(permit))),
                // The time may end before the store has answered once.
                Err(
                    leasehold::Error::TimedOut { .. }
                    | leasehold::Error::Unavailable { timed_out: true, .. },
                ) => Ok(None),
                Err(why) => Err(why.to_string()),
            },
            Self::Lock(lock) => match tokio::time::timeout(within, lock.acquire()).await {
                Ok(Ok(guard)) => Ok(Some(Grant::Guard(guard))),
                Ok(Err(leasehold::Error::TimedOut { .. })) | Err(_) => Ok(None),
                Ok(Err(why)) => Err(why.to_string()),
            },
            Self::Rslock { manager, key, lease } => {
                // rslock counts attempts. Before each it waits for a random part of its delay.
                let attempts = (within.as_millis() / (RSLOCK_DELAY.as_millis() / 2)).max(1);
                let attempts = u32::try_from(attempts).unwrap_or(u32::MAX);
                manager.set_retry(attempts, RSLOCK_DELAY);
                match manager.lock(key.as_str(), *lease).await {
                    Ok(lock) => Ok(Some(Grant::Rslock(lock))),
                    Err(LockError::Unavailable) => Ok(None),
                    Err(why) => Err(why.to_string()),
                }
            }
            Self::Tokio(semaphore) => {
                let permit = semaphore.clone().acquire_owned().await;
                permit.map(|permit| Some(Grant::Tokio(permit))).map_err(|why| why.to_string())
            }
            Self::Idle => Ok(Some(Grant::Nothing)),
            Self::Evalsha(connection, call) => match connection.send_packed_command(call).await {
                Ok(_) => Ok(Some(Grant::Nothing)),
                Err(why) => Err(why.to_string()),
            },
        }
    }
}

impl Grant {
    pub(super) async fn release(self) -> Result<(), String> {
        match self {
            Self::Permit(permit) => permit.release().await.map(drop).map_err(|why| why.to_string()),
            Self::Guard(guard) => guard.release().await.map(drop).map_err(|why| why.to_string()),
            Self::Rslock(lock) => {
                lock.release().await;
                Ok(())
            }
            Self::Tokio(permit) => {
                drop(permit);
                Ok(())
            }
            Self::Nothing => Ok(()),
        }
    }
}
