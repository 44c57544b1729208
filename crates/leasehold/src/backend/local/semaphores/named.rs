//! One name, while a batch is applied to it.

use std::num::NonZeroU32;

use rusqlite::{CachedStatement, Connection, OptionalExtension, Result, Row, params};

use super::Applied;
use crate::clock::{Span, Time};
use crate::machine::{Declared, Held, Meter, Rate, Share};
use crate::name::Name;
use crate::{AcquisitionId, ClientId, Fence};

/// The row of a name.
#[derive(Clone, Copy, PartialEq, Default)]
pub(super) struct State {
    /// The newest declaration. Zero if no client has declared a capacity yet.
    pub(super) declared: u32,
    /// The capacity that overrides the declared one.
    pub(super) pinned: Option<u32>,
    /// Since when nothing is granted.
    pub(super) paused: Option<i64>,
    /// The rate at which permits are granted. `None` if nobody has declared or set one.
    pub(super) pace: Option<Pace>,
    pub(super) held: u32,
    /// The total weight of the holders.
    pub(super) units: u32,
    pub(super) waiting: u64,
    pub(super) next_place: i64,
    pub(super) last_fence: u64,
}

/// The rate that a client has declared or an operator has set.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pace {
    /// Explicitly no rate.
    Free,
    Metered(Meter),
}

pub(super) struct Named<'a> {
    pub(super) tx: &'a Connection,
    pub(super) row: i64,
    pub(super) state: State,
    stored: State,
    fence_lead: u64,
    pub(super) applied: Applied,
    /// The place from which waiters are still to be tried. In this batch, every waiter before it was out of reach.
    pub(super) first_place: i64,
    pub(super) out_of_reach: Vec<ClientId>,
    pub(super) passed_over: u32,
    pub(super) looked_for_dead: bool,
    pub(super) expired: bool,
    pub(super) dead: Vec<ClientId>,
    /// The result of [`next_token`](Self::next_token) when the batch began.
    pub(super) token_before: Option<(Time, ClientId)>,
}

pub(super) struct Waiter {
    pub(super) place: i64,
    pub(super) id: AcquisitionId,
    pub(super) ttl: Option<Span>,
    pub(super) label: Option<String>,
    pub(super) share: Share,
}

#[derive(Clone, Copy)]
pub(super) struct Holder {
    pub(super) fence: Fence,
    /// The deadline for claiming the permit, if another client granted it.
    pub(super) claim_by: Option<Time>,
    pub(super) hold_until: Option<Time>,
    pub(super) weight: u32,
    pub(super) slot_number: Option<NonZeroU32>,
}

impl Holder {
    pub(super) fn held(&self, now: Time) -> Held {
        let slot_number = self.slot_number;
        Held { slot_number, fence: self.fence, valid_for: self.ends().map(|ends| ends - now) }
    }

    /// Returns the earlier of its deadlines.
    fn ends(&self) -> Option<Time> {
        self.claim_by.into_iter().chain(self.hold_until).min()
    }
}

/// Returns an id as it is stored: its client and its sequence.
pub(super) fn columns(id: AcquisitionId) -> (i64, i64) {
    (id.client().number().cast_signed(), id.sequence().cast_signed())
}

pub(super) fn micros(time: Time) -> i64 {
    time.micros().cast_signed()
}

/// Reads the rate from a row with the columns of `select!`.
fn pace(row: &Row<'_>) -> Result<Option<Pace>> {
    let said: Option<i64> = row.get(10)?;
    Ok(said
        .map(|_| meter_of(row, 10))
        .transpose()?
        .map(|meter| meter.map_or(Pace::Free, Pace::Metered)))
}

/// Reads a meter from the five columns that begin with `rate_count`.
pub(in crate::backend::local) fn meter_of(row: &Row<'_>, first: usize) -> Result<Option<Meter>> {
    let unsigned = |column| row.get::<_, i64>(column).map(i64::cast_unsigned);
    if row.get::<_, Option<i64>>(first)?.is_none_or(|count| count <= 0) {
        return Ok(None);
    }
    let rate = Rate::stored(unsigned(first)?, unsigned(first + 1)?, unsigned(first + 2)?);
    let Some(rate) = rate else { return Ok(None) };
    let full_at = Time::from_micros(unsigned(first + 3)?);
    Ok(Some(Meter { rate, full_at, returns_from: unsigned(first + 4)? }))
}

pub(super) fn client(row: &Row<'_>, column: usize) -> Result<ClientId> {
    let number: i64 = row.get(column)?;
    ClientId::from_number(number.cast_unsigned())
        .ok_or(rusqlite::Error::IntegralValueOutOfRange(column, number))
}

/// The columns of a name's row, in the order in which `Named::read` reads them.
macro_rules! select {
    () => {
        "SELECT id, capacity, held, waiting, next_place, last_fence, (SELECT fence_lead FROM meta), pinned, paused, units,
                rate_count, rate_period, rate_burst, rate_full_at, rate_returns_from"
    };
}

/// The row of a name, and its queue.
impl<'a> Named<'a> {
    pub(super) fn load(tx: &'a Connection, name: &Name, make: bool) -> Result<Option<Self>> {
        let found = tx.prepare_cached(concat!(select!(), " FROM semaphores WHERE name = ?1"))?;
        let found = Self::read(found, tx, name.as_str())?;
        if found.is_some() || !make {
            return Ok(found);
        }
        let insert =
            "INSERT INTO semaphores (name, capacity, held, waiting, next_place, last_fence)
                      VALUES (?1, 0, 0, 0, 0, 0)";
        tx.prepare_cached(insert)?.execute([name.as_str()])?;
        let found = tx.prepare_cached(concat!(select!(), " FROM semaphores WHERE name = ?1"))?;
        Self::read(found, tx, name.as_str())
    }

    pub(super) fn load_by_row(tx: &'a Connection, row: i64) -> Result<Option<Self>> {
        let found = tx.prepare_cached(concat!(select!(), " FROM semaphores WHERE id = ?1"))?;
        Self::read(found, tx, row)
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
                pace: pace(row)?,
                held: row.get(2)?,
                units: row.get(9)?,
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
                token_before: None,
            })
        };
        statement.query_row([by], read).optional()
    }

    /// Writes the counters back, or removes a name that was forgotten. Returns the result of the batch, and the clients
    /// that it found dead.
    pub(super) fn save(self) -> Result<(Applied, Vec<ClientId>)> {
        // While a client is still to be notified that it was evicted, the row stays, without content.
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
            let State { declared, pinned, paused, pace, held, units, waiting, next_place, .. } =
                self.state;
            let last_fence = self.state.last_fence.cast_signed();
            self.tx
                .prepare_cached(
                    "UPDATE semaphores SET capacity = ?2, held = ?3, waiting = ?4, next_place = ?5, last_fence = ?6,
                            pinned = ?7, paused = ?8, units = ?9
                     WHERE id = ?1",
                )?
                .execute(params![
                    self.row,
                    declared,
                    held,
                    waiting.cast_signed(),
                    next_place,
                    last_fence,
                    pinned,
                    paused,
                    units
                ])?;
            if pace != self.stored.pace {
                self.save_pace(pace)?;
            }
        }
        Ok((self.applied, self.dead))
    }

    fn save_pace(&self, pace: Option<Pace>) -> Result<()> {
        let meter = match pace {
            Some(Pace::Metered(meter)) => Some(meter),
            _ => None,
        };
        let count = pace.map(|_| meter.map_or(0, |meter| meter.rate.count));
        self.tx
            .prepare_cached(
                "UPDATE semaphores SET rate_count = ?2, rate_period = ?3, rate_burst = ?4, rate_full_at = ?5,
                        rate_returns_from = ?6
                 WHERE id = ?1",
            )?
            .execute(params![
                self.row,
                count.map(u64::cast_signed),
                meter.map(|meter| meter.rate.period.micros().cast_signed()),
                meter.map(|meter| meter.rate.burst),
                meter.map(|meter| micros(meter.full_at)),
                meter.map(|meter| meter.returns_from.cast_signed())
            ])
            .map(drop)
    }

    /// Whether a permit of this weight can be granted.
    pub(super) fn fits(&self, weight: u32, now: Time) -> bool {
        self.has_units(weight) && self.meter().is_none_or(|meter| meter.is_free(now))
    }

    fn has_units(&self, weight: u32) -> bool {
        self.state.paused.is_none() && weight <= self.capacity().saturating_sub(self.state.units)
    }

    pub(super) fn meter(&self) -> Option<&Meter> {
        match &self.state.pace {
            Some(Pace::Metered(meter)) => Some(meter),
            Some(Pace::Free) | None => None,
        }
    }

    /// Returns when the first waiter gets its token, if it waits for nothing else, and the client of that waiter.
    pub(super) fn next_token(&self, now: Time) -> Result<Option<(Time, ClientId)>> {
        let Some(meter) = self.meter().filter(|meter| !meter.is_free(now)) else { return Ok(None) };
        let head = self.first_waiter_from(0)?.filter(|head| self.has_units(head.share.weight));
        let waiting = usize::try_from(self.state.waiting).unwrap_or(usize::MAX);
        Ok(head.map(|head| (meter.next_at(now, waiting), head.id.client())))
    }

    /// Sets the rate from now on; `None` removes it.
    pub(super) fn set_rate(&mut self, rate: Option<Rate>, now: Time) {
        let last_fence = self.state.last_fence;
        match (&mut self.state.pace, rate) {
            (Some(Pace::Metered(meter)), Some(rate)) => meter.change(rate, now, last_fence),
            (pace, Some(rate)) => *pace = Some(Pace::Metered(Meter::new(rate, last_fence))),
            (pace, None) => *pace = Some(Pace::Free),
        }
    }

    /// See [`Meter::settle`].
    pub(super) fn settle(&mut self, now: Time) {
        if let Some(Pace::Metered(meter)) = &mut self.state.pace {
            meter.settle(now);
        }
    }

    /// Returns to the meter the tokens of permits that were never used.
    pub(super) fn return_tokens(&mut self, unused: Vec<Fence>) {
        if let Some(Pace::Metered(meter)) = &mut self.state.pace {
            meter.return_tokens(unused, self.state.last_fence);
        }
    }

    pub(super) fn capacity(&self) -> u32 {
        self.state.pinned.unwrap_or(self.state.declared)
    }

    /// Returns the capacity that would be in force after this declaration.
    pub(super) fn capacity_with(&self, declared: Declared) -> u32 {
        let counts = declared.is_new || self.state.declared == 0;
        self.state.pinned.unwrap_or(if counts { declared.capacity } else { self.state.declared })
    }

    pub(super) fn declare(&mut self, declared: Declared, now: Time) {
        let Declared { capacity, is_new, rate, rate_is_new } = declared;
        if is_new || self.state.declared == 0 {
            self.state.declared = capacity;
        }
        if let Some(rate) = rate
            && (rate_is_new || self.state.pace.is_none())
        {
            self.set_rate(Some(rate), now);
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
                "SELECT fence, ends, unclaimed, hold_until, weight, slot FROM holders
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
                Ok(Holder {
                    fence: Fence::new(fence.cast_unsigned()),
                    claim_by,
                    hold_until,
                    weight: row.get(4)?,
                    slot_number: NonZeroU32::new(row.get::<_, Option<u32>>(5)?.unwrap_or(0)),
                })
            })
            .optional()
    }

    /// Returns an upper bound of the number of waiters ahead of `id`, because gaps in the queue count. `None` if `id`
    /// does not wait.
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
                share: Share { weight: row.get(5)?, numbered: row.get(6)? },
            })
        };
        self.tx
            .prepare_cached(
                "SELECT place, client, sequence, ttl, label, weight, numbered FROM waiters
                 WHERE semaphore = ?1 AND place >= ?2
                 ORDER BY place LIMIT 1",
            )?
            .query_row(params![self.row, place], read)
            .optional()
    }

    /// Returns the lowest free slot number, if the permit is to have one.
    pub(super) fn slot_number(&self, share: Share) -> Result<Option<NonZeroU32>> {
        if !share.numbered {
            return Ok(None);
        }
        let mut select = self.tx.prepare_cached(
            "SELECT slot FROM holders WHERE semaphore = ?1 AND slot IS NOT NULL ORDER BY slot",
        )?;
        let mut taken = select.query([self.row])?;
        let mut lowest = NonZeroU32::MIN;
        while let Some(row) = taken.next()? {
            if row.get::<_, u32>(0)? != lowest.get() {
                break;
            }
            lowest = lowest.saturating_add(1);
        }
        Ok(Some(lowest))
    }

    pub(super) fn insert_holder(
        &mut self,
        id: AcquisitionId,
        holder: &Holder,
        label: Option<&str>,
        now: Time,
    ) -> Result<()> {
        self.state.held += 1;
        self.state.units += holder.weight;
        if let Some(Pace::Metered(meter)) = &mut self.state.pace {
            meter.take(now, holder.fence);
        }
        let (client, sequence) = columns(id);
        let fence = holder.fence.get().cast_signed();
        let unclaimed = holder.claim_by.is_some();
        self.tx
            .prepare_cached(
                "INSERT INTO holders
                 (semaphore, client, sequence, since, ends, fence, label, unclaimed, hold_until, weight, slot)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
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
                holder.hold_until.filter(|_| unclaimed).map(micros),
                holder.weight,
                holder.slot_number.map(NonZeroU32::get)
            ])
            .map(drop)
    }
}
