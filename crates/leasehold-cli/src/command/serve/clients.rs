//! The clients of a snapshot, the leases that each of them holds, and the semaphores that each of them waits for.

use std::collections::{BTreeMap, BTreeSet};

use leasehold::{AcquisitionId, SemaphoreMember, SemaphoreStats};
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::monitor::{Kind, Snapshot};

/// A client, as far as it is known.
#[derive(Debug, Default, Serialize)]
pub(super) struct ClientRow {
    /// None for locks, whose records do not have it, and for other programs.
    #[serde(rename = "client")]
    pub(super) id: Option<String>,
    pub(super) host: Option<String>,
    pub(super) pid: Option<u32>,
    /// The name of its program.
    pub(super) program: Option<String>,
    pub(super) labels: BTreeSet<String>,
    /// What it holds, and how many units.
    #[serde(serialize_with = "holds")]
    pub(super) holds: BTreeMap<(Kind, String), u32>,
    /// The semaphores that it waits for, and how many acquires wait.
    #[serde(serialize_with = "waits")]
    pub(super) waits: BTreeMap<String, usize>,
}

/// Returns all clients that the store knows, and other programs that hold a lease or wait for one, by host and process.
/// Holders come first, then waiters. `queues` are the semaphores whose waiters are known.
pub(super) fn clients(snapshot: &Snapshot, queues: &[SemaphoreStats]) -> Vec<ClientRow> {
    let mut rows: BTreeMap<Key, ClientRow> = BTreeMap::new();
    for one in &snapshot.clients {
        let key = Key::new((one.host.as_deref(), one.pid, &one.id));
        let row = rows.entry(key).or_default();
        row.id = Some(one.id.clone());
        row.program.clone_from(&one.program);
        row.take(one.host.as_deref(), one.pid, None);
    }
    for one in &snapshot.semaphores {
        for holder in &one.holders {
            row_of(&mut rows, holder).hold(Kind::Semaphore, &one.name, holder.weight);
        }
    }
    for one in queues {
        for waiter in &one.waiters {
            *row_of(&mut rows, waiter).waits.entry(one.name.clone()).or_default() += 1;
        }
    }
    for lock in &snapshot.locks {
        let info = &lock;
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
            let row = rows.entry(Key::new((None, None, &member.id))).or_default();
            row.id = Some(member.id.clone());
            row.hold(Kind::Pool, &pool.name, 1);
        }
    }
    let mut rows: Vec<_> = rows.into_values().collect();
    rows.sort_by_key(|row| (row.holds.is_empty(), row.waits.is_empty()));
    rows
}

/// Returns the row of the client of a holder or waiter.
fn row_of<'a>(
    rows: &'a mut BTreeMap<Key, ClientRow>,
    member: &SemaphoreMember,
) -> &'a mut ClientRow {
    let id = client_id(member);
    let key = Key::new((member.host.as_deref(), member.pid, id.unwrap_or(&member.id)));
    let row = rows.entry(key).or_default();
    row.id = id.map(str::to_owned);
    row.take(member.host.as_deref(), member.pid, member.label.as_deref());
    row
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
fn client_id(member: &SemaphoreMember) -> Option<&str> {
    member.id.parse::<AcquisitionId>().ok()?;
    member.id.rsplit_once('-').map(|(client, _)| client)
}

fn holds<S: Serializer>(
    holds: &BTreeMap<(Kind, String), u32>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(holds.iter().map(
        |((kind, name), units)| json!({ "kind": kind.as_str(), "name": name, "units": units }),
    ))
}

fn waits<S: Serializer>(waits: &BTreeMap<String, usize>, serializer: S) -> Result<S::Ok, S::Error> {
    let one = |(name, waiting)| json!({ "name": name, "waiting": waiting });
    serializer.collect_seq(waits.iter().map(one))
}
