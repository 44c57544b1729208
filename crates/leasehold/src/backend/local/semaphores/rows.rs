//! The rows of one name, in one transaction.

use std::num::NonZeroU32;
use std::sync::Arc;

use rusqlite::{Result, Row, params};

use super::{WATCHED_PLACES, WATCHERS};
use crate::backend::local::columns::{Bits, Column, acquisition_id, value};
use crate::backend::local::database::Transaction;
use crate::clock::Time;
use crate::machine::{
    Limits, Member, Pace, Pause, Rate, Rows, SemaphoreRow, Share, Stage, Terms, TokenBucket,
};
use crate::name::Name;
use crate::{AcquisitionId, ClientId};

pub(super) struct SqlRows<'a> {
    tx: &'a Transaction<'a>,
    name: &'a Name,
    /// 0, which no row has, if the name has no row yet.
    id: i64,
    row: SemaphoreRow,
    stored: SemaphoreRow,
    fence_lead: u64,
    from: Option<ClientId>,
    /// Whether expired holders were removed, and dead clients searched. Once is enough, because a batch happens at one
    /// time.
    expired: bool,
    searched_dead: bool,
    /// The dead clients that were removed under this name. They are removed under their other names after this name is
    /// written.
    pub(super) dead: Vec<ClientId>,
}

/// The columns that [`semaphore`] reads.
macro_rules! semaphore_columns {
    () => {
        "id, capacity, held, units, waiting, next_place, last_fence, pinned, paused, paused_by, pause_reason,
         rate_count, rate_period, rate_burst, rate_full_at, rate_returns_from"
    };
}
/// The columns that [`holder`] reads.
macro_rules! holder_columns {
    () => {
        "client, sequence, since, weight, ends, fence, unclaimed, hold_until, slot"
    };
}
/// The columns that [`waiter`] reads.
macro_rules! waiter_columns {
    () => {
        "client, sequence, since, weight, place, ttl, numbered"
    };
}
pub(in crate::backend::local) use {holder_columns, semaphore_columns, waiter_columns};

/// Reads the id and the row of a name. Its columns follow one other column.
pub(in crate::backend::local) fn semaphore(row: &Row<'_>) -> Result<(i64, SemaphoreRow)> {
    let bits = |column| row.get::<_, Bits>(column).map(|bits| bits.0);
    let paused = match row.get(9)? {
        None => None,
        Some(since) => {
            let by = row.get::<_, Option<Arc<str>>>(10)?.unwrap_or_default();
            Some(Pause { since, by, reason: row.get(11)? })
        }
    };
    let pace = match row.get::<_, Option<i64>>(12)? {
        None => Pace::Undeclared,
        Some(..=0) => Pace::Free,
        Some(_) => match Rate::stored(bits(12)?, bits(13)?, bits(14)?) {
            None => Pace::Free,
            Some(rate) => {
                let (full_at, returns_from) = (row.get(15)?, bits(16)?);
                Pace::Metered(TokenBucket { rate, full_at, returns_from })
            }
        },
    };
    let limits = Limits { declared: row.get(2)?, pinned: row.get(8)?, paused, pace };
    let count = |column| row.get::<_, u32>(column).map(|count| count as usize);
    Ok((
        row.get(1)?,
        SemaphoreRow {
            limits,
            holding: count(3)?,
            units: row.get(4)?,
            waiting: count(5)?,
            next_place: bits(6)?,
            last_fence: bits(7)?,
        },
    ))
}

fn member(row: &Row<'_>, stage: Stage, alive_by: Option<Time>) -> Result<(AcquisitionId, Member)> {
    Ok((acquisition_id(row, 0)?, Member { since: row.get(2)?, alive_by, stage }))
}

/// `ends` is the first deadline of a holder: of its TTL, or for claiming its permit.
pub(in crate::backend::local) fn holder(row: &Row<'_>) -> Result<(AcquisitionId, Member)> {
    let (ends, unclaimed) = (row.get(4)?, row.get(6)?);
    let (alive_by, hold_until) = if unclaimed { (ends, row.get(7)?) } else { (None, ends) };
    let slot_number = row.get::<_, Option<u32>>(8)?.and_then(NonZeroU32::new);
    let (fence, weight) = (value(row, 5)?, row.get(3)?);
    let stage = Stage::Holding { hold_until, fence, weight, slot_number, unclaimed };
    member(row, stage, alive_by)
}

pub(in crate::backend::local) fn waiter(row: &Row<'_>) -> Result<(AcquisitionId, Member)> {
    let terms = Terms { lease: None, ttl: row.get(5)? };
    let share = Share { weight: row.get(3)?, numbered: row.get(6)? };
    member(row, Stage::Waiting { place: row.get::<_, Bits>(4)?.0, terms, share }, None)
}

impl<'a> SqlRows<'a> {
    pub(super) fn find(
        tx: &'a Transaction<'a>,
        name: &'a Name,
        from: Option<ClientId>,
    ) -> Result<Self> {
        let select = concat!(
            "SELECT fence_lead, ",
            semaphore_columns!(),
            " FROM meta LEFT JOIN semaphores ON name = ?1"
        );
        let (fence_lead, (id, row)) = tx.prepare(select)?.query_row([name], |row| {
            let is_new = row.get::<_, Option<i64>>(1)?.is_none();
            let found = if is_new { (0, SemaphoreRow::default()) } else { semaphore(row)? };
            Ok((row.get::<_, Bits>(0)?.0, found))
        })?;
        let (stored, expired, searched_dead, dead) = (row.clone(), false, false, Vec::new());
        Ok(Self { tx, name, id, row, stored, fence_lead, from, expired, searched_dead, dead })
    }

    /// Runs a statement for the holder with this id. If there is none, runs the other one for the waiter with this id.
    fn one_of(&self, holders: &str, waiters: &str, id: AcquisitionId) -> Result<Option<Member>> {
        let (semaphore, sequence) = (self.id, Bits(id.sequence()));
        let which = params![semaphore, Column(id.client()), sequence];
        let mut found = self.tx.first(holders, which, holder)?;
        if found.is_none() && self.row.waiting > 0 {
            found = self.tx.first(waiters, which, waiter)?;
        }
        Ok(found.map(|(_, member)| member))
    }

    /// Writes the row of the name, or removes it if the name was forgotten.
    pub(super) fn save(&mut self) -> Result<()> {
        // While a client is still to be notified that it was evicted, the row stays, without content.
        let delete = "DELETE FROM semaphores WHERE id = ?1
                      AND NOT EXISTS (SELECT 1 FROM evicted WHERE semaphore = ?1)";
        let is_empty = self.row == SemaphoreRow::default();
        if is_empty && self.id != 0 && self.tx.execute(delete, [self.id])? > 0
            || self.row == self.stored
        {
            return Ok(());
        }
        self.insert_name()?;
        let SemaphoreRow { limits, holding, units, waiting, next_place, last_fence } = &self.row;
        let (holding, waiting) = (Bits(*holding as u64), Bits(*waiting as u64));
        let (next_place, last_fence) = (Bits(*next_place), Bits(*last_fence));
        self.tx.execute(
            "UPDATE semaphores SET capacity = ?2, held = ?3, units = ?4, waiting = ?5, next_place = ?6, last_fence = ?7
             WHERE id = ?1",
            params![self.id, limits.declared, holding, units, waiting, next_place, last_fence],
        )?;
        let Limits { pinned, paused, pace, .. } = limits;
        let stored = &self.stored.limits;
        if (pinned, paused, pace) == (&stored.pinned, &stored.paused, &stored.pace) {
            return Ok(());
        }
        let (meter, paused) = (limits.meter(), paused.as_ref());
        let count = match pace {
            Pace::Undeclared => None,
            Pace::Free => Some(0),
            Pace::Metered(meter) => Some(meter.rate.count),
        };
        let update = "UPDATE semaphores SET pinned = ?2, paused = ?3, paused_by = ?4, pause_reason = ?5, rate_count = ?6,
                    rate_period = ?7, rate_burst = ?8, rate_full_at = ?9, rate_returns_from = ?10
             WHERE id = ?1";
        let values = params![
            self.id,
            pinned,
            paused.map(|paused| paused.since),
            paused.map(|paused| &paused.by),
            paused.map(|paused| &paused.reason),
            count.map(Bits),
            meter.map(|meter| meter.rate.period),
            meter.map(|meter| meter.rate.burst),
            meter.map(|meter| meter.full_at),
            meter.map(|meter| Bits(meter.returns_from))
        ];
        self.tx.execute(update, values).map(drop)
    }

    fn insert_name(&mut self) -> Result<()> {
        if self.id == 0 {
            let insert =
                "INSERT INTO semaphores (name, capacity, held, waiting, next_place, last_fence)
                          VALUES (?1, 0, 0, 0, 0, 0)";
            self.id = self.tx.prepare(insert)?.insert([self.name])?;
        }
        Ok(())
    }

    /// Returns when the next holder expires.
    pub(super) fn next_expiry(&self) -> Result<Option<Time>> {
        let select = "SELECT ends FROM holders WHERE semaphore = ?1 AND ends IS NOT NULL ORDER BY ends LIMIT 1";
        self.tx.first(select, [self.id], |row| row.get(0))
    }

    /// Returns the first [`WATCHERS`] clients among the first [`WATCHED_PLACES`] waiters.
    pub(super) fn near_the_head(&self) -> Result<Vec<ClientId>> {
        let mut first = Vec::new();
        if self.row.waiting == 0 {
            return Ok(first);
        }
        let select = "SELECT client FROM waiters WHERE semaphore = ?1 ORDER BY place LIMIT ?2";
        let mut select = self.tx.prepare(select)?;
        let mut rows = select.query(params![self.id, WATCHED_PLACES])?;
        while first.len() < WATCHERS
            && let Some(row) = rows.next()?
        {
            let client = value(row, 0)?;
            if !first.contains(&client) {
                first.push(client);
            }
        }
        Ok(first)
    }
}

/// The label of an acquisition.
pub(super) type Label = Option<Arc<str>>;

impl Rows for SqlRows<'_> {
    /// `None` for a member that is removed: nobody reads its label.
    type Tag = Label;
    type Error = rusqlite::Error;

    fn row(&self) -> &SemaphoreRow {
        &self.row
    }

    fn row_mut(&mut self) -> &mut SemaphoreRow {
        &mut self.row
    }

    fn tag_of(label: Option<&Arc<str>>) -> Label {
        label.cloned()
    }

    fn member(&self, id: AcquisitionId) -> Result<Option<Member>> {
        let holders = concat!(
            "SELECT ",
            holder_columns!(),
            " FROM holders WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3"
        );
        let waiters = concat!(
            "SELECT ",
            waiter_columns!(),
            " FROM waiters WHERE client = ?2 AND semaphore = ?1 AND sequence = ?3"
        );
        self.one_of(holders, waiters, id)
    }

    fn insert(&mut self, id: AcquisitionId, member: Member, label: Label) -> Result<()> {
        self.insert_name()?;
        let (name, client, sequence, since) =
            (self.id, Column(id.client()), Bits(id.sequence()), member.since);
        match member.stage {
            Stage::Waiting { place, terms: Terms { ttl, .. }, share } => {
                let (place, Share { weight, numbered }) = (Bits(place), share);
                self.tx.execute(
                    "INSERT INTO waiters (semaphore, client, sequence, since, place, ttl, label, weight, numbered)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                    params![name, client, sequence, since, place, ttl, label, weight, numbered],
                )
            }
            Stage::Holding { hold_until, fence, weight, slot_number, unclaimed } => {
                let (ends, hold_until) = (member.ends(), hold_until.filter(|_| unclaimed));
                let (fence, slot) = (Column(fence), slot_number.map(NonZeroU32::get));
                let insert = "INSERT INTO holders
                     (semaphore, client, sequence, since, ends, fence, label, unclaimed, hold_until, weight, slot)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)";
                let values = params![
                    name, client, sequence, since, ends, fence, label, unclaimed, hold_until, weight, slot
                ];
                self.tx.execute(insert, values)
            }
        }
        .map(drop)
    }

    /// Without leases, only a claim changes something.
    fn update(&mut self, id: AcquisitionId, _before: &Member, after: &Member) -> Result<()> {
        let update = "UPDATE holders SET unclaimed = 0, ends = ?4, hold_until = NULL
                      WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3";
        let values = params![self.id, Column(id.client()), Bits(id.sequence()), after.ends()];
        self.tx.execute(update, values).map(drop)
    }

    fn remove(&mut self, id: AcquisitionId) -> Result<Option<(Member, Label)>> {
        let holders = concat!(
            "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3 RETURNING ",
            holder_columns!()
        );
        let waiters = concat!(
            "DELETE FROM waiters WHERE client = ?2 AND semaphore = ?1 AND sequence = ?3 RETURNING ",
            waiter_columns!()
        );
        Ok(self.one_of(holders, waiters, id)?.map(|member| (member, None)))
    }

    fn promote(&mut self, id: AcquisitionId, waiter: &Member, holder: &Member) -> Result<Label> {
        let Stage::Waiting { place, .. } = waiter.stage else { return Ok(None) };
        let delete = "DELETE FROM waiters WHERE semaphore = ?1 AND place = ?2 RETURNING label";
        let mut delete = self.tx.prepare(delete)?;
        let label: Label = delete.query_row(params![self.id, Bits(place)], |row| row.get(0))?;
        self.insert(id, *holder, label.clone())?;
        if matches!(holder.stage, Stage::Holding { unclaimed: true, .. }) {
            self.tx.wake(id.client());
        }
        Ok(label)
    }

    fn first_waiter(&self, from_place: u64) -> Result<Option<(AcquisitionId, Member)>> {
        let select = concat!(
            "SELECT ",
            waiter_columns!(),
            " FROM waiters WHERE semaphore = ?1 AND place >= ?2 ORDER BY place LIMIT 1"
        );
        self.tx.first(select, params![self.id, Bits(from_place)], waiter)
    }

    /// Returns an upper bound, because gaps in the queue count.
    fn waiters_before(&self, place: u64) -> Result<usize> {
        let select = "SELECT place FROM waiters WHERE semaphore = ?1 ORDER BY place LIMIT 1";
        let first: Bits = self.tx.prepare(select)?.query_row([self.id], |row| row.get(0))?;
        Ok(usize::try_from(place - first.0).unwrap_or(usize::MAX))
    }

    fn lowest_free_number(&self) -> Result<NonZeroU32> {
        let select =
            "SELECT slot FROM holders WHERE semaphore = ?1 AND slot IS NOT NULL ORDER BY slot";
        let mut select = self.tx.prepare(select)?;
        let mut taken = select.query([self.id])?;
        let mut lowest = NonZeroU32::MIN;
        while let Some(row) = taken.next()?
            && row.get::<_, u32>(0)? == lowest.get()
        {
            lowest = lowest.saturating_add(1);
        }
        Ok(lowest)
    }

    fn may_expire(&self) -> bool {
        !self.expired
    }

    fn remove_due(&mut self, now: Time) -> Result<Vec<(AcquisitionId, Member, Label)>> {
        self.expired = true;
        let which = params![self.id, now];
        let is_due = "SELECT 1 FROM holders WHERE semaphore = ?1 AND ends <= ?2 LIMIT 1";
        if self.tx.only_reads && !self.tx.prepare(is_due)?.exists(which)? {
            return Ok(Vec::new());
        }
        let delete = concat!(
            "DELETE FROM holders WHERE semaphore = ?1 AND ends <= ?2 RETURNING ",
            holder_columns!()
        );
        let removed = self.tx.all(delete, which, holder)?.into_iter();
        Ok(removed.map(|(id, member)| (id, member, None)).collect())
    }

    /// Without leases, the client of the member would never find out by itself.
    fn record_cancel(&mut self, id: AcquisitionId, _member: &Member, _now: Time) -> Result<()> {
        let insert =
            "INSERT OR IGNORE INTO evicted (client, semaphore, sequence) VALUES (?1, ?2, ?3)";
        self.tx.execute(insert, params![Column(id.client()), self.id, Bits(id.sequence())])?;
        self.tx.wake(id.client());
        Ok(())
    }

    /// Searches among the clients whose death would let another waiter in: the holders, and those near the head. The
    /// sender is left out.
    fn dead_clients(&mut self) -> Result<Vec<ClientId>> {
        if std::mem::replace(&mut self.searched_dead, true) {
            return Ok(Vec::new());
        }
        let holders = "SELECT DISTINCT client FROM holders WHERE semaphore = ?1";
        let mut clients = self.tx.all(holders, [self.id], |row| value(row, 0))?;
        clients.extend(self.near_the_head()?);
        clients.sort_unstable();
        clients.dedup();
        clients.retain(|client| self.from != Some(*client) && self.tx.peers.is_dead(*client));
        Ok(clients)
    }

    fn remove_client(&mut self, client: ClientId, is_dead: bool) -> Result<Vec<Member>> {
        let which = params![self.id, Column(client)];
        let mut removed = Vec::new();
        if is_dead {
            self.dead.push(client);
            let delete = concat!(
                "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 RETURNING ",
                holder_columns!()
            );
            removed = self.tx.all(delete, which, holder)?;
        }
        if self.row.waiting > 0 {
            let delete = concat!(
                "DELETE FROM waiters WHERE client = ?2 AND semaphore = ?1 RETURNING ",
                waiter_columns!()
            );
            removed.extend(self.tx.all(delete, which, waiter)?);
        }
        Ok(removed.into_iter().map(|(_, member)| member).collect())
    }

    fn fence_lead(&self) -> u64 {
        self.fence_lead
    }
}
