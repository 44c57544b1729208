//! A child is dead before its lease passes on, whatever happens to the command.
//!
//! The child writes the time into a file every millisecond. None of these times is later than the next holder's grant.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;

use crate::parts::part;
use crate::support::{Inspector, Running, Store, leasehold, now, run, until};

/// What happens to the command.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Killed,
    Stopped,
    CutOff,
    /// Nothing: its TTL ends.
    Late,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Permit,
    Lock,
}

/// Returns the pids and times in the file.
fn beats(file: &Path) -> Vec<(u32, i64)> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let beat = |line: &str| {
        let (pid, at) = line.split_once(' ')?;
        Some((pid.parse().ok()?, at.parse().ok()?))
    };
    // SIGKILL may have cut the last line short.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(beat).collect()
}

fn processes(file: &Path) -> usize {
    let mut pids: Vec<_> = beats(file).into_iter().map(|(pid, _)| pid).collect();
    pids.sort_unstable();
    pids.dedup();
    pids.len()
}

fn command(kind: Kind, fate: Fate, child: Vec<OsString>) -> Vec<OsString> {
    let options: &[&str] = match (kind, fate) {
        (Kind::Permit, Fate::Late) => &["run", "--ttl", "3s", "--grace", "200ms"],
        (Kind::Permit, _) => &["run", "--lease", "1500ms", "--grace", "200ms"],
        (Kind::Lock, Fate::Late) => &["lock", "--ttl", "3s", "--grace", "300ms"],
        (Kind::Lock, _) => &["lock", "--lease", "1s", "--grace", "300ms"],
    };
    let line = options.iter().chain(&["it", "--"]).map(OsString::from);
    line.chain(child).collect()
}

/// The child `family` is two processes that ignore SIGTERM.
fn dies_in_time(kind: Kind, fate: Fate, child: &str) {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let cut_off = || proxy.half_open();
    dies_in_time_on((&proxy.url(), &server.url()), kind, fate, child, cut_off);
}

/// On a file no command can be cut off.
fn dies_in_time_on_one_host(kind: Kind, fate: Fate, child: &str) {
    let store = Store::local();
    dies_in_time_on((&store.url(), &store.url()), kind, fate, child, || unreachable!());
}

fn dies_in_time_on(
    (theirs, ours): (&str, &str),
    kind: Kind,
    fate: Fate,
    child: &str,
    cut_off: impl FnOnce(),
) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("beats");
    let mut running = Running::start(theirs, &command(kind, fate, part(child, &[&file])));
    let members = if child == "family" { 2 } else { 1 };
    until(|| processes(&file) == members);

    let inspector = Inspector::new(ours);
    let fated = now();
    match fate {
        Fate::Killed => running.kill(),
        Fate::Stopped => running.signal(Signal::STOP),
        Fate::CutOff => cut_off(),
        Fate::Late => {}
    }
    let granted = match kind {
        Kind::Permit => {
            let semaphore = inspector.client.semaphore("it", 1).build().unwrap();
            let permit = inspector.block_on(semaphore.acquire()).unwrap();
            let granted = now();
            assert!(inspector.block_on(permit.release()).unwrap());
            granted
        }
        Kind::Lock => {
            let lock = inspector.client.lock("it").within(crate::support::TIME_LIMIT);
            let lock = lock.build().unwrap();
            let guard = inspector.block_on(lock.acquire()).unwrap();
            let granted = now();
            assert!(inspector.block_on(guard.release()).unwrap());
            granted
        }
    };
    let beats = beats(&file);
    let last = beats.iter().map(|(_, at)| *at).max().unwrap();
    assert!(last < granted, "alive {} µs after the next grant", last - granted);
    if fate != Fate::Killed && fate != Fate::Late {
        assert!(last > fated, "stopped too early");
    }
    let mut pids: Vec<_> = beats.iter().map(|(pid, _)| *pid).collect();
    pids.dedup();
    for pid in pids {
        let alive =
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
        assert!(!alive, "{pid} is still alive");
    }
    if fate == Fate::Stopped {
        running.signal(Signal::CONT);
    }
    if fate != Fate::Killed {
        assert_eq!(running.end().code, 124);
    }
}

#[test]
fn when_the_command_is_killed() {
    dies_in_time(Kind::Permit, Fate::Killed, "beat");
}

#[test]
fn when_the_command_is_killed_with_grandchildren() {
    dies_in_time(Kind::Permit, Fate::Killed, "family");
}

#[test]
fn when_the_command_is_stopped() {
    dies_in_time(Kind::Permit, Fate::Stopped, "beat");
}

#[test]
fn when_the_command_is_stopped_with_grandchildren() {
    dies_in_time(Kind::Permit, Fate::Stopped, "family");
}

#[test]
fn when_the_command_is_cut_off() {
    dies_in_time(Kind::Permit, Fate::CutOff, "beat");
}

#[test]
fn when_the_command_is_cut_off_with_grandchildren() {
    dies_in_time(Kind::Permit, Fate::CutOff, "family");
}

#[test]
fn when_its_ttl_runs_out() {
    dies_in_time(Kind::Permit, Fate::Late, "beat");
}

#[test]
fn when_its_ttl_runs_out_with_grandchildren() {
    dies_in_time(Kind::Permit, Fate::Late, "family");
}

#[test]
fn when_the_holder_of_a_lock_is_killed() {
    dies_in_time(Kind::Lock, Fate::Killed, "family");
}

#[test]
fn when_the_holder_of_a_lock_is_stopped() {
    dies_in_time(Kind::Lock, Fate::Stopped, "family");
}

#[test]
fn when_the_holder_of_a_lock_is_cut_off() {
    dies_in_time(Kind::Lock, Fate::CutOff, "family");
}

#[test]
fn when_the_ttl_of_a_lock_runs_out() {
    dies_in_time(Kind::Lock, Fate::Late, "family");
}

#[test]
fn on_one_host_when_the_ttl_of_a_lock_runs_out() {
    dies_in_time_on_one_host(Kind::Lock, Fate::Late, "family");
}

#[test]
fn on_one_host_when_the_command_is_killed() {
    dies_in_time_on_one_host(Kind::Permit, Fate::Killed, "beat");
}

#[test]
fn on_one_host_when_the_command_is_killed_with_grandchildren() {
    dies_in_time_on_one_host(Kind::Permit, Fate::Killed, "family");
}

#[test]
fn on_one_host_when_its_ttl_runs_out_with_grandchildren() {
    dies_in_time_on_one_host(Kind::Permit, Fate::Late, "family");
}

#[test]
fn on_one_host_when_the_holder_of_a_lock_is_killed() {
    dies_in_time_on_one_host(Kind::Lock, Fate::Killed, "family");
}

#[test]
fn on_one_host_when_the_holder_of_a_lock_is_stopped() {
    dies_in_time_on_one_host(Kind::Lock, Fate::Stopped, "family");
}

/// The kernel knows that the command is alive, so nothing needs renewal.
#[test]
fn on_one_host_a_command_that_is_stopped_keeps_its_permit() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let arguments = ["run", "--lease", "300ms", "it", "--", "sh", "-c", "read line; exit 6"];
    let mut command = leasehold(&store.url());
    command.args(arguments).stdin(Stdio::piped());
    let mut running = Running::of(command);
    let input = running.input();
    until(|| inspector.held_and_waiting("it") == (1, 0));
    running.signal(Signal::STOP);
    until(|| running.state() == 'T');
    let next = run(&store.url(), &["run", "--wait", "1s", "it", "--", "true"]);
    assert_eq!(next.code, 75, "{next:?}");
    running.signal(Signal::CONT);
    drop(input);
    assert_eq!(running.end().code, 6);
}

/// The command, its guard and so the child are killed. The grandchild still holds the permit.
#[test]
fn on_one_host_a_permit_passes_on_only_when_the_whole_group_is_gone() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("beats");
    let line = ["run", "it", "--"].map(OsString::from).into_iter();
    let line: Vec<_> = line.chain(part("family", &[&file])).collect();
    let mut running = Running::start(&store.url(), &line);
    until(|| processes(&file) == 2);
    let guard = running.guard();
    // Both at once, the guard first: each would kill the group when the other ends.
    running.signal(Signal::STOP);
    until(|| running.state() == 'T');
    kill_process(guard, Signal::KILL).unwrap();
    running.kill();
    let next = run(&store.url(), &["run", "--wait", "1s", "it", "--", "true"]);
    assert_eq!(next.code, 75, "{next:?}");
    let alive = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
    };
    let mut pids: Vec<_> = beats(&file).into_iter().map(|(pid, _)| pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let left: Vec<_> = pids.into_iter().filter(alive).collect();
    let [grandchild] = left[..] else { panic!("the kernel kills the child alone: {left:?}") };
    let grandchild = Pid::from_raw(i32::try_from(grandchild).unwrap()).unwrap();
    kill_process(grandchild, Signal::KILL).unwrap();
    let next = run(&store.url(), &["run", "it", "--", "true"]);
    assert_eq!(next.code, 0, "{next:?}");
    assert_eq!(inspector.held_and_waiting("it"), (0, 0));
}

/// The lease is renewed in time, many times over.
#[test]
fn a_child_runs_while_its_command_renews() {
    let server = RedisServer::start();
    let directory = tempfile::tempdir().unwrap();
    for (kind, options) in [("run", "--heartbeat"), ("lock", "--lease")] {
        let file = directory.path().join(kind);
        let line = [kind, options, "1s", "it", "--"].map(OsString::from).into_iter();
        let line: Vec<_> = line.chain(part("beat", &[&file])).collect();
        let running = Running::start(&server.url(), &line);
        let begun = || beats(&file).first().map(|(_, at)| *at);
        until(|| begun().is_some_and(|begun| now() - begun > 4_000_000));
        running.signal(Signal::TERM);
        assert_eq!(running.end().code, 143, "{kind}");
    }
}
