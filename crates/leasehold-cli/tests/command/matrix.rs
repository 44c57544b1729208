//! Whatever happens to the command and its guard, and whenever: never two children at once, and no process is left.
//!
//! The child takes a file lock, which the kernel releases when the child dies, and reports if
//! another child has it. The cells are independent of each other and run concurrently.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::parts::part;
use crate::support::{Inspector, Running, Store, run, until};

/// How many cells run at a time. They mostly wait.
const SIDE_BY_SIDE: usize = 8;
/// A lease of 1.2 s, a grace of 200 ms and their margin.
const LEASE: [&str; 4] = ["--lease", "1200ms", "--grace", "200ms"];
/// Longer than the lease, the grace and the margin.
const LEASE_IS_OVER: Duration = Duration::from_millis(2200);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Process {
    Command,
    Guard,
    Both,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Killed,
    Stopped,
    /// It continues after more than a lease.
    StoppedThenContinued,
    /// The guard is stopped, and then the command is killed.
    CommandKilled,
    /// The command is stopped, and then the guard is killed.
    GuardKilled,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Phase {
    Waiting,
    Granted,
    ChildForked,
    ChildRunning,
    Releasing,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum StoreKind {
    OneHost,
    Redis,
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Case {
    target: Process,
    fate: Fate,
    when: Phase,
    store_kind: StoreKind,
    deaf: bool,
}

impl Case {
    fn all() -> Vec<Self> {
        let fates = [Fate::Killed, Fate::Stopped, Fate::StoppedThenContinued];
        let mut cells = Vec::new();
        for target in [Process::Command, Process::Guard, Process::Both] {
            let one_of_two = [Fate::CommandKilled, Fate::GuardKilled];
            let one_of_two = one_of_two.into_iter().filter(|_| target == Process::Both);
            for fate in fates.into_iter().chain(one_of_two) {
                for when in [
                    Phase::Waiting,
                    Phase::Granted,
                    Phase::ChildForked,
                    Phase::ChildRunning,
                    Phase::Releasing,
                ] {
                    for store_kind in [StoreKind::OneHost, StoreKind::Redis] {
                        for deaf in [false, true] {
                            cells.push(Self { target, fate, when, store_kind, deaf });
                        }
                    }
                }
            }
        }
        cells
    }

    /// Returns whether docs/guarantees.md exempts this cell: no process is left that could stop the child in time.
    fn is_exempt(self) -> bool {
        self.store_kind == StoreKind::Redis
            && self.target == Process::Both
            && matches!(self.fate, Fate::Stopped | Fate::StoppedThenContinued)
            && !matches!(self.when, Phase::Waiting | Phase::Releasing)
    }
}

/// One run of the command, and the directory where its child reports.
struct Scene {
    name: String,
    url: String,
    directory: TempDir,
}

impl Scene {
    fn new(name: String, url: &str) -> Self {
        Self { name, url: url.to_owned(), directory: tempfile::tempdir().unwrap() }
    }

    fn has(&self, file: &str) -> bool {
        self.directory.path().join(file).exists()
    }

    fn line(&self, options: &[&str], inner: &[&str], child: &str) -> Vec<OsString> {
        let words = [&["run"], options, &LEASE, &[&self.name, "--"], inner].concat();
        let child = part(child, &[self.directory.path()]);
        words.into_iter().map(OsString::from).chain(child).collect()
    }

    fn start(&self, deaf: bool) -> Running {
        let child = if deaf { "alone and deaf" } else { "alone" };
        Running::start(&self.url, &self.line(&[], &[], child))
    }

    /// As [`start`](Self::start), but returns when the child has begun.
    fn start_and_begin(&self, deaf: bool) -> Running {
        for _ in 0..3 {
            let mut running = self.start(deaf);
            until(|| self.has("begun") || running.has_ended());
            if self.has("begun") {
                return running;
            }
            // On a busy machine the store may not answer in time, or the lease may end before the child has begun.
            let ended = running.end();
            assert!([69, 124].contains(&ended.code), "{ended:?}");
        }
        panic!("the child has not begun");
    }

    /// Runs the next child, which reports if it is not alone. Returns the exit code: 0, or 75 if
    /// the permit was not released, or 69 if the store does not answer.
    fn next(&self, wait: &str) -> i32 {
        let line = self.line(&["--wait", wait], &[], "pass by");
        let mut ended = run(&self.url, &line);
        // On a busy machine the store may not answer in time, or the short lease may be lost.
        for _ in 0..3 {
            if [69, 124].contains(&ended.code) {
                ended = run(&self.url, &line);
            }
        }
        assert!([0, 69, 75].contains(&ended.code), "{ended:?}");
        ended.code
    }

    /// Returns every process of this scene: their command lines or environments contain its directory.
    fn processes(&self) -> Vec<u32> {
        let directory = self.directory.path().to_str().unwrap().as_bytes();
        let knows = |path: &Path| {
            std::fs::read(path)
                .is_ok_and(|text| text.windows(directory.len()).any(|part| part == directory))
        };
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let all = all.filter(|process| {
            let path = process.path();
            knows(&path.join("cmdline")) || knows(&path.join("environ"))
        });
        let pids = all.filter_map(|process| process.file_name().to_str()?.parse().ok());
        pids.filter(|pid| *pid != std::process::id()).collect()
    }
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap()).unwrap()
}

/// Returns the children of a process.
fn children(of: Pid) -> Vec<Pid> {
    let of = of.as_raw_pid();
    let text = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children"));
    text.unwrap_or_default().split_whitespace().map(|child| pid(child.parse().unwrap())).collect()
}

/// Polls without a pause, because the awaited state does not last long.
fn soon<T>(mut read: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = read() {
            return answer;
        }
        assert!(begun.elapsed() < crate::support::TIME_LIMIT, "the condition did not hold in time");
    }
}

fn play(cell: Case, number: usize, redis: &Store) {
    // Its own store, so that a command stopped in the middle of a transaction does not block other cells.
    let local = Store::local();
    let store = if cell.store_kind == StoreKind::OneHost { &local } else { redis };
    let scene = Scene::new(format!("cell-{number}"), &store.url());
    let inspector = Inspector::new(&store.url());
    let held = (cell.when == Phase::Waiting).then(|| inspector.hold(&scene.name));
    let mut running = match cell.when {
        Phase::ChildRunning | Phase::Releasing => scene.start_and_begin(cell.deaf),
        _ => scene.start(cell.deaf),
    };
    let guard = || soon(|| children(running.pid()).first().copied());
    let guard = match cell.when {
        Phase::Waiting => {
            until(|| inspector.held_and_waiting(&scene.name) == (1, 1));
            Some(guard())
        }
        Phase::Granted => {
            until(|| inspector.held_and_waiting(&scene.name).0 == 1);
            (cell.target != Process::Command).then(guard)
        }
        Phase::ChildForked => {
            let guard = guard();
            soon(|| children(guard).first().copied());
            Some(guard)
        }
        Phase::ChildRunning | Phase::Releasing => {
            let guard = guard();
            if cell.when == Phase::Releasing {
                std::fs::write(scene.directory.path().join("end"), "").unwrap();
                soon(|| scene.has("ended").then_some(()));
            }
            Some(guard)
        }
    };
    // A process that has already ended cannot be signalled.
    let hit_command = |signal| {
        if cell.target != Process::Guard {
            let _ = kill_process(running.pid(), signal);
        }
    };
    let hit_guard = |signal| {
        if let Some(guard) = guard.filter(|_| cell.target != Process::Command) {
            let _ = kill_process(guard, signal);
        }
    };
    let hit = |signal| {
        hit_command(signal);
        hit_guard(signal);
    };
    match cell.fate {
        Fate::Killed => hit(Signal::KILL),
        Fate::Stopped | Fate::StoppedThenContinued => hit(Signal::STOP),
        Fate::CommandKilled => {
            hit_guard(Signal::STOP);
            hit_command(Signal::KILL);
        }
        Fate::GuardKilled => {
            hit_command(Signal::STOP);
            hit_guard(Signal::KILL);
        }
    }
    if let Some(held) = held {
        let _ = inspector.block_on(held.release());
    }
    if cell.fate == Fate::StoppedThenContinued {
        std::thread::sleep(LEASE_IS_OVER);
        hit(Signal::CONT);
    }
    // A stopped command on the local store keeps its permit, and may have stopped in the middle of a transaction.
    let code = scene.next("4s");
    let is_killed = matches!(cell.fate, Fate::Killed | Fate::CommandKilled);
    let may_keep = !is_killed && cell.store_kind == StoreKind::OneHost || cell.is_exempt();
    // If the command is not hit, or continues, its child may continue as well.
    let lives = cell.fate == Fate::StoppedThenContinued || cell.target == Process::Guard;
    assert!(code == 0 || may_keep || lives, "{cell:?}: the permit did not pass on");
    assert!(!scene.has("two at once") || cell.is_exempt(), "{cell:?}: two children at once");

    std::fs::write(scene.directory.path().join("end"), "").unwrap();
    hit(Signal::CONT);
    let left = || scene.processes().into_iter().filter(|left| pid(*left) != running.pid());
    let begun = Instant::now();
    while left().next().is_some() {
        let left: Vec<_> = left().collect();
        assert!(begun.elapsed() < crate::support::TIME_LIMIT, "{cell:?}: {left:?} are left");
        std::thread::sleep(Duration::from_millis(20));
    }
    until(|| running.has_ended());
    assert_eq!(scene.next("10s"), 0, "{cell:?}: the permit is still held");
}

/// Runs all cells, several at a time, and reports every failure.
fn side_by_side<T: Copy + Send + Sync>(cells: &[T], work: impl Fn(T, usize) + Sync) {
    let (rest, failures) = (Mutex::new(cells.iter().copied().enumerate()), Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| {
                loop {
                    let next = rest.lock().unwrap().next();
                    let Some((number, cell)) = next else { return };
                    let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        work(cell, number);
                    }));
                    if played.is_err() {
                        *failures.lock().unwrap() += 1;
                    }
                }
            });
        }
    });
    assert_eq!(*failures.lock().unwrap(), 0, "see above");
}

#[test]
fn never_two_children_and_no_process_left_in_any_state() {
    let redis = Store::redis();
    side_by_side(&Case::all(), |cell, number| play(cell, number, &redis));
}

/// The guard is killed as soon as the child exists.
#[test]
fn a_guard_that_is_killed_early_leaves_no_child() {
    let redis = Store::redis();
    let cells: Vec<_> = [StoreKind::OneHost, StoreKind::Redis]
        .into_iter()
        .flat_map(|store_kind| [Phase::Granted, Phase::ChildForked].map(|when| (store_kind, when)))
        .flat_map(|(store_kind, when)| {
            [false, true].map(|deaf| Case {
                target: Process::Guard,
                fate: Fate::Killed,
                when,
                store_kind,
                deaf,
            })
        })
        .flat_map(|cell| [cell; 20])
        .collect();
    side_by_side(&cells, |cell, number| play(cell, number, &redis));
}

/// The command is stopped and cannot read, while the guard has much to report.
#[test]
fn a_guard_without_a_reader_ends_its_child_in_time() {
    let redis = Store::redis();
    side_by_side(&[(); 20], |(), number| {
        let scene = Scene::new(format!("storm-{number}"), &redis.url());
        let running = scene.start_and_begin(true);
        let guard = soon(|| children(running.pid()).first().copied());
        let child = soon(|| children(guard).first().copied());
        running.signal(Signal::STOP);
        for _ in 0..1500 {
            // The guard reports each of these.
            let _ = kill_process(child, Signal::STOP);
            std::thread::sleep(Duration::from_micros(300));
            let _ = kill_process(child, Signal::CONT);
            std::thread::sleep(Duration::from_micros(300));
        }
        assert_eq!(scene.next("20s"), 0);
        assert!(!scene.has("two at once"), "the child has outlived its lease");
        running.signal(Signal::CONT);
        assert_eq!(running.end().code, 124);
    });
}

/// When the guard continues, it must read the new deadlines before it acts on the old one.
#[test]
fn a_stopped_guard_does_not_end_a_child_with_a_valid_lease() {
    let redis = Store::redis();
    side_by_side(&[(); 8], |(), number| {
        let scene = Scene::new(format!("pause-{number}"), &redis.url());
        let running = scene.start_and_begin(false);
        let guard = soon(|| children(running.pid()).first().copied());
        kill_process(guard, Signal::STOP).unwrap();
        std::thread::sleep(LEASE_IS_OVER);
        kill_process(guard, Signal::CONT).unwrap();
        std::thread::sleep(LEASE_IS_OVER);
        std::fs::write(scene.directory.path().join("end"), "").unwrap();
        let ended = running.end();
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    });
}

/// The guard is stopped, and the permit is released by hand: the command kills the child.
#[test]
fn a_guard_that_is_stopped_is_not_trusted() {
    let (local, redis) = (Store::local(), Store::redis());
    let cells: Vec<_> = [&local, &redis].into_iter().flat_map(|store| [store; 20]).collect();
    side_by_side(&cells, |store, number| {
        let scene = Scene::new(format!("trust-{number}"), &store.url());
        let inspector = Inspector::new(&store.url());
        let running = scene.start_and_begin(true);
        let guard = soon(|| children(running.pid()).first().copied());
        kill_process(guard, Signal::STOP).unwrap();
        let id = inspector.holder(&scene.name).id;
        let released = Instant::now();
        let line = ["release", &scene.name, &id];
        assert_eq!(run(&store.url(), &line).code, 0);
        assert_eq!(running.end().code, 124);
        // The command learns of the release at once or at its next renewal; the grace and the slack follow.
        assert!(released.elapsed() < Duration::from_secs(10), "{:?}", released.elapsed());
        assert_eq!(scene.processes(), Vec::<u32>::new(), "no process is left");
    });
}

/// The first process of many containers does not reap either.
#[test]
fn a_parent_that_does_not_reap_is_left_no_zombies() {
    let store = Store::local();
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let command = Path::new(env!("CARGO_BIN_EXE_leasehold"));
    let (url, name) = (store.url(), "it");
    let line = [&report, command, Path::new("run"), Path::new("--store"), Path::new(&url)];
    let line: Vec<_> = line.into_iter().chain([name, "--", "true"].map(Path::new)).collect();
    let line = part("init", &line);
    assert!(std::process::Command::new(&line[0]).args(&line[1..]).status().unwrap().success());
    assert_eq!(std::fs::read_to_string(report).unwrap(), "0");
}

/// The child of a nested command ends with the outer lease, whatever the inner grace.
#[test]
fn a_nested_child_ends_with_the_outer_lease() {
    let redis = Store::redis();
    side_by_side(&[(); 4], |(), number| {
        let scene = Scene::new(format!("nested-{number}"), &redis.url());
        let inner =
            [env!("CARGO_BIN_EXE_leasehold"), "run", "--grace", "5s", "inner", "-n", "9", "--"];
        let line = scene.line(&[], &inner, "alone and deaf");
        let running = Running::start(&scene.url, &line);
        until(|| scene.has("begun"));
        running.signal(Signal::STOP);
        assert_eq!(scene.next("20s"), 0);
        assert!(!scene.has("two at once"), "the inner child has outlived the outer lease");
        running.signal(Signal::CONT);
        assert_eq!(running.end().code, 124);
        until(|| scene.processes().is_empty());
    });
}
