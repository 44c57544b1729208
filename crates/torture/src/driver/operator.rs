//! The operator: sets the capacity of the operated thing, pauses and resumes it, and records when.
//!
//! It uses its own client, and connects to the store without a proxy. A change that was not answered at once may have
//! been applied, or may be applied later. So after that the state is unknown until two changes in a row were answered
//! at once: before the server reads the first of these, it reads everything that a client sent earlier.

use std::time::Duration;

use fastrand::Rng;
use leasehold::{Client, Error, Semaphore};
use tokio::time::timeout;

use super::stage::Stage;
use super::{Phase, Show, lock, millis};
use crate::clock::{self, Micros};
use crate::plan::{THINGS, Thing};

/// An answer that takes longer than this does not count as immediate.
const AT_ONCE: Duration = Duration::from_millis(500);
/// How often the last two changes are tried.
const ATTEMPTS: u32 = 40;

/// A change of the limits of one thing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Change {
    pub thing: usize,
    pub to: LimitChange,
    /// The time before the request.
    pub requested: Micros,
    /// When the change was certainly in force. `None` if that is not known.
    pub answered: Option<Micros>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LimitChange {
    Capacity(u32),
    Pause,
    Resume,
}

pub(super) fn lane(show: &Show, stage: &Stage) {
    let mut things = THINGS.iter().enumerate();
    let Some((at, thing)) = things.find(|(_, thing)| thing.operated) else { return };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let mut operator = Operator { show, stage, at, thing, at_once: false, client: None };
    let mut rng = show.rng(u64::MAX - 3);
    runtime.expect("a runtime").block_on(operator.change_limits(&mut rng));
}

struct Operator<'a> {
    show: &'a Show,
    stage: &'a Stage,
    at: usize,
    thing: &'static Thing,
    /// Whether the last change was answered at once.
    at_once: bool,
    /// With the URL for which it was opened.
    client: Option<(String, Client)>,
}

impl Operator<'_> {
    /// Makes changes until the run ends. Leaves nothing paused.
    async fn change_limits(&mut self, rng: &mut Rng) {
        let mut paused = false;
        while self.rest(millis(rng, 1000..3000)) {
            let to = match rng.u32(..100) {
                0..60 if paused => LimitChange::Resume,
                0..40 => LimitChange::Pause,
                _ => LimitChange::Capacity(rng.u32(1..=self.thing.capacity)),
            };
            let answered = self.change(to).await;
            match to {
                LimitChange::Pause => paused = true,
                LimitChange::Resume if answered => paused = false,
                LimitChange::Resume | LimitChange::Capacity(_) => {}
            }
        }
        for to in [LimitChange::Resume, LimitChange::Capacity(self.thing.capacity)] {
            let mut attempts = 0..ATTEMPTS;
            while !self.change(to).await {
                if attempts.next().is_none() {
                    self.show.doubt(format!("{} could not be reset", self.thing.name));
                    return;
                }
                tokio::time::sleep(AT_ONCE).await;
            }
        }
    }

    /// Sleeps. Returns `false` if the run has ended.
    fn rest(&self, span: Duration) -> bool {
        let phase = lock(&self.show.phase);
        let runs = |phase: &mut Phase| *phase < Phase::Finish;
        let waited = self.show.changed.wait_timeout_while(phase, span, runs);
        *waited.unwrap_or_else(std::sync::PoisonError::into_inner).0 < Phase::Finish
    }

    /// Makes a change. Returns whether it was answered at once.
    async fn change(&mut self, to: LimitChange) -> bool {
        let at = {
            let (thing, requested) = (self.at, clock::now());
            let mut log = lock(&self.show.log);
            log.changes.push(Change { thing, to, requested, answered: None });
            log.changes.len() - 1
        };
        let answered = timeout(AT_ONCE, self.apply(to)).await;
        let before = std::mem::replace(&mut self.at_once, matches!(answered, Ok(Ok(()))));
        if !self.at_once {
            // So that the client cannot send the change again later.
            self.client = None;
        } else if before {
            lock(&self.show.log).changes[at].answered = Some(clock::now());
        }
        if let Ok(Err(error)) = answered
            && !matches!(error, Error::Unavailable { .. })
        {
            self.show.doubt(format!("{} could not be changed: {error}", self.thing.name));
        }
        self.at_once
    }

    async fn apply(&mut self, to: LimitChange) -> Result<(), Error> {
        let semaphore = self.semaphore().await?;
        match to {
            LimitChange::Capacity(capacity) => semaphore.set_capacity(capacity).await,
            LimitChange::Pause => semaphore.pause().await,
            LimitChange::Resume => semaphore.resume().await,
        }
    }

    async fn semaphore(&mut self) -> Result<Semaphore, Error> {
        let url = self.stage.direct_url();
        let client = match self.client.take().filter(|(client_url, _)| *client_url == url) {
            Some((_, client)) => client,
            None => Client::open(&url).await?,
        };
        let semaphore = client.semaphore(self.thing.name, self.thing.capacity).build();
        self.client = Some((url, client));
        semaphore
    }
}
