//! Clients that are slow, many, greedy or malicious: memory is bounded, errors are clear, and no
//! other client is delayed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Signal, getrlimit, setrlimit};

use crate::client::{Console, Reply, TOKEN, bearer, read_for};
use crate::support::{Store, run, until};

/// How much memory such clients may cost, in KiB.
const MOST_MEMORY: u64 = 64 * 1024;
/// Far more than a reply should take, even on a slow machine.
const PROMPTLY: Duration = Duration::from_secs(5);

fn store() -> Store {
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    store
}

#[track_caller]
fn serves_promptly(console: &Console) {
    let began = Instant::now();
    let reply = console.get("/");
    assert_eq!(reply.status, 200, "{reply:?}");
    assert!(began.elapsed() < PROMPTLY, "{:?}", began.elapsed());
}

#[test]
fn a_request_that_is_too_large_is_refused() {
    let store = store();
    let console = Console::with_token(&store.url());
    let before = console.memory();
    let large = "x".repeat(20 * 1024);
    for path in ["/act", "/api/act"] {
        let reply = console.request("POST", path, &bearer(TOKEN), &large);
        assert_eq!(reply.status, 413, "{path}: {reply:?}");
        assert!(reply.body.contains("16384"), "{reply:?}");
    }
    assert_eq!(console.request("POST", "/login", "", &large).status, 413);
    // A body that is not needed is not read.
    let huge = format!(
        "POST /act HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n",
        console.port
    );
    assert_eq!(console.raw(huge.as_bytes()).status, 401);
    let head = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1024 * 1024));
    assert!([431, 0].contains(&console.raw(head.as_bytes()).status));
    let many = "a: b\r\n".repeat(1000);
    assert_eq!(console.request("GET", "/", &many, "").status, 431);
    assert_eq!(console.get(&format!("/?find={}", "x".repeat(20_000))).status, 200);
    for rude in
        [&b"\0\0\0\0\r\n\r\n"[..], b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02"]
    {
        let mut stream = console.connect();
        stream.write_all(rude).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert!([400, 0, 505].contains(&Reply::read(&mut stream).status), "{rude:?}");
    }
    assert!(console.memory() < before + MOST_MEMORY);
    serves_promptly(&console);
}

#[test]
fn a_thousand_connections_and_slow_clients_delay_no_request() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let store = store();
    let console = Console::with_token(&store.url());
    let before = console.memory();

    // Requests that arrive byte by byte, a body that does not arrive, and replies that are not read.
    let mut dribbles: Vec<_> = (0..20).map(|_| console.connect()).collect();
    for stream in &mut dribbles {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: 127").unwrap();
    }
    let host = format!("Host: 127.0.0.1:{}\r\n", console.port);
    let body = format!("POST /act HTTP/1.1\r\n{host}{}Content-Length: 9\r\n\r\nact", bearer(TOKEN));
    let mut bodies: Vec<_> = (0..20).map(|_| console.connect()).collect();
    for stream in &mut bodies {
        stream.write_all(body.as_bytes()).unwrap();
    }
    let pipelined = format!("GET / HTTP/1.1\r\n{host}\r\n").repeat(500);
    let unread: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = console.connect();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write(pipelined.as_bytes());
            stream
        })
        .collect();
    serves_promptly(&console);

    let idle: Vec<_> = (0..1000).map(|_| console.connect()).collect();
    for _ in 0..5 {
        serves_promptly(&console);
    }
    assert!(console.memory() < before + MOST_MEMORY, "{} KiB", console.memory());
    // The oldest connections were closed to make room.
    until(|| idle.iter().filter(|stream| is_closed(stream)).count() >= 450);

    // Slow bodies get an error; slow heads and slow readers are disconnected.
    for stream in &mut bodies {
        let reply = String::from_utf8_lossy(&read_for(stream, PROMPTLY * 4)).into_owned();
        assert!(reply.starts_with("HTTP/1.1 408") || reply.is_empty(), "{reply:?}");
    }
    until(|| dribbles.iter().all(is_closed));
    serves_promptly(&console);
    drop((unread, idle));
    assert!(console.memory() < before + MOST_MEMORY, "{} KiB", console.memory());
}

#[test]
fn slow_clients_are_cut_off() {
    let store = store();
    let console = Console::start(&store.url());
    let mut dribble = console.connect();
    dribble.write_all(b"GET / HTTP/1.1\r\nHost: 127").unwrap();
    // Sends requests forever, and never reads. The next write reports that it was disconnected.
    let asked = format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", console.port).repeat(500);
    let mut greedy = console.connect();
    let greedy = std::thread::spawn(move || while greedy.write_all(asked.as_bytes()).is_ok() {});
    serves_promptly(&console);
    until(|| is_closed(&dribble));
    until(|| greedy.is_finished());
    serves_promptly(&console);
}

/// Returns whether the server has closed the connection.
fn is_closed(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut byte = [0; 256];
    loop {
        match (&*stream).read(&mut byte) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn streams_are_bounded_and_end_with_the_server() {
    let store = store();
    let console = Console::start(&store.url());
    let before = console.memory();
    let request = format!("GET /live HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", console.port);
    let open = || {
        let mut stream = console.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut start = [0; 12];
        stream.read_exact(&mut start).unwrap();
        (String::from_utf8_lossy(&start).into_owned(), stream)
    };
    let streams: Vec<_> = (0..256).map(|_| open()).collect();
    assert!(streams.iter().all(|(start, _)| start == "HTTP/1.1 200"));
    let (start, mut refused) = open();
    assert_eq!(start, "HTTP/1.1 503");
    let rest =
        String::from_utf8_lossy(&read_for(&mut refused, Duration::from_secs(1))).into_owned();
    assert!(rest.to_lowercase().contains("retry-after: 10"), "{rest}");
    // Idle connections displace each other, never a stream.
    let idle: Vec<_> = (0..400).map(|_| console.connect()).collect();
    serves_promptly(&console);
    assert!(console.memory() < before + MOST_MEMORY);
    let (_, mut first) = streams.into_iter().next().unwrap();
    let (time, began) = (Duration::from_secs(6), Instant::now());
    let events = String::from_utf8_lossy(&read_for(&mut first, time)).into_owned();
    assert!(events.matches("event: version").count() >= 2, "{events}");
    assert!(began.elapsed() >= time, "the stream ended after {:?}", began.elapsed());
    drop(idle);
    let began = Instant::now();
    console.running.signal(Signal::TERM);
    assert_eq!(console.running.end().code, 143);
    assert!(began.elapsed() < PROMPTLY, "{:?}", began.elapsed());
}

/// More than the limit of connections, none of which is a stream or waits for a reply.
#[test]
fn slow_bodies_and_streams_without_a_body_are_displaced() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let store = store();
    let console = Console::with_token(&store.url());
    let host = format!("Host: 127.0.0.1:{}\r\n", console.port);
    let body = format!("POST /login HTTP/1.1\r\n{host}Content-Length: 9\r\n\r\ntok");
    let head = format!("HEAD /live HTTP/1.1\r\n{host}\r\n");
    for asked in [body, head] {
        let open = || {
            let mut stream = console.connect();
            stream.write_all(asked.as_bytes()).unwrap();
            stream
        };
        let slow: Vec<_> = (0..600).map(|_| open()).collect();
        for _ in 0..5 {
            serves_promptly(&console);
        }
        drop(slow);
    }
}

#[test]
fn wrong_tokens_are_delayed_without_delaying_others() {
    let store = store();
    let console = Console::with_token(&store.url());
    let wrong = format!(
        "GET / HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n{}Connection: close\r\n\r\n",
        console.port,
        bearer("wrong")
    );
    let mut guesses: Vec<_> = (0..50).map(|_| console.connect()).collect();
    for stream in &mut guesses {
        stream.write_all(wrong.as_bytes()).unwrap();
    }
    let began = Instant::now();
    assert_eq!(console.request("GET", "/", &bearer(TOKEN), "").status, 200);
    assert!(began.elapsed() < PROMPTLY);
    let replies: Vec<_> = guesses.iter_mut().map(|stream| Reply::read(stream).status).collect();
    assert!(replies.iter().all(|status| [401, 429].contains(status)), "{replies:?}");
    assert!(replies.contains(&429) && replies.contains(&401), "{replies:?}");
}
