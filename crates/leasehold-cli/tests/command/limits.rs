//! Limits that are changed from the shell, while they are in use.

use std::time::Instant;

use serde_json::Value;

use crate::support::{Looker, Running, Store, run, until};

fn ok(store: &Store, arguments: &[&str]) -> String {
    let ended = run(&store.url(), arguments);
    assert_eq!((ended.code, &*ended.stderr), (0, ""), "{arguments:?}");
    ended.stdout
}

/// Fails with this code, in one line that says all of this.
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
        fails(&store, &["limit", "it", "3", "--pin"], 1, &["\"it\""]);
        ok(&store, &["run", "-n", "3", "it", "--", "true"]);
        assert_eq!(ok(&store, &["limit", "it"]), "it: 3 permits\n");
        assert_eq!(ok(&store, &["limit", "it", "1"]), "it: 1 permit\n");
        // Who gives no number changes none.
        ok(&store, &["run", "it", "--", "true"]);
        assert_eq!(ok(&store, &["limit", "it"]), "it: 1 permit\n");
        assert_eq!(
            ok(&store, &["limit", "--pin", "it", "2"]),
            "it: 2 permits, pinned; 1 declared\n"
        );
        fails(&store, &["limit", "it", "4"], 64, &["pinned to 2", "unpin"]);
        let told = run(&store.url(), &["run", "-n", "5", "it", "--", "true"]);
        assert_eq!(told.stderr, "leasehold: \"it\" is pinned to 2: -n 5 has no effect\n");
        let shown: Value = serde_json::from_str(&ok(&store, &["limit", "--json", "it"])).unwrap();
        assert_eq!((&shown["capacity"], &shown["declared"]), (&2.into(), &5.into()));
        assert!(ok(&store, &["ls", "--all"]).contains("2 pinned"));
        assert_eq!(ok(&store, &["limit", "--unpin", "it"]), "it: 5 permits\n");
        let told = run(&store.url(), &["run", "-n", "1", "it", "--", "true"]);
        assert_eq!(told.stderr, "leasehold: \"it\" had a limit of 5: from now on it is 1\n");
        fails(&store, &["limit", "it", "0"], 64, &["0"]);
        fails(&store, &["limit", "it", "5", "--unpin"], 64, &["--unpin"]);
    }
}

#[test]
fn a_limit_that_grows_starts_those_who_wait() {
    for store in Store::both() {
        let line = |word| ["run", "it", "--", "sh", "-c", word];
        let first = Running::start(&store.url(), &line("echo begun; exec sleep 60"));
        let looker = Looker::new(&store.url());
        until(|| looker.census("it") == (1, 0));
        let second = Running::start(&store.url(), &line("echo second"));
        until(|| looker.census("it") == (1, 1));
        ok(&store, &["limit", "it", "2"]);
        assert_eq!(second.end().stdout, "second\n");
        first.signal(rustix::process::Signal::TERM);
        first.end();
    }
}

#[test]
fn a_pause_keeps_the_queue_and_tells_why() {
    for store in Store::both() {
        ok(&store, &["run", "-n", "2", "it", "--", "true"]);
        fails(&store, &["pause", "another"], 1, &["\"another\""]);
        ok(&store, &["pause", "it", "--reason", "a move"]);
        let shown = ok(&store, &["show", "it"]);
        assert!(shown.contains("paused for") && shown.contains(": a move"), "{shown}");
        let shown: Value = serde_json::from_str(&ok(&store, &["show", "--json", "it"])).unwrap();
        assert_eq!(shown["paused"]["reason"], "a move");
        fails(&store, &["run", "--no-wait", "it", "--", "true"], 75, &["\"it\""]);
        let waits = Running::start(&store.url(), &["run", "-v", "it", "--", "echo", "ran"]);
        waits.says("1st in the queue; paused for");
        waits.says(": a move");
        ok(&store, &["resume", "it"]);
        assert_eq!(waits.end().stdout, "ran\n");
        // Twice is harmless.
        ok(&store, &["resume", "it"]);
    }
}

#[test]
fn a_drain_ends_when_nobody_holds() {
    for store in Store::both() {
        let looker = Looker::new(&store.url());
        let held = looker.hold("it");
        let begun = Instant::now();
        let late = ["drain", "it", "--wait", "500ms"];
        fails(&store, &late, 75, &["not empty after 500ms", "1 held", "stays paused"]);
        assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
        let drain = Running::start(&store.url(), &["drain", "it"]);
        looker.block_on(held.release()).unwrap();
        assert_eq!(drain.end().code, 0);
        fails(&store, &["run", "--no-wait", "it", "--", "true"], 75, &[]);
        ok(&store, &["resume", "it"]);
        ok(&store, &["run", "it", "--", "true"]);
    }
}

#[test]
fn only_what_nobody_uses_is_forgotten_and_only_if_that_is_meant() {
    for store in Store::both() {
        let looker = Looker::new(&store.url());
        let held = looker.hold("it");
        fails(&store, &["forget", "it", "--yes"], 75, &["in use", "1 held, 0 waiting"]);
        looker.block_on(held.release()).unwrap();
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

/// They leave no semaphore behind.
#[test]
fn doctor_and_bench_forget_their_names() {
    for store in Store::both() {
        run(&store.url(), &["doctor"]);
        run(&store.url(), &["bench", "--for", "500ms"]);
        let left: Value = serde_json::from_str(&ok(&store, &["ls", "--all", "--json"])).unwrap();
        assert_eq!(left["semaphores"], Value::Array(Vec::new()));
    }
}

/// A shell takes a number that begins with 0 for an octal one.
#[test]
fn the_fence_is_a_number_for_the_shell() {
    let store = Store::local();
    let script = "echo $((LEASEHOLD_FENCE + 0)) $LEASEHOLD_FENCE_PADDED";
    for kind in ["run", "lock"] {
        let told = ok(&store, &[kind, "it", "--", "sh", "-c", script]);
        let (plain, padded) = told.trim().split_once(' ').unwrap();
        assert_eq!(padded.len(), 19, "{told}");
        assert_eq!(plain, padded.trim_start_matches('0'), "{told}");
    }
}
