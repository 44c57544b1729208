//! The state that all requests share: the monitor of the store, its version, and the answers made from it.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use leasehold::Client;
use tokio::sync::{Notify, watch};

use super::access::Access;
use super::details::Details;
use crate::monitor::{Change, Kind, Monitor, ReadFailure, Snapshot};
use crate::store::Store;

/// The largest number of cached answers, and their largest total size. All are dropped when the version changes.
const MOST_RENDERED: usize = 256;
const MOST_BYTES: usize = 16 * 1024 * 1024;
/// A client whose last request is more recent than this counts as present.
const ATTENTION: Duration = Duration::from_secs(60);
/// The longest time that a request waits for the poll that it causes.
const NEXT_POLL: Duration = Duration::from_secs(1);
/// How much later than planned a poll may be before its snapshot counts as old.
const SLACK: Duration = Duration::from_millis(100);
/// The largest number of streams of events.
const MOST_STREAMS: usize = 256;

/// The shared state: see the module.
pub(super) struct Console {
    /// A read-only client.
    pub(super) client: Client,
    /// For actions.
    pub(super) store: Store,
    /// The URL of the store without secrets.
    pub(super) place: String,
    pub(super) access: Access,
    pub(super) details: Details,
    state: Mutex<ConsoleState>,
    /// The version, which grows with every change of the data.
    version: watch::Sender<u64>,
    closing: watch::Sender<bool>,
    streams: AtomicUsize,
    /// Notified when the first client connects.
    view_opened: Notify,
    /// Notified after an action, so that the store is read again.
    acted: Notify,
}

/// The changing state. It is locked only briefly, never across an await.
#[derive(Default)]
pub(super) struct ConsoleState {
    pub(super) monitor: Monitor,
    /// Permits granted since the start, as far as polls have seen them, by semaphore.
    pub(super) grants: HashMap<String, u64>,
    pub(super) polls: u64,
    pub(super) failures: u64,
    /// How long the newest poll took, and the pause after it.
    pub(super) took: Duration,
    pub(super) rest: Duration,
    /// The time of the last poll, and of the last successful one.
    polled: Option<Instant>,
    pub(super) read: Option<Instant>,
    /// Semaphores that are being drained, and the operators who drain them.
    draining: HashMap<String, String>,
    rendered: Rendered,
    requested_at: Option<Instant>,
}

/// Answers made from one version of the monitor.
#[derive(Default)]
struct Rendered {
    version: u64,
    bytes: usize,
    by_key: HashMap<String, Arc<Rendering>>,
}

/// A part of a page, or an answer of the API.
#[derive(Clone, Debug)]
pub(super) struct Rendering {
    pub(super) title: String,
    pub(super) body: Bytes,
}

impl Console {
    pub(super) fn new(client: Client, store: Store, access: Access) -> Self {
        Self {
            client,
            place: store.place(),
            store,
            access,
            details: Details::default(),
            state: Mutex::default(),
            version: watch::Sender::new(0),
            closing: watch::Sender::new(false),
            streams: AtomicUsize::new(0),
            view_opened: Notify::new(),
            acted: Notify::new(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ConsoleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn version(&self) -> u64 {
        *self.version.borrow()
    }

    pub(super) fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(super) fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    /// Ends all streams of events.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Adds the result of a poll. `rest` is the pause after it.
    pub(super) fn record(
        &self,
        read: Result<Snapshot, ReadFailure>,
        took: Duration,
        rest: Duration,
    ) {
        let mut state = self.state();
        let state = &mut *state;
        state.polls += 1;
        (state.took, state.rest) = (took, rest);
        state.polled = Some(Instant::now());
        let read_something = read.is_ok();
        state.monitor.record(read);
        if read_something {
            state.read = Some(Instant::now());
            state.count_grants();
            state.see_drained();
        } else {
            state.failures += 1;
        }
        self.version.send_modify(|version| *version += 1);
    }

    /// Records an action of an operator, and causes the store to be read again.
    pub(super) fn note(&self, kind: Kind, name: &str, what: String, by: String) {
        let change = Change::Acted { what, by };
        self.state().monitor.events_mut().add(kind, name, change);
        self.version.send_modify(|version| *version += 1);
        self.acted.notify_one();
    }

    /// Records a drain. An event follows when nothing is held any more.
    pub(super) fn watch_draining(&self, name: &str, by: String) {
        self.state().draining.insert(name.to_owned(), by);
    }

    /// Records a request for data. After an idle period, waits for a new poll: the last one may be ten seconds old.
    pub(super) async fn is_asked(&self) {
        let polls = {
            let mut state = self.state();
            state.requested_at = Some(Instant::now());
            state.is_old().then_some(state.polls)
        };
        self.view_opened.notify_one();
        if let Some(polls) = polls {
            self.next_poll(polls).await;
        }
    }

    /// Waits until there are more polls than this, but not for long.
    pub(super) async fn next_poll(&self, polls: u64) {
        let mut versions = self.versions();
        let polled =
            async { while self.state().polls == polls && versions.changed().await.is_ok() {} };
        let _ = tokio::time::timeout(NEXT_POLL, polled).await;
    }

    /// Whether a page is open, or data was requested recently.
    pub(super) fn is_watched(&self) -> bool {
        let requested_at = self
            .state()
            .requested_at
            .is_some_and(|requested_at| requested_at.elapsed() < ATTENTION);
        requested_at || self.streams.load(Ordering::Acquire) > 0
    }

    pub(super) async fn view_opened(&self) {
        self.view_opened.notified().await;
    }

    pub(super) async fn acted(&self) {
        self.acted.notified().await;
    }

    /// Adds a stream of events. Returns `None` if there are too many.
    pub(super) fn stream(self: &Arc<Self>) -> Option<Stream> {
        let more = |streams| (streams < MOST_STREAMS).then_some(streams + 1);
        self.streams.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Stream(self.clone()))
    }

    /// Returns the result of `make`, which is called once per version and key, however many browsers there are.
    pub(super) async fn rendered<E>(
        &self,
        key: &str,
        make: impl Future<Output = Result<Rendering, E>>,
    ) -> Result<Arc<Rendering>, E> {
        let version = self.version();
        if let Some(found) = self.state().rendered.get(version, key) {
            return Ok(found);
        }
        let rendering = Arc::new(make.await?);
        self.state().rendered.keep(version, key, &rendering);
        Ok(rendering)
    }
}

impl ConsoleState {
    /// Whether the next poll would have been due by now if somebody had watched.
    fn is_old(&self) -> bool {
        let due = self.rest + self.took + SLACK;
        self.polled.is_none_or(|polled| polled.elapsed() > due)
    }

    fn count_grants(&mut self) {
        let Some(snapshot) = self.monitor.latest() else { return };
        let names: HashSet<_> = snapshot.semaphores.iter().map(|one| &*one.name).collect();
        self.grants.retain(|name, _| names.contains(name.as_str()));
        for name in names {
            let newest =
                self.monitor.history(name).and_then(|history| history.recent().next_back());
            let Some(newest) = newest else { continue };
            *self.grants.entry(name.to_owned()).or_default() += u64::from(newest.grants);
        }
    }

    fn see_drained(&mut self) {
        let Some(snapshot) = self.monitor.latest() else { return };
        let mut drained = Vec::new();
        self.draining.retain(|name, by| {
            let Some(one) = snapshot.semaphore(name).filter(|one| one.paused.is_some()) else {
                return false;
            };
            if one.held == 0 {
                drained.push((name.clone(), by.clone()));
            }
            one.held > 0
        });
        for (name, by) in drained {
            let what = "drained: nothing is held any more".to_owned();
            self.monitor.events_mut().add(Kind::Semaphore, &name, Change::Acted { what, by });
        }
    }
}

impl Rendered {
    fn get(&self, version: u64, key: &str) -> Option<Arc<Rendering>> {
        self.by_key.get(key).filter(|_| self.version == version).cloned()
    }

    fn keep(&mut self, version: u64, key: &str, made: &Arc<Rendering>) {
        let bytes = self.bytes + made.body.len();
        if self.version != version || self.by_key.len() >= MOST_RENDERED || bytes > MOST_BYTES {
            *self = Self { version, ..Self::default() };
        }
        self.bytes += made.body.len();
        self.by_key.insert(key.to_owned(), made.clone());
    }
}

/// One of the streams of events; it no longer counts when dropped.
pub(super) struct Stream(Arc<Console>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}
