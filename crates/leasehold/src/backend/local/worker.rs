//! The thread that a client's store works on.
//!
//! Not the engine's: waiting for a turn, or for SQLite, may take as long as some other process is stopped in the middle of a
//! transaction, and the engine's timers must not stand still for that.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};

use tokio::sync::oneshot;

use super::LocalSettings;
use super::database::{Database, MOMENT};
use crate::backend::Later;
use crate::engine::foreign::event;
use crate::{ClientId, Error};

type Job = Box<dyn FnOnce(&mut Result<Database, Error>) + Send>;

/// What asks the thread, once it is started.
#[derive(Default)]
pub(super) struct Worker {
    /// The first to go: when the thread ends, it has the last one.
    lifeline: Arc<OnceLock<OwnedFd>>,
    jobs: OnceLock<Sender<Job>>,
}

impl Worker {
    /// Starts the thread, which opens the store first of all. Its socket is told when that is done. The thread ends with
    /// the last who can ask it.
    pub(super) fn start(
        &self,
        settings: LocalSettings,
        client: ClientId,
        socket: oneshot::Sender<UnixDatagram>,
    ) {
        let (sender, jobs) = channel();
        let lifeline = self.lifeline.clone();
        let work = move || work(settings, client, lifeline, socket, &jobs);
        match std::thread::Builder::new().name("leasehold-store".into()).spawn(work) {
            Ok(_) => drop(self.jobs.set(sender)),
            Err(error) => event!(error, %error, "the store's thread could not be started"),
        }
    }

    pub(super) fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.lifeline.get().map(AsFd::as_fd)
    }

    /// Runs `work` there. If nobody waits for its answer any more when its turn comes, it is left out.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> Later<T> {
        let worker = self.clone();
        Box::pin(async move {
            let ended = || Error::internal("the store's thread has ended");
            let (answer, answered) = oneshot::channel();
            let job: Job = Box::new(move |store| {
                if !answer.is_closed() {
                    let done = match store {
                        Ok(store) => work(store),
                        Err(error) => Err(error.clone()),
                    };
                    let _ = answer.send(done);
                }
            });
            worker.jobs.get().ok_or_else(ended)?.send(job).map_err(|_| ended())?;
            drop(worker);
            answered.await.unwrap_or_else(|_| Err(ended()))
        })
    }
}

fn work(
    settings: LocalSettings,
    client: ClientId,
    lifeline: Arc<OnceLock<OwnedFd>>,
    socket: oneshot::Sender<UnixDatagram>,
    jobs: &Receiver<Job>,
) {
    let mut store = Database::open(settings, client, &lifeline).map(|(store, own)| {
        let _ = socket.send(own);
        store
    });
    while let Some(job) = next(jobs, &mut store) {
        job(&mut store);
        if let Ok(store) = &mut store {
            store.tidy_log();
        }
    }
    if let Ok(store) = store {
        store.leave(lifeline);
    }
}

/// The next job. If there is none for a moment, the log is copied back, should it be long.
fn next(jobs: &Receiver<Job>, store: &mut Result<Database, Error>) -> Option<Job> {
    if let Ok(store) = store
        && store.has_a_long_log()
    {
        match jobs.recv_timeout(MOMENT) {
            Err(RecvTimeoutError::Timeout) => store.copy_log_back(),
            job => return job.ok(),
        }
    }
    jobs.recv().ok()
}
