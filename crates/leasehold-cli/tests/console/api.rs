//! What scripts, Prometheus and supervisors receive, and names of all kinds.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::redis_server::RedisServer;

use crate::client::Console;
use crate::support::{Inspector, Running, Store, run, until};

/// Names that could be misread in a path, a query, a page or a label.
const NAMES: [&str; 12] = [
    "a/b",
    "a b",
    "100%",
    "%2F",
    "..",
    "é 夜 🦀",
    "a&name=b",
    "a\"b\\c",
    "<b>x</b>",
    "+",
    "'",
    "a#b?c",
];

fn encoded(name: &str) -> String {
    form_urlencoded::byte_serialize(name.as_bytes()).collect()
}

#[test]
fn any_name_has_a_page_an_address_and_metrics() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    for name in NAMES {
        assert_eq!(run(&store.url(), &["run", "-n", "2", name, "--", "true"]).code, 0, "{name}");
    }
    let held = inspector.hold("bi\u{202e}di");
    let console = Console::start(&store.url());
    let page = console.get("/").body;
    for name in NAMES {
        let path = format!("/semaphore?name={}", encoded(name));
        let linked = path.replace('&', "&amp;").replace('\'', "&#39;");
        assert!(page.contains(&format!("\"{linked}\"")), "{name} is not linked as {linked}");
        let shown = console.get(&path);
        assert_eq!(shown.status, 200, "{name}");
        let by_query = console.json(&format!("/api/semaphores?name={}", encoded(name)));
        assert_eq!(by_query["name"], name);
        // A client may resolve dots before it sends the request.
        let path = encoded(name).replace('+', "%20").replace('.', "%2E");
        assert_eq!(console.json(&format!("/api/semaphores/{path}"))["name"], name);
        assert_eq!(console.json(&format!("/api/history?name={}", encoded(name)))["name"], name);
    }
    assert!(!page.contains("<b>x</b>"));
    assert!(page.contains("bi\\u{202e}di</bdi>"), "characters that reverse text are escaped");
    assert_eq!(console.get("/semaphore?name=unknown").status, 404);
    assert_eq!(console.get("/semaphore").status, 404);
    assert_eq!(console.get("/api/semaphores/%ff").status, 400);
    assert_eq!(console.get("/api/history?name=unknown").status, 404);

    let metrics = console.get("/metrics");
    assert_eq!(metrics.kind(), "text/plain; version=0.0.4; charset=utf-8");
    promtool(&metrics.body);
    for line in [
        "leasehold_store_up 1",
        "leasehold_store_semaphore_capacity{name=\"a\\\"b\\\\c\"} 2",
        "leasehold_store_semaphore_held_units{name=\"bi\u{202e}di\"} 1",
        "leasehold_store_semaphore_waiting{name=\"a/b\"} 0",
    ] {
        assert!(metrics.body.lines().any(|found| found == line), "{line} not in {}", metrics.body);
    }
    drop(held);
}

/// Checks the metrics with Prometheus's own tool.
fn promtool(metrics: &str) {
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    let tool = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut tool = tool.expect("promtool is installed: scripts/test does it");
    tool.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let ended = tool.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let result = (ended.status.code(), text(ended.stdout), text(ended.stderr));
    assert_eq!(result, (Some(0), String::new(), String::new()));
}

#[test]
fn the_api_has_the_data_of_the_pages() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let console = Console::start(&store.url());
        let permit = inspector.hold("it");
        let lock = inspector.client.lock("key").label("cron").build().unwrap();
        let guard = inspector.block_on(lock.acquire()).unwrap();
        until(|| console.json("/api/overview")["locks"] == 1);
        let overview = console.json("/api/overview");
        assert_eq!((&overview["semaphores"], &overview["held_units"]), (&1.into(), &1.into()));
        assert!(overview["outage"].is_null() && overview["read_at"].is_string(), "{overview}");

        let one = console.json("/api/semaphores/it");
        let shown: serde_json::Value =
            serde_json::from_str(&run(&store.url(), &["show", "--json", "it"]).stdout).unwrap();
        for key in shown.as_object().unwrap().keys().filter(|key| *key != "also") {
            assert!(one.get(key).is_some(), "{key} is in `show --json`, and not in {one}");
        }
        assert_eq!(one["holders"][0]["id"], permit.id().to_string());
        let all = console.json("/api/semaphores");
        assert_eq!(all["semaphores"][0]["name"], "it");
        let locks = console.json("/api/locks");
        assert_eq!(
            (&locks["locks"][0]["key"], &locks["locks"][0]["label"]),
            (&"key".into(), &"cron".into())
        );
        assert!(console.json("/api/clients")["clients"].to_string().contains("\"it\""));
        assert_eq!(console.json("/api/history")["step_seconds"], 10);

        let granted = console.json("/api/events");
        let events = granted["events"].as_array().unwrap();
        let grant = events.iter().find(|event| event["name"] == "it").unwrap();
        assert_eq!(grant["event"], "granted");
        let path = format!("/api/events?after={}", events.last().unwrap()["number"]);
        assert_eq!(console.json(&path)["events"].as_array().unwrap().len(), 0);
        assert_eq!(console.get("/api/nothing").status, 404);
        assert_eq!(console.request("DELETE", "/api/locks", "", "").status, 405);
        drop((permit, guard));
    }
}

#[test]
fn a_long_queue_is_cut_off() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let held = inspector.hold("it");
    let semaphore = inspector.client.semaphore("it", 1).build().unwrap();
    let join = async { (0..203).map(|_| tokio::spawn(semaphore.acquire())).collect::<Vec<_>>() };
    let _waiters = inspector.block_on(join);
    until(|| inspector.held_and_waiting("it") == (1, 203));
    let console = Console::start(&store.url());
    let shown = console.json("/api/semaphores/it");
    assert_eq!((&shown["waiting"], &shown["waiters_left_off"]), (&203.into(), &3.into()));
    assert_eq!(shown["waiters"].as_array().unwrap().len(), 200);
    let page = console.get("/semaphore?name=it").body;
    assert!(page.contains("and 3 more."), "{page}");
    drop(held);
}

#[test]
fn a_user_that_may_only_read_is_enough() {
    let rights = "--user inspector on >pw ~* resetchannels &adv-sem:* +@read +@connection +@pubsub +eval +evalsha +script|load \
                  +time +info";
    let server = RedisServer::start_with(&[rights]);
    let inspector = Inspector::new(&server.url());
    let permit = inspector.hold("it");
    let console = Console::start(&server.url_with("inspector", "pw"));
    until(|| console.json("/api/overview")["semaphores"] == 1);
    assert_eq!(console.json("/api/semaphores/it")["held"], 1);
    drop(permit);
}

#[test]
fn the_dashboard_shows_metrics_that_exist() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let pool = inspector.client.pool("pool", 1).build().unwrap();
    let held = (inspector.hold("it"), inspector.block_on(pool.acquire("one")).unwrap());
    let console = Console::start(&store.url());
    let metrics = console.get("/metrics").body;
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana-dashboard.json");
    let dashboard = std::fs::read_to_string(path).unwrap();
    let _: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let mut shown = 0;
    for part in dashboard.split("leasehold_store_").skip(1) {
        let end = part.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap();
        let metric = format!("leasehold_store_{}", &part[..end]);
        assert!(metrics.contains(&format!("\n# TYPE {metric} ")), "{metric} is not in {metrics}");
        shown += 1;
    }
    assert!(shown > 10);
    drop(held);
}

#[test]
fn the_first_page_after_an_idle_period_is_new() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        // A poll that takes long, because the machine is busy, is followed by a longer pause: another console may do better.
        let is_new = (0..5).any(|attempt| {
            let console = Console::start(&store.url());
            std::thread::sleep(Duration::from_millis(1500));
            let permit = inspector.hold(&format!("new {attempt}"));
            let page = console.get("/").body;
            drop(permit);
            page.contains(&format!("new {attempt}"))
        });
        assert!(is_new);
    }
}

#[test]
fn a_name_that_is_newer_than_the_last_poll_is_found() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let console = Console::start(&store.url());
        for attempt in 0..20 {
            let name = format!("new-{attempt}");
            assert_eq!(console.get(&format!("/api/semaphores/{name}")).status, 404);
            let permit = inspector.hold(&name);
            assert_eq!(console.json(&format!("/api/semaphores/{name}"))["held"], 1);
            assert_eq!(console.get(&format!("/semaphore?name={name}")).status, 200);
            drop(permit);
        }
    }
}

#[test]
fn clients_are_listed_with_their_waits() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let permit = inspector.hold("it");
        let run = ["run", "-n", "1", "--label", "backup", "it", "--", "true"];
        let waiter = Running::start(&store.url(), &run);
        let console = Console::start(&store.url());
        until(|| inspector.held_and_waiting("it") == (1, 1));
        let waits = || {
            let clients = console.json("/api/clients")["clients"].clone();
            let is_waiter = |row: &&Value| row["labels"] == json!(["backup"]);
            clients.as_array().unwrap().iter().find(is_waiter).cloned()
        };
        until(|| waits().is_some());
        let waits = waits().unwrap();
        assert_eq!(waits["waits"], json!([{ "name": "it", "waiting": 1 }]), "{waits}");
        assert_eq!(
            (&waits["pid"], &waits["holds"]),
            (&waiter.pid().as_raw_pid().into(), &json!([]))
        );
        let page = console.get("/clients").body;
        assert!(page.contains("backup") && page.contains("Waits for"), "{page}");
        drop(permit);
    }
}
