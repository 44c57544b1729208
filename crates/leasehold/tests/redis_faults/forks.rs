//! Clients that are killed while a forked copy of their process lives.

use std::future::pending;

use testkit::child::{self, Child, ForkedCopy};
use testkit::redis_server::RedisServer;
use testkit::wait::eventually;

use super::{Waiter, acquire, builder, connect, held_and_waiting, one, release};

/// In the child: waits ten times for the semaphore, and forks a copy of the process.
pub(crate) async fn crowd(url: &str) {
    let client = builder(url).open().await.unwrap();
    for _ in 0..10 {
        tokio::spawn(one(&client).acquire());
    }
    eventually(async || held_and_waiting(&one(&client)).await.1 == 10).await;
    child::say(&lone_fork::fork_idle(60).unwrap().to_string());
    pending::<()>().await;
}

/// `url` is where the child connects to.
async fn check(server: &RedisServer, url: &str) {
    let client = connect(&server.url()).await;
    let permit = acquire(&one(&client)).await;
    let before = server.connected_clients();
    let mut crowd = Child::start("forked crowd", &[url]);
    let copy = ForkedCopy::new(&crowd.says().await);
    let waiter = Waiter::join(&one(&client)).await;
    crowd.kill();
    eventually(async || server.connected_clients() == before).await;
    assert!(release(permit).await);
    // If the dead client counted as subscribed, each of its waiters would cost the claim time: 50 s in all.
    assert!(release(waiter.permit().await).await);
    copy.assert_alive();
}

#[tokio::test]
async fn the_waiters_of_a_killed_client_are_skipped_although_a_forked_copy_lives() {
    let server = RedisServer::start();
    check(&server, &server.url()).await;
}

#[tokio::test]
async fn the_waiters_of_a_killed_client_on_a_unix_socket_are_skipped_although_a_forked_copy_lives()
{
    let server = RedisServer::start();
    check(&server, &server.unix_url()).await;
}
