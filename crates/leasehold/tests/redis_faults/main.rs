//! What the semaphore on Redis survives: one test per fault, against a real server.

#![cfg(feature = "redis")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{AcquisitionId, Client, Error, Permit, RedisBuilder, Semaphore};
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinHandle;

mod connection;
mod cost;
mod failover;
mod forks;
mod hostile;
mod lost_replies;
mod processes;
mod runtime;
mod server;

/// The entry point of the processes that [`processes`] starts.
#[test]
fn child() {
    testkit::child::play(processes::play);
}

const NAME: &str = "x";
/// A heartbeat interval that a test waits for: short, but long enough for a busy machine.
const LEASE: Duration = Duration::from_secs(2);
/// Far less than polling takes: what happens this quickly was notified.
const AT_ONCE: Duration = Duration::from_millis(500);

/// A builder for clients with other settings.
fn builder(url: &str) -> RedisBuilder {
    Client::redis_builder(url)
}

async fn connect(url: &str) -> Client {
    builder(url).open().await.expect("the server that was just started")
}

/// The semaphore of the test, with one permit and the default heartbeat.
fn one(client: &Client) -> Semaphore {
    client.semaphore(NAME, 1).build().unwrap()
}

/// The semaphore of the test, with one permit.
fn one_beating(client: &Client, heartbeat: Duration) -> Semaphore {
    client.semaphore(NAME, 1).lease(heartbeat).build().unwrap()
}

async fn acquire(semaphore: &Semaphore) -> Permit {
    deadline(semaphore.acquire()).await.unwrap()
}

async fn release(permit: Permit) -> bool {
    deadline(permit.release()).await.unwrap()
}

/// Returns the number of holders and the number of waiters.
async fn held_and_waiting(semaphore: &Semaphore) -> (u32, usize) {
    deadline(testkit::counts::held_and_waiting(semaphore)).await
}

/// Fails unless every permit becomes free and can be acquired.
async fn all_are_free(semaphore: &Semaphore) {
    eventually(async || held_and_waiting(semaphore).await == (0, 0)).await;
    deadline(testkit::counts::assert_all_are_free(semaphore)).await;
}

/// An acquire in the queue, in its own task, that records when it was granted.
struct Waiter {
    id: AcquisitionId,
    task: JoinHandle<(Instant, Result<Permit, Error>)>,
}

impl Waiter {
    /// Starts an acquire, and returns when it is in the queue.
    async fn join(semaphore: &Semaphore) -> Self {
        let waiter = Self::begin(semaphore);
        eventually(async || semaphore.position(&waiter.id).await.unwrap().is_some()).await;
        waiter
    }

    /// Starts an acquire, and returns before it is in the queue.
    fn begin(semaphore: &Semaphore) -> Self {
        let acquire = semaphore.acquire();
        let id = acquire.id();
        let task = tokio::spawn(async move {
            let result = acquire.await;
            (Instant::now(), result)
        });
        Self { id, task }
    }

    /// Returns the permit, and when it was granted.
    async fn granted(self) -> (Instant, Permit) {
        let (at, result) = deadline(self.task).await.unwrap();
        (at, result.unwrap())
    }

    async fn permit(self) -> Permit {
        self.granted().await.1
    }
}

/// The keys of one name, read without the library.
struct Keys(redis::Connection);

impl Keys {
    fn of(server: &RedisServer) -> Self {
        Self(server.connection())
    }

    fn key(kind: &str) -> String {
        format!("adv-sem:semaphore_{kind}:{NAME}")
    }

    fn ask<T: redis::FromRedisValue>(&mut self, command: &str, arguments: &[&str]) -> T {
        redis::cmd(command).arg(arguments).query(&mut self.0).unwrap()
    }

    /// Returns when the lease of a holder ends, by the server's clock.
    fn renew_by(&mut self, id: AcquisitionId) -> Option<f64> {
        self.ask("ZSCORE", &[&Self::key("main"), &id.to_string()])
    }

    fn now(&mut self) -> f64 {
        let (seconds, micros): (f64, f64) = self.ask("TIME", &[]);
        seconds + micros / 1e6
    }

    /// Returns in how many milliseconds a key expires: -1 for never, -2 if it does not exist.
    fn expires_in(&mut self, kind: &str) -> i64 {
        self.ask("PTTL", &[&Self::key(kind)])
    }

    /// Returns whether each connection of leasehold's clients is subscribed, by its id on the server.
    fn connections(&mut self) -> BTreeMap<u64, bool> {
        let list: String = self.ask("CLIENT", &["LIST"]);
        let field = |line: &str, name: &str| {
            let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        list.lines()
            .filter(|line| field(line, "user").as_deref() != Some("fixture"))
            .map(|line| {
                let subscribes = field(line, "sub").as_deref() != Some("0");
                (field(line, "id").unwrap().parse().unwrap(), subscribes)
            })
            .collect()
    }
}
