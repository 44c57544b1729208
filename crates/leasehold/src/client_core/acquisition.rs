//! One acquisition of this client, and one release that the store has not confirmed yet.

use std::sync::Arc;

use super::delivery::Delivery;
use crate::clock::{Moment, Span};
use crate::machine::{ReleaseHint, Share, Terms};
use crate::{Fence, LossReason};

/// What an acquire asks for.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Request {
    pub(crate) terms: Terms,
    pub(crate) share: Share,
    /// Whether it waits in the queue, or only tries.
    pub(crate) queues: bool,
    /// Whether a waiter that is woken claims its permit before the acquire returns it.
    pub(crate) claims_first: bool,
    /// When the acquire gives up.
    pub(crate) gives_up_at: Option<Moment>,
    pub(crate) label: Option<Arc<str>>,
}

/// One acquisition that waits or holds.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(super) struct Acquisition<T> {
    pub(super) owner: T,
    pub(super) request: Request,
    /// The longest lease that the store may have given it.
    pub(super) longest_lease: Option<Span>,
    /// Whether the caller extends the lease just now, so that it is not renewed.
    pub(super) is_extended: bool,
    /// When the acquire began.
    pub(super) began: Moment,
    pub(super) phase: Phase,
    /// The delivery of its enqueue.
    pub(super) delivery: Delivery,
    /// Whether the store has answered any command about it.
    pub(super) was_answered: bool,
    /// Whether one of its enqueues may have been applied, or may still be applied, without an answer.
    pub(super) doubtful: bool,
    /// Which of its commands are in [`unsent`](super::NameCore::unsent) or [`renewals`](super::NameCore::renewals).
    pub(super) wants_enqueue: bool,
    pub(super) wants_renewal: bool,
    /// Since when a renewal is waiting to be sent or answered.
    pub(super) renewal: Option<Moment>,
    /// Whether silence makes the connection suspect: see [`timing`](super::timing).
    pub(super) silence_is_suspect: bool,
    /// Its place in [`waiting`](super::NameCore::waiting), once the store has answered that it waits.
    pub(super) place: Option<u64>,
    pub(super) renew_at: Option<Moment>,
    pub(super) ends_at: Option<Moment>,
    /// When the TTL of a lock or a pool lease ends. `None` before the grant, and if the store ends it.
    pub(super) ttl_ends_at: Option<Moment>,
}

/// Whether an acquisition waits or holds. It only moves forward.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Phase {
    Waiting,
    Held {
        /// When the client began to hold the permit.
        since: Moment,
        /// The fence of the grant. If the store reports another one, it has lost this grant and made it again.
        fence: Fence,
        /// The end of the lease's validity.
        valid_until: Moment,
        /// Whether the TTL ends before the lease would, so that no renewal extends the permit.
        limited_by_ttl: bool,
    },
}

impl<T> Acquisition<T> {
    pub(super) fn new(owner: T, request: Request, began: Moment) -> Self {
        Self {
            owner,
            longest_lease: request.terms.lease,
            is_extended: false,
            request,
            began,
            phase: Phase::Waiting,
            delivery: Delivery::Unsent,
            was_answered: false,
            doubtful: false,
            wants_enqueue: false,
            wants_renewal: false,
            renewal: None,
            silence_is_suspect: false,
            place: None,
            renew_at: None,
            ends_at: None,
            ttl_ends_at: None,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.phase == Phase::Waiting
    }

    pub(super) fn is_held(&self) -> bool {
        !self.is_waiting()
    }

    pub(super) fn terms(&self) -> Terms {
        self.request.terms
    }

    /// Returns when the holder must no longer rely on the permit; `None` for a waiter.
    pub(super) fn ends(&self) -> Option<Moment> {
        match self.phase {
            Phase::Held { valid_until, .. } => Some(self.capped(valid_until)),
            Phase::Waiting => None,
        }
    }

    /// Returns the earlier of the end of the lease's validity and the end of the TTL.
    pub(super) fn capped(&self, valid_until: Moment) -> Moment {
        self.ttl_ends_at.map_or(valid_until, |end| end.min(valid_until))
    }

    /// Returns which of its deadlines ended the permit.
    pub(super) fn why_ended(&self) -> LossReason {
        let limited_by_ttl = matches!(self.phase, Phase::Held { limited_by_ttl: true, .. });
        why_ended(self.terms(), limited_by_ttl)
    }

    /// What the release of this id may skip, if its caller has seen the permit.
    pub(super) fn hint(&self) -> ReleaseHint {
        let is_certain = self.delivery == Delivery::Answered && !self.doubtful;
        if self.is_held() && self.request.share == Share::ONE && is_certain {
            ReleaseHint::Held { limited: self.terms().ttl.is_some() }
        } else {
            ReleaseHint::Nothing
        }
    }
}

/// Returns which of the two deadlines ended a permit with these terms.
pub(crate) fn why_ended(Terms { lease, ttl }: Terms, limited_by_ttl: bool) -> LossReason {
    match (ttl, lease) {
        (Some(ttl), Some(lease)) if ttl > lease && !limited_by_ttl => LossReason::NotRenewed,
        (Some(_), _) => LossReason::TtlEnded,
        (None, _) => LossReason::NotRenewed,
    }
}

/// A release that is not answered yet.
#[derive(Clone, Debug)]
pub(super) struct PendingRelease<T> {
    pub(super) delivery: Delivery,
    pub(super) hint: ReleaseHint,
    /// See [`Acquisition::doubtful`].
    pub(super) doubtful: bool,
    /// Whether an answer about the id arrived after the release was sent, so that the id is released once more.
    pub(super) again: bool,
    /// How often the store has refused the release.
    pub(super) refused: u32,
    /// The caller that waits for the outcome, and until when.
    pub(super) caller: Option<(T, Moment)>,
    /// By then the store must have expired the id. `None` if it never expires.
    pub(super) until: Option<Moment>,
}

/// Returns when the store must have expired an id that is silent from `now` on. A waiter that is granted a permit at
/// the very end of its waiter lease has up to one lease to claim it.
pub(super) fn expired_by(lease: Option<Span>, now: Moment) -> Option<Moment> {
    let terms = Terms { lease, ttl: None };
    let (waiter_lease, lease) = terms.waiter_lease().zip(lease)?;
    Some(now + waiter_lease + lease)
}
