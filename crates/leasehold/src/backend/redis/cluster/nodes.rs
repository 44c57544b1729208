//! The nodes of a cluster that a client knows, and the slots that they serve.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use tokio::task::AbortHandle;

use super::map::Map;
use super::{Address, NOWHERE};
use crate::backend::redis::connection::Connection;
use crate::backend::redis::slots::SLOTS;
use crate::backend::{Destination, Slot};
use crate::clock::{Moment, Span};

/// The most addresses of nodes that are remembered, if the current map has fewer.
const MOST_KNOWN: usize = 32;

/// How long a node without slots keeps its connection after a command was last sent to it.
const EXPECTED_FOR: Span = Span::from_millis(10_000);

pub(super) struct ClusterState {
    pub(super) slots: Vec<Destination>,
    pub(super) nodes: BTreeMap<Destination, Node>,
    /// The rank of the map: see [`Map::rank`].
    pub(super) rank: (usize, u64),
    /// Nodes that can be asked for the map: all that the current map names, replicas too, and then those that earlier
    /// maps have named.
    pub(super) known: Vec<Address>,
    /// When a node last answered that a slot is elsewhere.
    pub(super) moved: HashMap<Slot, Moment>,
    /// Whether an outage of [`NOWHERE`] was reported.
    pub(super) is_lost: bool,
    pub(super) last: u32,
}

impl ClusterState {
    pub(super) fn new() -> Self {
        Self {
            slots: vec![NOWHERE; usize::from(SLOTS)],
            nodes: BTreeMap::new(),
            rank: (0, 0),
            known: Vec::new(),
            moved: HashMap::new(),
            is_lost: false,
            last: NOWHERE.0,
        }
    }

    pub(super) fn find(&self, address: &Address) -> Option<Destination> {
        let node = self.nodes.iter().find(|(_, node)| node.address == *address);
        node.map(|(to, _)| *to)
    }

    /// Records the nodes that a map names, before those that earlier maps have named.
    pub(super) fn remember(&mut self, map: &Map) {
        let mut seen = HashSet::new();
        let named = map.ranges.iter().map(|(_, _, address)| address).chain(&map.replicas);
        let mut known: Vec<_> = named.filter(|address| seen.insert(*address)).cloned().collect();
        let room = MOST_KNOWN.saturating_sub(known.len());
        let former = self.known.iter().filter(|address| !seen.contains(address));
        known.extend(former.take(room).cloned());
        self.known = known;
    }
}

pub(super) struct Node {
    pub(super) address: Address,
    pub(super) connection: Arc<Connection>,
    pub(super) task: AbortHandle,
    /// Whether it serves slots. If not, a slot is being moved to it.
    pub(super) serves: bool,
    /// When a command was last sent to it because a slot is being moved to it.
    pub(super) asked: Option<Moment>,
}

impl Node {
    /// Whether commands are sent to it although it serves no slot yet.
    pub(super) fn is_expected(&self) -> bool {
        !self.serves && self.asked.is_some_and(|asked| Moment::now() < asked + EXPECTED_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_earlier_maps_are_remembered_after_those_of_the_current_one() {
        let address = |number: u16| ("node".to_owned(), number);
        let map = |primary, replicas: std::ops::Range<u16>| Map {
            ranges: vec![(0, 99, address(primary)), (100, 199, address(primary))],
            replicas: replicas.map(address).collect(),
            ..Map::default()
        };
        let mut state = ClusterState::new();
        state.remember(&map(1, 2..4));
        state.remember(&map(3, 4..5));
        assert_eq!(state.known, [3, 4, 1, 2].map(address));
        state.remember(&map(5, 10..40));
        let expected: Vec<_> = [5].into_iter().chain(10..40).chain([3]).map(address).collect();
        assert_eq!(state.known, expected);
    }
}
