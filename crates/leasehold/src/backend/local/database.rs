//! One client's access to the store: its connection, its lifeline, and its transactions.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use super::LocalSettings;
use super::errors::{damaged_log, of_system};
use super::lifeline::{self, Clients, Lifeline, Reach, WakeUps};
use super::location::Location;
use super::schema::{self, StoreClock};
use super::semaphores::{self, Applied, Circumstances};
use crate::callbacks::event;
use crate::clock::{Span, Time};
use crate::{ClientId, Error, process};

#[cfg(test)]
mod tests;

/// The file in which the kernel publishes the id of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The log is copied back into the database when it has this many pages (4 MB).
const LOG_PAGES: i32 = 1000;
/// When the log has this many pages, an idle client copies it back. The first client to open a store reads the whole
/// log, which takes two microseconds a page.
const PAGES_TO_READ: i32 = 128;
/// How long a client must be idle before it copies such a log back.
pub(super) const IDLE: Duration = Duration::from_millis(1);

/// How long a client that waits may read only. After that, its next query takes the write lock: if another process is
/// stopped in the middle of a transaction, no permit can be released, although queries are answered.
const UNTESTED: Duration = Duration::from_secs(3);

/// How many other clients a new client checks.
const LOOKED_AT: u32 = 1000;

pub(super) struct Database {
    pub(super) client: ClientId,
    pub(super) settings: LocalSettings,
    place: Arc<Location>,
    clients: Clients,
    connection: Connection,
    clock: StoreClock,
    log_pages: Arc<AtomicI32>,
    /// Whether to copy the log back, however short it is.
    copy_back: bool,
    /// When this client last had the write lock.
    written_at: Instant,
}

impl Database {
    /// Opens the store for a new client, and removes the clients that it finds dead. Also returns the socket that wakes
    /// the client. Fails if opening takes longer than the answer time-out.
    pub(super) fn open(
        settings: LocalSettings,
        client: ClientId,
        lifeline: &OnceLock<Lifeline>,
    ) -> Result<(Self, WakeUps), Error> {
        let until = Instant::now() + settings.answer_timeout;
        let boot = &*boot()?;
        let clients = Clients::new()?;
        let log_pages = Arc::new(AtomicI32::new(0));
        let (place, opened) = Location::prepare(&settings, until, |place, found| {
            let failed = |error| place.explain("opening", error);
            let left = until.saturating_duration_since(Instant::now());
            let mut connection = schema::open(place, left.min(schema::BUSY))?;
            if found.bad_log
                && schema::last_boot(&connection).map_err(failed)?.as_deref() == Some(boot)
            {
                // The log was not damaged by a power cut. SQLite would drop transactions that others have committed.
                return Err(damaged_log(&place.log()));
            }
            let clock = schema::clock(&mut connection, boot).map_err(failed)?;
            let pages = log_pages.clone();
            let hook = move |_: &mut rusqlite::hooks::Wal, written| {
                pages.store(written, Ordering::Relaxed);
                Ok(())
            };
            connection.wal_hook(Some(hook)).map_err(failed)?;
            let immediate = TransactionBehavior::Immediate;
            let tx = connection.transaction_with_behavior(immediate).map_err(failed)?;
            lifeline::tidy(place, |client| is_known(&tx, client).unwrap_or(true));
            let (line, socket) = lifeline::enter(place, client)?;
            // The lifeline exists before the client's row does, and is removed after it.
            let _ = lifeline.set(line);
            let entered = insert_client(&tx, client, clock.now()).and_then(|()| {
                let around = Surroundings { place, clients: &clients };
                let dead = others(&tx, client)?;
                let dead = dead.into_iter().filter(|client| lifeline::is_dead(place, *client));
                let removed = remove_dead_clients(
                    &tx,
                    dead.collect(),
                    clock.now(),
                    settings.confirm_within,
                    &around,
                )?;
                tx.commit()?;
                Ok(removed)
            });
            let removed =
                entered.inspect_err(|_| lifeline::remove_files(place, client)).map_err(failed)?;
            connection.busy_timeout(schema::BUSY).map_err(failed)?;
            Ok((connection, clock, socket, removed))
        })?;
        let (connection, clock, socket, removed) = opened;
        let store = Self {
            client,
            settings,
            place: Arc::new(place),
            clients,
            connection,
            clock,
            log_pages,
            copy_back: false,
            written_at: Instant::now(),
        };
        store.follow_up(&removed);
        Ok((store, socket))
    }

    /// Runs a read-only transaction. It waits for no writer.
    pub(super) fn read<T>(
        &mut self,
        work: impl FnOnce(&Connection, Time, &mut Surroundings<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        read(&self.place, &self.clients, &mut self.connection, self.clock.now(), work)
    }

    /// Returns a handle for queries that take long. They use a connection of their own, so nothing waits for them.
    pub(super) fn reader(&self) -> Reader {
        Reader { place: self.place.clone(), clock: self.clock }
    }

    /// Runs `work` in one transaction, under the write lock.
    pub(super) fn write<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>, Time, &mut Surroundings<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        self.place.check()?;
        let lock = self.place.write_lock()?;
        // Read the clock under the write lock, so that time never goes back from one transition to the next.
        let mut now = self.clock.now();
        if !self.clock.covers(now) {
            let reserved = self.clock.reserve(&mut self.connection);
            reserved.map_err(|error| self.place.explain("writing", error))?;
            now = self.clock.now();
            self.copy_back = true;
        }
        let mut surroundings = Surroundings { place: &self.place, clients: &self.clients };
        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let done = tx.and_then(|tx| {
            let done = work(&tx, now, &mut surroundings)?;
            tx.commit()?;
            Ok(done)
        });
        drop(lock);
        self.written_at = Instant::now();
        done.map_err(|error| self.place.explain("writing", error))
    }

    /// Whether a query should take the write lock, because this client has not had it for [`UNTESTED`].
    pub(super) fn should_test_write_lock(&self) -> bool {
        self.written_at.elapsed() >= UNTESTED
    }

    /// Removes the files of removed clients, and wakes the clients that a batch affected. Call it after the commit: a
    /// client that is woken earlier reads the old state.
    pub(super) fn follow_up(&self, applied: &Applied) {
        for client in &applied.removed_clients {
            lifeline::remove_files(&self.place, *client);
        }
        self.wake(&applied.wake);
    }

    pub(super) fn wake(&self, clients: &[ClientId]) {
        for client in clients {
            self.clients.wake(&self.place, *client);
        }
    }

    /// Copies the log back if it has grown, or if fences were reserved. Called when this client is idle; other clients
    /// continue meanwhile.
    pub(super) fn tidy_log(&mut self) {
        if self.log_pages.load(Ordering::Relaxed) >= LOG_PAGES || self.copy_back {
            self.copy_log_back();
        }
    }

    /// Whether the log is worth copying back when there is nothing else to do.
    pub(super) fn has_a_long_log(&self) -> bool {
        self.log_pages.load(Ordering::Relaxed) >= PAGES_TO_READ
    }

    pub(super) fn copy_log_back(&mut self) {
        self.log_pages.store(0, Ordering::Relaxed);
        self.copy_back = false;
        if let Err(error) = schema::copy_back(&self.connection) {
            event!(debug, %error, "the write-ahead log was not copied into the database");
        }
    }

    /// Removes the client, as other clients would if its process had died. If another process has inherited the
    /// lifeline, the client's permits stay held.
    pub(super) fn leave(mut self, lifeline: Arc<OnceLock<Lifeline>>) {
        drop(lifeline);
        let client = self.client;
        if !lifeline::is_dead(&self.place, client) {
            return;
        }
        let confirm_within = self.settings.confirm_within;
        match self.write(|tx, now, around| {
            remove_dead_clients(tx, vec![client], now, confirm_within, around)
        }) {
            Ok(removed) => self.follow_up(&removed),
            Err(error) => event!(debug, %error, "the client could not remove its rows on exit"),
        }
    }
}

/// Returns the id of the current boot.
fn boot() -> Result<String, Error> {
    let boot = fs::read_to_string(BOOT_ID);
    let boot = boot.map_err(|error| of_system("reading", Path::new(BOOT_ID), error))?;
    Ok(boot.trim().to_owned())
}

/// Read-only access to the store, over a connection of its own.
pub(super) struct Reader {
    place: Arc<Location>,
    clock: StoreClock,
}

impl Reader {
    /// Opens a store that exists, without a client. Nothing is written.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let place = Location::look(path)?;
        let clock = schema::clock_to_read(&place, &boot()?)?;
        Ok(Self { place: Arc::new(place), clock })
    }

    pub(super) fn read<T>(
        &self,
        work: impl FnOnce(&Connection, Time, &mut Surroundings<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        let (mut connection, clients) = (schema::open_to_read(&self.place)?, Clients::new()?);
        read(&self.place, &clients, &mut connection, self.clock.now(), work)
    }
}

/// Runs a read-only transaction. It waits for no writer.
fn read<T>(
    place: &Location,
    clients: &Clients,
    connection: &mut Connection,
    now: Time,
    work: impl FnOnce(&Connection, Time, &mut Surroundings<'_>) -> rusqlite::Result<T>,
) -> Result<T, Error> {
    place.check()?;
    let mut surroundings = Surroundings { place, clients };
    let tx = connection.transaction_with_behavior(TransactionBehavior::Deferred);
    let done = tx.and_then(|tx| work(&tx, now, &mut surroundings));
    done.map_err(|error| place.explain("request to", error))
}

/// What a transition can observe outside of the database: whether other clients are alive.
pub(super) struct Surroundings<'a> {
    place: &'a Location,
    clients: &'a Clients,
}

impl Surroundings<'_> {
    /// Returns two functions: one checks how a client can be reached, the other whether a client is dead.
    pub(super) fn probes(
        &self,
    ) -> (impl FnMut(ClientId) -> Reach + '_, impl FnMut(ClientId) -> bool + '_) {
        (|client| self.clients.reach(self.place, client), |client| self.is_dead(client))
    }

    pub(super) fn is_dead(&self, client: ClientId) -> bool {
        lifeline::is_dead(self.place, client)
    }
}

/// Removes all permits and waiters of these clients, and of other clients that turn out to be dead.
fn remove_dead_clients(
    tx: &Transaction<'_>,
    mut dead: Vec<ClientId>,
    now: Time,
    confirm_within: Span,
    around: &Surroundings<'_>,
) -> rusqlite::Result<Applied> {
    let mut applied = Applied::default();
    let (mut reach, mut is_dead) = around.probes();
    let (reach, is_dead) = (&mut reach, &mut is_dead);
    let mut call = Circumstances { from: None, now, confirm_within, reach, is_dead };
    while let Some(client) = dead.pop() {
        if !applied.removed_clients.contains(&client) {
            dead.extend(semaphores::remove_dead_client(tx, client, &mut call, &mut applied)?);
        }
    }
    Ok(applied)
}

fn insert_client(tx: &Connection, client: ClientId, now: Time) -> rusqlite::Result<()> {
    let host = process::host().unwrap_or_default();
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    tx.execute(
        "INSERT INTO clients (client, host, pid, program, since) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![
            client.number().cast_signed(),
            host,
            std::process::id(),
            program,
            now.micros().cast_signed()
        ],
    )
    .map(drop)
}

fn is_known(tx: &Connection, client: ClientId) -> rusqlite::Result<bool> {
    let mut select = tx.prepare_cached("SELECT 1 FROM clients WHERE client = ?1")?;
    select.exists([client.number().cast_signed()])
}

fn others(connection: &Connection, own: ClientId) -> rusqlite::Result<Vec<ClientId>> {
    let mut select =
        connection.prepare("SELECT client FROM clients WHERE client <> ?1 LIMIT ?2")?;
    let own = own.number().cast_signed();
    let others = select.query_map(params![own, LOOKED_AT], |row| row.get::<_, i64>(0))?;
    let others: Vec<_> = others.collect::<rusqlite::Result<_>>()?;
    Ok(others.into_iter().filter_map(|row| ClientId::from_number(row.cast_unsigned())).collect())
}
