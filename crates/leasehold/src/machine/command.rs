//! What is asked of the machine, and what it answers.

use std::sync::Arc;

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
}

/// What a client asks of one name.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// A permit, or a place in the queue. Declares the capacity, the newest declaration wins. By a
    /// holder it is a confirm, by a waiter it changes nothing. Without `wait` the answer may be `Full`.
    /// The label is for statistics alone, and only a store that is away looks at it.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    Enqueue { id: AcquisitionId, capacity: u32, wait: bool, terms: Terms, label: Option<Arc<str>> },
    /// A woken waiter claims its permit. The TTL and the fence are set at the first confirm.
    Confirm { id: AcquisitionId, terms: Terms },
    /// A sign of life, and the question whether it is still held or queued. Never moves a waiter, and
    /// does not confirm a holder.
    Renew { id: AcquisitionId, lease: Option<Span> },
    /// Removes an id wherever it is. Twice is harmless. Whether it is known to have been confirmed once
    /// saves a store that is away the search for what is kept for others alone.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    Release { id: AcquisitionId, confirmed: bool },
    /// Nothing but what every command does.
    Sweep,
}

impl Command {
    /// Whom it is about.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    pub(crate) fn id(&self) -> Option<AcquisitionId> {
        match self {
            Self::Enqueue { id, .. }
            | Self::Confirm { id, .. }
            | Self::Renew { id, .. }
            | Self::Release { id, .. } => Some(*id),
            Self::Sweep => None,
        }
    }
}

/// What the store answers to one command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Held(Held),
    /// In the queue, which now has this many waiters.
    Queued {
        length: usize,
    },
    Full,
    Waiting,
    Gone,
    Removed(Role),
    Swept,
}

/// A permit, as its holder is told about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    /// How many held a permit at that moment, this one included.
    pub(crate) slot_number: u32,
    /// None while the permit waits to be confirmed.
    pub(crate) fence: Option<Fence>,
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
        (sent + valid_for).minus(terms.margin())
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
    /// The sender's own waiters that became holders, confirmed.
    pub(crate) granted: Vec<(AcquisitionId, Held, T)>,
    /// Holders that were removed because their time was up.
    pub(crate) expired: Vec<(AcquisitionId, T)>,
}

impl<T> Default for Effects<T> {
    fn default() -> Self {
        Self { granted: Vec::new(), expired: Vec::new() }
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
    /// Sends the wake-up to the client of this waiter, and answers whether anybody heard it.
    pub(crate) wake: &'a mut dyn FnMut(AcquisitionId) -> bool,
    pub(crate) effects: &'a mut Effects<T>,
}
