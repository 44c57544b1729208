//! Short runs of the whole test.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use testkit::wait::{TIME_LIMIT, until};

fn torture() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torture"));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// A stopped run has neither passed nor failed.
#[test]
fn a_run_that_is_stopped_is_inconclusive_and_says_why() {
    for store in ["redis:", "redis-cluster:", "redis-sentinel:"] {
        let dir = tempfile::tempdir().unwrap();
        let options = ["--minutes", "5", "--seed", "7", "--store", store, "--keep"];
        let mut run = torture().args(options).arg(dir.path()).spawn().unwrap();
        let mut reader = BufReader::new(run.stdout.take().unwrap());
        let mut output = String::new();
        reader.read_line(&mut output).unwrap();
        assert_eq!(output, format!("torture: seed 7, 5 minutes on {store}\n"));
        until("a worker that has begun", TIME_LIMIT, || {
            let history = std::fs::read_to_string(dir.path().join("worker-0.1.history"));
            let history = history.map_err(|error| error.to_string())?;
            if history.contains(" grant ") { Ok(()) } else { Err(history) }
        });
        kill_process(Pid::from_child(&run), Signal::INT).unwrap();
        reader.read_to_string(&mut output).unwrap();
        assert_eq!(run.wait().unwrap().code(), Some(2), "{output}");
        assert!(output.contains("the run was stopped after"), "{output}");
        assert!(output.ends_with("inconclusive\n"), "{output}");
    }
}

#[test]
fn a_store_that_is_not_there_is_inconclusive() {
    let run = torture().args(["--store", "sqlite:/dev/null/store.db"]).output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    let stdout = String::from_utf8_lossy(&run.stdout);
    assert!(stdout.contains("inconclusive: "), "{stdout}");
}

/// Two rules whose violation is found soon. `scripts/torture --broken-all` tests all of them.
#[cfg(leasehold_broken)]
#[test]
fn a_broken_rule_is_found_out() {
    for rule in ["lifo", "limit"] {
        let options = ["--minutes", "1", "--seed", "1", "--broken", rule, "--until-found"];
        let run = torture().args(options).output().unwrap();
        let stdout = String::from_utf8_lossy(&run.stdout);
        assert_eq!(run.status.code(), Some(1), "{rule}: {stdout}");
    }
}

/// With `TORTURE_AS_BUILT`, the command may have been built without the rules. Then nothing would be broken.
#[cfg(leasehold_broken)]
#[test]
fn a_command_that_cannot_break_the_rule_is_refused_before_the_run() {
    for (rule, command, says) in [
        ("lifo", "/bin/true", "/bin/true cannot break the rule \"lifo\""),
        ("lifo", "/bin/false", "/bin/false cannot break the rule \"lifo\""),
        ("lifo", "/nowhere/leasehold", "/nowhere/leasehold: "),
        ("lifoo", "/bin/true", "there is no rule \"lifoo\" to break: ownership, "),
    ] {
        let options = ["--minutes", "1", "--broken", rule, "--until-found", "--command", command];
        let run = torture().args(options).output().unwrap();
        let stdout = String::from_utf8_lossy(&run.stdout);
        assert_eq!(run.status.code(), Some(2), "{stdout}");
        assert!(stdout.contains(&format!("inconclusive: {says}")), "{stdout}");
    }
}

/// `scripts/torture --broken-all` breaks every rule.
#[cfg(leasehold_broken)]
#[test]
fn the_script_knows_all_rules() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/torture");
    let script = std::fs::read_to_string(path).unwrap();
    let listed = script.lines().find_map(|line| line.strip_prefix("rules=(")).unwrap();
    let mut listed: Vec<_> = listed.trim_end_matches(')').split(' ').collect();
    let mut rules = leasehold::broken::RULES;
    listed.sort_unstable();
    rules.sort_unstable();
    assert_eq!(listed, rules);
}
