//! Signs of life, for a store that is away: what is renewed, asked about and released again, and when.

use std::time::Duration;

use super::{Chore, Desk, MAX_BATCH, scatter};
use crate::AcquisitionId;
use crate::clock::{Moment, Span};
use crate::engine::ticket::Ticket;
use crate::machine::Command;

/// How soon ids of which it is not known what the store knows are released again, unless a sign of life comes before.
const DOUBTS: Span = Span::from_millis(1000);

/// How soon a sign of life that was not answered is repeated, at the earliest and at the latest.
const SOON: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

impl Desk {
    /// A woken waiter claims its permit.
    pub(in crate::engine) fn claim(&mut self, id: AcquisitionId) {
        if let Some(ticket) = self.ticket(id).filter(|ticket| ticket.is_waiting()) {
            let terms = ticket.semaphore.terms;
            self.outbox.push(Command::Confirm { id, terms });
        }
    }

    /// Whether the store still knows it is not certain.
    pub(in crate::engine) fn ask_about(&mut self, id: AcquisitionId) {
        if let Some(ticket) = self.ticket(id) {
            self.renewals.push(renew(ticket));
        }
    }

    /// Believes a wake-up without asking.
    #[cfg(feature = "broken")]
    pub(in crate::engine) fn believe(&mut self, id: AcquisitionId, after: &mut super::After) {
        let Some(valid_for) = self.ticket(id).map(|own| own.semaphore.terms.heartbeat) else {
            return;
        };
        let fence = Some(crate::Fence::new(crate::clock::wall_micros()));
        let held = super::Held { slot_number: 1, fence, valid_for };
        self.told(id, super::Outcome::Held(held), Moment::now(), after);
    }

    /// A new connection: wake-ups and answers may have been missed.
    pub(in crate::engine) fn ask_about_everyone(&mut self) {
        let tickets = self.tickets.values().map(|entry| &entry.ticket);
        self.renewals.extend(tickets.filter(|ticket| !ticket.is_releasing()).map(|own| renew(own)));
        self.release_doubtful();
    }

    /// It is released again: with the next sign of life, or by itself if there is none.
    pub(super) fn doubt(&mut self, id: AcquisitionId) {
        self.doubtful.push(id);
        if self.doubtful.len() == 1 {
            self.agenda.insert((Moment::now() + DOUBTS, Chore::Doubts));
        }
    }

    pub(in crate::engine) fn release_doubtful(&mut self) {
        for id in std::mem::take(&mut self.doubtful) {
            self.outbox.push(Command::Release { id, confirmed: false });
        }
    }

    pub(super) fn ask_oldest_from(&mut self, place: u64) {
        let Some((_, oldest)) = self.waiting.range(place..).next() else { return };
        self.renewals.push(renew(&self.tickets[oldest].ticket));
    }

    /// Renewals go in batches: whoever is due, and those who will be soon.
    pub(super) fn renew_from(&mut self, first: AcquisitionId, now: Moment) {
        let Some(heartbeat) = self.renew_now(first) else { return };
        let soon = now + heartbeat.divided_by(6);
        let due = self.agenda.iter().take_while(|(at, _)| *at <= soon);
        let renewals = due.filter(|(_, chore)| matches!(chore, Chore::Renew(_)));
        let also: Vec<_> = renewals.take(MAX_BATCH - 1).copied().collect();
        for (at, chore) in also {
            self.agenda.remove(&(at, chore));
            if let Chore::Renew(id) = chore {
                self.renew_now(id);
            }
        }
        self.release_doubtful();
    }

    pub(super) fn renew_now(&mut self, id: AcquisitionId) -> Option<Span> {
        let entry = self.tickets.get_mut(&id)?;
        entry.renew_at = None;
        self.renewals.push(renew(&entry.ticket));
        entry.ticket.semaphore.terms.heartbeat
    }

    /// How long a sign of life may take: a third of the validity that is left, so that there is time for
    /// another.
    pub(in crate::engine) fn patience(&self, renewals: &[Command], now: Moment) -> Duration {
        let holders = renewals.iter().filter_map(Command::id).filter_map(|id| self.ticket(id));
        let left = holders
            .filter(|ticket| ticket.is_held())
            .map(|ticket| ticket.valid_until().saturating_since(now));
        left.min().map_or(Duration::MAX, |left| (left / 3).max(Duration::from_millis(10)))
    }

    pub(super) fn renew_soon(&mut self, id: AcquisitionId) {
        let Some(ticket) = self.ticket(id).filter(|ticket| !ticket.is_releasing()) else { return };
        let left = ticket.valid_until().saturating_since(Moment::now());
        let hurry = if ticket.is_waiting() { SOON.1 } else { (left / 3).clamp(SOON.0, SOON.1) };
        self.set_renewal(id, Moment::now() + Span::from_duration(hurry));
    }

    /// The next renewal is somewhere in the second third of the heartbeat interval, so that the renewals
    /// of permits that were granted together drift apart.
    pub(super) fn schedule_renewal(&mut self, id: AcquisitionId, sent: Moment) {
        let Some(heartbeat) = self.ticket(id).and_then(|own| own.semaphore.terms.heartbeat) else {
            return;
        };
        let third = heartbeat.divided_by(3);
        let spread = Span::from_micros(scatter(id.sequence() ^ sent.micros()) % third.micros() + 1);
        self.set_renewal(id, sent + third + spread);
    }

    pub(super) fn set_renewal(&mut self, id: AcquisitionId, at: Moment) {
        let Some(entry) = self.tickets.get_mut(&id) else { return };
        let before = entry.renew_at.replace(at);
        self.strike(before, Chore::Renew(id));
        self.agenda.insert((at, Chore::Renew(id)));
    }

    pub(super) fn schedule_end(&mut self, id: AcquisitionId, at: Moment) {
        if at == Moment::NEVER {
            return;
        }
        let Some(entry) = self.tickets.get_mut(&id) else { return };
        let before = entry.ends_at.replace(at);
        self.strike(before, Chore::End(id));
        self.agenda.insert((at, Chore::End(id)));
    }
}

fn renew(ticket: &Ticket) -> Command {
    Command::Renew { id: ticket.id, heartbeat: ticket.semaphore.terms.heartbeat }
}
