//! The limits that no contender can pass on this server.

use std::process::Command;
use std::time::Instant;

use redis::aio::MultiplexedConnection;

use super::{NANOS, RATE};
use crate::bench::Bench;
use crate::contender::{EVALSHA, PING};
use crate::contender_set::ContenderSet;
use crate::sample::{Sample, count};
use crate::scenario::pairs;

pub(super) fn run(bench: &mut Bench) {
    let mut connection = bench.connection();
    let many = if bench.quick { 1000 } else { 5000 };
    for _ in 0..bench.repetitions() {
        let pings = bench.runtime.block_on(async {
            let mut pings = Sample::default();
            for _ in 0..many {
                pings.0.push(ping(&mut connection).await);
            }
            pings
        });
        bench.add("round trip, p50", PING, NANOS, pings.median());
        bench.add("round trip, p99", PING, NANOS, pings.quantile(0.99));
    }
    let mut set = ContenderSet::new(&[&EVALSHA]);
    for tasks in [1, 50, 256] {
        let what = format!("calls of `return 1`, {tasks} at once");
        set.measure(bench, &what, RATE, |driver, bench| {
            // Redis's own tool, with one connection per caller, in the same round.
            match redis_benchmark(bench, tasks) {
                Ok(rate) => bench.add(&what, "redis-benchmark", RATE, rate),
                Err(why) => bench.trouble("redis-benchmark", why),
            }
            pairs::pair_rate(driver, bench, tasks, 1, 1)
        });
    }
}

/// One round trip on a connection that nothing else uses, in nanoseconds.
pub(super) async fn ping(connection: &mut MultiplexedConnection) -> f64 {
    let begun = Instant::now();
    let pong = connection.send_packed_command(&redis::cmd("PING")).await;
    let took = begun.elapsed();
    drop(pong.expect("PONG"));
    count(took.as_nanos())
}

fn redis_benchmark(bench: &Bench, clients: usize) -> Result<f64, String> {
    let requests = if clients == 1 { 4_000 } else { 20_000 } * if bench.quick { 1 } else { 5 };
    let output = Command::new("redis-benchmark")
        .args(["-u", &bench.url, "--csv", "-c", &clients.to_string(), "-n", &requests.to_string()])
        .args(["EVAL", "return 1", "0"])
        .output()
        .map_err(|why| why.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    // The last line is the result: "name","requests a second","latency",…
    let rate = text.lines().last().and_then(|line| line.split("\",\"").nth(1)?.parse().ok());
    rate.ok_or_else(|| format!("answered {:?}", text.trim()))
}
