//! What is in the file, and how it is opened.

use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};

use super::errors::of_sqlite;
use crate::Error;
use crate::clock::{self, Moment};

/// "Leas", by which a file says that it is ours.
const APPLICATION: i32 = 0x4c65_6173;
/// Of the schema below. A file with a later one is not touched.
const VERSION: i32 = 2;

/// How long SQLite itself may wait for others. They wait for their turn before that, so that only somebody with a tool of
/// his own can be in the way.
const BUSY: Duration = Duration::from_secs(5);

/// By how much fences of locks jump when the machine was started anew: what was written last may not have reached the
/// disk, and is not to be given out twice.
const FENCES_A_BOOT: i64 = 1 << 20;

/// Times are microseconds of the store's clock, those of locks milliseconds. Client ids are their 64 bits.
///
/// `held` and `waiting` are how many rows of `holders` and `waiters` there are: nothing is counted when it is asked for.
/// A holder without a `fence` has not claimed its permit yet, and has to until `ends`. Whoever was `evicted` was released by
/// another client, and is to be told. A lock without an `id` is free, and
/// its row is there for its fence.
const SCHEMA: &str = "
    CREATE TABLE meta (
        one INTEGER PRIMARY KEY CHECK (one = 1), boot TEXT NOT NULL, origin INTEGER NOT NULL,
        lock_floor INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE clients (
        client INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, program TEXT NOT NULL,
        since INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE semaphores (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, capacity INTEGER NOT NULL, held INTEGER NOT NULL,
        waiting INTEGER NOT NULL, next_place INTEGER NOT NULL, last_fence INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE holders (
        semaphore INTEGER NOT NULL, client INTEGER NOT NULL, sequence INTEGER NOT NULL, since INTEGER NOT NULL,
        ends INTEGER, fence INTEGER, label TEXT,
        PRIMARY KEY (semaphore, client, sequence)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX holders_by_end ON holders (semaphore, ends) WHERE ends IS NOT NULL;
    CREATE INDEX holders_by_client ON holders (client, semaphore);
    CREATE INDEX holders_to_claim ON holders (client) WHERE fence IS NULL;
    CREATE TABLE waiters (
        semaphore INTEGER NOT NULL, place INTEGER NOT NULL, client INTEGER NOT NULL, sequence INTEGER NOT NULL,
        since INTEGER NOT NULL, ttl INTEGER, label TEXT,
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

/// What makes a file of each earlier version, from the first on, one of the next.
const UPGRADES: [&str; VERSION as usize - 1] = [
    // Locks say who holds them.
    "ALTER TABLE locks ADD COLUMN host TEXT; ALTER TABLE locks ADD COLUMN pid INTEGER;
     ALTER TABLE locks ADD COLUMN label TEXT;",
];

/// Opens the database, in our turn, and makes it ours if it is new.
pub(super) fn open(path: &Path) -> Result<Connection, Error> {
    let failed = |error| of_sqlite("opening", path, error);
    // No URIs: a path is a path.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags).map_err(failed)?;
    connection.busy_timeout(BUSY).map_err(failed)?;
    let known = check(&connection, path)?;
    if connection.is_readonly("main").map_err(failed)? {
        let what =
            format!("{} cannot be written: chmod 600, or choose another path", path.display());
        return Err(Error::Refused { what });
    }
    set_up(&mut connection, known).map_err(failed)?;
    Ok(connection)
}

/// The version of its schema if it is a store already; none if it is a new file. Changes nothing, so that what is not
/// ours stays as it is.
fn check(connection: &Connection, path: &Path) -> Result<Option<i32>, Error> {
    let number = |pragma: &str| {
        let number = connection.pragma_query_value(None, pragma, |row| row.get::<_, i32>(0));
        number.map_err(|error| of_sqlite("opening", path, error))
    };
    let (application, version) = (number("application_id")?, number("user_version")?);
    let path = path.display();
    if application == APPLICATION && version > VERSION {
        let what = format!("{path} has schema {version}, and this version knows {VERSION}");
        return Err(Error::Refused { what: what + ": use the newer leasehold that made it" });
    }
    if application != APPLICATION {
        if application != 0 || version != 0 || number("schema_version")? != 0 {
            let problem = format!("{path} is the database of another program: choose another path");
            return Err(Error::invalid("store", problem));
        }
        return Ok(None);
    }
    Ok(Some(version))
}

fn set_up(connection: &mut Connection, known: Option<i32>) -> rusqlite::Result<()> {
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    // The log is synced when it is copied back, not at every commit. A power cut may take the last moments, but it takes
    // everybody's leases too.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    // Both would be done by whoever has the turn. The store's thread does it when it has answered.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.set_prepared_statement_cache_capacity(64);
    if known == Some(VERSION) {
        return Ok(());
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if let Some(version) = known {
        let done = usize::try_from(version - 1).unwrap_or_default();
        for upgrade in UPGRADES.iter().skip(done) {
            tx.execute_batch(upgrade)?;
        }
    } else {
        tx.execute_batch(SCHEMA)?;
        tx.pragma_update(None, "application_id", APPLICATION)?;
    }
    tx.pragma_update(None, "user_version", VERSION)?;
    tx.commit()
}

/// Where the store's clock begins: its time is that plus the time since the machine was started, so that a wall clock that
/// is set changes nothing. In our turn, and in a transaction.
///
/// If the machine was started anew, everybody is gone, and only fences are left.
pub(super) fn origin(connection: &Connection, boot: &str) -> rusqlite::Result<u64> {
    let known = "SELECT boot, origin, lock_floor FROM meta";
    let known: Option<(String, i64, i64)> = connection
        .query_row(known, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let lock_floor = match known {
        Some((known, origin, _)) if known == boot => return Ok(origin.cast_unsigned()),
        Some((_, _, lock_floor)) => lock_floor.saturating_add(FENCES_A_BOOT),
        None => 0,
    };
    let origin = clock::wall_micros().saturating_sub(Moment::now().micros());
    connection.execute_batch(
        "DELETE FROM holders; DELETE FROM waiters; DELETE FROM evicted; DELETE FROM clients; DELETE FROM leases;
         DELETE FROM lock_ids; DELETE FROM lock_waiters;
         UPDATE semaphores SET held = 0, waiting = 0;",
    )?;
    connection.execute(
        "UPDATE locks SET fence = fence + ?1, id = NULL, acquired_at = NULL, expires_at = NULL, host = NULL,
             pid = NULL, label = NULL",
        [FENCES_A_BOOT],
    )?;
    connection.execute(
        "INSERT OR REPLACE INTO meta (one, boot, origin, lock_floor) VALUES (1, ?1, ?2, ?3)",
        params![boot, origin.cast_signed(), lock_floor],
    )?;
    Ok(origin)
}

/// A new store that is nowhere, for testing what is done in it.
#[cfg(test)]
pub(super) fn in_memory() -> Connection {
    let connection = Connection::open_in_memory().unwrap();
    connection.execute_batch(SCHEMA).unwrap();
    connection.set_prepared_statement_cache_capacity(64);
    origin(&connection, "this start").unwrap();
    connection
}
