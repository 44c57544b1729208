//! A store over time: the newest snapshot, an hour of history, and recent events. `top` and `serve` both poll into one
//! [`Monitor`].
//!
//! A store keeps no log, so events are the differences between two snapshots. A permit that is granted and released between
//! two polls is not seen, so counts of grants are lower bounds. The library's metrics count every grant.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use leasehold::{Client, Error};

use crate::failure::Failure;

mod events;
mod history;
mod snapshot;

pub(crate) use events::{Change, Event, Events, Kind, who};
pub(crate) use history::{History, Sample};
pub(crate) use snapshot::{MOST, Snapshot};

/// The pause after a poll is this many times as long as the poll, so that polling takes less than 5 % of a server's time.
const REST: u32 = 25;
pub(crate) const SHORTEST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(60);

/// A poll that takes longer than this fails if the client has lost its connection. Otherwise the poll would wait for the end
/// of the outage, and the pause after it would be far too long.
const TIME_LIMIT: Duration = Duration::from_millis(500);

/// The number of names whose histories are kept.
const MOST_HISTORIES: usize = 2000;

/// The state of a store over time: see the module.
#[derive(Debug, Default)]
pub(crate) struct Monitor {
    latest: Option<Snapshot>,
    outage: Option<Outage>,
    histories: HashMap<String, History>,
    total: History,
    events: Events,
}

/// The store could not be read.
#[derive(Clone, Debug)]
pub(crate) struct ReadFailure {
    pub(crate) error: Error,
    /// When the client noticed.
    since: SystemTime,
}

impl From<Error> for ReadFailure {
    fn from(error: Error) -> Self {
        Self { error, since: SystemTime::now() }
    }
}

impl From<ReadFailure> for Failure {
    fn from(failure: ReadFailure) -> Self {
        failure.error.into()
    }
}

/// An outage: the store cannot be read.
#[derive(Clone, Debug)]
pub(crate) struct Outage {
    pub(crate) since: SystemTime,
    /// The newest error.
    pub(crate) problem: String,
}

impl Monitor {
    /// Reads the store once. Returns how long to wait before the next poll.
    pub(crate) async fn read(client: &Client) -> (Result<Snapshot, ReadFailure>, Duration) {
        let snapshot = unless_lost(client, Snapshot::take(client)).await;
        let rest = match &snapshot {
            Ok(snapshot) => rest(snapshot.took),
            Err(_) => SHORTEST_REST,
        };
        (snapshot, rest)
    }

    /// Adds the result of a poll.
    pub(crate) fn record(&mut self, read: Result<Snapshot, ReadFailure>) {
        match read {
            Ok(snapshot) => self.record_snapshot(snapshot),
            Err(failure) => self.record_failure(&failure),
        }
    }

    fn record_snapshot(&mut self, snapshot: Snapshot) {
        if let Some(outage) = self.outage.take() {
            self.events.add_store(Change::StoreBack { after: since(outage.since) });
        }
        let grants = match &self.latest {
            Some(before) => self.events.compare(before, &snapshot),
            None => HashMap::new(),
        };
        let mut total = Sample::at(snapshot.at);
        for one in &snapshot.semaphores {
            let sample = Sample {
                held: one.held_units,
                waiting: u32::try_from(one.waiting).unwrap_or(u32::MAX),
                grants: grants.get(&one.name).copied().unwrap_or_default(),
                ..Sample::at(snapshot.at)
            };
            total.add(&sample);
            let room = self.histories.len() < MOST_HISTORIES;
            if let Some(history) = self.histories.get_mut(&one.name) {
                history.record(sample);
            } else if room {
                self.histories.entry(one.name.clone()).or_default().record(sample);
            }
        }
        self.total.record(total);
        let names: HashSet<_> = snapshot.semaphores.iter().map(|one| &*one.name).collect();
        self.histories.retain(|name, _| names.contains(name.as_str()));
        self.latest = Some(snapshot);
    }

    fn record_failure(&mut self, failure: &ReadFailure) {
        let problem = crate::failure::text(&failure.error);
        if let Some(outage) = &mut self.outage {
            outage.problem = problem;
        } else {
            self.events.add_store(Change::StoreUnreachable { problem: problem.clone() });
            self.outage = Some(Outage { since: failure.since, problem });
        }
    }

    /// Returns the newest snapshot. During an outage it is the last one before the outage.
    pub(crate) fn latest(&self) -> Option<&Snapshot> {
        self.latest.as_ref()
    }

    pub(crate) fn outage(&self) -> Option<&Outage> {
        self.outage.as_ref()
    }

    pub(crate) fn history(&self, semaphore: &str) -> Option<&History> {
        self.histories.get(semaphore)
    }

    /// Returns the sums over all semaphores.
    pub(crate) fn total(&self) -> &History {
        &self.total
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    pub(crate) fn events_mut(&mut self) -> &mut Events {
        &mut self.events
    }
}

/// Returns the result of reading the store. Fails early if the connection is lost: see [`TIME_LIMIT`].
pub(crate) async fn unless_lost<T>(
    client: &Client,
    read: impl Future<Output = Result<T, Error>>,
) -> Result<T, ReadFailure> {
    tokio::select! {
        read = read => Ok(read?),
        failure = lost_connection(client) => Err(failure),
    }
}

/// Waits until the connection has been lost for [`TIME_LIMIT`], and returns why.
async fn lost_connection(client: &Client) -> ReadFailure {
    loop {
        tokio::time::sleep(TIME_LIMIT).await;
        if let Some(outage) = client.outage() {
            let lasts = outage.since.elapsed();
            if lasts >= TIME_LIMIT {
                let since = SystemTime::now().checked_sub(lasts).unwrap_or_else(SystemTime::now);
                return ReadFailure { error: outage.error, since };
            }
        }
    }
}

/// Returns how long to wait after a read that took this time.
pub(crate) fn rest(took: Duration) -> Duration {
    (REST * took).clamp(SHORTEST_REST, LONGEST_REST)
}

/// Returns the time since then, or zero if the clock was set back.
pub(crate) fn since(then: SystemTime) -> Duration {
    SystemTime::now().duration_since(then).unwrap_or_default()
}
