//! Many commands at once, a third of which are killed.

use std::ffi::OsString;

use rustix::process::Signal;

use crate::parts::part;
use crate::support::{Inspector, Running, Store, until};

#[test]
fn on_redis_there_are_never_more_children_at_once_than_permits() {
    crowd(&Store::redis(), 40);
}

#[test]
fn on_one_host_there_are_never_more_children_at_once_than_permits() {
    crowd(&Store::local(), 200);
}

fn crowd(store: &Store, size: usize) {
    let directory = tempfile::tempdir().unwrap();
    let line = ["run", "-n", "3", "--lease", "2s", "--grace", "100ms", "it", "--"];
    let line = line.map(OsString::from).into_iter().chain(part("slot", &[directory.path()]));
    let line: Vec<_> = line.collect();
    let mut crowd: Vec<_> = (0..size).map(|_| Running::start(&store.url(), &line)).collect();

    // Each is killed at a random moment, while the others make progress.
    let done = || std::fs::read_to_string(directory.path().join("done")).unwrap_or_default();
    for victim in 0..size / 3 {
        let so_far = done().lines().count();
        let moment = fastrand::usize(..3);
        until(|| {
            done().lines().count() >= so_far + moment || crowd.iter_mut().all(Running::has_ended)
        });
        let at = fastrand::usize(..crowd.len());
        let mut one = crowd.swap_remove(at);
        if !one.has_ended() {
            one.signal(Signal::KILL);
        }
        drop(one);
        assert!(
            !directory.path().join("too many").exists(),
            "more than three children at once, after {victim} kills"
        );
    }
    for one in crowd {
        let ended = one.end();
        let waits = |line: &str| line.starts_with("leasehold: waiting for \"it\" (");
        assert!(ended.code == 0 && ended.stderr.lines().all(waits), "{ended:?}");
    }
    assert!(!directory.path().join("too many").exists(), "more than three children at once");
    assert!(done().lines().count() >= size - size / 3, "not all of the others ran");
    let inspector = Inspector::new(&store.url());
    until(|| inspector.held_and_waiting("it") == (0, 0));
}
