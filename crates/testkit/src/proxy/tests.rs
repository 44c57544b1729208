//! The clients block on the test's single-threaded runtime on purpose: a proxy that needed that
//! runtime would hang here.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use redis::{Client, Connection, RedisResult};

use super::*;
use crate::redis_server::RedisServer;

const SILENCE: Duration = Duration::from_millis(50);
const SUBSCRIBE: &str = "*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nc\r\n";
const GET_N: &[u8] = b"*2\r\n$3\r\nGET\r\n$1\r\nn\r\n";

fn start() -> (RedisServer, FaultProxy) {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    (server, proxy)
}

fn connect(proxy: &FaultProxy) -> Connection {
    let connection = Client::open(proxy.url()).unwrap().get_connection().unwrap();
    connection.set_read_timeout(Some(DEADLINE)).unwrap();
    connection
}

/// A plain socket, for what a client library hides.
fn socket(proxy: &FaultProxy) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn read(socket: &mut TcpStream, expected: &str) {
    let mut bytes = vec![0; expected.len()];
    socket.read_exact(&mut bytes).unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes), expected);
}

fn assert_silent(socket: &mut TcpStream) {
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    assert_eq!(socket.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
}

fn incr(connection: &mut Connection, key: &str) -> RedisResult<u64> {
    redis::cmd("INCR").arg(key).query(connection)
}

fn value(server: &RedisServer, key: &str) -> Option<u64> {
    redis::cmd("GET").arg(key).query(&mut server.connection()).unwrap()
}

#[tokio::test]
async fn passes_on_and_counts() {
    let (_server, proxy) = start();
    let mut connection = connect(&proxy);
    let before = proxy.traffic();
    assert_eq!((before.accepted, before.connections), (1, 1));
    let pipeline = redis::pipe().incr("n", 1).incr("n", 1).get("n").clone();
    let replies: (u64, u64, u64) = pipeline.query(&mut connection).unwrap();
    assert_eq!(replies, (1, 2, 2));
    assert_eq!(proxy.requests() - before.requests, 3);
    let bytes = pipeline.get_packed_pipeline().len() + b":1\r\n:2\r\n$1\r\n2\r\n".len();
    assert_eq!(proxy.bytes() - before.bytes_to_server - before.bytes_to_client, bytes as u64);

    drop(connection);
    proxy.until(|traffic| traffic.connections == 0).await;
}

#[tokio::test]
async fn cut_ends_the_current_connections_only() {
    let (_server, proxy) = start();
    for how in [Cut::Close, Cut::Reset] {
        let mut sockets = [socket(&proxy), socket(&proxy)];
        for socket in &mut sockets {
            socket.write_all(GET_N).unwrap();
            read(socket, "$-1\r\n");
        }
        proxy.cut_with(how);
        assert_eq!(proxy.connections(), 0);
        for socket in &mut sockets {
            match how {
                Cut::Close => assert_eq!(socket.read(&mut [0]).unwrap(), 0),
                Cut::Reset => {
                    assert_eq!(
                        socket.read(&mut [0]).unwrap_err().kind(),
                        ErrorKind::ConnectionReset
                    );
                }
            }
        }
        let mut next = socket(&proxy);
        next.write_all(GET_N).unwrap();
        read(&mut next, "$-1\r\n");
        proxy.cut();
    }
}

#[tokio::test]
async fn refuse_turns_new_connections_away() {
    let (_server, proxy) = start();
    let mut connection = connect(&proxy);
    proxy.refuse(true);
    assert!(Client::open(proxy.url()).unwrap().get_connection().is_err());
    proxy.until(|traffic| traffic.refused == 1).await;
    assert_eq!(incr(&mut connection, "n").unwrap(), 1);
    proxy.refuse(false);
    assert_eq!(incr(&mut connect(&proxy), "n").unwrap(), 2);
}

#[tokio::test]
async fn half_open_is_silence_and_the_old_connection_never_recovers() {
    let (server, proxy) = start();
    let mut old = socket(&proxy);
    old.write_all(GET_N).unwrap();
    read(&mut old, "$-1\r\n");

    proxy.half_open();
    old.write_all(b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n").unwrap();
    let mut new = socket(&proxy);
    new.write_all(GET_N).unwrap();
    assert_silent(&mut old);
    assert_silent(&mut new);
    assert_eq!((proxy.connections(), server.connected_clients()), (1, 1));

    proxy.heal();
    read(&mut new, "$-1\r\n");
    assert_silent(&mut old);
    drop(old);
    assert_eq!((value(&server, "n"), server.connected_clients()), (None, 2));
    proxy.cut();
    assert_eq!(proxy.connections(), 0);
}

#[tokio::test]
async fn forgotten_connections_are_dead_while_new_ones_work() {
    let (_server, proxy) = start();
    let mut old = socket(&proxy);
    old.write_all(GET_N).unwrap();
    read(&mut old, "$-1\r\n");
    proxy.forget_connections();
    old.write_all(GET_N).unwrap();
    assert_eq!(incr(&mut connect(&proxy), "n").unwrap(), 1);
    assert_silent(&mut old);
}

#[tokio::test]
async fn a_stall_is_delivered_when_it_heals() {
    let (server, proxy) = start();
    let mut socket = socket(&proxy);
    socket.write_all(GET_N).unwrap();
    read(&mut socket, "$-1\r\n");
    proxy.stall();
    socket.write_all(b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n").unwrap();
    assert_silent(&mut socket);
    assert_eq!(value(&server, "n"), None);
    proxy.heal();
    read(&mut socket, ":1\r\n");
}

#[tokio::test]
async fn a_delay_is_latency_and_not_a_lower_rate() {
    let (_server, proxy) = start();
    let mut connection = connect(&proxy);
    let delay = Duration::from_millis(40);
    proxy.delay(delay);
    let begun = Instant::now();
    let mut pipeline = redis::pipe();
    for _ in 0..100 {
        pipeline.incr("n", 1);
    }
    let replies: Vec<u64> = pipeline.query(&mut connection).unwrap();
    let elapsed = begun.elapsed();
    assert_eq!(replies.len(), 100);
    assert!(elapsed >= 2 * delay, "{elapsed:?}");
    assert!(elapsed < 100 * delay, "{elapsed:?}");
}

#[tokio::test]
async fn a_lost_reply_means_that_the_command_ran() {
    let (server, proxy) = start();
    let (mut first, mut second) = (connect(&proxy), connect(&proxy));
    proxy.lose_reply_to(b"special");
    assert_eq!(incr(&mut first, "plain").unwrap(), 1);
    assert!(incr(&mut second, "special").unwrap_err().is_io_error());
    assert_eq!(value(&server, "special"), Some(1));
    assert_eq!(incr(&mut first, "special").unwrap(), 2);

    proxy.drop_next_reply();
    assert!(incr(&mut first, "plain").is_err());
    assert_eq!(value(&server, "plain"), Some(2));
    assert_eq!(proxy.traffic().lost, 2);
    proxy.until(|traffic| traffic.connections == 0).await;
}

#[tokio::test]
async fn in_a_pipeline_only_the_named_reply_is_lost() {
    let (server, proxy) = start();
    let mut socket = socket(&proxy);
    proxy.lose_reply_to(b"\r\nb\r\n");
    let incr = |key| format!("*2\r\n$4\r\nINCR\r\n$1\r\n{key}\r\n");
    socket.write_all(["a", "b", "c"].map(incr).concat().as_bytes()).unwrap();
    let mut replies = String::new();
    socket.read_to_string(&mut replies).unwrap();
    assert_eq!(replies, ":1\r\n");
    let values = ["a", "b", "c"].map(|key| value(&server, key));
    assert_eq!(values, [Some(1), Some(1), None]);
}

#[tokio::test]
async fn a_lost_request_never_ran() {
    let (server, proxy) = start();
    let mut connection = connect(&proxy);
    proxy.lose_request(b"INCR");
    assert!(incr(&mut connection, "n").unwrap_err().is_io_error());
    assert_eq!((value(&server, "n"), proxy.traffic().lost), (None, 1));
}

#[tokio::test]
async fn healing_cancels_pending_losses() {
    let (_server, proxy) = start();
    proxy.drop_next_reply();
    proxy.refuse(true);
    proxy.delay(Duration::from_secs(50));
    proxy.heal();
    assert_eq!(incr(&mut connect(&proxy), "n").unwrap(), 1);
}

#[tokio::test]
async fn a_lost_confirmation_of_a_subscription() {
    let (_server, proxy) = start();
    for hello in ["", "*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n"] {
        let mut listener = socket(&proxy);
        proxy.lose_reply_to(b"SUBSCRIBE");
        listener.write_all(format!("{hello}{SUBSCRIBE}").as_bytes()).unwrap();
        let mut seen = String::new();
        listener.read_to_string(&mut seen).unwrap();
        assert_eq!(
            (seen.contains("proto"), seen.contains("subscribe")),
            (!hello.is_empty(), false)
        );
    }
    assert_eq!(proxy.traffic().lost, 2);
}

#[tokio::test]
async fn pushes_are_not_taken_for_replies() {
    let (server, proxy) = start();
    let mut listener = socket(&proxy);
    listener.write_all(SUBSCRIBE.as_bytes()).unwrap();
    read(&mut listener, "*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
    redis::cmd("PUBLISH").arg("c").arg("hi").exec(&mut server.connection()).unwrap();
    read(&mut listener, "*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nhi\r\n");
    proxy.lose_reply_to(b"PING");
    listener.write_all(b"*1\r\n$4\r\nPING\r\n").unwrap();
    assert_eq!((listener.read(&mut [0]).unwrap(), proxy.traffic().lost), (0, 1));
}

#[tokio::test]
async fn the_proxy_follows_a_server_that_restarts() {
    let (server, proxy) = start();
    let mut connection = connect(&proxy);
    server.restart_empty();
    assert!(incr(&mut connection, "n").is_err());
    assert_eq!(incr(&mut connect(&proxy), "n").unwrap(), 1);
    drop(server);
    assert!(Client::open(proxy.url()).unwrap().get_connection().is_err());
}

#[tokio::test]
async fn passes_tls_on_unread() {
    let server = RedisServer::start_tls(&[]);
    let proxy = FaultProxy::start(server.port());
    let root_cert = server.ca_certificate().map(|pem| pem.as_bytes().to_vec());
    let certificates = redis::TlsCertificates { client_tls: None, root_cert };
    let url = proxy.url().replace("redis:", "rediss:");
    let client = Client::build_with_tls(url, certificates).unwrap();
    assert_eq!(incr(&mut client.get_connection().unwrap(), "n").unwrap(), 1);
    assert_eq!(proxy.requests(), 0);
}

#[tokio::test]
async fn dropping_it_closes_everything() {
    let (server, proxy) = start();
    let mut socket = socket(&proxy);
    socket.write_all(GET_N).unwrap();
    read(&mut socket, "$-1\r\n");
    drop(proxy);
    assert!(!matches!(socket.read(&mut [0]), Ok(1..)));
    drop(server);
}

#[tokio::test]
async fn new_connections_go_where_it_was_redirected_to() {
    let (server, proxy) = start();
    let other = RedisServer::start();
    let mut before = connect(&proxy);
    proxy.redirect(other.port());
    let port = |connection: &mut Connection| -> String {
        let info: String = redis::cmd("INFO").arg("server").query(connection).unwrap();
        info.lines().find_map(|line| line.strip_prefix("tcp_port:")).unwrap().to_owned()
    };
    assert_eq!(port(&mut before), server.port().to_string());
    assert_eq!(port(&mut connect(&proxy)), other.port().to_string());
    proxy.cut();
    let gone: RedisResult<String> = redis::cmd("PING").query(&mut before);
    assert!(gone.is_err());
}
