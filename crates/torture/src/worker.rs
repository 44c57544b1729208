//! One worker: a process that uses the library, or another program's client, and records what it sees.
//!
//! It has several clients and several tasks, which use names that all workers share. Each task has its own random
//! number generator, seeded from the seed of the run, the worker, the life of the worker, and the task.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use leasehold::compat::sync_guard::{LockLayout, StoreSettings};
use leasehold::{AcquisitionId, Client, Error};
use tokio::sync::watch;

use crate::clock::{self, MILLISECOND, Micros, SECOND};
use crate::history::{Event, HistoryFile, How, OpId};
use crate::plan::{CONFIRM, Kind, SOCKET_TIMEOUT, THINGS};
use crate::record::Record;

pub mod child;
mod foreign;
mod holding;
mod locks;
mod pools;
mod semaphores;

pub(crate) use child::{COMMAND, ONLY_OP};
use holding::TaskContext;

pub(crate) const CLIENTS: usize = 2;
const TASKS: usize = 7;
/// Tasks that only cancel acquires: often while connections are being replaced, and from time to time otherwise. The
/// other tasks are often busy with what they hold or wait for.
const CANCELLING: usize = 8;
/// Such a task decides about 70 times a second whether to cancel an acquire. While all connections work, it does so once
/// in this many times.
const CANCELS_RARELY: u32 = 200;
/// Tasks that only wait patiently for permits that pass on soon if they are not claimed. When a stopped process
/// continues, other tasks have given up before they look at a wake-up that arrived in the meantime.
const PATIENT: usize = 2;
/// How often the watchdog reads the clock, and from which length on it records a gap.
const TICK: Duration = Duration::from_millis(20);
const GAP: Micros = 120 * MILLISECOND;
/// How often the watchdog records that the process is running. If a process is silent for longer, `check` concludes
/// that it stood still.
pub(crate) const SIGN_OF_LIFE: Micros = 500 * MILLISECOND;

/// How often a task checks whether a client can reach the store.
const LOOK: Duration = Duration::from_millis(3);
/// How long after an outage acquires are cancelled.
const CANCELLED_AFTER_OUTAGE: Micros = SECOND;

/// The arguments of a worker.
#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    #[arg(long)]
    pub index: usize,
    #[arg(long)]
    pub life: u32,
    #[arg(long)]
    pub seed: u64,
    #[arg(long)]
    pub store: String,
    #[arg(long)]
    pub dir: PathBuf,
    /// Follows the published documents instead of using the library.
    #[arg(long)]
    pub foreign: bool,
}

impl Settings {
    fn lock_layout(&self) -> LockLayout {
        lock_layout(self.seed)
    }

    fn rng(&self, task: usize) -> Rng {
        let life = (self.index as u64) << 40 | u64::from(self.life) << 20 | task as u64;
        // One step of a generator separates seeds that are similar.
        Rng::with_seed(Rng::with_seed(self.seed ^ Rng::with_seed(life).u64(..)).u64(..))
    }
}

/// The layout of locks on Redis in a run. The seed decides, so that both layouts occur.
#[must_use]
pub fn lock_layout(seed: u64) -> LockLayout {
    if seed.is_multiple_of(2) { LockLayout::SyncGuard1 } else { LockLayout::SyncGuard2 }
}

/// The history of one life of a worker.
#[must_use]
pub fn history_path(dir: &Path, index: usize, life: u32) -> PathBuf {
    dir.join(format!("worker-{index}.{life}.history"))
}

/// The record that this thing protects.
#[must_use]
pub fn record_path(dir: &Path, thing: usize) -> PathBuf {
    dir.join(format!("{}.record", THINGS[thing].name))
}

/// The state that the tasks of a worker share.
struct Shared {
    history_file: Arc<HistoryFile>,
    clients: Vec<Client>,
    finish: watch::Receiver<bool>,
    /// Permits that have been released, to be released again.
    spent: Mutex<Vec<(usize, AcquisitionId)>>,
    /// When each client was last unable to reach the store.
    outages: [AtomicU64; CLIENTS],
}

/// When a task stops waiting by itself, and drops the future of its acquire.
#[derive(Clone, Copy)]
enum Patience {
    For(Duration),
    /// Until the future was polled once. Then its request was mostly sent, and is not answered.
    AtOnce,
    /// A moment after this client has lost its connection, while the connection is being replaced. Then the outcome of
    /// a command that was sent is unknown. A command that is requested during an outage is sent after it, so the next
    /// outage counts. In any case no later than `most`.
    UntilOutage {
        client: usize,
        moment: Duration,
        most: Duration,
    },
}

impl Shared {
    fn spend(&self, thing: usize, id: AcquisitionId) {
        let mut spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        spent.push((thing, id));
        if spent.len() > 50 {
            spent.remove(0);
        }
    }

    /// Resolves when the patience ends.
    async fn lose_patience(&self, patience: Patience) {
        match patience {
            Patience::For(span) => tokio::time::sleep(span).await,
            Patience::AtOnce => {}
            Patience::UntilOutage { client, moment, most } => {
                let outage = async {
                    for cut_off in [false, true] {
                        while self.is_cut_off(client) != cut_off {
                            tokio::time::sleep(LOOK).await;
                        }
                    }
                    tokio::time::sleep(moment).await;
                };
                let _ = tokio::time::timeout(most, outage).await;
            }
        }
    }

    fn is_cut_off(&self, client: usize) -> bool {
        self.clients[client].outage().is_some()
    }

    /// Whether a client was unable to reach the store a moment ago.
    fn had_outage_recently(&self) -> bool {
        let now = clock::now();
        self.outages.iter().any(|seen| now < seen.load(Ordering::Relaxed) + CANCELLED_AFTER_OUTAGE)
    }

    async fn watch_for_outages(&self) {
        loop {
            for (client, seen) in self.outages.iter().enumerate() {
                if self.is_cut_off(client) {
                    seen.store(clock::now(), Ordering::Relaxed);
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Runs the worker until the driver asks it to finish, or kills it.
#[must_use]
pub fn run(settings: &Settings) -> ExitCode {
    let history_file =
        HistoryFile::open(&history_path(&settings.dir, settings.index, settings.life));
    let history_file = Arc::new(history_file.expect("a directory for the history"));
    watch_the_clock(history_file.clone());
    let finish = listen();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        if settings.foreign {
            foreign::play(settings, &history_file, finish).await;
        } else {
            play(settings, &history_file, finish).await;
        }
    });
    history_file.note(Event::Done);
    ExitCode::SUCCESS
}

/// Waits for the word with which the driver asks the worker to finish. If the driver dies, the worker exits as well.
fn listen() -> watch::Receiver<bool> {
    let (sender, finish) = watch::channel(false);
    thread::spawn(move || {
        let mut word = String::new();
        if io::stdin().read_line(&mut word).is_ok_and(|length| length > 0) {
            sender.send_replace(true);
            // Until the driver closes the pipe.
            let _ = io::stdin().read_line(&mut word);
        }
        std::process::exit(3);
    });
    finish
}

/// Records when this process did not run although it was not stopped. Then long delays mean nothing.
fn watch_the_clock(history_file: Arc<HistoryFile>) {
    thread::spawn(move || {
        let mut last = history_file.note(Event::Tick);
        let mut last_tick = last;
        loop {
            thread::sleep(TICK);
            let now = clock::now();
            if now - last > GAP {
                history_file.note(Event::Gap { since: last });
            } else if now - last_tick > SIGN_OF_LIFE {
                last_tick = history_file.note(Event::Tick);
            }
            last = now;
        }
    });
}

/// Connects as a careful user would on an unreliable network.
async fn connect(settings: &Settings) -> Result<Client, Error> {
    let store = &settings.store;
    if let Some(path) = store.strip_prefix("sqlite:") {
        let builder = Client::local_builder(path).claim_within(Duration::from_micros(CONFIRM));
        return builder.answer_timeout(Duration::from_micros(SOCKET_TIMEOUT)).open().await;
    }
    Client::redis_builder(store)
        .lock_layout(settings.lock_layout())
        .answer_timeout(Duration::from_micros(SOCKET_TIMEOUT))
        .connect_timeout(Duration::from_secs(1))
        .claim_within(Duration::from_micros(CONFIRM))
        .open()
        .await
}

async fn play(settings: &Settings, history_file: &Arc<HistoryFile>, finish: watch::Receiver<bool>) {
    let mut clients = Vec::new();
    while clients.len() < CLIENTS {
        match connect(settings).await {
            Ok(client) => clients.push(client),
            // A fault is in effect, and the next attempt may succeed.
            Err(Error::Unavailable { .. }) if !*finish.borrow() => {}
            Err(Error::Unavailable { .. }) => return,
            Err(error) => panic!("connecting: {error}"),
        }
    }
    let names: Vec<_> = clients.iter().map(|client| client.id().to_string()).collect();
    history_file.note(Event::Begin { clients: names.join(",") });
    let (spent, outages) = (Mutex::default(), Default::default());
    let history_file = history_file.clone();
    let shared = Arc::new(Shared { history_file, clients, finish, spent, outages });
    let watcher = {
        let shared = shared.clone();
        tokio::spawn(async move { shared.watch_for_outages().await })
    };
    let context = |task| TaskContext::new(shared.clone(), settings, task);
    let working = (0..TASKS).map(|task| tokio::spawn(work(context(task))));
    let cancelling = (TASKS..TASKS + CANCELLING).map(|task| tokio::spawn(cancel(context(task))));
    let patient = (0..PATIENT).map(|task| tokio::spawn(wait(context(TASKS + CANCELLING + task))));
    let tasks: Vec<_> = working.chain(cancelling).chain(patient).collect();
    for task in tasks {
        task.await.expect("a task that does not panic");
    }
    watcher.abort();
    for client in &shared.clients {
        if let Err(error) = client.close().await {
            eprintln!("closing: {error}");
        }
    }
}

async fn work(mut context: TaskContext) {
    while !context.finishing() {
        let thing = context.rng.usize(..THINGS.len());
        match THINGS[thing].kind {
            Kind::Semaphore => context.use_semaphore(thing).await,
            Kind::Lock => context.use_lock(thing).await,
            Kind::Pool => context.use_pool(thing).await,
        }
        let pause = context.rng.u64(0..60);
        context.unless_finishing(tokio::time::sleep(Duration::from_millis(pause))).await;
    }
}

async fn cancel(mut context: TaskContext) {
    while !context.finishing() {
        if context.shared.had_outage_recently() {
            context.cancel().await;
        } else if context.rng.u32(..CANCELS_RARELY) == 0 {
            context.cancel_at_once().await;
        }
        let pause = context.millis(0..30);
        context.unless_finishing(tokio::time::sleep(pause)).await;
    }
}

async fn wait(mut context: TaskContext) {
    let passes_on_soon = |thing: &usize| {
        let thing = &THINGS[*thing];
        thing.kind == Kind::Semaphore && thing.lease <= 2 * SECOND
    };
    let things: Vec<_> = (0..THINGS.len()).filter(passes_on_soon).collect();
    while !context.finishing() {
        let thing = things[context.rng.usize(..things.len())];
        context.wait_for_semaphore(thing).await;
    }
}

/// Returns what an error means for the acquisition.
fn how(error: &Error) -> How {
    match error {
        Error::TimedOut { .. } => How::TimedOut,
        Error::Lost { .. } | Error::Cancelled { .. } => How::Lost,
        Error::Closed => How::Cancelled,
        Error::Unavailable { .. } => How::Failed,
        other => {
            eprintln!("{other:?}");
            How::Internal
        }
    }
}

/// Opens the record that a thing protects. Each task has its own, because a file lock belongs to the open file.
fn record(dir: &Path, thing: usize) -> Option<Record> {
    THINGS[thing].recorded.then(|| Record::open(&record_path(dir, thing)).expect("a directory"))
}

/// The result of an acquire.
enum AcquireResult<T> {
    Granted(T),
    Ended(How),
}

impl Shared {
    /// Records the request of an acquisition that the store will list with this id.
    fn record_request(&self, thing: usize, id: &str) -> OpId {
        let op = self.history_file.next_op();
        self.record_request_as(op, thing, id);
        op
    }

    /// The same for an id that contains the number of the acquisition.
    fn record_request_as(&self, op: OpId, thing: usize, id: &str) {
        let (thing, id) = (THINGS[thing].name.to_owned(), id.to_owned());
        self.history_file.note(Event::Ask { op, thing, id });
    }

    fn end(&self, op: OpId, how: How) {
        self.history_file.note(Event::End { op, how });
    }
}
