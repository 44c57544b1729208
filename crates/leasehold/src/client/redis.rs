//! A client on Redis.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Client;
use crate::Error;
use crate::backend::redis::{LockLayout, Prefix, Redis, RedisSettings};
use crate::engine::{Engine, Settings};
use crate::name::positive;

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
    /// let error = Client::redis("redis://127.0.0.1:1").await.unwrap_err();
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
    pub async fn redis(url: &str) -> Result<Self, Error> {
        Self::redis_builder(url).open().await
    }

    /// The same, with other settings than the default ones. `url` is
    /// `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or
    /// `unix:///path?db=…&user=…&pass=…`.
    pub fn redis_builder(url: &str) -> RedisBuilder {
        RedisBuilder::new(url)
    }
}

/// A client on Redis, with other settings: see [`Client::redis_builder`].
///
/// ```
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// async fn open() -> Result<Client, Error> {
///     Client::redis_builder("rediss://user:password@redis.internal:6380/0")
///         .namespace("billing")
///         .answer_timeout(Duration::from_secs(2))
///         .open()
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
    lock_layout: LockLayout,
    answer_timeout: Duration,
    connect_timeout: Duration,
    confirm_within: Duration,
}

impl RedisBuilder {
    fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            ca_certificate: None,
            namespace: None,
            lock_prefix: None,
            lock_layout: LockLayout::default(),
            answer_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            confirm_within: Duration::from_secs(5),
        }
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
    /// async fn open() -> Result<Client, Box<dyn std::error::Error>> {
    ///     let pem = std::fs::read("/etc/ssl/our-own.pem")?;
    ///     Ok(Client::redis_builder("rediss://redis.internal").ca_certificate(pem).open().await?)
    /// }
    ///
    /// // What is no certificate is refused before anything is connected to.
    /// let builder = Client::redis_builder("rediss://redis.internal").ca_certificate("our own");
    /// let error = builder.open().await.unwrap_err();
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

    /// How long the server may be silent: 5 s by default. A try, a release or a question fails with
    /// [`Error::Unavailable`] when it was not answered for that long, also while there is no connection, and a connection
    /// that was silent for that long is replaced. Waiting for a permit or a lock has no such limit.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// How long connecting may take: 2 s by default.
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

    /// How locks are spelled, for programs that share them: as `SyncGuard` 1 does by default.
    pub fn lock_layout(mut self, layout: LockLayout) -> Self {
        self.lock_layout = layout;
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// As for [`Client::redis`], and [`Error::InvalidArgument`] for settings that make no sense.
    ///
    /// # Cancel safety
    /// Dropping the future makes no client.
    pub async fn open(self) -> Result<Client, Error> {
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
        redis.lock_layout = self.lock_layout;
        let answer_timeout = positive("answer_timeout", self.answer_timeout)?;
        positive("connect_timeout", self.connect_timeout)?;
        redis.confirm_within = positive("confirm_within", self.confirm_within)?;
        (redis.answer_timeout, redis.connect_timeout) = (self.answer_timeout, self.connect_timeout);
        let redis = Arc::new(Redis::new(redis));
        let settings = Settings { answer_timeout, ..Settings::default() };
        let client = Client { engine: Engine::remote(redis.clone(), settings) };
        client.engine.core().run(redis.connected()).await?;
        Ok(client)
    }
}

impl fmt::Debug for RedisBuilder {
    /// Without the URL, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBuilder")
            .field("namespace", &self.namespace)
            .field("answer_timeout", &self.answer_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}
