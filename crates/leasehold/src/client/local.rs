//! Clients on a file of this host.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::Client;
use crate::Error;
use crate::backend::local::{Local, LocalSettings};
use crate::clock::Span;
use crate::engine::{Engine, Settings};
use crate::name::{claim_time, positive};

impl Client {
    /// Opens a client on a file of this host.
    ///
    /// Its permits are shared by all processes of this user that use the same file. No server is
    /// needed: the file is an SQLite database. If it does not exist, it is created. Its directory
    /// must exist ([`LocalBuilder::create_directories`]), so that a mistyped path is an error.
    ///
    /// This store is available on Linux only. It behaves like Redis, but permits need no renewal, because the kernel
    /// reports dead processes: the next waiter is granted the permit within 250 ms. docs/guarantees.md describes the
    /// other differences.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = std::env::temp_dir().join(format!("leasehold-doc-{}", std::process::id()));
    /// # std::fs::create_dir(&directory)?;
    /// use leasehold::Client;
    ///
    /// let path = directory.join("store");
    /// let (here, there) = (Client::local(&path).await?, Client::local(&path).await?);
    /// let permit = here.semaphore("builds", 1).build()?.acquire().await?;
    /// assert!(there.semaphore("builds", 1).build()?.try_acquire().await?.is_none());
    /// permit.release().await?;
    /// assert!(there.semaphore("builds", 1).build()?.try_acquire().await?.is_some());
    /// # std::fs::remove_dir_all(directory)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if there can be no file at this path, for example because its directory does not
    ///   exist.
    /// - [`Error::Denied`] if the file cannot be read or written, or belongs to another user.
    /// - [`Error::Unusable`] if the file belongs to another program, is damaged, was created by a newer version, is on a
    ///   network file system, or can be read or written by other users.
    /// - [`Error::NoRoom`] if the disk is full.
    /// - [`Error::Unavailable`] if the file cannot be opened within 5 s ([`LocalBuilder::answer_timeout`]), for example
    ///   because another process is stopped in the middle of a transaction.
    /// - [`Error::Stopped`] if the client's background thread cannot be started.
    ///
    /// # Cancel safety
    /// If the future is dropped, no client is created. Dropping it never blocks, because the file is opened on a
    /// separate thread.
    pub async fn local(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::local_builder(path).open().await
    }

    /// Returns a builder for a client on a file of this host, to change its settings.
    pub fn local_builder(path: impl AsRef<Path>) -> LocalBuilder {
        LocalBuilder::new(path.as_ref())
    }
}

/// A builder for a client on a file of this host: see [`Client::local_builder`].
///
/// ```
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// async fn open() -> Result<Client, Error> {
///     let builder = Client::local_builder("/var/lib/builds/leases");
///     builder.claim_within(Duration::from_secs(1)).open().await
/// }
/// ```
#[must_use = "the builder does nothing until `open` is awaited"]
#[derive(Clone, Debug)]
pub struct LocalBuilder {
    store: LocalSettings,
    claim_within: Duration,
}

impl LocalBuilder {
    fn new(path: &Path) -> Self {
        let (claim_within, answer_timeout) = (Duration::from_secs(5), Duration::from_secs(5));
        let store = LocalSettings {
            path: path.to_owned(),
            answer_timeout,
            confirm_within: Span::from_duration(claim_within),
            create_directories: false,
            read_only: false,
        };
        Self { store, claim_within }
    }

    /// Sets how long a waiter of another client has to claim a permit that this client grants to
    /// it: 5 s by default.
    ///
    /// If a process is stopped just when its turn comes, the waiters behind it are delayed by this
    /// time. The minimum is 1 s, because the time applies to the other clients.
    pub fn claim_within(mut self, limit: Duration) -> Self {
        self.claim_within = limit;
        self
    }

    /// Sets how long the client waits for an answer from the store: 5 s by default.
    ///
    /// After that, opening, a try, a release or a query fails with [`Error::Unavailable`]. This
    /// happens while another process is stopped in the middle of a transaction, or while the disk
    /// hangs. Waiting for a permit or a lock has no such limit.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.store.answer_timeout = timeout;
        self
    }

    /// Creates the parent directories that do not exist, with the mode 0700.
    ///
    /// By default the directory of the file must exist.
    pub fn create_directories(mut self) -> Self {
        self.store.create_directories = true;
        self
    }

    /// Makes the client read-only.
    ///
    /// It can fetch statistics, and look up locks with [`Locks::lookup`](crate::Locks::lookup) and
    /// similar functions. Everything else fails with [`Error::Denied`]. The client writes nothing,
    /// so it works on a full disk and on a read-only file system. The store must exist and must
    /// have been used since the machine was booted.
    pub fn read_only(mut self) -> Self {
        self.store.read_only = true;
        self
    }

    /// Opens the store.
    ///
    /// # Errors
    /// The same as for [`Client::local`], and [`Error::InvalidArgument`] if the path is empty, a duration is
    /// zero, or `claim_within` is less than a second.
    ///
    /// # Cancel safety
    /// If the future is dropped, no client is created.
    pub async fn open(self) -> Result<Client, Error> {
        let Self { mut store, claim_within } = self;
        if store.path.as_os_str() == OsStr::new("") {
            return Err(Error::invalid("store", "its path is empty: give the path of a file"));
        }
        store.confirm_within = claim_time("claim_within", claim_within)?;
        let answer_timeout = positive("answer_timeout", store.answer_timeout)?;
        let settings = Settings { answer_timeout, ..Settings::default() };
        let local = Arc::new(Local::new(store));
        let client = Client { engine: Engine::remote(local.clone(), settings) };
        client.engine.core().run(local.opened()).await?;
        Ok(client)
    }
}
