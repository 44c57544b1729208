//! The lock on Redis against what Redis can do at all: `EVALSHA` of `return 1`, and `PING`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::Retry;
use testkit::redis_server::RedisServer;

use crate::measure::quantile;
use crate::redis::{client, evalsha, plain, rate, runtime, verdict};

const TASKS: usize = 200;
const ROUNDS: usize = 5;
const HAND_OFFS: usize = 1000;

/// All of it, or one part by its name.
pub(crate) fn run(part: Option<&str>) {
    println!("locks on Redis, over loopback");
    for (name, measure) in [("pairs", pairs as fn()), ("handoff", hand_off)] {
        if part.is_none_or(|part| part == name) {
            measure();
        }
    }
}

/// Acquire and release, each task a key of its own.
fn pairs() {
    let server = RedisServer::start();
    runtime().block_on(async {
        let baseline = plain(&server.url()).await;
        let client = client(&server.url()).await;
        let locks: Arc<Vec<_>> = Arc::new(
            (0..TASKS).map(|n| client.lock(&format!("key {n}")).build().expect("a lock")).collect(),
        );
        let mut ratios = Vec::new();
        let (mut ours, mut theirs) = (0.0, 0.0);
        for _ in 0..ROUNDS {
            let locks = locks.clone();
            ours = rate(TASKS, move |task| {
                let lock = locks[task].clone();
                async move {
                    let guard = lock.try_acquire().await.expect("an answer").expect("it is ours");
                    guard.release().await.expect("released");
                }
            })
            .await;
            theirs = evalsha(&baseline, TASKS).await;
            ratios.push(ours / theirs);
        }
        let (ratio, bar) = (quantile(&mut ratios, 0.5), 0.12);
        println!(
            "{:<46} {ours:>9.0}/s  EVALSHA {theirs:>9.0}/s  {ratio:>5.3} ×  (at least {bar}) {}",
            format!("pairs, {TASKS} keys"),
            verdict(ratio >= bar)
        );
    });
}

/// From the release here until the waiter of another client has it.
fn hand_off() {
    let server = RedisServer::start();
    let (mut delays, mut pings) = (Vec::new(), Vec::new());
    runtime().block_on(async {
        let (here, there) = (client(&server.url()).await, client(&server.url()).await);
        let (mut connection, _) = plain(&server.url()).await;
        // Nothing but a wake-up can explain that it is prompt.
        let patient =
            Retry::default().delay(Duration::from_secs(30)).within(Duration::from_secs(60));
        let ours = here.lock("hand-off").retry(patient).build().expect("a lock");
        let theirs = there.lock("hand-off").retry(patient).build().expect("a lock");
        let waiting = Arc::new(AtomicUsize::new(0));
        for round in 1..=HAND_OFFS {
            let begun = Instant::now();
            let pong = connection.send_packed_command(&redis::cmd("PING")).await;
            pings.push(begun.elapsed().as_secs_f64() * 1e9);
            drop(pong.expect("PONG"));
            let held = ours.acquire().await.expect("the lock");
            let next = tokio::spawn({
                let (theirs, waiting) = (theirs.clone(), waiting.clone());
                async move {
                    waiting.store(round, Ordering::Release);
                    let guard = theirs.acquire().await.expect("the lock");
                    let at = Instant::now();
                    guard.release().await.expect("released");
                    at
                }
            });
            // It has asked once, and found it locked, when the store knows that it wants to be told.
            while waiting.load(Ordering::Acquire) < round {
                tokio::task::yield_now().await;
            }
            let mut exists = redis::cmd("EXISTS");
            exists.arg("adv-sem:lock_waiting:syncguard:hand-off");
            while !matches!(
                connection.send_packed_command(&exists).await.expect("an answer"),
                redis::Value::Int(1)
            ) {}
            let released = Instant::now();
            held.release().await.expect("released");
            let at = next.await.expect("the waiter");
            delays.push(at.duration_since(released).as_secs_f64() * 1e9);
        }
    });
    for (quantile_of, name, bar) in [(0.5, "p50", None), (0.99, "p99", Some(6.0))] {
        let (ours, ping) = (quantile(&mut delays, quantile_of), quantile(&mut pings, quantile_of));
        let ratio = ours / ping;
        let judged = bar.map(|bar| format!("(at most {bar}) {}", verdict(ratio <= bar)));
        println!(
            "lock, release to the next holder, {name:<12} {:>9.0} µs  PING {:>9.0} µs  {ratio:>5.2} ×  {}",
            ours / 1e3,
            ping / 1e3,
            judged.unwrap_or_default()
        );
    }
}
