//! How long no permit is granted when a primary is killed, behind sentinels and in a cluster. Also
//! the time that the servers themselves take until all of them name another primary.

use std::time::{Duration, Instant};

use leasehold::Client;
use testkit::redis_cluster::RedisCluster;
use testkit::redis_sentinel::{Options, RedisSentinel};

use super::NANOS;
use crate::bench::Bench;
use crate::contender::SEMAPHORE;

const WITHIN: Duration = Duration::from_secs(60);

const SENTINELS: &str = "the sentinels";
const NODES: &str = "the nodes of the cluster";

pub(super) fn run(bench: &mut Bench) {
    let mut rounds = 0;
    while bench.again(rounds) {
        rounds += 1;
        for (what, servers, measure) in [
            ("behind sentinels: until the next grant", SENTINELS, sentinel as Measure),
            ("in a cluster: until the next grant", NODES, cluster as Measure),
        ] {
            bench.step(&format!("{what}, round {rounds}"));
            match measure(bench) {
                Ok((ours, theirs)) => {
                    bench.add(what, SEMAPHORE.name, NANOS, ours.as_secs_f64() * 1e9);
                    bench.add(what, servers, NANOS, theirs.as_secs_f64() * 1e9);
                }
                Err(why) => bench.trouble(SEMAPHORE.name, why),
            }
        }
    }
}

/// Returns the time from the kill until the next grant, and until the servers agree.
type Measure = fn(&mut Bench) -> Result<(Duration, Duration), String>;

fn sentinel(bench: &mut Bench) -> Result<(Duration, Duration), String> {
    // The shorter the silence, the more the client's own share of the time shows.
    let servers = RedisSentinel::start_with(Options { down_after_ms: 600, ..Options::default() });
    let kill = || {
        let (killed, watched) = (Instant::now(), servers.clone());
        let primary = servers.kill_primary();
        (killed, std::thread::spawn(move || watched.wait_failover(primary, killed, WITHIN).1))
    };
    outage(bench, &servers.url(), "failover", kill)
}

fn cluster(bench: &mut Bench) -> Result<(Duration, Duration), String> {
    let servers = RedisCluster::start();
    let primary = servers.primary_of_key("{failover}");
    let kill = || {
        let (killed, watched) = (Instant::now(), servers.clone());
        servers.kill(primary);
        let agreed = move || {
            let _ = watched.wait_failover(primary, WITHIN);
            killed.elapsed()
        };
        (killed, std::thread::spawn(agreed))
    };
    outage(bench, &servers.url(), "failover", kill)
}

/// One task acquires and releases in a loop. The outage is the time from the kill until its next grant.
fn outage(
    bench: &mut Bench,
    url: &str,
    name: &str,
    kill: impl FnOnce() -> (Instant, std::thread::JoinHandle<Duration>),
) -> Result<(Duration, Duration), String> {
    let text = |why: leasehold::Error| why.to_string();
    bench.runtime.block_on(async {
        let client = Client::redis(url).await.map_err(text)?;
        let semaphore = client.semaphore(name, 1).build().map_err(text)?;
        for _ in 0..100 {
            semaphore.acquire().await.map_err(text)?.release().await.map_err(text)?;
        }
        let (killed, agreed) = kill();
        let permit = semaphore.acquire().within(WITHIN).await.map_err(text)?;
        let granted = killed.elapsed();
        drop(permit);
        let agreed = tokio::task::spawn_blocking(move || agreed.join()).await;
        match agreed {
            Ok(Ok(agreed)) => Ok((granted, agreed)),
            _ => Err("the servers did not agree on another primary".to_owned()),
        }
    })
}
