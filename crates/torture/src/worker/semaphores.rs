//! What a task does with a semaphore.

use std::pin::pin;
use std::sync::PoisonError;
use std::time::Duration;

use leasehold::{Acquire, Error, Permit, Semaphore};
use tokio::time::sleep;

use super::{AcquireResult, Patience, TaskContext, how};
use crate::clock;
use crate::history::{Event, How, OpId};
use crate::plan::THINGS;

/// The longest wait: a task that waits does nothing else.
const LONGEST: Duration = Duration::from_secs(25);

impl TaskContext {
    pub(super) async fn use_semaphore(&mut self, thing: usize) {
        let client = self.rng.usize(..self.shared.clients.len());
        let Some(semaphore) = self.semaphore(thing, client) else { return };
        match self.rng.u32(..100) {
            0..8 => self.try_acquire(thing, &semaphore).await,
            8..20 => self.with(thing, &semaphore).await,
            20..26 => self.release_again(thing, client).await,
            26..40 => {
                let limit = self.millis(20..2000);
                let acquire = semaphore.acquire().within(limit);
                self.acquire(thing, &semaphore, acquire, Patience::For(LONGEST)).await;
            }
            40..52 => {
                // Half of them are dropped while the request or its answer is in flight.
                let longest = if self.chance(50) { 5 } else { 1200 };
                let patience = Patience::For(self.millis(0..longest));
                self.acquire(thing, &semaphore, semaphore.acquire(), patience).await;
            }
            52..64 => {
                let patience = self.until_outage(client, LONGEST);
                self.acquire(thing, &semaphore, semaphore.acquire(), patience).await;
            }
            _ => {
                let patience = Patience::For(LONGEST);
                self.acquire(thing, &semaphore, semaphore.acquire(), patience).await;
            }
        }
    }

    pub(super) async fn wait_for_semaphore(&mut self, thing: usize) {
        let client = self.rng.usize(..self.shared.clients.len());
        self.acquire_semaphore(thing, client, Patience::For(LONGEST)).await;
    }

    pub(super) async fn acquire_semaphore(
        &mut self,
        thing: usize,
        client: usize,
        patience: Patience,
    ) {
        let Some(semaphore) = self.semaphore(thing, client) else { return };
        self.acquire(thing, &semaphore, semaphore.acquire(), patience).await;
    }

    fn semaphore(&self, thing: usize, client: usize) -> Option<Semaphore> {
        let spec = &THINGS[thing];
        let mut builder = self.shared.clients[client].semaphore(spec.name, spec.capacity);
        builder = builder.lease(spec.lease_time());
        if let Some(ttl) = spec.ttl {
            builder = builder.ttl(Duration::from_micros(ttl));
        }
        if spec.numbered {
            builder = builder.numbered();
        }
        if let Some(rate) = spec.rate {
            builder = builder.rate(rate.starts.into(), Duration::from_secs(1)).burst(rate.burst);
        }
        if spec.operated {
            // Otherwise the first acquire of each client would undo what the operator has set.
            builder = builder.unless_declared();
        }
        builder.build().ok()
    }

    fn any_weight(&mut self, thing: usize) -> u32 {
        // Plain ones draw no random number.
        let heaviest = THINGS[thing].heaviest;
        if heaviest == 1 { 1 } else { self.rng.u32(1..=heaviest) }
    }

    /// Acquires with a random weight, and gives up when the patience ends.
    async fn acquire(
        &mut self,
        thing: usize,
        semaphore: &Semaphore,
        acquire: Acquire,
        patience: Patience,
    ) {
        let weight = self.any_weight(thing);
        let acquire = acquire.weight(weight);
        let op = self.shared.record_request(thing, &acquire.id().to_string());
        // The future is dropped, and with it the place in the queue, before the end is recorded.
        match self.wait(op, semaphore, acquire, patience).await {
            AcquireResult::Granted(permit) => self.keep(op, thing, permit, weight).await,
            AcquireResult::Ended(how) => self.shared.end(op, how),
        }
    }

    /// Waits, and queries its position in the queue from time to time.
    async fn wait(
        &mut self,
        op: OpId,
        semaphore: &Semaphore,
        acquire: Acquire,
        patience: Patience,
    ) -> AcquireResult<Permit> {
        let id = acquire.id();
        let mut acquire = pin!(acquire);
        let shared = self.shared.clone();
        let mut over = pin!(shared.lose_patience(patience));
        let mut finish = self.shared.finish.clone();
        let mut pause = Duration::from_millis(4);
        loop {
            let query = async {
                sleep(pause).await;
                (clock::now(), semaphore.position(&id).await)
            };
            tokio::select! {
                biased;
                granted = &mut acquire => return match granted {
                    Ok(permit) => AcquireResult::Granted(permit),
                    Err(error) => AcquireResult::Ended(how(&error)),
                },
                _ = finish.wait_for(|finish| *finish) => return AcquireResult::Ended(How::Cancelled),
                () = &mut over => return AcquireResult::Ended(How::Cancelled),
                (since, position) = query => if let Ok(Some(position)) = position {
                    self.shared.history_file.note(Event::Queue { op, since, position: position as u64 });
                },
            }
            pause = self.millis(60..160);
        }
    }

    async fn try_acquire(&mut self, thing: usize, semaphore: &Semaphore) {
        let weight = self.any_weight(thing);
        let op = self.shared.record_request(thing, "-");
        match semaphore.try_acquire().weight(weight).await {
            Ok(Some(permit)) => self.keep(op, thing, permit, weight).await,
            Ok(None) => self.shared.end(op, How::Full),
            Err(error) => self.shared.end(op, how(&error)),
        }
    }

    /// Holds a permit, and then ends it in one of the possible ways.
    async fn keep(&mut self, op: OpId, thing: usize, permit: Permit, weight: u32) {
        let fence = self.granted(op, &permit, weight);
        let held = self.hold(op, thing, Some(fence), || permit.check().is_ok()).await;
        self.shared.history_file.note(Event::Ending { op });
        match self.rng.u32(..100) {
            _ if !held => {
                drop(permit);
                self.shared.end(op, How::Lost);
            }
            0..20 => {
                drop(permit);
                self.shared.end(op, How::Dropped);
            }
            20..32 => self.detach(op, thing, permit).await,
            _ => {
                let id = permit.id();
                let released = permit.release().await;
                self.shared.end(op, released_how(&released));
                if let Ok(true) = released {
                    self.shared.spend(thing, id);
                }
            }
        }
    }

    fn granted(&self, op: OpId, permit: &Permit, weight: u32) -> u64 {
        let (fence, slot) = (permit.fence().get(), permit.slot_number().unwrap_or(0));
        self.shared.history_file.note(Event::Grant { op, fence: Some(fence), slot, weight });
        fence
    }

    /// Keeps only the id, and releases by it, perhaps through another client.
    async fn detach(&mut self, op: OpId, thing: usize, permit: Permit) {
        let id = permit.detach();
        self.shared.history_file.note(Event::Detach { op });
        let pause = self.millis(0..300);
        self.unless_finishing(sleep(pause)).await;
        let client = self.rng.usize(..self.shared.clients.len());
        let Some(semaphore) = self.semaphore(thing, client) else { return };
        match semaphore.release(&id).await {
            // Whether it was held or had ended before, it is not held any more.
            Ok(_) => {
                self.shared.end(op, How::Released);
                self.shared.spend(thing, id);
            }
            Err(error) => self.shared.end(op, how(&error)),
        }
    }

    async fn with(&mut self, thing: usize, semaphore: &Semaphore) {
        let weight = self.any_weight(thing);
        let acquire = semaphore.acquire().weight(weight);
        let op = self.shared.record_request(thing, &acquire.id().to_string());
        let worked = acquire
            .with(async |permit| {
                let fence = self.granted(op, permit, weight);
                let held = self.hold(op, thing, Some(fence), || permit.check().is_ok()).await;
                self.shared.history_file.note(Event::Ending { op });
                held
            })
            .await;
        self.shared.end(
            op,
            match worked {
                Ok(true) => How::Dropped, // released, but a release that failed is only logged
                Ok(false) => How::Lost,
                Err(error) => how(&error),
            },
        );
    }

    /// An id that was released belongs to no holder. Releasing it again must not affect any holder.
    async fn release_again(&mut self, thing: usize, client: usize) {
        let spent = {
            let spent = self.shared.spent.lock().unwrap_or_else(PoisonError::into_inner);
            let mine: Vec<_> = spent.iter().filter(|(at, _)| *at == thing).copied().collect();
            mine
        };
        if spent.is_empty() {
            return;
        }
        let (_, id) = spent[self.rng.usize(..spent.len())];
        let Some(semaphore) = self.semaphore(thing, client) else { return };
        if let Ok(released) = semaphore.release(&id).await {
            let thing = THINGS[thing].name.to_owned();
            self.shared.history_file.note(Event::Stale { thing, released });
        }
    }
}

/// Returns what is known after a release.
pub(super) fn released_how(released: &Result<bool, Error>) -> How {
    match released {
        Ok(true) => How::Released,
        Ok(false) => How::Lost,
        Err(error) => match how(error) {
            How::Internal => How::Internal,
            _ => How::Failed,
        },
    }
}
