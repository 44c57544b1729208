//! Reads statistics over separate connections and on a separate thread. So a long listing delays neither the commands
//! nor the engine's thread, and its replies are decoded where nothing waits. The thread and the connections exist only
//! while they are used.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::locks::LockScripts;
use super::scripts::Scripts;
use super::settings::{Purpose, RedisSettings};
use super::topology::Topology;
use crate::backend::{Answer, Answers, BoxFuture, Part, Report, threads};
use crate::machine::lock::{LockCommand, LockOutcome, LockRef};
use crate::{ClientId, Error};

/// How long the thread and its connections stay after the last query.
const IDLE: Duration = Duration::from_secs(30);

type Job = Box<dyn FnOnce(Topology) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send>;

pub(super) struct StatsReader {
    settings: Arc<RedisSettings>,
    scripts: Arc<Scripts>,
    thread: Arc<Mutex<Thread>>,
}

/// The sender of jobs while the thread runs. The thread removes it under this lock when it ends, so that no job is
/// lost.
type Thread = Option<mpsc::UnboundedSender<Job>>;

impl StatsReader {
    pub(super) fn new(settings: &RedisSettings, scripts: &Arc<Scripts>) -> Self {
        let settings = Arc::new(RedisSettings { purpose: Purpose::Reading, ..settings.clone() });
        Self { settings, scripts: scripts.clone(), thread: Arc::default() }
    }

    /// Runs a query on the thread, which is started if it does not run.
    pub(super) fn read<T: Send + 'static, F: Future<Output = Result<T, Error>> + Send + 'static>(
        &self,
        client: ClientId,
        query: impl FnOnce(Topology) -> F + Send + 'static,
    ) -> BoxFuture<T> {
        let (mut answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |topology| {
            Box::pin(async move {
                let query = query(topology);
                // The caller may drop the future in the middle of a long listing.
                tokio::select! {
                    result = query => drop(answer.send(result)),
                    () = answer.closed() => {}
                }
            })
        });
        let sent = self.send(client, job);
        Box::pin(async move {
            sent?;
            answered.await.unwrap_or_else(|_| Err(Error::Closed))
        })
    }

    fn send(&self, client: ClientId, job: Job) -> Result<(), Error> {
        let mut thread = lock(&self.thread);
        // The thread may have ended by a panic.
        if thread.as_ref().is_none_or(mpsc::UnboundedSender::is_closed) {
            *thread = Some(self.start(client)?);
        }
        let sent = thread.as_ref().map(|jobs| jobs.send(job));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(Error::internal("the thread that reads statistics has ended")),
        }
    }

    fn start(&self, client: ClientId) -> Result<mpsc::UnboundedSender<Job>, Error> {
        let (sender, jobs) = mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let failed = |error| {
            let what = format!("the runtime for statistics could not be started: {error}");
            Error::Stopped { problem: what }
        };
        let (runtime, thread) =
            (DroppedAnywhere(Some(runtime.map_err(failed)?)), self.thread.clone());
        let (settings, scripts) = (self.settings.clone(), self.scripts.clone());
        threads::spawn("leasehold-stats", move || {
            runtime.block_on(async {
                let topology = Topology::new(&settings, &scripts);
                let report: Report = Arc::new(|_| {});
                topology.start(client, report);
                serve(jobs, &topology, &thread).await;
            });
        })?;
        Ok(sender)
    }
}

/// A runtime that may be dropped inside another one, where a runtime panics otherwise: if its thread cannot be started,
/// it is dropped where the query was made.
struct DroppedAnywhere(Option<Runtime>);

impl DroppedAnywhere {
    fn block_on(&self, work: impl Future<Output = ()>) {
        if let Some(runtime) = &self.0 {
            runtime.block_on(work);
        }
    }
}

impl Drop for DroppedAnywhere {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for StatsReader {
    fn drop(&mut self) {
        // The thread ends when its channel closes.
        *lock(&self.thread) = None;
    }
}

/// Runs jobs until the thread has been idle for [`IDLE`], or the channel closes.
async fn serve(
    mut jobs: mpsc::UnboundedReceiver<Job>,
    topology: &Topology,
    thread: &Mutex<Thread>,
) {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            job = jobs.recv() => match job {
                Some(job) => _ = running.spawn(job(topology.clone())),
                None => return,
            },
            Some(_) = running.join_next() => {}
            () = tokio::time::sleep(IDLE), if running.is_empty() => {
                let mut thread = lock(thread);
                if jobs.is_empty() {
                    *thread = None;
                    return;
                }
            }
        }
    }
}

/// Returns [`Error::Denied`] if the client only reads.
pub(super) fn check(topology: &Topology) -> Result<(), Error> {
    if topology.settings().only_reads() {
        let what = "this client is read-only: to make changes, open a client without read_only";
        return Err(Error::Denied { problem: what.to_owned() });
    }
    Ok(())
}

/// Answers a request of a client that only reads.
pub(super) async fn answers(topology: &Topology, locks: &LockScripts, request: &[Part]) -> Answers {
    let mut answers = Vec::with_capacity(request.len());
    for part in request {
        answers.push(answer(topology, locks, part).await);
    }
    answers
}

/// Such a client can look up locks by key, and nothing else.
async fn answer(topology: &Topology, locks: &LockScripts, part: &Part) -> Result<Answer, Error> {
    let outcome = match part {
        Part::Lock(LockCommand::Lookup(LockRef::Key(key))) => {
            LockOutcome::Lookup(locks.find(topology, key).await?)
        }
        Part::Lock(LockCommand::IsLocked { key, .. }) => {
            LockOutcome::IsLocked(locks.find(topology, key).await?.is_some())
        }
        _ => return check(topology).map(|()| Answer::NotNow),
    };
    Ok(Answer::Lock(outcome))
}

fn lock(thread: &Mutex<Thread>) -> MutexGuard<'_, Thread> {
    thread.lock().unwrap_or_else(PoisonError::into_inner)
}
