//! Every row of the table of exit codes in the README.

use rustix::process::{Pid, Signal, kill_process};
use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, leasehold, run, until};

#[test]
fn the_childs_own() {
    for store in Store::both() {
        let scripts = [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137)];
        for (script, code) in scripts {
            for kind in ["run", "lock"] {
                let ended = run(&store.url(), &[kind, "it", "--", "sh", "-c", script]);
                assert_eq!((ended.code, ended.stderr.as_str()), (code, ""), "{kind} {script}");
            }
        }
        assert_eq!(
            Inspector::new(&store.url()).held_and_waiting("it"),
            (0, 0),
            "the permit was not released"
        );
    }
}

#[test]
fn nothing_there_is_1() {
    let server = RedisServer::start();
    let ended = run(&server.url(), &["show", "nothing"]);
    assert_eq!(ended.code, 1);
    assert_eq!(
        ended.stderr,
        "leasehold: there is no semaphore, lock or pool \"nothing\": see `leasehold ls --all`\n"
    );
    let ended = run(&server.url(), &["lookup", "nothing"]);
    assert_eq!((ended.code, &*ended.stderr), (1, "leasehold: the lock \"nothing\" is not held\n"));
    for id in ["7Vd3kQ0aZx1-42", "AAECAwQFBgcICQoLDA0ODw"] {
        let ended = run(&server.url(), &["release", "nothing", id]);
        let message = "does not hold \"nothing\" and does not wait for it: see `leasehold show nothing`, or for a \
                    lock `leasehold lookup --raw nothing`\n";
        assert_eq!((ended.code, ended.stderr), (1, format!("leasehold: {id:?} {message}")));
    }
}

/// Users do not always know whether a name is a lock or a semaphore.
#[test]
fn a_lock_is_no_semaphore_and_a_semaphore_no_lock() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let lock = inspector.client.lock("k1").build().unwrap();
        let _locked = inspector.block_on(lock.acquire()).unwrap();
        let _held = inspector.hold("it");
        let ended = run(&store.url(), &["show", "k1"]);
        assert_eq!((ended.code, &*ended.stderr), (0, ""));
        assert!(ended.stdout.starts_with("k1: locked\n"), "{}", ended.stdout);
        let ended = run(&store.url(), &["lookup", "it"]);
        let message = "the lock \"it\" is not held; for the semaphore see `leasehold show it`";
        assert_eq!((ended.code, ended.stderr), (1, format!("leasehold: {message}\n")));
        // Names that a lock and a pool cannot have.
        for name in ["fence:it", "holders:it"] {
            assert_eq!(run(&store.url(), &["show", name]).code, 1, "{name}");
            let _held = inspector.hold(name);
            let ended = run(&store.url(), &["show", name]);
            assert_eq!((ended.code, &*ended.stderr), (0, ""), "{name}");
        }
    }
}

#[test]
fn bad_usage_is_64() {
    assert_eq!(run("", &["run", "-n", "0", "it", "--", "true"]).code, 64);
}

#[test]
fn a_store_whose_directory_does_not_exist_is_64() {
    let ended = run("sqlite:/proc/nowhere/store.db", &["run", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(ended.stderr.contains("/proc/nowhere"), "{ended:?}");
}

#[test]
fn a_name_of_another_program_is_64() {
    let server = RedisServer::start();
    let mut redis = server.connection();
    redis::cmd("RPUSH").arg("adv-sem:semaphore_main:it").arg("x").exec(&mut redis).unwrap();
    let ended = run(&server.url(), &["run", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{ended:?}");
    let message = "leasehold: \"it\": the key \"adv-sem:semaphore_main:it\" on ";
    assert!(ended.stderr.starts_with(message), "{ended:?}");
}

#[test]
fn a_store_without_room_is_69() {
    let server = RedisServer::start();
    let mut redis = server.connection();
    for (setting, value) in [("maxmemory-policy", "noeviction"), ("maxmemory", "1")] {
        redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).exec(&mut redis).unwrap();
    }
    for arguments in [&["lock", "it", "--", "true"][..], &["doctor"]] {
        let ended = run(&server.url(), arguments);
        assert_eq!(ended.code, 69, "{arguments:?}: {ended:?}");
        assert!(format!("{ended:?}").contains("is out of memory"), "{arguments:?}: {ended:?}");
    }
}

#[test]
fn a_store_that_cannot_be_reached_is_69() {
    for arguments in [&["ls"][..], &["run", "it", "--", "true"], &["doctor"]] {
        let ended = run("redis://127.0.0.1:1", arguments);
        assert_eq!(ended.code, 69, "{arguments:?}: {ended:?}");
    }
}

#[test]
fn a_store_that_refuses_us_is_77() {
    let server = RedisServer::start_with(&["--requirepass secret"]);
    for arguments in [&["ls"][..], &["run", "it", "--", "true"], &["doctor"]] {
        let ended = run(&server.url_with("", "wrong"), arguments);
        assert_eq!(ended.code, 77, "{arguments:?}: {ended:?}");
        assert!(!ended.stderr.contains("wrong@") && !ended.stderr.contains("secret"));
    }
}

#[test]
fn a_store_that_cannot_be_used_is_77() {
    let server = RedisServer::start();
    let url = server.url().replace("redis://", "redis-cluster://");
    for arguments in [&["ls"][..], &["run", "it", "--", "true"], &["doctor"]] {
        let ended = run(&url, arguments);
        assert_eq!(ended.code, 77, "{arguments:?}: {ended:?}");
    }
}

/// Only root or the same user can kill the guard.
#[test]
fn our_own_fault_is_70_and_the_child_does_not_outlive_its_guard() {
    let server = RedisServer::start();
    let mut running =
        Running::start(&server.url(), &["run", "it", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let pid = running.line();
    let guard = running.guard();
    // The child may run a moment before its guard has reported it.
    until(|| is_asleep(guard));
    kill_process(guard, Signal::KILL).unwrap();
    let ended = running.end();
    assert_eq!(ended.code, 70);
    let message = "leasehold: the leasehold-guard process was killed, so the child was stopped\n";
    assert_eq!(ended.stderr, message);
    // The child is gone, or it is a zombie that nobody reaps.
    until(|| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.is_empty())
            || !exists(&pid)
    });
    assert_eq!(
        Inspector::new(&server.url()).held_and_waiting("it"),
        (0, 0),
        "the permit was not released"
    );
}

/// Returns whether a process sleeps.
fn is_asleep(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
    let state = stat.unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

fn exists(pid: &str) -> bool {
    std::path::Path::new("/proc").join(pid).exists()
}

#[test]
fn not_acquired_is_75_or_the_conflict_exit_code() {
    let server = RedisServer::start();
    let url = server.url();
    let inspector = Inspector::new(&url);
    let _held = inspector.hold("it");
    let lock = inspector.client.lock("it").build().unwrap();
    let _locked = inspector.block_on(lock.acquire()).unwrap();
    for kind in ["run", "lock"] {
        for wait in [&["--no-wait"][..], &["--wait", "0s"], &["--wait", "400ms"]] {
            let line = |code: &[&str]| {
                let words = [&[kind], wait, code, &["it", "--", "true"]];
                run(&url, &words.concat())
            };
            assert_eq!(line(&[]).code, 75, "{kind} {wait:?}");
            assert_eq!(line(&["-E", "9"]).code, 9, "{kind} {wait:?}");
            assert_eq!(line(&["--conflict-exit-code", "9"]).code, 9, "{kind} {wait:?}");
            let fine = line(&["-E", "0"]);
            assert_eq!((fine.code, &*fine.stderr), (0, ""), "{kind} {wait:?}");
            let ended = line(&["-E", "0", "-v"]);
            let why = if kind == "run" { "no permit of \"it\"" } else { "the lock \"it\"" };
            assert_eq!(ended.code, 0, "{kind} {wait:?}");
            assert!(ended.stderr.contains(why), "{kind} {wait:?}: {}", ended.stderr);
        }
    }
    let refused = run(&url, &["run", "--no-wait", "it", "--", "true"]);
    let pid = std::process::id();
    let by = |what: &str, line: &str| {
        assert!(line.starts_with(what) && line.contains(&format!(" pid {pid} ")), "{line}");
    };
    by("leasehold: no permit of \"it\" is free: held by ", &refused.stderr);
    let late = run(&url, &["run", "--wait", "400ms", "it", "--", "true"]);
    assert_eq!(late.stderr, "leasehold: no permit of \"it\" was acquired within 400ms\n");
    let refused = run(&url, &["lock", "--no-wait", "it", "--", "true"]);
    by("leasehold: the lock \"it\" is held by ", &refused.stderr);
    assert_eq!(inspector.held_and_waiting("it"), (1, 0), "a waiter is left in the queue");
}

#[test]
fn a_lost_lease_is_124() {
    for store in Store::both() {
        let ended = run(&store.url(), &["run", "--ttl", "200ms", "it", "--", "sleep", "1000"]);
        assert_eq!(ended.code, 124);
        let message = "was lost: its TTL of 200ms ended; the child was stopped\n";
        assert!(ended.stderr.ends_with(message), "{ended:?}");
    }
}

/// At its TTL, not at its lease, which is extended meanwhile. The lock is free as soon as the child has ended.
#[test]
fn a_child_under_a_lock_that_runs_for_too_long_is_124() {
    for store in Store::both() {
        let words = ["lock", "--ttl", "1s", "--lease", "300ms", "it", "--", "sleep", "1000"];
        let begun = std::time::Instant::now();
        let ended = run(&store.url(), &words);
        assert!(begun.elapsed() >= std::time::Duration::from_secs(1), "{ended:?}");
        let message = "the lock \"it\" was lost: its TTL of 1s ended; the child was stopped";
        assert_eq!((ended.code, ended.stderr), (124, format!("leasehold: {message}\n")));
        assert_eq!(run(&store.url(), &["lock", "--no-wait", "it", "--", "true"]).code, 0);
        let words = ["lock", "--ttl", "5000000y", "it", "--", "sh", "-c", "exit 3"];
        assert_eq!(run(&store.url(), &words).code, 3);
    }
}

#[test]
fn a_permit_that_was_released_by_hand_is_124() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let arguments = ["run", "--lease", "600ms", "it", "--", "sleep", "1000"];
    let running = Running::start(&server.url(), &arguments);
    until(|| inspector.held_and_waiting("it") == (1, 0));
    let id = inspector.holder("it").id;
    let released = run(&server.url(), &["release", "it", &id]);
    assert_eq!(released.code, 0);
    assert!(released.stderr.starts_with("leasehold: warning: the old holder may still be"));
    assert_eq!(released.stdout, format!("released permit {id} of \"it\"\n"));
    let ended = running.end();
    assert_eq!(ended.code, 124);
    assert!(ended.stderr.ends_with("it is no longer in the store; the child was stopped\n"));
}

#[test]
fn a_child_that_cannot_be_run_is_126_or_127() {
    let server = RedisServer::start();
    let ended = run(&server.url(), &["run", "it", "--", "/etc/passwd"]);
    assert_eq!(ended.code, 126);
    let message = "leasehold: \"/etc/passwd\" could not be run: Permission denied (os error 13)\n";
    assert_eq!(ended.stderr, message);
    let ended = run(&server.url(), &["lock", "it", "--", "no-such-command"]);
    assert_eq!(ended.code, 127);
    let message = "could not be run: No such file or directory (os error 2)\n";
    assert_eq!(ended.stderr, format!("leasehold: \"no-such-command\" {message}"));
    assert_eq!(
        Inspector::new(&server.url()).held_and_waiting("it"),
        (0, 0),
        "the permit was not released"
    );
}

#[test]
fn a_signal_while_waiting_is_128_and_more() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let _held = inspector.hold("it");
    let lock = inspector.client.lock("it").build().unwrap();
    let _locked = inspector.block_on(lock.acquire()).unwrap();
    let signals =
        [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129), (Signal::USR1, 138)];
    for (signal, code) in signals {
        let running = Running::start(&server.url(), &["run", "it", "--", "true"]);
        until(|| inspector.held_and_waiting("it") == (1, 1));
        running.signal(signal);
        let ended = running.end();
        assert_eq!((ended.code, &*ended.stderr), (code, ""));
        assert_eq!(inspector.held_and_waiting("it"), (1, 0), "the waiter is still in the queue");
    }
    let running = Running::start(&server.url(), &["lock", "-v", "it", "--", "true"]);
    running.says("waiting for the lock");
    running.signal(Signal::TERM);
    assert_eq!(running.end().code, 143);
}

#[test]
fn help_and_version_are_0() {
    for option in ["--help", "--version", "-h", "-V"] {
        let output = leasehold("").arg(option).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
    }
}

/// The torture test checks before a run that the command can break the rule.
#[cfg(leasehold_broken)]
#[test]
fn a_build_that_can_break_rules_lists_them() {
    let listed = run("", &["--broken-rules"]);
    let rules = leasehold::broken::RULES.join("\n") + "\n";
    assert_eq!((listed.code, listed.stdout), (0, rules));
}
