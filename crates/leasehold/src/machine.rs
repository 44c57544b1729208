//! The fair semaphore as a pure state machine, without I/O and without a clock of its own.
//!
//! The memory store runs this code. The other stores implement the same transitions in their own atomic unit (a Lua
//! script, an SQL transaction). Tests compare them with this code by random commands.
//!
//! # State
//!
//! One [`Machine`] is the state of one name:
//!
//! - its [`Limits`];
//! - the holders, each with a fence, a weight, `renew_by`, and perhaps `hold_until` and a slot number;
//! - the queue of waiters, in order, each with `alive_by` and a weight;
//! - the last fence.
//!
//! `now` is always the store's clock, never a caller's.
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
//!   it. The machine has not tried to reach that waiter.
//! - *enqueue*, *renew*, *release*, *steer*: see [`Command`]. Cancel is a release by a waiter.
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
//!    caller has seen the permit: see [`Meter::return_token`].)
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

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use crate::clock::Time;
use crate::{AcquisitionId, Fence};

mod command;
mod limits;
pub(crate) mod lock;
mod members;
mod numbers;
pub(crate) mod pool;
mod questions;
mod queue;
mod rate;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use command::{
    Circumstances, Command, Declared, Effects, Held, Known, Outcome, Reply, Role, Share, Subject,
    Terms,
};
pub(crate) use limits::{Limits, Steer, Steered};
use members::Members;
use numbers::Numbers;
#[cfg(test)]
pub(crate) use questions::MemberView;
pub(crate) use questions::Row;
use queue::Queue;
pub(crate) use rate::{Meter, Rate};

/// A holder or a waiter, with the data that its client keeps beside it.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Member<T> {
    since: Time,
    /// `renew_by` of a holder, `alive_by` of a waiter.
    alive_by: Option<Time>,
    stage: Stage,
    kept: T,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Stage {
    Waiting {
        place: u64,
        terms: Terms,
        share: Share,
    },
    Holding {
        hold_until: Option<Time>,
        fence: Fence,
        weight: u32,
        slot_number: Option<NonZeroU32>,
        /// Whether it was granted with a wake-up and its client has not claimed it yet.
        unclaimed: bool,
    },
}

impl Member<()> {
    /// Creates a holder whose grant is reported by the reply.
    #[inline]
    fn holding(
        terms: Terms,
        weight: u32,
        slot_number: Option<NonZeroU32>,
        fence: Fence,
        now: Time,
    ) -> Self {
        let (hold_until, unclaimed) = (terms.ttl.map(|ttl| now + ttl), false);
        Self {
            since: now,
            alive_by: terms.lease.map(|lease| now + lease),
            stage: Stage::Holding { hold_until, fence, weight, slot_number, unclaimed },
            kept: (),
        }
    }

    #[inline]
    fn keeping<T>(self, kept: T) -> Member<T> {
        Member { since: self.since, alive_by: self.alive_by, stage: self.stage, kept }
    }
}

impl<T> Member<T> {
    fn is_holder(&self) -> bool {
        matches!(self.stage, Stage::Holding { .. })
    }

    fn ends(&self) -> Option<Time> {
        ends(self.alive_by, &self.stage)
    }

    fn weight(&self) -> u32 {
        match self.stage {
            Stage::Waiting { share, .. } => share.weight,
            Stage::Holding { weight, .. } => weight,
        }
    }

    /// Returns the permit as it is reported to its holder; `None` for a waiter.
    #[inline]
    fn held(&self, now: Time) -> Option<Held> {
        let Stage::Holding { fence, slot_number, .. } = self.stage else { return None };
        Some(Held { slot_number, fence, valid_for: self.ends().map(|ends| ends - now) })
    }
}

/// Returns the earliest deadline.
#[inline]
fn ends(alive_by: Option<Time>, stage: &Stage) -> Option<Time> {
    match (alive_by, stage) {
        (Some(alive_by), Stage::Holding { hold_until: Some(hold_until), .. }) => {
            Some(alive_by.min(*hold_until))
        }
        (None, Stage::Holding { hold_until, .. }) => *hold_until,
        (alive_by, _) => alive_by,
    }
}

/// The state of one name. `T` is what a client in this process keeps with each of its acquisitions.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Machine<T = ()> {
    limits: Limits,
    holding: u32,
    /// The sum of the weights of all holders.
    units: u32,
    numbers: Numbers,
    last_fence: u64,
    members: Members<Member<T>>,
    queue: Queue,
    /// The deadlines of the holders and waiters that expire. Empty if nothing expires.
    holder_ends: BTreeSet<(Time, AcquisitionId)>,
    waiter_ends: BTreeSet<(Time, AcquisitionId)>,
    /// Waiters that another client has removed, each until the end of its patience. Their clients must not enqueue them
    /// again. Empty on stores without leases, which report the removal reliably.
    cancelled: BTreeMap<AcquisitionId, Time>,
}

impl<T: Clone> Machine<T> {
    /// Creates the state of a name that is not in use. Its fences will be above `last_fence`.
    pub(crate) fn new(last_fence: u64) -> Self {
        Self {
            limits: Limits::default(),
            holding: 0,
            units: 0,
            numbers: Numbers::default(),
            last_fence,
            members: Members::default(),
            queue: Queue::default(),
            holder_ends: BTreeSet::new(),
            waiter_ends: BTreeSet::new(),
            cancelled: BTreeMap::new(),
        }
    }

    pub(crate) fn apply(&mut self, command: &Command, call: &mut Circumstances<'_, T>) -> Outcome
    where
        T: Default,
    {
        match command {
            Command::Enqueue { id, declared, wait, terms, share, label: _ } => {
                self.enqueue(*id, *declared, *wait, *terms, *share, |_| T::default(), call)
            }
            Command::Release { id, known } => Outcome::Removed(self.release(*id, *known, call).0),
            Command::Renew { id, terms } => {
                self.around(call, |machine, now| machine.renew(*id, *terms, now))
            }
            Command::Steer { capacity, steer } if crate::broken::is("resume") => {
                Outcome::Steered(self.steer(*capacity, steer, call.now))
            }
            Command::Steer { capacity, steer } => self.around(call, |machine, now| {
                Outcome::Steered(machine.steer(*capacity, steer, now))
            }),
            Command::Sweep => self.around(call, |_, _| Outcome::Swept),
        }
    }

    /// Runs expire, grant, the command, grant.
    #[inline]
    fn around<O>(
        &mut self,
        call: &mut Circumstances<'_, T>,
        command: impl FnOnce(&mut Self, Time) -> O,
    ) -> O {
        self.expire(call);
        self.grant(call);
        let outcome = command(self, call.now);
        self.grant(call);
        outcome
    }

    /// See [`Command::Enqueue`]. `keep` creates the data that is kept with the acquisition. It receives the permit, or
    /// `None` if the acquisition waits.
    #[inline]
    #[allow(clippy::too_many_arguments)] // the fields of the command
    pub(crate) fn enqueue(
        &mut self,
        id: AcquisitionId,
        declared: Declared,
        wait: bool,
        terms: Terms,
        share: Share,
        keep: impl FnOnce(Option<&Held>) -> T,
        call: &mut Circumstances<'_, T>,
    ) -> Outcome {
        if crate::broken::is("idempotence") {
            self.remove(id, Known::Nothing);
        }
        let is_new = self.members.get(&id).is_none();
        // An acquire that is refused declares nothing.
        let capacity = self.limits.capacity_with(declared);
        if is_new && share.weight > capacity {
            return self.around(call, |_, _| Outcome::TooHeavy { capacity });
        }
        // The declaration comes first: if it makes room, the room belongs to the waiters that are already queued.
        self.limits.declare(declared, call.now, self.last_fence);
        if self.queue.is_empty() && is_new && self.fits(share.weight, call.now) {
            return Outcome::Held(self.hold(id, terms, share, call.now, keep));
        }
        self.expire(call);
        let nobody_before = self.grant(call);
        let now = call.now;
        let outcome = if self.members.get(&id).is_some() {
            self.renew(id, terms, now)
        } else if share.weight > self.limits.capacity() {
            Outcome::TooHeavy { capacity: self.limits.capacity() }
        } else if nobody_before && self.fits(share.weight, now) {
            Outcome::Held(self.hold(id, terms, share, now, keep))
        } else if wait {
            let ahead = self.queue.len();
            self.wait(id, terms, share, now, keep(None));
            Outcome::Waiting { ahead }
        } else {
            Outcome::Full
        };
        self.grant(call);
        outcome
    }

    /// Enqueues an id that is not known yet, for an ordinary permit that does not expire. Returns `None` if that takes
    /// more than declaring a capacity and adding a holder. Then at most the capacity was declared.
    #[inline(always)]
    #[allow(clippy::inline_always)] // most branches are decided at the call site
    pub(crate) fn hold_at_once(
        &mut self,
        id: AcquisitionId,
        (capacity, is_new): (u32, bool),
        now: impl FnOnce() -> Time,
    ) -> Option<Held>
    where
        T: Default,
    {
        self.limits.declare_capacity(capacity, is_new);
        if !self.is_quiet() || !has_units(&self.limits, self.units, 1) {
            return None;
        }
        Some(self.hold(id, Terms::default(), Share::ONE, now(), |_| T::default()))
    }

    /// Releases `id`. Returns `None` if that takes more than removing it, or if it is not known. Then nothing was done.
    #[inline]
    pub(crate) fn remove_at_once(&mut self, id: AcquisitionId) -> Option<(Role, T)> {
        if self.is_quiet() { self.remove(id, Known::Nothing) } else { None }
    }

    /// Returns whether there is nothing to expire or to grant, and no deadline to compare with the clock.
    #[inline]
    fn is_quiet(&self) -> bool {
        self.queue.is_empty() && !self.is_timed()
    }

    #[inline]
    pub(crate) fn release(
        &mut self,
        id: AcquisitionId,
        known: Known,
        call: &mut Circumstances<'_, T>,
    ) -> (Role, Option<T>) {
        if id.client() != call.from {
            self.mark_cancelled(id, call.now);
        }
        // Remove first: a waiter that is being removed must not be granted a permit.
        let mut removed = self.remove(id, known);
        if removed.is_none() && crate::broken::is("ownership") {
            let longest = self.holders().first().map(|row| row.id);
            removed = longest.and_then(|longest| self.remove(longest, known));
        }
        if !self.queue.is_empty() && !crate::broken::is("hand-over") {
            self.expire(call);
            self.grant(call);
        }
        match removed {
            Some((role, kept)) => (role, Some(kept)),
            None => (Role::Nobody, None),
        }
    }

    /// Marks a waiter that another client removes. Its own client learns from the mark that its data is not lost, and
    /// gives up. A waiter that is silent for longer than the mark lasts would have expired anyway.
    fn mark_cancelled(&mut self, id: AcquisitionId, now: Time) {
        self.cancelled.retain(|_, until| *until > now);
        if let Some(Member { stage: Stage::Waiting { terms, .. }, .. }) = self.members.get(&id)
            && let Some(patience) = terms.patience()
            && !crate::broken::is("cancel-mark")
        {
            self.cancelled.insert(id, now + patience);
        }
    }

    #[inline]
    fn expire(&mut self, call: &mut Circumstances<'_, T>) {
        if self.is_timed() && !crate::broken::is("expiry") {
            self.expire_due(call);
        }
    }

    fn expire_due(&mut self, call: &mut Circumstances<'_, T>) {
        let mut unused = Vec::new();
        while let Some(id) = pop_due(&mut self.holder_ends, call.now) {
            if let Stage::Holding { fence, unclaimed: true, .. } = self.members[&id].stage {
                unused.push(fence);
            }
            if let Some((_, kept)) = self.remove(id, Known::Nothing) {
                call.effects.expired.push((id, kept));
            }
        }
        if let Some(meter) = self.limits.meter_mut() {
            meter.settle(call.now);
            meter.return_tokens(unused, self.last_fence);
        }
        while let Some(id) = pop_due(&mut self.waiter_ends, call.now) {
            self.remove(id, Known::Nothing);
        }
    }

    /// Grants permits to waiters, in order, as long as they fit. Returns whether a newcomer may be granted a permit,
    /// because no reachable waiter is left.
    #[inline]
    fn grant(&mut self, call: &mut Circumstances<'_, T>) -> bool {
        self.queue.is_empty() || self.fits(1, call.now) && self.grant_in_order(call)
    }

    fn grant_in_order(&mut self, call: &mut Circumstances<'_, T>) -> bool {
        let mut from_place = 0;
        while let Some((place, id)) = self.queue.first_from(from_place) {
            from_place = place + 1;
            let own = id.client() == call.from;
            // One unanswered wake-up per client is enough, however many of its waiters come first.
            if !own && call.effects.out_of_reach.contains(&id.client()) {
                continue;
            }
            match self.promote(place, id, own, call) {
                Promotion::Done if self.fits(1, call.now) => {}
                Promotion::DoesNotFit if crate::broken::is("overtaking") => {}
                Promotion::Done | Promotion::DoesNotFit => return false,
                Promotion::OutOfReach => call.effects.out_of_reach.push(id.client()),
            }
        }
        true
    }

    /// Makes the waiter a holder, if it fits. If the reply reports the grant, the permit has its whole lease, otherwise
    /// the time to claim it.
    fn promote(
        &mut self,
        place: u64,
        id: AcquisitionId,
        own: bool,
        call: &mut Circumstances<'_, T>,
    ) -> Promotion {
        let Some(member) = self.members.get_mut(&id) else { return Promotion::OutOfReach };
        let Stage::Waiting { terms, share, .. } = member.stage else {
            return Promotion::OutOfReach;
        };
        if !fits(&self.limits, self.units, share.weight, call.now) {
            return Promotion::DoesNotFit;
        }
        let fence = next_fence(self.last_fence, call.now);
        let slot_number = share.numbered.then(|| self.numbers.lowest_free());
        let alive_for = if own {
            terms.lease
        } else {
            let claim = terms.lease.map_or(call.confirm_within, |own| own.min(call.confirm_within));
            let held = Held { slot_number, fence, valid_for: Some(claim) };
            if !(call.wake)(id, &held) {
                return Promotion::OutOfReach;
            }
            Some(claim)
        };
        let waited_until = member.ends();
        let hold_until = terms.ttl.map(|ttl| call.now + ttl);
        let weight = share.weight;
        member.stage = Stage::Holding { hold_until, fence, weight, slot_number, unclaimed: !own };
        member.alive_by = alive_for.map(|span| call.now + span);
        member.since = call.now;
        let ends = member.ends();
        if own && let Some(held) = member.held(call.now) {
            call.effects.granted.push((id, held, member.kept.clone()));
        }
        self.count(weight, slot_number, fence, call.now);
        self.queue.leave(place);
        reschedule(&mut self.waiter_ends, id, waited_until, None);
        reschedule(&mut self.holder_ends, id, None, ends);
        Promotion::Done
    }

    fn wait(&mut self, id: AcquisitionId, terms: Terms, share: Share, now: Time, kept: T) {
        let place = self.queue.join(id);
        let alive_by = terms.patience().map(|patience| now + patience);
        reschedule(&mut self.waiter_ends, id, None, alive_by);
        let stage = Stage::Waiting { place, terms, share };
        self.members.insert(id, Member { since: now, alive_by, stage, kept });
    }

    fn renew(&mut self, id: AcquisitionId, terms: Terms, now: Time) -> Outcome {
        let Some(member) = self.members.get_mut(&id) else {
            let is_cancelled = self.cancelled.get(&id).is_some_and(|until| *until > now);
            return if is_cancelled { Outcome::Cancelled } else { Outcome::Gone };
        };
        let ended = member.ends();
        match &mut member.stage {
            Stage::Waiting { place, .. } => {
                member.alive_by = terms.patience().map(|patience| now + patience);
                reschedule(&mut self.waiter_ends, id, ended, member.alive_by);
                return Outcome::Waiting { ahead: self.queue.before(*place) };
            }
            Stage::Holding { unclaimed, .. } => *unclaimed = false,
        }
        member.alive_by = terms.lease.map(|lease| now + lease);
        reschedule(&mut self.holder_ends, id, ended, member.ends());
        member.held(now).map_or(Outcome::Gone, Outcome::Held)
    }

    #[inline]
    fn remove(&mut self, id: AcquisitionId, known: Known) -> Option<(Role, T)> {
        let Member { alive_by, stage, kept, .. } = self.members.remove(&id)?;
        let ended = ends(alive_by, &stage);
        let role = match stage {
            Stage::Holding { fence, weight, slot_number, .. } => {
                self.holding -= 1;
                self.units -= if crate::broken::is("weights") { 1 } else { weight };
                if let Some(number) = slot_number {
                    self.numbers.free(number);
                }
                if known == Known::Unused
                    && let Some(meter) = self.limits.meter_mut()
                {
                    meter.return_token(fence, self.last_fence);
                }
                reschedule(&mut self.holder_ends, id, ended, None);
                Role::Holder
            }
            Stage::Waiting { place, .. } => {
                self.queue.leave(place);
                reschedule(&mut self.waiter_ends, id, ended, None);
                Role::Waiter
            }
        };
        Some((role, kept))
    }

    /// Makes `id` a holder whose grant is reported by the reply.
    #[inline(always)]
    #[allow(clippy::inline_always)] // as above
    fn hold(
        &mut self,
        id: AcquisitionId,
        terms: Terms,
        Share { weight, numbered }: Share,
        now: Time,
        keep: impl FnOnce(Option<&Held>) -> T,
    ) -> Held {
        let fence = next_fence(self.last_fence, now);
        let slot_number = numbered.then(|| self.numbers.lowest_free());
        self.count(weight, slot_number, fence, now);
        let member = Member::holding(terms, weight, slot_number, fence, now);
        let ends = member.ends();
        let held = Held { slot_number, fence, valid_for: ends.map(|ends| ends - now) };
        reschedule(&mut self.holder_ends, id, None, ends);
        self.members.insert(id, member.keeping(keep(Some(&held))));
        held
    }

    /// Counts one more holder.
    #[inline]
    fn count(&mut self, weight: u32, slot_number: Option<NonZeroU32>, fence: Fence, now: Time) {
        self.holding += 1;
        self.units += if crate::broken::is("weights") { 1 } else { weight };
        self.last_fence = fence.get();
        if let Some(number) = slot_number {
            self.numbers.take(number);
        }
        if let Some(meter) = self.limits.meter_mut() {
            meter.take(now, fence);
        }
    }

    /// Returns whether a permit of this weight can be granted.
    #[inline]
    fn fits(&self, weight: u32, now: Time) -> bool {
        fits(&self.limits, self.units, weight, now)
    }
}

/// What happened to the first waiter.
enum Promotion {
    Done,
    OutOfReach,
    DoesNotFit,
}

/// Returns whether a permit of this weight can be granted while the holders have this many units.
#[inline]
fn fits(limits: &Limits, units: u32, weight: u32, now: Time) -> bool {
    has_units(limits, units, weight) && limits.meter().is_none_or(|meter| meter.is_free(now))
}

#[inline]
fn has_units(limits: &Limits, units: u32, weight: u32) -> bool {
    let ceiling = limits.ceiling() + u32::from(crate::broken::is("limit"));
    weight <= ceiling.saturating_sub(units)
}

fn pop_due(ends: &mut BTreeSet<(Time, AcquisitionId)>, now: Time) -> Option<AcquisitionId> {
    let &(first, id) = ends.first()?;
    (first <= now).then(|| ends.pop_first()).map(|_| id)
}

#[inline]
fn reschedule(
    ends: &mut BTreeSet<(Time, AcquisitionId)>,
    id: AcquisitionId,
    before: Option<Time>,
    after: Option<Time>,
) {
    if before == after {
        return;
    }
    if let Some(before) = before {
        ends.remove(&(before, id));
    }
    if let Some(after) = after {
        ends.insert((after, id));
    }
}

/// Returns the next fence (invariant 4).
#[inline]
fn next_fence(last: u64, now: Time) -> Fence {
    let last = if crate::broken::is("fence") { 0 } else { last };
    Fence::new((last + 1).max(now.micros()))
}
