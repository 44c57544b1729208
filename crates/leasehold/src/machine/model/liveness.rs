//! Liveness: what a state leads to if nothing goes wrong any more.
//!
//! A finite search can show only a part of liveness. From every reachable state, it plays one orderly future to its
//! end. Messages arrive, connections recover, holders release at once, no waiter gives up, and waiters renew in each
//! step of the clock. First an operator ends a pause, and raises the capacity so that the heaviest permit fits. The
//! future ends when every client is idle and no message is in flight. No waiter gives up, so each one became idle by
//! holding. Dead clients stay dead, and the store may continue to believe that they are connected.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

/// The most steps of an orderly future. One that takes more never ends.
const LONGEST: usize = 300;

impl World {
    pub(super) fn every_waiter_holds(&self, state: &State) -> bool {
        let known = || self.shown_live.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut path = Vec::new();
        let mut state = state.clone();
        loop {
            let mut hasher = DefaultHasher::new();
            state.hash(&mut hasher);
            let mark = hasher.finish();
            if known().contains(&mark) {
                break;
            }
            path.push(mark);
            if path.len() > LONGEST {
                return false;
            }
            if !self.orderly_step(&mut state) {
                // A release that still counts as sent was lost on its way.
                let lost =
                    |client: &Client| client.releases.iter().any(|own| own.life == Life::Sent);
                if state.clients.iter().any(lost) {
                    return false;
                }
                break;
            }
        }
        known().extend(path);
        true
    }

    /// Takes one step. Returns `false` if there is nothing left to do.
    fn orderly_step(&self, state: &mut State) -> bool {
        if state.store.machine.limits().paused().is_some() {
            state.steer(self, &Steer::Resume);
            return true;
        }
        if self.heavy && state.store.machine.limits().capacity() == 1 {
            state.steer(self, &Steer::Declare(2));
            return true;
        }
        if let Some(message) = state.wire.first().cloned() {
            match message.over() {
                Some(Over::Old) => state.settle(self, &message),
                Some(Over::Closed) => state.take(&message),
                _ => {
                    state.take(&message);
                    self.deliver(state, message);
                }
            }
            return true;
        }
        let now = state.now;
        for slot in 0..state.clients.len() {
            let client = &mut state.clients[slot];
            if !client.connected {
                client.connected = true;
                return true;
            }
            if matches!(client.stage, ClientStage::Held { .. }) {
                client.end(self, now);
                return true;
            }
            let urgent = client.asks(self).into_iter().find(|(_, _, urgent)| *urgent);
            if let Some((ask, id, _)) = urgent {
                state.send(slot, ask, id);
                return true;
            }
        }
        let waiting = state.clients.iter().any(|client| client.stage != ClientStage::Idle);
        if waiting {
            state.now = now + TICK;
            for slot in 0..state.clients.len() {
                for (ask, id, _) in state.clients[slot].asks(self) {
                    state.send(slot, ask, id);
                }
            }
        }
        waiting
    }
}
