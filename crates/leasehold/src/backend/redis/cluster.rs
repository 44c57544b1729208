//! A cluster: which primary serves which slot, and a connection to each primary.
//!
//! The client asks for the map at the start, when a node answers that a slot is elsewhere, when a connection is lost or
//! silent, and every 30 seconds. It asks several nodes at once and believes the first one whose cluster state is ok. So
//! a node that hangs, or is cut off from the others, does not mislead the client. If there is no such node, a map
//! replaces the current one only if it is at least as good: see [`round`].
//!
//! A node that does not serve a slot answers `MOVED` with the address of the node that does, and applies nothing. The
//! client sends the command there. If a second node contradicts the first within 20 ms, or a node names itself, the
//! command is postponed for a moment, which grows while this lasts.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::RedisSettings;
use super::connect::client_record;
use super::connection::{Connection, RECORD_CLIENT_EVERY, Target};
use super::errors::within;
use super::scripts::Scripts;
use super::slots::SLOTS;
use crate::backend::{Destination, Event, Report, Slot};
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::url::ServerSettings;
use crate::{ClientId, Error};

mod map;
mod nodes;
mod redirect;
mod round;

use map::Map;
use nodes::{ClusterState, Node};
pub(super) use redirect::redirect;

/// The destination of slots that no known node serves. Requests wait there.
const NOWHERE: Destination = Destination(0);

/// The delays between two rounds of queries for the map. While there is a problem, the delay grows from
/// [`SHORTEST_DELAY`] to [`LONGEST_DELAY`]. Otherwise it is [`REFRESH_EVERY`].
const SHORTEST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_millis(500);
const REFRESH_EVERY: Duration = Duration::from_secs(30);

/// If no reply and no silent node contradicted the map for this long, an earlier problem counts as solved.
const SOLVED_AFTER: Duration = Duration::from_secs(1);

/// If a slot was moved less than this ago, the answer of one node does not move it again.
const SETTLED_AFTER: Span = Span::from_millis(20);

/// A host and a port.
type Address = (String, u16);

/// Returns the host that a node has named. A node leaves it out if it does not know its own address, or is configured not
/// to return it; then it is the host of the node that answered.
fn host_or(named: &str, answered: &str) -> String {
    if matches!(named, "" | "?") { answered.to_owned() } else { named.to_owned() }
}

pub(super) struct Cluster {
    pub(super) settings: Arc<RedisSettings>,
    scripts: Arc<Scripts>,
    seeds: Vec<ServerSettings>,
    state: RwLock<ClusterState>,
    /// Notified when the map is found to be wrong.
    outdated: Arc<Notify>,
    /// The result of the first attempt to get the map.
    first_map: watch::Sender<Option<Result<(), Error>>>,
    /// Rotates which nodes are asked next.
    turn: AtomicUsize,
    /// The nodes that were late to write the last index of a lock.
    late_indexes: Mutex<HashSet<Destination>>,
    running: OnceLock<Running>,
}

/// The parts that exist once the engine's thread runs.
struct Running {
    client: ClientId,
    report: Report,
    runtime: Handle,
}

impl Cluster {
    pub(super) fn new(
        settings: Arc<RedisSettings>,
        scripts: Arc<Scripts>,
        seeds: Vec<ServerSettings>,
    ) -> Arc<Self> {
        Arc::new(Self {
            settings,
            scripts,
            seeds,
            state: RwLock::new(ClusterState::new()),
            outdated: Arc::default(),
            first_map: watch::Sender::new(None),
            turn: AtomicUsize::new(0),
            late_indexes: Mutex::default(),
            running: OnceLock::new(),
        })
    }

    /// Starts the background tasks. Called once, in the runtime of the engine's thread.
    pub(super) fn start(self: &Arc<Self>, client: ClientId, report: Report) {
        let _ = self.running.set(Running { client, report, runtime: Handle::current() });
        tokio::spawn(self.clone().keep_map());
        if !self.settings.only_reads() {
            tokio::spawn(self.clone().record_client(client));
        }
    }

    /// Waits for the first attempt to get the map and to connect to the primaries, and returns its result.
    pub(super) async fn connected(&self) -> Result<(), Error> {
        let until = Instant::now() + self.settings.connect_timeout;
        let mut first_map = self.first_map.subscribe();
        let decided = first_map.wait_for(Option::is_some).await.map_err(|_| Error::Closed)?.clone();
        decided.unwrap_or(Ok(()))?;
        let what = format!("connecting to {}", self.settings.address);
        within(until.saturating_duration_since(Instant::now()), &what, self.reach_one()).await
    }

    /// Waits until one primary is connected. One is enough: the others may recover later.
    async fn reach_one(&self) -> Result<(), Error> {
        let mut connecting = JoinSet::new();
        for connection in self.primaries() {
            connecting.spawn(async move { connection.connected().await });
        }
        let mut result = Ok(());
        while let Some(connected) = connecting.join_next().await {
            match connected {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => result = Err(error),
                Err(error) => result = Err(Error::internal(error.to_string())),
            }
        }
        result
    }

    pub(super) fn destination(&self, slot: Slot) -> Destination {
        self.state().slots.get(usize::from(slot.0)).copied().unwrap_or(NOWHERE)
    }

    pub(super) fn connection(&self, to: Destination) -> Option<Arc<Connection>> {
        self.state().nodes.get(&to).map(|node| node.connection.clone())
    }

    /// Returns the connection to a node that a slot is being moved to. Adds one if there is none: the node may not serve any
    /// slot yet.
    pub(super) fn connection_to(&self, address: &Address) -> Option<Arc<Connection>> {
        let mut state = self.state_mut();
        let to = state.find(address).or_else(|| self.add(&mut state, address))?;
        let node = state.nodes.get_mut(&to)?;
        node.asked = Some(Moment::now());
        Some(node.connection.clone())
    }

    /// Returns the connections to all nodes that serve slots.
    pub(super) fn primaries(&self) -> Vec<Arc<Connection>> {
        let state = self.state();
        let primaries = state.nodes.values().filter(|node| node.serves);
        primaries.map(|node| node.connection.clone()).collect()
    }

    pub(super) fn silence(&self) -> Error {
        Error::unavailable(format!("request to {}", self.settings.address), true, None)
    }

    pub(super) fn is_index_late(&self, to: Destination) -> bool {
        self.late_indexes().contains(&to)
    }

    pub(super) fn set_index_late(&self, to: Destination, is_late: bool) {
        let mut late = self.late_indexes();
        if is_late {
            late.insert(to)
        } else {
            late.remove(&to)
        };
    }

    fn late_indexes(&self) -> MutexGuard<'_, HashSet<Destination>> {
        self.late_indexes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the map soon, because it may be wrong.
    pub(super) fn doubt(&self) {
        self.outdated.notify_one();
    }

    /// Records that the node `from` says a slot is elsewhere. Returns false if another node has just said something else,
    /// or if the node names itself. A node does that if another one announces its address, for example after a mistake
    /// in `cluster-announce-port`.
    pub(super) fn moved(&self, slot: Slot, address: &Address, from: Destination) -> bool {
        let mut state = self.state_mut();
        // Under the lock, so that the next map that is adopted reports the change made here.
        self.doubt();
        let known = state.find(address);
        if known == Some(from) {
            return false;
        }
        if known == Some(state.slots[usize::from(slot.0)]) {
            return true;
        }
        let now = Moment::now();
        if state.moved.get(&slot).is_some_and(|last| now < *last + SETTLED_AFTER) {
            return false;
        }
        let Some(to) = known.or_else(|| self.add(&mut state, address)) else { return false };
        state.moved.insert(slot, now);
        state.slots[usize::from(slot.0)] = to;
        if let Some(node) = state.nodes.get_mut(&to) {
            node.serves = true;
        }
        true
    }

    /// Adds a connection to a node that was not known before.
    fn add(&self, state: &mut ClusterState, address: &Address) -> Option<Destination> {
        let (running, seed) = (self.running.get()?, self.seeds.first()?);
        state.last += 1;
        let to = Destination(state.last);
        let info = seed.at(&address.0, address.1);
        let connection =
            Connection::new(self.settings.clone(), self.scripts.clone(), Target::Node(info), to);
        let (outdated, report) = (self.outdated.clone(), running.report.clone());
        let report: Report = Arc::new(move |event| {
            if matches!(event, Event::Disconnected(..) | Event::Missed(_)) {
                outdated.notify_one();
            }
            report(event);
        });
        let task = running.runtime.spawn(connection.clone().keep_up(running.client, report));
        let (task, address) = (task.abort_handle(), address.clone());
        let node = Node { address, connection, task, serves: false, asked: None };
        state.nodes.insert(to, node);
        Some(to)
    }

    async fn keep_map(self: Arc<Self>) {
        let (mut problem_since, mut others_asked) = (Instant::now(), None);
        loop {
            let learnt = self.query(&mut others_asked).await;
            let is_sure = learnt.as_ref().is_ok_and(|map| map.is_sure);
            let learnt = learnt.map(|map| self.adopt(&map));
            if let Err(error) = &learnt {
                event!(debug, %error, "no node returned the slot map of the cluster");
                // If the map is known, the connections report what is wrong.
                let is_unknown = self.state().slots.contains(&NOWHERE);
                if is_unknown {
                    self.lose(error.clone());
                }
            }
            self.first_map.send_if_modified(|first| {
                let news = first.is_none();
                first.get_or_insert(learnt);
                news
            });
            let asked = Instant::now();
            // If the map has not been doubted recently, a doubt starts a round at once. During a problem the map is
            // doubted often, so the delay grows with the duration of the problem.
            let delay = problem_since.elapsed() / 20;
            tokio::time::sleep(delay.clamp(SHORTEST_DELAY, LONGEST_DELAY)).await;
            if is_sure && self.is_in_order() {
                let _ = tokio::time::timeout(REFRESH_EVERY, self.outdated.notified()).await;
            }
            if asked.elapsed() > SOLVED_AFTER {
                problem_since = Instant::now();
            }
        }
    }

    async fn record_client(self: Arc<Self>, client: ClientId) {
        let mut interval = tokio::time::interval(RECORD_CLIENT_EVERY);
        loop {
            interval.tick().await;
            let _ = self.connected().await;
            let record = client_record(&self.settings.namespace, client);
            // Only statistics need it, so a failure does not matter.
            let _ = super::topology::query(&self, Slot::ONLY, record.into()).await;
        }
    }

    /// Runs `work` in the background.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(running) = self.running.get() {
            running.runtime.spawn(work);
        }
    }

    fn is_in_order(&self) -> bool {
        let state = self.state();
        let all_are_up = state.nodes.values().all(|node| node.connection.is_up() || !node.serves);
        all_are_up && !state.slots.contains(&NOWHERE)
    }

    fn adopt(&self, map: &Map) {
        let mut state = self.state_mut();
        if !map.is_sure && map.rank() < state.rank {
            return;
        }
        let mut slots = vec![NOWHERE; usize::from(SLOTS)];
        let known = state.nodes.iter().map(|(to, node)| (node.address.clone(), *to));
        let mut known: HashMap<Address, Destination> = known.collect();
        let mut used = HashSet::new();
        for (first, last, address) in &map.ranges {
            let to = match known.get(address) {
                Some(to) => *to,
                None => match self.add(&mut state, address) {
                    Some(to) => *known.entry(address.clone()).or_insert(to),
                    None => return,
                },
            };
            used.insert(to);
            slots[usize::from(*first)..=usize::from(*last)].fill(to);
        }
        let is_gone =
            |(to, node): &(&Destination, &Node)| !used.contains(to) && !node.is_expected();
        let gone: Vec<_> = state.nodes.iter().filter(is_gone).map(|(to, _)| *to).collect();
        for to in &gone {
            if let Some(node) = state.nodes.remove(to) {
                node.task.abort();
                node.connection.leave();
            }
        }
        for (to, node) in &mut state.nodes {
            node.serves = used.contains(to);
        }
        let complete = !slots.contains(&NOWHERE);
        // An outage of all nodes ends even if the map is the same as before.
        let is_found = complete && std::mem::take(&mut state.is_lost);
        let changed =
            slots != state.slots || !gone.is_empty() || !state.moved.is_empty() || is_found;
        state.moved.clear();
        (state.slots, state.rank) = (slots, map.rank());
        state.remember(map);
        drop(state);
        if !complete {
            let what = format!("{}: no node serves some of the slots", self.settings.address);
            self.lose(Error::unavailable(what, false, None));
        }
        if changed {
            let gone = if complete { [gone, vec![NOWHERE]].concat() } else { gone };
            self.report(Event::Rerouted { gone });
        }
    }

    /// Reports that no node serves some of the slots, or that no node returns the map.
    fn lose(&self, error: Error) {
        self.state_mut().is_lost = true;
        self.report(Event::Disconnected(NOWHERE, error));
    }

    fn report(&self, event: Event) {
        if let Some(running) = self.running.get() {
            (running.report)(event);
        }
    }

    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, ClusterState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}
