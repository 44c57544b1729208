//! What the child sees: the same as without leasehold.

use std::io::Write;
use std::process::Stdio;

use rustix::process::Signal;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, ended, leasehold, run, until};

#[test]
fn the_child_receives_its_lease_in_its_environment() {
    let server = RedisServer::start();
    let script = "echo $LEASEHOLD_NAME; echo $LEASEHOLD_ID; echo $LEASEHOLD_FENCE";
    for kind in ["run", "lock"] {
        let ended = run(&server.url(), &[kind, "some name", "--", "sh", "-c", script]);
        assert_eq!((ended.code, &*ended.stderr), (0, ""));
        let lines: Vec<_> = ended.stdout.lines().collect();
        let [name, id, fence] = lines[..] else { panic!("{ended:?}") };
        assert_eq!((name, fence.parse::<u64>().is_ok()), ("some name", true));
        if kind == "run" {
            id.parse::<leasehold::AcquisitionId>().unwrap();
        } else {
            id.parse::<leasehold::LockId>().unwrap();
        }
    }
}

#[test]
fn it_reads_and_writes_as_if_it_were_run_directly() {
    let server = RedisServer::start();
    let mut command = leasehold(&server.url());
    command.args(["run", "it", "--", "sh", "-c", "cat; echo gone wrong >&2"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = command.spawn().unwrap();
    running.stdin.take().unwrap().write_all(b"in and out").unwrap();
    let ended = ended(running.wait_with_output().unwrap());
    let expected = (0, "in and out", "gone wrong\n");
    assert_eq!((ended.code, &*ended.stdout, &*ended.stderr), expected);
}

#[test]
fn a_script_without_an_interpreter_is_run_by_the_shell() {
    let server = RedisServer::start();
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    std::fs::write(&script, "exit $1\n").unwrap();
    let mut permissions = std::fs::metadata(&script).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    std::fs::set_permissions(&script, permissions).unwrap();
    let arguments = ["run", "it", "--", script.to_str().unwrap(), "5"];
    assert_eq!(run(&server.url(), &arguments).code, 5);
}

#[test]
fn signals_are_forwarded() {
    let server = RedisServer::start();
    let signals = [
        (Signal::HUP, "HUP"),
        (Signal::INT, "INT"),
        (Signal::QUIT, "QUIT"),
        (Signal::TERM, "TERM"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::WINCH, "WINCH"),
    ];
    for (signal, name) in signals {
        let script = format!("trap 'exit 5' {name}; echo ready; while :; do sleep 0.01; done");
        let mut running = Running::start(&server.url(), &["run", "it", "--", "sh", "-c", &script]);
        assert_eq!(running.line(), "ready");
        running.signal(signal);
        assert_eq!(running.end().code, 5, "{name}");
    }
}

#[test]
fn a_signal_that_ends_the_child_is_the_commands_end() {
    let server = RedisServer::start();
    let script = "echo ready; exec sleep 1000";
    let mut running = Running::start(&server.url(), &["run", "it", "--", "sh", "-c", script]);
    assert_eq!(running.line(), "ready");
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!((ended.code, &*ended.stderr), (143, ""));
}

#[test]
fn a_running_command_can_be_stopped_and_continued() {
    let server = RedisServer::start();
    let script = "echo ready; read line; echo $line";
    let mut command = leasehold(&server.url());
    command.args(["run", "it", "--", "sh", "-c", script]);
    command.stdin(Stdio::piped());
    let mut running = Running::of(command);
    let mut input = running.input();
    assert_eq!(running.line(), "ready");
    running.signal(Signal::STOP);
    until(|| running.state() == 'T');
    running.signal(Signal::CONT);
    input.write_all(b"and on\n").unwrap();
    let ended = running.end();
    assert_eq!((ended.code, &*ended.stdout), (0, "and on\n"));
}

/// As `nohup` and a shell's background jobs ignore signals.
#[test]
fn ignored_signals_stay_ignored_in_the_child() {
    let server = RedisServer::start();
    let url = server.url();
    let binary = env!("CARGO_BIN_EXE_leasehold");
    let script = format!(
        "trap '' HUP; exec {binary} run --store {url} it -- \
         sh -c 'grep SigIgn /proc/$$/status; read line; exit 4'"
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).stdin(Stdio::piped());
    let mut running = Running::of(command);
    let input = running.input();
    let line = running.line();
    let mask = line.split_whitespace().nth(1).unwrap();
    assert_eq!(u64::from_str_radix(mask, 16).unwrap() & 1, 1, "{line}");
    running.signal(Signal::HUP);
    drop(input);
    assert_eq!(running.end().code, 4);
}

#[test]
fn without_a_store_it_uses_a_file_in_the_state_directory() {
    let home = tempfile::tempdir().unwrap();
    let state = tempfile::tempdir().unwrap();
    let ls = |variable: &str, directory: &std::path::Path| {
        let mut command = leasehold("");
        command.env_remove("LEASEHOLD_STORE").env("HOME", home.path()).env(variable, directory);
        ended(command.args(["run", "it", "--", "true"]).output().unwrap())
    };
    assert_eq!(ls("HOME", home.path()).code, 0);
    assert!(home.path().join(".local/state/leasehold/store.db").exists());
    assert_eq!(ls("XDG_STATE_HOME", state.path()).code, 0);
    assert!(state.path().join("leasehold/store.db").exists());
}

#[test]
fn without_a_number_it_uses_the_capacity_that_there_is() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let capacity = |name: &str| {
        let stats = inspector.client.stats().names([name]).unused();
        inspector.block_on(stats).unwrap()[0].capacity
    };
    assert_eq!(run(&server.url(), &["run", "-n", "4", "it", "--", "true"]).code, 0);
    assert_eq!(capacity("it"), 4);
    assert_eq!(run(&server.url(), &["run", "it", "--", "true"]).code, 0);
    assert_eq!(capacity("it"), 4);
    assert_eq!(run(&server.url(), &["run", "new", "--", "true"]).code, 0);
    assert_eq!(capacity("new"), 1);
}

#[test]
fn orphans_end_before_the_permit_is_released() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    // The left process closes its output, so that only the guard waits for it.
    let script = "sleep 1000 >/dev/null 2>&1 & echo $!; exit 6";
    let arguments = ["run", "--grace", "300ms", "it", "--", "sh", "-c", script];
    let ended = run(&server.url(), &arguments);
    assert_eq!((ended.code, &*ended.stderr), (6, ""));
    let left: i32 = ended.stdout.trim().parse().unwrap();
    let left = rustix::process::Pid::from_raw(left).unwrap();
    assert!(rustix::process::test_kill_process(left).is_err(), "the process was not killed");
    assert_eq!(inspector.held_and_waiting("it"), (0, 0));
}

#[test]
fn verbose_output_reports_the_steps() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("it");
    let running = Running::start(&server.url(), &["run", "-v", "it", "--", "true"]);
    running.says("1st in the queue; held by ");
    assert!(inspector.block_on(held.release()).unwrap());
    let ended = running.end();
    assert_eq!(ended.code, 0);
    assert!(ended.stderr.contains(" of \"it\" acquired after "), "{}", ended.stderr);
    assert!(ended.stderr.ends_with(" of \"it\" released\n"), "{}", ended.stderr);
}

/// Reported once per holder, not once per second.
#[test]
fn verbose_output_names_the_holder_of_the_lock() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let lock = inspector.client.lock("it").label("nightly").build().unwrap();
    let guard = inspector.block_on(lock.acquire()).unwrap();
    let running = Running::start(&server.url(), &["lock", "-v", "it", "--", "true"]);
    let pid = std::process::id();
    running.says(&format!(" pid {pid} \"nightly\" for "));
    // The command looks again after a second.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(inspector.block_on(guard.release()).unwrap());
    let ended = running.end();
    assert_eq!(ended.code, 0);
    let waiting = ended.stderr.lines().filter(|line| line.contains("waiting for the lock"));
    assert_eq!(waiting.count(), 1, "{}", ended.stderr);

    // Another program does not record who holds the lock.
    let record = r#"{"lockId":"AAECAwQFBgcICQoLDA0ODw","key":"it","fence":"0000000000000000007","expiresAtMs":9999999999999,"acquiredAtMs":1}"#;
    let set = redis::cmd("SET").arg("syncguard:it").arg(record).exec(&mut server.connection());
    set.unwrap();
    let running = Running::start(&server.url(), &["lock", "-v", "it", "--", "true"]);
    running.says("locked with fence 0000000000000000007; held for ");
}

/// Where permits need no renewal, a short lease does not shorten the grace.
#[test]
fn a_short_lease_shortens_the_grace_only_where_it_counts() {
    let script = "trap 'sleep 0.5; echo done; exit' TERM; sleep 1000";
    for store in Store::both() {
        let words = ["run", "--lease", "600ms", "--ttl", "1s", "it", "--", "sh", "-c", script];
        let ended = run(&store.url(), &words);
        assert_eq!(ended.code, 124, "{ended:?}");
        let on_one_host = matches!(store, Store::Local(_));
        assert_eq!(ended.stdout == "done\n", on_one_host, "{ended:?}");
    }
}

/// In a container no other process would reap.
#[test]
fn as_the_first_process_it_reaps() {
    let server = RedisServer::start();
    let mut command = std::process::Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--map-root-user", "--user"]);
    if !command.arg("true").output().is_ok_and(|output| output.status.success()) {
        eprintln!("not tested: pid namespaces are not permitted");
        return;
    }
    let mut command = std::process::Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--map-root-user", "--user"]);
    // An orphan that has left its group ends, and must be reaped.
    let script = "orphan=$(setsid sh -c 'sleep 0.05 >/dev/null & echo $!'); \
                  while [ -d /proc/$orphan ]; do sleep 0.01; done; exit 3";
    let binary = env!("CARGO_BIN_EXE_leasehold");
    command.args([binary, "run", "--store", &server.url(), "it", "--", "sh", "-c", script]);
    let ended = Running::of(command).end();
    assert_eq!((ended.code, &*ended.stdout, &*ended.stderr), (3, "", ""));
}

/// Another program shares the semaphore, and its process has died.
#[test]
fn a_permit_of_another_program_is_released_by_its_id() {
    let server = testkit::redis_server::RedisServer::start();
    let mut redis = server.connection();
    let theirs = "2c5ea4c0-4067-11e9-8bad-9b1deb4d3b7d";
    let hold = ["ZADD", "adv-sem:semaphore_main:it", "9000000000", theirs];
    for words in [&hold[..], &["SET", "adv-sem:semaphore_max:it", "1"]] {
        redis::cmd(words[0]).arg(&words[1..]).exec(&mut redis).unwrap();
    }
    let inspector = Inspector::new(&server.url());
    assert_eq!(inspector.held_and_waiting("it"), (1, 0));
    let ended = run(&server.url(), &["release", "it", theirs]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(inspector.held_and_waiting("it"), (0, 0));
    // It has just ended, which is no mistake in the id.
    for theirs in [theirs, &theirs.replace('-', "")] {
        let ended = run(&server.url(), &["release", "it", theirs]);
        assert_eq!(ended.code, 1, "{ended:?}");
        assert!(ended.stderr.contains("does not hold"), "{ended:?}");
    }
    let ended = run(&server.url(), &["release", "it", "not an id"]);
    assert_eq!(ended.code, 64, "{ended:?}");
}

/// What the command sends before the child runs delays every start.
#[test]
fn a_start_on_redis_takes_one_connection_and_a_few_kilobytes() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let start = || {
        let ended = run(&proxy.url(), &["run", "-n", "1", "it", "--", "true"]);
        assert_eq!((ended.code, &*ended.stderr), (0, ""), "{ended:?}");
        proxy.traffic()
    };
    // The first one loads the scripts.
    let (before, after) = (start(), start());
    assert_eq!(after.accepted - before.accepted, 1);
    let sent = after.bytes_to_server - before.bytes_to_server;
    assert!(sent < 8192, "{sent} bytes");
}

/// A nested command does not hide the slot and the fence of the outer one.
#[test]
fn the_variables_of_outer_commands_stay_visible_by_name() {
    for store in Store::both() {
        let leasehold = env!("CARGO_BIN_EXE_leasehold");
        let inspector = Inspector::new(&store.url());
        let first = inspector.client.semaphore("gpu", 4).numbered().build().unwrap();
        let _first = inspector.block_on(first.acquire()).unwrap();
        let show = "echo $LEASEHOLD_SLOT $LEASEHOLD_GPU_SLOT $LEASEHOLD_NAME; \
                    test $LEASEHOLD_API_V2_ID = $LEASEHOLD_ID && test $LEASEHOLD_GPU_ID != $LEASEHOLD_ID && \
                    test $LEASEHOLD_API_V2_FENCE = $LEASEHOLD_FENCE && test -n \"$LEASEHOLD_GPU_FENCE\"";
        let words = [
            "run", "-n", "4", "gpu", "--", leasehold, "run", "-n", "5", "api/v2", "--", "sh", "-c",
            show,
        ];
        let ended = run(&store.url(), &words);
        assert_eq!((ended.code, &*ended.stdout), (0, "1 2 api/v2\n"), "{ended:?}");
    }
}
