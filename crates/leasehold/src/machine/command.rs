//! What is asked of the machine, and what it answers.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::limits::{Steer, Steered};
use super::rate::Rate;
use crate::clock::{Moment, Span, Time};
use crate::{AcquisitionId, ClientId, Fence};

/// What an acquisition asks for, besides a permit.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Terms {
    /// How long the holder or waiter may be silent. In memory nobody dies alone, and on one host the kernel tells
    /// who is dead: none.
    pub(crate) lease: Option<Span>,
    /// The longest it may hold.
    pub(crate) ttl: Option<Span>,
}

impl Terms {
    /// How much earlier than the store a holder ends its own validity, for clocks that do not run alike.
    /// Without a lease the store is on this host, and its clock is ours.
    pub(crate) fn margin(self) -> Span {
        let Some(lease) = self.lease else { return Span::from_micros(1) };
        let margin = lease.divided_by(10).clamp(Span::from_millis(50), Span::from_millis(5000));
        margin.min(lease.divided_by(2))
    }

    /// How long a waiter may be silent: two leases. A waiter that cannot be reached is passed over, so its silence costs
    /// others nothing, and it needs to say only half as often that it is still there.
    pub(crate) fn patience(self) -> Option<Span> {
        self.lease.map(|lease| lease + lease)
    }
}

/// What a permit takes of the capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// How many units, at least one.
    pub(crate) weight: u32,
    /// Whether it has a slot number.
    pub(crate) numbered: bool,
}

impl Share {
    pub(crate) const ONE: Self = Self { weight: 1, numbered: false };
}

/// What a client says of the limits. What the store has not heard yet is the newest declaration. Otherwise it counts only
/// if the store knows none, so that an acquire does not undo what others have declared since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Declared {
    pub(crate) capacity: u32,
    pub(crate) is_new: bool,
    /// None if the client says nothing of it.
    pub(crate) rate: Option<Rate>,
    pub(crate) rate_is_new: bool,
}

impl Declared {
    /// A capacity alone.
    pub(crate) const fn capacity(capacity: u32, is_new: bool) -> Self {
        Self { capacity, is_new, rate: None, rate_is_new: false }
    }
}

/// What a client asks of one name.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// A permit, or a place in the queue. May declare the limits, the newest declaration wins. By a
    /// holder or a waiter it is a renewal. Without `wait` the answer may be `Full`.
    /// The label is for statistics alone, and only a store that is away looks at it.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    Enqueue {
        id: AcquisitionId,
        declared: Declared,
        wait: bool,
        terms: Terms,
        share: Share,
        label: Option<Arc<str>>,
    },
    /// A sign of life, and the question whether it is still held or queued. It also claims a permit that was granted with
    /// a wake-up. Never moves a waiter.
    Renew { id: AcquisitionId, terms: Terms },
    /// Removes an id wherever it is. Twice is harmless.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    Release { id: AcquisitionId, known: Known },
    /// Changes the limits. `capacity` is what the sender has declared, if anything.
    Steer { capacity: Option<u32>, steer: Steer },
    /// Nothing but what every command does.
    Sweep,
}

/// What the client knows of an id that it releases. It saves a store that is away some searches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// Nothing: it may hold, wait, or be unknown to the store.
    Nothing,
    /// The same, and if it holds, nobody has seen the permit: its token goes back.
    Unused,
    /// It held an ordinary permit, of one unit and without a number, and so is no waiter.
    Held {
        /// Whether it has a TTL.
        limited: bool,
    },
}

impl Command {
    /// Whom it is about.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    pub(crate) fn id(&self) -> Option<AcquisitionId> {
        match self {
            Self::Enqueue { id, .. } | Self::Renew { id, .. } | Self::Release { id, .. } => {
                Some(*id)
            }
            Self::Steer { .. } | Self::Sweep => None,
        }
    }
}

/// What the store answers to one command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Held(Held),
    /// In the queue, behind this many others.
    Waiting {
        ahead: usize,
    },
    Full,
    /// It asks for more units than there are: for more than this.
    TooHeavy {
        capacity: u32,
    },
    Gone,
    Removed(Role),
    Steered(Steered),
    Swept,
}

/// A permit, as its holder is told about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    /// The lowest that no other permit of the name has; none if it did not ask for one.
    pub(crate) slot_number: Option<NonZeroU32>,
    pub(crate) fence: Fence,
    /// Until the first of `renew_by` and `hold_until`; none if neither is set.
    pub(crate) valid_for: Option<Span>,
}

impl Held {
    /// Until when the holder may believe that it holds: counted from before the request was sent, and less
    /// a margin for clocks that do not run alike (invariant 6).
    pub(crate) fn valid_until(&self, terms: Terms, sent: Moment) -> Moment {
        let Some(valid_for) = self.valid_for else { return Moment::NEVER };
        #[cfg(feature = "broken")]
        if crate::broken::is("margin") {
            return sent + valid_for + valid_for;
        }
        (sent + valid_for).minus(self.margin(terms))
    }

    /// What is taken off: the margin of the lease, or of the time to claim the permit if that is shorter.
    pub(crate) fn margin(&self, terms: Terms) -> Span {
        let lease = terms.lease.map(|lease| self.valid_for.map_or(lease, |own| own.min(lease)));
        Terms { lease, ttl: None }.margin()
    }
}

/// What an id was when it was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Holder,
    Waiter,
    Nobody,
}

/// What a command did to others than the one it names.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Effects<T = ()> {
    /// The sender's own waiters that became holders.
    pub(crate) granted: Vec<(AcquisitionId, Held, T)>,
    /// Holders that were removed because their time was up.
    pub(crate) expired: Vec<(AcquisitionId, T)>,
    /// Clients that did not hear a wake-up. None of them is tried again in the same batch.
    pub(crate) out_of_reach: Vec<ClientId>,
}

impl<T> Default for Effects<T> {
    fn default() -> Self {
        Self { granted: Vec::new(), expired: Vec::new(), out_of_reach: Vec::new() }
    }
}

impl<T> Effects<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.granted.is_empty() && self.expired.is_empty()
    }
}

/// The circumstances of a command: who sent it and when, and how others can be reached.
pub(crate) struct Circumstances<'a, T = ()> {
    pub(crate) from: ClientId,
    /// The store's clock.
    pub(crate) now: Time,
    /// How long a woken waiter has to claim its permit.
    pub(crate) confirm_within: Span,
    /// Sends the wake-up to the client of this waiter, with the permit that it gets if anybody hears it. Answers whether
    /// anybody did.
    pub(crate) wake: &'a mut dyn FnMut(AcquisitionId, &Held) -> bool,
    pub(crate) effects: &'a mut Effects<T>,
}
