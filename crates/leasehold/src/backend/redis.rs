//! The store on Redis or Valkey: the machine in Lua, over one multiplexed connection.
//!
//! - [`link`]: the connection, and how it is made anew.
//! - [`scripts`]: the transitions, one Lua script each, and their typed calls.
//! - [`locks`], [`pools`]: the same for locks and pools.
//! - [`stats`]: what is held and queued.
//! - [`tls`]: whom a connection over TLS trusts.
//! - [`errors`]: what Redis says, as what the caller does next.

use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use super::{AwayBackend, AwaySemaphore, Later, LockStore, PoolStore, Reply, WakeUps};
use crate::clock::Span;
use crate::machine::{Command, Effects};
use crate::name::Name;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

mod errors;
mod link;
mod locks;
mod pools;
mod scripts;
mod stats;
#[cfg(test)]
mod tests;
mod tls;
mod tray;

use link::Link;
pub(crate) use locks::Prefix;
use locks::RedisLocks;
use pools::RedisPools;
use scripts::{Keys, Scripts};

/// How long a member of another program is given when we grant it a permit: its own default.
const FOREIGN_HEARTBEAT: Span = Span::from_millis(180_000);

/// Where Redis is, and how to behave there.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) info: ConnectionInfo,
    /// The same without its secrets, for people.
    pub(crate) address: String,
    pub(crate) namespace: String,
    pub(crate) socket_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) confirm_within: Span,
    pub(crate) lock_prefix: Prefix,
}

impl Settings {
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
            namespace: "adv-sem".to_owned(),
            socket_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            confirm_within: Span::from_millis(5000),
            lock_prefix: Prefix::default(),
        })
    }

    /// Over TLS, only these authorities, as PEM, are trusted.
    pub(crate) fn trust_only(&mut self, pem: Vec<u8>) -> Result<(), Error> {
        self.info = tls::trust_only(self.info.clone(), pem)?;
        Ok(())
    }
}

/// The store.
pub(crate) struct Redis {
    link: Arc<Link>,
}

impl Redis {
    pub(crate) fn new(settings: Settings) -> Self {
        if matches!(settings.info.addr(), ConnectionAddr::TcpTls { .. }) {
            // If the program has chosen another provider, that one stays.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        Self { link: Link::new(settings, Scripts::new()) }
    }

    /// Waits until the connection is up, or says why it is not.
    pub(crate) fn connected(&self) -> Later<()> {
        let link = self.link.clone();
        Box::pin(async move { link.connection().await.map(drop) })
    }

    /// A pause, on the engine's thread: the caller's runtime may have no timers.
    pub(crate) fn pause(delay: Duration) -> Later<()> {
        Box::pin(async move {
            tokio::time::sleep(delay).await;
            Ok(())
        })
    }
}

impl AwayBackend for Redis {
    fn start(&self, client: ClientId, wake_ups: WakeUps) {
        tokio::spawn(self.link.clone().keep_up(client, wake_ups));
    }

    fn semaphore(&self, name: &Name, client: ClientId) -> Arc<dyn AwaySemaphore> {
        let settings = &self.link.settings;
        let (namespace, confirm_within) = (&settings.namespace, settings.confirm_within);
        let keys = Keys::new(namespace, name, client, confirm_within, FOREIGN_HEARTBEAT);
        Arc::new(RedisSemaphore { link: self.link.clone(), keys: Arc::new(keys) })
    }

    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>> {
        let link = self.link.clone();
        Box::pin(async move { stats::fetch(&link, query).await })
    }

    fn locks(&self, client: ClientId) -> Arc<dyn LockStore> {
        Arc::new(RedisLocks::new(self.link.clone(), client))
    }

    fn pools(&self) -> Arc<dyn PoolStore> {
        Arc::new(RedisPools(self.link.clone()))
    }

    fn kind(&self) -> &'static str {
        "redis"
    }
}

struct RedisSemaphore {
    link: Arc<Link>,
    keys: Arc<Keys>,
}

impl AwaySemaphore for RedisSemaphore {
    fn apply(&self, commands: Vec<Command>) -> Later<Reply> {
        let (link, keys) = (self.link.clone(), self.keys.clone());
        Box::pin(async move {
            let answer = match &commands[..] {
                // They never queue behind anything.
                [Command::Renew { .. }, ..] => {
                    let call = link.scripts.apply(&[(&*keys, &commands[..])]);
                    link.send(vec![call]).await.and_then(|answer| only(&link, answer))
                }
                _ => tray::ask(&link, &keys, commands.clone()).await,
            };
            let answer = match answer {
                Err(error @ Error::InvalidArgument { .. }) => {
                    return Err(name_misplaced(&link, &keys, error).await);
                }
                answer => scripts::decode(&commands, answer?).map_err(Error::internal)?,
            };
            let granted = answer.granted.into_iter().map(|(id, held)| (id, held, ())).collect();
            let effects = Effects { granted, ..Effects::default() };
            let scripts::Answer { outcomes, next_expiry, .. } = answer;
            Ok(Reply { outcomes, effects, next_expiry })
        })
    }

    fn position(&self, id: AcquisitionId) -> Later<Option<usize>> {
        let (link, keys) = (self.link.clone(), self.keys.clone());
        Box::pin(async move {
            let mut rank = redis::cmd("ZRANK");
            rank.arg(keys.waiting()).arg(id.to_string());
            let answer = link.send(vec![rank]).await?.pop().unwrap_or(redis::Value::Nil);
            redis::from_redis_value(answer).map_err(|error| Error::internal(error.to_string()))
        })
    }
}

/// The answer about the one name that was asked about.
fn only(link: &Link, answers: Vec<redis::Value>) -> Result<redis::Value, Error> {
    match answers.into_iter().next() {
        Some(redis::Value::Array(mut parts)) if parts.len() == 1 => {
            parts.remove(0).extract_error().map_err(|error| link.translate(&error))
        }
        other => Err(Error::internal(format!("a script answered {other:?}"))),
    }
}

/// Redis does not say which key had the wrong type.
async fn name_misplaced(link: &Link, keys: &Keys, error: Error) -> Error {
    match link.send(keys.types()).await {
        Ok(types) => keys.misplaced(types).map_or(error, |key| {
            let problem = format!("the key {key:?} on {} is not ours", link.settings.address);
            Error::invalid("name", problem + ": choose another name or namespace")
        }),
        Err(_) => error,
    }
}
