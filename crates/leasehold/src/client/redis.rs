//! Clients on Redis.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Client;
use crate::Error;
use crate::backend::redis::{LockLayout, Prefix, Purpose, Redis, RedisSettings};
use crate::engine::{Engine, Settings};
use crate::name::{claim_time, positive};
use crate::url::SentinelAccess;

impl Client {
    /// Opens a client on Redis or Valkey, version 6.2 or later (7.0 in a cluster).
    ///
    /// Its permits are shared by all clients of the same server, namespace and database.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use leasehold::{Client, Error};
    ///
    /// // Nothing listens on this port.
    /// let error = Client::redis("redis://127.0.0.1:1").await.unwrap_err();
    /// assert!(matches!(error, Error::Unavailable { .. }));
    /// let expected = "connecting to redis://127.0.0.1:1: the store cannot be reached";
    /// assert_eq!(error.to_string(), expected);
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the URL is invalid.
    /// - [`Error::Unavailable`] if the server cannot be reached or does not answer in time.
    /// - [`Error::Denied`] if the server denies access.
    /// - [`Error::Unusable`] if the server is too old, is a read-only replica, or is not of the kind that the URL names.
    /// - [`Error::Stopped`] if the client's background thread cannot be started.
    ///
    /// # Cancel safety
    /// If the future is dropped, no client is created.
    pub async fn redis(url: &str) -> Result<Self, Error> {
        Self::redis_builder(url).open().await
    }

    /// Returns a builder for a client on Redis, to change its settings. `url` is
    /// `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or `unix:///path?db=…&user=…&pass=…`.
    pub fn redis_builder(url: &str) -> RedisBuilder {
        RedisBuilder::new(url)
    }
}

/// A builder for a client on Redis: see [`Client::redis_builder`].
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
#[must_use = "the builder does nothing until `open` is awaited"]
#[derive(Clone)]
pub struct RedisBuilder {
    url: String,
    ca_certificate: Option<Vec<u8>>,
    sentinels: SentinelAccess,
    namespace: Option<String>,
    lock_prefix: Option<String>,
    lock_layout: LockLayout,
    purpose: Purpose,
    answer_timeout: Duration,
    connect_timeout: Duration,
    claim_within: Duration,
}

impl RedisBuilder {
    fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            ca_certificate: None,
            sentinels: SentinelAccess::default(),
            namespace: None,
            lock_prefix: None,
            lock_layout: LockLayout::default(),
            purpose: Purpose::Commands,
            answer_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            claim_within: Duration::from_secs(5),
        }
    }

    /// Sets the certificate authorities to trust over TLS, as PEM with one or more certificates.
    ///
    /// By default the client trusts the public authorities that browsers trust, which are built in.
    /// It does not read the system's own certificates: if one of those issued the server's
    /// certificate, pass that file here.
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
    /// // An invalid certificate is rejected before the client connects.
    /// let builder = Client::redis_builder("rediss://redis.internal").ca_certificate("our own");
    /// let error = builder.open().await.unwrap_err();
    /// assert!(matches!(error, Error::InvalidArgument { argument: "ca_certificate", .. }));
    /// # }
    /// ```
    pub fn ca_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca_certificate = Some(pem.into());
        self
    }

    /// Sets the user and password for the sentinels, for a URL that begins with `redis-sentinel://`
    /// or `rediss-sentinel://`.
    ///
    /// The user and password in the URL are for the server.
    ///
    /// ```
    /// use leasehold::{Client, Error};
    ///
    /// async fn open() -> Result<Client, Error> {
    ///     Client::redis_builder("redis-sentinel://app:secret@s1,s2,s3/mymaster")
    ///         .sentinel_credentials(Some("watcher"), "another secret")
    ///         .open()
    ///         .await
    /// }
    /// ```
    pub fn sentinel_credentials(mut self, user: Option<&str>, password: &str) -> Self {
        self.sentinels.user = user.map(str::to_owned);
        self.sentinels.password = Some(password.to_owned());
        self
    }

    /// Sets whether to connect to the sentinels over TLS.
    ///
    /// By default the client does so if it connects to the server over TLS.
    pub fn sentinel_tls(mut self, tls: bool) -> Self {
        self.sentinels.tls = Some(tls);
        self
    }

    /// Sets the prefix of the keys of semaphores, and of the channels and sets by which waiters are
    /// notified: `adv-sem` by default.
    ///
    /// The locks themselves have [`lock_prefix`](Self::lock_prefix), and the keys of pools always
    /// begin with `semaphores:`.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Sets how long the client waits for an answer from the server: 5 s by default.
    ///
    /// After that, a try, a release or a query fails with [`Error::Unavailable`], also while there
    /// is no connection. A connection that was silent for that long is replaced. Waiting for a
    /// permit or a lock has no such limit.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// Sets how long connecting may take: 2 s by default.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets how long a waiter of another client has to claim a permit that this client grants to
    /// it: 5 s by default, and never more than the waiter's lease.
    ///
    /// A client claims a permit with its first renewal. A permit that is not claimed in time passes
    /// to the next waiter. The minimum is 1 s, because the time applies to the other clients.
    pub fn claim_within(mut self, limit: Duration) -> Self {
        self.claim_within = limit;
        self
    }

    /// Sets the prefix of the keys of locks: `syncguard` by default.
    ///
    /// A colon follows the prefix, unless the prefix ends in one.
    pub fn lock_prefix(mut self, prefix: &str) -> Self {
        self.lock_prefix = Some(prefix.to_owned());
        self
    }

    /// Sets how locks are stored: see [`compat`](crate::compat).
    pub(crate) fn layout(mut self, layout: LockLayout) -> Self {
        self.lock_layout = layout;
        self
    }

    /// Makes the client read-only.
    ///
    /// It can fetch statistics, and look up locks with [`Locks::lookup`](crate::Locks::lookup) and
    /// similar functions. Everything else fails with [`Error::Denied`]. The Redis user of the
    /// client needs no permission to write, to run scripts or to subscribe.
    pub fn read_only(mut self) -> Self {
        self.purpose = Purpose::Reading;
        self
    }

    /// Connects to the server and creates the client.
    ///
    /// # Errors
    /// The same as for [`Client::redis`], and [`Error::InvalidArgument`] if a duration is zero, if
    /// `claim_within` is less than a second, or if the namespace, the lock prefix, the certificate or the sentinel
    /// settings are invalid.
    ///
    /// # Cancel safety
    /// If the future is dropped, no client is created.
    pub async fn open(self) -> Result<Client, Error> {
        let mut redis = RedisSettings::new(&self.url)?;
        redis.reach_sentinels_by(&self.sentinels)?;
        if let Some(pem) = &self.ca_certificate {
            redis.trust_only(pem)?;
        }
        if let Some(namespace) = &self.namespace {
            redis.namespace = crate::name::Name::new("namespace", namespace)?.to_string();
        }
        if let Some(prefix) = &self.lock_prefix {
            redis.lock_prefix = Prefix::new(prefix)?;
        }
        (redis.lock_layout, redis.purpose) = (self.lock_layout, self.purpose);
        let answer_timeout = positive("answer_timeout", self.answer_timeout)?;
        positive("connect_timeout", self.connect_timeout)?;
        redis.confirm_within = claim_time("claim_within", self.claim_within)?;
        (redis.answer_timeout, redis.connect_timeout) = (self.answer_timeout, self.connect_timeout);
        let redis = Arc::new(Redis::new(redis)?);
        let settings = Settings { answer_timeout, ..Settings::default() };
        let client = Client { engine: Engine::remote(redis.clone(), settings) };
        client.engine.core().run(redis.connected()).await?;
        Ok(client)
    }
}

impl fmt::Debug for RedisBuilder {
    /// Omits the URL, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBuilder")
            .field("namespace", &self.namespace)
            .field("answer_timeout", &self.answer_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}
