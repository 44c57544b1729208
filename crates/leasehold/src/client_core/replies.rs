//! The store's answers, and what follows from them for the acquisitions of this client.

use super::acquisition::Phase;
use super::delivery::Delivery;
use super::notice::{Failure, Notice};
use super::{Acquisition, NameCore, Timer, Want};
use crate::clock::{Moment, Span};
use crate::machine::Reply;
use crate::machine::{Command, Held, Outcome, ReleaseHint, Role, Terms};
use crate::{AcquisitionId, Error, LossReason};

/// How soon a release is repeated if it was refused, or if an enqueue of its id may still be applied. If it is refused
/// repeatedly, the delay grows up to `RELEASE_AGAIN_AT_LATEST` times this.
const RELEASE_AGAIN: Span = Span::from_millis(1000);
const RELEASE_AGAIN_AT_LATEST: u64 = 10;

/// How long after a trusted wake-up the permit is claimed. A permit that is released before then needs no request for
/// the claim.
const CLAIM_AFTER: Span = Span::from_millis(20);

/// How a group of commands was answered.
#[derive(Debug)]
pub(crate) enum Answered {
    Applied(Reply),
    /// Nothing was applied, because another server serves the name now.
    Elsewhere,
    /// Nothing was applied. The store serves other names, but cannot serve this one at the moment.
    NotNow,
    /// The store did not answer, and may have applied any of the commands.
    Unknown(Error),
    /// The store refuses the commands, and repeating them does not help.
    Refused(Error),
}

impl<T: Clone> NameCore<T> {
    /// Applies the answer to commands that were [taken](Self::take) and sent at `sent`.
    pub(crate) fn answered(
        &mut self,
        commands: &[Command],
        answer: Answered,
        sent: Moment,
        now: Moment,
    ) {
        self.in_flight -= 1;
        match answer {
            Answered::Applied(reply) => self.apply_reply(commands, reply, sent, now),
            Answered::Elsewhere => self.outcome_unknown(commands, sent, now),
            Answered::NotNow => {
                self.outcome_unknown(commands, sent, now);
                self.unserved.get_or_insert(sent);
            }
            Answered::Unknown(error) => {
                self.report_renewals(commands, &error, now);
                self.outcome_unknown(commands, sent, now);
            }
            Answered::Refused(error) => self.apply_refusal(commands, &error, now),
        }
    }

    pub(super) fn apply_reply(
        &mut self,
        commands: &[Command],
        reply: Reply,
        sent: Moment,
        now: Moment,
    ) {
        let mut about_first = false;
        let is_applied = reply.outcomes.iter().any(|outcome| *outcome != Outcome::Unapplied);
        self.unserved = None;
        for (command, outcome) in commands.iter().zip(reply.outcomes) {
            let Some(id) = command.id() else { continue };
            if outcome == Outcome::Unapplied {
                self.unapplied(command, sent, now);
                continue;
            }
            if let Outcome::Removed(role) = outcome {
                self.released(id, role, sent, now);
                continue;
            }
            let renews = matches!(command, Command::Renew { .. });
            let Some(acquisition) = self.acquisitions.get_mut(&id) else {
                if !renews && matches!(outcome, Outcome::Held(_) | Outcome::Waiting { .. }) {
                    self.ensure_released(id, false, now);
                }
                continue;
            };
            if renews {
                acquisition.renewal = None;
            } else {
                acquisition.delivery = Delivery::Answered;
            }
            acquisition.was_answered = true;
            if renews && acquisition.is_held() {
                let result = Ok(!matches!(outcome, Outcome::Gone | Outcome::Cancelled));
                let owner = acquisition.owner.clone();
                self.notices.push(Notice::Renewed { owner, result, sent });
            }
            let place = acquisition.place;
            self.apply_outcome(id, outcome, (sent, Some(command)), now);
            match (outcome, place) {
                (Outcome::Waiting { ahead }, _) if self.is_first(id) => {
                    about_first = true;
                    self.learn_place(id, ahead, now);
                }
                // Another client's command granted the permit, and the wake-up was lost. There may be more such
                // waiters.
                (Outcome::Held(_), Some(place)) if renews => self.query_first_from(place + 1, now),
                _ => {}
            }
        }
        for (id, held, ()) in reply.effects.granted {
            match self.acquisitions.get_mut(&id) {
                Some(acquisition) => {
                    acquisition.delivery = Delivery::Answered;
                    acquisition.was_answered = true;
                }
                None => self.ensure_released(id, false, now),
            }
            self.apply_outcome(id, Outcome::Held(held), (sent, None), now);
        }
        // A reply to commands that were not applied says nothing of the queue.
        if !is_applied {
            return;
        }
        self.schedule_query(reply.next_expiry, reply.foreign, about_first, now);
        self.token_at = None;
        if let Some(after) = reply.next_token {
            self.token_arrives(after, now);
        }
    }

    /// Handles commands whose answer did not arrive before the connection was lost. Those that are still wanted are
    /// sent again, in the same order.
    pub(super) fn outcome_unknown(&mut self, commands: &[Command], sent: Moment, now: Moment) {
        for command in commands {
            match command {
                Command::Enqueue { id, .. } => {
                    let Some(acquisition) = self.acquisitions.get_mut(id) else {
                        self.ensure_released(*id, true, now);
                        continue;
                    };
                    acquisition.doubtful = true;
                    if acquisition.is_held() {
                        continue;
                    }
                    acquisition.delivery = Delivery::Unknown;
                    if crate::broken::is("resent") {
                        continue;
                    }
                    if !std::mem::replace(&mut acquisition.wants_enqueue, true) {
                        self.want_again(Want::Enqueue(*id), sent);
                    }
                }
                Command::Renew { id, .. } => self.send_renewal(*id, now),
                Command::Release { id, .. } if crate::broken::is("released-once") => {
                    self.remove_release(*id);
                }
                Command::Release { id, .. } => {
                    if let Some(release) = self.releases.get_mut(id) {
                        release.delivery = Delivery::Unknown;
                        self.want_again(Want::Release(*id), sent);
                    }
                    if self.is_shared() {
                        self.withdraw_releases();
                    }
                }
                Command::ChangeLimits { .. } | Command::Sweep => {}
            }
        }
    }

    /// Sends a command again that the store has certainly not applied, before everything that was not sent yet.
    fn unapplied(&mut self, command: &Command, sent: Moment, now: Moment) {
        let Command::Enqueue { id, .. } = command else {
            return self.outcome_unknown(std::slice::from_ref(command), sent, now);
        };
        // If the acquire was dropped in the meantime, its release is on its way, and harmless.
        let Some(acquisition) = self.acquisitions.get_mut(id) else { return };
        if acquisition.is_held() {
            return;
        }
        let is_known = acquisition.was_answered || acquisition.doubtful;
        acquisition.delivery = if is_known { Delivery::Unknown } else { Delivery::Unsent };
        if !std::mem::replace(&mut acquisition.wants_enqueue, true) {
            self.want_again(Want::Enqueue(*id), sent);
        }
    }

    /// Reports that the renewals among these commands were not answered. They are sent again.
    fn report_renewals(&mut self, commands: &[Command], error: &Error, now: Moment) {
        for command in commands {
            if let Command::Renew { id, .. } = command {
                self.report_renewal(*id, error, now);
            }
        }
    }

    fn report_renewal(&mut self, id: AcquisitionId, error: &Error, now: Moment) {
        let holder = self.acquisitions.get(&id).filter(|acquisition| acquisition.is_held());
        if let Some(owner) = holder.map(|acquisition| acquisition.owner.clone()) {
            self.notices.push(Notice::Renewed { owner, result: Err(error.clone()), sent: now });
        }
    }

    /// Handles commands that the store refuses.
    pub(super) fn apply_refusal(&mut self, commands: &[Command], error: &Error, now: Moment) {
        for command in commands {
            match command {
                Command::Enqueue { id, .. } => {
                    self.fail_waiter(*id, Failure::Refused(error.clone()), now);
                }
                Command::Renew { id, .. } => {
                    self.fail_waiter(*id, Failure::Refused(error.clone()), now);
                    // A holder keeps its permit until its validity ends, and repeats the renewal until then.
                    self.report_renewal(*id, error, now);
                    if let Some(acquisition) = self.acquisitions.get_mut(id) {
                        acquisition.renewal = None;
                        let (owner, error) = (acquisition.owner.clone(), error.clone());
                        self.notices.push(Notice::RenewalRefused { owner, error });
                        self.renew_again(*id, now);
                    }
                }
                Command::Release { id, .. } => self.release_refused(*id, error, now),
                Command::ChangeLimits { .. } | Command::Sweep => {}
            }
        }
    }

    /// Handles a message that another client has released this id.
    pub(crate) fn cancelled_elsewhere(&mut self, id: AcquisitionId, now: Moment) {
        // A waiter that was removed must not be enqueued again.
        if !self.cancel_waiter(id, now) {
            // A query in flight may have been applied before the release.
            self.claim(id, now);
        }
    }

    /// Ends the wait of an id that another client has removed from the queue. Returns whether the id waited.
    fn cancel_waiter(&mut self, id: AcquisitionId, now: Moment) -> bool {
        let waits = self.acquisitions.get(&id).is_some_and(Acquisition::is_waiting);
        if waits {
            self.fail_waiter(id, Failure::Cancelled, now);
        }
        waits
    }

    /// Repeats the release as long as the store may know the id. The cause may be temporary: a full disk may have room
    /// again.
    fn release_refused(&mut self, id: AcquisitionId, error: &Error, now: Moment) {
        let Some(release) = self.releases.get_mut(&id) else { return };
        release.delivery = Delivery::Unknown;
        let times = 1_u64.checked_shl(release.refused).unwrap_or(u64::MAX);
        release.refused += 1;
        let delay = RELEASE_AGAIN.micros() * times.min(RELEASE_AGAIN_AT_LATEST);
        if !self.answer_release(id, Err(Failure::Refused(error.clone()))) {
            self.failed_release = Some(error.clone());
        }
        self.timers.insert((now + Span::from_micros(delay), Timer::ReleaseAgain(id)));
    }

    fn released(&mut self, id: AcquisitionId, role: Role, sent: Moment, now: Moment) {
        self.answer_release(id, Ok(role != Role::Nobody));
        // The former server may have answered, after the client knew of the new one.
        let is_outdated = self.taken_over.is_some_and(|at| sent <= at);
        let Some(release) = self.releases.get_mut(&id) else { return };
        if release.again || is_outdated {
            release.delivery = Delivery::Unknown;
            self.want(Want::Release(id), now);
            if self.is_shared() {
                self.withdraw_releases();
            }
            return;
        }
        let in_time = release.until.is_some_and(|until| now < until);
        let may_come_back = release.doubtful && in_time && self.has_stragglers;
        if may_come_back && !crate::broken::is("repeated-release") {
            // An enqueue that was sent over an earlier connection may still be applied.
            release.delivery = Delivery::Unknown;
            self.timers.insert((now + RELEASE_AGAIN, Timer::ReleaseAgain(id)));
            return;
        }
        self.remove_release(id);
        self.ended_in_store(id, now);
        if self.releases.is_empty() {
            // All earlier releases have succeeded by now.
            self.failed_release = None;
        }
    }

    /// Applies the store's outcome for one id, in answer to a request that was sent at `sent`, with this command about
    /// the id.
    fn apply_outcome(
        &mut self,
        id: AcquisitionId,
        outcome: Outcome,
        (sent, command): (Moment, Option<&Command>),
        now: Moment,
    ) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        let renews = matches!(command, Some(Command::Renew { .. }));
        let is_cancelled = outcome == Outcome::Cancelled;
        let outcome =
            if is_cancelled && crate::broken::is("cancelled") { Outcome::Gone } else { outcome };
        match (outcome, acquisition.phase) {
            // Another server has taken over without the grant, and has made it again. In between, another client may
            // have held the permit.
            (Outcome::Held(held), Phase::Held { since, fence, .. })
                if fence != held.fence
                    && self.taken_over.is_some_and(|at| since < at && at <= sent)
                    && !crate::broken::is("granted-again") =>
            {
                self.lose(id, LossReason::Missing, now);
            }
            (Outcome::Held(held), _) => {
                let Terms { lease, ttl } = acquisition.terms();
                let limited = match command {
                    // The client has asked for a lease that ends with the TTL.
                    Some(Command::Enqueue { terms, .. } | Command::Renew { terms, .. })
                        if self.rules.is_one_lease =>
                    {
                        terms.lease < lease
                    }
                    _ => ttl.is_some_and(|ttl| held.valid_for < lease || Some(ttl) <= lease),
                };
                self.hold(id, &held, limited, sent, now);
            }
            // The store was asked after it had granted the permit. So another server has taken over, without the
            // grant, and the permit may be another holder's.
            (Outcome::Waiting { .. }, Phase::Held { since, .. })
                if renews && since < sent && !crate::broken::is("missing") =>
            {
                self.lose(id, LossReason::Missing, now);
            }
            // A wake-up overtook this answer. Or the permit was released by its id, and the id is queued again.
            (Outcome::Waiting { .. }, Phase::Held { .. }) => {
                acquisition.doubtful = true;
                self.schedule_renewal(id, sent, now);
            }
            (Outcome::Waiting { .. }, Phase::Waiting) => {
                self.add_waiting(id);
                self.schedule_renewal(id, sent, now);
            }
            (Outcome::Full, Phase::Waiting) => {
                if let Some(owner) = self.end_unknown(id, ReleaseHint::Unused, now) {
                    self.notices.push(Notice::Full { owner });
                }
            }
            (Outcome::TooHeavy { capacity }, Phase::Waiting) => {
                if let Some(owner) = self.end_unknown(id, ReleaseHint::Unused, now) {
                    let failure = Failure::TooHeavy { capacity };
                    self.notices.push(Notice::Failed { owner, failure });
                }
            }
            (Outcome::Cancelled, Phase::Waiting) => {
                self.cancel_waiter(id, now);
            }
            // The enqueue was sent after the query, and will be answered. A second enqueue could be applied after the
            // permit that the first one got has ended. It would leave the id in the queue.
            (Outcome::Gone, Phase::Waiting)
                if acquisition.delivery == Delivery::Sent
                    && !crate::broken::is("enqueued-once") => {}
            (Outcome::Gone, Phase::Waiting) if crate::broken::is("queued-again") => {}
            (Outcome::Gone, Phase::Waiting) => {
                // The store expired the waiter, or lost its data. The waiter goes to the end of the queue.
                self.remove_waiting(id);
                self.want_enqueue(id, now);
            }
            (Outcome::Gone | Outcome::Cancelled, Phase::Held { .. }) => {
                if let Some(owner) = self.end_unknown(id, ReleaseHint::Nothing, now) {
                    self.notices.push(Notice::Lost { owner, reason: LossReason::Missing });
                }
                self.ended_in_store(id, now);
            }
            // An earlier answer has granted the permit.
            (Outcome::Full | Outcome::TooHeavy { .. }, Phase::Held { .. })
            | (
                Outcome::Removed(_)
                | Outcome::LimitsChanged(_)
                | Outcome::Swept
                | Outcome::Unapplied,
                _,
            ) => {}
        }
    }

    /// Applies a grant or a renewal by the store, in answer to a request that was sent at `sent`. `limited` says that
    /// the TTL ends before the lease would.
    fn hold(&mut self, id: AcquisitionId, held: &Held, limited: bool, sent: Moment, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        let from = if crate::broken::is("counted-from-answer") { now } else { sent };
        let until = self.rules.valid_until(held, acquisition.terms(), from);
        if self.rules.is_one_lease && acquisition.is_waiting() {
            acquisition.ttl_ends_at = acquisition.terms().ttl.map(|ttl| from + ttl);
        }
        match &mut acquisition.phase {
            // The answer took longer than the permit is valid. The caller has not seen the permit, so a waiter claims
            // it again. A try asks again, and is answered `Full` if another client has the permit by now.
            Phase::Waiting if until <= now && acquisition.request.queues => {
                return self.claim(id, now);
            }
            // The lease of a lock may be shorter than a round trip. Its holder then loses it at once.
            Phase::Waiting if until <= now && !self.rules.is_one_lease => {
                return self.want_enqueue(id, now);
            }
            Phase::Waiting => {
                let limited_by_ttl = limited || acquisition.capped(until) < until;
                let (since, fence, valid_until) = (now, held.fence, until);
                acquisition.phase = Phase::Held { since, fence, valid_until, limited_by_ttl };
                let (owner, gives_up_at) =
                    (acquisition.owner.clone(), acquisition.request.gives_up_at);
                let (held, valid_until) = (*held, acquisition.capped(until));
                self.notices.push(Notice::Granted { owner, held, valid_until, limited_by_ttl });
                self.remove_waiting(id);
                self.cancel_timer(gives_up_at, Timer::GiveUp(id));
                self.warn_of_short_lease(id);
            }
            // A permit whose validity has ended stays lost, even if its end has not been noticed yet. The answer may
            // belong to an enqueue that was sent twice and granted again, and then another client may have held the
            // permit in between.
            Phase::Held { limited_by_ttl, .. } => {
                *limited_by_ttl |= limited;
                self.extend_validity(id, until, now);
            }
        }
        if let Some(ends) = self.acquisitions.get(&id).and_then(Acquisition::ends) {
            self.schedule_end(id, ends);
        }
        self.schedule_renewal(id, sent, now);
    }

    pub(super) fn extend_validity(&mut self, id: AcquisitionId, until: Moment, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        let is_valid = acquisition.ends().is_some_and(|ends| now < ends);
        let ttl_ends_at = acquisition.ttl_ends_at.unwrap_or(Moment::NEVER);
        if let Phase::Held { valid_until, limited_by_ttl, .. } = &mut acquisition.phase
            && (is_valid || crate::broken::is("stays-lost"))
        {
            // One answer may overtake another, and the latest time counts.
            *valid_until = until.max(*valid_until);
            *limited_by_ttl |= ttl_ends_at < *valid_until;
            let (valid_until, limited_by_ttl) = ((*valid_until).min(ttl_ends_at), *limited_by_ttl);
            let owner = acquisition.owner.clone();
            self.notices.push(Notice::Extended { owner, valid_until, limited_by_ttl });
            self.schedule_end(id, valid_until);
        }
    }

    /// Handles a wake-up, which says that this waiter was granted a permit, at the moment in `grant` or later.
    ///
    /// If at least half of the time to claim it is left, the client holds the permit at once and claims it a little
    /// later. Otherwise, or if the age of the wake-up is not known, the client queries the store first. So it does for
    /// a semaphore that [claims first](crate::SemaphoreBuilder::claim_first).
    pub(crate) fn woken(&mut self, id: AcquisitionId, grant: Option<(Held, Moment)>, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else {
            return self.woken_without_owner(id, now);
        };
        if acquisition.is_held() {
            return;
        }
        let terms = acquisition.terms();
        let claims_first = terms.lease.is_some() && acquisition.request.claims_first;
        let trusted = grant.filter(|_| !claims_first).and_then(|(mut held, granted_at)| {
            let granted_at = if crate::broken::is("old-wakeup") { now } else { granted_at };
            held.valid_for = held.valid_for.into_iter().chain(terms.ttl).min();
            let until = self.rules.valid_until(&held, terms, granted_at);
            let left = until.saturating_since(now);
            let is_recent = held.valid_for.is_none_or(|whole| left >= whole.duration() / 2);
            is_recent.then_some((held, granted_at))
        });
        let Some((held, granted_at)) = trusted else { return self.claim(id, now) };
        acquisition.was_answered = true;
        let limited = terms.lease.is_some() && held.valid_for == terms.ttl;
        self.hold(id, &held, limited, granted_at, now);
        // The queue has moved, so the new first waiter may be close to the head.
        self.schedule_query(None, false, false, now);
        if terms.lease.is_some() && !limited {
            self.set_renewal(id, now + CLAIM_AFTER);
        }
    }

    /// Handles a wake-up for an id that this client has released. Another server has taken over, without that release,
    /// and nobody will claim the permit. If the release is in flight, or was answered by this server, the wake-up is
    /// older.
    fn woken_without_owner(&mut self, id: AcquisitionId, now: Moment) {
        let is_old = self.releases.contains_key(&id)
            || self.recent.iter().any(|(_, released)| *released == id);
        if id.client() == self.client && !is_old {
            self.ensure_released(id, false, now);
        }
    }

    /// Whether the id is the first waiter of this client.
    fn is_first(&self, id: AcquisitionId) -> bool {
        self.waiting.first_key_value().is_some_and(|(_, first)| *first == id)
    }
}
