//! What the children do that the command runs for a test: this very binary once more.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::support::{PATIENCE, now};

/// Between two signs of life.
const BEAT: Duration = Duration::from_millis(1);

/// The command line of a child that plays this part.
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
        "beat" => beat(arguments[0], GoesOn::No),
        "beat on" => beat(arguments[0], GoesOn::Yes),
        "family" => family(arguments[0]),
        "slot" => take_a_slot(Path::new(arguments[0])),
        _ => unreachable!("nobody plays {part}"),
    }
}

/// Whether it goes on after SIGTERM.
#[derive(Clone, Copy, PartialEq)]
enum GoesOn {
    Yes,
    No,
}

/// Writes the time into a file, again and again.
fn beat(file: &str, goes_on: GoesOn) {
    if goes_on == GoesOn::Yes {
        let nobody = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal_hook::consts::SIGTERM, nobody).unwrap();
    }
    let mut file = OpenOptions::new().append(true).create(true).open(file).unwrap();
    // Should everybody who could end it be gone, it ends by itself.
    let begun = Instant::now();
    while begun.elapsed() < 2 * PATIENCE {
        // In one piece: others write into the same file.
        file.write_all(format!("{} {}\n", std::process::id(), now()).as_bytes()).unwrap();
        std::thread::sleep(BEAT);
    }
}

/// A child with a child of its own in the same group, both of which do not heed SIGTERM.
fn family(file: &str) {
    let line = part("beat on", &[Path::new(file)]);
    let mut grandchild = Command::new(&line[0]).args(&line[1..]).spawn().unwrap();
    std::thread::spawn(move || grandchild.wait());
    beat(file, GoesOn::Yes);
}

/// Takes one of three slots, which the kernel gives back if it dies, and writes down that there was none if so.
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
