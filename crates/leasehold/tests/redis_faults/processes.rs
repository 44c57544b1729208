//! Clients that die, or stand still.

use std::cell::Cell;
use std::future::pending;
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use testkit::child::{self, Child};
use testkit::redis_server::RedisServer;
use testkit::wait::eventually;

use super::{
    AT_ONCE, Keys, SECOND, Waiter, acquire, all_are_free, census, connect, one, one_beating,
    release,
};

const CROWD: usize = 100;

/// In the child.
pub(crate) fn play(part: &str, arguments: &[&str]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let told = child::told();
        let client = connect(arguments[0]).await;
        match part {
            "holder" => hold(&client).await,
            "crowd" => crowd(&client).await,
            "worker" => work(&client, told).await,
            _ => unreachable!("nobody plays {part}"),
        }
    });
}

async fn hold(client: &Client) {
    let permit = acquire(&one_beating(client, SECOND)).await;
    child::say(&permit.id().to_string());
    pending().await
}

async fn crowd(client: &Client) {
    let semaphore = one(client);
    for _ in 0..CROWD {
        tokio::spawn(semaphore.acquire());
    }
    pending().await
}

/// Does a step of its work for every line that it is told.
async fn work(client: &Client, told: tokio::sync::mpsc::UnboundedReceiver<String>) {
    let told = Cell::new(told);
    let checked = Cell::new(None);
    let result = one_beating(client, SECOND)
        .with(async |permit| {
            child::say(&permit.id().to_string());
            let mut told = told.replace(tokio::sync::mpsc::unbounded_channel().1);
            let _told = CheckOnDrop(permit, &checked);
            while let Some(line) = told.recv().await {
                child::say(&format!("did {line}"));
            }
        })
        .await;
    child::say(&match result {
        Err(Error::Lost { reason, .. }) => format!("lost: {reason:?}"),
        other => format!("{other:?}"),
    });
    child::say(&format!("check failed: {:?}", checked.get()));
    pending().await
}

/// What `check` says at the moment when the work is taken away.
struct CheckOnDrop<'a>(&'a leasehold::Permit, &'a Cell<Option<bool>>);

impl Drop for CheckOnDrop<'_> {
    fn drop(&mut self) {
        self.1.set(Some(self.0.check().is_err()));
    }
}

#[tokio::test]
async fn the_next_waiter_follows_a_killed_holder_within_the_heartbeat_interval() {
    let server = RedisServer::start();
    let mut holder = Child::start("holder", &[&server.url()]);
    let id = holder.says().await.parse().unwrap();
    let client = connect(&server.url()).await;
    let semaphore = one_beating(&client, SECOND);
    let waiter = Waiter::join(&semaphore).await;

    // The worst moment to die is just after a renewal.
    let mut keys = Keys::of(&server);
    let before = keys.renew_by(id).expect("it holds");
    eventually(async || keys.renew_by(id).expect("it is alive") > before).await;
    holder.kill();
    let killed = Instant::now();

    let (at, permit) = waiter.granted().await;
    let took = at - killed;
    assert!(took <= SECOND + Duration::from_millis(200), "it took {took:?}");
    assert!(took >= Duration::from_millis(500), "its lease had not ended after {took:?}");
    release(permit).await;
    all_are_free(&semaphore).await;
}

#[tokio::test]
async fn a_crowd_of_killed_waiters_does_not_hold_up_the_next() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = one(&client);
    let held = acquire(&semaphore).await;
    let mut crowd = Child::start("crowd", &[&server.url()]);
    eventually(async || census(&semaphore).await == (1, CROWD)).await;
    let other = connect(&server.url()).await;
    let waiter = Waiter::join(&one(&other)).await;

    crowd.kill();
    eventually(async || server.connected_clients() == 2).await;
    assert_eq!(census(&semaphore).await, (1, CROWD + 1), "the crowd is still in the queue");
    let released = Instant::now();
    assert!(release(held).await);

    let (at, permit) = waiter.granted().await;
    assert!(at - released < AT_ONCE, "it took {:?}", at - released);
    release(permit).await;
}

#[tokio::test]
async fn a_client_that_was_stopped_past_its_lease_knows_when_it_goes_on() {
    let server = RedisServer::start();
    let mut worker = Child::start("worker", &[&server.url()]);
    worker.says().await;
    worker.tell("one");
    assert_eq!(worker.says().await, "did one");

    worker.stop();
    let client = connect(&server.url()).await;
    let permit = acquire(&one_beating(&client, SECOND)).await;
    // It has work to do when it goes on, and must not do it.
    worker.tell("two");
    worker.go_on();
    assert_eq!(worker.says().await, "lost: NotRenewed");
    assert_eq!(worker.says().await, "check failed: Some(true)");
    permit.check().expect("the other holds");
    assert!(release(permit).await);
}
