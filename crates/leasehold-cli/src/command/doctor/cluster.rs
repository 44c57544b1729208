//! Checks the nodes of a cluster and the slots that they serve.

use std::collections::BTreeMap;

use leasehold::url::ServerSettings;
use serde_json::{Value, json};

use super::Report;
use super::node::{self, Node, address, joined, query_all, replicas};
use super::redis::{Info, ServerRole};
use crate::store::Store;

const SLOTS: u16 = 16384;
const QUESTIONS: &[&[&str]] = &[&["CLUSTER", "NODES"], &["CLUSTER", "INFO"]];

pub(super) async fn examine(store: &Store, seeds: &[ServerSettings], report: &mut Report) {
    let nodes = query_nodes(store, seeds).await;
    let views: Vec<_> = nodes.iter().filter_map(View::of).collect();
    // A node that is new or cut off from the others knows less.
    let rank = |view: &&View| (view.is_ok, view.serves(), view.members.len());
    let Some(view) = views.iter().max_by_key(rank).map(|best| best.with_replicas(&views)) else {
        for node in &nodes {
            let address = &node.address;
            match &node.facts {
                Err(why) => {
                    let says = format!("{address} does not answer: {why}");
                    report.bad("node", says, "start it, or correct --store");
                }
                Ok(_) => report.warn(
                    "node",
                    format!("{address} does not list the nodes of the cluster"),
                    "allow the user +cluster|nodes and +cluster|info, and run this again",
                ),
            }
        }
        return;
    };
    report_state(&views, &view, report);
    let find = |member: &Member| nodes.iter().find(|node| node.address == member.address);
    let members = view.in_order();
    let mut facts = Vec::new();
    for member in &members {
        let Some(node) = find(member) else { continue };
        let primary = member.primary.as_ref().and_then(|id| find(view.by_id(id)?));
        member.report(node, primary, view.replicas_of(member), report);
        facts.push(member.as_json(node.as_json(primary)));
    }
    let serving = members.iter().filter(|member| !member.slots.is_empty());
    let primaries: Vec<_> = serving.filter_map(|member| find(member)).collect();
    node::check(store, &primaries, ServerRole::InCluster, report);
    let state = if view.is_ok { "ok" } else { "fail" };
    let unserved: Vec<_> = view.unserved().into_iter().map(range).collect();
    let facts = json!({ "state": state, "unserved_slots": unserved, "nodes": facts });
    report.servers = Some(("cluster", facts));
}

/// Queries the nodes in the URL, and every node that one of them knows.
async fn query_nodes(store: &Store, seeds: &[ServerSettings]) -> Vec<Node> {
    let mut nodes = query_all(store, seeds, QUESTIONS).await;
    let mut others = BTreeMap::new();
    for (seed, node) in seeds.iter().zip(&nodes) {
        for member in View::of(node).into_iter().flat_map(|view| view.members) {
            let info = seed.at(&member.host, member.port);
            if nodes.iter().all(|node| node.address != address(&info)) {
                others.insert(address(&info), info);
            }
        }
    }
    let others: Vec<_> = others.into_values().collect();
    nodes.extend(query_all(store, &others, QUESTIONS).await);
    nodes
}

fn report_state(views: &[View], view: &View, report: &mut Report) {
    let (primaries, copies) = view.counts();
    let plural = if primaries == 1 { "primary" } else { "primaries" };
    let counts = format!("{primaries} {plural}, {}", replicas(copies));
    let check = "see `redis-cli --cluster check`";
    let failed = views.iter().filter(|view| !view.is_ok).map(|view| view.seen_by.as_str());
    let failed: Vec<_> = failed.collect();
    let unserved = view.unserved();
    if failed.is_empty() {
        let all = if unserved.is_empty() { ", all slots are served" } else { "" };
        report.ok("cluster", format!("state ok, {counts}{all}"));
    } else {
        let says = format!("state fail according to {}; {counts}", failed.join(", "));
        report.bad("cluster", says, &format!("start the nodes that are down; {check}"));
    }
    if !unserved.is_empty() {
        let count: u32 = unserved.iter().map(|(first, last)| u32::from(last - first) + 1).sum();
        let ranges: Vec<_> = unserved.into_iter().map(range).collect();
        let says = format!("no node serves {count} of {SLOTS}: {}", ranges.join(", "));
        report.bad("slots", says, &format!("start their nodes, or a replica of each; {check}"));
    }
    for other in views.iter().filter(|other| other.owners() != view.owners()) {
        let says = format!("{} and {} disagree about slots", view.seen_by, other.seen_by);
        let advice = "wait until a failover or a resharding has ended";
        report.bad("slots", says, &format!("{advice}; if it stays, {check}"));
    }
}

/// The view of the cluster that one node has.
#[derive(Clone, Debug)]
struct View {
    seen_by: String,
    is_ok: bool,
    members: Vec<Member>,
}

impl View {
    fn of(node: &Node) -> Option<Self> {
        let (nodes, info): (String, String) = (node.answer(0)?, node.answer(1)?);
        let (host, _) = node.server.host_and_port();
        Some(Self {
            seen_by: node.address.clone(),
            is_ok: Info::parse(&info).get("cluster_state") == Some("ok"),
            members: nodes.lines().filter_map(|line| Member::parse(line, &host)).collect(),
        })
    }

    /// Returns the same view, with every node that reports itself as a replica marked as one. In a new cluster, the other
    /// nodes learn this a little later.
    fn with_replicas(&self, views: &[Self]) -> Self {
        let selves =
            views.iter().flat_map(|view| &view.members).filter(|member| member.has("myself"));
        let replicas: Vec<_> = selves.filter(|member| member.primary.is_some()).collect();
        let mut view = self.clone();
        for member in &mut view.members {
            if let Some(replica) = replicas.iter().find(|replica| replica.id == member.id) {
                (member.primary, member.flags) = (replica.primary.clone(), replica.flags.clone());
            }
        }
        view
    }

    /// Whether the node with this view serves slots itself.
    fn serves(&self) -> bool {
        self.members.iter().any(|member| member.has("myself") && !member.slots.is_empty())
    }

    fn by_id(&self, id: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }

    fn replicas_of(&self, primary: &Member) -> usize {
        self.members.iter().filter(|member| member.primary.as_ref() == Some(&primary.id)).count()
    }

    /// Returns the numbers of primaries that serve slots and of replicas.
    fn counts(&self) -> (usize, usize) {
        let primaries = self.members.iter().filter(|member| !member.slots.is_empty()).count();
        (primaries, self.members.iter().filter(|member| member.primary.is_some()).count())
    }

    /// Returns the primaries in the order of their slots, each before its replicas, and then the nodes without slots.
    fn in_order(&self) -> Vec<&Member> {
        let place = |member: &Member| {
            let primary = member.primary.as_ref().and_then(|id| self.by_id(id)).unwrap_or(member);
            let first = primary.slots.first().map_or(SLOTS, |(first, _)| *first);
            (first, primary.address.clone(), member.primary.is_some(), member.address.clone())
        };
        let mut members: Vec<_> = self.members.iter().collect();
        members.sort_by_key(|member| place(member));
        members
    }

    /// Returns the owner of each range of slots.
    fn owners(&self) -> BTreeMap<(u16, u16), &str> {
        let owned = |member: &'_ Member| member.slots.clone();
        let by_member = self.members.iter().map(|member| (owned(member), member.id.as_str()));
        by_member.flat_map(|(slots, id)| slots.into_iter().map(move |slots| (slots, id))).collect()
    }

    /// Returns the slots that no node owns, or only a node that the others consider failed.
    fn unserved(&self) -> Vec<(u16, u16)> {
        let live = self.members.iter().filter(|member| !member.has("fail"));
        let mut served: Vec<_> = live.flat_map(|member| member.slots.iter().copied()).collect();
        served.sort_unstable();
        let (mut unserved, mut next) = (Vec::new(), 0);
        for (first, last) in served.into_iter().chain([(SLOTS, SLOTS)]) {
            if first > next {
                unserved.push((next, first - 1));
            }
            next = next.max(last.saturating_add(1));
        }
        unserved
    }
}

/// A line of `CLUSTER NODES`.
#[derive(Clone, Debug)]
struct Member {
    id: String,
    address: String,
    host: String,
    port: u16,
    flags: Vec<String>,
    /// The id of the node whose replica this is.
    primary: Option<String>,
    /// The first and the last of each range.
    slots: Vec<(u16, u16)>,
}

impl Member {
    /// Parses `id host:port@bus[,name] flags primary ping pong epoch link slots…`. A node that does not know its own
    /// address leaves it out; `queried_host` is the host at which it was queried.
    fn parse(line: &str, queried_host: &str) -> Option<Self> {
        let fields: Vec<_> = line.split(' ').collect();
        let [id, place, flags, primary, _, _, _, _, slots @ ..] = &fields[..] else { return None };
        let (host, port) = place.split(['@', ',']).next()?.rsplit_once(':')?;
        let (host, port) = (if host.is_empty() { queried_host } else { host }, port.parse().ok()?);
        // A slot that is being moved is in brackets, and also listed as served.
        let range = |slots: &&str| {
            let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        Some(Self {
            id: (*id).to_owned(),
            address: joined(host, port),
            host: host.to_owned(),
            port,
            flags: flags.split(',').map(str::to_owned).collect(),
            primary: (*primary != "-").then(|| (*primary).to_owned()),
            slots: slots.iter().filter_map(range).collect(),
        })
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|member_flag| member_flag == flag)
    }

    fn report(&self, node: &Node, primary: Option<&Node>, copies: usize, report: &mut Report) {
        if self.primary.is_some() {
            node.report_replica(primary, report);
        } else if !self.slots.is_empty() {
            let slots: Vec<_> = self.slots.iter().copied().map(range).collect();
            let slots = format!("slots {}", slots.join(", "));
            let failed = if self.has("fail") { ", failed according to the others" } else { "" };
            let says = format!("primary, {slots}, {}{failed}", replicas(copies));
            node.report_primary(&says, report);
        } else if let Err(why) = &node.facts {
            let says = format!("{} primary without slots, does not answer: {why}", self.address);
            report.warn("node", says, "start it, or remove it: redis-cli --cluster del-node");
        } else {
            report.ok("node", format!("{} primary without slots", self.address));
        }
    }

    fn as_json(&self, mut node: Value) -> Value {
        node["role"] = if self.primary.is_some() { "replica" } else { "primary" }.into();
        node["slots"] = self.slots.iter().copied().map(range).collect();
        let flags = self.flags.iter().filter(|flag| !matches!(&***flag, "myself" | "noflags"));
        node["flags"] = flags.cloned().collect();
        node
    }
}

fn range((first, last): (u16, u16)) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: &str = "\
aa 10.0.0.1:7000@17000,one master - 0 0 3 connected 0-99 200 [300->-bb]
bb :7001@17001 myself,master - 0 0 2 connected 101-199
cc 10.0.0.3:7002@17002 slave aa 0 0 3 connected
dd fe80::1:7003@17003 master,fail - 0 0 1 disconnected 201-16383
";

    fn view() -> View {
        let members = NODES.lines().filter_map(|line| Member::parse(line, "asked"));
        View { seen_by: "asked:7001".to_owned(), is_ok: false, members: members.collect() }
    }

    #[test]
    fn nodes_are_listed_by_their_slots() {
        let view = view();
        let addresses: Vec<_> =
            view.in_order().into_iter().map(|member| member.address.as_str()).collect();
        assert_eq!(addresses, ["10.0.0.1:7000", "10.0.0.3:7002", "asked:7001", "[fe80::1]:7003"]);
        assert_eq!((view.counts(), view.serves()), ((3, 1), true));
        assert_eq!(view.replicas_of(view.by_id("aa").unwrap()), 1);
    }

    #[test]
    fn a_new_replica_is_marked_by_its_own_view() {
        let lines = NODES
            .replace("myself,", "")
            .replace("dd fe80::1:7003@17003 master,fail -", "dd :1@2 myself,slave bb");
        let members = lines.lines().filter_map(|line| Member::parse(line, "other")).collect();
        let other = View { seen_by: "other:1".to_owned(), is_ok: true, members };
        let view = view().with_replicas(&[other]);
        assert_eq!(view.by_id("dd").unwrap().primary.as_deref(), Some("bb"));
        assert_eq!(view.by_id("bb").unwrap().primary, None);
        assert_eq!(view.by_id("dd").unwrap().address, "[fe80::1]:7003");
    }

    #[test]
    fn slots_of_a_failed_node_are_not_served() {
        let unserved: Vec<_> = view().unserved().into_iter().map(range).collect();
        assert_eq!(unserved, ["100", "201-16383"]);
    }
}
