//! The transitions of one name.

use rusqlite::{CachedStatement, OptionalExtension, Result, params};

use super::named::{Holder, Named, State, Waiter, columns, micros};
use super::{Circumstances, PASSED_OVER};
use crate::backend::local::lifeline::Reach;
use crate::clock::{Span, Time};
use crate::machine::{Command, Declared, Known, Outcome, Role, Share, Steer, Steered};
use crate::{AcquisitionId, ClientId, Fence};

/// The sender of an enqueue.
struct Newcomer<'a> {
    id: AcquisitionId,
    wait: bool,
    ttl: Option<Span>,
    share: Share,
    label: Option<&'a str>,
}

impl Named<'_> {
    pub(super) fn is_due(&self, now: Time) -> Result<bool> {
        self.tx
            .prepare_cached("SELECT 1 FROM holders WHERE semaphore = ?1 AND ends <= ?2 LIMIT 1")?
            .exists(params![self.row, micros(now)])
    }

    /// Removes expired holders, once per batch: the whole batch happens at one time.
    pub(super) fn expire(&mut self, call: &Circumstances<'_>) -> Result<()> {
        if std::mem::replace(&mut self.expired, true) {
            return Ok(());
        }
        self.settle(call.now);
        let expired = self.tx.prepare_cached(
            "DELETE FROM holders WHERE semaphore = ?1 AND ends <= ?2 RETURNING weight, fence, unclaimed",
        )?;
        self.remove_holders(expired, micros(call.now))
    }

    /// Runs a statement that deletes holders of this name by `which` and returns their weight, fence and unclaimed
    /// flag. Subtracts them from the counters, and returns the tokens of unclaimed permits.
    pub(super) fn remove_holders(
        &mut self,
        mut delete: CachedStatement<'_>,
        which: i64,
    ) -> Result<()> {
        let (mut rows, mut unused) = (delete.query(params![self.row, which])?, Vec::new());
        while let Some(row) = rows.next()? {
            let (weight, fence, unclaimed): (u32, i64, bool) =
                (row.get(0)?, row.get(1)?, row.get(2)?);
            self.state.held -= 1;
            self.state.units -= weight;
            if unclaimed {
                unused.push(Fence::new(fence.cast_unsigned()));
            }
        }
        self.return_tokens(unused);
        Ok(())
    }

    /// Grants permits to waiters, in order, as long as they fit. Returns whether a newcomer may be granted a permit,
    /// because every remaining waiter is out of reach.
    pub(super) fn grant(&mut self, call: &mut Circumstances<'_>) -> Result<bool> {
        while self.state.waiting > 0 && self.passed_over < PASSED_OVER {
            if !self.fits(1, call.now) {
                return Ok(false);
            }
            let Some(waiter) = self.first_waiter_from(self.first_place)? else { break };
            let client = waiter.id.client();
            let own = call.from == Some(client);
            let known = !own && self.out_of_reach.contains(&client);
            if !known && !self.fits(waiter.share.weight, call.now) {
                return Ok(false);
            }
            if !own {
                let reach = if known { Reach::Silent } else { (call.reach)(client) };
                match reach {
                    Reach::Reached => {}
                    Reach::Silent => {
                        if !known {
                            self.out_of_reach.push(client);
                        }
                        self.passed_over += 1;
                        self.first_place = waiter.place + 1;
                        continue;
                    }
                    Reach::Inherited => {
                        self.remove_waiters(client)?;
                        continue;
                    }
                    Reach::Dead => {
                        self.remove_dead_client_here(client)?;
                        continue;
                    }
                }
            }
            self.promote(&waiter, own, call)?;
        }
        Ok(true)
    }

    /// Makes a waiter a holder. If it is the sender's own, the reply reports it. Otherwise its client must claim the
    /// permit in time.
    fn promote(&mut self, waiter: &Waiter, own: bool, call: &Circumstances<'_>) -> Result<()> {
        self.tx
            .prepare_cached("DELETE FROM waiters WHERE semaphore = ?1 AND place = ?2")?
            .execute(params![self.row, waiter.place])?;
        self.state.waiting -= 1;
        let holder = Holder {
            fence: self.mint(call.now),
            claim_by: (!own).then(|| call.now + call.confirm_within),
            hold_until: waiter.ttl.map(|ttl| call.now + ttl),
            weight: waiter.share.weight,
            slot_number: self.slot_number(waiter.share)?,
        };
        self.insert_holder(waiter.id, &holder, waiter.label.as_deref(), call.now)?;
        if own {
            self.applied.granted.push((waiter.id, holder.held(call.now)));
        } else {
            self.wake(waiter.id.client());
        }
        Ok(())
    }

    pub(super) fn command(
        &mut self,
        command: &Command,
        call: &mut Circumstances<'_>,
    ) -> Result<Outcome> {
        match command {
            Command::Enqueue { id, declared, wait, terms, share, label } => {
                let known = self.holder(*id)?;
                // A refused acquire declares nothing.
                let capacity = self.capacity_with(*declared);
                if share.weight > capacity && known.is_none() && self.ahead(*id)?.is_none() {
                    self.expire(call)?;
                    self.grant(call)?;
                    return Ok(Outcome::TooHeavy { capacity });
                }
                // Declare first: if that makes room, the room belongs to earlier waiters.
                self.declare(*declared, call.now);
                // If there is room and nobody waits, expired holders do not matter.
                let mut nobody_before = true;
                if self.state.waiting > 0 || !self.fits(share.weight, call.now) || known.is_some() {
                    self.expire(call)?;
                    nobody_before = self.grant(call)?;
                }
                let newcomer = Newcomer {
                    id: *id,
                    wait: *wait,
                    ttl: terms.ttl,
                    share: *share,
                    label: label.as_deref(),
                };
                self.enqueue(&newcomer, nobody_before, call)
            }
            Command::Release { id, known } => {
                // Remove first: a waiter that is being removed must not be granted a permit.
                let role = self.release(*id, *known, call)?;
                if self.state.waiting > 0 {
                    self.expire(call)?;
                    self.grant(call)?;
                }
                Ok(Outcome::Removed(role))
            }
            Command::Renew { id, .. } => {
                self.expire(call)?;
                self.grant(call)?;
                self.renew(*id, call.now)
            }
            Command::Steer { capacity, steer } => {
                self.expire(call)?;
                self.grant(call)?;
                // Forgetting a name must not declare a capacity for it first.
                if let Some(capacity) = capacity.filter(|_| *steer != Steer::Forget) {
                    self.declare(Declared::capacity(capacity, false), call.now);
                }
                self.steer(steer, call).map(Outcome::Steered)
            }
            Command::Sweep => {
                self.expire(call)?;
                self.grant(call)?;
                Ok(Outcome::Swept)
            }
        }
    }

    fn steer(&mut self, steer: &Steer, call: &mut Circumstances<'_>) -> Result<Steered> {
        if *steer == Steer::Forget {
            self.remove_dead_clients(call)?;
            let State { held, waiting, .. } = self.state;
            if held > 0 || waiting > 0 {
                let waiting = usize::try_from(waiting).unwrap_or(usize::MAX);
                return Ok(Steered::InUse { holding: held as usize, waiting });
            }
        }
        let State { declared, pinned, paused, pace, .. } = self.state;
        let is_known = declared > 0 || pinned.is_some() || paused.is_some() || pace.is_some();
        if !steer.sets() && !is_known {
            return Ok(Steered::Unknown);
        }
        match steer {
            Steer::Declare(capacity) => match self.state.pinned {
                Some(pinned) => return Ok(Steered::Pinned(pinned)),
                None => self.state.declared = *capacity,
            },
            Steer::Pin(capacity) => self.state.pinned = Some(*capacity),
            Steer::Unpin => self.state.pinned = None,
            Steer::Rate(rate) => self.set_rate(*rate, call.now),
            Steer::Pause { by, reason } => {
                self.state.paused.get_or_insert(micros(call.now));
                self.tx
                    .prepare_cached(
                        "UPDATE semaphores SET paused_by = ?2, pause_reason = ?3 WHERE id = ?1",
                    )?
                    .execute(params![self.row, by, reason])?;
            }
            Steer::Resume => self.state.paused = None,
            Steer::Forget => self.state = State::default(),
        }
        Ok(Steered::Done)
    }

    fn enqueue(
        &mut self,
        newcomer: &Newcomer<'_>,
        mut nobody_before: bool,
        call: &mut Circumstances<'_>,
    ) -> Result<Outcome> {
        let Newcomer { id, wait, ttl, share, label } = *newcomer;
        if self.holder(id)?.is_some() {
            return self.renew(id, call.now);
        }
        if self.state.waiting > 0
            && let Some(ahead) = self.ahead(id)?
        {
            return Ok(Outcome::Waiting { ahead });
        }
        if share.weight > self.capacity() {
            return Ok(Outcome::TooHeavy { capacity: self.capacity() });
        }
        if self.state.waiting == 0 && !self.fits(share.weight, call.now) {
            // With an empty queue, no other client checks whether the holders are alive.
            self.remove_dead_clients(call)?;
            nobody_before = true;
        }
        if nobody_before && self.fits(share.weight, call.now) {
            let holder = Holder {
                fence: self.mint(call.now),
                claim_by: None,
                hold_until: ttl.map(|ttl| call.now + ttl),
                weight: share.weight,
                slot_number: self.slot_number(share)?,
            };
            self.insert_holder(id, &holder, label, call.now)?;
            return Ok(Outcome::Held(holder.held(call.now)));
        }
        if !wait {
            return Ok(Outcome::Full);
        }
        let (client, sequence) = columns(id);
        let ttl = ttl.map(|ttl| ttl.micros().cast_signed());
        self.tx
            .prepare_cached(
                "INSERT INTO waiters (semaphore, place, client, sequence, since, ttl, label, weight, numbered)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            )?
            .execute(params![
                self.row,
                self.state.next_place,
                client,
                sequence,
                micros(call.now),
                ttl,
                label,
                share.weight,
                share.numbered
            ])?;
        let ahead = usize::try_from(self.state.waiting).unwrap_or(usize::MAX);
        self.state.next_place += 1;
        self.state.waiting += 1;
        Ok(Outcome::Waiting { ahead })
    }

    /// Claims a permit that another client has granted. Changes nothing otherwise, because there are no leases to
    /// renew.
    fn renew(&mut self, id: AcquisitionId, now: Time) -> Result<Outcome> {
        if self.holder(id)?.is_some_and(|holder| holder.claim_by.is_some()) {
            let (client, sequence) = columns(id);
            self.tx
                .prepare_cached(
                    "UPDATE holders SET unclaimed = 0, ends = hold_until, hold_until = NULL
                     WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3",
                )?
                .execute(params![self.row, client, sequence])?;
        }
        self.question(id, now)
    }

    /// Returns the state of an id.
    pub(super) fn question(&self, id: AcquisitionId, now: Time) -> Result<Outcome> {
        if let Some(holder) = self.holder(id)? {
            return Ok(Outcome::Held(holder.held(now)));
        }
        Ok(self.ahead(id)?.map_or(Outcome::Gone, |ahead| Outcome::Waiting { ahead }))
    }

    fn release(
        &mut self,
        id: AcquisitionId,
        known: Known,
        call: &Circumstances<'_>,
    ) -> Result<Role> {
        let (client, sequence) = columns(id);
        let held = self
            .tx
            .prepare_cached(
                "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3 RETURNING weight, fence",
            )?
            .query_row(params![self.row, client, sequence], |row| {
                Ok((row.get::<_, u32>(0)?, row.get::<_, i64>(1)?))
            })
            .optional()?;
        let role = if let Some((weight, fence)) = held {
            self.state.held -= 1;
            self.state.units -= weight;
            if known == Known::Unused {
                self.return_tokens(vec![Fence::new(fence.cast_unsigned())]);
            }
            Role::Holder
        } else {
            let waited = self
                .tx
                .prepare_cached(
                    "DELETE FROM waiters WHERE client = ?2 AND semaphore = ?1 AND sequence = ?3",
                )?
                .execute(params![self.row, client, sequence])?;
            if waited == 0 {
                return Ok(Role::Nobody);
            }
            self.state.waiting -= 1;
            Role::Waiter
        };
        if call.from != Some(id.client()) {
            // There are no renewals, so its client would never find out by itself.
            self.tx
                .prepare_cached(
                    "INSERT OR IGNORE INTO evicted (client, semaphore, sequence) VALUES (?1, ?2, ?3)",
                )?
                .execute(params![client, self.row, sequence])?;
            self.wake(id.client());
        }
        Ok(role)
    }

    pub(super) fn wake(&mut self, client: ClientId) {
        if !self.applied.wake.contains(&client) {
            self.applied.wake.push(client);
        }
    }
}
