//! The fenced lock in SQL: the [machine](crate::machine::lock) over the rows of all locks.
//!
//! A record expires at its TTL. After that no client sees it, and the next transaction that writes locks removes it.
//! The fence of a key stays in its row forever.

use std::sync::Arc;

use rusqlite::{Result, Row, params};

use super::columns::{Bits, Column, value};
use super::database::Transaction;
use crate::clock::Time;
use crate::machine::lock::{
    Acquired, Holder, LockCommand, LockMachine, LockOutcome, LockRows, NotifyWhen, Record, Verdict,
};
use crate::name::Name;
use crate::{ClientId, Fence, LockId};

#[cfg(test)]
mod tests;

/// The most expired records that one transaction removes.
const REMOVED_AT_ONCE: u32 = 64;

/// The rows of all locks.
pub(super) struct SqlLocks<'a> {
    tx: &'a Transaction<'a>,
    /// The time in milliseconds. Records that have expired by then are not found.
    now: u64,
    /// The time from which fences are minted.
    fences_from: Time,
}

/// The columns of a record that [`read`] reads.
macro_rules! lock_columns {
    () => {
        "key, id, acquired_at, expires_at, fence, host, pid, label"
    };
}

fn read(row: &Row<'_>) -> Result<Record> {
    let (acquired_at, expires_at) = (row.get::<_, Bits>(2)?.0, row.get::<_, Bits>(3)?.0);
    let holder = Arc::new(Holder { host: row.get(5)?, pid: row.get(6)?, label: row.get(7)? });
    let (key, id, fence) = (row.get(0)?, value(row, 1)?, value(row, 4)?);
    Ok(Record { key, id, acquired_at, expires_at, fence, holder })
}

fn millis(now: Time) -> u64 {
    now.micros() / 1000
}

fn machine<'a>(tx: &'a Transaction<'a>) -> LockMachine<SqlLocks<'a>> {
    LockMachine { rows: SqlLocks { tx, now: millis(tx.now), fences_from: tx.now } }
}

/// Whether a command changes nothing.
pub(super) fn is_query(command: &LockCommand) -> bool {
    matches!(command, LockCommand::IsLocked { .. } | LockCommand::Lookup(_))
}

/// Returns the held locks, ordered by key, at most `limit` of them.
pub(super) fn list(tx: &Transaction<'_>, limit: usize) -> Result<Vec<Record>> {
    let select = concat!(
        "SELECT ",
        lock_columns!(),
        " FROM locks WHERE id IS NOT NULL AND expires_at > ?1 ORDER BY key LIMIT ?2"
    );
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    tx.all(select, params![Bits(millis(tx.now)), limit], read)
}

/// Removes expired records, and wakes the clients that wait for their keys.
pub(super) fn remove_expired(tx: &Transaction<'_>) -> Result<()> {
    let removed = machine(tx).remove_expired(millis(tx.now))?;
    removed.iter().try_for_each(|key| wake_waiters(tx, key))
}

/// Answers a query.
pub(super) fn answer(tx: &Transaction<'_>, query: &LockCommand) -> Result<LockOutcome> {
    machine(tx).apply(query, millis(tx.now))
}

/// Applies a command of this client.
pub(super) fn apply(
    tx: &Transaction<'_>,
    command: &LockCommand,
    client: ClientId,
) -> Result<LockOutcome> {
    let outcome = machine(tx).apply(command, millis(tx.now))?;
    match (command, &outcome) {
        (LockCommand::Acquire { key, notify, .. }, LockOutcome::Acquire(acquired)) => {
            let is_locked = matches!(acquired, Acquired::Locked { .. });
            if *notify == NotifyWhen::Always || *notify == NotifyWhen::IfLocked && is_locked {
                register_waiter(tx, key, client)?;
            }
        }
        (_, LockOutcome::Release(Verdict::Done(Some(key)))) => {
            // The store wakes every client that waits, the releasing one included.
            wake_waiters(tx, key)?;
            return Ok(LockOutcome::Release(Verdict::Done(None)));
        }
        _ => {}
    }
    Ok(outcome)
}

impl LockRows for SqlLocks<'_> {
    type Error = rusqlite::Error;

    fn record(&self, key: &Name) -> Result<Option<Record>> {
        let select = concat!(
            "SELECT ",
            lock_columns!(),
            " FROM locks WHERE key = ?1 AND id IS NOT NULL AND expires_at > ?2"
        );
        self.tx.first(select, params![key, Bits(self.now)], read)
    }

    fn key_of(&self, id: LockId) -> Result<Option<Name>> {
        self.tx.first("SELECT key FROM lock_ids WHERE id = ?1", [Column(id)], |row| row.get(0))
    }

    fn insert(
        &mut self,
        key: &Name,
        id: LockId,
        acquired_at: u64,
        expires_at: u64,
        holder: &Arc<Holder>,
    ) -> Result<Fence> {
        // There may be an expired record that has not been removed yet.
        let delete = "DELETE FROM lock_ids WHERE id = (SELECT id FROM locks WHERE key = ?1 AND id IS NOT NULL)";
        self.tx.execute(delete, [key])?;
        let (Holder { host, pid, label }, from) = (&**holder, self.fences_from);
        let (acquired_at, expires_at) = (Bits(acquired_at), Bits(expires_at));
        let fence = self
            .tx
            .prepare(
                "INSERT INTO locks (key, fence, id, acquired_at, expires_at, host, pid, label)
                 VALUES (?1, max(?5 + (SELECT fence_lead FROM meta), 1), ?2, ?3, ?4, ?6, ?7, ?8)
                 ON CONFLICT (key) DO UPDATE SET
                     fence = max(fence + 1, excluded.fence), id = excluded.id,
                     acquired_at = excluded.acquired_at, expires_at = excluded.expires_at,
                     host = excluded.host, pid = excluded.pid, label = excluded.label
                 RETURNING fence",
            )?
            .query_row(
                params![key, Column(id), acquired_at, expires_at, from, host, pid, label],
                |row| value(row, 0),
            )?;
        let insert = "INSERT OR REPLACE INTO lock_ids (id, key) VALUES (?1, ?2)";
        self.tx.execute(insert, params![Column(id), key])?;
        Ok(fence)
    }

    fn set_expiry(&mut self, record: &Record, expires_at: u64) -> Result<()> {
        let update = "UPDATE locks SET expires_at = ?2 WHERE key = ?1";
        self.tx.execute(update, params![record.key, Bits(expires_at)]).map(drop)
    }

    fn remove(&mut self, record: &Record) -> Result<()> {
        let update = "UPDATE locks SET id = NULL, acquired_at = NULL, expires_at = NULL,
                          host = NULL, pid = NULL, label = NULL WHERE key = ?1";
        self.tx.execute(update, [&record.key]).map(drop)
    }

    fn remove_id(&mut self, id: LockId) -> Result<()> {
        self.tx.execute("DELETE FROM lock_ids WHERE id = ?1", [Column(id)]).map(drop)
    }

    fn expired(&self, now: u64) -> Result<Vec<Record>> {
        let select = concat!(
            "SELECT ",
            lock_columns!(),
            " FROM locks WHERE id IS NOT NULL AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2"
        );
        self.tx.all(select, params![Bits(now), REMOVED_AT_ONCE], read)
    }
}

/// Registers this client to be woken when the key is released.
fn register_waiter(tx: &Transaction<'_>, key: &Name, client: ClientId) -> Result<()> {
    let insert = "INSERT OR REPLACE INTO lock_waiters (key, client, woken) VALUES (?1, ?2, 0)";
    tx.execute(insert, params![key, Column(client)]).map(drop)
}

/// Wakes the clients that wait for the key. Each of them then reads which key was released.
fn wake_waiters(tx: &Transaction<'_>, key: &Name) -> Result<()> {
    let update = "UPDATE lock_waiters SET woken = 1 WHERE key = ?1 RETURNING client";
    tx.all(update, [key], |row| value(row, 0))?.into_iter().for_each(|client| tx.wake(client));
    Ok(())
}

/// Returns the keys that this client waited for and that were released. Each key is returned once.
pub(super) fn take_released(tx: &Transaction<'_>, client: ClientId) -> Result<Vec<Name>> {
    let delete = "DELETE FROM lock_waiters WHERE client = ?1 AND woken = 1 RETURNING key";
    tx.all(delete, [Column(client)], |row| row.get(0))
}
