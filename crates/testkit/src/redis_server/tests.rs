use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use redis::{Client, RedisResult};

use super::*;
use crate::query::query;

fn set(connection: &mut redis::Connection, key: &str, value: &str) {
    redis::cmd("SET").arg(key).arg(value).exec(connection).unwrap();
}

fn get(connection: &mut redis::Connection, key: &str) -> Option<String> {
    redis::cmd("GET").arg(key).query(connection).unwrap()
}

fn runs(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn answers_on_its_port_and_leaves_nothing_behind() {
    let server = RedisServer::start();
    let client = Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let pong: String = redis::cmd("PING").query_async(&mut connection).await.unwrap();
    assert_eq!(pong, "PONG");
    assert!(server.url().ends_with(&server.port().to_string()));

    let (pid, dir) = (server.pid(), server.dir.path().to_owned());
    assert!(runs(pid) && dir.exists());
    drop(server);
    assert!(!runs(pid) && !dir.exists());
}

#[tokio::test]
async fn servers_started_together_do_not_meet() {
    let starts: Vec<_> = (0..6).map(|_| std::thread::spawn(RedisServer::start)).collect();
    let servers: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
    for (index, server) in servers.iter().enumerate() {
        set(&mut server.connection(), "index", &index.to_string());
    }
    for (index, server) in servers.iter().enumerate() {
        assert_eq!(get(&mut server.connection(), "index"), Some(index.to_string()));
    }
}

#[tokio::test]
async fn a_taken_port_is_reported_so_that_another_is_tried() {
    let server = RedisServer::start();
    let dir = TempDir::new().unwrap();
    let args = launch::server_args(&[], server.port(), dir.path());
    assert!(matches!(Process::spawn(&args, dir.path()), Err(SpawnError::PortTaken)));
}

#[tokio::test]
#[should_panic(expected = "Bad directive")]
async fn a_refused_option_is_shown() {
    let _ = RedisServer::start_with(&["--no-such-option yes"]);
}

#[tokio::test]
async fn restart_empty_loses_the_data_and_keeps_the_port() {
    let server = RedisServer::start_with(&["--appendonly yes"]);
    set(&mut server.connection(), "kept", "no");
    let (port, pid) = (server.port(), server.pid());
    server.restart_empty();
    assert_eq!((server.port(), runs(pid)), (port, false));
    assert_eq!(get(&mut server.connection(), "kept"), None);
}

#[tokio::test]
async fn restart_keeps_the_data_and_the_port() {
    for options in [&[][..], &["--appendonly yes"], &["--requirepass secret"]] {
        let server = RedisServer::start_with(options);
        set(&mut server.connection(), "kept", "yes");
        let (port, pid) = (server.port(), server.pid());
        server.restart();
        assert_eq!((server.port(), runs(pid)), (port, false));
        assert_eq!(get(&mut server.connection(), "kept").as_deref(), Some("yes"));
    }
}

#[tokio::test]
async fn a_paused_server_is_silent_until_resumed() {
    let server = RedisServer::start();
    for _ in 0..3 {
        let mut connection = server.connection();
        server.pause();
        connection.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let silence: RedisResult<String> = redis::cmd("PING").query(&mut connection);
        assert!(silence.unwrap_err().is_timeout());
        server.resume();
        assert_eq!(get(&mut server.connection(), "any"), None);
    }
    server.pause();
    let pid = server.pid();
    drop(server);
    assert!(!runs(pid));
}

#[tokio::test]
async fn counts_leave_out_the_fixture() {
    let server = RedisServer::start();
    assert!(server.commandstats().is_empty());
    assert_eq!((server.total_commands_processed(), server.connected_clients()), (0, 0));

    let client = Client::open(server.url()).unwrap();
    let mut connection = client.get_connection().unwrap();
    let before = server.total_commands_processed();
    redis::cmd("SET").arg("a").arg(1).exec(&mut connection).unwrap();
    redis::cmd("EVAL")
        .arg("redis.call('SET', KEYS[1], 2) return redis.call('GET', KEYS[1])")
        .arg(1)
        .arg("a")
        .exec(&mut connection)
        .unwrap();
    assert_eq!((server.command_count("SET"), server.command_count("get")), (2, 1));
    assert_eq!(server.commandstats().get("eval"), Some(&1));
    assert_eq!(server.command_count("info"), 0);
    assert_eq!(server.total_commands_processed() - before, 4);
    assert_eq!(server.connected_clients(), 1);
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).unwrap();
    assert_eq!(server.command_count("script"), 1);

    server.restart_empty();
    assert_eq!((server.total_commands_processed(), server.connected_clients()), (0, 0));
    assert!(server.commandstats().is_empty());
}

#[test]
fn an_expiry_is_read_to_the_millisecond() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    assert_eq!(expires_at(&mut connection, "x"), -2);
    set(&mut connection, "x", "1");
    assert_eq!(expires_at(&mut connection, "x"), -1);
    // Often enough that some readings fall on the end of a millisecond.
    for end in 4_000_000_000_000..4_000_000_001_000 {
        assert_eq!(query::<u64>(&mut connection, &format!("PEXPIREAT x {end}")), 1);
        assert_eq!(expires_at(&mut connection, "x"), end);
    }
}

#[tokio::test]
async fn users_and_passwords() {
    let server = RedisServer::start_with(&["--requirepass secret", "--user alice on >pw ~* +@all"]);
    for (url, let_in) in [
        (server.url(), false),
        (server.url_with("", "secret"), true),
        (server.url_with("default", "secret"), true),
        (server.url_with("alice", "pw"), true),
        (server.url_with("alice", "wrong"), false),
    ] {
        let answer = Client::open(url.as_str())
            .and_then(|client| client.get_connection())
            .and_then(|mut connection| redis::cmd("PING").exec(&mut connection));
        assert_eq!(answer.is_ok(), let_in, "{url}: {answer:?}");
    }
    assert_eq!(server.total_commands_processed(), server.commandstats().values().sum::<u64>());
}

#[tokio::test]
async fn an_odd_password_survives_the_url() {
    let server = RedisServer::start_with(&["--requirepass", "s:/@%#é"]);
    let client = Client::open(server.url_with("", "s:/@%#é")).unwrap();
    redis::cmd("PING").exec(&mut client.get_connection().unwrap()).unwrap();
}

#[tokio::test]
async fn listens_on_a_unix_socket() {
    let server = RedisServer::start();
    let client = Client::open(server.unix_url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd("PING").exec_async(&mut connection).await.unwrap();
    UnixStream::connect(server.socket()).unwrap();
}

#[tokio::test]
async fn speaks_tls() {
    let server = RedisServer::start_tls(&[]);
    set(&mut server.connection(), "through", "tls");
    server.restart();
    let certificates = redis::TlsCertificates {
        client_tls: None,
        root_cert: server.ca_certificate().map(|pem| pem.as_bytes().to_vec()),
    };
    let client = Client::build_with_tls(server.url(), certificates).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let value: String =
        redis::cmd("GET").arg("through").query_async(&mut connection).await.unwrap();
    assert_eq!(value, "tls");

    let stranger = Client::open(server.url()).unwrap();
    assert!(stranger.get_multiplexed_async_connection().await.is_err());
}

/// Simulates a test process that is killed: the watchdog reads the end of its input.
#[tokio::test]
async fn the_watchdog_ends_an_abandoned_server() {
    let server = RedisServer::start();
    let (pid, dir) = (server.pid(), server.dir.path().to_owned());
    lock(&server.process).abandon();
    lock(&server.process).wait_ended();
    assert!(!runs(pid) && !dir.exists());
}

#[test]
fn a_killed_server_stays_dead_until_it_is_started() {
    let server = RedisServer::start();
    let (port, pid, dir) = (server.port(), server.pid(), server.dir.path().to_owned());
    server.kill();
    server.kill();
    assert!(!runs(pid) && !server.is_running() && dir.exists());
    server.crash();
    assert!(server.is_running());
    assert_eq!(server.port(), port);

    server.kill();
    lock(&server.process).abandon();
    assert!(!dir.exists());
}

#[test]
fn a_crash_keeps_replies_that_were_persisted() {
    for (args, expected) in [(&["--appendonly yes"][..], Some("1".to_owned())), (&[], None)] {
        let server = RedisServer::start_with(args);
        let (port, pid) = (server.port(), server.pid());
        let _: () = query(&mut server.connection(), "SET x 1");
        server.crash();
        assert_eq!(query::<Option<String>>(&mut server.connection(), "GET x"), expected);
        assert_eq!(server.port(), port);
        assert_ne!(server.pid(), pid);
    }
}
