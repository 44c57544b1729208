//! One client's access to the store: its connection, its lifeline, and its transactions.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rusqlite::{
    CachedStatement, Connection, OptionalExtension, Params, Row, TransactionBehavior, params,
};

use super::LocalSettings;
use super::columns::{Column, value};
use super::errors::{During, damaged_log};
use super::lifeline::{self, Clients, Lifeline, WakeUps};
use super::location::Location;
use super::schema::{self, StoreClock};
use super::semaphores;
use crate::callbacks::event;
use crate::clock::{Span, Time};
use crate::machine::Reach;
use crate::{ClientId, Error, process};

#[cfg(test)]
pub(super) mod tests;

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
const CHECKED: u32 = 1000;

/// The other clients of the store.
pub(super) trait Peers {
    fn reach(&self, client: ClientId) -> Reach;

    fn is_dead(&self, client: ClientId) -> bool;
}

/// A transaction, and the context of its transitions.
pub(super) struct Transaction<'a> {
    pub(super) connection: &'a Connection,
    /// The store's time, which is the same in the whole transaction.
    pub(super) now: Time,
    pub(super) confirm_within: Span,
    pub(super) peers: &'a dyn Peers,
    /// Whether a transition fails, with [`InvalidQuery`](rusqlite::Error::InvalidQuery), when it has to write something.
    pub(super) only_reads: bool,
    pub(super) follow_up: RefCell<FollowUp>,
}

/// What remains to be done after the commit.
#[derive(Debug, Default)]
pub(super) struct FollowUp {
    /// The clients to wake.
    pub(super) wake: Vec<ClientId>,
    /// The dead clients whose files can be removed.
    pub(super) removed_clients: Vec<ClientId>,
}

impl<'a> Transaction<'a> {
    pub(super) fn new(
        connection: &'a Connection,
        now: Time,
        confirm_within: Span,
        peers: &'a dyn Peers,
        only_reads: bool,
    ) -> Self {
        let follow_up = RefCell::default();
        Self { connection, now, confirm_within, peers, only_reads, follow_up }
    }

    /// Prepares a statement, or returns it from the cache.
    pub(super) fn prepare(&self, sql: &str) -> rusqlite::Result<CachedStatement<'a>> {
        let statement = self.connection.prepare_cached(sql)?;
        if self.only_reads && !statement.readonly() {
            return Err(rusqlite::Error::InvalidQuery);
        }
        Ok(statement)
    }

    /// Runs a statement. Returns the number of rows that it has changed.
    pub(super) fn execute(&self, sql: &str, params: impl Params) -> rusqlite::Result<usize> {
        self.prepare(sql)?.execute(params)
    }

    /// Runs a statement, and reads the first row that it returns.
    pub(super) fn first<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        self.prepare(sql)?.query_row(params, read).optional()
    }

    /// Runs a statement, and reads all rows that it returns.
    pub(super) fn all<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.prepare(sql)?.query_map(params, read)?.collect()
    }

    /// Wakes a client after the commit.
    pub(super) fn wake(&self, client: ClientId) {
        let wake = &mut self.follow_up.borrow_mut().wake;
        if !wake.contains(&client) {
            wake.push(client);
        }
    }
}

/// Access to the store for queries that take long. Each opens a connection of its own, so nothing waits for them.
#[derive(Clone)]
pub(super) struct Reader {
    settings: LocalSettings,
    place: Arc<Location>,
    clock: StoreClock,
}

impl Reader {
    /// Opens a store that exists, without a client. Nothing is written.
    pub(super) fn open(settings: LocalSettings) -> Result<Self, Error> {
        let place = Location::find(&settings.path)?;
        let clock = schema::clock_to_read(&place, &boot()?)?;
        Ok(Self { settings, place: Arc::new(place), clock })
    }

    /// Runs a read-only transaction. It waits for no writer.
    pub(super) fn read<T>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        let (mut connection, clients) = (schema::open_to_read(&self.place)?, Clients::new()?);
        self.read_over(&mut connection, &clients, work)
    }

    fn read_over<T>(
        &self,
        connection: &mut Connection,
        clients: &Clients,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        self.place.check()?;
        let (peers, now) = (&Surroundings { place: &self.place, clients }, self.clock.now());
        let tx = connection.transaction_with_behavior(TransactionBehavior::Deferred);
        let confirm_within = self.settings.confirm_within;
        let done = tx.and_then(|tx| work(&Transaction::new(&tx, now, confirm_within, peers, true)));
        done.map_err(|error| self.place.explain("request to", error))
    }
}

pub(super) struct Database {
    pub(super) client: ClientId,
    reader: Reader,
    clients: Clients,
    connection: Connection,
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
            let peers = &Surroundings { place, clients: &clients };
            let context = Transaction::new(&tx, clock.now(), settings.confirm_within, peers, false);
            lifeline::tidy(place, |client| has_row(&context, client).unwrap_or(true));
            let (lifeline_file, socket) = lifeline::enter(place, client)?;
            // The lifeline exists before the client's row does, and is removed after it.
            let _ = lifeline.set(lifeline_file);
            let entered = insert_client(&context, client).and_then(|()| {
                let mut others = other_clients(&context, client)?;
                others.retain(|client| peers.is_dead(*client));
                semaphores::remove_dead_clients(&context, others)
            });
            let follow_up = context.follow_up.into_inner();
            let entered = entered.and_then(|()| tx.commit());
            entered.inspect_err(|_| lifeline::remove_files(place, client)).map_err(failed)?;
            connection.busy_timeout(schema::BUSY).map_err(failed)?;
            Ok((connection, clock, socket, follow_up))
        })?;
        let (connection, clock, socket, follow_up) = opened;
        let store = Self {
            client,
            reader: Reader { settings, place: Arc::new(place), clock },
            clients,
            connection,
            log_pages,
            copy_back: false,
            written_at: Instant::now(),
        };
        store.follow_up(follow_up);
        Ok((store, socket))
    }

    /// Runs a read-only transaction. It waits for no writer.
    pub(super) fn read<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        self.reader.read_over(&mut self.connection, &self.clients, work)
    }

    pub(super) fn reader(&self) -> Reader {
        self.reader.clone()
    }

    /// Runs `work` in one transaction, under the write lock. After the commit, it wakes the clients that the transaction
    /// affects, and removes the files of those that it has removed. A client that is woken earlier reads the old state.
    pub(super) fn write<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        let Reader { settings, place, clock } = &mut self.reader;
        place.check()?;
        let lock = place.write_lock()?;
        // Read the clock under the write lock, so that time never goes back from one transition to the next.
        let mut now = clock.now();
        if !clock.covers(now) {
            let reserved = clock.reserve(&mut self.connection);
            reserved.map_err(|error| place.explain("writing", error))?;
            now = clock.now();
            self.copy_back = true;
        }
        let peers = &Surroundings { place, clients: &self.clients };
        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let done = tx.and_then(|tx| {
            let context = Transaction::new(&tx, now, settings.confirm_within, peers, false);
            let done = work(&context)?;
            let follow_up = context.follow_up.into_inner();
            tx.commit()?;
            Ok((done, follow_up))
        });
        drop(lock);
        self.written_at = Instant::now();
        let (done, follow_up) = done.map_err(|error| place.explain("writing", error))?;
        self.follow_up(follow_up);
        Ok(done)
    }

    /// Whether a query should take the write lock, because this client has not had it for [`UNTESTED`].
    pub(super) fn should_test_write_lock(&self) -> bool {
        self.written_at.elapsed() >= UNTESTED
    }

    fn follow_up(&self, FollowUp { wake, removed_clients }: FollowUp) {
        for client in removed_clients {
            lifeline::remove_files(&self.reader.place, client);
        }
        for client in wake {
            self.clients.wake(&self.reader.place, client);
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
        if !lifeline::is_dead(&self.reader.place, client) {
            return;
        }
        if let Err(error) = self.write(|tx| semaphores::remove_dead_clients(tx, vec![client])) {
            event!(debug, %error, "the client could not remove its rows on exit");
        }
    }
}

/// Returns the id of the current boot.
fn boot() -> Result<String, Error> {
    let boot = fs::read_to_string(BOOT_ID).during("reading", Path::new(BOOT_ID))?;
    Ok(boot.trim().to_owned())
}

/// The other clients, as the kernel reports them.
struct Surroundings<'a> {
    place: &'a Location,
    clients: &'a Clients,
}

impl Peers for Surroundings<'_> {
    fn reach(&self, client: ClientId) -> Reach {
        self.clients.reach(self.place, client)
    }

    fn is_dead(&self, client: ClientId) -> bool {
        lifeline::is_dead(self.place, client)
    }
}

fn insert_client(tx: &Transaction<'_>, client: ClientId) -> rusqlite::Result<()> {
    let host = process::host().unwrap_or_default();
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    tx.execute(
        "INSERT INTO clients (client, host, pid, program, since) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![Column(client), host, std::process::id(), program, tx.now],
    )
    .map(drop)
}

fn has_row(tx: &Transaction<'_>, client: ClientId) -> rusqlite::Result<bool> {
    tx.prepare("SELECT 1 FROM clients WHERE client = ?1")?.exists([Column(client)])
}

fn other_clients(tx: &Transaction<'_>, client: ClientId) -> rusqlite::Result<Vec<ClientId>> {
    let select = "SELECT client FROM clients WHERE client <> ?1 LIMIT ?2";
    tx.all(select, params![Column(client), CHECKED], |row| value(row, 0))
}
