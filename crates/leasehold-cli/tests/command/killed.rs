//! After `kill -9` of the command, its guard releases what the command held, once the child has ended.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, run, until};

const CHILD: [&str; 4] = ["--", "sh", "-c", "echo up; exec sleep 1000"];

/// Starts a command, and waits until its child runs. Returns the command and its guard.
fn start(store: &str, words: &[&str]) -> (Running, Pid) {
    let mut running = Running::start(store, &[words, &CHILD].concat());
    assert_eq!(running.line(), "up");
    let guard = running.guard();
    (running, guard)
}

/// Waits until the process has ended. Its new parent may not reap it.
fn until_ended(process: Pid) {
    until(|| {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid()));
        status.is_err() || status.is_ok_and(|status| status.contains(") Z "))
    });
}

/// The lease is 30 s, so the next job would not start in time if it had to wait for its end.
#[test]
fn the_next_job_does_not_wait_for_the_lease() {
    for store in Store::both() {
        for kind in ["run", "lock"] {
            let (mut running, _) = start(&store.url(), &[kind, "it"]);
            let killed = Instant::now();
            running.kill();
            let next = run(&store.url(), &[kind, "--wait", "10s", "it", "--", "true"]);
            assert_eq!(next.code, 0, "{kind} on {}: {next:?}", store.url());
            println!("{kind} on {}: {:?} after the kill", store.url(), killed.elapsed());
        }
    }
}

#[test]
fn a_waiter_leaves_the_queue() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("it");
    let mut waiting = Running::start(&server.url(), &["run", "it", "--", "true"]);
    until(|| inspector.held_and_waiting("it") == (1, 1));
    let killed = Instant::now();
    waiting.kill();
    until(|| inspector.held_and_waiting("it") == (1, 0));
    assert!(killed.elapsed() < Duration::from_secs(20), "its place expired");
    assert!(inspector.block_on(held.release()).unwrap());
}

#[test]
fn inner_and_outer_leases_are_released() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let leasehold = env!("CARGO_BIN_EXE_leasehold");
    let words = ["run", "outer", "--", leasehold, "run", "inner"];
    let (mut running, _) = start(&server.url(), &words);
    assert_eq!(inspector.held_and_waiting("inner"), (1, 0));
    let killed = Instant::now();
    running.kill();
    until(|| inspector.held_and_waiting("inner") == (0, 0));
    until(|| inspector.held_and_waiting("outer") == (0, 0));
    assert!(killed.elapsed() < Duration::from_secs(20), "the leases expired");
}

/// `--at-least` and `--once-per` promise that the lease is held for longer than the child runs.
#[test]
fn a_lease_that_outlives_the_child_ends_by_itself() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let (mut permit, guard) = start(&server.url(), &["run", "--at-least", "1h", "it"]);
    permit.kill();
    until_ended(guard);
    assert_eq!(inspector.held_and_waiting("it"), (1, 0));
    let (mut lock, guard) = start(&server.url(), &["lock", "--once-per", "1h", "it"]);
    lock.kill();
    until_ended(guard);
    assert!(inspector.block_on(inspector.client.locks().is_locked("it")).unwrap());
}

/// The guard does not wait for a store that is silent.
#[test]
fn a_guard_ends_although_the_store_is_silent() {
    let server = RedisServer::start();
    let (mut running, guard) = start(&server.url(), &["run", "it"]);
    server.pause();
    let killed = Instant::now();
    running.kill();
    until_ended(guard);
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    server.resume();
}

/// The lease then ends by itself, after the child.
#[test]
fn a_guard_that_is_killed_as_well_releases_nothing() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let (mut running, guard) = start(&server.url(), &["run", "it"]);
    running.signal(Signal::STOP);
    until(|| running.state() == 'T');
    kill_process(guard, Signal::KILL).unwrap();
    running.kill();
    assert_eq!(inspector.held_and_waiting("it"), (1, 0));
}

/// A signal that a user sends to all processes of the command does not end the guard.
#[test]
fn a_guard_blocks_every_signal_that_can_be_blocked() {
    let store = Store::local();
    let (_running, guard) = start(&store.url(), &["run", "it"]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", guard.as_raw_pid())).unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
    let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
    // Faults, SIGKILL, SIGCHLD and SIGSTOP; and two signals that the C library keeps for itself.
    let open = [4, 7, 8, 9, 11, 17, 19, 32, 33];
    let missing: Vec<_> =
        (1..=64).filter(|n| !open.contains(n) && blocked >> (n - 1) & 1 == 0).collect();
    assert!(missing.is_empty(), "not blocked: {missing:?}");
}
