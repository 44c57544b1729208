//! The transitions of one name.

use rusqlite::{Result, params};

use super::named::{Holder, Named, State, Waiter, columns, micros};
use super::{Circumstances, PASSED_OVER};
use crate::backend::local::lifeline::Reach;
use crate::clock::{Span, Time};
use crate::machine::{Command, Declared, Outcome, Role, Steer, Steered};
use crate::{AcquisitionId, ClientId};

impl Named<'_> {
    pub(super) fn is_due(&self, now: Time) -> Result<bool> {
        self.tx
            .prepare_cached("SELECT 1 FROM holders WHERE semaphore = ?1 AND ends <= ?2 LIMIT 1")?
            .exists(params![self.row, micros(now)])
    }

    /// Once a batch: all of it happens at one time.
    pub(super) fn expire(&mut self, call: &Circumstances<'_>) -> Result<()> {
        if std::mem::replace(&mut self.expired, true) {
            return Ok(());
        }
        let expired = self
            .tx
            .prepare_cached("DELETE FROM holders WHERE semaphore = ?1 AND ends <= ?2")?
            .execute(params![self.row, micros(call.now)])?;
        self.state.held -= u32::try_from(expired).unwrap_or(u32::MAX);
        Ok(())
    }

    pub(super) fn grant(&mut self, call: &mut Circumstances<'_>) -> Result<()> {
        while self.state.waiting > 0
            && self.has_room()
            && self.passed_over < PASSED_OVER
            && let Some(waiter) = self.first_waiter_from(self.first_place)?
        {
            let client = waiter.id.client();
            let own = call.from == Some(client);
            if !own {
                let known = self.out_of_reach.contains(&client);
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
                    Reach::Bequeathed => {
                        self.remove_waiters(client)?;
                        continue;
                    }
                    Reach::Dead => {
                        self.bury_here(client)?;
                        continue;
                    }
                }
            }
            self.promote(&waiter, own, call)?;
        }
        Ok(())
    }

    /// The waiter becomes a holder: at once if the reply tells it, else it has to claim the permit in time.
    fn promote(&mut self, waiter: &Waiter, own: bool, call: &Circumstances<'_>) -> Result<()> {
        self.tx
            .prepare_cached("DELETE FROM waiters WHERE semaphore = ?1 AND place = ?2")?
            .execute(params![self.row, waiter.place])?;
        self.state.waiting -= 1;
        let holder = Holder {
            fence: self.mint(call.now),
            claim_by: (!own).then(|| call.now + call.confirm_within),
            hold_until: waiter.ttl.map(|ttl| call.now + ttl),
        };
        self.insert_holder(waiter.id, &holder, waiter.label.as_deref(), call.now)?;
        if own {
            self.applied.granted.push((waiter.id, holder.held(self.state.held, call.now)));
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
            Command::Enqueue { id, declared, wait, terms, label } => {
                // First of all: if that makes room, it belongs to those who were here before.
                self.declare(*declared);
                let known = self.holder(*id)?;
                // With room and nobody waiting, holders whose time is up do not matter.
                if self.state.waiting > 0 || !self.has_room() || known.is_some() {
                    self.expire(call)?;
                    self.grant(call)?;
                }
                self.enqueue(*id, *wait, terms.ttl, label.as_deref(), call)
            }
            Command::Release { id, .. } => {
                // First of all: a waiter that leaves is not granted a permit on its way out.
                let role = self.release(*id, call)?;
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
                // What is to be forgotten is not declared by the way.
                if let Some(capacity) = capacity.filter(|_| *steer != Steer::Forget) {
                    self.declare(Declared { capacity, is_new: false });
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
            self.bury_the_dead(call)?;
            let State { held, waiting, .. } = self.state;
            if held > 0 || waiting > 0 {
                let waiting = usize::try_from(waiting).unwrap_or(usize::MAX);
                return Ok(Steered::InUse { holding: held as usize, waiting });
            }
        }
        if self.capacity() == 0 {
            return Ok(Steered::Unknown);
        }
        match steer {
            Steer::Declare(capacity) => match self.state.pinned {
                Some(pinned) => return Ok(Steered::Pinned(pinned)),
                None => self.state.declared = *capacity,
            },
            Steer::Pin(capacity) => self.state.pinned = Some(*capacity),
            Steer::Unpin => self.state.pinned = None,
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
        id: AcquisitionId,
        wait: bool,
        ttl: Option<Span>,
        label: Option<&str>,
        call: &mut Circumstances<'_>,
    ) -> Result<Outcome> {
        if self.holder(id)?.is_some() {
            return self.renew(id, call.now);
        }
        if self.state.waiting > 0
            && let Some(ahead) = self.ahead(id)?
        {
            return Ok(Outcome::Waiting { ahead });
        }
        if self.state.waiting == 0 && !self.has_room() {
            // Nobody else looks whether those who hold are alive.
            self.bury_the_dead(call)?;
        }
        if self.has_room() {
            let holder = Holder {
                fence: self.mint(call.now),
                claim_by: None,
                hold_until: ttl.map(|ttl| call.now + ttl),
            };
            self.insert_holder(id, &holder, label, call.now)?;
            return Ok(Outcome::Held(holder.held(self.state.held, call.now)));
        }
        if !wait {
            return Ok(Outcome::Full);
        }
        let (client, sequence) = columns(id);
        let ttl = ttl.map(|ttl| ttl.micros().cast_signed());
        self.tx
            .prepare_cached(
                "INSERT INTO waiters (semaphore, place, client, sequence, since, ttl, label)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![
                self.row,
                self.state.next_place,
                client,
                sequence,
                micros(call.now),
                ttl,
                label
            ])?;
        let ahead = usize::try_from(self.state.waiting).unwrap_or(usize::MAX);
        self.state.next_place += 1;
        self.state.waiting += 1;
        Ok(Outcome::Waiting { ahead })
    }

    /// Without leases it is only a question, and claims a permit that another client has granted.
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

    /// What is known of an id.
    pub(super) fn question(&self, id: AcquisitionId, now: Time) -> Result<Outcome> {
        if let Some(holder) = self.holder(id)? {
            return Ok(Outcome::Held(holder.held(self.state.held, now)));
        }
        Ok(self.ahead(id)?.map_or(Outcome::Gone, |ahead| Outcome::Waiting { ahead }))
    }

    fn release(&mut self, id: AcquisitionId, call: &Circumstances<'_>) -> Result<Role> {
        let (client, sequence) = columns(id);
        let held = self
            .tx
            .prepare_cached(
                "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3",
            )?
            .execute(params![self.row, client, sequence])?;
        let role = if held > 0 {
            self.state.held -= 1;
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
            // Without signs of life it would never find out by itself.
            self.tx
                .prepare_cached(
                    "INSERT OR IGNORE INTO evicted (client, semaphore, sequence) VALUES (?1, ?2, ?3)",
                )?
                .execute(params![client, self.row, sequence])?;
            self.wake(id.client());
        }
        Ok(role)
    }

    fn wake(&mut self, client: ClientId) {
        if !self.applied.wake.contains(&client) {
            self.applied.wake.push(client);
        }
    }
}
