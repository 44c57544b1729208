//! How many pairs of acquire and release are done in a second.

use std::time::Duration;

use super::{NANOS, RATE};
use crate::bench::Bench;
use crate::contender::{
    ETCD, EVALSHA, LOCK, POTTERY, PYTHON_REDIS_LOCK, REDIS_MUTEX, REDIS_PY, REDIS_SEMAPHORE,
    REDLOCK, RSLOCK, SEMAPHORE,
};
use crate::contender_set::ContenderSet;
use crate::driver::Driver;
use crate::report::Better;
use crate::sample::count;
use crate::server_time::ServerTime;

pub(super) fn semaphores(bench: &mut Bench) {
    let mut set = ContenderSet::new(&[&SEMAPHORE, &EVALSHA, &REDIS_SEMAPHORE]);
    for (what, tasks, names, capacity) in [
        ("1 task, 1 name", 1, 1, 256),
        ("50 tasks, 1 name", 50, 1, 256),
        ("256 tasks, 1 name, capacity 256", 256, 1, 256),
        ("256 tasks, 1 name, capacity 16: all contend", 256, 1, 16),
        ("1 task, 1,000 names", 1, 1000, 256),
        ("50 tasks, 1,000 names", 50, 1000, 256),
        ("256 tasks, 1,000 names", 256, 1000, 256),
    ] {
        if bench.quick && tasks == 50 {
            continue;
        }
        let cpu = server_cpu(what);
        set.measure(bench, what, RATE, |driver, bench| {
            let before = ServerTime::now(bench)?;
            let pairs = pairs(driver, bench, (tasks, names, capacity), bench.window())?;
            let spent = ServerTime::now(bench)?.since(&before).process_nanos();
            bench.add(&cpu, driver.contender(), NANOS, spent / pairs.all);
            Ok(pairs.rate)
        });
    }
    // One connection with few requests: many idle clients would add processor time of their own.
    for (bar, what) in
        [("pairs/1/server", "1 task, 1 name"), ("pairs/1000/server", "256 tasks, 1,000 names")]
    {
        bench.judge_ratio(bar, &server_cpu(what), SEMAPHORE.name, REDIS_SEMAPHORE.name);
    }
    for (bar, what, other) in [
        ("pairs/1/peer", "1 task, 1 name", &REDIS_SEMAPHORE),
        ("pairs/256", "256 tasks, 1 name, capacity 256", &EVALSHA),
        ("pairs/256/peer", "256 tasks, 1 name, capacity 256", &REDIS_SEMAPHORE),
        ("pairs/16", "256 tasks, 1 name, capacity 16: all contend", &EVALSHA),
        ("pairs/1000", "256 tasks, 1,000 names", &EVALSHA),
        ("pairs/1000/peer", "256 tasks, 1,000 names", &REDIS_SEMAPHORE),
    ] {
        bench.judge_ratio(bar, what, SEMAPHORE.name, other.name);
    }
}

/// The processor time of the server, with everything else that it does for a pair.
fn server_cpu(what: &str) -> String {
    format!("{what}, server CPU of a pair")
}

pub(super) fn locks(bench: &mut Bench) {
    let mut set = ContenderSet::new(&[
        &LOCK,
        &EVALSHA,
        &RSLOCK,
        &REDIS_MUTEX,
        &REDLOCK,
        &REDIS_PY,
        &PYTHON_REDIS_LOCK,
        &POTTERY,
        &ETCD,
    ]);
    for tasks in [1, 50, 200] {
        if bench.quick && tasks == 50 {
            continue;
        }
        let what = if tasks == 1 { "1 task".to_owned() } else { format!("{tasks} tasks") };
        set.measure(bench, &what, RATE, |driver, bench| pair_rate(driver, bench, tasks, tasks, 1));
    }
    bench.judge_ratio("locks/200", "200 tasks", LOCK.name, EVALSHA.name);
    bench.judge_ratio("locks/200/peer", "200 tasks", LOCK.name, RSLOCK.name);
}

/// Returns the pairs per second of one contender.
pub(super) fn pair_rate(
    driver: &mut Driver,
    bench: &mut Bench,
    tasks: usize,
    names: usize,
    capacity: usize,
) -> Result<f64, String> {
    let window = bench.window();
    pair_rate_during(driver, bench, (tasks, names, capacity), window)
}

/// The same in a window of another length, for tasks, names and the capacity in this order.
pub(super) fn pair_rate_during(
    driver: &mut Driver,
    bench: &mut Bench,
    load: (usize, usize, usize),
    window: Duration,
) -> Result<f64, String> {
    pairs(driver, bench, load, window).map(|pairs| pairs.rate)
}

/// The pairs of one measurement.
struct Pairs {
    /// The pairs per second within the window.
    rate: f64,
    /// Those before and after the window, too.
    all: f64,
}

fn pairs(
    driver: &mut Driver,
    bench: &mut Bench,
    (tasks, names, capacity): (usize, usize, usize),
    window: Duration,
) -> Result<Pairs, String> {
    let name = bench.name();
    let request = format!("pairs {name} {tasks} {names} {capacity} {}", window.as_millis());
    // A slow contender may take a while to finish its last round.
    match driver.call(&request, window * 2 + Duration::from_secs(15))?[..] {
        [pairs, nanos, all] if pairs > 0 => {
            Ok(Pairs { rate: count(pairs) / count(nanos) * 1e9, all: count(all) })
        }
        [0, ..] => Err("completed no pair within the window".to_owned()),
        ref other => Err(format!("answered {other:?}")),
    }
}

/// The unit of counts where fewer is better.
pub(super) const FEWER: (&str, Better) = ("", Better::Less);
