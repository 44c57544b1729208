//! Who may read and act, and which requests are refused.

use std::os::unix::fs::PermissionsExt;

use serde_json::json;
use testkit::redis_server::RedisServer;
use testkit::users::{PASSWORD, add_users};

use crate::client::{Console, Reply, TOKEN, bearer};
use crate::support::{Inspector, Store, run};

const PAUSE: &str = "action=pause&name=it";

fn store() -> Store {
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "-n", "2", "it", "--", "true"]).code, 0);
    store
}

fn limit(store: &Store) -> String {
    run(&store.url(), &["limit", "it"]).stdout
}

#[track_caller]
fn refused(reply: &Reply, status: u16, says: &str) {
    assert_eq!(reply.status, status, "{reply:?}");
    assert!(reply.body.contains(says), "{reply:?} does not say {says:?}");
}

/// Logs in, and returns the header with the cookie.
fn log_in(console: &Console) -> String {
    let origin = format!("Origin: http://127.0.0.1:{}\r\n", console.port);
    let reply = console.request("POST", "/login", &origin, &format!("token={TOKEN}"));
    assert_eq!(reply.status, 303, "{reply:?}");
    let cookie = reply.header("set-cookie").unwrap();
    assert!(cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
    format!("{origin}Cookie: {}\r\n", cookie.split(';').next().unwrap())
}

#[test]
fn without_a_token_nothing_can_be_changed() {
    let store = store();
    let console = Console::start(&store.url());
    let page = console.get("/semaphore?name=it");
    assert!(!page.body.contains("data-confirm") && page.body.contains("--token-file"));
    refused(&console.request("POST", "/act", "", PAUSE), 403, "--token-file");
    refused(&console.request("GET", &format!("/act?{PAUSE}"), "", ""), 403, "--token-file");
    refused(&console.act(&json!({ "action": "pause", "name": "it" })), 403, "--token-file");
    refused(&console.request("POST", "/login", "", "token=x"), 403, "--token-file");
    assert_eq!(limit(&store), "it: 2 permits\n");
}

#[test]
fn actions_need_the_token_and_come_from_here() {
    let store = store();
    let console = Console::with_token(&store.url());
    assert!(!console.get("/semaphore?name=it").body.contains("data-confirm"));
    refused(&console.request("POST", "/act", "", PAUSE), 401, "token");
    refused(&console.request("POST", &format!("/act?token={TOKEN}"), "", PAUSE), 401, "token");
    let with_token_field = format!("{PAUSE}&token={TOKEN}");
    refused(&console.request("POST", "/act", "", &with_token_field), 401, "token");
    refused(&console.request("POST", "/api/act", "", "{}"), 401, "token");
    refused(&console.request("POST", "/act", &bearer("wrong"), PAUSE), 401, "wrong");
    refused(
        &console.request("POST", "/act", "Authorization: Basic eDp5\r\n", PAUSE),
        401,
        "Bearer",
    );
    refused(
        &console.request("POST", "/act", "Cookie: leasehold=1\r\n", PAUSE),
        403,
        "another site",
    );

    let session = log_in(&console);
    let cookie = session.lines().last().unwrap();
    for origin in ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost"] {
        let headers = format!("Origin: {origin}\r\n{cookie}\r\n");
        refused(&console.request("POST", "/act", &headers, PAUSE), 403, "another site");
    }
    let headers = format!("Sec-Fetch-Site: cross-site\r\n{cookie}\r\n");
    refused(&console.request("POST", "/act", &headers, PAUSE), 403, "another site");
    refused(&console.request("POST", "/act", &format!("{cookie}\r\n"), PAUSE), 403, "another site");
    assert_eq!(limit(&store), "it: 2 permits\n");

    let question = console.request("GET", &format!("/act?{PAUSE}"), &session, "");
    refused(&question, 200, "waiters keep their places");
    let done = console.request("POST", "/act", &session, PAUSE);
    assert_eq!((done.status, done.header("location")), (303, Some("/semaphore?name=it")));
    let page = console.request("GET", "/semaphore?name=it", &session, "");
    assert!(page.body.contains("it: paused."), "{page:?}");
    assert!(limit(&store).contains("paused"), "{}", limit(&store));
    let again = console.request("GET", "/semaphore?name=it", &session, "");
    assert!(!again.body.contains("it: paused."), "the message is shown once");

    let out = console.request("POST", "/logout", &session, "");
    assert_eq!(out.status, 303);
    refused(&console.request("POST", "/act", &session, "action=resume&name=it"), 401, "token");
}

#[test]
fn every_action_works_through_the_api() {
    let store = store();
    let console = Console::with_token(&store.url());
    let act = |body| {
        let reply = console.act(&body);
        assert_eq!(reply.status, 200, "{body}: {reply:?}");
    };
    act(json!({ "action": "limit", "name": "it", "capacity": 4 }));
    assert_eq!(limit(&store), "it: 4 permits\n");
    act(json!({ "action": "pin", "name": "it", "capacity": "3" }));
    assert_eq!(limit(&store), "it: 3 permits, pinned (4 after --unpin)\n");
    refused(
        &console.act(&json!({ "action": "limit", "name": "it", "capacity": 9 })),
        409,
        "pinned",
    );
    act(json!({ "action": "unpin", "name": "it" }));
    act(json!({ "action": "drain", "name": "it", "reason": "a move" }));
    assert!(limit(&store).contains("a move"));
    crate::support::until(|| {
        let events = console.json("/api/events").to_string();
        events.contains("drained: nothing is held any more")
    });
    act(json!({ "action": "resume", "name": "it" }));
    assert_eq!(limit(&store), "it: 4 permits\n");
    act(json!({ "action": "forget", "name": "it" }));
    assert_eq!(run(&store.url(), &["limit", "it"]).code, 1);
    crate::support::until(|| console.get("/api/semaphores/it").status == 404);

    // Before the first use.
    let question = "/act?action=pin&name=new&capacity=2";
    let asked = console.request("GET", question, &bearer(TOKEN), "");
    assert!(asked.body.contains("new was not in use before"), "{asked:?}");
    let pinned = console.act(&json!({ "action": "pin", "name": "new", "capacity": 2 }));
    assert!(pinned.body.contains("limit pinned to 2; it was not in use before"), "{pinned:?}");
    let new = run(&store.url(), &["limit", "new"]).stdout;
    assert_eq!(new, "new: 2 permits, pinned (no limit was declared yet)\n");

    for (body, status, says) in [
        (json!({ "action": "resume", "name": "other" }), 404, "no semaphore"),
        (json!({ "action": "cancel", "name": "other", "id": "x" }), 404, "no semaphore"),
        (json!({ "action": "limit", "name": "it", "capacity": 0 }), 400, "from 1 to 4294967294"),
        (json!({ "action": "limit", "name": "it" }), 400, "capacity"),
        (json!({ "action": "explode", "name": "it" }), 400, "explode"),
        (
            json!({ "action": "release", "kind": "lock", "name": "it", "id": "1" }),
            404,
            "does not hold",
        ),
        (json!({ "name": "it" }), 400, "action"),
        (json!(["it"]), 400, "JSON object"),
    ] {
        refused(&console.act(&body), status, says);
    }
}

#[test]
fn holders_are_released_by_hand() {
    let store = Store::redis();
    let inspector = crate::support::Inspector::new(&store.url());
    let console = Console::with_token(&store.url());
    let permit = inspector.hold("it");
    let lock = inspector.client.lock("key").build().unwrap();
    let guard = inspector.block_on(lock.acquire()).unwrap();
    let pool = inspector.client.pool("pool", 2).build().unwrap();
    let lease = inspector.block_on(pool.acquire("one")).unwrap();
    crate::support::until(|| console.json("/api/pools")["pools"][0]["held"] == 1);
    let page = console.get("/locks").body;
    let id = guard.id().to_string();
    assert!(page.contains("key") && !page.contains(&id), "a lock id is a secret");
    assert!(!console.get("/api/locks").body.contains(&id));
    for (body, effect) in [
        (
            json!({ "action": "release", "name": "it", "id": permit.id().to_string() }),
            "more may run than the limit allows",
        ),
        (
            json!({ "kind": "lock", "action": "release", "name": "key", "id": guard.fence().to_string() }),
            "Another process can acquire key at once",
        ),
        (
            json!({ "kind": "pool", "action": "release", "name": "pool", "id": "one" }),
            "while one still runs. Pools have no fences.",
        ),
    ] {
        let reply = console.act(&body);
        assert_eq!(reply.status, 200, "{reply:?}");
        assert!(reply.body.contains(effect), "{reply:?}");
        assert_eq!(console.act(&body).status, 404, "{body}");
    }
    assert_eq!(inspector.held_and_waiting("it"), (0, 0));
    drop((permit, guard, lease));
}

/// The console does not know the lease of a pool. Here it is a day, and two instances have been silent for an hour.
#[test]
fn a_released_lease_leaves_the_others_of_its_pool() {
    let server = testkit::redis_server::RedisServer::start();
    let inspector = crate::support::Inspector::new(&server.url());
    let day = std::time::Duration::from_secs(86_400);
    let pool = inspector.client.pool("pool", 2).lease(day).build().unwrap();
    let mut redis = server.connection();
    for instance in ["one", "two"] {
        let _id = inspector.block_on(pool.acquire(instance)).unwrap().detach();
        let hour = ["semaphores:pool", "-3600", instance];
        redis::cmd("ZINCRBY").arg(&hour).exec(&mut redis).unwrap();
    }
    let console = Console::with_token(&server.url());
    let body = json!({ "kind": "pool", "action": "release", "name": "pool", "id": "one" });
    assert_eq!(console.act(&body).status, 200);
    let left: Vec<String> =
        redis::cmd("ZRANGE").arg(&["semaphores:pool", "0", "-1"]).query(&mut redis).unwrap();
    assert_eq!(left, ["two"]);
}

#[test]
fn only_known_hosts_are_answered() {
    let store = store();
    let options = ["--listen", "127.0.0.1:0", "--host", "leases.example.com"];
    let console = Console::start_with(&store.url(), false, &options);
    let port = console.port;
    let request = |host: &str| {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        console.raw(request.as_bytes())
    };
    for host in ["localhost", "127.0.0.1", "[::1]", "LEASES.example.com"] {
        assert_eq!(request(&format!("{host}:{port}")).status, 200, "{host}");
    }
    assert_eq!(request("leases.example.com").status, 200);
    for host in ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil.example"] {
        refused(&request(host), 421, "--host NAME");
    }
    refused(&console.raw(b"GET / HTTP/1.0\r\n\r\n"), 421, "--host NAME");
    let host = format!("127.0.0.1:{port}");
    refused(&request(&format!("{host}\r\nHost: evil.example")), 421, "--host NAME");
}

/// A browser sends our cookies also with requests of a page on another port of the same host.
#[test]
fn a_page_on_another_port_of_the_same_host_is_refused() {
    let store = store();
    let options = ["--listen", "127.0.0.1:0", "--host", "leases.example.com"];
    let console = Console::start_with(&store.url(), true, &options);
    let (port, name) = (console.port, "leases.example.com");
    let request = |host: &str, headers: &str| {
        let head = format!("POST /logout HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
        console.raw(format!("{head}{headers}\r\n").as_bytes())
    };
    let (origin, other) = (format!("http://{name}:{port}"), format!("http://{name}"));
    let direct = format!("{name}:{port}");
    assert_eq!(request(&direct, &format!("Origin: {origin}\r\n")).status, 303);
    refused(&request(&direct, &format!("Origin: {other}\r\n")), 403, "another site");
    let same_site = format!("Origin: {origin}\r\nSec-Fetch-Site: same-site\r\n");
    refused(&request(&direct, &same_site), 403, "another site");
    // Behind a proxy, which forwards the name or replaces it.
    let page = format!("Origin: https://{name}\r\n");
    let same_origin = format!("{page}Sec-Fetch-Site: same-origin\r\n");
    assert_eq!(request(name, &page).status, 303);
    assert_eq!(request(&format!("127.0.0.1:{port}"), &page).status, 303);
    assert_eq!(request(&direct, &same_origin).status, 303);
}

#[test]
fn every_answer_has_the_headers() {
    let store = store();
    let console = Console::with_token(&store.url());
    let wrong = b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    let mut replies = vec![console.raw(wrong), console.request("POST", "/act", "", PAUSE)];
    for path in ["/", "/nothing", "/api/overview", "/metrics", "/style.css", "/login", "/api/x"] {
        replies.push(console.get(path));
    }
    for reply in replies {
        let policy = reply.header("content-security-policy").unwrap_or_default();
        assert!(policy.starts_with("default-src 'none'; style-src 'self'"), "{reply:?}");
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"), "{reply:?}");
        assert_eq!(reply.header("referrer-policy"), Some("same-origin"), "{reply:?}");
        assert!(reply.header("cache-control").is_some(), "{reply:?}");
        assert_eq!(reply.header("access-control-allow-origin"), None, "{reply:?}");
        assert!(!reply.body.contains(" style=") && !reply.body.contains(" onclick="), "{reply:?}");
    }
}

#[test]
fn other_addresses_need_the_token_for_everything() {
    let store = store();
    let refused_to_start = run(&store.url(), &["serve", "--listen", "0.0.0.0:0"]);
    assert_eq!(refused_to_start.code, 64);
    assert!(refused_to_start.stderr.contains("--token-file"), "{refused_to_start:?}");

    let console = Console::start_with(&store.url(), true, &["--listen", "0.0.0.0:0"]);
    for path in ["/", "/metrics", "/api/overview", "/live", "/semaphore?name=it"] {
        refused(&console.get(path), 401, "token");
        // A stream does not end.
        if path != "/live" {
            let reply = console.request("GET", path, &bearer(TOKEN), "");
            assert_eq!(reply.status, 200, "{reply:?}");
        }
        refused(&console.request("GET", path, &bearer("wrong"), ""), 401, "wrong");
    }
    let browser = console.request("GET", "/", "Accept: text/html\r\n", "");
    assert_eq!((browser.status, browser.header("location")), (303, Some("/login")));
    assert_eq!(console.get("/login").status, 200);
    assert_eq!(console.get("/healthz").body, "ok\n");
    assert_eq!(console.request("GET", "/", &log_in(&console), "").status, 200);
}

#[test]
fn bad_token_files_and_addresses_are_refused() {
    let store = store();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    let name = file.display().to_string();
    let fails = |content: &str, mode: u32, says: &str| {
        std::fs::write(&file, content).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let ended = run(&store.url(), &["serve", "--listen", "127.0.0.1:0", "--token-file", &name]);
        assert_eq!((ended.code, &*ended.stdout), (64, ""), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?} does not say {says:?}");
    };
    fails(TOKEN, 0o640, &format!("chmod 600 {name}"));
    fails(TOKEN, 0o604, "chmod 600");
    fails("short\n", 0o600, "at least 16");
    fails("sixteen or more, with blanks", 0o600, "blank");
    std::fs::remove_file(&file).unwrap();
    let ended = run(&store.url(), &["serve", "--token-file", &name]);
    assert_eq!(ended.code, 64, "{ended:?}");

    let console = Console::start(&store.url());
    let taken = format!("127.0.0.1:{}", console.port);
    let ended = run(&store.url(), &["serve", "--listen", &taken]);
    assert_eq!(ended.code, 64);
    assert!(ended.stderr.contains("--listen 127.0.0.1:0"), "{ended:?}");
    assert_eq!(run(&store.url(), &["serve", "--listen", "localhost"]).code, 64);
    assert_eq!(run(&store.url(), &["serve", "--host", "http://example.com"]).code, 64);
    let nowhere = run("redis://127.0.0.1:1", &["serve", "--listen", "127.0.0.1:0"]);
    assert_eq!(nowhere.code, 69, "{nowhere:?}");
}

/// The users are those of docs/guarantees.md.
#[test]
fn a_read_only_user_is_enough_to_list() {
    let server = RedisServer::start();
    add_users(&mut server.connection());
    let (user, reader) = ("leasehold", "leasehold-reader");
    let [user, reader] = [user, reader].map(|user| server.url_with(user, PASSWORD));
    let inspector = Inspector::new(&user);
    let held = inspector.hold("deploy");
    let console = Console::with_token(&reader);
    assert!(console.get("/").body.contains("deploy"));
    assert_eq!(console.json("/api/semaphores/deploy")["held"], 1);
    let pause = json!({ "name": "deploy", "action": "pause" });
    let refused = console.act(&pause);
    assert_eq!(refused.status, 403, "{}", refused.body);
    assert!(refused.body.contains("Nothing was changed"), "{}", refused.body);
    assert_eq!(Console::with_token(&user).act(&pause).status, 200);
    drop(held);
}

#[test]
fn waiters_are_cancelled_by_hand() {
    for store in Store::both() {
        let inspector = crate::support::Inspector::new(&store.url());
        let console = Console::with_token(&store.url());
        let permit = inspector.hold("it");
        let waiter = crate::support::Running::start(&store.url(), &["run", "it", "--", "true"]);
        crate::support::until(|| console.json("/api/semaphores")["semaphores"][0]["waiting"] == 1);
        let shown = console.json("/api/semaphores/it");
        let id = shown["waiters"][0]["id"].as_str().unwrap();
        let page = console.request("GET", "/semaphore?name=it", &bearer(TOKEN), "").body;
        assert!(page.contains("value=\"cancel\"") && page.contains(id), "{page}");
        let body = json!({ "action": "cancel", "name": "it", "id": id });
        let cancelled = console.act(&body);
        assert_eq!(cancelled.status, 200, "{cancelled:?}");
        assert_eq!(waiter.end().code, 75);
        refused(&console.act(&body), 404, "does not wait for it any more");
        assert_eq!(inspector.held_and_waiting("it"), (1, 0));
        drop(permit);
    }
}
