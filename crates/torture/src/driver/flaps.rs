//! The lane of the workers' connections: once a cycle, and with nothing else befalling anybody, those of some workers flap.
//!
//! Workers that lose their connection drop what they are about to acquire, most of all what was sent and not answered. What
//! such an acquire was granted must be released as soon as there is a connection again: in the lull that follows, nobody
//! else may have to wait for its lease to end.

use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use testkit::proxy::{Cut, FaultProxy};

use super::stage::Stage;
use super::{FLAPS, Show, millis};
use crate::fault::{Kind, Scope};

/// What the requests contain that acquire a permit or a lock.
const ACQUIRES: [&[u8]; 2] = [b"enqueue", b"acquire"];
/// How many workers at a time: the others go on, so that what is cancelled is granted, and missed.
const FLAPPING: usize = 3;
/// How long to wait for such a request. Whoever was cut off before is back by then.
const UNTIL_ASKED: Duration = Duration::from_millis(1200);

pub(super) fn lane(show: &Show, stage: &Stage) {
    let Stage::Redis(redis) = stage else { return };
    let mut rng = show.rng(u64::MAX - 2);
    while show.next_flaps() {
        let until = Instant::now() + FLAPS;
        thread::scope(|all| {
            let workers = redis.proxies[..show.foreign].iter().enumerate();
            for (worker, proxy) in rng.choose_multiple(workers, FLAPPING) {
                let mut rng = rng.fork();
                all.spawn(move || {
                    show.fault(Kind::Flap, Scope::Worker(worker), || {
                        flap(show, proxy, &mut rng, until);
                    });
                });
            }
        });
    }
}

/// The connections are lost and refused for a moment, again and again until then.
pub(super) fn flap(show: &Show, proxy: &FaultProxy, rng: &mut Rng, until: Instant) {
    loop {
        if rng.bool() {
            lose_answer(show, proxy, ACQUIRES[usize::from(rng.u32(..4) == 0)]);
        } else {
            // So that at any time much is under way.
            proxy.delay(millis(rng, 20..80));
            show.pause(millis(rng, 100..400));
            // First, so that whoever is cut off does not come back at once.
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

/// The command is done, and its answer lost with the connection.
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
