//! Statistics, read in one transaction. Dead clients and expired holders that are not yet removed are left out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use rusqlite::{Result, Row, params};

use super::columns::{Bits, value};
use super::database::Transaction;
use super::semaphores::{
    holder, holder_columns, semaphore, semaphore_columns, waiter, waiter_columns,
};
use crate::clock::wall_time;
use crate::machine::{self, SemaphoreRow};
use crate::stats::{Query, SemaphoreMember, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo};

pub(super) fn fetch(tx: &Transaction<'_>, query: &Query) -> Result<Vec<SemaphoreStats>> {
    let mut reader = StatsReader { tx, dead: BTreeMap::new() };
    let rows = rows(tx, query)?.into_iter();
    rows.map(|(name, id, row)| reader.stats(name, id, &row, &query.waiters)).collect()
}

/// Returns the clients that are alive, ordered by id.
pub(super) fn clients(tx: &Transaction<'_>, limit: usize) -> Result<Vec<ClientInfo>> {
    let mut select = tx.prepare("SELECT client, host, pid, program, since FROM clients")?;
    let (mut rows, mut clients) = (select.query([])?, Vec::new());
    while let Some(row) = rows.next()? {
        let client = value(row, 0)?;
        if !tx.peers.is_dead(client) {
            clients.push(ClientInfo {
                id: client.to_string(),
                host: row.get::<_, Option<String>>(1)?.filter(|host| !host.is_empty()),
                pid: row.get(2)?,
                program: row.get(3)?,
                since: Some(wall_time(row.get::<_, Bits>(4)?.0 / 1000)),
            });
        }
    }
    clients.sort_by(|a, b| a.id.cmp(&b.id));
    clients.truncate(limit);
    Ok(clients)
}

/// Returns the names that the query asks for, each with its id and its row.
fn rows(tx: &Transaction<'_>, query: &Query) -> Result<Vec<(String, i64, SemaphoreRow)>> {
    let read = |row: &Row<'_>| {
        let (id, semaphore) = semaphore(row)?;
        Ok((row.get(0)?, id, semaphore))
    };
    let select = concat!("SELECT name, ", semaphore_columns!(), " FROM semaphores");
    let Some(names) = &query.names else {
        return tx.all(select, [], read);
    };
    let select = format!("{select} WHERE name = ?1");
    names.iter().filter_map(|name| tx.first(&select, [name], read).transpose()).collect()
}

struct StatsReader<'a> {
    tx: &'a Transaction<'a>,
    /// Whether a client is dead, for the clients already checked.
    dead: BTreeMap<ClientId, bool>,
}

impl StatsReader<'_> {
    fn stats(
        &mut self,
        name: String,
        id: i64,
        row: &SemaphoreRow,
        places: &Range<usize>,
    ) -> Result<SemaphoreStats> {
        let mut stats = SemaphoreStats::new(name, &row.limits, self.tx.now);
        stats.set_holders(self.holders(id)?);
        (stats.waiting, stats.oldest_wait) = self.queue(id)?;
        // Earlier waiters may be dead, and then do not count. So all of them are read, and at least the first one.
        let mut waiters = self.waiters(id, places.end.max(1))?;
        if let Some(head) = waiters.first().filter(|_| stats.waiting > 0) {
            stats.set_head(head.weight);
        }
        waiters.truncate(places.end);
        waiters.drain(..places.start.min(waiters.len()));
        stats.waiters = waiters;
        Ok(stats)
    }

    /// Returns the holders, longest-held first. They are sorted by fence, because fences are issued in the order of the
    /// grants.
    fn holders(&mut self, semaphore: i64) -> Result<Vec<SemaphoreMember>> {
        let select = concat!(
            "SELECT ",
            holder_columns!(),
            ", label, host, pid FROM holders LEFT JOIN (SELECT client, host, pid FROM clients) USING (client)
             WHERE semaphore = ?1 AND (ends IS NULL OR ends > ?2) ORDER BY fence"
        );
        let mut select = self.tx.prepare(select)?;
        let rows = select.query(params![semaphore, self.tx.now])?;
        self.members(rows, holder, 9, usize::MAX)
    }

    /// Returns at most `most` waiters, in the order of the queue.
    fn waiters(&mut self, semaphore: i64, most: usize) -> Result<Vec<SemaphoreMember>> {
        let select = concat!(
            "SELECT ",
            waiter_columns!(),
            ", label, host, pid FROM waiters LEFT JOIN (SELECT client, host, pid FROM clients) USING (client)
             WHERE semaphore = ?1 ORDER BY place"
        );
        let mut select = self.tx.prepare(select)?;
        let rows = select.query([semaphore])?;
        self.members(rows, waiter, 7, most)
    }

    /// Reads at most `most` live members. The label, host and pid of a member follow its other columns.
    fn members(
        &mut self,
        mut rows: rusqlite::Rows<'_>,
        read: fn(&Row<'_>) -> Result<(AcquisitionId, machine::Member)>,
        label: usize,
        most: usize,
    ) -> Result<Vec<SemaphoreMember>> {
        let mut members = Vec::new();
        while members.len() < most
            && let Some(row) = rows.next()?
        {
            let (id, member) = read(row)?;
            if !self.is_dead(id.client()) {
                let (host, pid) = (row.get(label + 1)?, row.get(label + 2)?);
                let label = row.get(label)?;
                members.push(SemaphoreMember {
                    label,
                    host,
                    pid,
                    ..SemaphoreMember::of(id, &member, self.tx.now)
                });
            }
        }
        Ok(members)
    }

    /// Returns the number of waiters, and how long the oldest has waited.
    fn queue(&mut self, semaphore: i64) -> Result<(usize, Option<Duration>)> {
        let mut select = self.tx.prepare(
            "SELECT client, count(*), min(since) FROM waiters WHERE semaphore = ?1 GROUP BY client",
        )?;
        let mut rows = select.query([semaphore])?;
        let (mut waiting, mut oldest) = (0, None);
        while let Some(row) = rows.next()? {
            if !self.is_dead(value(row, 0)?) {
                waiting += row.get::<_, u32>(1)? as usize;
                oldest = oldest.max(Some(self.tx.now.since(row.get(2)?)));
            }
        }
        Ok((waiting, oldest))
    }

    fn is_dead(&mut self, client: ClientId) -> bool {
        *self.dead.entry(client).or_insert_with(|| self.tx.peers.is_dead(client))
    }
}
