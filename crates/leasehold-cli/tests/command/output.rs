//! What is printed: help, tables, JSON.

use std::io::Write;

use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, Store, leasehold, run, until};

/// Replaces values that differ from run to run. A replacement has the same width, because tables fit their contents.
fn steady(text: &str, replacements: &[(&str, &str)]) -> String {
    let mut text = text.to_owned();
    for (found, replacement) in replacements {
        let width = found.chars().count();
        let replacement: String =
            replacement.chars().chain(std::iter::repeat('~')).take(width).collect();
        text = text.replace(found, &replacement);
    }
    text
}

#[test]
fn help() {
    for command in [
        "",
        "run",
        "lock",
        "ls",
        "show",
        "limit",
        "pause",
        "resume",
        "drain",
        "forget",
        "release",
        "lookup",
        "top",
        "serve",
        "doctor",
        "bench",
        "completions",
        "man",
    ] {
        let words: Vec<_> =
            [command, "--help"].into_iter().filter(|word| !word.is_empty()).collect();
        let ended = run("redis://user:secret@host", &words);
        assert_eq!((ended.code, &*ended.stderr), (0, ""));
        assert!(!ended.stdout.contains("secret"));
        assert!(ended.stdout.contains("Examples:"), "{command} has no example");
        insta::assert_snapshot!(
            format!("help_{command}").trim_end_matches('_').to_owned(),
            ended.stdout
        );
    }
}

#[test]
fn completions_and_the_manual_page() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let ended = run("", &["completions", shell]);
        assert_eq!(ended.code, 0);
        assert!(ended.stdout.contains("leasehold") && ended.stdout.contains("--lease"));
        // Except in the prefix of locks.
        let shown = ended.stdout.replace("syncguard", "");
        assert!(!shown.contains("guard"), "{shell} completes a hidden command");
    }
    let page = run("", &["man"]);
    assert_eq!(page.code, 0);
    assert!(page.stdout.starts_with(".ie"), "{}", page.stdout);
    let page = run("", &["man", "run"]).stdout;
    let head: Vec<_> = page.lines().skip(2).take(5).map(str::trim_end).collect();
    let head = head.join("\n").replace(env!("CARGO_PKG_VERSION"), "VERSION");
    insta::assert_snapshot!(head, @r#"
    .TH leasehold-run 1  "leasehold VERSION"
    .SH NAME
    leasehold\-run \- Run a command under a permit of a fair semaphore
    .SH SYNOPSIS
    \fBleasehold run\fR [OPTIONS] <NAME> \-\- <CMD>...
    "#);
}

#[test]
fn a_measurement_is_explained_and_leaves_no_keys() {
    for store in Store::both() {
        let json = run(&store.url(), &["bench", "--for", "700ms", "--json"]);
        assert_eq!((json.code, &*json.stderr), (0, ""));
        let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
        let figures = json["figures"].as_array().unwrap();
        let names: Vec<_> = figures.iter().filter_map(|figure| figure["what"].as_str()).collect();
        let all = ["question", "pair", "lock_pair", "hot", "names", "few", "many"];
        assert_eq!(names, all);
        for figure in figures {
            assert!(figure["a_second"].as_f64().is_some_and(|rate| rate > 1.0), "{figure}");
        }
        let bench = run(&store.url(), &["bench", "--for", "700ms"]);
        assert_eq!((bench.code, &*bench.stderr), (0, ""));
        assert!(bench.stdout.starts_with("WHAT "), "{}", bench.stdout);
        let says = "\nAcquiring and releasing a permit takes ";
        assert!(bench.stdout.contains(says), "{}", bench.stdout);
        let needs_renewals = matches!(store, Store::Redis(_));
        assert_eq!(bench.stdout.contains("--lease below"), needs_renewals, "{}", bench.stdout);
        let left = run(&store.url(), &["ls"]).stdout;
        assert_eq!(left, "no holders and no waiters\n");
    }
}

#[test]
fn an_empty_store() {
    let server = RedisServer::start();
    insta::assert_snapshot!(run(&server.url(), &["ls"]).stdout, @"no holders and no waiters");
    insta::assert_snapshot!(run(&server.url(), &["ls", "--json"]).stdout, @r#"
    {
      "locks": [],
      "pools": [],
      "semaphores": []
    }
    "#);
}

#[test]
fn a_semaphore_in_use() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("deploy");
    let _waiting =
        Running::start(&server.url(), &["run", "--label", "a b", "deploy", "--", "true"]);
    // A client writes its record, which has its host and process, beside its first requests.
    until(|| inspector.described("deploy").is_some());
    let stats = inspector.described("deploy").unwrap();
    let (holder, waiter) = (&stats.holders[0], &stats.waiters[0]);
    let pids = [holder, waiter].map(|member| member.pid.unwrap().to_string());
    let fence = held.fence().to_string();
    let host = holder.host.as_deref().unwrap();
    let replacements = [
        (&*holder.id, "HOLDER"),
        (&*waiter.id, "WAITER"),
        (&fence, "FENCE"),
        (&pids[0], "PID"),
        (&pids[1], "PID"),
        (host, "HOST"),
    ];

    let shown = run(&server.url(), &["show", "deploy"]).stdout;
    let shown = steady(&shown, &replacements);
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines[0], "deploy: 1 of 1 held, 1 waiting");
    let titles: Vec<_> = lines[2].split_whitespace().collect();
    let whole = "PLACE ID HOST PID LABEL FOR SILENT FOR TTL LEFT SLOT UNITS FENCE";
    assert_eq!(titles.join(" "), whole);
    assert!(lines[3].starts_with("held   HOLDER~") && lines[3].contains(" nightly "), "{shown}");
    assert!(lines[3].ends_with("FENCE~~~~~~~~~~~~~~"), "{shown}");
    assert!(lines[4].starts_with("1.     WAITER~") && lines[4].contains(" a b "), "{shown}");
    assert_eq!(lines.len(), 5);

    let json: serde_json::Value =
        serde_json::from_str(&run(&server.url(), &["show", "--json", "deploy"]).stdout).unwrap();
    insta::assert_snapshot!("show_json", format!("{:#}", masked(json)));

    let lock = inspector.client.lock("invoice:42").build().unwrap();
    let _locked = inspector.block_on(lock.acquire()).unwrap();
    let pool = inspector.client.pool("workers", 3).build().unwrap();
    let _id = inspector.block_on(pool.acquire("worker-7")).unwrap().detach();
    insta::assert_snapshot!("ls", ageless(&run(&server.url(), &["ls"]).stdout));
    let listed: serde_json::Value =
        serde_json::from_str(&run(&server.url(), &["ls", "--json"]).stdout).unwrap();
    insta::assert_snapshot!("ls_json", format!("{:#}", masked(listed)));
}

/// Returns a table without its ages and the spaces around them.
fn ageless(text: &str) -> String {
    let is_age = |word: &str| {
        let unit = word.trim_start_matches(|c: char| c.is_ascii_digit());
        unit.len() < word.len() && ["ms", "s", "m", "h", "d"].contains(&unit)
    };
    let plain = |line: &str| {
        let words = line.split_whitespace().map(|word| if is_age(word) { "AGE" } else { word });
        let mut words: Vec<_> = words.collect();
        words.dedup_by(|a, b| (*a, *b) == ("AGE", "AGE"));
        words.join(" ") + "\n"
    };
    text.lines().map(plain).collect()
}

/// Replaces every value that differs from run to run by its name.
fn masked(mut value: serde_json::Value) -> serde_json::Value {
    match &mut value {
        serde_json::Value::Object(fields) => {
            for (key, field) in fields.iter_mut().filter(|(_, field)| !field.is_null()) {
                *field = match key.as_str() {
                    "id" | "host" | "pid" | "fence" | "key_hash" | "id_hash" | "acquired_at"
                    | "expires_at" => key.to_uppercase().into(),
                    key if key.ends_with("_seconds") => {
                        assert!(field.as_f64().is_some_and(|age| (0.0..1000.0).contains(&age)));
                        "SECONDS".into()
                    }
                    _ => masked(field.take()),
                }
            }
        }
        serde_json::Value::Array(items) => {
            for item in items {
                *item = masked(item.take());
            }
        }
        _ => {}
    }
    value
}

#[test]
fn a_lock_in_use() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let lock = inspector.client.lock("invoice:42").label("a b").build().unwrap();
    let guard = inspector.block_on(lock.acquire()).unwrap();
    let (id, fence) = (guard.id().to_string(), guard.fence().to_string());
    assert_eq!(fence, "0000000000000000001");
    let found = inspector.block_on(inspector.client.locks().lookup("invoice:42")).unwrap().unwrap();

    let clean = run(&server.url(), &["lookup", "invoice:42"]).stdout;
    assert!(!clean.contains("invoice") && !clean.contains(&id), "{clean}");
    let titles: Vec<_> = clean.lines().map(|line| line[..13].trim_end()).collect();
    let holder = ["host", "pid", "label"];
    let rest = ["fence", "acquired", "ends"];
    assert_eq!(titles, [&["key hash", "lock id hash"][..], &holder, &rest].concat());
    let pid = std::process::id();
    assert!(clean.contains(&format!("\npid           {pid}\nlabel         a b\n")), "{clean}");
    let host = found.host.as_deref().unwrap();
    assert!(clean.contains(&format!("\nhost          {host}\n")), "{clean}");
    assert!(clean.contains(&found.key_hash) && clean.contains(&found.id_hash));

    let raw = run(&server.url(), &["lookup", "--raw", "--json", "invoice:42"]).stdout;
    let raw: serde_json::Value = serde_json::from_str(&raw).unwrap();
    assert_eq!(raw["key"], "invoice:42");
    assert_eq!(raw["id"], id);
    let clean = run(&server.url(), &["lookup", "--json", "invoice:42"]).stdout;
    let clean: serde_json::Value = serde_json::from_str(&clean).unwrap();
    let keys: Vec<_> = clean.as_object().unwrap().keys().map(String::as_str).collect();
    let times = ["acquired_at", "age_seconds", "expires_at", "expires_in_seconds", "fence"];
    assert_eq!(keys, [&times[..], &["host", "id_hash", "key_hash", "label", "pid"]].concat());
    assert_eq!((&clean["host"], &clean["label"]), (&host.into(), &"a b".into()));
    assert_eq!(clean["pid"], pid);

    let released = run(&server.url(), &["release", "invoice:42", &id]);
    let says = format!("released lock {id} of \"invoice:42\"\n");
    assert_eq!((released.code, released.stdout), (0, says));
    assert_eq!(run(&server.url(), &["lookup", "invoice:42"]).code, 1);
    drop(guard);

    // Another program does not record who holds the lock.
    let record = format!(
        r#"{{"lockId":"{id}","key":"invoice:42","fence":"{fence}","expiresAtMs":9999999999999,"acquiredAtMs":1}}"#
    );
    let mut set = redis::cmd("SET");
    set.arg("syncguard:invoice:42").arg(record).exec(&mut server.connection()).unwrap();
    let theirs = run(&server.url(), &["lookup", "invoice:42"]).stdout;
    assert!(theirs.contains("\nhost          -\npid           -\nlabel         -\n"), "{theirs}");
    let theirs = run(&server.url(), &["lookup", "--json", "invoice:42"]).stdout;
    let theirs: serde_json::Value = serde_json::from_str(&theirs).unwrap();
    for field in ["host", "pid", "label"] {
        assert_eq!(theirs.get(field), Some(&serde_json::Value::Null), "{field}");
    }
}

/// `lookup` names the process of `leasehold lock`, so that an operator can find the child that hangs.
#[test]
fn the_holder_of_a_lock_is_the_command() {
    for store in Store::both() {
        let words =
            ["lock", "--label", "nightly", "it", "--", "sh", "-c", "echo up; exec sleep 99"];
        let mut running = Running::start(&store.url(), &words);
        assert_eq!(running.line(), "up");
        let found = run(&store.url(), &["lookup", "--json", "it"]).stdout;
        let found: serde_json::Value = serde_json::from_str(&found).unwrap();
        assert_eq!(found["pid"], running.pid().as_raw_pid());
        assert_eq!(found["label"], "nightly");
        assert!(found["host"].is_string(), "{found}");
    }
}

/// Each kind alone, and all three under one name.
#[test]
fn all_kinds_with_the_name_are_shown() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let lock = |key: &str| {
            let lock = inspector.client.lock(key).label("nightly").build().unwrap();
            inspector.block_on(lock.acquire()).unwrap()
        };
        let pool = |name: &str| {
            let pool = inspector.client.pool(name, 3).build().unwrap();
            let _id = inspector.block_on(pool.acquire("worker-7")).unwrap().detach();
        };
        let only = lock("invoice:42");
        pool("workers");
        let guards = (lock("it"), inspector.hold("it"));
        pool("it");
        let show = |words: &[&str]| {
            let ended = run(&store.url(), &[&["show"], words].concat());
            assert_eq!((ended.code, &*ended.stderr), (0, ""), "{words:?}");
            ended.stdout
        };
        let json = |name| {
            let shown = show(&["--json", name]);
            assert!(!shown.contains(&only.id().to_string()), "{shown}");
            masked(serde_json::from_str(&shown).unwrap())
        };
        let (pid, host) = (std::process::id(), only_host(&inspector));
        let fence = only.fence();
        let line = format!("{host} {pid} nightly AGE {fence}\n");
        let expected = format!("invoice:42: locked\n\nHOST PID LABEL FOR LEASE LEFT FENCE\n{line}");
        assert_eq!(ageless(&show(&["invoice:42"])), expected);
        let expected = "workers: 1 held\n\nINSTANCE SILENT FOR LEASE LEFT\nworker-7 AGE\n";
        assert_eq!(ageless(&show(&["workers"])), expected);
        let all = ageless(&show(&["it"]));
        let lines: Vec<_> = all.lines().collect();
        assert_eq!(lines[..2], ["Semaphore", "it: 1 of 1 held, 0 waiting"]);
        assert_eq!(lines[5..8], ["", "Lock", "it: locked"], "{all}");
        assert_eq!(lines[11..14], ["", "Pool", "it: 1 held"], "{all}");
        assert_eq!(lines.len(), 17, "{all}");

        let name = if matches!(store, Store::Local(_)) { "local" } else { "redis" };
        let shown = ["invoice:42", "workers", "it"].map(|name| format!("{:#}\n", json(name)));
        insta::assert_snapshot!(format!("show_kinds_json_{name}"), shown.concat());
        drop(guards);
    }
}

fn only_host(inspector: &Inspector) -> String {
    let found = inspector.block_on(inspector.client.locks().lookup("invoice:42")).unwrap().unwrap();
    found.host.unwrap()
}

/// What the user may not read does not hide the rest.
#[test]
fn a_user_with_access_to_semaphores_only() {
    let user = "--user alice on >pw ~adv-sem:* &* +@all";
    let server = RedisServer::start_with(&[user]);
    let url = server.url_with("alice", "pw");
    let _held = Inspector::new(&url).hold("it");
    let ended = run(&url, &["show", "it"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stdout.starts_with("it: 1 of 1 held, 0 waiting\n"), "{ended:?}");
    let prefix = "leasehold: could not check for a lock \"it\": ";
    assert!(ended.stderr.starts_with(prefix), "{ended:?}");
    assert_eq!(run(&url, &["show", "nothing"]).code, 77);
}

#[test]
fn stored_text_is_escaped_for_the_terminal() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let later = "99999999999";
    let call = |connection: &mut redis::Connection, words: &[&str]| {
        let _: redis::Value = redis::cmd(words[0]).arg(&words[1..]).query(connection).unwrap();
    };
    call(&mut connection, &["ZADD", "adv-sem:semaphore_main:a\x1b[2Jb", later, "0123456789abcdef"]);
    let listed = run(&server.url(), &["ls"]).stdout;
    assert!(listed.contains("a\\u{1b}[2Jb"), "{listed:?}");

    // Invisible characters and those that reverse text are escaped, and a pid may not be a number.
    let inspector = Inspector::new(&server.url());
    let semaphore =
        inspector.client.semaphore("it\u{200b}", 1).label("\u{202e}gnp").build().unwrap();
    let _held = inspector.block_on(semaphore.acquire()).unwrap();
    let lock = inspector.client.lock("key\u{2066}").label("\u{feff}\u{2028}").build().unwrap();
    let _locked = inspector.block_on(lock.acquire()).unwrap();
    let client = format!("adv-sem:client:{}", inspector.client.id());
    // The client writes its record in the background, and would overwrite ours.
    let recorded = redis::cmd("HEXISTS").arg(&client).arg("since").clone();
    until(|| recorded.query(&mut connection).unwrap());
    call(&mut connection, &["HSET", &client, "host", "web\u{200e}", "pid", "not a number"]);
    let words = [&["ls"][..], &["show", "it\u{200b}"], &["show", "key\u{2066}"]];
    let all: String = words.iter().map(|words| run(&server.url(), words).stdout).collect();
    let all = all + &run(&server.url(), &["lookup", "--raw", "key\u{2066}"]).stdout;
    let hidden =
        |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{2069}' | '\u{feff}');
    assert!(!all.contains(hidden), "{all:?}");
    let escaped =
        ["it\\u{200b}", "\\u{202e}gnp", "web\\u{200e}", "key\\u{2066}", "\\u{feff}\\u{2028}"];
    for text in escaped {
        assert!(all.contains(text), "{text} is not in {all}");
    }
    let shown = run(&server.url(), &["show", "--json", "it\u{200b}"]);
    let shown: serde_json::Value = serde_json::from_str(&shown.stdout).unwrap();
    assert_eq!(shown["holders"][0]["pid"], serde_json::Value::Null);
}

/// Every check, by name and verdict.
fn verdicts(store: &str) -> Vec<(String, String)> {
    let ended = run(store, &["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let findings = report["findings"].as_array().unwrap().iter();
    let verdict = |finding: &serde_json::Value| {
        let (check, verdict) = (text(&finding["check"]), text(&finding["verdict"]));
        assert_eq!(finding["advice"].is_null(), verdict == "ok", "{finding}");
        (check, verdict)
    };
    findings.map(verdict).collect()
}

fn verdict(store: &str, check: &str) -> String {
    let verdicts = verdicts(store);
    let found = verdicts.iter().find(|(name, _)| name == check);
    found.unwrap_or_else(|| panic!("no {check} in {verdicts:?}")).1.clone()
}

#[test]
fn a_healthy_server() {
    let server = RedisServer::start_with(&["--appendonly yes"]);
    let verdicts = verdicts(&server.url());
    let checks: Vec<_> = verdicts.iter().map(|(check, _)| check.as_str()).collect();
    let expected = [
        "store",
        "reachable",
        "semaphore",
        "lock",
        "pool",
        "round trip",
        "lease",
        "clock",
        "wake-ups",
        "version",
        "memory",
        "persistence",
        "replication",
        "buffer",
    ];
    assert_eq!(checks, expected);
    // These depend on how busy this machine is.
    let measured = ["round trip", "lease"];
    assert!(
        verdicts.iter().all(|(check, verdict)| verdict == "ok" || measured.contains(&&**check))
    );
    let text = run(&server.url(), &["doctor"]).stdout;
    assert!(text.starts_with("ok    store        redis://127.0.0.1:"), "{text}");
    assert!(text.contains("\nok    reachable    yes, after "), "{text}");
    assert!(text.contains("   lease        at least "), "{text}");
    assert!(!text.contains('\x1b'), "colours are for terminals");
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    let text = run(&store.url(), &["doctor"]).stdout;
    assert!(text.contains("   lease        locks and pools: at least "), "{text}");
}

#[test]
fn a_server_with_a_small_buffer_for_wake_ups() {
    for (limits, verdict) in [("32768 0 0", "warning"), ("0 65536 60", "warning"), ("0 0 0", "ok")]
    {
        let limits = format!("--client-output-buffer-limit pubsub {limits}");
        let server = RedisServer::start_with(&[&limits]);
        assert_eq!(self::verdict(&server.url(), "buffer"), verdict, "{limits}");
        let text = run(&server.url(), &["doctor"]).stdout;
        let advice = "-> CONFIG SET client-output-buffer-limit \"pubsub 33554432 8388608 60\"";
        assert_eq!(text.contains(advice), verdict == "warning", "{text}");
    }
}

/// Neither with the URL of the store, nor with its errors, nor with errors in the command line.
#[test]
fn no_secret_is_printed() {
    let nowhere = tempfile::tempdir().unwrap();
    let socket = nowhere.path().join("x.sock");
    let stores = [
        format!("unix://{}?user=joe&pass=hunter2", socket.display()),
        format!("redis+unix://{}?pass=x@hunter2", socket.display()),
        "redis://joe:hunter2@127.0.0.1:1".to_owned(),
        "redis://joe:x?hunter2@127.0.0.1:1".to_owned(),
        "redis://joe:hunter2@127.0.0.1:1/x".to_owned(),
        "redis-cluster://joe:hunter2@127.0.0.1:1".to_owned(),
        "redis-cluster://joe:x/hunter2@127.0.0.1:1".to_owned(),
        "redis-cluster://joe:x?hunter2@127.0.0.1:1".to_owned(),
        "redis-sentinel://joe:hunter2@127.0.0.1:1/m?sentinel_password=hunter2".to_owned(),
        "rediss-sentinel://joe:x/hunter2@127.0.0.1:1/m".to_owned(),
        "joe:hunter2@127.0.0.1".to_owned(),
        "memory:hunter2".to_owned(),
    ];
    let commands =
        [&["ls"][..], &["doctor"], &["doctor", "--json"], &["run", "-v", "it", "--", "true"]];
    std::thread::scope(|scope| {
        for (store, command) in stores.iter().flat_map(|one| commands.map(|words| (one, words))) {
            scope.spawn(move || {
                let ended = run(store, command);
                assert!([64, 69].contains(&ended.code), "{store} {command:?}: {ended:?}");
                let output = ended.stdout + &ended.stderr;
                assert!(!output.contains("hunter2"), "{store} {command:?}: {output}");
            });
        }
    });
    let url = "redis://joe:hunter2@127.0.0.1:1";
    for words in [&["ls", url][..], &["ls", &format!("--json={url}")], &["run", url, "true"]] {
        let ended = run("", words);
        assert_eq!(ended.code, 64, "{words:?}: {ended:?}");
        assert!(!ended.stderr.contains("hunter2"), "{words:?}: {ended:?}");
    }
}

/// An argument that is not UTF-8 must not cause a panic.
#[test]
fn an_error_in_arguments_that_are_not_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"\xff");
    let ended = run("", &["run".as_ref(), "--frobnicate".as_ref(), odd]);
    assert_eq!(ended.code, 64, "{ended:?}");
}

#[test]
fn servers_on_which_leases_are_in_danger() {
    let server = RedisServer::start_with(&["--maxmemory 100mb", "--maxmemory-policy allkeys-lru"]);
    assert_eq!(verdict(&server.url(), "memory"), "bad");
    assert_eq!(run(&server.url(), &["doctor"]).code, 1);
    assert_eq!(verdict(&server.url(), "persistence"), "warning");
    let replica = format!("--replicaof 127.0.0.1 {}", server.port());
    let replica = RedisServer::start_with(&[&replica, "--replica-read-only no"]);
    assert_eq!(verdict(&replica.url(), "replication"), "bad");
    assert_eq!(run(&replica.url(), &["doctor", "--json"]).code, 1);
    until(|| verdict(&server.url(), "replication") == "warning");
}

/// Warnings do not fail a deployment: the exit code is 0.
#[test]
fn a_server_with_warnings_only() {
    let server = RedisServer::start();
    let ended = run(&server.url(), &["doctor"]);
    assert!(ended.stdout.contains("\nwarn  persistence "), "{}", ended.stdout);
    assert_eq!(ended.code, 0, "{}", ended.stdout);
}

/// Otherwise a mistyped path would be created, and reported as good.
#[test]
fn the_doctor_makes_no_store() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("typo/store.db");
    let ended = run(&format!("sqlite:{}", path.display()), &["doctor"]);
    assert_eq!((ended.code, &*ended.stderr), (69, ""));
    let expected = format!("\nbad   reachable    there is no store at {}\n", path.display());
    assert!(ended.stdout.contains(&expected), "{}", ended.stdout);
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "a file was created");
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    assert_eq!(run(&store.url(), &["doctor"]).code, 0);
}

#[test]
fn a_user_with_too_few_permissions() {
    let user = "--user alice on >pw ~adv-sem:* &* +@all -@admin";
    let server = RedisServer::start_with(&[user]);
    let url = server.url_with("alice", "pw");
    let ended = run(&url, &["doctor"]);
    assert_eq!(ended.code, 77, "{}", ended.stdout);
    let mut lines = ended.stdout.lines();
    let lock = lines.find(|line| line.starts_with("bad   lock ")).expect("a line about locks");
    assert!(lock.contains("missing permission"), "{lock}");
    assert!(ended.stdout.contains("-> let the server's ACL allow it"), "{}", ended.stdout);
    assert_eq!(verdict(&url, "semaphore"), "ok");
}

/// Without the permission, every waiter starts up to a second late.
#[test]
fn a_user_without_permission_to_publish() {
    let server = RedisServer::start_with(&["--user alice on >pw ~* &* +@all -publish"]);
    let url = server.url_with("alice", "pw");
    let ended = run(&url, &["doctor"]);
    assert_eq!(ended.code, 1, "{}", ended.stdout);
    assert!(ended.stdout.contains("bad   wake-ups "), "{}", ended.stdout);
    assert!(ended.stdout.contains("PUBLISH"), "{}", ended.stdout);
    assert!(ended.stdout.contains("the channels adv-sem:wake:*"), "{}", ended.stdout);
    let store = RedisServer::start();
    assert_eq!(verdict(&store.url(), "wake-ups"), "ok");
}

#[test]
fn a_reader_that_has_read_enough() {
    let mut child = leasehold("")
        .args(["completions", "bash"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    std::io::stdout().flush().unwrap();
}
