//! One command of a lock or a pool, and the future of its answer; queries.
//!
//! A call is sent again as long as its outcome is unknown and a caller waits for it. At its deadline it fails with
//! [`Error::Unavailable`]. What a call acquires has no guard: guards are acquired through a
//! [client core](crate::client_core), which undoes what no caller waits for any more.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::oneshot;

use super::Core;
use super::background::UnderWay;
use super::sender::{Source, Taken, Urgency};
use super::store::Store;
use super::thread::Message;
use super::timers::{Deadline, Timed};
use crate::backend::memory::Memory;
use crate::backend::{Answer, BoxFuture, Destination, Part, RemoteBackend, Slot};
use crate::callbacks::guarded;
use crate::client_core::Delivery;
use crate::clock::{Moment, Span};
use crate::machine::Command;
use crate::machine::lock::{LockOutcome, Record, Verdict};
use crate::machine::pool::PoolQuery;
use crate::stats::{PoolStats, Query, SemaphoreStats};
use crate::{ClientInfo, Error};

/// The shortest time that the store has to answer an attempt after the first, also if the caller's wait ends sooner.
const SHORTEST_ANSWER: Span = Span::from_millis(500);

/// The answer to one command. It is ready at once, or when a remote store has answered.
pub(crate) enum CallFuture {
    Answered(Option<CallAnswer>),
    Sent(Arc<Call>, oneshot::Receiver<CallAnswer>),
}

/// The answer, and the moment from which its validity counts.
pub(crate) type CallAnswer = Result<(Answer, Moment), Error>;

impl CallFuture {
    /// Asks a store that answers at once. The validity of the answer counts from before the call, because this thread
    /// may be paused as soon as it has the answer.
    pub(crate) fn at_once(sent: Moment, ask: impl FnOnce() -> Result<Answer, Error>) -> Self {
        Self::Answered(Some(ask().map(|answer| (answer, sent))))
    }
}

impl Future for CallFuture {
    type Output = CallAnswer;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match self.get_mut() {
            Self::Answered(answer) => answer.take(),
            Self::Sent(_, answer) => ready!(Pin::new(answer).poll(cx)).ok(),
        };
        let ended = || Err(Error::internal("a call was polled after it had completed"));
        Poll::Ready(answer.unwrap_or_else(ended))
    }
}

impl Drop for CallFuture {
    fn drop(&mut self) {
        if let Self::Sent(call, answer) = self {
            answer.close();
            call.release_close();
        }
    }
}

pub(crate) struct Call {
    core: Arc<Core>,
    slot: Slot,
    part: Part,
    asked: Moment,
    /// When the call fails, if the store has not answered.
    until: Moment,
    state: Mutex<CallState>,
    this: Weak<Self>,
}

struct CallState {
    delivery: Delivery,
    /// Receives the answer. `None` once it has received it.
    caller: Option<oneshot::Sender<CallAnswer>>,
    /// The call itself, if it is sent until it is answered, even if its future is dropped.
    kept_alive: Option<Arc<Call>>,
    /// Why the last attempt failed.
    problem: Option<Error>,
    /// Makes a close wait for this call, until it is answered or cannot be sent any more.
    under_way: Option<UnderWay>,
}

impl CallState {
    fn is_wanted(&self) -> bool {
        let waits = |caller: &oneshot::Sender<_>| !caller.is_closed();
        self.kept_alive.is_some() || self.caller.as_ref().is_some_and(waits)
    }
}

impl Call {
    /// Sends a command until it is answered, until its deadline has passed, or, unless `to_the_end` is set, until the
    /// future is dropped.
    pub(super) fn start(core: &Arc<Core>, part: Part, to_the_end: bool) -> CallFuture {
        let (caller, answer) = oneshot::channel();
        let (core, slot, asked) = (core.clone(), core.slot(part.subject()), core.now());
        let until = asked + core.settings.answer_timeout;
        let call = Arc::new_cyclic(|this: &Weak<Self>| {
            let state = Mutex::new(CallState {
                delivery: Delivery::Unsent,
                caller: Some(caller),
                kept_alive: None,
                problem: None,
                under_way: Some(UnderWay::new(&core)),
            });
            Self { core, slot, part, asked, until, state, this: this.clone() }
        });
        call.state().kept_alive = to_the_end.then(|| call.clone());
        call.begin();
        CallFuture::Sent(call, answer)
    }

    fn begin(&self) {
        let refusal = self.core.stopped().or_else(|| self.core.sender.refusal(self.destination()));
        let begun = refusal
            .map_or(Ok(()), Err)
            .and_then(|()| self.core.set_timer(self.this.clone(), None, Some(self.until)))
            .and_then(|()| self.send(None));
        if let Err(error) = begun {
            self.refuse(&error);
        }
    }

    /// Joins the sender's line: later, if the store has not been able to serve the call since a moment.
    fn send(&self, unserved_since: Option<Moment>) -> Result<(), Error> {
        let Some(this) = self.this.upgrade() else { return Ok(()) };
        let this = this as Arc<dyn Source>;
        match unserved_since {
            Some(since) => self.core.send_later(&this, Urgency::Ordinary, since),
            None => self.core.send(&this, Urgency::Ordinary),
        }
    }

    /// Answers the caller, if it still waits. A close does not wait for the call any more, unless it is in flight.
    fn finish(&self, answer: CallAnswer) {
        self.core.timers.set(self.this.clone(), Some(self.until), None);
        let mut state = self.state();
        let (caller, kept_alive) = (state.caller.take(), state.kept_alive.take());
        drop(state);
        if let Some(caller) = caller {
            // The caller may have gone.
            guarded(|| drop(caller.send(answer)));
        }
        self.release_close();
        drop(kept_alive);
    }

    /// Lets a close go on that waits for this call, unless the call is in flight or will be sent.
    fn release_close(&self) {
        let mut state = self.state();
        let waits = state.delivery == Delivery::Sent || state.is_wanted();
        let under_way = if waits { None } else { state.under_way.take() };
        drop(state);
        drop(under_way);
    }

    fn state(&self) -> MutexGuard<'_, CallState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    /// Sends one command for a lock or a pool. It fails if the store has not answered within the time for a call.
    pub(crate) fn call(self: &Arc<Self>, part: Part) -> CallFuture {
        match &self.store {
            Store::Memory(memory) => CallFuture::at_once(self.now(), || self.apply(memory, &part)),
            Store::Shared(_) => Call::start(self, part, false),
        }
    }

    fn apply(&self, memory: &Memory, part: &Part) -> Result<Answer, Error> {
        let answer = memory.apply(part)?;
        // The store has only this client, which sees every release.
        if let Answer::Lock(LockOutcome::Release(Verdict::Done(Some(key)))) = &answer {
            self.lock_waiters.wake_one(key);
        }
        Ok(answer)
    }

    /// Returns when a further attempt of a wait fails unanswered, if it begins now and the wait ends at `give_up_at`.
    ///
    /// The store has answered the attempts before it. So an attempt at the end of the wait gets time for its answer:
    /// otherwise a store that answers well would count as unavailable.
    pub(crate) fn next_attempt_until(&self, give_up_at: Moment) -> Moment {
        let now = self.now();
        if now < give_up_at {
            give_up_at.max(now + SHORTEST_ANSWER)
        } else {
            now + self.settings.answer_timeout
        }
    }

    /// Sends one command like [`call`](Self::call). Until its deadline it is repeated if it is not answered, even if the
    /// future is dropped.
    pub(crate) fn call_to_the_end(self: &Arc<Self>, part: Part) -> BoxFuture<Answer> {
        let call = match &self.store {
            Store::Memory(memory) => CallFuture::at_once(self.now(), || self.apply(memory, &part)),
            Store::Shared(_) => Call::start(self, part, true),
        };
        Box::pin(async move { Ok(call.await?.0) })
    }

    pub(crate) fn stats(self: &Arc<Self>, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        if let Store::Shared(backend) = &self.store {
            return self.run(backend.stats(query));
        }
        let names = self.registry.names().into_iter().filter(|named| {
            let name = named.name().as_str();
            query.names.as_ref().is_none_or(|names| names.iter().any(|wanted| wanted == name))
        });
        let all: Vec<_> = names.map(|named| named.stats(query.waiters.clone())).collect();
        Box::pin(async move {
            let mut stats = Vec::with_capacity(all.len());
            for one in all {
                stats.push(one.await?);
            }
            Ok(stats)
        })
    }

    /// Returns the held locks, ordered by key, at most `limit` of them.
    pub(crate) fn list_locks(self: &Arc<Self>, limit: usize) -> BoxFuture<Vec<Record>> {
        self.query(|memory| memory.list_locks(limit), |backend| backend.list_locks(limit))
    }

    /// Returns the pools that have members, ordered by name.
    pub(crate) fn list_pools(self: &Arc<Self>, query: PoolQuery) -> BoxFuture<Vec<PoolStats>> {
        let again = query.clone();
        self.query(move |memory| memory.list_pools(&again), |backend| backend.list_pools(query))
    }

    /// Returns the clients of the store, ordered by id, at most `limit` of them.
    pub(crate) fn list_clients(self: &Arc<Self>, limit: usize) -> BoxFuture<Vec<ClientInfo>> {
        let here = ClientInfo::here(self.client);
        let here = move |_: &_| [here].into_iter().take(limit).collect();
        self.query(here, |backend| backend.list_clients(limit))
    }

    /// Answers a query from memory, or on the engine's thread.
    fn query<T: Send + 'static>(
        &self,
        here: impl FnOnce(&Memory) -> T,
        shared: impl FnOnce(&dyn RemoteBackend) -> BoxFuture<T>,
    ) -> BoxFuture<T> {
        match &self.store {
            Store::Memory(memory) => Box::pin(std::future::ready(Ok(here(memory)))),
            Store::Shared(backend) => self.run(shared(&**backend)),
        }
    }

    /// Returns the result of `work`, or an error if `until` comes first, because the store has not answered.
    pub(crate) async fn until<T>(
        self: &Arc<Self>,
        until: Moment,
        work: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut work = pin!(work);
        // Usually the work is done at once and needs no timer.
        if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
            return Ok(done);
        }
        let asked = self.now();
        let done = Deadline::new(self, until).unless(work).await;
        done.ok_or_else(|| self.unavailable(None, asked, self.now()))
    }

    /// Runs a query on the engine's thread. The store limits the time of each step.
    pub(crate) fn run<T: Send + 'static>(&self, work: BoxFuture<T>) -> BoxFuture<T> {
        let (answer, answered) = oneshot::channel();
        let sent = self.send_message(Message::Run(Box::pin(async move {
            let done = work.await;
            guarded(|| drop(answer.send(done)));
        })));
        let this = self.this.clone();
        Box::pin(async move {
            sent?;
            answered.await.unwrap_or_else(|_| {
                let stopped = this.upgrade().and_then(|core| core.stopped());
                Err(stopped.unwrap_or_else(|| Error::internal("a query ended without an answer")))
            })
        })
    }
}

impl Source for Call {
    fn destination(&self) -> Destination {
        self.core.destination(self.slot)
    }

    fn take(self: Arc<Self>, _urgency: Urgency, _room: usize) -> Taken {
        let mut state = self.state();
        let wanted = state.is_wanted();
        if wanted {
            state.delivery = Delivery::Sent;
        }
        Taken { part: wanted.then(|| (self.part.clone(), None)), more: false }
    }

    fn answered(
        self: Arc<Self>,
        _part: &Part,
        _command: Option<&Command>,
        answer: Result<Answer, Error>,
        sent: Moment,
        _round_trip: Duration,
    ) {
        let rests = matches!(answer, Ok(Answer::NotNow));
        let is_unknown = match &answer {
            Ok(Answer::Elsewhere | Answer::NotNow) => true,
            Ok(_) => false,
            Err(error) => error.is_transient(),
        };
        if !is_unknown {
            self.state().delivery = Delivery::Answered;
            return self.finish(answer.map(|answer| (answer, sent)));
        }
        let mut state = self.state();
        state.delivery = Delivery::Unknown;
        state.problem = answer.err();
        let is_wanted = state.is_wanted();
        drop(state);
        self.release_close();
        if is_wanted && let Err(error) = self.send(rests.then_some(self.asked)) {
            self.refuse(&error);
        }
    }

    fn refuse(&self, error: &Error) {
        self.finish(Err(error.clone()));
    }
}

impl Timed for Call {
    /// Fails the call, because its deadline has passed.
    fn fire(&self, now: Moment) {
        let to = self.destination();
        let (is_unknown, problem) = {
            let mut state = self.state();
            (state.delivery == Delivery::Unknown, state.problem.take())
        };
        // A store that answers, but with an error, is not silent.
        let is_silent = self.core.sender.silent_since(to, now).is_some();
        let error = problem
            .filter(|_| is_unknown && !is_silent)
            .unwrap_or_else(|| self.core.unavailable(Some(to), self.asked, now));
        self.finish(Err(error));
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.core.timers.set(self.this.clone(), Some(self.until), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::lock::LockOutcome;

    #[tokio::test]
    async fn an_answer_counts_from_before_it_was_asked_for() {
        let mut asked = None;
        let call = CallFuture::at_once(Moment::now(), || {
            asked = Some(Moment::now());
            std::thread::sleep(std::time::Duration::from_millis(2));
            Ok(Answer::Lock(LockOutcome::IsLocked(true)))
        });
        let (_, sent) = call.await.unwrap();
        assert!(Some(sent) <= asked);
    }
}
