//! The store on one host: the machine in SQLite, in one file that any number of processes share.
//!
//! - [`location`]: the file and the directory beside it; [`inspect`]: the checks of their kind, owner and mode.
//! - [`schema`]: the tables in the file, and the store's clock.
//! - [`log`]: detects a damaged write-ahead log.
//! - [`lifeline`]: how clients find out whether another client is alive, and how they wake it.
//! - [`database`]: one client's connection and its transactions.
//! - [`worker`]: the thread that runs the transactions; [`read_only`]: a client that writes nothing.
//! - [`semaphores`], [`locks`], [`pools`]: the rows of the machines, in SQL; [`stats`]: queries.
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

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::{
    Answer, Answers, BoxFuture, Destination, Event, Part, Profile, RemoteBackend, Report, threads,
};
use crate::backend::TimeAuthority;
use crate::callbacks::event;
use crate::clock::{Moment, Span, Time};
use crate::machine::Reply;
use crate::machine::lock::Record;
use crate::machine::pool::PoolQuery;
use crate::machine::{Command, Effects, Outcome, Steered};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error};

mod database;
mod errors;
mod inspect;
mod lifeline;
mod location;
mod locks;
mod log;
mod pools;
mod read_only;
mod schema;
mod semaphores;
mod stats;
mod worker;

use database::{Database, Reader, Surroundings};
use lifeline::WakeUps;
pub(crate) use read_only::ReadOnly;
use semaphores::{Applied, Call};
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
}

/// The store of one client.
pub(crate) struct Local {
    settings: LocalSettings,
    address: String,
    worker: Arc<Worker>,
}

impl Local {
    pub(crate) fn new(settings: LocalSettings) -> Self {
        let address = settings.path.display().to_string();
        Self { settings, address, worker: Arc::default() }
    }

    /// Waits until the store is open. Fails with the reason if it cannot be opened.
    pub(crate) fn opened(&self) -> BoxFuture<()> {
        self.bounded("opening", |_| Ok(()))
    }

    /// Runs a short query or change on the worker, bounded by the answer time-out.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> BoxFuture<T> {
        self.bounded("request to", question)
    }

    /// Runs a query that may take long, on its own connection and thread, so that no command waits for it.
    fn read<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Reader) -> Result<T, Error> + Send + 'static,
    ) -> BoxFuture<T> {
        let (limit, what) = (self.settings.answer_timeout, format!("request to {}", self.address));
        let reader = self.worker.run(|store| Ok(store.reader()));
        Box::pin(async move {
            let reading = async {
                let reader = reader.await?;
                threads::run("leasehold-stats", move || question(&reader)).await?
            };
            let read = tokio::time::timeout(limit, reading).await;
            read.unwrap_or_else(|_| Err(Error::unavailable(what, true, None)))
        })
    }

    /// `what` names the attempt in the error, as in "opening".
    fn bounded<T: Send + 'static>(
        &self,
        what: &str,
        question: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> BoxFuture<T> {
        let (limit, what) = (self.settings.answer_timeout, format!("{what} {}", self.address));
        let answer = self.worker.run(question);
        Box::pin(async move {
            let answer = tokio::time::timeout(limit, answer).await;
            answer.unwrap_or_else(|_| Err(Error::unavailable(what, true, None)))
        })
    }
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
        self.worker.start(self.settings.clone(), client, socket);
        // A file needs no connection. If it cannot be used, the first request fails with the reason.
        report(Event::Connected {
            to: Destination::ONLY,
            again: false,
            other: false,
            stragglers: false,
        });
        tokio::spawn(listen(bound, Arc::downgrade(&self.worker), report));
    }

    fn apply(&self, _to: Destination, request: &Arc<[Part]>) -> BoxFuture<Answers> {
        let request = request.clone();
        self.worker.run(move |store| apply(store, &request))
    }

    fn position(&self, name: &Name, id: AcquisitionId) -> BoxFuture<Option<usize>> {
        let name = name.clone();
        self.ask(move |store| store.read(|tx, _, _| semaphores::position(tx, &name, id)))
    }

    fn steer(&self, name: &Name, steer: Command) -> BoxFuture<Steered> {
        let name = name.clone();
        self.ask(move |store| change_limits(store, &name, steer))
    }

    fn stats(&self, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        self.read(move |store| stats::fetch(store, &query))
    }

    fn list_locks(&self, limit: usize) -> BoxFuture<Vec<Record>> {
        self.read(move |store| locks::list(store, limit))
    }

    fn list_pools(&self, query: PoolQuery) -> BoxFuture<Vec<PoolStats>> {
        self.read(move |store| {
            store.read(|tx, now, _| {
                let pools = pools::list(tx, &query)?.into_iter();
                Ok(pools.map(|pool| PoolStats::of(pool, now)).collect())
            })
        })
    }

    fn list_clients(&self, limit: usize) -> BoxFuture<Vec<ClientInfo>> {
        self.read(move |store| stats::clients(store, limit))
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.worker.lifeline()
    }
}

/// The delay before the next attempt, if the store did not answer.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Calls [`look`] after every wake-up, until the client is dropped.
async fn listen(bound: oneshot::Receiver<WakeUps>, worker: Weak<Worker>, report: Report) {
    let Ok(socket) = bound.await else { return };
    let socket = match socket.try_map(tokio::net::UnixDatagram::from_std) {
        Ok(socket) => socket,
        Err(error) => {
            return event!(warn, %error, "this client cannot receive wake-ups; it will poll");
        }
    };
    while socket.readable().await.is_ok() {
        // Drain the socket first: a wake-up that arrives during the look is then read afterwards.
        while socket.try_recv(&mut [0]).is_ok() {}
        loop {
            let Some(worker) = worker.upgrade() else { return };
            let looked = worker.run(look);
            drop(worker);
            match looked.await {
                Ok(found) => break found.into_iter().for_each(&*report),
                // Retry, because the wake-up is not repeated.
                Err(error) => event!(debug, %error, "woken, but the store could not be read"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Reads what happened to this client, because a wake-up carries no content. Claims the permits that it was granted.
fn look(store: &mut Database) -> Result<Vec<Event>, Error> {
    let (client, asked) = (store.client, Moment::now());
    let (granted, evicted, released, tokens) = store.write(|tx, now, around| {
        let granted = semaphores::claim(tx, client, now)?;
        let tokens = semaphores::tokens(tx, client, now, around)?;
        let tokens: Vec<_> = tokens.into_iter().map(|(name, at)| (name, at - now)).collect();
        let evicted = semaphores::take_evicted(tx, client)?;
        Ok((granted, evicted, locks::take_released(tx, client)?, tokens))
    })?;
    let mut found = Vec::new();
    for (name, id, held) in granted {
        found.push(Event::Granted(Name::new("name", &name)?, id, Some((held, asked))));
    }
    for (name, after) in tokens {
        found.push(Event::Token(Name::new("name", &name)?, after));
    }
    for (name, id) in evicted {
        found.push(Event::Evicted(Name::new("name", &name)?, id));
    }
    for key in released {
        found.push(Event::Unlocked(Name::normalised("key", &key)?));
    }
    Ok(found)
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
    // A query usually has nothing to write, and then it does not need the write lock.
    if request.iter().all(only_asks)
        && !store.should_test_write_lock()
        && let Some(answers) = ask(store, request)?
    {
        return Ok(answers);
    }
    let client = (store.client, store.settings.confirm_within);
    let done =
        store.write(|tx, now, around| apply_parts(tx, now, around, client, request, false))?;
    for applied in &done.applied {
        store.follow_up(applied);
    }
    store.wake(&done.unlocked);
    Ok(done.answers)
}

/// Answers a request that consists of queries only. Returns `None` if something has to be written.
fn ask(store: &mut Database, request: &[Part]) -> Result<Option<Answers>, Error> {
    let client = (store.client, store.settings.confirm_within);
    store.read(|tx, now, around| match apply_parts(tx, now, around, client, request, true) {
        Err(rusqlite::Error::InvalidQuery) => Ok(None),
        done => done.map(|done| Some(done.answers)),
    })
}

/// The result of a request, in one transaction.
#[derive(Default)]
struct Done {
    answers: Answers,
    applied: Vec<Applied>,
    /// The clients that wait for a lock that was released.
    unlocked: Vec<ClientId>,
}

fn apply_parts(
    tx: &Connection,
    now: Time,
    around: &Surroundings<'_>,
    (client, confirm_within): (ClientId, Span),
    request: &[Part],
    only_reads: bool,
) -> rusqlite::Result<Done> {
    let mut done = Done::default();
    if !only_reads && request.iter().any(|part| matches!(part, Part::Lock(_))) {
        done.unlocked = locks::remove_expired(tx, now)?;
    }
    for part in request {
        done.answers.push(match part {
            Part::Semaphore { name, commands, .. } => {
                let call = Call { from: Some(client), now, confirm_within, peers: around };
                let applied = semaphores::apply(tx, name, commands, &call, only_reads)?;
                let reply = reply(&applied, now);
                done.applied.push(applied);
                Ok(Answer::Semaphore(reply))
            }
            Part::Lock(command) => {
                let outcome = locks::apply(tx, command, client, now, &mut done.unlocked)?;
                Ok(Answer::Lock(outcome))
            }
            Part::Pool(command) => Ok(Answer::Pool(pools::apply(tx, command, now)?)),
        });
    }
    Ok(done)
}

/// Changes the limits of a name. The sender is no client, so this client's waiters are woken like all others.
fn change_limits(store: &mut Database, name: &Name, steer: Command) -> Result<Steered, Error> {
    let (from, confirm_within) = (None, store.settings.confirm_within);
    let mut applied = store.write(|tx, now, around| {
        let call = Call { from, now, confirm_within, peers: around };
        semaphores::apply(tx, name, &[steer], &call, false)
    })?;
    store.follow_up(&applied);
    match applied.outcomes.pop() {
        Some(Outcome::Steered(steered)) => Ok(steered),
        other => {
            Err(Error::internal(format!("unexpected answer to a change of limits: {other:?}")))
        }
    }
}

/// Whether a part can usually be answered without writing.
fn only_asks(part: &Part) -> bool {
    match part {
        Part::Semaphore { commands, .. } => {
            let asks =
                |command: &Command| matches!(command, Command::Renew { .. } | Command::Sweep);
            commands.iter().all(asks)
        }
        Part::Lock(command) => locks::only_asks(command),
        Part::Pool(_) => false,
    }
}

fn reply(applied: &Applied, now: Time) -> Reply {
    let expiry = applied.next_expiry.map(|at| at - now);
    let watch = applied.watches.then_some(semaphores::WATCH);
    let granted = applied.granted.iter().map(|(id, held)| (*id, *held, ())).collect();
    Reply {
        outcomes: applied.outcomes.clone(),
        effects: Effects { granted, ..Effects::default() },
        next_expiry: expiry.into_iter().chain(watch).min(),
        next_token: applied.next_token.map(|at| at - now),
        foreign: false,
    }
}
