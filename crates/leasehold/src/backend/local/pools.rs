//! The machine of the lease pool in SQL: see [`crate::machine::pool`].

use rusqlite::{Connection, OptionalExtension, Result, Row, params};

use crate::clock::Time;
use crate::machine::pool::{
    PoolAction, PoolCommand, PoolMemberRow, PoolOutcome, PoolQuery, PoolRow, Status,
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
    let time = |micros: i64| Time::from_micros(micros.cast_unsigned());
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
pub(super) fn apply(tx: &Connection, ask: &PoolCommand, now: Time) -> Result<PoolOutcome> {
    let pool = Pool { tx, name: ask.pool.as_str(), now: now.micros(), ttl: ask.ttl.micros() };
    let mut expired = pool.sweep()?;
    let status = match &ask.action {
        PoolAction::Acquire { instance, capacity } => {
            let known = !matches!(pool.standing(instance)?, Standing::Nobody);
            if known || pool.count()? < u64::from(*capacity) {
                pool.touch(instance)?;
                Status::Acquired
            } else {
                Status::CapacityFull
            }
        }
        PoolAction::Renew { instance } => match pool.standing(instance)? {
            Standing::Nobody => Status::NotHeld,
            Standing::WithoutHolder => {
                expired += 1;
                pool.remove(instance)?;
                Status::Expired
            }
            Standing::Holder => {
                pool.touch(instance)?;
                Status::Renewed
            }
        },
        PoolAction::Release { instance } => match pool.standing(instance)? {
            Standing::Nobody => Status::NotHeld,
            Standing::WithoutHolder => {
                expired += 1;
                pool.remove(instance)?;
                Status::AlreadyExpired
            }
            Standing::Holder => {
                pool.remove(instance)?;
                Status::Released
            }
        },
        PoolAction::Count => Status::Counted,
    };
    Ok(PoolOutcome { status, current: pool.count()?, expired })
}

enum Standing {
    Nobody,
    WithoutHolder,
    Holder,
}

struct Pool<'a> {
    tx: &'a Connection,
    name: &'a str,
    now: u64,
    ttl: u64,
}

impl Pool<'_> {
    /// Removes the members that have been silent for the caller's TTL.
    fn sweep(&self) -> Result<u64> {
        let last = self.now.saturating_sub(self.ttl).cast_signed();
        let swept = self
            .tx
            .prepare_cached("DELETE FROM leases WHERE pool = ?1 AND last <= ?2")?
            .execute(params![self.name, last])?;
        Ok(swept as u64)
    }

    fn standing(&self, instance: &Name) -> Result<Standing> {
        let until: Option<Option<i64>> = self
            .tx
            .prepare_cached("SELECT holder_until FROM leases WHERE pool = ?1 AND instance = ?2")?
            .query_row([self.name, instance.as_str()], |row| row.get(0))
            .optional()?;
        Ok(match until {
            None => Standing::Nobody,
            Some(Some(until)) if self.now < until.cast_unsigned() => Standing::Holder,
            Some(_) => Standing::WithoutHolder,
        })
    }

    /// Returns the number of members. It is at most the capacity, so counting the rows is cheap.
    fn count(&self) -> Result<u64> {
        let count: i64 = self
            .tx
            .prepare_cached("SELECT count(*) FROM leases WHERE pool = ?1")?
            .query_row([self.name], |row| row.get(0))?;
        Ok(count.cast_unsigned())
    }

    fn touch(&self, instance: &Name) -> Result<()> {
        let (now, until) = (self.now.cast_signed(), (self.now + self.ttl).cast_signed());
        self.tx
            .prepare_cached(
                "INSERT OR REPLACE INTO leases (pool, instance, last, holder_until) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![self.name, instance.as_str(), now, until])
            .map(drop)
    }

    fn remove(&self, instance: &Name) -> Result<()> {
        self.tx
            .prepare_cached("DELETE FROM leases WHERE pool = ?1 AND instance = ?2")?
            .execute([self.name, instance.as_str()])
            .map(drop)
    }
}
