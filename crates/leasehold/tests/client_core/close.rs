//! A close ends every wait.

use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use testkit::redis_server::RedisServer;
use testkit::wait::deadline;

use super::{MINUTES, NAME, PROMPT, connect, only_when_notified, within};

/// Waits for a lease that another client holds, and closes the waiting client.
async fn a_close_ends_the_wait(client: Client, other: Client) {
    let declare = |client: &Client| {
        client.pool(NAME, 1).ttl(MINUTES).retry(only_when_notified()).build().unwrap()
    };
    let held = deadline(declare(&other).lease("holder")).await.unwrap();
    let pool = declare(&client);
    // The waiter's first request finds the pool full; the next would follow after minutes.
    assert!(deadline(pool.try_lease("waiter")).await.unwrap().is_none());
    let waiter = tokio::spawn(async move { pool.lease("waiter").await });
    let early = tokio::time::sleep(Duration::from_millis(300));
    early.await;
    assert!(!waiter.is_finished(), "the other client holds the lease");

    let closed = Instant::now();
    within(5 * PROMPT, client.close()).await.unwrap();
    let error = within(5 * PROMPT, waiter).await.unwrap().map(drop).unwrap_err();
    assert!(matches!(error, Error::Closed), "{error:?}");
    let took = closed.elapsed();
    assert!(took < PROMPT, "it took {took:?}");
    drop(held);
}

#[tokio::test]
async fn a_close_ends_the_wait_for_a_lease_of_a_pool_in_memory() {
    let client = Client::memory();
    // In memory only clones share a pool, so the close also ends the holder's lease.
    a_close_ends_the_wait(client.clone(), client).await;
}

#[tokio::test]
async fn a_close_ends_the_wait_for_a_lease_of_a_pool_on_redis() {
    let server = RedisServer::start();
    a_close_ends_the_wait(connect(&server.url()).await, connect(&server.url()).await).await;
}
