//! The limits of a name: its capacity, its rate, and whether it is paused.
//!
//! Programs declare limits, and operators override them. The *capacity* is the pinned one, if an operator has pinned
//! one, and otherwise the newest declaration. The *ceiling* is the capacity, or 0 while the name is paused. A grant
//! compares units with the ceiling only, so one number decides whether there is room.

use std::sync::Arc;

use super::{Circumstances, Declared, Machine, Rate, Rows, SemaphoreRow, TokenBucket};
use crate::clock::Time;

/// The limits of one name.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Limits {
    /// The newest declared capacity. Zero if no client has declared one yet.
    pub(crate) declared: u32,
    /// The capacity that an operator has set. It overrides every declaration.
    pub(crate) pinned: Option<u32>,
    pub(crate) paused: Option<Pause>,
    pub(crate) pace: Pace,
}

/// How often permits are granted.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) enum Pace {
    /// As often as there is room, because no client or operator has set a rate.
    #[default]
    Undeclared,
    /// As often as there is room, because an operator has removed the rate.
    Free,
    Metered(TokenBucket),
}

/// A pause: since when nothing is granted, by whom, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Pause {
    pub(crate) since: Time,
    pub(crate) by: Arc<str>,
    pub(crate) reason: Option<Arc<str>>,
}

/// A change that an operator makes to a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LimitChange {
    /// Declares a capacity without an acquire.
    Declare(u32),
    /// Sets the capacity, whatever programs declare.
    Pin(u32),
    /// Makes the newest declaration count again.
    Unpin,
    /// Sets the rate at which permits are granted. `None` grants them as often as there is room.
    Rate(Option<Rate>),
    /// Stops all grants. A second pause replaces `by` and `reason`, but not the start of the pause.
    Pause {
        by: Arc<str>,
        reason: Option<Arc<str>>,
    },
    Resume,
    /// Removes everything that is known about an unused name, including its last fence.
    Forget,
}

impl LimitChange {
    /// Whether the change has an effect on a name that nobody has used yet. The other changes end something, or remove
    /// it.
    pub(crate) fn sets(&self) -> bool {
        !matches!(self, Self::Unpin | Self::Resume | Self::Forget)
    }
}

/// The result of a [`LimitChange`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LimitsChanged {
    Done,
    /// Nothing is known about the name, so there is nothing to end or to remove.
    Unknown,
    /// Refused: the name is pinned to this capacity and stays pinned.
    Pinned(u32),
    /// Refused: the name has holders or waiters.
    InUse {
        holding: usize,
        waiting: usize,
    },
}

impl Limits {
    /// Returns the most units that may be granted: the capacity, or 0 while the name is paused.
    #[inline]
    pub(super) fn ceiling(&self) -> u32 {
        let is_paused = self.paused.is_some() && !crate::broken::is("pause");
        if is_paused { 0 } else { self.capacity() }
    }

    #[inline]
    pub(crate) fn capacity(&self) -> u32 {
        self.pinned.unwrap_or(self.declared)
    }

    /// Returns the capacity that would follow from this declaration.
    #[inline]
    pub(super) fn capacity_with(&self, declared: Declared) -> u32 {
        let counts = declared.is_new || self.declared == 0;
        self.pinned.unwrap_or(if counts { declared.capacity } else { self.declared })
    }

    pub(crate) fn meter(&self) -> Option<&TokenBucket> {
        match &self.pace {
            Pace::Metered(meter) => Some(meter),
            Pace::Undeclared | Pace::Free => None,
        }
    }

    pub(super) fn meter_mut(&mut self) -> Option<&mut TokenBucket> {
        match &mut self.pace {
            Pace::Metered(meter) => Some(meter),
            Pace::Undeclared | Pace::Free => None,
        }
    }

    /// Returns whether the limits can be forgotten while the name is unused: programs declare them again when they use
    /// the name, and no token is missing.
    pub(crate) fn can_be_forgotten(&self, now: Time) -> bool {
        let by_operator = self.pinned.is_some() || self.paused.is_some() || self.pace == Pace::Free;
        !by_operator && self.meter().is_none_or(|meter| meter.is_full(now))
    }

    #[inline]
    pub(super) fn declare(&mut self, declared: Declared, now: Time, last_fence: u64) {
        self.declare_capacity(declared.capacity, declared.is_new);
        if let Some(rate) = declared.rate
            && (declared.rate_is_new || self.pace == Pace::Undeclared)
        {
            self.set_rate(Some(rate), now, last_fence);
        }
    }

    #[inline]
    pub(super) fn declare_capacity(&mut self, capacity: u32, is_new: bool) {
        if is_new || self.declared == 0 {
            self.declared = capacity;
        }
    }

    fn set_rate(&mut self, rate: Option<Rate>, now: Time, last_fence: u64) {
        match (&mut self.pace, rate) {
            (Pace::Metered(meter), Some(rate)) => meter.change(rate, now, last_fence),
            (pace, Some(rate)) => *pace = Pace::Metered(TokenBucket::new(rate, last_fence)),
            (pace, None) => *pace = Pace::Free,
        }
    }

    pub(super) fn change_limits(
        &mut self,
        change: &LimitChange,
        now: Time,
        last_fence: u64,
    ) -> LimitsChanged {
        if !change.sets() && *self == Self::default() {
            return LimitsChanged::Unknown;
        }
        match change {
            LimitChange::Declare(capacity) => match self.pinned {
                Some(pinned) => return LimitsChanged::Pinned(pinned),
                None => self.declared = *capacity,
            },
            LimitChange::Pin(capacity) => self.pinned = Some(*capacity),
            LimitChange::Unpin => self.pinned = None,
            LimitChange::Rate(rate) => self.set_rate(*rate, now, last_fence),
            LimitChange::Pause { by, reason } => {
                let since = self.paused.as_ref().map_or(now, |paused| paused.since);
                self.paused = Some(Pause { since, by: by.clone(), reason: reason.clone() });
            }
            LimitChange::Resume => self.paused = None,
            LimitChange::Forget => *self = Self::default(),
        }
        LimitsChanged::Done
    }
}

impl<R: Rows> Machine<R> {
    /// Applies a change. `capacity` is the capacity that the sender has declared, if any. A name that has never been
    /// used starts with it.
    pub(super) fn change_limits(
        &mut self,
        capacity: Option<u32>,
        change: &LimitChange,
        call: &mut Circumstances<'_, R::Tag>,
    ) -> Result<LimitsChanged, R::Error> {
        let forgets = *change == LimitChange::Forget;
        if forgets {
            self.remove_dead_clients()?;
        }
        let row = self.rows.row_mut();
        if forgets && (row.holding > 0 || row.waiting > 0) {
            return Ok(LimitsChanged::InUse { holding: row.holding, waiting: row.waiting });
        }
        if let Some(capacity) = capacity.filter(|_| !forgets) {
            row.limits.declare_capacity(capacity, false);
        }
        let changed = row.limits.change_limits(change, call.now, row.last_fence);
        if forgets && changed == LimitsChanged::Done {
            *row = SemaphoreRow::default();
            call.effects.from_place = 0;
            self.rows.forget();
        }
        Ok(changed)
    }
}
