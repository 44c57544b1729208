//! Faults and failovers.

use std::time::{Duration, Instant};

use super::{RedisCluster, TIME_LIMIT, View, until, view};

/// A replica gives up a manual failover after five seconds, for instance if the primaries voted
/// for another failover of the same primary a moment ago.
const TRY_AGAIN: Duration = Duration::from_secs(6);

impl RedisCluster {
    /// Kills a node with SIGKILL. It stays dead until [`revive`](Self::revive).
    pub fn kill(&self, index: usize) {
        self.note_slot(index);
        self.node(index).kill();
    }

    /// Starts a killed node on its port, with its node configuration file and without data. Returns
    /// when it answers; [`wait_ready`](Self::wait_ready) waits until it has its place again.
    pub fn revive(&self, index: usize) {
        self.node(index).crash();
    }

    /// Stops a node with SIGSTOP: connections stay open, nothing is answered.
    pub fn pause(&self, index: usize) {
        self.note_slot(index);
        self.node(index).pause();
    }

    /// Continues a paused node. It may believe for a moment that it still has its old role;
    /// [`wait_ready`](Self::wait_ready) waits until it knows better.
    pub fn resume(&self, index: usize) {
        self.node(index).resume();
    }

    /// Waits until another node serves the slots that a killed or paused primary served, every
    /// running node knows it, and the cluster accepts commands. Returns the new primary.
    #[must_use]
    pub fn wait_failover(&self, dead: usize, within: Duration) -> usize {
        let slot = self.at(dead).slot;
        let slot = slot.unwrap_or_else(|| panic!("node {dead} served no slot when it was stopped"));
        until(&format!("the failover of node {dead}"), within, || {
            let mut owners = Vec::new();
            for (index, node) in self.running() {
                view::state_ok(&node.server)?;
                let view = View::of(&node.server)?;
                let owner = view.owner(slot).and_then(|id| self.index_of(id));
                match owner.filter(|&owner| owner != dead) {
                    Some(owner) => owners.push(owner),
                    None => return Err(format!("node {index} knows\n{view:?}")),
                }
            }
            owners.dedup();
            match owners.as_slice() {
                [owner] => Ok(*owner),
                _ => Err(format!("the nodes disagree about slot {slot}: {owners:?}")),
            }
        })
    }

    /// Makes a replica the primary, with the agreement of its primary: no write is lost.
    pub fn failover(&self, replica: usize) {
        let server = self.node(replica);
        until("a replica that is linked", TIME_LIMIT, || view::linked(&server));
        self.fail_over(replica, &["CLUSTER", "FAILOVER"]);
    }

    /// Makes a replica the primary without asking its primary, which may be dead or paused. Writes
    /// that were not replicated yet are lost.
    pub fn failover_force(&self, replica: usize) {
        self.fail_over(replica, &["CLUSTER", "FAILOVER", "FORCE"]);
    }

    fn fail_over(&self, replica: usize, command: &[&str]) {
        let node = self.at(replica);
        let view = View::of(&node.server).unwrap_or_else(|error| panic!("{error}"));
        let primary = view.get(&node.id).and_then(|myself| myself.primary.as_deref());
        let slot = primary.and_then(|id| view.get(id)?.slots.first());
        let slot = *slot.unwrap_or_else(|| panic!("node {replica} is no replica")).start();
        let mut sent: Option<Instant> = None;
        until(&format!("node {replica} as primary"), TIME_LIMIT, || {
            let view = View::of(&node.server)?;
            if view.owner(slot) == Some(&node.id) {
                return Ok(());
            }
            if sent.is_none_or(|sent| sent.elapsed() > TRY_AGAIN) {
                self.must::<()>(replica, command);
                sent = Some(Instant::now());
            }
            Err(format!("it knows\n{view:?}"))
        });
        self.wait_owner(slot, replica);
    }

    /// Remembers a slot of a primary that is about to be stopped.
    fn note_slot(&self, index: usize) {
        let node = self.at(index);
        if !node.server.is_running() {
            return;
        }
        let view = View::of(&node.server).unwrap_or_else(|error| panic!("{error}"));
        let slot = view.get(&node.id).and_then(|myself| Some(*myself.slots.first()?.start()));
        self.write_nodes()[index].slot = slot;
    }
}
