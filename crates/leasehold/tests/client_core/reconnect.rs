//! What a client with many waiters asks when it is connected again.
//!
//! A connection that subscribes is closed by the server when more than its limit waits to be read. What the client asks
//! must not be answered by more than that at a time, or it loses every connection that it makes.

use std::time::Duration;

use leasehold::{Client, Error, Permit};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinSet;

use super::{NAME, acquire, ask, connect, one, release};

const WAITERS: u32 = 2000;
/// How often a client may connect before it has recovered.
const RECOVERED: u64 = 4;

/// A server with a limit of 64 KiB, one permit that `other` holds, and a client behind a proxy with many waiters.
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
        eventually(async || crowd.census() == (1, WAITERS)).await;
        crowd
    }

    /// Past the library: statistics of so many holders are more than the limit as well.
    fn census(&self) -> (u32, u32) {
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
    // This one watches for a while: a connection that is lost again and again is made anew within a second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let made = crowd.proxy.traffic().accepted - before;
    assert!(made <= RECOVERED, "connected {made} times");
    assert!(release(crowd.held).await);
    let first = deadline(crowd.waiters.join_next()).await.unwrap().unwrap().unwrap();
    assert!(release(first).await);
}

/// All waiters are granted their permits at once, so that their wake-ups alone are more than the limit. After that the
/// client asks about every one of them.
#[tokio::test]
async fn wake_ups_beyond_the_output_buffer_do_not_make_a_client_reconnect_forever() {
    let mut crowd = Crowd::gather().await;
    let before = crowd.proxy.traffic().accepted;
    let room_for_all = WAITERS + 2;
    // Declared by both, so that this declaration is the newest one, whichever client asks next.
    let _declared = crowd.client.semaphore(NAME, room_for_all).build().unwrap();
    let wider = crowd.other.semaphore(NAME, room_for_all).build().unwrap();
    let more = acquire(&wider).await;
    let waiters = std::mem::take(&mut crowd.waiters);
    let permits = tokio::time::timeout(Duration::from_secs(10), waiters.join_all()).await;
    let made = crowd.proxy.traffic().accepted - before;
    assert!(made <= RECOVERED, "connected {made} times");
    for permit in permits.expect("all are granted") {
        permit.unwrap().check().unwrap();
    }
    assert!(release(more).await);
    eventually(async || crowd.census() == (1, 0)).await;
}

/// After a restart the server counts its connections anew, and another client may have the number of our old one. A client
/// that may not ask which run of the server it talks to must not close that one.
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
    // Innocent ones have every number that our client may have had.
    let mut innocent: Vec<_> = (0..newest + 5).map(|_| server.connection()).collect();
    let ids: Vec<u64> =
        innocent.iter_mut().map(|one| redis::cmd("CLIENT").arg("ID").query(one).unwrap()).collect();
    assert!(ids.contains(&newest), "{ids:?} and {newest}");
    let before = proxy.traffic().accepted;
    proxy.heal();
    eventually(async || proxy.traffic().accepted > before).await;
    // It works again, so that it has closed whatever it wanted to close.
    let again = acquire(&client.semaphore("another", 1).build().unwrap()).await;
    for one in &mut innocent {
        assert!(redis::cmd("PING").query::<String>(one).is_ok(), "an innocent client was closed");
    }
    release(again).await;
}
