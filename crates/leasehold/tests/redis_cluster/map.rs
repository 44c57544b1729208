//! How a client learns the map of the cluster, while nodes mislead it or do not answer.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use testkit::redis_cluster::RedisCluster;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::faults::name_on;
use super::recovery::refusals;
use super::{acquire, semaphore};

/// Removes a node from the cluster, as `redis-cli --cluster del-node` does. It keeps running.
fn remove(cluster: &RedisCluster, node: usize) {
    let id: String =
        redis::cmd("CLUSTER").arg("MYID").query(&mut cluster.connection(node)).unwrap();
    for other in (0..cluster.nodes().len()).filter(|other| *other != node) {
        let mut forget = redis::cmd("CLUSTER");
        forget.arg("FORGET").arg(&id).exec(&mut cluster.connection(other)).unwrap();
    }
    redis::cmd("CLUSTER").arg(&["RESET", "HARD"]).exec(&mut cluster.connection(node)).unwrap();
}

/// A node that has left the cluster knows no other node. The client does not prefer its empty map,
/// even while no other node is sure of its map.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_left_the_cluster_misleads_no_client() {
    let cluster = RedisCluster::start_primaries(3);
    let left = cluster.blocking(RedisCluster::add_node).await;
    let client = deadline(Client::redis(&cluster.url_of(&[left]))).await.unwrap();
    let names = [0, 1, 2].map(|node| name_on(&cluster, node, "left"));
    for name in &names {
        acquire(&semaphore(&client, name, 1)).await.release().await.unwrap();
    }
    cluster.blocking(move |cluster| remove(cluster, left)).await;
    cluster.kill(1);
    let asked = async || cluster.blocking(move |cluster| asked(&cluster.node(left)).1).await;
    let before = asked().await;
    eventually(async || asked().await > before + 8).await;
    cluster.blocking(|cluster| cluster.revive(1)).await;
    for name in &names {
        acquire(&semaphore(&client, name, 1)).await.release().await.unwrap();
    }
    eventually(async || client.outage().is_none()).await;
}

/// Returns how many connections, and how many `CLUSTER SLOTS`, a node has received since it was started.
fn asked(node: &RedisServer) -> (u64, u64) {
    let mut connection = node.connection();
    let info: String = redis::cmd("INFO").arg("stats").query(&mut connection).unwrap();
    let made = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    (made.unwrap().trim().parse().unwrap(), node.command_count("cluster|slots"))
}

/// While the cluster is down, a client asks its nodes for the map occasionally, over its existing connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_down_is_asked_at_a_moderate_rate() {
    let cluster = RedisCluster::start_primaries(3);
    let client = deadline(Client::redis(&cluster.url())).await.unwrap();
    let semaphore = semaphore(&client, &name_on(&cluster, 1, "down"), 1);
    let held = acquire(&semaphore).await;
    let waiter = tokio::spawn(semaphore.acquire());
    cluster.kill(0);
    eventually(async || refusals(&cluster, 1, "CLUSTERDOWN").await > 3).await;
    let count = async || cluster.blocking(|cluster| asked(&cluster.node(1))).await;
    // The counting itself makes connections.
    let (first, second) = (count().await, count().await);
    let by_counting = second.0 - first.0;
    let (began, before) = (Instant::now(), count().await);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after = count().await;
    let seconds = began.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss)]
    let rate = |count: u64| count as f64 / seconds;
    let connections = rate((after.0 - before.0).saturating_sub(by_counting));
    let questions = rate(after.1 - before.1);
    assert!(connections < 3.0 && questions < 12.0, "{connections} and {questions} per second");
    assert!(questions > 1.0, "{questions} questions per second");
    drop(held);
    waiter.abort();
}

/// A node that hangs does not delay the requests to the others, even while none of them is sure of its map.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_hangs_does_not_delay_the_map() {
    let cluster = RedisCluster::start_primaries(3);
    let client = deadline(Client::redis(&cluster.url())).await.unwrap();
    let semaphore = semaphore(&client, &name_on(&cluster, 1, "doubt"), 1);
    let held = acquire(&semaphore).await;
    let waiter = tokio::spawn(semaphore.acquire());
    cluster.pause(0);
    eventually(async || refusals(&cluster, 1, "CLUSTERDOWN").await > 3).await;
    let count = async || cluster.blocking(|cluster| asked(&cluster.node(1)).1).await;
    let (began, before) = (Instant::now(), count().await);
    eventually(async || count().await > before + 5).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "five questions took {took:?}");
    cluster.resume(0);
    drop(held);
    waiter.abort();
}

/// Opening is bounded by the time to connect, however many nodes do not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opening_fails_in_time_whatever_nodes_are_silent() {
    let silent: Vec<_> = (0..9).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let hosts: Vec<_> =
        silent.iter().map(|fresh| fresh.local_addr().unwrap().to_string()).collect();
    let builder = Client::redis_builder(&format!("redis-cluster://{}", hosts.join(",")));
    let began = Instant::now();
    let opened = deadline(builder.connect_timeout(Duration::from_secs(1)).open()).await;
    let took = began.elapsed();
    assert!(matches!(opened, Err(Error::Unavailable { .. })), "{opened:?}");
    assert!(took < Duration::from_millis(1900), "{took:?}");
}

/// One primary that can be reached is enough to open a client, and the others are not waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opening_does_not_wait_for_a_primary_that_hangs() {
    let cluster = RedisCluster::start_with(60_000, &[]);
    for node in 0..3 {
        cluster.pause(node);
        let builder = Client::redis_builder(&cluster.url());
        let began = Instant::now();
        let opened = deadline(builder.connect_timeout(Duration::from_secs(8)).open()).await;
        let took = began.elapsed();
        cluster.resume(node);
        drop(opened.unwrap());
        assert!(took < Duration::from_secs(4), "{took:?}");
    }
}

/// A node names itself in `MOVED` if another node announces its address. The client asks it again at a moderate rate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_redirects_to_itself_is_asked_at_a_moderate_rate() {
    let cluster = RedisCluster::start_primaries(3);
    let (liar, wrong) = (1, 0);
    let names = [name_on(&cluster, liar, "self"), name_on(&cluster, wrong, "self")];
    let announce = async |port: u16| {
        let set = move |cluster: &RedisCluster| {
            let mut set = redis::cmd("CONFIG");
            set.arg("SET").arg("cluster-announce-port").arg(port);
            set.exec(&mut cluster.connection(liar)).unwrap();
        };
        cluster.blocking(set).await;
    };
    announce(cluster.node(wrong).port()).await;
    let port = cluster.node(liar).port().to_string();
    let is_named = async || {
        let port = port.clone();
        let slots = move |cluster: &RedisCluster| {
            let mut slots = redis::cmd("CLUSTER");
            let slots = slots.arg("NODES").query(&mut cluster.connection(wrong));
            let slots: String = slots.unwrap();
            slots.contains(&format!(":{port}@"))
        };
        cluster.blocking(slots).await
    };
    eventually(async || !is_named().await).await;
    let client = deadline(Client::redis(&cluster.url_of(&[wrong]))).await.unwrap();
    let [moved, served] = names.map(|name| semaphore(&client, &name, 1));
    let waiter = tokio::spawn(moved.acquire());
    let moved_so_far = async || refusals(&cluster, wrong, "MOVED").await;
    eventually(async || moved_so_far().await > 0).await;
    let (began, before) = (Instant::now(), moved_so_far().await);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let rate = f64::from(moved_so_far().await - before) / began.elapsed().as_secs_f64();
    // The waiter sends two commands, 50 times a second at first. The record of the client has three.
    assert!(rate < 400.0, "{rate} commands per second");
    // Other names are served meanwhile.
    acquire(&served).await.release().await.unwrap();
    announce(0).await;
    eventually(is_named).await;
    drop(deadline(waiter).await.unwrap().unwrap());
}
