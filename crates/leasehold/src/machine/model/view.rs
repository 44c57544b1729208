//! The part of a state that decides its future.
//!
//! What can happen depends on differences between times, never on the time itself. It depends on the order of ids and
//! fences, never on their numbers. And it depends on the identity of a client only through the client's own ids and
//! messages. So a state is written as one list of small numbers for each client. Times are relative to now, and ids,
//! fences and places in the queue are ranks. A time in the past counts as now, however long ago it was. The lists are
//! sorted, because it does not matter which client is which.
//!
//! This runs for every generated state, and most of these are known already. So it uses plain loops for speed.

use super::client::{Release, Waiting};
use super::*;

/// The references for relative times and ranks.
struct Scale<'a> {
    state: &'a State,
    present: Vec<(AcquisitionId, &'a Member)>,
    fences: Vec<Fence>,
}

fn small(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

fn flags(flags: [bool; 4]) -> u8 {
    flags.into_iter().fold(0, |all, flag| all << 1 | u8::from(flag))
}

/// The first number of a request on the current connection. An answer begins with the next number.
const ORDERED: u8 = 2;

/// The number of clock steps from `now` to `then`.
fn steps(now: u64, then: u64) -> u8 {
    u8::try_from(then.saturating_sub(now).div_ceil(TICK.micros())).unwrap_or(u8::MAX)
}

impl State {
    pub(super) fn view(&self) -> Vec<u8> {
        let scale = Scale::new(self);
        let slots = 0..self.clients.len();
        let mut clients: Vec<Vec<u8>> = slots.map(|slot| scale.client(slot)).collect();
        clients.sort_unstable();
        let wrong = self.store.wrong.map_or(0, |wrong| 1 + wrong as u8);
        let limits = self.store.machine.limits();
        let paused = u8::from(limits.paused().is_some());
        let mut view = vec![small(limits.capacity() as usize), paused, wrong];
        scale.rate(&mut view);
        for client in &clients {
            view.push(small(client.len()));
            view.extend_from_slice(client);
        }
        view
    }
}

impl<'a> Scale<'a> {
    fn new(state: &'a State) -> Self {
        let present: Vec<_> = state.present().collect();
        let mut fences: Vec<Fence> = Vec::new();
        for (_, member) in &present {
            fences.extend(store::fence(member));
        }
        for client in &state.clients {
            if let ClientStage::Held { fence, .. } = client.stage {
                fences.push(fence);
            }
        }
        for message in &state.wire {
            match message {
                Message::Answer(Answer { outcome, granted, .. }) => {
                    if let Outcome::Held(held) = outcome {
                        fences.push(held.fence);
                    }
                    fences.extend(granted.iter().map(|(_, held)| held.fence));
                }
                Message::WakeUp { held, .. } => fences.push(held.fence),
                Message::Request { .. } => {}
            }
        }
        fences.sort_unstable();
        fences.dedup();
        Self { state, present, fences }
    }

    /// Adds what the store knows about tokens, and the watcher about starts.
    fn rate(&self, view: &mut Vec<u8>) {
        let store = &self.state.store;
        let now = self.state.store_time(self.state.now);
        if let Some(meter) = store.machine.limits().meter() {
            let before = |first: u64| self.fences.iter().filter(|own| own.get() < first).count();
            view.push(steps(now.micros(), meter.full_at.micros()));
            view.push(small(before(meter.returns_from)));
            view.push(self.rank(Fence::new(store.machine.last_fence())));
        }
        for (fence, at) in &store.grants {
            let started = self.state.starts.iter().any(|(own, _)| own == fence);
            let age = steps(at.micros(), now.micros());
            // No client can start to believe in a permit that is known nowhere.
            if !started && self.rank(*fence) == 0 {
                continue;
            }
            view.extend([self.rank(*fence), age, u8::from(started)]);
        }
    }

    fn client(&self, slot: usize) -> Vec<u8> {
        let client = &self.state.clients[slot];
        let ids = self.state.ids_of(slot, &self.present);
        let number = |id| small(ids.binary_search(&id).unwrap_or(usize::MAX));
        let mut view = Vec::with_capacity(32);
        let reach = u8::from(client.connected) | u8::from(client.half_open) << 1;
        view.extend([small(client.in_flight), reach, u8::from(self.state.heavy && slot == 0)]);
        match client.stage {
            ClientStage::Idle => view.push(0),
            ClientStage::Waiting(waiting) => {
                let Waiting { id, life, doubtful, queued, enqueue, claim } = waiting;
                view.extend([1, number(id), self.life(life)]);
                view.push(flags([doubtful, queued, enqueue, claim]));
            }
            ClientStage::Held { id, life, doubtful, fence, valid_until } => {
                let answered = life == Life::Answered;
                view.extend([2, number(id), flags([doubtful, answered, false, false])]);
                view.extend([self.rank(fence), self.until(valid_until.micros())]);
            }
        }
        for id in &ids {
            let lives = u8::from(id.client() == client.own_id);
            view.push(lives);
            for release in client.releases.iter().filter(|release| release.id == *id) {
                let Release { life, confirmed, unused, doubtful, again, until, .. } = *release;
                let (sent, repeats) = (life == Life::Sent, life == Life::Answered);
                let kind = 3 + u8::from(repeats) + 2 * u8::from(unused);
                view.extend([kind, flags([confirmed, doubtful, again, sent])]);
                if self.state.stragglers {
                    view.push(self.until(until.micros()));
                }
            }
            self.member(*id, &mut view);
        }
        let mut messages: Vec<Vec<u8>> = Vec::new();
        for message in &self.state.wire {
            if self::slot(message.id()) == slot {
                messages.push(self.message(message, &number));
            }
        }
        // The order of messages on the current connection matters.
        messages.sort_by(|one, other| match (one[0], other[0]) {
            (here, there) if here == there && (here == ORDERED || here == ORDERED + 1) => {
                std::cmp::Ordering::Equal
            }
            _ => one.cmp(other),
        });
        for message in &messages {
            view.extend_from_slice(message);
        }
        view
    }

    /// Adds what the store has under an id.
    fn member(&self, id: AcquisitionId, view: &mut Vec<u8>) {
        let Some((_, member)) = self.present.iter().find(|(other, _)| *other == id) else {
            return view.push(0);
        };
        let now = self.state.store_time(self.state.now).micros();
        let until = |time: Option<Time>| time.map_or(u8::MAX, |time| steps(now, time.micros()));
        match member.stage {
            Stage::Holding { hold_until, fence, slot_number, unclaimed, .. } => {
                let rated = self.state.store.machine.limits().meter().is_some();
                let number = slot_number.map_or(0, |number| small(number.get() as usize));
                view.extend([1, until(member.alive_by), until(hold_until), self.rank(fence)]);
                view.extend([number, u8::from(unclaimed && rated)]);
            }
            Stage::Waiting { .. } => {
                let place = self.place(self.state.store.machine.rows.queue.iter(), id);
                let watched = self.place(self.state.store.line.iter().copied(), id);
                view.extend([2, until(member.alive_by), place, watched]);
            }
        }
    }

    fn place(&self, line: impl Iterator<Item = AcquisitionId>, id: AcquisitionId) -> u8 {
        let mut before = 0;
        for other in line {
            if other == id {
                break;
            }
            before += u8::from(self.present.iter().any(|(present, _)| *present == other));
        }
        before
    }

    fn message(&self, message: &Message, number: &impl Fn(AcquisitionId) -> u8) -> Vec<u8> {
        match message {
            Message::WakeUp { id, held, granted_at } => {
                let good_for = self.good_until(held, *granted_at);
                // A wake-up that is too old only makes the client ask.
                let young = good_for > 0 || self.state.broken == Some(Broken::OldWakeUp);
                let fence = if young { self.rank(held.fence) } else { 0 };
                vec![1, number(*id), fence, good_for]
            }
            Message::Request { ask, id, sent, over } => {
                let over = ORDERED + 2 * (*over as u8);
                let mut view = vec![over, number(*id), *ask as u8, self.good_for(*ask, *id, *sent)];
                if self.state.stragglers {
                    view.push(self.until(sent.micros() + STRAGGLES_FOR.micros() + 1));
                }
                view
            }
            Message::Answer(Answer { ask, id, outcome, granted, sent, over }) => {
                let over = ORDERED + 1 + 2 * (*over as u8);
                let mut view = vec![over, number(*id), *ask as u8, small(granted.len())];
                self.outcome(*outcome, *sent, &mut view);
                for (id, held) in granted {
                    view.push(number(*id));
                    self.outcome(Outcome::Held(*held), *sent, &mut view);
                }
                view
            }
        }
    }

    fn outcome(&self, outcome: Outcome, sent: Moment, view: &mut Vec<u8>) {
        match outcome {
            Outcome::Held(held) => {
                view.extend([2, self.rank(held.fence), self.good_until(&held, sent)]);
                if self.state.broken == Some(Broken::CountedFromAnswer) {
                    view.push(steps(0, held.valid_for.map_or(0, Span::micros)));
                }
            }
            Outcome::Waiting { .. } => view.push(3),
            Outcome::Gone | Outcome::Cancelled => view.push(4),
            Outcome::Removed(_) => view.push(5),
            Outcome::Full | Outcome::TooHeavy { .. } => view.push(6),
            Outcome::Steered(_) | Outcome::Swept => view.push(7),
        }
    }

    /// Returns for how long a request may still lead to an answer that its client needs. A release may do so as well,
    /// if it grants a permit to another acquisition of the same client.
    fn good_for(&self, ask: Ask, id: AcquisitionId, sent: Moment) -> u8 {
        let client = &self.state.clients[slot(id)];
        let others = self.state.ids > 1 && client.own_id == id.client();
        let wanted = client.id() == Some(id) || ask.releases() && others;
        let lease = self.state.terms.lease.map_or(0, Span::micros);
        let slack = if self.state.broken == Some(Broken::NoMargin) { lease } else { 0 };
        if wanted { self.until(sent.micros() + lease + slack) } else { 0 }
    }

    /// Returns until when a holder believes an answer to a request that was sent at `sent`, or a wake-up for a grant at
    /// that time. Its slow clock adds what the margin subtracts.
    fn good_until(&self, held: &Held, sent: Moment) -> u8 {
        let valid_for = held.valid_for.map_or(0, Span::micros);
        let no_margin = self.state.broken == Some(Broken::NoMargin);
        let slack = if no_margin { held.margin(self.state.terms).micros() } else { 0 };
        self.until(sent.micros() + valid_for + slack)
    }

    /// Only whether the enqueue was sent matters: from then on, the client is responsible for the id until a release is
    /// answered.
    fn life(&self, life: Life) -> u8 {
        match life {
            Life::Unsent => 0,
            Life::Answered if self.state.broken == Some(Broken::LostCancel) => 2,
            _ => 1,
        }
    }

    fn until(&self, micros: u64) -> u8 {
        steps(self.state.now.micros(), micros)
    }

    fn rank(&self, fence: Fence) -> u8 {
        self.fences.binary_search(&fence).map_or(0, |at| small(at + 1))
    }
}
