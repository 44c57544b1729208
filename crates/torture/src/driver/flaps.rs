//! The lane of the workers' connections. Once in a cycle, while no other fault is injected, the connections of some
//! workers flap.
//!
//! Workers that lose their connection drop their pending acquires, especially those that were sent and not answered.
//! Whatever such an acquire was granted must be released as soon as the worker is connected again: in the lull that
//! follows, no other worker may have to wait for its lease to end.

use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use testkit::proxy::{Cut, FaultProxy};

use super::stage::Stage;
use super::{FLAPS, Show, lock, millis};
use crate::fault::{Kind, Scope};

/// Strings that occur in requests that acquire a permit or a lock.
const ACQUIRES: [&[u8]; 2] = [b"enqueue", b"acquire"];
/// How many workers flap at a time. The others continue, so that cancelled acquisitions are granted, and missed.
const FLAPPING: usize = 3;
/// How long to wait for such a request. A worker that was cut off before is connected again by then.
const UNTIL_ASKED: Duration = Duration::from_millis(1200);

pub(super) fn lane(show: &Show, stage: &Stage) {
    if stage.is_local() {
        return;
    }
    let mut rng = show.rng(u64::MAX - 2);
    while show.next_flaps() {
        let until = Instant::now() + FLAPS;
        thread::scope(|all| {
            for worker in rng.choose_multiple(0..show.workers, FLAPPING) {
                let mut rng = rng.fork();
                all.spawn(move || {
                    show.fault(Kind::Flap, Scope::Worker(worker), || match stage.proxy(worker) {
                        Some(proxy) => flap(show, proxy, &mut rng, until),
                        None => cut_often(show, stage, worker, &mut rng, until),
                    });
                });
            }
        });
    }
}

/// Loses the connections and refuses new ones for a moment, repeatedly until `until`.
pub(super) fn flap(show: &Show, proxy: &FaultProxy, rng: &mut Rng, until: Instant) {
    loop {
        if rng.bool() {
            lose_answer(show, proxy, ACQUIRES[usize::from(rng.u32(..4) == 0)]);
        } else {
            // A delay, so that many requests are in flight at any time.
            proxy.delay(millis(rng, 20..80));
            show.pause(millis(rng, 100..400));
            // First, so that a worker that is cut off does not reconnect at once.
            proxy.refuse(true);
            proxy.cut_with(if rng.bool() { Cut::Reset } else { Cut::Close });
            show.pause(millis(rng, 5..100));
        }
        proxy.heal();
        if Instant::now() >= until || !show.pause(millis(rng, 0..60)) {
            return;
        }
    }
}

/// Makes the servers close the connections, repeatedly until `until`.
pub(super) fn cut_often(show: &Show, stage: &Stage, worker: usize, rng: &mut Rng, until: Instant) {
    while Instant::now() < until && show.pause(millis(rng, 20..400)) {
        let pid = lock(&show.pids).get(&worker).copied();
        if let Some(pid) = pid {
            stage.cut(pid);
        }
    }
}

/// Loses the answer to a command, with the connection. The command itself is applied.
fn lose_answer(show: &Show, proxy: &FaultProxy, needle: &[u8]) {
    let before = proxy.traffic().lost;
    proxy.lose_reply_to(needle);
    let begun = Instant::now();
    while proxy.traffic().lost == before && begun.elapsed() < UNTIL_ASKED {
        if !show.pause(Duration::from_millis(2)) {
            return;
        }
    }
}
