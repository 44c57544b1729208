//! A Redis cluster, and the lane of its faults.
//!
//! There are three primaries with one replica each. A fault of a node is recorded for the names that the node serves;
//! other names must not be affected. Nodes that join later have no replica. So only the first six nodes are ever killed
//! or paused for long.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread;

use fastrand::Rng;
use testkit::redis_cluster::{RedisCluster, Reset, slot_of};
use testkit::wait::TIME_LIMIT;

use super::server::{
    ShuffledFaults, client_kill, client_pause, forget_fences, forget_fences_later,
};
use super::stage::redis_command;
use super::{CALM, Show, lock, millis};
use crate::fault::{Kind, Scope};
use crate::plan::{THINGS, Things};

/// How long a node may be silent before the others replace it. With a shorter time, a busy machine would cause
/// failovers by itself.
const NODE_TIMEOUT_MS: u32 = 1500;
/// Pauses, in milliseconds, that are too short for a failover.
const SHORT: std::ops::Range<u64> = 50..800;
const PRIMARIES: usize = 3;
const SLOTS: usize = 16_384;
/// The most nodes that join in one run.
const ADDED: usize = 2;

pub(super) struct Cluster {
    pub(super) nodes: RedisCluster,
    /// The node that serves each thing.
    homes: Mutex<Vec<usize>>,
    /// Whether all nodes refuse commands while some slots are not served, which is the default.
    needs_all_slots: bool,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    Pause,
    Failover,
    Move,
    Add,
    Freeze,
    ResetReplica,
    PauseReplica,
    ClientKill,
    ClientPause,
    ScriptFlush,
}

const FAULTS: [Fault; 15] = [
    Fault::Kill,
    Fault::Kill,
    Fault::Pause,
    Fault::Failover,
    Fault::Failover,
    Fault::Move,
    Fault::Move,
    Fault::Move,
    Fault::Add,
    Fault::Freeze,
    Fault::ResetReplica,
    Fault::PauseReplica,
    Fault::ClientKill,
    Fault::ClientPause,
    Fault::ScriptFlush,
];

pub(super) fn lane(show: &Show, cluster: &Cluster) {
    let mut rng = show.rng(u64::MAX);
    let (mut faults, mut next) = (ShuffledFaults::new(&FAULTS), CALM);
    thread::scope(|later| {
        while show.next(next) {
            if cluster.find_homes() != *lock(&cluster.homes) {
                show.doubt("the cluster failed over by itself".to_owned());
            }
            let lost = cluster.suffer(show, faults.draw(&mut rng), &mut rng);
            *lock(&cluster.homes) = cluster.find_homes();
            forget_fences_later(show, later, lost);
            next = millis(&mut rng, 300..2500);
        }
    });
}

impl Cluster {
    pub(super) fn start(seed: u64) -> Self {
        // The seed decides, so that both settings occur. Its lowest bit already decides the layout of locks.
        let needs_all_slots = (seed / 2).is_multiple_of(2);
        let coverage = if needs_all_slots { "yes" } else { "no" };
        let coverage = format!("--cluster-require-full-coverage {coverage}");
        // Otherwise a primary whose last slot moves away would become a replica by itself, and could not be given
        // another slot.
        let stays = "--cluster-allow-replica-migration no";
        let nodes = RedisCluster::start_with(NODE_TIMEOUT_MS, &[&coverage, stays]);
        let cluster = Self { nodes, homes: Mutex::default(), needs_all_slots };
        *lock(&cluster.homes) = cluster.find_homes();
        cluster
    }

    fn find_homes(&self) -> Vec<usize> {
        THINGS.iter().map(|thing| self.nodes.primary_of(slot_of(thing.name))).collect()
    }

    /// The nodes that serve things, each with its things.
    pub(super) fn homes(&self) -> Vec<(usize, Things)> {
        let homes = lock(&self.homes).clone();
        let nodes: BTreeSet<_> = homes.iter().copied().collect();
        let of = |node| (0..THINGS.len()).filter(|thing| homes[*thing] == node).collect();
        nodes.into_iter().map(|node| (node, of(node))).collect()
    }

    /// The URLs of the running nodes.
    pub(super) fn running(&self) -> Vec<String> {
        let nodes = self.nodes.nodes().into_iter();
        nodes.filter(|node| node.is_running()).map(|node| node.url()).collect()
    }

    /// The primaries: three of the first six nodes, and the nodes that have joined.
    pub(super) fn primaries(&self) -> Vec<usize> {
        let named: BTreeSet<_> = THINGS.iter().map(|thing| slot_of(thing.name)).collect();
        // A slot of each primary that never moves.
        let first = |primary: usize| {
            let slots = primary * SLOTS / PRIMARIES..;
            let mut slots = slots.filter_map(|slot| u16::try_from(slot).ok());
            slots.find(|slot| !named.contains(slot)).expect("a slot without a name")
        };
        let served = (0..PRIMARIES).map(|primary| self.nodes.primary_of(first(primary)));
        served.chain(2 * PRIMARIES..self.nodes.nodes().len()).collect()
    }

    /// Injects one fault. Returns the things whose data may be lost.
    fn suffer(&self, show: &Show, fault: Fault, rng: &mut Rng) -> Things {
        let homes = self.homes();
        let (any, of_any) = homes[rng.usize(..homes.len())];
        let replicated: Vec<_> =
            homes.iter().copied().filter(|(node, _)| *node < 2 * PRIMARIES).collect();
        let Some((primary, things)) = rng.choice(replicated) else {
            // All things have moved to nodes that joined later.
            self.relocate(show, rng.usize(..THINGS.len()), rng);
            return Things::default();
        };
        let nodes = &self.nodes;
        match fault {
            Fault::Kill => {
                self.replace(show, Kind::PrimaryKilled, primary, things, RedisCluster::kill);
                show.pause(millis(rng, 0..2000));
                // It learns that it is a replica before it accepts commands.
                nodes.revive(primary);
                nodes.wait_ready();
                return things;
            }
            Fault::Pause => {
                self.replace(show, Kind::PrimaryPaused, primary, things, RedisCluster::pause);
                show.pause(millis(rng, 0..2000));
                show.fault(Kind::OldPrimary, Scope::Things(things), || {
                    nodes.resume(primary);
                    nodes.wait_ready();
                });
                return things;
            }
            Fault::Failover => show.fault(Kind::ManualFailover, Scope::Things(things), || {
                nodes.failover(nodes.replica_of(primary));
                nodes.wait_ready();
            }),
            Fault::Move => self.relocate(show, rng.usize(..THINGS.len()), rng),
            Fault::Add => self.add(show, rng),
            Fault::Freeze => show.fault(Kind::Freeze, Scope::Things(of_any), || {
                nodes.pause(any);
                show.pause(millis(rng, SHORT));
                nodes.resume(any);
            }),
            Fault::ResetReplica => {
                let how = if rng.bool() { Reset::Soft } else { Reset::Hard };
                show.fault(Kind::ReplicaReset, Scope::Nobody, || {
                    nodes.reset_replica(nodes.replica_of(primary), how);
                });
            }
            Fault::PauseReplica => {
                let replica = nodes.replica_of(primary);
                show.fault(Kind::ReplicaPaused, Scope::Nobody, || {
                    nodes.pause(replica);
                    show.pause(millis(rng, 100..4000));
                    nodes.resume(replica);
                    nodes.wait_ready();
                });
            }
            Fault::ClientKill => show.fault(Kind::ClientKill, Scope::Things(of_any), || {
                client_kill(&nodes.node(any), rng);
            }),
            Fault::ClientPause => show.fault(Kind::ClientPause, Scope::Things(of_any), || {
                client_pause(&nodes.node(any), millis(rng, 50..2500));
            }),
            Fault::ScriptFlush => show.fault(Kind::ScriptFlush, Scope::Nobody, || {
                for primary in self.primaries() {
                    redis_command::<String>(&mut nodes.connection(primary), &["SCRIPT", "FLUSH"]);
                }
            }),
        }
        Things::default()
    }

    /// Stops a primary until its replica has taken its place.
    fn replace(
        &self,
        show: &Show,
        kind: Kind,
        primary: usize,
        things: Things,
        stop: fn(&RedisCluster, usize),
    ) {
        let replace = || {
            show.fault(kind, Scope::Things(things), || {
                stop(&self.nodes, primary);
                self.nodes.wait_failover(primary, TIME_LIMIT)
            })
        };
        if self.needs_all_slots {
            show.fault(Kind::ClusterDown, Scope::Everybody, replace);
        } else {
            replace();
        }
        forget_fences(show, things);
    }

    /// Moves the slot of a thing to another primary.
    fn relocate(&self, show: &Show, thing: usize, rng: &mut Rng) {
        let from = lock(&self.homes)[thing];
        let others = self.primaries().into_iter().filter(|primary| *primary != from);
        if let Some(to) = rng.choice(others.collect::<Vec<_>>()) {
            self.move_to(show, thing, to, rng);
        }
    }

    fn move_to(&self, show: &Show, thing: usize, to: usize, rng: &mut Rng) {
        let (slot, from) = (slot_of(THINGS[thing].name), lock(&self.homes)[thing]);
        let alike = (0..THINGS.len()).filter(|other| slot_of(THINGS[*other].name) == slot);
        show.fault(Kind::SlotMoved, Scope::Things(alike.collect()), || {
            let moving = self.nodes.begin_move(slot, from, to);
            // A few keys at a time: in between, a script finds some of its keys on one node and some on the other.
            let mut batches = 0..5;
            while moving.move_keys(2) > 0 && batches.next().is_some() {
                show.pause(millis(rng, 0..80));
            }
            moving.end();
        });
    }

    fn add(&self, show: &Show, rng: &mut Rng) {
        let thing = rng.usize(..THINGS.len());
        if self.nodes.nodes().len() >= 2 * PRIMARIES + ADDED {
            return self.relocate(show, thing, rng);
        }
        let new = show.fault(Kind::NodeAdded, Scope::Nobody, || self.nodes.add_node());
        self.move_to(show, thing, new, rng);
    }
}
