//! Queries that change nothing.

use std::num::NonZeroU32;

use super::{InMemory, Limits, Machine, Member, Rows, SemaphoreRow, Stage};
use crate::clock::Time;
use crate::{AcquisitionId, ClientId, Fence};

impl<R: Rows> Machine<R> {
    /// Returns whether the passing of time can change anything here.
    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.rows.may_expire() || self.limits().meter().is_some()
    }

    /// Returns when the first waiter can be granted a permit without any release, and the client of that waiter. `None`
    /// if it does not wait for a token, or not only for a token.
    pub(crate) fn awaited_token(&self, now: Time) -> Result<Option<(Time, ClientId)>, R::Error> {
        let SemaphoreRow { limits, waiting, .. } = self.rows.row();
        let Some(meter) = limits.meter().filter(|meter| *waiting > 0 && !meter.is_free(now)) else {
            return Ok(None);
        };
        let first = self.rows.first_waiter(0)?;
        let first = first.filter(|(_, waiter)| self.rows.row().has_units(waiter.weight()));
        Ok(first.map(|(id, _)| (meter.next_at(now, *waiting), id.client())))
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.rows.row().limits
    }
}

impl<T: Clone + Default> Machine<InMemory<T>> {
    /// Returns when the next holder, or the first waiter, expires. Waiting clients sweep at that time instead of
    /// polling.
    pub(crate) fn next_expiry(&self) -> Option<Time> {
        let holder = self.rows.holder_ends.first().map(|(ends, _)| *ends);
        let Ok(first) = self.rows.first_waiter(0);
        holder.into_iter().chain(first.and_then(|(_, waiter)| waiter.alive_by)).min()
    }

    /// Returns when the first waiter can be granted a permit without any release: it waits for a token and for nothing
    /// else.
    pub(crate) fn next_token(&self, now: Time) -> Option<Time> {
        let Ok(token) = self.awaited_token(now);
        token.map(|(at, _)| at)
    }

    /// Returns the number of units that are held.
    pub(crate) fn units(&self) -> u32 {
        self.rows.row.units
    }

    /// Returns the client's data that is kept with a holder or a waiter.
    pub(crate) fn kept(&self, id: AcquisitionId) -> Option<&T> {
        self.rows.members.get(&id).map(|(_, kept)| kept)
    }

    pub(crate) fn into_kept(self) -> impl Iterator<Item = T> {
        self.rows.members.into_values().map(|(_, kept)| kept)
    }

    pub(crate) fn kept_mut(&mut self, id: AcquisitionId) -> Option<&mut T> {
        self.rows.members.get_mut(&id).map(|(_, kept)| kept)
    }

    pub(crate) fn holds(&self, id: AcquisitionId) -> bool {
        self.rows.members.get(&id).is_some_and(|(member, _)| member.is_holder())
    }

    /// Returns whether the id holds a permit with a TTL.
    #[cfg(all(test, feature = "redis"))]
    pub(crate) fn is_limited(&self, id: AcquisitionId) -> bool {
        let stage = self.rows.members.get(&id).map(|(member, _)| &member.stage);
        matches!(stage, Some(Stage::Holding { hold_until: Some(_), .. }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.members.is_empty()
    }

    pub(crate) fn last_fence(&self) -> u64 {
        self.rows.row.last_fence
    }

    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.rows.row.waiting
    }

    /// Returns the number of waiters ahead of `id`. `None` if it does not wait.
    pub(crate) fn position(&self, id: AcquisitionId) -> Option<usize> {
        match self.rows.members.get(&id)?.0.stage {
            Stage::Waiting { place, .. } => Some(self.rows.queue.before(place)),
            Stage::Holding { .. } => None,
        }
    }

    /// Returns the waiters, in order.
    pub(crate) fn waiters(&self) -> impl Iterator<Item = Row<'_, T>> {
        self.rows.queue.iter().map(|id| Row::of(id, &self.rows.members[&id]))
    }

    /// Returns the holders. The one that has held for the longest time comes first.
    pub(crate) fn holders(&self) -> Vec<Row<'_, T>> {
        let members = self.rows.members.iter();
        let holders = members.filter(|(_, (member, _))| member.is_holder());
        let mut rows: Vec<_> = holders.map(|(id, entry)| Row::of(*id, entry)).collect();
        // Fences increase in the order of the grants.
        rows.sort_unstable_by_key(|row| row.fence);
        rows
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

impl<'a, T> Row<'a, T> {
    fn of(id: AcquisitionId, (member, kept): &'a (Member, T)) -> Self {
        let (fence, slot_number) = match member.stage {
            Stage::Waiting { .. } => (None, None),
            Stage::Holding { fence, slot_number, .. } => (Some(fence), slot_number),
        };
        let (since, ends, weight) = (member.since, member.ends(), member.weight());
        Self { id, since, ends, fence, weight, slot_number, kept }
    }
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
impl<T: Clone + Default> Machine<InMemory<T>> {
    /// Returns all holders and waiters, in no particular order.
    pub(crate) fn members(&self) -> impl Iterator<Item = MemberView> {
        self.rows.members.iter().map(|(id, (member, _))| {
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
