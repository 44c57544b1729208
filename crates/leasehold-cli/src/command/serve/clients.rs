//! The clients of a snapshot, and the leases that each of them holds.

use std::collections::{BTreeMap, BTreeSet};

use leasehold::{AcquisitionId, Member};
use serde_json::{Value, json};

use crate::monitor::{Kind, Snapshot};

/// A client, as far as it is known.
#[derive(Debug, Default)]
pub(super) struct ClientRow {
    /// None for locks, whose records do not have it, and for other programs.
    pub(super) id: Option<String>,
    pub(super) host: Option<String>,
    pub(super) pid: Option<u32>,
    /// The name of its program.
    pub(super) program: Option<String>,
    pub(super) labels: BTreeSet<String>,
    /// What it holds, and how many units.
    pub(super) holds: BTreeMap<(Kind, String), u32>,
}

/// Returns all clients that the store knows, and other programs that hold a lease, by host and process. Holders come first.
pub(super) fn clients(snapshot: &Snapshot) -> Vec<ClientRow> {
    let mut rows: BTreeMap<Key, ClientRow> = BTreeMap::new();
    for one in &snapshot.clients {
        let key = Key::new((one.host.as_deref(), one.pid, &one.id));
        let row = rows.entry(key).or_default();
        row.id = Some(one.id.clone());
        row.program.clone_from(&one.program);
        row.take(one.host.as_deref(), one.pid, None);
    }
    for one in &snapshot.semaphores {
        for holder in one.holders() {
            let id = client_id(holder);
            let key = (holder.host(), holder.pid(), id.unwrap_or(holder.id()));
            let row = rows.entry(Key::new(key)).or_default();
            row.id = id.map(str::to_owned);
            row.take(holder.host(), holder.pid(), holder.label());
            row.hold(Kind::Semaphore, one.name(), holder.weight());
        }
    }
    for lock in &snapshot.locks {
        let info = &lock.info;
        let place = (info.host.as_deref(), info.pid);
        // A record of a lock does not name its client, but its process.
        let client = rows.keys().find(|key| place.0.is_some() && key.place() == place);
        // Without a host, the holders of locks can be distinguished only by their locks.
        let id = client.map_or(&*lock.key, |key| &*key.id);
        let key = Key::new((place.0, place.1, id));
        let row = rows.entry(key).or_default();
        row.take(place.0, place.1, info.label.as_deref());
        row.hold(Kind::Lock, &lock.key, 1);
    }
    for pool in &snapshot.pools {
        for member in &pool.members {
            let row = rows.entry(Key::new((None, None, &member.instance_id))).or_default();
            row.id = Some(member.instance_id.clone());
            row.hold(Kind::Pool, &pool.name, 1);
        }
    }
    let mut rows: Vec<_> = rows.into_values().collect();
    rows.sort_by_key(|row| row.holds.is_empty());
    rows
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    host: Option<String>,
    pid: Option<u32>,
    id: String,
}

impl Key {
    fn new((host, pid, id): (Option<&str>, Option<u32>, &str)) -> Self {
        Self { host: host.map(str::to_owned), pid, id: id.to_owned() }
    }

    fn place(&self) -> (Option<&str>, Option<u32>) {
        (self.host.as_deref(), self.pid)
    }
}

impl ClientRow {
    fn take(&mut self, host: Option<&str>, pid: Option<u32>, label: Option<&str>) {
        self.host = host.map(str::to_owned);
        self.pid = pid;
        self.labels.extend(label.map(str::to_owned));
    }

    fn hold(&mut self, kind: Kind, name: &str, units: u32) {
        let held = self.holds.entry((kind, name.to_owned())).or_default();
        *held = held.saturating_add(units);
    }
}

/// An acquisition id is the id of its client, `-`, and a number.
fn client_id(holder: &Member) -> Option<&str> {
    holder.id().parse::<AcquisitionId>().ok()?;
    holder.id().rsplit_once('-').map(|(client, _)| client)
}

pub(super) fn client_json(row: &ClientRow) -> Value {
    let holds = row.holds.iter().map(
        |((kind, name), units)| json!({ "kind": kind.as_str(), "name": name, "units": units }),
    );
    json!({
        "client": row.id,
        "host": row.host,
        "pid": row.pid,
        "program": row.program,
        "labels": row.labels,
        "holds": holds.collect::<Value>(),
    })
}
