//! A worker that does not use the library: clients of another program, which follows only the published documents.
//!
//! These clients have no guards and no `check()`. Such a program believes an answer for as long as the document allows,
//! counted from before the request. Each step has a time limit. Most clients release what they requested, and repeat
//! that until the store confirms it. Some die without a trace, while they wait or hold. Half of those that use
//! semaphores have a TTL, and with it they let the keys of the semaphore expire, including its capacity. Leases of
//! pools have the other program's own TTL.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold::compat::sync_guard::LockLayout;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult};
use testkit::seed000::{self, Options, Seed000};
use testkit::seed002::{self, Seed002};
use testkit::seed003::Seed003;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::{Settings, Shared};
use crate::clock::{self, MILLISECOND, Micros, SECOND};
use crate::history::{Event, HistoryFile, How, OpId};
use crate::plan::{self, THINGS, Thing};

const STEP: Duration = Duration::from_millis(1500);
/// One in this many dies without a trace.
const DYING: u32 = 8;
/// With a TTL, the other program's keys expire ten seconds after that TTL.
const TTL: Duration = Duration::from_secs(6);
/// The time that such a program subtracts, so that it does not believe for longer than the store.
const CAUTION: Micros = 200 * MILLISECOND;

/// A task of the other program.
struct Other {
    shared: Arc<Shared>,
    rng: Rng,
    url: String,
}

pub(super) async fn play(
    settings: &Settings,
    history_file: &Arc<HistoryFile>,
    finish: watch::Receiver<bool>,
) {
    history_file.note(Event::Begin { clients: "-".to_owned() });
    let clients = Vec::new();
    let shared = Shared {
        history_file: history_file.clone(),
        clients,
        finish,
        spent: std::sync::Mutex::default(),
        outages: Default::default(),
    };
    let shared = Arc::new(shared);
    let other = |task| Other {
        shared: shared.clone(),
        rng: settings.rng(task),
        url: settings.store.clone(),
    };
    let tasks = [
        tokio::spawn(other(0).semaphores(None)),
        tokio::spawn(other(1).semaphores(Some(TTL))),
        tokio::spawn(other(2).pools()),
        tokio::spawn(other(3).locks(settings.lock_layout())),
    ];
    for task in tasks {
        task.await.expect("a task that does not panic");
    }
}

/// Runs one step, with a time limit.
async fn step<T>(call: impl Future<Output = RedisResult<T>>) -> Option<T> {
    timeout(STEP, call).await.ok()?.ok()
}

impl Other {
    fn finishing(&self) -> bool {
        *self.shared.finish.borrow()
    }

    async fn pause(&mut self, millis: u64) {
        sleep(Duration::from_millis(self.rng.u64(1..=millis))).await;
    }

    /// Holds for as long as it may believe.
    async fn hold(&mut self, op: OpId, good_until: Micros) {
        let mut left = self.rng.u64(0..300) * MILLISECOND;
        loop {
            let since = clock::now();
            if since >= good_until {
                return;
            }
            self.shared.history_file.note(Event::Hold { op, since });
            if left == 0 || self.finishing() {
                return;
            }
            let pause = left.min(30 * MILLISECOND);
            left -= pause;
            sleep(Duration::from_micros(pause)).await;
        }
    }

    fn granted(&self, op: OpId, fence: Option<u64>, slot: u64) {
        let slot = u32::try_from(slot).unwrap_or(u32::MAX);
        self.shared.history_file.note(Event::Grant { op, fence, slot, weight: 1 });
    }

    async fn connection(&self) -> Option<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(Some(STEP))
            .set_connection_timeout(Some(STEP));
        let client = redis::Client::open(self.url.as_str()).ok()?;
        step(client.get_multiplexed_async_connection_with_config(&config)).await
    }

    fn dies(&mut self) -> bool {
        self.rng.u32(..DYING) == 0
    }

    /// Follows document 000, step by step.
    async fn semaphores(mut self, ttl: Option<Duration>) {
        let (at, thing) = shared_thing(plan::Kind::Semaphore);
        let options = Options { attempts: 1, ..Options::default() };
        while !self.finishing() {
            let Some(seed) = step(Seed000::connect_with(&self.url, "adv-sem", options)).await
            else {
                self.pause(200).await;
                continue;
            };
            let mut fine = true;
            while fine && !self.finishing() {
                self.pause(120).await;
                let (id, op) = (seed000::new_id(), self.shared.record_request(at, "-"));
                let how = self.semaphore(&seed, thing, ttl, &id, op).await;
                fine = how.is_some();
                // Release it, whatever the outcome, unless the client dies.
                let gone = how != Some(How::Failed) && self.take_back(thing, &id).await;
                let how = how.unwrap_or(How::Failed);
                self.shared.end(op, if gone { how } else { How::Failed });
            }
        }
    }

    /// Waits in the queue and holds. Returns `Failed` if the client dies, and `None` if the store could not be reached.
    async fn semaphore(
        &mut self,
        seed: &Seed000,
        thing: &Thing,
        ttl: Option<Duration>,
        id: &str,
        op: OpId,
    ) -> Option<How> {
        let (limit, heartbeat) = (u64::from(thing.capacity), thing.lease_time());
        step(seed.queue(thing.name, id, heartbeat, ttl)).await?;
        if self.dies() {
            return Some(How::Failed);
        }
        let patience = clock::now() + self.rng.u64(1..10) * SECOND;
        loop {
            step(seed.wake_up_nexts(thing.name, limit, heartbeat, ttl)).await?;
            let poll = Duration::from_millis(500);
            if step(seed.wait_notification(id, poll)).await? {
                break;
            }
            if self.finishing() || clock::now() > patience {
                return Some(How::Cancelled);
            }
            step(seed.ping(thing.name, id)).await?;
        }
        let sent = clock::now();
        let (changed, card) = step(seed.confirm(thing.name, id, limit, heartbeat, ttl)).await?;
        if changed == 0 {
            return Some(How::Lost);
        }
        self.granted(op, None, card);
        self.hold(op, sent + thing.lease - CAUTION).await;
        if self.dies() {
            return Some(How::Failed);
        }
        let sent = clock::now();
        if self.rng.bool() && step(seed.ping(thing.name, id)).await?.1 == 1 {
            self.hold(op, sent + thing.lease - CAUTION).await;
        }
        self.shared.history_file.note(Event::Ending { op });
        Some(How::Released)
    }

    /// Releases until the store confirms it, over a new connection each time, because the old one may be dead.
    async fn take_back(&mut self, thing: &Thing, id: &str) -> bool {
        let options = Options { attempts: 1, ..Options::default() };
        for _ in 0..100 {
            let release = async {
                Seed000::connect_with(&self.url, "adv-sem", options)
                    .await?
                    .release(thing.name, id)
                    .await
            };
            if step(release).await.is_some() {
                return true;
            }
            self.pause(200).await;
        }
        false
    }

    /// Follows document 002.
    async fn pools(mut self) {
        let (at, thing) = shared_thing(plan::Kind::Pool);
        let (capacity, ttl) = (u64::from(thing.capacity), seed002::TTL_SECONDS);
        let mut connection = None;
        while !self.finishing() {
            self.pause(100).await;
            if connection.is_none() {
                connection = self.connection().await.map(Seed002::new);
            }
            let Some(pool) = connection.clone() else { continue };
            let (instance, op) = (seed000::new_id(), self.shared.record_request(at, "-"));
            let sent = clock::now();
            let answer = step(pool.acquire(thing.name, &instance, capacity, ttl)).await;
            let how = match &answer {
                None => How::Failed,
                Some(answer) if !answer.success => How::Full,
                Some(_) => {
                    self.granted(op, None, 1);
                    // Each program considers a lease dead after its own TTL, and ours is shorter.
                    self.hold(op, sent + thing.lease - CAUTION).await;
                    let sent = clock::now();
                    let renewed = step(pool.renew(thing.name, &instance, ttl)).await;
                    if renewed.is_some_and(|renewed| renewed.success) {
                        self.hold(op, sent + thing.lease - CAUTION).await;
                    }
                    self.shared.history_file.note(Event::Ending { op });
                    if self.dies() {
                        self.shared.end(op, How::Failed);
                        continue;
                    }
                    let released = step(pool.release(thing.name, &instance, ttl)).await;
                    released.map_or(How::Failed, |_| How::Released)
                }
            };
            self.shared.end(op, how);
            if how == How::Failed {
                connection = None;
            }
        }
    }

    /// Follows document 003, in either version of the program that it describes.
    async fn locks(mut self, layout: LockLayout) {
        let (at, thing) = shared_thing(plan::Kind::Lock);
        let ttl = thing.lease / MILLISECOND;
        let mut connection = None;
        while !self.finishing() {
            self.pause(60).await;
            if connection.is_none() {
                let new = self.connection().await;
                let locks = new.map(|connection| Seed003::new(connection, "syncguard"));
                connection = match layout {
                    LockLayout::SyncGuard2 => locks.map(Seed003::version_2),
                    _ => locks,
                };
            }
            let Some(locks) = connection.clone() else { continue };
            let op = self.shared.record_request(at, "-");
            let sent = clock::now();
            let how = match step(locks.acquire(thing.name, ttl)).await {
                None => How::Failed,
                Some(None) => How::Full,
                Some(Some(lock)) => {
                    self.granted(op, lock.fence.parse().ok(), 1);
                    self.hold(op, sent + thing.lease - CAUTION).await;
                    self.shared.history_file.note(Event::Ending { op });
                    let released = step(locks.release(&lock.lock_id)).await;
                    released.map_or(How::Failed, |_| How::Released)
                }
            };
            self.shared.end(op, how);
            if how == How::Failed {
                connection = None;
            }
        }
    }
}

/// The thing of this kind that the other program shares with the workers.
fn shared_thing(kind: plan::Kind) -> (usize, &'static Thing) {
    let shared = THINGS.iter().enumerate().find(|(_, thing)| thing.shared && thing.kind == kind);
    shared.expect("something is shared of each kind")
}
