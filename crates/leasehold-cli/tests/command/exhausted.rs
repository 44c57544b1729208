//! Limits of files, processes and threads that are too small. The command names the limit and how to raise it, and leaves
//! nothing behind.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::support::{Ended, Inspector, Running, Store, ended, leasehold};

/// A user that has no other processes. The limit of processes does not apply to root.
const USER: u32 = 54_321;

/// The command below a limit, as in `prlimit --nofile=20`.
fn limited(option: &str, limit: u32, store: &str, words: &[&str]) -> Command {
    let plain = leasehold(store);
    let mut command = Command::new("prlimit");
    command.arg(format!("--{option}={limit}")).arg(plain.get_program()).args(words);
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null());
    command
}

/// Checks that a command has failed in one line that names the limit.
#[track_caller]
fn names_the_limit(ended: &Ended, codes: &[i32], says: &str) {
    assert!(codes.contains(&ended.code), "{ended:?}");
    assert!(ended.stderr.ends_with(&format!(": {says}\n")), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(!ended.stderr.contains("internal error"), "{ended:?}");
}

fn of_files(limit: u32) -> String {
    format!("the limit is {limit}; raise it with `ulimit -n`")
}

/// Below four files, the system cannot even start a program.
#[test]
fn too_few_files_are_named_with_their_limit() {
    for store in Store::both() {
        for kind in ["run", "lock"] {
            let words = [kind, "it", "--", "true"];
            let mut worked = false;
            for limit in (4..=32).chain([128]) {
                let ended = ended(limited("nofile", limit, &store.url(), &words).output().unwrap());
                if ended.code == 0 {
                    assert_eq!(ended.stderr, "");
                    worked = true;
                } else {
                    // Sometimes a command works with fewer files: how many are open at once depends on the time. If
                    // the runtime has too few, the code is 70.
                    names_the_limit(&ended, &[69, 70, 126], &of_files(limit));
                }
            }
            assert!(worked);
        }
        assert_eq!(Inspector::new(&store.url()).held_and_waiting("it"), (0, 0));
    }
}

/// The statistics, which say why a permit is not free, need more files than a permit.
#[test]
fn too_few_files_for_a_wait_are_named_with_their_limit() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("it");
        let words = ["run", "--wait", "2s", "it", "--", "true"];
        // All of them wait at once.
        let start = |limit| (limit, Running::of(limited("nofile", limit, &store.url(), &words)));
        let running: Vec<_> = (12..=40).chain([128]).map(start).collect();
        let mut worked = false;
        for (limit, running) in running {
            let ended = running.end();
            if ended.code == 75 {
                worked = true;
            } else {
                let last = ended.stderr.lines().last().unwrap_or_default();
                assert!([69, 70].contains(&ended.code), "{ended:?}");
                assert!(last.ends_with(&of_files(limit)), "{ended:?}");
            }
        }
        assert!(worked);
        assert_eq!(inspector.held_and_waiting("it"), (1, 0));
    }
}

/// Runs the command as a user that has no other processes, if this user may do that.
fn as_another_user(mut command: Command) -> Command {
    if rustix::process::geteuid().is_root() {
        command.uid(USER).gid(USER);
    }
    command
}

#[test]
fn too_few_processes_are_named_with_their_limit() {
    let is_root = rustix::process::geteuid().is_root();
    let mut probe = as_another_user(limited("nproc", 1000, "", &["--version"]));
    if !probe.output().is_ok_and(|output| output.status.success()) {
        return eprintln!("not tested: no other user may run the command");
    }
    for store in Store::both() {
        if let (Store::Local(directory), true) = (&store, is_root) {
            chown(directory.path(), Some(USER), Some(USER)).unwrap();
        }
        // The name of a host is looked up on one more thread, and so are the statistics for `-n`.
        let url = store.url().replace("127.0.0.1", "localhost");
        for words in [&["run", "-n", "1", "it", "--", "true"][..], &["lock", "it", "--", "true"]] {
            let mut worked = false;
            for limit in 1..=9 {
                let command = limited("nproc", limit, &url, words);
                let ended = ended(as_another_user(command).output().unwrap());
                if ended.code == 0 {
                    assert_eq!(ended.stderr, "");
                    worked = true;
                } else {
                    let what = "the limit of processes and threads of this user is";
                    let says =
                        format!("{what} {limit}; raise it with `ulimit -u`, or end some of them");
                    names_the_limit(&ended, &[69, 126], &says);
                }
            }
            // Another user may have more processes already.
            assert!(worked || !is_root);
        }
        if let Store::Redis(_) = &store {
            assert_eq!(Inspector::new(&store.url()).held_and_waiting("it"), (0, 0));
        }
    }
}
