//! One acquisition, assembled from the lines of its history.

use std::collections::HashMap;
use std::fmt;

use super::History;
use super::spans::Span;
use crate::clock::Micros;
use crate::driver::LifetimeEnd;
use crate::history::{Event, How, OpId};
use crate::plan::{self, Thing};
use crate::worker::COMMAND;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Granted {
    pub(super) at: Micros,
    pub(super) fence: Option<u64>,
    /// 0 means none.
    pub(super) slot: u32,
    pub(super) weight: u32,
}

/// A write that the holder announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Write {
    pub(super) fence: u64,
    pub(super) version: u64,
    pub(super) before: u64,
    pub(super) sum: u64,
    /// Whether the write is known to have been made.
    pub(super) done: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) worker: usize,
    life: u32,
    id: OpId,
    pub(super) foreign: bool,
    /// Whether the command requested it. Then it was granted before the child of the command started.
    pub(super) by_command: bool,
    pub(super) thing: usize,
    /// The id with which the store lists it, if it is known.
    pub(super) listed_as: Option<String>,
    pub(super) requested: Micros,
    /// When it was seen in the queue: at some instant within each span.
    pub(super) queued: Vec<Span>,
    pub(super) granted: Option<Granted>,
    /// When it certainly held: at some instant within each span.
    pub(super) holds: Vec<Span>,
    pub(super) end: Option<(Micros, How)>,
    pub(super) killed: Option<Micros>,
    pub(super) writes: Vec<Write>,
    /// When the record refused it, and because of which fence.
    pub(super) refused: Vec<(Micros, u64)>,
    /// When the record had changed before its write, and to which version.
    pub(super) conflicts: Vec<(Micros, u64)>,
}

impl Op {
    /// The time for which it certainly held. An acquisition that held at two instants also held in between.
    pub(super) fn certain(&self) -> Option<Span> {
        let (first, last) = (self.holds.first()?.1, self.holds.last()?.0);
        (first < last).then_some((first, last))
    }

    /// The number of units that it takes.
    pub(super) fn weight(&self) -> u32 {
        self.granted.map_or(1, |granted| granted.weight)
    }

    /// The time in which the store may have granted the permit: not before it was last seen in the queue, and not after
    /// the worker received it.
    pub(super) fn start(&self) -> Option<Span> {
        let granted = self.granted?.at;
        // After a failover that lost the grant, a holder is in the queue again.
        let before = self.queued.iter().rev().find(|(since, _)| *since <= granted);
        let seen = before.map_or(self.requested, |(since, _)| *since);
        Some((seen.max(self.requested), granted))
    }

    pub(super) fn fence(&self) -> Option<u64> {
        self.granted.and_then(|granted| granted.fence)
    }

    /// When the worker stopped using it.
    pub(super) fn over(&self) -> Micros {
        self.end.map(|(at, _)| at).or(self.killed).unwrap_or(Micros::MAX)
    }

    /// The time from when it was first seen in the queue until it was granted or stopped waiting.
    pub(super) fn waited(&self) -> Option<Span> {
        let (_, seen) = *self.queued.first()?;
        let until = self.granted.map_or(self.over(), |granted| granted.at);
        (seen < until).then_some((seen, until))
    }

    /// The time from when it was requested until it was granted or stopped waiting.
    pub(super) fn requested_span(&self) -> Option<Span> {
        let until = self.granted.map_or(self.over(), |granted| granted.at);
        (self.requested < until).then_some((self.requested, until))
    }

    /// Whether the library releases in the background what may be left of it. The command does not wait for that
    /// release. And a lease without a guard is released only by its holder, which may fail.
    pub(super) fn is_released_later(&self, history: &History, how: How) -> bool {
        match how {
            _ if self.by_command => false,
            How::Dropped | How::Lost | How::Cancelled | How::TimedOut | How::Full => true,
            How::Failed => self.of(history).kind != plan::Kind::Pool,
            How::Released | How::Internal => false,
        }
    }

    pub(super) fn of<'a>(&self, history: &'a History) -> &'a Thing {
        &history.things[self.thing]
    }

    pub(super) fn name<'a>(&self, history: &'a History) -> &'a str {
        self.of(history).name
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { worker, life, id, .. } = self;
        write!(f, "worker {worker}.{life} op {id}")?;
        if let Some(fence) = self.fence() {
            write!(f, " (fence {fence})")?;
        }
        Ok(())
    }
}

/// Assembles all acquisitions.
///
/// # Errors
/// A message if lines are missing. Then the run is inconclusive.
pub(super) fn read(history: &History) -> Result<Vec<Op>, String> {
    let mut all = Vec::new();
    for (life, lines) in &history.lives {
        let mut index: HashMap<OpId, usize> = HashMap::new();
        let killed = if let LifetimeEnd::Killed(at) | LifetimeEnd::Stuck(at) = life.end {
            Some(at)
        } else {
            None
        };
        for line in lines {
            let at = line.at;
            if let Event::Ask { op, thing, id } = &line.event {
                let thing = history.things.iter().position(|spec| spec.name == thing);
                let by_command = id == COMMAND;
                let is_known = !by_command && id != "-";
                index.insert(*op, all.len());
                all.push(Op {
                    worker: life.worker,
                    life: life.life,
                    id: *op,
                    foreign: life.foreign,
                    by_command,
                    thing: thing.ok_or("an unknown thing")?,
                    listed_as: is_known.then(|| id.clone()),
                    requested: at,
                    queued: Vec::new(),
                    granted: None,
                    holds: Vec::new(),
                    end: None,
                    killed,
                    writes: Vec::new(),
                    refused: Vec::new(),
                    conflicts: Vec::new(),
                });
                continue;
            }
            let Some(op) = line.event.op() else { continue };
            let Some(op) = index.get(&op).and_then(|at| all.get_mut(*at)) else {
                return Err(format!("worker {}.{} never requested {op}", life.worker, life.life));
            };
            match line.event {
                Event::Queue { since, .. } => op.queued.push((since, at)),
                Event::Grant { fence, slot, weight, .. } => {
                    op.granted = Some(Granted { at, fence, slot, weight });
                }
                Event::Hold { since, .. } => op.holds.push((since, at)),
                Event::End { how, .. } => op.end = Some((at, how)),
                Event::Intend { fence, version, before, sum, .. } => {
                    op.writes.push(Write { fence, version, before, sum, done: false });
                }
                Event::Wrote { version, .. } => {
                    let mut writes = op.writes.iter_mut();
                    if let Some(write) = writes.find(|write| write.version == version) {
                        write.done = true;
                    }
                }
                Event::Refused { floor, .. } => op.refused.push((at, floor)),
                Event::Conflict { version, .. } => op.conflicts.push((at, version)),
                _ => {}
            }
        }
    }
    Ok(all)
}

impl Event {
    /// The acquisition that a line is about, after its request.
    fn op(&self) -> Option<OpId> {
        match self {
            Self::Queue { op, .. }
            | Self::Grant { op, .. }
            | Self::Hold { op, .. }
            | Self::Ending { op }
            | Self::Detach { op }
            | Self::End { op, .. }
            | Self::Read { op, .. }
            | Self::Intend { op, .. }
            | Self::Wrote { op, .. }
            | Self::Refused { op, .. }
            | Self::Conflict { op, .. } => Some(*op),
            _ => None,
        }
    }
}
