//! The store on Redis or Valkey: the machine in Lua, over one multiplexed connection.
//!
//! - [`link`]: the connection, kept up; [`connect`]: how it is made; [`wire`]: its socket; [`resp`]: its protocol.
//! - [`scripts`]: the transitions, one Lua script each, and their typed calls.
//! - [`locks`], [`pools`]: the same for locks and pools.
//! - [`server_clock`]: how old a wake-up is at most.
//! - [`stats`]: what is held and queued.
//! - [`tls`]: whom a connection over TLS trusts.
//! - [`errors`]: what Redis says, as what the caller does next.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use redis::{Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Value};
use rustls::RootCertStore;

use super::{Answer, Answers, Destination, Later, Part, Profile, RemoteBackend, Report};
use crate::clock::{Moment, Span, Time};
use crate::lock::TimeAuthority;
use crate::machine::lock::{LockCommand, Record};
use crate::machine::{Command, Outcome, Steered};
use crate::name::Name;
use crate::pool::{PoolStats, Which};
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

mod connect;
mod errors;
mod link;
mod locks;
mod pools;
mod resp;
mod scripts;
mod server_clock;
mod stats;
#[cfg(test)]
mod tests;
mod tls;
mod wire;

use link::Link;
use locks::Calls;
pub use locks::LockLayout;
pub(crate) use locks::Prefix;
use scripts::{Keys, Scripts};

/// The keys of this many names are remembered.
const REMEMBERED_NAMES: usize = 10_000;

/// How long a member of another program is given when we grant it a permit: its own default.
const FOREIGN_HEARTBEAT: Span = Span::from_millis(180_000);

/// Where Redis is, and how to behave there.
#[derive(Clone)]
pub(crate) struct RedisSettings {
    pub(crate) info: ConnectionInfo,
    /// The same without its secrets, for people.
    pub(crate) address: String,
    /// Over TLS, the authorities that are trusted instead of those of the web.
    pub(crate) roots: Option<Arc<RootCertStore>>,
    pub(crate) namespace: String,
    pub(crate) answer_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) confirm_within: Span,
    pub(crate) lock_prefix: Prefix,
    pub(crate) lock_layout: LockLayout,
}

impl RedisSettings {
    pub(crate) fn new(url: &str) -> Result<Self, Error> {
        let info = url.into_connection_info().map_err(|_| {
            // What the URL was is not repeated: it may contain a password.
            let expected = "expected redis://[user[:password]@]host[:port][/database], \
                            rediss://… for TLS, or unix:///path";
            Error::invalid("url", format!("it does not parse: {expected}"))
        })?;
        let address = match info.addr() {
            ConnectionAddr::Tcp(host, port) => format!("redis://{host}:{port}"),
            ConnectionAddr::TcpTls { host, port, .. } => format!("rediss://{host}:{port}"),
            ConnectionAddr::Unix(path) => format!("unix://{}", path.display()),
            _ => "Redis".to_owned(),
        };
        let address = match info.redis_settings().db() {
            database @ ..0 => {
                let problem = format!("there is no database {database}: they count from 0");
                return Err(Error::invalid("url", problem + ", as in redis://host:port/0"));
            }
            0 => address,
            database => format!("{address}/{database}"),
        };
        Ok(Self {
            info,
            address,
            roots: None,
            namespace: "adv-sem".to_owned(),
            answer_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            confirm_within: Span::from_millis(5000),
            lock_prefix: Prefix::default(),
            lock_layout: LockLayout::default(),
        })
    }

    /// Over TLS, only these authorities, as PEM, are trusted.
    pub(crate) fn trust_only(&mut self, pem: Vec<u8>) -> Result<(), Error> {
        let (info, roots) = tls::trust_only(self.info.clone(), pem)?;
        (self.info, self.roots) = (info, Some(roots));
        Ok(())
    }
}

/// The store.
pub(crate) struct Redis {
    link: Arc<Link>,
    locks: Arc<Calls>,
    client: OnceLock<ClientId>,
    /// The keys of names: made once, and not for each request.
    keys: Mutex<HashMap<Name, Arc<Keys>>>,
}

impl Redis {
    pub(crate) fn new(settings: RedisSettings) -> Self {
        if matches!(settings.info.addr(), ConnectionAddr::TcpTls { .. }) {
            // If the program has chosen another provider, that one stays.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let locks = Arc::new(Calls::new(
            settings.lock_prefix.clone(),
            settings.lock_layout,
            &settings.namespace,
        ));
        let link = Link::new(settings, Scripts::new());
        Self { link, locks, client: OnceLock::new(), keys: Mutex::default() }
    }

    /// How the first attempt to connect ended.
    pub(crate) fn connected(&self) -> Later<()> {
        let link = self.link.clone();
        Box::pin(async move { link.connected().await })
    }

    fn client(&self) -> Result<ClientId, Error> {
        self.client.get().copied().ok_or_else(|| Error::internal("the store was not started"))
    }

    fn keys(&self, name: &Name) -> Result<Arc<Keys>, Error> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = keys.get(name) {
            return Ok(known.clone());
        }
        let settings = &self.link.settings;
        let (namespace, confirm_within) = (&settings.namespace, settings.confirm_within);
        let new = Keys::new(namespace, name, self.client()?, confirm_within, FOREIGN_HEARTBEAT);
        let new = Arc::new(new);
        if keys.len() >= REMEMBERED_NAMES {
            keys.clear();
        }
        keys.insert(name.clone(), new.clone());
        Ok(new)
    }

    /// The commands of a request, in one pipeline: one script for all semaphores, one for all locks, one for each pool.
    fn encode(&self, request: &[Part]) -> Result<(Vec<Cmd>, Vec<Arc<Keys>>), Error> {
        let (mut semaphores, mut locks, mut pools) = (Vec::new(), Vec::new(), Vec::new());
        for part in request {
            match part {
                Part::Semaphore { name, declared, commands } => {
                    semaphores.push((self.keys(name)?, *declared, &commands[..]));
                }
                Part::Lock(command) => locks.push(command),
                Part::Pool(command) => pools.push(pools::call(&self.link.scripts, command)),
            }
        }
        let scripts = &self.link.scripts;
        let mut calls = Vec::with_capacity(2 + pools.len());
        if !semaphores.is_empty() {
            calls.push(scripts.apply(&semaphores));
        }
        if !locks.is_empty() {
            calls.push(self.locks.apply(scripts, self.client()?, &locks));
        }
        calls.extend(pools);
        Ok((calls, semaphores.into_iter().map(|(keys, ..)| keys).collect()))
    }
}

impl RemoteBackend for Redis {
    fn profile(&self) -> Profile {
        Profile { kind: "redis", needs_renewals: true, time_authority: TimeAuthority::Server }
    }

    fn address(&self) -> &str {
        &self.link.settings.address
    }

    fn start(&self, client: ClientId, report: Report) {
        let _ = self.client.set(client);
        tokio::spawn(self.link.clone().keep_up(client, report));
    }

    fn apply(&self, _to: Destination, request: &Arc<[Part]>) -> Later<Answers> {
        let (request, link, locks) = (request.clone(), self.link.clone(), self.locks.clone());
        let encoded = self.encode(&request);
        Box::pin(async move {
            let (calls, keys) = encoded?;
            let (sent, clock) = (Moment::now(), link.clock());
            let values = link.request(calls).await?;
            let (mut answers, time) = decode(&link, &locks, &request, values);
            if let (Some(clock), Some(time)) = (clock, time) {
                clock.learn(sent, time);
            }
            name_misplaced(&link, &request, &keys, &mut answers).await;
            Ok(answers)
        })
    }

    fn sends_from_any_thread(&self) -> bool {
        true
    }

    fn suspect(&self, _destination: Destination) {
        self.link.suspect_current();
    }

    fn position(&self, name: &Name, id: AcquisitionId) -> Later<Option<usize>> {
        let (link, keys) = (self.link.clone(), self.keys(name));
        Box::pin(async move {
            let mut rank = redis::cmd("ZRANK");
            rank.arg(keys?.waiting()).arg(id.to_string());
            let answer = link.send(vec![rank]).await?.pop().unwrap_or(Value::Nil);
            redis::from_redis_value(answer).map_err(|error| Error::internal(error.to_string()))
        })
    }

    fn release_member(&self, name: &Name, id: &str) -> Later<bool> {
        let (link, keys, id) = (self.link.clone(), self.keys(name), id.to_owned());
        Box::pin(async move {
            let call = link.scripts.release_member(&*keys?, &id);
            scripts::was_removed(&answer_of_one(&link, call).await?).map_err(Error::internal)
        })
    }

    fn steer(&self, name: &Name, steer: Command) -> Later<Steered> {
        let (link, keys) = (self.link.clone(), self.keys(name));
        Box::pin(async move {
            let call = link.scripts.steer(&*keys?, &steer);
            let answer = answer_of_one(&link, call).await?;
            let answer = scripts::decode(&[steer], answer).map_err(Error::internal)?;
            match answer.outcomes[..] {
                [Outcome::Steered(steered)] => Ok(steered),
                _ => Err(Error::internal(format!("a change of limits was answered {answer:?}"))),
            }
        })
    }

    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>> {
        let link = self.link.clone();
        Box::pin(async move { stats::fetch(&link, query).await })
    }

    fn list_locks(&self, limit: usize) -> Later<Vec<Record>> {
        let (link, locks) = (self.link.clone(), self.locks.clone());
        Box::pin(async move { locks.list(&link, limit).await })
    }

    fn list_pools(&self, which: Which) -> Later<Vec<PoolStats>> {
        let link = self.link.clone();
        Box::pin(async move { pools::list(&link, which).await })
    }
}

/// What a script answers that serves one name.
async fn answer_of_one(link: &Link, call: Cmd) -> Result<Value, Error> {
    let answer = link.request(vec![call]).await?.pop().unwrap_or(Ok(Value::Nil))?;
    match answer {
        Value::Array(mut names) if names.len() == 2 => {
            names.remove(1).extract_error().map_err(|error| link.translate(&error))
        }
        other => Err(unexpected(&other)),
    }
}

/// Reads what the commands of [`Redis::encode`] answered, part by part; and the server's time, if it was told.
fn decode(
    link: &Link,
    locks: &Calls,
    request: &[Part],
    values: Vec<Result<Value, Error>>,
) -> (Answers, Option<Time>) {
    let mut values = values.into_iter();
    let mut next = || values.next().unwrap_or_else(|| Err(unexpected(&Value::Nil)));
    let any = |wanted: fn(&Part) -> bool| request.iter().any(wanted);
    let semaphores = any(|part| matches!(part, Part::Semaphore { .. })).then(&mut next);
    let mut semaphores = Parts::of(link, semaphores);
    let time = semaphores.time();
    let mut all_locks = Parts::of(link, any(|part| matches!(part, Part::Lock(_))).then(&mut next));
    let read = |part: &Part| match part {
        Part::Semaphore { commands, .. } => decode_semaphore(commands, semaphores.next()?),
        Part::Lock(command) => decode_lock(locks, command, &all_locks.next()?),
        Part::Pool(command) => match next() {
            Ok(value) => pools::decode(&value).map(Answer::Pool).map_err(Error::internal),
            Err(Error::InvalidArgument { .. }) => Err(pools::misplaced(link, command)),
            Err(error) => Err(error),
        },
    };
    (request.iter().map(read).collect(), time)
}

fn decode_semaphore(commands: &[Command], value: Value) -> Result<Answer, Error> {
    scripts::decode(commands, value).map(Answer::Semaphore).map_err(Error::internal)
}

fn decode_lock(locks: &Calls, command: &LockCommand, value: &Value) -> Result<Answer, Error> {
    locks.decode(command, value).map(Answer::Lock)
}

fn unexpected(value: &Value) -> Error {
    Error::internal(format!("a script answered {value:?}"))
}

/// The answers of one script to several parts, or the error of all of them.
struct Parts<'a> {
    link: &'a Link,
    values: Result<std::vec::IntoIter<Value>, Error>,
}

impl<'a> Parts<'a> {
    fn of(link: &'a Link, answer: Option<Result<Value, Error>>) -> Self {
        let values = match answer {
            Some(Ok(Value::Array(values))) => Ok(values.into_iter()),
            Some(Ok(other)) => Err(unexpected(&other)),
            Some(Err(error)) => Err(error),
            None => Ok(Vec::new().into_iter()),
        };
        Self { link, values }
    }

    /// The server's time, which comes first in what semaphores are answered.
    fn time(&mut self) -> Option<Time> {
        match self.values.as_mut().ok()?.next()? {
            Value::Int(time @ 1..) => Some(Time::from_micros(time.cast_unsigned())),
            _ => None,
        }
    }

    fn next(&mut self) -> Result<Value, Error> {
        match &mut self.values {
            Ok(values) => {
                let value = values.next().ok_or_else(|| unexpected(&Value::Nil))?;
                value.extract_error().map_err(|error| self.link.translate(&error))
            }
            Err(error) => Err(error.clone()),
        }
    }
}

/// Redis does not say which key had the wrong type: the types of the keys of all such names are asked for, in one go.
async fn name_misplaced(link: &Link, request: &[Part], keys: &[Arc<Keys>], answers: &mut Answers) {
    let semaphores = request.iter().zip(answers);
    let semaphores = semaphores.filter(|(part, _)| matches!(part, Part::Semaphore { .. }));
    let misplaced = semaphores.map(|(_, answer)| answer).zip(keys);
    let misplaced = misplaced.filter(|(own, _)| matches!(own, Err(Error::InvalidArgument { .. })));
    let misplaced: Vec<_> = misplaced.collect();
    let calls: Vec<_> = misplaced.iter().flat_map(|(_, keys)| keys.types()).collect();
    if calls.is_empty() {
        return;
    }
    let Ok(types) = link.request(calls).await else { return };
    let mut types = types.into_iter().map(|own| own.unwrap_or(Value::Nil));
    for (answer, keys) in misplaced {
        let own = types.by_ref().take(keys.types().len()).collect();
        if let Some(key) = keys.misplaced(own) {
            let problem = format!("the key {key:?} on {} is not ours", link.settings.address);
            *answer = Err(Error::invalid("name", problem + ": choose another name or namespace"));
        }
    }
}
