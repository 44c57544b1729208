//! The commands that clients send to the machine, and the outcomes that it answers with.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::limits::{LimitChange, LimitsChanged};
use super::rate::Rate;
use crate::clock::{Moment, Span, Time};
use crate::name::Name;
use crate::{AcquisitionId, ClientId, Fence, LockId};

/// The times that an acquisition asks for.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Terms {
    /// How long the holder or waiter may be silent before it expires. `None` in memory, where a holder dies only with
    /// the store, and on one host, where the kernel reports dead processes.
    pub(crate) lease: Option<Span>,
    /// The longest time that the permit may be held.
    pub(crate) ttl: Option<Span>,
}

impl Terms {
    /// Returns how much earlier than the store a holder ends its own validity, because clocks run at different speeds.
    /// Without a lease the store is on this host and reads the same clock, so one microsecond is enough.
    pub(crate) fn margin(self) -> Span {
        let Some(lease) = self.lease else { return Span::from_micros(1) };
        let margin = lease.divided_by(10).clamp(Span::from_millis(50), Span::from_millis(5000));
        margin.min(lease.divided_by(2))
    }

    /// Returns how long a waiter may be silent: two leases. *grant* skips a waiter that cannot be reached, so its
    /// silence costs the others nothing, and a waiter needs to renew only half as often as a holder.
    pub(crate) fn waiter_lease(self) -> Option<Span> {
        self.lease.map(|lease| lease + lease)
    }
}

/// The part of the capacity that a permit takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// The number of units, at least one.
    pub(crate) weight: u32,
    /// Whether the permit gets a slot number.
    pub(crate) numbered: bool,
}

impl Share {
    pub(crate) const ONE: Self = Self { weight: 1, numbered: false };
}

/// The limits that a client declares for a name. A declaration that is new replaces what the store knows. An older one
/// counts only if the store knows none, so that an acquire does not undo what other clients have declared since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Declared {
    pub(crate) capacity: u32,
    pub(crate) is_new: bool,
    /// `None` if the client declares no rate.
    pub(crate) rate: Option<Rate>,
    pub(crate) rate_is_new: bool,
}

impl Declared {
    /// A declaration of a capacity, without a rate.
    pub(crate) const fn capacity(capacity: u32, is_new: bool) -> Self {
        Self { capacity, is_new, rate: None, rate_is_new: false }
    }
}

/// A command of one client about one name.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Command {
    /// Asks for a permit, or for a place in the queue. The newest declaration of the limits wins. If the id already
    /// holds or waits, this is a renewal. Without `wait` the outcome may be `Full`.
    ///
    /// The label is for statistics only, and only remote stores read it.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    Enqueue {
        id: AcquisitionId,
        declared: Declared,
        wait: bool,
        terms: Terms,
        share: Share,
        label: Option<Arc<str>>,
    },
    /// Renews a holder or a waiter, and asks which of the two it still is. It also claims a permit that was granted
    /// with a wake-up. It never moves a waiter in the queue.
    ///
    /// `holds` says which of the two the client believes the id to be. It only helps a remote store to choose a script.
    Renew { id: AcquisitionId, terms: Terms, holds: bool },
    /// Removes an id, whether it holds or waits. Repeating it is harmless. If another client removes a waiter, renewals
    /// of that waiter are answered `Cancelled` for a while.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    Release { id: AcquisitionId, hint: ReleaseHint },
    /// Changes the limits. `capacity` is the capacity that the sender has declared, if it has declared one.
    ChangeLimits { capacity: Option<u32>, change: LimitChange },
    /// Does only what every command does: expire and grant.
    Sweep,
}

/// What the client knows about an id that it releases. This saves a remote store some searches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReleaseHint {
    /// Nothing: the id may hold, wait, or be unknown to the store.
    Nothing,
    /// The same. But if the id holds a permit, no caller has seen it, so its token is returned.
    Unused,
    /// The id held an ordinary permit (one unit, no slot number), so it is not in the queue.
    Held {
        /// Whether the permit has a TTL.
        limited: bool,
    },
}

impl Command {
    /// The id that the command names, if it names one.
    #[cfg_attr(not(any(test, feature = "redis")), allow(dead_code))]
    pub(crate) fn id(&self) -> Option<AcquisitionId> {
        match self {
            Self::Enqueue { id, .. } | Self::Renew { id, .. } | Self::Release { id, .. } => {
                Some(*id)
            }
            Self::ChangeLimits { .. } | Self::Sweep => None,
        }
    }
}

/// The store's answer to one command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Held(Held),
    /// In the queue, with this many waiters ahead.
    Waiting {
        ahead: usize,
    },
    Full,
    /// The permit weighs more than the capacity, which is returned.
    TooHeavy {
        capacity: u32,
    },
    /// The store does not know the id.
    Gone,
    /// Another client has removed this waiter.
    Cancelled,
    Removed(Role),
    LimitsChanged(LimitsChanged),
    Swept,
    /// The store chose a script that does not serve this case, and changed nothing. The client sends the command again.
    Unapplied,
}

/// A permit, as the store reports it to its holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    /// The lowest number that no other permit of the name has. `None` if the acquisition did not ask for one.
    pub(crate) slot_number: Option<NonZeroU32>,
    pub(crate) fence: Fence,
    /// The time until the first of `renew_by` and `hold_until`. `None` if neither is set.
    pub(crate) valid_for: Option<Span>,
}

impl Held {
    /// Returns the moment until which the holder may rely on the permit (invariant 6). It is counted from before the
    /// request was sent, minus a margin for clocks that run at different speeds.
    pub(crate) fn valid_until(&self, terms: Terms, sent: Moment) -> Moment {
        let Some(valid_for) = self.valid_for else { return Moment::NEVER };
        if crate::broken::is("margin") {
            return sent + valid_for + valid_for;
        }
        (sent + valid_for).minus(self.margin(terms))
    }

    /// Returns the margin that is subtracted: that of the lease, or that of the time to claim the permit if that is
    /// shorter.
    pub(crate) fn margin(&self, terms: Terms) -> Span {
        let lease = terms.lease.map(|lease| self.valid_for.map_or(lease, |left| left.min(lease)));
        Terms { lease, ttl: None }.margin()
    }
}

/// The role of an id when it was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Holder,
    Waiter,
    Nobody,
}

/// What a command did to ids other than the one that it names.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Effects<T = ()> {
    /// Waiters of the sender that became holders.
    pub(crate) granted: Vec<(AcquisitionId, Held, T)>,
    /// Holders that were removed because they expired.
    pub(crate) expired: Vec<(AcquisitionId, T)>,
    /// Clients that did not receive a wake-up. The machine does not try them again in the same batch.
    pub(crate) out_of_reach: Vec<ClientId>,
    /// The place from which waiters are still to be tried. In this batch, all waiters before it were out of reach.
    pub(crate) from_place: u64,
    /// How many waiters were out of reach.
    pub(crate) passed_over: u32,
}

impl<T> Default for Effects<T> {
    fn default() -> Self {
        let (granted, expired, out_of_reach) = (Vec::new(), Vec::new(), Vec::new());
        Self { granted, expired, out_of_reach, from_place: 0, passed_over: 0 }
    }
}

impl<T> Effects<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.granted.is_empty() && self.expired.is_empty()
    }
}

/// Whether a client received a wake-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(all(feature = "local", target_os = "linux")), allow(dead_code))]
pub(crate) enum Reach {
    Reached,
    /// It did not. Its waiters keep their places.
    Silent,
    /// Its process has ended, but another process has inherited its lifeline. It keeps its permits, and its waiters are
    /// removed.
    Inherited,
    /// It is dead. All its permits and waiters are removed.
    Dead,
}

impl From<bool> for Reach {
    fn from(received: bool) -> Self {
        if received { Self::Reached } else { Self::Silent }
    }
}

/// The context of a command: its sender, the time, and how to reach other clients.
pub(crate) struct Circumstances<'a, T = ()> {
    /// `None` if no client is the sender. Then every grant has to be claimed.
    pub(crate) from: Option<ClientId>,
    /// The store's clock.
    pub(crate) now: Time,
    /// The time that a woken waiter has to claim its permit.
    pub(crate) confirm_within: Span,
    /// Sends a wake-up to the client of this waiter, with the permit that the waiter gets if the client receives it.
    pub(crate) wake: &'a mut dyn FnMut(AcquisitionId, &Held) -> Reach,
    pub(crate) effects: &'a mut Effects<T>,
}

/// The answer of a store to the commands for one name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    /// One outcome for each command, in the same order.
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) effects: Effects,
    /// The time until the next lease ends in the store, if anybody waits. The client queries the store at that time.
    pub(crate) next_expiry: Option<Span>,
    /// The time until the first waiter gets its token, if that waiter belongs to the sender and waits for nothing else.
    pub(crate) next_token: Option<Span>,
    /// Whether another program holds or waits under this name. It passes permits on without waking this client.
    pub(crate) foreign: bool,
    /// What the sender may expect of the name from now on, if the store knows.
    pub(crate) outlook: Option<Outlook>,
}

/// What a client expects of a name. A store on a server chooses by it the shortest script that may serve a command. A
/// wrong guess costs a second request, and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outlook {
    /// Nobody waits, and units are free.
    Room,
    /// The same, but the client learnt it a while ago.
    Quiet,
    /// Nobody waits.
    Full,
    /// Somebody waits.
    Queue,
    /// Only the script for all cases serves the name.
    Special,
}

/// The name, key or id that a request concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    Semaphore(&'a Name),
    Lock(&'a Name),
    /// A lock whose key the caller does not know.
    LockId(&'a LockId),
    Pool(&'a Name),
}
