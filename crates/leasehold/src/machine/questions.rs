//! Queries that change nothing.

use std::num::NonZeroU32;

use super::{Machine, Member, Stage, has_units};
use crate::clock::Time;
use crate::{AcquisitionId, Fence};

impl<T> Machine<T> {
    /// Returns whether the passing of time can change anything here.
    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.anybody_ends() || self.limits.meter().is_some()
    }

    /// Returns whether any holder or waiter can expire.
    #[inline]
    pub(crate) fn anybody_ends(&self) -> bool {
        !self.holder_ends.is_empty() || !self.waiter_ends.is_empty()
    }

    /// Returns when the next holder, or the first waiter, expires. Waiting clients sweep at that time instead of
    /// polling.
    pub(crate) fn next_expiry(&self) -> Option<Time> {
        let holder = self.holder_ends.first().map(|(ends, _)| *ends);
        let head = self.queue.first_from(0).and_then(|(_, id)| self.members[&id].alive_by);
        holder.into_iter().chain(head).min()
    }

    /// Returns when the first waiter can be granted a permit without any release: it waits for a token and for nothing
    /// else.
    pub(crate) fn next_token(&self, now: Time) -> Option<Time> {
        let meter = self.limits.meter()?;
        let (_, head) = self.queue.first_from(0)?;
        let weight = self.members[&head].weight();
        let waits = has_units(&self.limits, self.units, weight);
        (waits && !meter.is_free(now)).then(|| meter.next_at(now, self.queue.len()))
    }

    /// Returns the number of units that are held.
    pub(crate) fn units(&self) -> u32 {
        self.units
    }

    /// Returns the client's data that is kept with a holder or a waiter.
    pub(crate) fn kept(&self, id: AcquisitionId) -> Option<&T> {
        self.members.get(&id).map(|member| &member.kept)
    }

    pub(crate) fn into_kept(self) -> impl Iterator<Item = T> {
        self.members.into_values().map(|member| member.kept)
    }

    pub(crate) fn kept_mut(&mut self, id: AcquisitionId) -> Option<&mut T> {
        self.members.get_mut(&id).map(|member| &mut member.kept)
    }

    pub(crate) fn holds(&self, id: AcquisitionId) -> bool {
        self.members.get(&id).is_some_and(Member::is_holder)
    }

    /// Returns whether the id holds a permit with a TTL.
    #[cfg(all(test, feature = "redis"))]
    pub(crate) fn is_limited(&self, id: AcquisitionId) -> bool {
        let stage = self.members.get(&id).map(|member| &member.stage);
        matches!(stage, Some(Stage::Holding { hold_until: Some(_), .. }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn last_fence(&self) -> u64 {
        self.last_fence
    }

    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns the number of waiters ahead of `id`. `None` if it does not wait.
    pub(crate) fn position(&self, id: AcquisitionId) -> Option<usize> {
        match self.members.get(&id)?.stage {
            Stage::Waiting { place, .. } => Some(self.queue.before(place)),
            Stage::Holding { .. } => None,
        }
    }

    /// Returns the waiters, in order.
    pub(crate) fn waiters(&self) -> impl Iterator<Item = Row<'_, T>> {
        self.queue.iter().map(|id| self.row(id))
    }

    /// Returns the holders. The one that has held for the longest time comes first.
    pub(crate) fn holders(&self) -> Vec<Row<'_, T>> {
        let holders = self.members.iter().filter(|(_, member)| member.is_holder());
        let mut rows: Vec<_> = holders.map(|(id, _)| self.row(*id)).collect();
        // Fences increase in the order of the grants.
        rows.sort_unstable_by_key(|row| row.fence);
        rows
    }

    fn row(&self, id: AcquisitionId) -> Row<'_, T> {
        let member = &self.members[&id];
        let (fence, slot_number) = match member.stage {
            Stage::Waiting { .. } => (None, None),
            Stage::Holding { fence, slot_number, .. } => (Some(fence), slot_number),
        };
        let (since, ends, weight) = (member.since, member.ends(), member.weight());
        Row { id, since, ends, fence, weight, slot_number, kept: &member.kept }
    }
}

/// A holder or a waiter, as statistics show it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a, T> {
    pub(crate) id: AcquisitionId,
    pub(crate) since: Time,
    pub(crate) ends: Option<Time>,
    pub(crate) fence: Option<Fence>,
    pub(crate) weight: u32,
    pub(crate) slot_number: Option<NonZeroU32>,
    pub(crate) kept: &'a T,
}

/// A holder or a waiter with all of its deadlines, as the model checker compares them.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct MemberView {
    pub(crate) id: AcquisitionId,
    pub(crate) alive_by: Option<Time>,
    pub(crate) hold_until: Option<Time>,
    /// `None` for a waiter.
    pub(crate) fence: Option<Fence>,
    pub(crate) weight: u32,
    pub(crate) slot_number: Option<NonZeroU32>,
    pub(crate) is_unclaimed: bool,
}

#[cfg(test)]
impl MemberView {
    pub(crate) fn is_holder(&self) -> bool {
        self.fence.is_some()
    }

    pub(crate) fn ends(&self) -> Option<Time> {
        self.alive_by.into_iter().chain(self.hold_until).min()
    }
}

#[cfg(test)]
impl<T> Machine<T> {
    /// Returns all holders and waiters, in no particular order.
    pub(crate) fn members(&self) -> impl Iterator<Item = MemberView> {
        self.members.iter().map(|(id, member)| {
            let (hold_until, fence, slot_number, is_unclaimed) = match member.stage {
                Stage::Waiting { .. } => (None, None, None, false),
                Stage::Holding { hold_until, fence, slot_number, unclaimed, .. } => {
                    (hold_until, Some(fence), slot_number, unclaimed)
                }
            };
            let (id, alive_by, weight) = (*id, member.alive_by, member.weight());
            MemberView { id, alive_by, hold_until, fence, weight, slot_number, is_unclaimed }
        })
    }

    pub(crate) fn member(&self, id: AcquisitionId) -> Option<MemberView> {
        self.members().find(|member| member.id == id)
    }
}
