//! How many units there are, how often they are granted, and whether at all: what programs declare, and what operators set.

use std::sync::Arc;

use super::{Declared, Machine, Meter, Rate};
use crate::clock::Time;

/// The limits of one name.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Limits {
    /// By the newest declaration. Zero if nobody has declared a capacity yet.
    declared: u32,
    /// The capacity that an operator has set, whatever programs declare.
    pinned: Option<u32>,
    paused: Option<Pause>,
    pace: Pace,
    /// No more units than this are granted: the capacity, or 0 while the name is paused.
    ceiling: u32,
}

/// How often permits are granted.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
enum Pace {
    /// As often as there is room. Nobody has said anything else.
    #[default]
    Unsaid,
    /// The same, as an operator has said.
    Free,
    Metered(Meter),
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
    /// Permits are granted at this rate, or as often as there is room.
    Rate(Option<Rate>),
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

    /// What the capacity would be after this declaration.
    #[inline]
    pub(super) fn capacity_with(&self, declared: Declared) -> u32 {
        let counts = declared.is_new || self.declared == 0;
        self.pinned.unwrap_or(if counts { declared.capacity } else { self.declared })
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

    pub(crate) fn meter(&self) -> Option<&Meter> {
        match &self.pace {
            Pace::Metered(meter) => Some(meter),
            Pace::Unsaid | Pace::Free => None,
        }
    }

    pub(super) fn meter_mut(&mut self) -> Option<&mut Meter> {
        match &mut self.pace {
            Pace::Metered(meter) => Some(meter),
            Pace::Unsaid | Pace::Free => None,
        }
    }

    /// Whether all of this is what a program says when it comes back, and nothing is to be remembered until then.
    pub(crate) fn can_be_forgotten(&self, now: Time) -> bool {
        let by_operator = self.pinned.is_some() || self.paused.is_some() || self.pace == Pace::Free;
        !by_operator && self.meter().is_none_or(|meter| meter.is_full(now))
    }

    #[inline]
    pub(super) fn declare(&mut self, declared: Declared, now: Time, last_fence: u64) {
        self.declare_capacity(declared.capacity, declared.is_new);
        if let Some(rate) = declared.rate
            && (declared.rate_is_new || self.pace == Pace::Unsaid)
        {
            self.set_rate(Some(rate), now, last_fence);
        }
    }

    #[inline]
    pub(super) fn declare_capacity(&mut self, capacity: u32, is_new: bool) {
        if (is_new || self.declared == 0) && self.declared != capacity {
            self.declared = capacity;
            self.set_ceiling();
        }
    }

    fn set_rate(&mut self, rate: Option<Rate>, now: Time, last_fence: u64) {
        match (&mut self.pace, rate) {
            (Pace::Metered(meter), Some(rate)) => meter.change(rate, now, last_fence),
            (pace, Some(rate)) => *pace = Pace::Metered(Meter::new(rate, last_fence)),
            (pace, None) => *pace = Pace::Free,
        }
    }

    fn set_ceiling(&mut self) {
        self.ceiling = if self.paused.is_some() { 0 } else { self.capacity() };
    }

    pub(super) fn steer(&mut self, steer: &Steer, now: Time, last_fence: u64) -> Steered {
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
            Steer::Rate(rate) => self.set_rate(*rate, now, last_fence),
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
                self.limits.declare(Declared::capacity(capacity, false), now, self.last_fence);
            }
            return self.limits.steer(steer, now, self.last_fence);
        }
        if !self.members.is_empty() {
            let (holding, waiting) = (self.holding as usize, self.queue.len());
            return Steered::InUse { holding, waiting };
        }
        let forgotten = self.limits.steer(steer, now, self.last_fence);
        if forgotten == Steered::Done {
            self.last_fence = 0;
        }
        forgotten
    }
}
