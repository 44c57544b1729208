//! Looks into the store several times a second: are there more holders than permits? And does it answer as promptly as it
//! must, if anybody is to be blamed for being late?

use std::time::Duration;

use leasehold::Client;
use redis::Connection;
use tokio::runtime::Runtime;

use super::stage::Stage;
use super::{Crowded, Phase, Show, lock};
use crate::clock::{self, MILLISECOND, Micros};
use crate::fault::{Fault, Kind, Scope};
use crate::plan::{self, THINGS, Thing};

const EVERY: Duration = Duration::from_millis(60);
/// An answer that took longer than this says that the machine is slow, unless a fault says why.
const SLOW: Micros = 300 * MILLISECOND;

pub(super) fn lane(show: &Show, stage: &Stage) {
    let mut looker = Looker::default();
    let mut last = clock::now();
    while *lock(&show.phase) < Phase::Finish {
        std::thread::sleep(EVERY);
        // More than once: what cannot be reached now may be later.
        for ((thing, known), held) in semaphores().zip(looker.look(stage).unwrap_or_default()) {
            if held > u64::from(known.capacity) {
                lock(&show.log).crowded.push(Crowded { at: clock::now(), thing, held });
            }
        }
        let now = clock::now();
        if now - last > SLOW {
            let (kind, scope) = (Kind::Slow, Scope::Everybody);
            lock(&show.log).faults.push(Fault { kind, scope, begin: last, end: now });
        }
        last = now;
    }
}

fn semaphores() -> impl Iterator<Item = (usize, &'static Thing)> {
    THINGS.iter().enumerate().filter(|(_, thing)| thing.kind == plan::Kind::Semaphore)
}

/// What it looks through, once it has been opened.
#[derive(Default)]
struct Looker {
    redis: Option<Connection>,
    local: Option<(Runtime, Client)>,
}

impl Looker {
    /// How many hold each semaphore, as the store has it. A permit is granted only in a step that first removes whoever
    /// has expired: so there are never more holders than permits, expired ones included.
    fn look(&mut self, stage: &Stage) -> Option<Vec<u64>> {
        if stage.is_redis() { self.ask_redis(stage) } else { self.ask_local(stage) }
    }

    fn ask_redis(&mut self, stage: &Stage) -> Option<Vec<u64>> {
        let mut connection = match self.redis.take() {
            Some(connection) => connection,
            None => connect(&stage.direct_url())?,
        };
        let mut ask = redis::pipe();
        for (_, thing) in semaphores() {
            ask.cmd("ZCARD").arg(format!("adv-sem:semaphore_main:{}", thing.name));
        }
        let counts = ask.query(&mut connection).ok()?;
        // One that failed is not used again.
        self.redis = Some(connection);
        Some(counts)
    }

    fn ask_local(&mut self, stage: &Stage) -> Option<Vec<u64>> {
        if self.local.is_none() {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
            let client = runtime.block_on(Client::open(&stage.direct_url())).ok()?;
            self.local = Some((runtime, client));
        }
        let (runtime, client) = self.local.as_ref()?;
        let ask = client.stats().names(semaphores().map(|(_, thing)| thing.name)).unused();
        let stats = runtime.block_on(ask.fetch()).ok()?;
        let held = |(_, thing): (usize, &Thing)| {
            stats.iter().find(|one| one.name() == thing.name).map_or(0, |one| one.held().into())
        };
        Some(semaphores().map(held).collect())
    }
}

fn connect(url: &str) -> Option<Connection> {
    let client = redis::Client::open(url).ok()?;
    let connection = client.get_connection_with_timeout(Duration::from_secs(1)).ok()?;
    connection.set_read_timeout(Some(Duration::from_secs(3))).ok()?;
    Some(connection)
}
