//! The engine: everything above the interface to the stores, written once for every store.
//!
//! - [`ticket`]: one acquisition, shared by the engine and its future or guard. [`deferred`]: what runs after locks.
//! - [`driver`]: drives the client core of a name, a lock or a pool instance. [`registry`]: all of them.
//! - [`name_state`]: one semaphore name. [`in_process`] and [`remote`] implement it for the two kinds of stores.
//! - [`store`]: the store, and whether it can be reached.
//! - [`sender`]: packs commands for a remote store into requests.
//! - [`call`]: one command without a guard; queries.
//! - [`timers`]: the timers that the thread fires.
//! - [`thread`]: the engine's thread, which runs all of that.
//! - [`watch`]: reports to metrics, observers and `tracing`. [`meters`]: the metrics.
//! - [`background`]: work that outlives its caller. [`lock_waiters`]: the tasks that wait for a lock.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tokio::sync::{Notify, mpsc};

use crate::backend::RemoteBackend;
use crate::backend::memory::Memory;
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::manual_clock::{self, Clock};
use crate::{AcquisitionId, ClientId, Error};

mod alarm;
pub(crate) mod background;
pub(crate) mod call;
pub(crate) mod deferred;
pub(crate) mod driver;
pub(crate) mod in_process;
mod last_outlook;
pub(crate) mod lease_spec;
pub(crate) mod lock_waiters;
pub(crate) mod meters;
pub(crate) mod name_state;
pub(crate) mod pool_instance;
mod registry;
pub(crate) mod remote;
pub(crate) mod semaphore_spec;
pub(crate) mod sender;
mod store;
mod thread;
pub(crate) mod ticket;
pub(crate) mod timers;
pub(crate) mod watch;

#[cfg(test)]
mod tests;

use background::Background;
use lock_waiters::LockWaiters;
use meters::ClientMeters;
use pool_instance::PoolInstances;
use registry::Registry;
use sender::{Next, Sender, Source, Urgency};
use store::Store;
use thread::Message;
use timers::{Timed, Timers};

/// The engine of one client. Every client handle, semaphore, future and guard keeps it alive. When the last of them is
/// dropped, the names are dropped, and then the thread ends.
pub(crate) struct Engine {
    core: Arc<Core>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("client", &self.core.client).finish_non_exhaustive()
    }
}

/// The state that all names, locks and pools of one client share.
pub(crate) struct Core {
    pub(crate) client: ClientId,
    pub(crate) clock: Clock,
    pub(crate) settings: Settings,
    store: Store,
    pub(crate) sender: Sender,
    outbox: thread::Outbox,
    /// Whether the engine's thread was asked to check the sender's queues and has not done so yet.
    wake_requested: AtomicBool,
    pub(crate) timers: Timers,
    sequence: AtomicU64,
    closed: AtomicBool,
    /// Notified when the client is closed.
    closing: Notify,
    pub(crate) registry: Registry,
    pub(crate) lock_waiters: Arc<LockWaiters>,
    pool_instances: PoolInstances,
    pub(crate) meters: ClientMeters,
    background: Background,
    thread: OnceLock<Result<mpsc::UnboundedSender<Message>, Error>>,
    /// Why the engine's thread has ended, if it has.
    stopped: OnceLock<Error>,
    /// The moment until which the thread sleeps, in microseconds of [`Moment`].
    sleeping_until: AtomicU64,
    /// Whether requests of an earlier connection may still be applied.
    stragglers: AtomicBool,
    /// The process in which the thread was started. A process that was forked from it has no thread.
    process: OnceLock<u32>,
    this: Weak<Self>,
}

/// The settings of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// How long an unused name is kept.
    pub(crate) idle: Span,
    /// How long a call waits for an answer from the store. Waiting for a permit or a lock has no such limit.
    pub(crate) answer_timeout: Span,
}

impl Settings {
    /// How often unused names are looked for.
    fn tidy_interval(&self) -> Span {
        self.idle.divided_by(4)
    }
}

impl Default for Settings {
    fn default() -> Self {
        let (idle, answer_timeout) = (Span::from_millis(60_000), Span::from_millis(5000));
        Self { idle, answer_timeout }
    }
}

impl Engine {
    pub(crate) fn in_process(memory: Memory, settings: Settings) -> Arc<Self> {
        let clock = memory.clock.clone();
        Self::new(Store::Memory(Arc::new(memory)), settings, clock)
    }

    pub(crate) fn remote(backend: Arc<dyn RemoteBackend>, settings: Settings) -> Arc<Self> {
        Self::new(Store::Shared(backend), settings, Clock::default())
    }

    fn new(store: Store, settings: Settings, clock: Clock) -> Arc<Self> {
        let kind = store.profile().kind;
        let core = Arc::new_cyclic(|this| Core {
            client: ClientId::random(),
            clock,
            settings,
            store,
            sender: Sender::default(),
            outbox: thread::Outbox::default(),
            wake_requested: AtomicBool::new(false),
            timers: Timers::default(),
            sequence: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            registry: Registry::default(),
            lock_waiters: Arc::default(),
            pool_instances: PoolInstances::default(),
            meters: ClientMeters::new(kind, this.clone()),
            background: Background::default(),
            thread: OnceLock::new(),
            stopped: OnceLock::new(),
            sleeping_until: AtomicU64::new(0),
            stragglers: AtomicBool::new(false),
            process: OnceLock::new(),
            this: this.clone(),
        });
        core.clock.serve(core.this.clone());
        Arc::new(Self { core })
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.core.registry.abandon_names();
    }
}

impl manual_clock::Timers for Core {
    fn next(&self) -> Option<Moment> {
        self.timers.next()
    }

    fn fire_one(&self, until: Moment, now: Moment) -> bool {
        self.timers.pop(until).map(|due| due.fire(now)).is_some()
    }

    fn tidy(&self, now: Moment) {
        self.registry.remove_unused(self.settings.idle, now);
    }

    fn idle_times(&self) -> (Span, Span) {
        (self.settings.idle, self.settings.tidy_interval())
    }
}

impl Core {
    /// Returns the present on the client's clock.
    #[inline]
    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    #[inline]
    pub(crate) fn next_id(&self) -> AcquisitionId {
        AcquisitionId::new(self.client, self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    /// Ends everything that this client waits for and holds, and prevents it from beginning anything new.
    pub(crate) async fn close(&self) -> Result<(), Error> {
        self.registry.refuse_new(|| self.closed.store(true, Ordering::Release));
        self.registry.listeners().iter().for_each(|listener| listener.close());
        self.lock_waiters.wake_all();
        self.closing.notify_waiters();
        // All releases together have the deadline of a single one.
        let until = self.now() + self.settings.answer_timeout;
        let Some(core) = self.this.upgrade() else { return Ok(()) };
        core.until(until, self.background.done()).await?
    }

    /// Resolves when the client is closed. A close counts from this call on, not only from the first poll.
    pub(crate) fn closing(&self) -> impl Future<Output = ()> {
        self.closing.notified()
    }

    /// Returns [`Error::Closed`] once the client is closed.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    fn background_failed(&self, error: &Error) {
        event!(warn, %error, "a release failed: the lease remains until it expires");
        self.background.failed(error.clone());
    }

    // The engine's thread.

    /// Sends a message to the engine's thread. Never blocks.
    fn send_message(&self, message: Message) -> Result<(), Error> {
        if let Some(error) = self.stopped() {
            return Err(error);
        }
        let thread = self.thread.get_or_init(|| {
            let _ = self.process.set(std::process::id());
            let started = thread::start(self);
            if let Err(error) = &started {
                event!(error, %error, "permits, locks and leases cannot be renewed");
            }
            started
        });
        let sent = thread.as_ref().map_err(Clone::clone)?.send(message);
        sent.map_err(|_| self.stopped().unwrap_or(Error::Closed))
    }

    /// Returns why the engine is not running, if it is not.
    pub(crate) fn stopped(&self) -> Option<Error> {
        if let Some(error) = self.stopped.get() {
            return Some(error.clone());
        }
        let started = self.process.get()?;
        if *started != std::process::id() {
            let what = "this process was forked from the process that opened the client: \
                        open another client after the fork";
            return Some(Error::Stopped { what: what.to_owned() });
        }
        match self.thread.get() {
            Some(Err(error)) => Some(error.clone()),
            _ => None,
        }
    }

    /// Handles the end of the engine's thread: everything that waits fails, and so does every later call.
    fn stop(&self, error: Error) {
        event!(error, %error, "permits, locks and leases can no longer be renewed");
        let error = self.stopped.get_or_init(|| error);
        self.registry.listeners().iter().for_each(|listener| listener.stop(error));
        self.sender.refuse_calls(None, error);
        self.sender.clear();
        self.timers.take_all().iter().for_each(|target| target.fire(self.now()));
        self.lock_waiters.wake_all();
    }

    /// Puts a source in the queue that the store has not been able to serve since that moment. The source rests before it is sent again.
    fn send_later(
        &self,
        source: &Arc<dyn Source>,
        urgency: Urgency,
        since: Moment,
    ) -> Result<(), Error> {
        self.sender.enqueue_later(source, urgency, since);
        self.wake_thread()?;
        self.stopped.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Puts a source in the queue that has something to send.
    fn send(&self, source: &Arc<dyn Source>, urgency: Urgency) -> Result<(), Error> {
        // A forked process has the same socket, and must not write to it.
        if let Some(error) = self.stopped() {
            return Err(error);
        }
        let next = self.sender.enqueue(source, urgency, self.may_send_from_here());
        match (next, self.store.shared()) {
            (Next::Answer, _) => {}
            (Next::Send(turn), Some(remote)) => {
                self.outbox.send_all(self, &**remote, turn);
                // Only the engine's thread notices that a server is silent, so it must not sleep for long while a
                // request is in flight.
                let soon = Moment::now() + thread::CHECK_SILENCE;
                if self.sleeping_until.load(Ordering::SeqCst) > soon.micros() {
                    self.wake_thread()?;
                }
            }
            (Next::Send(_) | Next::WakeThread, _) => self.wake_thread()?,
        }
        // The thread may have stopped since the source last checked.
        self.stopped.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Whether a calling thread may send its own request: if the store allows that and the engine's thread sleeps. If
    /// the engine's thread is awake, it sends by itself, and packs more: tasks that were woken by one answer then share
    /// one request.
    fn may_send_from_here(&self) -> bool {
        self.sends_from_any_thread() && self.sleeping_until.load(Ordering::SeqCst) != 0
    }

    fn sends_from_any_thread(&self) -> bool {
        self.store.shared().is_some_and(|remote| remote.sends_from_any_thread())
    }

    /// Makes the engine's thread look at the queue. If the thread is awake, it looks before it sleeps. Each side first
    /// writes its own flag and then reads the other's, so at least one of the two sees the other.
    fn wake_thread(&self) -> Result<(), Error> {
        let was_requested = self.wake_requested.swap(true, Ordering::SeqCst);
        let awake = self.sleeping_until.load(Ordering::SeqCst) == 0;
        if was_requested || awake && self.thread.get().is_some() {
            Ok(())
        } else {
            self.send_message(Message::WakeUp)
        }
    }

    /// Replaces the timer of `target`.
    pub(crate) fn set_timer(
        &self,
        target: Weak<dyn Timed>,
        before: Option<Moment>,
        at: Option<Moment>,
    ) -> Result<(), Error> {
        self.timers.set(target.clone(), before, at);
        let result = self.timer_was_set(at);
        if result.is_err() {
            self.timers.set(target, at, None);
        }
        result
    }

    /// Makes sure that the engine's thread is awake at that moment.
    fn timer_was_set(&self, at: Option<Moment>) -> Result<(), Error> {
        // A manual clock fires the timers itself.
        if at.is_none() || self.clock.is_manual() {
            return Ok(());
        }
        if let Some(error) = self.stopped() {
            return Err(error);
        }
        // The thread first publishes until when it sleeps, and then looks at the timers once more. So at least one of
        // the two sees the other.
        match at {
            Some(at) if at.micros() < self.sleeping_until.load(Ordering::SeqCst) => {
                self.send_message(Message::WakeUp)
            }
            Some(_) if self.thread.get().is_none() => self.send_message(Message::WakeUp),
            _ => Ok(()),
        }
    }

    fn sleeps_until(&self, moment: Moment) {
        self.sleeping_until.store(moment.micros(), Ordering::SeqCst);
    }
}
