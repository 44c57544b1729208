//! Group commit: what is asked of one name while batches are in flight joins the next one.
//!
//! Two may be in flight, so that the store works on one while we work on the other. They reach it in the order in
//! which they were sent; should one of them have to be sent again, so that they change places, whoever left the
//! queue in between is released once more (see `settle_away`).

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use crate::machine::Command;

/// How many ids one batch has at most.
pub(crate) const MAX_BATCH: usize = 256;

/// How many batches of one name are in flight at most.
const IN_FLIGHT: u8 = 2;

/// The commands of one name that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    unsent: VecDeque<Command>,
    /// Somebody on the engine's thread is about to take a batch.
    starting: bool,
    in_flight: u8,
}

impl Outbox {
    pub(crate) fn push(&mut self, command: Command) {
        self.unsent.push_back(command);
    }

    /// True, once, if somebody has to begin to empty it.
    pub(crate) fn start_flush(&mut self) -> bool {
        let start = !self.starting && self.in_flight < IN_FLIGHT && !self.unsent.is_empty();
        self.starting |= start;
        start
    }

    /// The batch that was taken has been answered, or given up.
    pub(crate) fn answered(&mut self) {
        self.in_flight -= 1;
    }

    /// The next batch, of those that are still wanted. None ends the flush: there is nothing to send, or others
    /// will come for it.
    ///
    /// Releases come first, which is best for everybody. An enqueue and the release of the same id
    /// never share a batch: by the time the release was pushed, the enqueue was no longer wanted.
    pub(crate) fn next_batch(
        &mut self,
        mut wanted: impl FnMut(&Command) -> bool,
    ) -> Option<Vec<Command>> {
        self.starting = false;
        if self.in_flight >= IN_FLIGHT {
            return None;
        }
        let mut batch = Vec::with_capacity(self.unsent.len().min(MAX_BATCH));
        // Whoever was found to be gone while it was about to queue is here twice, and so is who was woken while the
        // answer came that says the same. A script decides about all of its ids together, and so must not be asked for
        // one of them twice.
        let (mut queueing, mut claiming) = (FxHashSet::default(), FxHashSet::default());
        while batch.len() < MAX_BATCH
            && let Some(command) = self.unsent.pop_front()
        {
            let again = match command {
                Command::Enqueue { id, .. } => !queueing.insert(id),
                Command::Confirm { id, .. } => !claiming.insert(id),
                _ => false,
            };
            if !again && wanted(&command) {
                batch.push(command);
            }
        }
        if batch.is_empty() {
            return None;
        }
        self.in_flight += 1;
        batch.sort_by_key(|command| match command {
            Command::Release { .. } => 0,
            Command::Confirm { .. } => 1,
            Command::Renew { .. } => 2,
            Command::Sweep => 3,
            Command::Enqueue { .. } => 4,
        });
        Some(batch)
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.starting && self.in_flight == 0 && self.unsent.is_empty()
    }
}
