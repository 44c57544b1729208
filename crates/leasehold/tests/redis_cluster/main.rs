//! A Redis cluster: the conformance suite, and what happens when nodes fail and slots move.

#![cfg(feature = "redis")]

use std::sync::LazyLock;

use leasehold::{Client, Permit, Semaphore};
use testkit::conformance::Store;
use testkit::redis_cluster::RedisCluster;
use testkit::wait::deadline;

mod faults;
mod hangs;
mod keys;
mod map;
mod recovery;
mod sharing;
mod slots;

/// Shared by the tests that break nothing: each uses its own names.
static CLUSTER: LazyLock<RedisCluster> = LazyLock::new(|| RedisCluster::start_with(5000, &[]));

struct Cluster;

impl Store for Cluster {
    async fn client(&self) -> Client {
        connect(&CLUSTER).await
    }
}

testkit::conformance!(Cluster);

async fn connect(cluster: &RedisCluster) -> Client {
    deadline(Client::redis(&cluster.url())).await.expect("a cluster that was just started")
}

fn semaphore(client: &Client, name: &str, capacity: u32) -> Semaphore {
    client.semaphore(name, capacity).build().unwrap()
}

async fn acquire(semaphore: &Semaphore) -> Permit {
    deadline(semaphore.acquire()).await.unwrap()
}

/// The key that every name has while it is held.
fn main_key(name: &str) -> String {
    format!("adv-sem:semaphore_main:{{{name}}}")
}
