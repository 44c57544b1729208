//! Another program's client of the fair semaphore, written from documents 000 and 001 alone.
//!
//! It shares no code with leasehold: its keys, scripts and steps are those of the documents. So a
//! test in which the two share one semaphore shows that any program that follows the documents can.
//! Where leasehold deviates from the documents (the server's clock, a release that wakes the next
//! waiter, expiries that only grow), this client follows the documents.
//!
//! # Where the documents leave a choice
//!
//! It follows the program that they describe (asyncio-advanced-semaphores 0.0.9), even where that harms other clients:
//!
//! - Queueing, granting and pinging set the expiry of the sorted sets that they write to ten
//!   seconds after the caller's TTL, regardless of what others need. The same holds for
//!   `semaphore_max`. A confirmation extends only the set of TTLs. A notification expires ten
//!   seconds after the heartbeat.
//! - Without a TTL the `ttl` argument is [`NO_TTL`].
//! - A client that dies leaves everything behind: see [`Seed000::stop_heartbeat`].
//! - A notification is the list element `1`. A client pings three times per heartbeat interval.
//! - A confirmation that changes nothing ends the acquire with [`AcquireError::Stale`].

mod error;
mod steps;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Client, RedisResult};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

pub use error::AcquireError;
use wire::Connection;
pub use wire::Options;

/// Document 001's default for the time after which a silent client counts as dead.
pub const HEARTBEAT: Duration = Duration::from_secs(180);
/// The TTL that means "no TTL": plus ten seconds, it is the longest expiry that fits into 31 bits.
pub const NO_TTL: Duration = Duration::from_secs(2_147_483_637);

/// How long one `BLPOP` waits, and how long a client sleeps between two `LPOP`.
const POLL: Duration = Duration::from_secs(1);

/// A slot that was acquired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acquired {
    /// The acquisition id, needed to release it: 32 lower-case hexadecimal digits.
    pub id: String,
    /// How many slots were in use after this one had been confirmed.
    pub slot_number: u64,
}

/// How many slots of a semaphore are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Members of the semaphore, including dead ones until a client removes them.
    pub acquired_slots: u64,
    /// The limit that the latest confirmation declared.
    pub max_slots: Option<u64>,
}

/// The foreign client. Clones share its state. When the last one is dropped, its heartbeats end as
/// if its process had died.
#[derive(Clone)]
pub struct Seed000 {
    inner: Arc<Inner>,
}

struct Inner {
    client: Client,
    namespace: String,
    options: Options,
    connection: Connection,
    pinged: Mutex<HashMap<String, Pinged>>,
}

/// What a client stores about one of its acquisitions.
struct Pinged {
    heartbeat: Duration,
    ttl: Option<Duration>,
    task: Option<AbortHandle>,
}

impl Seed000 {
    /// Connects with the documents' defaults.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached.
    pub async fn connect(url: &str, namespace: &str) -> RedisResult<Self> {
        Self::connect_with(url, namespace, Options::default()).await
    }

    /// Connects with other options.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached.
    pub async fn connect_with(url: &str, namespace: &str, options: Options) -> RedisResult<Self> {
        let (client, namespace) = (Client::open(url)?, namespace.to_owned());
        let (connection, pinged) = (Connection::default(), Mutex::default());
        let seed =
            Self { inner: Arc::new(Inner { client, namespace, options, connection, pinged }) };
        seed.call::<String>(&redis::cmd("PING")).await?;
        Ok(seed)
    }

    /// Waits in the queue for a slot and keeps it alive until it is [released](Self::release).
    ///
    /// `heartbeat` is shortened to `ttl` if that is shorter.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the queue and releases the slot in the background.
    ///
    /// # Errors
    ///
    /// See [`AcquireError`]. Nothing is left behind, unless Redis is unreachable for the clean-up as well.
    pub async fn acquire(
        &self,
        name: &str,
        limit: u64,
        heartbeat: Duration,
        ttl: Option<Duration>,
        max_acquire_time: Option<Duration>,
    ) -> Result<Acquired, AcquireError> {
        let heartbeat = ttl.map_or(heartbeat, |ttl| heartbeat.min(ttl));
        let id = new_id();
        self.start_heartbeat(name, &id, heartbeat, ttl);
        let mut undo = Undo { seed: self, name, id: &id, armed: true };
        let waiting = self.wait_in_line(name, &id, limit, heartbeat, ttl);
        let outcome = match max_acquire_time {
            Some(most) => tokio::time::timeout(most, waiting).await,
            None => Ok(waiting.await),
        };
        let outcome = outcome.unwrap_or(Err(AcquireError::Timeout));
        if outcome.is_err() {
            // Best effort; the first error is the one to report.
            let _ = self.release(name, &id).await;
        }
        undo.armed = false;
        Ok(Acquired { slot_number: outcome?, id: id.clone() })
    }

    async fn wait_in_line(
        &self,
        name: &str,
        id: &str,
        limit: u64,
        heartbeat: Duration,
        ttl: Option<Duration>,
    ) -> Result<u64, AcquireError> {
        let begun = Instant::now();
        // Its own connection, because one that is blocked by `BLPOP` serves nothing else.
        let connection = Connection::default();
        self.queue(name, id, heartbeat, ttl).await?;
        loop {
            self.wake_up_nexts(name, limit, heartbeat, ttl).await?;
            if begun.elapsed() < self.inner.options.long_polling {
                if self.pop_notification(&connection, id, Some(POLL)).await? {
                    break;
                }
            } else if self.pop_notification(&connection, id, None).await? {
                break;
            } else {
                // The documents prescribe short polling: there is no event to wait for.
                tokio::time::sleep(POLL).await;
            }
        }
        match self.confirm(name, id, limit, heartbeat, ttl).await? {
            (0, _) => Err(AcquireError::Stale),
            (_, card) => Ok(card),
        }
    }

    /// Ends the heartbeat of an acquisition and removes it, waiting or holding. Returns the number
    /// of slots this freed: 0 or 1. It wakes nobody; the next waiter finds the free slot itself.
    ///
    /// # Errors
    ///
    /// If Redis fails.
    pub async fn release(&self, name: &str, id: &str) -> RedisResult<u64> {
        self.stop_heartbeat(id);
        lock(&self.inner.pinged).remove(id);
        self.remove(name, id).await
    }

    /// Pings for an acquisition from now on, until it is released or the server reports it dead.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn start_heartbeat(
        &self,
        name: &str,
        id: &str,
        heartbeat: Duration,
        ttl: Option<Duration>,
    ) {
        let (weak, name, owned) = (Arc::downgrade(&self.inner), name.to_owned(), id.to_owned());
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(heartbeat / 3).await;
                // Weak, because the heartbeat must not keep the client alive that it reports as alive.
                let Some(inner) = weak.upgrade() else { return };
                if let Ok((0, 0)) = (Seed000 { inner }).ping(&name, &owned).await {
                    return;
                }
            }
        });
        let pinged = Pinged { heartbeat, ttl, task: Some(task.abort_handle()) };
        lock(&self.inner.pinged).insert(id.to_owned(), pinged);
    }

    /// Stops pinging for an acquisition, as if the client had died. Its slot or its place in the queue stays.
    pub fn stop_heartbeat(&self, id: &str) {
        let task = lock(&self.inner.pinged).get_mut(id).and_then(|pinged| pinged.task.take());
        if let Some(task) = task {
            task.abort();
        }
    }
}

/// Undoes an acquire when dropped, unless it was disarmed.
struct Undo<'a> {
    seed: &'a Seed000,
    name: &'a str,
    id: &'a str,
    armed: bool,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        let Some(runtime) = Handle::try_current().ok().filter(|_| self.armed) else { return };
        let (seed, name, id) = (self.seed.clone(), self.name.to_owned(), self.id.to_owned());
        runtime.spawn(async move { seed.release(&name, &id).await });
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in lock(&self.pinged).drain().filter_map(|(_, pinged)| pinged.task) {
            task.abort();
        }
    }
}

impl fmt::Debug for Seed000 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seed000").field("namespace", &self.inner.namespace).finish_non_exhaustive()
    }
}

/// A version 4 UUID as 32 lower-case hexadecimal digits.
///
/// # Panics
///
/// If there is no `/dev/urandom`.
#[must_use]
pub fn new_id() -> String {
    let mut bytes = [0; 16];
    let mut source = File::open("/dev/urandom").expect("a system with /dev/urandom");
    source.read_exact(&mut bytes).expect("random bytes without end");
    let random = u128::from_be_bytes(bytes);
    let version = (random & !(0xf << 76)) | (0x4 << 76);
    format!("{:032x}", (version & !(0x3 << 62)) | (0x2 << 62))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
