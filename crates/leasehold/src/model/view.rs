//! The part of a state that decides its future.
//!
//! What can happen depends on differences between times, never on the time itself. It depends on the order of ids and
//! fences, never on their numbers. And it depends on the identity of a client only through the client's own ids and
//! messages. So a state is written as one list of small numbers for each client. Times are relative to now, and ids,
//! fences and places in the queue are ranks. A time in the past counts as now, however long ago it was. The lists are
//! sorted, because it does not matter which client is which.
//!
//! This runs for every generated state, and most of these are known already. So it uses plain loops for speed.

use super::state::{local, local_span};
use super::*;
use crate::client_core::Scale as CoreScale;

/// The references for relative times and ranks.
struct Scale<'a> {
    state: &'a State,
    present: Vec<MemberView>,
    fences: Vec<Fence>,
}

fn small(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

/// The first number of a request on the current connection. An answer begins with the next number.
const ORDERED: u8 = 3;

/// The number of clock steps from `now` to `then`.
fn steps(now: u64, then: u64, step: Span) -> u8 {
    u8::try_from(then.saturating_sub(now).div_ceil(step.micros())).unwrap_or(u8::MAX)
}

impl State {
    pub(super) fn view(&self) -> Vec<u8> {
        let scale = Scale::new(self);
        let slots = 0..self.clients.len();
        let mut clients: Vec<Vec<u8>> = slots.map(|slot| scale.client(slot)).collect();
        clients.sort_unstable();
        let wrong = self.store.wrong.map_or(0, |wrong| 1 + wrong as u8);
        let limits = self.store.machine.limits();
        let paused = u8::from(limits.paused.is_some());
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
        let mut fences: Vec<Fence> = present.iter().filter_map(|member| member.fence).collect();
        for client in &state.clients {
            fences.extend(client.holders().map(|(_, fence)| fence));
        }
        for message in &state.wire {
            match message {
                Message::Answer(answer) => {
                    for outcome in &answer.outcomes {
                        if let Outcome::Held(held) = outcome {
                            fences.push(held.fence);
                        }
                    }
                    fences.extend(answer.granted.iter().map(|(_, held)| held.fence));
                }
                Message::WakeUp { held, .. } => fences.push(held.fence),
                Message::Request(_) | Message::Cancelled { .. } => {}
            }
        }
        fences.sort_unstable();
        fences.dedup();
        Self { state, present, fences }
    }

    /// Adds what the store knows about tokens, and the watcher about starts.
    fn rate(&self, view: &mut Vec<u8>) {
        let store = &self.state.store;
        let now = self.state.store_time();
        if let Some(meter) = store.machine.limits().meter() {
            let before =
                |first: u64| self.fences.iter().filter(|fence| fence.get() < first).count();
            view.push(steps(now.micros(), meter.full_at.micros(), TICK));
            view.push(small(before(meter.returns_from)));
            view.push(self.rank(Fence::new(store.machine.last_fence())));
        }
        for (fence, at) in &store.grants {
            let started = self.state.starts.iter().any(|(other, _)| other == fence);
            let age = steps(at.micros(), now.micros(), TICK);
            // No client can start to rely on a permit that is known nowhere.
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
        let mut view = Vec::with_capacity(48);
        let reach = u8::from(client.connected) | u8::from(client.half_open) << 1;
        let heavy = u8::from(self.state.rules.heavy && slot == 0);
        view.extend([small(client.in_flight), reach, heavy]);
        let mut sent: Vec<Moment> = client.core.sent().collect();
        let messages: Vec<_> =
            self.state.wire.iter().filter(|message| message.slot() == slot).collect();
        sent.extend(
            messages.iter().filter_map(|message| message.request()).map(|request| request.sent),
        );
        sent.sort_unstable();
        sent.dedup();
        let now = local(self.state.now);
        // A request that is sent later comes after all of them.
        let sent = |at: Moment| sent.binary_search(&at).map_or(u8::MAX, small);
        let rules = self.state.rules;
        let repeated_until = |id, until: Moment| self.repeated_until(id, until);
        let scale = CoreScale {
            id: &number,
            until: &|at| self.until(at),
            sent: &sent,
            repeated_until: &repeated_until,
            now,
            is_pipelined: rules.is_pipelined,
            delays_requests: client.in_flight > 0,
            is_rated: rules.is_rated,
        };
        client.core.view(&scale, &mut view);
        for usage in &client.uses {
            let fence = usage.held.map_or(0, |(fence, _)| 1 + self.rank(fence));
            // Only of several acquisitions does the order matter.
            let applied = usage.applied || self.state.rules.acquisitions == 1;
            view.extend([number(usage.id), fence, u8::from(applied)]);
        }
        for id in &ids {
            view.push(u8::from(id.client() == client.own_id));
            self.member(*id, &mut view);
        }
        let messages = messages.iter().map(|message| self.message(message, &number, &sent));
        let mut messages: Vec<Vec<u8>> = messages.collect();
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

    /// Whether a release is sent or forgotten makes no difference to a store that does not know the id. How long it is
    /// repeated makes none if the store forgets the id sooner in any case.
    fn repeated_until(&self, id: AcquisitionId, until: Moment) -> u8 {
        let is_mentioned = self.state.wire.iter().flat_map(Message::ids).any(|other| other == id);
        let member = self.present.iter().find(|member| member.id == id);
        let left = self.until(until);
        if self.state.rules.stragglers || is_mentioned {
            return left;
        }
        let Some(member) = member else { return 0 };
        let now = self.state.store_time().micros();
        let ends = member.ends().map_or(u64::MAX, Time::micros);
        let granted_last = if member.is_holder() { 0 } else { CONFIRM_WITHIN.micros() };
        let longest = steps(now, ends.saturating_add(granted_last), TICK);
        if longest <= left { u8::MAX } else { left }
    }

    /// Adds what the store has under an id.
    fn member(&self, id: AcquisitionId, view: &mut Vec<u8>) {
        let now = self.state.store_time().micros();
        if let Some((_, until)) = self.state.store.cancelled.iter().find(|(other, _)| *other == id)
        {
            view.extend([3, steps(now, until.micros(), TICK)]);
        }
        let Some(member) = self.present.iter().find(|member| member.id == id) else {
            return view.push(0);
        };
        let until =
            |time: Option<Time>| time.map_or(u8::MAX, |time| steps(now, time.micros(), TICK));
        if let Some(fence) = member.fence {
            let rated = self.state.store.machine.limits().meter().is_some();
            let number = member.slot_number.map_or(0, |number| small(number.get() as usize));
            view.extend([1, until(member.alive_by), until(member.hold_until), self.rank(fence)]);
            view.extend([number, u8::from(member.is_unclaimed && rated)]);
        } else {
            let place = self.place(self.state.store.machine.waiters().map(|row| row.id), id);
            let watched = self.place(self.state.store.queue.iter().copied(), id);
            view.extend([2, until(member.alive_by), place, watched]);
        }
    }

    fn place(&self, queue: impl Iterator<Item = AcquisitionId>, id: AcquisitionId) -> u8 {
        let mut before = 0;
        for other in queue {
            if other == id {
                break;
            }
            before += u8::from(self.present.iter().any(|present| present.id == other));
        }
        before
    }

    fn message(
        &self,
        message: &Message,
        number: &impl Fn(AcquisitionId) -> u8,
        sent: &impl Fn(Moment) -> u8,
    ) -> Vec<u8> {
        match message {
            Message::WakeUp { id, held, granted_at } => {
                let good_for = self.good_until(held, *granted_at);
                // A wake-up that is too old only makes the client query.
                let young = good_for > 0 || self.state.rules.broken.is_some();
                let fence = if young { self.rank(held.fence) } else { 0 };
                vec![1, number(*id), fence, good_for]
            }
            Message::Cancelled { id } => vec![2, number(*id)],
            Message::Request(request) => {
                let mut view = vec![ORDERED + 2 * (request.over as u8)];
                self.commands(request, number, sent, &mut view);
                if self.state.rules.stragglers {
                    let straggles_for = local_span(STRAGGLES_FOR).micros();
                    view.push(
                        self.until(Moment::from_micros(request.sent.micros() + straggles_for)),
                    );
                }
                view
            }
            Message::Answer(answer) => {
                let mut view = vec![ORDERED + 1 + 2 * (answer.to.over as u8)];
                self.commands(&answer.to, number, sent, &mut view);
                for outcome in &answer.outcomes {
                    self.outcome(*outcome, answer.to.sent, &mut view);
                }
                for (id, held) in &answer.granted {
                    view.push(number(*id));
                    self.outcome(Outcome::Held(*held), answer.to.sent, &mut view);
                }
                view
            }
        }
    }

    fn commands(
        &self,
        request: &Request,
        number: &impl Fn(AcquisitionId) -> u8,
        sent: &impl Fn(Moment) -> u8,
        view: &mut Vec<u8>,
    ) {
        let client = &self.state.clients[client::slot(request.from)];
        view.extend([small(request.commands.len()), sent(request.sent)]);
        let (mut leads_to_a_grant, mut lost_is_the_same) = (false, true);
        for command in &request.commands {
            let Some(id) = command.id() else { continue };
            let kind = match command {
                Command::Enqueue { .. } => 0,
                // Whether the answer shows that another server has taken over.
                Command::Renew { .. } => {
                    1 + u8::from(client.core.held_since(id).is_some_and(|at| at < request.sent))
                }
                Command::Release { hint: ReleaseHint::Nothing, .. } => 3,
                Command::Release { hint: ReleaseHint::Unused, .. } => 4,
                Command::Release { hint: ReleaseHint::Held { .. }, .. } => 5,
                Command::ChangeLimits { .. } | Command::Sweep => 6,
            };
            view.extend([kind, number(id)]);
            leads_to_a_grant |= client.usage(id).is_some();
            lost_is_the_same &= matches!(command, Command::Renew { .. });
        }
        // A command may also grant a permit to another acquisition of the same client.
        leads_to_a_grant |= client.uses.len() > usize::from(lost_is_the_same)
            && (self.state.rules.ids > 1 && request.from == client.own_id);
        if leads_to_a_grant {
            let lease = self.state.rules.terms.lease.map_or(0, Span::micros);
            let slack = if self.state.rules.broken.is_some() { 2 * lease } else { 0 };
            let valid_for = local_span(Span::from_micros(lease)).micros() + slack;
            view.push(self.until(Moment::from_micros(request.sent.micros() + valid_for)));
        }
    }

    fn outcome(&self, outcome: Outcome, sent: Moment, view: &mut Vec<u8>) {
        match outcome {
            Outcome::Held(held) => {
                view.extend([2, self.rank(held.fence), self.good_until(&held, sent)]);
                if self.state.rules.broken.is_some() {
                    view.push(steps(0, held.valid_for.map_or(0, Span::micros), TICK));
                }
            }
            Outcome::Waiting { .. } => view.push(3),
            Outcome::Gone => view.push(4),
            Outcome::Cancelled => view.push(5),
            Outcome::Removed(_) => view.push(6),
            Outcome::Full | Outcome::TooHeavy { .. } => view.push(7),
            Outcome::LimitsChanged(_) | Outcome::Swept => view.push(8),
            Outcome::Unapplied => view.push(9),
        }
    }

    /// Returns until when a holder relies on an answer to a request that was sent at `sent`, or a wake-up for a grant at
    /// that time.
    fn good_until(&self, held: &Held, sent: Moment) -> u8 {
        let terms = self.state.rules.terms;
        let slack = held.valid_for.filter(|_| self.state.rules.broken.is_some());
        let valid_until = held.valid_until(terms, sent);
        self.until(Moment::from_micros(valid_until.micros() + 2 * slack.map_or(0, Span::micros)))
    }

    fn until(&self, moment: Moment) -> u8 {
        steps(local(self.state.now).micros(), moment.micros(), local_span(TICK))
    }

    fn rank(&self, fence: Fence) -> u8 {
        self.fences.binary_search(&fence).map_or(0, |at| small(at + 1))
    }
}
