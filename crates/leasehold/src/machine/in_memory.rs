//! The rows of one name in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::members::Members;
use super::numbers::Numbers;
use super::queue::Queue;
use super::rows::{Member, Rows, SemaphoreRow, Stage};
use crate::clock::Time;
use crate::{AcquisitionId, ClientId};

/// The rows of one name. `T` is the tag that a client in this process attaches to each of its acquisitions.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct InMemory<T = ()> {
    pub(super) row: SemaphoreRow,
    pub(super) members: Members<(Member, T)>,
    pub(super) queue: Queue,
    pub(super) numbers: Numbers,
    /// The deadlines of the holders and waiters that expire. Empty if nothing expires.
    pub(super) holder_ends: BTreeSet<(Time, AcquisitionId)>,
    pub(super) waiter_ends: BTreeSet<(Time, AcquisitionId)>,
    /// Waiters that another client has removed, each until the end of its waiter lease. Their clients must not enqueue them
    /// again. Empty on stores without leases, which report the removal reliably.
    cancelled: BTreeMap<AcquisitionId, Time>,
}

impl<T> InMemory<T> {
    #[inline]
    fn schedule(&mut self, id: AcquisitionId, member: &Member) {
        if let Some(ends) = member.ends() {
            self.ends_of(member).insert((ends, id));
        }
    }

    #[inline]
    fn unschedule(&mut self, id: AcquisitionId, member: &Member) {
        if let Some(ends) = member.ends() {
            self.ends_of(member).remove(&(ends, id));
        }
    }

    /// Adds a member to its collections, except for `members`.
    #[inline(always)]
    #[allow(clippy::inline_always)] // the stage is known at the call site
    fn enter(&mut self, id: AcquisitionId, member: &Member) {
        match member.stage {
            Stage::Waiting { place, .. } => self.queue.join(place, id),
            Stage::Holding { slot_number: Some(number), .. } => self.numbers.take(number),
            Stage::Holding { .. } => {}
        }
        self.schedule(id, member);
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // as above
    fn leave(&mut self, id: AcquisitionId, member: &Member) {
        match member.stage {
            Stage::Waiting { place, .. } => self.queue.leave(place),
            Stage::Holding { slot_number: Some(number), .. } => self.numbers.free(number),
            Stage::Holding { .. } => {}
        }
        self.unschedule(id, member);
    }

    fn next_due(&self, now: Time) -> Option<AcquisitionId> {
        let ends = [&self.holder_ends, &self.waiter_ends].into_iter();
        let mut firsts = ends.filter_map(BTreeSet::first);
        firsts.find(|(ends, _)| *ends <= now).map(|(_, id)| *id)
    }

    fn ends_of(&mut self, member: &Member) -> &mut BTreeSet<(Time, AcquisitionId)> {
        if member.is_holder() { &mut self.holder_ends } else { &mut self.waiter_ends }
    }
}

impl<T: Clone + Default> Rows for InMemory<T> {
    type Tag = T;
    type Error = Infallible;

    #[inline]
    fn row(&self) -> &SemaphoreRow {
        &self.row
    }

    #[inline]
    fn row_mut(&mut self) -> &mut SemaphoreRow {
        &mut self.row
    }

    fn tag_of(_label: Option<&Arc<str>>) -> T {
        T::default()
    }

    #[inline]
    fn member(&self, id: AcquisitionId) -> Result<Option<Member>, Infallible> {
        Ok(self.members.get(&id).map(|(member, _)| *member))
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // the stage is known at the call site
    fn insert(&mut self, id: AcquisitionId, member: Member, tag: T) -> Result<(), Infallible> {
        self.enter(id, &member);
        self.members.insert(id, (member, tag));
        Ok(())
    }

    fn update(
        &mut self,
        id: AcquisitionId,
        before: &Member,
        after: &Member,
    ) -> Result<(), Infallible> {
        self.unschedule(id, before);
        self.schedule(id, after);
        if let Some((member, _)) = self.members.get_mut(&id) {
            *member = *after;
        }
        Ok(())
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // otherwise the member is copied
    fn remove(&mut self, id: AcquisitionId) -> Result<Option<(Member, T)>, Infallible> {
        let Some((member, tag)) = self.members.remove(&id) else { return Ok(None) };
        self.leave(id, &member);
        Ok(Some((member, tag)))
    }

    fn promote(
        &mut self,
        id: AcquisitionId,
        waiter: &Member,
        holder: &Member,
    ) -> Result<T, Infallible> {
        self.leave(id, waiter);
        self.enter(id, holder);
        let Some((member, tag)) = self.members.get_mut(&id) else { return Ok(T::default()) };
        *member = *holder;
        Ok(tag.clone())
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // otherwise the waiter is copied
    fn first_waiter(&self, from_place: u64) -> Result<Option<(AcquisitionId, Member)>, Infallible> {
        let mut first = self.queue.first_from(from_place);
        if crate::broken::is("lifo") {
            first = self.queue.last().filter(|(place, _)| *place >= from_place);
        }
        Ok(first.and_then(|(_, id)| Some((id, self.members.get(&id)?.0))))
    }

    fn waiters_before(&self, place: u64) -> Result<usize, Infallible> {
        Ok(self.queue.before(place))
    }

    #[inline]
    fn lowest_free_number(&self) -> Result<NonZeroU32, Infallible> {
        Ok(self.numbers.lowest_free())
    }

    #[inline]
    fn may_expire(&self) -> bool {
        !self.holder_ends.is_empty() || !self.waiter_ends.is_empty()
    }

    fn remove_due(&mut self, now: Time) -> Result<Vec<(AcquisitionId, Member, T)>, Infallible> {
        let mut due = Vec::new();
        while let Some(id) = self.next_due(now)
            && let Some((member, tag)) = self.remove(id)?
        {
            due.push((id, member, tag));
        }
        Ok(due)
    }

    /// Marks a waiter. Its own client learns from the mark that its data is not lost, and gives up. A waiter that is
    /// silent for longer than the mark lasts would have expired anyway.
    fn record_cancel(
        &mut self,
        id: AcquisitionId,
        member: &Member,
        now: Time,
    ) -> Result<(), Infallible> {
        self.cancelled.retain(|_, until| *until > now);
        if let Stage::Waiting { terms, .. } = member.stage
            && let Some(waiter_lease) = terms.waiter_lease()
            && !crate::broken::is("cancel-mark")
        {
            self.cancelled.insert(id, now + waiter_lease);
        }
        Ok(())
    }

    fn is_cancelled(&self, id: AcquisitionId, now: Time) -> bool {
        self.cancelled.get(&id).is_some_and(|until| *until > now)
    }

    fn longest_holder(&self) -> Option<AcquisitionId> {
        let holders = self.members.iter().filter(|(_, (member, _))| member.is_holder());
        holders.min_by_key(|(_, (member, _))| member.since).map(|(id, _)| *id)
    }

    fn forget(&mut self) {
        self.cancelled.clear();
    }

    fn remove_client(
        &mut self,
        client: ClientId,
        is_dead: bool,
    ) -> Result<Vec<Member>, Infallible> {
        let members = self.members.iter().filter(|(id, _)| id.client() == client);
        let leaving = members.filter(|(_, (member, _))| is_dead || !member.is_holder());
        let leaving: Vec<_> = leaving.map(|(id, _)| *id).collect();
        let removed = leaving.into_iter().filter_map(|id| self.remove(id).ok()?);
        Ok(removed.map(|(member, _)| member).collect())
    }
}
