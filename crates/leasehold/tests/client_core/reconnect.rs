//! What a client with many waiters asks after a reconnect.
//!
//! Redis closes a subscribed connection when more than its output buffer limit waits to be read. So the client's
//! questions must not cause more replies than that at a time, or it loses every connection that it makes.

use std::time::Duration;

use leasehold::{Client, Error, Permit};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinSet;

use super::{NAME, acquire, ask, connect, one, release};

const WAITERS: u32 = 2000;
/// How often a client may connect until it has recovered.
const RECOVERED: u64 = 4;

/// A server with a limit of 64 KiB, a permit that `other` holds, and a client behind a proxy with many waiters.
struct Crowd {
    server: RedisServer,
    proxy: FaultProxy,
    client: Client,
    other: Client,
    held: Permit,
    waiters: JoinSet<Result<Permit, Error>>,
}

impl Crowd {
    async fn gather() -> Self {
        let server = RedisServer::start();
        let limit = ["CONFIG", "SET", "client-output-buffer-limit", "pubsub 65536 0 0"];
        assert_eq!(ask::<String>(&server, &limit), "OK");
        let proxy = FaultProxy::start(server.port());
        let (client, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
        let held = acquire(&one(&other)).await;
        let mut waiters = JoinSet::new();
        let semaphore = one(&client);
        for _ in 0..WAITERS {
            waiters.spawn(semaphore.acquire());
        }
        let crowd = Self { server, proxy, client, other, held, waiters };
        eventually(async || crowd.held_and_waiting() == (1, WAITERS)).await;
        crowd
    }

    /// Reads the keys directly, because the statistics of so many holders exceed the limit as well.
    fn held_and_waiting(&self) -> (u32, u32) {
        let count = |kind| {
            let key = format!("adv-sem:semaphore_{kind}:{NAME}");
            ask::<u32>(&self.server, &["ZCARD", &key])
        };
        (count("main"), count("waiting"))
    }
}

#[tokio::test]
async fn a_small_output_buffer_does_not_make_a_client_with_many_waiters_reconnect_forever() {
    let mut crowd = Crowd::gather().await;
    let before = crowd.proxy.traffic().accepted;
    crowd.proxy.cut();
    crowd.proxy.until(|traffic| traffic.accepted > before).await;
    // Watches for a while: a client that keeps losing its connection reconnects within a second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let made = crowd.proxy.traffic().accepted - before;
    assert!(made <= RECOVERED, "connected {made} times");
    assert!(release(crowd.held).await);
    let first = deadline(crowd.waiters.join_next()).await.unwrap().unwrap().unwrap();
    assert!(release(first).await);
}

/// All waiters are granted their permits at once, so that their wake-ups alone exceed the limit.
/// Afterwards the client asks about every one of them.
#[tokio::test]
async fn wake_ups_beyond_the_output_buffer_do_not_make_a_client_reconnect_forever() {
    let mut crowd = Crowd::gather().await;
    let before = crowd.proxy.traffic().accepted;
    let room_for_all = WAITERS + 2;
    // Both clients declare it, so that this capacity is the newest, whichever client asks next.
    let _declared = crowd.client.semaphore(NAME, room_for_all).build().unwrap();
    let wider = crowd.other.semaphore(NAME, room_for_all).build().unwrap();
    let more = acquire(&wider).await;
    let waiters = std::mem::take(&mut crowd.waiters);
    let permits = tokio::time::timeout(Duration::from_secs(10), waiters.join_all()).await;
    let made = crowd.proxy.traffic().accepted - before;
    assert!(made <= RECOVERED, "connected {made} times");
    for permit in permits.expect("every waiter is granted a permit") {
        permit.unwrap().check().unwrap();
    }
    assert!(release(more).await);
    eventually(async || crowd.held_and_waiting() == (1, 0)).await;
}

/// A restarted server numbers its connections anew, so another client may get the id of our old
/// connection. A client that may not ask for the server's run id must not close that connection.
#[tokio::test]
async fn a_client_that_does_not_know_the_run_of_the_server_closes_no_other() {
    let server = RedisServer::start_with(&["--user app on nopass ~* &* +@all -info"]);
    let proxy = FaultProxy::start(server.port());
    let url = proxy.url().replace("redis://", "redis://app:any@");
    let client = connect(&url).await;
    let _permit = acquire(&one(&client)).await;
    let newest: u64 = ask(&server, &["CLIENT", "ID"]);
    proxy.refuse(true);
    proxy.cut();
    server.restart_empty();
    // Other connections have every id that our client may have had.
    let mut innocent: Vec<_> = (0..newest + 5).map(|_| server.connection()).collect();
    let ids: Vec<u64> =
        innocent.iter_mut().map(|one| redis::cmd("CLIENT").arg("ID").query(one).unwrap()).collect();
    assert!(ids.contains(&newest), "{ids:?} and {newest}");
    let before = proxy.traffic().accepted;
    proxy.heal();
    eventually(async || proxy.traffic().accepted > before).await;
    // The client works again, so it has already closed whatever it was going to close.
    let again = acquire(&client.semaphore("another", 1).build().unwrap()).await;
    for one in &mut innocent {
        assert!(
            redis::cmd("PING").query::<String>(one).is_ok(),
            "another client's connection was closed"
        );
    }
    release(again).await;
}
