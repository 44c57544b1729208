//! The store as one client has it: its connection, its lifeline, and its turn.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use super::LocalSettings;
use super::errors::{damaged_log, of_system};
use super::lifeline::{self, Clients, Reach};
use super::location::Location;
use super::schema::{self, StoreClock};
use super::semaphores::{self, Applied, Circumstances};
use crate::clock::{Span, Time};
use crate::engine::foreign::event;
use crate::{ClientId, Error, process};

#[cfg(test)]
mod tests;

/// Where the kernel says which start of the machine this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// When the log has so many pages, it is copied back: 4 MB.
const LOG_PAGES: i32 = 1000;
/// When the log has this many pages, an idle client copies it back. The first client to open a store reads the whole log,
/// which takes two microseconds a page.
const PAGES_TO_READ: i32 = 128;
pub(super) const MOMENT: Duration = Duration::from_millis(1);

/// How many clients of others a new client looks at, whether they are dead.
const LOOKED_AT: u32 = 1000;

pub(super) struct Database {
    pub(super) client: ClientId,
    pub(super) settings: LocalSettings,
    place: Location,
    clients: Clients,
    connection: Connection,
    clock: StoreClock,
    log_pages: Arc<AtomicI32>,
    /// The log is to be copied back, however long it is.
    copy_back: bool,
}

impl Database {
    /// Opens the store for a new client, and buries whom it finds dead. Also answers the socket that wakes it. Fails if it
    /// does not come to that within the time that an answer may take.
    pub(super) fn open(
        settings: LocalSettings,
        client: ClientId,
        lifeline: &OnceLock<OwnedFd>,
    ) -> Result<(Self, UnixDatagram), Error> {
        let until = Instant::now() + settings.answer_timeout;
        let boot = fs::read_to_string(BOOT_ID)
            .map_err(|error| of_system("reading", Path::new(BOOT_ID), error))?;
        let boot = boot.trim();
        let clients = Clients::new()?;
        let log_pages = Arc::new(AtomicI32::new(0));
        let (place, opened) = Location::prepare(&settings.path, until, |place, found| {
            let failed = |error| place.explain("opening", error);
            let left = until.saturating_duration_since(Instant::now());
            let mut connection = schema::open(place, left.min(schema::BUSY))?;
            if found.bad_log
                && schema::last_boot(&connection).map_err(failed)?.as_deref() == Some(boot)
            {
                // Not a power cut: SQLite would drop what others have committed.
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
            // Its file is there before its name is, and goes after it.
            let _ = lifeline.set(line);
            let entered = introduce(&tx, client, clock.now()).and_then(|()| {
                let around = Surroundings { place, clients: &clients };
                let dead = others(&tx, client)?;
                let dead = dead.into_iter().filter(|client| lifeline::is_dead(place, *client));
                let buried =
                    bury(&tx, dead.collect(), clock.now(), settings.confirm_within, &around)?;
                tx.commit()?;
                Ok(buried)
            });
            let buried =
                entered.inspect_err(|_| lifeline::remove_files(place, client)).map_err(failed)?;
            connection.busy_timeout(schema::BUSY).map_err(failed)?;
            Ok((connection, clock, socket, buried))
        })?;
        let (connection, clock, socket, buried) = opened;
        let store = Self {
            client,
            settings,
            place,
            clients,
            connection,
            clock,
            log_pages,
            copy_back: false,
        };
        store.follow_up(&buried);
        Ok((store, socket))
    }

    /// Looks, without waiting for anybody.
    pub(super) fn read<T>(
        &mut self,
        work: impl FnOnce(&Connection, Time, &mut Surroundings<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        self.place.check()?;
        let now = self.clock.now();
        let mut surroundings = Surroundings { place: &self.place, clients: &self.clients };
        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Deferred);
        let done = tx.and_then(|tx| work(&tx, now, &mut surroundings));
        done.map_err(|error| self.place.explain("asking", error))
    }

    /// Does all of it or nothing, in our turn.
    pub(super) fn write<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>, Time, &mut Surroundings<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        self.place.check()?;
        let lock = self.place.write_lock()?;
        // In our turn, so that time goes on from one transition to the next.
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
        done.map_err(|error| self.place.explain("writing", error))
    }

    /// Notifies the clients that a batch affected. Call it after the commit: a client that is woken earlier reads the old state.
    pub(super) fn follow_up(&self, applied: &Applied) {
        for client in &applied.buried {
            lifeline::remove_files(&self.place, *client);
        }
        self.wake(&applied.wake);
    }

    pub(super) fn wake(&self, clients: &[ClientId]) {
        for client in clients {
            self.clients.wake(&self.place, *client);
        }
    }

    /// Copies the log back once it has grown, or fences were reserved, when nobody waits for us. Others go on meanwhile.
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
            event!(debug, %error, "the log was not copied back");
        }
    }

    /// Ends the client as others would, if its process had died. If somebody has inherited its lifeline, what it held
    /// stays.
    pub(super) fn leave(mut self, lifeline: Arc<OnceLock<OwnedFd>>) {
        drop(lifeline);
        let client = self.client;
        if !lifeline::is_dead(&self.place, client) {
            return;
        }
        let confirm_within = self.settings.confirm_within;
        match self.write(|tx, now, around| bury(tx, vec![client], now, confirm_within, around)) {
            Ok(buried) => self.follow_up(&buried),
            Err(error) => event!(debug, %error, "the client's last words were not heard"),
        }
    }
}

/// What a transition can see outside of the database.
pub(super) struct Surroundings<'a> {
    place: &'a Location,
    clients: &'a Clients,
}

impl Surroundings<'_> {
    /// How to reach a client, and whether one is dead.
    pub(super) fn senses(
        &self,
    ) -> (impl FnMut(ClientId) -> Reach + '_, impl FnMut(ClientId) -> bool + '_) {
        (
            |client| self.clients.reach(self.place, client),
            |client| lifeline::is_dead(self.place, client),
        )
    }
}

/// Removes these clients, and whomever it finds dead on the way, from whatever they held and waited for.
fn bury(
    tx: &Transaction<'_>,
    mut dead: Vec<ClientId>,
    now: Time,
    confirm_within: Span,
    around: &Surroundings<'_>,
) -> rusqlite::Result<Applied> {
    let mut applied = Applied::default();
    let (mut reach, mut is_dead) = around.senses();
    let (reach, is_dead) = (&mut reach, &mut is_dead);
    let mut call = Circumstances { from: None, now, confirm_within, reach, is_dead };
    while let Some(client) = dead.pop() {
        if !applied.buried.contains(&client) {
            dead.extend(semaphores::bury(tx, client, &mut call, &mut applied)?);
        }
    }
    Ok(applied)
}

fn introduce(tx: &Connection, client: ClientId, now: Time) -> rusqlite::Result<()> {
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
