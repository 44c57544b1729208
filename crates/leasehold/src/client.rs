//! A client: one engine and the store that it uses.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use crate::backend::memory::Memory;
use crate::clock::Moment;
use crate::engine::{Engine, Settings};
use crate::lock::{LockBuilder, Locks};
use crate::name::positive;
use crate::pool::{PoolBuilder, Pools};
use crate::semaphore::SemaphoreBuilder;
use crate::stats::Stats;
use crate::{ClientId, Error};

#[cfg(all(feature = "local", target_os = "linux"))]
mod local;
#[cfg(feature = "redis")]
mod redis;
#[cfg(all(feature = "local", target_os = "linux"))]
pub use local::LocalBuilder;
#[cfg(feature = "redis")]
pub use redis::RedisBuilder;

/// The stores that there are.
const EXPECTED: &str = "expected memory:, sqlite:/path/to/a/file or redis://host:port";

static GLOBAL: LazyLock<Client> = LazyLock::new(Client::memory);

/// Where permits come from. Clones are the same client.
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
/// let stats = client.stats().fetch().await?;
/// assert_eq!((stats[0].name(), stats[0].held(), stats[0].capacity()), ("api", 1, 5));
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
    /// A client whose permits are shared by the tasks and threads of this process that use it, or a
    /// clone of it. Another `Client::memory()` shares nothing with it.
    #[must_use]
    pub fn memory() -> Self {
        Self::in_memory(Settings::default())
    }

    /// A client on whatever store the URL names: `memory:`; `sqlite:PATH` for a file on this host; `redis://…`,
    /// `rediss://…` and `unix://…` for Redis.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    ///
    /// let client = Client::open("memory:").await?;
    /// let error = Client::open("zookeeper://somewhere").await.unwrap_err();
    /// assert!(error.to_string().starts_with("invalid store: \"zookeeper:\" is not a store"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such store, or it was left out when the library was built; and what
    /// the store has to say.
    ///
    /// # Cancel safety
    /// Dropping the future makes no client.
    #[cfg_attr(
        not(any(feature = "redis", all(feature = "local", target_os = "linux"))),
        allow(clippy::unused_async)
    )]
    pub async fn open(url: &str) -> Result<Self, Error> {
        // Only the scheme is ever repeated: what follows may contain a password.
        let scheme = url.split_once(':').map(|(scheme, _)| scheme);
        match scheme {
            Some("memory") => Ok(Self::memory()),
            #[cfg(all(feature = "local", target_os = "linux"))]
            Some("sqlite") => Self::local(local::path_of(url)?).await,
            #[cfg(feature = "redis")]
            Some("redis" | "rediss" | "unix" | "valkey" | "valkeys" | "redis+unix") => {
                Self::redis(url).await
            }
            Some(scheme) => {
                let problem = format!("\"{scheme}:\" is not a store of this build");
                Err(Error::invalid("store", format!("{problem}: {EXPECTED}")))
            }
            None => Err(Error::invalid("store", format!("it is not a URL: {EXPECTED}"))),
        }
    }

    fn in_memory(settings: Settings) -> Self {
        Self { engine: Engine::in_process(Memory::new(), settings) }
    }

    #[cfg(test)]
    pub(crate) fn on(backend: Arc<dyn crate::backend::RemoteBackend>, settings: Settings) -> Self {
        Self { engine: Engine::remote(backend, settings) }
    }

    /// The same, with other settings.
    pub fn memory_builder() -> MemoryBuilder {
        MemoryBuilder::new()
    }

    /// The one client in memory that the whole process has in common, so that libraries that do not know
    /// of each other can share by name.
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

    /// Declares a semaphore with so many permits.
    pub fn semaphore(&self, name: &str, capacity: u32) -> SemaphoreBuilder {
        SemaphoreBuilder::new(self.engine.clone(), name, capacity)
    }

    /// Declares a rate without a limit of how many hold a permit at once: `starts` in any `period`, evenly spread. It is a
    /// semaphore, so that a limit can be [set](crate::Semaphore::set_capacity) later, and one that was declared elsewhere
    /// counts.
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
        self.semaphore(name, u32::MAX).unless_declared().rate(starts, period)
    }

    /// Declares a lock.
    pub fn lock(&self, key: &str) -> LockBuilder {
        self.locks().lock(key)
    }

    /// All locks, by key and by lock id.
    #[must_use]
    pub fn locks(&self) -> Locks {
        Locks::new(self.engine.clone())
    }

    /// All pools.
    #[must_use]
    pub fn pools(&self) -> Pools {
        Pools::new(self.engine.clone())
    }

    /// Declares a pool with so many leases.
    pub fn pool(&self, name: &str, capacity: u32) -> PoolBuilder {
        PoolBuilder::new(self.engine.clone(), name, capacity)
    }

    /// Asks what is held and who waits.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// for one in client.stats().names(["api", "db"]).unused().fetch().await? {
    ///     println!("{}: {}/{} ({:.1}%)", one.name(), one.held(), one.capacity(), one.percent());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats(&self) -> Stats {
        Stats::new(self.engine.clone())
    }

    /// What tells this client from every other.
    #[must_use]
    pub fn id(&self) -> ClientId {
        self.engine.core().client
    }

    /// What this client counts as alive by, on a store that is kept on one host; `None` elsewhere.
    ///
    /// It is the descriptor of a file that the client holds locked. The kernel lets go of the lock when the last process that
    /// has it open is gone: pass it to a child, and the client counts as alive, and its permits as held, until the child is
    /// gone too, even if this process is killed. It is closed on exec unless it is passed on, for example as a child's
    /// standard input:
    ///
    /// ```
    /// # #[cfg(all(feature = "local", target_os = "linux"))]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = std::env::temp_dir().join(format!("leasehold-doc-{}-lifeline", std::process::id()));
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

    /// Ends the client and its clones: whoever waits is told [`Error::Closed`], whatever is still held is
    /// released and its guards are told that it is lost, and then nothing new can be acquired. Returns
    /// when the store has been told of all that, and of whatever was dropped before. What was acquired without a guard, or
    /// detached from it, is not released; but for permits, which end with their client.
    ///
    /// # Errors
    /// What the store has to say.
    ///
    /// # Cancel safety
    /// The closing goes on if the future is dropped after it was first polled.
    pub async fn close(&self) -> Result<(), Error> {
        self.engine.core().close().await
    }

    /// The outage of the store, if it cannot be reached now. Whoever waits for a permit or a lock goes on waiting.
    #[must_use]
    pub fn outage(&self) -> Option<Outage> {
        let (since, error) = self.engine.core().outage()?;
        let now = Instant::now();
        let since = now.checked_sub(Moment::now().saturating_since(since)).unwrap_or(now);
        Some(Outage { since, error })
    }
}

/// A store that cannot be reached: see [`Client::outage`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outage {
    /// When it was noticed.
    pub since: Instant,
    /// What was seen last.
    pub error: Error,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// A client in memory, with other settings: see [`Client::memory_builder`].
///
/// ```
/// use leasehold::Client;
/// use std::time::{Duration, Instant};
///
/// let client = Client::memory_builder().idle(Duration::from_secs(5)).build()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "nothing is made until it is built"]
#[derive(Clone, Debug)]
pub struct MemoryBuilder {
    idle: Option<Duration>,
}

impl MemoryBuilder {
    fn new() -> Self {
        Self { idle: None }
    }

    /// How long a name that nobody uses is kept: 60 s by default. Then it costs nothing any more.
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }

    /// The client.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a duration of zero.
    pub fn build(self) -> Result<Client, Error> {
        let mut settings = Settings::default();
        if let Some(idle) = self.idle {
            settings.idle = positive("idle", idle)?;
        }
        Ok(Client::in_memory(settings))
    }
}
