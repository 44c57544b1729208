//! Jobs that are scheduled on several hosts: `run --at-least` and `lock --once-per`.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, run, until};

#[test]
fn a_quick_job_is_held_at_least_that_long() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let begun = Instant::now();
        let words = ["run", "--at-least", "2s", "it", "--", "sh", "-c", "echo ran; exit 5"];
        let mut first = Running::start(&store.url(), &words);
        assert_eq!(first.line(), "ran");
        let second = run(&store.url(), &["run", "--no-wait", "it", "--", "echo", "twice"]);
        assert_eq!((second.code, &*second.stdout), (75, ""), "{second:?}");
        let ended = first.end();
        assert_eq!(ended.code, 5, "{ended:?}");
        assert!(begun.elapsed() >= Duration::from_secs(2));
        assert_eq!(inspector.held_and_waiting("it"), (0, 0));
        // A signal ends the hold, and the permit is released.
        let words = ["run", "-v", "--at-least", "1h", "it", "--", "true"];
        let long = Running::start(&store.url(), &words);
        long.says("the child has ended; the permit ");
        assert_eq!(inspector.held_and_waiting("it"), (1, 0));
        long.signal(Signal::TERM);
        assert_eq!(long.end().code, 128 + 15);
        until(|| inspector.held_and_waiting("it") == (0, 0));
    }
}

#[test]
fn at_least_is_not_longer_than_the_ttl() {
    let store = Store::local();
    let words = ["run", "--ttl", "1m", "--at-least", "2m", "it", "--", "true"];
    let ended = run(&store.url(), &words);
    let says = "leasehold: --at-least 2m is longer than --ttl 1m, which ends the permit: give a shorter --at-least or a longer --ttl\n";
    assert_eq!((ended.code, &*ended.stderr), (64, says));
}

#[test]
fn a_job_runs_once_per_period_after_its_command_has_ended() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let once = |period: &str, command: &[&str]| {
            let words = [&["lock", "--once-per", period, "it", "--"], command].concat();
            run(&store.url(), &words)
        };
        // A program that does not exist does not count.
        assert_eq!(once("1h", &["no-such-program"]).code, 127);
        // A run that fails counts as well.
        assert_eq!(once("1h", &["false"]).code, 1);
        let again = once("1h", &["echo", "twice"]);
        assert_eq!((again.code, &*again.stdout), (75, ""), "{again:?}");
        let says = "leasehold: the job of lock \"it\" is running, or ran within the last 1h (--once-per); the lock expires in 59m ";
        assert!(again.stderr.starts_with(says), "{again:?}");
        // After the period the job runs again.
        let raw = inspector.block_on(inspector.client.locks().lookup("it")).unwrap().unwrap();
        assert!(inspector.block_on(inspector.client.locks().release(&raw.id)).unwrap());
        assert_eq!(once("1s", &["true"]).code, 0);
        until(|| once("1s", &["echo", "again"]).stdout == "again\n");
        // A job that takes longer than the period leaves no lock behind.
        assert!(inspector.block_on(async {
            let locks = inspector.client.locks();
            while locks.is_locked("it").await.unwrap() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            true
        }));
        assert_eq!(once("100ms", &["sleep", "0.2"]).code, 0);
        assert!(!inspector.block_on(inspector.client.locks().is_locked("it")).unwrap());
    }
}

/// Waits until the child has ended, and the command keeps the lock for the rest of its period.
fn until_the_child_ended(running: &Running) {
    let pid = running.guard().as_raw_pid();
    until(|| {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        children.is_ok_and(|children| children.trim().is_empty()) || running.state() == 'Z'
    });
}

/// A signal, or a store that does not answer, when the command keeps the lock for the rest of the period.
#[test]
fn a_job_that_ran_stays_locked_however_it_ends() {
    for interrupted in [true, false] {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(server.port());
        let inspector = Inspector::new(&server.url());
        let words = ["lock", "--once-per", "1h", "it", "--", "sh", "-c", "echo up; read line"];
        let mut command = crate::support::leasehold(&proxy.url());
        command.args(words).stdin(std::process::Stdio::piped());
        let mut running = Running::of(command);
        assert_eq!(running.line(), "up");
        proxy.stall();
        let begun = Instant::now();
        drop(running.input());
        if interrupted {
            until_the_child_ended(&running);
            running.signal(Signal::TERM);
        }
        let ended = running.end();
        let says = "leasehold: the lock \"it\" may not stay locked for --once-per: ";
        assert!(ended.stderr.starts_with(says), "{ended:?}");
        assert!(begun.elapsed() < Duration::from_secs(9), "it took {:?}", begun.elapsed());
        // Whatever the command has sent now arrives.
        proxy.heal();
        until(|| proxy.connections() == 0);
        assert!(inspector.block_on(inspector.client.locks().is_locked("it")).unwrap());
    }
}

/// The lock of a job that did not run is released.
#[test]
fn a_job_whose_guard_was_killed_before_it_started_did_not_run() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let inspector = Inspector::new(&server.url());
    // While the command connects, its guard waits for the lock to be acquired.
    proxy.stall();
    let running = Running::start(&proxy.url(), &["lock", "--once-per", "1h", "it", "--", "true"]);
    kill_process(running.guard(), Signal::KILL).unwrap();
    proxy.heal();
    let ended = running.end();
    assert_eq!(ended.code, 70, "{ended:?}");
    until(|| !inspector.block_on(inspector.client.locks().is_locked("it")).unwrap());
}

#[test]
fn a_period_has_a_limit() {
    let store = Store::local();
    let ended = run(&store.url(), &["lock", "--once-per", "99999999999y", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{ended:?}");
    assert!(ended.stderr.contains("the limit is 36500 days"), "{ended:?}");
    let long = run(&store.url(), &["lock", "--once-per", "36500days", "it", "--", "true"]);
    assert_eq!(long.code, 0, "{long:?}");
}
