//! Nodes that die, hang, change their roles, join and leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use leasehold::{Client, Error, Semaphore};
use testkit::redis_cluster::{RedisCluster, Reset};
use testkit::wait::{deadline, eventually};
use tokio::task::JoinSet;

use super::{acquire, connect, main_key, semaphore};

/// Far longer than a failover takes.
const WITHIN: Duration = Duration::from_secs(30);

/// Returns a name whose keys are on the node with this index.
pub(super) fn name_on(cluster: &RedisCluster, node: usize, about: &str) -> String {
    let mut names = (0..1000).map(|number| format!("{about} {number}"));
    names.find(|name| cluster.primary_of_key(&main_key(name)) == node).expect("a name on each node")
}

/// Tasks of several clients that acquire and release, and count how many hold at once.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    most: Arc<AtomicU32>,
    grants: Arc<AtomicU32>,
    tasks: JoinSet<()>,
}

impl Load {
    pub(super) async fn start(cluster: &RedisCluster, name: &str, capacity: u32) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            most: Arc::default(),
            grants: Arc::default(),
            tasks: JoinSet::new(),
        };
        let holding = Arc::new(AtomicU32::new(0));
        for _ in 0..3 {
            let client = connect(cluster).await;
            for _ in 0..4 {
                let contended = semaphore(&client, name, capacity);
                let (stop, most, grants) =
                    (load.stop.clone(), load.most.clone(), load.grants.clone());
                let holding = holding.clone();
                load.tasks.spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let permit = deadline(contended.acquire()).await.unwrap();
                        let now = holding.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                        holding.fetch_sub(1, Ordering::SeqCst);
                        grants.fetch_add(1, Ordering::SeqCst);
                        // During a failover the release may continue in the background.
                        let _ = permit.release().await;
                    }
                });
            }
        }
        load
    }

    /// Returns when permits are granted again.
    pub(super) async fn goes_on(&self) {
        let before = self.grants.load(Ordering::SeqCst);
        eventually(async || self.grants.load(Ordering::SeqCst) > before + 100).await;
    }

    /// Stops the tasks, and returns the highest number of concurrent holders.
    pub(super) async fn end(self) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        deadline(self.tasks.join_all()).await;
        self.most.load(Ordering::SeqCst)
    }
}

/// Checks that a wake-up hands a permit from one client to another: the waiter listens at the primary of the name.
pub(super) async fn hands_over(
    cluster: &RedisCluster,
    one: &Semaphore,
    other: &Semaphore,
    client: &Client,
) {
    let held = acquire(one).await;
    let waiter = other.acquire();
    let id = waiter.id();
    let waiter = tokio::spawn(waiter);
    eventually(async || one.position(&id).await.unwrap().is_some()).await;
    let channel = format!("adv-sem:wake:{}", client.id());
    let primary = cluster.primary_of_key(&main_key(one.name()));
    let listens = async || {
        let node = cluster.node(primary);
        let channels = testkit::wait::blocking(move || node.shard_channels()).await;
        channels.iter().any(|channel_there| channel_there.starts_with(&channel))
    };
    eventually(listens).await;
    held.release().await.unwrap();
    let permit = deadline(waiter).await.unwrap().unwrap();
    permit.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_killed_is_replaced_by_its_replica() {
    let cluster = RedisCluster::start();
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (dead, safe) = (name_on(&cluster, 0, "dead"), name_on(&cluster, 1, "safe"));
    let held = acquire(&semaphore(&one, &dead, 1)).await;
    let fence = held.fence();
    let waiter = semaphore(&other, &dead, 1).acquire();
    let id = waiter.id();
    let waiter = tokio::spawn(waiter);
    let looking = semaphore(&one, &dead, 1);
    eventually(async || looking.position(&id).await.unwrap().is_some()).await;
    // So that nothing of this is lost in the failover.
    let replicated = cluster.clone();
    testkit::wait::blocking(move || {
        let count: u32 =
            redis::cmd("WAIT").arg(1).arg(10_000).query(&mut replicated.connection(0)).unwrap();
        assert_eq!(count, 1);
    })
    .await;

    cluster.kill(0);
    // The other primaries serve their names for as long as the cluster is not down.
    let began = semaphore(&one, &safe, 1).acquire().within(WITHIN);
    deadline(began).await.unwrap().release().await.unwrap();
    cluster.blocking(|cluster| cluster.wait_failover(0, WITHIN)).await;

    held.check().unwrap();
    assert!(deadline(held.release()).await.unwrap());
    let permit = deadline(waiter).await.unwrap().unwrap();
    assert!(permit.fence() > fence);
    permit.release().await.unwrap();
    hands_over(&cluster, &semaphore(&one, &dead, 1), &semaphore(&other, &dead, 1), &other).await;
    assert_eq!(one.outage().map(|outage| outage.error.to_string()), None);
}

/// A manual failover loses nothing: the limit holds all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manual_failover_keeps_the_limit() {
    let cluster = RedisCluster::start();
    let name = name_on(&cluster, 0, "failover");
    let load = Load::start(&cluster, &name, 2).await;
    load.goes_on().await;
    for _ in 0..2 {
        let primary = cluster.primary_of_key(&main_key(&name));
        let replica = cluster.replica_of(primary);
        cluster.blocking(move |cluster| cluster.failover(replica)).await;
        load.goes_on().await;
    }
    assert_eq!(load.end().await, 2);
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    hands_over(&cluster, &semaphore(&one, &name, 1), &semaphore(&other, &name, 1), &other).await;
}

/// Stops replication: the replica gets a wrong password for its primary.
async fn cut_off(cluster: &RedisCluster, replica: usize) {
    let cut_off = move |cluster: &RedisCluster| {
        let mut connection = cluster.connection(replica);
        redis::cmd("CONFIG").arg(&["SET", "masterauth", "wrong"]).exec(&mut connection).unwrap();
        redis::cmd("CLIENT").arg(&["KILL", "TYPE", "master"]).exec(&mut connection).unwrap();
    };
    cluster.blocking(cut_off).await;
}

/// The holder of a permit that was not replicated learns that it has lost it, and waiters queue again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_no_replica_has_copied_is_lost() {
    let cluster = RedisCluster::start();
    let client = connect(&cluster).await;
    let name = name_on(&cluster, 0, "uncopied");
    let replica = cluster.replica_of(0);
    cut_off(&cluster, replica).await;
    let lease = Duration::from_secs(10);
    let contended = client.semaphore(&name, 1).lease(lease).build().unwrap();
    let held = acquire(&contended).await;
    let waiter = tokio::spawn(contended.acquire());
    cluster.kill(0);
    cluster.blocking(|cluster| cluster.wait_failover(0, WITHIN)).await;
    deadline(held.lost()).await;
    let permit = deadline(waiter).await.unwrap().unwrap();
    assert!(permit.fence() > held.fence());
    permit.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stands_still_is_waited_for() {
    // A node timeout so long that no replica takes over.
    let cluster = RedisCluster::start_with(60_000, &[]);
    let client = connect(&cluster).await;
    let (still, other) = (name_on(&cluster, 0, "still"), name_on(&cluster, 1, "other"));
    let held = acquire(&semaphore(&client, &still, 1)).await;
    cluster.pause(0);
    // The other nodes work, and the paused one is reported as an outage, not as contention.
    for _ in 0..10 {
        acquire(&semaphore(&client, &other, 1)).await.release().await.unwrap();
    }
    let limit = Duration::from_millis(500);
    let error = semaphore(&client, &still, 1).acquire().within(limit).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    cluster.resume(0);
    held.check().unwrap();
    assert!(deadline(held.release()).await.unwrap());
    acquire(&semaphore(&client, &still, 1)).await.release().await.unwrap();
}

/// Calls to a node that does not answer fail in time, although other nodes keep answering.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stands_still_keeps_no_call_beyond_its_limit() {
    let cluster = RedisCluster::start_with(60_000, &[]);
    let limit = Duration::from_secs(1);
    let client = Client::redis_builder(&cluster.url()).answer_timeout(limit).open();
    let client = deadline(client).await.unwrap();
    let (still, other) = (name_on(&cluster, 0, "silent"), name_on(&cluster, 1, "busy"));
    let busy = semaphore(&client, &other, 8);
    let mut traffic = JoinSet::new();
    for _ in 0..4 {
        let busy = busy.clone();
        traffic.spawn(async move {
            loop {
                busy.acquire().await.unwrap().release().await.unwrap();
            }
        });
    }
    let pool = client.pool(&still, 1).build().unwrap();
    cluster.pause(0);
    let (lock, contended) = (client.locks(), semaphore(&client, &still, 1));
    let failed = deadline(async {
        tokio::join!(
            lock.is_locked(&still),
            contended.try_acquire(),
            pool.try_acquire("one"),
            contended.stats()
        )
    });
    let (locked, tried, leased, stats) = failed.await;
    let errors = [locked.unwrap_err(), tried.unwrap_err(), leased.unwrap_err(), stats.unwrap_err()];
    for error in errors {
        assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    }
    cluster.resume(0);
    traffic.abort_all();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stands_still_for_too_long_is_replaced() {
    let cluster = RedisCluster::start();
    let name = name_on(&cluster, 0, "paused");
    let load = Load::start(&cluster, &name, 2).await;
    load.goes_on().await;
    cluster.pause(0);
    cluster.blocking(|cluster| cluster.wait_failover(0, WITHIN)).await;
    load.goes_on().await;
    // It comes back as a replica, with requests in its sockets that it must not serve.
    cluster.resume(0);
    cluster.blocking(RedisCluster::wait_ready).await;
    load.goes_on().await;
    load.end().await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    hands_over(&cluster, &semaphore(&one, &name, 1), &semaphore(&other, &name, 1), &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_join_and_replicas_that_are_reset_disturb_nobody() {
    let cluster = RedisCluster::start();
    let name = name_on(&cluster, 0, "joined");
    let load = Load::start(&cluster, &name, 2).await;
    load.goes_on().await;
    let new = cluster.blocking(RedisCluster::add_node).await;
    load.goes_on().await;
    let slot = testkit::redis_cluster::slot_of(&main_key(&name));
    cluster.blocking(move |cluster| cluster.move_slot(slot, 0, new)).await;
    load.goes_on().await;
    for how in [Reset::Soft, Reset::Hard] {
        let replica = cluster.replica_of(1);
        cluster.blocking(move |cluster| cluster.reset_replica(replica, how)).await;
        load.goes_on().await;
    }
    assert_eq!(load.end().await, 2);
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    hands_over(&cluster, &semaphore(&one, &name, 1), &semaphore(&other, &name, 1), &other).await;
}
