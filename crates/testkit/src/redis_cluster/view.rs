//! What one node knows about the cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use crate::redis_server::RedisServer;

/// The reply of `CLUSTER NODES`, by node id.
pub(super) struct View {
    members: BTreeMap<String, Member>,
    reply: String,
}

/// One line of `CLUSTER NODES`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// The id of the node whose replica this one is.
    pub(super) primary: Option<String>,
    pub(super) epoch: u64,
    pub(super) slots: Vec<RangeInclusive<u16>>,
    pub(super) connected: bool,
    /// The node is considered failed, or has not joined yet, or its address is unknown.
    pub(super) failed: bool,
}

impl Member {
    pub(super) fn serves(&self, slot: u16) -> bool {
        self.slots.iter().any(|range| range.contains(&slot))
    }
}

impl View {
    pub(super) fn of(server: &RedisServer) -> Result<Self, String> {
        let reply: String = server
            .call(&["CLUSTER", "NODES"])
            .map_err(|error| format!("CLUSTER NODES: {error}"))?;
        let members = reply.lines().map(|line| member(line).expect("a line of CLUSTER NODES"));
        Ok(Self { members: members.collect(), reply })
    }

    pub(super) fn get(&self, id: &str) -> Option<&Member> {
        self.members.get(id)
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// The id of the node that serves `slot`.
    pub(super) fn owner(&self, slot: u16) -> Option<&str> {
        let owner = self.members.iter().find(|(_, member)| member.serves(slot));
        owner.map(|(id, _)| id.as_str())
    }

    /// Whether both views give the same slots and roles to the nodes that `runs` selects.
    pub(super) fn agrees(&self, other: &Self, runs: impl Fn(&String) -> bool) -> bool {
        let roles = |view: &Self| -> Vec<_> {
            let members = view.members.iter().filter(|(id, _)| runs(id));
            members.map(|(_, member)| (member.primary.clone(), member.slots.clone())).collect()
        };
        roles(self) == roles(other)
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reply)
    }
}

/// `id address flags primary ping pong epoch link slots…`
fn member(text: &str) -> Option<(String, Member)> {
    let fields: Vec<&str> = text.split(' ').collect();
    let [id, _, flags, primary, _, _, epoch, link, slots @ ..] = fields.as_slice() else {
        return None;
    };
    let bad = ["fail", "fail?", "handshake", "noaddr"];
    // A slot that is being moved is in brackets and is listed as served as well.
    let slots = slots.iter().filter(|range| !range.is_empty() && !range.starts_with('['));
    let member = Member {
        primary: (*primary != "-").then(|| (*primary).to_owned()),
        epoch: epoch.parse().ok()?,
        slots: slots.map(|text| range(text)).collect::<Option<_>>()?,
        connected: *link == "connected",
        failed: flags.split(',').any(|flag| bad.contains(&flag)),
    };
    Some(((*id).to_owned(), member))
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// Whether the node accepts commands, or what `CLUSTER INFO` says instead.
pub(super) fn state_ok(server: &RedisServer) -> Result<(), String> {
    expect_line(server, &["CLUSTER", "INFO"], "cluster_state:ok")
}

/// Whether the replica is linked to its primary, or what `INFO replication` says instead.
pub(super) fn linked(server: &RedisServer) -> Result<(), String> {
    expect_line(server, &["INFO", "replication"], "master_link_status:up")
}

fn expect_line(server: &RedisServer, command: &[&str], line: &str) -> Result<(), String> {
    let reply: String = server.call(command).map_err(|error| format!("{command:?}: {error}"))?;
    if reply.lines().any(|other| other == line) {
        return Ok(());
    }
    Err(format!("port {}: no {line} in\n{reply}", server.port()))
}
