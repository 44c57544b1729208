//! A TCP proxy that records what clients send and receive, and counts their round trips.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::host;

/// How late each answer is. What a client sends without waiting for an answer is so recorded before that answer, and
/// belongs to the same round trip.
const LATENCY: Duration = Duration::from_millis(10);

/// One read from a socket, recorded before it is forwarded. So it is older than everything that it causes.
struct Entry {
    at: u64,
    connection: usize,
    bytes: usize,
    kind: Kind,
}

enum Kind {
    Opened,
    ToServer {
        /// The commands that it completes, if the protocol is that of Redis.
        commands: Vec<String>,
        /// Whether it is the rest of a command that an earlier entry began.
        is_rest: bool,
    },
    ToClient,
}

type Log = Arc<Mutex<Vec<Entry>>>;

/// A proxy on loopback. It stays until the process ends.
pub(crate) struct WireLog {
    port: u16,
    log: Log,
}

/// The traffic of a client, up to some moment.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) connections: usize,
    /// How often a client sent something at the beginning of a connection, or after an answer.
    pub(crate) round_trips: usize,
    pub(crate) commands: usize,
    pub(crate) bytes_to_server: usize,
    pub(crate) bytes_to_client: usize,
    /// The commands of each round trip, in the order in which they began.
    pub(crate) in_order: String,
}

impl WireLog {
    /// Starts a proxy in front of a server on this loopback port.
    pub(crate) fn start(upstream: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let log = Log::default();
        let for_thread = log.clone();
        thread::spawn(move || {
            for (connection, client) in listener.incoming().flatten().enumerate() {
                // A client that cannot be served reports that itself.
                let _ = relay(&for_thread, connection, &client, upstream);
            }
        });
        Ok(Self { port, log })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Forgets what was recorded.
    pub(crate) fn clear(&self) {
        self.log.lock().expect("no thread panics with it").clear();
    }

    /// Returns the traffic before this moment, by [`host::nanos`].
    pub(crate) fn before(&self, moment: u64) -> Traffic {
        let log = self.log.lock().expect("no thread panics with it");
        traffic(log.iter().take_while(|entry| entry.at < moment))
    }
}

fn relay(log: &Log, connection: usize, client: &TcpStream, upstream: u16) -> std::io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream))?;
    for socket in [client, &server] {
        socket.set_nodelay(true)?;
    }
    record(log, connection, 0, Kind::Opened);
    for (from, to, is_to_server) in [(client, &server, true), (&server, client, false)] {
        let (log, mut from, mut to) = (log.clone(), from.try_clone()?, to.try_clone()?);
        thread::spawn(move || {
            let (mut chunk, mut unparsed) = (vec![0; 256 * 1024], Vec::new());
            while let Ok(bytes @ 1..) = from.read(&mut chunk) {
                let kind = if is_to_server {
                    let is_rest = !unparsed.is_empty();
                    unparsed.extend_from_slice(&chunk[..bytes]);
                    Kind::ToServer { commands: take_commands(&mut unparsed), is_rest }
                } else {
                    thread::sleep(LATENCY);
                    Kind::ToClient
                };
                record(&log, connection, bytes, kind);
                if to.write_all(&chunk[..bytes]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    }
    Ok(())
}

fn record(log: &Log, connection: usize, bytes: usize, kind: Kind) {
    let mut log = log.lock().expect("no thread panics with it");
    // Read under the lock, so that the entries are in order.
    log.push(Entry { at: host::nanos(), connection, bytes, kind });
}

/// Removes the complete commands from the beginning, and returns their names. Leaves nothing of other protocols.
fn take_commands(bytes: &mut Vec<u8>) -> Vec<String> {
    let mut names = Vec::new();
    if !bytes.starts_with(b"*") {
        bytes.clear();
    }
    while let Some((words, length)) = command(bytes) {
        let long = ["CLIENT", "SCRIPT", "CONFIG", "FUNCTION"];
        let words: Vec<_> = words.iter().map(|word| word.to_uppercase()).collect();
        let count = if long.contains(&words[0].as_str()) { 2 } else { 1 };
        names.push(words[..words.len().min(count)].join(" "));
        bytes.drain(..length);
    }
    names
}

/// Returns the first two words of the first command, and its length. `None` if it is not complete.
fn command(bytes: &[u8]) -> Option<(Vec<String>, usize)> {
    let mut at = 0;
    let number = |at: &mut usize, mark: u8| -> Option<usize> {
        let line = bytes.get(*at..)?;
        let end = line.windows(2).position(|two| two == b"\r\n")?;
        *at += end + 2;
        (*line.first()? == mark).then_some(())?;
        std::str::from_utf8(&line[1..end]).ok()?.parse().ok()
    };
    let mut words = Vec::new();
    for index in 0..number(&mut at, b'*')? {
        let length = number(&mut at, b'$')?;
        let word = bytes.get(at..at + length)?;
        at += length + 2;
        if index < 2 {
            words.push(String::from_utf8_lossy(word).into_owned());
        }
    }
    (at <= bytes.len() && !words.is_empty()).then_some((words, at))
}

fn traffic<'a>(entries: impl Iterator<Item = &'a Entry>) -> Traffic {
    let mut traffic = Traffic::default();
    let mut trips: Vec<(usize, Vec<&str>)> = Vec::new();
    // For each connection: whether its last entry was an answer, and its latest round trip.
    let mut connections: BTreeMap<usize, (bool, usize)> = BTreeMap::new();
    for entry in entries {
        let (answered, latest) = connections.entry(entry.connection).or_insert((true, 0));
        match &entry.kind {
            Kind::Opened => {}
            Kind::ToServer { commands, is_rest } => {
                if *answered && !is_rest {
                    *latest = trips.len();
                    trips.push((entry.connection, Vec::new()));
                }
                *answered = false;
                trips[*latest].1.extend(commands.iter().map(String::as_str));
                traffic.commands += commands.len();
                traffic.bytes_to_server += entry.bytes;
            }
            Kind::ToClient => {
                *answered = true;
                traffic.bytes_to_client += entry.bytes;
            }
        }
    }
    traffic.connections = connections.len();
    traffic.round_trips = trips.len();
    let numbers: Vec<_> = connections.into_keys().collect();
    let in_order = trips.iter().map(|(connection, commands)| {
        match numbers.iter().position(|number| number == connection) {
            Some(index @ 1..) => format!("{} (connection {})", listed(commands), index + 1),
            _ => listed(commands),
        }
    });
    traffic.in_order = in_order.collect::<Vec<_>>().join(" → ");
    traffic
}

/// Returns the commands of one round trip, each with the number of its repetitions.
fn listed(commands: &[&str]) -> String {
    let same = commands.chunk_by(|a, b| a == b).map(|run| match run {
        [name] => (*name).to_owned(),
        [name, ..] => format!("{} × {name}", run.len()),
        [] => String::new(),
    });
    same.collect::<Vec<_>>().join(", ")
}
