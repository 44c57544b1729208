//! Keeps leases alive and finds lost wake-ups: decides when a name renews, and when it sends the periodic query about
//! its first waiter.

use super::acquisition::Phase;
use super::delivery::Delivery;
use super::notice::Notice;
use super::timing::{self, Place, Situation};
use super::{NameCore, Rules, Timer, Want};
use crate::AcquisitionId;
use crate::clock::{Moment, Span};

/// The most holders that are renewed together.
const MOST_TOGETHER: usize = 256;

impl<T: Clone> NameCore<T> {
    /// Sets the slowest answer that is still normal.
    pub(crate) fn set_round_trip(&mut self, round_trip: std::time::Duration) {
        self.round_trip = round_trip;
    }

    /// Handles the timer of a renewal: it is due, or the last one was not answered in time.
    pub(super) fn renew_due(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        acquisition.renew_at = None;
        let Some(since) = acquisition.renewal else { return self.renew_from(id, now) };
        if acquisition.silence_is_suspect {
            self.notices.push(Notice::Overdue { since });
        }
        self.renew_again(id, now);
    }

    /// Renews a batch: the leases that are due now, and those that are due soon.
    fn renew_from(&mut self, first: AcquisitionId, now: Moment) {
        let Some(lease) = self.acquisitions[&first].terms().lease else { return };
        self.renew(first, now);
        let soon = now + lease.divided_by(6);
        let due = self.timers.iter().take_while(|(at, _)| *at <= soon);
        let renewals = due.filter(|(_, timer)| matches!(timer, Timer::Renew(_)));
        let also: Vec<_> = renewals.take(MOST_TOGETHER - 1).copied().collect();
        for (at, timer) in also {
            if let Timer::Renew(id) = timer
                && let Some(acquisition) = self.acquisitions.get_mut(&id)
                && acquisition.renewal.is_none()
            {
                acquisition.renew_at = None;
                self.timers.remove(&(at, timer));
                self.renew(id, now);
            }
        }
    }

    /// Renews one id, unless its renewal is already waiting or in flight. [`timing`] decides when silence is suspect.
    pub(super) fn renew(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        if acquisition.renewal.is_some() || acquisition.is_extended {
            return;
        }
        acquisition.renewal = Some(now);
        self.renew_again(id, now);
        self.send_renewal(id, now);
    }

    /// Sets the timer that checks again if a holder's renewal is not answered.
    pub(super) fn renew_again(&mut self, id: AcquisitionId, now: Moment) {
        let Some(plan) = self.plan(id, now) else { return };
        if let Some(acquisition) = self.acquisitions.get_mut(&id) {
            acquisition.silence_is_suspect = plan.silence_is_suspect;
        }
        self.set_renewal(id, now + Span::from_duration(plan.wait));
    }

    /// Queues a renewal. A holder's renewal does not wait behind other commands.
    pub(super) fn send_renewal(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        let is_queued = std::mem::replace(&mut acquisition.wants_renewal, true);
        if is_queued && !crate::broken::is("one-command") {
            return;
        }
        if acquisition.is_held() {
            self.renewals.push_back(id);
        } else {
            self.want(Want::Renew(id), now);
        }
    }

    /// Queries whether a waiter holds a permit, even if such a query is in flight: its answer may be older than what
    /// the client knows.
    pub(super) fn claim(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        acquisition.renewal.get_or_insert(now);
        self.send_renewal(id, now);
    }

    /// Renews every id that the store has answered before.
    pub(super) fn renew_all(&mut self, now: Moment) {
        let answered = self
            .acquisitions
            .iter()
            .filter(|(_, acquisition)| acquisition.delivery == Delivery::Answered);
        let mut answered: Vec<_> = answered.map(|(id, _)| *id).collect();
        answered.sort_unstable();
        for id in answered {
            self.renew(id, now);
        }
    }

    /// Sends the periodic query about the first waiter, and schedules the next one while there are waiters.
    pub(super) fn query(&mut self, now: Moment) {
        self.query_at = None;
        if crate::broken::is("wakeup") {
            return;
        }
        self.query_first_from(0, now);
        if !self.waiting.is_empty() {
            // The answer sets a better time.
            self.set_query(now + timing::question(Place::default(), false, None));
        }
    }

    /// Schedules the next query after an answer, while there are waiters. `about_first` says whether the answer was
    /// about our first waiter.
    pub(super) fn schedule_query(
        &mut self,
        next_expiry: Option<Span>,
        foreign: bool,
        about_first: bool,
        now: Moment,
    ) {
        let Some((_, first)) = self.waiting.first_key_value() else { return };
        let learnt = self.place_of_first.filter(|(id, ..)| id == first);
        let place = learnt.map_or(Place::default(), |(_, place, _)| place);
        let next_expiry =
            next_expiry.map(|delay| timing::jittered(delay, (self.spread)(now.micros())));
        let at = now + timing::question(place, foreign, next_expiry);
        if about_first || self.query_at.is_none_or(|earlier| at < earlier) {
            self.set_query(at);
        }
    }

    /// Schedules a query for a token. The first waiter in the queue is ours, and is granted a permit if it is queried
    /// after this time.
    pub(crate) fn token_arrives(&mut self, after: Span, now: Moment) {
        let at = now + after;
        self.token_at = Some(at);
        if !self.waiting.is_empty() && self.query_at.is_none_or(|earlier| at < earlier) {
            self.set_query(at);
        }
    }

    /// Records how many waiters are ahead of our first one.
    pub(super) fn learn_place(&mut self, id: AcquisitionId, ahead: usize, now: Moment) {
        let before = self.place_of_first.filter(|(first, ..)| *first == id);
        let moved = before
            .map(|(_, before, at)| (before.ahead.saturating_sub(ahead), now.saturating_since(at)));
        self.place_of_first = Some((id, Place { ahead, moved }, now));
    }

    fn set_query(&mut self, at: Moment) {
        let before = self.query_at.replace(at);
        self.cancel_timer(before, Timer::Query);
        self.timers.insert((at, Timer::Query));
    }

    pub(super) fn query_first_from(&mut self, place: u64, now: Moment) {
        if let Some((_, first)) = self.waiting.range(place..).next() {
            self.renew(*first, now);
        }
    }

    /// Schedules the next renewal after an answer to a request that was sent at `sent`.
    pub(super) fn schedule_renewal(&mut self, id: AcquisitionId, sent: Moment, now: Moment) {
        let Some(acquisition) = self.acquisitions.get(&id) else { return };
        if acquisition.is_held() {
            match self.plan(id, now) {
                Some(plan) => self.set_renewal(id, now + Span::from_duration(plan.renew_in)),
                None => self.cancel_renewal(id),
            }
            return;
        }
        // A waiter renews its place at a random moment in the second third of its waiter lease.
        let Some(waiter_lease) = acquisition.terms().waiter_lease() else { return };
        let third = waiter_lease.divided_by(3);
        let spread =
            Span::from_micros((self.spread)(id.sequence() ^ sent.micros()) % third.micros() + 1);
        self.set_renewal(id, sent + third + spread);
    }

    /// Returns when to renew a holder; `None` for a waiter, and for a holder that no renewal extends.
    fn plan(&self, id: AcquisitionId, now: Moment) -> Option<timing::Plan> {
        let acquisition = self.acquisitions.get(&id)?;
        let Phase::Held { valid_until, limited_by_ttl, .. } = acquisition.phase else {
            return None;
        };
        let valid_for = valid_until.saturating_since(now);
        let Rules { ends_with_ttl, spreads, longest_interval, .. } = self.rules;
        let ttl_left = (limited_by_ttl && ends_with_ttl).then_some(valid_for);
        let (lease, round_trip) = (acquisition.terms().lease?, self.round_trip);
        let spread = (self.spread)(id.sequence() ^ now.micros()).to_le_bytes()[0];
        let spread = spreads.then_some(spread);
        let margin = self.rules.margin_of(lease).duration();
        let situation =
            Situation { lease, margin, ttl_left, round_trip, valid_for, longest_interval, spread };
        timing::plan(situation)
    }

    pub(super) fn set_renewal(&mut self, id: AcquisitionId, at: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        let before = acquisition.renew_at.replace(at);
        self.cancel_timer(before, Timer::Renew(id));
        self.timers.insert((at, Timer::Renew(id)));
    }

    /// Called before the store is asked to let the lease of this holder end `lease` from now, which may be earlier than
    /// its current end. If the answer never arrives, the holder must not rely on the lease after the new end. No renewal
    /// is sent before [`extended`](Self::extended).
    pub(crate) fn extending(&mut self, id: AcquisitionId, lease: Span, now: Moment) {
        let until = self.rules.end_of(lease, now);
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        acquisition.is_extended = true;
        acquisition.longest_lease = acquisition.longest_lease.max(Some(lease));
        let Phase::Held { valid_until, .. } = &mut acquisition.phase else { return };
        *valid_until = (*valid_until).min(until);
        let valid_until = *valid_until;
        let (owner, valid_until) = (acquisition.owner.clone(), acquisition.capped(valid_until));
        self.notices.push(Notice::Limited { owner, valid_until });
        self.schedule_end(id, valid_until);
    }

    /// Applies the answer to an extension. `granted` is the new lease and the moment when the request was sent, or
    /// `None` if the store has not extended the lease, or has not answered.
    pub(crate) fn extended(
        &mut self,
        id: AcquisitionId,
        granted: Option<(Span, Moment)>,
        now: Moment,
    ) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        acquisition.is_extended = false;
        if let Some((lease, sent)) = granted {
            self.extend_validity(id, self.rules.end_of(lease, sent), now);
        }
        self.schedule_renewal(id, now, now);
    }

    fn cancel_renewal(&mut self, id: AcquisitionId) {
        let acquisition = self.acquisitions.get_mut(&id);
        let before = acquisition.and_then(|acquisition| acquisition.renew_at.take());
        self.cancel_timer(before, Timer::Renew(id));
    }

    pub(super) fn schedule_end(&mut self, id: AcquisitionId, at: Moment) {
        if at == Moment::NEVER {
            return;
        }
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        let before = acquisition.ends_at.replace(at);
        self.cancel_timer(before, Timer::End(id));
        self.timers.insert((at, Timer::End(id)));
    }

    /// Warns, once for each name, of a lease that cannot survive a lost connection at this round-trip time.
    pub(super) fn warn_of_short_lease(&mut self, id: AcquisitionId) {
        // A store in this process has no connection to lose.
        if self.warned_of_short_lease || self.round_trip.is_zero() {
            return;
        }
        let Some(acquisition) = self.acquisitions.get(&id) else { return };
        let limited = matches!(acquisition.phase, Phase::Held { limited_by_ttl: true, .. });
        let (lease, round_trip) = (acquisition.terms().lease, self.round_trip);
        let shortest = timing::shortest_lease(round_trip);
        if !limited && lease.is_some_and(|lease| lease.duration() < shortest) {
            self.warned_of_short_lease = true;
            let owner = acquisition.owner.clone();
            self.notices.push(Notice::ShortLease { owner, round_trip });
        }
    }
}
