//! The lease pool in SQL: the [machine](crate::machine::pool) over the rows of one pool.

use rusqlite::{Connection, OptionalExtension, Result, Row, params};

use crate::clock::Time;
use crate::machine::pool::{
    self, Member, PoolCommand, PoolMemberRow, PoolOutcome, PoolQuery, PoolRow, PoolRows,
};
use crate::name::Name;

#[cfg(test)]
mod tests;

/// Returns the pools that have members, ordered by name.
pub(super) fn list(tx: &Connection, query: &PoolQuery) -> Result<Vec<PoolRow>> {
    let (name, limit) = match query {
        PoolQuery::First(limit) => (None, i64::try_from(*limit).unwrap_or(i64::MAX)),
        PoolQuery::Named(name) => (Some(name.as_str()), 1),
    };
    let mut names = tx.prepare(
        "SELECT DISTINCT pool FROM leases WHERE ?1 IS NULL OR pool = ?1 ORDER BY pool LIMIT ?2",
    )?;
    let mut members = tx.prepare(
        "SELECT instance, last, holder_until FROM leases WHERE pool = ?1 ORDER BY last, instance",
    )?;
    let member = |row: &Row<'_>| {
        let (instance, last) = (row.get(0)?, time(row.get(1)?));
        let holder_until = row.get::<_, Option<i64>>(2)?.map(time);
        Ok(PoolMemberRow { instance, last, holder_until })
    };
    let names = names.query_map(params![name, limit], |row| row.get::<_, String>(0))?;
    names
        .map(|name| {
            let name = name?;
            let members = members.query_map([&name], member)?.collect::<Result<_>>()?;
            Ok(PoolRow { name, members })
        })
        .collect()
}

/// Applies a command. Call it in a transaction.
pub(super) fn apply(tx: &Connection, command: &PoolCommand, now: Time) -> Result<PoolOutcome> {
    pool::apply(&mut SqlPool { tx, name: command.pool.as_str() }, command, now)
}

/// The rows of one pool.
struct SqlPool<'a> {
    tx: &'a Connection,
    name: &'a str,
}

impl PoolRows for SqlPool<'_> {
    type Error = rusqlite::Error;

    /// Counting the rows is cheap, because they are at most as many as the capacity.
    fn count(&self) -> Result<u64> {
        let mut select = self.tx.prepare_cached("SELECT count(*) FROM leases WHERE pool = ?1")?;
        select.query_row([self.name], |row| row.get(0).map(i64::cast_unsigned))
    }

    fn member(&self, instance: &Name) -> Result<Option<Member>> {
        let mut select = self.tx.prepare_cached(
            "SELECT last, holder_until FROM leases WHERE pool = ?1 AND instance = ?2",
        )?;
        let read = |row: &Row<'_>| {
            let holder_until = row.get::<_, Option<i64>>(1)?.map(time);
            Ok(Member { last: time(row.get(0)?), holder_until })
        };
        select.query_row([self.name, instance.as_str()], read).optional()
    }

    fn put(&mut self, instance: &Name, row: Member) -> Result<()> {
        let micros = |time: Time| time.micros().cast_signed();
        let (last, until) = (micros(row.last), row.holder_until.map(micros));
        self.tx
            .prepare_cached(
                "INSERT OR REPLACE INTO leases (pool, instance, last, holder_until) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![self.name, instance.as_str(), last, until])
            .map(drop)
    }

    fn remove(&mut self, instance: &Name) -> Result<()> {
        self.tx
            .prepare_cached("DELETE FROM leases WHERE pool = ?1 AND instance = ?2")?
            .execute([self.name, instance.as_str()])
            .map(drop)
    }

    fn remove_silent(&mut self, last: Time) -> Result<u64> {
        let mut delete =
            self.tx.prepare_cached("DELETE FROM leases WHERE pool = ?1 AND last <= ?2")?;
        delete
            .execute(params![self.name, last.micros().cast_signed()])
            .map(|removed| removed as u64)
    }
}

fn time(micros: i64) -> Time {
    Time::from_micros(micros.cast_unsigned())
}
