//! Redis behind sentinels: the conformance suite, and what happens when servers and sentinels fail.

#![cfg(feature = "redis")]

use std::sync::LazyLock;

use leasehold::{Client, Permit, Semaphore};
use testkit::conformance::Store;
use testkit::redis_sentinel::RedisSentinel;
use testkit::wait::deadline;

mod access;
mod faults;
mod roles;

/// Shared by the tests that break nothing: each uses its own names.
static SERVERS: LazyLock<RedisSentinel> = LazyLock::new(RedisSentinel::start);

struct Sentinel;

impl Store for Sentinel {
    async fn client(&self) -> Client {
        connect(&SERVERS.url()).await
    }
}

testkit::conformance!(Sentinel);

async fn connect(url: &str) -> Client {
    deadline(Client::redis(url)).await.expect("servers that were just started")
}

fn one(client: &Client) -> Semaphore {
    client.semaphore("one", 1).build().unwrap()
}

async fn acquire(semaphore: &Semaphore) -> Permit {
    deadline(semaphore.acquire()).await.unwrap()
}
