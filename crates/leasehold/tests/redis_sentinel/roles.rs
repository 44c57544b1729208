//! Servers whose role differs from what a sentinel says.

use std::time::{Duration, Instant};

use leasehold::Client;
use testkit::redis_sentinel::{Options, RedisSentinel};
use testkit::wait::{deadline, eventually};

use super::{acquire, connect, one};

/// A replica that accepts writes is not the primary: what is written there is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_can_be_written_to_is_not_the_primary() {
    let options = Options { server_options: &["--replica-read-only no"], ..Options::default() };
    let servers = RedisSentinel::start_with(options);
    let old = servers.primary();
    let stale = servers.blocking(move |servers| servers.stale_sentinel(old)).await;
    servers.blocking(RedisSentinel::failover).await;
    let error = deadline(Client::redis(&servers.url_of(&[stale]))).await.unwrap_err();
    assert!(error.to_string().contains("the server is a replica"), "{error}");
    acquire(&one(&connect(&servers.url_of(&[stale, 0])).await)).await.release().await.unwrap();
}

/// Makes another server the primary through a sentinel that cannot demote the old one, which
/// therefore continues as a primary.
async fn fail_over_without_demotion(servers: &RedisSentinel, by: usize) {
    let fail_over = move |servers: &RedisSentinel| {
        let old = servers.named_by(by);
        let mut rights = redis::cmd("ACL");
        rights.arg(&["SETUSER", "fixture", "-slaveof", "-replicaof"]);
        rights.exec(&mut servers.server(old).connection()).unwrap();
        let mut failover = redis::cmd("SENTINEL");
        failover.arg(&["FAILOVER", "mymaster"]);
        failover.exec(&mut servers.sentinel(by).connection()).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while servers.named_by(by) == old {
            assert!(Instant::now() < until, "there was no failover");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    servers.blocking(fail_over).await;
}

/// Waits until some client listens to this sentinel.
async fn is_listened_to(servers: &RedisSentinel, sentinel: usize) {
    let listens = move |servers: &RedisSentinel| {
        servers.sentinel(sentinel).client_list().iter().any(|client| client.contains(" sub=1 "))
    };
    eventually(async || servers.blocking(listens).await).await;
}

/// The old primary answers, accepts writes and closes no connection. Only the announcement tells clients to leave it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_not_demoted_is_left() {
    let servers = RedisSentinel::start();
    let client = connect(&servers.url()).await;
    acquire(&one(&client)).await.release().await.unwrap();
    fail_over_without_demotion(&servers, 0).await;
    let other = connect(&servers.url()).await;
    let held = acquire(&one(&other)).await;
    eventually(async || one(&client).try_acquire().await.unwrap().is_none()).await;
    assert!(deadline(held.release()).await.unwrap());
}

/// One sentinel still names the old primary, which considers itself the primary. The other
/// sentinels have a newer configuration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_newest_configuration_names_the_primary() {
    let servers = RedisSentinel::start();
    let old = servers.primary();
    let stale = servers.blocking(move |servers| servers.stale_sentinel(old)).await;
    fail_over_without_demotion(&servers, 0).await;
    let held = acquire(&one(&connect(&servers.url()).await)).await;
    for _ in 0..10 {
        let client = connect(&servers.url_of(&[stale, 0, 1, 2])).await;
        let second = deadline(one(&client).try_acquire()).await.unwrap();
        assert!(second.is_none(), "the permit was granted twice");
    }
    assert!(deadline(held.release()).await.unwrap());
}

/// The sentinels that know the new primary die, and one that names the old primary is left. The
/// client knows a newer configuration, and does not go back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_sentinel_does_not_end_a_good_connection() {
    let servers = RedisSentinel::start();
    let old = servers.primary();
    let stale = servers.blocking(move |servers| servers.stale_sentinel(old)).await;
    fail_over_without_demotion(&servers, 0).await;
    let held = acquire(&one(&connect(&servers.url_of(&[0])).await)).await;
    let client = connect(&servers.url_of(&[0, stale])).await;
    assert!(deadline(one(&client).try_acquire()).await.unwrap().is_none());
    for sentinel in 0..3 {
        servers.kill_sentinel(sentinel);
    }
    is_listened_to(&servers, stale).await;
    // The stale sentinel may close connections to the new primary. Then the store is unreachable.
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        let second = deadline(one(&client).try_acquire()).await;
        assert!(!matches!(second, Ok(Some(_))), "the permit was granted twice");
    }
    held.check().unwrap();
}

/// One sentinel hangs and announces nothing. The client hears of the new primary from another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_hangs_does_not_hide_a_failover() {
    for hung in 0..3 {
        let servers = RedisSentinel::start();
        let client = connect(&servers.url()).await;
        acquire(&one(&client)).await.release().await.unwrap();
        for sentinel in 0..3 {
            is_listened_to(&servers, sentinel).await;
        }
        servers.pause_sentinel(hung);
        fail_over_without_demotion(&servers, (hung + 1) % 3).await;
        let other = connect(&servers.url()).await;
        let held = acquire(&one(&other)).await;
        eventually(async || one(&client).try_acquire().await.unwrap().is_none()).await;
        assert!(deadline(held.release()).await.unwrap());
        servers.resume_sentinel(hung);
    }
}
