//! The client's side of the model: what `engine/remote` does for one acquisition and what it sends, without timers,
//! batches and threads. Whatever the engine does at some time, the model may do at any time.

use super::*;

/// A client, or rather a place for one: when a client dies, another one takes its place.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Client {
    pub(super) own_id: ClientId,
    pub(super) in_flight: usize,
    sequence: u64,
    pub(super) stage: Stage,
    pub(super) releases: Vec<Release>,
    /// Whether its requests reach the store, and wake-ups reach it.
    pub(super) connected: bool,
    /// Whether the store still believes that the clients that died in this place are connected.
    pub(super) half_open: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Stage {
    Idle,
    Waiting(Waiting),
    /// The enqueue may still be in flight: a wake-up arrived first.
    Held {
        id: AcquisitionId,
        life: Life,
        doubtful: bool,
        fence: Fence,
        valid_until: Moment,
    },
}

#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is one of the engine's
pub(super) struct Waiting {
    pub(super) id: AcquisitionId,
    /// The life of its enqueue.
    pub(super) life: Life,
    /// Whether one of its enqueues was not answered.
    pub(super) doubtful: bool,
    /// Whether the store has answered that it is in the queue.
    pub(super) queued: bool,
    /// Whether an enqueue has to be sent.
    pub(super) enqueue: bool,
    /// Whether it may hold a permit, so that the client asks the store at once.
    pub(super) claim: bool,
}

impl Waiting {
    fn holding(&self, fence: Fence, valid_until: Moment) -> Stage {
        let Self { id, life, doubtful, .. } = *self;
        Stage::Held { id, life, doubtful, fence, valid_until }
    }
}

/// The engine's `Life`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    Unsent,
    Sent,
    Answered,
    Unknown,
}

/// The engine's `Unreleased`: an id that the client no longer needs.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is one of the engine's
pub(super) struct Release {
    pub(super) id: AcquisitionId,
    /// [`Life::Answered`] if it was answered but is still repeated.
    pub(super) life: Life,
    /// Whether the id is known to have been a holder, so that the store does not look for it in the queue.
    pub(super) confirmed: bool,
    /// Whether no caller has seen the permit, if there was one. Used only where there is a rate.
    pub(super) unused: bool,
    pub(super) doubtful: bool,
    /// Whether an answer about the id arrived after the release was sent.
    pub(super) again: bool,
    /// By then the store must have expired the id.
    pub(super) until: Moment,
}

impl Release {
    fn ask(&self) -> Ask {
        match (self.unused, self.confirmed) {
            (true, _) => Ask::ReleaseUnused,
            (false, true) => Ask::ReleaseHolder,
            (false, false) => Ask::Release,
        }
    }
}

/// A client id encodes its place (from 1 on), times this, plus the number of clients that have died there.
const LIVES: u64 = 1000;

pub(super) fn slot(client: ClientId) -> usize {
    usize::try_from(client.number() / LIVES).unwrap_or_default() - 1
}

impl Client {
    pub(super) fn new(number: u64, in_flight: usize) -> Self {
        Self {
            own_id: ClientId::from_bits(number * LIVES),
            in_flight,
            sequence: 0,
            stage: Stage::Idle,
            releases: Vec::new(),
            connected: true,
            half_open: false,
        }
    }

    /// Whether dying would change nothing.
    pub(super) fn is_new(&self) -> bool {
        self.stage == Stage::Idle && self.releases.is_empty()
    }

    pub(super) fn id(&self) -> Option<AcquisitionId> {
        match self.stage {
            Stage::Idle => None,
            Stage::Waiting(Waiting { id, .. }) | Stage::Held { id, .. } => Some(id),
        }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AcquisitionId> {
        self.releases.iter().map(|release| release.id).chain(self.id())
    }

    pub(super) fn believes(&self, now: Moment) -> bool {
        matches!(self.stage, Stage::Held { valid_until, .. } if now < valid_until)
    }

    /// Whether the store has the permit that the client believes in.
    pub(super) fn agrees_with(&self, state: &State) -> bool {
        let Stage::Held { id: own, fence: believed, .. } = self.stage else { return false };
        state
            .present()
            .any(|(id, member)| id == own && super::store::fence(member) == Some(believed))
    }

    /// Whether the client knows that the store may have this id.
    pub(super) fn answers_for(&self, id: AcquisitionId) -> bool {
        let waits = match self.stage {
            Stage::Waiting(waiting) => waiting.id == id && waiting.life != Life::Unsent,
            Stage::Held { id: own, .. } => own == id,
            Stage::Idle => false,
        };
        waits || self.releases.iter().any(|release| release.id == id)
    }

    pub(super) fn acquire(&mut self) {
        self.sequence += 1;
        self.stage = Stage::Waiting(Waiting {
            id: AcquisitionId::new(self.own_id, self.sequence),
            life: Life::Unsent,
            doubtful: false,
            queued: false,
            enqueue: true,
            claim: false,
        });
    }

    pub(super) fn end(&mut self, world: &World, now: Moment) {
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Idle => {}
            Stage::Waiting(Waiting { id, life, doubtful, .. }) => {
                let lost = world.is(Broken::LostCancel) && life != Life::Answered;
                if life != Life::Unsent && !lost {
                    self.add_release(world, id, (false, true), doubtful, now);
                }
            }
            Stage::Held { id, life, doubtful, .. } => {
                // A holder whose enqueue is neither in flight nor in doubt is not in the queue, so the store need not
                // look there. Without pipelining both releases do the same, so only one of them is modelled.
                let certain = !doubtful && life == Life::Answered;
                let confirmed = certain && world.is_pipelined();
                self.add_release(world, id, (confirmed, false), doubtful, now);
            }
        }
    }

    fn add_release(
        &mut self,
        world: &World,
        id: AcquisitionId,
        (confirmed, unused): (bool, bool),
        doubtful: bool,
        now: Moment,
    ) {
        let (life, again, until) = (Life::Unsent, false, world.expired_by(now));
        let doubtful = doubtful && world.is_pipelined();
        let unused = unused && world.rate.is_some();
        self.releases.push(Release { id, life, confirmed, unused, doubtful, again, until });
    }

    /// Releases an id that this client no longer needs and that the store may know.
    fn ensure_released(&mut self, world: &World, id: AcquisitionId, doubtful: bool, now: Moment) {
        if let Some(release) = self.release(id) {
            release.again |= release.life == Life::Sent && !world.is(Broken::NoAgain);
            release.doubtful |= doubtful;
            // The id may be in the queue again, and its time to expire starts again.
            (release.confirmed, release.until) = (false, world.expired_by(now));
        } else if !world.is(Broken::LateAnswer) {
            self.add_release(world, id, (false, true), doubtful, now);
        }
    }

    fn release(&mut self, id: AcquisitionId) -> Option<&mut Release> {
        self.releases.iter_mut().find(|release| release.id == id)
    }

    /// Forgets a release that was repeated for long enough.
    pub(super) fn forget(&mut self, id: AcquisitionId) {
        self.releases.retain(|release| release.id != id);
    }

    pub(super) fn crash(&mut self) {
        let successor = ClientId::from_bits(self.own_id.number() + 1);
        *self = Self { own_id: successor, half_open: true, ..Self::new(1, self.in_flight) };
    }

    /// The requests that the client may send now. Urgent ones do not wait for a timer.
    pub(super) fn asks(&self, world: &World) -> Vec<(Ask, AcquisitionId, Urgent)> {
        let mut asks = Vec::new();
        for release in &self.releases {
            if release.life != Life::Sent {
                asks.push((release.ask(), release.id, release.life != Life::Answered));
            }
        }
        match self.stage {
            Stage::Idle => {}
            Stage::Waiting(Waiting { id, queued, enqueue, claim, .. }) => {
                if enqueue {
                    asks.push((Ask::Enqueue, id, true));
                }
                if claim || queued && !enqueue && !world.is(Broken::NoBackstop) {
                    asks.push((Ask::Renew, id, claim));
                }
            }
            Stage::Held { id, .. } => asks.push((Ask::Renew, id, false)),
        }
        asks
    }

    /// Whether it makes a difference to the client that a request was sent and lost.
    pub(super) fn is_changed_by_loss(&self, world: &World, ask: Ask, id: AcquisitionId) -> bool {
        let mut lost = self.clone();
        lost.sends(ask, id);
        lost.unanswered(world, ask, id, Moment::NEVER);
        lost != *self
    }

    /// A command was packed into a request.
    pub(super) fn sends(&mut self, ask: Ask, sent_id: AcquisitionId) {
        if ask.releases() {
            if let Some(release) = self.release(sent_id) {
                (release.life, release.again) = (Life::Sent, false);
            }
        } else if let Stage::Waiting(waiting) = &mut self.stage {
            if ask == Ask::Enqueue {
                (waiting.life, waiting.enqueue) = (Life::Sent, false);
            } else {
                waiting.claim = false;
            }
        }
    }

    /// The connection was lost before the answer arrived.
    pub(super) fn unanswered(&mut self, world: &World, ask: Ask, lost: AcquisitionId, now: Moment) {
        if ask.releases() {
            if world.is(Broken::ReleasedOnce) {
                self.forget(lost);
            } else if let Some(release) = self.release(lost) {
                release.life = Life::Unknown;
            }
            return;
        }
        match &mut self.stage {
            // A waiter that is queued asks again anyway.
            Stage::Waiting(waiting) if ask == Ask::Renew && waiting.id == lost => {
                waiting.claim |= !waiting.queued;
            }
            _ if ask == Ask::Renew => {}
            Stage::Waiting(waiting) if waiting.id == lost => {
                (waiting.life, waiting.doubtful) = (Life::Unknown, world.is_pipelined());
                waiting.enqueue = true;
            }
            Stage::Held { id, life, doubtful, .. } if *id == lost => {
                (*life, *doubtful) = (Life::Unknown, world.is_pipelined());
            }
            _ => self.ensure_released(world, lost, true, now),
        }
    }

    /// A wake-up says what was granted, and when. The client believes it if it is young enough, and otherwise asks the
    /// store.
    pub(super) fn woken(
        &mut self,
        world: &World,
        woken_id: AcquisitionId,
        (mut held, granted_at): (Held, Moment),
        now: Moment,
    ) {
        let Stage::Waiting(waiting) = &mut self.stage else { return };
        if waiting.id != woken_id {
            return;
        }
        held.valid_for = held.valid_for.into_iter().chain(world.terms.ttl).min();
        let granted_at = if world.is(Broken::OldWakeUp) { now } else { granted_at };
        let valid_until = world.valid_until(&held, granted_at, now);
        // Where there is a rate, the store has to know that the permit is used.
        let asks_first = world.rate.is_some() && !world.is(Broken::Unclaimed);
        if now < valid_until && !asks_first {
            self.stage = waiting.holding(held.fence, valid_until);
        } else {
            waiting.claim = true;
        }
    }

    pub(super) fn answered(&mut self, world: &World, answer: &Answer, now: Moment) {
        let &Answer { ask, id, outcome, sent, .. } = answer;
        if ask.releases() {
            self.released(world, id, now);
        } else {
            let known = matches!(outcome, Outcome::Held(_) | Outcome::Waiting { .. });
            if ask != Ask::Renew {
                self.mark_answered(world, id, known, now);
            }
            self.apply_outcome(world, id, outcome, sent, now);
        }
        for (id, held) in &answer.granted {
            self.mark_answered(world, *id, true, now);
            self.apply_outcome(world, *id, Outcome::Held(*held), sent, now);
        }
    }

    /// The store has answered a request about this id, or has granted it a permit.
    fn mark_answered(&mut self, world: &World, id: AcquisitionId, known: bool, now: Moment) {
        match &mut self.stage {
            Stage::Waiting(waiting) if waiting.id == id => waiting.life = Life::Answered,
            Stage::Held { id: own, life, .. } if *own == id => *life = Life::Answered,
            _ if known => self.ensure_released(world, id, false, now),
            _ => {}
        }
    }

    fn released(&mut self, world: &World, id: AcquisitionId, now: Moment) {
        let Some(release) = self.release(id) else { return };
        if release.again {
            (release.life, release.again) = (Life::Unknown, false);
        } else if release.doubtful
            && now < release.until
            && world.stragglers > 0
            && !world.is(Broken::NoRepeat)
        {
            release.life = Life::Answered;
        } else {
            self.forget(id);
        }
    }

    fn apply_outcome(
        &mut self,
        world: &World,
        id: AcquisitionId,
        outcome: Outcome,
        sent: Moment,
        now: Moment,
    ) {
        if self.id() != Some(id) {
            return;
        }
        match (&mut self.stage, outcome) {
            (Stage::Waiting(waiting), Outcome::Held(held)) => {
                let valid_until = world.valid_until(&held, sent, now);
                if now < valid_until {
                    self.stage = waiting.holding(held.fence, valid_until);
                } else {
                    // The answer took longer than the permit is valid.
                    waiting.claim = true;
                }
            }
            // A permit whose validity has ended stays lost, even if the client has not noticed yet.
            (Stage::Held { valid_until, .. }, Outcome::Held(held))
                if now < *valid_until || world.is(Broken::ComesBack) =>
            {
                *valid_until = world.valid_until(&held, sent, now).max(*valid_until);
            }
            (Stage::Waiting(waiting), Outcome::Waiting { .. }) => waiting.queued = true,
            // The id may be in the queue again.
            (Stage::Held { doubtful, .. }, Outcome::Waiting { .. }) => {
                *doubtful |= world.is_pipelined() && !world.is(Broken::EnqueuedTwice);
            }
            // Its enqueue was sent after the renewal, and will be answered.
            (Stage::Waiting(waiting), Outcome::Gone)
                if waiting.life == Life::Sent && !world.is(Broken::EnqueuedTwice) => {}
            (Stage::Waiting(waiting), Outcome::Gone) => {
                (waiting.queued, waiting.enqueue) = (false, true);
                // A claim that has not been sent yet would find nothing, unless another request of the client is
                // applied before it. That needs pipelining.
                waiting.claim &= world.is_pipelined();
            }
            // The store does not know the id, or has refused it. But a request of an earlier connection may still be
            // applied, or may have been applied after this answer. So with stragglers the id is released.
            (Stage::Held { .. }, Outcome::Gone) | (Stage::Waiting(_), Outcome::TooHeavy { .. }) => {
                if world.stragglers > 0 {
                    self.end(world, now);
                } else {
                    self.stage = Stage::Idle;
                }
            }
            _ => {}
        }
    }
}

type Urgent = bool;

impl World {
    /// The engine's rule, on a clock that falls behind.
    pub(super) fn valid_until(&self, held: &Held, sent: Moment, now: Moment) -> Moment {
        let from = if self.is(Broken::CountedFromAnswer) { now } else { sent };
        let (margin, valid_until) = (held.margin(self.terms), held.valid_until(self.terms, from));
        // The slow clock adds what the margin subtracts.
        let valid_until = valid_until + margin;
        if self.is(Broken::NoMargin) { valid_until + margin } else { valid_until }
    }

    /// When the store must have expired an id that is silent from now on.
    pub(super) fn expired_by(&self, now: Moment) -> Moment {
        let Terms { lease, .. } = self.terms;
        now + self.terms.patience().unwrap_or(TICK) + lease.unwrap_or(TICK)
    }
}
