//! The store on one host: the machine in SQLite, in one file that any number of processes share.
//!
//! - [`location`]: the file and the directory beside it; [`inspect`]: the checks of their kind, owner and mode.
//! - [`schema`]: the tables in the file, and the store's clock.
//! - [`log`]: detects a damaged write-ahead log.
//! - [`lifeline`]: how clients find out whether another client is alive, and how they wake it.
//! - [`database`]: one client's connection and its transactions.
//! - [`worker`]: the thread that runs the transactions.
//! - [`semaphores`], [`locks`], [`pools`]: the rows of the machines, in SQL; [`stats`]: queries; [`columns`]: types.
//! - [`errors`]: maps errors of SQLite and the operating system to [`Error`].
//!
//! # Why it is safe
//!
//! Every transition is one `BEGIN IMMEDIATE` transaction. So it is atomic even if the process dies in the middle of it,
//! and transitions of all processes happen one after another. Writers first take a lock that the kernel hands over at
//! once (see [`location`]). That lock keeps writers prompt; correctness does not depend on it.
//!
//! The store's clock counts the time since the machine was booted. It continues during suspend and cannot be set. The
//! file also records the kernel's boot id. If the boot id differs, all processes in the file are dead: their rows are
//! removed, and fences continue. All processes read the same clock, so a holder's own TTL ends before the store's.
//!
//! The kernel reports whether a client is alive (see [`lifeline`]), so there are no heartbeats. A stopped holder keeps
//! its permit. A dead holder loses it within 250 ms. Neither case costs any work in the meantime.
//!
//! A release writes the grant and then wakes the client that was granted the permit. If the wake-up is lost, the
//! client's periodic query finds the permit within a second.
//!
//! # Read-only clients
//!
//! A read-only client writes nothing at all, so it works on a full disk and on a read-only file system: it has no
//! lifeline, no worker and no row in the store, and it opens the database anew for every query.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;

use super::{
    Answer, Answers, BoxFuture, Destination, Event, Part, Profile, RemoteBackend, Report, threads,
};
use crate::backend::TimeAuthority;
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::machine::lock::Record;
use crate::machine::pool::PoolQuery;
use crate::machine::{Command, LimitsChanged, Outcome};
use crate::name::Name;
use crate::stats::{PoolStats, Query, SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error};

mod columns;
mod database;
mod errors;
mod inspect;
mod lifeline;
mod location;
mod locks;
mod log;
mod pools;
mod schema;
mod semaphores;
mod stats;
mod worker;

use database::{Database, Reader, Transaction};
use lifeline::WakeUps;
use worker::Worker;

/// The path of the store, and the limits that its client applies.
#[derive(Clone, Debug)]
pub(crate) struct LocalSettings {
    pub(crate) path: PathBuf,
    /// The longest time that a query may take.
    pub(crate) answer_timeout: Duration,
    pub(crate) confirm_within: Span,
    /// Whether to create the parent directories that do not exist.
    pub(crate) create_directories: bool,
    pub(crate) read_only: bool,
}

/// The store of one client.
pub(crate) struct Local {
    settings: LocalSettings,
    address: String,
    /// Not started if the client is read-only.
    worker: Arc<Worker>,
}

impl Local {
    pub(crate) fn new(settings: LocalSettings) -> Self {
        let address = settings.path.display().to_string();
        Self { settings, address, worker: Arc::default() }
    }

    /// Waits until the store is open. Fails with the reason if it cannot be opened.
    pub(crate) fn opened(&self) -> BoxFuture<()> {
        if self.settings.read_only {
            return self.read(|_| Ok(()));
        }
        self.bounded("opening", self.worker.run(|_| Ok(())))
    }

    /// Runs a short query or change on the worker, bounded by the answer time-out.
    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> BoxFuture<T> {
        if self.settings.read_only {
            return Box::pin(std::future::ready(Err(is_read_only())));
        }
        self.bounded("request to", self.worker.run(work))
    }

    /// Runs a query that may take long, on its own connection and thread, so that no command waits for it.
    fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> BoxFuture<T> {
        let settings = self.settings.clone();
        if settings.read_only {
            let read = move || Reader::open(settings)?.read(query);
            let read = async { threads::run("leasehold-stats", read).await? };
            return self.bounded("reading", read);
        }
        let reader = self.worker.run(|store| Ok(store.reader()));
        let read = async {
            let reader = reader.await?;
            threads::run("leasehold-stats", move || reader.read(query)).await?
        };
        self.bounded("request to", read)
    }

    /// Waits for an answer, at most the answer time-out. `what` names the attempt in the error, as in "opening".
    fn bounded<T: Send + 'static>(
        &self,
        what: &str,
        answer: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> BoxFuture<T> {
        let (limit, what) = (self.settings.answer_timeout, format!("{what} {}", self.address));
        Box::pin(async move {
            let answer = tokio::time::timeout(limit, answer).await;
            answer.unwrap_or_else(|_| Err(Error::unavailable(what, true, None)))
        })
    }
}

fn is_read_only() -> Error {
    let what = "this client is read-only: to make changes, open a client without read_only";
    Error::Denied { problem: what.to_owned() }
}

impl RemoteBackend for Local {
    fn profile(&self) -> Profile {
        Profile { kind: "local", needs_renewals: false, time_authority: TimeAuthority::Host }
    }

    fn address(&self) -> &str {
        &self.address
    }

    fn start(&self, client: ClientId, report: Report) {
        let (socket, bound) = oneshot::channel();
        if !self.settings.read_only {
            self.worker.start(self.settings.clone(), client, socket);
        }
        // A file needs no connection. If it cannot be used, the first request fails with the reason.
        report(Event::Connected {
            to: Destination::ONLY,
            again: false,
            other: false,
            stragglers: false,
        });
        if !self.settings.read_only {
            tokio::spawn(listen(bound, Arc::downgrade(&self.worker), report));
        }
    }

    fn apply(&self, _to: Destination, request: &Arc<[Part]>) -> BoxFuture<Answers> {
        let request = request.clone();
        if self.settings.read_only {
            return self.read(move |tx| answer_lock_queries(tx, &request));
        }
        self.worker.run(move |store| apply(store, &request))
    }

    fn position(&self, name: &Name, id: AcquisitionId) -> BoxFuture<Option<usize>> {
        let name = name.clone();
        self.call(move |store| store.read(|tx| semaphores::position(tx, &name, id)))
    }

    fn limits(&self, name: &Name) -> BoxFuture<SemaphoreLimits> {
        let name = name.clone();
        let query = move |tx: &Transaction<'_>| semaphores::limits(tx, &name);
        if self.settings.read_only {
            return self.read(query);
        }
        self.call(move |store| store.read(query))
    }

    fn change_limits(&self, name: &Name, change: Command) -> BoxFuture<LimitsChanged> {
        let name = name.clone();
        self.call(move |store| change_limits(store, &name, change))
    }

    fn stats(&self, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        self.read(move |tx| stats::fetch(tx, &query))
    }

    fn list_locks(&self, limit: usize) -> BoxFuture<Vec<Record>> {
        self.read(move |tx| locks::list(tx, limit))
    }

    fn list_pools(&self, query: PoolQuery) -> BoxFuture<Vec<PoolStats>> {
        self.read(move |tx| {
            let pools = pools::list(tx, &query)?.into_iter();
            Ok(pools.map(|pool| PoolStats::of(pool, tx.now)).collect())
        })
    }

    fn list_clients(&self, limit: usize) -> BoxFuture<Vec<ClientInfo>> {
        self.read(move |tx| stats::clients(tx, limit))
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.worker.lifeline()
    }
}

/// The delay before the next attempt, if the store did not answer.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// Calls [`read_events`] after every wake-up, until the client is dropped.
async fn listen(bound: oneshot::Receiver<WakeUps>, worker: Weak<Worker>, report: Report) {
    let Ok(socket) = bound.await else { return };
    let socket = match socket.try_map(tokio::net::UnixDatagram::from_std) {
        Ok(socket) => socket,
        Err(error) => {
            return event!(warn, %error, "this client cannot receive wake-ups; it will poll");
        }
    };
    while socket.readable().await.is_ok() {
        // Drain the socket first: a wake-up that arrives while the events are read is then read afterwards.
        while socket.try_recv(&mut [0]).is_ok() {}
        loop {
            let Some(worker) = worker.upgrade() else { return };
            let events = worker.run(read_events);
            drop(worker);
            match events.await {
                Ok(events) => break events.into_iter().for_each(&*report),
                // Retry, because the wake-up is not repeated.
                Err(error) => event!(debug, %error, "woken, but the store could not be read"),
            }
            tokio::time::sleep(READ_AGAIN).await;
        }
    }
}

/// Reads what happened to this client, because a wake-up carries no content. Claims the permits that it was granted.
fn read_events(store: &mut Database) -> Result<Vec<Event>, Error> {
    let (client, sent) = (store.client, Moment::now());
    store.write(|tx| {
        let granted = semaphores::claim(tx, client)?.into_iter();
        let tokens = semaphores::tokens(tx, client)?.into_iter();
        let evicted = semaphores::take_evicted(tx, client)?.into_iter();
        let released = locks::take_released(tx, client)?.into_iter();
        let granted = granted.map(|(name, id, held)| Event::Granted(name, id, Some((held, sent))));
        let tokens = tokens.map(|(name, at)| Event::Token(name, at - tx.now));
        let evicted = evicted.map(|(name, id)| Event::Evicted(name, id));
        Ok(granted.chain(tokens).chain(evicted).chain(released.map(Event::Unlocked)).collect())
    })
}

/// Applies a request in one transaction. If a part fails for a reason that a retry cannot fix, each part is applied in
/// a transaction of its own.
fn apply(store: &mut Database, request: &[Part]) -> Result<Answers, Error> {
    match apply_together(store, request) {
        Err(error) if request.len() > 1 && !error.is_transient() => {
            let apart = request.iter().map(|part| {
                let mut answers = apply_together(store, std::slice::from_ref(part))?;
                answers.pop().unwrap_or_else(|| Err(Error::internal("a command got no answer")))
            });
            Ok(apart.collect())
        }
        answers => answers,
    }
}

fn apply_together(store: &mut Database, request: &[Part]) -> Result<Answers, Error> {
    let client = store.client;
    // A query usually has nothing to write, and then it does not need the write lock.
    if request.iter().all(is_query) && !store.should_test_write_lock() {
        let answers = store.read(|tx| match apply_parts(tx, client, request) {
            Err(rusqlite::Error::InvalidQuery) => Ok(None),
            answers => answers.map(Some),
        })?;
        if let Some(answers) = answers {
            return Ok(answers);
        }
    }
    store.write(|tx| {
        if request.iter().any(|part| matches!(part, Part::Lock(_))) {
            locks::remove_expired(tx)?;
        }
        apply_parts(tx, client, request)
    })
}

fn apply_parts(
    tx: &Transaction<'_>,
    client: ClientId,
    request: &[Part],
) -> rusqlite::Result<Answers> {
    let answer = |part: &Part| {
        Ok(Ok(match part {
            Part::Semaphore { name, commands, .. } => {
                Answer::Semaphore(semaphores::apply(tx, Some(client), name, commands)?)
            }
            Part::Lock(command) => Answer::Lock(locks::apply(tx, command, client)?),
            Part::Pool(command) => Answer::Pool(pools::apply(tx, command)?),
        }))
    };
    request.iter().map(answer).collect()
}

/// Answers a request of a read-only client.
fn answer_lock_queries(tx: &Transaction<'_>, request: &[Part]) -> rusqlite::Result<Answers> {
    let answer = |part: &Part| match part {
        Part::Lock(command) if locks::is_query(command) => {
            locks::answer(tx, command).map(|outcome| Ok(Answer::Lock(outcome)))
        }
        _ => Ok(Err(is_read_only())),
    };
    request.iter().map(answer).collect()
}

/// Changes the limits of a name. The sender is no client, so this client's waiters are woken like all others.
fn change_limits(
    store: &mut Database,
    name: &Name,
    change: Command,
) -> Result<LimitsChanged, Error> {
    let reply = store.write(|tx| semaphores::apply(tx, None, name, &[change]))?;
    match reply.outcomes[..] {
        [Outcome::LimitsChanged(changed)] => Ok(changed),
        ref outcomes => {
            Err(Error::internal(format!("unexpected answer to a change of limits: {outcomes:?}")))
        }
    }
}

/// Whether a part can usually be answered without writing.
fn is_query(part: &Part) -> bool {
    match part {
        Part::Semaphore { commands, .. } => {
            commands.iter().all(|command| matches!(command, Command::Renew { .. } | Command::Sweep))
        }
        Part::Lock(command) => locks::is_query(command),
        Part::Pool(_) => false,
    }
}
