//! A simulated remote store for testing the engine: the machine behind a connection that a test can cut.
//!
//! It does not imitate Redis, and proves nothing about Redis. It lets a test choose what happens between the engine and
//! a store: an answer that is late, lost after the command ran, or never sent; a wake-up that is lost; a store that
//! loses all data.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::{Answer, Answers, BoxFuture, Destination, Event, Part, Profile, RemoteBackend, Report};
use crate::backend::TimeAuthority;
use crate::clock::{Moment, Span, Time};
use crate::machine::Reply;
use crate::machine::lock::{LockMachine, LockOutcome, Record, Verdict};
use crate::machine::pool::PoolMachine;
use crate::machine::pool::PoolQuery;
use crate::machine::{
    Circumstances, Command, Effects, Limits, LimitsChanged, Machine, Outcome, Reach, ReleaseHint,
};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error};

/// The state that several clients share.
#[derive(Default)]
pub(crate) struct World {
    machines: HashMap<Name, Machine>,
    locks: LockMachine,
    pools: PoolMachine,
    clients: HashMap<ClientId, Report>,
    /// Clients that are cut off: nothing reaches them, and they reach nothing.
    pub(crate) cut_off: Vec<ClientId>,
    /// Clients whose requests are lost before they arrive, although wake-ups reach them.
    pub(crate) mute: Vec<ClientId>,
    /// How many of the next answers are lost after their commands ran.
    pub(crate) lose_answers: usize,
    /// How many of the next wake-ups are lost, although the store counts them as delivered.
    pub(crate) lose_wake_ups: usize,
    /// How long a command takes to reach the store (`delay`), and its answer to come back (`linger`).
    pub(crate) delay: Duration,
    pub(crate) linger: Duration,
    /// The time to claim a granted permit; 200 ms if there is none.
    pub(crate) confirm_within: Option<Span>,
    /// How often a client found its connection suspect.
    pub(crate) suspected: usize,
    /// Every command for a semaphore that was sent, whether or not it has arrived.
    pub(crate) asked: Vec<Command>,
    /// Every batch that was applied, one entry per name and request.
    pub(crate) batches: Vec<Vec<Command>>,
    /// The number of parts of every request.
    pub(crate) requests: Vec<usize>,
}

/// One client's view of the store. A clone is the same store for another client.
#[derive(Default)]
pub(crate) struct Simulated(Arc<Mutex<World>>, OnceLock<ClientId>);

impl Clone for Simulated {
    fn clone(&self) -> Self {
        Self(self.0.clone(), OnceLock::new())
    }
}

impl Simulated {
    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loses all data, like a store that restarts empty, and reports to the clients that they have reconnected.
    pub(crate) fn restart_empty(&self) {
        let mut world = self.world();
        world.machines.clear();
        for report in world.clients.values() {
            report(reconnected());
        }
    }

    /// Returns a replica: a copy that is not updated any more.
    pub(crate) fn replica(&self) -> HashMap<Name, Machine> {
        self.world().machines.clone()
    }

    /// Lets a replica take over, and reports to the clients that they have reconnected to another server.
    pub(crate) fn fail_over(&self, replica: HashMap<Name, Machine>) {
        let mut world = self.world();
        world.machines = replica;
        for report in world.clients.values() {
            let to = Destination::ONLY;
            report(Event::Connected { to, again: true, other: true, stragglers: false });
        }
    }

    /// Releases an id in the store, as another client does, and reports it to the client of the id.
    pub(crate) fn evict(&self, name: &Name, id: AcquisitionId) {
        let nobody = ClientId::from_bits(u64::MAX);
        let mut world = self.world();
        world.apply(name, nobody, &[Command::Release { id, hint: ReleaseHint::Nothing }]);
        world.clients[&id.client()](Event::Evicted(name.clone(), id));
    }

    /// Cuts a client off and reports the disconnection to it.
    pub(crate) fn cut(&self, client: ClientId) {
        let mut world = self.world();
        world.cut_off.push(client);
        let error = Error::unavailable("request to the simulated store", false, None);
        world.clients[&client](Event::Disconnected(Destination::ONLY, error));
    }

    /// Returns how long the only lock is still held.
    pub(crate) fn left_of_lock(&self) -> Duration {
        let held = self.world().held_locks();
        assert_eq!(held.len(), 1, "{held:?}");
        Duration::from_millis(held[0].expires_at.saturating_sub(now().micros() / 1000))
    }

    /// Reconnects a client that was cut off.
    pub(crate) fn heal(&self, client: ClientId) {
        let mut world = self.world();
        world.cut_off.retain(|other| *other != client);
        world.clients[&client](reconnected());
    }
}

fn reconnected() -> Event {
    Event::Connected { to: Destination::ONLY, again: true, other: false, stragglers: false }
}

impl RemoteBackend for Simulated {
    fn profile(&self) -> Profile {
        Profile { kind: "simulated", needs_renewals: true, time_authority: TimeAuthority::Server }
    }

    fn address(&self) -> &'static str {
        "the simulated store"
    }

    fn start(&self, client: ClientId, report: Report) {
        self.1.set(client).expect("one client has one store");
        let to = Destination::ONLY;
        report(Event::Connected { to, again: false, other: false, stragglers: false });
        self.world().clients.insert(client, report);
    }

    fn apply(&self, _to: Destination, request: &Arc<[Part]>) -> BoxFuture<Answers> {
        let (store, request, client) = (self.clone(), request.clone(), *self.1.get().unwrap());
        Box::pin(async move {
            let (delay, linger) = {
                let mut world = store.world();
                for part in &*request {
                    if let Part::Semaphore { commands, .. } = part {
                        world.asked.extend(commands.iter().cloned());
                    }
                }
                (world.delay, world.linger)
            };
            tokio::time::sleep(delay).await;
            let answers = store.world().apply_all(client, &request);
            tokio::time::sleep(linger).await;
            answers
        })
    }

    fn suspect(&self, _destination: Destination) {
        self.world().suspected += 1;
    }

    fn position(&self, name: &Name, id: AcquisitionId) -> BoxFuture<Option<usize>> {
        let world = self.world();
        let position = world.machines.get(name).and_then(|machine| machine.position(id));
        Box::pin(async move { Ok(position) })
    }

    fn limits(&self, name: &Name) -> BoxFuture<SemaphoreLimits> {
        let unused = Limits::default();
        let world = self.world();
        let limits = world.machines.get(name).map_or(&unused, |machine| machine.limits());
        let limits = SemaphoreLimits::of(limits, now());
        Box::pin(async move { Ok(limits) })
    }

    fn change_limits(&self, name: &Name, change: Command) -> BoxFuture<LimitsChanged> {
        let nobody = ClientId::from_bits(u64::MAX);
        let outcome = self.world().apply(name, nobody, &[change]).outcomes.pop();
        Box::pin(async move {
            match outcome {
                Some(Outcome::LimitsChanged(changed)) => Ok(changed),
                other => Err(Error::internal(format!("{other:?}"))),
            }
        })
    }

    fn stats(&self, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        let now = now();
        let world = self.world();
        let wanted = |name: &Name| {
            query.names.as_ref().is_none_or(|names| names.iter().any(|n| n == name.as_str()))
        };
        let named = world.machines.iter().filter(|(name, _)| wanted(name));
        let stats = named.map(|(name, machine)| {
            SemaphoreStats::of(name, machine, now, query.waiters.clone(), |()| None)
        });
        let stats = stats.collect();
        Box::pin(async { Ok(stats) })
    }

    fn list_locks(&self, limit: usize) -> BoxFuture<Vec<Record>> {
        let mut locks = self.world().held_locks();
        locks.truncate(limit);
        Box::pin(async { Ok(locks) })
    }

    fn list_clients(&self, _limit: usize) -> BoxFuture<Vec<ClientInfo>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn list_pools(&self, which: PoolQuery) -> BoxFuture<Vec<PoolStats>> {
        let pools = self
            .world()
            .pools
            .list(&which)
            .into_iter()
            .map(|pool| PoolStats::of(pool, now()))
            .collect();
        Box::pin(async { Ok(pools) })
    }
}

impl World {
    fn apply_all(&mut self, from: ClientId, request: &[Part]) -> Result<Answers, Error> {
        let lost = Error::unavailable("request to the simulated store", true, None);
        if self.cut_off.contains(&from) || self.mute.contains(&from) {
            return Err(lost);
        }
        self.requests.push(request.len());
        let apply = |part: &Part| match part {
            Part::Semaphore { name, commands, .. } => {
                Answer::Semaphore(self.apply(name, from, commands))
            }
            Part::Lock(command) => {
                let Ok(outcome) = self.locks.apply(command, now().micros() / 1000);
                if let LockOutcome::Release(Verdict::Done(Some(key))) = &outcome {
                    self.report_unlocked(key);
                }
                Answer::Lock(outcome)
            }
            Part::Pool(command) => Answer::Pool(self.pools.apply(command, now())),
        };
        let answers = request.iter().map(apply).map(Ok).collect();
        if self.lose_answers > 0 {
            self.lose_answers -= 1;
            return Err(lost);
        }
        Ok(answers)
    }

    /// Notifies every client that is not cut off.
    fn report_unlocked(&self, key: &Name) {
        for (client, report) in &self.clients {
            if !self.cut_off.contains(client) {
                report(Event::Unlocked(key.clone()));
            }
        }
    }

    fn apply(&mut self, name: &Name, from: ClientId, commands: &[Command]) -> Reply {
        let Self { machines, clients, cut_off, lose_wake_ups, confirm_within, .. } = self;
        let machine = machines.entry(name.clone()).or_insert_with(|| Machine::new(0));
        let mut effects = Effects::default();
        let (granted_at, rated) = (now(), machine.limits().meter().is_some());
        let mut call = Circumstances {
            from: Some(from),
            now: granted_at,
            confirm_within: confirm_within.unwrap_or(Span::from_millis(200)),
            wake: &mut |id, held| {
                let Some(report) = clients.get(&id.client()) else { return Reach::Silent };
                if cut_off.contains(&id.client()) {
                    return Reach::Silent;
                }
                if *lose_wake_ups > 0 {
                    *lose_wake_ups -= 1;
                } else {
                    // The store and the client share one clock here.
                    let grant = (*held, Moment::from_micros(granted_at.micros()));
                    // A permit that was never claimed was never used, and its token goes back. So under a rate the
                    // client must claim the permit explicitly: the wake-up does not carry the grant.
                    report(Event::Granted(name.clone(), id, (!rated).then_some(grant)));
                }
                Reach::Reached
            },
            effects: &mut effects,
        };
        let outcomes = commands.iter().map(|command| {
            let Ok(outcome) = machine.apply(command, &mut call);
            outcome
        });
        let outcomes = outcomes.collect();
        let next_expiry = machine.next_expiry().map(|at| at - now());
        self.batches.push(commands.to_vec());
        let next_token = machine.next_token(now()).map(|at| at - now());
        Reply { outcomes, effects, next_expiry, next_token, ..Reply::default() }
    }

    /// Returns the locks that are held.
    pub(crate) fn held_locks(&self) -> Vec<Record> {
        self.locks.list(usize::MAX, now().micros() / 1000)
    }

    /// Returns the number of holders and the number of waiters.
    pub(crate) fn count(&self, name: &str) -> (usize, usize) {
        let machine = self.machines.iter().find(|(other, _)| other.as_str() == name);
        machine.map_or((0, 0), |(_, machine)| (machine.holders().len(), machine.waiting()))
    }
}

fn now() -> Time {
    Time::from_micros(Moment::now().micros())
}
