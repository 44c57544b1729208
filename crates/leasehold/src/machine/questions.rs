//! Queries that change nothing.

use super::{InMemory, Limits, Machine, Member, Rows, SemaphoreRow, Stage};
use crate::clock::Time;
use crate::{AcquisitionId, ClientId};

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
    #[cfg(test)]
    pub(crate) fn units(&self) -> u32 {
        self.rows.row.units
    }

    /// Returns the tag of a holder or a waiter.
    pub(crate) fn tag(&self, id: AcquisitionId) -> Option<&T> {
        self.rows.members.get(&id).map(|(_, tag)| tag)
    }

    pub(crate) fn into_tags(self) -> impl Iterator<Item = T> {
        self.rows.members.into_values().map(|(_, tag)| tag)
    }

    pub(crate) fn tag_mut(&mut self, id: AcquisitionId) -> Option<&mut T> {
        self.rows.members.get_mut(&id).map(|(_, tag)| tag)
    }

    pub(crate) fn holds(&self, id: AcquisitionId) -> bool {
        self.rows.members.get(&id).is_some_and(|(member, _)| member.is_holder())
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
        self.rows.queue.iter().map(|id| {
            let (member, tag) = &self.rows.members[&id];
            Row { id, member, tag }
        })
    }

    /// Returns the holders. The one that has held for the longest time comes first.
    pub(crate) fn holders(&self) -> Vec<Row<'_, T>> {
        let members = self.rows.members.iter();
        let rows = members.map(|(id, (member, tag))| Row { id: *id, member, tag });
        let mut holders: Vec<_> = rows.filter(|row| row.member.is_holder()).collect();
        // Fences increase in the order of the grants.
        holders.sort_unstable_by_key(|row| row.member.fence());
        holders
    }
}

/// A holder or a waiter, with the tag of its client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a, T> {
    pub(crate) id: AcquisitionId,
    pub(crate) member: &'a Member,
    pub(crate) tag: &'a T,
}
