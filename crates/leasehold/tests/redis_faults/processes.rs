//! Clients that die or are stopped.

use std::cell::Cell;
use std::future::{pending, poll_fn};
use std::net::Ipv4Addr;
use std::pin::pin;
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use testkit::child::{self, Child};
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{
    AT_ONCE, Keys, LEASE, Waiter, acquire, all_are_free, connect, forks, held_and_waiting, one,
    one_beating, release,
};

/// A semaphore with a rate.
const RATED: &str = "rated";

/// More waiters than a script reads at once.
const CROWD: usize = 1500;

/// In the child: plays the named part.
pub(crate) fn play(part: &str, arguments: &[&str]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let _told = child::lines_from_test();
        if part == "forked crowd" {
            return forks::crowd(arguments[0]).await;
        }
        let client = connect(arguments[0]).await;
        match part {
            "holder" => hold(&client).await,
            "crowd" => crowd(&client).await,
            "worker" => work(&client, arguments[1]).await,
            "waiter" => {
                let permit = client.semaphore(RATED, 1).build().unwrap().acquire().await;
                unreachable!("{permit:?} was granted to a stopped process");
            }
            _ => unreachable!("unknown part {part:?}"),
        }
    });
}

async fn hold(client: &Client) {
    let permit = acquire(&one_beating(client, LEASE)).await;
    child::say(&permit.id().to_string());
    pending::<()>().await;
}

async fn crowd(client: &Client) {
    let semaphore = one(client);
    for _ in 0..CROWD {
        tokio::spawn(semaphore.acquire());
    }
    pending::<()>().await;
}

/// Does one step of work for every byte it receives, and reports when it waits for the next.
async fn work(client: &Client, address: &str) {
    let mut bytes = TcpStream::connect(address).await.unwrap();
    let semaphore = one_beating(client, LEASE);
    let checked = Cell::new(None);
    let mut working = pin!(semaphore.with(async |permit| {
        let _checked = CheckOnDrop(permit, &checked);
        while let Ok(step) = bytes.read_u8().await {
            child::say(&format!("did {step}"));
        }
    }));
    // Reported outside the work, because a process that is stopped within a step continues within it.
    let result = poll_fn(|cx| {
        let polled = working.as_mut().poll(cx);
        if polled.is_pending() {
            child::say("waits");
        }
        polled
    });
    child::say(&match result.await {
        Err(Error::Lost { reason, .. }) => format!("lost: {reason:?}"),
        other => format!("{other:?}"),
    });
    child::say(&format!("check failed: {:?}", checked.get()));
    pending::<()>().await;
}

/// Records what `check` returns when the work is dropped.
struct CheckOnDrop<'a>(&'a leasehold::Permit, &'a Cell<Option<bool>>);

impl Drop for CheckOnDrop<'_> {
    fn drop(&mut self) {
        self.1.set(Some(self.0.check().is_err()));
    }
}

/// Two of four in time are enough, because a busy machine may be late itself.
#[tokio::test]
async fn the_next_waiter_follows_a_killed_holder_within_the_heartbeat_interval() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let mut took = Vec::new();
    let in_time = |took: &Vec<Duration>| {
        took.iter().filter(|took| **took <= LEASE + Duration::from_millis(200)).count()
    };
    while in_time(&took) < 2 {
        assert!(took.len() < 4, "it took {took:?}");
        took.push(follow_a_killed_holder(&server, &client).await);
    }
    all_are_free(&one(&client)).await;
}

/// Returns the time from the kill to the grant.
async fn follow_a_killed_holder(server: &RedisServer, client: &Client) -> Duration {
    let mut holder = Child::start("holder", &[&server.url()]);
    let id = holder.says().await.parse().unwrap();
    let waiter = Waiter::join(&one_beating(client, LEASE)).await;

    // The worst moment to die is just after a renewal.
    let mut keys = Keys::of(server);
    let before = keys.renew_by(id).expect("it holds");
    eventually(async || keys.renew_by(id).expect("it is alive") > before).await;
    holder.kill();
    let killed = Instant::now();

    let (at, permit) = waiter.granted().await;
    let took = at - killed;
    assert!(took >= LEASE / 2, "granted after {took:?}, before its lease ended");
    assert!(release(permit).await);
    took
}

#[tokio::test]
async fn a_crowd_of_killed_waiters_does_not_hold_up_the_next() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = one(&client);
    let held = acquire(&semaphore).await;
    let mut crowd = Child::start("crowd", &[&server.url()]);
    eventually(async || held_and_waiting(&semaphore).await == (1, CROWD)).await;
    let other = connect(&server.url()).await;
    let waiter = Waiter::join(&one(&other)).await;

    crowd.kill();
    // Two clients, and the connection for statistics.
    eventually(async || server.connected_clients() <= 3).await;
    assert_eq!(
        held_and_waiting(&semaphore).await,
        (1, CROWD + 1),
        "the crowd is still in the queue"
    );
    let released = Instant::now();
    assert!(release(held).await);

    let (at, permit) = waiter.granted().await;
    assert!(at - released < AT_ONCE, "it took {:?}", at - released);
    release(permit).await;
}

/// Queues waiters as killed clients leave them.
fn leave_behind(keys: &mut Keys, ids: &[String], heartbeat: Duration) {
    let now = keys.now();
    for (kind, score) in [("waiting", now), ("waiting_heartbeat", now + heartbeat.as_secs_f64())] {
        let (key, score) = (Keys::key(kind), score.to_string());
        let members = ids.iter().flat_map(|id| [score.as_str(), id]);
        let arguments: Vec<_> = [key.as_str()].into_iter().chain(members).collect();
        let added: usize = keys.ask("ZADD", &arguments);
        assert_eq!(added, ids.len());
    }
}

#[tokio::test]
async fn a_crowd_of_killed_clients_does_not_hold_up_the_next() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&client)).await;
    let ids: Vec<_> = (0..2000).map(|number| format!("{number:011}-0")).collect();
    leave_behind(&mut Keys::of(&server), &ids, Duration::from_secs(100));
    let waiter = Waiter::join(&one(&other)).await;
    let released = Instant::now();
    assert!(release(held).await);

    let (at, permit) = waiter.granted().await;
    assert!(at - released < AT_ONCE, "it took {:?}", at - released);
    assert!(release(permit).await);
    assert_eq!(held_and_waiting(&one(&client)).await, (0, ids.len()), "they keep their places");
}

/// So many that a script that skipped them all would block the server.
#[tokio::test]
async fn a_crowd_that_is_too_large_to_pass_over_holds_up_the_next_until_its_heartbeats_are_over() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&client)).await;
    let ids: Vec<_> = (0..15_000).map(|number| format!("{:011}-{number}", 0)).collect();
    let left = Instant::now();
    leave_behind(&mut Keys::of(&server), &ids, LEASE);
    let waiter = Waiter::join(&one(&other)).await;
    assert!(release(held).await);

    let (at, permit) = waiter.granted().await;
    let took = at - left;
    assert!(took >= LEASE, "{} of them passed over after {took:?}", ids.len());
    assert!(took < LEASE + 2 * AT_ONCE, "it took {took:?}");
    assert!(release(permit).await);
}

#[tokio::test]
async fn a_client_that_was_stopped_past_its_lease_knows_when_it_goes_on() {
    let server = RedisServer::start();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut worker = Child::start("worker", &[&server.url(), &address]);
    let (mut steps, _) = deadline(listener.accept()).await.unwrap();
    steps.write_u8(1).await.unwrap();
    while worker.says().await != "did 1" {}
    assert_eq!(worker.says().await, "waits");

    worker.stop();
    let client = connect(&server.url()).await;
    let permit = acquire(&one_beating(&client, LEASE)).await;
    // It has work to do when it continues, and must not do it.
    steps.write_u8(2).await.unwrap();
    worker.go_on();
    assert_eq!(worker.says().await, "lost: NotRenewed");
    assert_eq!(worker.says().await, "check failed: Some(true)");
    permit.check().expect("the other client holds the permit");
    assert!(release(permit).await);
}

/// With two starts an hour, this test would time out if the token were lost.
#[tokio::test]
async fn the_token_of_a_permit_that_is_never_claimed_goes_back() {
    let limit = Duration::from_secs(1);
    let server = RedisServer::start();
    let client = Client::redis_builder(&server.url()).claim_within(limit).open().await.unwrap();
    let hour = Duration::from_secs(3600);
    let semaphore = client.semaphore(RATED, 1).rate(2, hour).burst(2).build().unwrap();
    let held = acquire(&semaphore).await;
    let mut stopped = Child::start("waiter", &[&server.url()]);
    eventually(async || held_and_waiting(&semaphore).await == (1, 1)).await;
    let other = connect(&server.url()).await.semaphore(RATED, 1).build().unwrap();
    let waiter = Waiter::join(&other).await;
    stopped.stop();
    // The second token goes to the stopped process.
    assert!(release(held).await);
    assert!(held_and_waiting(&semaphore).await.1 > 0);
    let (_, permit) = waiter.granted().await;
    assert!(semaphore.stats().await.unwrap().next_token.is_some(), "there is no third token");
    assert!(release(permit).await);
    stopped.kill();
}
