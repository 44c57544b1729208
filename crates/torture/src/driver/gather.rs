//! Puts together what the driver and the workers wrote.

use std::path::Path;

use super::{Life, LifeEnd, Log};
use crate::check::History;
use crate::clock::{self, Micros, SECOND};
use crate::history;
use crate::plan::THINGS;
use crate::worker::{history_path, record_path};

const A_MOMENT_AGO: Micros = 2 * SECOND;

/// Everything about a run that is over.
///
/// # Errors
/// If a history cannot be read: then nothing can be said.
pub fn gather(dir: &Path, log: &Log) -> Result<History, String> {
    let mut history = read(dir, log)?;
    for (at, thing) in THINGS.iter().enumerate().filter(|(_, thing)| thing.recorded) {
        let record = crate::record::Record::open(&record_path(dir, at));
        let state = record.and_then(|record| record.look());
        let state = state.map_err(|error| format!("the record of {}: {error}", thing.name))?;
        history.records.push((at, state));
    }
    Ok(history)
}

/// The same in the middle of a run, as it was a moment ago: one history is read after the other, and what one says must
/// not be missing from another; nor that somebody stood still, which it can say only afterwards.
///
/// # Errors
/// If a history cannot be read.
pub(super) fn so_far(dir: &Path, log: &Log, foreign: usize) -> Result<History, String> {
    let until = clock::now() - A_MOMENT_AGO;
    let mut history = read(dir, log)?;
    history.ended = until;
    for (life, _) in &mut history.lives {
        life.foreign = life.worker == foreign && !log.local;
    }
    for (_, lines) in &mut history.lives {
        lines.retain(|line| line.at <= until);
    }
    Ok(history)
}

/// All histories; those who still live have not ended.
fn read(dir: &Path, log: &Log) -> Result<History, String> {
    let mut history = History {
        things: THINGS.to_vec(),
        wall_offset: log.wall_offset,
        local: log.local,
        faults: log.faults.clone(),
        changes: log.changes.clone(),
        crowded: log.crowded.clone(),
        leftovers: log.leftovers.clone(),
        ended: log.ended,
        ..History::default()
    };
    let mut lives = log.lives.clone();
    let mut worker = 0;
    while history_path(dir, worker, 1).exists() {
        let known = lives.iter().filter(|life| life.worker == worker).map(|life| life.life).max();
        let next = known.unwrap_or_default() + 1;
        if history_path(dir, worker, next).exists() {
            lives.push(Life { worker, life: next, foreign: false, end: LifeEnd::Done });
        }
        worker += 1;
    }
    for life in lives {
        let path = history_path(dir, life.worker, life.life);
        // One that was killed at once has written nothing.
        if path.exists() {
            history.lives.push((life.clone(), history::read(&path)?));
        }
    }
    Ok(history)
}
