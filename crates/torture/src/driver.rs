//! The driver: starts the store and the workers, injects faults by a schedule that follows from the seed, and collects
//! the results.
//!
//! Faults come in *lanes*. Each lane is a thread with its own random numbers. There is one lane for each worker (its
//! process and its connections), one for the store, one for the workers' clock, and one that makes connections flap. An
//! operator has a lane as well, which injects no faults. A lane does one thing at a time, and lanes overlap freely.
//! Every lane records a fault from before it begins until after it has ended.
//!
//! Flaps and *storms* alternate, with lulls between them. In a storm, faults hit almost every worker, so hardly any
//! delay can be judged. In a lull, everything must recover from earlier faults, and nothing is exempt.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::args::Run;
use crate::clock::{self, Micros, SECOND, WALL, Wall};
use crate::fault::{Fault, Kind, Scope};

mod clocks;
mod cluster;
mod command;
mod connections;
mod flaps;
mod gather;
mod leftovers;
mod log;
mod operator;
mod sampler;
mod sentinel;
mod server;
mod stage;
mod worker;

pub use gather::gather;
pub use operator::{Change, LimitChange};
use stage::Stage;

/// How long the workers are left alone at the beginning. [`QUIET`] is the time at the end. In these times nothing is
/// exempt.
const CALM: Duration = Duration::from_secs(28);
/// The exceptions in the first calm. Connections flap once. Some workers are stopped once, each while it waits. All
/// workers are killed once, each while it holds something. What they held must be available again when the leases have
/// ended, and no other fault can be the cause if it is not.
const FIRST_FLAPS: Duration = Duration::from_secs(2);
const FIRST_STOPS: Duration = Duration::from_secs(7);
const POWER_CUT: Duration = Duration::from_secs(16);
const QUIET: Duration = Duration::from_secs(14);
/// How long connections flap, and how long the lull after that is. In that lull no worker may have to wait for an
/// acquisition that was cancelled.
const FLAPS: Duration = Duration::from_secs(4);
const LULL_AFTER_FLAPS: Duration = Duration::from_secs(10);
/// How long a storm lasts, and how long the lull after it is.
const STORM: Duration = Duration::from_secs(20);
const LULL: Duration = Duration::from_secs(13);
const CYCLE: Duration = Duration::from_secs(
    FLAPS.as_secs() + LULL_AFTER_FLAPS.as_secs() + STORM.as_secs() + LULL.as_secs(),
);
/// How many lanes run the command. Each runs one command after the other.
const COMMANDS: usize = 2;
/// How long a worker may take to finish.
pub const TIME_LIMIT: Micros = 40 * SECOND;
/// How often the histories are checked during a run, if that is requested.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// What the driver knows after a run, in addition to the histories.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Log {
    pub began: Micros,
    pub ended: Micros,
    /// When the last fault had ended.
    pub quiet_from: Micros,
    pub wall_offset: Micros,
    /// Whether the store was the local one.
    pub local: bool,
    pub faults: Vec<Fault>,
    pub lives: Vec<Lifetime>,
    /// The changes that the operator made, in order.
    pub changes: Vec<Change>,
    /// Samples of the store that had more holders than permits.
    pub crowded: Vec<Crowded>,
    /// The acquisitions that samples of the store listed.
    pub listed: Vec<Listed>,
    /// What was left in the store after all workers had ended.
    pub leftovers: Vec<String>,
    /// Why this run may prove nothing.
    pub doubts: Vec<String>,
}

/// A worker process, from one start to its end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lifetime {
    pub worker: usize,
    pub life: u32,
    pub foreign: bool,
    pub end: LifetimeEnd,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LifetimeEnd {
    Killed(Micros),
    Done,
    /// It ended by itself, with this status.
    Broke(String),
    /// It did not end when it was asked to.
    Stuck(Micros),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Crowded {
    pub at: Micros,
    pub thing: usize,
    pub held: u64,
}

/// An acquisition that every sample of the store listed, as a holder or a waiter, from the first instant to the last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    pub thing: usize,
    pub id: String,
    pub from: Micros,
    pub to: Micros,
}

/// The state that all lanes share.
struct Show {
    begun: Instant,
    seed: u64,
    dir: PathBuf,
    phase: Mutex<Phase>,
    changed: Condvar,
    log: Mutex<Log>,
    broken: Option<String>,
    /// The wall clock of the workers. It must not affect them.
    workers_clock: Option<Wall>,
    /// When the server's clock may first be set. Before that, the fence of a permit tells when it was granted.
    clock_from: Duration,
    /// How many workers use the library.
    workers: usize,
    /// The worker that is the other program, if that program can use the store.
    foreign: Option<usize>,
    /// The process id of each worker.
    pids: Mutex<BTreeMap<usize, u32>>,
    /// Whether a violation was found during the run. Used only with `--until-found`.
    found: Mutex<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Phase {
    Faults,
    Quiet,
    Finish,
}

impl Show {
    /// Sleeps. Returns `false` if the time for faults ended in the meantime.
    fn pause(&self, span: Duration) -> bool {
        let phase = lock(&self.phase);
        let waited = self.changed.wait_timeout_while(phase, span, |phase| *phase == Phase::Faults);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == Phase::Faults
    }

    /// Sleeps for `span`, and then, in a lull, until the next storm. Returns `false` if there will be none.
    fn next(&self, span: Duration) -> bool {
        if !self.pause(span) {
            return false;
        }
        let (begin, into) = (FLAPS + LULL_AFTER_FLAPS, self.time_in_cycle());
        match into {
            _ if into < begin => self.pause(begin.saturating_sub(into)),
            _ if into < begin + STORM => true,
            _ => self.pause((CYCLE + begin).saturating_sub(into)),
        }
    }

    /// Waits until the connections have to flap. Returns `false` if they will not flap any more.
    fn next_flaps(&self) -> bool {
        let now = self.begun.elapsed();
        self.pause(match now {
            _ if now < FIRST_FLAPS => FIRST_FLAPS.saturating_sub(now),
            _ if now < CALM => CALM.saturating_sub(now),
            _ => CYCLE.saturating_sub(self.time_in_cycle()),
        })
    }

    /// Returns the time since the current cycle began. A cycle is flaps, a lull, a storm and another lull.
    fn time_in_cycle(&self) -> Duration {
        let into = self.begun.elapsed().saturating_sub(CALM).as_micros() % CYCLE.as_micros();
        Duration::from_micros(u64::try_from(into).unwrap_or_default())
    }

    fn wait_for(&self, wanted: Phase) {
        let phase = lock(&self.phase);
        drop(self.changed.wait_while(phase, |phase| *phase < wanted));
    }

    fn enter(&self, phase: Phase) {
        *lock(&self.phase) = phase;
        self.changed.notify_all();
    }

    /// Injects a fault, and records when it began and ended.
    fn fault<T>(&self, kind: Kind, scope: Scope, work: impl FnOnce() -> T) -> T {
        let at = {
            let mut log = lock(&self.log);
            log.faults.push(Fault { kind, scope, begin: clock::now(), end: Micros::MAX });
            log.faults.len() - 1
        };
        let done = work();
        lock(&self.log).faults[at].end = clock::now();
        done
    }

    /// Sets the environment of a process that the driver starts.
    fn equip(&self, command: &mut Command) {
        if let Some(rule) = &self.broken {
            command.env("LEASEHOLD_BROKEN", rule);
        }
        if let Some(wall) = &self.workers_clock {
            command.env(WALL, &wall.path);
        }
    }

    fn doubt(&self, why: String) {
        lock(&self.log).doubts.push(why);
    }

    fn rng(&self, lane: u64) -> Rng {
        Rng::with_seed(Rng::with_seed(self.seed).u64(..) ^ Rng::with_seed(lane).u64(..))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a random duration, in milliseconds within `range`.
fn millis(rng: &mut Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}

/// Fails unless this build, and the command if it takes part, can break the rule. Otherwise nothing would be broken, and
/// the run would say nothing about the checker.
fn check_broken(rule: &str, command: Option<&Path>) -> Result<(), String> {
    #[cfg(leasehold_broken)]
    let rules = leasehold::broken::RULES;
    #[cfg(not(leasehold_broken))]
    let rules = ["none, because torture was built without --cfg leasehold_broken"];
    if !rules.contains(&rule) {
        return Err(format!("there is no rule {rule:?} to break: {}", rules.join(", ")));
    }
    let Some(command) = command else { return Ok(()) };
    let probe = Command::new(command).arg("--broken-rules").output();
    let probe = probe.map_err(|error| format!("{}: {error}", command.display()))?;
    let can_break = String::from_utf8_lossy(&probe.stdout).lines().any(|line| line == rule);
    if !probe.status.success() || !can_break {
        let problem = format!("{} cannot break the rule {rule:?}", command.display());
        return Err(problem + ": build it with --cfg leasehold_broken");
    }
    Ok(())
}

/// Runs the whole test and returns what the driver saw. What the workers saw is in the directory.
///
/// # Errors
/// A message if the store could not be started, or if the rule cannot be broken. Then nothing was tested.
pub fn run(run: &Run, seed: u64, dir: &Path) -> Result<Log, String> {
    if let Some(rule) = &run.broken {
        check_broken(rule, run.command.as_deref())?;
    }
    let stage = Stage::set(&run.store, seed, run.workers + 1 + COMMANDS, dir)?;
    let whole = Duration::from_secs_f64(run.minutes * 60.0);
    let show = Show {
        begun: Instant::now(),
        seed,
        dir: dir.to_owned(),
        phase: Mutex::new(Phase::Faults),
        changed: Condvar::new(),
        log: Mutex::default(),
        broken: run.broken.clone(),
        workers_clock: Wall::another(&dir.join("workers-clock")),
        clock_from: whole / 2,
        workers: run.workers,
        foreign: stage.is_shared().then_some(run.workers),
        pids: Mutex::default(),
        found: Mutex::new(false),
    };
    let interrupted = Arc::new(Mutex::new(false));
    listen_for_ctrl_c(&interrupted);
    {
        let mut log = lock(&show.log);
        (log.began, log.wall_offset) = (clock::now(), clock::wall_offset());
        log.local = stage.is_local();
    }
    let faults = whole.saturating_sub(QUIET).max(whole / 2);
    thread::scope(|lanes| {
        let mut all = Vec::new();
        for worker in 0..=run.workers {
            let foreign = show.foreign == Some(worker);
            if worker == run.workers && !foreign {
                continue;
            }
            let (show, stage) = (&show, &stage);
            all.push(lanes.spawn(move || worker::lane(show, stage, worker, foreign)));
        }
        for binary in run.command.iter().flat_map(|binary| [binary; COMMANDS]) {
            // On a store that the other program cannot use, the index of that program is free.
            let (show, stage, index) = (&show, &stage, all.len());
            all.push(lanes.spawn(move || command::lane(show, stage, index, binary)));
        }
        let sampler = lanes.spawn(|| sampler::lane(&show, &stage));
        let server = lanes.spawn(|| server::lane(&show, &stage));
        let workers_clock = lanes.spawn(|| clocks::lane(&show));
        let flaps = lanes.spawn(|| flaps::lane(&show, &stage));
        let operator = lanes.spawn(|| operator::lane(&show, &stage));
        let begun = Instant::now();
        let mut looked = begun;
        let mut over = |limit: Duration| {
            if run.until_found && looked.elapsed() > LOOK_EVERY {
                let found = *lock(&show.found) || found_something(&show);
                *lock(&show.found) = found;
                looked = Instant::now();
            }
            begun.elapsed() >= limit || *lock(&interrupted) || *lock(&show.found)
        };
        while !over(faults) {
            thread::sleep(Duration::from_millis(100));
        }
        show.enter(Phase::Quiet);
        join(&show, "the store's lane", server);
        join(&show, "the lane of the workers' clock", workers_clock);
        join(&show, "the lane of the workers' connections", flaps);
        stage.heal();
        lock(&show.log).quiet_from = clock::now();
        while !over(whole) {
            thread::sleep(Duration::from_millis(100));
        }
        lock(&show.log).ended = clock::now();
        show.enter(Phase::Finish);
        for (worker, lane) in all.into_iter().enumerate() {
            join(&show, &format!("the lane of worker {worker}"), lane);
        }
        join(&show, "the sampler", sampler);
        join(&show, "the operator's lane", operator);
    });
    if *lock(&interrupted) {
        let mut log = lock(&show.log);
        let ran = log.ended - log.began;
        let whole = whole.as_secs();
        log.doubts.push(format!("the run was stopped after {} of {whole} s", ran / SECOND));
    } else if !*lock(&show.found) {
        let left = leftovers::find(&stage, &lock(&show.log));
        let mut log = lock(&show.log);
        match left {
            Ok(leftovers) => log.leftovers = leftovers,
            Err(why) => {
                log.doubts.push(format!("the store could not be read at the end: {why}"));
            }
        }
    }
    let drift = clock::wall_offset().abs_diff(lock(&show.log).wall_offset);
    if drift > SECOND / 10 {
        show.doubt(format!("the wall clock, which Redis uses, was stepped by {drift} µs"));
    }
    Ok(std::mem::take(&mut lock(&show.log)))
}

/// Checks the histories so far, during a run.
fn found_something(show: &Show) -> bool {
    let so_far = gather::so_far(&show.dir, &lock(&show.log), show.foreign);
    let Ok(history) = so_far else { return false };
    let violations = crate::check::check(&history).violations;
    if let Some(first) = violations.first() {
        // At the end more is known, and the finding may turn out to be exempt.
        let (rule, thing, what) = (first.rule.as_str(), &first.thing, &first.what);
        show.doubt(format!("found during the run: {rule} {thing}: {what}"));
    }
    !violations.is_empty()
}

fn join<T>(show: &Show, what: &str, lane: thread::ScopedJoinHandle<'_, T>) {
    if let Err(panic) = lane.join() {
        let why = panic.downcast_ref::<String>().map(String::as_str);
        let why = why.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        show.doubt(format!("{what} stopped early: {why}"));
    }
}

fn listen_for_ctrl_c(interrupted: &Arc<Mutex<bool>>) {
    let interrupted = interrupted.clone();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                *lock(&interrupted) = true;
            }
        });
    });
}

/// Describes an exit status.
fn describe(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "its exit status is unknown".to_owned(), |status| status.to_string())
}

/// Returns the number of faults of each kind.
#[must_use]
pub fn by_kind(faults: &[Fault]) -> BTreeMap<Kind, usize> {
    let mut counts = BTreeMap::new();
    for fault in faults {
        *counts.entry(fault.kind).or_default() += 1;
    }
    counts
}
