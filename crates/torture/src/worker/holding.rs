//! What a task does while it holds a permit, a lock or a pool lease.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;

use super::{Patience, Settings, Shared, record};
use crate::clock::{self, Micros, SECOND};
use crate::history::{Event, OpId};
use crate::plan::{Kind, LONG, THINGS, Thing};
use crate::record::{Contents, Record, Step, sum};

/// A task, with its random numbers and its own open file for each record.
pub(super) struct TaskContext {
    pub(super) shared: Arc<Shared>,
    pub(super) task: usize,
    pub(super) rng: Rng,
    records: Vec<Option<Record>>,
}

impl TaskContext {
    pub(super) fn new(shared: Arc<Shared>, settings: &Settings, task: usize) -> Self {
        let records = (0..THINGS.len()).map(|thing| record(&settings.dir, thing)).collect();
        Self { shared, task, rng: settings.rng(task), records }
    }

    pub(super) fn finishing(&self) -> bool {
        *self.shared.finish.borrow()
    }

    /// Returns the future's output, unless the run ends first.
    pub(super) async fn unless_finishing<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut finish = self.shared.finish.clone();
        tokio::select! {
            biased;
            _ = finish.wait_for(|finish| *finish) => None,
            output = future => Some(output),
        }
    }

    /// Returns the future's output, unless the run or the patience ends first. Then the future is dropped.
    pub(super) async fn unless_impatient<F: Future>(
        &self,
        patience: Patience,
        future: F,
    ) -> Option<F::Output> {
        let either = async {
            tokio::select! {
                biased;
                output = future => Some(output),
                () = self.shared.lose_patience(patience) => None,
            }
        };
        self.unless_finishing(either).await.flatten()
    }

    pub(super) fn chance(&mut self, percent: u32) -> bool {
        self.rng.u32(..100) < percent
    }

    pub(super) fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.rng.u64(range))
    }

    /// Patience that ends shortly after the next outage begins, or after `most` at the latest.
    pub(super) fn until_outage(&mut self, client: usize, most: Duration) -> Patience {
        let longest = if self.chance(50) { 4 } else { 60 };
        Patience::UntilOutage { client, moment: self.millis(0..longest), most }
    }

    /// Mostly short, sometimes past the time at which the lease must have been renewed.
    fn how_long(&mut self, lease: Micros) -> Duration {
        match self.rng.u32(..100) {
            0..75 => self.millis(0..40),
            75..95 => self.millis(40..400),
            // Acquisitions that were cancelled but not released must have a chance to be granted.
            _ if lease == LONG => Duration::from_micros(self.rng.u64(lease / 10..lease / 4)),
            _ => Duration::from_micros(self.rng.u64(lease / 2..2 * lease)),
        }
    }

    /// Acquires something while connections are being replaced, and mostly cancels the acquire before it is answered.
    pub(super) async fn cancel(&mut self) {
        // A long lease that is not released is missed for a long time, above all by waiters in a queue.
        let lasting = |thing: &Thing| thing.is_lasting() && thing.kind == Kind::Semaphore;
        let lasting: Vec<_> = (0..THINGS.len()).filter(|at| lasting(&THINGS[*at])).collect();
        let any = self.rng.usize(..THINGS.len());
        // All tasks use the same thing for a while, so that one request contains several commands.
        let now = usize::try_from(clock::now() / (SECOND / 2)).unwrap_or_default();
        let thing = if self.chance(35) { any } else { lasting[now % lasting.len()] };
        let client = self.rng.usize(..self.shared.clients.len());
        let longest = if self.chance(30) { 200 } else { 2000 };
        let most = self.millis(0..longest);
        let patience = self.until_outage(client, most);
        self.acquire_and_cancel(thing, client, patience).await;
    }

    /// Acquires something, and mostly cancels the acquire while its request or the answer is in flight. What is not
    /// released then stays for a long lease.
    pub(super) async fn cancel_at_once(&mut self) {
        let lasting: Vec<_> = (0..THINGS.len()).filter(|at| THINGS[*at].is_lasting()).collect();
        let thing = lasting[self.rng.usize(..lasting.len())];
        let client = self.rng.usize(..self.shared.clients.len());
        let at_once = self.chance(70);
        let patience = if at_once { Patience::AtOnce } else { Patience::For(self.millis(0..5)) };
        self.acquire_and_cancel(thing, client, patience).await;
    }

    async fn acquire_and_cancel(&mut self, thing: usize, client: usize, patience: Patience) {
        match THINGS[thing].kind {
            Kind::Semaphore => self.acquire_semaphore(thing, client, patience).await,
            Kind::Lock => self.cancel_lock(thing, client, patience).await,
            Kind::Pool => self.cancel_lease(thing, client, patience).await,
        }
    }

    /// Holds for a while, and records when it certainly held. Returns `false` as soon as it does not hold any more.
    pub(super) async fn hold(
        &mut self,
        op: OpId,
        thing: usize,
        fence: Option<u64>,
        check: impl Fn() -> bool,
    ) -> bool {
        let span = self.how_long(THINGS[thing].lease);
        let until = clock::now() + clock::micros(span);
        if !self.believes(op, &check) {
            return false;
        }
        let read = match fence {
            Some(fence) => self.read(op, thing, fence).await,
            None => None,
        };
        loop {
            let left = until.saturating_sub(clock::now());
            if left == 0 || self.finishing() {
                break;
            }
            let pause = Duration::from_micros(left).min(self.millis(10..80));
            tokio::time::sleep(pause).await;
            if !self.believes(op, &check) {
                return false;
            }
        }
        if let (Some(fence), Some(read)) = (fence, read) {
            self.write(op, thing, fence, read).await;
        }
        self.believes(op, &check)
    }

    pub(super) fn believes(&self, op: OpId, check: &impl Fn() -> bool) -> bool {
        let since = clock::now();
        let fine = check();
        if fine {
            self.shared.history_file.note(Event::Hold { op, since });
        }
        fine
    }

    async fn read(&mut self, op: OpId, thing: usize, fence: u64) -> Option<Contents> {
        let state = self.step(op, thing, fence, |record| record.read(fence)).await?;
        let Contents { version, sum, .. } = state;
        self.shared.history_file.note(Event::Read { op, fence, version, sum });
        Some(state)
    }

    async fn write(&mut self, op: OpId, thing: usize, fence: u64, read: Contents) {
        let (before, version) = (read.sum, read.version + 1);
        let sum = sum(before, version, fence);
        self.shared.history_file.note(Event::Intend { op, fence, version, before, sum });
        let since = clock::now();
        if self.step(op, thing, fence, |record| record.write(fence, version, sum)).await.is_some() {
            self.shared.history_file.note(Event::Wrote { op, since, version });
        }
    }

    /// One step on the record. It is repeated while another process has locked the record, but not forever: that
    /// process may have been stopped.
    async fn step(
        &mut self,
        op: OpId,
        thing: usize,
        fence: u64,
        step: impl Fn(&Record) -> std::io::Result<Step>,
    ) -> Option<Contents> {
        for _ in 0..20 {
            let record = self.records[thing].as_ref()?;
            match step(record).expect("a record that can be read") {
                Step::Done(state) => return Some(state),
                Step::Refused { floor } => {
                    self.shared.history_file.note(Event::Refused { op, fence, floor });
                    return None;
                }
                Step::Conflict { version } => {
                    self.shared.history_file.note(Event::Conflict { op, fence, version });
                    return None;
                }
                Step::Busy => {
                    let pause = self.millis(1..10);
                    tokio::time::sleep(pause).await;
                }
            }
        }
        None
    }
}
