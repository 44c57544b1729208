//! Another program's client of the pool, written from document 002 alone.
//!
//! It shares no code with leasehold: its scripts have the document's names, keys, arguments and
//! results. So a test in which the two share one pool shows that any program that follows the
//! document can. The scripts are run by their SHA, and loaded when the server lacks them.
//!
//! # Where the document leaves a choice
//!
//! - The keys have the names that leasehold's documents give: `semaphores:{key}` and
//!   `semaphores:holders:{key}:{instance id}`.
//! - A score has microseconds. An entry has expired when its score is at most `now - ttl`, by the
//!   TTL of the caller: there is one TTL per pool, and a caller with a shorter one evicts others.
//! - The sorted set has no expiry: the sweep at the start of every script empties it.
//! - A holder key has the value `1`. A sweep leaves it alone, because the script does not know its name.
//! - An acquire by a holding instance is a renewal, even in a full pool and without its holder key.
//! - `expired` and `already_expired`: the sweep kept the entry, but its holder key no longer
//!   exists. The entry is removed, and counts as cleaned up.

#[cfg(test)]
mod tests;

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Script};

const ACQUIRE: &str = include_str!("seed002/acquire_semaphore.lua");
const COUNT: &str = include_str!("seed002/count_semaphore.lua");
const RENEW: &str = include_str!("seed002/renew_semaphore.lua");
const RELEASE: &str = include_str!("seed002/release_semaphore.lua");

/// The program's default for the time after which a silent instance counts as dead.
pub const TTL_SECONDS: u64 = 10;

/// The result of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub success: bool,
    /// Of an acquire `acquired` or `capacity_full`; of a renewal `renewed`, `not_held` or `expired`;
    /// of a release `released`, `not_held` or `already_expired`.
    pub status: String,
    /// The number of holders after the call.
    pub current_count: i64,
    /// The number of expired entries that were removed.
    pub expired_count: i64,
}

/// The foreign client. It renews nothing on its own: the test calls [`renew`](Self::renew).
#[derive(Debug, Clone)]
pub struct Seed002 {
    connection: MultiplexedConnection,
}

impl Seed002 {
    #[must_use]
    pub fn new(connection: MultiplexedConnection) -> Self {
        Self { connection }
    }

    /// Acquires a place for an instance, or renews the one that it has.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn acquire(
        &self,
        key: &str,
        instance_id: &str,
        capacity: u64,
        ttl_seconds: u64,
    ) -> RedisResult<Outcome> {
        self.about(key, instance_id, ACQUIRE, &[capacity, ttl_seconds]).await
    }

    /// Renews the place of an instance for a whole TTL.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn renew(
        &self,
        key: &str,
        instance_id: &str,
        ttl_seconds: u64,
    ) -> RedisResult<Outcome> {
        self.about(key, instance_id, RENEW, &[ttl_seconds]).await
    }

    /// Releases the place of an instance.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn release(
        &self,
        key: &str,
        instance_id: &str,
        ttl_seconds: u64,
    ) -> RedisResult<Outcome> {
        self.about(key, instance_id, RELEASE, &[ttl_seconds]).await
    }

    /// Returns the number of holders, and the number of expired entries that were removed:
    /// `(current_count, expired_count)`.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn count(&self, key: &str, ttl_seconds: u64) -> RedisResult<(i64, i64)> {
        let script = Script::new(COUNT);
        script.key(pool(key)).arg(ttl_seconds).invoke_async(&mut self.connection.clone()).await
    }

    /// Runs a script about one instance, whose id precedes the numbers in the arguments.
    async fn about(
        &self,
        key: &str,
        instance_id: &str,
        script: &str,
        numbers: &[u64],
    ) -> RedisResult<Outcome> {
        let script = Script::new(script);
        let mut call = script.key(pool(key));
        call.key(format!("semaphores:holders:{key}:{instance_id}")).arg(instance_id).arg(numbers);
        let (success, status, current_count, expired_count) =
            call.invoke_async(&mut self.connection.clone()).await?;
        Ok(Outcome { success, status, current_count, expired_count })
    }
}

fn pool(key: &str) -> String {
    format!("semaphores:{key}")
}
