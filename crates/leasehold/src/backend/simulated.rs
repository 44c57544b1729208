//! A store that is away, for testing the engine: the machine behind a wire that a test can cut.
//!
//! It is no mock of Redis, and proves nothing about one. It lets a test choose what happens between the
//! engine and any store: an answer that comes late, is lost after the command ran, or never comes; a
//! wake-up that is lost; a store that forgets everything.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{AwayBackend, AwaySemaphore, Later, LockStore, PoolStore, Reply, WakeUp, WakeUps};
use crate::clock::{Moment, Span, Time};
use crate::machine::{Call, Command, Effects, Machine};
use crate::name::Name;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, Error};

/// What several clients share.
#[derive(Default)]
pub(crate) struct World {
    machines: HashMap<Name, Machine>,
    clients: HashMap<ClientId, WakeUps>,
    /// Clients that nothing reaches, and that reach nothing.
    pub(crate) cut_off: Vec<ClientId>,
    /// How many of the next answers are lost after their commands ran.
    pub(crate) lose_answers: usize,
    /// How many of the next wake-ups are lost although somebody heard them.
    pub(crate) lose_wake_ups: usize,
    /// How long every command is on its way, and how long its answer.
    pub(crate) delay: Duration,
    pub(crate) linger: Duration,
    /// Every command that is on its way, or was.
    pub(crate) asked: Vec<Command>,
    /// Every batch that was applied.
    pub(crate) batches: Vec<Vec<Command>>,
}

#[derive(Clone, Default)]
pub(crate) struct Simulated(Arc<Mutex<World>>);

impl Simulated {
    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything, as a store that is restarted empty, and tells the clients that they are new.
    pub(crate) fn restart_empty(&self) {
        let mut world = self.world();
        world.machines.clear();
        for wake in world.clients.values() {
            wake(WakeUp::Reconnected);
        }
    }

    /// Lets a client that was cut off back in.
    pub(crate) fn heal(&self, client: ClientId) {
        let mut world = self.world();
        world.cut_off.retain(|other| *other != client);
        world.clients[&client](WakeUp::Reconnected);
    }
}

impl AwayBackend for Simulated {
    fn start(&self, client: ClientId, wake_ups: WakeUps) {
        self.world().clients.insert(client, wake_ups);
    }

    fn semaphore(&self, name: &Name, client: ClientId) -> Arc<dyn AwaySemaphore> {
        Arc::new(SimulatedSemaphore { store: self.clone(), name: name.clone(), client })
    }

    fn locks(&self, _client: ClientId) -> Arc<dyn LockStore> {
        unreachable!("only semaphores are simulated")
    }

    fn pools(&self) -> Arc<dyn PoolStore> {
        unreachable!("only semaphores are simulated")
    }

    fn kind(&self) -> &'static str {
        "simulated"
    }

    fn stats(&self, query: Query) -> Later<Vec<SemaphoreStats>> {
        let now = now();
        let world = self.world();
        let wanted = |name: &Name| {
            query.names.as_ref().is_none_or(|names| names.iter().any(|n| n == name.as_str()))
        };
        let named = world.machines.iter().filter(|(name, _)| wanted(name));
        let stats = named.map(|(name, machine)| {
            SemaphoreStats::of(name, machine, now, query.waiters, |()| None)
        });
        let stats = stats.collect();
        Box::pin(async { Ok(stats) })
    }
}

struct SimulatedSemaphore {
    store: Simulated,
    name: Name,
    client: ClientId,
}

impl AwaySemaphore for SimulatedSemaphore {
    fn apply(&self, commands: Vec<Command>) -> Later<Reply> {
        let (store, name, client) = (self.store.clone(), self.name.clone(), self.client);
        Box::pin(async move {
            let (delay, linger) = {
                let mut world = store.world();
                world.asked.extend(commands.iter().cloned());
                (world.delay, world.linger)
            };
            tokio::time::sleep(delay).await;
            let answer = store.world().apply(&name, client, commands);
            tokio::time::sleep(linger).await;
            answer
        })
    }

    fn position(&self, id: AcquisitionId) -> Later<Option<usize>> {
        let world = self.store.world();
        let position = world.machines.get(&self.name).and_then(|machine| machine.position(id));
        Box::pin(async move { Ok(position) })
    }
}

impl World {
    fn apply(
        &mut self,
        name: &Name,
        from: ClientId,
        commands: Vec<Command>,
    ) -> Result<Reply, Error> {
        let lost = Error::Unavailable {
            what: "asking the simulated store".into(),
            timed_out: true,
            source: None,
        };
        if self.cut_off.contains(&from) {
            return Err(lost);
        }
        let Self { machines, clients, cut_off, lose_wake_ups, .. } = self;
        let machine = machines.entry(name.clone()).or_insert_with(|| Machine::new(0));
        let mut effects = Effects::default();
        let mut call = Call {
            from,
            now: now(),
            confirm_within: Span::from_millis(200),
            wake: &mut |id| {
                let Some(wake) = clients.get(&id.client()) else { return false };
                if cut_off.contains(&id.client()) {
                    return false;
                }
                if *lose_wake_ups > 0 {
                    *lose_wake_ups -= 1;
                } else {
                    wake(WakeUp::Granted(name.clone(), id));
                }
                true
            },
            effects: &mut effects,
        };
        let outcomes = commands.iter().map(|command| machine.apply(command, &mut call)).collect();
        let next_expiry = machine.next_expiry().map(|at| at - now());
        self.batches.push(commands);
        if self.lose_answers > 0 {
            self.lose_answers -= 1;
            return Err(lost);
        }
        Ok(Reply { outcomes, effects, next_expiry })
    }

    /// How many hold and how many wait.
    pub(crate) fn count(&self, name: &str) -> (usize, usize) {
        let machine = self.machines.iter().find(|(known, _)| known.as_str() == name);
        machine.map_or((0, 0), |(_, machine)| (machine.holders().len(), machine.waiting()))
    }
}

fn now() -> Time {
    Time::from_micros(Moment::now().micros())
}
