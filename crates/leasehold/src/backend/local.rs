//! The store on one host: the machine in SQLite, in one file that any number of processes share.
//!
//! - [`place`]: the file, the directory beside it, and who may use them.
//! - [`schema`]: what is in the file.
//! - [`lifeline`]: who is alive, and how to wake him.
//! - [`store`]: a client's connection, and its turn.
//! - [`worker`]: the thread that it works on.
//! - [`semaphores`], [`locks`], [`pools`], [`stats`]: the transitions and questions, in SQL.
//! - [`errors`]: what SQLite and the system say, as what the caller does next.
//!
//! # Why it is safe
//!
//! Every transition is one `BEGIN IMMEDIATE` transaction, so that it happens wholly or not at all, whatever becomes of the
//! process in the middle of it, and after every other. In front of it is a lock that the kernel hands on at once (see
//! [`place`]); it keeps writers prompt, and correctness does not depend on it.
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

use super::{AwayBackend, AwaySemaphore, Later, LockStore, PoolStore, Reply, WakeUp, WakeUps};
use crate::clock::Span;
use crate::machine::{Command, Effects};
use crate::name::Name;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

mod errors;
mod lifeline;
mod locks;
mod place;
mod pools;
mod schema;
mod semaphores;
mod stats;
mod store;
mod worker;

use locks::LocalLocks;
use pools::LocalPools;
use semaphores::{Applied, Call};
use store::Store;
use worker::Worker;

/// Where the store is, and how to behave there.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) path: PathBuf,
    pub(crate) confirm_within: Span,
}

/// The store of one client.
pub(crate) struct Local {
    settings: Settings,
    worker: Arc<Worker>,
}

impl Local {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { settings, worker: Arc::default() }
    }

    /// Waits until the store is open, or says why it is not.
    pub(crate) fn opened(&self) -> Later<()> {
        self.worker.run(|_| Ok(()))
    }
}

impl AwayBackend for Local {
    fn start(&self, client: ClientId, wake_ups: WakeUps) {
        let (socket, bound) = oneshot::channel();
        self.worker.start(self.settings.clone(), client, socket);
        tokio::spawn(listen(bound, Arc::downgrade(&self.worker), wake_ups));
    }

    fn semaphore(&self, name: &Name, client: ClientId) -> Arc<dyn AwaySemaphore> {
        Arc::new(LocalSemaphore { worker: self.worker.clone(), name: name.clone(), client })
    }

    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>> {
        self.worker.run(move |store| stats::fetch(store, &query))
    }

    fn locks(&self, client: ClientId) -> Arc<dyn LockStore> {
        Arc::new(LocalLocks::new(self.worker.clone(), client))
    }

    fn pools(&self) -> Arc<dyn PoolStore> {
        Arc::new(LocalPools(self.worker.clone()))
    }

    fn kind(&self) -> &'static str {
        "local"
    }

    fn is_on_this_host(&self) -> bool {
        true
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.worker.lifeline()
    }
}

/// How soon after it did not answer.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Looks whenever somebody says so, until the client is gone.
async fn listen(bound: oneshot::Receiver<UnixDatagram>, worker: Weak<Worker>, wake_ups: WakeUps) {
    let Ok(socket) = bound.await else { return };
    let socket = match tokio::net::UnixDatagram::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => {
            return tracing::warn!(%error, "nobody can wake this client: it will ask");
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
                Ok(found) => break found.into_iter().for_each(&wake_ups),
                // Nobody says it again.
                Err(error) => tracing::debug!(%error, "woken, but the store does not say why"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// What this client would have been told, had the wake-up a content.
fn look(store: &mut Store) -> Result<Vec<WakeUp>, Error> {
    let client = store.client;
    let (granted, news) = store.read(|tx, _, _| {
        let news = semaphores::any_evicted(tx, client)? || locks::any_released(tx, client)?;
        Ok((semaphores::to_claim(tx, client)?, news))
    })?;
    let mut found = Vec::new();
    for (name, id) in granted {
        found.push(WakeUp::Granted(Name::new("name", &name)?, id));
    }
    if news {
        let (evicted, released) = store.write(|tx, _, _| {
            Ok((semaphores::take_evicted(tx, client)?, locks::take_released(tx, client)?))
        })?;
        for (name, id) in evicted {
            found.push(WakeUp::Evicted(Name::new("name", &name)?, id));
        }
        for key in released {
            found.push(WakeUp::Released(Name::new("key", &key)?));
        }
    }
    Ok(found)
}

struct LocalSemaphore {
    worker: Arc<Worker>,
    name: Name,
    client: ClientId,
}

impl AwaySemaphore for LocalSemaphore {
    fn apply(&self, commands: Vec<Command>) -> Later<Reply> {
        let (name, client) = (self.name.clone(), self.client);
        self.worker.run(move |store| apply(store, client, &name, &commands))
    }

    fn position(&self, id: AcquisitionId) -> Later<Option<usize>> {
        let name = self.name.clone();
        self.worker.run(move |store| store.read(|tx, _, _| semaphores::position(tx, &name, id)))
    }
}

fn apply(
    store: &mut Store,
    client: ClientId,
    name: &Name,
    commands: &[Command],
) -> Result<Reply, Error> {
    let (from, confirm_within) = (Some(client), store.settings.confirm_within);
    let asks = |command: &Command| matches!(command, Command::Renew { .. } | Command::Sweep);
    let mut asked = None;
    if commands.iter().all(asks) {
        // Mostly there is nothing to be done, and then nobody has to wait for his turn.
        asked = store.read(|tx, now, around| {
            let (mut reach, mut is_dead) = around.senses();
            let (reach, is_dead) = (&mut reach, &mut is_dead);
            let mut call = Call { from, now, confirm_within, reach, is_dead };
            let asked = semaphores::ask(tx, name, commands, &mut call)?;
            Ok(asked.map(|asked| reply(&asked, now)))
        })?;
    }
    if let Some(reply) = asked {
        return Ok(reply);
    }
    let (applied, reply) = store.write(|tx, now, around| {
        let (mut reach, mut is_dead) = around.senses();
        let (reach, is_dead) = (&mut reach, &mut is_dead);
        let mut call = Call { from, now, confirm_within, reach, is_dead };
        let applied = semaphores::apply(tx, name, commands, &mut call)?;
        let reply = reply(&applied, now);
        Ok((applied, reply))
    })?;
    store.follow_up(&applied);
    Ok(reply)
}

fn reply(applied: &Applied, now: crate::clock::Time) -> Reply {
    let expiry = applied.next_expiry.map(|at| at - now);
    let watch = applied.watches.then_some(semaphores::WATCH);
    let granted = applied.granted.iter().map(|(id, held)| (*id, *held, ())).collect();
    Reply {
        outcomes: applied.outcomes.clone(),
        effects: Effects { granted, ..Effects::default() },
        next_expiry: expiry.into_iter().chain(watch).min(),
    }
}
