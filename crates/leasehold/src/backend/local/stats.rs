//! Statistics, read in one transaction. Dead clients and expired holders that are not yet removed are left out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use rusqlite::{Connection, Result, Row, Rows, params};

use super::database::{Reader, Surroundings};
use super::semaphores::{Peers, meter_of};
use crate::clock::{Span, Time, wall_time};
use crate::stats::{Limits, Member, Paused, Query, RateLimit, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error, Fence};

pub(super) fn fetch(
    store: &Reader,
    query: &Query,
) -> std::result::Result<Vec<SemaphoreStats>, Error> {
    store.read(|tx, now, around| {
        let mut reading = Reading { tx, now, around, dead: BTreeMap::new() };
        let names = reading.names(query)?;
        names.into_iter().map(|named| reading.of(named, &query.waiters)).collect()
    })
}

/// Returns the clients that are alive, ordered by id.
pub(super) fn clients(store: &Reader, limit: usize) -> std::result::Result<Vec<ClientInfo>, Error> {
    store.read(|tx, _, around| {
        let mut select = tx.prepare("SELECT client, host, pid, program, since FROM clients")?;
        let (mut rows, mut clients) = (select.query([])?, Vec::new());
        while let Some(row) = rows.next()? {
            let Some(client) = client(row)?.filter(|client| !around.is_dead(*client)) else {
                continue;
            };
            clients.push(ClientInfo {
                id: client.to_string(),
                host: row.get::<_, Option<String>>(1)?.filter(|host| !host.is_empty()),
                pid: row.get(2)?,
                program: row.get(3)?,
                since: Some(wall_time(row.get::<_, i64>(4)?.cast_unsigned() / 1000)),
            });
        }
        clients.sort_by(|a, b| a.id.cmp(&b.id));
        clients.truncate(limit);
        Ok(clients)
    })
}

struct Reading<'a, 'b> {
    tx: &'a Connection,
    now: Time,
    around: &'a Surroundings<'b>,
    /// Whether a client is dead, for the clients already checked.
    dead: BTreeMap<ClientId, bool>,
}

/// The row of a name.
struct Named {
    row: i64,
    name: String,
    limits: Limits,
}

const COLUMNS: &str = "id, name, capacity, pinned, paused, paused_by, pause_reason,
                       rate_count, rate_period, rate_burst, rate_full_at, rate_returns_from";

impl Reading<'_, '_> {
    fn names(&self, query: &Query) -> Result<Vec<Named>> {
        let read = |row: &Row<'_>| {
            let paused: Option<i64> = row.get(4)?;
            let meter = meter_of(row, 7)?;
            let limits = Limits {
                declared: row.get(2)?,
                pinned: row.get(3)?,
                paused: match paused {
                    None => None,
                    Some(since) => Some(Paused {
                        since: self.since(since),
                        by: row.get::<_, Option<String>>(5)?.unwrap_or_default(),
                        reason: row.get(6)?,
                    }),
                },
                rate: meter.map(|meter| RateLimit::of(meter.rate)),
                next_token: meter.and_then(|meter| meter.next_in(self.now)).map(Span::duration),
            };
            Ok(Named { row: row.get(0)?, name: row.get(1)?, limits })
        };
        let Some(names) = &query.names else {
            let mut select = self.tx.prepare(&format!("SELECT {COLUMNS} FROM semaphores"))?;
            return select.query_map([], read)?.collect();
        };
        let mut select =
            self.tx.prepare(&format!("SELECT {COLUMNS} FROM semaphores WHERE name = ?1"))?;
        let mut found = Vec::new();
        for name in names {
            for named in select.query_map([name], read)? {
                found.push(named?);
            }
        }
        Ok(found)
    }

    fn of(
        &mut self,
        Named { row, name, limits }: Named,
        places: &Range<usize>,
    ) -> Result<SemaphoreStats> {
        let holders = self.holders(row)?;
        let units = holders.iter().map(Member::weight).fold(0, u32::saturating_add);
        let (waiting, oldest_wait) = self.queue(row)?;
        // Earlier waiters may be dead, and then do not count. So all of them are read.
        let mut waiters =
            if places.is_empty() { Vec::new() } else { self.waiters(row, places.end)? };
        waiters.drain(..places.start.min(waiters.len()));
        // The first waiter that is alive.
        let head = self.waiters(row, 1)?.first().map(Member::weight);
        let waits_for = head.map(|weight| limits.waits_for(units, weight));
        let (units, waits_for) = (units, waits_for.filter(|_| waiting > 0));
        Ok(SemaphoreStats {
            name,
            limits,
            units,
            waits_for,
            holders,
            waiters,
            waiting,
            oldest_wait,
        })
    }

    /// Returns the holders, longest-held first. They are sorted by fence, because fences are issued in the order of the
    /// grants.
    fn holders(&mut self, semaphore: i64) -> Result<Vec<Member>> {
        let mut select = self.tx.prepare_cached(
            "SELECT h.client, h.sequence, h.since, h.ends, h.label, c.host, c.pid, h.fence, h.weight, h.slot,
                    CASE WHEN h.unclaimed THEN h.hold_until ELSE h.ends END
             FROM holders h LEFT JOIN clients c USING (client)
             WHERE h.semaphore = ?1 AND (h.ends IS NULL OR h.ends > ?2)
             ORDER BY h.fence IS NULL, h.fence, h.since",
        )?;
        let rows = select.query(params![semaphore, self.now.micros().cast_signed()])?;
        self.members(rows, usize::MAX)
    }

    /// Returns at most `most` waiters, in the order of the queue.
    fn waiters(&mut self, semaphore: i64, most: usize) -> Result<Vec<Member>> {
        let mut select = self.tx.prepare_cached(
            "SELECT w.client, w.sequence, w.since, NULL, w.label, c.host, c.pid, NULL, w.weight, NULL, NULL
             FROM waiters w LEFT JOIN clients c USING (client)
             WHERE w.semaphore = ?1 ORDER BY w.place",
        )?;
        let rows = select.query([semaphore])?;
        self.members(rows, most)
    }

    /// Reads at most `most` live members from rows of: client, sequence, since, ends, label, host, pid, fence, weight,
    /// slot, end of the TTL.
    fn members(&mut self, mut rows: Rows<'_>, most: usize) -> Result<Vec<Member>> {
        let now = self.now.micros();
        let mut members = Vec::new();
        while members.len() < most
            && let Some(row) = rows.next()?
        {
            let Some(client) = client(row)? else { continue };
            if self.is_dead(client) {
                continue;
            }
            let (ends, fence): (Option<i64>, Option<i64>) = (row.get(3)?, row.get(7)?);
            let hold_until: Option<i64> = row.get(10)?;
            let left =
                |until: i64| Duration::from_micros(until.cast_unsigned().saturating_sub(now));
            members.push(Member {
                id: AcquisitionId::new(client, row.get::<_, i64>(1)?.cast_unsigned()).to_string(),
                label: row.get(4)?,
                host: row.get(5)?,
                pid: row.get(6)?,
                age: Some(self.since(row.get(2)?)),
                ends_in: ends.map(left),
                ttl_left: hold_until.map(left),
                // Nothing is renewed: the kernel reports dead processes.
                silent_for: None,
                fence: fence.map(|fence| Fence::new(fence.cast_unsigned())),
                weight: row.get(8)?,
                slot_number: row.get(9)?,
            });
        }
        Ok(members)
    }

    /// Returns the number of waiters, and how long the oldest has waited.
    fn queue(&mut self, semaphore: i64) -> Result<(usize, Option<Duration>)> {
        let mut select = self.tx.prepare_cached(
            "SELECT client, count(*), min(since) FROM waiters WHERE semaphore = ?1 GROUP BY client",
        )?;
        let mut rows = select.query([semaphore])?;
        let (mut waiting, mut oldest) = (0, None);
        while let Some(row) = rows.next()? {
            let Some(client) = client(row)? else { continue };
            if !self.is_dead(client) {
                waiting += usize::try_from(row.get::<_, i64>(1)?).unwrap_or_default();
                oldest = oldest.max(Some(self.since(row.get(2)?)));
            }
        }
        Ok((waiting, oldest))
    }

    fn is_dead(&mut self, client: ClientId) -> bool {
        let around = self.around;
        *self.dead.entry(client).or_insert_with(|| around.is_dead(client))
    }

    fn since(&self, micros: i64) -> Duration {
        self.now.since(Time::from_micros(micros.cast_unsigned()))
    }
}

fn client(row: &Row<'_>) -> Result<Option<ClientId>> {
    Ok(ClientId::from_number(row.get::<_, i64>(0)?.cast_unsigned()))
}
