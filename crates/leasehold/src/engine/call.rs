//! One command of a lock or a pool, and the future of its answer.
//!
//! A call is sent again as long as its outcome is unknown and a caller waits for it. At its deadline it fails with
//! [`Error::Unavailable`]. What a call acquires has no guard: guards are acquired through a
//! [client core](crate::client_core), which undoes what no caller waits for any more.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::Core;
use super::background::UnderWay;
use super::sender::{Source, Taken, Urgency};
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
    urgency: Urgency,
    asked: Moment,
    /// When the call fails, if the store has not answered.
    until: Moment,
    state: Mutex<State>,
}

struct State {
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
    /// No caller awaits the answer. The call is sent until it is answered.
    Background(Done),
    /// The caller no longer waits for the answer.
    Dropped,
}

impl Phase {
    fn is_wanted(&self) -> bool {
        matches!(self, Self::Waiting(_) | Self::Background(_))
    }
}

impl Call {
    pub(super) fn start(
        core: &Arc<Core>,
        part: Part,
        urgency: Urgency,
        until: Moment,
    ) -> CallFuture {
        let call = Self::new(core, part, urgency, until, Phase::Waiting(None));
        call.clone().begin();
        CallFuture::Sent(call)
    }

    /// Sends the call until it is answered or its deadline has passed, and calls `done`.
    pub(super) fn start_in_background(core: &Arc<Core>, part: Part, until: Moment, done: Done) {
        let phase = Phase::Background(done);
        Self::new(core, part, Urgency::Ordinary, until, phase).begin();
    }

    fn new(
        core: &Arc<Core>,
        part: Part,
        urgency: Urgency,
        until: Moment,
        phase: Phase,
    ) -> Arc<Self> {
        let under_way = Some(UnderWay::new(core));
        let state =
            Mutex::new(State { delivery: Delivery::Unsent, phase, problem: None, under_way });
        let (core, slot, asked) = (core.clone(), core.slot(part.subject()), Moment::now());
        Arc::new(Self { core, slot, part, urgency, asked, until, state })
    }

    fn begin(self: Arc<Self>) {
        let sent =
            match self.core.stopped().or_else(|| self.core.sender.refusal(self.destination())) {
                Some(error) => Err(error),
                None => self.core.send(self.clone(), self.urgency),
            };
        if let Err(error) = sent {
            self.refuse(&error);
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

    /// Ends the wait. Returns `false` if no caller waits any more.
    fn finish(&self, answer: Result<(Answer, Moment), Error>) -> bool {
        let mut state = self.state();
        match &mut state.phase {
            Phase::Waiting(waker) => {
                let waker = waker.take();
                state.phase = Phase::Answered(answer);
                drop(state);
                if let Some(waker) = waker {
                    guarded(|| waker.wake());
                }
                true
            }
            Phase::Background(_) => {
                let phase = std::mem::replace(&mut state.phase, Phase::Dropped);
                drop(state);
                if let Phase::Background(done) = phase {
                    guarded(|| done(answer.map(|(answer, _)| answer)));
                }
                true
            }
            Phase::Answered(_) | Phase::Dropped => false,
        }
    }

    fn cancel(&self) {
        let mut state = self.state();
        let phase = std::mem::replace(&mut state.phase, Phase::Dropped);
        // If the call is in flight, a close waits for its answer.
        let in_flight = state.delivery == Delivery::Sent;
        let under_way = if in_flight { None } else { state.under_way.take() };
        drop(state);
        drop((phase, under_way));
    }

    fn under_way_no_more(&self) {
        let under_way = self.state().under_way.take();
        drop(under_way);
    }

    fn state(&self) -> MutexGuard<'_, State> {
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
        if is_unknown {
            let mut state = self.state();
            state.delivery = Delivery::Unknown;
            state.problem = answer.err();
            let wanted = state.phase.is_wanted();
            drop(state);
            if !wanted {
                return self.under_way_no_more();
            }
            // The engine's thread checks deadlines only while a store is silent. A store that answers but does not
            // serve this call is never silent, so the deadline is checked here.
            let now = Moment::now();
            if now >= self.until {
                return self.expire(now);
            }
            let sent = if rests {
                self.core.send_later(self.clone(), self.urgency, self.asked)
            } else {
                self.core.send(self.clone(), self.urgency)
            };
            if let Err(error) = sent {
                self.refuse(&error);
            }
            return;
        }
        self.state().delivery = Delivery::Answered;
        self.finish(answer.map(|answer| (answer, sent)));
        self.under_way_no_more();
    }

    fn expire(&self, now: Moment) {
        if now < self.until {
            return;
        }
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
        if self.finish(Err(error)) && self.state().delivery != Delivery::Sent {
            self.under_way_no_more();
        }
    }

    fn leave_if_unwanted(&self, _urgency: Urgency) -> bool {
        !self.state().phase.is_wanted()
    }

    fn refuse(&self, error: &Error) {
        if self.finish(Err(error.clone())) {
            self.under_way_no_more();
        }
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
