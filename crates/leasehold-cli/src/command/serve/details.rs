//! The queue of one semaphore. It is read only for the semaphore's page, once per version for all browsers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold::SemaphoreStats;
use tokio::sync::{OnceCell, Semaphore};

use super::console::Console;

/// The number of waiters that pages and the API show.
pub(super) const SHOWN: usize = 200;
/// The number of queues that are read at a time.
const AT_ONCE: usize = 4;
/// The number of queues that are kept for one version.
const KEPT: usize = 64;
/// The pause after a read as a multiple of its duration, as after a poll.
const REST: u32 = 25;

/// A semaphore with its waiters, or the reason why they cannot be read.
pub(super) type Detail = Result<SemaphoreStats, String>;

pub(super) struct Details {
    read: Mutex<Read>,
    at_once: Semaphore,
}

#[derive(Default)]
struct Read {
    version: u64,
    kept: HashMap<String, Arc<OnceCell<Arc<Detail>>>>,
    /// The time spent on reading since the last poll.
    spent: Duration,
}

impl Default for Details {
    fn default() -> Self {
        Self { read: Mutex::default(), at_once: Semaphore::new(AT_ONCE) }
    }
}

impl Details {
    fn read(&self) -> std::sync::MutexGuard<'_, Read> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the pause that is due for the reads since the last call.
    pub(super) fn debt(&self) -> Duration {
        REST * std::mem::take(&mut self.read().spent)
    }

    /// Returns the semaphore with its waiters, or `None` if there is no such semaphore.
    pub(super) async fn of(console: &Console, name: &str) -> Option<Arc<Detail>> {
        let one = {
            let state = console.state();
            state.monitor.latest()?.semaphore(name)?.clone()
        };
        // Without a queue there is nothing more to read.
        if one.waiting() == 0 {
            return Some(Arc::new(Ok(one)));
        }
        let details = &console.details;
        let cell = {
            let version = console.version();
            let mut read = details.read();
            if read.version != version || read.kept.len() >= KEPT {
                (read.version, read.kept) = (version, HashMap::new());
            }
            read.kept.entry(name.to_owned()).or_default().clone()
        };
        Some(cell.get_or_init(|| details.fetch(console, name)).await.clone())
    }

    async fn fetch(&self, console: &Console, name: &str) -> Arc<Detail> {
        let Ok(_permit) = self.at_once.acquire().await else {
            return Arc::new(Err("the console is closed".to_owned()));
        };
        let began = Instant::now();
        let found =
            console.client.stats().names([name]).unused().waiters_in(0..SHOWN).fetch().await;
        self.read().spent += began.elapsed();
        Arc::new(match found {
            Ok(found) => found.into_iter().next().ok_or_else(|| "it no longer exists".to_owned()),
            Err(error) => Err(crate::failure::text(&error)),
        })
    }
}
