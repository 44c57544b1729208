//! The connection to Redis: one, multiplexed, and ours to keep.
//!
//! A connection that is lost is made anew in this order: connect, subscribe to our wake-ups (that must
//! succeed, or waiters would wait for the backstop), end the old connection on the server (a half-open one
//! would go on hearing wake-ups that nobody reads), and only then serve.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, Pipeline, ProtocolVersion,
    PushInfo, PushKind, RedisError, ServerErrorKind, Value,
};
use tokio::sync::{mpsc, watch};

use super::Settings;
use super::errors::translate;
use super::scripts::Scripts;
use super::tray::Tray;
use crate::backend::{WakeUp, WakeUps};
use crate::name::Name;
use crate::{ClientId, Error};

#[cfg(test)]
mod tests;

/// The oldest server that knows all we use (`ZMSCORE`).
const OLDEST: (u32, u32) = (6, 2);
/// How often this client says who it is, and for how long that is believed.
const WHO_WE_ARE_EVERY: Duration = Duration::from_secs(60);
const WHO_WE_ARE_FOR: Duration = Duration::from_secs(200);

/// How long to wait before the connection is made anew, when that did not help at once.
const SHORTEST_DELAY: Duration = Duration::from_millis(10);
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// A connection that is kept up, and whoever wants to use it.
pub(super) struct Link {
    pub(super) settings: Settings,
    pub(super) scripts: Scripts,
    pub(super) tray: Tray,
    state: watch::Sender<State>,
    /// The number of the last connection that is not to be trusted any more.
    suspected: watch::Sender<u64>,
}

#[derive(Clone)]
enum State {
    Connecting,
    /// Connections are numbered, so that a complaint about one is not taken for one about the next.
    Up(MultiplexedConnection, u64),
    Down(Error),
}

/// One connection, as it was made.
struct Live {
    connection: MultiplexedConnection,
    wake_ups: mpsc::UnboundedReceiver<PushInfo>,
    /// Where the server speaks RESP2 only, wake-ups come over a second connection, read by this task.
    second: Option<AbortOnDrop>,
    identity: Identity,
}

/// What a connection is called on its server. Another run of the server gives the same numbers to others.
#[derive(Clone, Default, PartialEq)]
struct Identity {
    run: String,
    id: i64,
}

/// Something that was sent over one connection. If it ends in an error, or if nobody waits for the answer any
/// longer, the connection may be half open.
struct Unanswered<'a> {
    link: &'a Link,
    number: u64,
}

impl Unanswered<'_> {
    fn answered(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.link.suspect(self.number);
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Link {
    pub(super) fn new(settings: Settings, scripts: Scripts) -> Arc<Self> {
        let state = watch::Sender::new(State::Connecting);
        let (tray, suspected) = (Tray::default(), watch::Sender::new(0));
        Arc::new(Self { settings, scripts, tray, state, suspected })
    }

    /// The connection as soon as there is one, or why there is none.
    pub(super) async fn connection(&self) -> Result<(MultiplexedConnection, u64), Error> {
        let mut state = self.state.subscribe();
        loop {
            match &*state.borrow_and_update() {
                State::Up(connection, number) => return Ok((connection.clone(), *number)),
                State::Down(error) => return Err(error.clone()),
                State::Connecting => {}
            }
            if state.changed().await.is_err() {
                return Err(Error::Closed);
            }
        }
    }

    /// A connection is not to be trusted. If it is gone already, that says nothing about the one after it.
    fn suspect(&self, number: u64) {
        self.suspected.send_if_modified(|last| {
            let news = number > *last;
            *last = number.max(*last);
            news
        });
    }

    /// Sends commands in one go, and answers with what each of them answered, or with the first error.
    pub(super) async fn send(&self, commands: Vec<Cmd>) -> Result<Vec<Value>, Error> {
        self.send_each(commands).await?.into_iter().collect()
    }

    /// Sends commands in one go, and answers with what each of them answered. Scripts that the server has
    /// forgotten are sent again in full, which also lets it know them from then on.
    pub(super) async fn send_each(
        &self,
        commands: Vec<Cmd>,
    ) -> Result<Vec<Result<Value, Error>>, Error> {
        let (mut connection, number) = self.connection().await?;
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command);
        }
        let mut answers = self.answers(&mut connection, number, &pipeline).await?;
        let forgotten = |value: &Value| matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript));
        if answers.iter().any(forgotten) {
            let mut again = Pipeline::new();
            for (command, answer) in pipeline.cmd_iter().zip(&answers) {
                if forgotten(answer) {
                    again.add_command(self.scripts.spelled_out(command));
                }
            }
            let mut anew = self.answers(&mut connection, number, &again).await?.into_iter();
            for answer in answers.iter_mut().filter(|answer| forgotten(answer)) {
                *answer = anew.next().unwrap_or(Value::Nil);
            }
        }
        // An error inside an answer is about a part of what was asked, and for whoever asked for that.
        let failed = |answer| match answer {
            Value::ServerError(error) => Err(self.translate(&error.into())),
            answer => Ok(answer),
        };
        Ok(answers.into_iter().map(failed).collect())
    }

    /// What the server said to what it was asked.
    pub(super) fn translate(&self, error: &RedisError) -> Error {
        if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) {
            // It was the primary when we connected: by now the address may be another's.
            if let State::Up(_, number) = &*self.state.borrow() {
                self.suspect(*number);
            }
        }
        translate(&format!("asking {}", self.settings.address), error)
    }

    async fn answers(
        &self,
        connection: &mut MultiplexedConnection,
        number: u64,
        pipeline: &Pipeline,
    ) -> Result<Vec<Value>, Error> {
        let unanswered = Unanswered { link: self, number };
        let mut suspected = self.suspected.subscribe();
        let answers = tokio::select! {
            biased;
            answers = connection.send_packed_commands(pipeline, 0, pipeline.len()) => answers,
            // Somebody else has found out that nobody answers here.
            _ = suspected.wait_for(|last| *last >= number) => {
                let what = format!("asking {}", self.settings.address);
                return Err(Error::Unavailable { what, timed_out: true, source: None });
            }
        };
        match answers {
            Ok(answers) => {
                unanswered.answered();
                Ok(answers)
            }
            // Whatever it was, it was not the server that said so.
            Err(error) => Err(self.translate(&error)),
        }
    }

    /// Keeps the connection up, for as long as the engine's thread runs.
    pub(super) async fn keep_up(self: Arc<Self>, client: ClientId, wake: WakeUps) {
        let mut before: Option<Identity> = None;
        let mut number = 0;
        let mut delay = SHORTEST_DELAY;
        loop {
            let made = tokio::time::timeout(
                self.settings.connect_timeout,
                self.connect(client, before.as_ref()),
            );
            let live = made.await.unwrap_or_else(|_| {
                let what = format!("connecting to {}", self.settings.address);
                Err(Error::Unavailable { what, timed_out: true, source: None })
            });
            match live {
                Ok(live) => {
                    let since = Instant::now();
                    number += 1;
                    self.state.send_replace(State::Up(live.connection.clone(), number));
                    if before.replace(live.identity.clone()).is_some() {
                        wake(WakeUp::Reconnected);
                    }
                    self.serve(client, live, number, &wake).await;
                    tracing::warn!(address = self.settings.address, "connection lost");
                    self.state.send_replace(State::Connecting);
                    // One that is lost again and again, as that to a replica, is not made again in a circle.
                    if since.elapsed() > LONGEST_DELAY {
                        delay = SHORTEST_DELAY;
                    } else {
                        tokio::time::sleep(delay).await;
                        delay = (delay * 2).min(LONGEST_DELAY);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "no connection");
                    self.state.send_replace(State::Down(error));
                    tokio::time::sleep(delay).await;
                    delay = (delay * 2).min(LONGEST_DELAY);
                }
            }
        }
    }

    /// Until the connection is gone, or no longer to be trusted.
    async fn serve(&self, client: ClientId, mut live: Live, number: u64, wake: &WakeUps) {
        let mut suspected = self.suspected.subscribe();
        let mut who_we_are = tokio::time::interval(WHO_WE_ARE_EVERY);
        loop {
            tokio::select! {
                push = live.wake_ups.recv() => match push {
                    Some(PushInfo { kind: PushKind::Message, data }) => {
                        if let Some(granted) = read_wake_up(&data) {
                            wake(granted);
                        }
                    }
                    // Not always announced: the channel may just end.
                    None | Some(PushInfo { kind: PushKind::Disconnection, .. }) => return,
                    Some(_) => {}
                },
                _ = suspected.wait_for(|suspect| *suspect >= number) => return,
                _ = who_we_are.tick() => {
                    // Only statistics need it: whether it got through does not matter.
                    let mut connection = live.connection.clone();
                    let who = self.who_we_are(client);
                    tokio::spawn(async move {
                        let _ = connection.send_packed_commands(&who, 0, who.len()).await;
                    });
                }
            }
        }
    }

    async fn connect(&self, client: ClientId, before: Option<&Identity>) -> Result<Live, Error> {
        let what = format!("connecting to {}", self.settings.address);
        let failed = |error: RedisError| translate(&what, &error);
        let mut live = match self.connect_resp3().await {
            Err(error) if refuses_resp3(&error) => self.connect_resp2(client).await?,
            made => made.map_err(failed)?,
        };
        let connection = &mut live.connection;

        let mut hello = Pipeline::new();
        hello.cmd("INFO").arg("server").cmd("CLIENT").arg("ID");
        let loaded = hello.len();
        for load in self.scripts.load() {
            hello.add_command(load);
        }
        let answers = connection.send_packed_commands(&hello, 0, hello.len()).await;
        let mut answers = answers.map_err(failed)?;
        let scripts = answers.split_off(loaded);
        for answer in scripts {
            answer.extract_error().map_err(failed)?;
        }
        // A user who may not ask for either is let in; then nobody can tell him that the server is too old.
        if let Ok(info) = redis::from_redis_value::<String>(answers.remove(0)) {
            check_version(&info)?;
            field(&info, "run_id:").unwrap_or_default().clone_into(&mut live.identity.run);
        }
        live.identity.id = redis::from_redis_value(answers.remove(0)).unwrap_or_default();
        if live.second.is_none() {
            let subscribed = live.connection.subscribe(self.channel(client)).await;
            subscribed.map_err(|error| self.no_wake_ups(client, &error))?;
        }
        if let Some(before) = before.filter(|before| before.run == live.identity.run) {
            let mut kill = redis::cmd("CLIENT");
            kill.arg("KILL").arg("ID").arg(before.id);
            // Most often it is gone already.
            let _ = live.connection.send_packed_command(&kill).await;
        }
        Ok(live)
    }

    async fn connect_resp3(&self) -> Result<Live, RedisError> {
        let (push, wake_ups) = mpsc::unbounded_channel();
        let info = self.info(ProtocolVersion::RESP3);
        let config = self.config().set_push_sender(push);
        let redis = Client::open(info)?;
        let connection = redis.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Live { connection, wake_ups, second: None, identity: Identity::default() })
    }

    async fn connect_resp2(&self, client: ClientId) -> Result<Live, Error> {
        let what = format!("connecting to {}", self.settings.address);
        let failed = |error: RedisError| translate(&what, &error);
        let (push, wake_ups) = mpsc::unbounded_channel();
        let redis = Client::open(self.info(ProtocolVersion::RESP2)).map_err(failed)?;
        let config = self.config();
        let connection = redis.get_multiplexed_async_connection_with_config(&config).await;
        let connection = connection.map_err(failed)?;
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
        let second = Some(AbortOnDrop(second));
        Ok(Live { connection, wake_ups, second, identity: Identity::default() })
    }

    fn info(&self, protocol: ProtocolVersion) -> ConnectionInfo {
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(10))
            .with_interval(Duration::from_secs(5))
            .with_retries(3);
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let tcp = tcp.set_user_timeout(self.settings.socket_timeout);
        let info = self.settings.info.clone();
        let redis = info.redis_settings().clone().set_protocol(protocol);
        info.set_redis_settings(redis).set_tcp_settings(tcp)
    }

    fn config(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.settings.connect_timeout))
            .set_response_timeout(Some(self.settings.socket_timeout))
            .set_pipeline_buffer_size(1024)
    }

    fn no_wake_ups(&self, client: ClientId, error: &RedisError) -> Error {
        translate(&format!("subscribing to our wake-ups, {:?}", self.channel(client)), error)
    }

    fn channel(&self, client: ClientId) -> String {
        format!("{}:wake:{client}", self.settings.namespace)
    }

    fn who_we_are(&self, client: ClientId) -> Pipeline {
        let key = format!("{}:client:{client}", self.settings.namespace);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let program = std::env::args().next().unwrap_or_default();
        let program = program.rsplit('/').next().unwrap_or_default().to_owned();
        let mut pipeline = Pipeline::new();
        pipeline.cmd("HSET").arg(&key).arg("host").arg(host).arg("pid").arg(std::process::id());
        pipeline.arg("program").arg(program);
        pipeline.cmd("HSETNX").arg(&key).arg("since").arg(crate::clock::wall_micros() / 1_000_000);
        pipeline.cmd("EXPIRE").arg(&key).arg(WHO_WE_ARE_FOR.as_secs());
        pipeline
    }
}

fn read_wake_up(data: &[Value]) -> Option<WakeUp> {
    let [_, Value::BulkString(payload)] = data else { return None };
    let (id, name) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    if id == "lock" {
        return Some(WakeUp::Released(Name::new("key", name).ok()?));
    }
    Some(WakeUp::Granted(Name::new("name", name).ok()?, id.parse().ok()?))
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
