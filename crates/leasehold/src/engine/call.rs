//! One command of a lock or a pool, and the future of its answer.
//!
//! A call is sent again as long as its outcome is unknown and a caller waits for it. At its deadline it fails with
//! [`Error::Unavailable`]. What a call acquires has no guard: guards are acquired through a
//! [client core](crate::client_core), which undoes what no caller waits for any more.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::Core;
use super::background::UnderWay;
use super::sender::{Source, Taken, Urgency};
use super::timers::Timed;
use crate::backend::{Answer, Destination, Part, Slot};
use crate::callbacks::guarded;
use crate::client_core::Delivery;
use crate::clock::Moment;
use crate::{AcquisitionId, Error};

/// Receives the answer to a call that no caller awaits.
pub(crate) type Done = Box<dyn FnOnce(Result<Answer, Error>) + Send>;

/// The answer to one command. It is ready at once, or when a remote store has answered.
pub(crate) enum CallFuture {
    Answered(Option<Result<(Answer, Moment), Error>>),
    Sent(Arc<Call>),
}

impl CallFuture {
    /// Asks a store that answers at once. The validity of the answer counts from before the call, because this thread
    /// may be paused as soon as it has the answer.
    pub(crate) fn at_once(sent: Moment, ask: impl FnOnce() -> Result<Answer, Error>) -> Self {
        Self::Answered(Some(ask().map(|answer| (answer, sent))))
    }
}

impl Future for CallFuture {
    type Output = Result<(Answer, Moment), Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Answered(answer) => Poll::Ready(answer.take().unwrap_or_else(|| {
                Err(Error::internal("a call was polled after it had completed"))
            })),
            Self::Sent(call) => call.poll(cx),
        }
    }
}

impl Drop for CallFuture {
    fn drop(&mut self) {
        if let Self::Sent(call) = self {
            call.cancel();
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
    phase: Phase,
    /// Why the last attempt failed.
    problem: Option<Error>,
    /// Makes a close wait for this call, until it is answered or cannot be sent any more.
    under_way: Option<UnderWay>,
}

enum Phase {
    Waiting(Option<Waker>),
    Answered(Result<(Answer, Moment), Error>),
    /// No caller awaits the answer. The call, which nothing else keeps alive, is sent until it is answered.
    Background(Done, Arc<Call>),
    /// The caller no longer waits for the answer.
    Dropped,
}

impl Phase {
    fn is_wanted(&self) -> bool {
        matches!(self, Self::Waiting(_) | Self::Background(..))
    }
}

impl Call {
    pub(super) fn start(core: &Arc<Core>, part: Part) -> CallFuture {
        let call = Self::new(core, part);
        call.begin();
        CallFuture::Sent(call)
    }

    /// Sends the call until it is answered or its deadline has passed, and calls `done`.
    pub(super) fn start_in_background(core: &Arc<Core>, part: Part, done: Done) {
        let call = Self::new(core, part);
        call.state().phase = Phase::Background(done, call.clone());
        call.begin();
    }

    fn new(core: &Arc<Core>, part: Part) -> Arc<Self> {
        let state = Mutex::new(CallState {
            delivery: Delivery::Unsent,
            phase: Phase::Waiting(None),
            problem: None,
            under_way: Some(UnderWay::new(core)),
        });
        let (core, slot, asked) = (core.clone(), core.slot(part.subject()), core.now());
        let until = asked + core.settings.answer_timeout;
        Arc::new_cyclic(|this| Self { core, slot, part, asked, until, state, this: this.clone() })
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
        match unserved_since {
            Some(since) => self.core.send_later(this, Urgency::Ordinary, since),
            None => self.core.send(this, Urgency::Ordinary),
        }
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(Answer, Moment), Error>> {
        match &self.state().phase {
            Phase::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => return Poll::Pending,
            _ => {}
        }
        let waker = cx.waker().clone();
        let mut state = self.state();
        if let Phase::Waiting(slot) = &mut state.phase {
            let replaced = slot.replace(waker);
            drop(state);
            drop(replaced);
            return Poll::Pending;
        }
        let phase = std::mem::replace(&mut state.phase, Phase::Dropped);
        drop(state);
        drop(waker);
        match phase {
            Phase::Answered(answer) => Poll::Ready(answer),
            _ => Poll::Ready(Err(Error::internal("a call was polled after it had completed"))),
        }
    }

    /// Ends the wait, if anything still waits for the answer. A close does not wait for the call any more, unless it
    /// is in flight.
    fn finish(&self, answer: Result<(Answer, Moment), Error>) {
        self.core.timers.set(self.this.clone(), Some(self.until), None);
        let mut state = self.state();
        let is_in_flight = state.delivery == Delivery::Sent;
        let under_way = if is_in_flight { None } else { state.under_way.take() };
        let ended = match std::mem::replace(&mut state.phase, Phase::Dropped) {
            Phase::Waiting(waker) => {
                state.phase = Phase::Answered(answer);
                drop(state);
                waker.map(|waker| guarded(|| waker.wake()));
                None
            }
            Phase::Background(done, this) => {
                drop(state);
                guarded(|| done(answer.map(|(answer, _)| answer)));
                Some(this)
            }
            ended => {
                state.phase = ended;
                drop(state);
                None
            }
        };
        drop((under_way, ended));
    }

    /// Handles a caller that no longer waits. If the call is in flight, a close waits for its answer.
    fn cancel(&self) {
        let mut state = self.state();
        let phase = std::mem::replace(&mut state.phase, Phase::Dropped);
        let is_in_flight = state.delivery == Delivery::Sent;
        let under_way = if is_in_flight { None } else { state.under_way.take() };
        drop(state);
        drop((phase, under_way));
    }

    fn state(&self) -> MutexGuard<'_, CallState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source for Call {
    fn destination(&self) -> Destination {
        self.core.destination(self.slot)
    }

    fn take(self: Arc<Self>, _urgency: Urgency, _room: usize) -> Taken {
        let mut state = self.state();
        let wanted = state.phase.is_wanted();
        if wanted {
            state.delivery = Delivery::Sent;
        }
        Taken { part: wanted.then(|| (self.part.clone(), None)), more: false }
    }

    fn settle(
        self: Arc<Self>,
        _part: &Part,
        _id: Option<AcquisitionId>,
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
        let under_way = if state.phase.is_wanted() { None } else { state.under_way.take() };
        let is_wanted = state.phase.is_wanted();
        drop(state);
        drop(under_way);
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
