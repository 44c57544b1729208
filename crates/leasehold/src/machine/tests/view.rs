//! The members of a machine, as the model checker and the simulation compare them.

use std::num::NonZeroU32;

use crate::clock::Time;
use crate::machine::{InMemory, Machine, Member, Stage};
use crate::{AcquisitionId, Fence};

/// A holder or a waiter with all of its deadlines.
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

impl MemberView {
    fn of(id: AcquisitionId, member: &Member) -> Self {
        Self {
            id,
            alive_by: member.alive_by,
            hold_until: member.hold_until(),
            fence: member.fence(),
            weight: member.weight(),
            slot_number: member.slot_number(),
            is_unclaimed: matches!(member.stage, Stage::Holding { unclaimed: true, .. }),
        }
    }

    pub(crate) fn is_holder(&self) -> bool {
        self.fence.is_some()
    }

    pub(crate) fn ends(&self) -> Option<Time> {
        self.alive_by.into_iter().chain(self.hold_until).min()
    }
}

impl<T: Clone + Default> Machine<InMemory<T>> {
    /// Returns all holders and waiters, in no particular order.
    pub(crate) fn members(&self) -> impl Iterator<Item = MemberView> {
        self.rows.members.iter().map(|(id, (member, _))| MemberView::of(*id, member))
    }

    pub(crate) fn member(&self, id: AcquisitionId) -> Option<MemberView> {
        let (member, _) = self.rows.members.get(&id)?;
        Some(MemberView::of(id, member))
    }

    /// Returns whether the id holds a permit with a TTL.
    #[cfg(feature = "redis")]
    pub(crate) fn is_limited(&self, id: AcquisitionId) -> bool {
        self.member(id).is_some_and(|member| member.hold_until.is_some())
    }
}
