//! How a connection to Redis is made, in this order: connect, load the scripts, subscribe to our wake-ups (without them
//! waiters would wait for the question once a second), and close the previous connection on the server. A half-open one
//! would go on receiving wake-ups that nobody reads, and requests that it carried might still be applied.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, Pipeline,
    ProtocolVersion, PushInfo, PushKind, RedisError, ServerErrorKind, Value,
};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;

use super::errors::translate;
use super::link::Link;
use crate::{ClientId, Error, process};

/// The oldest server that knows all we use (`ZMSCORE`).
const OLDEST: (u32, u32) = (6, 2);

/// For how long an introduction is kept: a little longer than three of them.
const INTRODUCED_FOR: Duration = Duration::from_secs(200);

/// How long we listen for why the server hung up on us.
const LISTEN: Duration = Duration::from_millis(200);

/// One connection, as it was made.
pub(super) struct Connection {
    pub(super) commands: MultiplexedConnection,
    pub(super) wake_ups: mpsc::UnboundedReceiver<PushInfo>,
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
        let mut hello = Pipeline::new();
        hello.cmd("INFO").arg("server").cmd("CLIENT").arg("ID").cmd("INFO").arg("replication");
        let questions = hello.len();
        for load in self.scripts.load() {
            hello.add_command(load);
        }
        let answers = live.commands.send_packed_commands(&hello, 0, hello.len()).await;
        let mut answers = answers.map_err(failed)?;
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
            let subscribed = live.commands.subscribe(self.channel(client)).await;
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
        let info = self.info(ProtocolVersion::RESP3);
        let config = self.config().set_push_sender(push);
        let redis = Client::open(info)?;
        let commands = redis.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Connection::new(commands, wake_ups, None))
    }

    async fn connect_resp2(&self, client: ClientId) -> Result<Connection, Error> {
        let what = format!("connecting to {}", self.settings.address);
        let failed = |error: RedisError| translate(&what, &error);
        let (push, wake_ups) = mpsc::unbounded_channel();
        let redis = Client::open(self.info(ProtocolVersion::RESP2)).map_err(failed)?;
        let config = self.config();
        let commands = redis.get_multiplexed_async_connection_with_config(&config).await;
        let commands = commands.map_err(failed)?;
        let (mut sink, mut stream) = redis.get_async_pubsub().await.map_err(failed)?.split();
        let subscribed = sink.subscribe(self.channel(client)).await;
        subscribed.map_err(|error| self.no_wake_ups(client, &error))?;
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
                if push.send(PushInfo { kind: PushKind::Message, data }).is_err() {
                    return;
                }
            }
        });
        Ok(Connection::new(commands, wake_ups, Some(AbortOnDrop(second))))
    }

    fn info(&self, protocol: ProtocolVersion) -> ConnectionInfo {
        let keepalive = TcpKeepalive::new()
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

    fn config(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.settings.connect_timeout))
            .set_response_timeout(Some(self.settings.answer_timeout))
            .set_pipeline_buffer_size(1024)
    }

    fn no_wake_ups(&self, client: ClientId, error: &RedisError) -> Error {
        translate(&format!("subscribing to our wake-ups, {:?}", self.channel(client)), error)
    }

    fn channel(&self, client: ClientId) -> String {
        format!("{}:wake:{client}", self.settings.namespace)
    }

    /// Says who this client is, for statistics.
    pub(super) fn introduction(&self, client: ClientId) -> Pipeline {
        let key = format!("{}:client:{client}", self.settings.namespace);
        let program = std::env::args().next().unwrap_or_default();
        let program = program.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
        let mut pipeline = Pipeline::new();
        pipeline
            .cmd("HSET")
            .arg(&key)
            .arg("host")
            .arg(process::host().unwrap_or_default().as_ref());
        pipeline.arg("pid").arg(std::process::id()).arg("program").arg(program);
        pipeline.cmd("HSETNX").arg(&key).arg("since").arg(crate::clock::wall_micros() / 1_000_000);
        pipeline.cmd("EXPIRE").arg(&key).arg(INTRODUCED_FOR.as_secs());
        pipeline
    }
}

impl Connection {
    fn new(
        commands: MultiplexedConnection,
        wake_ups: mpsc::UnboundedReceiver<PushInfo>,
        second: Option<AbortOnDrop>,
    ) -> Self {
        Self { commands, wake_ups, second, identity: Identity::default(), stragglers: false }
    }

    /// Closes the previous connection on the server. True if nothing that it carried can be applied any more: it is
    /// closed, or the server was started anew.
    async fn close_on_server(&mut self, before: &Identity) -> bool {
        if before.run.is_empty() || self.identity.run.is_empty() || before.id == 0 {
            return false;
        }
        if before.run != self.identity.run {
            return true;
        }
        let mut kill = redis::cmd("CLIENT");
        kill.arg("KILL").arg("ID").arg(before.id);
        // Most often it is closed already, which the server answers with 0.
        self.commands
            .send_packed_command(&kill)
            .await
            .is_ok_and(|answer| answer.extract_error().is_ok())
    }
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
