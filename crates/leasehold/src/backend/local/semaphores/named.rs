//! One name, while a batch is applied to it.

use rusqlite::{CachedStatement, Connection, OptionalExtension, Result, Row, params};

use super::Applied;
use crate::clock::{Span, Time};
use crate::machine::{Declared, Held};
use crate::name::Name;
use crate::{AcquisitionId, ClientId, Fence};

/// The row of a name.
#[derive(Clone, Copy, PartialEq, Default)]
pub(super) struct State {
    /// By the newest declaration. Zero if nobody has declared one yet.
    pub(super) declared: u32,
    /// The capacity that counts instead.
    pub(super) pinned: Option<u32>,
    /// Since when nothing is granted.
    pub(super) paused: Option<i64>,
    pub(super) held: u32,
    pub(super) waiting: u64,
    pub(super) next_place: i64,
    last_fence: u64,
}

pub(super) struct Named<'a> {
    pub(super) tx: &'a Connection,
    pub(super) row: i64,
    pub(super) state: State,
    stored: State,
    fence_lead: u64,
    pub(super) applied: Applied,
    /// Nobody who waits before this place can be reached, as far as this batch goes.
    pub(super) first_place: i64,
    pub(super) out_of_reach: Vec<ClientId>,
    pub(super) passed_over: u32,
    pub(super) looked_for_dead: bool,
    pub(super) expired: bool,
    pub(super) dead: Vec<ClientId>,
}

pub(super) struct Waiter {
    pub(super) place: i64,
    pub(super) id: AcquisitionId,
    pub(super) ttl: Option<Span>,
    pub(super) label: Option<String>,
}

#[derive(Clone, Copy)]
pub(super) struct Holder {
    pub(super) fence: Fence,
    /// By when the permit has to be claimed, if it was granted by another client.
    pub(super) claim_by: Option<Time>,
    pub(super) hold_until: Option<Time>,
}

impl Holder {
    pub(super) fn held(&self, slot_number: u32, now: Time) -> Held {
        Held { slot_number, fence: self.fence, valid_for: self.ends().map(|ends| ends - now) }
    }

    /// At the first of its deadlines.
    fn ends(&self) -> Option<Time> {
        self.claim_by.into_iter().chain(self.hold_until).min()
    }
}

/// An id as it is stored: its client and its sequence.
pub(super) fn columns(id: AcquisitionId) -> (i64, i64) {
    (id.client().number().cast_signed(), id.sequence().cast_signed())
}

pub(super) fn micros(time: Time) -> i64 {
    time.micros().cast_signed()
}

pub(super) fn client(row: &Row<'_>, column: usize) -> Result<ClientId> {
    let number: i64 = row.get(column)?;
    ClientId::from_number(number.cast_unsigned())
        .ok_or(rusqlite::Error::IntegralValueOutOfRange(column, number))
}

/// The row of a name, and its queue.
impl<'a> Named<'a> {
    pub(super) fn load(tx: &'a Connection, name: &Name, make: bool) -> Result<Option<Self>> {
        let select = "SELECT id, capacity, held, waiting, next_place, last_fence, (SELECT fence_lead FROM meta), pinned, paused
                      FROM semaphores WHERE name = ?1";
        let found = tx.prepare_cached(select)?;
        let found = Self::read(found, tx, name.as_str())?;
        if found.is_some() || !make {
            return Ok(found);
        }
        let insert = "INSERT INTO semaphores (name, capacity, held, waiting, next_place, last_fence)
                      VALUES (?1, 0, 0, 0, 0, 0)
                      RETURNING id, capacity, held, waiting, next_place, last_fence, (SELECT fence_lead FROM meta),
                                pinned, paused";
        Self::read(tx.prepare_cached(insert)?, tx, name.as_str())
    }

    pub(super) fn load_by_row(tx: &'a Connection, row: i64) -> Result<Option<Self>> {
        let select = "SELECT id, capacity, held, waiting, next_place, last_fence, (SELECT fence_lead FROM meta), pinned, paused
                      FROM semaphores WHERE id = ?1";
        Self::read(tx.prepare_cached(select)?, tx, row)
    }

    fn read(
        mut statement: CachedStatement<'_>,
        tx: &'a Connection,
        by: impl rusqlite::ToSql,
    ) -> Result<Option<Self>> {
        let read = |row: &Row<'_>| {
            let state = State {
                declared: row.get(1)?,
                pinned: row.get(7)?,
                paused: row.get(8)?,
                held: row.get(2)?,
                waiting: row.get::<_, i64>(3)?.cast_unsigned(),
                next_place: row.get(4)?,
                last_fence: row.get::<_, i64>(5)?.cast_unsigned(),
            };
            Ok(Self {
                tx,
                row: row.get(0)?,
                state,
                stored: state,
                fence_lead: row.get::<_, i64>(6)?.cast_unsigned(),
                applied: Applied::default(),
                first_place: 0,
                out_of_reach: Vec::new(),
                passed_over: 0,
                looked_for_dead: false,
                expired: false,
                dead: Vec::new(),
            })
        };
        statement.query_row([by], read).optional()
    }

    /// Writes the counters back, or removes a name that was forgotten. Answers what came of the batch, and whom it found
    /// dead.
    pub(super) fn save(self) -> Result<(Applied, Vec<ClientId>)> {
        // Where somebody is still to be told that it was evicted, the row stays, and says nothing.
        let removed = self.state == State::default()
            && self
                .tx
                .prepare_cached(
                    "DELETE FROM semaphores WHERE id = ?1
                     AND NOT EXISTS (SELECT 1 FROM evicted WHERE semaphore = ?1)",
                )?
                .execute([self.row])?
                > 0;
        if !removed && self.state != self.stored {
            let State { declared, pinned, paused, held, waiting, next_place, last_fence } =
                self.state;
            let (waiting, last_fence) = (waiting.cast_signed(), last_fence.cast_signed());
            self.tx
                .prepare_cached(
                    "UPDATE semaphores SET capacity = ?2, held = ?3, waiting = ?4, next_place = ?5, last_fence = ?6,
                            pinned = ?7, paused = ?8
                     WHERE id = ?1",
                )?
                .execute(params![
                    self.row, declared, held, waiting, next_place, last_fence, pinned, paused
                ])?;
        }
        Ok((self.applied, self.dead))
    }

    pub(super) fn has_room(&self) -> bool {
        self.state.paused.is_none() && self.state.held < self.capacity()
    }

    pub(super) fn capacity(&self) -> u32 {
        self.state.pinned.unwrap_or(self.state.declared)
    }

    pub(super) fn declare(&mut self, Declared { capacity, is_new }: Declared) {
        if is_new || self.state.declared == 0 {
            self.state.declared = capacity;
        }
    }

    /// See [`StoreClock`](crate::backend::local::schema::StoreClock).
    pub(super) fn mint(&mut self, now: Time) -> Fence {
        let by_clock = now.micros() + self.fence_lead;
        self.state.last_fence = (self.state.last_fence + 1).max(by_clock);
        Fence::new(self.state.last_fence)
    }

    pub(super) fn holder(&self, id: AcquisitionId) -> Result<Option<Holder>> {
        let (client, sequence) = columns(id);
        self.tx
            .prepare_cached(
                "SELECT fence, ends, unclaimed, hold_until FROM holders
                 WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3",
            )?
            .query_row(params![self.row, client, sequence], |row| {
                let time = |column| -> Result<Option<Time>> {
                    let time: Option<i64> = row.get(column)?;
                    Ok(time.map(|time| Time::from_micros(time.cast_unsigned())))
                };
                let fence: i64 = row.get(0)?;
                let (ends, unclaimed): (_, bool) = (time(1)?, row.get(2)?);
                let (claim_by, hold_until) =
                    if unclaimed { (ends, time(3)?) } else { (None, ends) };
                Ok(Holder { fence: Fence::new(fence.cast_unsigned()), claim_by, hold_until })
            })
            .optional()
    }

    /// How many waiters are ahead of a waiter at most, because gaps in the queue count; none if it does not wait.
    pub(super) fn ahead(&self, id: AcquisitionId) -> Result<Option<usize>> {
        let (client, sequence) = columns(id);
        let ahead: Option<i64> = self
            .tx
            .prepare_cached(
                "SELECT place - (SELECT place FROM waiters WHERE semaphore = ?1 ORDER BY place LIMIT 1)
                 FROM waiters WHERE client = ?2 AND semaphore = ?1 AND sequence = ?3",
            )?
            .query_row(params![self.row, client, sequence], |row| row.get(0))
            .optional()?;
        Ok(ahead.and_then(|ahead| usize::try_from(ahead).ok()))
    }

    pub(super) fn first_waiter_from(&self, place: i64) -> Result<Option<Waiter>> {
        let read = |row: &Row<'_>| {
            let (sequence, ttl): (i64, Option<i64>) = (row.get(2)?, row.get(3)?);
            Ok(Waiter {
                place: row.get(0)?,
                id: AcquisitionId::new(client(row, 1)?, sequence.cast_unsigned()),
                ttl: ttl.map(|ttl| Span::from_micros(ttl.cast_unsigned())),
                label: row.get(4)?,
            })
        };
        self.tx
            .prepare_cached(
                "SELECT place, client, sequence, ttl, label FROM waiters WHERE semaphore = ?1 AND place >= ?2
                 ORDER BY place LIMIT 1",
            )?
            .query_row(params![self.row, place], read)
            .optional()
    }

    pub(super) fn insert_holder(
        &mut self,
        id: AcquisitionId,
        holder: &Holder,
        label: Option<&str>,
        now: Time,
    ) -> Result<()> {
        self.state.held += 1;
        let (client, sequence) = columns(id);
        let fence = holder.fence.get().cast_signed();
        let unclaimed = holder.claim_by.is_some();
        self.tx
            .prepare_cached(
                "INSERT INTO holders (semaphore, client, sequence, since, ends, fence, label, unclaimed, hold_until)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            )?
            .execute(params![
                self.row,
                client,
                sequence,
                micros(now),
                holder.ends().map(micros),
                fence,
                label,
                unclaimed,
                holder.hold_until.filter(|_| unclaimed).map(micros)
            ])
            .map(drop)
    }
}
