//! The engine's own thread: it fires timers, sends requests and applies their answers, all in one task.
//!
//! The thread is the client's own, so that renewals continue while the user's executor is blocked, guards may be
//! dropped outside any runtime, and a runtime that shuts down takes no lease with it. It starts when it is first needed and
//! ends when the last client, semaphore, future and guard is gone.
//!
//! It is supervised. Foreign code that panics is caught where it is called ([`foreign`](super::foreign)). Should the
//! thread panic all the same, or not start, [`Core::stop`] fails everything that waits, and every later call.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use tokio::sync::mpsc;

use super::Core;
use super::alarm::Alarm;
use super::foreign::event;
use super::in_flight::InFlight;
use super::sender::{Ending, Reachability, Request};
use crate::Error;
use crate::backend::{Answers, Destination, Event, RemoteBackend, Report};
use crate::clock::{Moment, Span};

/// How often calls are checked for deadlines while the store does not answer. After the last answer the thread looks once
/// more, so that whoever sends meanwhile does not have to wake it for that.
pub(super) const CHECK_CALLS: Span = Span::from_millis(50);

/// What the engine's thread is told.
pub(crate) enum Message {
    /// Something stands in the sender's line, or a timer is due before the thread would wake up.
    Look,
    /// A remote store reports something.
    Store(Event),
    /// A future to run there, because it needs that thread's runtime.
    Run(Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// Starts the thread. An error says why there is none.
pub(super) fn start(core: &Core) -> Result<mpsc::UnboundedSender<Message>, Error> {
    let (tell, messages) = mpsc::unbounded_channel();
    let (this, backend) = (core.this.clone(), core.remote.clone());
    // Weak: a store that has nothing to report must not keep the thread.
    let weak = tell.downgrade();
    let report: Report = Box::new(move |event| {
        weak.upgrade().map(|tell| tell.send(Message::Store(event)));
    });
    let client = core.client;
    let work = move || {
        let run = catch_unwind(AssertUnwindSafe(|| {
            // Made here: a runtime cannot be dropped in another one, should the thread not start.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| format!("it has no runtime: {error}"))?;
            runtime.block_on(async {
                if let Some(backend) = &backend {
                    backend.start(client, report);
                }
                let mut thread = Thread::new(this.clone(), backend, messages);
                poll_fn(|cx| thread.poll(cx)).await;
            });
            Ok::<(), String>(())
        }));
        let why = match run {
            Ok(Ok(())) => return,
            Ok(Err(why)) => why,
            Err(_) => "it panicked: please report this".to_owned(),
        };
        if let Some(core) = this.upgrade() {
            core.stop(Error::Stopped { what: format!("the engine's thread has ended: {why}") });
        }
    };
    let thread = std::thread::Builder::new().name("leasehold".into());
    let started = thread.spawn(work);
    let what = |error| format!("the engine's thread could not be started: {error}");
    started.map(|_| tell).map_err(|error| Error::Stopped { what: what(error) })
}

struct Thread {
    core: Weak<Core>,
    backend: Option<Arc<dyn RemoteBackend>>,
    messages: mpsc::UnboundedReceiver<Message>,
    in_flight: Vec<InFlight>,
    alarm: Alarm,
    tidy_at: Option<Moment>,
    check_calls_at: Option<Moment>,
    /// Something was answered since the calls were last checked.
    answered: bool,
}

impl Thread {
    fn new(
        core: Weak<Core>,
        backend: Option<Arc<dyn RemoteBackend>>,
        messages: mpsc::UnboundedReceiver<Message>,
    ) -> Self {
        let (in_flight, alarm) = (Vec::new(), Alarm::new());
        let (tidy_at, check_calls_at, answered) = (None, None, false);
        Self { core, backend, messages, in_flight, alarm, tidy_at, check_calls_at, answered }
    }

    /// Until nobody is left who could tell us anything.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(core) = self.core.upgrade() {
            // Awake: nobody has to tell us of a timer, or of what is to be sent.
            core.sleeps_until(Moment::from_micros(0));
            core.outbox.set_thread(cx.waker());
        }
        loop {
            let mut progress = false;
            while let Poll::Ready(message) = self.messages.poll_recv(cx) {
                let Some(message) = message else { return Poll::Ready(()) };
                self.handle(message);
                progress = true;
            }
            let Some(core) = self.core.upgrade() else { return Poll::Ready(()) };
            // Who comes in line from here on tells us again.
            core.told.store(false, Ordering::SeqCst);
            progress |= self.poll_answers(&core, cx);
            progress |= self.do_what_is_due(&core, Moment::now());
            if let Some(backend) = &self.backend {
                progress |= core.outbox.send_all(&core.sender, &**backend);
            }
            if progress {
                continue;
            }
            if self.poll_sleep(&core, cx).is_pending() {
                return Poll::Pending;
            }
            core.sleeps_until(Moment::from_micros(0));
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Look => {}
            Message::Store(event) => {
                if let Some(core) = self.core.upgrade() {
                    apply(&core, event);
                }
            }
            Message::Run(work) => drop(tokio::spawn(work)),
        }
    }

    fn poll_answers(&mut self, core: &Arc<Core>, cx: &mut Context<'_>) -> bool {
        self.in_flight.append(&mut core.outbox.take());
        let mut progress = false;
        let mut at = 0;
        while at < self.in_flight.len() {
            match self.in_flight[at].poll(cx) {
                Poll::Pending => at += 1,
                Poll::Ready(answers) => {
                    // In order: what was sent first is settled first.
                    let InFlight { request, .. } = self.in_flight.remove(at);
                    self.settle(core, &request, answers);
                    progress = true;
                }
            }
        }
        progress
    }

    fn settle(&mut self, core: &Core, request: &Request, answers: Result<Answers, Error>) {
        self.answered = true;
        let Request { parts, sources, sent, .. } = request;
        let answers = match answers {
            Ok(answers) if answers.len() == parts.len() => {
                let may_pass =
                    |answer: &Result<_, Error>| answer.as_ref().is_err_and(Error::may_pass);
                let trouble = answers.iter().any(may_pass);
                let verdict = if trouble { Ending::Trouble } else { Ending::Answered };
                core.sender.settled(request, verdict);
                answers
            }
            answers => {
                let error = answers.map_or_else(
                    |error| error,
                    |_| Error::internal("the store answered less than it was asked"),
                );
                event!(debug, %error, "a request was not answered");
                core.sender.settled(request, Ending::Silence);
                parts.iter().map(|_| Err(error.clone())).collect()
            }
        };
        for ((source, part), answer) in sources.iter().zip(&**parts).zip(answers) {
            source.clone().settle(part, answer, *sent);
        }
    }

    fn do_what_is_due(&mut self, core: &Arc<Core>, now: Moment) -> bool {
        let mut progress = false;
        while let Some(target) = core.timers.pop(now) {
            target.fire(now);
            progress = true;
        }
        if core.names_to_tidy() && self.tidy_at.is_none() {
            self.tidy_at = Some(now + core.tidy_interval());
        }
        if self.tidy_at.is_some_and(|at| at <= now) {
            self.tidy_at = core.tidy(now);
            progress = true;
        }
        if self.check_calls_at.is_some_and(|at| at <= now) {
            // A store that answers needs no deadlines.
            if std::mem::take(&mut self.answered) {
                let again = core.sends_from_any_thread() || core.sender.is_busy();
                self.check_calls_at = again.then(|| now + CHECK_CALLS);
            } else {
                let in_flight = self.in_flight.iter().flat_map(|own| own.request.sources.iter());
                in_flight.for_each(|source| source.expire(now));
                core.sender.expire(now);
                self.check_calls_at = None;
            }
        }
        let lingers = self.answered && core.sends_from_any_thread();
        if self.check_calls_at.is_none() && (lingers || core.sender.is_busy()) {
            self.check_calls_at = Some(now + CHECK_CALLS);
        }
        progress
    }

    /// Pending until something is due.
    fn poll_sleep(&mut self, core: &Core, cx: &mut Context<'_>) -> Poll<()> {
        let now = Moment::now();
        let timer = core.timers.next();
        let others = [self.check_calls_at, self.tidy_at, core.sender.next_resume(now)];
        let until = others.into_iter().flatten().chain(timer).min().unwrap_or(Moment::NEVER);
        core.sleeps_until(until);
        // A timer may have been set, or something come in line, before it could be seen until when we sleep.
        if core.timers.next() != timer || core.told.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        self.alarm.poll(until, now, cx)
    }
}

impl Drop for Thread {
    /// Should the thread panic, nobody waits for an answer that does not come.
    fn drop(&mut self) {
        let error = Error::Stopped { what: "the engine's thread has ended".to_owned() };
        let sent = self.core.upgrade().map(|core| core.outbox.take()).unwrap_or_default();
        for own in self.in_flight.drain(..).chain(sent) {
            own.request.sources.iter().for_each(|source| source.refuse(&error));
        }
    }
}

/// What a store reports.
fn apply(core: &Arc<Core>, event: Event) {
    match event {
        #[cfg(feature = "broken")]
        Event::Granted(..) if crate::broken::is("wakeup") => {}
        Event::Granted(name, id, told) => {
            if let Some(named) = core.known(&name) {
                named.granted(id, told);
            }
        }
        Event::Token(name, after) => {
            if let Some(named) = core.known(&name) {
                named.token_comes(after);
            }
        }
        Event::Evicted(name, id) => {
            if let Some(named) = core.known(&name) {
                named.evicted(id);
            }
        }
        Event::Unlocked(key) => core.lock_waiters.wake_one(&key),
        Event::Connected { to, again, stragglers } => connected(core, to, again, stragglers),
        Event::Disconnected(to, error) => disconnected(core, to, &error),
    }
}

fn connected(core: &Arc<Core>, to: Destination, again: bool, stragglers: bool) {
    if let Some((since, _)) = core.sender.outage() {
        let after = Moment::now().saturating_since(since);
        event!(warn, ?after, "the store can be reached again");
    }
    core.set_stragglers(stragglers);
    core.sender.set_reach(to, Reachability::Up);
    if again {
        core.all().iter().for_each(|named| named.reconnected());
        core.lock_waiters.wake_all();
    }
}

fn disconnected(core: &Arc<Core>, to: Destination, error: &Error) {
    if core.sender.outage().is_none() {
        event!(warn, %error, "the store cannot be reached: waiting until it can");
    }
    core.sender.set_reach(to, Reachability::Down { since: Moment::now(), error: error.clone() });
    if !error.may_pass() {
        core.all().iter().for_each(|named| named.refused(error));
        core.sender.refuse_calls(error);
        core.lock_waiters.wake_all();
    }
}
