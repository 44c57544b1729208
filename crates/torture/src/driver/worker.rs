//! The lane of one worker: faults of its process and its connections.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use testkit::proxy::{Cut, FaultProxy};

use super::stage::Stage;
use super::{
    CALM, FIRST_STOPS, Lifetime, LifetimeEnd, POWER_CUT, Phase, Show, TIME_LIMIT, describe, flaps,
    lock, millis,
};
use crate::clock::{self, SECOND};
use crate::fault::{Kind, Scope};
use crate::history::{self, Event};
use crate::plan::{self, CONFIRM, SOCKET_TIMEOUT, THINGS, Thing};
use crate::worker::history_path;

/// A string that occurs in every request of the library.
const SCRIPT: &[u8] = b"EVALSHA";

struct Worker<'a> {
    show: &'a Show,
    index: usize,
    life: u32,
    foreign: bool,
    url: String,
    process: Child,
}

pub(super) fn lane(show: &Show, stage: &Stage, index: usize, foreign: bool) {
    let mut rng = show.rng(index as u64);
    let mut worker = Worker::start(show, index, 1, foreign, stage.url(index));
    let proxy = stage.proxy(index);
    if !foreign && is_stopped_first(index) && show.pause(FIRST_STOPS) {
        worker = worker.stop_as_a_waiter(&mut rng, proxy);
    }
    if !foreign && show.pause(POWER_CUT.saturating_sub(show.begun.elapsed())) {
        worker.wait_until_it_holds();
        worker = worker.kill(&mut rng);
    }
    let mut next = CALM.saturating_sub(show.begun.elapsed()) + millis(&mut rng, 0..4000);
    while show.next(next) {
        worker = if worker.has_ended() { worker.again() } else { worker.suffer(&mut rng, stage) };
        next = millis(&mut rng, 1000..10_000);
    }
    if let Some(proxy) = proxy {
        proxy.heal();
    }
    show.wait_for(Phase::Finish);
    worker.finish();
}

/// Whether this worker is one of those that are stopped in the first calm.
pub(super) fn is_stopped_first(index: usize) -> bool {
    index % 2 == 1
}

impl<'a> Worker<'a> {
    fn start(show: &'a Show, index: usize, life: u32, foreign: bool, url: String) -> Self {
        let errors = File::create(show.dir.join(format!("worker-{index}.{life}.errors")));
        let mut command = Command::new(std::env::current_exe().expect("our own path"));
        command.arg("worker").args(["--index", &index.to_string(), "--life", &life.to_string()]);
        command.args(["--seed", &show.seed.to_string(), "--store", &url, "--dir"]).arg(&show.dir);
        if foreign {
            // The other program writes times itself, so it needs the clock of the servers.
            command.arg("--foreign");
        } else {
            show.equip(&mut command);
        }
        // A group of its own, because Ctrl-C is meant for the driver only. And if the driver dies, the kernel ends
        // stopped processes in orphaned groups.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let process =
            command.stderr(errors.expect("a directory")).spawn().expect("our own program");
        lock(&show.pids).insert(index, process.id());
        Self { show, index, life, foreign, url, process }
    }

    /// Starts the next life, after this one has ended.
    fn again(&self) -> Self {
        Self::start(self.show, self.index, self.life + 1, self.foreign, self.url.clone())
    }

    fn ended(&self, end: LifetimeEnd) {
        let Self { index: worker, life, foreign, .. } = *self;
        lock(&self.show.log).lives.push(Lifetime { worker, life, foreign, end });
    }

    /// Whether it ended without being asked to.
    fn has_ended(&mut self) -> bool {
        let Ok(Some(status)) = self.process.try_wait() else { return false };
        self.ended(LifetimeEnd::Broke(describe(Some(status))));
        true
    }

    /// Waits, for a limited time, until it holds something that only workers use.
    fn wait_until_it_holds(&self) {
        let only_workers_use = |thing: &Thing| {
            let others = thing.is_for_the_command() || thing.shared || thing.is_lasting();
            thing.is_plain() && !others
        };
        self.wait_until(|requested, granted| only_workers_use(requested) && granted);
    }

    /// Waits, for a limited time, until it waits for a permit that will pass on soon if it is not claimed.
    fn wait_until_it_waits(&self) {
        self.wait_until(|requested, granted| requested.lease <= 2 * SECOND && !granted);
    }

    /// Waits, for a limited time, until `is_right` returns `true` for one of its acquisitions of a semaphore, given
    /// whether it was granted.
    fn wait_until(&self, is_right: impl Fn(&Thing, bool) -> bool) {
        let semaphore = |name: &str| {
            plan::find(name).map(|at| &THINGS[at]).filter(|it| it.kind == plan::Kind::Semaphore)
        };
        let path = history_path(&self.show.dir, self.index, self.life);
        for _ in 0..200 {
            let mut current = BTreeMap::new();
            for line in history::read(&path).unwrap_or_default() {
                match line.event {
                    Event::Ask { op, thing, .. } => {
                        current.extend(semaphore(&thing).map(|thing| (op, (thing, false))));
                    }
                    Event::Grant { op, .. } => {
                        current.entry(op).and_modify(|(_, granted)| *granted = true);
                    }
                    Event::Ending { op } | Event::End { op, .. } => _ = current.remove(&op),
                    _ => {}
                }
            }
            let found = current.values().any(|(thing, granted)| is_right(thing, *granted));
            if found || !self.show.pause(Duration::from_millis(10)) {
                return;
            }
        }
    }

    fn suffer(mut self, rng: &mut Rng, stage: &Stage) -> Self {
        let scope = Scope::Worker(self.index);
        let (show, span) = (self.show, millis(rng, 100..6000));
        let roll = rng.u32(..100);
        let Some(proxy) = stage.proxy(self.index) else {
            return match roll {
                0..12 if !stage.is_local() => {
                    show.fault(Kind::Cut, scope, || stage.cut(self.process.id()));
                    self
                }
                12..25 if !stage.is_local() => {
                    let until = Instant::now() + span / 2;
                    let flap = || flaps::cut_often(show, stage, self.index, rng, until);
                    show.fault(Kind::Flap, scope, flap);
                    self
                }
                0..50 => self.kill(rng),
                50..75 => self.stop(span),
                _ => self.stop_as_a_waiter(rng, None),
            };
        };
        match roll {
            0..25 if !self.foreign => return self.kill(rng),
            0..30 => return self.stop(span),
            30..43 => return self.stop_as_a_waiter(rng, Some(proxy)),
            43..47 => show.fault(Kind::Cut, scope, || proxy.cut_with(Cut::Close)),
            47..51 => show.fault(Kind::Reset, scope, || proxy.cut_with(Cut::Reset)),
            51..57 => {
                let until = Instant::now() + span / 2;
                show.fault(Kind::Flap, scope, || flaps::flap(show, proxy, rng, until));
            }
            57..62 => {
                return self.endure(Kind::Refuse, span, rng, proxy, |_| {
                    proxy.refuse(true);
                    proxy.cut_with(Cut::Reset);
                });
            }
            62..68 => {
                let delay = |rng: &mut Rng| proxy.delay(millis(rng, 5..400));
                return self.endure(Kind::Delay, span, rng, proxy, delay);
            }
            68..75 => return self.endure(Kind::Stall, span, rng, proxy, |_| proxy.stall()),
            75..84 => return self.endure(Kind::HalfOpen, span, rng, proxy, |_| proxy.half_open()),
            84..89 => show.fault(Kind::Forget, scope, || proxy.forget_connections()),
            89..96 => {
                show.fault(Kind::LoseReply, scope, || lose(proxy, rng, FaultProxy::lose_reply_to));
            }
            _ => {
                show.fault(Kind::LoseRequest, scope, || lose(proxy, rng, FaultProxy::lose_request));
            }
        }
        self
    }

    /// A fault that lasts until the proxy is healed. Some workers are killed in the middle of it, and restarted while
    /// it lasts.
    fn endure(
        mut self,
        kind: Kind,
        span: Duration,
        rng: &mut Rng,
        proxy: &FaultProxy,
        begin: impl FnOnce(&mut Rng),
    ) -> Self {
        self.show.fault(kind, Scope::Worker(self.index), || {
            begin(rng);
            if !self.foreign && rng.u32(..100) < 20 {
                self.show.pause(span / 2);
                self = self.kill(rng);
                self.show.pause(span / 2);
            } else {
                self.show.pause(span);
            }
            proxy.heal();
            self
        })
    }

    fn kill(&mut self, rng: &mut Rng) -> Self {
        let begin = clock::now();
        self.show.fault(Kind::Kill, Scope::Worker(self.index), || {
            let _ = self.process.kill();
            let _ = self.process.wait();
        });
        self.ended(LifetimeEnd::Killed(begin));
        self.show.pause(millis(rng, 0..1500));
        self.again()
    }

    fn stop(self, span: Duration) -> Self {
        self.stop_and_then(span, || {})
    }

    fn stop_and_then(self, span: Duration, before_it_goes_on: impl FnOnce()) -> Self {
        let pid = Pid::from_child(&self.process);
        self.show.fault(Kind::Stop, Scope::Worker(self.index), || {
            let _ = kill_process(pid, Signal::STOP);
            let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            let _ = waitid(WaitId::Pid(pid), options);
            self.show.pause(span);
            before_it_goes_on();
            let _ = kill_process(pid, Signal::CONT);
        });
        self
    }

    /// Stops a worker that waits, until its turn has come and the time to claim its permit has passed. When it
    /// continues, it finds an old wake-up, and for a moment its requests are answered late.
    fn stop_as_a_waiter(self, rng: &mut Rng, proxy: Option<&FaultProxy>) -> Self {
        self.wait_until_it_waits();
        let span = Duration::from_micros(CONFIRM) + millis(rng, 500..3000);
        let Some(proxy) = proxy else { return self.stop(span) };
        let slow = Duration::from_micros(SOCKET_TIMEOUT / 4);
        let stopped = self.stop_and_then(span, || proxy.delay(slow));
        let scope = Scope::Worker(stopped.index);
        stopped.show.fault(Kind::Delay, scope, || stopped.show.pause(4 * slow));
        proxy.heal();
        stopped
    }

    fn finish(mut self) {
        if self.has_ended() {
            return;
        }
        if *lock(&self.show.found) {
            return self.ended(LifetimeEnd::Killed(clock::now()));
        }
        let asked_at = clock::now();
        if let Some(input) = self.process.stdin.as_mut() {
            let _ = input.write_all(b"finish\n");
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(TIME_LIMIT) {
            match self.process.try_wait() {
                Ok(Some(status)) if status.success() => return self.ended(LifetimeEnd::Done),
                Ok(Some(status)) => return self.ended(LifetimeEnd::Broke(describe(Some(status)))),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        self.ended(LifetimeEnd::Stuck(asked_at));
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Loses the answers to some commands, or the commands themselves, one after the other.
fn lose(proxy: &FaultProxy, rng: &mut Rng, order: impl Fn(&FaultProxy, &[u8])) {
    for _ in 0..rng.u32(1..5) {
        let before = proxy.traffic().lost;
        order(proxy, SCRIPT);
        let begun = Instant::now();
        while proxy.traffic().lost == before && begun.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    proxy.heal();
}
