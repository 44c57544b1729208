//! Looks into the store, past the library, several times a second: are there more holders than permits? And does the
//! server answer as promptly as it must, if anybody is to be blamed for being late?

use std::time::Duration;

use redis::Connection;

use super::stage::Stage;
use super::{Crowded, Phase, Show, lock};
use crate::clock::{self, MILLISECOND, Micros};
use crate::fault::{Fault, Kind, Scope};
use crate::plan::{self, THINGS};

const EVERY: Duration = Duration::from_millis(60);
/// An answer that took longer than this says that the machine is slow, unless a fault says why.
const SLOW: Micros = 300 * MILLISECOND;

pub(super) fn lane(show: &Show, stage: &Stage) {
    let mut connection = None;
    let mut last = clock::now();
    while *lock(&show.phase) < Phase::Finish {
        std::thread::sleep(EVERY);
        if stage.is_redis() {
            if connection.is_none() {
                connection = connect(&stage.direct_url());
            }
            if let Some(mut live) = connection.take() {
                // A connection that failed is not used again.
                if look(show, &mut live) {
                    connection = Some(live);
                }
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

fn connect(url: &str) -> Option<Connection> {
    let client = redis::Client::open(url).ok()?;
    let connection = client.get_connection_with_timeout(Duration::from_secs(1)).ok()?;
    connection.set_read_timeout(Some(Duration::from_secs(3))).ok()?;
    Some(connection)
}

/// A permit is granted only in a script that first removes whoever has expired: so there are never more members than
/// permits, expired ones included.
fn look(show: &Show, connection: &mut Connection) -> bool {
    let semaphores =
        THINGS.iter().enumerate().filter(|(_, thing)| thing.kind == plan::Kind::Semaphore);
    let mut ask = redis::pipe();
    for (_, thing) in semaphores.clone() {
        ask.cmd("ZCARD").arg(format!("adv-sem:semaphore_main:{}", thing.name));
    }
    let Ok(counts) = ask.query::<Vec<u64>>(connection) else { return false };
    for ((thing, known), held) in semaphores.zip(counts) {
        if held > u64::from(known.capacity) {
            lock(&show.log).crowded.push(Crowded { at: clock::now(), thing, held });
        }
    }
    true
}
