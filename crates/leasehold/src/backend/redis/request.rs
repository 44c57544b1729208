//! One request: how it is encoded, sent and answered.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::command::RedisCommand;
use super::connection::Connection;
use super::locks::LockScripts;
use super::scripts::{self, KINDS, Keys, storage_keys};
use super::slots::KeyTag;
use super::topology::{Topology, Unapplied};
use super::value::Value;
use super::{Redis, connect, lock_index, pools, stats_reader};
use crate::Error;
use crate::backend::{Answer, Answers, BoxFuture, Destination, Part, RemoteBackend, Slot};
use crate::clock::Moment;
use crate::machine::Command;
use crate::machine::lock::{Acquired, LockCommand, LockOutcome};

/// The parts that one command of a request serves.
struct Served {
    pub(super) kind: Kind,
    /// The indexes of these parts in the request.
    pub(super) parts: Vec<usize>,
}

/// The kind of a command.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Semaphores,
    Locks,
    Pool,
}

/// An encoded request.
#[derive(Default)]
struct Encoded {
    pub(super) commands: Vec<RedisCommand>,
    /// The parts that each command serves.
    pub(super) served: Vec<Served>,
    /// In a cluster, the channels to subscribe to first, each with the parts that depend on it.
    pub(super) channels: BTreeMap<String, Vec<usize>>,
}

impl Redis {
    /// Encodes a request as one pipeline: one script call for all semaphores of a slot, one for all locks of a slot,
    /// one for each pool.
    fn encode(&self, request: &[Part]) -> Result<Encoded, Error> {
        let mut groups: BTreeMap<(Kind, Slot), Vec<usize>> = BTreeMap::new();
        let (mut encoded, mut names) = (Encoded::default(), Vec::new());
        for (at, part) in request.iter().enumerate() {
            let channel = match part {
                Part::Semaphore { name, commands, .. } => {
                    let keys = self.keys(name)?;
                    groups.entry((Kind::Semaphores, keys.slot())).or_default().push(at);
                    let listens = commands.iter().any(listens);
                    let channel = if listens { keys.channel() } else { None };
                    names.push(Some(keys));
                    channel
                }
                Part::Lock(command) => {
                    let slot = self.slot(command.subject());
                    groups.entry((Kind::Locks, slot)).or_default().push(at);
                    names.push(None);
                    self.locks.channel(command, slot, self.client()?)
                }
                Part::Pool(_) => {
                    names.push(None);
                    None
                }
            };
            if let Some(channel) = channel {
                encoded.channels.entry(channel).or_default().push(at);
            }
        }
        for ((kind, slot), parts) in groups {
            let command = match kind {
                Kind::Semaphores => self.semaphores(request, &names, &parts),
                Kind::Locks | Kind::Pool => {
                    let commands = locks_in(request, &parts);
                    self.locks.apply(&self.scripts, self.client()?, slot, &commands)
                }
            };
            encoded.commands.push(command);
            encoded.served.push(Served { kind, parts });
        }
        for (at, part) in request.iter().enumerate() {
            if let Part::Pool(command) = part {
                let pool = self.pools.write(command.pool.as_str());
                encoded.commands.push(pools::call(&self.scripts, &pool, command));
                encoded.served.push(Served { kind: Kind::Pool, parts: vec![at] });
            }
        }
        Ok(encoded)
    }

    fn semaphores(
        &self,
        request: &[Part],
        keys: &[Option<Keys<'_>>],
        parts: &[usize],
    ) -> RedisCommand {
        let named = parts.iter().filter_map(|at| match (&request[*at], &keys[*at]) {
            (Part::Semaphore { declared, commands, .. }, Some(keys)) => {
                Some((keys.clone(), *declared, &commands[..]))
            }
            _ => None,
        });
        self.scripts.apply(&named.collect::<Vec<_>>())
    }

    /// Sends a request to a server, and returns one answer for each part.
    pub(super) fn send(&self, to: Destination, request: Arc<[Part]>) -> BoxFuture<Answers> {
        let (topology, locks, key_tag) = (self.topology.clone(), self.locks.clone(), self.names);
        if topology.settings().only_reads() {
            return Box::pin(async move {
                Ok(stats_reader::answers(&topology, &locks, &request).await)
            });
        }
        let encoded = self.encode(&request);
        Box::pin(async move {
            let Encoded { commands, served, channels } = encoded?;
            let Some(connection) = topology.connection(to) else {
                return Ok(request.iter().map(|_| Ok(Answer::Elsewhere)).collect());
            };
            let (sent, current) = (Moment::now(), connection.current()?);
            let (replies, refused) =
                connection.request_listening(&current, channels.keys(), &commands).await?;
            let mut reader = Reader::new(&connection, &locks, &request);
            let unapplied = topology.unapplied(&replies, &connection, &commands, sent).await;
            let mut unapplied = unapplied.into_iter();
            for (served, reply) in served.iter().zip(replies) {
                match unapplied.next().flatten() {
                    None => {
                        reader.read(served, reply.map_err(|error| connection.translate(&error)));
                    }
                    Some(Unapplied::There(answer)) => {
                        reader.read(served, answer);
                    }
                    Some(Unapplied::Down(error)) => reader.read(served, Err(error)),
                    Some(Unapplied::NotNow(_)) => reader.unserved(served, || Answer::NotNow),
                    Some(Unapplied::Elsewhere) => reader.unserved(served, || Answer::Elsewhere),
                }
            }
            let mut answers = reader.done();
            for (channel, error) in refused {
                let error = connect::no_wake_ups(&channel, &error);
                for at in channels.get(&channel).into_iter().flatten() {
                    if !error.is_transient() && needs_wake_ups(&answers[*at]) {
                        answers[*at] = Err(error.clone());
                    }
                }
            }
            name_misplaced(&connection, key_tag, &request, &mut answers).await;
            if let Topology::Cluster(cluster) = &topology {
                lock_index::keep(cluster, &locks, &request, &answers).await;
            }
            Ok(answers)
        })
    }
}

/// Whether a client that sends this command must be able to receive wake-ups.
fn listens(command: &Command) -> bool {
    matches!(command, Command::Enqueue { wait: true, .. } | Command::Renew { .. })
}

/// Whether a client that got this answer must be able to receive wake-ups.
///
/// It need not if the script was not applied, because the slot has moved. It need not if a lock was acquired: an error
/// would leave the lock held without a guard. It must if a permit was granted: its renewals would be refused as well,
/// so the acquire fails and the permit is released at once.
fn needs_wake_ups(answer: &Result<Answer, Error>) -> bool {
    !matches!(
        answer,
        Ok(Answer::Elsewhere
            | Answer::NotNow
            | Answer::Lock(LockOutcome::Acquire(Acquired::Held { .. })))
    )
}

fn locks_in<'a>(request: &'a [Part], parts: &[usize]) -> Vec<&'a LockCommand> {
    let lock = |at: &usize| match &request[*at] {
        Part::Lock(command) => Some(command),
        _ => None,
    };
    parts.iter().filter_map(lock).collect()
}

/// Decodes the answers to the commands of [`Redis::encode`](super::Redis::encode) into one answer for each part.
struct Reader<'a> {
    connection: &'a Connection,
    locks: &'a LockScripts,
    request: &'a [Part],
    answers: Vec<Option<Result<Answer, Error>>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        connection: &'a Connection,
        locks: &'a LockScripts,
        request: &'a [Part],
    ) -> Self {
        let answers = request.iter().map(|_| None).collect();
        Self { connection, locks, request, answers }
    }

    pub(super) fn unserved(&mut self, served: &Served, answer: impl Fn() -> Answer) {
        for at in &served.parts {
            self.answers[*at] = Some(Ok(answer()));
        }
    }

    pub(super) fn read(&mut self, served: &Served, reply: Result<Value, Error>) {
        if served.kind == Kind::Pool {
            for at in &served.parts {
                self.answers[*at] = Some(self.pool(&self.request[*at], &reply));
            }
            return;
        }
        let mut values = match reply {
            Ok(Value::Array(values)) => Ok(values.into_iter()),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(error),
        };
        // The first value in the answer of the semaphore script is the server's time.
        if let (Kind::Semaphores, Ok(values)) = (served.kind, &mut values) {
            values.next();
        }
        for at in &served.parts {
            let value = match &mut values {
                Ok(values) => values.next().ok_or_else(|| unexpected(&Value::Nil)),
                Err(error) => Err(error.clone()),
            };
            self.answers[*at] =
                Some(value.and_then(|value| self.answer(&self.request[*at], value)));
        }
    }

    /// Decodes the value that a script returned for one part.
    fn answer(&self, part: &Part, value: Value) -> Result<Answer, Error> {
        let value = value.checked().map_err(|error| self.connection.translate(&error))?;
        match part {
            Part::Semaphore { commands, .. } => {
                scripts::decode(commands, value).map(Answer::Semaphore).map_err(Error::internal)
            }
            Part::Lock(command) => self.locks.decode(command, &value).map(Answer::Lock),
            Part::Pool(_) => Err(unexpected(&value)),
        }
    }

    fn pool(&self, part: &Part, reply: &Result<Value, Error>) -> Result<Answer, Error> {
        match (reply, part) {
            (Ok(value), _) => pools::decode(value).map(Answer::Pool).map_err(Error::internal),
            (Err(Error::ForeignData { .. }), Part::Pool(command)) => {
                Err(pools::misplaced(self.connection, command))
            }
            (Err(error), _) => Err(error.clone()),
        }
    }

    pub(super) fn done(self) -> Answers {
        let missing = || Err(unexpected(&Value::Nil));
        let answers = self.answers.into_iter().map(|answer| answer.unwrap_or_else(missing));
        answers.collect()
    }
}

pub(super) fn unexpected(value: &Value) -> Error {
    Error::internal(scripts::unexpected(value))
}

/// Replaces errors about a key of the wrong type by errors that name the key. Redis does not say which key it is, so
/// the types of all keys of these names are read in one pipeline.
async fn name_misplaced(
    connection: &Connection,
    key_tag: KeyTag,
    request: &[Part],
    answers: &mut Answers,
) {
    let namespace = &connection.settings.namespace;
    let keys_of = |(at, part): (usize, &Part)| match (part, &answers[at]) {
        (Part::Semaphore { name, .. }, Err(Error::ForeignData { .. })) => {
            Some((at, storage_keys(namespace, &key_tag.write(name.as_str()))))
        }
        _ => None,
    };
    let misplaced: Vec<_> = request.iter().enumerate().filter_map(keys_of).collect();
    let types: Vec<_> = misplaced.iter().flat_map(|(_, keys)| scripts::types(keys)).collect();
    if types.is_empty() {
        return;
    }
    let Ok(types) = connection.request(&types).await else { return };
    let mut types = types.into_iter().map(|found| found.unwrap_or(Value::Nil));
    for (at, keys) in misplaced {
        let types: Vec<_> = types.by_ref().take(KINDS.len()).collect();
        if let Some(key) = scripts::misplaced(&keys, types) {
            let problem =
                format!("the key {key:?} on {} does not belong to leasehold", connection.address);
            answers[at] = Err(Error::foreign(problem + ": choose another name or namespace"));
        }
    }
}
