//! What is in the file, and how it is opened.

use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};

use super::errors::another_programs;
use super::location::Location;
use crate::Error;
use crate::clock::{self, Moment, Time};

/// "Leas", by which a file says that it is ours.
const APPLICATION: i32 = 0x4c65_6173;
/// Of the schema below. A file with a later one is not touched, one with an earlier one is changed.
const VERSION: i32 = 5;

/// How long SQLite itself may wait for others. They wait for their turn before that, so that only somebody with a tool of
/// his own can be in the way.
pub(super) const BUSY: Duration = Duration::from_secs(5);

/// For how long ahead fences are reserved, in microseconds: a minute. So often the disk is waited for, and by so much
/// fences may be ahead of the clock after a start of the machine.
const RESERVED: u64 = 60_000_000;
/// How close to the end of what is reserved more is reserved: a name that is granted more than once in a microsecond runs
/// ahead of the clock.
const MARGIN: u64 = 1_000_000;

/// Times are microseconds of the store's clock, those of locks milliseconds. Client ids are their 64 bits.
///
/// `held` and `waiting` are how many rows of `holders` and `waiters` there are, and `units` what the holders weigh: nothing is
/// counted when it is asked for. `capacity` is the newest declaration, `pinned` what counts instead, and `paused` since when
/// nothing is granted. `rate_interval` is NULL if nobody has said anything of a rate, and 0 if an operator has said that there
/// is none; `rate_full_at` and `rate_returns_from` are those of a [`Meter`](crate::machine::Meter).
/// A holder that is `unclaimed` was granted its permit by another client: it has to claim it until `ends`, and then holds
/// it until `hold_until`. An `evicted` id was released by another client, and its own client is to be notified. A lock
/// without an `id` is free, and its row is there for its fence.
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
        paused INTEGER, paused_by TEXT, pause_reason TEXT, units INTEGER NOT NULL DEFAULT 0, rate_interval INTEGER,
        rate_burst INTEGER, rate_full_at INTEGER, rate_returns_from INTEGER
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

/// What makes a store of the first version one of the second. Its locks had fences that count, and did not say who
/// holds them.
const FROM_1_TO_2: &str = "
    ALTER TABLE meta RENAME COLUMN lock_floor TO fence_lead;
    ALTER TABLE meta ADD COLUMN horizon INTEGER NOT NULL DEFAULT 0;
    UPDATE meta SET fence_lead = 0;
    ALTER TABLE locks ADD COLUMN host TEXT;
    ALTER TABLE locks ADD COLUMN pid INTEGER;
    ALTER TABLE locks ADD COLUMN label TEXT;
";

/// What makes a store of the second version one of the third. Its unclaimed holders had no fences: they queue again.
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

/// What makes a store of the third version one of the fourth. Its limits could not be steered.
const FROM_3_TO_4: &str = "
    ALTER TABLE semaphores ADD COLUMN pinned INTEGER;
    ALTER TABLE semaphores ADD COLUMN paused INTEGER;
    ALTER TABLE semaphores ADD COLUMN paused_by TEXT;
    ALTER TABLE semaphores ADD COLUMN pause_reason TEXT;
";

/// What makes a store of the fourth version one of the fifth. Its permits weighed one unit and had no numbers, and there were
/// no rates.
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

/// Opens the database, in our turn, and makes it ours if it is new. SQLite waits for others no longer than `busy`.
pub(super) fn open(place: &Location, busy: Duration) -> Result<Connection, Error> {
    let failed = |error| place.explain("opening", error);
    // No URIs: a path is a path.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let flags = flags | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let mut connection = Connection::open_with_flags(&place.file, flags).map_err(failed)?;
    connection.busy_timeout(busy).map_err(failed)?;
    let known = check(&connection, place)?;
    if connection.is_readonly("main").map_err(failed)? {
        let path = place.file.display();
        let what = format!("{path} cannot be written: chmod 600, or choose another path");
        return Err(Error::Refused { what });
    }
    set_up(&mut connection, known).map_err(failed)?;
    Ok(connection)
}

/// Whether a database that begins like this is certainly not a store. What it says may be changed by its log.
pub(super) fn is_another_programs(header: &[u8]) -> bool {
    let number = |at: usize| {
        let bytes = header.get(at..at + 4)?.try_into().ok()?;
        Some(i32::from_be_bytes(bytes))
    };
    // Where the format has the version of the tables, and the application.
    let (Some(tables), Some(application)) = (number(40), number(68)) else { return false };
    application != APPLICATION && (application != 0 || tables != 0)
}

/// The version of the store, 0 if it is a new file. Changes nothing, so that what is not ours stays as it is.
fn check(connection: &Connection, place: &Location) -> Result<i32, Error> {
    let number = |pragma: &str| {
        let number = connection.pragma_query_value(None, pragma, |row| row.get::<_, i32>(0));
        number.map_err(|error| place.explain("opening", error))
    };
    let (application, version) = (number("application_id")?, number("user_version")?);
    let path = place.file.display();
    if application == APPLICATION && version > VERSION {
        let what = format!("{path} has schema {version}, and this version knows {VERSION}");
        return Err(Error::Refused { what: what + ": use the newer leasehold that made it" });
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
    // The log is synced when it is copied back, not at every commit. A power cut may take the last moments, but it takes
    // everybody's leases too. Only fences must not be forgotten: see `durably`.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    // Otherwise the client that has the turn would do both. The store's thread does them after it has answered.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.set_prepared_statement_cache_capacity(64);
    let changes: &[&str] = match version {
        0 => &[SCHEMA],
        1 => &[FROM_1_TO_2, FROM_2_TO_3, FROM_3_TO_4, FROM_4_TO_5],
        2 => &[FROM_2_TO_3, FROM_3_TO_4, FROM_4_TO_5],
        3 => &[FROM_3_TO_4, FROM_4_TO_5],
        4 => &[FROM_4_TO_5],
        _ => return Ok(()),
    };
    durably(connection, |tx| {
        changes.iter().try_for_each(|change| tx.execute_batch(change))?;
        tx.pragma_update(None, "application_id", APPLICATION)?;
        tx.pragma_update(None, "user_version", VERSION)
    })
}

/// A transaction that is on the disk when it returns. In our turn.
fn durably<T>(
    connection: &mut Connection,
    work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    // With this, a commit syncs the log.
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

/// Copies the log back into the database, as far as no reader is in the way, and syncs both. Others go on meanwhile.
pub(super) fn copy_back(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))
}

/// The store's clock, in microseconds. Its time is `origin` plus the time since the machine was started, so that a wall clock
/// that is set changes nothing.
///
/// A fence is `fence_lead` plus that time, or one more than the last fence of its name or key if that is larger. So fences grow
/// although the last ones may be forgotten, as long as the machine runs. **No fence is above `horizon`**, which is on the disk
/// before any fence is given out, and the next start of the machine begins above it. So they also grow if a power cut takes
/// everything that was not synced, and whatever the wall clock says after that.
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

    /// Whether fences may be given out at that time.
    pub(super) fn covers(&self, now: Time) -> bool {
        now.micros() + self.fence_lead + MARGIN <= self.horizon
    }

    fn read(connection: &Connection) -> rusqlite::Result<Option<(String, Self)>> {
        let known = "SELECT boot, origin, fence_lead, horizon FROM meta";
        let read = |row: &rusqlite::Row<'_>| {
            let number = |column| row.get::<_, i64>(column).map(i64::cast_unsigned);
            let clock = Self { origin: number(1)?, fence_lead: number(2)?, horizon: number(3)? };
            Ok((row.get(0)?, clock))
        };
        connection.query_row(known, [], read).optional()
    }

    /// Raises the horizon if need be. In our turn.
    pub(super) fn reserve(&mut self, connection: &mut Connection) -> rusqlite::Result<()> {
        if let Some((_, known)) = Self::read(connection)? {
            // Another client may have done it.
            self.horizon = known.horizon;
        }
        if self.covers(self.now()) {
            return Ok(());
        }
        let horizon = self.now().micros() + self.fence_lead + RESERVED;
        durably(connection, |tx| {
            tx.execute("UPDATE meta SET horizon = max(horizon, ?1)", [horizon.cast_signed()])
        })?;
        self.horizon = horizon;
        Ok(())
    }
}

/// Which start of the machine the store was last used in. None if it never was.
pub(super) fn last_boot(connection: &Connection) -> rusqlite::Result<Option<String>> {
    Ok(StoreClock::read(connection)?.map(|(boot, _)| boot))
}

/// The store's clock, which is begun anew if the machine was started anew: then everybody is gone, and only fences are left.
/// In our turn.
pub(super) fn clock(connection: &mut Connection, boot: &str) -> rusqlite::Result<StoreClock> {
    let clock = match StoreClock::read(connection)? {
        Some((known, clock)) if known == boot && clock.covers(clock.now()) => return Ok(clock),
        Some((known, mut clock)) if known == boot => {
            clock.reserve(connection)?;
            clock
        }
        _ => durably(connection, |tx| begin(tx, boot))?,
    };
    // Before anything is given out: then it does not matter if the log is lost as a whole.
    copy_back(connection)?;
    Ok(clock)
}

fn begin(tx: &Connection, boot: &str) -> rusqlite::Result<StoreClock> {
    let last: i64 = tx.query_row(
        "SELECT max(ifnull((SELECT horizon FROM meta), 0), ifnull((SELECT max(last_fence) FROM semaphores), 0),
                    ifnull((SELECT max(fence) FROM locks), 0))",
        [],
        |row| row.get(0),
    )?;
    let (wall, since_start) = (clock::wall_micros(), Moment::now().micros());
    let fence_lead = (last.cast_unsigned() + 1).saturating_sub(wall);
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
        params![boot, origin.cast_signed(), fence_lead.cast_signed(), horizon.cast_signed()],
    )?;
    Ok(StoreClock { origin, fence_lead, horizon })
}

/// A new store that is nowhere, for testing what is done in it.
#[cfg(test)]
pub(super) fn in_memory() -> Connection {
    let mut connection = Connection::open_in_memory().unwrap();
    connection.execute_batch(SCHEMA).unwrap();
    connection.set_prepared_statement_cache_capacity(64);
    clock(&mut connection, "this start").unwrap();
    connection
}
