//! How the semaphore on Redis handles invalid input and unsuitable servers, and which input is valid.

#![cfg(feature = "redis")]

use std::collections::BTreeMap;
use std::error::Error as _;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use leasehold::{Client, Error, Permit, Semaphore};
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

mod tls;

/// Must not appear in any message.
const SECRET: &str = "hunter2";
/// Far less than polling takes: what happens this quickly was notified.
const AT_ONCE: Duration = Duration::from_millis(500);

async fn refused(url: &str) -> Error {
    let error = deadline(Client::redis_builder(url).open()).await.unwrap_err();
    let source = error.source().map(|source| format!("{source} {source:?}"));
    let all = format!("{error} {error:?} {source:?}");
    assert!(!all.contains(SECRET), "{all}");
    error
}

async fn connect(url: &str) -> Client {
    deadline(Client::redis(url)).await.expect("the server that was just started")
}

fn one(client: &Client, name: &str) -> Semaphore {
    client.semaphore(name, 1).build().unwrap()
}

async fn acquire(semaphore: &Semaphore) -> Permit {
    deadline(semaphore.acquire()).await.unwrap()
}

async fn release(permit: Permit) {
    assert!(deadline(permit.release()).await.unwrap());
}

/// Hands a permit from one client to the other by a wake-up.
async fn hand_over(from: &Client, to: &Client, name: &str) {
    let held = acquire(&one(from, name)).await;
    let semaphore = one(to, name);
    let waiting = semaphore.acquire();
    let id = waiting.id();
    let waiting = tokio::spawn(async move { (waiting.await, Instant::now()) });
    eventually(async || semaphore.position(&id).await.unwrap().is_some()).await;
    let released = Instant::now();
    release(held).await;
    let (permit, at) = deadline(waiting).await.unwrap();
    assert!(at - released < AT_ONCE, "{name:?} took {:?}", at - released);
    release(permit.unwrap()).await;
}

#[tokio::test]
async fn a_server_that_is_not_there_is_told_of_at_once() {
    // No process listens on a port that was free a moment ago.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let url = format!("redis://:{SECRET}@127.0.0.1:{port}");
    let begun = Instant::now();
    let error = deadline(Client::redis_builder(&url).open()).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(1), "it took {:?}", begun.elapsed());
    assert!(matches!(error, Error::Unavailable { timed_out: false, .. }), "{error}");
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
    assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_told_of_in_time() {
    let server = RedisServer::start();
    server.pause();
    let builder = Client::redis_builder(&server.url()).connect_timeout(AT_ONCE);
    let begun = Instant::now();
    let error = deadline(builder.open()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { timed_out: true, .. }), "{error}");
    assert!(begun.elapsed() < 2 * AT_ONCE, "it took {:?}", begun.elapsed());
}

#[tokio::test]
async fn passwords_that_are_wrong_or_missing_are_refused_with_advice() {
    let user = "--user app on >right ~* &* +@all";
    let server = RedisServer::start_with(&["--requirepass right", user]);
    for wrong in [server.url_with("", SECRET), server.url_with("app", SECRET)] {
        let error = refused(&wrong).await;
        assert!(matches!(error, Error::Denied { .. }), "{error}");
        assert!(error.to_string().contains("wrong user or password"), "{error}");
    }
    let error = refused(&server.url_with("nobody", SECRET)).await;
    assert!(matches!(error, Error::Denied { .. }), "{error}");

    let error = refused(&server.url()).await;
    assert!(matches!(error, Error::Denied { .. }), "{error}");
    assert!(error.to_string().contains("put the user and the password into the URL"), "{error}");
    eventually(async || server.connected_clients() == 0).await;

    let clients = [server.url_with("", "right"), server.url_with("app", "right")];
    hand_over(&connect(&clients[0]).await, &connect(&clients[1]).await, "x").await;
}

/// Such as a server older than 6.0, which repeats the arguments of an unknown command in its error.
#[tokio::test]
async fn a_server_without_hello_is_refused_with_the_version_that_is_needed() {
    let server = RedisServer::start_with(&["--rename-command", "HELLO", ""]);
    for url in [server.url(), server.url_with("", SECRET)] {
        let error = refused(&url).await;
        assert!(matches!(error, Error::Unusable { .. }), "{error}");
        let advice = "the server does not support HELLO 3: use Redis 6.2 or later, or Valkey";
        assert!(error.to_string().ends_with(advice), "{error}");
    }
    eventually(async || server.connected_clients() == 0).await;
}

#[tokio::test]
async fn a_password_may_consist_of_anything() {
    let password = "p@ss/w:rd%#?&";
    let server = RedisServer::start_with(&[&format!("--user app on >{password} ~* &* +@all")]);
    let client = connect(&server.url_with("app", password)).await;
    release(acquire(&one(&client, "x")).await).await;
}

#[tokio::test]
async fn a_database_that_is_not_there_is_named() {
    let server = RedisServer::start();
    let begun = Instant::now();
    let error = refused(&format!("{}/99", server.url())).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "a retry does not help");
    assert!(matches!(error, Error::Unusable { .. }), "{error}");
    assert!(error.to_string().contains("/99"), "{error}");
    assert!(error.to_string().to_lowercase().contains("db index"), "{error}");
}

#[tokio::test]
async fn databases_have_nothing_to_do_with_each_other() {
    let server = RedisServer::start();
    let (one_url, two_url) = (format!("{}/1", server.url()), format!("{}/2", server.url()));
    let (first, second) = (connect(&one_url).await, connect(&two_url).await);
    let held = (acquire(&one(&first, "x")).await, acquire(&one(&second, "x")).await);
    release(held.0).await;
    release(held.1).await;
    hand_over(&first, &connect(&one_url).await, "x").await;
}

#[tokio::test]
async fn namespaces_have_nothing_to_do_with_each_other() {
    let server = RedisServer::start();
    let url = server.url();
    let first = deadline(Client::redis_builder(&url).namespace("a").open()).await.unwrap();
    let second = deadline(Client::redis_builder(&url).namespace("b").open()).await.unwrap();
    let held = (acquire(&one(&first, "x")).await, acquire(&one(&second, "x")).await);
    release(held.0).await;
    release(held.1).await;
}

#[tokio::test]
async fn urls_that_do_not_parse_are_refused_without_being_repeated() {
    for url in [
        format!("redis://:{SECRET}@"),
        format!("redis://:{SECRET}@localhost:port"),
        format!("redis://:{SECRET}@localhost:70000"),
        format!("redis://:{SECRET}@localhost/first"),
        format!("redis://:{SECRET}@localhost/-1"),
        format!("redis://u:%zz{SECRET}%ff@localhost/"),
        format!("http://:{SECRET}@localhost"),
        format!("redis:{SECRET}"),
        format!("//{SECRET}@localhost"),
        SECRET.to_owned(),
        String::new(),
        " ".to_owned(),
    ] {
        let begun = Instant::now();
        let error = refused(&url).await;
        assert!(
            matches!(error, Error::InvalidArgument { argument: "store", .. }),
            "{url:?}: {error:?}"
        );
        assert!(error.to_string().contains("redis://"), "{error}");
        assert!(begun.elapsed() < AT_ONCE, "no I/O");
    }
    let builder = Client::redis_builder(&format!("redis://:{SECRET}@localhost"));
    assert!(!format!("{builder:?}").contains(SECRET), "{builder:?}");
}

#[tokio::test]
async fn settings_that_cannot_be_are_refused_by_name() {
    let no_time = Duration::ZERO;
    for (builder, name) in [
        (Client::redis_builder("redis://localhost").answer_timeout(no_time), "answer_timeout"),
        (Client::redis_builder("redis://localhost").connect_timeout(no_time), "connect_timeout"),
        (Client::redis_builder("redis://localhost").claim_within(no_time), "claim_within"),
        (
            Client::redis_builder("redis://localhost").claim_within(Duration::from_millis(999)),
            "claim_within: it is 999ms; the minimum is 1s",
        ),
        (Client::redis_builder("redis://localhost").namespace(""), "namespace"),
    ] {
        let error = deadline(builder.open()).await.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// Returns every key of the server with its content, except the records of clients.
fn dump(server: &RedisServer) -> BTreeMap<String, Vec<u8>> {
    let mut connection = server.connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
    keys.into_iter()
        .filter(|key| !key.starts_with("adv-sem:client:"))
        .map(|key| {
            let value = redis::cmd("DUMP").arg(&key).query(&mut connection).unwrap();
            (key, value)
        })
        .collect()
}

#[tokio::test]
async fn a_key_of_another_type_in_our_place_is_named_and_nothing_is_written() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    for kind in ["main", "ttl", "max", "waiting", "waiting_heartbeat", "fence", "info"] {
        let name = format!("in the place of {kind}");
        let key = format!("adv-sem:semaphore_{kind}:{name}");
        let semaphore = one(&client, &name);
        // These keys matter only when an acquire has to wait.
        let waits = ["ttl", "waiting", "waiting_heartbeat"].contains(&kind);
        let held = if waits { Some(acquire(&semaphore).await) } else { None };
        // A type that leasehold does not use: it uses ZSET, HASH and STRING.
        let mut connection = server.connection();
        let _: u64 = redis::cmd("RPUSH").arg(&key).arg("ours").query(&mut connection).unwrap();
        let before = dump(&server);
        for _ in 0..2 {
            let error = deadline(semaphore.acquire()).await.unwrap_err();
            assert!(matches!(error, Error::ForeignData { .. }), "{kind}: {error}");
            assert!(error.to_string().contains(&key), "{key:?}: {error}");
        }
        assert_eq!(dump(&server), before, "{kind}");
        let _: u64 = redis::cmd("DEL").arg(&key).query(&mut connection).unwrap();
        if let Some(held) = held {
            release(held).await;
        }
        release(acquire(&semaphore).await).await;
    }
    // Other names and the client itself still work.
    hand_over(&client, &connect(&server.url()).await, "x").await;
}

#[tokio::test]
async fn names_are_opaque_to_the_scripts() {
    let long = "x".repeat(511);
    let names = [
        "a b",
        " a",
        "a{b}",
        "{a}",
        "{",
        "}",
        "a\"b",
        "a'b",
        "\\",
        "\\n",
        "%",
        "%s %d",
        "a%20b",
        "a@b",
        "@",
        "a:b",
        ":",
        "*",
        "?",
        "[a]",
        "a*",
        "$(a)",
        "-",
        "- - - -",
        "--",
        "0",
        "nil",
        "semaphore_main:a",
        "adv-sem:semaphore_main:a",
        "🦀",
        "🦀🦀",
        "é",
        "日本語",
        "1e5",
        "a\u{a0}b",
    ];
    let mut names: Vec<String> = names.into_iter().map(str::to_owned).collect();
    names.extend([format!("{long}1"), format!("{long}2"), "🦀".repeat(128)]);
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    // All held together: two names that the server took for one would exclude each other.
    let mut held = Vec::new();
    for name in &names {
        let permit = deadline(one(&client, name).try_acquire()).await.unwrap();
        held.push(permit.unwrap_or_else(|| panic!("{name:?} is held already")));
    }
    for (permit, name) in held.into_iter().zip(&names) {
        let stats = deadline(one(&other, name).stats()).await.unwrap();
        assert_eq!((&*stats.name, stats.held), (name.as_str(), 1));
        release(permit).await;
        hand_over(&client, &other, name).await;
    }
    let known = deadline(client.stats().unused().limit(1000)).await.unwrap();
    assert_eq!(known.len(), names.len(), "one entry per name");
}

#[tokio::test]
async fn a_socket_is_as_good_as_a_port() {
    let server = RedisServer::start();
    let socket = server.unix_url();
    let also = socket.replace("redis+unix:", "unix:");
    let (client, other) = (connect(&socket).await, connect(&also).await);
    hand_over(&client, &other, "x").await;
    hand_over(&other, &connect(&server.url()).await, "x").await;
    let fourth = connect(&format!("{also}?db=4")).await;
    release(acquire(&one(&fourth, "x")).await).await;
}

/// A TTL that ends before its holder learns of the grant would be acquired again and again.
#[tokio::test]
async fn a_ttl_is_long_enough_to_be_had() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let error = client.semaphore("x", 1).ttl(Duration::from_millis(40)).build().unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(error.to_string().contains("40ms") && error.to_string().contains("100ms"), "{error}");
    let shortest = client.semaphore("x", 1).ttl(Duration::from_millis(100)).build().unwrap();
    let permit = acquire(&shortest).await;
    assert_eq!(deadline(permit.lost()).await, leasehold::LossReason::TtlEnded);
}
