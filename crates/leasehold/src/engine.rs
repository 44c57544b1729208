//! The engine: everything above the seam that every store needs, written once.
//!
//! - [`ticket`]: one acquisition, shared by its future or guard and the engine.
//! - [`desk`]: the state of one name in this client, and its rules.
//! - [`named`]: one name behind its lock, as the public face uses it.
//! - [`lease`]: a lease that is not a permit: of a lock or a pool.
//! - [`waiters`]: who waits for a lock.
//! - [`errands`]: what goes on although nobody waits for it.
//! - [`outbox`]: group commit for stores that are away.
//! - [`driver`]: the engine's own thread, with its timers and its trips to the store.
//!
//! The thread is the client's own, so that renewals go on while the user's executor is blocked, guards may
//! be dropped outside any runtime, and a runtime that shuts down takes no lease with it. It starts when it
//! is first needed and ends when the last client, semaphore, future and guard is gone.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot};

use crate::backend::{Backend, Later, WakeUp};
use crate::clock::{Moment, Span};
use crate::machine::Command;
use crate::name::Name;
use crate::pool::Seats;
use crate::{AcquisitionId, ClientId, Error};

mod desk;
mod driver;
pub(crate) mod errands;
pub(crate) mod lease;
pub(crate) mod named;
mod outbox;
pub(crate) mod ticket;
mod waiters;

#[cfg(test)]
mod tests;

use errands::{Errands, Wanted};
use lease::Lease;
use named::Named;
use waiters::Waiters;

/// What every client, semaphore, future and guard holds on to. With the last of them the names go, and
/// with the names the thread.
pub(crate) struct Engine {
    core: Arc<Core>,
}

/// What the names of one client share.
pub(crate) struct Core {
    pub(crate) client: ClientId,
    pub(crate) backend: Backend,
    pub(crate) settings: Settings,
    sequence: AtomicU64,
    closed: AtomicBool,
    names: Mutex<Names>,
    /// Who waits for a lock.
    pub(crate) waiters: Arc<Waiters>,
    /// Locks and leases that are held, by their addresses.
    leases: Mutex<FxHashMap<usize, Weak<Lease>>>,
    /// Who shares the lease of one instance id.
    pub(crate) seats: Seats,
    errands: Errands,
    driver: OnceLock<Option<mpsc::UnboundedSender<Message>>>,
    this: Weak<Self>,
}

#[derive(Default)]
struct Names {
    /// Each with the moment since when it is known to be unused.
    by_name: FxHashMap<Name, (Arc<Named>, Option<Moment>)>,
    tidied: bool,
}

/// What a client can be told about how to behave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// How long an unused name is kept.
    pub(crate) idle: Span,
    pub(crate) retries: Retries,
}

impl Default for Settings {
    fn default() -> Self {
        Self { idle: Span::from_millis(60_000), retries: Retries::default() }
    }
}

/// How often, and how soon after each other, a store that does not answer is asked again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retries {
    pub(crate) attempts: u32,
    pub(crate) multiplier: f64,
    pub(crate) min_delay: Duration,
    pub(crate) max_delay: Duration,
    /// How long one answer may take.
    pub(crate) timeout: Duration,
}

impl Retries {
    /// How long to wait after so many attempts.
    pub(crate) fn delay(&self, attempts: u32) -> Duration {
        let factor = self.multiplier.powi(i32::try_from(attempts).unwrap_or(i32::MAX) - 1);
        let delay = Duration::try_from_secs_f64(self.min_delay.as_secs_f64() * factor);
        delay.unwrap_or(self.max_delay).min(self.max_delay)
    }

    /// Asks until there is an answer, or the attempts are used up. Only on the engine's thread, which has timers.
    pub(crate) async fn persist<T>(&self, ask: impl FnMut() -> Later<T>) -> Result<T, Error> {
        self.persist_if(|| true, ask).await
    }

    /// The same, but nobody is asked again for an answer that is not wanted any more.
    pub(crate) async fn persist_while<T>(
        &self,
        wanted: &Wanted,
        ask: impl FnMut() -> Later<T>,
    ) -> Result<T, Error> {
        self.persist_if(|| wanted.still(), ask).await
    }

    async fn persist_if<T>(
        &self,
        wanted: impl Fn() -> bool,
        mut ask: impl FnMut() -> Later<T>,
    ) -> Result<T, Error> {
        let mut attempt = 1;
        loop {
            let answer = tokio::time::timeout(self.timeout, ask()).await;
            let answer = answer.unwrap_or_else(|_| Err(driver::no_answer()));
            match answer {
                Err(error @ Error::Unavailable { .. }) if attempt < self.attempts && wanted() => {
                    tracing::debug!(%error, attempt, "asking the store again");
                    tokio::time::sleep(self.delay(attempt)).await;
                    attempt += 1;
                }
                answer => return answer,
            }
        }
    }
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            attempts: 3,
            multiplier: 2.0,
            min_delay: Duration::from_secs(1),
            max_delay: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
        }
    }
}

/// What the engine's thread is told.
pub(crate) enum Message {
    /// Something is due at that desk then.
    LookAt(Moment, Weak<Named>),
    /// There is something to send.
    Send { named: Arc<Named>, flush: bool, renewals: Vec<Command> },
    /// A store that is away has something to say.
    WakeUp(WakeUp),
    /// Names may be unused then.
    TidyAt(Moment),
    /// A future to run there, because it needs that thread's runtime.
    Run(Pin<Box<dyn Future<Output = ()> + Send>>),
}

impl Engine {
    pub(crate) fn new(backend: Backend, settings: Settings) -> Arc<Self> {
        let core = Arc::new_cyclic(|this| Core {
            client: ClientId::random(),
            backend,
            settings,
            sequence: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            names: Mutex::default(),
            waiters: Arc::default(),
            leases: Mutex::default(),
            seats: Seats::default(),
            errands: Errands::default(),
            driver: OnceLock::new(),
            this: this.clone(),
        });
        Arc::new(Self { core })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Taken out first: a name that goes may run code that is not ours.
        let names = std::mem::take(&mut self.core.names().by_name);
        for (named, _) in names.into_values() {
            named.abandon();
        }
    }
}

impl Core {
    pub(crate) fn next_id(&self) -> AcquisitionId {
        AcquisitionId::new(self.client, self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    /// The name, new or known.
    pub(crate) fn named(&self, name: &Name) -> Result<Arc<Named>, Error> {
        let mut names = self.names();
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        if let Some((named, unused_since)) = names.by_name.get_mut(name) {
            *unused_since = None;
            return Ok(named.clone());
        }
        let this = self.this.upgrade().ok_or(Error::Closed)?;
        let new = Named::new(name.clone(), this);
        names.by_name.insert(name.clone(), (new.clone(), None));
        let first = !std::mem::replace(&mut names.tidied, true);
        drop(names);
        if first {
            self.tell(Message::TidyAt(Moment::now() + self.tidy_interval()));
        }
        Ok(new)
    }

    /// Every name that is in use, or was not long ago.
    pub(crate) fn all(&self) -> Vec<Arc<Named>> {
        self.names().by_name.values().map(|(named, _)| named.clone()).collect()
    }

    /// Removes the names that nobody has used for a while, and says when to come again.
    fn tidy(&self, now: Moment) -> Option<Moment> {
        let mut names = self.names();
        names.by_name.retain(|_, (named, unused_since)| {
            // Nobody can come to hold it while we have the lock, and so nobody can begin to use it.
            let unused = Arc::strong_count(named) == 1 && named.is_idle();
            let since = *unused_since.get_or_insert(now);
            if !unused {
                *unused_since = None;
            }
            !unused || now < since + self.settings.idle
        });
        names.tidied = !names.by_name.is_empty();
        names.tidied.then(|| now + self.tidy_interval())
    }

    fn tidy_interval(&self) -> Span {
        self.settings.idle.divided_by(4)
    }

    fn woken(&self, wake_up: WakeUp) {
        let known = |name| self.names().by_name.get(name).map(|(named, _)| named.clone());
        match wake_up {
            #[cfg(feature = "broken")]
            WakeUp::Granted(..) if crate::broken::is("wakeup") => {}
            WakeUp::Granted(name, id) => {
                if let Some(named) = known(&name) {
                    named.woken(id);
                }
            }
            WakeUp::Evicted(name, id) => {
                if let Some(named) = known(&name) {
                    named.evicted(id);
                }
            }
            WakeUp::Released(key) => self.waiters.wake_one(&key),
            WakeUp::Reconnected => {
                self.all().iter().for_each(|named| named.reconnected());
                self.waiters.wake_all();
            }
        }
    }

    /// Ends everything this client waits for and holds, and lets it begin nothing new.
    pub(crate) fn close(&self) -> Vec<Arc<Named>> {
        let names = self.names();
        self.closed.store(true, Ordering::Release);
        drop(names);
        let all = self.all();
        for named in &all {
            named.close();
        }
        self.waiters.wake_all();
        all
    }

    /// Waits until nothing goes on any more that nobody waits for.
    pub(crate) async fn errands_done(&self) -> Result<(), Error> {
        self.errands.done().await
    }

    /// An error once the client is closed.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    fn enroll(&self, lease: &Arc<Lease>) {
        self.leases().insert(Arc::as_ptr(lease) as usize, Arc::downgrade(lease));
    }

    fn dismiss(&self, address: usize) {
        self.leases().remove(&address);
    }

    /// Locks and leases that somebody in this process holds.
    pub(crate) fn all_leases(&self) -> Vec<Arc<Lease>> {
        self.leases().values().filter_map(Weak::upgrade).collect()
    }

    fn leases(&self) -> MutexGuard<'_, FxHashMap<usize, Weak<Lease>>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands something to the engine's thread. Never blocks.
    pub(crate) fn tell(&self, message: Message) {
        // If there is no thread, the process is out of resources. Then nothing is renewed, and every
        // lease ends by itself.
        let driver = self.driver.get_or_init(|| driver::start(self));
        if let Some(driver) = driver {
            let _ = driver.send(message);
        }
    }

    /// Runs a future of the store's on the engine's thread. It goes on whether or not anybody waits for the answer.
    pub(crate) async fn run<T: Send + 'static>(&self, work: Later<T>) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        self.tell(Message::Run(Box::pin(async move {
            let _ = answer.send(work.await);
        })));
        answered.await.unwrap_or_else(|_| Err(Error::internal("the engine's thread has ended")))
    }

    /// The same, but when nobody waits for the answer any more, the work is dropped where it is, unless it is asking a store.
    pub(crate) async fn run_while_wanted<T: Send + 'static>(
        &self,
        work: impl FnOnce(Wanted) -> Later<T>,
    ) -> Result<T, Error> {
        let (mut answer, answered) = oneshot::channel();
        let wanted = Wanted::default();
        let mut work = work(wanted.clone());
        self.tell(Message::Run(Box::pin(async move {
            let done = poll_fn(|cx| {
                if wanted.still() && answer.poll_closed(cx).is_ready() {
                    wanted.no_more();
                }
                match wanted.goes_on().then(|| work.as_mut().poll(cx)) {
                    Some(Poll::Ready(done)) => Poll::Ready(Some(done)),
                    Some(Poll::Pending) if wanted.goes_on() => Poll::Pending,
                    _ => Poll::Ready(None),
                }
            });
            if let Some(done) = done.await {
                let _ = answer.send(done);
            }
        })));
        answered.await.unwrap_or_else(|_| Err(Error::internal("the engine's thread has ended")))
    }

    /// Asks a store, and again, as the settings say, if it does not answer. A store in this process answers at once.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        mut ask: impl FnMut() -> Later<T> + Send + 'static,
    ) -> Result<T, Error> {
        match &self.backend {
            Backend::Memory(_) => ask().await,
            Backend::Away(_) => {
                let retries = self.settings.retries;
                self.run(Box::pin(async move { retries.persist(ask).await })).await
            }
        }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
