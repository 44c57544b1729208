use std::path::PathBuf;
use std::time::Instant;

use super::*;
use crate::query::query;

fn runs(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}

#[test]
fn starts_and_leaves_nothing_behind() {
    let set = RedisSentinel::start();
    let hosts = set.sentinel_addresses().join(",");
    assert_eq!(set.url(), format!("redis-sentinel://{hosts}/mymaster"));
    assert_eq!(set.primary(), 0);
    let servers = (0..SERVERS).map(|index| set.server(index).pid());
    let sentinels = (0..SENTINELS).map(|index| set.sentinel(index).pid());
    let pids: Vec<u32> = servers.chain(sentinels).collect();
    assert!(pids.iter().all(|&pid| runs(pid)));
    drop(set);
    assert!(!pids.iter().any(|&pid| runs(pid)));
}

#[test]
fn a_killed_primary_fails_over_and_comes_back_as_replica() {
    let set = RedisSentinel::start();
    let killed = Instant::now();
    assert_eq!(set.kill_primary(), 0);
    let (primary, _) = set.wait_failover(0, killed, TIME_LIMIT);
    assert!(primary != 0);
    assert_eq!(set.primary(), primary);
    let _: () = query(&mut set.server(primary).connection(), "SET key value");
    set.revive(0);
    assert_eq!(role(set.server(0)).unwrap()[0], "master");
    set.wait_ready();
    assert_eq!(set.server(0).keys(), ["key"]);
}

#[tokio::test]
async fn a_paused_primary_fails_over_while_the_test_goes_on() {
    let set = RedisSentinel::start();
    let paused = Instant::now();
    assert_eq!(set.pause_primary(), 0);
    let (primary, _) = set.blocking(move |set| set.wait_failover(0, paused, TIME_LIMIT)).await;
    set.resume(0);
    set.blocking(RedisSentinel::wait_ready).await;
    assert_eq!(set.primary(), primary);
}

#[test]
fn a_failover_by_hand_with_passwords_and_a_stale_sentinel() {
    let options = Options {
        password: Some("secret"),
        sentinel_password: Some("other"),
        // Nothing fails, so the sentinels must not fail over by themselves, however slow the machine.
        down_after_ms: 10_000,
        ..Options::default()
    };
    let set = RedisSentinel::start_with(options);
    let client = redis::Client::open(set.server(0).url_with("", "secret")).unwrap();
    assert!(client.get_connection().is_ok());
    assert_eq!(set.server(0).connected_clients(), 0);
    let stale = set.stale_sentinel(0);
    let primary = set.failover();
    assert_ne!(primary, 0);
    assert_eq!((set.named_by(0), set.named_by(stale)), (primary, 0));
    assert!(set.url_of(&[stale]).contains(&set.sentinel(stale).port().to_string()));
    let client = redis::Client::open(set.sentinel(0).url_with("", "other")).unwrap();
    assert!(client.get_connection().is_ok());
}

#[test]
fn sentinels_die_come_back_and_are_added() {
    let set = RedisSentinel::start();
    set.kill_sentinel(1);
    assert_eq!(set.add_sentinel(), 3);
    set.revive_sentinel(1);
    set.wait_ready();
    // Three of four are a majority.
    set.pause_sentinel(2);
    let killed = Instant::now();
    let dead = set.kill_primary();
    let (primary, took) = set.wait_failover(dead, killed, TIME_LIMIT);
    assert!(took <= killed.elapsed());
    set.resume_sentinel(2);
    set.wait_ready();
    assert_eq!([0, 1, 2, 3].map(|sentinel| set.named_by(sentinel)), [primary; 4]);
}
