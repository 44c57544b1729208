//! The client core through the public API, against real servers and real files: cancellation,
//! panics in foreign code, refusals and wakers that call back.
//!
//! What depends on time alone is tested in virtual time, next to the engine.

#![cfg(all(feature = "redis", feature = "local", target_os = "linux"))]

use std::panic::Location;
use std::time::Duration;

use leasehold::{AcquisitionId, Client, Error, Jitter, Permit, Retry, Semaphore};
use testkit::local_store::LocalStore;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinHandle;

mod bounds;
mod cancel;
mod reconnect;
mod refusal;
mod statistics;
mod supervision;
mod unanswered;
mod wakers;

/// The entry point of the processes that [`supervision`] starts.
#[test]
fn child() {
    testkit::child::play(supervision::play);
}

const NAME: &str = "x";
/// Longer than any test may take.
const MINUTES: Duration = Duration::from_secs(300);
/// The longest that anything may take without a fault, on a busy machine.
const PROMPT: Duration = Duration::from_secs(1);

/// A client on Redis with default settings. Every test connects here.
async fn connect(url: &str) -> Client {
    deadline(Client::redis_builder(url).open()).await.expect("the server that was just started")
}

/// The semaphore of the test, with one permit.
fn one(client: &Client) -> Semaphore {
    client.semaphore(NAME, 1).build().unwrap()
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

/// Awaits the future, but fails the test after `limit`.
#[track_caller]
fn within<F: Future>(limit: Duration, future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        let Ok(output) = tokio::time::timeout(limit, future).await else {
            panic!("the future at {caller} was not ready within {limit:?}")
        };
        output
    }
}

/// Retries only after minutes, so that a waiter that gets a lock or a pool lease earlier was notified.
fn only_when_notified() -> Retry {
    Retry::default().delay(MINUTES).max_delay(MINUTES).jitter(Jitter::None)
}

/// Retries at least twice a second, for minutes.
fn persistent() -> Retry {
    Retry::default().max_delay(Duration::from_millis(500))
}

/// An acquire in the queue, in its own task.
struct Waiter {
    task: JoinHandle<Result<Permit, Error>>,
}

impl Waiter {
    /// Starts an acquire, and returns when it is in the queue.
    async fn join(semaphore: &Semaphore) -> Self {
        let acquire = semaphore.acquire();
        let id: AcquisitionId = acquire.id();
        let task = tokio::spawn(acquire);
        eventually(async || semaphore.position(&id).await.unwrap().is_some()).await;
        Self { task }
    }
}

/// Sends a command to the server without the library.
#[track_caller]
fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let answer = redis::cmd(command[0]).arg(&command[1..]).query(&mut server.connection());
    answer.unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

async fn open(store: &LocalStore) -> Client {
    deadline(Client::local(store.path())).await.expect("a store of our own")
}
