//! The engine's own thread: timers, and trips to stores that are away.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::mpsc;

use super::named::Named;
use super::outbox::MAX_BATCH;
use super::{Core, Message};
use crate::Error;
use crate::backend::{AwaySemaphore, Backend, Reply};
use crate::clock::Moment;
use crate::machine::Command;

/// The thread does not sleep longer than this while anything is due: its timers stand still while the
/// machine is suspended, the clock of the leases does not.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// None if the system has no thread to give.
pub(super) fn start(core: &Core) -> Option<mpsc::UnboundedSender<Message>> {
    let (tell, told) = mpsc::unbounded_channel();
    // Weak: a store that has nothing to say to anybody must not keep the thread.
    let (client, backend, weak) = (core.client, core.backend.clone(), tell.downgrade());
    let start = move || {
        if let Backend::Away(backend) = backend {
            let wake = move |wake_up| {
                weak.upgrade().map(|tell| tell.send(Message::WakeUp(wake_up)));
            };
            backend.start(client, Box::new(wake));
        }
    };
    let driver = Driver { core: core.this.clone(), timers: BTreeMap::new(), tidy_at: None };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let started = runtime.and_then(|runtime| {
        std::thread::Builder::new().name("leasehold".into()).spawn(move || {
            runtime.block_on(async {
                start();
                driver.run(told).await;
            });
        })
    });
    match started {
        Ok(_) => Some(tell),
        Err(error) => {
            tracing::error!(%error, "the engine's thread could not be started");
            None
        }
    }
}

struct Driver {
    core: Weak<Core>,
    /// The address tells names apart that are due together.
    timers: BTreeMap<(Moment, usize), Weak<Named>>,
    tidy_at: Option<Moment>,
}

impl Driver {
    /// Until nobody is left to tell us anything.
    async fn run(mut self, mut told: mpsc::UnboundedReceiver<Message>) {
        loop {
            let message = match self.next_due() {
                None => told.recv().await,
                Some(due) => {
                    let pause = due.saturating_since(Moment::now()).min(LONGEST_SLEEP);
                    let Ok(message) = tokio::time::timeout(pause, told.recv()).await else {
                        self.do_what_is_due();
                        continue;
                    };
                    message
                }
            };
            let Some(message) = message else { return };
            self.handle(message);
            // However many messages there are, what is due is done.
            self.do_what_is_due();
        }
    }

    fn next_due(&self) -> Option<Moment> {
        let look = self.timers.keys().next().map(|(at, _)| *at);
        look.into_iter().chain(self.tidy_at).min()
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::LookAt(at, named) => {
                self.timers.insert((at, named.as_ptr() as usize), named);
            }
            Message::Send { named, flush, renewals } => {
                let Some(store) = named.away() else { return };
                for renewals in renewals.chunks(MAX_BATCH) {
                    tokio::spawn(renew(named.clone(), store.clone(), renewals.to_vec()));
                }
                if flush {
                    tokio::spawn(self::flush(named, store));
                }
            }
            Message::WakeUp(wake_up) => {
                if let Some(core) = self.core.upgrade() {
                    core.woken(wake_up);
                }
            }
            Message::TidyAt(at) => self.tidy_at = Some(at),
            Message::Run(work) => drop(tokio::spawn(work)),
        }
    }

    fn do_what_is_due(&mut self) {
        let Some(due) = self.next_due() else { return };
        let now = Moment::now();
        if now < due {
            return;
        }
        while let Some(timer) = self.timers.first_entry().filter(|timer| timer.key().0 <= now) {
            if let Some(named) = timer.remove().upgrade() {
                named.look(now);
            }
        }
        if self.tidy_at.is_some_and(|at| at <= now) {
            self.tidy_at = self.core.upgrade().and_then(|core| core.tidy(now));
            // What was due at a name that is gone: without it, nothing is left of the name.
            self.timers.retain(|_, named| named.strong_count() > 0);
        }
    }
}

/// Empties the outbox of one name, one batch after the other.
async fn flush(named: Arc<Named>, store: Arc<dyn AwaySemaphore>) {
    loop {
        let batch = named.at_desk(|desk, _| {
            let mut outbox = std::mem::take(&mut desk.outbox);
            let batch = outbox.next_batch(|command| desk.wants(command));
            desk.outbox = outbox;
            batch
        });
        let Some(batch) = batch else { return named.flushed() };
        send(&named, store.as_ref(), batch).await;
        named.desk().outbox.answered();
    }
}

/// Sends a batch until it is answered or the attempts are used up. Any command may be sent again: the ids
/// make it harmless (invariant 5). What nobody wants any more is not sent again.
async fn send(named: &Named, store: &dyn AwaySemaphore, mut batch: Vec<Command>) {
    let retries = named.core().settings.retries;
    for attempt in 1.. {
        let sent = Moment::now();
        let error = match attempt_once(retries.timeout, store, batch.clone()).await {
            Ok(reply) => {
                named.at_desk(|desk, after| desk.settle_away(&batch, reply, sent, after));
                return;
            }
            Err(error) => error,
        };
        if attempt >= retries.attempts || !matches!(error, Error::Unavailable { .. }) {
            named.at_desk(|desk, after| desk.give_up_on(&batch, &error, after));
            return;
        }
        tracing::debug!(name = named.name().as_str(), %error, attempt, "asking the store again");
        tokio::time::sleep(retries.delay(attempt)).await;
        batch = named
            .at_desk(|desk, _| batch.into_iter().filter(|command| desk.wants(command)).collect());
        if batch.is_empty() {
            return;
        }
    }
}

async fn attempt_once(
    limit: Duration,
    store: &dyn AwaySemaphore,
    batch: Vec<Command>,
) -> Result<Reply, Error> {
    tokio::time::timeout(limit, store.apply(batch)).await.unwrap_or_else(|_| Err(no_answer()))
}

pub(super) fn no_answer() -> Error {
    Error::Unavailable { what: "asking the store".into(), timed_out: true, source: None }
}

/// One try: whoever is not answered is asked about again soon, for as long as its validity lasts.
async fn renew(named: Arc<Named>, store: Arc<dyn AwaySemaphore>, renewals: Vec<Command>) {
    let sent = Moment::now();
    let limit = named.at_desk(|desk, _| desk.patience(&renewals, sent));
    let limit = limit.min(named.core().settings.retries.timeout);
    match attempt_once(limit, store.as_ref(), renewals.clone()).await {
        Ok(reply) => named.at_desk(|desk, after| desk.settle_away(&renewals, reply, sent, after)),
        Err(error) => {
            tracing::debug!(name = named.name().as_str(), %error, "renewal not answered");
            named.at_desk(|desk, after| desk.give_up_on(&renewals, &error, after));
        }
    }
}
