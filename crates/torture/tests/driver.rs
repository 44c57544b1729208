//! The whole thing, briefly.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

fn torture() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torture"));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Neither passed nor failed: nobody can tell.
#[test]
fn a_run_that_is_stopped_is_inconclusive_and_says_why() {
    let mut run = torture().args(["--minutes", "5", "--seed", "7"]).spawn().unwrap();
    let mut output = BufReader::new(run.stdout.take().unwrap());
    let mut said = String::new();
    output.read_line(&mut said).unwrap();
    assert_eq!(said, "torture: seed 7, 5 minutes on redis:\n");
    // Nothing else says that it has begun; a little later or earlier makes no difference.
    std::thread::sleep(Duration::from_secs(3));
    kill_process(Pid::from_child(&run), Signal::INT).unwrap();
    output.read_to_string(&mut said).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(2), "{said}");
    assert!(said.contains("it was stopped after"), "{said}");
    assert!(said.ends_with("inconclusive\n"), "{said}");
}

#[test]
fn a_store_that_is_not_there_is_inconclusive() {
    let run = torture().args(["--store", "sqlite:/dev/null/store.db"]).output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(said.contains("inconclusive: "), "{said}");
}

/// Two that are found soon: `scripts/torture --broken-all` has all of them.
#[cfg(feature = "broken")]
#[test]
fn a_broken_rule_is_found_out() {
    for rule in ["lifo", "limit"] {
        let options = ["--minutes", "1", "--seed", "1", "--broken", rule, "--until-found"];
        let run = torture().args(options).output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert_eq!(run.status.code(), Some(1), "{rule}: {said}");
    }
}
