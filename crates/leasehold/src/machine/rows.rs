//! The rows of one name: what the machine reads and writes.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::{Held, Limits, Share, Terms};
use crate::clock::Time;
use crate::{AcquisitionId, ClientId, Fence};

/// The row of a name: its limits and its counters.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct SemaphoreRow {
    pub(crate) limits: Limits,
    pub(crate) holding: usize,
    /// The sum of the weights of all holders.
    pub(crate) units: u32,
    pub(crate) waiting: usize,
    /// The place of the next waiter that joins the queue.
    pub(crate) next_place: u64,
    pub(crate) last_fence: u64,
}

impl SemaphoreRow {
    /// Returns whether a permit of this weight can be granted.
    #[inline]
    pub(super) fn fits(&self, weight: u32, now: Time) -> bool {
        self.has_units(weight) && self.limits.meter().is_none_or(|meter| meter.is_free(now))
    }

    /// Counts one more holder.
    #[inline(always)]
    #[allow(clippy::inline_always)] // most branches are decided at the call site
    pub(super) fn add_holder(&mut self, holder: &Member, now: Time) {
        let Stage::Holding { fence, weight, .. } = holder.stage else { return };
        self.holding += 1;
        self.units += if crate::broken::is("weights") { 1 } else { weight };
        self.last_fence = fence.get();
        if let Some(meter) = self.limits.meter_mut() {
            meter.take(now, fence);
        }
    }

    /// Counts one member less.
    #[inline]
    pub(super) fn subtract(&mut self, member: &Member) {
        match member.stage {
            Stage::Holding { weight, .. } => {
                self.holding -= 1;
                self.units -= if crate::broken::is("weights") { 1 } else { weight };
            }
            Stage::Waiting { .. } => self.waiting -= 1,
        }
    }

    #[inline]
    pub(super) fn has_units(&self, weight: u32) -> bool {
        let ceiling = self.limits.ceiling() + u32::from(crate::broken::is("limit"));
        weight <= ceiling.saturating_sub(self.units)
    }
}

/// A holder or a waiter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Member {
    pub(crate) since: Time,
    /// `renew_by` of a holder, `alive_by` of a waiter.
    pub(crate) alive_by: Option<Time>,
    pub(crate) stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Stage {
    Waiting {
        place: u64,
        terms: Terms,
        share: Share,
    },
    Holding {
        hold_until: Option<Time>,
        fence: Fence,
        weight: u32,
        slot_number: Option<NonZeroU32>,
        /// Whether it was granted with a wake-up and its client has not claimed it yet.
        unclaimed: bool,
    },
}

impl Member {
    pub(crate) fn is_holder(&self) -> bool {
        matches!(self.stage, Stage::Holding { .. })
    }

    /// Returns the earliest deadline.
    #[inline]
    pub(crate) fn ends(&self) -> Option<Time> {
        match (self.alive_by, self.stage) {
            (Some(alive_by), Stage::Holding { hold_until: Some(hold_until), .. }) => {
                Some(alive_by.min(hold_until))
            }
            (None, Stage::Holding { hold_until, .. }) => hold_until,
            (alive_by, _) => alive_by,
        }
    }

    pub(crate) fn weight(&self) -> u32 {
        match self.stage {
            Stage::Waiting { share, .. } => share.weight,
            Stage::Holding { weight, .. } => weight,
        }
    }

    /// Returns the fence of a holder; `None` for a waiter.
    pub(crate) fn fence(&self) -> Option<Fence> {
        match self.stage {
            Stage::Waiting { .. } => None,
            Stage::Holding { fence, .. } => Some(fence),
        }
    }

    /// Returns the end of the TTL of a holder.
    pub(crate) fn hold_until(&self) -> Option<Time> {
        match self.stage {
            Stage::Waiting { .. } => None,
            Stage::Holding { hold_until, .. } => hold_until,
        }
    }

    pub(crate) fn slot_number(&self) -> Option<NonZeroU32> {
        match self.stage {
            Stage::Waiting { .. } => None,
            Stage::Holding { slot_number, .. } => slot_number,
        }
    }

    /// Returns the permit as it is reported to its holder; `None` for a waiter.
    #[inline]
    pub(crate) fn held(&self, now: Time) -> Option<Held> {
        let Stage::Holding { fence, slot_number, .. } = self.stage else { return None };
        Some(Held { slot_number, fence, valid_for: self.ends().map(|ends| ends - now) })
    }
}

/// The rows of one name, in memory or in one transaction of a store.
///
/// A store that implements this trait gets all transitions from [`Machine`](super::Machine). Each method is a plain
/// read or write; the machine keeps the counters of [`row_mut`](Self::row_mut).
pub(crate) trait Rows {
    /// What the client attaches to an acquisition. It moves with it from the queue to the holders: a ticket, or a label.
    type Tag: Clone;
    type Error;

    fn row(&self) -> &SemaphoreRow;

    fn row_mut(&mut self) -> &mut SemaphoreRow;

    /// Returns the tag of an acquisition that has this label.
    fn tag_of(label: Option<&Arc<str>>) -> Self::Tag;

    fn member(&self, id: AcquisitionId) -> Result<Option<Member>, Self::Error>;

    /// Adds a member whose id is not known yet.
    fn insert(
        &mut self,
        id: AcquisitionId,
        member: Member,
        tag: Self::Tag,
    ) -> Result<(), Self::Error>;

    /// Replaces the deadlines and the claim of a member.
    fn update(
        &mut self,
        id: AcquisitionId,
        before: &Member,
        after: &Member,
    ) -> Result<(), Self::Error>;

    fn remove(&mut self, id: AcquisitionId) -> Result<Option<(Member, Self::Tag)>, Self::Error>;

    /// Replaces a waiter with a holder. Returns its tag.
    fn promote(
        &mut self,
        id: AcquisitionId,
        waiter: &Member,
        holder: &Member,
    ) -> Result<Self::Tag, Self::Error>;

    /// Returns the first waiter at this place or behind it.
    fn first_waiter(&self, from_place: u64)
    -> Result<Option<(AcquisitionId, Member)>, Self::Error>;

    /// Returns the number of waiters before this place, or an upper bound.
    fn waiters_before(&self, place: u64) -> Result<usize, Self::Error>;

    fn lowest_free_number(&self) -> Result<NonZeroU32, Self::Error>;

    /// Returns whether any member may have expired.
    fn may_expire(&self) -> bool;

    /// Removes the members that end at `now` or before.
    #[allow(clippy::type_complexity)]
    fn remove_due(
        &mut self,
        now: Time,
    ) -> Result<Vec<(AcquisitionId, Member, Self::Tag)>, Self::Error>;

    /// Records that another client has removed this member, so that its own client finds out.
    fn record_cancel(
        &mut self,
        id: AcquisitionId,
        member: &Member,
        now: Time,
    ) -> Result<(), Self::Error>;

    /// Returns whether another client has removed this waiter, which may renew it.
    fn is_cancelled(&self, _id: AcquisitionId, _now: Time) -> bool {
        false
    }

    /// Forgets everything beside the row of the name and its members.
    fn forget(&mut self) {}

    /// Returns the dead clients that hold or wait near the head of the queue. Empty unless the store can tell.
    fn dead_clients(&mut self) -> Result<Vec<ClientId>, Self::Error> {
        Ok(Vec::new())
    }

    /// Removes the waiters of a client, and its permits too if it is dead.
    fn remove_client(
        &mut self,
        client: ClientId,
        is_dead: bool,
    ) -> Result<Vec<Member>, Self::Error>;

    /// Returns the holder that has held for the longest time, for a broken rule.
    fn longest_holder(&self) -> Option<AcquisitionId> {
        None
    }

    /// Returns how many microseconds fences are ahead of the store's clock.
    fn fence_lead(&self) -> u64 {
        0
    }
}
