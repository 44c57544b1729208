//! The cost of many commands on a host while they wait for one permit.

use std::collections::HashMap;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use leasehold::Client;

use super::command::{self, OURS};
use crate::bench::Bench;
use crate::host;
use crate::report::Better;
use crate::sample::{Sample, count};

const COMMANDS: usize = 400;
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// A command behaves differently right after joining and while it waits.
const SETTLE: Duration = Duration::from_secs(2);

pub(super) fn run(bench: &mut Bench) {
    if let Err(why) = measure(bench) {
        bench.trouble(OURS, why);
    }
}

fn measure(bench: &mut Bench) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|why| why.to_string())?;
    let tool = command::ours(folder.path());
    bench.step("joining");
    let (client, semaphore, held) = bench.runtime.block_on(async {
        let client = Client::local(command::database(folder.path())).await.expect("the store");
        let semaphore = client.semaphore(command::NAME, 1).build().expect("a valid semaphore");
        let held = semaphore.acquire().await.expect("a permit");
        (client, semaphore, held)
    });
    let mut waiting = Waiting(Vec::new());
    for _ in 0..COMMANDS {
        let child = tool.command(folder.path(), &["true"]).spawn();
        waiting.0.push(child.map_err(|why| why.to_string())?);
    }
    let begun = Instant::now();
    let joined = || bench.runtime.block_on(semaphore.stats()).map(|stats| stats.waiting);
    // The store may be too busy to answer while all of them join.
    while joined().unwrap_or(0) < COMMANDS {
        if begun.elapsed() > TIME_LIMIT {
            return Err(format!("not all of {COMMANDS} had joined after {TIME_LIMIT:?}"));
        }
        sleep(Duration::from_millis(100));
    }
    sleep(SETTLE);
    let watched = Duration::from_secs(if bench.quick { 4 } else { 30 });
    bench.step("waiting");
    let (begun, before) = (Instant::now(), waiting.processor_times());
    sleep(watched);
    let (nanos, after) = (begun.elapsed().as_nanos(), waiting.processor_times());
    drop(waiting);
    drop(held);
    bench.runtime.block_on(client.close()).map_err(|why| why.to_string())?;
    let spent: u64 = after
        .iter()
        .map(|(thread, used)| used.saturating_sub(*before.get(thread).unwrap_or(&0)))
        .sum();
    let share = count(spent) / count(nanos) * 100.0;
    bench.add("share of a core", OURS, ("%", Better::Less), share);
    bench.report.judge("commands/share", &Sample(vec![share]));
    Ok(())
}

/// Commands that wait. They are killed when this is dropped.
struct Waiting(Vec<Child>);

impl Waiting {
    /// Returns the nanoseconds that each of their threads has used.
    fn processor_times(&self) -> HashMap<u32, u64> {
        self.0.iter().flat_map(|child| host::processor_times(child.id())).collect()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}
