//! Where data is on a Redis server: the command can choose all that a program can choose.

use leasehold::Client;
use testkit::redis_server::RedisServer;

use crate::support::{Ended, Inspector, Store, ended, leasehold, run};

const PLACE: [(&str, &str); 2] =
    [("LEASEHOLD_NAMESPACE", "billing"), ("LEASEHOLD_LOCK_PREFIX", "bill:")];

/// Runs the command with environment variables.
fn run_with(store: &str, variables: &[(&str, &str)], arguments: &[&str]) -> Ended {
    let variables = variables.iter().copied();
    ended(leasehold(store).envs(variables).args(arguments).output().unwrap())
}

#[test]
fn a_namespace_and_a_lock_prefix() {
    let server = RedisServer::start();
    let url = server.url();
    let inspector = Inspector::new(&url);
    let program = Client::redis_builder(&url).namespace("billing").lock_prefix("bill:").open();
    let program = inspector.block_on(program).unwrap();
    let _held = inspector.block_on(program.semaphore("it", 1).build().unwrap().acquire()).unwrap();
    let _locked = inspector.block_on(program.lock("k1").build().unwrap().acquire()).unwrap();

    assert_eq!(run(&url, &["ls"]).stdout, "no holders and no waiters\n");
    let place = ["--namespace", "billing", "--lock-prefix", "bill:"];
    for (words, code) in [
        (&["show", "it"][..], 0),
        (&["lookup", "k1"], 0),
        (&["run", "--no-wait", "it", "--", "true"], 75),
        (&["lock", "--no-wait", "k1", "--", "true"], 75),
        (&["doctor"], 0),
    ] {
        let here = [&words[..1], &place, &words[1..]].concat();
        let by_option = run(&url, &here);
        assert_eq!(by_option.code, code, "{here:?}: {by_option:?}");
        let by_variable = run_with(&url, &PLACE, words);
        assert_eq!(by_variable.code, code, "{words:?}: {by_variable:?}");
    }
    let listed = run_with(&url, &PLACE, &["ls"]).stdout;
    assert!(listed.contains("\nit ") && listed.contains("\nk1 "), "{listed}");
    // An option overrides the variable.
    let elsewhere = run_with(&url, &PLACE, &["show", "--namespace", "other", "it"]);
    assert_eq!(elsewhere.code, 1, "{elsewhere:?}");
    let empty = run(&url, &["ls", "--namespace", ""]);
    assert_eq!(empty.code, 64, "{empty:?}");
    // An empty variable counts as unset.
    assert_eq!(run_with(&url, &[("LEASEHOLD_NAMESPACE", "")], &["ls"]).code, 0);
}

#[test]
fn a_user_of_another_namespace_gets_the_missing_permissions() {
    let server = RedisServer::start_with(&["--user alice on >pw ~x &* +@all -@admin"]);
    let url = server.url_with("alice", "pw");
    let advice = |words: &[&str]| {
        let ended = run(&url, words);
        assert_eq!(ended.code, 77, "{ended:?}");
        let (_, advice) = ended.stdout.split_once("let the server's ACL allow it, for ").unwrap();
        advice.lines().next().unwrap().to_owned()
    };
    let usual = "the keys adv-sem:*, syncguard:* and semaphores:* and the channels adv-sem:wake:*";
    assert_eq!(advice(&["doctor"]), usual);
    let ours = "the keys billing:*, bill:* and semaphores:* and the channels billing:wake:*";
    for prefix in ["bill", "bill:"] {
        assert_eq!(advice(&["doctor", "--namespace", "billing", "--lock-prefix", prefix]), ours);
    }
}

#[test]
fn an_authority_of_ones_own() {
    let server = RedisServer::start_tls(&[]);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    std::fs::write(&file, server.ca_certificate().unwrap()).unwrap();
    let file = file.to_str().unwrap();
    let variable = [("LEASEHOLD_CA_CERTIFICATE", file)];

    let words = ["ls", "--ca-certificate", file];
    assert_eq!(run(&server.url(), &words).code, 0);
    assert_eq!(run_with(&server.url(), &variable, &["ls"]).code, 0);
    let examined = run_with(&server.url(), &variable, &["doctor"]);
    assert_eq!(examined.code, 0, "{examined:?}");
    assert!(examined.stdout.contains("\nok    version "), "{}", examined.stdout);
    let stranger = run(&server.url(), &["doctor"]);
    assert_eq!(stranger.code, 77, "{stranger:?}");
    assert!(stranger.stdout.contains("as --ca-certificate\n"), "{}", stranger.stdout);

    // Without TLS the option is a mistake, but the variable may be meant for other stores.
    let plain = RedisServer::start();
    let mistaken = run(&plain.url(), &words);
    assert_eq!(mistaken.code, 64, "{mistaken:?}");
    assert!(mistaken.stderr.contains("the URL does not use TLS"), "{mistaken:?}");
    assert_eq!(run_with(&plain.url(), &variable, &["ls"]).code, 0);
    let missing = run(&server.url(), &["ls", "--ca-certificate", "/nowhere/ca.pem"]);
    assert_eq!(missing.code, 64, "{missing:?}");
    let prefix = "leasehold: the certificate \"/nowhere/ca.pem\" cannot be read: No such file";
    assert!(missing.stderr.starts_with(prefix), "{missing:?}");
}

/// This takes as long as the connect time-out: the server waits for the end of a line.
#[test]
fn a_server_without_tls() {
    let server = RedisServer::start();
    let url = format!("rediss://127.0.0.1:{}", server.port());
    std::thread::scope(|scope| {
        for command in ["ls", "doctor"] {
            let url = &url;
            scope.spawn(move || {
                let ended = run(url, &[command]);
                assert_eq!(ended.code, 69, "{ended:?}");
                let output = ended.stdout + &ended.stderr;
                assert!(output.contains("write redis instead of rediss"), "{output}");
            });
        }
    });
}

#[test]
fn options_of_redis_are_refused_for_a_file() {
    let store = Store::local();
    for option in ["--namespace", "--lock-prefix", "--lock-layout", "--ca-certificate"] {
        let ended = run(&store.url(), &["run", option, "x", "it", "--", "true"]);
        let message =
            "is for Redis, but the store is a file: leave it out, or give a Redis URL as --store";
        assert_eq!((ended.code, ended.stderr), (64, format!("leasehold: {option} {message}\n")));
    }
    let all = [&PLACE[..], &[("LEASEHOLD_CA_CERTIFICATE", "/nowhere/ca.pem")]].concat();
    let ended = run_with(&store.url(), &all, &["run", "it", "--", "true"]);
    assert_eq!((ended.code, &*ended.stderr), (0, ""));
}

#[test]
fn an_unknown_lock_layout_is_refused() {
    let server = RedisServer::start();
    let ended = run(&server.url(), &["lock", "--lock-layout", "syncguard-3", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{ended:?}");
    assert!(ended.stderr.contains("syncguard-1 or syncguard-2"), "{ended:?}");
    let line = ["lock", "--lock-layout", "syncguard-2", "it", "--", "true"];
    assert_eq!(run(&server.url(), &line).code, 0);
    let ended = run(&server.url(), &["lock", "it", "--", "true"]);
    assert_eq!(ended.code, 64, "{ended:?}");
    assert!(ended.stderr.contains("--lock-layout"), "{ended:?}");
}
