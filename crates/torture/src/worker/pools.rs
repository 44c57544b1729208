//! What a task does with a pool.

use std::time::Duration;

use leasehold::compat::lua_pool::{AcquireStatus, LuaPool};
use leasehold::{Pool, PoolLease, Retry};

use super::semaphores::released_how;
use super::{Patience, TaskContext, how};
use crate::clock::{self, Micros, SECOND};
use crate::history::{Event, How, OpId};
use crate::plan::THINGS;

impl TaskContext {
    pub(super) async fn use_pool(&mut self, thing: usize) {
        let client = self.rng.usize(..self.shared.clients.len());
        let Some(pool) = self.pool(thing, client) else { return };
        let client = self.shared.clients[client].id().to_string();
        // With the same id at once: a release in the background must not end the next lease.
        while self.use_lease(thing, &pool, &client).await == How::Cancelled && self.chance(70) {}
    }

    pub(super) async fn cancel_lease(&mut self, thing: usize, client: usize, patience: Patience) {
        let Some(pool) = self.pool(thing, client) else { return };
        let client = self.shared.clients[client].id().to_string();
        // Mostly with another id each time, so that no later acquisition ends what is left of it.
        let is_new = self.chance(80);
        let (op, instance) = self.record_lease_request(thing, &client, is_new);
        self.lease(op, thing, &pool, &instance, patience).await;
    }

    /// Records the request of a lease, with an instance id that is new or that this task always uses.
    fn record_lease_request(&self, thing: usize, client: &str, is_new: bool) -> (OpId, String) {
        let op = self.shared.history_file.next_op();
        let instance =
            if is_new { format!("{client}-{op}") } else { format!("{client}-task-{}", self.task) };
        self.shared.record_request_as(op, thing, &instance);
        (op, instance)
    }

    fn pool(&mut self, thing: usize, client: usize) -> Option<Pool> {
        let spec = &THINGS[thing];
        let within = self.millis(200..4000);
        let retry = Retry::default().max_delay(Duration::from_millis(300));
        let builder = self.shared.clients[client].pool(spec.name, spec.capacity);
        builder.lease(spec.lease_time()).within(within).retry(retry).build().ok()
    }

    async fn use_lease(&mut self, thing: usize, pool: &Pool, client: &str) -> How {
        let roll = self.rng.u32(..100);
        let (op, instance) = self.record_lease_request(thing, client, (20..45).contains(&roll));
        let ended = match roll {
            0..20 => match pool.try_acquire(&instance).await {
                Ok(Some(lease)) => return self.keep_lease(op, thing, lease).await,
                Ok(None) => How::Full,
                Err(error) => how(&error),
            },
            20..45 => return self.lease_by_hand(op, thing, pool, &instance).await,
            _ => {
                let longest = if self.chance(40) { 5 } else { 5000 };
                let patience = Patience::For(self.millis(0..longest));
                return self.lease(op, thing, pool, &instance, patience).await;
            }
        };
        self.shared.end(op, ended);
        ended
    }

    async fn lease(
        &mut self,
        op: OpId,
        thing: usize,
        pool: &Pool,
        instance: &str,
        patience: Patience,
    ) -> How {
        let ended = match self.unless_impatient(patience, pool.acquire(instance)).await {
            Some(Ok(lease)) => return self.keep_lease(op, thing, lease).await,
            Some(Err(error)) => how(&error),
            None => How::Cancelled,
        };
        self.shared.end(op, ended);
        ended
    }

    async fn keep_lease(&mut self, op: OpId, thing: usize, lease: PoolLease) -> How {
        self.shared.history_file.note(Event::Grant { op, fence: None, slot: 1, weight: 1 });
        let held = self.hold(op, thing, None, || lease.check().is_ok()).await;
        self.shared.history_file.note(Event::Ending { op });
        let ended = if !held || self.chance(30) {
            drop(lease);
            if held { How::Dropped } else { How::Lost }
        } else {
            released_how(&lease.release().await)
        };
        self.shared.end(op, ended);
        ended
    }

    /// Leases without a guard. The lease is valid for a TTL from before the request, and only this task renews it.
    async fn lease_by_hand(&mut self, op: OpId, thing: usize, pool: &Pool, instance: &str) -> How {
        let sent = clock::now();
        let ended = match LuaPool::new(pool.clone()).acquire(instance).await {
            Ok(answer) if answer.status == AcquireStatus::Acquired => {
                self.keep_by_hand(op, thing, pool, instance, sent).await
            }
            Ok(_) => How::Full,
            Err(error) => how(&error),
        };
        self.shared.end(op, ended);
        ended
    }

    async fn keep_by_hand(
        &mut self,
        op: OpId,
        thing: usize,
        pool: &Pool,
        instance: &str,
        sent: Micros,
    ) -> How {
        let ttl = THINGS[thing].lease;
        let mut good_until = sent + ttl - SECOND / 10;
        self.shared.history_file.note(Event::Grant { op, fence: None, slot: 1, weight: 1 });
        let mut held = self.hold(op, thing, None, || clock::now() < good_until).await;
        if held {
            let sent = clock::now();
            held = pool.extend(instance).await.is_ok_and(|renewed| renewed);
            if held {
                good_until = sent + ttl - SECOND / 10;
                held = self.hold(op, thing, None, || clock::now() < good_until).await;
            }
        }
        self.shared.history_file.note(Event::Ending { op });
        match pool.release(instance).await {
            Ok(_) if held => How::Released,
            Ok(_) => How::Lost,
            Err(error) => how(&error),
        }
    }
}
