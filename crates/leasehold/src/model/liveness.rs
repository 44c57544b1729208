//! Liveness: what a state leads to if nothing goes wrong any more.
//!
//! A finite search can show only a part of liveness. From every reachable state, it plays one orderly future to its
//! end. Messages arrive, connections recover, holders release at once, no waiter gives up, and every timer fires when
//! it is due. First an operator ends a pause, and raises the capacity so that the heaviest permit fits. The future ends
//! when no user waits or holds and no message is in flight. No waiter gives up, so each one has held. Dead clients stay
//! dead, and the store may continue to believe that they are connected.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

/// The most steps of an orderly future. One that takes more never ends.
const LONGEST: usize = 300;

impl World {
    pub(super) fn every_waiter_holds(&self, state: &State) -> bool {
        while_broken(self.broken, || self.leads_to_holding(state))
    }

    fn leads_to_holding(&self, state: &State) -> bool {
        let shown_live =
            || self.shown_live.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut path = Vec::new();
        let mut state = state.clone();
        loop {
            let mut hasher = DefaultHasher::new();
            state.hash(&mut hasher);
            let mark = hasher.finish();
            if shown_live().contains(&mark) {
                break;
            }
            path.push(mark);
            if path.len() > LONGEST {
                return false;
            }
            if !self.orderly_step(&mut state) {
                // A waiter for which nothing will ever happen, or a release that still counts as sent, was lost.
                let lost = |client: &Arc<Client>| {
                    !client.uses.is_empty()
                        || client.core.ids().any(|id| client.core.awaits_release(id))
                };
                if state.clients.iter().any(lost) {
                    return false;
                }
                break;
            }
        }
        shown_live().extend(path);
        true
    }

    /// Takes one step. Returns `false` if there is nothing left to do.
    fn orderly_step(&self, state: &mut State) -> bool {
        if state.store.machine.limits().paused.is_some() {
            state.change_limits(&LimitChange::Resume);
            return true;
        }
        if self.heavy && state.store.machine.limits().capacity() == 1 {
            state.change_limits(&LimitChange::Declare(2));
            return true;
        }
        if let Some(message) = state.wire.first().cloned() {
            match message.over() {
                Some(Over::Old) => state.end_request(&message),
                Some(Over::Closed) => state.take(&message),
                _ => {
                    state.take(&message);
                    self.deliver(state, message);
                }
            }
            return true;
        }
        let now = state.local();
        for slot in 0..state.clients.len() {
            let client = state.clients[slot].clone();
            if !client.connected {
                state.reconnected(slot);
                return true;
            }
            let holder = client.holders().next();
            if let Some((id, _)) = holder {
                state.client(slot).end(id, now);
                return true;
            }
            for (has, urgency) in [
                (client.core.has_renewals(), Urgency::Renewals),
                (client.core.has_commands(), Urgency::Ordinary),
            ] {
                if has {
                    state.send(self, slot, urgency);
                    return true;
                }
            }
        }
        if state.clients.iter().all(|client| client.uses.is_empty()) {
            return false;
        }
        // Nothing happens until the first timer is due.
        let due = state.clients.iter().filter_map(|client| client.core.next_timeout()).min();
        let Some(due) = due else { return false };
        let due = Moment::from_micros(2 * due.micros());
        state.now = state.now.max(due);
        let now = state.local();
        for slot in 0..state.clients.len() {
            state.client(slot).timeout(now);
        }
        true
    }
}
