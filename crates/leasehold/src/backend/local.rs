//! The store on one host: the machine in SQLite, in one file that any number of processes share.
//!
//! - [`location`]: the file, the directory beside it, and who may use them.
//! - [`schema`]: what is in the file, and the store's clock.
//! - [`log`]: whether SQLite's log is damaged.
//! - [`lifeline`]: who is alive, and how to wake him.
//! - [`database`]: a client's connection, and its turn.
//! - [`worker`]: the thread that it works on.
//! - [`semaphores`], [`locks`], [`pools`], [`stats`]: the transitions and questions, in SQL.
//! - [`errors`]: what SQLite and the system say, as what the caller does next.
//!
//! # Why it is safe
//!
//! Every transition is one `BEGIN IMMEDIATE` transaction, so that it happens wholly or not at all, whatever becomes of the
//! process in the middle of it, and after every other. In front of it is a lock that the kernel hands on at once (see
//! [`location`]); it keeps writers prompt, and correctness does not depend on it.
//!
//! Time is that since the machine was started, which goes on while it is suspended and cannot be set, together with the id
//! that the kernel gives to each start. If that id differs, everybody in the file is gone, and fences go on. All processes
//! read the same clock, so that a holder's own idea of its TTL ends before the store's.
//!
//! Whether a client is alive the kernel knows (see [`lifeline`]), and so there are no heartbeats: a holder that is stopped
//! keeps its permit, one that is dead loses it within 250 ms, and nothing is to be done for either in between.
//!
//! A release writes the grant, and then wakes the client that got it. Should the wake-up be lost, the client's own question
//! finds the permit within a second.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;

use super::{
    Answer, Answers, Destination, Event, Later, Part, Profile, RemoteBackend, Reply, Report,
};
use crate::clock::{Moment, Span};
use crate::engine::foreign::event;
use crate::lock::TimeAuthority;
use crate::machine::lock::Record;
use crate::machine::{Command, Effects, Outcome, Steered};
use crate::name::Name;
use crate::pool::{PoolStats, Which};
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

mod database;
mod errors;
mod lifeline;
mod location;
mod locks;
mod log;
mod pools;
mod schema;
mod semaphores;
mod stats;
mod worker;

use database::Database;
use locks::Locks;
use semaphores::{Applied, Circumstances};
use worker::Worker;

/// Where the store is, and how to behave there.
#[derive(Clone, Debug)]
pub(crate) struct LocalSettings {
    pub(crate) path: PathBuf,
    /// How long a question may take.
    pub(crate) answer_timeout: Duration,
    pub(crate) confirm_within: Span,
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

    /// Waits until the store is open, or says why it is not.
    pub(crate) fn opened(&self) -> Later<()> {
        self.bounded("opening", |_| Ok(()))
    }

    /// Asks something that changes nothing, for as long as an answer may take.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> Later<T> {
        self.bounded("asking", question)
    }

    /// `what` is tried, as in "asking".
    fn bounded<T: Send + 'static>(
        &self,
        what: &str,
        question: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> Later<T> {
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
        // The file is always there to be asked; what is wrong with it, it answers.
        report(Event::Connected { to: Destination::ONLY, again: false, stragglers: false });
        tokio::spawn(listen(bound, Arc::downgrade(&self.worker), report));
    }

    fn apply(&self, _to: Destination, request: &Arc<[Part]>) -> Later<Answers> {
        let request = request.clone();
        self.worker.run(move |store| apply(store, &request))
    }

    fn position(&self, name: &Name, id: AcquisitionId) -> Later<Option<usize>> {
        let name = name.clone();
        self.ask(move |store| store.read(|tx, _, _| semaphores::position(tx, &name, id)))
    }

    fn steer(&self, name: &Name, steer: Command) -> Later<Steered> {
        let name = name.clone();
        self.ask(move |store| change_limits(store, &name, steer))
    }

    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>> {
        self.ask(move |store| stats::fetch(store, &query))
    }

    fn list_locks(&self, limit: usize) -> Later<Vec<Record>> {
        self.ask(move |store| {
            let found = store.read(|tx, now, _| Locks::new(tx, now).list(limit))?;
            found.into_iter().map(locks::Stored::checked).collect()
        })
    }

    fn list_pools(&self, which: Which) -> Later<Vec<PoolStats>> {
        self.ask(move |store| store.read(|tx, now, _| pools::list(tx, &which, now)))
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.worker.lifeline()
    }
}

/// How soon after it did not answer.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Looks whenever somebody says so, until the client is gone.
async fn listen(bound: oneshot::Receiver<UnixDatagram>, worker: Weak<Worker>, report: Report) {
    let Ok(socket) = bound.await else { return };
    let socket = match tokio::net::UnixDatagram::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => {
            return event!(warn, %error, "nobody can wake this client: it will ask");
        }
    };
    while socket.readable().await.is_ok() {
        // Read first: what comes while we look is there to be read after that.
        while socket.try_recv(&mut [0]).is_ok() {}
        loop {
            let Some(worker) = worker.upgrade() else { return };
            let looked = worker.run(look);
            drop(worker);
            match looked.await {
                Ok(found) => break found.into_iter().for_each(&report),
                // Nobody says it again.
                Err(error) => event!(debug, %error, "woken, but the store does not say why"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// What this client would have been told, had the wake-up a content. What it was granted, it claims.
fn look(store: &mut Database) -> Result<Vec<Event>, Error> {
    let (client, asked) = (store.client, Moment::now());
    let (granted, evicted, released, tokens) = store.write(|tx, now, _| {
        let granted = semaphores::claim(tx, client, now)?;
        let tokens = semaphores::tokens(tx, client, now)?;
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

/// Applies a request in one transaction. If one part fails for a reason of its own, each is applied by itself.
fn apply(store: &mut Database, request: &[Part]) -> Result<Answers, Error> {
    match apply_together(store, request) {
        Err(error) if request.len() > 1 && !error.may_pass() => {
            let apart = request.iter().map(|part| {
                let mut answers = apply_together(store, std::slice::from_ref(part))?;
                answers.pop().unwrap_or_else(|| Err(Error::internal("a part was not answered")))
            });
            Ok(apart.collect())
        }
        answers => answers,
    }
}

fn apply_together(store: &mut Database, request: &[Part]) -> Result<Answers, Error> {
    // Mostly a question finds nothing to be done, and then nobody has to wait for a turn.
    if request.iter().all(only_asks)
        && let Some(answers) = ask(store, request)?
    {
        return Ok(answers);
    }
    let (from, confirm_within) = (Some(store.client), store.settings.confirm_within);
    let client = store.client;
    let (answers, applied, unlocked) = store.write(|tx, now, around| {
        let locks = Locks::new(tx, now);
        let mut unlocked = Vec::new();
        if request.iter().any(|part| matches!(part, Part::Lock(_))) {
            unlocked = locks.let_go()?;
        }
        let (mut answers, mut all) = (Vec::with_capacity(request.len()), Vec::new());
        for part in request {
            answers.push(match part {
                Part::Semaphore { name, commands, .. } => {
                    let (mut reach, mut is_dead) = around.senses();
                    let (reach, is_dead) = (&mut reach, &mut is_dead);
                    let mut call = Circumstances { from, now, confirm_within, reach, is_dead };
                    let applied = semaphores::apply(tx, name, commands, &mut call)?;
                    let reply = reply(&applied, now);
                    all.push(applied);
                    Ok(Answer::Semaphore(reply))
                }
                Part::Lock(command) => {
                    let (outcome, wake) = locks.apply(command, client)?;
                    unlocked.extend(wake);
                    outcome.map(Answer::Lock)
                }
                Part::Pool(command) => Ok(Answer::Pool(pools::apply(tx, command, now)?)),
            });
        }
        Ok((answers, all, unlocked))
    })?;
    for applied in &applied {
        store.follow_up(applied);
    }
    store.wake(&unlocked);
    Ok(answers)
}

/// Nobody in particular is the sender.
fn change_limits(store: &mut Database, name: &Name, steer: Command) -> Result<Steered, Error> {
    let (from, confirm_within) = (None, store.settings.confirm_within);
    let mut applied = store.write(|tx, now, around| {
        let (mut reach, mut is_dead) = around.senses();
        let (reach, is_dead) = (&mut reach, &mut is_dead);
        let mut call = Circumstances { from, now, confirm_within, reach, is_dead };
        semaphores::apply(tx, name, &[steer], &mut call)
    })?;
    store.follow_up(&applied);
    match applied.outcomes.pop() {
        Some(Outcome::Steered(steered)) => Ok(steered),
        other => Err(Error::internal(format!("a change of limits was answered {other:?}"))),
    }
}

/// Whether a part can be answered without writing, mostly.
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

/// Answers a request that only asks. None if there is something to be done.
fn ask(store: &mut Database, request: &[Part]) -> Result<Option<Answers>, Error> {
    let (from, confirm_within) = (Some(store.client), store.settings.confirm_within);
    store.read(|tx, now, around| {
        let mut answers = Vec::with_capacity(request.len());
        for part in request {
            answers.push(match part {
                Part::Semaphore { name, commands, .. } => {
                    let (mut reach, mut is_dead) = around.senses();
                    let (reach, is_dead) = (&mut reach, &mut is_dead);
                    let mut call = Circumstances { from, now, confirm_within, reach, is_dead };
                    let asked = semaphores::ask(tx, name, commands, &mut call)?;
                    let Some(asked) = asked else { return Ok(None) };
                    Ok(Answer::Semaphore(reply(&asked, now)))
                }
                Part::Lock(command) => Locks::new(tx, now).ask(command)?.map(Answer::Lock),
                Part::Pool(_) => return Ok(None),
            });
        }
        Ok(Some(answers))
    })
}

fn reply(applied: &Applied, now: crate::clock::Time) -> Reply {
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
