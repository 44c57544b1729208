//! The thread that runs all transactions of one client.
//!
//! It is not the engine's thread. Waiting for the write lock, or for SQLite, may take as long as another process is
//! stopped in the middle of a transaction, and the engine's timers must not stop for that.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};

use tokio::sync::oneshot;

use super::LocalSettings;
use super::database::{Database, IDLE};
use super::lifeline::{Lifeline, WakeUps};
use crate::backend::{BoxFuture, threads};
use crate::callbacks::event;
use crate::{ClientId, Error};

type Job = Box<dyn FnOnce(&mut Result<Database, Error>) + Send>;

/// A handle to the thread. It accepts jobs once the thread is started.
#[derive(Default)]
pub(super) struct Worker {
    /// Declared before `jobs`, because fields are dropped in the order of their declaration. When `jobs` closes, the
    /// thread ends, and then it must have the last reference to the lifeline.
    lifeline: Arc<OnceLock<Lifeline>>,
    /// An error if the thread could not be started.
    jobs: OnceLock<Result<Sender<Job>, Error>>,
}

impl Worker {
    /// Starts the thread, which first opens the store and then sends the client's socket to `socket`. The thread ends
    /// when the last handle is dropped.
    pub(super) fn start(
        &self,
        settings: LocalSettings,
        client: ClientId,
        socket: oneshot::Sender<WakeUps>,
    ) {
        let (sender, jobs) = channel();
        let lifeline = self.lifeline.clone();
        let work = move || work(settings, client, lifeline, socket, &jobs);
        let started = threads::spawn("leasehold-store", work);
        if let Err(error) = &started {
            event!(error, %error, "permits, locks and pool leases cannot be acquired");
        }
        let _ = self.jobs.set(started.map(|()| sender));
    }

    pub(super) fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.lifeline.get().map(AsFd::as_fd)
    }

    /// Runs `work` on the thread. If the caller has dropped the future by the time the job is due, the job is skipped.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> BoxFuture<T> {
        let worker = self.clone();
        Box::pin(async move {
            let ended = || Error::internal("the store's thread has ended: open another client");
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
            let jobs = worker.jobs.get().ok_or_else(ended)?;
            jobs.as_ref().map_err(Clone::clone)?.send(job).map_err(|_| ended())?;
            drop(worker);
            answered.await.unwrap_or_else(|_| Err(ended()))
        })
    }
}

fn work(
    settings: LocalSettings,
    client: ClientId,
    lifeline: Arc<OnceLock<Lifeline>>,
    socket: oneshot::Sender<WakeUps>,
    jobs: &Receiver<Job>,
) {
    let mut store = Database::open(settings, client, &lifeline).map(|(store, wake_ups)| {
        let _ = socket.send(wake_ups);
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

/// Returns the next job. If the thread is idle for [`IDLE`] and the log is long, the log is copied back first.
fn next(jobs: &Receiver<Job>, store: &mut Result<Database, Error>) -> Option<Job> {
    if let Ok(store) = store
        && store.has_a_long_log()
    {
        match jobs.recv_timeout(IDLE) {
            Err(RecvTimeoutError::Timeout) => store.copy_log_back(),
            job => return job.ok(),
        }
    }
    jobs.recv().ok()
}
