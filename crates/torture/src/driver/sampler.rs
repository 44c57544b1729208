//! Inspects the store several times a second. Does it have more holders than permits? And does it answer fast enough
//! for delays to be judged?

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::Client;
use redis::Connection;
use tokio::runtime::Runtime;

use super::cluster::Cluster;
use super::connections::{self, PROMPTLY};
use super::stage::Stage;
use super::{Crowded, Phase, Show, lock};
use crate::clock::{self, MILLISECOND, Micros};
use crate::fault::{Fault, Kind, Scope};
use crate::plan::{self, THINGS};

const EVERY: Duration = Duration::from_millis(60);
/// How long to wait for an answer where there is one server.
const PATIENTLY: Duration = Duration::from_secs(3);
/// An answer that took longer than this means that the machine is slow, unless a fault explains it.
const SLOW: Micros = 300 * MILLISECOND;

pub(super) fn lane(show: &Show, stage: &Stage) {
    let mut reader = Reader::default();
    let mut last = clock::now();
    while *lock(&show.phase) < Phase::Finish {
        std::thread::sleep(EVERY);
        // Repeatedly, because a server that cannot be reached now may be reachable later.
        for (thing, held) in reader.look(show, stage) {
            if held > u64::from(THINGS[thing].capacity) {
                lock(&show.log).crowded.push(Crowded { at: clock::now(), thing, held });
            }
        }
        let now = clock::now();
        if now - last - std::mem::take(&mut reader.waited) > SLOW {
            is_slow(show, Scope::Everybody, last, now);
        }
        last = now;
    }
}

fn is_slow(show: &Show, scope: Scope, begin: Micros, end: Micros) {
    lock(&show.log).faults.push(Fault { kind: Kind::Slow, scope, begin, end });
}

fn semaphores() -> impl Iterator<Item = usize> {
    (0..THINGS.len()).filter(|at| THINGS[*at].kind == plan::Kind::Semaphore)
}

/// The open connections to the store.
#[derive(Default)]
struct Reader {
    /// By URL.
    servers: BTreeMap<String, Connection>,
    local: Option<(Runtime, Client)>,
    /// How long it has waited for single nodes of a cluster.
    waited: Micros,
}

impl Reader {
    /// Returns the number of holders of each semaphore in the store, where the store can be reached. A permit is
    /// granted only in a step that first removes expired holders. So there are never more holders than permits, even
    /// counting expired ones.
    fn look(&mut self, show: &Show, stage: &Stage) -> Vec<(usize, u64)> {
        let one = |url: String, reader: &mut Self| {
            let all: Vec<_> = semaphores().collect();
            reader.ask_server(stage, &url, &all, PATIENTLY)
        };
        let found = match stage {
            Stage::Redis(redis) => one(redis.primary().url(), self),
            Stage::Sentinel(sentinel) => one(sentinel.primary().url(), self),
            Stage::Cluster(cluster) => Some(self.ask_cluster(show, stage, cluster)),
            Stage::Local(_) => self.ask_local(stage),
        };
        found.unwrap_or_default()
    }

    /// A node that does not answer counts as slow, for the names that it serves. The other nodes are asked
    /// nevertheless.
    fn ask_cluster(&mut self, show: &Show, stage: &Stage, cluster: &Cluster) -> Vec<(usize, u64)> {
        let mut found = Vec::new();
        for (node, things) in cluster.homes() {
            let node = cluster.nodes.node(node);
            let own: Vec<_> = semaphores().filter(|thing| things.contains(*thing)).collect();
            if own.is_empty() || !node.is_running() {
                continue;
            }
            let begin = clock::now();
            found.extend(self.ask_server(stage, &node.url(), &own, PROMPTLY).unwrap_or_default());
            let now = clock::now();
            if now - begin >= clock::micros(PROMPTLY) {
                is_slow(show, Scope::Things(things), begin, now);
                self.waited += now - begin;
            }
        }
        found
    }

    fn ask_server(
        &mut self,
        stage: &Stage,
        url: &str,
        things: &[usize],
        within: Duration,
    ) -> Option<Vec<(usize, u64)>> {
        let mut connection = match self.servers.remove(url) {
            Some(connection) => connection,
            None => connections::open(url, within)?,
        };
        let mut ask = redis::pipe();
        for thing in things {
            let name = stage.spell(THINGS[*thing].name);
            ask.cmd("ZCARD").arg(format!("adv-sem:semaphore_main:{name}"));
        }
        let counts: Vec<u64> = ask.query(&mut connection).ok()?;
        // A connection that failed is not used again.
        self.servers.insert(url.to_owned(), connection);
        Some(things.iter().copied().zip(counts).collect())
    }

    fn ask_local(&mut self, stage: &Stage) -> Option<Vec<(usize, u64)>> {
        if self.local.is_none() {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
            let client = runtime.block_on(Client::open(&stage.direct_url())).ok()?;
            self.local = Some((runtime, client));
        }
        let (runtime, client) = self.local.as_ref()?;
        let ask = client.stats().names(semaphores().map(|at| THINGS[at].name)).unused();
        let stats = runtime.block_on(ask.fetch()).ok()?;
        let held = |at: usize| {
            let one = stats.iter().find(|one| one.name() == THINGS[at].name);
            (at, one.map_or(0, |one| one.held().into()))
        };
        Some(semaphores().map(held).collect())
    }
}
