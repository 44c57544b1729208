//! The fair semaphore as a pure state machine: no I/O and no clock of its own.
//!
//! The memory store runs this code. The other stores spell the same transitions in their own atomic
//! unit (a Lua script, an SQL transaction), and are tested against it with random commands.
//!
//! # State
//!
//! One [`Machine`] is the state of one name: its [`Limits`]; the holders, each with a fence, `renew_by`, and perhaps
//! `hold_until`; the queue, in order, each waiter with `alive_by`; and the last fence. `now` is always the store's clock,
//! never a caller's.
//!
//! # Transitions
//!
//! Every command runs as *expire, grant, the command, grant*. So a release itself hands the permit to
//! the next waiter, and nobody is told `Full` while a permit is free. Two commands skip what cannot matter to them: a
//! release removes its id first, and the rest only if somebody waits; an enqueue that finds room and nobody waiting does
//! not look for holders whose time is up, because they could only make more room.
//!
//! - *expire*: holders go at `renew_by` or `hold_until`, waiters at `alive_by`, whoever sends a command.
//! - *grant*: while a permit is free and the name is not paused, the first waiter in the queue that can be reached becomes a
//!   holder. Its fence is minted and its TTL begins. If its client sent this very command, the reply tells it, and it has
//!   its whole lease. Any other client gets a wake-up that says the same, and has `confirm_within` to renew the permit.
//! - *enqueue*, *renew*, *release*, *steer*: see [`Command`]. Cancel is a release by a waiter.
//!
//! A wake-up can sit in the socket buffer of a paused process for as long as it likes. So the client believes it only if
//! it can show how old the wake-up is at most; otherwise it renews first, and believes the reply.
//!
//! # Invariants
//!
//! 1. **Limit.** A permit is granted only while fewer are held than the capacity, and never during a pause. After a shrink
//!    nobody is granted until there is room. (`grant` and `enqueue` are the only ways in, and both count first.)
//! 2. **Order.** Waiters that can be reached are granted in the order in which they were enqueued, also
//!    within one microsecond and one batch. (Places in the queue are numbered, not timed; a newcomer is
//!    granted at once only when `grant` has just left a permit free, so nobody reachable waits.)
//! 3. **No lost wake-up.** After every command, either no reachable waiter is queued, or every permit is
//!    held, or the name is paused. (Every command ends with `grant`.)
//! 4. **Fence.** The fences of one name strictly increase: max(last + 1, the store's microseconds), and
//!    the last one outlives everything else, so they grow even over a store that lost its data.
//! 5. **Idempotence.** Any command may be sent again with the same id after an unknown outcome: a
//!    second enqueue finds the holder or the waiter, a second release finds nobody.
//! 6. **Self-fencing.** A holder's own idea of its validity ends before the store lets another in: every
//!    `Held` says how long it is good for, counted from before the request was sent.
//! 7. **No leak.** Whatever future or guard is dropped, at any await point, nothing stays behind once the
//!    engine has drained. (That is the engine's; here it is enough that *release* removes an id wherever
//!    it is.)

use std::collections::BTreeSet;

use crate::clock::Time;
use crate::{AcquisitionId, Fence};

mod command;
mod limits;
pub(crate) mod lock;
mod members;
#[cfg(test)]
mod model;
pub(crate) mod pool;
mod questions;
mod queue;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use command::{
    Circumstances, Command, Declared, Effects, Held, Known, Outcome, Role, Terms,
};
pub(crate) use limits::{Limits, Steer, Steered};
use members::Members;
pub(crate) use questions::Row;
use queue::Queue;

/// A holder or a waiter, with what its client keeps beside it.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Member<T> {
    since: Time,
    /// A holder's `renew_by`, a waiter's `alive_by`.
    alive_by: Option<Time>,
    stage: Stage,
    kept: T,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Stage {
    Waiting { place: u64, terms: Terms },
    Holding { hold_until: Option<Time>, fence: Fence },
}

impl Member<()> {
    /// A holder that the reply tells so.
    #[inline]
    fn holding(terms: Terms, fence: Fence, now: Time) -> Self {
        Self {
            since: now,
            alive_by: terms.lease.map(|lease| now + lease),
            stage: Stage::Holding { hold_until: terms.ttl.map(|ttl| now + ttl), fence },
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

    /// What a holder is told; none for a waiter.
    #[inline]
    fn held(&self, slot_number: u32, now: Time) -> Option<Held> {
        let Stage::Holding { fence, .. } = self.stage else { return None };
        Some(Held { slot_number, fence, valid_for: self.ends().map(|ends| ends - now) })
    }
}

/// At the first of its deadlines.
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
    last_fence: u64,
    members: Members<Member<T>>,
    queue: Queue,
    /// The holders and the waiters that end by themselves, by when. Empty where nothing ends.
    holder_ends: BTreeSet<(Time, AcquisitionId)>,
    waiter_ends: BTreeSet<(Time, AcquisitionId)>,
}

impl<T: Clone> Machine<T> {
    /// A name that nobody has used yet, or not since its last fence was `last_fence`.
    pub(crate) fn new(last_fence: u64) -> Self {
        Self {
            limits: Limits::default(),
            holding: 0,
            last_fence,
            members: Members::default(),
            queue: Queue::default(),
            holder_ends: BTreeSet::new(),
            waiter_ends: BTreeSet::new(),
        }
    }

    pub(crate) fn apply(&mut self, command: &Command, call: &mut Circumstances<'_, T>) -> Outcome
    where
        T: Default,
    {
        match command {
            Command::Enqueue { id, declared, wait, terms, label: _ } => {
                self.enqueue(*id, *declared, *wait, *terms, |_| T::default(), call)
            }
            Command::Release { id, .. } => Outcome::Removed(self.release(*id, call).0),
            Command::Renew { id, terms } => {
                self.around(call, |machine, now| machine.renew(*id, *terms, now))
            }
            Command::Steer { capacity, steer } => self.around(call, |machine, now| {
                Outcome::Steered(machine.steer(*capacity, steer, now))
            }),
            Command::Sweep => self.around(call, |_, _| Outcome::Swept),
        }
    }

    /// Expire, grant, the command, grant.
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

    /// `keep` makes what is kept with the acquisition, knowing whether it holds or waits.
    #[inline]
    pub(crate) fn enqueue(
        &mut self,
        id: AcquisitionId,
        declared: Declared,
        wait: bool,
        terms: Terms,
        keep: impl FnOnce(Option<&Held>) -> T,
        call: &mut Circumstances<'_, T>,
    ) -> Outcome {
        // First of all: if that makes room, it belongs to those who were here before.
        self.limits.declare(declared);
        if self.queue.is_empty() && self.has_room() && self.members.get(&id).is_none() {
            return Outcome::Held(self.hold(id, terms, call.now, keep));
        }
        self.around(call, |machine, now| {
            if machine.members.get(&id).is_some() {
                return machine.renew(id, terms, now);
            }
            if machine.has_room() {
                return Outcome::Held(machine.hold(id, terms, now, keep));
            }
            if !wait {
                return Outcome::Full;
            }
            let ahead = machine.queue.len();
            machine.wait(id, terms, now, keep(None));
            Outcome::Waiting { ahead }
        })
    }

    /// An enqueue of an id that is not known yet and whose permit does not end by itself. `None` if it takes more than to
    /// declare a capacity and to add a holder: then no more than the first was done.
    #[inline]
    pub(crate) fn hold_at_once(
        &mut self,
        id: AcquisitionId,
        declared: Declared,
        now: impl FnOnce() -> Time,
    ) -> Option<Held>
    where
        T: Default,
    {
        self.limits.declare(declared);
        if !self.is_quiet() || !self.has_room() {
            return None;
        }
        Some(self.hold(id, Terms::default(), now(), |_| T::default()))
    }

    /// A release. `None` if it takes more than to remove `id`, or if that is not known: then nothing was done.
    #[inline]
    pub(crate) fn remove_at_once(&mut self, id: AcquisitionId) -> Option<(Role, T)> {
        if self.is_quiet() { self.remove(id) } else { None }
    }

    /// Whether nothing is there to expire or to grant.
    #[inline]
    fn is_quiet(&self) -> bool {
        self.queue.is_empty() && !self.is_timed()
    }

    #[inline]
    pub(crate) fn release(
        &mut self,
        id: AcquisitionId,
        call: &mut Circumstances<'_, T>,
    ) -> (Role, Option<T>) {
        // First of all: a waiter that leaves is not granted a permit on its way out.
        let removed = self.remove(id);
        if !self.queue.is_empty() {
            self.expire(call);
            self.grant(call);
        }
        match removed {
            Some((role, kept)) => (role, Some(kept)),
            None => (Role::Nobody, None),
        }
    }

    #[inline]
    fn expire(&mut self, call: &mut Circumstances<'_, T>) {
        if self.is_timed() {
            self.expire_due(call);
        }
    }

    fn expire_due(&mut self, call: &mut Circumstances<'_, T>) {
        while let Some(id) = pop_due(&mut self.holder_ends, call.now) {
            if let Some((_, kept)) = self.remove(id) {
                call.effects.expired.push((id, kept));
            }
        }
        while let Some(id) = pop_due(&mut self.waiter_ends, call.now) {
            self.remove(id);
        }
    }

    #[inline]
    fn grant(&mut self, call: &mut Circumstances<'_, T>) {
        if !self.queue.is_empty() && self.has_room() {
            self.grant_in_order(call);
        }
    }

    fn grant_in_order(&mut self, call: &mut Circumstances<'_, T>) {
        let mut out_of_reach = Vec::new();
        let mut from_place = 0;
        while self.has_room()
            && let Some((place, id)) = self.queue.first_from(from_place)
        {
            from_place = place + 1;
            let own = id.client() == call.from;
            // One unanswered call a client is enough, however many of its waiters come first.
            if !own && out_of_reach.contains(&id.client()) {
                continue;
            }
            if !self.promote(place, id, own, call) {
                out_of_reach.push(id.client());
            }
        }
    }

    /// The waiter becomes a holder: for its whole lease if the reply tells it, else for the time to claim its permit.
    /// False if its client could not be reached.
    fn promote(
        &mut self,
        place: u64,
        id: AcquisitionId,
        own: bool,
        call: &mut Circumstances<'_, T>,
    ) -> bool {
        let Some(member) = self.members.get_mut(&id) else { return false };
        let Stage::Waiting { terms, .. } = member.stage else { return false };
        let (fence, slot_number) = (next_fence(self.last_fence, call.now), self.holding + 1);
        let alive_for = if own {
            terms.lease
        } else {
            let claim = terms.lease.map_or(call.confirm_within, |own| own.min(call.confirm_within));
            let held = Held { slot_number, fence, valid_for: Some(claim) };
            if !(call.wake)(id, &held) {
                return false;
            }
            Some(claim)
        };
        self.last_fence = fence.get();
        self.holding += 1;
        let waited_until = member.ends();
        let hold_until = terms.ttl.map(|ttl| call.now + ttl);
        member.stage = Stage::Holding { hold_until, fence };
        member.alive_by = alive_for.map(|span| call.now + span);
        member.since = call.now;
        let ends = member.ends();
        if own && let Some(held) = member.held(slot_number, call.now) {
            call.effects.granted.push((id, held, member.kept.clone()));
        }
        self.queue.leave(place);
        reschedule(&mut self.waiter_ends, id, waited_until, None);
        reschedule(&mut self.holder_ends, id, None, ends);
        true
    }

    fn wait(&mut self, id: AcquisitionId, terms: Terms, now: Time, kept: T) {
        let place = self.queue.join(id);
        let alive_by = terms.patience().map(|patience| now + patience);
        reschedule(&mut self.waiter_ends, id, None, alive_by);
        let stage = Stage::Waiting { place, terms };
        self.members.insert(id, Member { since: now, alive_by, stage, kept });
    }

    fn renew(&mut self, id: AcquisitionId, terms: Terms, now: Time) -> Outcome {
        let Some(member) = self.members.get_mut(&id) else { return Outcome::Gone };
        let ended = member.ends();
        if let Stage::Waiting { place, .. } = member.stage {
            member.alive_by = terms.patience().map(|patience| now + patience);
            reschedule(&mut self.waiter_ends, id, ended, member.alive_by);
            return Outcome::Waiting { ahead: self.queue.before(place) };
        }
        member.alive_by = terms.lease.map(|lease| now + lease);
        reschedule(&mut self.holder_ends, id, ended, member.ends());
        member.held(self.holding, now).map_or(Outcome::Gone, Outcome::Held)
    }

    #[inline]
    fn remove(&mut self, id: AcquisitionId) -> Option<(Role, T)> {
        let Member { alive_by, stage, kept, .. } = self.members.remove(&id)?;
        let ended = ends(alive_by, &stage);
        let role = match stage {
            Stage::Holding { .. } => {
                self.holding -= 1;
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

    /// Makes `id` a holder that the reply tells so.
    #[inline]
    fn hold(
        &mut self,
        id: AcquisitionId,
        terms: Terms,
        now: Time,
        keep: impl FnOnce(Option<&Held>) -> T,
    ) -> Held {
        self.holding += 1;
        let fence = next_fence(self.last_fence, now);
        self.last_fence = fence.get();
        let member = Member::holding(terms, fence, now);
        let ends = member.ends();
        let held =
            Held { slot_number: self.holding, fence, valid_for: ends.map(|ends| ends - now) };
        reschedule(&mut self.holder_ends, id, None, ends);
        self.members.insert(id, member.keeping(keep(Some(&held))));
        held
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.holding < self.limits.ceiling()
    }
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

/// The next fence (invariant 4).
#[inline]
fn next_fence(last: u64, now: Time) -> Fence {
    Fence::new((last + 1).max(now.micros()))
}
