//! Keeps leases alive and finds lost wake-ups: decides when a name renews, and when it sends the periodic query about
//! its first waiter.

use std::sync::Arc;

use super::state::{State, Timer, Want};
use crate::AcquisitionId;
use crate::clock::{Moment, Span};
use crate::engine::callbacks::event;
use crate::engine::life::Life;
use crate::engine::sender::MAX_IDS;
use crate::engine::ticket::{After, Ticket};
use crate::engine::timing::{self, Place, Situation};

impl State {
    /// Handles the timer of a renewal: it is due, or the last one was not answered in time.
    pub(super) fn renew_due(&mut self, id: AcquisitionId, now: Moment) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        own.renew_at = None;
        let Some(since) = own.renewal else { return self.renew_from(id, now) };
        if own.silence_is_suspect && self.core.sender.heard_nothing_since(self.to, since) {
            self.core.suspect(self.to);
        }
        self.renew_again(id, now);
    }

    /// Renews a batch: the leases that are due now, and those that are due soon.
    fn renew_from(&mut self, first: AcquisitionId, now: Moment) {
        let Some(lease) = self.acquisitions[&first].ticket.semaphore.terms.lease else { return };
        self.renew(first, now);
        let soon = now + lease.divided_by(6);
        let due = self.timers.iter().take_while(|(at, _)| *at <= soon);
        let renewals = due.filter(|(_, timer)| matches!(timer, Timer::Renew(_)));
        let also: Vec<_> = renewals.take(MAX_IDS - 1).copied().collect();
        for (at, timer) in also {
            if let Timer::Renew(id) = timer
                && let Some(own) = self.acquisitions.get_mut(&id)
                && own.renewal.is_none()
            {
                own.renew_at = None;
                self.timers.remove(&(at, timer));
                self.renew(id, now);
            }
        }
    }

    /// Renews one id, unless its renewal is already waiting or in flight. [`timing`] decides when silence is suspect.
    pub(super) fn renew(&mut self, id: AcquisitionId, now: Moment) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        if own.renewal.is_some() {
            return;
        }
        own.renewal = Some(now);
        self.renew_again(id, now);
        self.send_renewal(id);
    }

    /// Sets the timer that checks again if a holder's renewal is not answered.
    pub(super) fn renew_again(&mut self, id: AcquisitionId, now: Moment) {
        let Some(own) = self.acquisitions.get(&id).filter(|own| own.ticket.is_held()) else {
            return;
        };
        let Some(plan) = self.plan(&own.ticket, now, id) else { return };
        if let Some(own) = self.acquisitions.get_mut(&id) {
            own.silence_is_suspect = plan.silence_is_suspect;
        }
        self.set_renewal(id, now + Span::from_duration(plan.wait));
    }

    /// Queues a renewal. A holder's renewal does not wait behind other commands.
    pub(super) fn send_renewal(&mut self, id: AcquisitionId) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        if std::mem::replace(&mut own.wants.renewal, true) {
            return;
        }
        if own.ticket.is_held() {
            self.renewals.push_back(id);
        } else {
            self.want(Want::Renew(id));
        }
    }

    /// Asks about every id that the store has answered before, because the connection is new. The other commands are
    /// sent again anyway.
    pub(super) fn renew_everyone(&mut self, now: Moment) {
        let known = self.acquisitions.iter().filter(|(_, own)| own.life == Life::Answered);
        let mut known: Vec<_> = known.map(|(id, _)| *id).collect();
        known.sort_unstable();
        for id in known {
            self.renew(id, now);
        }
    }

    /// Sends the periodic query about the first waiter, and schedules the next one while there are waiters.
    pub(super) fn ask(&mut self, now: Moment) {
        self.ask_at = None;
        #[cfg(feature = "broken")]
        if crate::broken::is("wakeup") {
            return;
        }
        self.ask_about_first_from(0, now);
        if !self.waiting.is_empty() {
            // The answer sets a better time.
            self.set_question(now + timing::question(Place::default(), false, None));
        }
    }

    /// Schedules the next query after an answer, while there are waiters. `asked` says whether the answer was about our
    /// first waiter.
    pub(super) fn schedule_question(
        &mut self,
        next_expiry: Option<Span>,
        foreign: bool,
        asked: bool,
    ) {
        let Some((_, first)) = self.waiting.first_key_value() else { return };
        let known = self.place_of_first.filter(|(id, ..)| id == first);
        let place = known.map_or(Place::default(), |(_, place, _)| place);
        let at = Moment::now() + timing::question(place, foreign, next_expiry.map(jittered));
        if asked || self.ask_at.is_none_or(|earlier| at < earlier) {
            self.set_question(at);
        }
    }

    /// Schedules a query for a token. The first waiter in the queue is ours, and is granted a permit if it is queried
    /// after this time.
    pub(super) fn ask_for_token(&mut self, after: Span) {
        let at = Moment::now() + after;
        self.token_at = Some(at);
        if !self.waiting.is_empty() && self.ask_at.is_none_or(|earlier| at < earlier) {
            self.set_question(at);
        }
    }

    /// Records how many waiters are ahead of our first one.
    pub(super) fn learn_place(&mut self, id: AcquisitionId, ahead: usize) {
        let now = Moment::now();
        let before = self.place_of_first.filter(|(known, ..)| *known == id);
        let moved = before
            .map(|(_, before, at)| (before.ahead.saturating_sub(ahead), now.saturating_since(at)));
        self.place_of_first = Some((id, Place { ahead, moved }, now));
    }

    fn set_question(&mut self, at: Moment) {
        let before = self.ask_at.replace(at);
        self.cancel_timer(before, Timer::Ask);
        self.timers.insert((at, Timer::Ask));
    }

    pub(super) fn ask_about_first_from(&mut self, place: u64, now: Moment) {
        if let Some((_, first)) = self.waiting.range(place..).next() {
            self.renew(*first, now);
        }
    }

    /// Schedules the next renewal after an answer.
    pub(super) fn schedule_renewal(&mut self, id: AcquisitionId, sent: Moment) {
        let Some(own) = self.acquisitions.get(&id) else { return };
        let ticket = own.ticket.clone();
        let now = Moment::now();
        if ticket.is_held() {
            match self.plan(&ticket, now, id) {
                Some(plan) => self.set_renewal(id, now + Span::from_duration(plan.renew_in)),
                None => self.cancel_renewal(id),
            }
            return;
        }
        // A waiter renews its place at a random moment in the second third of its patience.
        let Some(patience) = ticket.semaphore.terms.patience() else { return };
        let third = patience.divided_by(3);
        let spread = Span::from_micros(scatter(id.sequence() ^ sent.micros()) % third.micros() + 1);
        self.set_renewal(id, sent + third + spread);
    }

    fn plan(&self, ticket: &Ticket, now: Moment, id: AcquisitionId) -> Option<timing::Plan> {
        let valid_for = ticket.valid_until().saturating_since(now);
        let ttl_left = ticket.is_limited_by_ttl().then_some(valid_for);
        let round_trip = self.core.sender.round_trip(self.to);
        let lease = ticket.semaphore.terms.lease?;
        let spread = scatter(id.sequence() ^ now.micros()).to_le_bytes()[0];
        timing::plan(Situation { lease, ttl_left, round_trip, valid_for, spread })
    }

    pub(super) fn set_renewal(&mut self, id: AcquisitionId, at: Moment) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        let before = own.renew_at.replace(at);
        self.cancel_timer(before, Timer::Renew(id));
        self.timers.insert((at, Timer::Renew(id)));
    }

    fn cancel_renewal(&mut self, id: AcquisitionId) {
        let before = self.acquisitions.get_mut(&id).and_then(|own| own.renew_at.take());
        self.cancel_timer(before, Timer::Renew(id));
    }

    pub(super) fn schedule_end(&mut self, id: AcquisitionId, at: Moment) {
        if at == Moment::NEVER {
            return;
        }
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        let before = own.ends_at.replace(at);
        self.cancel_timer(before, Timer::End(id));
        self.timers.insert((at, Timer::End(id)));
    }

    /// Warns, once for each name, of a lease that cannot survive a lost connection at this round-trip time.
    pub(super) fn warn_of_short_lease(&mut self, ticket: &Arc<Ticket>, after: &mut After) {
        let Some(lease) = ticket.semaphore.terms.lease.filter(|_| !self.warned_of_short_lease)
        else {
            return;
        };
        let round_trip = self.core.sender.round_trip(self.to);
        let shortest = timing::shortest_lease(round_trip);
        if lease.duration() < shortest && !ticket.is_limited_by_ttl() {
            self.warned_of_short_lease = true;
            let ticket = ticket.clone();
            after.report(move || {
                let (name, lease) = (ticket.semaphore.named.name().as_str(), lease.duration());
                let what = "the lease is too short for this round-trip time: if the connection is lost, so is the permit";
                event!(warn, name, ?lease, ?round_trip, ?shortest, "{what}");
            });
        }
    }
}

/// Adds a random delay of up to a tenth, but at most 100 ms, so that not all clients ask at once.
fn jittered(delay: Span) -> Span {
    let most = (delay.micros() / 10).clamp(1, 100_000);
    Span::from_micros(delay.micros() + scatter(Moment::now().micros()) % most + 1)
}

/// Hashes a number, to spread numbers evenly. Not for secrets.
fn scatter(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
