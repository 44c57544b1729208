//! Another program's client of the fenced lock, written from document 003 alone.
//!
//! It shares no code with leasehold: its keys, records, scripts and codes are those of the
//! document. So a test in which the two share one lock shows that any program that follows the
//! document can. Scripts are run by their SHA, and loaded when the server lacks them. Where
//! leasehold deviates from the document, this client follows the document:
//!
//! - A lock id that acquires its own lock again gets the answer that the lock is held.
//! - An acquire over an expired record deletes the index of the *new* lock id, which it then
//!   writes. The index of the old one stays until it expires.
//! - A fence goes through a Lua number, which is exact up to 2^53.
//!
//! # Where the document leaves a choice
//!
//! - An acquirer should learn when its lock expires, but the script does not return it. Here it is
//!   one more element at the end of the reply.
//! - A lock id is 16 random bytes in base64url, 22 characters.
//! - Keys and lock ids are used as they are: not normalised, not checked, not truncated. A prefix
//!   has no colon at its end.
//! - The query whether a key is locked never cleans up, which is the document's default.
//! - A lookup returns the record as it is stored. Hashing it is left to the program.

#[cfg(test)]
mod tests;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, RedisResult, Script, Value};

const ACQUIRE: &str = include_str!("seed003/acquire.lua");
const RELEASE_OR_EXTEND: &str = include_str!("seed003/release_or_extend.lua");
const LOOKUP: &str = include_str!("seed003/lookup.lua");

/// The program's default TTL of a lock.
pub const TTL_MS: u64 = 30_000;

/// For how long after its expiry the document considers a record alive.
pub const TOLERANCE_MS: u64 = 1000;

/// A lock that was acquired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acquired {
    pub lock_id: String,
    /// 19 digits.
    pub fence: String,
    /// By the server's clock.
    pub expires_at_ms: u64,
}

/// The record of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockData {
    pub lock_id: String,
    pub expires_at_ms: u64,
    pub acquired_at_ms: u64,
    pub key: String,
    pub fence: String,
}

/// The foreign client. Every operation is one attempt, and nothing is extended by itself.
#[derive(Debug, Clone)]
pub struct Seed003 {
    connection: MultiplexedConnection,
    prefix: String,
    tolerance_ms: u64,
    version: u8,
}

impl Seed003 {
    /// The document's default prefix is `syncguard`.
    #[must_use]
    pub fn new(connection: MultiplexedConnection, prefix: &str) -> Self {
        Self { connection, prefix: prefix.to_owned(), tolerance_ms: TOLERANCE_MS, version: 1 }
    }

    /// The same client in the layout of version 2: the index holds the whole storage key of the
    /// lock, the fence counter is named after that key, and fences have 15 digits.
    #[must_use]
    pub fn version_2(self) -> Self {
        Self { version: 2, ..self }
    }

    /// The same client with another tolerance than [`TOLERANCE_MS`].
    #[must_use]
    pub fn with_tolerance_ms(self, tolerance_ms: u64) -> Self {
        Self { tolerance_ms, ..self }
    }

    /// Acquires the lock under a new lock id. Returns `None` if it is held.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn acquire(&self, key: &str, ttl_ms: u64) -> RedisResult<Option<Acquired>> {
        self.acquire_as(&new_lock_id(), key, ttl_ms).await
    }

    /// Acquires the lock under a lock id of the caller. Returns `None` if it is held, even by that id.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn acquire_as(
        &self,
        lock_id: &str,
        key: &str,
        ttl_ms: u64,
    ) -> RedisResult<Option<Acquired>> {
        let lock = self.key(key);
        let (digits, found) = if self.version == 2 { ("15", lock.as_str()) } else { ("19", key) };
        let keys = [lock.clone(), self.index(lock_id), self.key(&format!("fence:{found}"))];
        let (ttl, tolerance) = (ttl_ms.to_string(), self.tolerance_ms.to_string());
        let arguments = [lock_id, &ttl, &tolerance, key, digits, found];
        let reply = self.script(ACQUIRE, &keys, &arguments).await?;
        if reply == Value::Int(0) {
            return Ok(None);
        }
        let (_, fence, _, expires_at_ms): (u64, _, u64, _) = redis::from_redis_value(reply)?;
        Ok(Some(Acquired { lock_id: lock_id.to_owned(), fence, expires_at_ms }))
    }

    /// Releases a lock. Returns the script's code: 1 for success, 0 if another id holds the lock,
    /// -1 if there is no lock, -2 if it had expired and was removed.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn release(&self, lock_id: &str) -> RedisResult<i64> {
        let keys = [self.index(lock_id), self.found_under()];
        self.script(RELEASE_OR_EXTEND, &keys, &[lock_id, &self.tolerance_ms.to_string()]).await
    }

    /// Makes a lock expire `ttl_ms` from now, be that later or earlier than before. Returns the
    /// codes of [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn extend(&self, lock_id: &str, ttl_ms: u64) -> RedisResult<i64> {
        let keys = [self.index(lock_id), self.found_under()];
        let (ttl, tolerance) = (ttl_ms.to_string(), self.tolerance_ms.to_string());
        self.script(RELEASE_OR_EXTEND, &keys, &[lock_id, &tolerance, &ttl]).await
    }

    /// Returns whether the lock is held.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn is_locked(&self, key: &str) -> RedisResult<bool> {
        Ok(self.lookup_by_key(key).await?.is_some())
    }

    /// Returns the record of the lock's holder.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    ///
    /// # Panics
    ///
    /// If the record is not the document's JSON.
    pub async fn lookup_by_key(&self, key: &str) -> RedisResult<Option<LockData>> {
        let mut both = redis::pipe();
        both.cmd("GET").arg(self.key(key)).cmd("TIME");
        let (record, (seconds, micros)): (Option<String>, (u64, u64)) =
            both.query_async(&mut self.connection.clone()).await?;
        let now = seconds * 1000 + micros / 1000;
        let record = record.as_deref().map(LockData::parse);
        Ok(record.filter(|record| record.expires_at_ms + self.tolerance_ms > now))
    }

    /// Returns the record of the lock that this lock id holds.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    ///
    /// # Panics
    ///
    /// If the record is not the document's JSON.
    pub async fn lookup_by_id(&self, lock_id: &str) -> RedisResult<Option<LockData>> {
        let keys = [self.index(lock_id), self.found_under()];
        let args = [lock_id, &self.tolerance_ms.to_string()];
        let record: Option<String> = self.script(LOOKUP, &keys, &args).await?;
        Ok(record.as_deref().map(LockData::parse))
    }

    async fn script<T: FromRedisValue>(
        &self,
        script: &str,
        keys: &[String],
        args: &[&str],
    ) -> RedisResult<T> {
        let script = Script::new(script);
        script.key(keys).arg(args).invoke_async(&mut self.connection.clone()).await
    }

    /// The prefix that makes the content of an index a storage key.
    fn found_under(&self) -> String {
        if self.version == 2 { String::new() } else { self.prefix.clone() }
    }

    fn key(&self, key: &str) -> String {
        format!("{}:{key}", self.prefix)
    }

    fn index(&self, lock_id: &str) -> String {
        self.key(&format!("id:{lock_id}"))
    }
}

impl LockData {
    /// Parses strictly, as a program in a typed language does: times are whole numbers, a fence is a string.
    ///
    /// # Panics
    ///
    /// If a field is missing or of another type.
    #[must_use]
    pub fn parse(json: &str) -> Self {
        let record: serde_json::Value = serde_json::from_str(json)
            .unwrap_or_else(|error| panic!("a lock's record is not JSON: {error}: {json}"));
        let bad = |field: &str| -> ! { panic!("a lock's record lacks a good {field}: {json}") };
        let text = |field| record[field].as_str().unwrap_or_else(|| bad(field)).to_owned();
        let time = |field| record[field].as_u64().unwrap_or_else(|| bad(field));
        Self {
            lock_id: text("lockId"),
            expires_at_ms: time("expiresAtMs"),
            acquired_at_ms: time("acquiredAtMs"),
            key: text("key"),
            fence: text("fence"),
        }
    }
}

/// 16 random bytes as 22 characters of base64url.
///
/// # Panics
///
/// If the system provides no random bytes.
#[must_use]
pub fn new_lock_id() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("random bytes from the system");
    URL_SAFE_NO_PAD.encode(bytes)
}
