//! Inspects the store several times a second. Does it have more holders than permits? Which acquisitions does it list?
//! And does it answer fast enough for delays to be judged?

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use leasehold::{Client, Error};
use redis::{Connection, Pipeline, Value};
use tokio::runtime::Runtime;

use super::cluster::Cluster;
use super::connections::{self, PROMPTLY};
use super::stage::Stage;
use super::{Crowded, Listed, Log, Phase, Show, lock};
use crate::clock::{self, MILLISECOND, Micros};
use crate::fault::{Fault, Kind, Scope};
use crate::plan::{self, THINGS};

const EVERY: Duration = Duration::from_millis(60);
/// How long to wait for an answer where there is one server.
const PATIENTLY: Duration = Duration::from_secs(3);
/// An answer that took longer than this means that the machine is slow, unless a fault explains it.
const SLOW: Micros = 300 * MILLISECOND;
/// More locks and pools than there are.
const ALL: usize = 100;

pub(super) fn lane(show: &Show, stage: &Stage) {
    let (mut reader, mut listing) = (Reader::default(), Listing::default());
    let mut last = clock::now();
    while *lock(&show.phase) < Phase::Finish {
        std::thread::sleep(EVERY);
        // Repeatedly, because a server that cannot be reached now may be reachable later.
        let samples = reader.samples(show, stage);
        {
            let mut log = lock(&show.log);
            for Sample { thing, answered, holders, .. } in &samples {
                let held = holders.len() as u64;
                if held > u64::from(THINGS[*thing].capacity) {
                    log.crowded.push(Crowded { at: *answered, thing: *thing, held });
                }
            }
            listing.add(samples, &mut log);
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

/// The ids that the store lists for one thing, at some instant between the request and the answer.
///
/// A permit is granted only in a step that first removes expired holders. So a semaphore never has more holders than
/// permits, even counting expired ones.
struct Sample {
    thing: usize,
    requested: Micros,
    answered: Micros,
    /// Of a semaphore.
    holders: Vec<String>,
    /// The waiters of a semaphore, the members of a pool, or the label of the holder of a lock.
    others: Vec<String>,
}

/// The acquisitions that the last samples listed.
#[derive(Default)]
struct Listing {
    /// For each thing and id, the place of its entry in the log.
    current: HashMap<(usize, String), usize>,
}

impl Listing {
    /// Extends the entries of the ids that are listed again. An id that was not listed in between gets a new entry.
    fn add(&mut self, samples: Vec<Sample>, log: &mut Log) {
        let mut before = std::mem::take(&mut self.current);
        for Sample { thing, requested, answered, holders, others } in samples {
            for id in holders.into_iter().chain(others) {
                let key = (thing, id);
                let at = before.remove(&key).unwrap_or_else(|| {
                    let (from, to, id) = (answered, answered, key.1.clone());
                    log.listed.push(Listed { thing, id, from, to });
                    log.listed.len() - 1
                });
                let listed = &mut log.listed[at];
                listed.to = listed.to.max(requested);
                self.current.insert(key, at);
            }
        }
    }
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
    /// Returns what the store lists, where it can be reached.
    fn samples(&mut self, show: &Show, stage: &Stage) -> Vec<Sample> {
        let one = |url: String, reader: &mut Self| {
            let all: Vec<_> = (0..THINGS.len()).collect();
            reader.query_server(stage, &url, &all, PATIENTLY)
        };
        let found = match stage {
            Stage::Redis(redis) => one(redis.primary().url(), self),
            Stage::Sentinel(sentinel) => one(sentinel.primary().url(), self),
            Stage::Cluster(cluster) => Some(self.query_cluster(show, stage, cluster)),
            Stage::Local(_) => self.query_local(stage),
        };
        found.unwrap_or_default()
    }

    /// A node that does not answer counts as slow, for the names that it serves. The other nodes are asked
    /// nevertheless.
    fn query_cluster(&mut self, show: &Show, stage: &Stage, cluster: &Cluster) -> Vec<Sample> {
        let mut found = Vec::new();
        for (node, things) in cluster.homes() {
            let node = cluster.nodes.node(node);
            if !node.is_running() {
                continue;
            }
            let served: Vec<_> = things.iter().collect();
            let begin = clock::now();
            found.extend(
                self.query_server(stage, &node.url(), &served, PROMPTLY).unwrap_or_default(),
            );
            let now = clock::now();
            if now - begin >= clock::micros(PROMPTLY) {
                is_slow(show, Scope::Things(things), begin, now);
                self.waited += now - begin;
            }
        }
        found
    }

    fn query_server(
        &mut self,
        stage: &Stage,
        url: &str,
        things: &[usize],
        within: Duration,
    ) -> Option<Vec<Sample>> {
        let mut connection = match self.servers.remove(url) {
            Some(connection) => connection,
            None => connections::open(url, within)?,
        };
        let mut pipeline = redis::pipe();
        for thing in things {
            let name = stage.spell(THINGS[*thing].name);
            add_member_queries(&mut pipeline, THINGS[*thing].kind, &name);
        }
        let requested = clock::now();
        let answers: Vec<Value> = pipeline.query(&mut connection).ok()?;
        let answered = clock::now();
        // A connection that failed is not used again.
        self.servers.insert(url.to_owned(), connection);
        let mut answers = answers.into_iter();
        let sample = |thing: &usize| {
            let (holders, others) = read_members(THINGS[*thing].kind, &mut answers)?;
            Some(Sample { thing: *thing, requested, answered, holders, others })
        };
        things.iter().map(sample).collect()
    }

    fn query_local(&mut self, stage: &Stage) -> Option<Vec<Sample>> {
        if self.local.is_none() {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
            let client = runtime.block_on(Client::open(&stage.direct_url())).ok()?;
            self.local = Some((runtime, client));
        }
        let (runtime, client) = self.local.as_ref()?;
        runtime.block_on(list_local(client)).ok()
    }
}

/// Adds the commands that list the members of one thing.
fn add_member_queries(pipeline: &mut Pipeline, kind: plan::Kind, name: &str) {
    let mut list = |key: String| _ = pipeline.cmd("ZRANGE").arg(key).arg(0).arg(-1);
    match kind {
        plan::Kind::Semaphore => {
            list(format!("adv-sem:semaphore_main:{name}"));
            list(format!("adv-sem:semaphore_waiting:{name}"));
        }
        plan::Kind::Pool => list(format!("semaphores:{name}")),
        plan::Kind::Lock => _ = pipeline.cmd("GET").arg(format!("syncguard:{name}")),
    }
}

/// Reads the answers to these commands: the holders, and the other members.
fn read_members(
    kind: plan::Kind,
    answers: &mut impl Iterator<Item = Value>,
) -> Option<(Vec<String>, Vec<String>)> {
    let mut next = || answers.next();
    let ids = |answer: Value| redis::from_redis_value::<Vec<String>>(answer).ok();
    Some(match kind {
        plan::Kind::Semaphore => (ids(next()?)?, ids(next()?)?),
        plan::Kind::Pool => (Vec::new(), ids(next()?)?),
        plan::Kind::Lock => {
            let record: Option<String> = redis::from_redis_value(next()?).ok()?;
            (Vec::new(), record.as_deref().and_then(label).into_iter().collect())
        }
    })
}

/// Returns the label in the record of a lock. The other program has none.
fn label(record: &str) -> Option<String> {
    let (_, rest) = record.split_once("\"label\":\"")?;
    Some(rest.split_once('"')?.0.to_owned())
}

async fn list_local(client: &Client) -> Result<Vec<Sample>, Error> {
    let requested = clock::now();
    let semaphores = THINGS.iter().filter(|thing| thing.kind == plan::Kind::Semaphore);
    let stats = client.stats().names(semaphores.map(|thing| thing.name)).waiters().await?;
    let (pools, locks) = (client.pools().list(ALL).await?, client.locks().list(ALL).await?);
    let answered = clock::now();
    let sample = |(thing, spec): (usize, &plan::Thing)| {
        let named = stats.iter().filter(|one| one.name == spec.name);
        let holders = named.clone().flat_map(|one| &one.holders).map(|one| one.id.clone());
        let waiters = named.flat_map(|one| &one.waiters).map(|one| one.id.clone());
        let pools = pools.iter().filter(|one| one.name == spec.name);
        let members = pools.flat_map(|one| &one.members).map(|one| one.id.clone());
        let locks = locks.iter().filter(|one| one.key == spec.name);
        let labels = locks.filter_map(|one| one.label.clone());
        let others = waiters.chain(members).chain(labels).collect();
        Sample { thing, requested, answered, holders: holders.collect(), others }
    };
    Ok(THINGS.iter().enumerate().map(sample).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(requested: Micros, ids: &[&str]) -> Sample {
        let others = ids.iter().map(|id| (*id).to_owned()).collect();
        Sample { thing: 1, requested, answered: requested + 2, holders: Vec::new(), others }
    }

    #[test]
    fn an_id_is_listed_from_the_first_to_the_last_sample_in_a_row() {
        let (mut listing, mut log) = (Listing::default(), Log::default());
        listing.add(vec![sample(10, &["a", "b"])], &mut log);
        listing.add(vec![sample(20, &["a"])], &mut log);
        listing.add(vec![sample(30, &["a", "b"])], &mut log);
        // The store could not be reached.
        listing.add(vec![], &mut log);
        listing.add(vec![sample(50, &["a"])], &mut log);
        let listed: Vec<_> =
            log.listed.iter().map(|one| (one.id.as_str(), one.from, one.to)).collect();
        assert_eq!(listed, [("a", 12, 30), ("b", 12, 12), ("b", 32, 32), ("a", 52, 52)]);
    }

    #[test]
    fn the_label_of_a_lock_is_found_in_its_record() {
        let record = r#"{"lockId":"x","key":"brief","fence":"1","pid":7,"label":"7Vd3kQ0aZx1-42"}"#;
        assert_eq!(label(record).as_deref(), Some("7Vd3kQ0aZx1-42"));
        assert_eq!(label(r#"{"lockId":"x","key":"brief"}"#), None);
    }
}
