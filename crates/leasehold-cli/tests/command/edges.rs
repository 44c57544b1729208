//! Small mistakes and odd stores: each is refused, or reported with its cause, and leaves nothing behind.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, ended, leasehold, run, until};

fn refused(store: &str) -> String {
    let ended = run(store, &["run", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{store}: {ended:?}");
    ended.stderr
}

#[test]
fn a_database_is_a_parameter_or_the_path() {
    let server = RedisServer::start();
    let with = format!("{}?db=1", server.url());
    let mut held =
        Running::start(&with, &["run", "it", "--", "sh", "-c", "echo up; exec sleep 1000"]);
    assert_eq!(held.line(), "up");
    let listed = |store: &str| run(store, &["ls"]).stdout.contains("it ");
    assert!(listed(&with) && listed(&format!("{}/1", server.url())));
    assert!(!listed(&server.url()), "database 0 has nothing of it");
    let message = refused(&format!("{}?timeout=5", server.url()));
    assert!(message.contains("the parameter \"timeout\" is unknown"), "{message}");
    let message = refused("redis://127.0.0.1:99999");
    assert!(message.contains("the port 99999 is not a number from 1 to 65535"), "{message}");
}

#[test]
fn a_store_that_is_no_url_gets_a_hint() {
    let message = refused("/var/tmp/x.db");
    assert!(message.contains("for a file write sqlite:/var/tmp/x.db"), "{message}");
    let message = refused("foo");
    assert!(!message.contains("memory:"), "{message}");
    let message = refused("localhost:6379");
    assert!(message.contains("for a Redis server write redis://localhost:6379"), "{message}");
    assert!(!refused("hunter2@host").contains("hunter2"));
}

#[test]
fn a_tilde_is_the_home_directory() {
    let home = tempfile::tempdir().unwrap();
    let here = tempfile::tempdir().unwrap();
    let mut command = leasehold("sqlite:~/x.db");
    command.env("HOME", home.path()).current_dir(here.path());
    let ended = ended(command.args(["run", "-v", "it", "--", "true"]).output().unwrap());
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(home.path().join("x.db").exists());
    assert!(names(here.path()).is_empty(), "no directory named ~");
    let says = format!("the store is sqlite:{}/x.db\n", home.path().display());
    assert!(ended.stderr.contains(&says), "{ended:?}");
}

#[test]
fn the_default_store_is_named_as_such() {
    let home = tempfile::tempdir().unwrap();
    let at_home = |arguments: &[&str]| {
        let mut command = leasehold("");
        command.env("HOME", home.path()).env_remove("LEASEHOLD_STORE").args(arguments);
        ended(command.output().unwrap())
    };
    let says = "store.db (the default, one for each user)\n";
    for words in [["run", "-v", "it", "--", "true"], ["lock", "-v", "it", "--", "true"]] {
        let ended = at_home(&words);
        assert!(ended.stderr.contains(says), "{ended:?}");
    }
    assert!(at_home(&["doctor"]).stdout.contains(says));
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_refused_file_gets_no_files_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let url = |name: &str| format!("sqlite:{}", path(name).display());
    std::os::unix::fs::symlink("/dev/null", path("null")).unwrap();
    fs::create_dir(path("folder")).unwrap();
    fs::write(path("open"), "").unwrap();
    fs::set_permissions(path("open"), PermissionsExt::from_mode(0o644)).unwrap();
    // Another program uses this database, and its writes are still in the log.
    let other = rusqlite::Connection::open(path("other")).unwrap();
    other.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).unwrap();
    other.execute_batch("CREATE TABLE notes (text)").unwrap();
    let before = names(directory.path());
    for (name, says) in [
        ("null", "is not a regular file: choose another path"),
        ("folder", "is not a regular file: choose another path"),
        ("open", "is open to other users (mode 644)"),
        ("other", "is a database of another program: choose another path"),
    ] {
        for words in [&["run", "it", "--", "true"][..], &["ls"]] {
            let ended = run(&url(name), words);
            assert_eq!(ended.code, 77, "{ended:?}");
            assert!(ended.stderr.contains(says), "{ended:?}");
            assert!(says.contains("other users") || !ended.stderr.contains("chmod"), "{ended:?}");
        }
    }
    assert_eq!(names(directory.path()), before);
    assert!(!Path::new("/dev/null.clients").exists());
}

/// Servers that are unreachable or still load their data.
#[test]
fn the_doctor_names_the_cause() {
    let doctor = |store: &str| {
        let ended = run(store, &["doctor"]);
        assert_eq!(ended.code, 69, "{ended:?}");
        ended.stdout
    };
    let output = doctor("redis://127.0.0.1:1");
    assert!(output.contains("(Connection refused (os error 111))"), "{output}");
    assert!(output.contains("nothing listens there"), "{output}");
    let output = doctor("redis://no-such-host.invalid");
    assert!(output.contains("the host has no address"), "{output}");
    // It takes seconds to load its data, and answers meanwhile.
    let slow = ["--key-load-delay 1000", "--loading-process-events-interval-bytes 1024"];
    let server = RedisServer::start_with(&slow);
    let mut redis = server.connection();
    let fill = "for i = 1, 8000 do redis.call('set', 'k' .. i, i) end";
    redis::cmd("EVAL").arg(fill).arg(0).exec(&mut redis).unwrap();
    redis::cmd("SAVE").exec(&mut redis).unwrap();
    drop(redis);
    let loading = std::thread::scope(|scope| {
        let restart = scope.spawn(|| server.crash());
        let mut output = String::new();
        until(|| {
            output = run(&server.url(), &["doctor"]).stdout;
            output.contains("LOADING Redis is loading") || restart.is_finished()
        });
        output
    });
    assert!(loading.contains("-> wait until it has loaded its data"), "{loading}");
}

/// A server without a password refuses clients of other hosts. The command connects to an address
/// of this host that is not loopback.
#[test]
fn a_server_in_protected_mode_says_so() {
    let probe = UdpSocket::bind("0.0.0.0:0").unwrap();
    // This sends nothing, and fails on a host without a network.
    let Ok(()) = probe.connect("192.0.2.1:9") else { return };
    let address = probe.local_addr().unwrap().ip();
    let server = RedisServer::start();
    for (setting, value) in [("protected-mode", "yes"), ("bind", "0.0.0.0")] {
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg(setting).arg(value).exec(&mut server.connection()).unwrap();
    }
    let ended = run(&format!("redis://{address}:{}", server.port()), &["doctor"]);
    assert_eq!(ended.code, 77, "{ended:?}");
    assert!(ended.stdout.contains("protected mode"), "{ended:?}");
    let advice = ": connect from its own host, or give it a password";
    assert!(ended.stdout.contains(advice), "{ended:?}");
}

#[test]
fn a_command_that_does_not_exist_does_not_wait() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("it");
        let ended = run(&store.url(), &["run", "it", "--", "no-such-program"]);
        let says = "leasehold: \"no-such-program\" could not be run: No such file or directory (os error 2)\n";
        assert_eq!((ended.code, &*ended.stderr), (127, says));
        let ended = run(&store.url(), &["lock", "it", "--", "/etc/passwd"]);
        let says = "leasehold: \"/etc/passwd\" could not be run: Permission denied (os error 13)\n";
        assert_eq!((ended.code, &*ended.stderr), (126, says));
    }
}

#[test]
fn a_name_inside_itself_is_refused() {
    let program = env!("CARGO_BIN_EXE_leasehold");
    for store in Store::both() {
        for kind in ["run", "lock"] {
            // Another name between them makes no difference. `--wait` ends a command that is not refused.
            let inner = [program, kind, "--wait", "5s", "it", "--", "true"];
            let words = [&[kind, "it", "--", program, "run", "other", "--"], &inner[..]].concat();
            let ended = run(&store.url(), &words);
            assert_eq!(ended.code, 64, "{ended:?}");
            let says = "\"it\" is held by the leasehold command that started this one";
            assert!(ended.stderr.contains(says), "{ended:?}");
        }
        // A lock and a semaphore of the same name are different things.
        let words = ["run", "it", "--", program, "lock", "it", "--", "true"];
        assert_eq!(run(&store.url(), &words).code, 0);
    }
    // A child that outlives its lease may acquire it again.
    let store = Store::local();
    let id = run(&store.url(), &["run", "it", "--", "sh", "-c", "echo $LEASEHOLD_ID"]).stdout;
    let mut later = leasehold(&store.url());
    later.env("LEASEHOLD_ID", id.trim()).env("LEASEHOLD_NAME", "it");
    assert_eq!(ended(later.args(["run", "it", "--", "true"]).output().unwrap()).code, 0);
}

/// Without a terminal, and without -v.
#[test]
fn a_job_reports_once_that_it_waits_and_who_holds() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let held = inspector.hold("it");
        let lock = inspector.client.lock("it").label("nightly").build().unwrap();
        let guard = inspector.block_on(lock.acquire()).unwrap();
        let waiting =
            ["run", "lock"].map(|kind| Running::start(&store.url(), &[kind, "it", "--", "true"]));
        for waiting in &waiting {
            waiting.says(&format!(" pid {} \"nightly\" for ", std::process::id()));
        }
        inspector.block_on(held.release()).unwrap();
        inspector.block_on(guard.release()).unwrap();
        for waiting in waiting {
            let ended = waiting.end();
            assert_eq!((ended.code, ended.stderr.lines().count()), (0, 1), "{ended:?}");
        }
    }
}

#[test]
fn a_variable_makes_both_verbose() {
    let store = Store::local();
    for (kind, what) in [("run", " of \"it\""), ("lock", "lock \"it\"")] {
        let stderr_with = |value: &str| {
            let mut command = leasehold(&store.url());
            command.env("LEASEHOLD_VERBOSE", value).args([kind, "it", "--", "true"]);
            ended(command.output().unwrap()).stderr
        };
        let stderr = stderr_with("1");
        assert!(stderr.contains(&format!("{what} acquired after ")), "{stderr}");
        assert!(
            stderr.contains(", with fence ") && stderr.ends_with(&format!("{what} released\n")),
            "{stderr}"
        );
        assert_eq!(stderr_with("0"), "");
    }
}

/// Runs in its own mount namespace, where that is allowed.
#[test]
fn a_store_on_a_read_only_disk_can_be_listed() {
    let unshare = ["--mount", "--map-root-user", "true"];
    if !Command::new("unshare").args(unshare).status().is_ok_and(|status| status.success()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // The permit is held by a process that continues while the disk is full or read-only.
    let script = r#"
        set -e
        mount -t tmpfs -o size=1m,nr_inodes=30,mode=700 none "$1"
        export LEASEHOLD_STORE="sqlite:$1/store"
        mkfifo "$1/go"
        "$2" run --label busy held -- sh -c 'echo up > "$0/go"; exec sleep 1000' "$1" & pid=$!
        read up < "$1/go"
        if [ "$3" = full ]; then
            cat /dev/zero > "$1/fill" 2> /dev/null || true
            i=0; while touch "$1/$i" 2> /dev/null; do i=$((i + 1)); done
        else
            mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"
        fi
        "$2" ls; "$2" show held; "$2" lookup none || echo "lookup: $?"
        "$2" run other -- true || echo "run: $?"
        kill -9 $pid
    "#;
    for (how, refused) in [("full", "run: 69\n"), ("read-only", "run: 77\n")] {
        let mut command = leasehold("");
        let program = command.get_program().to_owned();
        let mut unshare = Command::new("unshare");
        unshare.args([
            "--mount",
            "--map-root-user",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
            "sh",
        ]);
        command = unshare;
        command.arg(directory.path()).arg(program).arg(how);
        let ended = ended(command.output().unwrap());
        assert!(
            ended.stdout.contains("held ") && ended.stdout.contains("busy"),
            "{how}: {ended:?}"
        );
        assert!(
            ended.stdout.contains("lookup: 1\n") && ended.stdout.contains(refused),
            "{how}: {ended:?}"
        );
        assert!(
            ended.stderr.contains("reading only, because the store cannot be written"),
            "{how}: {ended:?}"
        );
    }
}
