//! The semaphore on Redis against what Redis can do at all: `EVALSHA` of `return 1`, and `PING`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Semaphore};
use redis::aio::MultiplexedConnection;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use tokio::runtime::Runtime;

use crate::measure::{quantile, resident};

const TASKS: usize = 256;
const WINDOW: Duration = Duration::from_millis(1500);
const ROUNDS: usize = 5;

/// All of it, or one part by its name.
pub(crate) fn run(part: Option<&str>) {
    let parts: [(&str, fn()); 4] =
        [("hot", hot), ("handoff", hand_off), ("waiters", waiters), ("queue", queue_length)];
    println!("on Redis, over loopback");
    for (name, measure) in parts {
        if part.is_none_or(|part| part == name) {
            measure();
        }
    }
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime")
}

pub(crate) async fn client(url: &str) -> Client {
    Client::connect(url).await.expect("the server that was just started")
}

fn semaphore(client: &Client, name: &str, capacity: u32) -> Semaphore {
    client.semaphore(name, capacity).build().expect("a valid semaphore")
}

/// How many operations a second that many tasks get done together.
pub(crate) async fn rate<F: Future<Output = ()> + Send + 'static>(
    tasks: usize,
    work: impl Fn(usize) -> F + Clone + Send + 'static,
) -> f64 {
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let (stop, done, work) = (stop.clone(), done.clone(), work.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    work(task).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    tokio::time::sleep(WINDOW / 5).await;
    let (start, before) = (Instant::now(), done.load(Ordering::Relaxed));
    tokio::time::sleep(WINDOW).await;
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    let rate = (done.load(Ordering::Relaxed) - before) as f64 / start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for task in running {
        task.await.expect("a task of the benchmark");
    }
    rate
}

pub(crate) async fn plain(url: &str) -> (MultiplexedConnection, redis::Cmd) {
    let redis = redis::Client::open(url).expect("a URL");
    let mut connection =
        redis.get_multiplexed_async_connection().await.expect("the server that was started");
    let sha: String = redis::cmd("SCRIPT")
        .arg("LOAD")
        .arg("return 1")
        .query_async(&mut connection)
        .await
        .expect("a script");
    let mut call = redis::cmd("EVALSHA");
    call.arg(sha).arg(0);
    (connection, call)
}

/// How many calls of `return 1` a second that many tasks get done together.
pub(crate) async fn evalsha(
    (connection, call): &(MultiplexedConnection, redis::Cmd),
    tasks: usize,
) -> f64 {
    let (connection, call) = (connection.clone(), call.clone());
    rate(tasks, move |_| {
        let (mut connection, call) = (connection.clone(), call.clone());
        async move { drop(connection.send_packed_command(&call).await.expect("1")) }
    })
    .await
}

pub(crate) fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}

fn hot() {
    let server = RedisServer::start();
    let runtime = runtime();
    runtime.block_on(async {
        let baseline = plain(&server.url()).await;
        let client = client(&server.url()).await;
        for (what, names, capacity, bar) in [
            ("pairs, one semaphore, capacity 256", 1, 256, 0.25),
            ("pairs, one semaphore, capacity 16", 1, 16, 0.1),
            ("pairs, 1,000 semaphores", 1000, 16, 0.07),
        ] {
            let names: Arc<Vec<_>> = Arc::new(
                (0..names).map(|n| semaphore(&client, &format!("{capacity} {n}"), capacity)).collect(),
            );
            let next = Arc::new(AtomicUsize::new(0));
            let mut ratios = Vec::new();
            let (mut ours, mut theirs) = (0.0, 0.0);
            for _ in 0..ROUNDS {
                let (names, next) = (names.clone(), next.clone());
                ours = rate(TASKS, move |_| {
                    let semaphore =
                        names[next.fetch_add(1, Ordering::Relaxed) % names.len()].clone();
                    async move {
                        let permit = semaphore.acquire().await.expect("a permit");
                        permit.release().await.expect("released");
                    }
                })
                .await;
                theirs = evalsha(&baseline, TASKS).await;
                ratios.push(ours / theirs);
            }
            let ratio = quantile(&mut ratios, 0.5);
            println!(
                "{what:<46} {ours:>9.0}/s  EVALSHA {theirs:>9.0}/s  {ratio:>5.3} ×  (at least {bar}) {}",
                verdict(ratio >= bar)
            );
        }
    });
}

/// Nanoseconds that all processes of this host agree on.
fn host_nanos() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    #[allow(clippy::cast_precision_loss)]
    let nanos = now.tv_sec as f64 * 1e9 + now.tv_nsec as f64;
    nanos
}

const HAND_OFFS: usize = 1000;

/// From the release here until the next one runs there, in another process with 20 waiters.
fn hand_off() {
    let server = RedisServer::start();
    let mut child = Command::new(std::env::current_exe().expect("ourselves"))
        .args(["redis-waiters", &server.url()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a second process");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let runtime = runtime();
    let (mut released, mut pings) = (Vec::new(), Vec::new());
    runtime.block_on(async {
        let client = client(&server.url()).await;
        let semaphore = semaphore(&client, "hand-off", 1);
        let (mut connection, _) = plain(&server.url()).await;
        let mut permit = semaphore.acquire().await.expect("a permit");
        writeln!(child.stdin.as_ref().expect("its input"), "go").expect("told");
        while semaphore.stats().await.expect("statistics").waiting() < 20 {}
        for _ in 0..HAND_OFFS {
            let begun = Instant::now();
            let pong = connection.send_packed_command(&redis::cmd("PING")).await;
            #[allow(clippy::cast_precision_loss)]
            pings.push(begun.elapsed().as_nanos() as f64);
            drop(pong.expect("PONG"));
            let fence = permit.fence().get();
            released.push((fence, host_nanos()));
            permit.release().await.expect("released");
            permit = semaphore.acquire().await.expect("a permit, after the 20");
        }
    });
    drop(child.stdin.take());
    let mut granted = Vec::new();
    while let Some(Ok(line)) = lines.next() {
        let (fence, at) = line.split_once(' ').expect("a fence and a time");
        granted.push((fence.parse::<u64>().expect("a fence"), at.parse::<f64>().expect("a time")));
    }
    child.wait().expect("the second process ends");
    granted.sort_by_key(|(fence, _)| *fence);
    let mut delays: Vec<_> = released
        .iter()
        .filter_map(|(fence, at)| {
            let next = granted.get(granted.partition_point(|(other, _)| other <= fence))?;
            Some(next.1 - at)
        })
        .collect();
    for (quantile_of, name, bar) in [(0.5, "p50", 4.0), (0.99, "p99", 6.0)] {
        let (ours, ping) = (quantile(&mut delays, quantile_of), quantile(&mut pings, quantile_of));
        let ratio = ours / ping;
        println!(
            "hand-off to another process, 20 waiters, {name:<5} {:>9.0} µs  PING {:>9.0} µs  {ratio:>5.2} ×  (at most {bar}) {}",
            ours / 1e3,
            ping / 1e3,
            verdict(ratio <= bar)
        );
    }
}

/// The second process of the hand-off: 20 tasks that take what they get and give it back at once.
pub(crate) fn waiters_of(url: &str) {
    let runtime = runtime();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("told to go");
    let stop = Arc::new(AtomicBool::new(false));
    let granted = runtime.block_on(async {
        let client = client(url).await;
        let semaphore = semaphore(&client, "hand-off", 1);
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let (semaphore, stop) = (semaphore.clone(), stop.clone());
                tokio::spawn(async move {
                    let mut granted = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let acquire = semaphore.acquire().within(Duration::from_secs(2));
                        let Ok(permit) = acquire.await else { continue };
                        granted.push((permit.fence().get(), host_nanos()));
                        permit.release().await.expect("released");
                    }
                    granted
                })
            })
            .collect();
        let stopped = tokio::task::spawn_blocking(move || {
            let mut rest = String::new();
            drop(std::io::stdin().read_line(&mut rest));
            stop.store(true, Ordering::Relaxed);
        });
        stopped.await.expect("told to stop");
        let mut granted = Vec::new();
        for task in tasks {
            granted.extend(task.await.expect("a waiter"));
        }
        granted
    });
    let mut out = std::io::stdout().lock();
    for (fence, at) in granted {
        writeln!(out, "{fence} {at}").expect("an output");
    }
}

/// What 100,000 waiters of one process cost while they wait.
fn waiters() {
    const WAITERS: usize = 100_000;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let runtime = runtime();
    runtime.block_on(async {
        let before = server.connected_clients();
        let client = client(&proxy.url()).await;
        let semaphore = semaphore(&client, "waiters", 1);
        let held = semaphore.acquire().await.expect("a permit");
        let (start, empty) = (Instant::now(), resident());
        let tasks: Vec<_> = (0..WAITERS)
            .map(|_| {
                let semaphore = semaphore.clone();
                tokio::spawn(async move { semaphore.acquire().await.map(drop) })
            })
            .collect();
        while semaphore.stats().await.expect("statistics").waiting() < WAITERS {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let each = (resident() - empty) / WAITERS;
        println!("100,000 waiters enqueued in {:?}", start.elapsed());
        let connections = server.connected_clients() - before;
        let verdict = |met| if met { "met" } else { "MISSED" };
        println!("connections: {connections} (at most 2) {}", verdict(connections <= 2));
        println!("bytes a waiter in the client: {each} (at most 1536) {}", verdict(each <= 1536));
        // Over a whole heartbeat interval: the renewals come in its second third.
        let requests = proxy.requests();
        let watched = Duration::from_secs(150);
        tokio::time::sleep(watched).await;
        #[allow(clippy::cast_precision_loss)]
        let a_second = (proxy.requests() - requests) as f64 / watched.as_secs_f64();
        println!(
            "commands a second while they wait: {a_second:.1} (at most 10) {}",
            verdict(a_second <= 10.0)
        );
        for task in &tasks {
            task.abort();
        }
        drop(held);
        client.close().await.expect("closed");
    });
}

/// What a grant costs with many others in the queue.
fn queue_length() {
    let server = RedisServer::start();
    let runtime = runtime();
    runtime.block_on(async {
        let client = client(&server.url()).await;
        let mut ratios = Vec::new();
        let (long, short) = (semaphore(&client, "long", 1), semaphore(&client, "short", 1));
        let long_held = long.acquire().await.expect("a permit");
        // They wait behind, and never get their turn.
        let others: Vec<_> = (0..100_000)
            .map(|_| {
                let long = long.clone();
                tokio::spawn(async move { long.acquire().await.map(drop) })
            })
            .collect();
        while long.stats().await.expect("statistics").waiting() < others.len() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let short_held = short.acquire().await.expect("a permit");
        let few: Vec<_> = (0..10)
            .map(|_| {
                let short = short.clone();
                tokio::spawn(async move { short.acquire().await.map(drop) })
            })
            .collect();
        while short.stats().await.expect("statistics").waiting() < few.len() {}
        let (mut a, mut b) = (0.0, 0.0);
        for _ in 0..ROUNDS {
            a = cost(&long).await;
            b = cost(&short).await;
            ratios.push(a / b);
        }
        let ratio = quantile(&mut ratios, 0.5);
        println!(
            "{:<46} {:>9.1} µs  {:>9.1} µs  {ratio:>5.2} ×  (at most 2) {}",
            "enqueue + leave, 100,000 queued against 10",
            a / 1e3,
            b / 1e3,
            if ratio <= 2.0 { "met" } else { "MISSED" }
        );
        for task in others.iter().chain(&few) {
            task.abort();
        }
        drop((long_held, short_held));
        client.close().await.expect("closed");
    });
}

/// Joining the queue and leaving it again, in nanoseconds: an acquire that gives up, and the release that
/// follows it, as the server sees them.
async fn cost(semaphore: &Semaphore) -> f64 {
    const TIMES: u32 = 2000;
    let start = Instant::now();
    for _ in 0..TIMES {
        let acquire = semaphore.acquire();
        let id = acquire.id();
        let waiting = tokio::spawn(acquire);
        while semaphore.position(&id).await.expect("a position").is_none() {}
        assert!(!semaphore.release(&id).await.expect("released"), "it was only queued");
        waiting.await.expect("a task").expect_err("taken out of the queue");
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES)
}
