//! The lane of the workers' connections. Once in a cycle, while no other fault is injected, the connections of some
//! workers flap.
//!
//! Workers that lose their connection drop their pending acquires, especially those that were sent and not answered.
//! Whatever such an acquire was granted must be released as soon as the worker is connected again: in the lull that
//! follows, the store must not list it, and no other worker may have to wait for its lease to end.

use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use testkit::proxy::{Cut, FaultProxy};

use super::stage::Stage;
use super::{FLAPS, Show, lock, millis, worker};
use crate::fault::{Kind, Scope};
use crate::worker::CLIENTS;

/// Strings that occur in requests that acquire a permit or a lock.
const ACQUIRES: [&[u8]; 2] = [b"enqueue", b"acquire"];
/// How many workers flap at a time. The others continue, so that cancelled acquisitions are granted, and missed.
const FLAPPING: usize = 3;
/// How long to wait for such a request, and before that until a worker that was cut off is connected again.
const UNTIL_ASKED: Duration = Duration::from_millis(1200);

pub(super) fn lane(show: &Show, stage: &Stage) {
    if stage.is_local() {
        return;
    }
    let mut rng = show.rng(u64::MAX - 2);
    let mut is_first = true;
    while show.next_flaps() {
        let until = Instant::now() + FLAPS;
        // The first time, only workers that are then left alone for a while.
        let spared = |worker: &usize| !is_first || !worker::is_stopped_first(*worker);
        let workers: Vec<_> = (0..show.workers).filter(spared).collect();
        is_first = false;
        thread::scope(|all| {
            for worker in rng.choose_multiple(workers, FLAPPING) {
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
            lose_answer(show, proxy, rng, until);
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

/// Loses the answer to an acquire, with the connection. The command itself is applied. For a moment the worker cannot
/// connect again, so that it drops acquires whose outcome is unknown.
fn lose_answer(show: &Show, proxy: &FaultProxy, rng: &mut Rng, until: Instant) {
    let wait_for = |condition: &dyn Fn() -> bool| {
        let until = until.min(Instant::now() + UNTIL_ASKED);
        while !condition() {
            if Instant::now() > until || !show.pause(Duration::from_millis(2)) {
                return false;
            }
        }
        true
    };
    if !wait_for(&|| proxy.connections() >= CLIENTS) {
        return;
    }
    let before = proxy.traffic().lost;
    proxy.refuse(true);
    proxy.lose_reply_to(ACQUIRES[usize::from(rng.u32(..4) == 0)]);
    if wait_for(&|| proxy.traffic().lost > before) {
        show.pause(millis(rng, 5..100));
    }
}
