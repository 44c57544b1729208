//! The client's side of the model: what `engine/desk.rs` does about one acquisition, without timers, batches and
//! threads. Whenever the engine might do something, it may be done here, and whenever that is.

use super::*;

/// A client, or rather a place for one: when it dies, another takes its place.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Client {
    pub(super) own_id: ClientId,
    pub(super) in_flight: usize,
    sequence: u64,
    pub(super) stage: Stage,
    /// Ids that it is done with, until a release of them is answered.
    pub(super) letting_go: Vec<AcquisitionId>,
    /// Whether it reaches the store, and wake-ups reach it.
    pub(super) connected: bool,
    /// Whether the store takes those for connected that died in this place.
    pub(super) half_open: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Stage {
    Idle,
    Waiting {
        id: AcquisitionId,
        /// Whether the store has said that it is in the queue.
        queued: bool,
        /// Whether a permit is to be claimed.
        woken: bool,
    },
    Held {
        id: AcquisitionId,
        fence: Option<Fence>,
        valid_until: Moment,
    },
}

/// Client ids say whose place it is, and how many have died there.
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
            letting_go: Vec::new(),
            connected: true,
            half_open: false,
        }
    }

    /// Whether dying would change nothing.
    pub(super) fn is_new(&self) -> bool {
        self.stage == Stage::Idle && self.letting_go.is_empty()
    }

    pub(super) fn id(&self) -> Option<AcquisitionId> {
        match self.stage {
            Stage::Idle => None,
            Stage::Waiting { id, .. } | Stage::Held { id, .. } => Some(id),
        }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AcquisitionId> {
        self.letting_go.iter().copied().chain(self.id())
    }

    pub(super) fn believes(&self, now: Moment) -> bool {
        matches!(self.stage, Stage::Held { valid_until, .. } if now < valid_until)
    }

    /// Whether what it believes in is what the store has.
    pub(super) fn agrees_with(&self, state: &State) -> bool {
        let Stage::Held { id: own, fence: believed, .. } = self.stage else { return false };
        state.present().any(|(id, member)| id == own && super::store::fence(member) == believed)
    }

    pub(super) fn acquire(&mut self) {
        self.sequence += 1;
        let id = AcquisitionId::new(self.own_id, self.sequence);
        self.stage = Stage::Waiting { id, queued: false, woken: false };
    }

    pub(super) fn let_go(&mut self) {
        self.letting_go.extend(self.id());
        self.stage = Stage::Idle;
    }

    pub(super) fn crash(&mut self) {
        let successor = ClientId::from_bits(self.own_id.number() + 1);
        *self = Self { own_id: successor, half_open: true, ..Self::new(1, self.in_flight) };
    }

    /// What it may send now, for the first time or again.
    pub(super) fn asks(&self, world: &World) -> Vec<(Ask, AcquisitionId)> {
        let mut asks: Vec<_> = self.letting_go.iter().map(|id| (Ask::Release, *id)).collect();
        match self.stage {
            Stage::Idle => {}
            Stage::Waiting { id, queued, woken } => {
                if woken {
                    asks.push((Ask::Confirm, id));
                }
                if !queued {
                    asks.push((Ask::Enqueue, id));
                } else if !world.is(Broken::NoBackstop) {
                    asks.push((Ask::Renew, id));
                }
            }
            Stage::Held { id, .. } => asks.push((Ask::Renew, id)),
        }
        asks
    }

    pub(super) fn woken(&mut self, world: &World, woken_id: AcquisitionId, now: Moment) {
        let Stage::Waiting { id, woken, .. } = &mut self.stage else { return };
        if *id != woken_id {
            return;
        }
        *woken = true;
        if world.is(Broken::NoConfirm) {
            let held = Held { slot_number: 1, fence: None, valid_for: world.terms.lease };
            let valid_until = held.valid_until(world.terms, now) + DRIFT;
            self.stage = Stage::Held { id: woken_id, fence: None, valid_until };
        }
    }

    pub(super) fn answered(&mut self, world: &World, answer: &Answer, now: Moment) {
        let &Answer { ask, id, outcome, sent, .. } = answer;
        let stays = matches!(outcome, Outcome::Held(_) | Outcome::Queued { .. });
        if stays && ask != Ask::Renew && self.id() != Some(id) {
            // Nobody waits for it any more, and the release may have come before.
            self.give_back(id);
        }
        self.told(world, ask, id, outcome, sent, now);
        for (id, held) in &answer.granted {
            if self.id() != Some(*id) {
                self.give_back(*id);
            }
            self.told(world, ask, *id, Outcome::Held(*held), sent, now);
        }
    }

    fn give_back(&mut self, id: AcquisitionId) {
        if !self.letting_go.contains(&id) {
            self.letting_go.push(id);
        }
    }

    fn told(
        &mut self,
        world: &World,
        ask: Ask,
        told_id: AcquisitionId,
        outcome: Outcome,
        sent: Moment,
        now: Moment,
    ) {
        if matches!(outcome, Outcome::Removed(_)) {
            self.letting_go.retain(|id| *id != told_id);
        }
        if self.id() != Some(told_id) {
            return;
        }
        match (&mut self.stage, outcome) {
            (Stage::Waiting { id, woken, .. }, Outcome::Held(held)) => {
                let valid_until = world.valid_until(&held, sent, now);
                if held.fence.is_some() && now < valid_until {
                    self.stage = Stage::Held { id: *id, fence: held.fence, valid_until };
                } else {
                    // Either it is to be claimed first, or the answer took longer than it is good for.
                    *woken = true;
                }
            }
            // What has ended stays ended, also if nobody has noticed yet.
            (Stage::Held { valid_until, .. }, Outcome::Held(held))
                if held.fence.is_some() && (now < *valid_until || world.is(Broken::ComesBack)) =>
            {
                *valid_until = world.valid_until(&held, sent, now).max(*valid_until);
            }
            (Stage::Waiting { queued, woken, .. }, Outcome::Queued { .. } | Outcome::Waiting) => {
                *queued = true;
                *woken &= ask != Ask::Confirm;
            }
            (Stage::Waiting { queued, woken, .. }, Outcome::Gone) => {
                (*queued, *woken) = (false, false);
            }
            (Stage::Held { .. }, Outcome::Gone) => self.stage = Stage::Idle,
            _ => {}
        }
    }
}

impl World {
    /// The engine's rule, on a clock that falls behind.
    pub(super) fn valid_until(&self, held: &Held, sent: Moment, now: Moment) -> Moment {
        let from = if self.is(Broken::CountedFromAnswer) { now } else { sent };
        let margin = if self.is(Broken::NoMargin) { Some(self.terms.margin()) } else { None };
        let valid_until = held.valid_until(self.terms, from) + DRIFT;
        margin.map_or(valid_until, |margin| valid_until + margin)
    }
}
