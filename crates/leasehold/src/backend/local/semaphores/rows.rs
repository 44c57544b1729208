//! The rows of one name, in one transaction.

use std::num::NonZeroU32;
use std::sync::Arc;

use rusqlite::{CachedStatement, Connection, OptionalExtension, Params, Result, Row, params};

use super::{Peers, WATCHED_PLACES, WATCHERS};
use crate::clock::{Span, Time};
use crate::machine::{
    Limits, Member, Pace, Pause, Rate, Rows, SemaphoreRow, Share, Stage, Terms, TokenBucket,
};
use crate::{AcquisitionId, ClientId, Fence};

pub(super) struct SqlRows<'a> {
    tx: &'a Connection,
    name: &'a str,
    /// 0, which no row has, if the name has no row yet.
    id: i64,
    row: SemaphoreRow,
    stored: SemaphoreRow,
    fence_lead: u64,
    from: Option<ClientId>,
    peers: &'a dyn Peers,
    /// Whether a statement that writes fails, with [`InvalidQuery`](rusqlite::Error::InvalidQuery).
    only_reads: bool,
    /// Whether expired holders were removed, and dead clients searched. Once is enough, because a batch happens at one
    /// time.
    expired: bool,
    looked_for_dead: bool,
    /// The clients to wake after the commit.
    pub(super) wake: Vec<ClientId>,
    /// The dead clients that were removed under this name. They are removed under their other names after this name is
    /// written.
    pub(super) dead: Vec<ClientId>,
}

/// Returns an id as it is stored: its client and its sequence.
pub(super) fn columns(id: AcquisitionId) -> (i64, i64) {
    (id.client().number().cast_signed(), id.sequence().cast_signed())
}

pub(super) fn micros(time: Time) -> i64 {
    time.micros().cast_signed()
}

fn unsigned(row: &Row<'_>, column: usize) -> Result<u64> {
    row.get(column).map(i64::cast_unsigned)
}

fn time(row: &Row<'_>, column: usize) -> Result<Option<Time>> {
    let micros: Option<i64> = row.get(column)?;
    Ok(micros.map(|micros| Time::from_micros(micros.cast_unsigned())))
}

pub(super) fn client(row: &Row<'_>, column: usize) -> Result<ClientId> {
    let number: i64 = row.get(column)?;
    ClientId::from_number(number.cast_unsigned())
        .ok_or(rusqlite::Error::IntegralValueOutOfRange(column, number))
}

/// Reads a meter from the five columns that begin with `rate_count`.
pub(in crate::backend::local) fn meter_of(
    row: &Row<'_>,
    first: usize,
) -> Result<Option<TokenBucket>> {
    if row.get::<_, Option<i64>>(first)?.is_none_or(|count| count <= 0) {
        return Ok(None);
    }
    let number = |column| unsigned(row, first + column);
    let Some(rate) = Rate::stored(number(0)?, number(1)?, number(2)?) else { return Ok(None) };
    let full_at = Time::from_micros(number(3)?);
    Ok(Some(TokenBucket { rate, full_at, returns_from: number(4)? }))
}

/// Selects the row of a name, with the columns that [`name_row`] reads.
macro_rules! select_name {
    ($which:literal) => {
        concat!(
            "SELECT (SELECT fence_lead FROM meta), id, capacity, held, units, waiting, next_place, last_fence, pinned,
                    paused, paused_by, pause_reason, rate_count, rate_period, rate_burst, rate_full_at, rate_returns_from
             FROM semaphores WHERE ",
            $which
        )
    };
}

/// Returns the fence lead, and the id and the row of a name.
fn name_row(row: &Row<'_>) -> Result<(u64, i64, SemaphoreRow)> {
    let paused = match time(row, 9)? {
        None => None,
        Some(since) => {
            let by = row.get::<_, Option<Arc<str>>>(10)?.unwrap_or_default();
            Some(Pause { since, by, reason: row.get(11)? })
        }
    };
    let pace = match row.get::<_, Option<i64>>(12)? {
        None => Pace::Undeclared,
        Some(_) => meter_of(row, 12)?.map_or(Pace::Free, Pace::Metered),
    };
    let state = SemaphoreRow {
        limits: Limits::stored(row.get(2)?, row.get(8)?, paused, pace),
        holding: row.get::<_, u32>(3)? as usize,
        units: row.get(4)?,
        waiting: row.get::<_, u32>(5)? as usize,
        next_place: unsigned(row, 6)?,
        last_fence: unsigned(row, 7)?,
    };
    Ok((unsigned(row, 0)?, row.get(1)?, state))
}

/// The columns that [`member`] reads, of a holder and of a waiter.
macro_rules! holder_columns {
    () => {
        "client, sequence, since, weight, ends, fence, unclaimed, hold_until, slot"
    };
}
pub(super) use holder_columns;
macro_rules! waiter_columns {
    () => {
        "client, sequence, since, weight, place, ttl, numbered"
    };
}

fn member(row: &Row<'_>, stage: Stage, alive_by: Option<Time>) -> Result<(AcquisitionId, Member)> {
    let id = AcquisitionId::new(client(row, 0)?, unsigned(row, 1)?);
    Ok((id, Member { since: Time::from_micros(unsigned(row, 2)?), alive_by, stage }))
}

/// `ends` is the first deadline of a holder: of its TTL, or for claiming its permit.
pub(super) fn holder(row: &Row<'_>) -> Result<(AcquisitionId, Member)> {
    let (ends, unclaimed) = (time(row, 4)?, row.get(6)?);
    let (alive_by, hold_until) = if unclaimed { (ends, time(row, 7)?) } else { (None, ends) };
    let slot_number = NonZeroU32::new(row.get::<_, Option<u32>>(8)?.unwrap_or(0));
    let (fence, weight) = (Fence::new(unsigned(row, 5)?), row.get(3)?);
    let stage = Stage::Holding { hold_until, fence, weight, slot_number, unclaimed };
    member(row, stage, alive_by)
}

fn waiter(row: &Row<'_>) -> Result<(AcquisitionId, Member)> {
    let ttl = row.get::<_, Option<i64>>(5)?.map(|ttl| Span::from_micros(ttl.cast_unsigned()));
    let share = Share { weight: row.get(3)?, numbered: row.get(6)? };
    let stage =
        Stage::Waiting { place: unsigned(row, 4)?, terms: Terms { lease: None, ttl }, share };
    member(row, stage, None)
}

/// What identifies the row of a name. A row with that id exists.
#[derive(Clone, Copy)]
pub(super) enum Find<'a> {
    Name(&'a str),
    Id(i64),
}

impl<'a> SqlRows<'a> {
    pub(super) fn find(
        tx: &'a Connection,
        find: Find<'a>,
        only_reads: bool,
        from: Option<ClientId>,
        peers: &'a dyn Peers,
    ) -> Result<Self> {
        let (name, found) = match find {
            Find::Name(name) => {
                let mut select = tx.prepare_cached(select_name!("name = ?1"))?;
                (name, select.query_row([name], name_row).optional()?)
            }
            Find::Id(id) => {
                let mut select = tx.prepare_cached(select_name!("id = ?1"))?;
                ("", select.query_row([id], name_row).optional()?)
            }
        };
        let (fence_lead, id, row) = if let Some(found) = found {
            found
        } else {
            let mut select = tx.prepare_cached("SELECT fence_lead FROM meta")?;
            (select.query_row([], |row| unsigned(row, 0))?, 0, SemaphoreRow::default())
        };
        Ok(Self {
            tx,
            name,
            id,
            stored: row.clone(),
            row,
            fence_lead,
            from,
            peers,
            only_reads,
            expired: false,
            looked_for_dead: false,
            wake: Vec::new(),
            dead: Vec::new(),
        })
    }

    fn prepare(&self, sql: &str) -> Result<CachedStatement<'a>> {
        let statement = self.tx.prepare_cached(sql)?;
        if self.only_reads && !statement.readonly() {
            return Err(rusqlite::Error::InvalidQuery);
        }
        Ok(statement)
    }

    /// Runs a statement that returns members.
    fn members(
        &self,
        sql: &str,
        which: impl Params,
        read: impl FnMut(&Row<'_>) -> Result<(AcquisitionId, Member)>,
    ) -> Result<Vec<(AcquisitionId, Member)>> {
        self.prepare(sql)?.query_map(which, read)?.collect()
    }

    /// Writes the row of the name, or removes it if the name was forgotten.
    pub(super) fn save(&mut self) -> Result<()> {
        // While a client is still to be notified that it was evicted, the row stays, without content.
        let delete = "DELETE FROM semaphores WHERE id = ?1
                      AND NOT EXISTS (SELECT 1 FROM evicted WHERE semaphore = ?1)";
        let is_empty = self.row == SemaphoreRow::default();
        if is_empty && self.id != 0 && self.prepare(delete)?.execute([self.id])? > 0
            || self.row == self.stored
        {
            return Ok(());
        }
        self.insert_name()?;
        let SemaphoreRow { limits, holding, units, waiting, next_place, last_fence } = &self.row;
        self.prepare(
            "UPDATE semaphores SET capacity = ?2, held = ?3, units = ?4, waiting = ?5, next_place = ?6, last_fence = ?7
             WHERE id = ?1",
        )?
        .execute(params![
            self.id,
            limits.declared(),
            i64::try_from(*holding).unwrap_or(i64::MAX),
            units,
            i64::try_from(*waiting).unwrap_or(i64::MAX),
            next_place.cast_signed(),
            last_fence.cast_signed()
        ])?;
        let others = |limits: &'_ Limits| {
            let (pinned, paused, pace) = (limits.pinned(), limits.paused(), limits.pace());
            (pinned, paused.cloned(), pace)
        };
        if others(limits) == others(&self.stored.limits) {
            return Ok(());
        }
        let paused = limits.paused();
        let count = match limits.pace() {
            Pace::Undeclared => None,
            Pace::Free => Some(0),
            Pace::Metered(meter) => Some(meter.rate.count.cast_signed()),
        };
        let meter = limits.meter();
        self.prepare(
            "UPDATE semaphores SET pinned = ?2, paused = ?3, paused_by = ?4, pause_reason = ?5, rate_count = ?6,
                    rate_period = ?7, rate_burst = ?8, rate_full_at = ?9, rate_returns_from = ?10
             WHERE id = ?1",
        )?
        .execute(params![
            self.id,
            limits.pinned(),
            paused.map(|paused| micros(paused.since)),
            paused.map(|paused| &paused.by),
            paused.map(|paused| &paused.reason),
            count,
            meter.map(|meter| meter.rate.period.micros().cast_signed()),
            meter.map(|meter| meter.rate.burst),
            meter.map(|meter| micros(meter.full_at)),
            meter.map(|meter| meter.returns_from.cast_signed())
        ])
        .map(drop)
    }

    fn insert_name(&mut self) -> Result<()> {
        if self.id == 0 {
            let insert =
                "INSERT INTO semaphores (name, capacity, held, waiting, next_place, last_fence)
                          VALUES (?1, 0, 0, 0, 0, 0)";
            self.id = self.prepare(insert)?.insert([self.name])?;
        }
        Ok(())
    }

    /// Returns when the next holder expires.
    pub(super) fn next_expiry(&self) -> Result<Option<Time>> {
        self.prepare(
            "SELECT ends FROM holders WHERE semaphore = ?1 AND ends IS NOT NULL ORDER BY ends LIMIT 1",
        )?
        .query_row([self.id], |row| time(row, 0))
        .optional()
        .map(Option::flatten)
    }

    /// Returns the first [`WATCHERS`] clients among the first [`WATCHED_PLACES`] waiters.
    pub(super) fn near_the_head(&self) -> Result<Vec<ClientId>> {
        let mut first = Vec::new();
        if self.row.waiting == 0 {
            return Ok(first);
        }
        let mut select = self
            .prepare("SELECT client FROM waiters WHERE semaphore = ?1 ORDER BY place LIMIT ?2")?;
        let mut rows = select.query(params![self.id, WATCHED_PLACES])?;
        while first.len() < WATCHERS
            && let Some(row) = rows.next()?
        {
            let client = client(row, 0)?;
            if !first.contains(&client) {
                first.push(client);
            }
        }
        Ok(first)
    }

    pub(super) fn wake(&mut self, client: ClientId) {
        if !self.wake.contains(&client) {
            self.wake.push(client);
        }
    }
}

/// The label of an acquisition.
pub(super) type Label = Option<Arc<str>>;

impl Rows for SqlRows<'_> {
    /// `None` for a member that is removed: nobody reads its label.
    type Kept = Label;
    type Error = rusqlite::Error;

    fn row(&self) -> &SemaphoreRow {
        &self.row
    }

    fn row_mut(&mut self) -> &mut SemaphoreRow {
        &mut self.row
    }

    fn keep(label: Option<&Arc<str>>) -> Label {
        label.cloned()
    }

    fn member(&self, id: AcquisitionId) -> Result<Option<Member>> {
        let ((client, sequence), semaphore) = (columns(id), self.id);
        let which = params![semaphore, client, sequence];
        let select = concat!(
            "SELECT ",
            holder_columns!(),
            " FROM holders WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3"
        );
        let mut found = self.prepare(select)?.query_row(which, holder).optional()?;
        if found.is_none() && self.row.waiting > 0 {
            let select = concat!(
                "SELECT ",
                waiter_columns!(),
                " FROM waiters WHERE client = ?2 AND semaphore = ?1 AND sequence = ?3"
            );
            found = self.prepare(select)?.query_row(which, waiter).optional()?;
        }
        Ok(found.map(|(_, member)| member))
    }

    fn insert(&mut self, id: AcquisitionId, member: Member, label: Label) -> Result<()> {
        self.insert_name()?;
        let ((client, sequence), since) = (columns(id), micros(member.since));
        match member.stage {
            Stage::Waiting { place, terms, share } => self
                .prepare(
                    "INSERT INTO waiters (semaphore, place, client, sequence, since, ttl, label, weight, numbered)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                )?
                .execute(params![
                    self.id,
                    place.cast_signed(),
                    client,
                    sequence,
                    since,
                    terms.ttl.map(|ttl| ttl.micros().cast_signed()),
                    label,
                    share.weight,
                    share.numbered
                ]),
            Stage::Holding { hold_until, fence, weight, slot_number, unclaimed } => self
                .prepare(
                    "INSERT INTO holders
                     (semaphore, client, sequence, since, ends, fence, label, unclaimed, hold_until, weight, slot)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
                )?
                .execute(params![
                    self.id,
                    client,
                    sequence,
                    since,
                    member.ends().map(micros),
                    fence.get().cast_signed(),
                    label,
                    unclaimed,
                    hold_until.filter(|_| unclaimed).map(micros),
                    weight,
                    slot_number.map(NonZeroU32::get)
                ]),
        }
        .map(drop)
    }

    /// Without leases, only a claim changes something.
    fn update(&mut self, id: AcquisitionId, _before: &Member, after: &Member) -> Result<()> {
        let (client, sequence) = columns(id);
        self.prepare(
            "UPDATE holders SET unclaimed = 0, ends = ?4, hold_until = NULL
             WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3",
        )?
        .execute(params![self.id, client, sequence, after.ends().map(micros)])
        .map(drop)
    }

    fn remove(&mut self, id: AcquisitionId) -> Result<Option<(Member, Label)>> {
        let ((client, sequence), semaphore) = (columns(id), self.id);
        let which = params![semaphore, client, sequence];
        let delete = concat!(
            "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3 RETURNING ",
            holder_columns!()
        );
        let mut removed = self.prepare(delete)?.query_row(which, holder).optional()?;
        if removed.is_none() && self.row.waiting > 0 {
            let delete = concat!(
                "DELETE FROM waiters WHERE client = ?2 AND semaphore = ?1 AND sequence = ?3 RETURNING ",
                waiter_columns!()
            );
            removed = self.prepare(delete)?.query_row(which, waiter).optional()?;
        }
        Ok(removed.map(|(_, member)| (member, None)))
    }

    fn promote(&mut self, id: AcquisitionId, waiter: &Member, holder: &Member) -> Result<Label> {
        let Stage::Waiting { place, .. } = waiter.stage else { return Ok(None) };
        let label: Label = self
            .prepare("DELETE FROM waiters WHERE semaphore = ?1 AND place = ?2 RETURNING label")?
            .query_row(params![self.id, place.cast_signed()], |row| row.get(0))?;
        self.insert(id, *holder, label.clone())?;
        if matches!(holder.stage, Stage::Holding { unclaimed: true, .. }) {
            self.wake(id.client());
        }
        Ok(label)
    }

    fn first_waiter(&self, from_place: u64) -> Result<Option<(AcquisitionId, Member)>> {
        let select = concat!(
            "SELECT ",
            waiter_columns!(),
            " FROM waiters WHERE semaphore = ?1 AND place >= ?2 ORDER BY place LIMIT 1"
        );
        let which = params![self.id, from_place.cast_signed()];
        self.prepare(select)?.query_row(which, waiter).optional()
    }

    /// Returns an upper bound, because gaps in the queue count.
    fn waiters_before(&self, place: u64) -> Result<usize> {
        let first: i64 = self
            .prepare("SELECT place FROM waiters WHERE semaphore = ?1 ORDER BY place LIMIT 1")?
            .query_row([self.id], |row| row.get(0))?;
        Ok(usize::try_from(place - first.cast_unsigned()).unwrap_or(usize::MAX))
    }

    fn lowest_free_number(&self) -> Result<NonZeroU32> {
        let mut select = self.prepare(
            "SELECT slot FROM holders WHERE semaphore = ?1 AND slot IS NOT NULL ORDER BY slot",
        )?;
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
        let which = params![self.id, micros(now)];
        let is_due = "SELECT 1 FROM holders WHERE semaphore = ?1 AND ends <= ?2 LIMIT 1";
        if self.only_reads && !self.prepare(is_due)?.exists(which)? {
            return Ok(Vec::new());
        }
        let delete = concat!(
            "DELETE FROM holders WHERE semaphore = ?1 AND ends <= ?2 RETURNING ",
            holder_columns!()
        );
        let removed = self.members(delete, which, holder)?.into_iter();
        Ok(removed.map(|(id, member)| (id, member, None)).collect())
    }

    /// Without leases, the client of the member would never find out by itself.
    fn record_cancel(&mut self, id: AcquisitionId, _member: &Member, _now: Time) -> Result<()> {
        let (client, sequence) = columns(id);
        self.prepare(
            "INSERT OR IGNORE INTO evicted (client, semaphore, sequence) VALUES (?1, ?2, ?3)",
        )?
        .execute(params![client, self.id, sequence])?;
        self.wake(id.client());
        Ok(())
    }

    /// Searches among the clients whose death would let another waiter in: the holders, and those near the head. The
    /// sender is left out.
    fn dead_clients(&mut self) -> Result<Vec<ClientId>> {
        if std::mem::replace(&mut self.looked_for_dead, true) {
            return Ok(Vec::new());
        }
        let mut select =
            self.prepare("SELECT DISTINCT client FROM holders WHERE semaphore = ?1")?;
        let holders = select.query_map([self.id], |row| client(row, 0))?;
        let mut clients: Vec<_> = holders.collect::<Result<_>>()?;
        clients.extend(self.near_the_head()?);
        clients.sort_unstable();
        clients.dedup();
        clients.retain(|client| self.from != Some(*client) && self.peers.is_dead(*client));
        Ok(clients)
    }

    fn remove_client(&mut self, client: ClientId, is_dead: bool) -> Result<Vec<Member>> {
        let which = params![self.id, client.number().cast_signed()];
        let mut removed = Vec::new();
        if is_dead {
            self.dead.push(client);
            let delete = concat!(
                "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 RETURNING ",
                holder_columns!()
            );
            removed = self.members(delete, which, holder)?;
        }
        if self.row.waiting > 0 {
            let delete = concat!(
                "DELETE FROM waiters WHERE client = ?2 AND semaphore = ?1 RETURNING ",
                waiter_columns!()
            );
            removed.extend(self.members(delete, which, waiter)?);
        }
        Ok(removed.into_iter().map(|(_, member)| member).collect())
    }

    fn fence_lead(&self) -> u64 {
        self.fence_lead
    }
}
