//! Names, locks and pools of a store that other processes share.
//!
//! A name is a driver of the [client core](crate::client_core), which it keeps behind one lock. It passes calls,
//! answers and events to the core, and afterwards applies the core's notices to the tickets, sets its timer, and joins
//! the sender's line if there is something to send. It has no rules of its own.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;

use super::Core;
use super::call::{Asked, Call, Done, Undo};
use super::in_process::{timed_out, too_heavy};
use super::name_state::{Common, Entered, NameState, Release, ReleasedBy};
use super::semaphore_spec::SemaphoreSpec;
use super::sender::{Source, Taken, Urgency};
use super::store::Store;
use super::ticket::{After, Grant, Ticket};
use super::timers::{Deadline, Timed};
use crate::backend::{Answer, Destination, Later, Part, Profile, RemoteBackend, Slot};
use crate::callbacks::{event, guarded};
use crate::client_core::{Answered, Failure, NameCore, Notice, Request, timing};
use crate::clock::{Moment, Span};
use crate::machine::Subject;
use crate::machine::lock::{LockCommand, Record};
use crate::machine::pool::PoolAction;
use crate::machine::pool::PoolQuery;
use crate::machine::{Command, Held, Known, Outcome, Share, Steer, Steered};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientInfo, Error, LossReason};

/// A store that other processes share, as the engine sees it.
pub(crate) struct Remote(pub(crate) Arc<dyn RemoteBackend>);

impl Store for Remote {
    fn profile(&self) -> Profile {
        self.0.profile()
    }

    fn open(&self, name: Name, core: Arc<Core>) -> Arc<dyn NameState> {
        let (slot, backend) = (self.0.slot(Subject::Semaphore(&name)), self.0.clone());
        let (client, answer_timeout) = (core.client, core.settings.answer_timeout);
        let state = Mutex::new(RemoteState {
            core: NameCore::new(client, answer_timeout, timing::scatter, core.has_stragglers()),
            to: self.0.destination(slot),
            closed: false,
            in_line: (false, false),
            rests: false,
            timer_at: None,
        });
        Arc::new_cyclic(|this| RemoteName {
            common: Common::new(name, core),
            backend,
            slot,
            state,
            settled: Notify::new(),
            this: this.clone(),
        })
    }

    fn ask(&self, core: &Arc<Core>, part: Part, until: Moment, undo: Option<Undo>) -> Asked {
        let renews = match &part {
            Part::Lock(command) => matches!(command, LockCommand::Extend { .. }),
            Part::Pool(command) => matches!(command.action, PoolAction::Renew { .. }),
            Part::Semaphore { .. } => false,
        };
        let urgency = if renews { Urgency::Renewals } else { Urgency::Ordinary };
        Call::start(core, part, urgency, until, undo)
    }

    fn ask_in_background(&self, core: &Arc<Core>, part: Part, until: Moment, done: Done) {
        Call::start_in_background(core, part, until, done);
    }

    fn stats(&self, core: &Arc<Core>, query: Query) -> Later<Vec<SemaphoreStats>> {
        core.run(self.0.stats(query))
    }

    fn list_locks(&self, core: &Arc<Core>, limit: usize) -> Later<Vec<Record>> {
        core.run(self.0.list_locks(limit))
    }

    fn list_pools(&self, core: &Arc<Core>, which: PoolQuery) -> Later<Vec<PoolStats>> {
        core.run(self.0.list_pools(which))
    }

    fn list_clients(&self, core: &Arc<Core>, limit: usize) -> Later<Vec<ClientInfo>> {
        core.run(self.0.list_clients(limit))
    }

    #[cfg(unix)]
    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.0.lifeline()
    }
}

/// One name of a remote store.
struct RemoteName {
    common: Common,
    backend: Arc<dyn RemoteBackend>,
    slot: Slot,
    state: Mutex<RemoteState>,
    /// Notified when nothing has to be sent and nothing is in flight.
    settled: Notify,
    this: Weak<Self>,
}

struct RemoteState {
    core: NameCore<Arc<Ticket>>,
    /// The server that serves the name, as far as this client knows.
    to: Destination,
    closed: bool,
    /// Whether this name is in the sender's line: for ordinary commands, and for renewals.
    in_line: (bool, bool),
    /// Whether the name rests before it sends again, because the store could not serve it just now.
    rests: bool,
    /// When the engine's thread fires the timer of this name.
    timer_at: Option<Moment>,
}

impl RemoteState {
    /// Ends the acquisition. Returns its ticket, to be notified.
    fn end(&mut self, id: AcquisitionId, now: Moment) -> Option<Arc<Ticket>> {
        let was_seen = self.core.owner(id)?.was_seen();
        self.core.end(id, was_seen, now)
    }
}

impl RemoteName {
    fn state(&self) -> MutexGuard<'_, RemoteState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` under the lock, and then notifies the tickets, sets the timer, joins the sender's line if there is
    /// something to send, and wakes the tasks that were notified.
    fn locked<R>(&self, work: impl FnOnce(&mut RemoteState, &mut After, Moment) -> R) -> R {
        let mut after = After::default();
        let mut state = self.state();
        // Under the lock, so that the core never sees time go back.
        let now = Moment::now();
        let result = work(&mut state, &mut after, now);
        self.notify(&mut state, now, &mut after);
        let next = state.core.next_timeout();
        let before = std::mem::replace(&mut state.timer_at, next);
        let (sends, renews) = (state.core.has_commands(), state.core.has_renewals());
        let joins = (sends && !state.in_line.0, renews && !state.in_line.1);
        state.in_line.0 |= sends;
        state.in_line.1 |= renews;
        let settled = state.core.is_settled();
        let rests = std::mem::take(&mut state.rests);
        let rests = rests.then(|| state.core.unserved_since()).flatten();
        drop(state);
        if let Err(error) = self.follow_up(before, next, joins, rests) {
            self.stop(&error);
        }
        after.run();
        if settled {
            guarded(|| self.settled.notify_waiters());
        }
        result
    }

    fn follow_up(
        &self,
        before: Option<Moment>,
        next: Option<Moment>,
        (ordinary, renewals): (bool, bool),
        rests: Option<Moment>,
    ) -> Result<(), Error> {
        let core = &self.common.core;
        if before != next {
            core.set_timer(self.this.clone(), before, next)?;
        }
        let Some(this) = self.this.upgrade() else { return Ok(()) };
        let joining = [(renewals, Urgency::Renewals), (ordinary, Urgency::Ordinary)];
        for (_, urgency) in joining.into_iter().filter(|(joins, _)| *joins) {
            if let Some(since) = rests {
                core.send_later(this.clone(), urgency, since)?;
            } else {
                core.send(this.clone(), urgency)?;
            }
        }
        Ok(())
    }

    /// Applies the notices of the core.
    fn notify(&self, state: &mut RemoteState, now: Moment, after: &mut After) {
        while !state.core.notices().is_empty() {
            let mut notices = std::mem::take(state.core.notices());
            for notice in notices.drain(..) {
                self.apply_notice(state, notice, now, after);
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
        state: &mut RemoteState,
        notice: Notice<Arc<Ticket>>,
        now: Moment,
        after: &mut After,
    ) {
        match notice {
            Notice::Granted { owner, held, valid_until, limited_by_ttl } => {
                owner.set_limited_by_ttl(limited_by_ttl);
                owner.grant(Grant::new(&held), valid_until, after);
            }
            Notice::Extended { owner, valid_until, limited_by_ttl } => {
                owner.set_limited_by_ttl(limited_by_ttl);
                if !owner.extend(valid_until) {
                    state.core.validity_ended(owner.id, now);
                }
            }
            Notice::Full { owner } => owner.full(after),
            Notice::Failed { owner, failure } => {
                owner.fail(self.error(failure, &owner, state.to, now), after);
            }
            Notice::Lost { owner, reason } => {
                owner.lose(reason, after);
            }
            Notice::Renewed { owner, result, sent } => after.renewed(&owner, result, sent),
            Notice::Released { owner, outcome } => {
                let outcome = outcome.map_err(|own| self.error(own, &owner, state.to, now));
                owner.finish_release(outcome, after);
            }
            Notice::RenewalRefused { id, error } => after.report(move || {
                let what = "the store refused to renew the permit; the client tries again";
                event!(warn, %id, %error, "{what}");
            }),
            Notice::ShortLease { owner, round_trip } => after.report(move || {
                let shortest = timing::shortest_lease(round_trip);
                let (name, lease) = (owner.semaphore.named.name(), owner.semaphore.terms.lease);
                let (name, lease) = (name.as_str(), lease.map(Span::duration));
                let what = "the lease is too short for this round-trip time: if the connection is lost, so is the permit";
                event!(warn, name, ?lease, ?round_trip, ?shortest, "{what}");
            }),
            Notice::Overdue { since } => {
                let core = &self.common.core;
                if core.sender.heard_nothing_since(state.to, since) {
                    core.suspect(state.to);
                }
            }
        }
    }

    fn error(&self, failure: Failure, ticket: &Ticket, to: Destination, now: Moment) -> Error {
        let core = &self.common.core;
        match failure {
            Failure::TimedOut { next_start } if core.sender.silent_since(to, now).is_none() => {
                timed_out(ticket, next_start)
            }
            Failure::TimedOut { .. } => core.unavailable(Some(to), ticket.queued_at, now),
            Failure::Unanswered { since } => core.unavailable(Some(to), since, now),
            Failure::TooHeavy { capacity } => {
                too_heavy(&self.common.name, ticket.share.weight, capacity)
            }
            Failure::Cancelled => ticket.cancelled(),
            Failure::Refused(error) => error,
        }
    }
}

impl Timed for RemoteName {
    fn fire(&self, _now: Moment) {
        self.locked(|state, _, now| {
            state.timer_at = None;
            state.core.timeout(now);
        });
    }
}

impl Source for RemoteName {
    fn destination(&self) -> Destination {
        self.backend.destination(self.slot)
    }

    fn take(self: Arc<Self>, urgency: Urgency, room: usize) -> Taken {
        let declared = self.common.declared();
        let mut state = self.state();
        let (commands, more) = match urgency {
            Urgency::Renewals => {
                let commands = state.core.take_renewals(room);
                state.in_line.1 = state.core.has_renewals();
                (commands, state.in_line.1)
            }
            Urgency::Ordinary => {
                let commands = state.core.take(room, declared, Moment::now());
                state.in_line.0 = state.core.has_commands();
                (commands, state.in_line.0)
            }
        };
        let settled = state.core.is_settled();
        drop(state);
        if settled {
            guarded(|| self.settled.notify_waiters());
        }
        let part = (!commands.is_empty()).then(|| {
            let name = self.common.name.clone();
            Part::Semaphore { name, declared, commands }
        });
        Taken { part, more }
    }

    fn settle(
        self: Arc<Self>,
        part: &Part,
        answer: Result<Answer, Error>,
        sent: Moment,
        round_trip: Duration,
    ) {
        let Part::Semaphore { declared, commands, .. } = part else { return };
        // A refused acquire has declared nothing.
        let declares = |(command, outcome): (&Command, &Outcome)| {
            matches!(command, Command::Enqueue { .. })
                && !matches!(outcome, Outcome::TooHeavy { .. })
        };
        if let Ok(Answer::Semaphore(reply)) = &answer
            && commands.iter().zip(&reply.outcomes).any(declares)
        {
            self.common.heard(*declared);
        }
        let answered = match answer {
            Ok(Answer::Semaphore(reply)) => Answered::Applied(reply),
            Ok(Answer::Elsewhere) => Answered::Elsewhere,
            Ok(Answer::NotNow) => Answered::NotNow,
            Ok(other) => Answered::Refused(Error::internal(format!(
                "unexpected answer to a command for a semaphore: {other:?}"
            ))),
            Err(error) if error.may_pass() => Answered::Unknown(error),
            Err(error) => Answered::Refused(error),
        };
        self.locked(|state, _, now| {
            state.rests = matches!(answered, Answered::NotNow);
            state.core.set_round_trip(round_trip);
            state.core.answered(commands, answered, sent, now);
        });
    }

    fn leave_if_unwanted(&self, urgency: Urgency) -> bool {
        let mut state = self.state();
        match urgency {
            Urgency::Renewals => {
                let wanted = state.core.forget_unwanted_renewals();
                state.in_line.1 = wanted;
                !wanted
            }
            Urgency::Ordinary => {
                let now = Moment::now();
                let wanted = state.core.wants_to_send(now);
                if !wanted {
                    state.core.forget_unwanted(now);
                    state.in_line.0 = false;
                }
                drop(state);
                if !wanted {
                    guarded(|| self.settled.notify_waiters());
                }
                !wanted
            }
        }
    }
}

impl NameState for RemoteName {
    fn common(&self) -> &Common {
        &self.common
    }

    fn enter(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<SemaphoreSpec>,
        weight: u32,
        wait: bool,
        within: Option<Span>,
        _waker: &Waker,
    ) -> Entered {
        let core = &self.common.core;
        if let Some(error) = core.stopped().or_else(|| core.sender.refusal(self.destination())) {
            return Entered::Failed(Box::new(error));
        }
        // A try is bounded like every other call.
        let within = if wait { within } else { Some(core.settings.answer_timeout) };
        let share = Share { weight, numbered: semaphore.numbered };
        let ticket = Ticket::waiting(id, semaphore.clone(), share, within);
        let request = Request {
            terms: semaphore.terms,
            share,
            queues: wait,
            claims_first: semaphore.claims_first,
            gives_up_at: ticket.gives_up_at,
            label: semaphore.label.clone(),
        };
        self.locked(|state, _, now| {
            if state.closed {
                return Entered::Failed(Box::new(Error::Closed));
            }
            state.core.acquire(id, ticket.clone(), request, now);
            Entered::Waiting(ticket)
        })
    }

    fn end(&self, id: AcquisitionId, _known: Known) {
        self.locked(|state, after, now| {
            if let Some(ticket) = state.end(id, now) {
                ticket.cancel(after);
            }
        });
    }

    fn release(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<SemaphoreSpec>,
        by: ReleasedBy,
    ) -> Release {
        if let Some(error) = self.common.core.stopped() {
            return Release::Failed(error);
        }
        self.locked(|state, after, now| {
            let ticket = state.end(id, now);
            if let Some(ticket) = &ticket {
                by.notify(ticket, after);
            }
            let by_guard = by == ReleasedBy::Guard;
            let caller = ticket.filter(|_| by_guard);
            let caller = caller.unwrap_or_else(|| Ticket::releasing(id, semaphore.clone()));
            let lease = semaphore.terms.lease;
            let caller = state.core.release(id, caller, (by_guard, lease), now);
            caller.map_or(Release::Done(false), Release::Sent)
        })
    }

    fn attach(&self, id: AcquisitionId, semaphore: &Arc<SemaphoreSpec>) -> Arc<Ticket> {
        self.locked(|state, after, _| {
            if let Some(ticket) = state.core.owner(id) {
                return ticket.clone();
            }
            let ticket = Ticket::held(id, semaphore.clone(), Moment::NEVER);
            let reason = if state.closed { LossReason::Closed } else { LossReason::Released };
            ticket.lose(reason, after);
            ticket
        })
    }

    fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        let state = self.state();
        match state.core.owner(id) {
            Some(_) => Ok(()),
            None if state.closed => Err(LossReason::Closed),
            None => Err(LossReason::Released),
        }
    }

    fn close(&self) {
        self.locked(|state, after, now| {
            state.closed = true;
            for id in state.core.ids_to_close() {
                if let Some(ticket) = state.end(id, now) {
                    ticket.fail(Error::Closed, after);
                    ticket.lose(LossReason::Closed, after);
                }
            }
            state.core.forget_unwanted(now);
        });
    }

    fn drained(self: Arc<Self>, until: Moment) -> Later<()> {
        let asked = Moment::now();
        let deadline = Deadline::new(&self.common.core, until);
        Box::pin(async move {
            loop {
                let settled = self.settled.notified();
                {
                    let mut state = self.state();
                    if state.core.is_settled() {
                        return state.core.take_failed_release().map_or(Ok(()), Err);
                    }
                }
                if deadline.unless(settled).await.is_none() {
                    let core = &self.common.core;
                    return Err(core.unavailable(Some(self.destination()), asked, Moment::now()));
                }
            }
        })
    }

    fn abandon(&self) {
        let mut after = After::default();
        let mut state = self.state();
        let ids = state.core.ids_to_close();
        let abandoned: Vec<_> = ids.into_iter().filter_map(|id| state.core.forget(id)).collect();
        drop(state);
        for ticket in abandoned {
            ticket.cancel(&mut after);
        }
        after.run();
    }

    fn stop(&self, error: &Error) {
        let mut after = After::default();
        let mut state = self.state();
        let now = Moment::now();
        state.core.refuse_waiters(error, now);
        self.notify(&mut state, now, &mut after);
        for ticket in state.core.owners() {
            ticket.lose(LossReason::NotRenewed, &mut after);
        }
        drop(state);
        after.run();
    }

    fn is_idle(&self) -> bool {
        self.state().core.is_idle()
    }

    fn release_member(&self, id: &str) -> Later<bool> {
        self.common.core.run(self.backend.release_member(&self.common.name, id))
    }

    fn steer(&self, steer: Steer, declares: bool) -> Later<Steered> {
        let declares = declares && steer != Steer::Forget;
        let capacity = declares.then(|| self.common.capacity());
        let name = &self.common.name;
        self.common.core.run(self.backend.steer(name, Command::Steer { capacity, steer }))
    }

    fn position(&self, id: AcquisitionId) -> Later<Option<usize>> {
        self.common.core.run(self.backend.position(&self.common.name, id))
    }

    fn stats(&self, waiters: Range<usize>) -> Later<SemaphoreStats> {
        let name = self.common.name.to_string();
        let query = Query { names: Some(vec![name.clone()]), limit: 1, unused: true, waiters };
        let stats = self.common.core.run(self.backend.stats(query));
        Box::pin(async move {
            let found = stats.await?.into_iter().next();
            Ok(found.unwrap_or_else(|| SemaphoreStats::unused(name)))
        })
    }

    fn granted(&self, id: AcquisitionId, grant: Option<(Held, Moment)>) {
        self.locked(|state, _, now| state.core.woken(id, grant, now));
    }

    fn token_comes(&self, after: Span) {
        self.locked(|state, _, now| state.core.token_arrives(after, now));
    }

    fn evicted(&self, id: AcquisitionId) {
        self.locked(|state, _, now| state.core.cancelled_elsewhere(id, now));
    }

    fn reconnected(&self, to: Destination, other: bool) {
        let is_ours = self.destination() == to;
        let has_stragglers = self.common.core.has_stragglers();
        self.locked(|state, _, now| {
            if has_stragglers {
                state.core.expect_stragglers();
            }
            if is_ours {
                state.core.connected(other, now);
            }
        });
    }

    fn wake_ups_missed(&self, slot: Slot) {
        if self.slot == slot {
            self.locked(|state, _, now| state.core.connected(false, now));
        }
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
            self.locked(|state, _, now| state.core.refuse_waiters(error, now));
        }
    }
}

impl fmt::Debug for RemoteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteName").field("name", &self.common.name).finish_non_exhaustive()
    }
}
