//! The engine: everything above the interface to the stores, written once for every store.
//!
//! - [`ticket`]: one acquisition, shared by the engine and its future or guard.
//! - [`name_state`]: one semaphore name. [`in_process`] and [`remote`] implement it, and [`store`], for the two kinds
//!   of stores.
//! - [`sender`]: packs commands for a remote store into requests. [`in_flight`]: sends them.
//! - [`call`]: one command for a lock or a pool. [`lease`]: what such a command acquires.
//! - [`timers`]: the timers that the thread fires.
//! - [`thread`]: the engine's thread, which runs all of that.
//! - [`watch`]: reports to metrics, observers and `tracing`. [`meters`]: the metrics.
//! - [`background`]: work that outlives its caller. [`lock_waiters`]: the tasks that wait for a lock.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;

use rustc_hash::FxHashMap;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::backend::memory::Memory;
use crate::backend::{Answer, BoxFuture, Destination, Part, Profile, RemoteBackend, Slot};
use crate::callbacks::{self, event};
use crate::clock::{Moment, Span};
use crate::machine::Subject;
use crate::machine::lock::{LockOutcome, Record, Verdict};
use crate::machine::pool::PoolQuery;
use crate::manual_clock::{self, Clock};
use crate::name::Name;
use crate::stats::{PoolStats, Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error, LockId};

mod alarm;
pub(crate) mod background;
pub(crate) mod call;
pub(crate) mod driver;
mod in_flight;
pub(crate) mod in_process;
pub(crate) mod lease_spec;
pub(crate) mod lock_waiters;
pub(crate) mod meters;
pub(crate) mod name_state;
pub(crate) mod pool_instance;
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
use call::{Call, CallFuture};
use driver::{AnyLease, Driver, Protocol};
use in_flight::Outbox;
use lock_waiters::LockWaiters;
use meters::ClientMeters;
use name_state::NameState;
use pool_instance::PoolInstances;
use sender::{Next, Sender, Source, Urgency};
use store::Store;
use thread::Message;
use timers::{Timed, Timers};

/// A request to a store without connections that is not answered for this long is an outage.
const LONG_SILENCE: Span = Span::from_millis(2000);

/// The shortest time that the store has to answer an attempt after the first, also if the caller's wait ends sooner.
const SHORTEST_ANSWER: Span = Span::from_millis(500);

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
    outbox: Outbox,
    /// Whether the engine's thread was asked to check the sender's queues and has not done so yet.
    look_requested: AtomicBool,
    pub(crate) timers: Timers,
    sequence: AtomicU64,
    closed: AtomicBool,
    /// Notified when the client is closed.
    closing: Notify,
    names: Mutex<Names>,
    pub(crate) lock_waiters: Arc<LockWaiters>,
    leases: Mutex<Leases>,
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

/// The drivers of locks and pool instances, each by its address.
type Leases = FxHashMap<usize, Weak<dyn AnyLease>>;

/// The names in use, each with the moment since which it has been unused.
type Names = HashMap<Name, (Arc<dyn NameState>, Option<Moment>)>;

/// The settings of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// How long an unused name is kept.
    pub(crate) idle: Span,
    /// How long a call waits for an answer from the store. Waiting for a permit or a lock has no such limit.
    pub(crate) answer_timeout: Span,
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
            outbox: Outbox::default(),
            look_requested: AtomicBool::new(false),
            timers: Timers::default(),
            sequence: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            names: Mutex::default(),
            lock_waiters: Arc::default(),
            leases: Mutex::default(),
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
        // The names are taken out of the lock first, because dropping a name may run the user's code.
        let names = std::mem::take(&mut *self.core.names());
        for (named, _) in names.into_values() {
            named.abandon();
        }
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
        self.remove_unused(now);
    }

    fn idle_times(&self) -> (Span, Span) {
        (self.settings.idle, self.tidy_interval())
    }
}

impl Core {
    /// Returns the present on the client's clock.
    #[inline]
    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(crate) fn profile(&self) -> Profile {
        self.store.profile()
    }

    #[cfg(unix)]
    pub(crate) fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.store.shared()?.lifeline()
    }

    #[inline]
    pub(crate) fn next_id(&self) -> AcquisitionId {
        AcquisitionId::new(self.client, self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the state of this name, and creates it if necessary.
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
        if first && !self.clock.is_manual() {
            // The thread removes names that are no longer used. Without a thread, they stay.
            let _ = self.send_message(Message::Look);
        }
        Ok(new)
    }

    /// Returns the state of this name, if this client uses it.
    fn known(&self, name: &Name) -> Option<Arc<dyn NameState>> {
        self.names().get(name).map(|(named, _)| named.clone())
    }

    /// Returns every name that is in use, or was in use recently.
    pub(crate) fn all(&self) -> Vec<Arc<dyn NameState>> {
        self.names().values().map(|(named, _)| named.clone()).collect()
    }

    /// Removes the names that have been unused for long enough. Returns when to do this again.
    fn remove_unused(&self, now: Moment) -> Option<Moment> {
        let mut names = self.names();
        names.retain(|_, (named, unused_since)| {
            // Nobody can begin to use the name while the lock is held.
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

    /// Ends everything that this client waits for and holds, and prevents it from beginning anything new.
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
        // Every release is started before the first is awaited, so that one that fails does not delay the others.
        self.all_leases().iter().for_each(|lease| lease.close());
        // All releases together have the deadline of a single one.
        let until = self.now() + self.settings.answer_timeout;
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

    /// Resolves when the client is closed. A close counts from this call on, not only from the first poll.
    pub(crate) fn closing(&self) -> impl Future<Output = ()> {
        self.closing.notified()
    }

    /// Returns [`Error::Closed`] once the client is closed.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// Registers the lease of a lock or of a pool instance, until it is dropped. Fails if the client is closed.
    pub(crate) fn add_lease<P: Protocol>(&self, lease: &Arc<Driver<P>>) -> Result<(), Error> {
        let weak = Arc::downgrade(lease) as Weak<dyn AnyLease>;
        self.leases().insert(Arc::as_ptr(lease) as usize, weak);
        // After the insertion: a close that begins now finds this lease.
        self.check_open()
    }

    /// Called when a driver is dropped.
    fn remove_lease<P: Protocol>(&self, lease: &Driver<P>) {
        self.leases().remove(&(std::ptr::from_ref(lease) as usize));
    }

    fn all_leases(&self) -> Vec<Arc<dyn AnyLease>> {
        self.leases().values().filter_map(Weak::upgrade).collect()
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Requests to the store.

    /// Sends one command for a lock or a pool. It fails if the store has not answered within the time for a call.
    pub(crate) fn call(self: &Arc<Self>, part: Part) -> CallFuture {
        match &self.store {
            Store::Memory(memory) => CallFuture::at_once(self.now(), || self.apply(memory, &part)),
            Store::Shared(_) => {
                let until = self.now() + self.settings.answer_timeout;
                Call::start(self, part, Urgency::Ordinary, until)
            }
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
        let memory = match &self.store {
            Store::Memory(memory) => memory,
            Store::Shared(_) => {
                let (answer, answered) = oneshot::channel();
                let until = self.now() + self.settings.answer_timeout;
                let done = Box::new(|done| drop(answer.send(done)));
                Call::start_in_background(self, part, until, done);
                return Box::pin(async move {
                    let ended = |_| Err(Error::internal("a call ended without an answer"));
                    answered.await.unwrap_or_else(ended)
                });
            }
        };
        Box::pin(std::future::ready(self.apply(memory, &part)))
    }

    pub(crate) fn stats(self: &Arc<Self>, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        if let Store::Shared(backend) = &self.store {
            return self.run(backend.stats(query));
        }
        let names = self.all().into_iter().filter(|named| {
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

    fn background_failed(&self, error: &Error) {
        event!(warn, %error, "a release failed: the lease remains until it expires");
        self.background.failed(error.clone());
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
        let done = timers::Deadline::new(self, until).unless(work).await;
        done.ok_or_else(|| self.unavailable(None, asked, self.now()))
    }

    /// Returns the slot in which the store keeps this name, key or id.
    pub(crate) fn slot(&self, subject: Subject<'_>) -> Slot {
        self.store.shared().map_or(Slot::ONLY, |remote| remote.slot(subject))
    }

    /// Returns the server that serves a slot now.
    pub(crate) fn destination(&self, slot: Slot) -> Destination {
        self.store.shared().map_or(Destination::ONLY, |remote| remote.destination(slot))
    }

    /// Looks up the key of the lock that this id holds. Returns `None` if no lookup is needed, because the store finds
    /// the key when it applies the command.
    pub(crate) fn key_of_lock(&self, id: LockId) -> Option<BoxFuture<Option<Name>>> {
        self.store.shared()?.key_of_lock(id)
    }

    /// Returns [`Error::InvalidArgument`] if the store cannot keep anything under this name.
    pub(crate) fn check_name(&self, subject: Subject<'_>) -> Result<(), Error> {
        self.store.shared().map_or(Ok(()), |remote| remote.check(subject))
    }

    /// Returns the error of a call that was made at `asked` and not answered. It says how long this destination, or any
    /// destination, has been silent.
    pub(crate) fn unavailable(&self, to: Option<Destination>, asked: Moment, now: Moment) -> Error {
        let silent = match to {
            Some(to) => self.sender.silent_since(to, now),
            None => self.sender.outage().map(|(since, error)| (since, Some(error))),
        };
        let (since, error) = silent.unwrap_or((asked, None));
        let silent_for = Some(now.saturating_since(since));
        match error {
            Some(Error::Unavailable { what, timed_out, source, .. }) => {
                Error::Unavailable { what, timed_out, silent_for, source }
            }
            Some(error) => error,
            None => {
                let address = self.store.shared().map_or("the store", |remote| remote.address());
                let what = format!("request to {address}");
                Error::Unavailable { what, timed_out: true, silent_for, source: None }
            }
        }
    }

    /// Reports to the store that the destination has been silent for too long.
    fn suspect(&self, to: Destination) {
        if let Some(remote) = self.store.shared() {
            remote.suspect(to);
        }
    }

    fn has_stragglers(&self) -> bool {
        self.stragglers.load(Ordering::Acquire)
    }

    fn set_stragglers(&self, stragglers: bool) {
        self.stragglers.fetch_or(stragglers, Ordering::AcqRel);
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
        let told = thread.as_ref().map_err(Clone::clone)?.send(message);
        told.map_err(|_| self.stopped().unwrap_or(Error::Closed))
    }

    /// Whether the store is in this process, so that no time passes between a grant and its answer.
    pub(crate) fn is_in_process(&self) -> bool {
        self.store.memory().is_some()
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
        self.all().iter().for_each(|named| named.stop(error));
        self.all_leases().iter().for_each(|lease| lease.stop(error));
        self.sender.refuse_calls(None, error);
        self.sender.clear();
        self.timers.take_all().iter().for_each(|target| target.fire(self.now()));
        self.lock_waiters.wake_all();
    }

    /// Puts a source in line that the store has not been able to serve since that moment. The source rests before it is sent again.
    fn send_later(
        &self,
        source: Arc<dyn Source>,
        urgency: Urgency,
        since: Moment,
    ) -> Result<(), Error> {
        self.sender.enqueue_later(source, urgency, since);
        self.look()?;
        self.stopped.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Puts a source in line that has something to send.
    fn send(&self, source: Arc<dyn Source>, urgency: Urgency) -> Result<(), Error> {
        // A forked process has the same socket, and must not write to it.
        if let Some(error) = self.stopped() {
            return Err(error);
        }
        match (self.sender.enqueue(source, urgency, self.may_send_from_here()), self.store.shared())
        {
            (Next::Answer, _) => {}
            (Next::Send(turn), Some(remote)) => {
                self.outbox.send_all(self, &**remote, turn);
                // Only the engine's thread checks deadlines, so it must not sleep for long while something is in flight.
                let soon = Moment::now() + thread::CHECK_CALLS;
                if self.sleeping_until.load(Ordering::SeqCst) > soon.micros() {
                    self.look()?;
                }
            }
            (Next::Send(_) | Next::Look, _) => self.look()?,
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

    /// Makes the engine's thread look at the line. If the thread is awake, it looks before it sleeps. Each side first
    /// writes its own flag and then reads the other's, so at least one of the two sees the other.
    fn look(&self) -> Result<(), Error> {
        let told = self.look_requested.swap(true, Ordering::SeqCst);
        let awake = self.sleeping_until.load(Ordering::SeqCst) == 0;
        if told || awake && self.thread.get().is_some() {
            Ok(())
        } else {
            self.send_message(Message::Look)
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
                self.send_message(Message::Look)
            }
            Some(_) if self.thread.get().is_none() => self.send_message(Message::Look),
            _ => Ok(()),
        }
    }

    fn sleeps_until(&self, moment: Moment) {
        self.sleeping_until.store(moment.micros(), Ordering::SeqCst);
    }

    /// Runs a query on the engine's thread. The store limits the time of each step.
    pub(crate) fn run<T: Send + 'static>(&self, work: BoxFuture<T>) -> BoxFuture<T> {
        let (answer, answered) = oneshot::channel();
        let told = self.send_message(Message::Run(Box::pin(async move {
            let done = work.await;
            callbacks::guarded(|| drop(answer.send(done)));
        })));
        let this = self.this.clone();
        Box::pin(async move {
            told?;
            answered.await.unwrap_or_else(|_| {
                let stopped = this.upgrade().and_then(|core| core.stopped());
                Err(stopped.unwrap_or_else(|| Error::internal("a query ended without an answer")))
            })
        })
    }

    /// Returns since when the store cannot be reached, and why.
    pub(crate) fn outage(&self) -> Option<(Moment, Error)> {
        self.sender.outage().or_else(|| self.silence())
    }

    /// Returns since when a store without connections has not answered: another process may be stopped in the middle of
    /// a transaction. On other stores, a silent connection is closed, which is an outage.
    fn silence(&self) -> Option<(Moment, Error)> {
        #[cfg(unix)]
        let has_no_connection = self.lifeline().is_some();
        #[cfg(not(unix))]
        let has_no_connection = false;
        if !has_no_connection {
            return None;
        }
        let now = Moment::now();
        let (since, to) = self.sender.unanswered_for(LONG_SILENCE, now)?;
        Some((since, self.unavailable(Some(to), since, now)))
    }
}
