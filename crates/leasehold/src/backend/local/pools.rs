//! The lease pool in SQL: the [machine](crate::machine::pool) over the rows of one pool.

use rusqlite::{Result, Row, params};

use super::columns::Bits;
use super::database::Transaction;
use crate::clock::Time;
use crate::machine::pool::{self, Member, PoolCommand, PoolOutcome, PoolQuery, PoolRow, PoolRows};
use crate::name::Name;

#[cfg(test)]
mod tests;

/// Returns the pools that have members, ordered by name.
pub(super) fn list(tx: &Transaction<'_>, query: &PoolQuery) -> Result<Vec<PoolRow>> {
    let (name, limit) = match query {
        PoolQuery::First(limit) => (None, i64::try_from(*limit).unwrap_or(i64::MAX)),
        PoolQuery::Named(name) => (Some(name), 1),
    };
    let names =
        "SELECT DISTINCT pool FROM leases WHERE ?1 IS NULL OR pool = ?1 ORDER BY pool LIMIT ?2";
    let names = tx.all(names, params![name, limit], |row| row.get::<_, String>(0))?.into_iter();
    let members =
        "SELECT last, holder_until, instance FROM leases WHERE pool = ?1 ORDER BY last, instance";
    names
        .map(|name| {
            let members = tx.all(members, [&name], |row| Ok((row.get(2)?, member(row)?)))?;
            Ok(PoolRow { name, members })
        })
        .collect()
}

fn member(row: &Row<'_>) -> Result<Member> {
    Ok(Member { last: row.get(0)?, holder_until: row.get(1)? })
}

/// Applies a command.
pub(super) fn apply(tx: &Transaction<'_>, command: &PoolCommand) -> Result<PoolOutcome> {
    pool::apply(&mut SqlPool { tx, name: &command.pool }, command, tx.now)
}

/// The rows of one pool.
struct SqlPool<'a> {
    tx: &'a Transaction<'a>,
    name: &'a Name,
}

impl PoolRows for SqlPool<'_> {
    type Error = rusqlite::Error;

    /// Counting the rows is cheap, because they are at most as many as the capacity.
    fn count(&self) -> Result<u64> {
        let select = "SELECT count(*) FROM leases WHERE pool = ?1";
        self.tx.prepare(select)?.query_row([self.name], |row| Ok(row.get::<_, Bits>(0)?.0))
    }

    fn member(&self, instance: &Name) -> Result<Option<Member>> {
        let select = "SELECT last, holder_until FROM leases WHERE pool = ?1 AND instance = ?2";
        self.tx.first(select, [self.name, instance], member)
    }

    fn put(&mut self, instance: &Name, row: Member) -> Result<()> {
        let insert = "INSERT OR REPLACE INTO leases (pool, instance, last, holder_until) VALUES (?1, ?2, ?3, ?4)";
        let values = params![self.name, instance, row.last, row.holder_until];
        self.tx.execute(insert, values).map(drop)
    }

    fn remove(&mut self, instance: &Name) -> Result<()> {
        let delete = "DELETE FROM leases WHERE pool = ?1 AND instance = ?2";
        self.tx.execute(delete, [self.name, instance]).map(drop)
    }

    fn remove_silent(&mut self, last: Time) -> Result<u64> {
        let delete = "DELETE FROM leases WHERE pool = ?1 AND last <= ?2";
        Ok(self.tx.execute(delete, params![self.name, last])? as u64)
    }
}
