//! Combines what the driver and the workers wrote.

use std::path::Path;

use super::{Lifetime, LifetimeEnd, Log};
use crate::check::History;
use crate::clock::{self, Micros, SECOND};
use crate::history;
use crate::plan::THINGS;
use crate::worker::{history_path, record_path};

const A_MOMENT_AGO: Micros = 2 * SECOND;

/// Returns everything about a run that has ended.
///
/// # Errors
/// A message if a history or a record cannot be read. Then the run is inconclusive.
pub fn gather(dir: &Path, log: &Log) -> Result<History, String> {
    let mut history = read(dir, log)?;
    for (at, thing) in THINGS.iter().enumerate().filter(|(_, thing)| thing.recorded) {
        let record = crate::record::Record::open(&record_path(dir, at));
        let state = record.and_then(|record| record.contents());
        let state = state.map_err(|error| format!("the record of {}: {error}", thing.name))?;
        history.records.push((at, state));
    }
    Ok(history)
}

/// Returns the same during a run, as of a moment ago. The histories are read one after the other, and an event in one
/// must not be missing from another. Nor may a gap be missing, which a worker can record only afterwards.
///
/// # Errors
/// A message if a history cannot be read.
pub(super) fn so_far(dir: &Path, log: &Log, foreign: Option<usize>) -> Result<History, String> {
    let until = clock::now() - A_MOMENT_AGO;
    let mut history = read(dir, log)?;
    history.ended = until;
    for (life, _) in &mut history.lives {
        life.foreign = foreign == Some(life.worker);
    }
    for (_, lines) in &mut history.lives {
        lines.retain(|line| line.at <= until);
    }
    Ok(history)
}

/// Reads all histories. Workers that are still alive have not ended.
fn read(dir: &Path, log: &Log) -> Result<History, String> {
    let mut history = History {
        things: THINGS.to_vec(),
        wall_offset: log.wall_offset,
        local: log.local,
        faults: log.faults.clone(),
        changes: log.changes.clone(),
        crowded: log.crowded.clone(),
        listed: log.listed.clone(),
        leftovers: log.leftovers.clone(),
        ended: log.ended,
        ..History::default()
    };
    let mut lives = log.lives.clone();
    let mut worker = 0;
    while history_path(dir, worker, 1).exists() {
        let last = lives.iter().filter(|life| life.worker == worker).map(|life| life.life).max();
        let next = last.unwrap_or_default() + 1;
        if history_path(dir, worker, next).exists() {
            lives.push(Lifetime { worker, life: next, foreign: false, end: LifetimeEnd::Done });
        }
        worker += 1;
    }
    for life in lives {
        let path = history_path(dir, life.worker, life.life);
        // A process that was killed at once has written nothing.
        if path.exists() {
            history.lives.push((life.clone(), history::read(&path)?));
        }
    }
    Ok(history)
}
