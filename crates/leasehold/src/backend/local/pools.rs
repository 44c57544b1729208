//! The lease pool in SQL: the [machine](crate::machine::pool) over the rows of one pool.

use rusqlite::{Connection, OptionalExtension, Result, Row, params};

use super::columns::Bits;
use crate::clock::Time;
use crate::machine::pool::{self, Member, PoolCommand, PoolOutcome, PoolQuery, PoolRow, PoolRows};
use crate::name::Name;

#[cfg(test)]
mod tests;

/// Returns the pools that have members, ordered by name.
pub(super) fn list(tx: &Connection, query: &PoolQuery) -> Result<Vec<PoolRow>> {
    let (name, limit) = match query {
        PoolQuery::First(limit) => (None, i64::try_from(*limit).unwrap_or(i64::MAX)),
        PoolQuery::Named(name) => (Some(name), 1),
    };
    let mut names = tx.prepare(
        "SELECT DISTINCT pool FROM leases WHERE ?1 IS NULL OR pool = ?1 ORDER BY pool LIMIT ?2",
    )?;
    let mut members = tx.prepare(
        "SELECT last, holder_until, instance FROM leases WHERE pool = ?1 ORDER BY last, instance",
    )?;
    let names = names.query_map(params![name, limit], |row| row.get::<_, String>(0))?;
    names
        .map(|name| {
            let name = name?;
            let members = members.query_map([&name], |row| Ok((row.get(2)?, member(row)?)))?;
            Ok(PoolRow { members: members.collect::<Result<_>>()?, name })
        })
        .collect()
}

fn member(row: &Row<'_>) -> Result<Member> {
    Ok(Member { last: row.get(0)?, holder_until: row.get(1)? })
}

/// Applies a command. Call it in a transaction.
pub(super) fn apply(tx: &Connection, command: &PoolCommand, now: Time) -> Result<PoolOutcome> {
    pool::apply(&mut SqlPool { tx, name: &command.pool }, command, now)
}

/// The rows of one pool.
struct SqlPool<'a> {
    tx: &'a Connection,
    name: &'a Name,
}

impl PoolRows for SqlPool<'_> {
    type Error = rusqlite::Error;

    /// Counting the rows is cheap, because they are at most as many as the capacity.
    fn count(&self) -> Result<u64> {
        let mut select = self.tx.prepare_cached("SELECT count(*) FROM leases WHERE pool = ?1")?;
        select.query_row([self.name], |row| Ok(row.get::<_, Bits>(0)?.0))
    }

    fn member(&self, instance: &Name) -> Result<Option<Member>> {
        let mut select = self.tx.prepare_cached(
            "SELECT last, holder_until FROM leases WHERE pool = ?1 AND instance = ?2",
        )?;
        select.query_row([self.name, instance], member).optional()
    }

    fn put(&mut self, instance: &Name, row: Member) -> Result<()> {
        let mut insert = self.tx.prepare_cached(
            "INSERT OR REPLACE INTO leases (pool, instance, last, holder_until) VALUES (?1, ?2, ?3, ?4)",
        )?;
        insert.execute(params![self.name, instance, row.last, row.holder_until]).map(drop)
    }

    fn remove(&mut self, instance: &Name) -> Result<()> {
        let delete = "DELETE FROM leases WHERE pool = ?1 AND instance = ?2";
        self.tx.prepare_cached(delete)?.execute([self.name, instance]).map(drop)
    }

    fn remove_silent(&mut self, last: Time) -> Result<u64> {
        let delete = "DELETE FROM leases WHERE pool = ?1 AND last <= ?2";
        let removed = self.tx.prepare_cached(delete)?.execute(params![self.name, last])?;
        Ok(removed as u64)
    }
}
