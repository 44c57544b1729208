//! Semaphore names of a store that other processes share.

use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use super::Core;
use super::deferred::Deferred;
use super::driver::{Driver, Protocol};
use super::last_outlook::LastOutlook;
use super::name_state::{Common, Entered, NameState, Release, ReleasedBy};
use super::semaphore_spec::SemaphoreSpec;
use super::sender::{MAX_IDS, TakenPart};
use super::ticket::Ticket;
use crate::backend::{Answer, BoxFuture, Part, RemoteBackend, Slot};
use crate::client_core::{Request, Rules};
use crate::clock::{Moment, Span};
use crate::machine::{
    Command, Declared, Held, LimitChange, LimitsChanged, Outcome, Outlook, ReleaseHint, Reply,
    Share, Subject, Terms,
};
use crate::name::Name;
use crate::stats::{Query, SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, Error, LossReason};

/// One name of a remote store.
pub(super) type RemoteName = Driver<SemaphoreProtocol>;

/// Semaphores take the commands of the core as they are.
pub(super) struct SemaphoreProtocol {
    common: Common,
    backend: Arc<dyn RemoteBackend>,
    outlook: LastOutlook,
}

impl Protocol for SemaphoreProtocol {
    const MOST_COMMANDS: usize = MAX_IDS;

    fn subject(&self) -> Subject<'_> {
        Subject::Semaphore(&self.common.name)
    }

    fn rules(&self, _core: &Core) -> Rules {
        Rules::default()
    }

    fn declared(&self) -> Declared {
        self.common.declared()
    }

    fn part(&self, declared: Declared, commands: Vec<Command>, now: Moment) -> TakenPart {
        let (name, outlook) = (self.common.name.clone(), self.outlook.now(now));
        (Part::Semaphore { name, declared, commands, outlook }, None)
    }

    fn reply(&self, part: &Part, answer: Answer, _deferred: &mut Deferred) -> Result<Reply, Error> {
        let (Part::Semaphore { declared, commands, .. }, Answer::Semaphore(reply)) = (part, answer)
        else {
            return Err(Error::internal("unexpected answer to a command for a semaphore"));
        };
        self.outlook.learn(&reply, Moment::now());
        // A refused acquire has declared nothing.
        let declares = |(command, outcome): (&Command, &Outcome)| {
            matches!(command, Command::Enqueue { .. })
                && !matches!(outcome, Outcome::TooHeavy { .. } | Outcome::Unapplied)
        };
        if commands.iter().zip(&reply.outcomes).any(declares) {
            self.common.acknowledged(*declared);
        }
        Ok(reply)
    }
}

impl RemoteName {
    pub(super) fn open(
        name: Name,
        core: Arc<Core>,
        backend: Arc<dyn RemoteBackend>,
    ) -> Arc<dyn NameState> {
        let common = Common::new(name, core.clone());
        Self::new(SemaphoreProtocol { common, backend, outlook: LastOutlook::default() }, core)
    }

    fn name(&self) -> &Name {
        &self.protocol.common.name
    }

    /// Runs a query on the engine's thread.
    fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&dyn RemoteBackend, &Name) -> BoxFuture<T>,
    ) -> BoxFuture<T> {
        let name = self.name().clone();
        let answered = self.core.run(query(&*self.protocol.backend, &name));
        Box::pin(async move { answered.await.map_err(|error| error.in_name(name.as_str())) })
    }
}

impl NameState for RemoteName {
    fn common(&self) -> &Common {
        &self.protocol.common
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
        // A try is bounded like every other call.
        let within = if wait { within } else { Some(self.core.settings.answer_timeout) };
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
        match self.acquire(&ticket, request) {
            Ok(()) => Entered::Waiting(ticket),
            Err(error) => Entered::Failed(Box::new(error)),
        }
    }

    fn end(&self, id: AcquisitionId, _hint: ReleaseHint) {
        self.end(id);
    }

    fn release(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<SemaphoreSpec>,
        by: ReleasedBy,
    ) -> Release {
        if let Some(error) = self.core.stopped() {
            return Release::Failed(error);
        }
        self.locked(|state, deferred, now| {
            let ticket = state.end(id, now);
            if let Some(ticket) = &ticket {
                by.notify(ticket, deferred);
            }
            let by_guard = by == ReleasedBy::Guard;
            let caller = ticket.filter(|_| by_guard);
            let caller = caller.unwrap_or_else(|| Ticket::releasing(id, semaphore.clone()));
            let lease = semaphore.terms.lease;
            let caller = state.core.release(id, caller, (by_guard, lease), now);
            caller.map_or(Release::Done(false), Release::Sent)
        })
    }

    fn detach(&self, id: AcquisitionId) {
        self.forget(id);
    }

    fn extend(&self, id: AcquisitionId, terms: Terms) -> BoxFuture<bool> {
        let (name, declared) = (self.name().clone(), self.common().declared());
        let commands = vec![Command::Renew { id, terms, holds: true }];
        let outlook = Outlook::Special;
        let call = self.core.call(Part::Semaphore { name, declared, commands, outlook });
        Box::pin(async move {
            match call.await?.0 {
                Answer::Semaphore(reply) => Ok(matches!(reply.outcomes[..], [Outcome::Held(_)])),
                answer => {
                    Err(Error::internal(format!("unexpected answer to a renewal: {answer:?}")))
                }
            }
        })
    }

    fn attach(&self, id: AcquisitionId, semaphore: &Arc<SemaphoreSpec>) -> Arc<Ticket> {
        self.locked(|state, deferred, _| {
            if let Some(ticket) = state.core.owner(id) {
                return ticket.clone();
            }
            let ticket = Ticket::held(id, semaphore.clone(), Moment::NEVER);
            let reason = if state.closed { LossReason::Closed } else { LossReason::Released };
            ticket.lose(reason, deferred);
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

    fn abandon(&self) {
        self.abandon();
    }

    fn is_idle(&self) -> bool {
        let mut state = self.state();
        // What was dropped during an outage has to leave no trace.
        state.core.forget_unwanted(self.core.now());
        state.core.is_idle()
    }

    fn release_member(&self, id: &str) -> BoxFuture<bool> {
        self.query(|backend, name| backend.release_member(name, id))
    }

    fn change_limits(&self, change: LimitChange, declares: bool) -> BoxFuture<LimitsChanged> {
        let declares = declares && change != LimitChange::Forget;
        let capacity = declares.then(|| self.common().capacity());
        self.query(|backend, name| {
            backend.change_limits(name, Command::ChangeLimits { capacity, change })
        })
    }

    fn position(&self, id: AcquisitionId) -> BoxFuture<Option<usize>> {
        self.query(|backend, name| backend.position(name, id))
    }

    fn limits(&self) -> BoxFuture<SemaphoreLimits> {
        self.query(|backend, name| backend.limits(name))
    }

    fn stats(&self, waiters: Range<usize>) -> BoxFuture<SemaphoreStats> {
        let name = self.name().to_string();
        let query = Query { names: Some(vec![name.clone()]), limit: 1, unused: true, waiters };
        let stats = self.query(|backend, _| backend.stats(query));
        Box::pin(async move {
            let found = stats.await?.into_iter().next();
            Ok(found.unwrap_or_else(|| SemaphoreStats::unused(name)))
        })
    }

    fn granted(&self, id: AcquisitionId, grant: Option<(Held, Moment)>) {
        self.input(|core, now| core.woken(id, grant, now));
    }

    fn token_comes(&self, after: Span) {
        self.input(|core, now| core.token_arrives(after, now));
    }

    fn evicted(&self, id: AcquisitionId) {
        self.input(|core, now| core.cancelled_elsewhere(id, now));
    }

    fn wake_ups_missed(&self, slot: Slot) {
        if self.slot() == slot {
            self.input(|core, now| core.connected(false, now));
        }
    }
}
