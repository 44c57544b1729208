//! The client, as Python sees it.
//!
//! `settings`: how it was declared. `shared`: what all of its objects share. `opening`: an attempt to open its store. `registry`: all
//! clients of the process.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::lock::{Lock, LockOptions, Locks, RetryPolicy};
use crate::log;
use crate::numbers::{Number, whole};
use crate::pending::{Pending, Value};
use crate::pool::{Pool, PoolOptions};
use crate::seconds::{Seconds, given};
use crate::semaphore::{Semaphore, SemaphoreOptions};
use crate::values;

mod opening;
mod registry;
mod settings;
mod shared;

pub(crate) use registry::close_all;
use settings::{Options, Settings, certificate, url_from_environment};
pub(crate) use shared::Shared;

/// A client of the store that `url` names.
///
/// The URL is `memory:`, `sqlite:PATH`, `redis://…`, `unix://…`, `redis-sentinel://…` or `redis-cluster://…`. Over TLS it begins with
/// `rediss`. Without a URL, the client uses `$LEASEHOLD_STORE`, and raises InvalidArgument if that variable is not set.
///
/// The client connects at its first operation. Any number of threads and event loops can use it. After a fork, the child opens the
/// store again when it first uses the client.
///
/// For Redis:
///
/// - `namespace`: the prefix of the keys of semaphores (`adv-sem`).
/// - `lock_prefix`: the prefix of the keys of locks (`syncguard`).
/// - `ca_certificate`: the certificate authorities to trust over TLS, as PEM or as the path of a PEM file. By default these are the
///   public authorities that browsers trust.
/// - `connect_timeout`: how long connecting may take (2 s).
///
/// For Redis and `sqlite:`:
///
/// - `answer_timeout`: how long the client waits for an answer of the store (5 s). After that, an operation raises Unavailable. An
///   acquire that waits has no such limit.
/// - `claim_within`: how long another client has to claim a permit that this client grants to it (5 s). After that, the permit
///   passes to the next waiter. The minimum is 1 s.
/// - `read_only`: the client only reads statistics and looks up locks. Everything else raises Refused.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Client {
    shared: Arc<Shared>,
}

impl Client {
    fn declared(py: Python<'_>, url: String, options: Options) -> PyResult<Self> {
        let settings = Settings::new(url, options)?;
        log::refresh(py);
        Ok(Self { shared: Shared::new(settings) })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (
        url=None, *, namespace=None, lock_prefix=None, ca_certificate=None, connect_timeout=None, answer_timeout=None,
        claim_within=None, read_only=false
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        url: Option<String>,
        namespace: Option<String>,
        lock_prefix: Option<String>,
        ca_certificate: Option<Bound<'_, PyAny>>,
        connect_timeout: Option<Seconds>,
        answer_timeout: Option<Seconds>,
        claim_within: Option<Seconds>,
        read_only: bool,
    ) -> PyResult<Self> {
        let url = match url {
            Some(url) => url,
            None => url_from_environment()?,
        };
        let options = Options {
            namespace,
            lock_prefix,
            ca_certificate: ca_certificate.map(|given| certificate(&given)).transpose()?,
            connect_timeout: given(connect_timeout),
            answer_timeout: given(answer_timeout),
            claim_within: given(claim_within),
            read_only,
        };
        Self::declared(py, url, options)
    }

    /// Returns a client in memory. The tasks and threads that use this object share its permits; other clients do not.
    #[staticmethod]
    fn memory(py: Python<'_>) -> PyResult<Self> {
        Self::declared(py, "memory:".to_owned(), Options::default())
    }

    /// Opens the store now instead of at the first operation, and returns this client. Raises Unavailable if that fails.
    fn open(slf: Bound<'_, Self>) -> Pending {
        let (shared, this) = (slf.get().shared.clone(), slf.unbind());
        shared.operation("Client.open", |_| async { Ok(Value::made(|_| Ok(this.into_any()))) })
    }

    /// The client id, with which the ids of its permits begin; None until the store is open.
    #[getter]
    fn id(&self) -> Option<String> {
        let engine = self.shared.now().ok().flatten()?;
        Some(engine.id().to_string())
    }

    /// The URL of the store, without the user and the password.
    #[getter]
    fn url(&self) -> String {
        self.shared.settings().address()
    }

    /// Returns a fair semaphore, and declares its capacity and its rate.
    ///
    /// A declaration takes effect at the first use. It applies to all programs that use the name in this store, until one of them
    /// declares another capacity or rate. All durations are in seconds.
    ///
    /// - `capacity`: how many units can be held at once. Without it, the capacity in the store applies, or 1 if there is none.
    /// - `ttl`: the longest time that a permit may be held. After that it is lost. By default there is no limit.
    /// - `lease`: on Redis, how long a holder or waiter may be silent before it loses its permit or its place (30 s). The client renews
    ///   the lease in the background.
    /// - `within`: the longest wait of an acquire. After that it raises TimedOut. By default there is no limit.
    /// - `label`: a text that statistics show beside the holders and waiters of this object.
    /// - `numbered`: whether each permit has a `slot_number`.
    /// - `rate`: with `(100, 60)`, never more than 100 permits start in any minute, evenly spread. A rate stays until
    ///   it is changed or removed (`Semaphore.clear_rate`), even if no program declares it any more.
    /// - `burst`: how many permits of the rate start at once after a quiet time (1). They are a part of the rate, so the
    ///   others are slowed down: `(100, 60)` with a burst of 10 grants 91 per minute in the long run.
    /// - `unless_declared`: whether `capacity` applies only if the store has none yet.
    #[pyo3(signature = (
        name, capacity=None, *, ttl=None, lease=None, within=None, label=None, numbered=false, rate=None, burst=None,
        unless_declared=false
    ))]
    #[allow(clippy::too_many_arguments)]
    fn semaphore(
        &self,
        py: Python<'_>,
        name: String,
        capacity: Option<Number<u32>>,
        ttl: Option<Seconds>,
        lease: Option<Seconds>,
        within: Option<Seconds>,
        label: Option<String>,
        numbered: bool,
        rate: Option<(Number<u64>, Seconds)>,
        burst: Option<Number<u32>>,
        unless_declared: bool,
    ) -> PyResult<Py<Semaphore>> {
        let options = SemaphoreOptions {
            capacity: capacity.map_or(1, |capacity| capacity.0),
            declares: capacity.is_some() && !unless_declared,
            ttl: given(ttl),
            lease: given(lease),
            within: given(within),
            label,
            numbered,
            rate: rate.map(|(starts, period)| (starts.0, period.0)),
            burst: burst.map(|burst| burst.0),
            rate_only: false,
        };
        log::refresh(py);
        Semaphore::declared(py, self.shared.clone(), name, options)
    }

    /// Returns a semaphore that limits only the rate: never more than `starts` permits in any `period` of seconds.
    ///
    /// Any number of permits can be held at once, unless another program has declared a capacity for the name. A rate
    /// counts starts, so a weight is refused.
    ///
    /// - `burst`: how many of these permits start at once after a quiet time (1); see `semaphore`.
    /// - `label`: a text that statistics show beside the holders and waiters of this object.
    #[pyo3(signature = (name, starts, period, *, burst=None, label=None))]
    fn rate(
        &self,
        py: Python<'_>,
        name: String,
        starts: Number<u64>,
        period: Seconds,
        burst: Option<Number<u32>>,
        label: Option<String>,
    ) -> PyResult<Py<Semaphore>> {
        let options = SemaphoreOptions {
            capacity: leasehold::Semaphore::UNLIMITED,
            declares: false,
            ttl: None,
            lease: None,
            within: None,
            label,
            numbered: false,
            rate: Some((starts.0, period.0)),
            burst: burst.map(|burst| burst.0),
            rate_only: true,
        };
        Semaphore::declared(py, self.shared.clone(), name, options)
    }

    /// Returns a fenced lock. All durations are in seconds.
    ///
    /// - `lease`: how long the holder may be silent before the lock expires (30 s). The client renews the lease in the background.
    /// - `ttl`: the longest time that the lock may be held. After that it is lost. By default there is no limit.
    /// - `label`: a text that a lookup shows beside the holder.
    /// - `within`: the longest wait of an acquire. After that it raises TimedOut. By default there is no limit.
    /// - `retry`: the delays between the attempts of a waiting acquire: by default from 0.1 s to 5 s.
    #[pyo3(signature = (key, *, lease=None, ttl=None, label=None, within=None, retry=None))]
    #[allow(clippy::too_many_arguments)]
    fn lock(
        &self,
        py: Python<'_>,
        key: String,
        lease: Option<Seconds>,
        ttl: Option<Seconds>,
        label: Option<String>,
        within: Option<Seconds>,
        retry: Option<RetryPolicy>,
    ) -> PyResult<Py<Lock>> {
        log::refresh(py);
        let (lease, ttl, within) = (given(lease), given(ttl), given(within));
        let options = LockOptions { lease, ttl, label, within, retry };
        Lock::declared(py, self.shared.clone(), key, options)
    }

    /// All locks of the store, by key and by lock id.
    #[getter]
    fn locks(&self) -> Locks {
        Locks::new(self.shared.clone())
    }

    /// Returns a pool of `capacity` leases. All durations are in seconds.
    ///
    /// - `lease`: how long an instance may be silent before its lease expires (30 s). Use the same value in all programs. The client
    ///   renews the lease in the background.
    /// - `ttl`: the longest time that a lease may be held. After that it is lost. By default there is no limit.
    /// - `within`: the longest wait of an acquire. After that it raises TimedOut. By default there is no limit.
    /// - `retry`: the delays between the attempts of a waiting acquire: by default from 0.1 s to 5 s.
    #[pyo3(signature = (name, capacity, *, lease=None, ttl=None, within=None, retry=None))]
    #[allow(clippy::too_many_arguments)]
    fn pool(
        &self,
        py: Python<'_>,
        name: String,
        capacity: Number<u32>,
        lease: Option<Seconds>,
        ttl: Option<Seconds>,
        within: Option<Seconds>,
        retry: Option<RetryPolicy>,
    ) -> PyResult<Pool> {
        log::refresh(py);
        let (lease, ttl, within) = (given(lease), given(ttl), given(within));
        let options = PoolOptions { capacity: capacity.0, lease, ttl, within, retry };
        Pool::declared(self.shared.clone(), name, options)
    }

    /// Returns the pools that have members, sorted by name; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn pools(&self, #[pyo3(from_py_with = whole)] limit: usize) -> Pending {
        self.shared.operation("Client.pools", move |engine| async move {
            let pools = engine.pools().list(limit).await?;
            Ok(Value::made(move |py| values::pools(py, &pools)))
        })
    }

    /// Returns the limits, holders and waiters of semaphores, the most used name first.
    ///
    /// - `names`: the semaphores. Without it, all are returned.
    /// - `limit`: the largest number of semaphores that are returned.
    /// - `unused`: whether to include names without holders and waiters.
    /// - `waiters`: how many waiters of each name are listed.
    #[pyo3(signature = (names=None, *, limit=100, unused=false, waiters=0))]
    fn stats(
        &self,
        names: Option<Vec<String>>,
        #[pyo3(from_py_with = whole)] limit: usize,
        unused: bool,
        #[pyo3(from_py_with = whole)] waiters: usize,
    ) -> Pending {
        self.shared.operation("Client.stats", move |engine| async move {
            let mut query = engine.stats().limit(limit).waiters_in(0..waiters);
            if let Some(names) = names {
                query = query.names(names);
            }
            if unused {
                query = query.unused();
            }
            let stats = query.await?;
            Ok(Value::made(move |py| values::all_stats(py, &stats)))
        })
    }

    /// Returns the clients of the store, sorted by id; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn clients(&self, #[pyo3(from_py_with = whole)] limit: usize) -> Pending {
        self.shared.operation("Client.clients", move |engine| async move {
            let clients = engine.clients(limit).await?;
            Ok(Value::made(move |py| values::clients(py, &clients)))
        })
    }

    /// Returns the current outage of the store; None if the store can be reached, or is not open yet.
    fn outage(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let engine = self.shared.now()?;
        engine
            .and_then(|engine| engine.outage())
            .map(|outage| values::outage(py, &outage))
            .transpose()
    }

    /// Closes the client, and returns when the store has released its permits, locks and pool leases. Waiting acquires raise Closed.
    ///
    /// What was detached, and what `Locks.try_acquire` acquired, stays held until it expires.
    fn close(&self) -> Pending {
        let shared = self.shared.clone();
        Pending::of("Client.close", async move {
            if let Some(engine) = shared.begin_close() {
                engine.close().await?;
            }
            Ok(Value::None)
        })
    }

    fn __aenter__(slf: Bound<'_, Self>) -> Pending {
        Self::open(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __aexit__(&self, _exception: Bound<'_, PyAny>) -> Pending {
        self.close()
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Option<Py<PyAny>>> {
        let py = slf.py();
        Self::open(slf).block(py)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, PyAny>) -> PyResult<()> {
        self.close().block(py).map(drop)
    }

    fn __repr__(&self) -> String {
        format!("<leasehold.Client {}>", self.url())
    }
}
