//! A server that sends what no Redis server sends: without end, too large, or in answer to nothing.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{Error, LossReason};
use testkit::redis_server::RedisServer;
use testkit::wait::deadline;

use super::{LEASE, acquire, builder};

/// What a flood begins with and what it repeats, while there is one.
type Flood = Option<(Vec<u8>, Vec<u8>)>;

/// A relay in front of a server that floods its clients on demand.
struct Hostile {
    port: u16,
    flood: Arc<Mutex<Flood>>,
}

impl Hostile {
    fn start(upstream: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let flood = Arc::default();
        let shared = Arc::clone(&flood);
        // The threads end with the process of the test.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, flood) = (client.unwrap(), Arc::clone(&shared));
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream)) else {
                    return;
                };
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || pass(from, to));
                std::thread::spawn(move || answer(server, client, &flood));
            }
        });
        Self { port, flood }
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends `first` and then `endless`, without end, instead of the next answer over each connection.
    fn flood(&self, first: &str, endless: &[u8]) {
        let block = endless.repeat(64 * 1024 / endless.len());
        *self.flood.lock().unwrap() = Some((first.as_bytes().to_vec(), block));
    }

    fn heal(&self) {
        *self.flood.lock().unwrap() = None;
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

/// Passes the server's answers on, until a flood replaces one of them.
fn answer(mut server: TcpStream, mut client: TcpStream, flood: &Mutex<Flood>) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = server.read(&mut buffer) {
        let flooding = flood.lock().unwrap().clone();
        if let Some((first, endless)) = flooding {
            let mut sent = client.write_all(&first);
            while sent.is_ok() && flood.lock().unwrap().is_some() {
                sent = client.write_all(&endless);
            }
            break;
        }
        if client.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

/// Returns the memory of this process in MiB.
fn memory() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (pages * 4096) >> 20
}

const MESSAGE: &[u8] =
    b">3\r\n$7\r\nmessage\r\n$14\r\nadv-sem:wake:0\r\n$20\r\n1-2 3 4 5 6 unheard!\r\n";

/// Timers go on during a flood: the permit is lost when its validity ends. Memory is bounded. Afterwards the client
/// reconnects.
#[tokio::test]
async fn a_server_that_sends_without_end_neither_stops_timers_nor_takes_memory() {
    let floods: [(&str, &[u8]); 6] = [
        ("", MESSAGE),
        ("$100000000000\r\n", b"x"),
        ("", b"*1\r\n"),
        ("*500000\r\n", b"_\r\n"),
        ("-", b"x"),
        ("", b"+OK\r\n"),
    ];
    let (server, before) = (Arc::new(RedisServer::start()), memory());
    let mut all = tokio::task::JoinSet::new();
    for (at, (first, endless)) in floods.into_iter().enumerate() {
        all.spawn(survives(server.clone(), format!("x{at}"), first, endless));
    }
    while let Some(survived) = all.join_next().await {
        survived.unwrap();
        assert!(memory() < before + 600, "{} MiB, before {before}", memory());
    }
}

async fn survives(server: Arc<RedisServer>, name: String, first: &str, endless: &[u8]) {
    let hostile = Hostile::start(server.port());
    let client = builder(&hostile.url()).open().await.unwrap();
    let semaphore = client.semaphore(&name, 1).lease(LEASE).build().unwrap();
    let permit = acquire(&semaphore).await;
    hostile.flood(first, endless);
    let began = Instant::now();
    let reason = deadline(permit.lost()).await;
    assert_eq!(reason, LossReason::NotRenewed, "{name}");
    assert!(began.elapsed() < 5 * LEASE, "{name} took {:?}", began.elapsed());
    let error = deadline(semaphore.try_acquire()).await.unwrap_err();
    let is_expected = matches!(error, Error::Unavailable { .. } | Error::Unusable { .. });
    assert!(is_expected, "{name}: {error}");
    hostile.heal();
    drop(permit);
    let recovers = async {
        while !matches!(semaphore.try_acquire().await, Ok(Some(_))) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    deadline(recovers).await;
}
