//! Runtimes that shut down.

use leasehold::Client;
use testkit::redis_server::RedisServer;
use testkit::wait::eventually;
use tokio::runtime::Runtime;

use super::{
    Keys, LEASE, acquire, all_are_free, connect, held_and_waiting, one, one_beating, release,
};

#[test]
fn a_runtime_that_shuts_down_leaves_neither_waiters_nor_permits() {
    let server = RedisServer::start();
    let (doomed, looking) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    let other = looking.block_on(connect(&server.url()));
    doomed.spawn(live(server.url()));
    looking.block_on(eventually(async || held_and_waiting(&one(&other)).await == (1, 10)));

    doomed.shutdown_background();
    looking.block_on(all_are_free(&one(&other)));
    // One client, and its connection for statistics.
    looking.block_on(eventually(async || server.connected_clients() <= 2));
}

/// Holds and waits until it is dropped.
async fn live(url: String) {
    let client: Client = connect(&url).await;
    let _held = acquire(&one(&client)).await;
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..10 {
        waiters.spawn(one(&client).acquire());
    }
    waiters.join_next().await;
}

#[test]
fn a_permit_outlives_the_runtime_in_which_it_was_acquired() {
    let server = RedisServer::start();
    let (doomed, looking) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    let client = doomed.block_on(connect(&server.url()));
    let held = doomed.block_on(acquire(&one_beating(&client, LEASE)));
    drop(doomed);

    let mut keys = Keys::of(&server);
    let before = keys.renew_by(held.id()).expect("it holds");
    looking.block_on(eventually(async || keys.renew_by(held.id()).expect("it holds") > before));
    held.check().unwrap();
    assert!(looking.block_on(release(held)));
}
