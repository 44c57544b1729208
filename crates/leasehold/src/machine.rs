//! The fair semaphore as a pure state machine, without I/O and without a clock of its own.
//!
//! It is written over [`Rows`]. The memory store keeps them in collections ([`InMemory`]), and the store on one host in
//! SQLite, where a batch of commands is one transaction. On Redis a Lua script implements the same transitions; tests
//! compare it with this code by random commands.
//!
//! # State
//!
//! One [`Machine`] is the state of one name:
//!
//! - its row, with its [`Limits`], its counters and the last fence;
//! - the holders, each with a fence, a weight, `renew_by`, and perhaps `hold_until` and a slot number;
//! - the queue of waiters, in order, each with `alive_by` and a weight.
//!
//! `now` is always the store's clock, never a caller's.
//!
//! A store that can tell which clients are dead has no leases ([`Terms::lease`]). There, a query of a waiter, and a
//! newcomer that finds no room and an empty queue, remove the [dead clients](Rows::dead_clients).
//!
//! # Transitions
//!
//! Every command runs as *expire, grant, the command, grant*. So a release itself passes the permit to the next waiter,
//! and no caller receives `Full` while it could be granted a permit. Two commands skip steps that cannot matter to
//! them. A release removes its id first, and runs the other steps only if somebody waits. An enqueue that finds room
//! and an empty queue does not look for expired holders, because they could only make more room.
//!
//! - *expire*: holders are removed at `renew_by` or `hold_until`, waiters at `alive_by`, whichever client sends the
//!   command.
//! - *grant*: while the first reachable waiter in the queue *fits*, it becomes a holder. It fits if the name is not
//!   paused, if as many units are free as it weighs, and, where there is a [rate](Rate), if there is a token. Its fence
//!   is issued, its TTL begins, and it takes the token. If its own client sent this command, the reply reports the
//!   grant, and the permit has its whole lease. Any other client receives a wake-up that says the same, and has
//!   `confirm_within` to renew the permit. A waiter that does not fit ends the grant, so that no later waiter overtakes
//!   it. The machine has not tried to reach that waiter. If a client turns out to be dead, its members are removed.
//! - *enqueue*, *renew*, *release*, *change limits*: see [`Command`]. Cancel is a release by a waiter.
//!
//! A wake-up can stay in the socket buffer of a paused process for any length of time. So the client trusts a wake-up
//! only if it can prove the largest age that the wake-up may have. Otherwise it renews first, and trusts the reply.
//!
//! # Invariants
//!
//! 1. **Limit.** A permit is granted only if its weight and those of all holders together do not exceed the capacity.
//!    It is never granted during a pause, and never without a token: in any period, grants are no more frequent than
//!    the rate allows. After the capacity shrinks, nothing is granted until there is room. No two holders have the same
//!    slot number. (Only `grant` and `enqueue` add holders, and both check `fits`. A token is returned only if no
//!    caller has seen the permit: see [`TokenBucket::return_token`].)
//! 2. **Order.** Reachable waiters are granted permits in the order in which they were enqueued, even within one
//!    microsecond and one batch, and whatever their weight. (Places in the queue are numbers here; on Redis they are
//!    times, each above the last. A newcomer is granted a permit at once only if `grant` has just gone through the
//!    whole queue, so no reachable waiter is left.)
//! 3. **No lost wake-up.** After every command, either no reachable waiter is queued, or the first waiter that was not
//!    found unreachable does not fit. (Every command ends with `grant`. Time alone makes a waiter fit only when a token
//!    arrives: `next_token` says when.)
//! 4. **Fence.** The fences of one name strictly increase: each is max(last + 1, the store's microseconds). The last
//!    fence outlives all other state, and the clock makes fences grow even if the store has lost its data.
//! 5. **Idempotence.** After an unknown outcome, any command may be sent again with the same id: a second enqueue finds
//!    the holder or the waiter, a second release finds nothing.
//! 6. **Self-fencing.** A holder considers its permit invalid before the store grants it to another. Every `Held` says
//!    how long it is valid, counted from before the request was sent.
//! 7. **No leak.** Whichever future or guard is dropped, at any await point, nothing stays behind once the engine has
//!    drained. (The engine ensures that. The machine only has to ensure that *release* removes an id wherever it is.)

use crate::clock::Time;
use crate::{AcquisitionId, ClientId, Fence};

mod command;
mod in_memory;
mod limits;
pub(crate) mod lock;
mod members;
mod numbers;
pub(crate) mod pool;
mod questions;
mod queue;
mod rate;
mod rows;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use command::{
    Circumstances, Command, Declared, Effects, Held, Outcome, Outlook, Reach, ReleaseHint, Reply,
    Role, Share, Subject, Terms,
};
pub(crate) use in_memory::InMemory;
pub(crate) use limits::{LimitChange, Limits, LimitsChanged};
#[cfg(any(feature = "redis", all(feature = "local", target_os = "linux")))]
pub(crate) use limits::{Pace, Pause};
pub(crate) use questions::Row;
pub(crate) use rate::{Rate, TokenBucket};
pub(crate) use rows::{Member, Rows, SemaphoreRow, Stage};
#[cfg(test)]
pub(crate) use tests::view::MemberView;

/// The most waiters out of reach that one batch passes over: see docs/guarantees.md.
const PASSED_OVER: u32 = 10_000;

/// The state of one name.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Machine<R = InMemory> {
    pub(crate) rows: R,
}

impl<R: Rows> Machine<R> {
    pub(crate) fn apply(
        &mut self,
        command: &Command,
        call: &mut Circumstances<'_, R::Tag>,
    ) -> Result<Outcome, R::Error> {
        match command {
            Command::Enqueue { id, declared, wait, terms, share, label } => {
                let tag = |_: Option<&Held>| R::tag_of(label.as_ref());
                return self.enqueue(*id, *declared, *wait, *terms, *share, tag, call);
            }
            Command::Release { id, hint } => {
                return self.release(*id, *hint, call).map(|(role, _)| Outcome::Removed(role));
            }
            Command::ChangeLimits { capacity, change } if crate::broken::is("resume") => {
                return Ok(Outcome::LimitsChanged(self.change_limits(*capacity, change, call)?));
            }
            Command::Renew { .. } | Command::Sweep if self.rows.row().waiting > 0 => {
                self.remove_dead_clients()?;
            }
            Command::Renew { .. } | Command::ChangeLimits { .. } | Command::Sweep => {}
        }
        self.expire(call)?;
        self.grant(call)?;
        let outcome = match command {
            Command::Renew { id, terms, .. } => self.renew(*id, *terms, call.now)?,
            Command::ChangeLimits { capacity, change } => {
                Outcome::LimitsChanged(self.change_limits(*capacity, change, call)?)
            }
            _ => Outcome::Swept,
        };
        self.grant(call)?;
        Ok(outcome)
    }

    /// See [`Command::Enqueue`]. `tag` returns the tag of the acquisition. It receives the permit, or `None` if the
    /// acquisition waits.
    #[inline]
    #[allow(clippy::too_many_arguments)] // the fields of the command
    pub(crate) fn enqueue(
        &mut self,
        id: AcquisitionId,
        declared: Declared,
        wait: bool,
        terms: Terms,
        share: Share,
        tag: impl FnOnce(Option<&Held>) -> R::Tag,
        call: &mut Circumstances<'_, R::Tag>,
    ) -> Result<Outcome, R::Error> {
        if crate::broken::is("idempotence") {
            self.remove(id, ReleaseHint::Nothing)?;
        }
        let is_new = self.rows.member(id)?.is_none();
        let now = call.now;
        let row = self.rows.row_mut();
        // An acquire that is refused declares nothing.
        let capacity = row.limits.capacity_with(declared);
        if is_new && share.weight > capacity {
            self.expire(call)?;
            self.grant(call)?;
            return Ok(Outcome::TooHeavy { capacity });
        }
        // The declaration comes first: if it makes room, the room belongs to the waiters that are already queued.
        row.limits.declare(declared, now, row.last_fence);
        if is_new && row.waiting == 0 && row.fits(share.weight, now) {
            return Ok(Outcome::Held(self.hold(id, terms, share, now, tag)?));
        }
        self.expire(call)?;
        let mut nobody_before = self.grant(call)?;
        let renewed = if is_new { None } else { self.renew_member(id, terms, now)? };
        let capacity = self.rows.row().limits.capacity();
        if renewed.is_none() && self.rows.row().waiting == 0 && !self.fits(share.weight, now) {
            // With an empty queue, no other client checks whether the holders are alive.
            self.remove_dead_clients()?;
            nobody_before = true;
        }
        let outcome = if let Some(renewed) = renewed {
            renewed
        } else if share.weight > capacity {
            Outcome::TooHeavy { capacity }
        } else if nobody_before && self.fits(share.weight, now) {
            Outcome::Held(self.hold(id, terms, share, now, tag)?)
        } else if wait {
            let ahead = self.rows.row().waiting;
            self.wait(id, terms, share, now, tag(None))?;
            Outcome::Waiting { ahead }
        } else {
            Outcome::Full
        };
        self.grant(call)?;
        Ok(outcome)
    }

    #[inline]
    pub(crate) fn release(
        &mut self,
        id: AcquisitionId,
        hint: ReleaseHint,
        call: &mut Circumstances<'_, R::Tag>,
    ) -> Result<(Role, Option<R::Tag>), R::Error> {
        // Remove first: a waiter that is being removed must not be granted a permit.
        let mut removed = self.remove(id, hint)?;
        if removed.is_none()
            && crate::broken::is("ownership")
            && let Some(longest) = self.rows.longest_holder()
        {
            removed = self.remove(longest, hint)?;
        }
        let (role, tag) = match removed {
            Some((member, tag)) => {
                if call.from != Some(id.client()) {
                    self.rows.record_cancel(id, &member, call.now)?;
                }
                (if member.is_holder() { Role::Holder } else { Role::Waiter }, Some(tag))
            }
            None => (Role::Nobody, None),
        };
        if self.rows.row().waiting > 0 && !crate::broken::is("hand-over") {
            self.expire(call)?;
            self.grant(call)?;
        }
        Ok((role, tag))
    }

    #[inline]
    pub(crate) fn expire(&mut self, call: &mut Circumstances<'_, R::Tag>) -> Result<(), R::Error> {
        let may_expire = self.is_timed() && !crate::broken::is("expiry");
        if may_expire { self.expire_due(call) } else { Ok(()) }
    }

    fn expire_due(&mut self, call: &mut Circumstances<'_, R::Tag>) -> Result<(), R::Error> {
        let due = self.rows.remove_due(call.now)?;
        if let Some(meter) = self.rows.row_mut().limits.meter_mut() {
            meter.limit_missing(call.now);
        }
        self.count_out(due.iter().map(|(_, member, _)| member));
        let holders = due.into_iter().filter(|(_, member, _)| member.is_holder());
        call.effects.expired.extend(holders.map(|(id, _, tag)| (id, tag)));
        Ok(())
    }

    fn remove_dead_clients(&mut self) -> Result<(), R::Error> {
        for client in self.rows.dead_clients()? {
            self.remove_client(client, true)?;
        }
        Ok(())
    }

    /// Removes the waiters of a client, and its permits too if it is dead.
    pub(crate) fn remove_client(
        &mut self,
        client: ClientId,
        is_dead: bool,
    ) -> Result<(), R::Error> {
        let removed = self.rows.remove_client(client, is_dead)?;
        self.count_out(removed.iter());
        Ok(())
    }

    /// Subtracts members that no client has released, and returns the tokens of permits that were never claimed.
    fn count_out<'a>(&mut self, removed: impl Iterator<Item = &'a Member>) {
        let (row, mut unused) = (self.rows.row_mut(), Vec::new());
        for member in removed {
            if let Stage::Holding { fence, unclaimed: true, .. } = member.stage {
                unused.push(fence);
            }
            row.subtract(member);
        }
        if let Some(meter) = row.limits.meter_mut() {
            meter.return_tokens(unused, row.last_fence);
        }
    }

    /// Grants permits to waiters, in order, as long as they fit. Returns whether a newcomer may be granted a permit,
    /// because no reachable waiter is left.
    #[inline]
    pub(crate) fn grant(&mut self, call: &mut Circumstances<'_, R::Tag>) -> Result<bool, R::Error> {
        if self.rows.row().waiting == 0 { Ok(true) } else { self.grant_in_order(call) }
    }

    fn grant_in_order(&mut self, call: &mut Circumstances<'_, R::Tag>) -> Result<bool, R::Error> {
        while self.rows.row().waiting > 0 && call.effects.passed_over < PASSED_OVER {
            if !self.fits(1, call.now) {
                return Ok(false);
            }
            let Some((id, waiter)) = self.rows.first_waiter(call.effects.from_place)? else {
                break;
            };
            let Stage::Waiting { place, terms, share } = waiter.stage else { break };
            // One unanswered wake-up per client is enough, however many of its waiters come first.
            let is_sender = call.from == Some(id.client());
            if is_sender || !call.effects.out_of_reach.contains(&id.client()) {
                if !self.fits(share.weight, call.now) {
                    if crate::broken::is("overtaking") {
                        call.effects.from_place = place + 1;
                        continue;
                    }
                    return Ok(false);
                }
                match self.promote(id, &waiter, terms, share, is_sender, call)? {
                    Reach::Reached => continue,
                    Reach::Silent => call.effects.out_of_reach.push(id.client()),
                    ended @ (Reach::Inherited | Reach::Dead) => {
                        self.remove_client(id.client(), ended == Reach::Dead)?;
                        continue;
                    }
                }
            }
            call.effects.passed_over += 1;
            call.effects.from_place = place + 1;
        }
        Ok(true)
    }

    /// Makes the waiter a holder, if its client is reached. If the reply reports the grant, the permit has its whole
    /// lease, otherwise the time to claim it.
    #[inline]
    fn promote(
        &mut self,
        id: AcquisitionId,
        waiter: &Member,
        terms: Terms,
        share: Share,
        is_sender: bool,
        call: &mut Circumstances<'_, R::Tag>,
    ) -> Result<Reach, R::Error> {
        let mut holder = self.holder(terms, share, call.now)?;
        if !is_sender
            && let Stage::Holding { fence, slot_number, unclaimed, .. } = &mut holder.stage
        {
            let limit = call.confirm_within;
            let claim = terms.lease.map_or(limit, |lease| lease.min(limit));
            let (fence, slot_number) = (*fence, *slot_number);
            let held = Held { slot_number, fence, valid_for: Some(claim) };
            let reach = (call.wake)(id, &held);
            if reach != Reach::Reached {
                return Ok(reach);
            }
            *unclaimed = true;
            holder.alive_by = Some(call.now + claim);
        }
        let tag = self.rows.promote(id, waiter, &holder)?;
        let row = self.rows.row_mut();
        row.waiting -= 1;
        row.add_holder(&holder, call.now);
        if is_sender && let Some(held) = holder.held(call.now) {
            call.effects.granted.push((id, held, tag));
        }
        Ok(Reach::Reached)
    }

    fn wait(
        &mut self,
        id: AcquisitionId,
        terms: Terms,
        share: Share,
        now: Time,
        tag: R::Tag,
    ) -> Result<(), R::Error> {
        let place = self.rows.row().next_place;
        let alive_by = terms.waiter_lease().map(|waiter_lease| now + waiter_lease);
        let stage = Stage::Waiting { place, terms, share };
        self.rows.insert(id, Member { since: now, alive_by, stage }, tag)?;
        let row = self.rows.row_mut();
        row.next_place += 1;
        row.waiting += 1;
        Ok(())
    }

    fn renew(&mut self, id: AcquisitionId, terms: Terms, now: Time) -> Result<Outcome, R::Error> {
        Ok(match self.renew_member(id, terms, now)? {
            Some(renewed) => renewed,
            None if self.rows.is_cancelled(id, now) => Outcome::Cancelled,
            None => Outcome::Gone,
        })
    }

    fn renew_member(
        &mut self,
        id: AcquisitionId,
        terms: Terms,
        now: Time,
    ) -> Result<Option<Outcome>, R::Error> {
        let Some(member) = self.rows.member(id)? else { return Ok(None) };
        let mut renewed = member;
        let outcome = match &mut renewed.stage {
            Stage::Waiting { place, .. } => {
                renewed.alive_by = terms.waiter_lease().map(|waiter_lease| now + waiter_lease);
                Some(Outcome::Waiting { ahead: self.rows.waiters_before(*place)? })
            }
            Stage::Holding { unclaimed, .. } => {
                *unclaimed = false;
                renewed.alive_by = terms.lease.map(|lease| now + lease);
                renewed.held(now).map(Outcome::Held)
            }
        };
        if renewed != member {
            self.rows.update(id, &member, &renewed)?;
        }
        Ok(outcome)
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // otherwise the member is copied
    fn remove(
        &mut self,
        id: AcquisitionId,
        hint: ReleaseHint,
    ) -> Result<Option<(Member, R::Tag)>, R::Error> {
        let removed = self.rows.remove(id)?;
        if let Some((member, _)) = &removed {
            let row = self.rows.row_mut();
            row.subtract(member);
            if hint == ReleaseHint::Unused
                && let Stage::Holding { fence, .. } = member.stage
                && let Some(meter) = row.limits.meter_mut()
            {
                meter.return_token(fence, row.last_fence);
            }
        }
        Ok(removed)
    }

    /// Makes `id` a holder whose grant is reported by the reply.
    #[inline(always)]
    #[allow(clippy::inline_always)] // most branches are decided at the call site
    fn hold(
        &mut self,
        id: AcquisitionId,
        terms: Terms,
        share: Share,
        now: Time,
        tag: impl FnOnce(Option<&Held>) -> R::Tag,
    ) -> Result<Held, R::Error> {
        let holder = self.holder(terms, share, now)?;
        self.rows.row_mut().add_holder(&holder, now);
        let Stage::Holding { fence, slot_number, .. } = holder.stage else { unreachable!() };
        let held = Held { slot_number, fence, valid_for: holder.ends().map(|ends| ends - now) };
        self.rows.insert(id, holder, tag(Some(&held)))?;
        Ok(held)
    }

    /// Creates a holder whose grant is reported by the reply, with the next fence (invariant 4).
    #[inline(always)]
    #[allow(clippy::inline_always)] // as above
    fn holder(&self, terms: Terms, share: Share, now: Time) -> Result<Member, R::Error> {
        let slot_number = if share.numbered { Some(self.rows.lowest_free_number()?) } else { None };
        let last_fence = self.rows.row().last_fence;
        let last_fence = if crate::broken::is("fence") { 0 } else { last_fence };
        let fence = Fence::new((last_fence + 1).max(now.micros() + self.rows.fence_lead()));
        let (hold_until, unclaimed) = (terms.ttl.map(|ttl| now + ttl), false);
        let (weight, alive_by) = (share.weight, terms.lease.map(|lease| now + lease));
        let stage = Stage::Holding { hold_until, fence, weight, slot_number, unclaimed };
        Ok(Member { since: now, alive_by, stage })
    }

    /// Returns whether a permit of this weight can be granted.
    #[inline]
    pub(crate) fn fits(&self, weight: u32, now: Time) -> bool {
        self.rows.row().fits(weight, now)
    }
}

impl<T: Clone + Default> Machine<InMemory<T>> {
    /// Creates the state of a name that is not in use. Its fences will be above `last_fence`.
    pub(crate) fn new(last_fence: u64) -> Self {
        let mut rows = InMemory::default();
        rows.row.last_fence = last_fence;
        Self { rows }
    }

    /// Enqueues an id that is not known yet, for an ordinary permit that does not expire. Returns `None` if that takes
    /// more than declaring a capacity and adding a holder. Then at most the capacity was declared.
    #[inline(always)]
    #[allow(clippy::inline_always)] // as above
    pub(crate) fn hold_at_once(
        &mut self,
        id: AcquisitionId,
        (capacity, is_new): (u32, bool),
        now: impl FnOnce() -> Time,
    ) -> Option<Held> {
        self.rows.row.limits.declare_capacity(capacity, is_new);
        if !self.is_quiet() || !self.rows.row.has_units(1) {
            return None;
        }
        let Ok(held) = self.hold(id, Terms::default(), Share::ONE, now(), |_| T::default());
        Some(held)
    }

    /// Releases `id`. Returns `None` if that takes more than removing it, or if it is not known. Then nothing was done.
    pub(crate) fn remove_at_once(&mut self, id: AcquisitionId) -> Option<(Role, T)> {
        if !self.is_quiet() {
            return None;
        }
        // The queue is empty.
        let Ok(removed) = self.remove(id, ReleaseHint::Nothing);
        removed.map(|(_, tag)| (Role::Holder, tag))
    }

    /// Returns whether there is nothing to expire or to grant, and no deadline to compare with the clock.
    #[inline]
    fn is_quiet(&self) -> bool {
        self.rows.row.waiting == 0 && !self.is_timed()
    }
}
