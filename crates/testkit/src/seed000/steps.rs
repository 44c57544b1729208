//! The single steps of the documents, one script each, for tests that run them one by one.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::{Cmd, FromRedisValue, RedisResult};

use super::wire::Connection;
use super::{HEARTBEAT, NO_TTL, Pinged, Seed000, Stats, lock};

const QUEUE: &str = include_str!("queue.lua");
const WAKE_UP_NEXTS: &str = include_str!("wake_up_nexts.lua");
const ACQUIRE: &str = include_str!("acquire.lua");
const RELEASE: &str = include_str!("release.lua");
const PING: &str = include_str!("ping.lua");
const CARD: &str = include_str!("card.lua");

const PLACEHOLDER: &str = "@@@ACQUISITION_ID@@@";

/// How many semaphores are reported if no names are given.
const STATS_LIMIT: usize = 100;

/// The keys of one semaphore.
struct Keys {
    main: String,
    ttl: String,
    max: String,
    waiting: String,
    alive: String,
}

impl Seed000 {
    /// Joins the queue with an id of the caller (see [`new_id`](super::new_id)).
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn queue(
        &self,
        name: &str,
        id: &str,
        heartbeat: Duration,
        ttl: Option<Duration>,
    ) -> RedisResult<()> {
        lock(&self.inner.pinged).entry(id.to_owned()).or_insert(Pinged {
            heartbeat,
            ttl,
            task: None,
        });
        let keys = self.keys(name);
        let args = [id.to_owned(), seconds(heartbeat), ttl_arg(ttl), self.now()];
        self.script(QUEUE, &[keys.waiting, keys.alive], &args).await
    }

    /// Removes what has expired, grants free slots to the next waiters, and returns how many it granted.
    ///
    /// They have the *caller's* heartbeat interval until they confirm.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn wake_up_nexts(
        &self,
        name: &str,
        limit: u64,
        heartbeat: Duration,
        ttl: Option<Duration>,
    ) -> RedisResult<u64> {
        let keys = self.keys(name);
        let keys = [keys.main, keys.ttl, keys.waiting, keys.alive];
        let (pattern, heartbeat) = (self.notification_key(PLACEHOLDER), seconds(heartbeat));
        let args = [limit.to_string(), heartbeat, ttl_arg(ttl), self.now(), pattern];
        self.script(WAKE_UP_NEXTS, &keys, &args).await
    }

    /// Waits for the notification of an id, and returns whether there was one. With a timeout of
    /// zero it does not wait (`LPOP`).
    ///
    /// # Cancel safety
    ///
    /// None: a notification that arrives while the future is dropped may be lost.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn wait_notification(&self, id: &str, timeout: Duration) -> RedisResult<bool> {
        let timeout = Some(timeout).filter(|timeout| !timeout.is_zero());
        self.pop_notification(&Connection::default(), id, timeout).await
    }

    pub(super) async fn pop_notification(
        &self,
        connection: &Connection,
        id: &str,
        timeout: Option<Duration>,
    ) -> RedisResult<bool> {
        let key = self.notification_key(id);
        let mut command = redis::cmd(if timeout.is_some() { "BLPOP" } else { "LPOP" });
        command.arg(key).arg(timeout.map(seconds));
        let popped: redis::Value = self.call_on(connection, &command).await?;
        Ok(popped != redis::Value::Nil)
    }

    /// Confirms the slot of a notified id (`acquire.lua`). Returns `(changed, card)`.
    ///
    /// `changed` is 0 for an id that has no slot, and for one whose score happens to stay the same.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn confirm(
        &self,
        name: &str,
        id: &str,
        limit: u64,
        heartbeat: Duration,
        ttl: Option<Duration>,
    ) -> RedisResult<(u64, u64)> {
        let keys = self.keys(name);
        let (id, limit) = (id.to_owned(), limit.to_string());
        let args = [id, limit, seconds(heartbeat), ttl_arg(ttl), self.now()];
        self.script(ACQUIRE, &[keys.main, keys.ttl, keys.max], &args).await
    }

    pub(super) async fn remove(&self, name: &str, id: &str) -> RedisResult<u64> {
        let keys = self.keys(name);
        let keys = [keys.main, keys.ttl, keys.waiting, keys.alive];
        self.script(RELEASE, &keys, &[id.to_owned()]).await
    }

    /// Renews an id. Returns `(changed_waiting, changed_semaphore)`, both 0 if the id has expired. An id of this client
    /// is renewed with the times it queued with, any other with the documents' defaults.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn ping(&self, name: &str, id: &str) -> RedisResult<(u64, u64)> {
        let pinged = lock(&self.inner.pinged).get(id).map(|pinged| (pinged.heartbeat, pinged.ttl));
        let (heartbeat, ttl) = pinged.unwrap_or((HEARTBEAT, None));
        let keys = self.keys(name);
        let args = [id.to_owned(), seconds(heartbeat), ttl_arg(ttl), self.now()];
        self.script(PING, &[keys.waiting, keys.alive, keys.main], &args).await
    }

    /// Counts the slots in use, after removing those that expired.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn card(&self, name: &str) -> RedisResult<u64> {
        let keys = self.keys(name);
        self.script(CARD, &[keys.main, keys.ttl], &[self.now()]).await
    }

    /// Returns the slots in use and the limits of the named semaphores or, for `None`, of the first hundred found.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn stats(&self, names: Option<&[&str]>) -> RedisResult<BTreeMap<String, Stats>> {
        let names = match names {
            Some(names) => names.iter().map(|name| (*name).to_owned()).collect(),
            None => self.names().await?,
        };
        let mut stats = BTreeMap::new();
        for name in names {
            let keys = self.keys(&name);
            let acquired_slots = self.call(redis::cmd("ZCARD").arg(keys.main)).await?;
            let max_slots = self.call(redis::cmd("GET").arg(keys.max)).await?;
            stats.insert(name, Stats { acquired_slots, max_slots });
        }
        Ok(stats)
    }

    /// Returns the names of all semaphores. `SCAN` returns to cursor 0 however the keys change, so this ends.
    async fn names(&self) -> RedisResult<Vec<String>> {
        let prefix = self.keys("").main;
        let pattern = format!("{}*", escape_glob(&prefix));
        let (mut names, mut cursor) = (Vec::new(), 0_u64);
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(STATS_LIMIT);
            let (next, keys): (u64, Vec<String>) = self.call(&scan).await?;
            names
                .extend(keys.iter().filter_map(|key| key.strip_prefix(&prefix)).map(str::to_owned));
            if next == 0 || names.len() >= STATS_LIMIT {
                names.truncate(STATS_LIMIT);
                return Ok(names);
            }
            cursor = next;
        }
    }

    async fn script<T: FromRedisValue>(
        &self,
        script: &str,
        keys: &[String],
        args: &[String],
    ) -> RedisResult<T> {
        self.call(redis::cmd("EVAL").arg(script).arg(keys.len()).arg(keys).arg(args)).await
    }

    pub(super) async fn call<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        self.call_on(&self.inner.connection, command).await
    }

    async fn call_on<T: FromRedisValue>(
        &self,
        connection: &Connection,
        command: &Cmd,
    ) -> RedisResult<T> {
        connection.call(&self.inner.client, self.inner.options.attempts, command).await
    }

    fn keys(&self, name: &str) -> Keys {
        let key = |kind: &str| format!("{}:semaphore_{kind}:{name}", self.inner.namespace);
        Keys {
            main: key("main"),
            ttl: key("ttl"),
            max: key("max"),
            waiting: key("waiting"),
            alive: key("waiting_heartbeat"),
        }
    }

    fn notification_key(&self, id: &str) -> String {
        format!("{}:acquisition_notification:{id}", self.inner.namespace)
    }

    /// This client's wall clock, in seconds.
    fn now(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock past 1970");
        format!("{:.6}", now.as_secs_f64() + self.inner.options.clock_skew)
    }
}

fn ttl_arg(ttl: Option<Duration>) -> String {
    seconds(ttl.unwrap_or(NO_TTL))
}

fn seconds(duration: Duration) -> String {
    duration.as_secs_f64().to_string()
}

fn escape_glob(text: &str) -> String {
    let special = |c: char| "*?[]\\^".contains(c);
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}
