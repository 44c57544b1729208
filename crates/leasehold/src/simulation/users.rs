//! The users of a process: what they do with their semaphores, and what they see.

use super::process::terms;
use super::*;
use crate::client_core::{Failure, Notice, Request};
use crate::clock::Moment;
use crate::machine::{MemberView, Share};
use crate::{Fence, LossReason};

/// The longest wait: a user that waits does nothing else.
const LONGEST: Micros = 25 * SECOND;

/// The caller of an acquisition or a release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    user: usize,
    op: u64,
    id: AcquisitionId,
}

/// One user, who does one thing at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct User {
    /// Numbers the turns, so that an event of an earlier turn is ignored.
    turn: u64,
    doing: Doing,
    /// Permits that the user has released.
    spent: Vec<(usize, AcquisitionId)>,
}

#[derive(Clone, Debug, Default)]
enum Doing {
    #[default]
    Nothing,
    Waiting(Use),
    /// The permit was granted. The user has not seen it yet.
    Granted(Use, Permit),
    Holding(Use, Permit),
    Releasing(Use),
    /// Releases an id once more.
    ReleasingAgain(usize),
}

#[derive(Clone, Copy, Debug)]
struct Use {
    op: u64,
    thing: usize,
    id: AcquisitionId,
    weight: u32,
    queues: bool,
    /// When the acquire must have ended, until it is granted.
    limit: Option<Micros>,
}

#[derive(Clone, Copy, Debug)]
struct Permit {
    fence: Fence,
    slot: u32,
    valid_until: Moment,
    granted: Micros,
}

impl Process {
    /// The permits of this thing on which users rely, each with its fence and the end of its validity.
    pub(super) fn relies_on(&self, thing: usize) -> Vec<(AcquisitionId, Fence, Moment)> {
        let holds = self.users.iter().filter_map(|user| match &user.doing {
            Doing::Granted(usage, permit) | Doing::Holding(usage, permit)
                if usage.thing == thing =>
            {
                Some((usage.id, permit.fence, permit.valid_until))
            }
            _ => None,
        });
        holds.collect()
    }

    /// The acquisitions of this thing for which users wait.
    pub(super) fn waits_for(&self, thing: usize) -> Vec<AcquisitionId> {
        let waits = self.users.iter().filter_map(|user| match &user.doing {
            Doing::Waiting(usage) if usage.thing == thing && usage.queues => Some(usage.id),
            _ => None,
        });
        waits.collect()
    }
}

/// A permit that was lost although its holder did nothing wrong.
#[derive(Clone, Debug)]
pub(super) struct Loss {
    pub(super) worker: usize,
    pub(super) thing: usize,
    pub(super) op: u64,
    pub(super) from: Micros,
    pub(super) at: Micros,
}

impl Simulation<'_> {
    pub(super) fn next_turn(&mut self, worker: usize, user: usize, later: Micros) {
        let process = &mut self.processes[worker];
        process.users[user].turn += 1;
        let (life, turn) = (process.life, process.users[user].turn);
        self.at(self.now + later, Event::User { worker, life, user, turn });
    }

    /// A user takes its turn: it begins something, gives up, or ends what it holds.
    pub(super) fn user(&mut self, worker: usize, life: u32, user: usize, turn: u64) {
        let process = &self.processes[worker];
        if process.life != life || !process.alive || process.users[user].turn != turn {
            return;
        }
        if self.defer(worker, Event::User { worker, life, user, turn }) {
            return;
        }
        match std::mem::take(&mut self.processes[worker].users[user].doing) {
            Doing::Nothing if self.finishing => {}
            Doing::Nothing => self.begin(worker, user),
            Doing::Waiting(usage) => {
                self.with_core(worker, usage.thing, |core, now| core.end(usage.id, false, now));
                self.ends(worker, user, usage, How::Cancelled);
            }
            Doing::Granted(usage, permit) => self.sees(worker, user, usage, permit),
            Doing::Holding(usage, permit) => self.finishes(worker, user, usage, permit),
            Doing::Releasing(usage) => {
                self.processes[worker].users[user].doing = Doing::Releasing(usage);
            }
            Doing::ReleasingAgain(thing) => {
                self.processes[worker].users[user].doing = Doing::ReleasingAgain(thing);
            }
        }
    }

    fn begin(&mut self, worker: usize, user: usize) {
        let scenario = self.scenario;
        let rng = &mut self.processes[worker].rng;
        let thing = scenario.things[rng.usize(..scenario.things.len())];
        let choice = rng.u32(..100);
        if choice < 5
            && let Some((thing, id)) = self.processes[worker].users[user].spent.pop()
        {
            let owner = Owner { user, op: 0, id };
            let lease = terms(thing).lease;
            let released = self
                .with_core(worker, thing, |core, now| core.release(id, owner, (false, lease), now));
            if released.is_some() {
                self.processes[worker].users[user].doing = Doing::ReleasingAgain(thing);
                return;
            }
        }
        let rng = &mut self.processes[worker].rng;
        let weight = rng.u32(1..=THINGS[thing].heaviest);
        let (mut queues, mut within, mut patience) = (true, None, LONGEST);
        match choice {
            5..12 => {
                queues = false;
                within = Some(5 * SECOND);
            }
            12..24 => within = Some(rng.u64(20 * MILLISECOND..2 * SECOND)),
            24..32 => patience = rng.u64(0..5 * MILLISECOND),
            32..42 => patience = rng.u64(0..1200 * MILLISECOND),
            _ => {}
        }
        let process = &mut self.processes[worker];
        process.sequence += 1;
        process.last_op += 1;
        let id = AcquisitionId::new(process.client, process.sequence);
        let (op, life) = (process.last_op, process.life);
        let now = process.local(self.now);
        let gives_up_at = within.map(|within| now + Span::from_micros(within));
        let limit = gives_up_at.map(|at| process.time_of(at));
        let usage = Use { op, thing, id, weight, queues, limit };
        process.users[user].doing = Doing::Waiting(usage);
        self.ids.insert(id, (worker, life, op));
        let (name, listed) = (THINGS[thing].name.to_owned(), id.to_string());
        self.note(worker, self.now, Noted::Ask { op, thing: name, id: listed });
        let share = Share { weight, numbered: THINGS[thing].numbered };
        let (terms, label, claims_first) = (terms(thing), None, false);
        let request = Request { terms, share, queues, claims_first, gives_up_at, label };
        self.next_turn(worker, user, patience);
        self.with_core(worker, thing, |core, now| {
            core.acquire(id, Owner { user, op, id }, request, now);
        });
    }

    fn sees(&mut self, worker: usize, user: usize, usage: Use, permit: Permit) {
        let Use { op, weight, .. } = usage;
        let fence = Some(permit.fence.get());
        self.note(worker, self.now, Noted::Grant { op, fence, slot: permit.slot, weight });
        self.note_hold(worker, usage, permit);
        let rng = &mut self.processes[worker].rng;
        let hold = match rng.u32(..10) {
            0 => rng.u64(2 * SECOND..9 * SECOND),
            1..4 => rng.u64(300 * MILLISECOND..2 * SECOND),
            _ => rng.u64(5 * MILLISECOND..300 * MILLISECOND),
        };
        self.processes[worker].users[user].doing = Doing::Holding(usage, permit);
        self.next_turn(worker, user, if self.finishing { 0 } else { hold });
    }

    /// Notes the last instant, until now, at which the holder certainly held.
    fn note_hold(&mut self, worker: usize, usage: Use, permit: Permit) {
        let process = &self.processes[worker];
        let valid_until = process.time_of(permit.valid_until).saturating_sub(1);
        let since = self.now.min(valid_until);
        if permit.granted <= since {
            self.note(worker, since, Noted::Hold { op: usage.op, since });
        }
    }

    fn finishes(&mut self, worker: usize, user: usize, usage: Use, permit: Permit) {
        let Use { op, thing, id, .. } = usage;
        self.note_hold(worker, usage, permit);
        self.note(worker, self.now, Noted::Ending { op });
        let is_valid = self.processes[worker].local(self.now) < permit.valid_until;
        self.with_core(worker, thing, |core, now| core.end(id, true, now));
        if !is_valid {
            self.loses(worker, usage, permit, LossReason::NotRenewed);
            return self.ends(worker, user, usage, How::Lost);
        }
        if self.processes[worker].rng.u32(..4) == 0 {
            return self.ends(worker, user, usage, How::Dropped);
        }
        self.processes[worker].users[user].doing = Doing::Releasing(usage);
        let (owner, lease) = (Owner { user, op, id }, terms(thing).lease);
        let released =
            self.with_core(worker, thing, |core, now| core.release(id, owner, (true, lease), now));
        if released.is_none() {
            self.ends(worker, user, usage, How::Lost);
        }
    }

    fn ends(&mut self, worker: usize, user: usize, usage: Use, how: How) {
        self.note(worker, self.now, Noted::End { op: usage.op, how });
        if usage.limit.is_some_and(|limit| self.now > limit + 5 * MILLISECOND)
            && matches!(how, How::TimedOut | How::Full | How::Failed)
            && self.continued_since(worker, usage.limit)
        {
            let what = format!("worker {worker} op {} ended long after its time limit", usage.op);
            self.saw(torture::check::Rule::Waiting, usage.thing, what);
        }
        self.processes[worker].users[user].doing = Doing::Nothing;
        let rng = &mut self.processes[worker].rng;
        let pause = if rng.u32(..4) == 0 { rng.u64(0..4 * SECOND) } else { rng.u64(0..SECOND) };
        self.next_turn(worker, user, pause);
    }

    /// Checks that the store keeps a permit for as long as its holder relies on it (invariant 6).
    fn check_validity(&mut self, worker: usize, thing: usize, owner: Owner, valid_until: Moment) {
        if self.lost_data || self.clock_was_set {
            return;
        }
        let until = self.processes[worker].time_of(valid_until);
        let Owner { op, id, .. } = owner;
        let member = self.store.machines[thing].member(id).filter(MemberView::is_holder);
        let ends = member.map_or(0, |member| {
            member.ends().map_or(Micros::MAX, |ends| ends.micros() - STORE_AHEAD)
        });
        if ends < until {
            let what = format!(
                "worker {worker} op {op} is relied on for {} ms longer than the store keeps it",
                (until - ends.max(self.now.min(until))) / MILLISECOND
            );
            self.saw(torture::check::Rule::Limit, thing, what);
        }
    }

    /// While a connection is lost, some users give up, some of them before their client knows that it is lost.
    pub(super) fn users_lose_patience(&mut self, worker: usize) {
        for user in 0..self.processes[worker].users.len() {
            let process = &mut self.processes[worker];
            let waits = matches!(process.users[user].doing, Doing::Waiting(_));
            if waits && !process.rng.bool() {
                let later = process.rng.u64(0..120 * MILLISECOND);
                let at_once = process.rng.bool();
                let (life, turn) = (process.life, process.users[user].turn);
                if at_once {
                    self.user(worker, life, user, turn);
                } else {
                    self.next_turn(worker, user, later);
                }
            }
        }
    }

    /// Whether the process was not stopped since then.
    fn continued_since(&self, worker: usize, since: Option<Micros>) -> bool {
        let stopped = self.faults.iter().any(|fault| {
            fault.kind == Kind::Stop
                && fault.scope == Scope::Worker(worker)
                && since.is_some_and(|since| fault.end >= since)
        });
        let begun = self.begun.keys().any(|at| {
            let injection = &self.scenario.injections[*at];
            injection.kind == Kind::Stop && injection.worker == worker
        });
        !stopped && !begun
    }

    fn loses(&mut self, worker: usize, usage: Use, permit: Permit, reason: LossReason) {
        if reason != LossReason::TtlEnded && THINGS[usage.thing].ttl.is_none() {
            let (thing, op, from, at) = (usage.thing, usage.op, permit.granted, self.now);
            self.losses.push(Loss { worker, thing, op, from, at });
        }
    }

    /// Applies the notices of a core, as the engine applies them to tickets.
    pub(super) fn apply_notices(&mut self, worker: usize, thing: usize) {
        loop {
            let Some(core) = self.processes[worker].existing_core(thing) else { return };
            let notices = std::mem::take(core.notices());
            if notices.is_empty() {
                return;
            }
            for notice in notices {
                self.apply_notice(worker, thing, notice);
            }
        }
    }

    fn apply_notice(&mut self, worker: usize, thing: usize, notice: Notice<Owner>) {
        let owner = match &notice {
            Notice::Granted { owner, .. }
            | Notice::Extended { owner, .. }
            | Notice::Full { owner }
            | Notice::Failed { owner, .. }
            | Notice::Lost { owner, .. }
            | Notice::Released { owner, .. } => *owner,
            Notice::Overdue { since } => return self.suspect(worker, *since),
            Notice::Limited { .. }
            | Notice::Renewed { .. }
            | Notice::RenewalRefused { .. }
            | Notice::ShortLease { .. } => return,
        };
        if let Notice::Granted { valid_until, .. } | Notice::Extended { valid_until, .. } = notice {
            self.check_validity(worker, thing, owner, valid_until);
        }
        let user = owner.user;
        let doing = self.processes[worker].users[user].doing.clone();
        match (doing, notice) {
            (Doing::Waiting(usage), Notice::Granted { held, valid_until, .. })
                if usage.op == owner.op =>
            {
                let slot = held.slot_number.map_or(0, std::num::NonZeroU32::get);
                let (fence, granted) = (held.fence, self.now);
                let permit = Permit { fence, slot, valid_until, granted };
                // The time limit is that of the acquire.
                let usage = Use { limit: None, ..usage };
                self.processes[worker].users[user].doing = Doing::Granted(usage, permit);
                // Usually the task of the user runs at once.
                let rng = &mut self.processes[worker].rng;
                let later = if rng.u32(..20) == 0 { rng.u64(0..20 * MILLISECOND) } else { 0 };
                self.next_turn(worker, user, later);
            }
            (Doing::Granted(usage, permit), Notice::Extended { valid_until, .. })
                if usage.op == owner.op =>
            {
                let valid_until = valid_until.max(permit.valid_until);
                let permit = Permit { valid_until, ..permit };
                self.processes[worker].users[user].doing = Doing::Granted(usage, permit);
            }
            (Doing::Holding(usage, permit), Notice::Extended { valid_until, .. })
                if usage.op == owner.op =>
            {
                let valid_until = valid_until.max(permit.valid_until);
                let permit = Permit { valid_until, ..permit };
                self.processes[worker].users[user].doing = Doing::Holding(usage, permit);
            }
            (Doing::Waiting(usage), Notice::Full { .. }) if usage.op == owner.op => {
                self.ends(worker, user, usage, How::Full);
            }
            (Doing::Waiting(usage), Notice::Failed { failure, .. }) if usage.op == owner.op => {
                let how = match failure {
                    Failure::TimedOut { .. } => How::TimedOut,
                    Failure::Unanswered { .. } => How::Failed,
                    Failure::Cancelled => How::Lost,
                    Failure::TooHeavy { .. } | Failure::Refused(_) => How::Internal,
                };
                self.ends(worker, user, usage, how);
            }
            (Doing::Granted(usage, permit), Notice::Lost { .. }) if usage.op == owner.op => {
                let _ = permit;
                self.ends(worker, user, usage, How::Lost);
            }
            (Doing::Holding(usage, permit), Notice::Lost { reason, .. })
                if usage.op == owner.op =>
            {
                self.note_hold(worker, usage, permit);
                self.loses(worker, usage, permit, reason);
                self.ends(worker, user, usage, How::Lost);
            }
            (Doing::Releasing(usage), Notice::Released { outcome, .. }) if usage.op == owner.op => {
                let how = match outcome {
                    Ok(true) => How::Released,
                    Ok(false) => How::Lost,
                    Err(_) => How::Failed,
                };
                if how == How::Released {
                    self.processes[worker].users[user].spent.push((usage.thing, usage.id));
                }
                self.ends(worker, user, usage, how);
            }
            (Doing::ReleasingAgain(thing), Notice::Released { outcome, .. }) => {
                // An enqueue of a lost connection may have brought the id back after its release.
                if let Ok(released) = outcome
                    && !(released && self.watch.brought_back.contains(&owner.id))
                {
                    let name = THINGS[thing].name.to_owned();
                    self.note(worker, self.now, Noted::Stale { thing: name, released });
                }
                self.processes[worker].users[user].doing = Doing::Nothing;
                self.next_turn(worker, user, 100 * MILLISECOND);
            }
            _ => {}
        }
    }

    /// The process dies: what its users held until now.
    pub(super) fn uses_end(&mut self, worker: usize) {
        for user in 0..self.processes[worker].users.len() {
            if let Doing::Holding(usage, permit) = self.processes[worker].users[user].doing.clone()
            {
                self.note_hold(worker, usage, permit);
            }
        }
    }

    /// The users give up what they wait for, and end what they hold.
    pub(super) fn finish(&mut self) {
        self.finishing = true;
        for worker in 0..self.processes.len() {
            for user in 0..self.processes[worker].users.len() {
                if self.processes[worker].alive {
                    self.next_turn(worker, user, 0);
                }
            }
        }
        self.reset_limits();
    }
}
