//! A clock that a test advances, and the choice between it and the system's clocks.
//!
//! A client with such a clock has no timers of its own: nothing becomes due between two calls of
//! [`ManualClock::advance`]. That function goes from one due moment to the next, sets the clock to each of them, and
//! fires the timers of that moment on the calling thread. So a token that arrives after 2 s is granted at 2 s, even if
//! the clock is moved by an hour, and everything that became due is applied when the function returns.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::clock::{self, Moment, Span, Time};

/// A clock for tests, which stands still until it is [advanced](Self::advance).
///
/// A client in memory that is built with it takes the time from it: for TTLs and leases, rates, time limits of
/// acquires, ages in statistics, and the removal of unused names. Other clients, and `tokio::time`, are not affected.
/// Clones are the same clock, and several clients may share one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, LossReason, ManualClock};
/// use std::time::Duration;
///
/// let clock = ManualClock::new();
/// let client = Client::memory_builder().manual_clock(&clock).build()?;
/// let api = client.semaphore("api", 1).ttl(Duration::from_secs(3600)).build()?;
///
/// let permit = api.acquire().await?;
/// clock.advance(Duration::from_secs(3599));
/// permit.check()?; // still held
///
/// clock.advance(Duration::from_secs(1));
/// assert!(permit.check().is_err());
/// assert_eq!(permit.lost().await, LossReason::TtlEnded);
/// assert!(api.try_acquire().await?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct ManualClock(Arc<Inner>);

struct Inner {
    /// The first moment of this clock, and the time of day at it, in microseconds.
    origin: u64,
    wall_origin: u64,
    /// Microseconds since the origin.
    elapsed: AtomicU64,
    /// Microseconds since the origin that the clock is moved to.
    target: AtomicU64,
    clients: Mutex<Vec<Client>>,
    /// The thread that is moving the clock.
    mover: Mutex<Option<ThreadId>>,
    /// Held by the thread that moves the clock.
    turn: Mutex<()>,
}

/// The clock stops here, below [`Moment::NEVER`]: after more than a hundred thousand years.
const LATEST: u64 = u64::MAX / 4;

/// The part of a client that depends on time.
pub(crate) trait Timers: Send + Sync {
    /// Returns when the next timer is due.
    fn next(&self) -> Option<Moment>;

    /// Fires one timer that is due at `until`. Returns `false` if none is.
    fn fire_one(&self, until: Moment, now: Moment) -> bool;

    /// Removes the names that have been unused for long enough.
    fn tidy(&self, now: Moment);

    /// Returns how long an unused name is kept, and how often unused names are removed.
    fn idle_times(&self) -> (Span, Span);
}

/// A client that uses the clock.
struct Client {
    timers: Weak<dyn Timers>,
    /// When its unused names were last removed.
    tidied: Moment,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            origin: Moment::now().micros(),
            wall_origin: clock::wall_micros(),
            elapsed: AtomicU64::new(0),
            target: AtomicU64::new(0),
            clients: Mutex::default(),
            mover: Mutex::default(),
            turn: Mutex::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ManualClock {
    /// Creates a clock.
    ///
    /// Pass it to [`MemoryBuilder::manual_clock`](crate::MemoryBuilder::manual_clock).
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns how far the clock has been advanced in total.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Duration::from_micros(self.0.elapsed.load(Ordering::SeqCst))
    }

    /// Moves the clock forward. When this function returns, everything that became due has happened, in its order:
    ///
    /// - Permits and locks whose time has ended are lost, and granted to the next waiters.
    /// - Leases are renewed.
    /// - Tokens of a rate have arrived, and permits were granted with them.
    /// - Acquires that reached their time limit have failed.
    ///
    /// Futures that are ready because of it have been woken. Their tasks continue when the runtime polls them next, not
    /// inside this call. So an operation that consists of several waits needs several calls: [`Lock::acquire`],
    /// [`Pool::acquire`] and [`Semaphore::drain`] wait for a pause, ask again, and wait for the next pause.
    ///
    /// [`Lock::acquire`]: crate::Lock::acquire
    /// [`Pool::acquire`]: crate::Pool::acquire
    /// [`Semaphore::drain`]: crate::Semaphore::drain
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, Error, ManualClock};
    /// use std::time::Duration;
    ///
    /// let clock = ManualClock::new();
    /// let client = Client::memory_builder().manual_clock(&clock).build()?;
    /// let api = client.semaphore("api", 1).build()?;
    /// let held = api.acquire().await?;
    ///
    /// let minute = Duration::from_secs(60);
    /// let waiting = tokio::spawn(api.acquire().within(minute));
    /// while api.stats().await?.waiting == 0 {
    ///     tokio::task::yield_now().await; // until it is queued
    /// }
    /// clock.advance(minute);
    /// let error = waiting.await.expect("the task did not panic").unwrap_err();
    /// assert!(matches!(error, Error::TimedOut { limit, .. } if limit == minute));
    /// # drop(held);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The call takes as long as it takes to apply everything: a lock that is extended every ten seconds is extended
    /// 3 million times in a year.
    ///
    /// If two threads call this function, the clock moves by the sum. If a waker or an observer calls it, the call
    /// returns at once, and the outer call moves the clock further.
    pub fn advance(&self, by: Duration) {
        let span = if by.is_zero() { 0 } else { Span::from_duration(by).micros() };
        let further = |target: u64| Some(target.saturating_add(span).min(LATEST));
        let _ = self.0.target.fetch_update(Ordering::SeqCst, Ordering::SeqCst, further);
        let this_thread = thread::current().id();
        if *lock(&self.0.mover) == Some(this_thread) {
            return;
        }
        let _turn = lock(&self.0.turn);
        *lock(&self.0.mover) = Some(this_thread);
        let _moving = Moving(&self.0);
        while self.step() {}
    }

    /// Moves the clock to the next moment at which something is due, and applies it. Returns `false` if nothing is due
    /// any more; then the clock has reached its target.
    fn step(&self) -> bool {
        let target = self.moment(self.0.target.load(Ordering::SeqCst));
        let clients: Vec<Arc<dyn Timers>> =
            lock(&self.0.clients).iter().filter_map(|client| client.timers.upgrade()).collect();
        let next = clients.iter().filter_map(|timers| timers.next()).min();
        let until = next.map_or(target, |next| next.min(target));
        for timers in &clients {
            self.tidy(timers, until);
        }
        self.set(until);
        let mut fired = false;
        for timers in &clients {
            while timers.fire_one(until, self.now()) {
                fired = true;
            }
        }
        fired || self.now() < self.moment(self.0.target.load(Ordering::SeqCst))
    }

    /// Removes unused names, as often as the engine's thread would. Nothing else changes before `until`, so after a
    /// long time only the last intervals matter.
    fn tidy(&self, timers: &Arc<dyn Timers>, until: Moment) {
        let (idle, interval) = timers.idle_times();
        let timers_of = Arc::downgrade(timers);
        let tidied = |client: &&mut Client| client.timers.ptr_eq(&timers_of);
        let last = lock(&self.0.clients).iter_mut().find(tidied).map(|client| client.tidied);
        let Some(last) = last else { return };
        let mut at = (last + interval).max(until.minus(idle + idle));
        let mut done = last;
        while at <= until {
            self.set(at);
            timers.tidy(at);
            (done, at) = (at, at + interval);
        }
        if let Some(client) = lock(&self.0.clients).iter_mut().find(tidied) {
            client.tidied = done;
        }
    }

    fn now(&self) -> Moment {
        self.moment(self.0.elapsed.load(Ordering::SeqCst))
    }

    fn moment(&self, elapsed: u64) -> Moment {
        Moment::from_micros(self.0.origin.saturating_add(elapsed))
    }

    /// Sets the clock, but never back.
    fn set(&self, moment: Moment) {
        let elapsed = moment.micros().saturating_sub(self.0.origin);
        self.0.elapsed.fetch_max(elapsed, Ordering::SeqCst);
    }
}

/// Ends the turn of a thread, even if a timer that it fires panics.
struct Moving<'a>(&'a Inner);

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        *lock(&self.0.mover) = None;
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManualClock").field("elapsed", &self.elapsed()).finish_non_exhaustive()
    }
}

/// The clock of one client.
#[derive(Clone, Default, Debug)]
pub(crate) struct Clock(Option<ManualClock>);

impl Clock {
    pub(crate) fn manual(clock: ManualClock) -> Self {
        Self(Some(clock))
    }

    pub(crate) fn is_manual(&self) -> bool {
        self.0.is_some()
    }

    /// Makes a manual clock fire the timers of this client.
    pub(crate) fn serve(&self, timers: Weak<dyn Timers>) {
        if let Some(clock) = &self.0 {
            let mut clients = lock(&clock.0.clients);
            clients.retain(|client| client.timers.strong_count() > 0);
            clients.push(Client { timers, tidied: clock.now() });
        }
    }

    /// Returns the moment that the client's timers and leases are compared with.
    #[inline]
    pub(crate) fn now(&self) -> Moment {
        self.0.as_ref().map_or_else(Moment::now, ManualClock::now)
    }

    /// Returns the time of the memory store: see [`clock::memory`].
    #[inline]
    pub(crate) fn fine(&self) -> Time {
        self.0.as_ref().map_or_else(clock::memory::fine, ManualClock::time)
    }

    /// Returns the time of the memory store where no deadline depends on it: see [`clock::memory`].
    #[inline]
    pub(crate) fn coarse(&self) -> Time {
        self.0.as_ref().map_or_else(clock::memory::coarse, ManualClock::time)
    }

    /// Returns the microseconds since the Unix epoch.
    pub(crate) fn steady_wall_micros(&self) -> u64 {
        let manual = |clock: &ManualClock| {
            clock.0.wall_origin.saturating_add(clock.0.elapsed.load(Ordering::SeqCst))
        };
        self.0.as_ref().map_or_else(clock::steady_wall_micros, manual)
    }
}

impl ManualClock {
    /// Returns the time, on the same scale as [`Self::now`].
    fn time(&self) -> Time {
        Time::from_micros(self.now().micros())
    }
}
