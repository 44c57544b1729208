//! One request: its commands, the parts that each command serves, and how the answers are read.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::command::RedisCommand;
use super::connection::Connection;
use super::locks::LockScripts;
use super::pools;
use super::scripts::{self, KINDS, Keys};
use super::value::Value;
use crate::Error;
use crate::backend::{Answer, Answers, Part};
use crate::clock::Time;
use crate::machine::Command;
use crate::machine::lock::{Acquired, LockCommand, LockOutcome};

/// The parts that one command of a request serves.
pub(super) struct Served {
    pub(super) kind: Kind,
    /// The indexes of these parts in the request.
    pub(super) parts: Vec<usize>,
}

/// The kind of a command.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Semaphores,
    Locks,
    Pool,
}

/// An encoded request.
#[derive(Default)]
pub(super) struct Encoded {
    pub(super) commands: Vec<RedisCommand>,
    /// The parts that each command serves.
    pub(super) served: Vec<Served>,
    /// In a cluster, the channels to subscribe to first, each with the parts that depend on it.
    pub(super) channels: BTreeMap<String, Vec<usize>>,
    /// For each part, its keys if it is a semaphore.
    pub(super) keys: Vec<Option<Arc<Keys>>>,
}

/// Whether a client that sends this command must be able to receive wake-ups.
pub(super) fn listens(command: &Command) -> bool {
    matches!(command, Command::Enqueue { wait: true, .. } | Command::Renew { .. })
}

/// Whether a client that got this answer must be able to receive wake-ups.
///
/// It need not if the script was not applied, because the slot has moved. It need not if a lock was acquired: an error
/// would leave the lock held without a guard. It must if a permit was granted: its renewals would be refused as well,
/// so the acquire fails and the permit is released at once.
pub(super) fn needs_wake_ups(answer: &Result<Answer, Error>) -> bool {
    !matches!(
        answer,
        Ok(Answer::Elsewhere
            | Answer::NotNow
            | Answer::Lock(LockOutcome::Acquire(Acquired::Held { .. })))
    )
}

pub(super) fn locks_in<'a>(request: &'a [Part], parts: &[usize]) -> Vec<&'a LockCommand> {
    let lock = |at: &usize| match &request[*at] {
        Part::Lock(command) => Some(command),
        _ => None,
    };
    parts.iter().filter_map(lock).collect()
}

/// Decodes the answers to the commands of [`Redis::encode`](super::Redis::encode) into one answer for each part.
pub(super) struct Reader<'a> {
    connection: &'a Connection,
    locks: &'a LockScripts,
    request: &'a [Part],
    answers: Vec<Option<Result<Answer, Error>>>,
    /// The server's time, if a script returned it.
    pub(super) time: Option<Time>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        connection: &'a Connection,
        locks: &'a LockScripts,
        request: &'a [Part],
    ) -> Self {
        let answers = request.iter().map(|_| None).collect();
        Self { connection, locks, request, answers, time: None }
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
        // The first value in the answer of the semaphore script is the server's time, if it was read.
        if let (Kind::Semaphores, Ok(values)) = (served.kind, &mut values)
            && let Some(Value::Int(time @ 1..)) = values.next()
        {
            self.time = Some(Time::from_micros(time.cast_unsigned()));
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
            (Err(Error::InvalidArgument { .. }), Part::Pool(command)) => {
                Err(pools::misplaced(self.connection, command))
            }
            (Err(error), _) => Err(error.clone()),
        }
    }

    pub(super) fn done(self) -> (Answers, Option<Time>) {
        let missing = || Err(unexpected(&Value::Nil));
        let answers = self.answers.into_iter().map(|answer| answer.unwrap_or_else(missing));
        (answers.collect(), self.time)
    }
}

pub(super) fn unexpected(value: &Value) -> Error {
    Error::internal(scripts::unexpected(value))
}

/// Replaces errors about a key of the wrong type by errors that name the key. Redis does not say which key it is, so
/// the types of all keys of these names are read in one pipeline.
pub(super) async fn name_misplaced(
    connection: &Connection,
    keys: &[Option<Arc<Keys>>],
    answers: &mut Answers,
) {
    let is_misplaced = |at: usize| matches!(answers[at], Err(Error::InvalidArgument { .. }));
    let misplaced = keys.iter().enumerate().filter(|(at, _)| is_misplaced(*at));
    let misplaced: Vec<_> = misplaced.filter_map(|(at, keys)| Some((at, keys.as_ref()?))).collect();
    let types: Vec<_> = misplaced.iter().flat_map(|(_, keys)| scripts::types(&keys.all)).collect();
    if types.is_empty() {
        return;
    }
    let Ok(types) = connection.request(&types).await else { return };
    let mut types = types.into_iter().map(|found| found.unwrap_or(Value::Nil));
    for (at, keys) in misplaced {
        let types: Vec<_> = types.by_ref().take(KINDS.len()).collect();
        if let Some(key) = scripts::misplaced(&keys.all, types) {
            let problem =
                format!("the key {key:?} on {} does not belong to leasehold", connection.address);
            answers[at] =
                Err(Error::invalid("name", problem + ": choose another name or namespace"));
        }
    }
}
