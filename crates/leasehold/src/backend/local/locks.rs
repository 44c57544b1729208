//! The fenced lock in SQL: the [machine](crate::machine::lock) over the rows of all locks.
//!
//! A record expires at its TTL. After that no client sees it, and the next transaction that writes locks removes it.
//! The fence of a key stays in its row forever.

use std::sync::Arc;

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Result, Row, params};

use super::database::Reader;
use crate::clock::Time;
use crate::machine::lock::{
    Acquired, Holder, LockCommand, LockMachine, LockOutcome, LockRows, NewRecord, NotifyWhen,
    Record, Verdict,
};
use crate::name::Name;
use crate::{ClientId, Error, Fence, LockId};

#[cfg(test)]
mod tests;

/// The most expired records that one transaction removes.
const REMOVED_AT_ONCE: u32 = 64;

/// The rows of all locks at the moment `now`, in milliseconds.
pub(super) struct SqlLocks<'a> {
    pub(super) tx: &'a Connection,
    pub(super) now: u64,
    /// The same moment in microseconds, from which fences are minted.
    pub(super) micros: u64,
}

/// The columns of a record, in the order in which [`read`] reads them.
const COLUMNS: &str = "key, id, acquired_at, expires_at, fence, host, pid, label";

fn read(row: &Row<'_>) -> Result<Record> {
    let number = |column| row.get::<_, i64>(column).map(i64::cast_unsigned);
    let id: String = row.get(1)?;
    Ok(Record {
        key: key(row)?,
        id: id.parse().map_err(|error| invalid(1, error))?,
        acquired_at: number(2)?,
        expires_at: number(3)?,
        fence: Fence::new(number(4)?),
        holder: Arc::new(Holder { host: row.get(5)?, pid: row.get(6)?, label: row.get(7)? }),
    })
}

/// Reads a key from the first column.
fn key(row: &Row<'_>) -> Result<Name> {
    let key: String = row.get(0)?;
    Name::normalised("key", &key).map_err(|error| invalid(0, error))
}

fn invalid(column: usize, error: Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
}

/// Returns the locks at this time.
pub(super) fn machine(tx: &Connection, now: Time) -> LockMachine<SqlLocks<'_>> {
    LockMachine { rows: SqlLocks { tx, now: now.micros() / 1000, micros: now.micros() } }
}

/// Whether a command changes nothing.
pub(super) fn only_asks(command: &LockCommand) -> bool {
    matches!(command, LockCommand::IsLocked { .. } | LockCommand::Lookup(_))
}

/// Returns the held locks, ordered by key, at most `limit` of them.
pub(super) fn list(store: &Reader, limit: usize) -> std::result::Result<Vec<Record>, Error> {
    store.read(|tx, now, _| machine(tx, now).rows.list(limit))
}

/// Removes expired records. Returns the clients that wait for their keys. Call it in a transaction that may write.
pub(super) fn remove_expired(tx: &Connection, now: Time) -> Result<Vec<ClientId>> {
    let mut wake = Vec::new();
    for key in machine(tx, now).remove_expired(now.micros() / 1000)? {
        wake.extend(wake_waiters(tx, &key)?);
    }
    Ok(wake)
}

/// Applies a command. Adds the clients to wake because of it to `wake`.
pub(super) fn apply(
    tx: &Connection,
    command: &LockCommand,
    client: ClientId,
    now: Time,
    wake: &mut Vec<ClientId>,
) -> Result<LockOutcome> {
    let outcome = machine(tx, now).apply(command, now.micros() / 1000)?;
    Ok(match (command, outcome) {
        (LockCommand::Acquire { key, notify, .. }, LockOutcome::Acquire(acquired)) => {
            let locked = matches!(acquired, Acquired::Locked { .. });
            if *notify == NotifyWhen::Always || *notify == NotifyWhen::IfLocked && locked {
                register_waiter(tx, key, client)?;
            }
            LockOutcome::Acquire(acquired)
        }
        (_, LockOutcome::Release(Verdict::Done(Some(key)))) => {
            // The store wakes every client that waits, the releasing one included.
            wake.extend(wake_waiters(tx, &key)?);
            LockOutcome::Release(Verdict::Done(None))
        }
        (_, outcome) => outcome,
    })
}

impl SqlLocks<'_> {
    /// Returns the held locks, ordered by key, at most `limit` of them.
    fn list(&self, limit: usize) -> Result<Vec<Record>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.tx
            .prepare(&format!(
                "SELECT {COLUMNS} FROM locks
                 WHERE id IS NOT NULL AND expires_at > ?1 ORDER BY key LIMIT ?2"
            ))?
            .query_map(params![self.now.cast_signed(), limit], read)?
            .collect()
    }
}

impl LockRows for SqlLocks<'_> {
    type Error = rusqlite::Error;

    fn record(&self, key: &Name) -> Result<Option<Record>> {
        self.tx
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM locks WHERE key = ?1 AND id IS NOT NULL AND expires_at > ?2"
            ))?
            .query_row(params![key.as_str(), self.now.cast_signed()], read)
            .optional()
    }

    fn key_of(&self, id: LockId) -> Result<Option<Name>> {
        let mut select = self.tx.prepare_cached("SELECT key FROM lock_ids WHERE id = ?1")?;
        select.query_row([id.as_str()], key).optional()
    }

    fn insert(&mut self, record: NewRecord<'_>) -> Result<Fence> {
        let NewRecord { key, id, acquired_at, expires_at, holder } = record;
        // There may be an expired record that has not been removed yet.
        self.tx
            .prepare_cached(
                "DELETE FROM lock_ids WHERE id = (SELECT id FROM locks WHERE key = ?1 AND id IS NOT NULL)",
            )?
            .execute([key.as_str()])?;
        let Holder { host, pid, label } = &**holder;
        let fence: i64 = self
            .tx
            .prepare_cached(
                "INSERT INTO locks (key, fence, id, acquired_at, expires_at, host, pid, label)
                 VALUES (?1, max(?5 + (SELECT fence_lead FROM meta), 1), ?2, ?3, ?4, ?6, ?7, ?8)
                 ON CONFLICT (key) DO UPDATE SET
                     fence = max(fence + 1, excluded.fence), id = excluded.id,
                     acquired_at = excluded.acquired_at, expires_at = excluded.expires_at,
                     host = excluded.host, pid = excluded.pid, label = excluded.label
                 RETURNING fence",
            )?
            .query_row(
                params![
                    key.as_str(),
                    id.as_str(),
                    acquired_at.cast_signed(),
                    expires_at.cast_signed(),
                    self.micros.cast_signed(),
                    host,
                    pid,
                    label
                ],
                |row| row.get(0),
            )?;
        self.tx
            .prepare_cached("INSERT OR REPLACE INTO lock_ids (id, key) VALUES (?1, ?2)")?
            .execute([id.as_str(), key.as_str()])?;
        Ok(Fence::new(fence.cast_unsigned()))
    }

    fn set_expiry(&mut self, record: &Record, expires_at: u64) -> Result<()> {
        self.tx
            .prepare_cached("UPDATE locks SET expires_at = ?2 WHERE key = ?1")?
            .execute(params![record.key.as_str(), expires_at.cast_signed()])
            .map(drop)
    }

    fn remove(&mut self, record: &Record) -> Result<()> {
        self.tx
            .prepare_cached(
                "UPDATE locks SET id = NULL, acquired_at = NULL, expires_at = NULL, host = NULL, pid = NULL,
                     label = NULL
                 WHERE key = ?1",
            )?
            .execute([record.key.as_str()])
            .map(drop)
    }

    fn remove_id(&mut self, id: LockId) -> Result<()> {
        let mut delete = self.tx.prepare_cached("DELETE FROM lock_ids WHERE id = ?1")?;
        delete.execute([id.as_str()]).map(drop)
    }

    fn expired(&self, now: u64) -> Result<Vec<Record>> {
        self.tx
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM locks
                 WHERE id IS NOT NULL AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2"
            ))?
            .query_map(params![now.cast_signed(), REMOVED_AT_ONCE], read)?
            .collect()
    }
}

/// Registers this client to be woken when the key is released.
fn register_waiter(tx: &Connection, key: &Name, client: ClientId) -> Result<()> {
    tx.prepare_cached(
        "INSERT OR REPLACE INTO lock_waiters (key, client, woken) VALUES (?1, ?2, 0)",
    )?
    .execute(params![key.as_str(), client.number().cast_signed()])
    .map(drop)
}

/// Marks the clients that wait for the key as woken, and returns them. Each client then reads which key was released.
fn wake_waiters(tx: &Connection, key: &Name) -> Result<Vec<ClientId>> {
    let mut update =
        tx.prepare_cached("UPDATE lock_waiters SET woken = 1 WHERE key = ?1 RETURNING client")?;
    let clients = update.query_map([key.as_str()], |row| row.get::<_, i64>(0))?;
    let clients: Vec<_> = clients.collect::<Result<_>>()?;
    let client = |number: i64| ClientId::from_number(number.cast_unsigned());
    Ok(clients.into_iter().filter_map(client).collect())
}

/// Returns the keys that this client waited for and that were released. Each key is returned once.
pub(super) fn take_released(tx: &Connection, client: ClientId) -> Result<Vec<String>> {
    let mut delete = tx
        .prepare_cached("DELETE FROM lock_waiters WHERE client = ?1 AND woken = 1 RETURNING key")?;
    let keys = delete.query_map([client.number().cast_signed()], |row| row.get(0))?;
    keys.collect()
}
