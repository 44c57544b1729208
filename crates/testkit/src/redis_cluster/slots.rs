//! Hash slots, and moving a slot from one primary to another.

use super::{FIXTURE, RedisCluster, View};
use crate::wait::{TIME_LIMIT, until};

pub(super) const SLOTS: usize = 16_384;

/// How long `MIGRATE` may wait for the other node, in milliseconds.
const MIGRATE_TIMEOUT: u32 = 10_000;
const BATCH: usize = 100;

/// Returns the hash slot of a key: the CRC16 of its hash tag, or of the key if it has none.
#[must_use]
pub fn slot_of(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    let hashed = tag.map_or(key, |(tag, _)| if tag.is_empty() { key } else { tag });
    crc16(hashed.as_bytes()) % 16_384
}

/// Returns a short text without braces whose slot is `slot`, for use as a key or as a hash tag.
#[must_use]
pub fn tag_of(slot: u16) -> String {
    let mut tags = (0_u32..10_000_000).map(|number| number.to_string());
    tags.find(|tag| slot_of(tag) == slot).unwrap_or_else(|| panic!("no slot {slot}"))
}

/// CRC-16/XMODEM: polynomial 0x1021, initially zero, not reflected.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

/// A slot that is being moved: one primary is migrating it, and another is importing it.
///
/// The slot stays in this state if the value is dropped.
#[derive(Clone, Debug)]
#[must_use]
pub struct SlotMove {
    cluster: RedisCluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl RedisCluster {
    /// Moves a slot with its keys, in the steps of `redis-cli --cluster reshard`.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to).end();
    }

    /// Marks a slot as importing at `to` and as migrating at `from`. No key is moved yet.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) -> SlotMove {
        let (source, target) = (self.at(from).id, self.at(to).id);
        let slot_text = slot.to_string();
        // The target first: otherwise the source sends clients to a node that refuses them.
        self.must::<()>(to, &["CLUSTER", "SETSLOT", &slot_text, "IMPORTING", &source]);
        self.must::<()>(from, &["CLUSTER", "SETSLOT", &slot_text, "MIGRATING", &target]);
        SlotMove { cluster: self.clone(), slot, from, to }
    }
}

impl SlotMove {
    /// Moves up to `count` of the keys that are left at the source. Returns how many it moved.
    #[must_use = "zero says that no key is left"]
    pub fn move_keys(&self, count: usize) -> usize {
        let mut source = self.cluster.connection(self.from);
        let keys: Vec<Vec<u8>> = redis::cmd("CLUSTER")
            .arg("GETKEYSINSLOT")
            .arg(self.slot)
            .arg(count)
            .query(&mut source)
            .unwrap_or_else(|error| panic!("the keys of slot {}: {error}", self.slot));
        if keys.is_empty() {
            return 0;
        }
        let target = self.cluster.node(self.to).port();
        redis::cmd("MIGRATE")
            .arg(("127.0.0.1", target, "", 0, MIGRATE_TIMEOUT))
            .arg(("AUTH2", FIXTURE, FIXTURE, "KEYS"))
            .arg(&keys)
            .exec(&mut source)
            .unwrap_or_else(|error| panic!("MIGRATE of slot {}: {error}", self.slot));
        keys.len()
    }

    /// Moves the keys that are left and assigns the slot to the target. Returns when every running
    /// node knows it.
    pub fn end(self) {
        while self.move_keys(BATCH) > 0 {}
        let Self { cluster, slot, from, to } = self;
        let target = cluster.at(to).id;
        let slot_text = slot.to_string();
        // The target first: otherwise no node serves the slot for a while, and if the source died
        // then, none ever would.
        let others = cluster.running().into_iter().map(|(index, _)| index);
        let others = others.filter(|&index| index != to && index != from && cluster.serves(index));
        for index in [to, from].into_iter().chain(others) {
            cluster.must::<()>(index, &["CLUSTER", "SETSLOT", &slot_text, "NODE", &target]);
        }
        cluster.wait_owner(slot, to);
    }
}

impl RedisCluster {
    /// Waits until every running node believes that `owner` serves `slot`.
    pub(super) fn wait_owner(&self, slot: u16, owner: usize) {
        let id = self.at(owner).id;
        until(&format!("slot {slot} at node {owner}"), TIME_LIMIT, || {
            self.running().iter().try_for_each(|(index, node)| {
                let view = View::of(&node.server)?;
                if view.owner(slot) == Some(&id) {
                    return Ok(());
                }
                Err(format!("node {index} knows\n{view:?}"))
            })
        });
    }

    /// Whether a node believes that it is a primary with slots.
    fn serves(&self, index: usize) -> bool {
        let node = self.at(index);
        let view = View::of(&node.server).unwrap_or_else(|error| panic!("{error}"));
        view.get(&node.id).is_some_and(|myself| !myself.slots.is_empty())
    }
}
