//! Invalid input: one line with advice, and exit code 64.

use std::io::{Read, Write};

use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, ended, leasehold, run, until};

/// Returns the error of a command line, without the prefix.
fn refused(arguments: &[&str]) -> String {
    let store = Store::local();
    // A store that exists, because some commands do not create one.
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    let ended = run(&store.url(), arguments);
    assert_eq!((ended.code, &*ended.stdout), (64, ""), "{arguments:?}: {}", ended.stderr);
    let line = ended.stderr.strip_prefix("leasehold: ").expect("the prefix");
    let line = line.strip_suffix('\n').expect("a whole line");
    assert!(!line.contains('\n'), "one line: {line:?}");
    line.to_owned()
}

/// Returns each command line with its error.
fn all_refused(lines: &[&[&str]]) -> String {
    let messages = lines.iter().map(|words| {
        let line = words.join(" ").escape_debug().to_string();
        // Shortened for the snapshot.
        let line = line.replace(&"x".repeat(513), "xxx…");
        format!("leasehold {line}\n  {}\n", refused(words))
    });
    messages.collect::<Vec<_>>().concat()
}

#[test]
fn commands_that_are_missing_or_unknown() {
    insta::assert_snapshot!(all_refused(&[
        &["run", "it"],
        &["run", "it", "--"],
        &["run", "--", "true"],
        &["rnu", "it", "--", "true"],
        &["guard", "--", "true"],
        &["run", "--frobnicate", "it", "--", "true"],
        &["completions", "tcsh"],
    ]));
}

#[test]
fn without_arguments_the_help_is_printed() {
    let ended = run("", &[""; 0]);
    assert_eq!((ended.code, &*ended.stdout), (64, ""));
    assert!(ended.stderr.contains("Usage: leasehold <COMMAND>"), "{}", ended.stderr);
}

#[test]
fn unknown_stores_are_refused() {
    let unknown = refused(&["ls", "--store", "zookeeper://user:secret@host"]);
    assert!(unknown.starts_with("invalid store: there is no store \"zookeeper:\""), "{unknown}");
    assert!(!unknown.contains("secret"), "{unknown}");
    let nowhere = refused(&["ls", "--store", "somewhere"]);
    assert!(
        nowhere.starts_with(
            "invalid store: it is not a URL: for a file write sqlite:PATH, for a Redis server redis://"
        ),
        "{nowhere}"
    );
    for (store, hint) in [
        (
            "/var/lib/x",
            "for a file write sqlite:/var/lib/x, for the socket of a Redis server unix:///var/lib/x",
        ),
        ("host:6379", "for a Redis server write redis://host:6379"),
        ("REDIS://user:secret@host", "write \"redis:\" instead of \"REDIS:\""),
        ("secret@host:6379", "it is not a URL"),
        ("  ", "--store is empty: give a URL, or leave it out"),
    ] {
        let message = refused(&["ls", "--store", store]);
        assert!(message.contains(hint) && !message.contains("secret"), "{message}");
    }
    let odd = refused(&["ls", "--store", "redis://user:secret@host:port"]);
    assert!(
        odd.starts_with("invalid store: the port is not a number from 1 to 65535: expected"),
        "{odd}"
    );
    assert!(!odd.contains("secret"), "{odd}");
}

/// A user who writes `--store "$URL"` means some store, even if `URL` is empty.
#[test]
fn empty_and_unshared_stores_are_refused() {
    let command = || {
        let mut command = leasehold("");
        command.env_remove("LEASEHOLD_STORE");
        command
    };
    let message = |store: &str| {
        let ended =
            ended(command().args(["run", "--store", store, "it", "--", "true"]).output().unwrap());
        assert_eq!(ended.code, 64, "{ended:?}");
        ended.stderr
    };
    assert_eq!(message(""), "leasehold: --store is empty: give a URL, or leave it out\n");
    assert!(message("memory:").contains("would limit nothing"), "{}", message("memory:"));
    // As after `LEASEHOLD_STORE=$(cat FILE)` without that file.
    let ended = run("", &["run", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{ended:?}");
    let problem = "leasehold: --store or LEASEHOLD_STORE is empty: give a URL, or leave out both\n";
    assert_eq!(ended.stderr, problem);
}

#[test]
fn reading_commands_create_no_store() {
    let store = Store::local();
    for arguments in
        [&["ls"][..], &["show", "it"], &["lookup", "it"], &["release", "it", "7Vd3kQ0aZx1-42"]]
    {
        let ended = run(&store.url(), arguments);
        assert_eq!(ended.code, 69, "{ended:?}");
        assert!(ended.stderr.contains(": `leasehold run` creates it"), "{ended:?}");
    }
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    assert_eq!(run(&store.url(), &["ls"]).code, 0);
}

#[test]
fn a_file_of_another_program_is_not_changed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("notes.txt");
    std::fs::write(&file, "nothing to do with leases, and open to others").unwrap();
    let ended = run(&format!("sqlite:{}", file.display()), &["run", "it", "--", "true"]);
    assert_eq!(ended.code, 77, "{ended:?}");
    assert!(ended.stderr.contains("is not a leasehold store"), "{ended:?}");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "a file was created beside it");
}

#[test]
fn a_server_that_is_not_redis() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serve = std::thread::spawn(move || {
        for connection in listener.incoming().take(20) {
            let Ok(mut connection) = connection else { continue };
            let mut some = [0; 64];
            match connection.read(&mut some) {
                Ok(length) if some[..length].starts_with(b"done") => return,
                _ => drop(connection.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n")),
            }
        }
    });
    let ended = run(&format!("redis://127.0.0.1:{port}"), &["ls"]);
    assert_eq!(ended.code, 77, "{ended:?}");
    assert!(ended.stderr.contains("does not answer as Redis does"), "{ended:?}");
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"done").unwrap();
    serve.join().unwrap();
}

#[test]
fn a_waiter_is_cancelled_by_its_id() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let held = inspector.hold("it");
        let waiting = Running::start(&store.url(), &["run", "it", "--", "true"]);
        until(|| inspector.held_and_waiting("it") == (1, 1));
        let json = run(&store.url(), &["show", "--json", "it"]).stdout;
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let id = json["waiters"][0]["id"].as_str().unwrap();
        let ended = run(&store.url(), &["release", "it", id]);
        let says = format!("cancelled the wait of {id} for \"it\"\n");
        assert_eq!((ended.code, ended.stdout, &*ended.stderr), (0, says, ""));
        let cancelled = waiting.end();
        let says = format!("the wait for \"it\" was cancelled: {id} was released by its id\n");
        assert_eq!(cancelled.code, 75, "{cancelled:?}");
        assert!(cancelled.stderr.ends_with(&says), "{cancelled:?}");
        assert_eq!(inspector.held_and_waiting("it"), (1, 0));
        let again = run(&store.url(), &["release", "it", id]);
        assert_eq!(again.code, 1, "{again:?}");
        assert!(again.stderr.contains("does not wait for it"), "{again:?}");
        drop(held);
    }
}

#[test]
fn a_lock_is_released_by_its_key_if_that_is_confirmed() {
    for store in Store::both() {
        let line =
            ["lock", "--label", "nightly", "it", "--", "sh", "-c", "echo begun; exec sleep 60"];
        let mut holder = Running::start(&store.url(), &line);
        assert_eq!(holder.line(), "begun");
        let pid = holder.pid().as_raw_pid();
        let shown = run(&store.url(), &["release", "it"]);
        assert_eq!((shown.code, &*shown.stdout), (64, ""), "{shown:?}");
        for part in ["\"it\" is locked by \"nightly\" on ", &format!(" pid {pid} for "), "--yes"] {
            assert!(shown.stderr.contains(part), "{shown:?} does not say {part:?}");
        }
        assert_eq!(run(&store.url(), &["lookup", "it"]).code, 0);
        let ended = run(&store.url(), &["release", "--yes", "it"]);
        assert_eq!(ended.code, 0, "{ended:?}");
        assert!(
            ended.stdout.starts_with("released the lock \"it\", which was held by "),
            "{ended:?}"
        );
        assert!(ended.stderr.contains("may still be running"), "{ended:?}");
        assert_eq!(run(&store.url(), &["lookup", "it"]).code, 1);
        let again = run(&store.url(), &["release", "--yes", "it"]);
        assert_eq!((again.code, &*again.stderr), (1, "leasehold: \"it\" is not locked\n"));
        run(&store.url(), &["run", "permits", "--", "true"]);
        let semaphore = run(&store.url(), &["release", "--yes", "permits"]);
        assert_eq!(semaphore.code, 1);
        assert!(semaphore.stderr.contains("is a semaphore: give the id"), "{semaphore:?}");
        holder.kill();
    }
}

/// A foreign value in the place of one name does not hide the other names.
#[test]
fn a_key_that_is_not_ours_does_not_spoil_the_list() {
    let server = RedisServer::start();
    let _held = Inspector::new(&server.url()).hold("it");
    let mut redis = server.connection();
    redis::cmd("SET").arg("adv-sem:semaphore_main:odd").arg("x").exec(&mut redis).unwrap();
    redis::cmd("SET").arg("adv-sem:semaphore_max:many").arg("lots").exec(&mut redis).unwrap();
    let listed = run(&server.url(), &["ls", "--all"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    assert!(listed.stdout.contains("it ") && !listed.stdout.contains("odd"), "{listed:?}");
    for name in ["odd", "many"] {
        let shown = run(&server.url(), &["show", name]);
        assert_eq!(shown.code, 64, "{shown:?}");
        assert!(shown.stderr.contains(&format!("{name:?}")), "{shown:?}");
    }
}

#[test]
fn no_store_at_all() {
    let output = leasehold("").env_remove("LEASEHOLD_STORE").env_remove("HOME").arg("ls").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let expected = "leasehold: no store: give --store URL, or set LEASEHOLD_STORE or HOME\n";
    assert_eq!(String::from_utf8(output.stderr).unwrap(), expected);
}

#[test]
fn numbers_and_durations() {
    insta::assert_snapshot!(all_refused(&[
        &["run", "-n", "0", "it", "--", "true"],
        &["run", "-n", "many", "it", "--", "true"],
        &["run", "--wait", "it", "--", "true"],
        &["run", "--wait", "5", "it", "--", "true"],
        &["run", "--wait", "5s", "--no-wait", "it", "--", "true"],
        &["run", "--ttl", "0s", "it", "--", "true"],
        &["run", "--ttl=-5s", "it", "--", "true"],
        &["run", "--lease", "100ms", "it", "--", "true"],
        &["run", "--heartbeat", "100ms", "it", "--", "true"],
        &["run", "--heartbeat", "0s", "it", "--", "true"],
        &["run", "--lease", "5s", "--heartbeat", "5s", "it", "--", "true"],
        &["run", "-E", "256", "it", "--", "true"],
        &["run", "--at-least", "0s", "it", "--", "true"],
        &["lock", "--lease", "0s", "it", "--", "true"],
        &["lock", "--once-per", "1h", "--wait", "5s", "it", "--", "true"],
        &["bench", "--for", "1ms"],
        &["lock", "--ttl", "0s", "it", "--", "true"],
        &["lock", "--lease", "1s", "--grace", "1s", "it", "--", "true"],
    ]));
}

/// Only where permits are renewed. Nothing listens at this address: the refusal precedes the connection.
#[test]
fn a_grace_that_leaves_no_time_for_renewals() {
    let words = ["run", "--lease", "5s", "--grace", "2s", "it", "--", "true"];
    let ended = run("redis://127.0.0.1:1", &words);
    let message = "--grace 2s is too long for --lease 5s: at most 833ms, or give --lease 12s";
    assert_eq!((ended.code, ended.stderr), (64, format!("leasehold: {message}\n")));
    let store = Store::local();
    assert_eq!(run(&store.url(), &words).code, 0);
    for grace in ["40s", "5000000y"] {
        let ended = run(&store.url(), &["run", "--grace", grace, "it", "--", "true"]);
        assert_eq!((ended.code, &*ended.stderr), (0, ""), "{grace}");
    }
}

#[test]
fn names_that_cannot_be() {
    insta::assert_snapshot!(all_refused(&[
        &["run", "", "--", "true"],
        &["run", "a\nb", "--", "true"],
        &["run", &"x".repeat(513), "--", "true"],
        &["run", "--label", "a\tb", "it", "--", "true"],
        &["lock", "fence:it", "--", "true"],
        &["lock", "--label", "", "it", "--", "true"],
        &["show", ""],
        &["lookup", ""],
        &["release", "it", "not an id"],
        &["ls", "--watch"],
    ]));
}
