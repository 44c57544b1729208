//! How a connection to Redis is made. The steps, in this order: connect, authenticate, identify the server, subscribe to
//! our wake-ups, load the scripts that the server does not have, and close the previous connection on the server.
//! Without the subscription, a waiter would find its permit only with the query once a second. The previous connection
//! must be closed because it may be half open: it would still receive wake-ups that nobody reads, and requests that it
//! carried might still be applied. A connection that only reads neither subscribes nor loads, and closes none.
//!
//! Everything up to the subscription is sent before the first reply is read, so a new connection to a server that has
//! the scripts takes one round trip. The replies are checked in the order of the steps: a server of the wrong kind
//! refuses several of these commands, and its kind is the error to report.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
#[cfg(unix)]
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lone_fork::CloseOnFork;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::command::RedisCommand;
use super::connection::{Connection, Target};
use super::errors::{RedisError, ServerError, translate, translate_server};
use super::sentinel::Announced;
use super::socket::{MOST_WAKE_UPS, Replies, Socket, Stream, WakeUp};
use super::value::Value;
use super::{RedisSettings, tls};
use crate::backend::threads;
use crate::url::{Endpoint, ServerSettings};
use crate::{ClientId, Error, process};

/// The oldest supported server (it has `ZMSCORE`), and the oldest supported node of a cluster (it has `SPUBLISH`).
const OLDEST: (u32, u32) = (6, 2);
const OLDEST_NODE: (u32, u32) = (7, 0);

/// How long the server keeps the record of a client: a little longer than three of the intervals at which it is
/// written.
const CLIENT_RECORD_TTL: Duration = Duration::from_secs(200);

/// A socket over which the client is authenticated, and what the client knows about it.
pub(super) struct OpenSocket {
    pub(super) socket: Arc<Socket>,
    /// The server that it leads to.
    pub(super) info: ServerSettings,
    pub(super) wake_ups: mpsc::Receiver<WakeUp>,
    /// Receives the primaries that the sentinels announce, since before this connection was made.
    pub(super) announced: Option<Announced>,
    _reader: AbortOnDrop,
    pub(super) identity: Identity,
    /// Whether requests sent over the previous connection may still be applied.
    pub(super) stragglers: bool,
}

/// Identifies a connection on its server. The run id is needed because a restarted server reuses the numbers.
#[derive(Clone, Default, PartialEq)]
pub(super) struct Identity {
    /// Empty if we lack the permission to read it.
    run: String,
    id: i64,
}

impl Identity {
    /// Whether the two connections may lead to different servers, or to one that has restarted.
    pub(super) fn differs(&self, other: &Self) -> bool {
        self.run.is_empty() || self.run != other.run
    }
}

/// A task that ends when this is dropped.
pub(super) struct AbortOnDrop(pub(super) tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connection {
    /// `before` is the previous connection of this client.
    pub(super) async fn connect(
        &self,
        client: ClientId,
        before: Option<&Identity>,
    ) -> Result<OpenSocket, Error> {
        match &self.target {
            Target::Only(info) | Target::Node(info) => self.connect_to(info, client, before).await,
            Target::Primary(sentinels) => sentinels.connect(self, client, before).await,
        }
    }

    pub(super) async fn connect_to(
        &self,
        info: &ServerSettings,
        client: ClientId,
        before: Option<&Identity>,
    ) -> Result<OpenSocket, Error> {
        let what = format!("connecting to {info}");
        let failed = |error: RedisError| translate(&what, &error);
        let writes = !self.settings.only_reads();
        // In a cluster the channels depend on the slots in use: see `Connection::request_listening`.
        let channel = (writes && !self.is_node())
            .then(|| format!("{}:wake:{client}", self.settings.namespace));
        let queries = [["INFO", "server"], ["CLIENT", "ID"], ["INFO", "replication"]];
        let mut queries: Vec<_> = queries.map(|[name, of]| RedisCommand::new(name).arg(of)).into();
        queries.extend(channel.iter().map(|channel| RedisCommand::new("SUBSCRIBE").arg(channel)));
        if writes {
            queries.extend(self.scripts.exist());
        }
        let opened = OpenSocket::open(&self.settings, info, &queries).await;
        let (mut socket, answers) = opened.map_err(failed)?;
        // A user without permission for these queries is accepted. Then an old server or a replica goes unnoticed.
        let mut answers = answers.into_iter();
        let mut next = || answers.next().unwrap_or_default();
        let server = next().read::<String>().ok();
        socket.identity.id = next().read().unwrap_or_default();
        let replication = next().read::<String>().ok();
        if let Some(server) = server {
            self.check_mode(&what, info, &server)?;
            check_version(&server, self.is_node())?;
            field(&server, "run_id:").unwrap_or_default().clone_into(&mut socket.identity.run);
        }
        if let Some(replication) = replication {
            // Sentinels and cluster nodes may have outdated information about which server is the primary.
            let is_only = matches!(self.target, Target::Only(_));
            let may_change = before.is_some() || !is_only;
            // A write to a replica is lost, even if the replica accepts writes. It is allowed only if the URL names
            // that replica itself.
            check_role(&what, &replication, may_change, is_only)?;
        }
        let subscribed = channel.map(|channel| (next(), channel));
        // Check this after the kind of server: a sentinel, for example, does not support scripts.
        if writes {
            self.load_missing(&socket, answers).await.map_err(failed)?;
        }
        if let Some((answer, channel)) = subscribed {
            answer.checked().map_err(|error| no_wake_ups(&channel, &error))?;
        }
        if let Some(before) = before.filter(|_| writes) {
            socket.stragglers = !socket.close_on_server(before).await;
        }
        Ok(socket)
    }

    /// Loads the scripts that the server does not have. `exist` are the answers to [`Scripts::exist`].
    ///
    /// [`Scripts::exist`]: super::scripts::Scripts::exist
    async fn load_missing(
        &self,
        socket: &OpenSocket,
        exist: impl Iterator<Item = Value>,
    ) -> Result<(), RedisError> {
        // A server that refuses the question may still let us load them, or say why not.
        let exists = |answer: Value| answer.read::<Vec<i64>>().is_ok_and(|found| found == [1]);
        let exist: Vec<_> = exist.map(exists).collect();
        if exist.iter().all(|exists| *exists) {
            return Ok(());
        }
        let missing = self.scripts.load().zip(exist).filter(|(_, exists)| !exists);
        let missing: Vec<_> = missing.map(|(load, _)| load).collect();
        for answer in socket.query(&missing).await? {
            answer.checked()?;
        }
        Ok(())
    }

    fn is_node(&self) -> bool {
        matches!(self.target, Target::Node(_))
    }

    /// Refuses a server of another kind than the URL says. The error suggests the right URL.
    fn check_mode(&self, what: &str, info: &ServerSettings, server: &str) -> Result<(), Error> {
        let problem = match (field(server, "redis_mode:"), &self.target) {
            (Some("cluster"), Target::Only(_) | Target::Primary(_)) => {
                format!("the server is a cluster node: use {}", info.cluster_url())
            }
            (Some("sentinel"), Target::Only(_)) => {
                let url = info.sentinel_url();
                format!("the server is a sentinel: use {url}, with the name of the primary")
            }
            (Some("standalone"), Target::Node(_)) => {
                format!("the server is not a cluster node: use {info}")
            }
            _ => return Ok(()),
        };
        Err(Error::Unusable { problem: format!("{what}: {problem}") })
    }
}

/// The error for a channel that the server does not allow us to subscribe to.
pub(super) fn no_wake_ups(channel: &str, error: &ServerError) -> Error {
    translate_server(&subscribing(channel), error)
}

fn subscribing(channel: &str) -> String {
    format!("subscribing to the wake-up channel {channel:?}")
}

/// Returns the commands that write the record of this client, which statistics show.
pub(super) fn client_record(namespace: &str, client: ClientId) -> [RedisCommand; 3] {
    let key = format!("{namespace}:client:{client}");
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
    let host = process::host().unwrap_or_default();
    let who = RedisCommand::new("HSET").arg(&key).arg("host").arg(&*host);
    let since = RedisCommand::new("HSETNX").arg(&key).arg("since");
    [
        who.arg("pid").arg_fmt(std::process::id()).arg("program").arg(program),
        since.arg_fmt(crate::clock::wall_micros() / 1_000_000),
        RedisCommand::new("EXPIRE").arg(&key).arg_fmt(CLIENT_RECORD_TTL.as_secs()),
    ]
}

/// Connects a socket.
async fn connect_socket(
    settings: &RedisSettings,
    server: &ServerSettings,
) -> Result<Socket, RedisError> {
    let (host, port) = match &server.endpoint {
        Endpoint::Tcp { host, port, .. } => (host, *port),
        #[cfg(unix)]
        Endpoint::Unix(path) => return Ok(Socket::new(Stream::Unix(connect_unix(path)?), None)),
        #[cfg(not(unix))]
        Endpoint::Unix(_) => return Err(RedisError::Url("this platform has no Unix sockets")),
    };
    let session = server.uses_tls().then(|| tls::session(host, settings.roots.as_ref()));
    let session = session.transpose()?;
    let stream = connect_tcp(host, port, settings.answer_timeout).await?;
    Ok(Socket::new(Stream::Tcp(stream), session))
}

/// Returns the command that chooses the protocol and authenticates us.
fn hello(server: &ServerSettings) -> RedisCommand {
    let hello = RedisCommand::new("HELLO").arg("3");
    let Some(password) = &server.password else { return hello };
    hello.arg("AUTH").arg(server.user.as_deref().unwrap_or("default")).arg(password)
}

/// Returns the commands that follow: the first one selects the database, if that is not database 0. A sentinel does not
/// support that command. The others describe this library to `CLIENT LIST`, from Redis 7.2 on.
fn after_hello(server: &ServerSettings) -> Vec<RedisCommand> {
    let database = server.database;
    let select = (database != 0).then(|| RedisCommand::new("SELECT").arg_fmt(database));
    let description = [("LIB-NAME", "leasehold"), ("LIB-VER", env!("CARGO_PKG_VERSION"))];
    let describe = description
        .map(|(field, value)| RedisCommand::new("CLIENT").args(["SETINFO", field, value]));
    select.into_iter().chain(describe).collect()
}

impl Drop for OpenSocket {
    fn drop(&mut self) {
        self.socket.end(&RedisError::lost());
    }
}

impl OpenSocket {
    /// Opens a connection and authenticates. Also returns the replies to `queries`, which take no further round trip.
    pub(super) async fn open(
        settings: &RedisSettings,
        info: &ServerSettings,
        queries: &[RedisCommand],
    ) -> Result<(Self, Vec<Value>), RedisError> {
        let socket = Arc::new(connect_socket(settings, info).await?);
        // Sent before the first byte is read: a server that refuses connections sends the reason at once and closes,
        // and the reason is then the reply to HELLO.
        let hello = socket.send(&[hello(info)]);
        let after_hello = after_hello(info);
        let rest = socket.send(&[&after_hello, queries].concat());
        let (push, wake_ups) = mpsc::channel(MOST_WAKE_UPS);
        let (reading, answer_timeout) = (socket.clone(), settings.answer_timeout);
        // The channel closes when the connection is lost.
        let reader = tokio::spawn(async move { reading.read(answer_timeout, &push).await });
        let open = Self {
            socket,
            info: info.clone(),
            wake_ups,
            announced: None,
            _reader: AbortOnDrop(reader),
            identity: Identity::default(),
            stragglers: false,
        };
        received(hello).await?.pop().unwrap_or_default().checked()?;
        let mut replies = received(rest).await?;
        let answers = replies.split_off(after_hello.len());
        if info.database != 0 {
            replies.swap_remove(0).checked()?;
        }
        Ok((open, answers))
    }

    /// Sends commands and returns their replies.
    pub(super) async fn query(&self, commands: &[RedisCommand]) -> Result<Vec<Value>, RedisError> {
        received(self.socket.send(commands)).await
    }

    pub(super) async fn ask_one(&self, command: RedisCommand) -> Result<Value, RedisError> {
        Ok(self.query(&[command]).await?.pop().unwrap_or_default().checked()?)
    }

    /// Closes the previous connection on the server. Returns true if nothing that it carried can still be applied: it
    /// is closed, or the server has restarted.
    async fn close_on_server(&self, before: &Identity) -> bool {
        if before.run.is_empty() || self.identity.run.is_empty() || before.id == 0 {
            return false;
        }
        if before.run != self.identity.run {
            return true;
        }
        let kill = RedisCommand::new("CLIENT").args(["KILL", "ID"]).arg_fmt(before.id);
        // Usually it is closed already; then the server answers 0.
        self.ask_one(kill).await.is_ok()
    }
}

/// Waits for the replies to a request.
pub(super) async fn received(replies: Replies) -> Result<Vec<Value>, RedisError> {
    replies.await.unwrap_or_else(|_| Err(RedisError::lost()))
}

async fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let host = host.to_owned();
    let look_up = move || (host, port).to_socket_addrs().map(Iterator::collect);
    threads::run("leasehold-dns", look_up).await.map_err(io::Error::other)?
}

/// Connects to all addresses of the host at once, and returns the first connection that succeeds, because some
/// addresses may be unreachable.
async fn connect_tcp(
    host: &str,
    port: u16,
    answer_timeout: Duration,
) -> Result<CloseOnFork<TcpStream>, RedisError> {
    let mut attempts = JoinSet::new();
    for address in addresses(host, port).await? {
        attempts.spawn(connect_to_address(address));
    }
    let mut error = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    while let Some(attempt) = attempts.join_next().await {
        match attempt.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(socket) => {
                set_options(&socket, answer_timeout)?;
                return Ok(socket);
            }
            Err(failed) => error = failed,
        }
    }
    Err(error.into())
}

/// Makes the system notice that the server is gone, even if nothing is sent, or nothing that was sent is acknowledged.
fn set_options(socket: &TcpStream, answer_timeout: Duration) -> io::Result<()> {
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    socket.set_nodelay(true)?;
    let options = socket2::SockRef::from(socket);
    options.set_tcp_keepalive(&keepalive)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    options.set_tcp_user_timeout(Some(answer_timeout))?;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = answer_timeout;
    Ok(())
}

async fn connect_to_address(address: SocketAddr) -> io::Result<CloseOnFork<TcpStream>> {
    let socket =
        CloseOnFork::open(|| TcpStream::from_std(begin_to_connect(&address.into())?.into()))?;
    // It can be written when the attempt has ended, with or without success.
    socket.writable().await?;
    match socket.take_error()? {
        Some(error) => Err(error),
        None => Ok(socket),
    }
}

/// The system connects a local socket at once, or not at all.
#[cfg(unix)]
fn connect_unix(path: &Path) -> io::Result<CloseOnFork<tokio::net::UnixStream>> {
    let address = socket2::SockAddr::unix(path)?;
    CloseOnFork::open(|| tokio::net::UnixStream::from_std(begin_to_connect(&address)?.into()))
}

/// Returns a socket that is connected, or that is being connected in the background.
fn begin_to_connect(address: &socket2::SockAddr) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(address.domain(), socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(address) {
        Err(error) if !is_under_way(&error) => Err(error),
        _ => Ok(socket),
    }
}

fn is_under_way(error: &io::Error) -> bool {
    #[cfg(unix)]
    let under_way = rustix::io::Errno::INPROGRESS.raw_os_error();
    #[cfg(windows)]
    let under_way = 10_035; // WSAEWOULDBLOCK
    error.raw_os_error() == Some(under_way)
}

pub(super) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn check_version(info: &str, is_node: bool) -> Result<(), Error> {
    let Some(version) = field(info, "redis_version:") else { return Ok(()) };
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or_default());
    let found = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let (oldest, why) = if is_node { (OLDEST_NODE, " in a cluster") } else { (OLDEST, "") };
    if found < oldest {
        let (major, minor) = oldest;
        let what = format!(
            "the server is Redis {version}; the minimum is {major}.{minor}{why}: upgrade it"
        );
        return Err(Error::Unusable { problem: what });
    }
    Ok(())
}

/// Refuses a replica, unless it accepts writes and `may_be_written` is set. If `may_change` is set, the error is
/// temporary: the server may be a demoted primary, and the address may soon lead to the new one.
fn check_role(what: &str, info: &str, may_change: bool, may_be_written: bool) -> Result<(), Error> {
    let is_writable = field(info, "slave_read_only:") == Some("0");
    if field(info, "role:") != Some("slave") || is_writable && may_be_written {
        return Ok(());
    }
    let kind = if is_writable { "a replica" } else { "a read-only replica" };
    let what = format!("{what}: the server is {kind}");
    if may_change {
        return Err(Error::unavailable(what, false, None));
    }
    Err(Error::Unusable { problem: format!("{what}: connect to the primary") })
}
