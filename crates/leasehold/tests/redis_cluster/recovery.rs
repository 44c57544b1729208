//! What a client does during and after a fault: deadlines, the end of outages, renewed subscriptions.

use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use testkit::redis_cluster::{RedisCluster, slot_of};
use testkit::wait::{blocking, deadline, eventually};

use super::faults::name_on;
use super::{CLUSTER, acquire, connect, main_key, semaphore};

const SHORT: Duration = Duration::from_millis(300);

/// An outage of all nodes ends when they answer again, although the map of the cluster has not changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_all_nodes_ends() {
    let cluster = RedisCluster::start_with(60_000, &[]);
    let builder = Client::redis_builder(&cluster.url()).connect_timeout(SHORT);
    let client = deadline(builder.answer_timeout(SHORT).open()).await.unwrap();
    let name = name_on(&cluster, 0, "outage");
    acquire(&semaphore(&client, &name, 1)).await.release().await.unwrap();
    (0..6).for_each(|node| cluster.pause(node));
    // The waiter makes the client notice the outage.
    let waiter = tokio::spawn(semaphore(&client, &name, 1).acquire());
    eventually(async || client.outage().is_some()).await;
    // By then the client has asked every node for the map in vain.
    tokio::time::sleep(10 * SHORT).await;
    (0..6).for_each(|node| cluster.resume(node));
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();
    eventually(async || client.outage().is_none()).await;
}

/// A user who may not subscribe cannot wait. An attempt that still acquires a permit releases it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_channels_leaves_nothing_behind() {
    let add = |cluster: &RedisCluster| {
        for node in 0..6 {
            let mut user = redis::cmd("ACL");
            user.arg("SETUSER").arg(&["silent", "on", ">pw", "~*", "+@all", "resetchannels"]);
            user.exec(&mut cluster.connection(node)).unwrap();
        }
    };
    CLUSTER.blocking(add).await;
    let client = deadline(Client::redis(&CLUSTER.url_with("silent", "pw"))).await.unwrap();
    let lock = client.lock("without channels").build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    let waits = deadline(lock.acquire()).await;
    assert!(matches!(waits, Err(Error::Denied { .. })), "{waits:?}");
    assert!(deadline(guard.release()).await.unwrap());
    let refused = deadline(semaphore(&client, "without channels", 1).acquire()).await;
    assert!(matches!(refused, Err(Error::Denied { .. })), "{refused:?}");

    let looks = connect(&CLUSTER).await;
    assert!(!deadline(looks.locks().is_locked("without channels")).await.unwrap());
    drop(acquire(&semaphore(&looks, "without channels", 1)).await);
}

/// Returns a lock key on the node with this index.
pub(super) fn lock_on(cluster: &RedisCluster, node: usize) -> String {
    let mut keys = (0..1000).map(|number| format!("lock {number}"));
    let is_there = |key: &String| cluster.primary_of(slot_of(&format!("{{{key}}}"))) == node;
    keys.find(is_there).expect("a lock on each node")
}

/// Returns how often a node has refused something with this error.
pub(super) async fn refusals(cluster: &RedisCluster, node: usize, error: &'static str) -> u32 {
    let count = move |cluster: &RedisCluster| {
        let mut connection = cluster.connection(node);
        let info: String = redis::cmd("INFO").arg("errorstats").query(&mut connection).unwrap();
        let prefix = format!("errorstat_{error}:count=");
        let counted = info.lines().find_map(|line| line.strip_prefix(&prefix));
        counted.map_or(0, |count| count.parse::<u32>().unwrap())
    };
    cluster.blocking(count).await
}

/// Asks about a lock, and returns how long the call took to fail.
async fn fails_after(client: &Client, key: &str) -> Duration {
    let asked = Instant::now();
    let answer = deadline(client.locks().is_locked(key)).await;
    assert!(matches!(answer, Err(Error::Unavailable { .. })), "{answer:?}");
    asked.elapsed()
}

/// A cluster that only answers that it is down delays no call beyond its deadline, however often it answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_end_in_time_while_the_cluster_is_down() {
    let cluster = RedisCluster::start_primaries(3);
    let builder = Client::redis_builder(&cluster.url()).answer_timeout(Duration::from_secs(1));
    let client = deadline(builder.open()).await.unwrap();
    let (name, key) = (name_on(&cluster, 1, "down"), lock_on(&cluster, 1));
    let semaphore = client.semaphore(&name, 1).lease(Duration::from_secs(12)).build().unwrap();
    let held = acquire(&semaphore).await;
    assert!(!client.locks().is_locked(&key).await.unwrap());
    cluster.kill(0);
    // The renewal is due, and is refused repeatedly.
    eventually(async || refusals(&cluster, 1, "CLUSTERDOWN").await > 10).await;
    for _ in 0..3 {
        let after = fails_after(&client, &key).await;
        assert!(after < Duration::from_millis(1500), "{after:?}");
    }
    drop(held);
}

/// A silent node delays no call beyond its deadline, however much the others answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_to_a_silent_node_end_in_time_while_others_answer() {
    let cluster = RedisCluster::start_with(60_000, &[]);
    let builder = Client::redis_builder(&cluster.url()).answer_timeout(Duration::from_secs(1));
    let client = deadline(builder.open()).await.unwrap();
    let (name, key) = (name_on(&cluster, 1, "answers"), lock_on(&cluster, 0));
    let semaphore = semaphore(&client, &name, 1);
    let load = tokio::spawn(async move {
        loop {
            drop(acquire(&semaphore).await);
        }
    });
    assert!(!client.locks().is_locked(&key).await.unwrap());
    cluster.pause(0);
    for _ in 0..3 {
        let after = fails_after(&client, &key).await;
        assert!(after < Duration::from_millis(1500), "{after:?}");
    }
    load.abort();
    cluster.resume(0);
    assert!(!deadline(client.locks().is_locked(&key)).await.unwrap());
}

/// Locks are acquired from threads that have no runtime.
#[test]
fn locks_need_no_runtime() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime.block_on(connect(&CLUSTER));
    let threads: Vec<_> = (0..3)
        .map(|thread| {
            let client = client.clone();
            std::thread::spawn(move || {
                for number in 0..300 {
                    let lock =
                        client.lock(&format!("no runtime {thread} {number}")).build().unwrap();
                    let guard = wait_for(lock.try_acquire()).unwrap().unwrap();
                    assert!(wait_for(guard.release()).unwrap());
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("a thread without a runtime");
    }
}

/// Polls a future on this thread, without a runtime.
fn wait_for<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = std::pin::pin!(future);
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let began = Instant::now();
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "not within ten seconds");
        std::thread::park_timeout(Duration::from_secs(1));
    }
}

/// Fails unless the client listens at the current primary of the name. A client far from the head
/// asks rarely, but must still listen there.
async fn listens_at(cluster: &RedisCluster, client: &Client, name: &str) {
    let channel = format!("adv-sem:wake:{}", client.id());
    let key = main_key(name);
    let listens = async || {
        let (cluster, key) = (cluster.clone(), key.clone());
        let channels =
            blocking(move || cluster.node(cluster.primary_of_key(&key)).shard_channels()).await;
        channels.iter().any(|name| name.starts_with(&channel))
    };
    let listening = tokio::time::timeout(Duration::from_secs(8), eventually(listens));
    listening.await.expect("the client listens");
}

/// A waiter with this many ahead of it asks once in thirty seconds.
const AHEAD: u32 = 60;

async fn waits_far_behind(
    ahead: &Client,
    client: &Client,
    name: &str,
) -> Vec<tokio::task::JoinHandle<()>> {
    let first = semaphore(ahead, name, 1);
    let held = acquire(&first).await;
    let mut waiting = Vec::new();
    waiting.push(tokio::spawn(async move {
        let _held = held;
        std::future::pending::<()>().await;
    }));
    for _ in 0..AHEAD {
        let waiter = first.acquire();
        waiting.push(tokio::spawn(async move { drop(waiter.await) }));
    }
    eventually(async || first.stats().await.unwrap().waiting == AHEAD as usize).await;
    let waiter = semaphore(client, name, 1).acquire();
    let id = waiter.id();
    waiting.push(tokio::spawn(async move { drop(waiter.await) }));
    eventually(async || first.position(&id).await.unwrap().is_some()).await;
    // After a second the client asks again, and learns how many are ahead.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    waiting
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_far_behind_listens_where_its_slot_has_moved() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let name = name_on(&cluster, 0, "far behind");
    let waiting = waits_far_behind(&one, &other, &name).await;
    let slot = slot_of(&main_key(&name));
    // The slot moves back to a node to which the client is still connected, and which has ended the subscription.
    for (from, to) in [(0, 1), (1, 0)] {
        cluster.blocking(move |cluster| cluster.move_slot(slot, from, to)).await;
        listens_at(&cluster, &other, &name).await;
    }
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_far_behind_listens_at_the_next_primary() {
    let cluster = RedisCluster::start();
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let name = name_on(&cluster, 0, "far behind");
    let waiting = waits_far_behind(&one, &other, &name).await;
    cluster.kill(0);
    cluster.blocking(|cluster| cluster.wait_failover(0, Duration::from_secs(30))).await;
    listens_at(&cluster, &other, &name).await;
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// The connection is lost, and the node stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_far_behind_listens_over_its_next_connection() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let name = name_on(&cluster, 0, "far behind");
    let waiting = waits_far_behind(&one, &other, &name).await;
    cluster
        .blocking(|cluster| {
            let mut kill = redis::cmd("CLIENT");
            kill.arg(&["KILL", "TYPE", "pubsub"]);
            kill.exec(&mut cluster.connection(0)).unwrap();
        })
        .await;
    listens_at(&cluster, &other, &name).await;
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// The client asks about a name in a moving slot occasionally, not as fast as the node refuses it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_on_its_way_is_not_asked_for_in_a_circle() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let client = connect(&cluster).await;
    let name = name_on(&cluster, 0, "in a circle");
    let slot = slot_of(&main_key(&name));
    let held = acquire(&semaphore(&client, &name, 1)).await;
    let moving = cluster.blocking(move |cluster| cluster.begin_move(slot, 0, 1)).await;
    let some = moving.clone();
    assert_eq!(blocking(move || some.move_keys(1)).await, 1);
    let refused = async || refusals(&cluster, 0, "TRYAGAIN").await;
    let waiter = tokio::spawn(semaphore(&client, &name, 1).acquire());
    eventually(async || refused().await > 2).await;
    let (began, before) = (Instant::now(), refused().await);
    eventually(async || refused().await > before + 10).await;
    let each = began.elapsed() / (refused().await - before);
    assert!(each > Duration::from_millis(8), "asked every {each:?}");
    blocking(move || moving.end()).await;
    assert!(deadline(held.release()).await.unwrap());
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();
}

/// A waiter that times out while its slot moves could not be served: that is an outage, not contention.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_slot_is_on_its_way_is_not_served() {
    let cluster = RedisCluster::start_with(5000, &[]);
    let client = connect(&cluster).await;
    let name = name_on(&cluster, 0, "not served");
    let slot = slot_of(&main_key(&name));
    let semaphore = semaphore(&client, &name, 1);
    let held = acquire(&semaphore).await;
    let waiter = semaphore.acquire().within(Duration::from_secs(4));
    let waiter = tokio::spawn(waiter.into_future());
    eventually(async || semaphore.stats().await.unwrap().waiting == 1).await;
    let moving = cluster.blocking(move |cluster| cluster.begin_move(slot, 0, 1)).await;
    let some = moving.clone();
    assert_eq!(blocking(move || some.move_keys(1)).await, 1);
    let error = deadline(waiter).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    blocking(move || moving.end()).await;
    assert!(deadline(held.release()).await.unwrap());
}
