use std::path::PathBuf;

use super::*;
use crate::query::query;

fn runs(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}

/// Sets a key in `slot`, and returns it.
fn fill(cluster: &RedisCluster, slot: u16, name: &str) -> String {
    let key = format!("{{{}}}{name}", tag_of(slot));
    let _: () = query(&mut cluster.connection(cluster.primary_of(slot)), &format!("SET {key} 1"));
    key
}

#[test]
fn starts_and_leaves_nothing_behind() {
    let cluster = RedisCluster::start();
    assert_eq!(cluster.nodes().len(), 6);
    let addresses = cluster.addresses();
    assert_eq!(cluster.url(), format!("redis-cluster://{}", addresses[..3].join(",")));
    assert_eq!((cluster.primary_of(0), cluster.primary_of(16_383)), (0, 2));
    assert_eq!((cluster.replica_of(0), cluster.replica_of(2)), (3, 5));
    let pids: Vec<u32> = cluster.nodes().iter().map(|node| node.pid()).collect();
    assert!(pids.iter().all(|&pid| runs(pid)));
    drop(cluster);
    assert!(!pids.iter().any(|&pid| runs(pid)));
}

#[test]
fn a_slot_is_computed_as_by_redis() {
    let cluster = RedisCluster::start_primaries(1);
    for key in ["", "a", "123456789", "{user}.a", "a{user}b{c}", "{}x", "x{", "}{y}", "{{z}}", "é"]
    {
        let slot: u16 = redis::cmd("CLUSTER")
            .arg("KEYSLOT")
            .arg(key)
            .query(&mut cluster.connection(0))
            .unwrap();
        assert_eq!(slot_of(key), slot, "{key}");
    }
    for slot in [0, 1, 8_000, 16_383] {
        assert_eq!(slot_of(&tag_of(slot)), slot);
    }
}

#[test]
fn a_killed_primary_fails_over_and_comes_back_as_replica() {
    let cluster = RedisCluster::start();
    let key = fill(&cluster, 0, "kept");
    query::<u64>(&mut cluster.connection(0), "WAIT 1 10000");
    cluster.kill(0);
    assert_eq!(cluster.wait_failover(0, TIME_LIMIT), 3);
    assert_eq!(cluster.primary_of_key(&key), 3);
    assert_eq!(cluster.node(3).keys(), [key.as_str()]);
    cluster.revive(0);
    cluster.wait_ready();
    assert_eq!(cluster.replica_of(3), 0);
    assert_eq!(cluster.node(0).keys(), [key.as_str()]);
}

#[tokio::test]
async fn a_paused_primary_fails_over_while_the_test_goes_on() {
    let cluster = RedisCluster::start_with(600, &[]);
    cluster.pause(1);
    let waiting = cluster.blocking(|cluster| cluster.wait_failover(1, TIME_LIMIT));
    let ticking = async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    };
    let (primary, ()) = tokio::join!(waiting, ticking);
    assert_eq!(primary, 4);
    cluster.resume(1);
    cluster.blocking(RedisCluster::wait_ready).await;
    assert_eq!(cluster.replica_of(4), 1);
}

#[test]
fn a_replica_becomes_primary_by_hand_and_is_reset() {
    let cluster = RedisCluster::start();
    for primary in [3, 0] {
        cluster.failover(primary);
        assert_eq!(cluster.primary_of(0), primary);
    }
    cluster.pause(1);
    cluster.failover_force(4);
    cluster.resume(1);
    cluster.wait_ready();
    assert_eq!(cluster.primary_of(8_000), 4);

    let key = fill(&cluster, 16_000, "copied");
    for how in [Reset::Soft, Reset::Hard] {
        cluster.reset_replica(5, how);
        assert_eq!(cluster.replica_of(2), 5);
        assert_eq!(cluster.node(5).keys(), [key.as_str()]);
    }
}

#[test]
fn a_slot_moves_with_its_keys() {
    let cluster = RedisCluster::start_with(NODE_TIMEOUT_MS, &["--requirepass secret"]);
    let mut keys: Vec<_> = (0..5).map(|n| fill(&cluster, 7, &format!("key{n}"))).collect();
    keys.sort();
    let moving = cluster.begin_move(7, 0, 2);
    assert_eq!(moving.move_keys(2), 2);
    assert_eq!((cluster.node(0).keys().len(), cluster.node(2).keys().len()), (3, 2));
    assert_eq!(cluster.primary_of(7), 0);
    moving.end();
    assert_eq!(cluster.primary_of(7), 2);
    assert_eq!((cluster.node(0).keys().len(), cluster.node(2).keys()), (0, keys));

    let added = cluster.add_node();
    assert_eq!(added, 6);
    cluster.move_slot(7, 2, added);
    assert_eq!(cluster.primary_of(7), added);
    assert_eq!(cluster.node(added).keys().len(), 5);
    cluster.wait_ready();
}

#[test]
fn counts_leave_out_the_fixture_and_the_replicas() {
    let cluster = RedisCluster::start();
    let called: Vec<_> = cluster.node(0).commandstats().into_keys().collect();
    assert_eq!(called, ["auth", "ping", "psync", "replconf"], "by the replica");
    let client = redis::Client::open(cluster.node(0).url()).unwrap();
    let _client = client.get_connection().unwrap();
    assert_eq!(cluster.node(0).connected_clients(), 1);
    assert_eq!(cluster.node(3).connected_clients(), 0);
    assert!(cluster.node(0).shard_channels().is_empty());
}

#[test]
fn speaks_tls() {
    let cluster = RedisCluster::start_tls(&[]);
    assert!(cluster.url().starts_with("rediss-cluster://127.0.0.1:"));
    assert!(cluster.ca_certificate().is_some());
    let key = fill(&cluster, 1, "through-tls");
    cluster.move_slot(1, 0, 1);
    assert_eq!(cluster.node(1).keys(), [key]);
    cluster.failover(4);
    assert_eq!(cluster.primary_of(1), 4);
}
