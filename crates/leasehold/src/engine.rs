//! The engine: everything above the seam that every store needs, written once.
//!
//! - [`ticket`]: one acquisition, shared by its future or guard and the engine.
//! - [`name_state`]: one semaphore name; [`in_process`] and [`remote`] implement it, and [`store`], for the two kinds of stores.
//! - [`sender`]: packs what is to be sent to a remote store into requests; [`in_flight`]: sends them; [`life`]: how far a
//!   command has come.
//! - [`call`]: one command of a lock or a pool; [`lease`]: what such a command acquires.
//! - [`timing`]: when to renew; [`timers`]: what is due when.
//! - [`thread`]: the engine's thread, which does all of that.
//! - [`background`]: work that outlives its caller; [`lock_waiters`]: who waits for a lock; [`foreign`]: code that is not ours.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;

use rustc_hash::FxHashMap;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::backend::{Answer, Destination, Later, Part, Profile, RemoteBackend};
use crate::clock::{Moment, Span};
use crate::name::Name;
use crate::pool::Seats;
use crate::{AcquisitionId, ClientId, Error, LossReason};

mod alarm;
pub(crate) mod background;
pub(crate) mod call;
pub(crate) mod foreign;
mod in_flight;
pub(crate) mod in_process;
pub(crate) mod lease;
mod life;
pub(crate) mod lock_waiters;
pub(crate) mod name_state;
pub(crate) mod remote;
mod sender;
mod store;
mod thread;
pub(crate) mod ticket;
pub(crate) mod timers;
pub(crate) mod timing;

#[cfg(test)]
mod tests;

use background::Background;
use call::{Asked, Done, Undo};
use foreign::event;
use in_flight::Outbox;
use lease::Lease;
use lock_waiters::LockWaiters;
use name_state::NameState;
use sender::{Next, Sender, Source, Urgency};
use store::Store;
use thread::Message;
use timers::{Timed, Timers};

/// What every client, semaphore, future and guard holds on to. With the last of them the names go, and with the names
/// the thread.
pub(crate) struct Engine {
    core: Arc<Core>,
}

/// What the names of one client share.
pub(crate) struct Core {
    pub(crate) client: ClientId,
    pub(crate) settings: Settings,
    store: Box<dyn Store>,
    remote: Option<Arc<dyn RemoteBackend>>,
    pub(crate) sender: Sender,
    outbox: Outbox,
    /// The engine's thread knows, or finds out before it sleeps, that something is in line.
    told: AtomicBool,
    pub(crate) timers: Timers,
    sequence: AtomicU64,
    closed: AtomicBool,
    /// Notified when the client is closed.
    closing: Notify,
    names: Mutex<Names>,
    pub(crate) lock_waiters: Arc<LockWaiters>,
    /// Locks and pool leases that are held, by their addresses.
    leases: Mutex<FxHashMap<usize, Weak<Lease>>>,
    /// Who shares the lease of one instance id.
    pub(crate) seats: Seats,
    background: Background,
    thread: OnceLock<Result<mpsc::UnboundedSender<Message>, Error>>,
    /// Why the engine's thread has ended, if it has.
    stopped: OnceLock<Error>,
    /// Until when the thread sleeps, in microseconds of [`Moment`].
    sleeping_until: AtomicU64,
    /// Whether requests of an earlier connection may still be applied.
    stragglers: AtomicBool,
    /// Where the thread was started. A process that was forked from there has no thread.
    process: OnceLock<u32>,
    this: Weak<Self>,
}

/// The names in use, each with the moment since when it is known to be unused.
type Names = HashMap<Name, (Arc<dyn NameState>, Option<Moment>)>;

/// How a client behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// How long an unused name is kept.
    pub(crate) idle: Span,
    /// How long a call waits for the store to answer. Waiting for a permit or a lock has no such limit.
    pub(crate) answer_timeout: Span,
}

impl Default for Settings {
    fn default() -> Self {
        let (idle, answer_timeout) = (Span::from_millis(60_000), Span::from_millis(5000));
        Self { idle, answer_timeout }
    }
}

impl Engine {
    pub(crate) fn in_process(
        memory: crate::backend::memory::Memory,
        settings: Settings,
    ) -> Arc<Self> {
        Self::new(Box::new(in_process::InProcess(Arc::new(memory))), None, settings)
    }

    pub(crate) fn remote(backend: Arc<dyn RemoteBackend>, settings: Settings) -> Arc<Self> {
        Self::new(Box::new(remote::Remote(backend.clone())), Some(backend), settings)
    }

    fn new(
        store: Box<dyn Store>,
        remote: Option<Arc<dyn RemoteBackend>>,
        settings: Settings,
    ) -> Arc<Self> {
        let core = Arc::new_cyclic(|this| Core {
            client: ClientId::random(),
            settings,
            store,
            remote,
            sender: Sender::default(),
            outbox: Outbox::default(),
            told: AtomicBool::new(false),
            timers: Timers::default(),
            sequence: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            names: Mutex::default(),
            lock_waiters: Arc::default(),
            leases: Mutex::default(),
            seats: Seats::default(),
            background: Background::default(),
            thread: OnceLock::new(),
            stopped: OnceLock::new(),
            sleeping_until: AtomicU64::new(0),
            stragglers: AtomicBool::new(false),
            process: OnceLock::new(),
            this: this.clone(),
        });
        Arc::new(Self { core })
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Taken out first: dropping a name may run foreign code.
        let names = std::mem::take(&mut *self.core.names());
        for (named, _) in names.into_values() {
            named.abandon();
        }
    }
}

impl Core {
    pub(crate) fn profile(&self) -> Profile {
        self.store.profile()
    }

    #[cfg(unix)]
    pub(crate) fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.store.lifeline()
    }

    #[inline]
    pub(crate) fn next_id(&self) -> AcquisitionId {
        AcquisitionId::new(self.client, self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    /// The name, new or known.
    pub(crate) fn named(&self, name: &Name) -> Result<Arc<dyn NameState>, Error> {
        let mut names = self.names();
        self.check_open()?;
        if let Some((named, unused_since)) = names.get_mut(name) {
            *unused_since = None;
            return Ok(named.clone());
        }
        let this = self.this.upgrade().ok_or(Error::Closed)?;
        let new = self.store.open(name.clone(), this);
        names.insert(name.clone(), (new.clone(), None));
        let first = names.len() == 1;
        drop(names);
        if first {
            // The thread tidies up names that are no longer used. If there is none, they stay.
            let _ = self.tell(Message::Look);
        }
        Ok(new)
    }

    /// The name, if this client uses it.
    fn known(&self, name: &Name) -> Option<Arc<dyn NameState>> {
        self.names().get(name).map(|(named, _)| named.clone())
    }

    /// Every name that is in use, or was not long ago.
    pub(crate) fn all(&self) -> Vec<Arc<dyn NameState>> {
        self.names().values().map(|(named, _)| named.clone()).collect()
    }

    /// Removes the names that nobody has used for a while. Returns when to come again.
    fn tidy(&self, now: Moment) -> Option<Moment> {
        let mut names = self.names();
        names.retain(|_, (named, unused_since)| {
            // Nobody can begin to use it while we have the lock.
            let unused = Arc::strong_count(named) == 1 && named.is_idle();
            let since = *unused_since.get_or_insert(now);
            if !unused {
                *unused_since = None;
            }
            !unused || now < since + self.settings.idle
        });
        (!names.is_empty()).then(|| now + self.tidy_interval())
    }

    fn names_to_tidy(&self) -> bool {
        !self.names().is_empty()
    }

    fn tidy_interval(&self) -> Span {
        self.settings.idle.divided_by(4)
    }

    /// Ends everything this client waits for and holds, and lets it begin nothing new.
    pub(crate) async fn close(&self) -> Result<(), Error> {
        let names = self.names();
        self.closed.store(true, Ordering::Release);
        drop(names);
        let all = self.all();
        for named in &all {
            named.close();
        }
        self.lock_waiters.wake_all();
        self.closing.notify_waiters();
        // Everything is told before anything is waited for: one that fails must not keep the others waiting.
        self.held_leases().iter().for_each(Lease::close);
        // For all of them together, no longer than a release may take.
        let until = Moment::now() + self.settings.answer_timeout;
        let mut result = self.background_done(until).await;
        for named in all {
            result = result.and(named.drained(until).await);
        }
        result
    }

    async fn background_done(&self, until: Moment) -> Result<(), Error> {
        let Some(core) = self.this.upgrade() else { return Ok(()) };
        core.until(until, self.background.done()).await?
    }

    /// Resolves when the client is closed. Counts from this call and not only from the first poll.
    pub(crate) fn closing(&self) -> impl Future<Output = ()> {
        self.closing.notified()
    }

    /// [`Error::Closed`] once the client is closed.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    fn held_leases(&self) -> Vec<Arc<Lease>> {
        self.leases().values().filter_map(Weak::upgrade).collect()
    }

    fn leases(&self) -> MutexGuard<'_, FxHashMap<usize, Weak<Lease>>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The store.

    /// Asks for one command of a lock or a pool, which is answered until that moment or fails. `undo` releases what the
    /// store may have granted if nobody waits for it any more.
    pub(crate) fn ask(self: &Arc<Self>, part: Part, until: Moment, undo: Option<Undo>) -> Asked {
        self.store.ask(self, part, until, undo)
    }

    /// The same with the limit of an ordinary call.
    pub(crate) fn ask_now(self: &Arc<Self>, part: Part) -> Asked {
        self.ask(part, Moment::now() + self.settings.answer_timeout, None)
    }

    /// The same in the background, with `done` told of the answer. An error is reported by the next close, too.
    pub(crate) fn ask_in_background(self: &Arc<Self>, part: Part, until: Moment, done: Done) {
        let weak = self.this.clone();
        let done = Box::new(move |answer: Result<_, Error>| {
            if let (Err(error), Some(core)) = (&answer, weak.upgrade()) {
                core.background_failed(error);
            }
            done(answer);
        });
        self.store.ask_in_background(self, part, until, done);
    }

    /// The same with the limit of an ordinary call. It is sent until it is answered, even if the future is dropped.
    pub(crate) fn ask_to_the_end(self: &Arc<Self>, part: Part) -> Later<Answer> {
        let (answer, answered) = oneshot::channel();
        let until = Moment::now() + self.settings.answer_timeout;
        self.store.ask_in_background(self, part, until, Box::new(|done| drop(answer.send(done))));
        Box::pin(async move {
            answered.await.unwrap_or_else(|_| Err(Error::internal("a call was not answered")))
        })
    }

    pub(crate) fn background_failed(&self, error: &Error) {
        event!(warn, %error, "not released: it ends with its TTL");
        self.background.failed(error.clone());
    }

    pub(crate) fn stats(
        self: &Arc<Self>,
        query: crate::stats::Query,
    ) -> Later<Vec<crate::stats::SemaphoreStats>> {
        self.store.stats(self, query)
    }

    pub(crate) fn list_locks(
        self: &Arc<Self>,
        limit: usize,
    ) -> Later<Vec<crate::machine::lock::Record>> {
        self.store.list_locks(self, limit)
    }

    pub(crate) fn list_pools(
        self: &Arc<Self>,
        which: crate::pool::Which,
    ) -> Later<Vec<crate::pool::PoolStats>> {
        self.store.list_pools(self, which)
    }

    /// The result of `work`, unless that moment comes first: then the store has not answered.
    pub(crate) async fn until<T>(
        self: &Arc<Self>,
        until: Moment,
        work: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut work = pin!(work);
        // Mostly it does not have to wait, and then needs no timer.
        if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
            return Ok(done);
        }
        let asked = Moment::now();
        let done = timers::Alarm::new(self, until).unless(work).await;
        done.ok_or_else(|| self.unavailable(Destination::ONLY, asked, Moment::now()))
    }

    /// A store has not answered since then, or for longer.
    pub(crate) fn unavailable(&self, to: Destination, asked: Moment, now: Moment) -> Error {
        let (since, error) = self.sender.silent_since(to, now).unwrap_or((asked, None));
        let silent_for = Some(now.saturating_since(since));
        match error {
            Some(Error::Unavailable { what, timed_out, source, .. }) => {
                Error::Unavailable { what, timed_out, silent_for, source }
            }
            Some(error) => error,
            None => {
                let address = self.remote.as_ref().map_or("the store", |remote| remote.address());
                let what = format!("asking {address}");
                Error::Unavailable { what, timed_out: true, silent_for, source: None }
            }
        }
    }

    /// The destination has been silent for longer than it should be.
    fn suspect(&self, to: Destination) {
        if let Some(remote) = &self.remote {
            remote.suspect(to);
        }
    }

    fn has_stragglers(&self) -> bool {
        self.stragglers.load(Ordering::Acquire)
    }

    fn set_stragglers(&self, stragglers: bool) {
        self.stragglers.fetch_or(stragglers, Ordering::AcqRel);
    }

    // The thread.

    /// Hands something to the engine's thread. Never blocks.
    fn tell(&self, message: Message) -> Result<(), Error> {
        if let Some(error) = self.stopped() {
            return Err(error);
        }
        let thread = self.thread.get_or_init(|| {
            let _ = self.process.set(std::process::id());
            let started = thread::start(self);
            if let Err(error) = &started {
                event!(error, %error, "no permit, lock or lease can be renewed");
            }
            started
        });
        let told = thread.as_ref().map_err(Clone::clone)?.send(message);
        told.map_err(|_| self.stopped().unwrap_or(Error::Closed))
    }

    /// Why the engine does not work, if it does not.
    pub(crate) fn stopped(&self) -> Option<Error> {
        if let Some(error) = self.stopped.get() {
            return Some(error.clone());
        }
        let started = self.process.get()?;
        if *started != std::process::id() {
            let what = "this process was forked from the one that made the client: make another one after the fork";
            return Some(Error::Stopped { what: what.to_owned() });
        }
        match self.thread.get() {
            Some(Err(error)) => Some(error.clone()),
            _ => None,
        }
    }

    /// The engine's thread has ended: everything that waits fails, and so does every later call.
    fn stop(&self, error: Error) {
        event!(error, %error, "no permit, lock or lease can be renewed");
        let error = self.stopped.get_or_init(|| error);
        self.all().iter().for_each(|named| named.stop(error));
        for lease in self.held_leases() {
            lease.lose(LossReason::NotRenewed);
        }
        self.sender.refuse_calls(error);
        self.sender.clear();
        self.timers.take_all().iter().for_each(|target| target.fire(Moment::now()));
        self.lock_waiters.wake_all();
    }

    /// The source has something to send.
    fn send(&self, source: Arc<dyn Source>, urgency: Urgency) -> Result<(), Error> {
        match self.sender.enqueue(source, urgency) {
            Next::Answer => {}
            Next::Send if self.send_from_here()? => {}
            Next::Send | Next::Look => self.look()?,
        }
        // It may have stopped since the source last asked.
        self.stopped.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Sends what is in line, if the store allows that on this thread and the engine's thread sleeps. If that is awake it sends
    /// itself, and more at once: those who were woken by one answer go into one request.
    fn send_from_here(&self) -> Result<bool, Error> {
        let Some(remote) = self.remote.as_deref() else { return Ok(false) };
        if !remote.sends_from_any_thread() || self.sleeping_until.load(Ordering::SeqCst) == 0 {
            return Ok(false);
        }
        // A process that was forked has the same socket, and must not write to it.
        if let Some(error) = self.stopped() {
            return Err(error);
        }
        self.outbox.send_all(&self.sender, remote);
        // Deadlines are the thread's business: it must not sleep for long while something is in flight.
        let soon = Moment::now() + thread::CHECK_CALLS;
        if self.sleeping_until.load(Ordering::SeqCst) > soon.micros() {
            self.look()?;
        }
        Ok(true)
    }

    fn sends_from_any_thread(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.sends_from_any_thread())
    }

    /// Makes the engine's thread look at what is in line. If it is awake it does before it sleeps: one of us sees the other.
    fn look(&self) -> Result<(), Error> {
        let told = self.told.swap(true, Ordering::SeqCst);
        let awake = self.sleeping_until.load(Ordering::SeqCst) == 0;
        if told || awake && self.thread.get().is_some() { Ok(()) } else { self.tell(Message::Look) }
    }

    /// Replaces the timer of `target`.
    pub(crate) fn set_timer(
        &self,
        target: Weak<dyn Timed>,
        before: Option<Moment>,
        at: Option<Moment>,
    ) -> Result<(), Error> {
        self.timers.set(target.clone(), before, at);
        if at.is_none() {
            return Ok(());
        }
        if let Some(error) = self.stopped() {
            self.timers.set(target, at, None);
            return Err(error);
        }
        // The thread says until when it sleeps before it looks at the timers once more: one of us sees the other.
        match at {
            Some(at) if at.micros() < self.sleeping_until.load(Ordering::SeqCst) => {
                self.tell(Message::Look)
            }
            Some(_) if self.thread.get().is_none() => self.tell(Message::Look),
            _ => Ok(()),
        }
    }

    fn sleeps_until(&self, moment: Moment) {
        self.sleeping_until.store(moment.micros(), Ordering::SeqCst);
    }

    /// Runs a future in the background, on the engine's thread.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Err(error) = self.tell(Message::Run(Box::pin(work))) {
            event!(warn, %error, "nothing runs in the background");
        }
    }

    /// Runs a question on the engine's thread. The store bounds each of its steps.
    pub(crate) fn run<T: Send + 'static>(&self, work: Later<T>) -> Later<T> {
        let (answer, answered) = oneshot::channel();
        let told = self.tell(Message::Run(Box::pin(async move {
            let done = work.await;
            foreign::guarded(|| drop(answer.send(done)));
        })));
        Box::pin(async move {
            told?;
            answered.await.unwrap_or_else(|_| Err(Error::internal("a question was not answered")))
        })
    }

    /// Since when the store cannot be reached, and why.
    pub(crate) fn outage(&self) -> Option<(Moment, Error)> {
        self.sender.outage()
    }
}
