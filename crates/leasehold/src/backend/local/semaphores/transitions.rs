//! The transitions of one name.

use rusqlite::{Result, params};

use super::named::{Holder, Named, Waiter, columns, micros};
use super::{Circumstances, PASSED_OVER};
use crate::backend::local::lifeline::Reach;
use crate::clock::{Span, Time};
use crate::machine::{Command, Outcome, Role};
use crate::{AcquisitionId, ClientId};

impl Named<'_> {
    pub(super) fn is_due(&self, now: Time) -> Result<bool> {
        self.tx
            .prepare_cached("SELECT 1 FROM holders WHERE semaphore = ?1 AND ends <= ?2 LIMIT 1")?
            .exists(params![self.row, micros(now)])
    }

    pub(super) fn expire(&mut self, call: &Circumstances<'_>) -> Result<()> {
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

    /// The waiter becomes a holder: confirmed if the reply tells it, else with a time to claim it.
    fn promote(&mut self, waiter: &Waiter, own: bool, call: &Circumstances<'_>) -> Result<()> {
        self.tx
            .prepare_cached("DELETE FROM waiters WHERE semaphore = ?1 AND place = ?2")?
            .execute(params![self.row, waiter.place])?;
        self.state.waiting -= 1;
        let holder = if own {
            let fence = Some(self.mint(call.now));
            Holder { ends: waiter.ttl.map(|ttl| call.now + ttl), fence }
        } else {
            Holder { ends: Some(call.now + call.confirm_within), fence: None }
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
            Command::Enqueue { id, wait, terms, label, .. } => {
                self.enqueue(*id, *wait, terms.ttl, label.as_deref(), call)
            }
            Command::Confirm { id, terms } => match self.holder(*id)? {
                Some(holder) => self.confirm(*id, &holder, terms.ttl, call.now),
                None if self.waits(*id)? => Ok(Outcome::Waiting),
                None => Ok(Outcome::Gone),
            },
            Command::Renew { id, .. } => self.renew(*id, call.now),
            Command::Release { id, .. } => Ok(Outcome::Removed(self.release(*id, call)?)),
            Command::Sweep => Ok(Outcome::Swept),
        }
    }

    fn enqueue(
        &mut self,
        id: AcquisitionId,
        wait: bool,
        ttl: Option<Span>,
        label: Option<&str>,
        call: &mut Circumstances<'_>,
    ) -> Result<Outcome> {
        if let Some(holder) = self.holder(id)? {
            return self.confirm(id, &holder, ttl, call.now);
        }
        let length = |waiting| usize::try_from(waiting).unwrap_or(usize::MAX);
        if self.waits(id)? {
            return Ok(Outcome::Queued { length: length(self.state.waiting) });
        }
        if self.state.waiting == 0 && !self.has_room() {
            // Nobody else looks whether those who hold are alive.
            self.bury_the_dead(call)?;
        }
        if self.has_room() {
            let fence = Some(self.mint(call.now));
            let holder = Holder { ends: ttl.map(|ttl| call.now + ttl), fence };
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
        self.state.next_place += 1;
        self.state.waiting += 1;
        Ok(Outcome::Queued { length: length(self.state.waiting) })
    }

    /// The first time, the permit is claimed, and its TTL begins. After that it changes nothing.
    fn confirm(
        &mut self,
        id: AcquisitionId,
        holder: &Holder,
        ttl: Option<Span>,
        now: Time,
    ) -> Result<Outcome> {
        if holder.fence.is_some() {
            return Ok(Outcome::Held(holder.held(self.state.held, now)));
        }
        let fence = self.mint(now);
        let holder = Holder { ends: ttl.map(|ttl| now + ttl), fence: Some(fence) };
        let (client, sequence) = columns(id);
        self.tx
            .prepare_cached(
                "UPDATE holders SET ends = ?4, fence = ?5 WHERE semaphore = ?1 AND client = ?2 AND sequence = ?3",
            )?
            .execute(params![
                self.row,
                client,
                sequence,
                holder.ends.map(micros),
                fence.get().cast_signed()
            ])?;
        Ok(Outcome::Held(holder.held(self.state.held, now)))
    }

    /// Without heartbeats it is only a question.
    pub(super) fn renew(&self, id: AcquisitionId, now: Time) -> Result<Outcome> {
        Ok(match self.holder(id)? {
            Some(holder) => Outcome::Held(holder.held(self.state.held, now)),
            None if self.waits(id)? => Outcome::Waiting,
            None => Outcome::Gone,
        })
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
