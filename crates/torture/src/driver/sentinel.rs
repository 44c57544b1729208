//! A primary with two replicas and their sentinels, and the lane of their faults.
//!
//! Every worker also knows a sentinel that the other sentinels do not know. It names the first primary forever.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use testkit::redis_sentinel::{Options, RedisSentinel};
use testkit::redis_server::RedisServer;
use testkit::wait::TIME_LIMIT;

use super::server::{
    ShuffledFaults, client_kill, client_pause, forget_fences, forget_fences_later,
};
use super::stage::redis_command;
use super::{CALM, Show, millis};
use crate::fault::{Kind, Scope};
use crate::plan::{THINGS, Things};

/// How long a server may be silent before the sentinels consider it down. With a shorter time, a busy machine would
/// cause failovers by itself.
const DOWN_AFTER_MS: u32 = 1500;
/// Pauses, in milliseconds, that are too short for a failover.
const SHORT: std::ops::Range<u64> = 50..800;
const SERVERS: usize = 3;

pub(super) struct Sentinel {
    set: RedisSentinel,
    stale: usize,
    primary: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    Pause,
    Failover,
    KillSentinels,
    Freeze,
    ClientKill,
    ClientPause,
    ScriptFlush,
}

const FAULTS: [Fault; 11] = [
    Fault::Kill,
    Fault::Kill,
    Fault::Pause,
    Fault::Pause,
    Fault::Failover,
    Fault::KillSentinels,
    Fault::KillSentinels,
    Fault::Freeze,
    Fault::ClientKill,
    Fault::ClientPause,
    Fault::ScriptFlush,
];

pub(super) fn lane(show: &Show, sentinel: &Sentinel) {
    let mut rng = show.rng(u64::MAX);
    let (mut faults, mut next) = (ShuffledFaults::new(&FAULTS), CALM);
    show.fault(Kind::StaleSentinel, Scope::Nobody, || {
        thread::scope(|later| {
            while show.next(next) {
                if sentinel.set.primary() != sentinel.primary.load(Ordering::SeqCst) {
                    show.doubt("the sentinels chose another primary by themselves".to_owned());
                }
                let lost = sentinel.suffer(show, faults.draw(&mut rng), &mut rng);
                sentinel.primary.store(sentinel.set.primary(), Ordering::SeqCst);
                forget_fences_later(show, later, lost);
                next = millis(&mut rng, 300..2500);
            }
        });
    });
}

impl Sentinel {
    pub(super) fn start() -> Self {
        // So that an old primary comes back with its data.
        let server_options = &["--appendonly yes", "--appendfsync no"];
        let down_after_ms = DOWN_AFTER_MS;
        let options = Options { down_after_ms, server_options, ..Options::default() };
        let set = RedisSentinel::start_with(options);
        let primary = set.primary();
        let stale = set.stale_sentinel(primary);
        Self { set, stale, primary: AtomicUsize::new(primary) }
    }

    pub(super) fn url(&self) -> String {
        self.set.url_of(&[self.stale, 0, 1, 2])
    }

    pub(super) fn primary(&self) -> &RedisServer {
        self.set.server(self.primary.load(Ordering::SeqCst))
    }

    /// The URLs of the running servers and sentinels.
    pub(super) fn running(&self) -> Vec<String> {
        let url = |server: &RedisServer| server.is_running().then(|| server.url());
        let servers = (0..SERVERS).filter_map(|index| url(self.set.server(index)));
        let sentinels = (0..=self.stale).filter_map(|index| url(&self.set.sentinel(index)));
        servers.chain(sentinels).collect()
    }

    /// Injects one fault. Returns the things whose data may be lost.
    fn suffer(&self, show: &Show, fault: Fault, rng: &mut Rng) -> Things {
        let (set, everybody) = (&self.set, Scope::Everybody);
        let primary = set.primary();
        let all: Things = (0..THINGS.len()).collect();
        match fault {
            Fault::Kill => {
                self.replace(show, Kind::PrimaryKilled, primary, RedisSentinel::kill);
                show.pause(millis(rng, 0..2000));
                show.fault(Kind::OldPrimary, everybody, || {
                    set.revive(primary);
                    set.wait_ready();
                });
                return all;
            }
            Fault::Pause => {
                self.replace(show, Kind::PrimaryPaused, primary, RedisSentinel::pause);
                show.pause(millis(rng, 0..2000));
                show.fault(Kind::OldPrimary, everybody, || {
                    set.resume(primary);
                    set.wait_ready();
                });
                return all;
            }
            Fault::Failover => {
                let to = show.fault(Kind::SentinelFailover, everybody, || set.failover());
                self.primary.store(to, Ordering::SeqCst);
                forget_fences(show, all);
                return all;
            }
            Fault::KillSentinels => self.kill_sentinels(show, rng),
            Fault::Freeze => show.fault(Kind::Freeze, everybody, || {
                set.pause(primary);
                show.pause(millis(rng, SHORT));
                set.resume(primary);
            }),
            Fault::ClientKill => show.fault(Kind::ClientKill, everybody, || {
                client_kill(set.server(primary), rng);
            }),
            Fault::ClientPause => show.fault(Kind::ClientPause, everybody, || {
                // A short pause, because it also affects the connections of the sentinels.
                client_pause(set.server(primary), millis(rng, SHORT));
            }),
            Fault::ScriptFlush => show.fault(Kind::ScriptFlush, Scope::Nobody, || {
                redis_command::<String>(
                    &mut set.server(primary).connection(),
                    &["SCRIPT", "FLUSH"],
                );
            }),
        }
        Things::default()
    }

    /// Stops the primary until a replica has taken its place.
    fn replace(&self, show: &Show, kind: Kind, primary: usize, stop: fn(&RedisSentinel, usize)) {
        let (to, _) = show.fault(kind, Scope::Everybody, || {
            stop(&self.set, primary);
            self.set.wait_failover(primary, Instant::now(), TIME_LIMIT)
        });
        self.primary.store(to, Ordering::SeqCst);
        forget_fences(show, (0..THINGS.len()).collect());
    }

    /// Kills the sentinels one after the other. A client that is connected does not need them. While the last one is
    /// dead, no client can connect.
    fn kill_sentinels(&self, show: &Show, rng: &mut Rng) {
        let mut order = [0, 1, 2];
        rng.shuffle(&mut order);
        let [first, second, last] = order;
        let (set, one) = (&self.set, Kind::SentinelKilled);
        show.fault(one, Scope::Nobody, || {
            set.kill_sentinel(first);
            show.pause(millis(rng, 100..1500));
            show.fault(one, Scope::Nobody, || {
                set.kill_sentinel(second);
                show.pause(millis(rng, 100..1500));
                show.fault(Kind::NoSentinel, Scope::Everybody, || {
                    set.kill_sentinel(last);
                    show.pause(millis(rng, 100..1000));
                    set.revive_sentinel(last);
                });
                show.pause(millis(rng, 0..1000));
                set.revive_sentinel(second);
            });
            set.revive_sentinel(first);
            set.wait_ready();
        });
    }
}
