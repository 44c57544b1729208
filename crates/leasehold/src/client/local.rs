//! A client on a file of this host.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::Client;
use crate::Error;
use crate::backend::local::{Local, LocalSettings};
use crate::engine::{Engine, Settings};
use crate::name::positive;

/// What follows `sqlite:` in a URL.
pub(super) fn path_of(url: &str) -> Result<&Path, Error> {
    let expected = "expected sqlite:/path/to/a/file, or sqlite:file for one in this directory";
    let rest = url.strip_prefix("sqlite:").unwrap_or(url);
    let path = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        Some(_) => {
            let problem = "sqlite:// names a host, and a file is on this one";
            return Err(Error::invalid("store", format!("{problem}: {expected}")));
        }
        None => rest,
    };
    if path == ":memory:" {
        return Err(Error::invalid("store", "a store in memory is memory:"));
    }
    if path.is_empty() {
        return Err(Error::invalid("store", format!("it has no path: {expected}")));
    }
    Ok(Path::new(path))
}

impl Client {
    /// A client whose permits are shared by all processes of this host, of this user, that use the same file. No server is
    /// needed: the file is an SQLite database, and is made if it is not there, together with the directories above it.
    ///
    /// Only on Linux. Everything else is as on Redis, but there are no heartbeats: the kernel tells who is dead, and within
    /// 250 ms the next has his permit. See docs/guarantees.md for the rest.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = std::env::temp_dir().join(format!("leasehold-doc-{}", std::process::id()));
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
    /// [`Error::InvalidArgument`] if the path cannot be a store's: it is another program's file, or on a network file system;
    /// [`Error::Refused`] if it may not be read or written, or others may do so, if it was made by a newer version, is
    /// damaged, or the disk is full; [`Error::Unavailable`] if it cannot be opened within 5 s
    /// ([`LocalBuilder::answer_timeout`]), because another process is stopped in the middle of a transaction.
    ///
    /// # Cancel safety
    /// Dropping the future makes no client, and returns at once: the file is opened on a thread of its own.
    pub async fn local(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::local_builder(path).open().await
    }

    /// The same, with other settings than the default ones.
    pub fn local_builder(path: impl AsRef<Path>) -> LocalBuilder {
        LocalBuilder::new(path.as_ref())
    }
}

/// A client on a file of this host, with other settings: see [`Client::local_builder`].
///
/// ```
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// async fn open() -> Result<Client, Error> {
///     let builder = Client::local_builder("/var/lib/builds/leases");
///     builder.confirm_within(Duration::from_secs(1)).open().await
/// }
/// ```
#[must_use = "nothing is opened until it is told to"]
#[derive(Clone, Debug)]
pub struct LocalBuilder {
    path: PathBuf,
    confirm_within: Duration,
    answer_timeout: Duration,
}

impl LocalBuilder {
    fn new(path: &Path) -> Self {
        let (confirm_within, answer_timeout) = (Duration::from_secs(5), Duration::from_secs(5));
        Self { path: path.to_owned(), confirm_within, answer_timeout }
    }

    /// How long a waiter of another client has to claim a permit that we hand to it: 5 s by default. It is what a process
    /// that is stopped just when its turn has come costs the others.
    pub fn confirm_within(mut self, limit: Duration) -> Self {
        self.confirm_within = limit;
        self
    }

    /// How long the store may be silent: 5 s by default. Opening, a try, a release or a question fails with
    /// [`Error::Unavailable`] when it was not answered for that long. That happens while another process is stopped in the
    /// middle of a transaction, or the disk hangs. Waiting for a permit or a lock has no such limit.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// Opens the store.
    ///
    /// # Errors
    /// As for [`Client::local`], and [`Error::InvalidArgument`] for settings that make no sense.
    ///
    /// # Cancel safety
    /// Dropping the future makes no client.
    pub async fn open(self) -> Result<Client, Error> {
        if self.path.as_os_str() == OsStr::new("") {
            return Err(Error::invalid("store", "its path is empty: give the path of a file"));
        }
        let confirm_within = positive("confirm_within", self.confirm_within)?;
        let answer_timeout = positive("answer_timeout", self.answer_timeout)?;
        let path = self.path;
        let local = LocalSettings { path, answer_timeout: self.answer_timeout, confirm_within };
        let local = Arc::new(Local::new(local));
        let settings = Settings { answer_timeout, ..Settings::default() };
        let client = Client { engine: Engine::remote(local.clone(), settings) };
        client.engine.core().run(local.opened()).await?;
        Ok(client)
    }
}
