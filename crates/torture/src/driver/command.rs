//! The lane of the command: one `leasehold run` or `leasehold lock` after the other, some of which are killed, stopped
//! or cut off.
//!
//! The command runs this program again, as a [child] that records that it is alive. There is no `check()` to call:
//! while a child of the command is alive, the command must hold. Each command is one life of a worker, with one
//! acquisition.
//!
//! [child]: crate::worker::child

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use testkit::proxy::{Cut, FaultProxy};

use super::stage::Stage;
use super::{Lifetime, LifetimeEnd, Phase, Show, TIME_LIMIT, describe, lock, millis};
use crate::clock::{self, Micros};
use crate::fault::{Kind, Scope};
use crate::history::{Event, HistoryFile, How};
use crate::plan::{self, THINGS, Thing};
use crate::worker::{COMMAND, ONLY_OP, history_path, lock_layout};

/// How long the command waits for its turn. After that, another command with another thing follows.
const WAIT: &str = "3s";
/// The command's own exit codes, and what they mean for the acquisition.
const ENDS: [(i32, How); 4] =
    [(0, How::Released), (75, How::TimedOut), (124, How::Lost), (69, How::Failed)];

pub(super) fn lane(show: &Show, stage: &Stage, index: usize, binary: &Path) {
    let mut rng = show.rng(index as u64);
    let mut life = 0;
    while *lock(&show.phase) < Phase::Finish {
        life += 1;
        // Most children would live much longer than any fault of the command lasts, if they were not stopped.
        let span = if rng.u32(..4) > 0 { 5000..10_000 } else { 0..1500 };
        let job = Job { show, index, life, span: millis(&mut rng, span) };
        let end = job.run(binary, stage, &mut rng);
        lock(&show.log).lives.push(Lifetime { worker: index, life, foreign: false, end });
    }
}

struct Job<'a> {
    show: &'a Show,
    index: usize,
    life: u32,
    /// How long the child lives, if nothing ends it.
    span: Duration,
}

impl Job<'_> {
    fn run(&self, binary: &Path, stage: &Stage, rng: &mut Rng) -> LifetimeEnd {
        // Mostly things with a capacity of 1, where a child that lives too long is noticed.
        let any = rng.u32(..4) == 0;
        let fits = |thing: &&Thing| thing.is_for_the_command() && (any || thing.capacity == 1);
        let usable: Vec<_> = THINGS.iter().filter(fits).collect();
        let thing = *rng.choice(&usable).expect("things for the command");
        let history_file = HistoryFile::open(&history_path(&self.show.dir, self.index, self.life));
        let history_file = history_file.expect("a directory for the history");
        history_file.note(Event::Begin { clients: COMMAND.to_owned() });
        let (op, id) = (ONLY_OP, COMMAND.to_owned());
        history_file.note(Event::Ask { op, thing: thing.name.to_owned(), id });
        let mut process = self.start(binary, &stage.url(self.index), thing);
        let killed = self.suffer(&mut process, stage, rng);
        let Some(status) = wait(&mut process) else { return LifetimeEnd::Stuck(clock::now()) };
        if let Some(at) = killed.filter(|_| status.signal().is_some()) {
            return LifetimeEnd::Killed(at);
        }
        let end = ENDS.iter().find(|(code, _)| status.code() == Some(*code));
        let Some((_, how)) = end else { return LifetimeEnd::Broke(describe(Some(status))) };
        history_file.note(Event::End { op, how: *how });
        history_file.note(Event::Done);
        LifetimeEnd::Done
    }

    fn start(&self, binary: &Path, url: &str, thing: &Thing) -> Child {
        let mut command = Command::new(binary);
        // The command asks the store for a longer lease than the child may use. Half of the lease leaves room for that.
        let lease = format!("{}ms", thing.lease / clock::MILLISECOND / 2);
        match thing.kind {
            plan::Kind::Lock => command.args(["lock", "--lease", &lease]),
            _ => command.args(["run", "-n", &thing.capacity.to_string(), "--heartbeat", &lease]),
        };
        command.env("LEASEHOLD_LOCK_LAYOUT", lock_layout(self.show.seed).to_string());
        command.args(["--store", url, "--wait", WAIT, thing.name, "--"]);
        // Half of the children ignore SIGTERM, so they have to be killed, and in time.
        if self.life.is_multiple_of(2) {
            command.args(["sh", "-c", "trap '' TERM; exec \"$@\"", "sh"]);
        }
        command.arg(std::env::current_exe().expect("our own path")).arg("child").arg("--dir");
        command.arg(&self.show.dir).args(["--index", &self.index.to_string()]);
        command.args(["--life", &self.life.to_string()]);
        command.args(["--millis", &self.span.as_millis().to_string()]);
        self.show.equip(&mut command);
        let errors = format!("worker-{}.{}.errors", self.index, self.life);
        let errors = File::create(self.show.dir.join(errors)).expect("a directory");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        command.spawn().expect("the command")
    }

    /// Kills the command, stops it or its guard for a while, cuts it off, or does nothing. Returns when it was killed,
    /// if it was.
    fn suffer(&self, process: &mut Child, stage: &Stage, rng: &mut Rng) -> Option<Micros> {
        let (scope, proxy) = (Scope::Worker(self.index), stage.proxy(self.index));
        let pid = Pid::from_child(process);
        // In turn, so that a short run has each of these faults. Those that kill or stop the command come twice,
        // because only then is the guard alone with the child. The lanes start at different places.
        match (self.life as usize + 3 * self.index) % 7 {
            0 | 4 if self.wait_a_little(rng) => {
                let begin = clock::now();
                if process.try_wait().ok()?.is_some() {
                    return None;
                }
                self.show.fault(Kind::Kill, scope, || process.kill()).ok()?;
                Some(begin)
            }
            // On one host, a command that is stopped at the wrong moment blocks the store for all processes. Then no
            // delay could be judged, so this is rare.
            2 | 6 if stage.is_local() && rng.u32(..5) > 0 => None,
            6 if self.wait_a_little(rng) => {
                let span = millis(rng, 100..6000);
                self.show.fault(Kind::Stop, scope, || {
                    let _ = kill_process(pid, Signal::STOP);
                    self.show.pause(span);
                    let _ = kill_process(pid, Signal::CONT);
                });
                None
            }
            2 if self.wait_a_little(rng) => {
                self.storm(pid, millis(rng, 3000..6000));
                None
            }
            1 | 3 if proxy.is_none() && self.wait_a_little(rng) => {
                self.show.fault(Kind::Cut, scope, || stage.cut(process.id()));
                None
            }
            3 if self.wait_a_little(rng) => {
                self.cut_off(proxy?, rng);
                None
            }
            1 | 5 if self.wait_a_little(rng) => {
                self.stop_the_guard(pid, proxy?, millis(rng, 4000..6000));
                None
            }
            _ => None,
        }
    }

    /// Stops the command, so that it reads nothing. Then stops and continues its child so often that the guard has more
    /// to report than a socket can buffer.
    fn storm(&self, command: Pid, span: Duration) {
        let child = first_child(command).and_then(first_child);
        self.show.fault(Kind::Stop, Scope::Worker(self.index), || {
            let _ = kill_process(command, Signal::STOP);
            let begun = Instant::now();
            for _ in 0..1500 {
                for signal in [Signal::STOP, Signal::CONT] {
                    let _ = child.map(|child| kill_process(child, signal));
                    // The guard has to see each signal.
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            self.show.pause(span.saturating_sub(begun.elapsed()));
            let _ = kill_process(command, Signal::CONT);
        });
    }

    /// Stops the guard and cuts the command off from the store. The lease ends, and only the command can stop the
    /// child.
    fn stop_the_guard(&self, command: Pid, proxy: &FaultProxy, span: Duration) {
        let guard = first_child(command);
        self.show.fault(Kind::HalfOpen, Scope::Worker(self.index), || {
            let _ = guard.map(|guard| kill_process(guard, Signal::STOP));
            proxy.half_open();
            self.show.pause(span);
            proxy.heal();
            let _ = guard.map(|guard| kill_process(guard, Signal::CONT));
        });
    }

    /// Waits, mostly until the child runs, if that is soon, because a command that is killed while it waits leaves
    /// nothing behind. Returns `false` if the time for faults ended in the meantime.
    fn wait_a_little(&self, rng: &mut Rng) -> bool {
        let path = history_path(&self.show.dir, self.index, self.life);
        let runs = || std::fs::read_to_string(&path).is_ok_and(|text| text.contains(" grant "));
        for _ in 0..if rng.u32(..5) > 0 { 100 } else { 0 } {
            if runs() || !self.show.pause(Duration::from_millis(30)) {
                break;
            }
        }
        self.show.pause(millis(rng, 0..1000))
    }

    /// Cuts the command off, sometimes for longer than it may believe.
    fn cut_off(&self, proxy: &FaultProxy, rng: &mut Rng) {
        let (kind, begin): (_, fn(&FaultProxy)) = match rng.u32(..4) {
            0 => (Kind::Reset, |proxy| proxy.cut_with(Cut::Reset)),
            1 => (Kind::Stall, FaultProxy::stall),
            2 => (Kind::HalfOpen, FaultProxy::half_open),
            _ => (Kind::Refuse, |proxy| {
                proxy.refuse(true);
                proxy.cut_with(Cut::Reset);
            }),
        };
        let span = millis(rng, 100..6000);
        self.show.fault(kind, Scope::Worker(self.index), || {
            begin(proxy);
            self.show.pause(span);
            proxy.heal();
        });
    }
}

/// Returns the first child of a process, as the kernel lists them: the guard of a command, or the child of a guard.
fn first_child(of: Pid) -> Option<Pid> {
    let of = of.as_raw_pid();
    let children = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).ok()?;
    Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
}

/// Returns how the process ended, or `None` if it did not end in time.
fn wait(process: &mut Child) -> Option<ExitStatus> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_micros(TIME_LIMIT) {
        if let Ok(Some(status)) = process.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    let _ = process.wait();
    None
}
