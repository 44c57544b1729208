//! The parts that children of the command play in tests: this test binary, started again.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::support::{TIME_LIMIT, now};

/// The pause between two beats.
const BEAT: Duration = Duration::from_millis(1);

/// Returns the command line of a child that plays this part.
pub(crate) fn part(part: &str, arguments: &[&Path]) -> Vec<OsString> {
    let program = std::env::current_exe().expect("the test binary knows its own path");
    let arguments: Vec<_> = arguments.iter().map(|path| path.to_str().unwrap()).collect();
    let arguments = format!("LEASEHOLD_TEST_ARGUMENTS={}", arguments.join("\n"));
    let part = format!("LEASEHOLD_TEST_PART={part}");
    let line = ["env".into(), part.into(), arguments.into(), program.into()];
    let harness = ["child", "--exact", "--nocapture", "--test-threads=1"].map(OsString::from);
    line.into_iter().chain(harness).collect()
}

pub(crate) fn play(part: &str, arguments: &[&str]) {
    match part {
        "beat" => beat(arguments[0], IgnoresSigterm::No),
        "beat on" => beat(arguments[0], IgnoresSigterm::Yes),
        "family" => family(arguments[0]),
        "slot" => take_a_slot(Path::new(arguments[0])),
        "alone" => be_alone(Path::new(arguments[0]), IgnoresSigterm::No),
        "alone and deaf" => be_alone(Path::new(arguments[0]), IgnoresSigterm::Yes),
        "pass by" => drop(take_the_slot(Path::new(arguments[0]))),
        "writer" => write_forever(arguments[0], Path::new(arguments[1])),
        "panic on a screen" => panic_on_a_screen(),
        "init" => be_a_careless_init(arguments),
        _ => unreachable!("unknown part {part:?}"),
    }
}

/// Panics while it draws on the terminal.
fn panic_on_a_screen() {
    let mut screen = crate::screen::Screen::open().unwrap();
    screen.draw(|frame| frame.render_widget("drawn", frame.area())).unwrap();
    let _ = screen.draw(|_| panic!("a panic to be read"));
}

/// Whether the child ignores SIGTERM.
#[derive(Clone, Copy, PartialEq)]
enum IgnoresSigterm {
    Yes,
    No,
}

/// Writes the time into a file repeatedly.
fn beat(file: &str, ignores_sigterm: IgnoresSigterm) {
    if ignores_sigterm == IgnoresSigterm::Yes {
        ignore_sigterm();
    }
    let mut file = OpenOptions::new().append(true).create(true).open(file).unwrap();
    // Ends on its own, in case nothing is left that could end it.
    let begun = Instant::now();
    while begun.elapsed() < 2 * TIME_LIMIT {
        // In one write: others append to the same file.
        file.write_all(format!("{} {}\n", std::process::id(), now()).as_bytes()).unwrap();
        std::thread::sleep(BEAT);
    }
}

/// A child with its own child in the same group, both of which ignore SIGTERM.
fn family(file: &str) {
    let line = part("beat on", &[Path::new(file)]);
    let mut grandchild = Command::new(&line[0]).args(&line[1..]).spawn().unwrap();
    std::thread::spawn(move || grandchild.wait());
    beat(file, IgnoresSigterm::Yes);
}

/// Takes one of three slots, which the kernel releases when this process dies, and reports if none is free.
fn take_a_slot(directory: &Path) {
    let slot = |number| {
        let file = File::create(directory.join(format!("slot-{number}"))).unwrap();
        flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file)
    };
    let Some(slot) = (0..3).find_map(slot) else {
        File::create(directory.join("too many")).unwrap();
        return;
    };
    std::thread::sleep(Duration::from_millis(fastrand::u64(5..40)));
    let log = OpenOptions::new().append(true).create(true).open(directory.join("done"));
    writeln!(log.unwrap(), "done").unwrap();
    drop(slot);
}

/// Takes the only slot, which the kernel releases when this process dies, and reports if another
/// process has it. Runs until the file `end` exists.
fn be_alone(directory: &Path, ignores_sigterm: IgnoresSigterm) {
    if ignores_sigterm == IgnoresSigterm::Yes {
        ignore_sigterm();
    }
    let _slot = take_the_slot(directory);
    File::create(directory.join("begun")).unwrap();
    let begun = Instant::now();
    while !directory.join("end").exists() && begun.elapsed() < TIME_LIMIT {
        std::thread::sleep(BEAT);
    }
    File::create(directory.join("ended")).unwrap();
}

fn take_the_slot(directory: &Path) -> File {
    let slot = File::create(directory.join("slot")).unwrap();
    if flock(&slot, FlockOperation::NonBlockingLockExclusive).is_err() {
        File::create(directory.join("two at once")).unwrap();
    }
    slot
}

fn ignore_sigterm() {
    let nobody = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, nobody).unwrap();
}

/// Adopts orphans as the first process of a container does, and never reaps them. Runs a command,
/// and reports how many zombies it leaves behind.
fn be_a_careless_init(arguments: &[&str]) {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let (report, line) = (Path::new(arguments[0]), &arguments[1..]);
    for _ in 0..20 {
        assert!(Command::new(line[0]).args(&line[1..]).status().unwrap().success());
    }
    let pid = std::process::id();
    let children: String = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap())
        .collect();
    std::fs::write(report, children.split_whitespace().count().to_string()).unwrap();
}

/// Begins a transaction, and never ends it.
fn write_forever(database: &str, ready: &Path) {
    let connection = rusqlite::Connection::open(database).unwrap();
    connection.execute_batch("BEGIN EXCLUSIVE").unwrap();
    File::create(ready).unwrap();
    std::thread::sleep(TIME_LIMIT);
}
