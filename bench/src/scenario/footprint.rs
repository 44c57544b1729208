//! How much memory of its process one waiter on Redis takes.

use std::time::Duration;

use super::{BYTES, contention};
use crate::bench::Bench;
use crate::contender::{Contender, SEMAPHORE, WAITING};
use crate::driver::Driver;
use crate::sample::count;

const TIME_LIMIT: Duration = Duration::from_secs(10);

pub(super) fn run(bench: &mut Bench) {
    let mut rounds = 0;
    while bench.again(rounds) {
        rounds += 1;
        for contender in WAITING {
            measure(bench, contender, 200);
        }
        // 200 waiters of ours hardly show among the pages that a process has anyway.
        measure(bench, &SEMAPHORE, 10_000);
    }
}

fn measure(bench: &mut Bench, contender: &'static Contender, waiters: u64) {
    bench.step(contender.name);
    match each(bench, contender, waiters) {
        Ok(bytes) => bench.add(&format!("{waiters} waiters, each"), contender.name, BYTES, bytes),
        Err(why) => bench.trouble(contender.name, why),
    }
}

/// Returns the bytes for each waiter, in a process of their own. In memory the holder has to be in the same process.
pub(super) fn each(
    bench: &mut Bench,
    contender: &'static Contender,
    waiters: u64,
) -> Result<f64, String> {
    let name = bench.name();
    let hold = format!("hold {name} 10000");
    // A contender that can wait without a limit does, because a limit costs memory as well.
    let time_limit = if contender.is_bare() { 0 } else { 9000 };
    let mut others = Driver::start(contender, &bench.url)?;
    let mut holder = None;
    if contender.is_on_redis() {
        holder.insert(Driver::start(contender, &bench.url)?).call(&hold, TIME_LIMIT)?;
    } else {
        others.call(&hold, TIME_LIMIT)?;
    }
    // One waiter first, so that the memory that every process needs once does not count.
    others.call(&format!("wait {name} 1 10000 {time_limit}"), TIME_LIMIT)?;
    std::thread::sleep(contention::SETTLE);
    let before = others.resident()?;
    others.call(&format!("wait {name} {waiters} 10000 {time_limit}"), TIME_LIMIT)?;
    std::thread::sleep(contention::SETTLE * 2);
    let after = others.resident()?;
    drop(holder);
    Ok(count(after.saturating_sub(before)) / count(waiters))
}
