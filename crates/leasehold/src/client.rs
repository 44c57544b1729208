//! The client: one engine, and the store that it uses.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use crate::backend::memory::Memory;
use crate::clock::Moment;
use crate::engine::{Engine, Settings};
use crate::lock::{LockBuilder, Locks};
use crate::manual_clock::Clock;
use crate::name::positive;
use crate::pool::{PoolBuilder, Pools};
use crate::semaphore::{Semaphore, SemaphoreBuilder};
use crate::url::StoreUrl;
#[cfg(not(all(feature = "local", target_os = "linux")))]
use crate::url::without_feature;
use crate::{ClientId, Error, ManualClock};

#[cfg(all(feature = "local", target_os = "linux"))]
mod local;
mod queries;
#[cfg(feature = "redis")]
mod redis;
#[cfg(all(feature = "local", target_os = "linux"))]
pub use local::LocalBuilder;
pub use queries::Stats;
#[cfg(feature = "redis")]
pub use redis::RedisBuilder;

static GLOBAL: LazyLock<Client> = LazyLock::new(Client::memory);

/// A handle to one store, on which semaphores, locks and pools are declared.
///
/// Clones are the same client.
///
/// All builders follow one rule. `build()` makes a handle and sends nothing. `open().await` opens a client. Everything
/// else is awaited itself: an acquire, the query [`Stats`], a [`Pause`](crate::Pause), a [`Drain`](crate::Drain).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let client = Client::memory();
/// let api = client.semaphore("api", 5).build()?;
/// let permit = api.acquire().await?;
///
/// let stats = client.stats().await?;
/// assert_eq!((&*stats[0].name, stats[0].held, stats[0].capacity), ("api", 1, 5));
///
/// drop(permit);
/// client.close().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    engine: Arc<Engine>,
}

impl Client {
    /// Creates a client in memory.
    ///
    /// Its permits are shared by the tasks and threads of this process that use the client or a
    /// clone of it. Another `Client::memory()` shares nothing with it.
    #[must_use]
    pub fn memory() -> Self {
        Self::in_memory(Settings::default(), Clock::default())
    }

    /// Opens a client on the store that the URL names:
    ///
    /// - `memory:` for a client in memory
    /// - `sqlite:PATH` for a file on this host
    /// - `redis://…`, `rediss://…` (TLS) and `unix://…` for a Redis server
    /// - `redis-sentinel://…` and `rediss-sentinel://…` (TLS) for a primary behind sentinels
    /// - `redis-cluster://…` and `rediss-cluster://…` (TLS) for a Redis Cluster
    ///
    /// [`StoreUrl`] parses a URL without opening the store.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::open("memory:").await?;
    /// let error = Client::open("zookeeper://somewhere").await.unwrap_err();
    /// assert!(error.to_string().starts_with("invalid store: there is no store \"zookeeper:\""));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the URL is invalid, or names a store whose Cargo feature is disabled.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`] if the store denies access, [`Error::Unusable`] if it cannot be used, or [`Error::NoRoom`] if
    ///   its disk is full.
    /// - [`Error::Stopped`] if the client's background thread cannot be started.
    ///
    /// # Cancel safety
    /// If the future is dropped, no client is created.
    #[cfg_attr(
        not(any(feature = "redis", all(feature = "local", target_os = "linux"))),
        allow(clippy::unused_async)
    )]
    pub async fn open(url: &str) -> Result<Self, Error> {
        match StoreUrl::parse(url)? {
            StoreUrl::Memory => Ok(Self::memory()),
            #[cfg(all(feature = "local", target_os = "linux"))]
            StoreUrl::File(path) => Self::local(path).await,
            #[cfg(not(all(feature = "local", target_os = "linux")))]
            StoreUrl::File(_) => Err(Error::invalid("store", without_feature("local"))),
            #[cfg(feature = "redis")]
            StoreUrl::Redis(_) => Self::redis(url).await,
        }
    }

    fn in_memory(settings: Settings, clock: Clock) -> Self {
        Self { engine: Engine::in_process(Memory::new(clock), settings) }
    }

    #[cfg(test)]
    pub(crate) fn on(backend: Arc<dyn crate::backend::RemoteBackend>, settings: Settings) -> Self {
        Self { engine: Engine::remote(backend, settings) }
    }

    /// Returns a builder for a client in memory, to change its settings.
    pub fn memory_builder() -> MemoryBuilder {
        MemoryBuilder { idle: None, clock: Clock::default() }
    }

    /// Returns the client in memory that the whole process shares.
    ///
    /// Libraries that do not know each other can share permits by name through it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let here = Client::global().semaphore("gpu", 1).build()?;
    /// let there = Client::global().semaphore("gpu", 1).build()?;
    /// let held = here.acquire().await?;
    /// assert!(there.try_acquire().await?.is_none());
    /// # drop(held);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn global() -> Self {
        GLOBAL.clone()
    }

    /// Returns a builder for a semaphore with this many permits.
    pub fn semaphore(&self, name: &str, capacity: u32) -> SemaphoreBuilder {
        SemaphoreBuilder::new(self.engine.clone(), name, capacity)
    }

    /// Returns a builder for a semaphore that limits only the [rate](SemaphoreBuilder::rate): no
    /// more than `starts` grants in any `period`, evenly spread, however many permits are held at
    /// once.
    ///
    /// A capacity that was declared elsewhere still applies, and one can be
    /// [set](crate::Semaphore::set_capacity) later.
    ///
    /// A rate counts starts, so an acquire of this semaphore with a [weight](crate::Acquire::weight) above 1 fails with
    /// [`Error::InvalidArgument`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// # let client = leasehold::Client::memory();
    /// let mails = client.rate("mails", 1000, Duration::from_secs(1)).build()?;
    /// for _ in 0..3 {
    ///     mails.acquire().await?; // a millisecond apart
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn rate(&self, name: &str, starts: u64, period: Duration) -> SemaphoreBuilder {
        self.semaphore(name, Semaphore::UNLIMITED)
            .unless_declared()
            .rate(starts, period)
            .rate_only()
    }

    /// Returns a builder for the lock with this key.
    pub fn lock(&self, key: &str) -> LockBuilder {
        self.locks().lock(key)
    }

    /// Returns a handle to the locks of this store, by key and by lock id.
    #[must_use]
    pub fn locks(&self) -> Locks {
        Locks::new(self.engine.clone())
    }

    /// Returns a handle to the pools of this store, to list them.
    #[must_use]
    pub fn pools(&self) -> Pools {
        Pools::new(self.engine.clone())
    }

    /// Returns a builder for a pool with this many leases.
    pub fn pool(&self, name: &str, capacity: u32) -> PoolBuilder {
        PoolBuilder::new(self.engine.clone(), name, capacity)
    }

    /// Returns a query for the limits, holders and waiters of semaphores.
    ///
    /// Nothing is sent before the query is awaited.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// for one in client.stats().names(["api", "db"]).unused().await? {
    ///     println!("{}: {}/{} ({:.1}%)", one.name, one.held, one.capacity, one.percent());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The names are sorted by the share of the capacity that is held, then by the number of waiters, highest first.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if a name in the query is empty, longer than 512 bytes, or contains control
    ///   characters.
    /// - [`Error::ForeignData`] if another program uses the keys of a name on Redis.
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// The query changes nothing in the store, so the future can be dropped at any time.
    pub fn stats(&self) -> Stats {
        Stats::new(self.engine.clone())
    }

    /// Returns the id of this client.
    #[must_use]
    pub fn id(&self) -> ClientId {
        self.engine.core().client
    }

    /// Returns the file descriptor whose lock proves that this client is alive, on the local store; `None` on other
    /// stores.
    ///
    /// The kernel releases the lock when the last process that has the file open has ended. If you pass the descriptor
    /// to a child process, the client counts as alive, and its permits as held, until the child has ended, too, even if
    /// this process is killed. The descriptor is closed on exec unless it is passed on, for example as the child's
    /// standard input:
    ///
    /// ```
    /// # #[cfg(all(feature = "local", target_os = "linux"))]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = std::env::temp_dir().join(format!("leasehold-doc-{}-lifeline", std::process::id()));
    /// # std::fs::create_dir(&directory)?;
    /// # let path = directory.join("store");
    /// use leasehold::Client;
    /// use std::process::Command;
    ///
    /// let client = Client::local(&path).await?;
    /// let permit = client.semaphore("builds", 2).build()?.acquire().await?;
    /// let lifeline = client.lifeline().expect("the store is on this host");
    /// let mut build = Command::new("true").stdin(lifeline.try_clone_to_owned()?).spawn()?;
    /// # build.wait()?;
    /// # permit.release().await?;
    /// # drop(client);
    /// # std::fs::remove_dir_all(directory)?;
    /// # Ok(())
    /// # }
    /// # #[cfg(not(all(feature = "local", target_os = "linux")))]
    /// # fn main() {}
    /// ```
    #[cfg(unix)]
    #[must_use]
    pub fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.engine.core().lifeline()
    }

    /// Closes the client and its clones.
    ///
    /// Waiting acquires fail with [`Error::Closed`]. Everything that is held with a guard is released, and the guards are
    /// notified of the loss. After that, everything that would acquire or extend fails with [`Error::Closed`], and so
    /// does every `build()`. Releases by id and queries still work.
    ///
    /// The function returns when the store has confirmed these releases, and those of guards that were dropped before.
    ///
    /// What was detached or acquired without a guard is not released: on Redis it expires with its lease, and so do locks
    /// and pool leases on every store. A detached permit in memory is released. On one host it ends when the last clone
    /// of the client is dropped.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store does not confirm all releases in time. They continue in the background.
    /// - The error of a release that failed, also of a guard that was dropped before: [`Error::Denied`],
    ///   [`Error::NoRoom`] or [`Error::Unusable`] if the store refused it, [`Error::ForeignData`] if another program uses
    ///   the keys on Redis, [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// # Cancel safety
    /// If the future is dropped after it was first polled, the client is closed all the same, and the releases continue
    /// in the background.
    pub async fn close(&self) -> Result<(), Error> {
        self.engine.core().close().await
    }

    /// Returns the current outage of the store, or `None` if the store can be reached.
    ///
    /// Acquires that wait for a permit, a lock or a pool lease keep waiting during an outage.
    #[must_use]
    pub fn outage(&self) -> Option<Outage> {
        let (since, error) = self.engine.core().outage()?;
        let now = Instant::now();
        let since = now.checked_sub(Moment::now().saturating_since(since)).unwrap_or(now);
        Some(Outage { since, error })
    }
}

/// An outage of the store: see [`Client::outage`].
///
/// ```
/// use leasehold::Client;
///
/// /// The answer of a readiness probe.
/// fn readiness(client: &Client) -> String {
///     match client.outage() {
///         Some(outage) => format!("no answer for {:?}: {}", outage.since.elapsed(), outage.error),
///         None => "ready".to_owned(),
///     }
/// }
///
/// assert_eq!(readiness(&Client::memory()), "ready");
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outage {
    /// When the client noticed that the store is unreachable.
    pub since: Instant,
    /// The most recent error.
    pub error: Error,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// A builder for a client in memory: see [`Client::memory_builder`].
///
/// ```
/// use leasehold::Client;
/// use std::time::Duration;
///
/// let client = Client::memory_builder().idle(Duration::from_secs(5)).build()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the builder does nothing until `build` is called"]
#[derive(Clone, Debug)]
pub struct MemoryBuilder {
    idle: Option<Duration>,
    clock: Clock,
}

impl MemoryBuilder {
    /// Sets how long a name is kept after its last use: 60 s by default.
    ///
    /// After that it takes no memory.
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }

    /// Makes the client use this clock, for tests: see [`ManualClock`].
    ///
    /// Time then passes only when [`ManualClock::advance`] is called.
    pub fn manual_clock(mut self, clock: &ManualClock) -> Self {
        self.clock = Clock::manual(clock.clone());
        self
    }

    /// Creates the client.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a duration is zero.
    pub fn build(self) -> Result<Client, Error> {
        let mut settings = Settings::default();
        if let Some(idle) = self.idle {
            settings.idle = positive("idle", idle)?;
        }
        Ok(Client::in_memory(settings, self.clock))
    }
}
