//! What a task does with a pool.

use std::time::Duration;

use leasehold::{AcquireStatus, Pool, PoolLease, RenewStatus, Retry};

use super::semaphores::released_how;
use super::{Hands, how};
use crate::clock::{self, SECOND};
use crate::history::{Event, How, OpId};
use crate::plan::THINGS;

impl Hands {
    pub(super) async fn use_pool(&mut self, thing: usize) {
        let client = self.rng.usize(..self.shared.clients.len());
        let known = &THINGS[thing];
        let within = self.millis(200..4000);
        let retry =
            Retry::default().times(1000).max_delay(Duration::from_millis(300)).within(within);
        let builder = self.shared.clients[client].pool(known.name, known.capacity);
        let Ok(pool) = builder.ttl(known.lease_time()).retry(retry).build() else { return };
        let op = self.shared.ask(thing, "-");
        let client = self.shared.clients[client].id();
        // One after the other under one id: what was dropped or given up before must not end what comes after.
        let instance = format!("{client}-task-{}", self.task);
        match self.rng.u32(..100) {
            0..20 => match pool.try_lease(&instance).await {
                Ok(Some(lease)) => self.keep_lease(op, thing, lease).await,
                Ok(None) => self.shared.end(op, How::Full),
                Err(error) => self.shared.end(op, how(&error)),
            },
            20..45 => {
                let instance = format!("{client}-{op}");
                self.lease_by_hand(op, thing, &pool, &instance).await;
            }
            _ => {
                let longest = if self.chance(30) { 5 } else { 5000 };
                let patience = self.millis(0..longest);
                let wait = tokio::time::timeout(patience, pool.lease(&instance));
                match self.unless_finishing(wait).await {
                    Some(Ok(Ok(lease))) => self.keep_lease(op, thing, lease).await,
                    Some(Ok(Err(error))) => self.shared.end(op, how(&error)),
                    Some(Err(_)) | None => self.shared.end(op, How::Cancelled),
                }
            }
        }
    }

    async fn keep_lease(&mut self, op: OpId, thing: usize, lease: PoolLease) {
        self.shared.diary.note(Event::Grant { op, fence: None, slot: 1 });
        let held = self.hold(op, thing, None, || lease.check().is_ok()).await;
        self.shared.diary.note(Event::Ending { op });
        if !held || self.chance(30) {
            drop(lease);
            self.shared.end(op, if held { How::Dropped } else { How::Lost });
        } else {
            let released = lease.release().await;
            self.shared.end(op, released_how(&released));
        }
    }

    /// Without a guard: the lease is good for a TTL from before it was asked for, and nobody renews it but we.
    async fn lease_by_hand(&mut self, op: OpId, thing: usize, pool: &Pool, instance: &str) {
        let ttl = THINGS[thing].lease;
        let mut good_until = clock::now() + ttl - SECOND / 10;
        match pool.acquire(instance).await {
            Ok(answer) if answer.status == AcquireStatus::Acquired => {}
            Ok(_) => return self.shared.end(op, How::Full),
            Err(error) => return self.shared.end(op, how(&error)),
        }
        self.shared.diary.note(Event::Grant { op, fence: None, slot: 1 });
        let mut held = self.hold(op, thing, None, || clock::now() < good_until).await;
        if held {
            let sent = clock::now();
            let renewed = pool.renew(instance).await;
            held = renewed.is_ok_and(|answer| answer.status == RenewStatus::Renewed);
            if held {
                good_until = sent + ttl - SECOND / 10;
                held = self.hold(op, thing, None, || clock::now() < good_until).await;
            }
        }
        self.shared.diary.note(Event::Ending { op });
        match pool.release(instance).await {
            Ok(_) => self.shared.end(op, if held { How::Released } else { How::Lost }),
            Err(error) => self.shared.end(op, how(&error)),
        }
    }
}
