//! How a connection to Redis is made. The steps, in this order: connect, load the scripts, subscribe to our wake-ups,
//! and close the previous connection on the server. Without the subscription, a waiter would find its permit only with
//! the query once a second. The previous connection must be closed because it may be half open: it would still receive
//! wake-ups that nobody reads, and requests that it carried might still be applied. A connection that only reads needs
//! the first step only.

use std::io;
use std::net::SocketAddr;
#[cfg(unix)]
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lone_fork::CloseOnFork;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2};
use redis::{
    Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, ProtocolVersion, PushInfo, PushKind,
    RedisError, ServerErrorKind, Value,
};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::errors::translate;
use super::link::{Link, Server};
use super::sentinel::Announced;
use super::wire::{MOST_WAKE_UPS, Socket, Stream, Wire};
use super::{RedisSettings, deployment, resp, tls};
use crate::{ClientId, Error, process};

/// The oldest supported server (it has `ZMSCORE`), and the oldest supported node of a cluster (it has `SPUBLISH`).
const OLDEST: (u32, u32) = (6, 2);
const OLDEST_NODE: (u32, u32) = (7, 0);

/// How long the server keeps the record of a client: a little longer than three of the intervals at which it is
/// written.
const CLIENT_RECORD_TTL: Duration = Duration::from_secs(200);

/// How long we wait for the server to say why it closed the connection.
const LISTEN: Duration = Duration::from_millis(200);

/// One connection.
pub(super) struct Connection {
    pub(super) commands: Arc<Wire>,
    /// The server that it leads to.
    pub(super) info: ConnectionInfo,
    pub(super) wake_ups: mpsc::Receiver<PushInfo>,
    /// Receives the primaries that the sentinels announce, since before this connection was made.
    pub(super) announced: Option<Announced>,
    _reader: AbortOnDrop,
    /// The task that reads wake-ups from a second connection, if the server speaks only RESP2.
    second: Option<AbortOnDrop>,
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

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Link {
    /// `before` is the previous connection of this client.
    pub(super) async fn connect(
        &self,
        client: ClientId,
        before: Option<&Identity>,
    ) -> Result<Connection, Error> {
        match &self.server {
            Server::Only(info) | Server::Node(info) => self.connect_to(info, client, before).await,
            Server::Primary(sentinels) => sentinels.connect(self, client, before).await,
        }
    }

    pub(super) async fn connect_to(
        &self,
        info: &ConnectionInfo,
        client: ClientId,
        before: Option<&Identity>,
    ) -> Result<Connection, Error> {
        let what = format!("connecting to {}", deployment::address(info));
        let failed = |error: RedisError| translate(&what, &error);
        let mut live = match Connection::open(&self.settings, info).await {
            Err(error) if refuses_resp3(&error) && !self.is_node() => {
                self.connect_resp2(info, client).await?
            }
            Err(error) if error.is_connection_dropped() && resp::violated(&error).is_none() => {
                return Err(failed(reason(info).await.unwrap_or(error)));
            }
            made => made.map_err(failed)?,
        };
        let questions = [["INFO", "server"], ["CLIENT", "ID"], ["INFO", "replication"]];
        let mut hello: Vec<_> =
            questions.map(|[name, of]| redis::cmd(name).arg(of).to_owned()).into();
        if !self.settings.only_reads() {
            hello.extend(self.scripts.load());
        }
        let questions = questions.len();
        let mut answers = live.ask(&hello).await.map_err(failed)?;
        let loaded = answers.split_off(questions);
        // A user without permission for these queries is accepted. Then an old server or a replica goes unnoticed.
        let mut answers = answers.into_iter();
        let mut next = || {
            let answer = answers.next().unwrap_or(Value::Nil);
            redis::from_redis_value::<String>(answer).ok()
        };
        let (server, id, replication) = (next(), next(), next());
        if let Some(server) = server {
            self.check_mode(&what, info, &server)?;
            check_version(&server, self.is_node())?;
            field(&server, "run_id:").unwrap_or_default().clone_into(&mut live.identity.run);
        }
        live.identity.id = id.and_then(|id| id.parse().ok()).unwrap_or_default();
        if let Some(replication) = replication {
            // Sentinels and cluster nodes may have outdated information about which server is the primary.
            let is_only = matches!(self.server, Server::Only(_));
            let may_change = before.is_some() || !is_only;
            // A write to a replica is lost, even if the replica accepts writes. It is allowed only if the URL names
            // that replica itself.
            check_role(&what, &replication, may_change, is_only)?;
        }
        // Check this after the kind of server: a sentinel, for example, does not support scripts.
        for answer in loaded {
            answer.extract_error().map_err(failed)?;
        }
        // In a cluster the channels depend on the slots in use: see `Link::request_listening`.
        if live.second.is_none() && !self.is_node() && !self.settings.only_reads() {
            let subscribe = redis::cmd("SUBSCRIBE").arg(self.channel(client)).to_owned();
            let subscribed = live.ask_one(subscribe).await;
            subscribed.map_err(|error| no_wake_ups(&self.channel(client), &error))?;
        }
        if let Some(before) = before
            && !self.settings.only_reads()
        {
            live.stragglers = !live.close_on_server(before).await;
        }
        Ok(live)
    }

    fn is_node(&self) -> bool {
        matches!(self.server, Server::Node(_))
    }

    /// Refuses a server of another kind than the URL says. The error suggests the right URL.
    fn check_mode(&self, what: &str, info: &ConnectionInfo, server: &str) -> Result<(), Error> {
        let problem = match (field(server, "redis_mode:"), &self.server) {
            (Some("cluster"), Server::Only(_) | Server::Primary(_)) => {
                format!("the server is a cluster node: use {}", deployment::cluster_url(info))
            }
            (Some("sentinel"), Server::Only(_)) => {
                let url = deployment::sentinel_url(info);
                format!("the server is a sentinel: use {url}, with the name of the primary")
            }
            (Some("standalone"), Server::Node(_)) => {
                format!("the server is not a cluster node: use {}", deployment::address(info))
            }
            _ => return Ok(()),
        };
        Err(Error::Refused { what: format!("{what}: {problem}") })
    }

    async fn connect_resp2(
        &self,
        info: &ConnectionInfo,
        client: ClientId,
    ) -> Result<Connection, Error> {
        let what = format!("connecting to {}", deployment::address(info));
        let failed = |error: RedisError| translate(&what, &error);
        let (push, wake_ups) = mpsc::channel(MOST_WAKE_UPS);
        let info = with_protocol(&self.settings, info, ProtocolVersion::RESP2);
        let commands = wire(&self.settings, &info, false).await.map_err(failed)?;
        let mut second = None;
        if !self.settings.only_reads() {
            let wire = wire(&self.settings, &info, true).await.map_err(failed)?;
            let (reading, answer_timeout) = (wire.clone(), self.settings.answer_timeout);
            let to = push.clone();
            second = Some(AbortOnDrop(tokio::spawn(async move {
                reading.read(answer_timeout, &to).await;
                let _ = to.send(disconnection()).await;
            })));
            let subscribe = redis::cmd("SUBSCRIBE").arg(self.channel(client)).to_owned();
            let subscribed = ask_over(&wire, &[subscribe]).await;
            let subscribed =
                subscribed.and_then(|mut all| all.pop().unwrap_or_default().extract_error());
            subscribed.map_err(|error| no_wake_ups(&self.channel(client), &error))?;
        }
        Ok(Connection::begin_to_read(&self.settings, info, commands, (push, wake_ups), second))
    }

    fn channel(&self, client: ClientId) -> String {
        format!("{}:wake:{client}", self.settings.namespace)
    }
}

/// The error for a channel that the server does not allow us to subscribe to.
pub(super) fn no_wake_ups(channel: &str, error: &RedisError) -> Error {
    translate(&format!("subscribing to the wake-up channel {channel:?}"), error)
}

/// Returns the commands that write the record of this client, which statistics show.
pub(super) fn client_record(namespace: &str, client: ClientId) -> [Cmd; 3] {
    let key = format!("{namespace}:client:{client}");
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
    let mut who = redis::cmd("HSET");
    who.arg(&key).arg("host").arg(process::host().unwrap_or_default().as_ref());
    who.arg("pid").arg(std::process::id()).arg("program").arg(program);
    let mut since = redis::cmd("HSETNX");
    since.arg(&key).arg("since").arg(crate::clock::wall_micros() / 1_000_000);
    let mut expire = redis::cmd("EXPIRE");
    expire.arg(&key).arg(CLIENT_RECORD_TTL.as_secs());
    [who, since, expire]
}

/// Returns the reason why the server refuses connections, for example that it has too many. The server sends the reason
/// unasked and closes the connection, so that on an ordinary connection our first write fails before the reason is
/// read. This connection only reads. Over TLS the server sends no reason.
async fn reason(info: &ConnectionInfo) -> Option<RedisError> {
    let listen = async {
        match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let made = tokio::net::TcpStream::connect((host.as_str(), *port)).await;
                refusal(made.ok()?).await
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => {
                refusal(tokio::net::UnixStream::connect(path).await.ok()?).await
            }
            _ => None,
        }
    };
    tokio::time::timeout(LISTEN, listen).await.ok()?
}

/// Connects a socket. The Redis library authenticates us over it and selects the database. For `is_second`, see
/// [`Wire`].
async fn wire(
    settings: &RedisSettings,
    info: &ConnectionInfo,
    is_second: bool,
) -> Result<Arc<Wire>, RedisError> {
    let wire = match info.addr() {
        ConnectionAddr::Tcp(host, port) => {
            let socket = connect_tcp(host, *port, info.tcp_settings()).await?;
            Wire::new(Socket::Tcp(socket), None, is_second)
        }
        ConnectionAddr::TcpTls { host, port, insecure, .. } => {
            let session = tls::session(host, *insecure, settings.roots.as_ref())?;
            let socket = connect_tcp(host, *port, info.tcp_settings()).await?;
            Wire::new(Socket::Tcp(socket), Some(session), is_second)
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => Wire::new(Socket::Unix(connect_unix(path)?), None, is_second),
        _ => {
            let problem = "this platform does not support addresses of this kind";
            return Err((ErrorKind::InvalidClientConfig, problem).into());
        }
    };
    // The library reads exactly the answers to its own commands, because nothing else has been sent yet.
    let stream = Stream::new(wire.clone());
    let made = MultiplexedConnection::new(info.redis_settings(), stream).await;
    drop(made.map_err(|error| wire.violation().map_or(error, resp::violation))?);
    Ok(wire)
}

fn with_protocol(
    settings: &RedisSettings,
    info: &ConnectionInfo,
    protocol: ProtocolVersion,
) -> ConnectionInfo {
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let tcp = tcp.set_user_timeout(settings.answer_timeout);
    let redis = info.redis_settings().clone().set_protocol(protocol);
    info.clone().set_redis_settings(redis).set_tcp_settings(tcp)
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.commands.end(&lost());
    }
}

impl Connection {
    /// Opens a connection that speaks RESP3, and authenticates. Does nothing more.
    pub(super) async fn open(
        settings: &RedisSettings,
        info: &ConnectionInfo,
    ) -> Result<Self, RedisError> {
        let info = with_protocol(settings, info, ProtocolVersion::RESP3);
        let wire = wire(settings, &info, false).await?;
        Ok(Self::begin_to_read(settings, info, wire, mpsc::channel(MOST_WAKE_UPS), None))
    }

    fn begin_to_read(
        settings: &RedisSettings,
        info: ConnectionInfo,
        commands: Arc<Wire>,
        (push, wake_ups): (mpsc::Sender<PushInfo>, mpsc::Receiver<PushInfo>),
        second: Option<AbortOnDrop>,
    ) -> Self {
        let (wire, answer_timeout) = (commands.clone(), settings.answer_timeout);
        let reader = tokio::spawn(async move {
            wire.read(answer_timeout, &push).await;
            let _ = push.send(disconnection()).await;
        });
        let (identity, stragglers) = (Identity::default(), false);
        Self {
            commands,
            info,
            wake_ups,
            announced: None,
            _reader: AbortOnDrop(reader),
            second,
            identity,
            stragglers,
        }
    }

    pub(super) async fn ask(&self, commands: &[Cmd]) -> Result<Vec<Value>, RedisError> {
        ask_over(&self.commands, commands).await
    }

    pub(super) async fn ask_one(&self, command: Cmd) -> Result<Value, RedisError> {
        self.ask(&[command]).await?.pop().unwrap_or_default().extract_error()
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
        let mut kill = redis::cmd("CLIENT");
        kill.arg("KILL").arg("ID").arg(before.id);
        // Usually it is closed already; then the server answers 0.
        self.ask_one(kill).await.is_ok()
    }
}

/// Sends commands and returns their replies.
async fn ask_over(wire: &Wire, commands: &[Cmd]) -> Result<Vec<Value>, RedisError> {
    let replies = wire.send(&pack(commands), commands.len()).await;
    replies.unwrap_or_else(|_| Err(lost()))
}

/// Encodes commands for sending.
pub(super) fn pack(commands: &[Cmd]) -> Vec<u8> {
    let mut packed = Vec::new();
    for command in commands {
        command.write_packed_command(&mut packed);
    }
    packed
}

/// Reports the loss of either of the two sockets. The connection is useless without both.
fn disconnection() -> PushInfo {
    PushInfo { kind: PushKind::Disconnection, data: Vec::new() }
}

/// The error for a connection that was lost before the answer came.
pub(super) fn lost() -> RedisError {
    io::Error::from(io::ErrorKind::ConnectionReset).into()
}

/// Connects to all addresses of the host at once, and returns the first connection that succeeds, because some
/// addresses may be unreachable.
async fn connect_tcp(
    host: &str,
    port: u16,
    settings: &TcpSettings,
) -> Result<CloseOnFork<TcpStream>, RedisError> {
    let mut attempts = JoinSet::new();
    for address in tokio::net::lookup_host((host, port)).await? {
        attempts.spawn(connect_to_address(address));
    }
    let mut error = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    while let Some(attempt) = attempts.join_next().await {
        match attempt.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(socket) => {
                socket.set_nodelay(settings.nodelay())?;
                let options = socket2::SockRef::from(&*socket);
                if let Some(keepalive) = settings.keepalive() {
                    options.set_tcp_keepalive(keepalive)?;
                }
                #[cfg(any(target_os = "linux", target_os = "android"))]
                options.set_tcp_user_timeout(settings.user_timeout())?;
                return Ok(socket);
            }
            Err(failed) => error = failed,
        }
    }
    Err(error.into())
}

async fn connect_to_address(address: SocketAddr) -> io::Result<CloseOnFork<TcpStream>> {
    let socket = CloseOnFork::open(|| {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        begin_to_connect(&socket, &address.into())?;
        TcpStream::from_std(socket.into())
    })?;
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
    CloseOnFork::open(|| {
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        begin_to_connect(&socket, &socket2::SockAddr::unix(path)?)?;
        tokio::net::UnixStream::from_std(socket.into())
    })
}

fn begin_to_connect(socket: &socket2::Socket, address: &socket2::SockAddr) -> io::Result<()> {
    match socket.connect(address) {
        Err(error) if is_under_way(&error) => Ok(()),
        begun => begun,
    }
}

fn is_under_way(error: &io::Error) -> bool {
    #[cfg(unix)]
    let under_way = rustix::io::Errno::INPROGRESS.raw_os_error();
    #[cfg(windows)]
    let under_way = 10_035; // WSAEWOULDBLOCK
    error.raw_os_error() == Some(under_way)
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
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
        return Err(Error::Refused { what });
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
    Err(Error::Refused { what: format!("{what}: connect to the primary") })
}

/// Reads the error that a server sends before it closes the connection.
async fn refusal(stream: impl AsyncRead + Unpin) -> Option<RedisError> {
    let mut said = Vec::new();
    // If the read fails, `said` still has what was read before.
    let _ = stream.take(1000).read_to_end(&mut said).await;
    let line = said.split(|byte| *byte == b'\r').next().filter(|line| line.starts_with(b"-"))?;
    let line = String::from_utf8_lossy(line);
    // Some errors are followed by a page of advice.
    let sentence = line.split(". ").next().unwrap_or_default();
    match redis::parse_redis_value(format!("{sentence}\r\n").as_bytes()) {
        Ok(Value::ServerError(error)) => Some(error.into()),
        _ => None,
    }
}

/// Whether the server does not support RESP3. The wording differs between servers and proxies.
fn refuses_resp3(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default().to_ascii_lowercase();
    match error.kind() {
        ErrorKind::RESP3NotSupported => true,
        ErrorKind::Server(ServerErrorKind::ResponseError) | ErrorKind::Extension => {
            let unknown = detail.contains("unknown") || detail.contains("unsupported");
            error.code() == Some("NOPROTO") || detail.contains("hello") && unknown
        }
        _ => false,
    }
}
