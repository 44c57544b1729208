//! The store's answers, and what follows from them for the acquisitions of this client.

use std::sync::Arc;

use super::state::{State, Timer, Want};
use crate::backend::Reply;
use crate::clock::{Moment, Span};
use crate::engine::callbacks::event;
use crate::engine::in_process::too_heavy;
use crate::engine::life::Life;
use crate::engine::ticket::{After, Grant, Ticket};
use crate::machine::{Command, Held, Outcome, Role, Terms};
use crate::{AcquisitionId, Error, LossReason};

/// How soon a release is repeated if it was refused, or if an enqueue of its id may still be applied. If it is refused
/// repeatedly, the delay grows up to `RELEASE_AGAIN_AT_LATEST` times this.
const RELEASE_AGAIN: Span = Span::from_millis(1000);
const RELEASE_AGAIN_AT_LATEST: u64 = 10;

/// How long after a trusted wake-up the permit is claimed. A permit that is released before then needs no request for
/// the claim.
const CLAIM_AFTER: Span = Span::from_millis(20);

impl State {
    /// Applies the store's answers to commands that were sent at `sent`.
    pub(super) fn apply_reply(
        &mut self,
        commands: &[Command],
        reply: Reply,
        sent: Moment,
        after: &mut After,
    ) {
        let mut asked = false;
        self.unserved = None;
        for (command, outcome) in commands.iter().zip(reply.outcomes) {
            let Some(id) = command.id() else { continue };
            if let Outcome::Removed(role) = outcome {
                self.released(id, role, sent, after);
                continue;
            }
            let renews = matches!(command, Command::Renew { .. });
            if renews
                && let Some(own) = self.acquisitions.get(&id).filter(|own| own.ticket.is_held())
            {
                let is_held = !matches!(outcome, Outcome::Gone | Outcome::Cancelled);
                after.renewed(&own.ticket, Ok(is_held), sent);
            }
            let Some(own) = self.acquisitions.get_mut(&id) else {
                if !renews && matches!(outcome, Outcome::Held(_) | Outcome::Waiting { .. }) {
                    self.ensure_released(id, false);
                }
                continue;
            };
            if renews {
                own.renewal = None;
            } else {
                own.life.answer();
            }
            own.known = true;
            let place = own.place;
            self.apply_outcome(id, outcome, (sent, renews), after);
            match (outcome, place) {
                (Outcome::Waiting { ahead }, _) if self.is_first(id) => {
                    asked = true;
                    self.learn_place(id, ahead);
                }
                // Another client's command granted the permit, and the wake-up was lost. There may be more such
                // waiters.
                (Outcome::Held(_), Some(place)) if renews => {
                    self.ask_about_first_from(place + 1, Moment::now());
                }
                _ => {}
            }
        }
        for (id, held, ()) in reply.effects.granted {
            match self.acquisitions.get_mut(&id) {
                Some(own) => {
                    own.life.answer();
                    own.known = true;
                }
                None => self.ensure_released(id, false),
            }
            self.apply_outcome(id, Outcome::Held(held), (sent, false), after);
        }
        self.schedule_question(reply.next_expiry, reply.foreign, asked);
        self.token_at = None;
        if let Some(after) = reply.next_token {
            self.ask_for_token(after);
        }
    }

    /// Handles commands that were sent at `sent`, and whose answer did not arrive before the connection was lost. Those
    /// that are still wanted are sent again, in the same order.
    pub(super) fn outcome_unknown(&mut self, commands: &[Command], sent: Moment) {
        for command in commands {
            match command {
                Command::Enqueue { id, .. } => {
                    let Some(own) = self.acquisitions.get_mut(id) else {
                        self.ensure_released(*id, true);
                        continue;
                    };
                    own.doubtful = true;
                    if !own.ticket.is_waiting() {
                        continue;
                    }
                    own.life.lose();
                    if !std::mem::replace(&mut own.wants.enqueue, true) {
                        self.want_again(Want::Enqueue(*id), sent);
                    }
                }
                Command::Renew { id, .. } => self.send_renewal(*id),
                Command::Release { id, .. } => {
                    if let Some(release) = self.releases.get_mut(id) {
                        release.life.lose();
                        self.want_again(Want::Release(*id), sent);
                    }
                }
                Command::Steer { .. } | Command::Sweep => {}
            }
        }
    }

    /// Reports that the renewals among these commands were not answered. They are sent again.
    pub(super) fn renewals_failed(&self, commands: &[Command], error: &Error, after: &mut After) {
        for command in commands {
            if let Command::Renew { id, .. } = command
                && let Some(own) = self.acquisitions.get(id).filter(|own| own.ticket.is_held())
            {
                after.renewed(&own.ticket, Err(error.kind()), Moment::now());
            }
        }
    }

    /// Handles commands that the store refuses, where repeating them does not help.
    pub(super) fn apply_refusal(&mut self, commands: &[Command], error: &Error, after: &mut After) {
        for command in commands {
            match command {
                Command::Enqueue { id, .. } => self.fail_waiter(*id, error, after),
                Command::Renew { id, .. } => {
                    self.fail_waiter(*id, error, after);
                    // A holder keeps its permit until its validity ends, and repeats the renewal until then.
                    let id = *id;
                    if let Some(own) = self.acquisitions.get_mut(&id) {
                        own.renewal = None;
                        after.renewed(&own.ticket, Err(error.kind()), Moment::now());
                        let error = error.clone();
                        after.report(move || {
                            let what =
                                "the store refused to renew the permit; the client tries again";
                            event!(warn, %id, %error, "{what}");
                        });
                        self.renew_again(id, Moment::now());
                    }
                }
                Command::Release { id, .. } => self.release_refused(*id, error, after),
                Command::Steer { .. } | Command::Sweep => {}
            }
        }
    }

    /// Ends the wait of an id that another client has removed from the queue. Returns whether the id waited.
    pub(super) fn cancelled(&mut self, id: AcquisitionId, after: &mut After) -> bool {
        let ticket = self.acquisitions.get(&id).map(|own| own.ticket.clone());
        let Some(ticket) = ticket.filter(|ticket| ticket.is_waiting()) else { return false };
        self.fail_waiter(id, &ticket.cancelled(), after);
        true
    }

    fn fail_waiter(&mut self, id: AcquisitionId, error: &Error, after: &mut After) {
        let Some(own) = self.acquisitions.get(&id) else { return };
        // If a second request about the same id has been granted the permit, the ticket no longer waits, and nothing
        // fails.
        if own.ticket.clone().fail(error.clone(), after) {
            self.end(id);
        }
    }

    /// Repeats the release as long as the store may know the id. The cause may be temporary: a full disk may have room
    /// again.
    fn release_refused(&mut self, id: AcquisitionId, error: &Error, after: &mut After) {
        let Some(release) = self.releases.get_mut(&id) else { return };
        release.life = Life::Unknown;
        let times = 1_u64.checked_shl(release.refused).unwrap_or(u64::MAX);
        release.refused += 1;
        let delay = RELEASE_AGAIN.micros() * times.min(RELEASE_AGAIN_AT_LATEST);
        if !self.answer_release(id, Err(error.clone()), after) {
            self.failed_release = Some(error.clone());
        }
        let at = Moment::now() + Span::from_micros(delay);
        self.timers.insert((at, Timer::ReleaseAgain(id)));
    }

    fn released(&mut self, id: AcquisitionId, role: Role, sent: Moment, after: &mut After) {
        self.answer_release(id, Ok(role != Role::Nobody), after);
        // The former server may have answered, after the client knew of the new one.
        let is_outdated = self.taken_over.is_some_and(|at| sent <= at);
        let Some(release) = self.releases.get_mut(&id) else { return };
        if release.again || is_outdated {
            release.life = Life::Unknown;
            return self.want(Want::Release(id));
        }
        let now = Moment::now();
        let in_time = release.until.is_some_and(|until| now < until);
        if release.doubtful && in_time && self.core.has_stragglers() {
            // An enqueue that was sent over an earlier connection may still be applied.
            release.life = Life::Unknown;
            self.timers.insert((now + RELEASE_AGAIN, Timer::ReleaseAgain(id)));
            return;
        }
        self.releases.remove(&id);
        self.ended_in_store(id);
        if self.releases.is_empty() {
            // All earlier releases have succeeded by now.
            self.failed_release = None;
        }
    }

    /// Applies the store's outcome for one id, in answer to a request that was sent at `sent`. `renews` says whether it
    /// was a renewal.
    fn apply_outcome(
        &mut self,
        id: AcquisitionId,
        outcome: Outcome,
        (sent, renews): (Moment, bool),
        after: &mut After,
    ) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        let ticket = own.ticket.clone();
        match outcome {
            Outcome::Held(held) => {
                let Terms { lease, ttl } = ticket.semaphore.terms;
                if held.valid_for < lease || ttl.is_some_and(|ttl| Some(ttl) <= lease) {
                    ticket.set_limited_by_ttl();
                }
                self.hold(id, &ticket, &held, sent, after);
            }
            // The store was asked after it had granted the permit. So another server has taken over, without the
            // grant, and the permit may be another holder's.
            Outcome::Waiting { .. }
                if renews && own.held_since.is_some_and(|since| since < sent) =>
            {
                ticket.lose(LossReason::Missing, after);
                self.end(id);
            }
            // A wake-up overtook this answer. Or the permit was released by its id, and the id is queued again.
            Outcome::Waiting { .. } if !ticket.is_waiting() => {
                own.doubtful = true;
                self.schedule_renewal(id, sent);
            }
            Outcome::Waiting { .. } => {
                self.add_waiting(id);
                self.schedule_renewal(id, sent);
            }
            // An earlier answer has settled the ticket.
            Outcome::Full if !ticket.is_waiting() => {}
            Outcome::Full => {
                self.forget_in_store(id);
                ticket.full(after);
            }
            Outcome::TooHeavy { capacity } => {
                let name = ticket.semaphore.named.name();
                let error = too_heavy(name, ticket.share.weight, capacity);
                if ticket.fail(error, after) {
                    self.forget_in_store(id);
                }
            }
            // The enqueue was sent after the query, and will be answered. A second enqueue could be applied after the
            // permit that the first one got has ended. It would leave the id in the queue.
            Outcome::Gone if ticket.is_waiting() && own.life == Life::Sent => {}
            Outcome::Gone if ticket.is_waiting() => {
                // The store expired the waiter, or lost its data. The waiter goes to the end of the queue.
                self.remove_waiting(id);
                self.want_enqueue(id);
            }
            Outcome::Cancelled if self.cancelled(id, after) => {}
            Outcome::Gone | Outcome::Cancelled => {
                self.forget_in_store(id);
                self.ended_in_store(id);
                ticket.lose(LossReason::Missing, after);
            }
            Outcome::Removed(_) | Outcome::Steered(_) | Outcome::Swept => {}
        }
    }

    /// Applies a grant or a renewal by the store, in answer to a request that was sent at `sent`.
    fn hold(
        &mut self,
        id: AcquisitionId,
        ticket: &Arc<Ticket>,
        held: &Held,
        sent: Moment,
        after: &mut After,
    ) {
        let valid_until = held.valid_until(ticket.semaphore.terms, sent);
        if ticket.is_waiting() {
            if valid_until <= Moment::now() {
                // The answer took longer than the permit is valid. The caller has not seen the permit, so a waiter
                // claims it again. A try asks again, and is answered `Full` if another client has the permit by now.
                return if ticket.queues { self.claim(id) } else { self.want_enqueue(id) };
            }
            self.remove_waiting(id);
            self.cancel_timer(ticket.gives_up_at, Timer::GiveUp(id));
            if ticket.grant(Grant::new(held), valid_until, after)
                && let Some(own) = self.acquisitions.get_mut(&id)
            {
                own.held_since = Some(Moment::now());
            }
            self.warn_of_short_lease(ticket, after);
        } else {
            ticket.extend(valid_until);
        }
        self.schedule_end(id, ticket.valid_until());
        self.schedule_renewal(id, sent);
    }

    /// Handles a wake-up, which says that this waiter was granted a permit, at the moment in `grant` or later.
    ///
    /// If at least half of the time to claim it is left, the client holds the permit at once and claims it a little
    /// later. Otherwise, or if the age of the wake-up is not known, the client asks the store first. So it does for a
    /// semaphore that [claims first](crate::SemaphoreBuilder::claim_first).
    pub(super) fn woken(
        &mut self,
        id: AcquisitionId,
        grant: Option<(Held, Moment)>,
        after: &mut After,
    ) {
        let Some(own) = self.acquisitions.get(&id) else { return self.woken_without_owner(id) };
        let ticket = own.ticket.clone();
        if !ticket.is_waiting() {
            return;
        }
        let Terms { lease, ttl } = ticket.semaphore.terms;
        let now = Moment::now();
        let claims_first = lease.is_some() && ticket.semaphore.claims_first;
        let believed = grant.filter(|_| !claims_first).and_then(|(mut held, granted_at)| {
            #[cfg(feature = "broken")]
            let granted_at = if crate::broken::is("old-wakeup") { now } else { granted_at };
            let claim = held.valid_for;
            held.valid_for = claim.into_iter().chain(ttl).min();
            let left = held.valid_until(ticket.semaphore.terms, granted_at).saturating_since(now);
            let young = held.valid_for.is_none_or(|whole| left >= whole.duration() / 2);
            young.then_some((held, granted_at))
        });
        let Some((held, granted_at)) = believed else { return self.claim(id) };
        if let Some(own) = self.acquisitions.get_mut(&id) {
            own.known = true;
        }
        if lease.is_some() && held.valid_for == ttl {
            ticket.set_limited_by_ttl();
        }
        self.hold(id, &ticket, &held, granted_at, after);
        // The queue has moved, so the new first waiter may be close to the head.
        self.schedule_question(None, false, false);
        if lease.is_some() && !ticket.is_limited_by_ttl() {
            self.set_renewal(id, now + CLAIM_AFTER);
        }
    }

    /// Handles a wake-up for an id that this client has released. Another server has taken over, without that release,
    /// and nobody will claim the permit. If the release is in flight, or was answered by this server, the wake-up is
    /// older.
    fn woken_without_owner(&mut self, id: AcquisitionId) {
        let is_old = self.releases.contains_key(&id) || self.recent.iter().any(|own| own.1 == id);
        if id.client() == self.core.client && !is_old {
            self.ensure_released(id, false);
        }
    }

    /// Forgets an id that the store does not know. But an enqueue that was sent over an earlier connection may still be
    /// applied, or may have been applied after this answer. In that case the id is released.
    fn forget_in_store(&mut self, id: AcquisitionId) {
        if self.core.has_stragglers() {
            self.end(id);
        } else {
            self.forget(id);
        }
    }

    /// Records that the id waits in the store. If it did not wait before, it is behind all other waiters of this
    /// client.
    fn add_waiting(&mut self, id: AcquisitionId) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        if own.place.is_none() {
            self.last_place += 1;
            own.place = Some(self.last_place);
            self.waiting.insert(self.last_place, id);
        }
    }

    /// Whether the id is the first waiter of this client.
    fn is_first(&self, id: AcquisitionId) -> bool {
        self.waiting.first_key_value().is_some_and(|(_, first)| *first == id)
    }

    pub(super) fn remove_waiting(&mut self, id: AcquisitionId) {
        let own = self.acquisitions.get_mut(&id);
        if let Some(place) = own.and_then(|own| own.place.take()) {
            self.waiting.remove(&place);
        }
    }
}
