//! A replica that takes over and lacks the last releases.

use std::time::{Duration, Instant};

use leasehold::{LossReason, Semaphore};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{Client, Waiter, acquire, connect, held_and_waiting, one, release};

fn two(client: &Client) -> Semaphore {
    client.semaphore(super::NAME, 2).build().unwrap()
}

/// Starts a replica, and waits until it has everything.
async fn replica_of(primary: &RedisServer) -> RedisServer {
    let replica = RedisServer::start();
    let mut follow = redis::cmd("REPLICAOF");
    follow.arg("127.0.0.1").arg(primary.port());
    follow.exec(&mut replica.connection()).unwrap();
    let replication = |server: &RedisServer| -> String {
        redis::cmd("INFO").arg("replication").query(&mut server.connection()).unwrap()
    };
    let offset = |info: &str, field: &str| -> Option<u64> {
        info.lines().find_map(|line| line.strip_prefix(field)?.trim().parse().ok())
    };
    eventually(async || {
        let (here, there) = (replication(&replica), replication(primary));
        let has = offset(&here, "slave_repl_offset:");
        here.contains("master_link_status:up") && has == offset(&there, "master_repl_offset:")
    })
    .await;
    replica
}

/// Leases last thirty seconds here, so only repeated releases can end what the replica still has.
#[tokio::test]
async fn releases_that_a_replica_lacks_are_repeated() {
    let primary = RedisServer::start();
    let proxy = FaultProxy::start(primary.port());
    let (here, there) = (connect(&proxy.url()).await, connect(&proxy.url()).await);
    let held = acquire(&two(&here)).await;
    let detached = acquire(&two(&there)).await.detach();
    let waiter = Waiter::join(&two(&there)).await;
    let replica = replica_of(&primary).await;
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut replica.connection()).unwrap();

    waiter.task.abort();
    eventually(async || held_and_waiting(&two(&here)).await == (2, 0)).await;
    assert!(release(held).await);
    assert!(deadline(two(&here).release(&detached)).await.unwrap());
    assert_eq!(held_and_waiting(&two(&here)).await, (0, 0));
    let direct = connect(&replica.url()).await;
    assert_eq!(held_and_waiting(&two(&direct)).await, (2, 1), "the replica lacks the releases");

    proxy.redirect(replica.port());
    proxy.cut();
    eventually(async || held_and_waiting(&two(&direct)).await == (0, 0)).await;
}

/// The client of a permit is notified at once if another client releases it, not only at its next renewal.
#[tokio::test]
async fn a_release_by_another_client_notifies_the_holder() {
    let server = RedisServer::start();
    let (here, there) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&here)).await;
    let began = Instant::now();
    assert!(deadline(one(&there).release(&held.id())).await.unwrap());
    assert_eq!(deadline(held.lost()).await, LossReason::Missing);
    // The next renewal would follow after six seconds.
    assert!(began.elapsed() < Duration::from_secs(5), "it took {:?}", began.elapsed());
}
