//! The lane of the store.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use testkit::redis_server::RedisServer;

use super::stage::{Local, Stage, redis_command};
use super::{CALM, Show, clocks, cluster, lock, millis, sentinel};
use crate::clock::{SECOND, Wall};
use crate::fault::{Kind, Scope};
use crate::plan::{self, EXTENSION, THINGS, Things};
use crate::record::{Record, Step};
use crate::worker::record_path;

/// After this time the last lease from before has ended.
const LAST_LEASE: Duration = Duration::from_micros(EXTENSION + SECOND);

/// Faults in random order. Each fault comes once before any comes again, so that a short run has all of them.
pub(super) struct ShuffledFaults<T: 'static> {
    all: &'static [T],
    left: Vec<T>,
}

impl<T: Copy> ShuffledFaults<T> {
    pub(super) fn new(all: &'static [T]) -> Self {
        Self { all, left: Vec::new() }
    }

    pub(super) fn draw(&mut self, rng: &mut Rng) -> T {
        if self.left.is_empty() {
            self.left = self.all.to_vec();
            rng.shuffle(&mut self.left);
        }
        self.left.pop().expect("a list that is not empty")
    }
}

pub(super) fn lane(show: &Show, stage: &Stage) {
    let mut rng = show.rng(u64::MAX);
    let redis = match stage {
        Stage::Redis(redis) => redis,
        Stage::Cluster(cluster) => return cluster::lane(show, cluster),
        Stage::Sentinel(sentinel) => return sentinel::lane(show, sentinel),
        Stage::Local(local) => return disk(show, local, &mut rng),
    };
    let all: Things = (0..THINGS.len()).collect();
    let (mut next, wall) = (CALM, Wall::of_this_process());
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
                forget_fences_twice(show, all);
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
                show.fault(Kind::ClientPause, Scope::Everybody, || {
                    client_pause(redis.primary(), span);
                });
            }
            54..70 => show.fault(Kind::ClientKill, Scope::Everybody, || {
                client_kill(redis.primary(), &mut rng);
            }),
            70..88 => show.fault(Kind::ScriptFlush, Scope::Nobody, || {
                redis_command::<String>(&mut redis.primary().connection(), &["SCRIPT", "FLUSH"]);
            }),
            _ => {
                if redis.is_copied() {
                    let split = millis(&mut rng, 0..400);
                    show.fault(Kind::Promote, Scope::Everybody, || redis.promote(split));
                    redis.demote();
                    forget_fences_twice(show, all);
                }
            }
        }
        next = millis(&mut rng, 2000..12_000);
    }
}

/// The lane of a local store.
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
            show.doubt(format!("the store could not be blocked: {error}"));
        }
        next = millis(rng, 2000..12_000);
    }
}

pub(super) fn client_pause(server: &RedisServer, span: Duration) {
    let mut connection = server.connection();
    redis_command::<String>(&mut connection, &["CLIENT", "PAUSE", &span.as_millis().to_string()]);
    thread::sleep(span);
}

/// Kills about half of the connections. A multiplexed client has only one.
pub(super) fn client_kill(server: &RedisServer, rng: &mut Rng) {
    let mut connection = server.connection();
    let list: String = redis_command(&mut connection, &["CLIENT", "LIST"]);
    let ours = |line: &&str| line.contains(" user=default ") && !line.contains(" flags=S ");
    let ids =
        list.lines().filter(ours).filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    for id in ids {
        if rng.bool() {
            // The client may have disconnected in the meantime.
            redis_command::<u64>(&mut connection, &["CLIENT", "KILL", "ID", id]);
        }
    }
}

/// Resets the fence floors of the records twice after the store has lost its data. The fence counter of a lock is lost
/// with the data and starts again. The fences of a permit start at the clock, which may have been set back. The
/// operator of a resource has to know both. The second reset comes when the last lease from before has ended, because
/// its holder may have used its large fence in between.
fn forget_fences_twice(show: &Show, things: Things) {
    forget_fences(show, things);
    show.pause(LAST_LEASE);
    forget_fences(show, things);
}

/// Does the second reset while the lane continues.
pub(super) fn forget_fences_later<'scope, 'env: 'scope>(
    show: &'scope Show,
    later: &'scope thread::Scope<'scope, 'env>,
    things: Things,
) {
    later.spawn(move || {
        show.pause(LAST_LEASE);
        forget_fences(show, things);
    });
}

/// Resets the fence floors once.
pub(super) fn forget_fences(show: &Show, things: Things) {
    let set_back = lock(&show.log).faults.iter().any(|fault| fault.kind == Kind::ClockBack);
    for (at, thing) in things.iter().map(|at| (at, &THINGS[at])) {
        if !thing.recorded || thing.kind != plan::Kind::Lock && !set_back {
            continue;
        }
        let Ok(record) = Record::open(&record_path(&show.dir, at)) else { continue };
        for _ in 0..100 {
            match record.forget_fences() {
                Ok(Step::Busy) => thread::sleep(Duration::from_millis(5)),
                _ => break,
            }
        }
    }
}
