//! The store on Redis or Valkey: the machine in Lua, over one multiplexed connection to each primary.
//!
//! - [`deployment`]: the kinds of deployments; [`url`]: parses their URLs; [`sentinel`]: finds the primary;
//!   [`cluster`]: the map from slots to nodes; [`slots`]: the map from keys to slots; [`topology`]: the common interface
//!   to one server, Sentinel and Cluster.
//! - [`connection`]: keeps the connection to one server up; [`connect`]: opens its socket, and checks the server;
//!   [`socket`]: the socket.
//! - [`command`]: packs commands; [`resp`]: decodes replies; [`value`]: their values; [`errors`]: the errors of
//!   requests, and how they become [`Error`].
//! - [`settings`]: the settings of a client; [`request`]: encodes the commands of one request and decodes its answers.
//! - [`scripts`]: the transitions, one Lua file each, and their typed calls.
//! - [`locks`], [`pools`]: the same for locks and pools; [`lock_index`]: the index of lock ids, which the client
//!   maintains in a cluster.
//! - [`stats`]: reads holders, waiters and clients; [`stats_reader`]: the connections and the thread for such reads.
//! - [`tls`]: the certificates that a TLS connection trusts.

use std::sync::{Arc, OnceLock};

use super::{Answers, BoxFuture, Destination, Part, Profile, RemoteBackend, Report, Slot};
use crate::backend::TimeAuthority;
use crate::clock::Span;
use crate::machine::Subject;
use crate::machine::lock::Record;
use crate::machine::pool::PoolQuery;
use crate::machine::{Command, LimitsChanged, Outcome};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreLimits, SemaphoreStats};
use crate::url::Deployment;
use crate::{AcquisitionId, ClientId, ClientInfo, Error, LockId};

mod cluster;
mod command;
mod connect;
mod connection;
mod errors;
mod lock_index;
mod locks;
mod pools;
mod request;
mod resp;
mod scripts;
mod sentinel;
mod settings;
mod slots;
mod socket;
mod stats;
mod stats_reader;
#[cfg(test)]
mod tests;
mod tls;
mod topology;
mod value;

use command::RedisCommand;
pub use locks::LockLayout;
use locks::LockScripts;
pub(crate) use locks::Prefix;
use scripts::{Form, Keys, Scripts};
pub(crate) use settings::{Purpose, RedisSettings};
use slots::{KeyTag, slot_of};
use stats_reader::StatsReader;
use topology::Topology;

/// The lease of another program's member when we grant it a permit. It is that program's own default.
const FOREIGN_HEARTBEAT: Span = Span::from_millis(180_000);

/// The store.
pub(crate) struct Redis {
    topology: Topology,
    stats_reader: StatsReader,
    scripts: Arc<Scripts>,
    /// How the names of semaphores and pools are written in keys.
    names: KeyTag,
    pools: KeyTag,
    locks: Arc<LockScripts>,
    client: OnceLock<ClientId>,
}

impl Redis {
    pub(crate) fn new(settings: RedisSettings) -> Result<Self, Error> {
        if settings.deployment.has_tls() {
            // If the program has already installed another provider, that one stays.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let is_cluster = matches!(settings.deployment, Deployment::Cluster(_));
        let (mut names, mut pools) = (KeyTag::Plain, KeyTag::Plain);
        let locks = LockScripts::new(
            settings.lock_prefix.clone(),
            settings.lock_layout,
            &settings.namespace,
        );
        let locks = if is_cluster {
            names = KeyTag::below("namespace", &settings.namespace)?;
            pools = KeyTag::Tagged;
            locks.in_cluster()?
        } else {
            locks
        };
        let (settings, scripts) = (Arc::new(settings), Arc::new(Scripts::new()));
        let topology = Topology::new(&settings, &scripts);
        let stats_reader = StatsReader::new(&settings, &scripts);
        Ok(Self {
            topology,
            stats_reader,
            scripts,
            names,
            pools,
            locks: Arc::new(locks),
            client: OnceLock::new(),
        })
    }

    /// Waits for the first attempt to connect, and returns its result.
    pub(crate) fn connected(&self) -> BoxFuture<()> {
        let topology = self.topology.clone();
        Box::pin(async move { topology.connected().await })
    }

    fn client(&self) -> Result<ClientId, Error> {
        self.client.get().copied().ok_or_else(|| Error::internal("the store was not started"))
    }

    /// Runs a query whose answer may take long to arrive or to decode, on connections and a thread of its own. A client
    /// that only reads has no other work, so it uses its ordinary connections.
    fn read<T: Send + 'static, F: Future<Output = Result<T, Error>> + Send + 'static>(
        &self,
        query: impl FnOnce(Topology) -> F + Send + 'static,
    ) -> BoxFuture<T> {
        match (self.topology.settings().only_reads(), self.client()) {
            (true, _) => Box::pin(query(self.topology.clone())),
            (false, Ok(client)) => self.stats_reader.read(client, query),
            (false, Err(error)) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn is_cluster(&self) -> bool {
        matches!(self.topology, Topology::Cluster(..))
    }

    fn keys<'a>(&'a self, name: &'a Name) -> Result<Keys<'a>, Error> {
        let settings = self.topology.settings();
        let (namespace, confirm_within) = (&settings.namespace, settings.confirm_within);
        let written = self.names.write(name.as_str());
        let (client, foreign) = (self.client()?, FOREIGN_HEARTBEAT);
        let keys = Keys::new((namespace, written), name.as_str(), client, confirm_within, foreign);
        Ok(if self.is_cluster() { keys.in_cluster() } else { keys })
    }
}

impl RemoteBackend for Redis {
    fn profile(&self) -> Profile {
        Profile { kind: "redis", needs_renewals: true, time_authority: TimeAuthority::Server }
    }

    fn address(&self) -> &str {
        &self.topology.settings().address
    }

    fn start(&self, client: ClientId, report: Report) {
        let _ = self.client.set(client);
        self.topology.start(client, report);
    }

    fn slot(&self, subject: Subject<'_>) -> Slot {
        if !self.is_cluster() {
            return Slot::ONLY;
        }
        match subject {
            Subject::Semaphore(name) => self.keys(name).map_or(Slot::ONLY, |keys| keys.slot()),
            Subject::Lock(key) => slot_of(&self.locks.lock(key)),
            Subject::LockId(id) => slot_of(&self.locks.index(id)),
            Subject::Pool(name) => slot_of(&self.pools.write(name.as_str())),
        }
    }

    fn destination(&self, slot: Slot) -> Destination {
        self.topology.destination(slot)
    }

    fn check(&self, subject: Subject<'_>) -> Result<(), Error> {
        match subject {
            Subject::Semaphore(name) => self.names.check("name", name.as_str()),
            Subject::Lock(key) => self.locks.check(key),
            Subject::LockId(_) => Ok(()),
            Subject::Pool(name) => self.pools.check("name", name.as_str()),
        }
    }

    fn apply(&self, to: Destination, request: &Arc<[Part]>) -> BoxFuture<Answers> {
        self.send(to, request.clone())
    }

    fn sends_from_any_thread(&self) -> bool {
        true
    }

    fn suspect(&self, destination: Destination) {
        if let Some(connection) = self.topology.connection(destination) {
            connection.suspect_current();
        }
    }

    fn doubt(&self, _destination: Destination) {
        if let Topology::Cluster(cluster) = &self.topology {
            cluster.doubt();
        }
    }

    fn position(&self, name: &Name, id: AcquisitionId) -> BoxFuture<Option<usize>> {
        let topology = self.topology.clone();
        let rank = |keys: Keys<'_>| RedisCommand::new("ZRANK").arg(keys.waiting()).arg_fmt(id);
        let call = self.keys(name).map(|keys| (keys.slot(), rank(keys)));
        Box::pin(async move {
            let (slot, rank) = call?;
            stats::read(topology.query(slot, vec![rank]).await?.pop().unwrap_or_default())
        })
    }

    fn limits(&self, name: &Name) -> BoxFuture<SemaphoreLimits> {
        let (topology, names) = (self.topology.clone(), self.names);
        let (slot, name) = (self.slot(Subject::Semaphore(name)), name.clone());
        Box::pin(async move { stats::limits(&topology, names, slot, name.as_str()).await })
    }

    fn release_member(&self, name: &Name, id: &str) -> BoxFuture<bool> {
        let topology = self.topology.clone();
        let call = |keys: Keys<'_>| (keys.slot(), self.scripts.release_member(&keys, id));
        let call = self.keys(name).map(call);
        Box::pin(async move {
            stats_reader::check(&topology)?;
            let (slot, call) = call?;
            let answer = topology.call(slot, call).await?.0;
            scripts::was_removed(&answer).map_err(Error::internal)
        })
    }

    fn change_limits(&self, name: &Name, change: Command) -> BoxFuture<LimitsChanged> {
        let topology = self.topology.clone();
        let call = |keys: Keys<'_>| (keys.slot(), self.scripts.change_limits(&keys, &change));
        let call = self.keys(name).map(call);
        Box::pin(async move {
            stats_reader::check(&topology)?;
            let (slot, call) = call?;
            let answer = topology.call(slot, call).await?.0;
            let answer = scripts::decode(&[change], [(Form::Machine, 1, answer)])
                .map_err(Error::internal)?;
            match answer.outcomes[..] {
                [Outcome::LimitsChanged(changed)] => Ok(changed),
                _ => Err(Error::internal(format!(
                    "unexpected answer to a change of limits: {answer:?}"
                ))),
            }
        })
    }

    fn key_of_lock(&self, id: LockId) -> Option<BoxFuture<Option<Name>>> {
        if !self.is_cluster() {
            return None;
        }
        let (topology, locks) = (self.topology.clone(), self.locks.clone());
        Some(Box::pin(async move { locks.key_of(&topology, &id).await }))
    }

    fn stats(&self, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        let names = self.names;
        self.read(move |topology| async move { stats::fetch(&topology, names, query).await })
    }

    fn list_locks(&self, limit: usize) -> BoxFuture<Vec<Record>> {
        let locks = self.locks.clone();
        self.read(move |topology| async move { locks.list(&topology, limit).await })
    }

    fn list_pools(&self, which: PoolQuery) -> BoxFuture<Vec<PoolStats>> {
        let pools = self.pools;
        self.read(move |topology| async move { pools::list(&topology, pools, which).await })
    }

    fn list_clients(&self, limit: usize) -> BoxFuture<Vec<ClientInfo>> {
        self.read(move |topology| async move { stats::clients(&topology, limit).await })
    }
}
