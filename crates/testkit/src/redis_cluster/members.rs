//! Nodes that join, and replicas that join again.

use super::{RedisCluster, TIME_LIMIT, View, until};

/// What a replica forgets when it is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// The other nodes and its data.
    Soft,
    /// The other nodes, its data, its id and the epochs.
    Hard,
}

impl RedisCluster {
    /// Starts another node as a primary without slots, and returns when all running nodes know it.
    #[must_use]
    pub fn add_node(&self) -> usize {
        let node = self.launch_node();
        let index = {
            let mut nodes = self.write_nodes();
            nodes.push(node);
            nodes.len() - 1
        };
        self.join(index);
        self.wait_ready();
        index
    }

    /// Removes a replica from the cluster with `CLUSTER RESET`, and lets it join again as a replica
    /// of the same primary. It synchronizes its data from the beginning.
    pub fn reset_replica(&self, index: usize, how: Reset) {
        let node = self.at(index);
        let view = View::of(&node.server).unwrap_or_else(|error| panic!("{error}"));
        let primary = view.get(&node.id).and_then(|myself| self.index_of(myself.primary.as_ref()?));
        let primary = primary.unwrap_or_else(|| panic!("node {index} is no replica"));
        let how_text = if how == Reset::Soft { "SOFT" } else { "HARD" };
        self.must::<()>(index, &["CLUSTER", "RESET", how_text]);
        if how == Reset::Hard {
            self.write_nodes()[index].id = self.must(index, &["CLUSTER", "MYID"]);
            for (other, _) in self.running() {
                if other != index {
                    self.must::<()>(other, &["CLUSTER", "FORGET", &node.id]);
                }
            }
        }
        self.join(index);
        self.replicate(index, primary);
        self.wait_ready();
    }

    /// Introduces a node to every other running node, which is quicker than one introduction and
    /// gossip.
    fn join(&self, index: usize) {
        for (other, _) in self.running() {
            if other != index {
                self.meet(index, other);
            }
        }
    }

    pub(super) fn meet(&self, index: usize, other: usize) {
        let node = self.node(other);
        let (port, bus_port) = (node.port().to_string(), node.bus_port().to_string());
        self.must::<()>(index, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus_port]);
    }

    /// Makes a node a replica, once it knows the primary.
    pub(super) fn replicate(&self, index: usize, primary: usize) {
        let (node, id) = (self.at(index), self.at(primary).id);
        until(&format!("node {index} knows node {primary}"), TIME_LIMIT, || {
            let view = View::of(&node.server)?;
            match view.get(&id) {
                Some(member) if member.is_healthy() => Ok(()),
                _ => Err(format!("it knows\n{view:?}")),
            }
        });
        self.must::<()>(index, &["CLUSTER", "REPLICATE", &id]);
    }
}
