//! One command of a lock or a pool on its way to the store, and the future of its answer.
//!
//! The call is sent again, with the same id, for as long as its outcome is unknown and somebody waits for it. At its
//! deadline it fails with [`Error::Unavailable`]. A call that acquires something carries its *undo*, the release: it
//! runs when the store may have granted what nobody waits for any more. Dropping the future of a call that was never sent
//! costs nothing.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::Core;
use super::background::UnderWay;
use super::foreign::guarded;
use super::life::Life;
use super::sender::{Source, Taken, Urgency};
use crate::Error;
use crate::backend::{Answer, Destination, Part};
use crate::clock::Moment;

/// Releases what a call may have acquired.
pub(crate) type Undo = Box<dyn FnOnce() + Send>;

/// Is called with the answer to a call that nobody awaits.
pub(crate) type Done = Box<dyn FnOnce(Result<Answer, Error>) + Send>;

/// The answer to one command: at once, or when a remote store has answered.
pub(crate) enum Asked {
    Answered(Option<Result<(Answer, Moment), Error>>),
    Sent(Arc<Call>),
}

impl Asked {
    /// Asks a store that answers at once. What it answers counts from before it was asked: this thread may stand still as
    /// soon as it has the answer.
    pub(crate) fn at_once(ask: impl FnOnce() -> Result<Answer, Error>) -> Self {
        let sent = Moment::now();
        Self::Answered(Some(ask().map(|answer| (answer, sent))))
    }
}

impl Future for Asked {
    type Output = Result<(Answer, Moment), Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Answered(answer) => Poll::Ready(
                answer.take().unwrap_or_else(|| Err(Error::internal("a call was polled twice"))),
            ),
            Self::Sent(call) => call.poll(cx),
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Self::Sent(call) = self {
            call.cancel();
        }
    }
}

pub(crate) struct Call {
    core: Arc<Core>,
    to: Destination,
    part: Part,
    urgency: Urgency,
    asked: Moment,
    /// When it fails, if the store has not answered.
    until: Moment,
    state: Mutex<State>,
}

struct State {
    life: Life,
    phase: Phase,
    undo: Option<Undo>,
    /// A close waits for it, until it is answered or cannot be sent any more.
    under_way: Option<UnderWay>,
}

enum Phase {
    Waiting(Option<Waker>),
    Answered(Result<(Answer, Moment), Error>),
    /// Nobody awaits the answer: it is sent until it is answered.
    Background(Done),
    /// Nobody waits for the answer any more.
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
        to: Destination,
        part: Part,
        urgency: Urgency,
        until: Moment,
        undo: Option<Undo>,
    ) -> Asked {
        let call = Self::new(core, to, part, urgency, until, Phase::Waiting(None), undo);
        call.clone().begin();
        Asked::Sent(call)
    }

    /// Sends it until it is answered, or the deadline has passed, and tells `done`.
    pub(super) fn start_in_background(
        core: &Arc<Core>,
        to: Destination,
        part: Part,
        until: Moment,
        done: Done,
    ) {
        let phase = Phase::Background(done);
        Self::new(core, to, part, Urgency::Ordinary, until, phase, None).begin();
    }

    fn new(
        core: &Arc<Core>,
        to: Destination,
        part: Part,
        urgency: Urgency,
        until: Moment,
        phase: Phase,
        undo: Option<Undo>,
    ) -> Arc<Self> {
        let under_way = Some(UnderWay::new(core));
        let state = Mutex::new(State { life: Life::Unsent, phase, undo, under_way });
        let (core, asked) = (core.clone(), Moment::now());
        Arc::new(Self { core, to, part, urgency, asked, until, state })
    }

    fn begin(self: Arc<Self>) {
        let sent = match self.core.stopped().or_else(|| self.core.sender.refusal(self.to)) {
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
        // Whoever has the answer has what was acquired, too.
        let answered = matches!(phase, Phase::Answered(Ok(_)));
        let undo = if answered { state.undo.take() } else { None };
        drop(state);
        drop((undo, waker));
        match phase {
            Phase::Answered(answer) => Poll::Ready(answer),
            _ => Poll::Ready(Err(Error::internal("a call was polled after it was done"))),
        }
    }

    /// Ends the wait. False if nobody waits any more.
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
        // Granted, and not seen; or in line again, and not to be sent any more. If it is in flight, `settle` decides.
        let granted = matches!(phase, Phase::Answered(Ok(_)));
        let undo = (granted || state.life == Life::Unknown).then(|| state.undo.take()).flatten();
        let in_flight = state.life == Life::Sent;
        let under_way = if in_flight { None } else { state.under_way.take() };
        drop(state);
        drop(phase);
        if let Some(undo) = undo {
            undo();
        }
        drop(under_way);
    }

    fn undo(&self) {
        let undo = self.state().undo.take();
        if let Some(undo) = undo {
            #[cfg(feature = "broken")]
            if crate::broken::is("lost-cancel") {
                return;
            }
            undo();
        }
    }

    /// It is not sent any more. What the store may have granted is released.
    fn end(&self) {
        if self.state().life.needs_release() {
            self.undo();
        }
        self.under_way_no_more();
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
        self.to
    }

    fn take(self: Arc<Self>, _urgency: Urgency, _room: usize) -> Taken {
        let mut state = self.state();
        let wanted = state.phase.is_wanted();
        if wanted {
            state.life.send();
        }
        Taken { part: wanted.then(|| self.part.clone()), more: false }
    }

    fn settle(self: Arc<Self>, _part: &Part, answer: Result<Answer, Error>, sent: Moment) {
        if let Err(error) = &answer
            && error.may_pass()
        {
            let mut state = self.state();
            state.life.lose();
            let wanted = state.phase.is_wanted();
            drop(state);
            if !wanted {
                return self.end();
            }
            if let Err(error) = self.core.send(self.clone(), self.urgency) {
                self.refuse(&error);
            }
            return;
        }
        self.state().life.answer();
        // A close may have looked for guards before there was this one.
        let closed = self.state().undo.is_some() && self.core.check_open().is_err();
        let answer = if closed { Err(Error::Closed) } else { answer.map(|answer| (answer, sent)) };
        if !self.finish(answer) || closed {
            self.undo();
        }
        self.under_way_no_more();
    }

    fn expire(&self, now: Moment) {
        if now < self.until {
            return;
        }
        let error = self.core.unavailable(self.to, self.asked, now);
        if self.finish(Err(error)) && self.state().life != Life::Sent {
            self.end();
        }
    }

    fn leave_if_unwanted(&self, _urgency: Urgency) -> bool {
        !self.state().phase.is_wanted()
    }

    fn refuse(&self, error: &Error) {
        if self.finish(Err(error.clone())) {
            self.end();
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
        let call = Asked::at_once(|| {
            asked = Some(Moment::now());
            std::thread::sleep(std::time::Duration::from_millis(2));
            Ok(Answer::Lock(LockOutcome::IsLocked(true)))
        });
        let (_, sent) = call.await.unwrap();
        assert!(Some(sent) <= asked);
    }
}
