//! The topology of a store: one server, or the primaries of a cluster. Queries go to the server that has their key.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::RedisSettings;
use super::cluster::{Cluster, redirect};
use super::command::RedisCommand;
use super::connection::{CommandReply, Connection, Failure, Target};
use super::errors::ServerError;
use super::scripts::Scripts;
use super::sentinel::Sentinels;
use super::slots::slot_of;
use super::value::Value;
use crate::backend::{Destination, Report, Slot};
use crate::clock::Moment;
use crate::url::Deployment;
use crate::{ClientId, Error};

/// How long a command may take on the server that its slot is being moved to: this many times as long as on the server
/// that its slot is being moved from, within these limits. The answers to other commands wait for it.
const TIMES_AS_LONG: u32 = 3;
const AT_LEAST: Duration = Duration::from_millis(150);
const AT_MOST: Duration = Duration::from_secs(1);

/// The delay before a query that no server could answer is repeated: a twentieth of the time since it began, within
/// these limits.
const REPEAT_AFTER: Duration = Duration::from_millis(20);
const REPEAT_AFTER_AT_MOST: Duration = Duration::from_millis(200);

#[derive(Clone)]
pub(super) enum Topology {
    /// One server, with its sentinels if it has any.
    One(Arc<Connection>, Option<Arc<Sentinels>>),
    Cluster(Arc<Cluster>),
}

/// Whether commands are sent again if their outcome is unknown. Those that were not applied are always sent again.
#[derive(Clone, Copy, PartialEq)]
enum Repeat {
    Unknown,
    Unapplied,
}

/// The answer to one command, and the server that it came from.
type ServerAnswer = (Result<Value, Error>, Arc<Connection>);

/// The fate of a command that a server did not apply.
#[derive(Debug)]
pub(super) enum Unapplied {
    /// Another server has its slot now.
    Elsewhere,
    /// The slot is being moved. This is the answer of the server that it is being moved to.
    There(Result<Value, Error>),
    /// The slot is being moved. The command can be applied when the move is complete.
    NotNow(Error),
    /// The cluster is down.
    Down(Error),
}

impl Topology {
    pub(super) fn new(settings: &Arc<RedisSettings>, scripts: &Arc<Scripts>) -> Self {
        let scripts = scripts.clone();
        let one =
            |target| Connection::new(settings.clone(), scripts.clone(), target, Destination::ONLY);
        match &settings.deployment {
            Deployment::Server(info) => Self::One(one(Target::Only(info.clone())), None),
            Deployment::Sentinel(sentinels) => {
                let sentinels = Sentinels::new(settings.clone(), sentinels.clone());
                Self::One(one(Target::Primary(sentinels.clone())), Some(sentinels))
            }
            Deployment::Cluster(seeds) => {
                Self::Cluster(Cluster::new(settings.clone(), scripts, seeds.clone()))
            }
        }
    }

    /// Connects, in the runtime of this thread, and stays connected.
    pub(super) fn start(&self, client: ClientId, report: Report) {
        match self {
            Self::One(connection, sentinels) => {
                tokio::spawn(connection.clone().keep_up(client, report));
                if let Some(sentinels) = sentinels {
                    tokio::spawn(sentinels.clone().listen());
                }
            }
            Self::Cluster(cluster) => cluster.start(client, report),
        }
    }

    /// Waits for the first attempt to connect, and returns its result.
    pub(super) async fn connected(&self) -> Result<(), Error> {
        match self {
            Self::One(connection, _) => connection.connected().await,
            Self::Cluster(cluster) => cluster.connected().await,
        }
    }

    pub(super) fn settings(&self) -> &RedisSettings {
        match self {
            Self::One(connection, _) => &connection.settings,
            Self::Cluster(cluster) => &cluster.settings,
        }
    }

    /// Returns the slot of a key. Without a cluster there is only one.
    pub(super) fn slot(&self, key: &str) -> Slot {
        match self {
            Self::One(..) => Slot::ONLY,
            Self::Cluster(..) => slot_of(key),
        }
    }

    pub(super) fn destination(&self, slot: Slot) -> Destination {
        match self {
            Self::One(..) => Destination::ONLY,
            Self::Cluster(cluster) => cluster.destination(slot),
        }
    }

    pub(super) fn connection(&self, to: Destination) -> Option<Arc<Connection>> {
        match self {
            Self::One(connection, _) => Some(connection.clone()),
            Self::Cluster(cluster) => cluster.connection(to),
        }
    }

    /// Returns every server that has keys. In a cluster that the client is still connecting to, waits until they are
    /// known.
    pub(super) async fn primaries(&self) -> Result<Vec<Arc<Connection>>, Error> {
        let cluster = match self {
            Self::One(connection, _) => return Ok(vec![connection.clone()]),
            Self::Cluster(cluster) => cluster,
        };
        let known = async {
            loop {
                let primaries = cluster.primaries();
                if !primaries.is_empty() {
                    return primaries;
                }
                tokio::time::sleep(REPEAT_AFTER).await;
            }
        };
        match self.in_time(known).await {
            Some(primaries) => Ok(primaries),
            // Return the reason, if it is known.
            None => Err(cluster.connected().await.err().unwrap_or_else(|| self.silence())),
        }
    }

    /// Returns the result of a query, or `None` when the answer time-out has passed.
    async fn in_time<T>(&self, query: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(self.settings().answer_timeout, query).await.ok()
    }

    fn silence(&self) -> Error {
        match self {
            Self::One(connection, _) => connection.silence_with_cause(),
            Self::Cluster(cluster) => cluster.silence(),
        }
    }

    /// Returns the answer to each query, or the first error.
    pub(super) async fn query(
        &self,
        home: Slot,
        queries: Vec<RedisCommand>,
    ) -> Result<Vec<Value>, Error> {
        self.query_each(home, queries).await?.into_iter().collect()
    }

    /// Returns the answer to each query. The first argument of a query is its key; a query without arguments goes to
    /// the server of `home`. A query whose outcome is unknown is sent again until the answer time-out has passed.
    pub(super) async fn query_each(
        &self,
        home: Slot,
        queries: Vec<RedisCommand>,
    ) -> Result<Vec<Result<Value, Error>>, Error> {
        let slot = |query: &_| key_of(query).map_or(home, |key| self.slot(key));
        let to = |query: &_| self.destination(slot(query));
        let answers = self.send(&queries, to, Repeat::Unknown).await?;
        Ok(answers.into_iter().map(|(answer, _)| answer).collect())
    }

    /// Like [`query`](Self::query), for one query to this server.
    pub(super) async fn query_at(
        &self,
        server: &Connection,
        query: RedisCommand,
    ) -> Result<Value, Error> {
        let answers = self.send(&[query], |_| server.to(), Repeat::Unknown).await?;
        answers.into_iter().next().map_or(Ok(Value::Nil), |(answer, _)| answer)
    }

    /// Calls a script on the server of this slot. The call is sent again only if it was not applied.
    pub(super) async fn call(
        &self,
        slot: Slot,
        call: RedisCommand,
    ) -> Result<(Value, Arc<Connection>), Error> {
        let answers = self.send(&[call], |_| self.destination(slot), Repeat::Unapplied).await?;
        let (answer, server) = answers.into_iter().next().ok_or_else(|| self.silence())?;
        Ok((answer?, server))
    }

    /// Sends commands to their destinations until each of them is answered, or the answer time-out has passed. Fails at
    /// once if the only server refuses us in a way that no retry can fix.
    async fn send(
        &self,
        commands: &[RedisCommand],
        destination: impl Fn(&RedisCommand) -> Destination,
        repeat: Repeat,
    ) -> Result<Vec<ServerAnswer>, Error> {
        let mut answers: Vec<Option<ServerAnswer>> = commands.iter().map(|_| None).collect();
        let (mut problem, began) = (None, Instant::now());
        let is_cluster = matches!(self, Self::Cluster(_));
        let sending = async {
            loop {
                let mut groups: BTreeMap<Destination, Vec<usize>> = BTreeMap::new();
                for (at, _) in answers.iter().enumerate().filter(|(_, answer)| answer.is_none()) {
                    groups.entry(destination(&commands[at])).or_default().push(at);
                }
                if groups.is_empty() {
                    return Ok(());
                }
                let delay = (began.elapsed() / 20).clamp(REPEAT_AFTER, REPEAT_AFTER_AT_MOST);
                let (mut requests, mut again_at_once) = (JoinSet::new(), true);
                for (to, group) in groups {
                    let Some(connection) = self.connection(to) else {
                        again_at_once = false;
                        continue;
                    };
                    let commands: Vec<_> = group.iter().map(|at| commands[*at].clone()).collect();
                    requests.spawn(async move {
                        let sent = Moment::now();
                        let replies = connection.request_when_up(&commands, delay).await;
                        (connection, group, commands, replies, sent)
                    });
                }
                while let Some(done) = requests.join_next().await {
                    let Ok((connection, group, commands, replies, sent)) = done else { continue };
                    let replies = match replies {
                        Ok(replies) => replies,
                        // It has already waited for the connection.
                        Err(Failure::Unsent(error)) => {
                            problem = Some(error);
                            continue;
                        }
                        Err(Failure::Unknown(error)) if repeat == Repeat::Unknown => {
                            (problem, again_at_once) = (Some(error), false);
                            continue;
                        }
                        // Another node may soon serve the slots.
                        Err(Failure::Final(error)) if is_cluster && repeat == Repeat::Unknown => {
                            (problem, again_at_once) = (Some(error), false);
                            continue;
                        }
                        Err(Failure::Unknown(error) | Failure::Final(error)) => return Err(error),
                    };
                    let unapplied = self.unapplied(&replies, &connection, &commands, sent).await;
                    let mut unapplied = unapplied.into_iter();
                    for (at, reply) in group.into_iter().zip(replies) {
                        let answer = match unapplied.next().flatten() {
                            None => reply.map_err(|error| connection.translate(&error)),
                            Some(Unapplied::There(answer)) => answer,
                            Some(Unapplied::Elsewhere) => continue,
                            Some(Unapplied::NotNow(error) | Unapplied::Down(error)) => {
                                (problem, again_at_once) = (Some(error), false);
                                continue;
                            }
                        };
                        answers[at] = Some((answer, connection.clone()));
                    }
                }
                if !again_at_once {
                    tokio::time::sleep(delay).await;
                }
            }
        };
        match self.in_time(sending).await {
            Some(sent) => sent?,
            None => return Err(problem.filter(|_| is_cluster).unwrap_or_else(|| self.silence())),
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Returns the fate of each command that the server did not apply because it does not serve the slot, or not at
    /// the moment. The fate of every other command is `None`. Returns nothing if all commands were applied.
    pub(super) async fn unapplied(
        &self,
        replies: &[CommandReply],
        from: &Connection,
        commands: &[RedisCommand],
        sent: Moment,
    ) -> Vec<Option<Unapplied>> {
        match self {
            Self::One(..) => Vec::new(),
            Self::Cluster(cluster) => unapplied(cluster, replies, from, commands, sent).await,
        }
    }
}

/// See [`Topology::unapplied`].
async fn unapplied(
    cluster: &Cluster,
    replies: &[CommandReply],
    from: &Connection,
    commands: &[RedisCommand],
    sent: Moment,
) -> Vec<Option<Unapplied>> {
    if replies.iter().all(Result::is_ok) {
        return Vec::new();
    }
    let took = Moment::now().saturating_since(sent);
    let limit = (took * TIMES_AS_LONG).clamp(AT_LEAST, AT_MOST);
    // All redirected commands are sent before the first answer is awaited.
    let fates = replies.iter().zip(commands).map(|(reply, command)| {
        let error = reply.as_ref().err()?;
        Some(fate(cluster, error, from, command, limit))
    });
    let mut all = Vec::with_capacity(replies.len());
    for fate in fates.collect::<Vec<_>>() {
        all.push(match fate {
            Some(fate) => fate.await,
            None => None,
        });
    }
    all
}

/// Returns the fate of a command that was answered with this error. If its slot is being moved to another server, the
/// command is sent there before this returns.
fn fate<'a>(
    cluster: &Cluster,
    error: &ServerError,
    from: &'a Connection,
    command: &RedisCommand,
    limit: Duration,
) -> impl Future<Output = Option<Unapplied>> + use<'a> {
    let not_now = |error: &ServerError| Some(Unapplied::NotNow(from.translate(error)));
    let mut there = None;
    let here = match (error.code(), redirect(error, from)) {
        ("MOVED", Some((slot, address))) if cluster.moved(slot, &address, from.to()) => {
            Some(Unapplied::Elsewhere)
        }
        ("ASK", Some((_, address))) => {
            let server = cluster.connection_to(&address);
            let server = server.filter(|server| server.is_up() && !server.is_late());
            there =
                server.map(|server| (server.clone(), call_there(cluster, server, command, limit)));
            not_now(error)
        }
        _ if is_being_moved(error) => not_now(error),
        ("CLUSTERDOWN", _) => {
            cluster.doubt();
            Some(Unapplied::Down(from.translate(error)))
        }
        _ => None,
    };
    async move {
        let Some((server, answer)) = there else { return here };
        match answer.await {
            Ok(Err(error)) if is_being_moved(&error) => not_now(&error),
            Ok(reply) => {
                let answer = reply.map_err(|error| server.translate(&error));
                Some(Unapplied::There(answer))
            }
            // The outcome is unknown, so the command is sent again.
            Err(_) => here,
        }
    }
}

/// Sends a command to the server that its slot is being moved to. If that server does not answer within `limit`, no
/// other command is sent to it in this way until it does.
///
/// The engine's runtime does the work, because the caller may have none.
fn call_there(
    cluster: &Cluster,
    connection: Arc<Connection>,
    command: &RedisCommand,
    limit: Duration,
) -> oneshot::Receiver<CommandReply> {
    let (answer, answered) = oneshot::channel();
    let request = [RedisCommand::new("ASKING"), command.clone()];
    cluster.spawn(async move {
        let mut asking = pin!(connection.request(&request));
        let replies = tokio::time::timeout(limit, &mut asking).await;
        let Ok(replies) = replies else {
            connection.set_late(true);
            drop(answer);
            let _ = asking.await;
            return connection.set_late(false);
        };
        if let Some(reply) = replies.ok().and_then(|mut replies| replies.pop()) {
            let _ = answer.send(reply);
        }
    });
    answered
}

/// Whether the slot is being moved.
fn is_being_moved(error: &ServerError) -> bool {
    matches!(error.code(), "TRYAGAIN" | "MOVED" | "ASK")
}

/// See [`Topology::query_each`].
pub(super) async fn query(
    cluster: &Arc<Cluster>,
    home: Slot,
    queries: Vec<RedisCommand>,
) -> Result<Vec<Result<Value, Error>>, Error> {
    Topology::Cluster(cluster.clone()).query_each(home, queries).await
}

/// Returns the first argument of a command.
pub(super) fn key_of(command: &RedisCommand) -> Option<&str> {
    std::str::from_utf8(command.iter().nth(1)?).ok()
}
