//! A real Redis cluster for a test, on loopback. It needs Redis 7.0 or later.
//!
//! Each node is a [`RedisServer`] with a bus port of its own. A cluster takes a little more than two
//! seconds to start: Redis lets a primary wait that long before it accepts commands.
//!
//! Functions that change the cluster return when the change has taken effect, and panic with what
//! they saw if it does not within [`TIME_LIMIT`]. They block. An async test that has work to do in
//! the meantime calls them through [`RedisCluster::blocking`].
//!
//! Nodes are named by their index: first the primaries in the order of their slots, then their
//! replicas in the same order, then the added nodes. The index of a node does not change with its
//! role.
//!
//! # Counts of commands
//!
//! Replicas log in at their primary as the user of the fixture. So they work whatever password the
//! test asked for, and [`RedisServer::connected_clients`] leaves them out. The counts of commands
//! contain what the nodes send each other: the commands of a replica at its primary, such as
//! `REPLCONF`, the replicated writes, and the commands of `MIGRATE`.

mod changes;
mod members;
mod slots;
#[cfg(test)]
mod tests;
mod view;

use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use redis::FromRedisValue;

use crate::redis_server::{Certificate, FIXTURE, Kind, RedisServer, escape};
use crate::wait::{TIME_LIMIT, blocking, until};
pub use members::Reset;
use slots::SLOTS;
pub use slots::{SlotMove, slot_of, tag_of};
use view::{Member, View};

/// How long a node may be silent before the others consider it failed, unless a test asks for
/// another time. Shorter times make a busy machine look like a failure.
const NODE_TIMEOUT_MS: u32 = 1000;
const PRIMARIES: usize = 3;

/// A Redis cluster on loopback, stopped when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct RedisCluster {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    nodes: RwLock<Vec<Node>>,
    options: Vec<String>,
    certificate: Option<Certificate>,
}

#[derive(Clone, Debug)]
struct Node {
    server: Arc<RedisServer>,
    id: String,
    /// A slot that the node served when it was last killed or paused.
    slot: Option<u16>,
}

impl RedisCluster {
    /// Starts three primaries with one replica each, and returns when all of them are ready.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(NODE_TIMEOUT_MS, &[])
    }

    /// Starts three primaries with one replica each, with another `cluster-node-timeout` and more
    /// options for every node, as in [`RedisServer::start_with`].
    #[must_use]
    pub fn start_with(node_timeout_ms: u32, options: &[&str]) -> Self {
        Self::launch(PRIMARIES, true, node_timeout_ms, options, None)
    }

    /// Starts `primaries` primaries without replicas.
    #[must_use]
    pub fn start_primaries(primaries: usize) -> Self {
        Self::launch(primaries, false, NODE_TIMEOUT_MS, &[], None)
    }

    /// Starts three primaries with one replica each. They speak only TLS to clients and each other.
    #[must_use]
    pub fn start_tls(options: &[&str]) -> Self {
        Self::launch(PRIMARIES, true, NODE_TIMEOUT_MS, options, Some(Certificate::make()))
    }

    fn launch(
        primaries: usize,
        replicas: bool,
        node_timeout_ms: u32,
        options: &[&str],
        certificate: Option<Certificate>,
    ) -> Self {
        let timeout = format!("--cluster-node-timeout {node_timeout_ms}");
        let login = format!("--masteruser {FIXTURE} --masterauth {FIXTURE}");
        // By default, a primary waits five seconds for more replicas before it sends its data.
        let sync = "--repl-diskless-sync-delay 0";
        let fixture_options = [timeout.as_str(), &login, sync];
        let options =
            fixture_options.iter().chain(options).map(|&option| option.to_owned()).collect();
        let shared = Shared { nodes: RwLock::default(), options, certificate };
        let cluster = Self { shared: Arc::new(shared) };
        let count = if replicas { 2 * primaries } else { primaries };
        thread::scope(|scope| {
            let starts: Vec<_> =
                (0..count).map(|_| scope.spawn(|| cluster.launch_node())).collect();
            let nodes = starts.into_iter().map(|start| start.join().expect("a node that starts"));
            *cluster.write_nodes() = nodes.collect();
        });
        cluster.form(primaries);
        cluster
    }

    fn launch_node(&self) -> Node {
        let options: Vec<&str> = self.shared.options.iter().map(String::as_str).collect();
        let certificate = self.shared.certificate.as_ref();
        let server = RedisServer::launch(Kind::ClusterNode, &options, certificate);
        let id = server.call(&["CLUSTER", "MYID"]).expect("a node of a cluster");
        Node { server: Arc::new(server), id, slot: None }
    }

    /// Makes one cluster of nodes that do not know each other yet.
    fn form(&self, primaries: usize) {
        let count = self.read_nodes().len();
        for index in 0..count {
            // Different epochs, as no node would otherwise win a conflict.
            let epoch = (index + 1).to_string();
            self.must::<()>(index, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
            if index < primaries {
                let first = (index * SLOTS / primaries).to_string();
                let last = ((index + 1) * SLOTS / primaries - 1).to_string();
                self.must::<()>(index, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
            }
            for other in 0..index {
                self.meet(index, other);
            }
        }
        for replica in primaries..count {
            self.replicate(replica, replica - primaries);
        }
        self.wait_ready();
        if count > primaries {
            self.wait_listed(primaries);
        }
    }

    /// Waits until `CLUSTER SLOTS` lists the replicas. It leaves a replica out that has not yet
    /// received anything from its primary after the initial data.
    fn wait_listed(&self, primaries: usize) {
        for primary in 0..primaries {
            self.must::<()>(primary, &["FLUSHALL"]);
        }
        until("replicas in CLUSTER SLOTS", TIME_LIMIT, || {
            for (index, node) in self.running() {
                let ranges: redis::RedisResult<Vec<Vec<redis::Value>>> =
                    node.server.call(&["CLUSTER", "SLOTS"]);
                let ranges = ranges.map_err(|error| format!("CLUSTER SLOTS: {error}"))?;
                // The first and the last slot, the primary, the replica.
                if ranges.iter().any(|range| range.len() != 4) {
                    return Err(format!("node {index} lists {ranges:?}"));
                }
            }
            Ok(())
        });
    }

    /// The URL of the first three nodes; `rediss-cluster:` for [`start_tls`](Self::start_tls).
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of(&self.first_nodes())
    }

    /// The URL of these nodes.
    #[must_use]
    pub fn url_of(&self, indices: &[usize]) -> String {
        format!("{}://{}", self.scheme(), self.hosts(indices))
    }

    /// The URL of the first three nodes with credentials; an empty user is the default user.
    #[must_use]
    pub fn url_with(&self, user: &str, password: &str) -> String {
        let (user, password) = (escape(user), escape(password));
        let hosts = self.hosts(&self.first_nodes());
        format!("{}://{user}:{password}@{hosts}", self.scheme())
    }

    /// The address of every node, `host:port`, by index.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.nodes().iter().map(|node| format!("127.0.0.1:{}", node.port())).collect()
    }

    /// The server of every node, by index.
    #[must_use]
    pub fn nodes(&self) -> Vec<Arc<RedisServer>> {
        self.read_nodes().into_iter().map(|node| node.server).collect()
    }

    /// The server of one node.
    #[must_use]
    pub fn node(&self, index: usize) -> Arc<RedisServer> {
        self.at(index).server
    }

    /// A blocking connection to one node, as [`RedisServer::connection`] makes it.
    #[must_use]
    pub fn connection(&self, index: usize) -> redis::Connection {
        self.node(index).connection()
    }

    /// The authority, as PEM, that a client of [`start_tls`](Self::start_tls) has to trust.
    #[must_use]
    pub fn ca_certificate(&self) -> Option<String> {
        self.node(0).ca_certificate().map(str::to_owned)
    }

    /// Calls a function of the fixture on a thread where it may block, and returns its result.
    pub async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let cluster = self.clone();
        blocking(move || call(&cluster)).await
    }

    /// The running node that serves `slot`. If several nodes believe that they do, the one that the
    /// cluster will agree on: the one with the highest epoch.
    #[must_use]
    pub fn primary_of(&self, slot: u16) -> usize {
        let owners = self.running().into_iter().filter_map(|(index, node)| {
            let view = View::of(&node.server).unwrap_or_else(|error| panic!("{error}"));
            let myself = view.get(&node.id)?;
            myself.serves(slot).then_some((myself.epoch, index))
        });
        let owner = owners.max().unwrap_or_else(|| panic!("no running node serves slot {slot}"));
        owner.1
    }

    /// The running node that serves the slot of `key`.
    #[must_use]
    pub fn primary_of_key(&self, key: &str) -> usize {
        self.primary_of(slot_of(key))
    }

    /// The first running replica of a node.
    #[must_use]
    pub fn replica_of(&self, primary: usize) -> usize {
        let id = self.at(primary).id;
        let replica = self.running().into_iter().find(|(_, node)| {
            let view = View::of(&node.server).unwrap_or_else(|error| panic!("{error}"));
            view.get(&node.id).is_some_and(|myself| myself.primary.as_ref() == Some(&id))
        });
        replica.unwrap_or_else(|| panic!("node {primary} has no running replica")).0
    }

    /// Waits until the running nodes agree about the cluster: every slot is served, no running
    /// node is considered failed, and every replica of a running primary is linked to it.
    pub fn wait_ready(&self) {
        self.wait_ready_within(TIME_LIMIT);
    }

    /// As [`wait_ready`](Self::wait_ready), with another deadline.
    pub fn wait_ready_within(&self, within: Duration) {
        until("a cluster that is ready", within, || {
            self.agreed()?;
            self.running().iter().try_for_each(|(_, node)| view::state_ok(&node.server))
        });
    }

    /// What the running nodes agree about, or in what they differ.
    fn agreed(&self) -> Result<View, String> {
        let running = self.running();
        let mut agreed: Option<View> = None;
        for (index, node) in &running {
            let view = View::of(&node.server)?;
            let complain = |what: &str| Err(format!("{what} by node {index}:\n{view:?}"));
            if view.len() != self.read_nodes().len() {
                return complain("not every node is known");
            }
            for (_, other) in &running {
                match view.get(&other.id) {
                    Some(member) if member.is_healthy() => {}
                    _ => return complain(&format!("{} is not reached", other.id)),
                }
            }
            let primary = view.get(&node.id).and_then(|myself| myself.primary.clone());
            let runs = |id: &String| running.iter().any(|(_, node)| node.id == *id);
            if primary.as_ref().is_some_and(runs) {
                view::linked(&node.server)?;
            }
            match &agreed {
                Some(first) if !first.agrees(&view, runs) => {
                    return complain(&format!("this view\n{first:?}\nis not shared"));
                }
                Some(_) => {}
                None => agreed = Some(view),
            }
        }
        agreed.ok_or_else(|| "no node runs".to_owned())
    }

    /// The running nodes with their indices.
    fn running(&self) -> Vec<(usize, Node)> {
        let nodes = self.read_nodes().into_iter().enumerate();
        nodes.filter(|(_, node)| node.server.is_running()).collect()
    }

    /// The index of the node with this id.
    fn index_of(&self, id: &str) -> Option<usize> {
        self.read_nodes().iter().position(|node| node.id == id)
    }

    fn at(&self, index: usize) -> Node {
        let nodes = self.read_nodes();
        let node = nodes.get(index);
        node.unwrap_or_else(|| panic!("node {index} of {}", nodes.len())).clone()
    }

    fn read_nodes(&self) -> Vec<Node> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn write_nodes(&self) -> std::sync::RwLockWriteGuard<'_, Vec<Node>> {
        self.shared.nodes.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a command that has to succeed on a node. A signal that another test handles may interrupt the call, so it
    /// is repeated once.
    #[track_caller]
    fn must<T: FromRedisValue>(&self, index: usize, command: &[&str]) -> T {
        let mut reply = self.node(index).call(command);
        let interrupted = std::io::Error::from(std::io::ErrorKind::Interrupted).kind().to_string();
        if reply.as_ref().is_err_and(|error| error.to_string().contains(&interrupted)) {
            reply = self.node(index).call(command);
        }
        reply.unwrap_or_else(|error| panic!("{command:?} at node {index}: {error}"))
    }

    fn first_nodes(&self) -> Vec<usize> {
        (0..self.read_nodes().len().min(PRIMARIES)).collect()
    }

    fn hosts(&self, indices: &[usize]) -> String {
        let addresses = self.addresses();
        let chosen: Vec<_> = indices.iter().map(|&index| addresses[index].as_str()).collect();
        chosen.join(",")
    }

    fn scheme(&self) -> &'static str {
        if self.shared.certificate.is_some() { "rediss-cluster" } else { "redis-cluster" }
    }
}

impl Member {
    fn is_healthy(&self) -> bool {
        self.connected && !self.failed
    }
}
