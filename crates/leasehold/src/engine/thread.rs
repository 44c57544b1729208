//! The engine's own thread. It fires timers, sends requests and applies their answers, all in one task.
//!
//! A thread that calls may send its own request. This saves waking the engine's thread: half the cost of an uncontended
//! acquire. The answers are always applied here. Only one thread at a time has the turn to send, so that no request
//! overtakes another. No thread waits for the turn: a thread that finds another one sending leaves its commands in the
//! queue, and the other thread sends them.
//!
//! Each client has its own thread. So renewals continue while the user's executor is blocked, guards may be dropped
//! outside any runtime, and a runtime that shuts down loses no lease. The thread starts when it is first needed. It
//! ends when the last handle is dropped: client, semaphore, future or guard.
//!
//! The thread is supervised. Panics of the user's code are caught where it is called ([`callbacks`](crate::callbacks)). If
//! the thread panics nevertheless, or cannot start, [`Core::stop`] fails everything that waits, and every later call.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::mpsc;

use super::Core;
use super::alarm::Alarm;
use super::sender::{Ending, Reachability, Request, Turn};
use crate::backend::{Answers, BoxFuture, Destination, Event, RemoteBackend, Report};
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::{ClientId, Error};

/// How often the thread checks which destinations are silent, while requests are in flight. After the last answer the
/// thread wakes up once more, after this time. So another thread that sends in the meantime need not wake it.
pub(super) const CHECK_SILENCE: Span = Span::from_millis(50);

/// A destination that has not answered a request for this long may have been replaced by another server.
const DOUBTED_AFTER: Duration = Duration::from_millis(500);

/// A message to the engine's thread.
pub(crate) enum Message {
    /// A source has joined the sender's line, or a timer is due before the thread would wake up.
    WakeUp,
    /// An event of a remote store.
    Store(Event),
    /// A future to run on the thread, because it needs the thread's runtime.
    Run(Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// A request that is not answered yet.
pub(super) struct InFlight {
    pub(super) request: Request,
    answers: BoxFuture<Answers>,
}

impl InFlight {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Answers, Error>> {
        self.answers.as_mut().poll(cx)
    }
}

/// The requests that were sent since the engine's thread last took them.
#[derive(Default)]
pub(super) struct Outbox {
    sent: Mutex<Vec<InFlight>>,
    /// Wakes the engine's thread when a request is answered.
    thread: OnceLock<Waker>,
}

impl Outbox {
    pub(super) fn set_thread(&self, waker: &Waker) {
        self.thread.get_or_init(|| waker.clone());
    }

    /// Sends everything that may be sent.
    pub(super) fn send_all(&self, core: &Core, backend: &dyn RemoteBackend, turn: Turn<'_>) {
        turn.send_all(|request| {
            let answers = backend.apply(request.to, &request.parts);
            let ids = request.ids();
            self.add(InFlight { request, answers });
            core.meters.sent(ids);
        });
    }

    /// Sends the request by polling it for the first time. The list is locked in the meantime, so that the engine's
    /// thread finds the request there when the answer wakes it.
    fn add(&self, mut new: InFlight) {
        let waker = self.thread.get().map_or(Waker::noop(), |waker| waker);
        let mut sent = self.sent();
        if let Poll::Ready(answers) = new.poll(&mut Context::from_waker(waker)) {
            new.answers = Box::pin(std::future::ready(answers));
            waker.wake_by_ref();
        }
        sent.push(new);
    }

    pub(super) fn take(&self) -> Vec<InFlight> {
        std::mem::take(&mut self.sent())
    }

    fn sent(&self) -> MutexGuard<'_, Vec<InFlight>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the thread. Fails with [`Error::Stopped`] if it cannot be started.
pub(super) fn start(core: &Core) -> Result<mpsc::UnboundedSender<Message>, Error> {
    let (sender, messages) = mpsc::unbounded_channel();
    let (this, backend) = (core.this.clone(), core.store.shared().cloned());
    // Weak, so that the store does not keep the thread alive.
    let weak = sender.downgrade();
    let report: Report = Arc::new(move |event| {
        weak.upgrade().map(|sender| sender.send(Message::Store(event)));
    });
    let client = core.client;
    #[cfg(test)]
    if crate::virtual_time::is_on() {
        tokio::spawn(run(this, backend, (client, report), messages));
        return Ok(sender);
    }
    let work = move || {
        let ended = |why: &str| {
            if let Some(core) = this.upgrade() {
                core.stop(Error::Stopped {
                    problem: format!("the client's background thread has ended: {why}"),
                });
            }
        };
        let run = catch_unwind(AssertUnwindSafe(|| {
            // Create the runtime on the thread. If it was created before and the thread did not start, it would be
            // dropped inside another runtime, which panics.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => {
                    ended(&format!("its runtime could not be started: {error}"));
                    // A query in it ends when it is dropped, and must find the reason then.
                    return drop(messages);
                }
            };
            runtime.block_on(run(this.clone(), backend, (client, report), messages));
        }));
        if run.is_err() {
            ended("it panicked, which is a bug: please report it");
        }
    };
    let thread = std::thread::Builder::new().name("leasehold".into());
    let started = thread.spawn(work);
    let what = |error| format!("the client's background thread could not be started: {error}");
    started.map(|_| sender).map_err(|error| Error::Stopped { problem: what(error) })
}

/// Starts the store, and runs until no other owner of the engine is left.
async fn run(
    core: Weak<Core>,
    backend: Option<Arc<dyn RemoteBackend>>,
    (client, report): (ClientId, Report),
    messages: mpsc::UnboundedReceiver<Message>,
) {
    if let Some(backend) = &backend {
        backend.start(client, report);
    }
    let mut thread = Thread::new(core, backend, messages);
    poll_fn(|cx| thread.poll(cx)).await;
}

struct Thread {
    core: Weak<Core>,
    backend: Option<Arc<dyn RemoteBackend>>,
    messages: mpsc::UnboundedReceiver<Message>,
    in_flight: Vec<InFlight>,
    alarm: Alarm,
    tidy_at: Option<Moment>,
    check_silence_at: Option<Moment>,
    /// Whether a request was answered since the last check.
    answered: bool,
}

impl Thread {
    fn new(
        core: Weak<Core>,
        backend: Option<Arc<dyn RemoteBackend>>,
        messages: mpsc::UnboundedReceiver<Message>,
    ) -> Self {
        let (in_flight, alarm) = (Vec::new(), Alarm::new());
        let (tidy_at, check_silence_at, answered) = (None, None, false);
        Self { core, backend, messages, in_flight, alarm, tidy_at, check_silence_at, answered }
    }

    /// Runs until no other owner of the engine is left.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(core) = self.core.upgrade() {
            // While the thread is awake, other threads need not notify it of timers or of sources in the queue.
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
            // A source that joins the line from here on notifies the thread again. So this comes before the line is
            // looked at.
            core.wake_requested.store(false, Ordering::SeqCst);
            progress |= self.poll_answers(&core, cx);
            progress |= self.do_what_is_due(&core, Moment::now());
            if let Some(backend) = &self.backend
                && let Some(turn) = core.sender.begin(Moment::now())
            {
                core.outbox.send_all(&core, &**backend, turn);
                progress = true;
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
            Message::WakeUp => {}
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
                    // In order: the first request that was sent is answered first.
                    let InFlight { request, .. } = self.in_flight.remove(at);
                    self.apply_answers(core, &request, answers);
                    progress = true;
                }
            }
        }
        progress
    }

    fn apply_answers(&mut self, core: &Core, request: &Request, answers: Result<Answers, Error>) {
        self.answered = true;
        let Request { parts, sources, sent, .. } = request;
        let (answers, round_trip): (Answers, _) = match answers {
            Ok(answers) if answers.len() == parts.len() => {
                let is_transient =
                    |answer: &Result<_, Error>| answer.as_ref().is_err_and(Error::is_transient);
                let trouble = answers.iter().any(is_transient);
                let verdict = if trouble { Ending::TemporaryError } else { Ending::Answered };
                (answers, core.sender.ended(request, verdict))
            }
            answers => {
                let error = answers.map_or_else(
                    |error| error,
                    |_| Error::internal("the store's answer is incomplete"),
                );
                event!(debug, %error, "a request failed");
                let round_trip = core.sender.ended(request, Ending::Unanswered);
                (parts.iter().map(|_| Err(error.clone())).collect(), round_trip)
            }
        };
        for (((source, command), part), answer) in sources.iter().zip(&**parts).zip(answers) {
            let answer = answer.map_err(|error| part.named_in(error));
            source.clone().answered(part, command.as_ref(), answer, *sent, round_trip);
        }
    }

    fn do_what_is_due(&mut self, core: &Arc<Core>, now: Moment) -> bool {
        if core.clock.is_manual() {
            return false;
        }
        let mut progress = false;
        while let Some(target) = core.timers.pop(now) {
            target.fire(now);
            progress = true;
        }
        let tidy_interval = core.settings.tidy_interval();
        if self.tidy_at.is_none() && core.registry.has_names() {
            self.tidy_at = Some(now + tidy_interval);
        }
        if self.tidy_at.is_some_and(|at| at <= now) {
            let names_are_left = core.registry.remove_unused(core.settings.idle, now);
            self.tidy_at = names_are_left.then_some(now + tidy_interval);
            progress = true;
        }
        if self.check_silence_at.is_some_and(|at| at <= now) {
            self.report_silent_destinations(core, now);
            self.check_silence_at = None;
        }
        if self.check_silence_at.is_none() {
            let lingers = std::mem::take(&mut self.answered) && core.sends_from_any_thread();
            let checks = lingers || !self.in_flight.is_empty();
            self.check_silence_at = checks.then(|| now + CHECK_SILENCE);
        }
        progress
    }

    /// Reports to the store which destinations leave requests unanswered.
    fn report_silent_destinations(&self, core: &Core, now: Moment) {
        let Some(backend) = &self.backend else { return };
        let is_silent = |to: &Destination| {
            let silent = core.sender.silent_since(*to, now);
            silent.is_some_and(|(since, _)| now.saturating_since(since) >= DOUBTED_AFTER)
        };
        let all: BTreeSet<_> = self.in_flight.iter().map(|sent| sent.request.to).collect();
        all.into_iter().filter(is_silent).for_each(|to| backend.doubt(to));
    }

    /// Resolves when something is due.
    fn poll_sleep(&mut self, core: &Core, cx: &mut Context<'_>) -> Poll<()> {
        let now = Moment::now();
        let timer = core.timers.next();
        let others = [self.check_silence_at, self.tidy_at, core.sender.next_resume(now)];
        let next = others.into_iter().flatten().chain(timer).min();
        let until = next.filter(|_| !core.clock.is_manual()).unwrap_or(Moment::NEVER);
        core.sleeps_until(until);
        // Another thread may have set a timer or added a source before it could see until when this one sleeps. So
        // check once more.
        if core.timers.next() != timer || core.wake_requested.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        self.alarm.poll(until, now, cx)
    }
}

impl Drop for Thread {
    /// If the thread panics, the calls in flight fail instead of waiting forever.
    fn drop(&mut self) {
        let error = Error::Stopped {
            problem: "the client's background thread has ended: open another client".to_owned(),
        };
        let sent = self.core.upgrade().map(|core| core.outbox.take()).unwrap_or_default();
        for InFlight { request, .. } in self.in_flight.drain(..).chain(sent) {
            request.sources.iter().for_each(|(source, _)| source.refuse(&error));
        }
    }
}

/// Applies an event of a store.
fn apply(core: &Arc<Core>, event: Event) {
    match event {
        Event::Granted(..) if crate::broken::is("wakeup") => {}
        Event::Granted(name, id, grant) => {
            // A permit for an id that this client has forgotten is released: see `NameCore::woken`.
            let named = core.registry.find(&name).or_else(|| core.named(&name).ok());
            if let Some(named) = named {
                named.granted(id, grant);
            }
        }
        Event::Token(name, after) => {
            if let Some(named) = core.registry.find(&name) {
                named.token_comes(after);
            }
        }
        Event::Evicted(name, id) => {
            if let Some(named) = core.registry.find(&name) {
                named.evicted(id);
            }
        }
        Event::Unlocked(key) => core.lock_waiters.wake_one(&key),
        Event::Connected { to, again, other, stragglers } => {
            connected(core, to, (again, other), stragglers);
        }
        Event::Disconnected(to, error) => disconnected(core, to, &error),
        Event::Missed(slot) => {
            core.registry.names().iter().for_each(|named| named.wake_ups_missed(slot));
            core.lock_waiters.wake_all();
        }
        Event::Rerouted { gone } => {
            core.sender.reroute(&gone);
            core.registry.listeners().iter().for_each(|listener| listener.rerouted());
            core.lock_waiters.wake_all();
        }
    }
}

fn connected(core: &Arc<Core>, to: Destination, (again, other): (bool, bool), stragglers: bool) {
    if let Some((since, _)) = core.sender.down(to) {
        let after = Moment::now().saturating_since(since);
        event!(warn, ?after, "the store is reachable again");
    }
    core.set_stragglers(stragglers);
    core.sender.set_reach(to, Reachability::Up);
    if again {
        core.meters.reconnected();
        core.registry.listeners().iter().for_each(|listener| listener.reconnected(to, other));
        core.lock_waiters.wake_all();
    }
}

fn disconnected(core: &Arc<Core>, to: Destination, error: &Error) {
    if core.sender.down(to).is_none() {
        event!(warn, %error, "the store is unreachable; the client tries to reconnect");
    }
    core.sender.set_reach(to, Reachability::Down { since: Moment::now(), error: error.clone() });
    if !error.is_transient() {
        core.registry.listeners().iter().for_each(|listener| listener.refused(to, error));
        core.sender.refuse_calls(Some(to), error);
        core.lock_waiters.wake_all();
    }
}
