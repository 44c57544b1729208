//! Locks on Redis: their keys, their cost, sharing them with other programs, and the faults they survive.

#![cfg(feature = "redis")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{Client, Error, Jitter, Lock, LockGuard, RedisBuilder, Retry};
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinHandle;

mod connection;
mod cost;
mod fences;
mod keys;
mod lost_replies;
mod not_ours;
mod processes;
mod sharing;

/// The entry point of the processes that [`processes`] starts.
#[test]
fn child() {
    testkit::child::play(processes::play);
}

const KEY: &str = "invoice:42";
/// Longer than any test may take.
const MINUTES: Duration = Duration::from_secs(300);

/// A builder for clients with other settings.
fn builder(url: &str) -> RedisBuilder {
    Client::redis_builder(url)
}

async fn connect(url: &str) -> Client {
    deadline(builder(url).open()).await.expect("the server that was just started")
}

/// Retries only after minutes. So a waiter acquires when it is notified of a release, or when the holder's lease ends.
fn only_when_told() -> Retry {
    Retry::default().delay(MINUTES).max_delay(MINUTES).jitter(Jitter::None)
}

fn lock(client: &Client, ttl: Duration) -> Lock {
    client.lock(KEY).lease(ttl).retry(only_when_told()).build().unwrap()
}

async fn acquire(lock: &Lock) -> LockGuard {
    deadline(lock.acquire()).await.unwrap()
}

async fn try_acquire(client: &Client) -> Option<LockGuard> {
    deadline(lock(client, MINUTES).try_acquire()).await.unwrap()
}

async fn release(guard: LockGuard) -> bool {
    deadline(guard.release()).await.unwrap()
}

/// An acquire that waits in its own task, and records when it was granted.
struct Waiter {
    task: JoinHandle<(Instant, Result<LockGuard, Error>)>,
}

impl Waiter {
    /// Starts an acquire, and returns when the server has recorded that this client waits.
    async fn join(server: &Server, client: &Client, lock: &Lock) -> Self {
        let waiter = Self::begin(lock);
        let waiting = format!("adv-sem:lock_waiting:syncguard:{}", lock.name());
        let id = client.id().to_string();
        eventually(async || server.ask::<bool>(&["SISMEMBER", &waiting, &id])).await;
        waiter
    }

    fn begin(lock: &Lock) -> Self {
        let lock = lock.clone();
        let task = tokio::spawn(async move {
            let result = lock.acquire().await;
            (Instant::now(), result)
        });
        Self { task }
    }

    async fn granted(self) -> (Instant, LockGuard) {
        let (at, result) = deadline(self.task).await.unwrap();
        (at, result.unwrap())
    }
}

/// A server, and a connection to inspect it without the library.
struct Server {
    server: RedisServer,
    look: std::sync::Mutex<redis::Connection>,
}

impl std::ops::Deref for Server {
    type Target = RedisServer;
    fn deref(&self) -> &RedisServer {
        &self.server
    }
}

impl Server {
    fn start() -> Self {
        let server = RedisServer::start();
        let look = server.connection().into();
        Self { server, look }
    }

    /// Sends a command to the server.
    #[track_caller]
    fn ask<T: redis::FromRedisValue>(&self, command: &[&str]) -> T {
        let mut look = self.look.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let answer = redis::cmd(command[0]).arg(&command[1..]).query(&mut *look);
        answer.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// Returns when a key expires, in milliseconds of the server's clock; negative if it does not
    /// expire or does not exist.
    #[track_caller]
    fn ends(&self, key: &str) -> i64 {
        let mut look = self.look.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        testkit::redis_server::expires_at(&mut look, key)
    }

    fn set(&self, key: &str, value: &str) {
        let _: () = self.ask(&["SET", key, value]);
    }

    /// Returns every key with its content and its expiry, except the records of clients.
    fn dump(&self) -> BTreeMap<String, (Vec<u8>, i64)> {
        let keys: Vec<String> = self.ask(&["KEYS", "*"]);
        keys.into_iter()
            .filter(|key| !key.starts_with("adv-sem:client:"))
            .map(|key| {
                let held = (self.ask(&["DUMP", &key]), self.ends(&key));
                (key, held)
            })
            .collect()
    }

    fn keys(&self) -> Vec<String> {
        self.dump().into_keys().collect()
    }
}
