//! The tables in the file, how the file is opened, and the store's clock.

use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};

use super::columns::Bits;
use super::errors::{another_programs, denied, unusable};
use super::location::Location;
use crate::Error;
use crate::clock::{self, Moment, Time};

/// "Leas": the application id that marks a file as ours.
const APPLICATION: i32 = 0x4c65_6173;
/// The version of the schema below. A file with a later version is not touched; one with an earlier version is
/// migrated.
const VERSION: i32 = 6;

/// How long SQLite itself may wait for another writer. Our clients wait for the write lock first, so only a separate
/// SQLite tool can block here.
pub(super) const BUSY: Duration = Duration::from_secs(5);

/// How far ahead fences are reserved, in microseconds: one minute. The disk is synced once per such period of use, and
/// after a reboot fences may be ahead of the clock by this much.
const RESERVED: u64 = 60_000_000;
/// When less than this is left of the reservation, more is reserved. The margin is needed because a name that is
/// granted more than once per microsecond runs ahead of the clock.
const MARGIN: u64 = 1_000_000;

/// Times are microseconds of the store's clock; those of locks are milliseconds. Client ids are stored as their 64
/// bits.
///
/// - `held` and `waiting` are the numbers of rows in `holders` and `waiters`, and `units` is the total weight of the
///   holders. So no query has to count.
/// - `capacity` is the newest declaration, `pinned` overrides it, and `paused` is the time since which nothing is
///   granted.
/// - `rate_count` is NULL if nobody has declared or set a rate, and 0 if an operator has removed it. `rate_period` and
///   `rate_burst` belong to it; `rate_full_at` and `rate_returns_from` are those of a [`TokenBucket`](crate::machine::TokenBucket).
/// - An `unclaimed` holder was granted its permit by another client. It must claim the permit before `ends`, and then
///   holds it until `hold_until`.
/// - An `evicted` id was released by another client, and its own client is still to be notified.
/// - A lock without an `id` is free. Its row is kept for its fence.
const SCHEMA: &str = "
    CREATE TABLE meta (
        one INTEGER PRIMARY KEY CHECK (one = 1), boot TEXT NOT NULL, origin INTEGER NOT NULL,
        fence_lead INTEGER NOT NULL, horizon INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE clients (
        client INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, program TEXT NOT NULL,
        since INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE semaphores (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, capacity INTEGER NOT NULL, held INTEGER NOT NULL,
        waiting INTEGER NOT NULL, next_place INTEGER NOT NULL, last_fence INTEGER NOT NULL, pinned INTEGER,
        paused INTEGER, paused_by TEXT, pause_reason TEXT, units INTEGER NOT NULL DEFAULT 0, rate_count INTEGER,
        rate_period INTEGER, rate_burst INTEGER, rate_full_at INTEGER, rate_returns_from INTEGER
    ) STRICT;
    CREATE TABLE holders (
        semaphore INTEGER NOT NULL, client INTEGER NOT NULL, sequence INTEGER NOT NULL, since INTEGER NOT NULL,
        ends INTEGER, fence INTEGER, label TEXT, unclaimed INTEGER NOT NULL DEFAULT 0, hold_until INTEGER,
        weight INTEGER NOT NULL DEFAULT 1, slot INTEGER,
        PRIMARY KEY (semaphore, client, sequence)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX holders_by_end ON holders (semaphore, ends) WHERE ends IS NOT NULL;
    CREATE INDEX holders_by_client ON holders (client, semaphore);
    CREATE INDEX holders_to_claim ON holders (client) WHERE unclaimed;
    CREATE UNIQUE INDEX holders_by_slot ON holders (semaphore, slot) WHERE slot IS NOT NULL;
    CREATE TABLE waiters (
        semaphore INTEGER NOT NULL, place INTEGER NOT NULL, client INTEGER NOT NULL, sequence INTEGER NOT NULL,
        since INTEGER NOT NULL, ttl INTEGER, label TEXT, weight INTEGER NOT NULL DEFAULT 1,
        numbered INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (semaphore, place)
    ) STRICT, WITHOUT ROWID;
    CREATE UNIQUE INDEX waiters_by_id ON waiters (client, semaphore, sequence);
    CREATE TABLE evicted (
        client INTEGER NOT NULL, semaphore INTEGER NOT NULL, sequence INTEGER NOT NULL,
        PRIMARY KEY (client, semaphore, sequence)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE locks (
        key TEXT PRIMARY KEY, fence INTEGER NOT NULL, id TEXT, acquired_at INTEGER, expires_at INTEGER,
        host TEXT, pid INTEGER, label TEXT
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX locks_by_end ON locks (expires_at) WHERE id IS NOT NULL;
    CREATE TABLE lock_ids (id TEXT PRIMARY KEY, key TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE lock_waiters (
        key TEXT NOT NULL, client INTEGER NOT NULL, woken INTEGER NOT NULL, PRIMARY KEY (key, client)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX lock_waiters_by_client ON lock_waiters (client, woken);
    CREATE TABLE leases (
        pool TEXT NOT NULL, instance TEXT NOT NULL, last INTEGER NOT NULL, holder_until INTEGER,
        PRIMARY KEY (pool, instance)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX leases_by_age ON leases (pool, last);
";

/// The changes from each version to the next one, starting at version 1.
const MIGRATIONS: [&str; 5] = [FROM_1_TO_2, FROM_2_TO_3, FROM_3_TO_4, FROM_4_TO_5, FROM_5_TO_6];

/// Migrates a store from version 1 to 2. In version 1 the fences of locks were counters, and locks did not record their
/// holder.
const FROM_1_TO_2: &str = "
    ALTER TABLE meta RENAME COLUMN lock_floor TO fence_lead;
    ALTER TABLE meta ADD COLUMN horizon INTEGER NOT NULL DEFAULT 0;
    UPDATE meta SET fence_lead = 0;
    ALTER TABLE locks ADD COLUMN host TEXT;
    ALTER TABLE locks ADD COLUMN pid INTEGER;
    ALTER TABLE locks ADD COLUMN label TEXT;
";

/// Migrates a store from version 2 to 3. In version 2 unclaimed holders had no fence: they are removed and must queue
/// again.
const FROM_2_TO_3: &str = "
    DROP INDEX holders_to_claim;
    UPDATE semaphores SET held = held - (
        SELECT count(*) FROM holders WHERE semaphore = semaphores.id AND fence IS NULL
    );
    DELETE FROM holders WHERE fence IS NULL;
    ALTER TABLE holders ADD COLUMN unclaimed INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE holders ADD COLUMN hold_until INTEGER;
    CREATE INDEX holders_to_claim ON holders (client) WHERE unclaimed;
";

/// Migrates a store from version 3 to 4. In version 3 limits could not be pinned or paused.
const FROM_3_TO_4: &str = "
    ALTER TABLE semaphores ADD COLUMN pinned INTEGER;
    ALTER TABLE semaphores ADD COLUMN paused INTEGER;
    ALTER TABLE semaphores ADD COLUMN paused_by TEXT;
    ALTER TABLE semaphores ADD COLUMN pause_reason TEXT;
";

/// Migrates a store from version 4 to 5. In version 4 every permit weighed one unit and had no slot number, and there
/// were no rates.
const FROM_4_TO_5: &str = "
    ALTER TABLE semaphores ADD COLUMN units INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE semaphores ADD COLUMN rate_interval INTEGER;
    ALTER TABLE semaphores ADD COLUMN rate_burst INTEGER;
    ALTER TABLE semaphores ADD COLUMN rate_full_at INTEGER;
    ALTER TABLE semaphores ADD COLUMN rate_returns_from INTEGER;
    UPDATE semaphores SET units = held;
    ALTER TABLE holders ADD COLUMN weight INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE holders ADD COLUMN slot INTEGER;
    CREATE UNIQUE INDEX holders_by_slot ON holders (semaphore, slot) WHERE slot IS NOT NULL;
    ALTER TABLE waiters ADD COLUMN weight INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE waiters ADD COLUMN numbered INTEGER NOT NULL DEFAULT 0;
";

/// Migrates a store from version 5 to 6. In version 5 a rate was stored as an interval and a burst. The same tokens arrive
/// at a rate of `burst` per interval.
const FROM_5_TO_6: &str = "
    ALTER TABLE semaphores ADD COLUMN rate_count INTEGER;
    ALTER TABLE semaphores RENAME COLUMN rate_interval TO rate_period;
    UPDATE semaphores SET rate_count = iif(rate_period > 0, rate_burst, 0) WHERE rate_period IS NOT NULL;
";

/// Opens the database, and creates the tables if it is new. SQLite waits for other writers no longer than `busy`. Call
/// it under the write lock.
pub(super) fn open(place: &Location, busy: Duration) -> Result<Connection, Error> {
    let failed = |error| place.explain("opening", error);
    // URIs are not enabled: the path is taken literally.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let flags = flags | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let mut connection = Connection::open_with_flags(&place.file, flags).map_err(failed)?;
    connection.busy_timeout(busy).map_err(failed)?;
    let version = check(&connection, place)?;
    if connection.is_readonly("main").map_err(failed)? {
        let problem = "cannot be written: run chmod 600 on it, or choose another path";
        return Err(denied(&place.file, problem));
    }
    set_up(&mut connection, version).map_err(failed)?;
    Ok(connection)
}

/// Opens the database of a store that is in use, read-only.
pub(super) fn open_to_read(place: &Location) -> Result<Connection, Error> {
    connect_to_read(place).map_err(|error| place.explain("opening", error))
}

fn connect_to_read(place: &Location) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let flags = flags | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let connection = Connection::open_with_flags(&place.file, flags)?;
    connection.busy_timeout(BUSY)?;
    Ok(connection)
}

/// Whether every page of the database and its log can be read, over a new connection, which has none of them in memory.
pub(super) fn is_readable(place: &Location) -> rusqlite::Result<bool> {
    let connection = connect_to_read(place)?;
    connection.query_row("PRAGMA quick_check(1)", [], |row| Ok(row.get::<_, String>(0)? == "ok"))
}

/// Returns the clock of a store that must not be written. Fails if the store would have to be written first: its schema
/// is older, or the host was booted since it was last used.
pub(super) fn clock_to_read(place: &Location, boot: &str) -> Result<StoreClock, Error> {
    let connection = open_to_read(place)?;
    if check(&connection, place)? != VERSION {
        let problem =
            "was made by an earlier version: open it once without read_only, which migrates it";
        return Err(denied(&place.file, problem));
    }
    match StoreClock::read(&connection).map_err(|error| place.explain("reading", error))? {
        Some((last_boot, clock)) if last_boot == boot => Ok(clock),
        _ => Err(denied(
            &place.file,
            "was last used before this boot, so nothing in it is held: open it once without read_only",
        )),
    }
}

/// Whether a database with this header certainly belongs to another program. The header may be outdated: newer values
/// may still be in the log.
pub(super) fn is_another_programs(header: &[u8]) -> bool {
    let number = |at: usize| {
        let bytes = header.get(at..at + 4)?.try_into().ok()?;
        Some(i32::from_be_bytes(bytes))
    };
    // The offsets of the schema cookie, the user version and the application id in SQLite's file header.
    let (Some(tables), Some(version), Some(application)) = (number(40), number(60), number(68))
    else {
        return false;
    };
    application != APPLICATION && (application != 0 || version != 0 || tables != 0)
}

/// Returns the version of the store, or 0 for a new file. It changes nothing, so that a file that is not ours stays as
/// it is.
fn check(connection: &Connection, place: &Location) -> Result<i32, Error> {
    let number = |pragma: &str| {
        let number = connection.pragma_query_value(None, pragma, |row| row.get::<_, i32>(0));
        number.map_err(|error| place.explain("opening", error))
    };
    let (application, version) = (number("application_id")?, number("user_version")?);
    if application == APPLICATION && version > VERSION {
        let problem = format!("has schema {version}; this version supports up to {VERSION}");
        let advice = ": use the newer leasehold that created it";
        return Err(unusable(&place.file, &(problem + advice)));
    }
    if application != APPLICATION
        && (application != 0 || version != 0 || number("schema_version")? != 0)
    {
        return Err(another_programs(&place.file));
    }
    Ok(version)
}

fn set_up(connection: &mut Connection, version: i32) -> rusqlite::Result<()> {
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    // The log is synced when it is copied back, not at every commit. A power cut may lose the last transactions, but it
    // also ends every lease. Only fences must survive it: see `durably`.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    // Otherwise SQLite would copy the log back inside the write lock, or when a connection is closed. The store's
    // thread does it after it has answered.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    // Otherwise SQLite compiles a statement again whenever another value is bound to a range.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    connection.set_prepared_statement_cache_capacity(64);
    let changes = match usize::try_from(version) {
        Ok(0) => &[SCHEMA][..],
        version => version.ok().and_then(|version| MIGRATIONS.get(version - 1..)).unwrap_or(&[]),
    };
    if changes.is_empty() {
        return Ok(());
    }
    durably(connection, |tx| {
        changes.iter().try_for_each(|change| tx.execute_batch(change))?;
        tx.pragma_update(None, "application_id", APPLICATION)?;
        tx.pragma_update(None, "user_version", VERSION)
    })
}

/// Runs a transaction that is on the disk when this returns. Call it under the write lock.
fn durably<T>(
    connection: &mut Connection,
    work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    // With this setting a commit syncs the log.
    connection.pragma_update(None, "synchronous", "FULL")?;
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
    let done = tx.and_then(|tx| {
        let done = work(&tx)?;
        tx.commit()?;
        Ok(done)
    });
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    done
}

/// Copies the log back into the database, as far as no reader prevents it, and syncs both. Other clients continue
/// meanwhile.
pub(super) fn copy_back(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))
}

/// The store's clock, in microseconds. Its time is `origin` plus the time since boot, so setting the wall clock changes
/// nothing.
///
/// A fence is `fence_lead` plus that time, or one more than the last fence of its name or key, whichever is larger. So
/// fences grow within one boot even if the last ones are lost. **No fence is above `horizon`**: it is on the disk
/// before any fence below it is granted, and the next boot starts above it. So fences also grow after a power cut that
/// loses everything that was not synced, whatever the wall clock says then.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreClock {
    origin: u64,
    fence_lead: u64,
    pub(super) horizon: u64,
}

impl StoreClock {
    pub(super) fn now(&self) -> Time {
        Time::from_micros(self.origin + Moment::now().micros())
    }

    /// Whether fences may be granted at that time.
    pub(super) fn covers(&self, now: Time) -> bool {
        now.micros() + self.fence_lead + MARGIN <= self.horizon
    }

    fn read(connection: &Connection) -> rusqlite::Result<Option<(String, Self)>> {
        let select = "SELECT boot, origin, fence_lead, horizon FROM meta";
        let read = |row: &rusqlite::Row<'_>| {
            let number = |column| row.get::<_, Bits>(column).map(|bits| bits.0);
            let clock = Self { origin: number(1)?, fence_lead: number(2)?, horizon: number(3)? };
            Ok((row.get(0)?, clock))
        };
        connection.query_row(select, [], read).optional()
    }

    /// Raises the horizon, unless it covers the current time. Call it under the write lock.
    pub(super) fn reserve(&mut self, connection: &mut Connection) -> rusqlite::Result<()> {
        if let Some((_, stored)) = Self::read(connection)? {
            // Another client may have raised it.
            self.horizon = stored.horizon;
        }
        if self.covers(self.now()) {
            return Ok(());
        }
        let horizon = self.now().micros() + self.fence_lead + RESERVED;
        durably(connection, |tx| {
            tx.execute("UPDATE meta SET horizon = max(horizon, ?1)", [Bits(horizon)])
        })?;
        self.horizon = horizon;
        Ok(())
    }
}

/// Returns the boot id under which the store was last used, or `None` if it is new.
pub(super) fn last_boot(connection: &Connection) -> rusqlite::Result<Option<String>> {
    Ok(StoreClock::read(connection)?.map(|(boot, _)| boot))
}

/// Returns the store's clock. After a reboot it starts a new one: all processes in the file are dead, their rows are
/// removed, and only limits and fences stay. Call it under the write lock.
pub(super) fn clock(connection: &mut Connection, boot: &str) -> rusqlite::Result<StoreClock> {
    let clock = match StoreClock::read(connection)? {
        Some((last, clock)) if last == boot && clock.covers(clock.now()) => return Ok(clock),
        Some((last, mut clock)) if last == boot => {
            clock.reserve(connection)?;
            clock
        }
        _ => durably(connection, |tx| begin(tx, boot))?,
    };
    // Before any fence is granted, so that even the loss of the whole log does no harm.
    copy_back(connection)?;
    Ok(clock)
}

fn begin(tx: &Connection, boot: &str) -> rusqlite::Result<StoreClock> {
    let last: Bits = tx.query_row(
        "SELECT max(ifnull((SELECT horizon FROM meta), 0), ifnull((SELECT max(last_fence) FROM semaphores), 0),
                    ifnull((SELECT max(fence) FROM locks), 0))",
        [],
        |row| row.get(0),
    )?;
    let (wall, since_start) = (clock::wall_micros(), Moment::now().micros());
    let fence_lead = (last.0 + 1).saturating_sub(wall);
    let origin = wall.saturating_sub(since_start);
    let horizon = origin + since_start + fence_lead + RESERVED;
    tx.execute_batch(
        "DELETE FROM holders; DELETE FROM waiters; DELETE FROM evicted; DELETE FROM clients; DELETE FROM leases;
         DELETE FROM lock_ids; DELETE FROM lock_waiters;
         UPDATE semaphores SET held = 0, waiting = 0, units = 0;
         UPDATE locks SET id = NULL, acquired_at = NULL, expires_at = NULL;",
    )?;
    tx.execute(
        "INSERT OR REPLACE INTO meta (one, boot, origin, fence_lead, horizon) VALUES (1, ?1, ?2, ?3, ?4)",
        params![boot, Bits(origin), Bits(fence_lead), Bits(horizon)],
    )?;
    Ok(StoreClock { origin, fence_lead, horizon })
}

/// A new store without a file, for tests of the SQL.
#[cfg(test)]
pub(super) fn in_memory() -> Connection {
    let mut connection = Connection::open_in_memory().unwrap();
    connection.execute_batch(SCHEMA).unwrap();
    connection.set_prepared_statement_cache_capacity(64);
    clock(&mut connection, "this start").unwrap();
    connection
}
