//! Limits that are changed by commands while they are in use.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Inspector, Running, Store, run, until};

fn ok(store: &Store, arguments: &[&str]) -> String {
    let ended = run(&store.url(), arguments);
    assert_eq!((ended.code, &*ended.stderr), (0, ""), "{arguments:?}");
    ended.stdout
}

/// Fails unless the command ends with this code and one line that contains all of these.
fn fails(store: &Store, arguments: &[&str], code: i32, says: &[&str]) {
    let ended = run(&store.url(), arguments);
    assert_eq!((ended.code, &*ended.stdout), (code, ""), "{arguments:?}: {ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    for part in says {
        assert!(ended.stderr.contains(part), "{ended:?} does not say {part:?}");
    }
}

#[test]
fn a_limit_is_shown_changed_and_pinned() {
    for store in Store::both() {
        ok(&store, &["run", "other", "--", "true"]);
        fails(&store, &["limit", "it"], 1, &["\"it\"", "leasehold ls --all"]);
        fails(&store, &["limit", "it", "--pin"], 1, &["\"it\""]);
        ok(&store, &["run", "-n", "3", "it", "--", "true"]);
        assert_eq!(ok(&store, &["limit", "it"]), "it: 3 permits\n");
        assert_eq!(ok(&store, &["limit", "it", "1"]), "it: 1 permit\n");
        // A command without `-n` does not change the limit.
        ok(&store, &["run", "it", "--", "true"]);
        assert_eq!(ok(&store, &["limit", "it"]), "it: 1 permit\n");
        assert_eq!(
            ok(&store, &["limit", "--pin", "it", "2"]),
            "it: 2 permits, pinned (1 after --unpin)\n"
        );
        fails(&store, &["limit", "it", "4"], 64, &["pinned to 2", "unpin"]);
        let ended = run(&store.url(), &["run", "-n", "5", "it", "--", "true"]);
        assert_eq!(ended.stderr, "leasehold: \"it\" is pinned to 2: -n 5 has no effect\n");
        let shown: Value = serde_json::from_str(&ok(&store, &["limit", "--json", "it"])).unwrap();
        assert_eq!((&shown["capacity"], &shown["declared"]), (&2.into(), &5.into()));
        assert!(ok(&store, &["ls", "--all"]).contains("2 pinned"));
        assert_eq!(ok(&store, &["limit", "--unpin", "it"]), "it: 5 permits\n");
        let ended = run(&store.url(), &["run", "-n", "1", "it", "--", "true"]);
        assert_eq!(ended.stderr, "leasehold: the limit of \"it\" was 5 and is now 1\n");
        fails(&store, &["limit", "it", "0"], 64, &["0"]);
        fails(&store, &["limit", "it", "5", "--unpin"], 64, &["--unpin"]);
    }
}

#[test]
fn limits_can_be_set_before_the_first_use() {
    for store in Store::both() {
        ok(&store, &["run", "other", "--", "true"]);
        let new = |arguments: &[&str]| {
            let ended = run(&store.url(), arguments);
            let says = "was not in use before: if it is mistyped, see `leasehold ls --all`";
            let expected = format!("leasehold: \"{}\" {says}\n", arguments[1]);
            assert_eq!((ended.code, ended.stderr), (0, expected), "{arguments:?}");
            ended.stdout
        };
        assert_eq!(new(&["limit", "a", "3"]), "a: 3 permits\n");
        assert_eq!(ok(&store, &["limit", "a"]), "a: 3 permits\n");
        assert_eq!(ok(&store, &["run", "a", "--", "echo", "ran"]), "ran\n");
        assert_eq!(ok(&store, &["limit", "a"]), "a: 3 permits\n", "the first run declares nothing");

        let pinned = "b: 2 permits, pinned (no limit was declared yet)\n";
        assert_eq!(new(&["limit", "b", "2", "--pin"]), pinned);
        let started = run(&store.url(), &["run", "-n", "5", "b", "--", "true"]);
        assert_eq!(started.stderr, "leasehold: \"b\" is pinned to 2: -n 5 has no effect\n");
        assert_eq!(ok(&store, &["limit", "b"]), "b: 2 permits, pinned (5 after --unpin)\n");

        assert_eq!(new(&["pause", "c", "--reason", "a move"]), "");
        assert!(ok(&store, &["limit", "c"]).starts_with("c: no limit yet; paused by"));
        fails(&store, &["limit", "c", "--pin"], 64, &["no limit yet", "number"]);
        assert!(ok(&store, &["show", "c"]).starts_with("c: 0 held, 0 waiting; paused by"));
        assert!(ok(&store, &["ls", "--all"]).contains("- paused"));
        fails(&store, &["run", "--no-wait", "c", "--", "true"], 75, &["a move"]);
        ok(&store, &["resume", "c"]);
        assert_eq!(ok(&store, &["run", "c", "--", "echo", "ran"]), "ran\n");
        assert_eq!(new(&["drain", "d"]), "");
        fails(&store, &["run", "--no-wait", "d", "--", "true"], 75, &["paused"]);
        new(&["limit", "e", "--rate", "1/1h"]);
        ok(&store, &["run", "e", "--", "true"]);
        fails(&store, &["run", "--no-wait", "e", "--", "true"], 75, &[]);
    }
}

#[test]
fn a_larger_limit_starts_waiting_jobs() {
    for store in Store::both() {
        let line = |word| ["run", "it", "--", "sh", "-c", word];
        let first = Running::start(&store.url(), &line("echo begun; exec sleep 60"));
        let inspector = Inspector::new(&store.url());
        until(|| inspector.held_and_waiting("it") == (1, 0));
        let second = Running::start(&store.url(), &line("echo second"));
        until(|| inspector.held_and_waiting("it") == (1, 1));
        ok(&store, &["limit", "it", "2"]);
        assert_eq!(second.end().stdout, "second\n");
        first.signal(rustix::process::Signal::TERM);
        first.end();
    }
}

#[test]
fn a_pause_keeps_the_queue_and_shows_its_reason() {
    for store in Store::both() {
        ok(&store, &["run", "-n", "2", "it", "--", "true"]);
        fails(&store, &["resume", "another"], 1, &["\"another\""]);
        ok(&store, &["pause", "it", "--reason", "a move"]);
        let shown = ok(&store, &["show", "it"]);
        assert!(shown.contains("paused by") && shown.contains(" ago: a move"), "{shown}");
        let shown: Value = serde_json::from_str(&ok(&store, &["show", "--json", "it"])).unwrap();
        assert_eq!(shown["paused"]["reason"], "a move");
        fails(
            &store,
            &["run", "--no-wait", "it", "--", "true"],
            75,
            &["\"it\" was paused by", " ago: a move"],
        );
        let waits = Running::start(&store.url(), &["run", "-v", "it", "--", "echo", "ran"]);
        waits.says("1st in the queue; paused by");
        waits.says(": a move");
        ok(&store, &["resume", "it"]);
        assert_eq!(waits.end().stdout, "ran\n");
        // Resuming again does nothing.
        ok(&store, &["resume", "it"]);
    }
}

#[test]
fn a_drain_ends_when_nobody_holds() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let held = inspector.hold("it");
        let begun = Instant::now();
        let late = ["drain", "it", "--wait", "500ms"];
        let says = "1 permit of \"it\" is still held after 500ms; the semaphore stays paused";
        fails(&store, &late, 75, &[says]);
        assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
        let drain = Running::start(&store.url(), &["drain", "it"]);
        inspector.block_on(held.release()).unwrap();
        assert_eq!(drain.end().code, 0);
        fails(&store, &["run", "--no-wait", "it", "--", "true"], 75, &[]);
        ok(&store, &["resume", "it"]);
        ok(&store, &["run", "it", "--", "true"]);
    }
}

#[test]
fn forget_needs_an_unused_name_and_a_confirmation() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let held = inspector.hold("it");
        fails(&store, &["forget", "it", "--yes"], 75, &["in use", "1 held, 0 waiting"]);
        inspector.block_on(held.release()).unwrap();
        fails(&store, &["forget", "it"], 64, &["last fence", "--yes"]);
        ok(&store, &["forget", "it", "--yes"]);
        fails(&store, &["forget", "it", "--yes"], 1, &["\"it\""]);
        assert!(!ok(&store, &["ls", "--all"]).contains("it "));
    }
}

#[test]
fn a_lock_has_no_limit() {
    for store in Store::both() {
        let line = ["lock", "it", "--", "sh", "-c", "echo begun; exec sleep 60"];
        let mut held = Running::start(&store.url(), &line);
        assert_eq!(held.line(), "begun");
        fails(&store, &["limit", "it", "2"], 1, &["\"it\" is a lock"]);
        held.signal(rustix::process::Signal::TERM);
        held.end();
    }
}

/// Both leave no semaphore behind.
#[test]
fn doctor_and_bench_forget_their_names() {
    for store in Store::both() {
        run(&store.url(), &["doctor"]);
        run(&store.url(), &["bench", "--for", "500ms"]);
        let left: Value = serde_json::from_str(&ok(&store, &["ls", "--all", "--json"])).unwrap();
        assert_eq!(left["semaphores"], Value::Array(Vec::new()));
    }
}

/// A shell reads a number that begins with 0 as octal.
#[test]
fn the_fence_is_a_number_for_the_shell() {
    let store = Store::local();
    let script = "echo $((LEASEHOLD_FENCE + 0)) $LEASEHOLD_FENCE_PADDED";
    for kind in ["run", "lock"] {
        let stdout = ok(&store, &[kind, "it", "--", "sh", "-c", script]);
        let (plain, padded) = stdout.trim().split_once(' ').unwrap();
        assert_eq!(padded.len(), 19, "{stdout}");
        assert_eq!(plain, padded.trim_start_matches('0'), "{stdout}");
    }
}

#[test]
fn a_child_that_weighs_more_waits_for_all_of_it() {
    for store in Store::both() {
        let line =
            |weight, word| ["run", "-n", "3", "--weight", weight, "it", "--", "sh", "-c", word];
        let mut light = Running::start(&store.url(), &line("1", "echo begun; exec sleep 60"));
        assert_eq!(light.line(), "begun");
        fails(&store, &["run", "--weight", "4", "it", "--", "true"], 64, &["the weight is 4", "3"]);
        let no_wait = ["run", "--no-wait", "--weight", "3", "it", "--", "true"];
        fails(&store, &no_wait, 75, &["3 units of \"it\" are not free"]);
        let inspector = Inspector::new(&store.url());
        let heavy = Running::start(&store.url(), &line("3", "echo heavy"));
        until(|| inspector.held_and_waiting("it") == (1, 1));
        fails(&store, &["run", "--no-wait", "it", "--", "true"], 75, &["no permit"]);
        let shown: Value = serde_json::from_str(&ok(&store, &["show", "--json", "it"])).unwrap();
        assert_eq!((&shown["held_units"], &shown["waits_for"]), (&1.into(), &"room".into()));
        assert_eq!(shown["waiters"][0]["weight"], 3);
        light.signal(rustix::process::Signal::TERM);
        light.end();
        assert_eq!(heavy.end().stdout, "heavy\n");
        fails(&store, &["run", "--weight", "0", "it", "--", "true"], 64, &["--weight", "0"]);
    }
}

#[test]
fn a_rate_is_declared_shown_and_changed() {
    for store in Store::both() {
        let call = |rate| ["run", "--no-wait", "--rate", rate, "it", "--", "true"];
        ok(&store, &call("2/1h"));
        let advice = "leasehold limit \"it\" --rate none removes the rate";
        let says = ["the rate of 2 per hour allows the next start in 29m", advice];
        fails(&store, &call("2/1h"), 75, &says);
        let within = ["run", "--wait", "300ms", "it", "--", "true"];
        fails(&store, &within, 75, &["was acquired within 300ms: the rate of 2 per hour", advice]);
        let waits = Running::start(&store.url(), &["run", "-v", "it", "--", "echo", "ran"]);
        waits.says("1st in the queue; the rate of 2 per hour allows the next start in 29m");
        waits.says(advice);
        let shown = ok(&store, &["show", "it"]);
        let says =
            "it: 0 held, 1 waiting; the first waits for a token of the rate; rate: 2 per hour";
        assert!(shown.starts_with(says), "{shown}");
        let shown: Value = serde_json::from_str(&ok(&store, &["show", "--json", "it"])).unwrap();
        assert_eq!((&shown["rate"]["burst"], &shown["waits_for"]), (&1.into(), &"rate".into()));
        let rate = (&shown["rate"]["starts"], &shown["rate"]["period_seconds"]);
        assert_eq!(rate, (&2.into(), &3600.0.into()));
        let changed = ok(&store, &["limit", "it", "--rate", "100/s", "--burst", "3"]);
        assert_eq!(changed, "it: any number of permits, 100 per second, burst 3\n");
        assert_eq!(waits.end().stdout, "ran\n");
        assert_eq!(ok(&store, &["limit", "it", "2", "--rate", "none"]), "it: 2 permits\n");
        ok(&store, &["run", "it", "--", "true"]);
        ok(&store, &["run", "--rate", "100/s", "it", "--", "true"]);
        let ended = run(&store.url(), &["run", "--rate", "50/s", "it", "--", "true"]);
        let says = "the rate of \"it\" was 100 per second and is now 50 per second";
        assert_eq!(ended.stderr, format!("leasehold: {says}\n"));
        for (rate, says) in
            [("0/1m", "--rate"), ("many", "100/1m"), ("1000000000000/1s", "10000 per second")]
        {
            fails(&store, &call(rate), 64, &[says]);
        }
        fails(&store, &["run", "--burst", "3", "it", "--", "true"], 64, &["--rate"]);
        let burst = ["run", "--rate", "2/1h", "--burst", "3", "it", "--", "true"];
        fails(&store, &burst, 64, &["burst: it is 3", "the rate is 2 in 3600s"]);
    }
}

/// Returns a line of the README, without its prompt and its comment.
fn of_the_readme(begins: &str) -> String {
    let readme = include_str!("../../../../README.md");
    let line = readme.lines().find_map(|line| line.strip_prefix("$ ")?.strip_prefix(begins));
    let line = line.unwrap_or_else(|| panic!("no line of the README begins with {begins:?}"));
    let line = line.rsplit_once("   #").map_or(line, |(line, _)| line);
    format!("{begins}{line}")
}

/// Runs a command line in a directory that contains the script it calls.
fn start_in(directory: &Path, store: &Store, line: &str) -> Running {
    let leasehold = Path::new(env!("CARGO_BIN_EXE_leasehold")).parent().unwrap();
    let path = format!("{}:{}", leasehold.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).current_dir(directory);
    shell.env("PATH", path).env("LEASEHOLD_STORE", store.url());
    Running::of(shell)
}

fn script(directory: &Path, name: &str, text: &str) {
    let path = directory.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_readme_gives_each_job_its_own_gpu() {
    let line = of_the_readme("leasehold run -n 4 gpu");
    for store in Store::both() {
        let directory = tempfile::tempdir().unwrap();
        // A second job on the same device would find its directory.
        let train =
            "mkdir gpu-$CUDA_VISIBLE_DEVICES || exit 9; sleep 0.2; rmdir gpu-$CUDA_VISIBLE_DEVICES
                     echo $CUDA_VISIBLE_DEVICES";
        script(directory.path(), "train", train);
        let jobs: Vec<_> = (0..10).map(|_| start_in(directory.path(), &store, &line)).collect();
        let mut devices = BTreeSet::new();
        for job in jobs {
            let ended = job.end();
            let waits = |line: &str| line.starts_with("leasehold: waiting for \"gpu\" (");
            assert!(ended.stderr.lines().all(waits), "{ended:?}");
            assert_eq!(ended.code, 0, "two jobs on one GPU");
            devices.insert(ended.stdout.trim().to_owned());
        }
        assert_eq!(devices, ["0", "1", "2", "3"].map(str::to_owned).into());
    }
}

/// A rate stays after the job that declared it.
#[test]
fn a_rate_that_stays_is_removed_by_the_next_job() {
    for store in Store::both() {
        ok(&store, &["run", "--rate", "1/1h", "it", "--", "true"]);
        fails(&store, &["run", "--no-wait", "it", "--", "true"], 75, &["the rate of 1 per hour"]);
        let freed = run(&store.url(), &["run", "--no-wait", "--rate", "none", "it", "--", "true"]);
        assert_eq!(freed.code, 0, "{freed:?}");
        let says = "the rate of \"it\" was 1 per hour and is now removed";
        assert_eq!(freed.stderr, format!("leasehold: {says}\n"));
        ok(&store, &["run", "--no-wait", "it", "--", "true"]);
        // There is nothing to remove, and a new name has no rate.
        ok(&store, &["run", "--no-wait", "--rate", "none", "it", "--", "true"]);
        ok(&store, &["run", "--no-wait", "--rate", "none", "new", "--", "true"]);
        assert_eq!(ok(&store, &["limit", "new"]), "new: 1 permit\n");
        let both = ["run", "--rate", "none", "--burst", "3", "it", "--", "true"];
        fails(&store, &both, 64, &["--burst 3", "--rate none"]);
    }
}

#[test]
fn a_name_that_limits_only_a_rate_has_no_weights() {
    for store in Store::both() {
        let new = ["run", "--rate", "100/s", "--weight", "3", "it", "--", "true"];
        let says = ["--weight 3", "\"it\" has only a rate", "-n"];
        fails(&store, &new, 64, &says);
        ok(&store, &["run", "--rate", "100/s", "it", "--", "true"]);
        fails(&store, &["run", "--weight", "3", "it", "--", "true"], 64, &says);
        assert_eq!(
            run(&store.url(), &["run", "-n", "4", "--weight", "3", "it", "--", "true"]).code,
            0
        );
        ok(&store, &["run", "--weight", "3", "it", "--", "true"]);
    }
}

#[test]
fn the_readme_calls_an_api_five_at_a_time_and_a_hundred_times_per_minute() {
    let line = of_the_readme("leasehold run -n 5 --rate 100/1m");
    for store in Store::both() {
        let directory = tempfile::tempdir().unwrap();
        // A call that finds none of the five places free is the sixth at a time.
        let call = "for place in 1 2 3 4 5; do
                      if mkdir place-$place 2> /dev/null; then date +%s%N; sleep 0.1; rmdir place-$place; exit; fi
                    done; exit 9";
        script(directory.path(), "call-the-api", call);
        let calls: Vec<_> = (0..14).map(|_| start_in(directory.path(), &store, &line)).collect();
        let mut starts: Vec<u64> = Vec::new();
        for call in calls {
            let ended = call.end();
            let waits = |line: &str| line.starts_with("leasehold: waiting for \"api\" (");
            assert!(ended.stderr.lines().all(waits), "{ended:?}");
            assert_eq!(ended.code, 0, "six at a time");
            starts.push(ended.stdout.trim().parse().unwrap());
        }
        starts.sort_unstable();
        // Ten start at once, then one every 660 ms. A child starts a little later than its grant.
        let took = Duration::from_nanos(starts[13] - starts[0]);
        assert!(took > Duration::from_secs(2), "{took:?}");
    }
}
