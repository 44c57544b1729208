//! How many acquires with their releases are done in a second.

use std::time::Duration;

use super::RATE;
use crate::bench::Bench;
use crate::contender::{
    EVALSHA, LOCK, POTTERY, PYTHON_REDIS_LOCK, REDIS_MUTEX, REDIS_PY, REDIS_SEMAPHORE, REDLOCK,
    RSLOCK, SEMAPHORE,
};
use crate::crew::Crew;
use crate::driver::Driver;
use crate::report::Better;
use crate::sample::count;

const HOT: &str = "256 tasks, 1 name, capacity 256";

pub(super) fn semaphores(bench: &mut Bench) {
    let mut crew = Crew::new(&[&SEMAPHORE, &EVALSHA, &REDIS_SEMAPHORE]);
    for (what, tasks, names, capacity, bar) in [
        ("1 task, 1 name", 1, 1, 256, None),
        ("50 tasks, 1 name", 50, 1, 256, None),
        (HOT, 256, 1, 256, Some("pairs/256")),
        ("256 tasks, 1 name, capacity 16: all contend", 256, 1, 16, Some("pairs/16")),
        ("1 task, 1,000 names", 1, 1000, 256, None),
        ("50 tasks, 1,000 names", 50, 1000, 256, None),
        ("256 tasks, 1,000 names", 256, 1000, 256, Some("pairs/1000")),
    ] {
        if bench.quick && tasks == 50 {
            continue;
        }
        crew.measure(bench, what, RATE, |driver, bench| ask(driver, bench, tasks, names, capacity));
        let of_limit = bench.sample(what, SEMAPHORE.name).over(&bench.sample(what, EVALSHA.name));
        if let Some(bar) = bar {
            bench.report.judge(bar, &of_limit);
        }
    }
    let peer = bench.sample(HOT, REDIS_SEMAPHORE.name);
    let of_peer = bench.sample(HOT, SEMAPHORE.name).over(&peer);
    bench.report.judge("pairs/peer", &of_peer);
}

pub(super) fn locks(bench: &mut Bench) {
    let mut crew = Crew::new(&[
        &LOCK,
        &EVALSHA,
        &RSLOCK,
        &REDIS_MUTEX,
        &REDLOCK,
        &REDIS_PY,
        &PYTHON_REDIS_LOCK,
        &POTTERY,
    ]);
    for tasks in [1, 50, 200] {
        if bench.quick && tasks == 50 {
            continue;
        }
        let what = if tasks == 1 { "1 task".to_owned() } else { format!("{tasks} tasks") };
        crew.measure(bench, &what, RATE, |driver, bench| ask(driver, bench, tasks, tasks, 1));
        if tasks == 200 {
            let limit = bench.sample(&what, EVALSHA.name);
            let of_limit = bench.sample(&what, LOCK.name).over(&limit);
            bench.report.judge("locks/200", &of_limit);
        }
    }
}

/// Pairs a second of one contender.
pub(super) fn ask(
    driver: &mut Driver,
    bench: &mut Bench,
    tasks: usize,
    names: usize,
    capacity: usize,
) -> Result<f64, String> {
    let (name, window) = (bench.name(), bench.window());
    let request = format!("pairs {name} {tasks} {names} {capacity} {}", window.as_millis());
    // A slow contender may take a while to end its last round.
    match driver.ask(&request, window * 2 + Duration::from_secs(15))?[..] {
        [pairs, nanos] if pairs > 0 => Ok(count(pairs) / count(nanos) * 1e9),
        [0, _] => Err("did not get anything done within the window".to_owned()),
        ref other => Err(format!("answered {other:?}")),
    }
}

/// The unit of things that are better if there are fewer of them.
pub(super) const FEWER: (&str, Better) = ("", Better::Less);
