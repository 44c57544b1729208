//! A client of the model: the shipped core, its user, and its connection.

use super::*;
use crate::client_core::{Answered, NameCore, Notice, Request as AcquireRequest, Timer};

/// A client, or rather a place for one: when a client dies, another one takes its place.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) own_id: ClientId,
    /// The most requests and answers on its connection.
    pub(super) in_flight: usize,
    sequence: u64,
    pub(super) core: NameCore<AcquisitionId>,
    /// What its user waits for and holds.
    pub(super) uses: Vec<Use>,
    /// Whether its requests reach the store, and wake-ups reach it.
    pub(super) connected: bool,
    /// Whether the store still believes that the clients that died in this place are connected.
    pub(super) half_open: bool,
}

/// One acquisition, as its user sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Use {
    pub(super) id: AcquisitionId,
    /// The permit, from its grant on: its fence, and until when the user may rely on it.
    pub(super) held: Option<(Fence, Moment)>,
    /// Whether the store has applied one of its enqueues.
    pub(super) applied: bool,
}

impl Use {
    pub(super) fn is_valid(&self, now: Moment) -> bool {
        self.held.is_some_and(|(_, valid_until)| now < valid_until)
    }
}

/// A client id encodes its place (from 1 on), times this, plus the number of clients that have died there.
const LIVES: u64 = 1000;

pub(super) fn slot(client: ClientId) -> usize {
    usize::try_from(client.number() / LIVES).unwrap_or_default() - 1
}

/// Spreads nothing. The model fires timers at any time anyway.
fn no_spread(_: u64) -> u64 {
    0
}

impl Client {
    pub(super) fn new(own_id: ClientId, in_flight: usize, has_stragglers: bool) -> Self {
        let answer_timeout = Span::from_millis(5000);
        Self {
            own_id,
            in_flight,
            sequence: 0,
            core: NameCore::new(own_id, answer_timeout, no_spread, has_stragglers),
            uses: Vec::new(),
            connected: true,
            half_open: false,
        }
    }

    pub(super) fn first(number: u64, in_flight: usize, has_stragglers: bool) -> Self {
        Self::new(ClientId::from_bits(number * LIVES), in_flight, has_stragglers)
    }

    /// Whether dying would change nothing.
    pub(super) fn is_new(&self) -> bool {
        self.core.is_idle()
    }

    pub(super) fn usage(&self, id: AcquisitionId) -> Option<&Use> {
        self.uses.iter().find(|usage| usage.id == id)
    }

    pub(super) fn holders(&self) -> impl Iterator<Item = (AcquisitionId, Fence)> {
        self.uses.iter().filter_map(|usage| usage.held.map(|(fence, _)| (usage.id, fence)))
    }

    pub(super) fn acquire(&mut self, world: &World, now: Moment) {
        self.sequence += 1;
        let id = AcquisitionId::new(self.own_id, self.sequence);
        let (share, label) = (world.share(slot(self.own_id)), None);
        let (terms, queues, gives_up_at) = (world.terms, true, None);
        let claims_first = false;
        let request = AcquireRequest { terms, share, queues, claims_first, gives_up_at, label };
        self.core.acquire(id, id, request, now);
        self.uses.push(Use { id, held: None, applied: false });
    }

    /// The user releases the permit or gives up waiting.
    pub(super) fn end(&mut self, id: AcquisitionId, now: Moment) {
        let was_seen = self.usage(id).is_some_and(|usage| usage.held.is_some());
        self.core.end(id, was_seen, now);
        self.uses.retain(|usage| usage.id != id);
        self.apply_notices();
    }

    pub(super) fn take(&mut self, world: &World, urgency: Urgency, now: Moment) -> Vec<Command> {
        match urgency {
            Urgency::Ordinary => self.core.take(usize::MAX, world.declared(), now),
            Urgency::Renewals => self.core.take_renewals(usize::MAX, now),
        }
    }

    pub(super) fn fire(&mut self, timer: Timer, now: Moment) {
        self.core.fire_now(timer, now);
        self.apply_notices();
    }

    /// Fires every timer that is due, and no other.
    pub(super) fn timeout(&mut self, now: Moment) {
        self.core.timeout(now);
        self.apply_notices();
    }

    pub(super) fn answered(
        &mut self,
        commands: &[Command],
        how: Answered,
        sent: Moment,
        now: Moment,
    ) {
        self.core.answered(commands, how, sent, now);
        self.apply_notices();
    }

    /// The client learns that these commands will not be answered.
    pub(super) fn unanswered(&mut self, commands: &[Command], sent: Moment, now: Moment) {
        let error = Error::unavailable("request", true, None);
        self.answered(commands, Answered::Unknown(error), sent, now);
    }

    pub(super) fn reconnected(&mut self, now: Moment) {
        self.core.connected(false, now);
        self.apply_notices();
    }

    pub(super) fn woken(&mut self, id: AcquisitionId, grant: Option<(Held, Moment)>, now: Moment) {
        self.core.woken(id, grant, now);
        self.apply_notices();
    }

    pub(super) fn cancelled(&mut self, id: AcquisitionId, now: Moment) {
        self.core.cancelled_elsewhere(id, now);
        self.apply_notices();
    }

    /// Does what the engine does with the tickets of its users. A ticket refuses an extension after the end of its
    /// validity. Here it does not, so the core alone has to keep that rule.
    fn apply_notices(&mut self) {
        while !self.core.notices().is_empty() {
            for notice in std::mem::take(self.core.notices()) {
                match notice {
                    Notice::Granted { owner, held, valid_until, .. } => {
                        if let Some(usage) = self.uses.iter_mut().find(|usage| usage.id == owner) {
                            usage.held = Some((held.fence, valid_until));
                        }
                    }
                    Notice::Extended { owner, valid_until, .. } => {
                        let usage = self.uses.iter_mut().find(|usage| usage.id == owner);
                        if let Some((_, until)) = usage.and_then(|usage| usage.held.as_mut()) {
                            *until = valid_until.max(*until);
                        }
                    }
                    Notice::Full { owner }
                    | Notice::Failed { owner, .. }
                    | Notice::Lost { owner, .. } => {
                        self.uses.retain(|usage| usage.id != owner);
                    }
                    Notice::Limited { .. }
                    | Notice::Renewed { .. }
                    | Notice::Released { .. }
                    | Notice::RenewalRefused { .. }
                    | Notice::ShortLease { .. }
                    | Notice::Overdue { .. } => {}
                }
            }
        }
    }

    pub(super) fn die(&mut self, has_stragglers: bool) {
        let successor = ClientId::from_bits(self.own_id.number() + 1);
        *self = Self { half_open: true, ..Self::new(successor, self.in_flight, has_stragglers) };
    }
}
