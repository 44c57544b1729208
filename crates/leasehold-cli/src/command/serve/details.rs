//! The queue of one semaphore, and the first waiters of all semaphores. They are read only for the pages that show them,
//! once per version for all browsers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold::SemaphoreStats;
use tokio::sync::{OnceCell, Semaphore};

use super::console::Console;
use crate::command::show::find_with;

/// The number of waiters that pages and the API show.
pub(super) const SHOWN: usize = 200;
/// The number of queues that are read at a time.
const AT_ONCE: usize = 4;
/// The number of queues that are kept for one version.
const KEPT: usize = 64;
/// The number of queues whose first waiters are listed by client.
const QUEUES: usize = 100;
/// The pause after a read as a multiple of its duration, as after a poll.
const REST: u32 = 25;

/// A semaphore with its waiters, or the reason why they cannot be read.
pub(super) type Detail = Result<SemaphoreStats, String>;

/// Semaphores with their first [`SHOWN`] waiters, or the reason why they cannot be read.
pub(super) type Queues = Result<Vec<SemaphoreStats>, String>;

pub(super) struct Details {
    read: Mutex<DetailCache>,
    at_once: Semaphore,
}

#[derive(Default)]
struct DetailCache {
    version: u64,
    by_name: HashMap<String, Arc<OnceCell<Arc<Detail>>>>,
    queues: Arc<OnceCell<Arc<Queues>>>,
    /// The time spent on reading since the last poll.
    spent: Duration,
}

impl Default for Details {
    fn default() -> Self {
        Self { read: Mutex::default(), at_once: Semaphore::new(AT_ONCE) }
    }
}

impl Details {
    fn read(&self) -> std::sync::MutexGuard<'_, DetailCache> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the pause that is due for the reads since the last call.
    pub(super) fn debt(&self) -> Duration {
        REST * std::mem::take(&mut self.read().spent)
    }

    /// Returns the semaphore with its waiters, or `None` if there is no such semaphore.
    pub(super) async fn of(console: &Console, name: &str) -> Option<Arc<Detail>> {
        let polled = {
            let state = console.state();
            state.monitor.latest().and_then(|latest| latest.semaphore(name)).cloned()
        };
        // Without a queue there is nothing more to read. A name that is not in the snapshot may be newer.
        if let Some(one) = polled
            && one.waiting == 0
        {
            return Some(Arc::new(Ok(one)));
        }
        let details = &console.details;
        let cell = {
            let mut read = details.read();
            read.of_version(console.version());
            if read.by_name.len() >= KEPT {
                read.by_name.clear();
            }
            read.by_name.entry(name.to_owned()).or_default().clone()
        };
        // That there is no such semaphore is not cached, because it may be used at any moment.
        let fetch = async || details.fetch(console, name).await.ok_or(());
        cell.get_or_try_init(fetch).await.ok().cloned()
    }

    async fn fetch(&self, console: &Console, name: &str) -> Option<Arc<Detail>> {
        let found = self.timed(find_with(&console.client, name, 0..SHOWN)).await;
        found.transpose().map(|found| Arc::new(found.map_err(|error| crate::failure::text(&error))))
    }

    /// Returns the semaphores that have the most use, with their first waiters.
    pub(super) async fn queues(console: &Console) -> Arc<Queues> {
        let details = &console.details;
        let cell = {
            let mut read = details.read();
            read.of_version(console.version());
            read.queues.clone()
        };
        cell.get_or_init(|| details.fetch_queues(console)).await.clone()
    }

    async fn fetch_queues(&self, console: &Console) -> Arc<Queues> {
        let names: Vec<_> = {
            let state = console.state();
            let all = state.monitor.latest().map_or(&[][..], |latest| &latest.semaphores);
            let waiting = all.iter().filter(|one| one.waiting > 0).take(QUEUES);
            waiting.map(|one| one.name.clone()).collect()
        };
        if names.is_empty() {
            return Arc::new(Ok(Vec::new()));
        }
        let found = console.client.stats().names(names).waiters_in(0..SHOWN).into_future();
        Arc::new(self.timed(found).await.map_err(|error| crate::failure::text(&error)))
    }

    /// Awaits a read. At most [`AT_ONCE`] run at a time, and their durations are recorded.
    async fn timed<T>(&self, read: impl Future<Output = T>) -> T {
        // The semaphore is never closed.
        let _permit = self.at_once.acquire().await;
        let began = Instant::now();
        let value = read.await;
        self.read().spent += began.elapsed();
        value
    }
}

impl DetailCache {
    /// Drops what was read for an earlier version.
    fn of_version(&mut self, version: u64) {
        if self.version != version {
            (self.version, self.by_name, self.queues) = (version, HashMap::new(), Arc::default());
        }
    }
}
