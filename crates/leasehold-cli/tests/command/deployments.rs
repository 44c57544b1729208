//! The command on a cluster, and on a primary behind sentinels.

use std::sync::LazyLock;

use serde_json::Value;
use testkit::redis_cluster::RedisCluster;
use testkit::redis_sentinel::{Options, RedisSentinel};
use testkit::redis_server::RedisServer;

use crate::support::{Ended, Inspector, Running, TIME_LIMIT, run, until};

/// The name that `doctor` acquires.
const TRIAL: &str = "leasehold-doctor";

/// Shared by tests that break nothing: each uses its own names.
static CLUSTER: LazyLock<RedisCluster> = LazyLock::new(|| RedisCluster::start_with(5000, &[]));

/// Returns a name that this node of a cluster serves.
fn name_on(cluster: &RedisCluster, node: usize, prefix: &str) -> String {
    let mut names = (0..).map(|number| format!("{prefix}-{number}"));
    names.find(|name| cluster.primary_of_key(name) == node).unwrap()
}

#[track_caller]
fn ok(store: &str, arguments: &[&str]) -> String {
    let ended = run(store, arguments);
    assert_eq!((ended.code, &*ended.stderr), (0, ""), "{arguments:?}: {ended:?}");
    ended.stdout
}

fn json(store: &str, arguments: &[&str]) -> Value {
    serde_json::from_str(&ok(store, arguments)).unwrap()
}

/// Runs `doctor` until its report contains all of these texts, and returns the last report.
#[track_caller]
fn examine(store: &str, expected: &[&str]) -> Ended {
    let mut last = run(store, &["doctor"]);
    // A node learns of the failure of another a moment later.
    until(|| {
        let complete = expected.iter().all(|text| last.stdout.contains(text));
        if !complete {
            println!("{}", last.stdout);
            last = run(store, &["doctor"]);
        }
        complete
    });
    last
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn every_command_works_on_a_cluster() {
    let url = CLUSTER.url();
    let names = [0, 1, 2].map(|node| name_on(&CLUSTER, node, "all"));
    let sleep = ["--", "sh", "-c", "echo begun; exec sleep 1000"];
    let start = |kind: &str, name: &str| {
        let mut running = Running::start(&url, &[&[kind, name], &sleep[..]].concat());
        assert_eq!(running.line(), "begun");
        running
    };
    let mut running: Vec<_> = names.iter().map(|name| start("run", name)).collect();
    let locked: Vec<_> = names.iter().map(|name| start("lock", name)).collect();

    let listed = json(&url, &["ls", "--json"]);
    let listed_names = |kind: &str, field: &str| {
        let all = listed[kind].as_array().unwrap().iter();
        let all = all.map(|one| one[field].as_str().unwrap().to_owned());
        let mut all: Vec<_> = all.filter(|name| name.starts_with("all-")).collect();
        all.sort();
        all
    };
    let mut expected = names.to_vec();
    expected.sort();
    assert_eq!(listed_names("semaphores", "name"), expected, "without hash tags");
    assert_eq!(listed_names("locks", "key"), expected, "without hash tags");
    assert!(!ok(&url, &["ls"]).contains('{'));

    for name in &names {
        let shown = json(&url, &["show", "--json", name]);
        assert_eq!((&shown["held"], &shown["capacity"]), (&1.into(), &1.into()));
        assert_eq!(ok(&url, &["limit", name, "2"]), format!("{name}: 2 permits\n"));
        ok(&url, &["run", name, "--", "true"]);
        ok(&url, &["pause", name, "--reason", "a move"]);
        let refused = run(&url, &["run", "--no-wait", name, "--", "true"]);
        assert_eq!(refused.code, 75, "{refused:?}");
        assert!(refused.stderr.contains(": a move"), "{refused:?}");
        ok(&url, &["resume", name]);
        assert_eq!(run(&url, &["lock", "--no-wait", name, "--", "true"]).code, 75);
        assert!(ok(&url, &["lookup", name]).contains("fence"));
    }
    let id = json(&url, &["show", "--json", &names[1]])["holders"][0]["id"].clone();
    let released = run(&url, &["release", &names[1], id.as_str().unwrap()]);
    assert_eq!(released.code, 0, "{released:?}");
    until(|| Inspector::new(&url).held_and_waiting(&names[1]) == (0, 0));
    running.extend(locked);
    for one in &running {
        one.signal(rustix::process::Signal::TERM);
    }
    for one in running {
        one.end();
    }
    for name in &names {
        ok(&url, &["forget", name, "--yes"]);
    }
    let bench = json(&url, &["bench", "--for", "700ms", "--json"]);
    assert_eq!(bench["figures"].as_array().unwrap().len(), 7);
}

#[test]
fn a_healthy_cluster() {
    let url = CLUSTER.url();
    let addresses = CLUSTER.addresses();
    let ended = examine(&url, &[&format!("{} replica of {}, link up", addresses[3], addresses[0])]);
    assert_eq!(ended.code, 0, "{}", ended.stdout);
    let text = ended.stdout;
    for expected in [
        "\nok    cluster      state ok, 3 primaries, 3 replicas, all slots are served\n",
        &format!("\nok    node         {} primary, slots 0-5460, 1 replica, ", addresses[0]),
        "\nwarn  coverage     cluster-require-full-coverage yes: while the slots of one primary",
        "\nwarn  replication  1 replica, asynchronous: a failover may forget",
    ] {
        assert!(text.contains(expected), "no {expected:?} in {text}");
    }
    assert_eq!(count(&text, "   node         "), 6, "{text}");
    for check in ["clock", "version", "memory", "persistence", "replication", "coverage"] {
        assert_eq!(count(&text, &format!("  {check:<12} ")), 1, "{check} in {text}");
    }
    assert_eq!(count(&text, "\nbad "), 0, "{text}");

    let report = json(&url, &["doctor", "--json"]);
    let cluster = &report["cluster"];
    assert_eq!(
        (&cluster["state"], &cluster["unserved_slots"]),
        (&"ok".into(), &Value::Array(vec![]))
    );
    let nodes = cluster["nodes"].as_array().unwrap();
    let roles: Vec<_> = nodes.iter().map(|node| node["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["primary", "replica"].repeat(3));
    assert_eq!(nodes[5]["primary"], nodes[4]["address"]);
    assert_eq!((&nodes[4]["slots"][0], &nodes[5]["link"]), (&"10922-16383".into(), &"up".into()));
}

/// The waiter keeps its place, `doctor` lists what is down, and the names of other primaries are served.
#[test]
fn a_command_waits_through_a_failover_of_a_cluster() {
    let cluster = RedisCluster::start_with(1000, &["--cluster-require-full-coverage no"]);
    let url = cluster.url();
    // Not the primary of the name that `doctor` uses.
    let trial = cluster.primary_of_key(TRIAL);
    let primary = (trial + 1) % 3;
    let name = name_on(&cluster, primary, "it");
    let inspector = Inspector::new(&url);
    let held = inspector.hold(&name);
    let waiting = Running::start(&url, &["run", "-v", &name, "--", "echo", "ran"]);
    until(|| inspector.held_and_waiting(&name) == (1, 1));
    let replicated: u64 =
        redis::cmd("WAIT").arg((1, 10_000)).query(&mut cluster.connection(primary)).unwrap();
    assert_eq!(replicated, 1);
    cluster.kill(primary);
    let promoted = cluster.wait_failover(primary, TIME_LIMIT);
    assert!(inspector.block_on(held.release()).unwrap());
    let ended = waiting.end();
    assert_eq!((ended.code, &*ended.stdout), (0, "ran\n"), "{ended:?}");
    // The outage may be too short to be reported.
    let outage = format!("redis://{} of {url} cannot be reached: ", cluster.addresses()[primary]);
    let outages = ended.stderr.lines().filter(|line| line.contains("cannot be reached"));
    assert!(outages.clone().all(|line| line.contains(&outage)), "{ended:?}");

    let addresses = cluster.addresses();
    let down = format!("warn  node         {} primary without slots, does not", addresses[primary]);
    let alone =
        "warn  replication  a primary without replicas: if it fails, no node serves its slots";
    let ended = examine(&url, &[&down, &format!("{alone} ({})", addresses[promoted])]);
    assert_eq!(ended.code, 0, "{}", ended.stdout);
    assert!(ended.stdout.contains("\nok    coverage     "), "{}", ended.stdout);

    cluster.kill(promoted);
    let lost = "\nbad   slots        no node serves 546";
    let down = format!("\nbad   node         {} primary, slots ", addresses[promoted]);
    let ended = examine(&url, &[lost, &down, "failed according to the others"]);
    assert_eq!(ended.code, 1, "{}", ended.stdout);
    assert_eq!(run(&url, &["run", TRIAL, "--", "true"]).code, 0);
    let ended = run(&url, &["run", "--wait", "1s", &name, "--", "true"]);
    assert_eq!(ended.code, 69, "{ended:?}");
    // A list without the names of the lost slots would look complete.
    let ended = run(&url, &["ls"]);
    assert_eq!((ended.code, &*ended.stdout), (69, ""), "{ended:?}");
    assert!(ended.stderr.contains(&addresses[promoted]), "{ended:?}");
}

#[test]
fn sentinels_that_fail_and_disagree() {
    let options = Options {
        password: Some("secret"),
        sentinel_password: Some("other"),
        ..Options::default()
    };
    let set = RedisSentinel::start_with(options);
    let with_passwords = |url: &str| {
        let url = url.replace("redis-sentinel://", "redis-sentinel://:secret@");
        url + "?sentinel_password=other"
    };
    let url = with_passwords(&set.url_of(&[0, 1]));
    let (servers, sentinels) = (set.addresses(), set.sentinel_addresses());

    let ended = examine(&url, &[&format!("{} replica of {}, link up", servers[2], servers[0])]);
    assert_eq!(ended.code, 0, "{}", ended.stdout);
    for expected in [
        "\nok    quorum       3 of 3 answer; a failover needs 2, the quorum is 2\n",
        &format!("\nok    primary      {}, all sentinels that answer name it\n", servers[0]),
        &format!("\nok    node         {} primary, 2 replicas, answers in ", servers[0]),
        "\nwarn  replication  2 replicas, asynchronous: a failover may forget",
        "\nok    version      ",
    ] {
        assert!(ended.stdout.contains(expected), "no {expected:?} in {}", ended.stdout);
    }
    assert_eq!(count(&ended.stdout, "\nok    sentinel     "), 3, "{}", ended.stdout);
    let report = json(&url, &["doctor", "--json"]);
    assert_eq!(report["sentinel"]["quorum"], 2);
    assert_eq!(report["sentinel"]["primary"], *servers[0]);

    let set_least = |least: u32| {
        let mut set_it = redis::cmd("CONFIG");
        set_it.arg(("SET", "min-replicas-to-write", least));
        set_it.exec(&mut set.server(0).connection()).unwrap();
    };
    set_least(1);
    let differs = format!("{} has min-replicas-to-write 0, and its primary 1\n", servers[1]);
    let bounded = "newest leases; min-replicas-to-write 1 limits how many\n";
    let ended = examine(&url, &[&format!("\nwarn  settings     {differs}"), bounded]);
    assert_eq!(ended.code, 0, "{}", ended.stdout);
    set_least(3);
    let refuses =
        "\nbad   replication  2 replicas, and min-replicas-to-write is 3: it refuses writes\n";
    assert_eq!(examine(&url, &[refuses]).code, 69);
    set_least(0);

    let inspector = Inspector::new(&url);
    let held = inspector.hold("it");
    let waiting = Running::start(&url, &["run", "-v", "it", "--", "echo", "ran"]);
    until(|| inspector.held_and_waiting("it") == (1, 1));
    let primary = set.failover();
    assert!(inspector.block_on(held.release()).unwrap());
    let ended = waiting.end();
    assert_eq!((ended.code, &*ended.stdout), (0, "ran\n"), "{ended:?}");
    ok(&url, &["lock", "it", "--", "true"]);
    assert!(ok(&url, &["ls", "--all"]).contains("\nit "));

    let stale = with_passwords(&set.url_of(&[0, set.stale_sentinel((primary + 1) % 3)]));
    let ended = examine(&stale, &["\nbad   primary      the sentinels disagree: they name "]);
    assert_eq!(ended.code, 1, "{}", ended.stdout);

    set.kill_sentinel(1);
    let down = format!("\nwarn  sentinel     {} does not answer: Connection refused", sentinels[1]);
    let ended = examine(&url, &[&down, "\nok    quorum       2 of 3 answer"]);
    assert_eq!(ended.code, 0, "{}", ended.stdout);
    set.kill_sentinel(2);
    let ended = examine(&url, &["\nbad   quorum       1 of 3 answer; a failover needs 2"]);
    assert_eq!(ended.code, 1, "{}", ended.stdout);
    set.kill(primary);
    let down = format!("\nbad   node         {} primary, 2 replicas, does not", servers[primary]);
    let ended = examine(&url, &["\nbad   reachable    ", &down, ", and cannot reach it\n"]);
    assert_eq!(ended.code, 69, "{}", ended.stdout);
}

/// The error names the URL that fits.
#[test]
fn urls_of_another_kind_of_store() {
    let (server, set) = (RedisServer::start(), RedisSentinel::start());
    let (node, sentinel) = (&CLUSTER.addresses()[0], &set.sentinel_addresses()[0]);
    let port = server.port();
    for (store, says) in [
        (
            format!("redis://{node}"),
            format!("the server is a cluster node: use redis-cluster://{node}"),
        ),
        (
            format!("redis-cluster://127.0.0.1:{port}"),
            format!("the server is not a cluster node: use redis://127.0.0.1:{port}"),
        ),
        (
            format!("redis://{sentinel}"),
            format!(
                "the server is a sentinel: use redis-sentinel://{sentinel}/NAME, with the name of the primary"
            ),
        ),
        (
            format!("redis-sentinel://127.0.0.1:{port}/mymaster"),
            "the server is not a sentinel: use redis:// for a single server".to_owned(),
        ),
        (
            format!("redis-sentinel://{sentinel}/other"),
            "the sentinel knows no primary \"other\": use the name from its configuration"
                .to_owned(),
        ),
    ] {
        for command in [&["ls"][..], &["run", "it", "--", "true"]] {
            let ended = run(&store, command);
            assert_eq!((ended.code, &*ended.stdout), (77, ""), "{store}: {ended:?}");
            assert_eq!(ended.stderr.lines().count(), 1, "{store}: {ended:?}");
            assert!(ended.stderr.contains(&says), "{store}: {ended:?}");
        }
        let ended = run(&store, &["doctor"]);
        assert_eq!(ended.code, 77, "{store}: {}", ended.stdout);
        assert!(ended.stdout.contains(&says), "{store}: {}", ended.stdout);
        assert_eq!(count(&ended.stdout, "bad "), 1, "{store}: {}", ended.stdout);
    }
    for (store, says) in [
        ("redis-sentinel://127.0.0.1:1", "the name of the primary is missing"),
        ("redis-cluster://127.0.0.1:1/3", "it selects a database; a cluster has only database 0"),
        ("redis-clusters://127.0.0.1:1", "redis-cluster://host:port"),
    ] {
        let ended = run(store, &["ls"]);
        assert_eq!(ended.code, 64, "{store}: {ended:?}");
        assert!(ended.stderr.contains(says), "{store}: {ended:?}");
    }
}

#[test]
fn a_cluster_over_tls_with_users() {
    let user = "--user alice on >pw ~* &* +@all -@admin -cluster|nodes -config -info";
    let cluster = RedisCluster::start_tls(&["--requirepass secret", user]);
    let url = cluster.url_with("", "secret");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    std::fs::write(&file, cluster.ca_certificate().unwrap()).unwrap();
    let trust = ["--ca-certificate", file.to_str().unwrap()];
    ok(&url, &[&["run"], &trust[..], &["it", "--", "true"]].concat());
    let examined = run(&url, &[&["doctor"], &trust[..]].concat());
    assert_eq!(examined.code, 0, "{}", examined.stdout);
    assert_eq!(count(&examined.stdout, "   node         "), 6, "{}", examined.stdout);
    assert!(!examined.stdout.contains("secret") && !examined.stdout.contains("does not answer"));
    let stranger = run(&url, &["doctor"]);
    assert_eq!(stranger.code, 77, "{}", stranger.stdout);
    assert!(stranger.stdout.contains("-> give its certificate as --ca-certificate\n"));

    // Alice may use the store, but not inspect it.
    let url = cluster.url_with("alice", "pw");
    let examined = run(&url, &[&["doctor"], &trust[..]].concat());
    assert_eq!(examined.code, 0, "{}", examined.stdout);
    let advice = "-> allow the user +cluster|nodes and +cluster|info, and run this again\n";
    assert_eq!(count(&examined.stdout, advice), 3, "{}", examined.stdout);
}
