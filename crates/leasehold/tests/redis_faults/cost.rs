//! What a client sends when there is no fault.

use std::time::Duration;

use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::eventually;

use super::{acquire, connect, held_and_waiting, one, release};

#[tokio::test]
async fn an_acquire_is_one_round_trip_and_so_is_a_release() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one(&client);
    // Requests of the connect may still be under way. The last one sets the expiry of the client's record.
    eventually(async || server.command_count("expire") == 1).await;
    let count = || (proxy.requests(), server.command_count("evalsha"));

    for _ in 0..3 {
        let before = count();
        let permit = acquire(&semaphore).await;
        assert_eq!(count(), (before.0 + 1, before.1 + 1), "an acquire");
        assert!(release(permit).await);
        assert_eq!(count(), (before.0 + 2, before.1 + 2), "a release");
    }
}

#[tokio::test]
async fn a_thousand_waiters_share_a_connection_and_hardly_use_it() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let other = connect(&server.url()).await;
    let held = acquire(&one(&other)).await;
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        waiters.spawn(one(&client).acquire());
    }
    eventually(async || held_and_waiting(&one(&other)).await == (1, 1000)).await;
    assert!(proxy.connections() <= 2, "{} connections", proxy.connections());

    // Watches for a while.
    let before = proxy.requests();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let sent = proxy.requests() - before;
    assert!(sent <= 30, "{sent} commands in three seconds");
    assert!(release(held).await);
    let first = waiters.join_next().await.unwrap().unwrap().unwrap();
    assert!(release(first).await);
}
