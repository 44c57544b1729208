//! A client that only reads. It writes nothing at all, so it works on a full disk and on a read-only file system: it
//! has no lifeline and no row in the store, and it opens the database anew for every query.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::database::Reader;
use super::{locks, pools, stats};
use crate::backend::TimeAuthority;
use crate::backend::{
    Answer, Answers, BoxFuture, Destination, Event, Part, Profile, RemoteBackend, Report, threads,
};
use crate::machine::lock::Record;
use crate::machine::pool::PoolQuery;
use crate::machine::{Command, Steered};
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreStats};
use crate::{AcquisitionId, ClientId, ClientInfo, Error};

pub(crate) struct ReadOnly {
    path: PathBuf,
    address: String,
    answer_timeout: Duration,
}

impl ReadOnly {
    pub(crate) fn new(path: PathBuf, answer_timeout: Duration) -> Self {
        let address = path.display().to_string();
        Self { path, address, answer_timeout }
    }

    /// Fails with the reason if the store cannot be read.
    pub(crate) fn opened(&self) -> BoxFuture<()> {
        self.read(|_| Ok(()))
    }

    /// Runs a query on its own thread, bounded by the answer time-out.
    fn read<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Reader) -> Result<T, Error> + Send + 'static,
    ) -> BoxFuture<T> {
        let (limit, what) = (self.answer_timeout, format!("reading {}", self.address));
        let path = self.path.clone();
        Box::pin(async move {
            let reading = async {
                threads::run("leasehold-stats", move || question(&Reader::open(&path)?)).await?
            };
            let read = tokio::time::timeout(limit, reading).await;
            read.unwrap_or_else(|_| Err(Error::unavailable(what, true, None)))
        })
    }
}

fn refused<T: Send + 'static>() -> BoxFuture<T> {
    Box::pin(std::future::ready(Err(only_reads())))
}

fn only_reads() -> Error {
    let what = "this client is read-only: to make changes, open a client without read_only";
    Error::Refused { what: what.to_owned() }
}

impl RemoteBackend for ReadOnly {
    fn profile(&self) -> Profile {
        Profile { kind: "local", needs_renewals: false, time_authority: TimeAuthority::Host }
    }

    fn address(&self) -> &str {
        &self.address
    }

    fn start(&self, _client: ClientId, report: Report) {
        let to = Destination::ONLY;
        report(Event::Connected { to, again: false, other: false, stragglers: false });
    }

    fn apply(&self, _to: Destination, request: &Arc<[Part]>) -> BoxFuture<Answers> {
        let request = request.clone();
        self.read(move |store| {
            store.read(|tx, now, _| {
                let mut answers = Vec::with_capacity(request.len());
                for part in &*request {
                    answers.push(match part {
                        Part::Lock(command) if locks::only_asks(command) => {
                            let outcome =
                                locks::machine(tx, now).apply(command, now.micros() / 1000)?;
                            Ok(Answer::Lock(outcome))
                        }
                        _ => Err(only_reads()),
                    });
                }
                Ok(answers)
            })
        })
    }

    fn position(&self, _name: &Name, _id: AcquisitionId) -> BoxFuture<Option<usize>> {
        refused()
    }

    fn steer(&self, _name: &Name, _steer: Command) -> BoxFuture<Steered> {
        refused()
    }

    fn stats(&self, query: Query) -> BoxFuture<Vec<SemaphoreStats>> {
        self.read(move |store| stats::fetch(store, &query))
    }

    fn list_locks(&self, limit: usize) -> BoxFuture<Vec<Record>> {
        self.read(move |store| locks::list(store, limit))
    }

    fn list_pools(&self, query: PoolQuery) -> BoxFuture<Vec<PoolStats>> {
        self.read(move |store| {
            store.read(|tx, now, _| {
                let pools = pools::list(tx, &query)?.into_iter();
                Ok(pools.map(|pool| PoolStats::of(pool, now)).collect())
            })
        })
    }

    fn list_clients(&self, limit: usize) -> BoxFuture<Vec<ClientInfo>> {
        self.read(move |store| stats::clients(store, limit))
    }
}
