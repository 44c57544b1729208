//! A server, one of our clients and one of theirs.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use leasehold::{Client, Error, Permit, Semaphore};
use redis::FromRedisValue;
use testkit::redis_server::{RedisServer, expires_at};
use testkit::seed000::{Options, Seed000, new_id};
use testkit::wait::{deadline, eventually};
use tokio::task::JoinHandle;

/// The semaphore that is shared.
pub(crate) const NAME: &str = "shared";
/// The namespace of both, by default.
pub(crate) const NAMESPACE: &str = "adv-sem";
/// The heartbeat interval of their members. It differs from the one that we give them, so that
/// their confirm always changes a score.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(60);
/// How long to wait for what must happen without a heartbeat: shorter than any heartbeat interval.
pub(crate) const SOON: Duration = Duration::from_secs(15);

pub(crate) struct Both {
    pub(crate) server: RedisServer,
    pub(crate) ours: Client,
    pub(crate) theirs: Seed000,
    look: Mutex<redis::Connection>,
}

/// One of our waiters in the queue.
pub(crate) struct Waiter {
    pub(crate) id: String,
    task: JoinHandle<Result<Permit, Error>>,
}

impl Waiter {
    pub(crate) async fn permit(self) -> Permit {
        deadline(self.task).await.expect("a task that does not panic").expect("a permit")
    }

    /// Whether the acquire has not returned yet.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.task.is_finished()
    }

    /// Drops the acquire, or its permit if it has just been granted.
    pub(crate) fn cancel(self) {
        self.task.abort();
    }
}

impl Both {
    pub(crate) async fn start() -> Self {
        Self::start_with_skew(0.0).await
    }

    /// Starts with their clock this many seconds ahead.
    pub(crate) async fn start_with_skew(clock_skew: f64) -> Self {
        let server = RedisServer::start();
        let ours = Client::redis(&server.url()).await.expect("the server that was just started");
        let options = Options { clock_skew, ..Options::default() };
        let theirs = Seed000::connect_with(&server.url(), NAMESPACE, options).await.unwrap();
        let look = Mutex::new(server.connection());
        Self { server, ours, theirs, look }
    }

    /// Another client of ours.
    pub(crate) async fn another(&self) -> Client {
        Client::redis(&self.server.url()).await.expect("the same server")
    }

    /// The shared semaphore, as we declare it.
    pub(crate) fn semaphore(&self, capacity: u32) -> Semaphore {
        self.ours.semaphore(NAME, capacity).build().unwrap()
    }

    /// Queues one of our waiters.
    pub(crate) async fn we_queue(&self, semaphore: &Semaphore) -> Waiter {
        let acquire = semaphore.acquire();
        let id = acquire.id().to_string();
        let task = tokio::spawn(acquire);
        eventually(async || self.place(&id).is_some()).await;
        Waiter { id, task }
    }

    /// Queues one of their waiters.
    pub(crate) async fn they_queue(&self) -> String {
        let id = new_id();
        self.theirs.queue(NAME, &id, HEARTBEAT, None).await.unwrap();
        id
    }

    /// Lets one of theirs acquire a permit that is free.
    pub(crate) async fn they_hold(&self, limit: u64) -> String {
        let id = self.they_queue().await;
        assert_eq!(self.they_wake(limit).await, 1);
        self.they_were_notified(&id).await;
        self.they_confirm(&id, limit).await;
        id
    }

    pub(crate) async fn they_wake(&self, limit: u64) -> u64 {
        self.theirs.wake_up_nexts(NAME, limit, HEARTBEAT, None).await.unwrap()
    }

    pub(crate) async fn they_were_notified(&self, id: &str) {
        let notified = deadline(self.theirs.wait_notification(id, SOON)).await.unwrap();
        assert!(notified, "{id} was not notified");
    }

    pub(crate) async fn they_confirm(&self, id: &str, limit: u64) {
        let (changed, card) = self.theirs.confirm(NAME, id, limit, HEARTBEAT, None).await.unwrap();
        assert_eq!(changed, 1, "{id} has no permit to confirm");
        assert!(card <= limit, "{card} of {limit}");
    }

    /// Sends a command to the server.
    pub(crate) fn ask<T: FromRedisValue>(&self, command: &[&str]) -> T {
        let mut look = self.look.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = redis::cmd(command[0]).arg(&command[1..]).query(&mut *look);
        answer.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// The place of a waiter in the queue.
    pub(crate) fn place(&self, id: &str) -> Option<u64> {
        self.ask(&["ZRANK", &key("waiting"), id])
    }

    pub(crate) fn score(&self, kind: &str, id: &str) -> Option<f64> {
        self.ask(&["ZSCORE", &key(kind), id])
    }

    pub(crate) fn members(&self, kind: &str) -> Vec<String> {
        self.ask(&["ZRANGE", &key(kind), "0", "-1"])
    }

    pub(crate) fn holds(&self, id: &str) -> bool {
        self.score("main", id).is_some()
    }

    pub(crate) fn exists(&self, key: &str) -> bool {
        self.ask(&["EXISTS", key])
    }

    /// Returns the time until a key expires, in milliseconds; negative if it does not expire or does not exist.
    pub(crate) fn left(&self, kind: &str) -> i64 {
        self.ask(&["PTTL", &key(kind)])
    }

    /// Returns when a key expires, in milliseconds of the server's clock.
    pub(crate) fn ends(&self, kind: &str) -> i64 {
        let mut look = self.look.lock().unwrap_or_else(PoisonError::into_inner);
        expires_at(&mut look, &key(kind))
    }

    /// Returns the server's clock, in seconds.
    pub(crate) fn now(&self) -> f64 {
        let (seconds, micros): (f64, f64) = self.ask(&["TIME"]);
        seconds + micros / 1e6
    }

    /// Fails unless nothing is held, nothing waits, and no notification is left behind.
    pub(crate) async fn is_left_clean(&self) {
        for kind in ["main", "ttl", "waiting", "waiting_heartbeat", "info"] {
            eventually(async || !self.exists(&key(kind))).await;
        }
        let lists: Vec<String> = self.ask(&["KEYS", &notification("*")]);
        assert_eq!(lists, Vec::<String>::new());
    }
}

pub(crate) fn key(kind: &str) -> String {
    format!("{NAMESPACE}:semaphore_{kind}:{NAME}")
}

pub(crate) fn notification(id: &str) -> String {
    format!("{NAMESPACE}:acquisition_notification:{id}")
}
