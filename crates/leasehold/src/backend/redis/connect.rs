//! How a connection to Redis is made, in this order: connect, load the scripts, subscribe to our wake-ups (without them
//! waiters would wait for the question once a second), and close the previous connection on the server. A half-open one
//! would go on receiving wake-ups that nobody reads, and requests that it carried might still be applied.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2};
use redis::{
    Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, ProtocolVersion, PushInfo, PushKind,
    RedisError, ServerErrorKind, Value,
};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::errors::translate;
use super::link::Link;
use super::tls;
use super::wire::{Socket, Stream, Wire};
use crate::{ClientId, Error, process};

/// The oldest server that knows all we use (`ZMSCORE`).
const OLDEST: (u32, u32) = (6, 2);

/// For how long an introduction is kept: a little longer than three of them.
const INTRODUCED_FOR: Duration = Duration::from_secs(200);

/// How long we listen for why the server hung up on us.
const LISTEN: Duration = Duration::from_millis(200);

/// One connection, as it was made.
pub(super) struct Connection {
    pub(super) commands: Arc<Wire>,
    pub(super) wake_ups: mpsc::UnboundedReceiver<PushInfo>,
    _reader: AbortOnDrop,
    /// Where the server speaks RESP2 only, wake-ups come over a second connection, read by this task.
    second: Option<AbortOnDrop>,
    pub(super) identity: Identity,
    /// Whether requests of the previous connection may still be applied.
    pub(super) stragglers: bool,
}

/// What a connection is called on its server. Another run of the server gives the same numbers to other clients.
#[derive(Clone, Default, PartialEq)]
pub(super) struct Identity {
    /// Empty if we may not ask.
    run: String,
    id: i64,
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
        let what = format!("connecting to {}", self.settings.address);
        let failed = |error: RedisError| translate(&what, &error);
        let mut live = match self.connect_resp3().await {
            Err(error) if refuses_resp3(&error) => self.connect_resp2(client).await?,
            Err(error) if error.is_connection_dropped() => {
                return Err(failed(self.reason().await.unwrap_or(error)));
            }
            made => made.map_err(failed)?,
        };
        let questions = [["INFO", "server"], ["CLIENT", "ID"], ["INFO", "replication"]];
        let mut hello: Vec<_> =
            questions.map(|[name, of]| redis::cmd(name).arg(of).to_owned()).into();
        hello.extend(self.scripts.load());
        let questions = questions.len();
        let mut answers = live.ask(&hello).await.map_err(failed)?;
        for answer in answers.split_off(questions) {
            answer.extract_error().map_err(failed)?;
        }
        // A user who may not ask is let in; then nobody can say that the server is too old, or a replica.
        let mut answers = answers.into_iter();
        let mut info = || {
            let answer = answers.next().unwrap_or(Value::Nil);
            redis::from_redis_value::<String>(answer).ok()
        };
        let (server, id, replication) = (info(), info(), info());
        if let Some(server) = server {
            check_version(&server)?;
            field(&server, "run_id:").unwrap_or_default().clone_into(&mut live.identity.run);
        }
        live.identity.id = id.and_then(|id| id.parse().ok()).unwrap_or_default();
        if let Some(replication) = replication {
            check_role(&what, &replication, before.is_some())?;
        }
        if live.second.is_none() {
            let subscribe = redis::cmd("SUBSCRIBE").arg(self.channel(client)).to_owned();
            let subscribed = live.ask_one(subscribe).await;
            subscribed.map_err(|error| self.no_wake_ups(client, &error))?;
        }
        if let Some(before) = before {
            live.stragglers = !live.close_on_server(before).await;
        }
        Ok(live)
    }

    /// What the server says to a connection that it does not take, such as that it has too many. It says so before it is
    /// asked, and hangs up, so that sending something fails before the answer is read. Here we only listen. Over TLS it
    /// says nothing.
    async fn reason(&self) -> Option<RedisError> {
        let listen = async {
            match self.settings.info.addr() {
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

    async fn connect_resp3(&self) -> Result<Connection, RedisError> {
        let (push, wake_ups) = mpsc::unbounded_channel();
        let wire = self.wire(ProtocolVersion::RESP3).await?;
        Ok(self.begin_to_read(wire, push, wake_ups, None))
    }

    async fn connect_resp2(&self, client: ClientId) -> Result<Connection, Error> {
        let what = format!("connecting to {}", self.settings.address);
        let failed = |error: RedisError| translate(&what, &error);
        let (push, wake_ups) = mpsc::unbounded_channel();
        let wire = self.wire(ProtocolVersion::RESP2).await.map_err(failed)?;
        let redis = Client::open(self.info(ProtocolVersion::RESP2)).map_err(failed)?;
        let (mut sink, mut stream) = redis.get_async_pubsub().await.map_err(failed)?.split();
        let subscribed = sink.subscribe(self.channel(client)).await;
        subscribed.map_err(|error| self.no_wake_ups(client, &error))?;
        let to = push.clone();
        let second = tokio::spawn(async move {
            // The sink is kept for as long as messages are read.
            let _sink = sink;
            while let Some(message) = std::future::poll_fn(|cx| {
                futures_core::Stream::poll_next(std::pin::Pin::new(&mut stream), cx)
            })
            .await
            {
                let payload = Value::BulkString(message.get_payload_bytes().to_vec());
                let channel = Value::BulkString(message.get_channel_name().into());
                let data = vec![channel, payload];
                if to.send(PushInfo { kind: PushKind::Message, data }).is_err() {
                    return;
                }
            }
            let _ = to.send(disconnection());
        });
        Ok(self.begin_to_read(wire, push, wake_ups, Some(AbortOnDrop(second))))
    }

    fn begin_to_read(
        &self,
        commands: Arc<Wire>,
        push: mpsc::UnboundedSender<PushInfo>,
        wake_ups: mpsc::UnboundedReceiver<PushInfo>,
        second: Option<AbortOnDrop>,
    ) -> Connection {
        let (wire, answer_timeout) = (commands.clone(), self.settings.answer_timeout);
        let reader = tokio::spawn(async move {
            wire.read(answer_timeout, &push).await;
            let _ = push.send(disconnection());
        });
        let (identity, stragglers) = (Identity::default(), false);
        Connection {
            commands,
            wake_ups,
            _reader: AbortOnDrop(reader),
            second,
            identity,
            stragglers,
        }
    }

    /// A socket over which the Redis library has authenticated us and selected the database.
    async fn wire(&self, protocol: ProtocolVersion) -> Result<Arc<Wire>, RedisError> {
        let info = self.info(protocol);
        let wire = match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                Wire::new(Socket::Tcp(connect_tcp(host, *port, info.tcp_settings()).await?), None)
            }
            ConnectionAddr::TcpTls { host, port, insecure, .. } => {
                let session = tls::session(host, *insecure, self.settings.roots.as_ref())?;
                let socket = connect_tcp(host, *port, info.tcp_settings()).await?;
                Wire::new(Socket::Tcp(socket), Some(session))
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => {
                Wire::new(Socket::Unix(tokio::net::UnixStream::connect(path).await?), None)
            }
            _ => {
                let problem = "there are no such addresses on this platform";
                return Err((ErrorKind::InvalidClientConfig, problem).into());
            }
        };
        // It reads all that it asked for, and no more: nothing else is sent yet.
        let made = MultiplexedConnection::new(info.redis_settings(), Stream(wire.clone())).await?;
        drop(made);
        Ok(wire)
    }

    fn info(&self, protocol: ProtocolVersion) -> ConnectionInfo {
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(10))
            .with_interval(Duration::from_secs(5))
            .with_retries(3);
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let tcp = tcp.set_user_timeout(self.settings.answer_timeout);
        let info = self.settings.info.clone();
        let redis = info.redis_settings().clone().set_protocol(protocol);
        info.set_redis_settings(redis).set_tcp_settings(tcp)
    }

    fn no_wake_ups(&self, client: ClientId, error: &RedisError) -> Error {
        translate(&format!("subscribing to our wake-ups, {:?}", self.channel(client)), error)
    }

    fn channel(&self, client: ClientId) -> String {
        format!("{}:wake:{client}", self.settings.namespace)
    }

    /// Says who this client is, for statistics.
    pub(super) fn introduction(&self, client: ClientId) -> [Cmd; 3] {
        let key = format!("{}:client:{client}", self.settings.namespace);
        let program = std::env::args().next().unwrap_or_default();
        let program = program.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
        let mut who = redis::cmd("HSET");
        who.arg(&key).arg("host").arg(process::host().unwrap_or_default().as_ref());
        who.arg("pid").arg(std::process::id()).arg("program").arg(program);
        let mut since = redis::cmd("HSETNX");
        since.arg(&key).arg("since").arg(crate::clock::wall_micros() / 1_000_000);
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(&key).arg(INTRODUCED_FOR.as_secs());
        [who, since, expire]
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.commands.end(&lost());
    }
}

impl Connection {
    async fn ask(&self, commands: &[Cmd]) -> Result<Vec<Value>, RedisError> {
        let replies = self.commands.send(&pack(commands), commands.len()).await;
        replies.unwrap_or_else(|_| Err(lost()))
    }

    async fn ask_one(&self, command: Cmd) -> Result<Value, RedisError> {
        self.ask(&[command]).await?.pop().unwrap_or_default().extract_error()
    }

    /// Closes the previous connection on the server. True if nothing that it carried can be applied any more: it is
    /// closed, or the server was started anew.
    async fn close_on_server(&self, before: &Identity) -> bool {
        if before.run.is_empty() || self.identity.run.is_empty() || before.id == 0 {
            return false;
        }
        if before.run != self.identity.run {
            return true;
        }
        let mut kill = redis::cmd("CLIENT");
        kill.arg("KILL").arg("ID").arg(before.id);
        // Most often it is closed already, which the server answers with 0.
        self.ask_one(kill).await.is_ok()
    }
}

/// Some commands, as they are sent.
pub(super) fn pack(commands: &[Cmd]) -> Vec<u8> {
    let mut packed = Vec::new();
    for command in commands {
        command.write_packed_command(&mut packed);
    }
    packed
}

/// Without either of its two sockets a connection is of no use.
fn disconnection() -> PushInfo {
    PushInfo { kind: PushKind::Disconnection, data: Vec::new() }
}

/// The connection was lost before the answer came.
pub(super) fn lost() -> RedisError {
    io::Error::from(io::ErrorKind::ConnectionReset).into()
}

/// The first of the host's addresses that answers: one of them may lead nowhere.
async fn connect_tcp(
    host: &str,
    port: u16,
    settings: &TcpSettings,
) -> Result<TcpStream, RedisError> {
    let mut attempts = JoinSet::new();
    for address in tokio::net::lookup_host((host, port)).await? {
        attempts.spawn(TcpStream::connect(address));
    }
    let mut error = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    while let Some(attempt) = attempts.join_next().await {
        match attempt.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(socket) => {
                socket.set_nodelay(settings.nodelay())?;
                let options = socket2::SockRef::from(&socket);
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

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn check_version(info: &str) -> Result<(), Error> {
    let Some(version) = field(info, "redis_version:") else { return Ok(()) };
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or_default());
    let found = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    if found < OLDEST {
        let (major, minor) = OLDEST;
        let what =
            format!("it is Redis {version}, and too old: at least {major}.{minor} is needed");
        return Err(Error::Refused { what });
    }
    Ok(())
}

/// A replica is refused at first. Later it may be a primary that was demoted: the address may soon lead to the new one.
fn check_role(what: &str, info: &str, again: bool) -> Result<(), Error> {
    let replica = field(info, "role:") == Some("slave");
    if !replica || field(info, "slave_read_only:") == Some("0") {
        return Ok(());
    }
    let what = format!("{what}: it is a read-only replica");
    if again {
        return Err(Error::unavailable(what, false, None));
    }
    Err(Error::Refused { what: format!("{what}: connect to the primary") })
}

/// The error that a server sends before it hangs up.
async fn refusal(stream: impl AsyncRead + Unpin) -> Option<RedisError> {
    let mut said = Vec::new();
    // However it ends, what was read before is there.
    let _ = stream.take(1000).read_to_end(&mut said).await;
    let line = said.split(|byte| *byte == b'\r').next().filter(|line| line.starts_with(b"-"))?;
    let line = String::from_utf8_lossy(line);
    // Some are followed by a page of advice.
    let sentence = line.split(". ").next().unwrap_or_default();
    match redis::parse_redis_value(format!("{sentence}\r\n").as_bytes()) {
        Ok(Value::ServerError(error)) => Some(error.into()),
        _ => None,
    }
}

/// The words differ from server to server and from proxy to proxy.
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
