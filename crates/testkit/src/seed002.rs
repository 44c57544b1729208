//! Another program's client of the pool, written from document 002 alone.
//!
//! It shares no code with leasehold: its scripts have the document's names, keys, arguments and
//! results, so that a test in which the two share one pool proves that any program following the
//! document can. They are run by their SHA and loaded when the server lacks them.
//!
//! # Where the document leaves a choice
//!
//! - The keys have the names that leasehold's documents give: `semaphores:{key}` and
//!   `semaphores:holders:{key}:{instance id}`.
//! - A score has microseconds. An entry has expired when its score is at most `now - ttl`, by the
//!   TTL of whoever looks: there is one TTL per pool, and a caller with a shorter one evicts others.
//! - The sorted set has no expiry: the sweep that comes first in every script empties it.
//! - A holder key has the value `1`. A sweep leaves it alone, as the script does not know its name.
//! - An instance that acquires again is renewed, also in a full pool and without its holder key.
//! - `expired` and `already_expired`: the sweep left the entry, but its holder key is gone. The entry
//!   is removed, and counts as one of those that were cleaned up.

#[cfg(test)]
mod tests;

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Script};

const ACQUIRE: &str = include_str!("seed002/acquire_semaphore.lua");
const COUNT: &str = include_str!("seed002/count_semaphore.lua");
const RENEW: &str = include_str!("seed002/renew_semaphore.lua");
const RELEASE: &str = include_str!("seed002/release_semaphore.lua");

/// After how long a silent instance is dead unless the program's user says otherwise.
pub const TTL_SECONDS: u64 = 10;

/// What a script answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub success: bool,
    /// Of an acquire `acquired` or `capacity_full`; of a renewal `renewed`, `not_held` or `expired`;
    /// of a release `released`, `not_held` or `already_expired`.
    pub status: String,
    /// How many hold after it.
    pub current_count: i64,
    /// How many had expired and were cleaned up.
    pub expired_count: i64,
}

/// The foreign client. It renews nothing by itself: a test says when.
#[derive(Debug, Clone)]
pub struct Seed002 {
    connection: MultiplexedConnection,
}

impl Seed002 {
    #[must_use]
    pub fn new(connection: MultiplexedConnection) -> Self {
        Self { connection }
    }

    /// Takes a place for an instance, or renews the one that it has.
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

    /// Lets an instance keep its place for the whole TTL from now on.
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

    /// Gives back the place of an instance.
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

    /// How many hold, and how many had expired and were cleaned up: `(current_count,
    /// expired_count)`.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn count(&self, key: &str, ttl_seconds: u64) -> RedisResult<(i64, i64)> {
        let script = Script::new(COUNT);
        script.key(pool(key)).arg(ttl_seconds).invoke_async(&mut self.connection.clone()).await
    }

    /// Runs a script about one instance, which comes before the numbers in its arguments.
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
