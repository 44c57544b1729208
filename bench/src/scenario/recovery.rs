//! How long the next waiter waits when a holder is killed. Every lease is two seconds. Libraries that can renew do so.

use std::thread;
use std::time::Duration;

use super::NANOS;
use crate::bench::Bench;
use crate::contender::{Contender, SEMAPHORE, WAITING};
use crate::driver::Driver;
use crate::sample::{Sample, count};

const LEASE: Duration = Duration::from_secs(2);
const TIME_LIMIT: Duration = Duration::from_secs(10);

pub(super) fn run(bench: &mut Bench) {
    let what = "from the kill to the next holder";
    let mut round = 0;
    while bench.again(round) {
        bench.step(&format!("round {}", round + 1));
        // Killed at different moments of a lease.
        let into = LEASE * u32::try_from(round % 4).expect("few") / 5 + Duration::from_millis(100);
        // This is mostly waiting, so all contenders do it at once.
        let names: Vec<_> = WAITING.iter().map(|_| bench.name()).collect();
        let url = bench.url.clone();
        let recovered: Vec<_> = thread::scope(|scope| {
            let waiting: Vec<_> = WAITING
                .iter()
                .zip(&names)
                .map(|(contender, name)| scope.spawn(|| recover(contender, &url, name, into)))
                .collect();
            let panicked = |_| Err("broke".to_owned());
            waiting.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        for (contender, recovered) in WAITING.iter().zip(recovered) {
            match recovered {
                Ok(nanos) => bench.add(what, contender.name, NANOS, nanos),
                Err(why) => bench.trouble(contender.name, why),
            }
        }
        round += 1;
    }
    let ours = bench.sample(what, SEMAPHORE.name);
    bench.report.judge("recovery", &Sample(ours.0.iter().map(|nanos| nanos / 1e9).collect()));
}

fn recover(
    contender: &'static Contender,
    url: &str,
    name: &str,
    into: Duration,
) -> Result<f64, String> {
    let mut holder = Driver::start(contender, url)?;
    let mut other = Driver::start(contender, url)?;
    let lease = LEASE.as_millis();
    holder.call(&format!("hold {name} {lease}"), TIME_LIMIT)?;
    other.call(&format!("wait {name} 1 {lease} {}", TIME_LIMIT.as_millis()), TIME_LIMIT)?;
    thread::sleep(into);
    let killed = holder.kill();
    let granted = other.call("granted", TIME_LIMIT)?.first().copied().unwrap_or(0);
    if granted < killed {
        return Err("another waiter was granted the permit while the holder was alive".to_owned());
    }
    Ok(count(granted - killed))
}
