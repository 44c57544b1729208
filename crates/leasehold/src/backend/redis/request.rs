//! One request: how it is encoded, sent and answered.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::command::RedisCommand;
use super::connection::Connection;
use super::locks::LockScripts;
use super::scripts::{self, Form, KINDS, storage_keys};
use super::slots::KeyTag;
use super::topology::{Topology, Unapplied};
use super::value::Value;
use super::{Redis, connect, lock_index, pools, stats_reader};
use crate::Error;
use crate::backend::{Answer, Answers, BoxFuture, Destination, Part, RemoteBackend};
use crate::clock::Moment;
use crate::machine::Command;
use crate::machine::lock::{Acquired, LockOutcome};

/// What one call of a request serves.
enum Served {
    /// This many commands of a part for a semaphore.
    Semaphore {
        part: usize,
        form: Form,
        commands: usize,
    },
    Lock {
        part: usize,
    },
    Pool {
        part: usize,
    },
}

impl Served {
    fn part(&self) -> usize {
        match self {
            Self::Semaphore { part, .. } | Self::Lock { part } | Self::Pool { part } => *part,
        }
    }
}

/// An encoded request: one call for each lock and pool, and one or more for each semaphore.
#[derive(Default)]
struct Encoded {
    calls: Vec<RedisCommand>,
    /// What each call serves, in the order of the parts.
    served: Vec<Served>,
    /// In a cluster, the channels to subscribe to first, each with the parts that depend on it.
    channels: BTreeMap<String, Vec<usize>>,
}

impl Redis {
    fn encode(&self, request: &[Part]) -> Result<Encoded, Error> {
        let mut encoded = Encoded::default();
        for (part, of_part) in request.iter().enumerate() {
            let channel = match of_part {
                Part::Semaphore { name, declared, commands, outlook } => {
                    let keys = self.keys(name)?;
                    for (call, form, commands) in
                        self.scripts.calls(&keys, *declared, commands, *outlook)
                    {
                        encoded.calls.push(call);
                        encoded.served.push(Served::Semaphore { part, form, commands });
                    }
                    let listens = commands.iter().any(listens);
                    if listens { keys.channel() } else { None }
                }
                Part::Lock(command) => {
                    let (slot, client) = (self.slot(command.subject()), self.client()?);
                    encoded.calls.push(self.locks.call(&self.scripts, client, slot, command));
                    encoded.served.push(Served::Lock { part });
                    self.locks.channel(command, slot, client)
                }
                Part::Pool(command) => {
                    let pool = self.pools.write(command.pool.as_str());
                    encoded.calls.push(pools::call(&self.scripts, &pool, command));
                    encoded.served.push(Served::Pool { part });
                    None
                }
            };
            if let Some(channel) = channel {
                encoded.channels.entry(channel).or_default().push(part);
            }
        }
        Ok(encoded)
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
            let Encoded { calls, served, channels } = encoded?;
            let Some(connection) = topology.connection(to) else {
                return Ok(request.iter().map(|_| Ok(Answer::Elsewhere)).collect());
            };
            let (sent, current) = (Moment::now(), connection.current()?);
            let (replies, refused) =
                connection.request_listening(&current, channels.keys(), &calls).await?;
            let unapplied = topology.unapplied(&replies, &connection, &calls, sent).await;
            let mut unapplied = unapplied.into_iter();
            let outcomes = replies.into_iter().map(|reply| match unapplied.next().flatten() {
                None => CallOutcome::Answered(reply.map_err(|error| connection.translate(&error))),
                Some(Unapplied::There(answer)) => CallOutcome::Answered(answer),
                Some(Unapplied::Down(error)) => CallOutcome::Answered(Err(error)),
                Some(Unapplied::NotNow(_)) => CallOutcome::NotNow,
                Some(Unapplied::Elsewhere) => CallOutcome::Elsewhere,
            });
            let reader = Reader { connection: &connection, locks: &locks };
            let mut calls = served.into_iter().zip(outcomes).peekable();
            let mut answers: Answers = Vec::with_capacity(request.len());
            for (at, part) in request.iter().enumerate() {
                let of_part = std::iter::from_fn(|| calls.next_if(|(to, _)| to.part() == at));
                answers.push(reader.answer(part, of_part.collect()));
            }
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

/// How one call of a request ended.
enum CallOutcome {
    Answered(Result<Value, Error>),
    /// It was not applied.
    NotNow,
    Elsewhere,
}

/// Decodes the answers to the calls of [`Redis::encode`](super::Redis::encode) into one answer for each part.
struct Reader<'a> {
    connection: &'a Connection,
    locks: &'a LockScripts,
}

impl Reader<'_> {
    fn answer(&self, part: &Part, calls: Vec<(Served, CallOutcome)>) -> Result<Answer, Error> {
        let some_applied =
            calls.iter().any(|(_, outcome)| matches!(outcome, CallOutcome::Answered(_)));
        let mut values = Vec::with_capacity(calls.len());
        for (served, outcome) in calls {
            let value = match outcome {
                CallOutcome::Answered(reply) => reply,
                // The other calls of the part were applied. A small script that was not applied is as one that did not
                // serve its case.
                CallOutcome::NotNow | CallOutcome::Elsewhere if some_applied => Ok(Value::Nil),
                CallOutcome::NotNow => return Ok(Answer::NotNow),
                CallOutcome::Elsewhere => return Ok(Answer::Elsewhere),
            };
            values.push((served, value));
        }
        match part {
            Part::Semaphore { commands, .. } => {
                let answer = |(served, value): (Served, Result<Value, Error>)| match served {
                    Served::Semaphore { form, commands, .. } => {
                        Ok((form, commands, self.checked(value)?))
                    }
                    _ => Err(unexpected(&Value::Nil)),
                };
                let answers = values.into_iter().map(answer).collect::<Result<Vec<_>, Error>>()?;
                let (reply, _time) = scripts::decode(commands, answers).map_err(Error::internal)?;
                Ok(Answer::Semaphore(reply))
            }
            Part::Lock(command) => {
                let value = values.pop().map(|(_, value)| self.checked(value));
                self.locks.decode(command, &value.unwrap_or(Ok(Value::Nil))?).map(Answer::Lock)
            }
            Part::Pool(command) => match values.pop().map(|(_, value)| value) {
                Some(Ok(value)) => pools::decode(&value).map(Answer::Pool).map_err(Error::internal),
                Some(Err(Error::ForeignData { .. })) => {
                    Err(pools::misplaced(self.connection, command))
                }
                Some(Err(error)) => Err(error),
                None => Err(unexpected(&Value::Nil)),
            },
        }
    }

    fn checked(&self, reply: Result<Value, Error>) -> Result<Value, Error> {
        reply?.checked().map_err(|error| self.connection.translate(&error))
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
