//! The machine of the fenced lock in SQL: see [`crate::machine::lock`].
//!
//! A record expires at its TTL. After that no client sees it, and the next transaction that writes locks removes it.
//! The fence of a key stays in its row forever.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Result, Row, params};

use super::database::Reader;
use crate::clock::Time;
use crate::machine::lock::{
    Acquired, By, Holder, LockCommand, LockOutcome, NotifyWhen, Record, Verdict,
};
use crate::name::Name;
use crate::{ClientId, Error, Fence, LockId};

#[cfg(test)]
mod tests;

/// The most expired records that one transaction removes.
const REMOVED_AT_ONCE: u32 = 64;

/// A record as it is stored.
pub(super) struct Stored {
    key: String,
    id: String,
    acquired_at: u64,
    expires_at: u64,
    fence: u64,
    holder: Holder,
}

/// The columns of a record, in the order in which [`Stored::read`] reads them.
const COLUMNS: &str = "key, id, acquired_at, expires_at, fence, host, pid, label";

impl Stored {
    fn read(row: &Row<'_>) -> Result<Self> {
        let number = |column| row.get::<_, i64>(column).map(i64::cast_unsigned);
        Ok(Self {
            key: row.get(0)?,
            id: row.get(1)?,
            acquired_at: number(2)?,
            expires_at: number(3)?,
            fence: number(4)?,
            holder: Holder { host: row.get(5)?, pid: row.get(6)?, label: row.get(7)? },
        })
    }

    pub(super) fn checked(self) -> std::result::Result<Record, Error> {
        let Self { key, id, acquired_at, expires_at, fence, holder } = self;
        let (key, id) = (Name::normalised("key", &key)?, id.parse()?);
        let (fence, holder) = (Fence::new(fence), Arc::new(holder));
        Ok(Record { key, id, acquired_at, expires_at, fence, holder })
    }
}

/// The locks at the moment `now`, in milliseconds.
pub(super) struct Locks<'a> {
    pub(super) tx: &'a Connection,
    pub(super) now: u64,
    /// The same moment in microseconds, from which fences are minted.
    pub(super) micros: u64,
}

/// The outcome of a command, and the clients to wake because of it.
type Outcome = (std::result::Result<LockOutcome, Error>, Vec<ClientId>);

/// Whether a command changes nothing.
pub(super) fn only_asks(command: &LockCommand) -> bool {
    matches!(command, LockCommand::IsLocked { .. } | LockCommand::Lookup(_))
}

/// Returns the held locks, ordered by key, at most `limit` of them.
pub(super) fn list(store: &Reader, limit: usize) -> std::result::Result<Vec<Record>, Error> {
    let found = store.read(|tx, now, _| Locks::new(tx, now).list(limit))?;
    found.into_iter().map(Stored::checked).collect()
}

impl<'a> Locks<'a> {
    pub(super) fn new(tx: &'a Connection, now: Time) -> Self {
        Self { tx, now: now.micros() / 1000, micros: now.micros() }
    }

    /// Applies a command. Call it in a transaction that may write.
    pub(super) fn apply(&self, command: &LockCommand, client: ClientId) -> Result<Outcome> {
        let outcome = match command {
            LockCommand::Acquire { key, id, ttl, notify, holder, .. } => {
                let acquired = self.acquire(key, *id, *ttl, holder)?;
                let locked = matches!(acquired, Acquired::Locked { .. });
                if *notify == NotifyWhen::Always || *notify == NotifyWhen::IfLocked && locked {
                    self.register_waiter(key, client)?;
                }
                LockOutcome::Acquire(acquired)
            }
            LockCommand::Release { id, .. } => {
                let verdict = self.release(*id)?;
                // The store wakes every client that waits, the releasing one included.
                let wake = match &verdict {
                    Verdict::Done(key) => self.wake_waiters(key)?,
                    _ => Vec::new(),
                };
                return Ok((Ok(LockOutcome::Release(verdict.map(|_| None))), wake));
            }
            LockCommand::Extend { id, ttl, only_longer, .. } => {
                LockOutcome::Extend(self.extend(*id, *ttl, *only_longer)?)
            }
            LockCommand::IsLocked { .. } | LockCommand::Lookup(_) => {
                return Ok((self.ask(command)?, Vec::new()));
            }
        };
        Ok((Ok(outcome), Vec::new()))
    }

    /// Answers a command that changes nothing. There is nothing to clean up: an expired record is never read.
    pub(super) fn ask(
        &self,
        command: &LockCommand,
    ) -> Result<std::result::Result<LockOutcome, Error>> {
        Ok(match command {
            LockCommand::IsLocked { key, .. } => {
                Ok(LockOutcome::IsLocked(self.record(key.as_str())?.is_some()))
            }
            LockCommand::Lookup(by) => {
                self.lookup(by)?.map(Stored::checked).transpose().map(LockOutcome::Lookup)
            }
            other => Err(Error::internal(format!("{other:?} is not a query"))),
        })
    }

    /// Returns the record of a key, unless it has expired.
    fn record(&self, key: &str) -> Result<Option<Stored>> {
        self.tx
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM locks WHERE key = ?1 AND id IS NOT NULL AND expires_at > ?2"
            ))?
            .query_row(params![key, self.now.cast_signed()], Stored::read)
            .optional()
    }

    fn key_of(&self, id: LockId) -> Result<Option<String>> {
        self.tx
            .prepare_cached("SELECT key FROM lock_ids WHERE id = ?1")?
            .query_row([id.as_str()], |row| row.get(0))
            .optional()
    }

    pub(super) fn acquire(
        &self,
        key: &Name,
        id: LockId,
        ttl: u64,
        holder: &Holder,
    ) -> Result<Acquired> {
        if let Some(Stored { id: holder, expires_at, fence, .. }) = self.record(key.as_str())? {
            let remaining = expires_at.saturating_sub(self.now);
            return Ok(if holder == id.as_str() {
                Acquired::Held { fence: Fence::new(fence), expires_at, remaining }
            } else {
                Acquired::Locked { remaining }
            });
        }
        // There may be an expired record that has not been removed yet.
        self.remove(key.as_str())?;
        let expires_at = self.now + ttl;
        let (acquired_at, ends) = (self.now.cast_signed(), expires_at.cast_signed());
        let Holder { host, pid, label } = holder;
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
                    acquired_at,
                    ends,
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
        let fence = Fence::new(fence.cast_unsigned());
        Ok(Acquired::Held { fence, expires_at, remaining: ttl })
    }

    /// Returns the key that was released.
    pub(super) fn release(&self, id: LockId) -> Result<Verdict<String>> {
        self.owned(id, |locks, key, _| {
            locks.remove(&key)?;
            Ok(key)
        })
    }

    /// Returns the new time of expiry. With `only_longer` it is never earlier than the old one.
    pub(super) fn extend(&self, id: LockId, ttl: u64, only_longer: bool) -> Result<Verdict<u64>> {
        self.owned(id, |locks, key, before| {
            let expires_at = locks.now + ttl;
            let expires_at = if only_longer { expires_at.max(before) } else { expires_at };
            locks
                .tx
                .prepare_cached("UPDATE locks SET expires_at = ?2 WHERE key = ?1")?
                .execute(params![key, expires_at.cast_signed()])?;
            Ok(expires_at)
        })
    }

    fn owned<T>(
        &self,
        id: LockId,
        act: impl FnOnce(&Self, String, u64) -> Result<T>,
    ) -> Result<Verdict<T>> {
        let Some(key) = self.key_of(id)? else { return Ok(Verdict::NotFound) };
        let Some(record) = self.record(&key)? else { return Ok(Verdict::NotFound) };
        if record.id != id.as_str() {
            return Ok(Verdict::NotOwner);
        }
        act(self, key, record.expires_at).map(Verdict::Done)
    }

    pub(super) fn lookup(&self, by: &By) -> Result<Option<Stored>> {
        match by {
            By::Key(key) => self.record(key.as_str()),
            By::Id(id) => {
                let Some(key) = self.key_of(*id)? else { return Ok(None) };
                Ok(self.record(&key)?.filter(|record| record.id == id.as_str()))
            }
        }
    }

    /// Returns the held locks, ordered by key, at most `limit` of them.
    pub(super) fn list(&self, limit: usize) -> Result<Vec<Stored>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.tx
            .prepare(&format!(
                "SELECT {COLUMNS} FROM locks
                 WHERE id IS NOT NULL AND expires_at > ?1 ORDER BY key LIMIT ?2"
            ))?
            .query_map(params![self.now.cast_signed(), limit], Stored::read)?
            .collect()
    }

    /// Removes expired records. Returns the clients that wait for their keys.
    pub(super) fn remove_expired(&self) -> Result<Vec<ClientId>> {
        let mut select = self.tx.prepare_cached(
            "SELECT key FROM locks WHERE id IS NOT NULL AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2",
        )?;
        let over =
            select.query_map(params![self.now.cast_signed(), REMOVED_AT_ONCE], |row| row.get(0))?;
        let mut wake = Vec::new();
        for key in over.collect::<Result<Vec<String>>>()? {
            self.remove(&key)?;
            wake.extend(self.wake_waiters(&key)?);
        }
        Ok(wake)
    }

    /// Removes the record of a key and its index, but never its fence.
    fn remove(&self, key: &str) -> Result<()> {
        self.tx
            .prepare_cached(
                "DELETE FROM lock_ids WHERE id = (SELECT id FROM locks WHERE key = ?1 AND id IS NOT NULL)",
            )?
            .execute([key])?;
        self.tx
            .prepare_cached(
                "UPDATE locks SET id = NULL, acquired_at = NULL, expires_at = NULL, host = NULL, pid = NULL,
                     label = NULL
                 WHERE key = ?1",
            )?
            .execute([key])
            .map(drop)
    }

    /// Registers this client to be woken when the key is released.
    fn register_waiter(&self, key: &Name, client: ClientId) -> Result<()> {
        self.tx
            .prepare_cached(
                "INSERT OR REPLACE INTO lock_waiters (key, client, woken) VALUES (?1, ?2, 0)",
            )?
            .execute(params![key.as_str(), client.number().cast_signed()])
            .map(drop)
    }

    /// Marks the clients that wait for the key as woken, and returns them. Each client then reads which key was
    /// released.
    fn wake_waiters(&self, key: &str) -> Result<Vec<ClientId>> {
        let mut update = self
            .tx
            .prepare_cached("UPDATE lock_waiters SET woken = 1 WHERE key = ?1 RETURNING client")?;
        let clients = update.query_map([key], |row| row.get::<_, i64>(0))?;
        let clients: Vec<_> = clients.collect::<Result<_>>()?;
        let client = |number: i64| ClientId::from_number(number.cast_unsigned());
        Ok(clients.into_iter().filter_map(client).collect())
    }
}

/// Returns the keys that this client waited for and that were released. Each key is returned once.
pub(super) fn take_released(tx: &Connection, client: ClientId) -> Result<Vec<String>> {
    let mut delete = tx
        .prepare_cached("DELETE FROM lock_waiters WHERE client = ?1 AND woken = 1 RETURNING key")?;
    let keys = delete.query_map([client.number().cast_signed()], |row| row.get(0))?;
    keys.collect()
}
