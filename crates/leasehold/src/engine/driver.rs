//! Drives a [client core](crate::client_core), which it keeps behind one lock.
//!
//! A driver passes calls, answers, events and the time to its core. Afterwards it applies the core's notices to the
//! tickets, sets its timer, and joins the sender's queue if there is something to send. A store in this process answers
//! at once instead. A driver has no rules of its own, and a [`Protocol`] says how the commands are spelled: there is one
//! for semaphore names, one for locks, and one for pool instances.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::Core;
use super::background::UnderWay;
use super::deferred::Deferred;
use super::registry::Listener;
use super::sender::{Source, Taken, TakenPart, Urgency};
use super::ticket::{Grant, Ticket};
use super::timers::Timed;
use crate::backend::{Answer, Destination, Part, Slot};
use crate::callbacks::event;
use crate::client_core::{Answered, Failure, NameCore, Notice, Request, Rules, timing};
use crate::clock::{Moment, Span};
use crate::machine::{Command, Declared, Reply, Subject};
use crate::{AcquisitionId, Error, LockId, LossReason, Outcome};

/// How the commands of a core are spelled for the store.
pub(crate) trait Protocol: Send + Sync + Sized + 'static {
    /// The most commands in one part of a request.
    const MOST_COMMANDS: usize;

    fn subject(&self) -> Subject<'_>;

    fn rules(&self, core: &Core) -> Rules;

    /// Returns the limits that this client declares.
    fn declared(&self) -> Declared;

    /// Returns the lock id, if this is the lease of a lock.
    fn lock_id(&self) -> Option<LockId> {
        None
    }

    /// Returns the part of a request for these commands. It has a command in it only if the part does not contain it.
    fn part(&self, declared: Declared, commands: Vec<Command>, now: Moment) -> TakenPart;

    /// Reads the answer to a part. `deferred` runs when the lock is released.
    fn reply(&self, part: &Part, answer: Answer, deferred: &mut Deferred) -> Result<Reply, Error>;
}

pub(crate) struct Driver<P: Protocol> {
    pub(crate) protocol: P,
    pub(crate) core: Arc<Core>,
    slot: Slot,
    state: Mutex<DriverState<P>>,
    this: Weak<Self>,
}

pub(super) struct DriverState<P: Protocol> {
    pub(super) core: NameCore<Arc<Ticket>>,
    /// The server that serves the name, as far as this client knows.
    to: Destination,
    pub(super) closed: bool,
    /// Whether the client no longer exists, so that it does not keep this driver alive.
    abandoned: bool,
    /// Whether this driver is in the sender's queue: for ordinary commands, and for renewals.
    is_queued: (bool, bool),
    /// Whether the driver rests before it sends again, because the store could not serve it just now.
    rests: bool,
    /// When the engine fires the timer of this driver.
    timer_at: Option<Moment>,
    /// The driver itself, while a release is not answered that has to outlive the guard or the client.
    kept_alive: Option<Arc<Driver<P>>>,
    /// Makes a close wait for commands that wait to be sent or for their answer.
    under_way: Option<UnderWay>,
}

impl<P: Protocol> DriverState<P> {
    /// Ends the acquisition. Returns its ticket, to be notified.
    pub(super) fn end(&mut self, id: AcquisitionId, now: Moment) -> Option<Arc<Ticket>> {
        let was_seen = self.core.owner(id)?.was_seen();
        self.core.end(id, was_seen, now)
    }

    /// Returns when the timer has to fire. A timer that fires too early stays: to move it with every command costs more
    /// than to let it fire once for nothing.
    fn next_timer(&self) -> Option<Moment> {
        let next = self.core.next_timeout()?;
        Some(self.timer_at.map_or(next, |at| at.min(next)))
    }

    /// Ends all acquisitions, because the client is being closed.
    fn close(&mut self, deferred: &mut Deferred, now: Moment) {
        self.closed = true;
        for id in self.core.ids_to_close() {
            if let Some(ticket) = self.end(id, now) {
                ticket.fail(Error::Closed, deferred);
                ticket.lose(LossReason::Closed, deferred);
            }
        }
        self.core.forget_unwanted(now);
    }
}

impl<P: Protocol> Driver<P> {
    pub(crate) fn new(protocol: P, core: Arc<Core>) -> Arc<Self> {
        let slot = core.slot(protocol.subject());
        let (client, answer_timeout) = (core.client, core.settings.answer_timeout);
        let (stragglers, spread) = (core.has_stragglers(), timing::scatter);
        let state = DriverState {
            core: NameCore::new(client, answer_timeout, spread, stragglers)
                .with_rules(protocol.rules(&core)),
            to: core.destination(slot),
            closed: false,
            abandoned: false,
            is_queued: (false, false),
            rests: false,
            timer_at: None,
            kept_alive: None,
            under_way: None,
        };
        let state = Mutex::new(state);
        Arc::new_cyclic(|this| Self { protocol, core, slot, state, this: this.clone() })
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    pub(super) fn state(&self) -> MutexGuard<'_, DriverState<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts an acquire.
    pub(crate) fn acquire(&self, ticket: &Arc<Ticket>, request: Request) -> Result<(), Error> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        self.locked(|state, _, now| {
            if state.closed {
                return Err(Error::Closed);
            }
            state.core.acquire(ticket.id, ticket.clone(), request, now);
            Ok(())
        })
    }

    /// Returns why nothing can be sent, if waiting does not help.
    fn refusal(&self) -> Option<Error> {
        self.core.stopped().or_else(|| self.core.sender.refusal(self.destination()))
    }

    /// Ends an acquisition whose guard or future was dropped.
    pub(crate) fn end(&self, id: AcquisitionId) {
        self.locked(|state, deferred, now| {
            if let Some(ticket) = state.end(id, now) {
                ticket.cancel(deferred);
            }
        });
    }

    /// Removes an acquisition without a release. The store keeps it.
    pub(crate) fn forget(&self, id: AcquisitionId) {
        self.locked(|state, deferred, _| {
            if let Some(ticket) = state.core.forget(id) {
                ticket.detach(deferred);
            }
        });
    }

    /// Releases what a guard of this client holds, and waits for the outcome: whether it was held until now.
    pub(crate) fn release(&self, ticket: &Arc<Ticket>) -> super::name_state::Release {
        use super::name_state::Release;
        if let Some(error) = self.core.stopped() {
            return Release::Failed(error);
        }
        if ticket.check().is_err() {
            self.end(ticket.id);
            return Release::Done(false);
        }
        self.locked(|state, deferred, now| {
            let Some(ended) = state.end(ticket.id, now) else { return Release::Done(false) };
            ended.cancel(deferred);
            if state.core.is_shared() {
                return Release::Done(true);
            }
            let lease = ticket.spec.terms().lease;
            let caller = state.core.release(ticket.id, ended, (true, lease), now);
            caller.map_or(Release::Done(false), Release::Sent)
        })
    }

    /// Notifies the guards whose lease this client has released by its id, in a request that was sent at `sent`.
    pub(crate) fn released_by_id(&self, sent: Moment) {
        self.input(|core, now| {
            // A guard that was acquired meanwhile may have a lease of its own.
            let held = |ticket: &&Arc<Ticket>| ticket.was_seen() && ticket.queued_at < sent;
            let ids: Vec<_> = core.owners().filter(held).map(|ticket| ticket.id).collect();
            for id in ids {
                core.lose(id, LossReason::Released, now);
            }
        });
    }

    /// Passes an input to the core.
    pub(crate) fn input<R>(
        &self,
        input: impl FnOnce(&mut NameCore<Arc<Ticket>>, Moment) -> R,
    ) -> R {
        self.locked(|state, _, now| input(&mut state.core, now))
    }

    /// Forgets all acquisitions, because the client no longer exists. Releases that are not answered keep the driver
    /// alive from now on.
    pub(super) fn abandon(&self) {
        self.locked(|state, deferred, _| {
            for ticket in
                state.core.ids_to_close().into_iter().filter_map(|id| state.core.forget(id))
            {
                ticket.cancel(deferred);
            }
            state.core.expire_releases();
            state.abandoned = true;
        });
    }

    #[cfg(test)]
    pub(crate) fn has_timer(&self) -> bool {
        self.state().timer_at.is_some()
    }

    /// Runs `work` under the lock, and then notifies the tickets, sets the timer, joins the sender's queue if there is
    /// something to send, and wakes the tasks that were notified.
    pub(super) fn locked<R>(
        &self,
        work: impl FnOnce(&mut DriverState<P>, &mut Deferred, Moment) -> R,
    ) -> R {
        let mut deferred = Deferred::default();
        let mut state = self.state();
        // Under the lock, so that the core never sees time go back.
        let now = self.core.now();
        let result = work(&mut state, &mut deferred, now);
        self.notify(&mut state, now, &mut deferred);
        if let Some(memory) = self.core.store.memory() {
            while let Some(((part, command), sent)) = self.next_part(&mut state) {
                let answer = memory.apply(&part);
                let commands = commands_of(&part, command.as_ref());
                self.apply_answer(&mut state, (&part, commands), answer, sent, &mut deferred);
                self.notify(&mut state, self.core.now(), &mut deferred);
            }
        }
        let changes_timer = state.next_timer() != state.timer_at;
        let (sends, renews) = (state.core.has_commands(), state.core.has_renewals());
        let joins = (sends && !state.is_queued.0, renews && !state.is_queued.1);
        state.is_queued.0 |= sends;
        state.is_queued.1 |= renews;
        let rests = std::mem::take(&mut state.rests);
        let rests = rests.then(|| state.core.unserved_since()).flatten();
        let no_longer_under_way = self.keep_alive(&mut state);
        if (state.closed || state.core.is_one_lease())
            && let Some(error) = state.core.take_failed_release()
        {
            let core = self.core.clone();
            deferred.add(move || core.background_failed(&error));
        }
        drop(state);
        if let Err(error) = self.follow_up(changes_timer, joins, rests) {
            self.stop(&error);
        }
        deferred.run();
        drop(no_longer_under_way);
        result
    }

    /// Keeps the driver alive while a release is not answered, unless the client does so, as it does for names. A close
    /// waits for such a release, and for everything that a closed name has sent or has to send. Returns what has to be
    /// dropped after the lock is released.
    fn keep_alive(&self, state: &mut DriverState<P>) -> (Option<Arc<Self>>, Option<UnderWay>) {
        let has_releases =
            (state.core.is_one_lease() || state.abandoned) && state.core.has_releases();
        let is_under_way = (has_releases || state.closed) && !state.core.is_settled();
        if has_releases && state.kept_alive.is_none() {
            state.kept_alive = self.this.upgrade();
        }
        if is_under_way && state.under_way.is_none() {
            state.under_way = Some(UnderWay::new(&self.core));
        }
        let ended = if is_under_way { None } else { state.under_way.take() };
        (if has_releases { None } else { state.kept_alive.take() }, ended)
    }

    fn follow_up(
        &self,
        changes_timer: bool,
        (ordinary, renewals): (bool, bool),
        rests: Option<Moment>,
    ) -> Result<(), Error> {
        // A command is sent before the timer is set, so that the thread takes fewer locks before the bytes leave.
        let joining = [(renewals, Urgency::Renewals), (ordinary, Urgency::Ordinary)];
        for (_, urgency) in joining.into_iter().filter(|(joins, _)| *joins) {
            let Some(this) = self.this.upgrade() else { break };
            let this = this as Arc<dyn Source>;
            match rests {
                Some(since) => self.core.send_later(&this, urgency, since)?,
                None => self.core.send(&this, urgency)?,
            }
        }
        if changes_timer { self.set_timer() } else { Ok(()) }
    }

    /// Makes the engine fire the timer when the core is next due.
    fn set_timer(&self) -> Result<(), Error> {
        let mut state = self.state();
        let next = state.next_timer();
        let before = std::mem::replace(&mut state.timer_at, next);
        if before != next {
            self.core.timers.set(self.this.clone(), before, next);
        }
        drop(state);
        self.core.timer_was_set(next)
    }

    /// Takes the next part for a store that answers at once. Also returns the moment from which the answer counts: before
    /// the command runs, because this thread may be paused as soon as it has run.
    fn next_part(&self, state: &mut DriverState<P>) -> Option<(TakenPart, Moment)> {
        let (declared, now) = (self.protocol.declared(), self.core.now());
        let mut commands = state.core.take_renewals(P::MOST_COMMANDS, now);
        if commands.is_empty() {
            commands = state.core.take(P::MOST_COMMANDS, declared, now);
        }
        (!commands.is_empty()).then(|| (self.protocol.part(declared, commands, now), now))
    }

    fn apply_answer(
        &self,
        state: &mut DriverState<P>,
        (part, commands): (&Part, &[Command]),
        answer: Result<Answer, Error>,
        sent: Moment,
        deferred: &mut Deferred,
    ) {
        let answered = match answer {
            Ok(Answer::Elsewhere) => Answered::Elsewhere,
            Ok(Answer::NotNow) => Answered::NotNow,
            Ok(answer) => match self.protocol.reply(part, answer, deferred) {
                Ok(reply) => Answered::Applied(reply),
                Err(error) => Answered::Refused(error),
            },
            Err(error) if error.is_transient() => Answered::Unknown(error),
            Err(error) => Answered::Refused(error),
        };
        state.rests = matches!(answered, Answered::NotNow);
        state.core.answered(commands, answered, sent, self.core.now());
    }

    /// Applies the notices of the core.
    fn notify(&self, state: &mut DriverState<P>, now: Moment, deferred: &mut Deferred) {
        while !state.core.notices().is_empty() {
            let mut notices = std::mem::take(state.core.notices());
            for notice in notices.drain(..) {
                self.apply_notice(state, notice, now, deferred);
            }
            // A notice may lead to another one. Usually there is none, and the allocation is used again.
            if state.core.notices().is_empty() {
                *state.core.notices() = notices;
                return;
            }
        }
    }

    fn apply_notice(
        &self,
        state: &mut DriverState<P>,
        notice: Notice<Arc<Ticket>>,
        now: Moment,
        deferred: &mut Deferred,
    ) {
        match notice {
            Notice::Granted { owner, held, valid_until, limited_by_ttl } => {
                owner.set_limited_by_ttl(limited_by_ttl);
                owner.grant(Grant::new(&held), valid_until, deferred);
            }
            Notice::Extended { owner, valid_until, limited_by_ttl } => {
                owner.set_limited_by_ttl(limited_by_ttl);
                if !owner.extend(valid_until) {
                    state.core.validity_ended(owner.id, now);
                }
            }
            Notice::Limited { owner, valid_until } => owner.limit(valid_until),
            Notice::Full { owner } => owner.full(deferred),
            Notice::Failed { owner, failure } => {
                owner.fail(self.error(failure, &owner, state.to, now), deferred);
            }
            Notice::Lost { owner, reason } => {
                owner.lose(reason, deferred);
            }
            Notice::Renewed { owner, result, sent } => {
                if owner.spec.watch().reports_renewals() {
                    deferred.add(move || {
                        let outcome = || Outcome::of(result.as_ref().map(|held| *held));
                        owner.spec.watch().renewed(|| owner.spec.id(owner.id), outcome, sent);
                    });
                }
            }
            Notice::Released { owner, outcome } => {
                let outcome = outcome.map_err(|failure| self.error(failure, &owner, state.to, now));
                owner.finish_release(outcome, deferred);
            }
            Notice::RenewalRefused { owner, error } => deferred.add(move || {
                let (name, id) = (owner.spec.watch().public_name(), owner.spec.id(owner.id));
                let what = "the store refused to renew the lease; the client tries again";
                event!(warn, name = &*name, %id, %error, "{what}");
            }),
            Notice::ShortLease { owner, round_trip } => deferred.add(move || {
                let shortest = timing::shortest_lease(round_trip);
                let name = owner.spec.watch().public_name();
                let (name, lease) = (&*name, owner.spec.terms().lease.map(Span::duration));
                let what = "the lease is too short for this round-trip time: if the connection is lost, so is the permit";
                event!(warn, name, ?lease, ?round_trip, ?shortest, "{what}");
            }),
            Notice::Overdue { since } => {
                if self.core.sender.is_silent_since(state.to, since) {
                    self.core.suspect(state.to);
                }
            }
        }
    }

    fn error(&self, failure: Failure, ticket: &Ticket, to: Destination, now: Moment) -> Error {
        let core = &self.core;
        match failure {
            Failure::TimedOut { next_start } if core.sender.silent_since(to, now).is_none() => {
                ticket.timed_out(next_start)
            }
            Failure::TimedOut { .. } => core.unavailable(Some(to), ticket.queued_at, now),
            Failure::Unanswered { since } => core.unavailable(Some(to), since, now),
            Failure::TooHeavy { capacity } => ticket.too_heavy(capacity),
            Failure::Cancelled => ticket.cancelled(),
            Failure::Refused(error) => error,
        }
    }
}

/// Returns the commands from which a part was made.
fn commands_of<'a>(part: &'a Part, command: Option<&'a Command>) -> &'a [Command] {
    match part {
        Part::Semaphore { commands, .. } => commands,
        Part::Lock(_) | Part::Pool(_) => command.map_or(&[], std::slice::from_ref),
    }
}

impl<P: Protocol> Timed for Driver<P> {
    fn fire(&self, _now: Moment) {
        self.locked(|state, _, now| {
            // Another thread may have set it again since.
            state.timer_at = state.timer_at.filter(|at| *at > now);
            state.core.timeout(now);
        });
    }
}

impl<P: Protocol> Source for Driver<P> {
    fn destination(&self) -> Destination {
        self.core.destination(self.slot)
    }

    fn take(self: Arc<Self>, urgency: Urgency, room: usize) -> Taken {
        let (declared, now) = (self.protocol.declared(), self.core.now());
        let room = room.min(P::MOST_COMMANDS);
        let mut state = self.state();
        let (commands, more) = match urgency {
            Urgency::Renewals => {
                let commands = state.core.take_renewals(room, now);
                state.is_queued.1 = state.core.has_renewals();
                (commands, state.is_queued.1)
            }
            Urgency::Ordinary => {
                let commands = state.core.take(room, declared, now);
                state.is_queued.0 = state.core.has_commands();
                (commands, state.is_queued.0)
            }
        };
        let no_longer_under_way = self.keep_alive(&mut state);
        drop(state);
        drop(no_longer_under_way);
        let part = (!commands.is_empty()).then(|| self.protocol.part(declared, commands, now));
        Taken { part, more }
    }

    fn answered(
        self: Arc<Self>,
        part: &Part,
        command: Option<&Command>,
        answer: Result<Answer, Error>,
        sent: Moment,
        round_trip: Duration,
    ) {
        self.locked(|state, deferred, _| {
            state.core.set_round_trip(round_trip);
            self.apply_answer(state, (part, commands_of(part, command)), answer, sent, deferred);
        });
    }
}

impl<P: Protocol> Drop for Driver<P> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = state.timer_at {
            self.core.timers.set(self.this.clone(), Some(at), None);
        }
        if state.core.is_one_lease() {
            self.core.remove_lease(self);
        }
    }
}

impl<P: Protocol> Listener for Driver<P> {
    fn close(&self) {
        self.locked(DriverState::close);
    }

    fn lock_released(&self, id: LockId, sent: Moment) {
        if self.protocol.lock_id() == Some(id) {
            self.released_by_id(sent);
        }
    }

    fn stop(&self, error: &Error) {
        let mut deferred = Deferred::default();
        let mut state = self.state();
        let now = self.core.now();
        state.core.refuse_waiters(error, now);
        self.notify(&mut state, now, &mut deferred);
        for ticket in state.core.owners() {
            ticket.lose(LossReason::NotRenewed, &mut deferred);
        }
        let no_longer_under_way = (state.kept_alive.take(), state.under_way.take());
        drop(state);
        drop(no_longer_under_way);
        deferred.run();
    }

    fn reconnected(&self, to: Destination, other: bool) {
        let is_ours = self.destination() == to;
        let has_stragglers = self.core.has_stragglers();
        self.input(|core, now| {
            if has_stragglers {
                core.expect_stragglers();
            }
            if is_ours {
                core.connected(other, now);
            }
        });
    }

    fn rerouted(&self) {
        let to = self.destination();
        self.locked(|state, _, now| {
            if std::mem::replace(&mut state.to, to) != to {
                state.core.connected(true, now);
            }
        });
    }

    fn refused(&self, from: Destination, error: &Error) {
        if self.destination() == from {
            self.input(|core, now| core.refuse_waiters(error, now));
        }
    }
}

impl<P: Protocol> fmt::Debug for Driver<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("subject", &self.protocol.subject()).finish_non_exhaustive()
    }
}
