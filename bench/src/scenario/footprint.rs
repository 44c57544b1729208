//! How much memory of its process one that waits on Redis takes.

use std::time::Duration;

use super::{BYTES, contention};
use crate::bench::Bench;
use crate::contender::{Contender, SEMAPHORE, WAITING};
use crate::driver::Driver;
use crate::sample::count;

const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(bench: &mut Bench) {
    let mut rounds = 0;
    while bench.again(rounds) {
        rounds += 1;
        for contender in WAITING {
            measure(bench, contender, 200);
        }
        // Two hundred of ours hardly show among the pages that a process has anyway.
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

/// Bytes for each that waits in a process of its own. In memory the holder has to be in the same.
pub(super) fn each(
    bench: &mut Bench,
    contender: &'static Contender,
    waiters: u64,
) -> Result<f64, String> {
    let name = bench.name();
    let hold = format!("hold {name} 10000");
    // Who can wait without a limit does: a limit costs memory as well.
    let patience = if contender.is_bare() { 0 } else { 9000 };
    let mut others = Driver::start(contender, &bench.url)?;
    let mut holder = None;
    if contender.is_on_redis() {
        holder.insert(Driver::start(contender, &bench.url)?).ask(&hold, PATIENCE)?;
    } else {
        others.ask(&hold, PATIENCE)?;
    }
    // One first, so that what every process needs once does not count.
    others.ask(&format!("wait {name} 1 10000 {patience}"), PATIENCE)?;
    std::thread::sleep(contention::SETTLE);
    let before = others.resident()?;
    others.ask(&format!("wait {name} {waiters} 10000 {patience}"), PATIENCE)?;
    std::thread::sleep(contention::SETTLE * 2);
    let after = others.resident()?;
    drop(holder);
    Ok(count(after.saturating_sub(before)) / count(waiters))
}
