//! A client on Redis.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Client;
use crate::Error;
use crate::backend::Backend;
use crate::backend::redis::{Prefix, Redis, Settings as RedisSettings};
use crate::engine::{Engine, Retries, Settings};
use crate::name::positive;

/// The store that is meant where Redis is asked for without saying which.
const DEFAULT_URL: &str = "redis://localhost:6379";

impl Client {
    /// A client whose permits are shared by everyone who uses the same Redis or Valkey server, version 6.2 or
    /// later.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use leasehold::{Client, ErrorKind};
    ///
    /// // Nobody listens there.
    /// let connect = Client::redis().url("redis://127.0.0.1:1").attempts(1).connect();
    /// let error = connect.await.unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::ServiceUnavailable);
    /// let expected = "connecting to redis://127.0.0.1:1: the store cannot be reached";
    /// assert_eq!(error.to_string(), expected);
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the URL does not parse, [`Error::Unavailable`] if the server cannot be
    /// reached, [`Error::Refused`] if it does not let us in or is too old.
    ///
    /// # Cancel safety
    /// Dropping the future makes no client.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::redis().url(url).connect().await
    }

    /// A client on Redis, with other settings than the default ones.
    pub fn redis() -> RedisBuilder {
        RedisBuilder::new()
    }
}

/// A client on Redis, with other settings: see [`Client::redis`].
///
/// ```
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// async fn connect() -> Result<Client, Error> {
///     Client::redis()
///         .url("rediss://user:password@redis.internal:6380/0")
///         .namespace("billing")
///         .socket_timeout(Duration::from_secs(5))
///         .attempts(5)
///         .connect()
///         .await
/// }
/// ```
#[must_use = "nothing is connected until it is told to"]
#[derive(Clone)]
pub struct RedisBuilder {
    url: String,
    ca_certificate: Option<Vec<u8>>,
    namespace: Option<String>,
    lock_prefix: Option<String>,
    socket_timeout: Duration,
    connect_timeout: Duration,
    confirm_within: Duration,
    attempts: u32,
    multiplier: f64,
    min_delay: Duration,
    max_delay: Duration,
}

impl RedisBuilder {
    fn new() -> Self {
        let Retries { attempts, multiplier, min_delay, max_delay, timeout } = Retries::default();
        Self {
            url: DEFAULT_URL.to_owned(),
            ca_certificate: None,
            namespace: None,
            lock_prefix: None,
            socket_timeout: timeout,
            connect_timeout: Duration::from_secs(10),
            confirm_within: Duration::from_secs(5),
            attempts,
            multiplier,
            min_delay,
            max_delay,
        }
    }

    /// Where: `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or
    /// `unix:///path?db=…&user=…&pass=…`. By default `redis://localhost:6379`.
    pub fn url(mut self, url: &str) -> Self {
        url.clone_into(&mut self.url);
        self
    }

    /// Over TLS, trusts the authorities in this PEM, one or several, instead of those that browsers trust, which
    /// are built in. The system's own are not read: if the server's certificate is from one of them, give
    /// that file.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use leasehold::{Client, Error};
    ///
    /// async fn connect() -> Result<Client, Box<dyn std::error::Error>> {
    ///     let pem = std::fs::read("/etc/ssl/our-own.pem")?;
    ///     Ok(Client::redis().url("rediss://redis.internal").ca_certificate(pem).connect().await?)
    /// }
    ///
    /// // What is no certificate is refused before anything is connected to.
    /// let builder = Client::redis().url("rediss://redis.internal").ca_certificate("our own");
    /// let error = builder.connect().await.unwrap_err();
    /// assert!(matches!(error, Error::InvalidArgument { what: "ca_certificate", .. }));
    /// # }
    /// ```
    pub fn ca_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca_certificate = Some(pem.into());
        self
    }

    /// What the keys of semaphores begin with, and the wake-ups and waiting lists of locks: `adv-sem` by default. Locks
    /// themselves have [`lock_prefix`](Self::lock_prefix), and pools always begin with `semaphores:`.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// How long an answer may take: 30 s by default.
    pub fn socket_timeout(mut self, timeout: Duration) -> Self {
        self.socket_timeout = timeout;
        self
    }

    /// How long connecting may take: 10 s by default.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long a waiter of another client has to claim a permit that we hand to it: 5 s by default, and never
    /// more than its heartbeat interval.
    pub fn confirm_within(mut self, limit: Duration) -> Self {
        self.confirm_within = limit;
        self
    }

    /// What the keys of all our locks begin with: `syncguard` by default. A colon follows, unless it ends in one.
    pub fn lock_prefix(mut self, prefix: &str) -> Self {
        self.lock_prefix = Some(prefix.to_owned());
        self
    }

    /// How often a server that does not answer is asked, in all: 3 by default.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// How long to wait between attempts: from `min` (1 s), by `multiplier` (2) more each time, up to `max`
    /// (60 s).
    pub fn retry_delays(mut self, min: Duration, multiplier: f64, max: Duration) -> Self {
        (self.min_delay, self.multiplier, self.max_delay) = (min, multiplier, max);
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// As for [`Client::connect`], and [`Error::InvalidArgument`] for settings that make no sense.
    ///
    /// # Cancel safety
    /// Dropping the future makes no client.
    pub async fn connect(self) -> Result<Client, Error> {
        let mut redis = RedisSettings::new(&self.url)?;
        if let Some(pem) = self.ca_certificate {
            redis.trust_only(pem)?;
        }
        if let Some(namespace) = &self.namespace {
            redis.namespace = crate::name::Name::new("namespace", namespace)?.to_string();
        }
        if let Some(prefix) = &self.lock_prefix {
            redis.lock_prefix = Prefix::new(prefix)?;
        }
        positive("socket_timeout", self.socket_timeout)?;
        positive("connect_timeout", self.connect_timeout)?;
        positive("retry_delays", self.min_delay)?;
        redis.confirm_within = positive("confirm_within", self.confirm_within)?;
        if self.attempts == 0 {
            return Err(Error::invalid("attempts", "0 is not an attempt: at least 1"));
        }
        if !(self.multiplier.is_finite() && self.multiplier >= 1.0) {
            let problem = format!("{} would not lengthen a delay: at least 1", self.multiplier);
            return Err(Error::invalid("retry_delays", problem));
        }
        (redis.socket_timeout, redis.connect_timeout) = (self.socket_timeout, self.connect_timeout);
        let retries = Retries {
            attempts: self.attempts,
            multiplier: self.multiplier,
            min_delay: self.min_delay,
            max_delay: self.max_delay.max(self.min_delay),
            timeout: self.socket_timeout,
        };
        let redis = Arc::new(Redis::new(redis));
        let settings = Settings { retries, ..Settings::default() };
        let client = Client { engine: Engine::new(Backend::Away(redis.clone()), settings) };
        let core = client.engine.core();
        let mut attempt = 1;
        loop {
            match core.run(redis.connected()).await {
                Ok(()) => return Ok(client),
                Err(error @ Error::Unavailable { .. }) if attempt < self.attempts => {
                    tracing::debug!(%error, attempt, "connecting again");
                    core.run(Redis::pause(retries.delay(attempt))).await?;
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl fmt::Debug for RedisBuilder {
    /// Without the URL, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBuilder")
            .field("namespace", &self.namespace)
            .field("socket_timeout", &self.socket_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
