//! The lane of the store.

use std::time::Duration;

use fastrand::Rng;

use super::stage::{Local, Redis, Stage, ask};
use super::{CALM, Show, clocks, lock, millis};
use crate::clock::{SECOND, Wall};
use crate::fault::{Kind, Scope};
use crate::plan::{self, EXTENSION, THINGS};
use crate::record::{Record, Step};
use crate::worker::record_path;

pub(super) fn lane(show: &Show, stage: &Stage) {
    let mut rng = show.rng(u64::MAX);
    let redis = match stage {
        Stage::Redis(redis) => redis,
        Stage::Local(local) => return disk(show, local, &mut rng),
    };
    let (mut next, wall) = (CALM, Wall::own());
    while show.next(next) {
        let late = show.begun.elapsed() > show.clock_from;
        if let Some(wall) = wall.as_ref().filter(|_| late && rng.u32(..100) < 25) {
            clocks::set_the_servers(show, wall, &mut rng);
            next = millis(&mut rng, 2000..12_000);
            continue;
        }
        match rng.u32(..100) {
            0..11 => show.fault(Kind::Restart, Scope::Everybody, || redis.primary().restart()),
            11..22 => show.fault(Kind::Crash, Scope::Everybody, || redis.primary().crash()),
            22..32 => {
                show.fault(Kind::RestartEmpty, Scope::Everybody, || {
                    redis.primary().restart_empty();
                });
                forget_fences(show);
            }
            32..43 => {
                let span = millis(&mut rng, 50..2500);
                show.fault(Kind::Freeze, Scope::Everybody, || {
                    redis.primary().pause();
                    show.pause(span);
                    redis.primary().resume();
                });
            }
            43..54 => {
                let span = millis(&mut rng, 50..2500);
                show.fault(Kind::ClientPause, Scope::Everybody, || client_pause(redis, span));
            }
            54..70 => show.fault(Kind::ClientKill, Scope::Everybody, || {
                client_kill(redis, &mut rng);
            }),
            70..88 => show.fault(Kind::ScriptFlush, Scope::Nobody, || {
                ask::<String>(&mut redis.primary().connection(), &["SCRIPT", "FLUSH"]);
            }),
            _ => {
                if redis.is_copied() {
                    let split = millis(&mut rng, 0..400);
                    show.fault(Kind::Promote, Scope::Everybody, || redis.promote(split));
                    redis.demote();
                    forget_fences(show);
                }
            }
        }
        next = millis(&mut rng, 2000..12_000);
    }
}

/// The lane of a store that is a file.
fn disk(show: &Show, local: &Local, rng: &mut Rng) {
    let mut next = CALM;
    while show.next(next) {
        let span = millis(rng, 50..2500);
        let held = show.fault(Kind::Freeze, Scope::Everybody, || {
            local.hold_up(|| {
                show.pause(span);
            })
        });
        if let Err(error) = held {
            show.doubt(format!("the store could not be held up: {error}"));
        }
        next = millis(rng, 2000..12_000);
    }
}

fn client_pause(redis: &Redis, span: Duration) {
    let mut connection = redis.primary().connection();
    ask::<String>(&mut connection, &["CLIENT", "PAUSE", &span.as_millis().to_string()]);
    std::thread::sleep(span);
}

/// Half of them, more or less; a multiplexed client has only one.
fn client_kill(redis: &Redis, rng: &mut Rng) {
    let mut connection = redis.primary().connection();
    let list: String = ask(&mut connection, &["CLIENT", "LIST"]);
    let ours = |line: &&str| line.contains(" user=default ") && !line.contains(" flags=S ");
    let ids =
        list.lines().filter(ours).filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    for id in ids {
        if rng.bool() {
            // It may have gone by itself.
            ask::<u64>(&mut connection, &["CLIENT", "KILL", "ID", id]);
        }
    }
}

/// With the store's data the count of a lock's fences is gone, and begins anew; and those of a permit begin at a clock that may
/// have been set back since. Whoever runs the resource has to know; and once more when the last lease of before is over,
/// because whoever had it may have come with its large fence.
fn forget_fences(show: &Show) {
    forget_fences_once(show);
    show.pause(Duration::from_micros(EXTENSION + SECOND));
    forget_fences_once(show);
}

fn forget_fences_once(show: &Show) {
    let set_back = lock(&show.log).faults.iter().any(|fault| fault.kind == Kind::ClockBack);
    for (at, thing) in THINGS.iter().enumerate() {
        if !thing.recorded || thing.kind != plan::Kind::Lock && !set_back {
            continue;
        }
        let Ok(record) = Record::open(&record_path(&show.dir, at)) else { continue };
        for _ in 0..100 {
            match record.forget_fences() {
                Ok(Step::Busy) => std::thread::sleep(Duration::from_millis(5)),
                _ => break,
            }
        }
    }
}
