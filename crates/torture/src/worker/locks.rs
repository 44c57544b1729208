//! What a task does with a lock.

use std::time::Duration;

use leasehold::{Lock, LockGuard, Retry};

use super::semaphores::released_how;
use super::{Patience, TaskContext, how};
use crate::clock::SECOND;
use crate::history::{Event, How, OpId};
use crate::plan::{EXTENSION, THINGS};

const LONGEST: Duration = Duration::from_secs(20);

impl TaskContext {
    pub(super) async fn use_lock(&mut self, thing: usize) {
        let client = self.rng.usize(..self.shared.clients.len());
        let Some((op, lock)) = self.lock(thing, client) else { return };
        match self.rng.u32(..100) {
            0..15 => self.try_lock(op, thing, &lock).await,
            15..30 => self.with_lock(op, thing, &lock).await,
            30..45 => {
                let longest = if self.chance(50) { 5 } else { 800 };
                let patience = Patience::For(self.millis(0..longest));
                self.acquire_lock(op, thing, &lock, patience).await;
            }
            45..57 => {
                let patience = self.until_outage(client, LONGEST);
                self.acquire_lock(op, thing, &lock, patience).await;
            }
            _ => self.acquire_lock(op, thing, &lock, Patience::For(LONGEST)).await,
        }
    }

    pub(super) async fn cancel_lock(&mut self, thing: usize, client: usize, patience: Patience) {
        let Some((op, lock)) = self.lock(thing, client) else { return };
        self.acquire_lock(op, thing, &lock, patience).await;
    }

    /// Records the request of a lock, whose label is the id of this one acquisition.
    fn lock(&mut self, thing: usize, client: usize) -> Option<(OpId, Lock)> {
        let spec = &THINGS[thing];
        let within = self.millis(500..6000);
        let retry = Retry::default().max_delay(Duration::from_millis(400));
        let (client, op) = (&self.shared.clients[client], self.shared.history_file.next_op());
        let id = format!("{}-{op}", client.id());
        let builder = client.lock(spec.name).lease(spec.lease_time()).within(within).label(&id);
        let builder = if spec.extended { builder } else { builder.ttl(spec.lease_time()) };
        let lock = builder.retry(retry).build().ok()?;
        self.shared.record_request_as(op, thing, &id);
        Some((op, lock))
    }

    async fn acquire_lock(&mut self, op: OpId, thing: usize, lock: &Lock, patience: Patience) {
        match self.unless_impatient(patience, lock.acquire()).await {
            Some(Ok(guard)) => self.keep_lock(op, thing, guard).await,
            Some(Err(error)) => self.shared.end(op, how(&error)),
            None => self.shared.end(op, How::Cancelled),
        }
    }

    async fn try_lock(&mut self, op: OpId, thing: usize, lock: &Lock) {
        match lock.try_acquire().await {
            Ok(Some(guard)) => self.keep_lock(op, thing, guard).await,
            Ok(None) => self.shared.end(op, How::Full),
            Err(error) => self.shared.end(op, how(&error)),
        }
    }

    async fn keep_lock(&mut self, op: OpId, thing: usize, guard: LockGuard) {
        let fence = guard.fence().get();
        self.shared.history_file.note(Event::Grant { op, fence: Some(fence), slot: 1, weight: 1 });
        let mut held = self.hold(op, thing, Some(fence), || guard.check().is_ok()).await;
        if held && self.chance(15) {
            // Extended explicitly, to a time that is shorter or longer than before.
            let lease = Duration::from_micros(self.rng.u64(SECOND / 2..EXTENSION));
            held = guard.extend(lease).await.is_ok()
                && self.hold(op, thing, None, || guard.check().is_ok()).await;
        }
        self.shared.history_file.note(Event::Ending { op });
        if !held || self.chance(25) {
            drop(guard);
            self.shared.end(op, if held { How::Dropped } else { How::Lost });
            return;
        }
        let (id, key) = (guard.id(), THINGS[thing].name);
        let released = guard.release().await;
        self.shared.end(op, released_how(&released));
        if let (Ok(true), true) = (released, self.chance(30)) {
            // The lock was released. Releasing it again, even a little later, must not affect another holder.
            let pause = self.millis(0..200);
            self.unless_finishing(tokio::time::sleep(pause)).await;
            let client = self.rng.usize(..self.shared.clients.len());
            if let Ok(released) = self.shared.clients[client].locks().release(&id).await {
                self.shared.history_file.note(Event::Stale { thing: key.to_owned(), released });
            }
        }
    }

    async fn with_lock(&mut self, op: OpId, thing: usize, lock: &Lock) {
        let worked = lock
            .with(async |guard| {
                let fence = guard.fence().get();
                self.shared.history_file.note(Event::Grant {
                    op,
                    fence: Some(fence),
                    slot: 1,
                    weight: 1,
                });
                let held = self.hold(op, thing, Some(fence), || guard.check().is_ok()).await;
                self.shared.history_file.note(Event::Ending { op });
                held
            })
            .await;
        self.shared.end(
            op,
            match worked {
                Ok(true) => How::Dropped,
                Ok(false) => How::Lost,
                Err(error) => how(&error),
            },
        );
    }
}
