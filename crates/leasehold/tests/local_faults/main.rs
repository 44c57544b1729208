//! What the local store survives: processes that die or stop, and files that are not what they should be.

#![cfg(all(feature = "local", target_os = "linux"))]

use std::time::{Duration, Instant};

use leasehold::{AcquisitionId, Client, Error, Permit, Semaphore};
use rusqlite::Connection;
use testkit::local_store::LocalStore;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinHandle;

mod crowd;
mod files;
mod forks;
mod opening;
mod owners;
mod processes;
mod reboot;
mod short_times;

/// The entry point of the processes that the tests start.
#[test]
fn child() {
    testkit::child::play(|part, arguments| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            match part {
                "hammer" => crowd::play(arguments).await,
                "stranger" => files::play(arguments).await,
                "forked writer" | "forked crowd" => forks::play(part, arguments).await,
                "blocker" | "impatient" => opening::play(part, arguments).await,
                _ => processes::play(part, arguments).await,
            }
        });
    });
}

const NAME: &str = "x";

/// How soon the death of a process must be noticed, and how much a busy machine may add to that.
const NOTICED: Duration = Duration::from_millis(250);
const SLACK: Duration = Duration::from_millis(250);

async fn open(store: &LocalStore) -> Client {
    Client::local(store.path()).await.expect("the store can be opened")
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

/// Opens the database directly, without the library.
fn look(store: &LocalStore) -> Connection {
    Connection::open(store.path()).unwrap()
}

fn count(store: &LocalStore, table: &str) -> u32 {
    let count = format!("SELECT count(*) FROM {table}");
    look(store).query_row(&count, [], |row| row.get(0)).unwrap()
}

/// An acquire in the queue, in its own task, that records when it was granted.
struct Waiter {
    id: AcquisitionId,
    task: JoinHandle<(Instant, Result<Permit, Error>)>,
}

impl Waiter {
    /// Starts an acquire, and returns when it is in the queue.
    async fn join(semaphore: &Semaphore) -> Self {
        let acquire = semaphore.acquire();
        let id = acquire.id();
        let task = tokio::spawn(async move {
            let result = acquire.await;
            (Instant::now(), result)
        });
        eventually(async || semaphore.position(&id).await.unwrap().is_some()).await;
        Self { id, task }
    }

    /// Returns the permit, and when it was granted.
    async fn granted(self) -> (Instant, Permit) {
        let (at, result) = deadline(self.task).await.unwrap();
        let permit = result.unwrap();
        assert_eq!(permit.id(), self.id);
        (at, permit)
    }
}
