//! How many permits there are, and whether they are granted at all: what programs declare, and what operators set.

use std::sync::Arc;

use super::{Declared, Machine};
use crate::clock::Time;

/// The limits of one name.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Limits {
    /// By the newest declaration. Zero if nobody has declared a capacity yet.
    declared: u32,
    /// The capacity that an operator has set, whatever programs declare.
    pinned: Option<u32>,
    paused: Option<Pause>,
    /// A permit is granted only while fewer are held: the capacity, or 0 while the name is paused.
    ceiling: u32,
}

/// Since when nothing is granted, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Pause {
    pub(crate) since: Time,
    pub(crate) by: Arc<str>,
    pub(crate) reason: Option<Arc<str>>,
}

/// What an operator asks of a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Steer {
    /// A declaration that no acquire brings with it.
    Declare(u32),
    /// From now on this is the capacity, whatever is declared.
    Pin(u32),
    /// The newest declaration counts again.
    Unpin,
    /// Nothing is granted from now on. A second pause changes by whom and why, not since when.
    Pause {
        by: Arc<str>,
        reason: Option<Arc<str>>,
    },
    Resume,
    /// Removes everything that is known of a name that nobody uses, its last fence, too.
    Forget,
}

/// What became of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Steered {
    Done,
    /// Nobody has declared a capacity: there is no such name.
    Unknown,
    /// The name is pinned to this capacity, and stays so.
    Pinned(u32),
    /// Somebody holds or waits.
    InUse {
        holding: usize,
        waiting: usize,
    },
}

impl Limits {
    #[inline]
    pub(super) fn ceiling(&self) -> u32 {
        self.ceiling
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.pinned.unwrap_or(self.declared)
    }

    pub(crate) fn declared(&self) -> u32 {
        self.declared
    }

    pub(crate) fn pinned(&self) -> Option<u32> {
        self.pinned
    }

    pub(crate) fn paused(&self) -> Option<&Pause> {
        self.paused.as_ref()
    }

    #[inline]
    pub(super) fn declare(&mut self, Declared { capacity, is_new }: Declared) {
        if (is_new || self.declared == 0) && self.declared != capacity {
            self.declared = capacity;
            self.set_ceiling();
        }
    }

    fn set_ceiling(&mut self) {
        self.ceiling = if self.paused.is_some() { 0 } else { self.capacity() };
    }

    pub(super) fn steer(&mut self, steer: &Steer, now: Time) -> Steered {
        if self.capacity() == 0 {
            return Steered::Unknown;
        }
        match steer {
            Steer::Declare(capacity) => match self.pinned {
                Some(pinned) => return Steered::Pinned(pinned),
                None => self.declared = *capacity,
            },
            Steer::Pin(capacity) => self.pinned = Some(*capacity),
            Steer::Unpin => self.pinned = None,
            Steer::Pause { by, reason } => {
                let since = self.paused.as_ref().map_or(now, |paused| paused.since);
                self.paused = Some(Pause { since, by: by.clone(), reason: reason.clone() });
            }
            Steer::Resume => self.paused = None,
            Steer::Forget => *self = Self::default(),
        }
        self.set_ceiling();
        Steered::Done
    }
}

impl<T: Clone> Machine<T> {
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// `capacity` is what the sender has declared, if anything: a name that nobody has used yet begins with it.
    pub(super) fn steer(&mut self, capacity: Option<u32>, steer: &Steer, now: Time) -> Steered {
        if *steer != Steer::Forget {
            if let Some(capacity) = capacity {
                self.limits.declare(Declared { capacity, is_new: false });
            }
            return self.limits.steer(steer, now);
        }
        if !self.members.is_empty() {
            let (holding, waiting) = (self.holding as usize, self.queue.len());
            return Steered::InUse { holding, waiting };
        }
        let forgotten = self.limits.steer(steer, now);
        if forgotten == Steered::Done {
            self.last_fence = 0;
        }
        forgotten
    }
}
