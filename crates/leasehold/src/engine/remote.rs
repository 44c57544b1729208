//! Names, locks and pools of a store that other processes share.
//!
//! A name keeps its state behind one lock: the acquisitions of this client, each with its ticket and the
//! [`life`](super::life) of its commands; the releases that are not answered yet; the commands that have to be sent, in
//! order; and its timers. [`outcomes`] applies the store's answers. [`renewals`] keeps leases and places in the queue
//! alive.
//!
//! Whatever happens to a request, one of these is always true of every id that the store may know (invariant 7):
//!
//! - its ticket holds or waits;
//! - its release is repeated until it is answered;
//! - so much time has passed that the store must have expired it.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use tokio::sync::Notify;

use super::Core;
use super::call::{Asked, Call, Done, Undo};
use super::callbacks::guarded;
use super::life::Life;
use super::name_state::{Common, Entered, NameState, Release, ReleasedBy};
use super::sender::{Source, Taken, Urgency};
use super::store::Store;
use super::ticket::{After, Ticket};
use super::timers::{Deadline, Timed};
use crate::backend::{Answer, Destination, Later, Part, Profile, RemoteBackend, Slot, Subject};
use crate::clock::{Moment, Span};
use crate::machine::lock::{LockCommand, Record};
use crate::machine::pool::PoolAction;
use crate::machine::{Command, Held, Known, Outcome, Share, Steer, Steered};
use crate::name::Name;
use crate::pool::{PoolStats, Which};
use crate::semaphore::Declaration;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientInfo, Error, LossReason};

mod outcomes;
mod renewals;
mod state;
#[cfg(test)]
mod tests;

use state::{State, Timer, Want};

/// A store that other processes share, as the engine sees it.
pub(crate) struct Remote(pub(crate) Arc<dyn RemoteBackend>);

impl Store for Remote {
    fn profile(&self) -> Profile {
        self.0.profile()
    }

    fn open(&self, name: Name, core: Arc<Core>) -> Arc<dyn NameState> {
        let (slot, backend) = (self.0.slot(Subject::Semaphore(&name)), self.0.clone());
        let state = Mutex::new(State::new(core.clone(), self.0.destination(slot)));
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

    fn list_pools(&self, core: &Arc<Core>, which: Which) -> Later<Vec<PoolStats>> {
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
    state: Mutex<State>,
    /// Notified when nothing has to be sent and nothing is in flight.
    settled: Notify,
    this: Weak<Self>,
}

impl RemoteName {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` under the lock, and then sets the timer, joins the sender's line if there is something to send, and
    /// wakes the tasks that `work` has notified.
    fn locked<T>(&self, work: impl FnOnce(&mut State, &mut After) -> T) -> T {
        let mut after = After::default();
        let mut state = self.state();
        let result = work(&mut state, &mut after);
        let next = state.timers.first().map(|(at, _)| *at);
        let before = std::mem::replace(&mut state.timer_at, next);
        let (sends, renews) = (!state.unsent.is_empty(), !state.renewals.is_empty());
        let joins = (sends && !state.in_line.0, renews && !state.in_line.1);
        state.in_line.0 |= sends;
        state.in_line.1 |= renews;
        let settled = state.is_settled();
        let rests = std::mem::take(&mut state.rests).then_some(state.unserved).flatten();
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
}

impl Timed for RemoteName {
    fn fire(&self, now: Moment) {
        self.locked(|state, after| {
            state.timer_at = None;
            state.fire(now, after);
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
                let commands = state.take_renewals(room);
                state.in_line.1 = !state.renewals.is_empty();
                (commands, state.in_line.1)
            }
            Urgency::Ordinary => {
                let commands = state.take(room, declared);
                state.in_line.0 = !state.unsent.is_empty();
                (commands, state.in_line.0)
            }
        };
        state.in_flight += usize::from(!commands.is_empty());
        let settled = state.is_settled();
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

    fn settle(self: Arc<Self>, part: &Part, answer: Result<Answer, Error>, sent: Moment) {
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
        self.locked(|state, after| {
            state.in_flight -= 1;
            match answer {
                Ok(Answer::Semaphore(reply)) => state.apply_reply(commands, reply, sent, after),
                Ok(Answer::Elsewhere) => state.outcome_unknown(commands, sent),
                Ok(Answer::NotNow) => {
                    state.outcome_unknown(commands, sent);
                    state.unserved.get_or_insert(sent);
                    state.rests = true;
                }
                Ok(other) => {
                    let error = Error::internal(format!(
                        "unexpected answer to a command for a semaphore: {other:?}"
                    ));
                    state.apply_refusal(commands, &error, after);
                }
                Err(error) if error.may_pass() => {
                    state.renewals_failed(commands, &error, after);
                    state.outcome_unknown(commands, sent);
                }
                Err(error) => state.apply_refusal(commands, &error, after),
            }
        });
    }

    fn leave_if_unwanted(&self, urgency: Urgency) -> bool {
        let mut state = self.state();
        match urgency {
            Urgency::Renewals => {
                let wanted = state.renewals.iter().any(|id| state.is_wanted(Want::Renew(*id)));
                if !wanted {
                    state.renewals.clear();
                    state.in_line.1 = false;
                }
                !wanted
            }
            Urgency::Ordinary => {
                let wanted = state.unsent.iter().any(|(_, want)| state.is_wanted(*want));
                if !wanted {
                    state.forget_unwanted();
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
        semaphore: &Arc<Declaration>,
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
        let ticket = Ticket::waiting(id, semaphore.clone(), share, wait, within);
        self.locked(|state, _| {
            if state.closed {
                return Entered::Failed(Box::new(Error::Closed));
            }
            state.add(&ticket, Life::Unsent);
            state.want_enqueue(id);
            Entered::Waiting(ticket)
        })
    }

    fn end(&self, id: AcquisitionId, _known: Known) {
        self.locked(|state, after| {
            if let Some(ticket) = state.end(id) {
                ticket.cancel(after);
            }
        });
    }

    fn release(&self, id: AcquisitionId, semaphore: &Arc<Declaration>, by: ReleasedBy) -> Release {
        if let Some(error) = self.common.core.stopped() {
            return Release::Failed(error);
        }
        let answer_timeout = self.common.core.settings.answer_timeout;
        self.locked(|state, after| {
            if let Some(ticket) = state.end(id) {
                by.notify(&ticket, after);
            }
            let (terms, own) = (semaphore.terms, id.client() == self.common.core.client);
            if !state.releases.contains_key(&id) {
                if own && by == ReleasedBy::Guard {
                    // The enqueue was never sent.
                    return Release::Done(false);
                }
                state.add_release(id, terms, Known::Nothing, false);
            }
            let Some(release) = state.releases.get_mut(&id) else { return Release::Done(false) };
            // A second caller of a release in flight receives the outcome of that release.
            if let Some((ticket, _)) = &release.ticket {
                return Release::Sent(ticket.clone());
            }
            let ticket = Ticket::releasing(id, semaphore.clone());
            let until = Moment::now() + answer_timeout;
            release.ticket = Some((ticket.clone(), until));
            state.timers.insert((until, Timer::ReleaseUnanswered(id)));
            Release::Sent(ticket)
        })
    }

    fn attach(&self, id: AcquisitionId, semaphore: &Arc<Declaration>) -> Arc<Ticket> {
        self.locked(|state, after| {
            if let Some(own) = state.acquisitions.get(&id) {
                return own.ticket.clone();
            }
            let ticket = Ticket::held(id, semaphore.clone(), Moment::NEVER);
            let reason = if state.closed { LossReason::Closed } else { LossReason::Released };
            ticket.lose(reason, after);
            ticket
        })
    }

    fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        let state = self.state();
        match state.acquisitions.contains_key(&id) {
            true => Ok(()),
            false if state.closed => Err(LossReason::Closed),
            false => Err(LossReason::Released),
        }
    }

    fn close(&self) {
        self.locked(|state, after| {
            state.closed = true;
            // Waiters first, and among them the last one first, so that no waiter is granted a permit only to lose it.
            let mut ids: Vec<_> = state.acquisitions.keys().copied().collect();
            ids.sort_unstable_by_key(|id| {
                (state.acquisitions[id].ticket.is_held(), std::cmp::Reverse(id.sequence()))
            });
            for id in ids {
                if let Some(ticket) = state.end(id) {
                    ticket.fail(Error::Closed, after);
                    ticket.lose(LossReason::Closed, after);
                }
            }
            state.forget_unwanted();
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
                    if state.is_settled() {
                        return state.failed_release.take().map_or(Ok(()), Err);
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
        let ids: Vec<_> = state.acquisitions.keys().copied().collect();
        let abandoned: Vec<_> = ids.into_iter().filter_map(|id| state.forget(id)).collect();
        drop(state);
        for own in abandoned {
            own.ticket.cancel(&mut after);
        }
        after.run();
    }

    fn stop(&self, error: &Error) {
        let mut after = After::default();
        let mut state = self.state();
        state.fail_waiters(error, &mut after);
        for own in state.acquisitions.values() {
            own.ticket.lose(LossReason::NotRenewed, &mut after);
        }
        drop(state);
        after.run();
    }

    fn is_idle(&self) -> bool {
        self.state().is_idle()
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
        self.locked(|state, after| state.woken(id, grant, after));
    }

    fn token_comes(&self, after: Span) {
        self.locked(|state, _| state.ask_for_token(after));
    }

    fn evicted(&self, id: AcquisitionId) {
        self.locked(|state, after| {
            // A waiter that was removed must not be enqueued again.
            if !state.cancelled(id, after) {
                // A query in flight may have been applied before the eviction.
                state.claim(id);
            }
        });
    }

    fn reconnected(&self, to: Destination, other: bool) {
        if self.destination() == to {
            self.locked(|state, _| {
                if other {
                    state.release_recent();
                }
                state.renew_everyone(Moment::now());
            });
        }
    }

    fn wake_ups_missed(&self, slot: Slot) {
        if self.slot == slot {
            self.locked(|state, _| state.renew_everyone(Moment::now()));
        }
    }

    fn rerouted(&self) {
        let to = self.destination();
        self.locked(|state, _| {
            if std::mem::replace(&mut state.to, to) != to {
                state.release_recent();
                state.renew_everyone(Moment::now());
            }
        });
    }

    fn refused(&self, from: Destination, error: &Error) {
        if self.destination() == from {
            self.locked(|state, after| state.fail_waiters(error, after));
        }
    }
}

impl fmt::Debug for RemoteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteName").field("name", &self.common.name).finish_non_exhaustive()
    }
}
