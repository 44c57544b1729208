//! A client, which opens its store when it is first used, and again in a forked child.

use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use leasehold::{Client as Engine, Error};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::failure::Failure;
use crate::lock::{DeclaredLock, Lock, LockOptions, Locks, Retrying};
use crate::pending::{Pending, Value};
use crate::pool::{DeclaredPool, Pool, PoolOptions};
use crate::process::{self, PerProcess, generation};
use crate::seconds::{Seconds, given};
use crate::semaphore::{Declared, Semaphore, SemaphoreOptions};
use crate::wake::lock;
use crate::{log, values};

const EXPECTED: &str = "expected memory:, sqlite:/path/to/a/file, redis://host:port, redis-sentinel://host:port/name or \
                        redis-cluster://host:port";

/// The schemes of Redis. What follows is read when the store is opened.
const REDIS: [&str; 10] = [
    "redis",
    "rediss",
    "unix",
    "valkey",
    "valkeys",
    "redis+unix",
    "redis-sentinel",
    "rediss-sentinel",
    "redis-cluster",
    "rediss-cluster",
];

/// How a client was declared.
struct Settings {
    url: String,
    store: Store,
    namespace: Option<String>,
    lock_prefix: Option<String>,
    ca_certificate: Option<Vec<u8>>,
    connect_timeout: Option<Duration>,
    answer_timeout: Option<Duration>,
    confirm_within: Option<Duration>,
    read_only: bool,
}

enum Store {
    Memory,
    File(PathBuf),
    Redis,
}

/// What all objects of one client share.
pub(crate) struct Shared {
    settings: Settings,
    state: Mutex<State>,
}

struct State {
    /// The process that the rest is about.
    generation: u32,
    phase: Phase,
    closed: bool,
    /// Counts the attempts to open the store.
    attempt: u64,
    /// The last attempt that failed, for those who waited for it.
    failed: Option<(u64, Failure)>,
    waiting: PerProcess<Vec<Waker>>,
}

enum Phase {
    Unopened,
    /// Somebody opens it.
    Opening,
    Open(PerProcess<Engine>, Option<RawFd>),
    Closed,
}

/// The clients of this process. Only used with the GIL held, and so never locked while the process is forked.
static CLIENTS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

impl Shared {
    fn new(settings: Settings) -> Arc<Self> {
        let state = State {
            generation: generation(),
            phase: Phase::Unopened,
            closed: false,
            attempt: 0,
            failed: None,
            waiting: PerProcess::new(Vec::new()),
        };
        let shared = Arc::new(Self { settings, state: Mutex::new(state) });
        let mut clients = lock(&CLIENTS);
        clients.retain(|client| client.strong_count() > 0);
        clients.push(Arc::downgrade(&shared));
        shared
    }

    pub(crate) fn is_memory(&self) -> bool {
        matches!(self.settings.store, Store::Memory)
    }

    /// Only with the GIL held, and so never locked while the process is forked.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        if state.generation != generation() {
            state.generation = generation();
            state.phase = if state.closed { Phase::Closed } else { Phase::Unopened };
            state.failed = None;
            state.waiting = PerProcess::new(Vec::new());
        }
        state
    }

    /// The engine, if it is open or can be opened without waiting.
    pub(crate) fn now(&self) -> Result<Option<Engine>, Failure> {
        let mut state = self.state();
        match &state.phase {
            Phase::Open(engine, _) => Ok(engine.get().cloned()),
            Phase::Closed => Err(Error::Closed.into()),
            Phase::Unopened if self.is_memory() => {
                let engine = Engine::memory();
                state.phase = Phase::Open(PerProcess::new(engine.clone()), None);
                Ok(Some(engine))
            }
            Phase::Unopened | Phase::Opening => Ok(None),
        }
    }

    /// The engine. Opens the store if nobody has. If somebody opens it already, waits for that, and shares its failure.
    pub(crate) async fn opened(self: &Arc<Self>) -> Result<Engine, Failure> {
        let mut awaited = None;
        loop {
            match self.next(awaited)? {
                Next::Open(engine) => return Ok(engine),
                Next::Run(opening) => {
                    let opened = self.open().await;
                    return opening.settle(opened);
                }
                Next::Wait(attempt) => {
                    awaited = Some(attempt);
                    std::future::poll_fn(|cx| self.poll_attempt(attempt, cx.waker())).await;
                }
            }
        }
    }

    /// What somebody who needs the engine does next; `awaited` is the attempt that it has waited for.
    fn next(self: &Arc<Self>, awaited: Option<u64>) -> Result<Next, Failure> {
        if let Some(engine) = self.now()? {
            return Ok(Next::Open(engine));
        }
        let mut state = self.state();
        if let (Some(awaited), Some((attempt, failure))) = (awaited, &state.failed)
            && awaited == *attempt
        {
            return Err(failure.clone());
        }
        if matches!(state.phase, Phase::Opening) {
            return Ok(Next::Wait(state.attempt));
        }
        state.phase = Phase::Opening;
        state.attempt += 1;
        Ok(Next::Run(Opening { shared: self.clone(), attempt: state.attempt, settled: false }))
    }

    /// Ready when the attempt has ended.
    fn poll_attempt(&self, attempt: u64, waker: &Waker) -> Poll<()> {
        let mut state = self.state();
        if state.attempt == attempt && matches!(state.phase, Phase::Opening) {
            if let Some(waiting) = state.waiting.get_mut() {
                waiting.push(waker.clone());
            }
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    async fn open(&self) -> Result<Engine, Failure> {
        let settings = &self.settings;
        Ok(match &settings.store {
            Store::Memory => Engine::memory(),
            Store::File(path) => {
                process::open_file()?;
                let mut builder = Engine::local_builder(path);
                if let Some(timeout) = settings.answer_timeout {
                    builder = builder.answer_timeout(timeout);
                }
                if let Some(limit) = settings.confirm_within {
                    builder = builder.confirm_within(limit);
                }
                builder.open().await?
            }
            Store::Redis => {
                let mut builder = Engine::redis_builder(&settings.url);
                if let Some(namespace) = &settings.namespace {
                    builder = builder.namespace(namespace);
                }
                if let Some(prefix) = &settings.lock_prefix {
                    builder = builder.lock_prefix(prefix);
                }
                if let Some(pem) = &settings.ca_certificate {
                    builder = builder.ca_certificate(pem.clone());
                }
                if let Some(timeout) = settings.connect_timeout {
                    builder = builder.connect_timeout(timeout);
                }
                if let Some(timeout) = settings.answer_timeout {
                    builder = builder.answer_timeout(timeout);
                }
                if let Some(limit) = settings.confirm_within {
                    builder = builder.confirm_within(limit);
                }
                if settings.read_only {
                    builder = builder.read_only();
                }
                builder.open().await?
            }
        })
    }

    /// Nothing can be begun any more. The engine that has to be closed, if there is one.
    fn begin_close(&self) -> Option<Engine> {
        let mut state = self.state();
        state.closed = true;
        let engine = match std::mem::replace(&mut state.phase, Phase::Closed) {
            Phase::Open(engine, fd) => {
                let open = engine.get().cloned();
                // Kept, so that the descriptor stays known until the engine is gone.
                state.phase = Phase::Open(engine, fd);
                open
            }
            Phase::Unopened | Phase::Opening | Phase::Closed => None,
        };
        let waiting = state.waiting.get_mut().map(std::mem::take).unwrap_or_default();
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        engine
    }
}

/// What somebody who needs the engine does next.
enum Next {
    Open(Engine),
    /// It opens the store.
    Run(Opening),
    /// It waits for the attempt that somebody else makes.
    Wait(u64),
}

/// An attempt to open the store. If it is dropped, somebody else makes the next one.
struct Opening {
    shared: Arc<Shared>,
    attempt: u64,
    settled: bool,
}

impl Opening {
    fn settle(mut self, opened: Result<Engine, Failure>) -> Result<Engine, Failure> {
        self.settled = true;
        let mut state = self.shared.state();
        if let Phase::Closed = state.phase {
            drop(state);
            // The engine is dropped here, and ends.
            return Err(Error::Closed.into());
        }
        match &opened {
            Ok(engine) => {
                let fd = engine.lifeline().map(|lifeline| lifeline.as_raw_fd());
                state.phase = Phase::Open(PerProcess::new(engine.clone()), fd);
            }
            Err(failure) => {
                state.phase = Phase::Unopened;
                state.failed = Some((self.attempt, failure.clone()));
            }
        }
        let waiting = state.waiting.get_mut().map(std::mem::take).unwrap_or_default();
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        opened
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let mut state = self.shared.state();
        if state.attempt == self.attempt && matches!(state.phase, Phase::Opening) {
            state.phase = Phase::Unopened;
        }
        let waiting = state.waiting.get_mut().map(std::mem::take).unwrap_or_default();
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// In a forked child: the descriptors by which the parent's clients count as alive. The child must close them, or else the parent's
/// permits stay held for as long as the child lives.
pub(crate) fn inherited_lifelines() -> Vec<RawFd> {
    let clients = std::mem::take(&mut *lock(&CLIENTS));
    let lifeline = |shared: &Arc<Shared>| match &lock(&shared.state).phase {
        Phase::Open(_, fd) => *fd,
        _ => None,
    };
    let lifelines =
        clients.iter().filter_map(Weak::upgrade).filter_map(|shared| lifeline(&shared)).collect();
    *lock(&CLIENTS) = clients;
    lifelines
}

/// Closes all clients of this process, for no longer than this.
pub(crate) fn close_all(py: Python<'_>, limit: Duration) {
    let clients = lock(&CLIENTS).clone();
    let engines: Vec<_> = clients
        .iter()
        .filter_map(Weak::upgrade)
        .filter_map(|shared| shared.begin_close())
        .collect();
    if engines.is_empty() {
        return;
    }
    let until = Instant::now() + limit;
    py.detach(|| {
        let parked = crate::wake::Parked::new();
        let waker = parked.clone().into();
        let mut cx = std::task::Context::from_waker(&waker);
        let mut closing: Vec<_> = engines
            .into_iter()
            .map(|engine| Box::pin(async move { engine.close().await }))
            .collect();
        loop {
            closing.retain_mut(|close| close.as_mut().poll(&mut cx).is_pending());
            let left = until.saturating_duration_since(Instant::now());
            if closing.is_empty() || left.is_zero() {
                return;
            }
            if !parked.take() {
                std::thread::park_timeout(left);
            }
        }
    });
}

/// A client of a store: `memory:`, `sqlite:PATH`, `redis://…`, `rediss://…`, `unix://…`, `redis-sentinel://…` or `redis-cluster://…`.
///
/// Without a URL it is `$LEASEHOLD_STORE`, or else `memory:`. Nothing is connected before the first operation. Use it from any
/// number of threads and event loops. After a fork, the child opens the store again when it first uses the client.
#[pyclass(frozen, weakref, module = "leasehold")]
pub(crate) struct Client {
    shared: Arc<Shared>,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (
        url=None, *, namespace=None, lock_prefix=None, ca_certificate=None, connect_timeout=None, answer_timeout=None,
        confirm_within=None, read_only=false
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
        confirm_within: Option<Seconds>,
        read_only: bool,
    ) -> PyResult<Self> {
        let url = match url {
            Some(url) => url,
            None => from_environment()?,
        };
        let settings = Settings {
            store: store_of(&url)?,
            url,
            namespace,
            lock_prefix,
            ca_certificate: ca_certificate.map(|given| certificate(&given)).transpose()?,
            connect_timeout: given(connect_timeout),
            answer_timeout: given(answer_timeout),
            confirm_within: given(confirm_within),
            read_only,
        };
        settings.check()?;
        log::refresh(py);
        Ok(Self { shared: Shared::new(settings) })
    }

    /// A client whose permits are shared by the tasks and threads that use this object. Another one shares nothing with it.
    #[staticmethod]
    fn memory(py: Python<'_>) -> PyResult<Self> {
        Self::new(py, Some("memory:".to_owned()), None, None, None, None, None, None, false)
    }

    /// Opens the store now, so that a store that cannot be reached is noticed early. Returns this client.
    fn open(slf: Bound<'_, Self>) -> Pending {
        let (shared, this) = (slf.get().shared.clone(), slf.unbind());
        Pending::of("Client.open", async move {
            shared.opened().await?;
            Ok(Value::made(move |_| Ok(this.into_any())))
        })
    }

    /// The client id, with which the ids of its permits begin; None while the store is not open.
    #[getter]
    fn id(&self) -> Option<String> {
        let engine = self.shared.now().ok().flatten()?;
        Some(engine.id().to_string())
    }

    /// The URL of the store, without passwords.
    #[getter]
    fn url(&self) -> String {
        masked(&self.shared.settings.url)
    }

    /// Declares a fair semaphore: see the class `Semaphore`.
    #[pyo3(signature = (
        name, capacity=None, *, ttl=None, lease=None, max_acquire_time=None, label=None, numbered=false, rate=None, burst=None,
        unless_declared=false
    ))]
    #[allow(clippy::too_many_arguments)]
    fn semaphore(
        &self,
        py: Python<'_>,
        name: String,
        capacity: Option<u32>,
        ttl: Option<Seconds>,
        lease: Option<Seconds>,
        max_acquire_time: Option<Seconds>,
        label: Option<String>,
        numbered: bool,
        rate: Option<(u64, Seconds)>,
        burst: Option<u32>,
        unless_declared: bool,
    ) -> PyResult<Semaphore> {
        let options = SemaphoreOptions {
            capacity: capacity.unwrap_or(1),
            declares: capacity.is_some() && !unless_declared,
            ttl: given(ttl),
            lease: given(lease),
            max_acquire_time: given(max_acquire_time),
            label,
            numbered,
            rate: rate.map(|(starts, period)| (starts, period.0)),
            burst,
        };
        log::refresh(py);
        Ok(Semaphore::new(Declared::new(self.shared.clone(), name, options)?))
    }

    /// Declares a rate without a limit of how many hold a permit at once: `starts` in any `period` of so many seconds.
    #[pyo3(signature = (name, starts, period, *, burst=None, label=None))]
    fn rate(
        &self,
        py: Python<'_>,
        name: String,
        starts: u64,
        period: Seconds,
        burst: Option<u32>,
        label: Option<String>,
    ) -> PyResult<Semaphore> {
        let rate = Some((starts, period));
        self.semaphore(py, name, Some(u32::MAX), None, None, None, label, false, rate, burst, true)
    }

    /// Declares a fenced lock: see the class `Lock`.
    #[pyo3(signature = (key, *, lease=None, auto_extend=true, label=None, within=None, retry=None))]
    #[allow(clippy::too_many_arguments)]
    fn lock(
        &self,
        py: Python<'_>,
        key: String,
        lease: Option<Seconds>,
        auto_extend: bool,
        label: Option<String>,
        within: Option<Seconds>,
        retry: Option<Retrying>,
    ) -> PyResult<Lock> {
        log::refresh(py);
        let options =
            LockOptions { lease: given(lease), auto_extend, label, within: given(within), retry };
        Ok(Lock::new(DeclaredLock::new(self.shared.clone(), key, options)?))
    }

    /// All locks of the store, by key and by lock id.
    #[getter]
    fn locks(&self) -> Locks {
        Locks::new(self.shared.clone())
    }

    /// Declares a pool of leases: see the class `Pool`.
    #[pyo3(signature = (name, capacity, *, lease=None, within=None, retry=None))]
    fn pool(
        &self,
        py: Python<'_>,
        name: String,
        capacity: u32,
        lease: Option<Seconds>,
        within: Option<Seconds>,
        retry: Option<Retrying>,
    ) -> PyResult<Pool> {
        log::refresh(py);
        let options = PoolOptions { capacity, lease: given(lease), within: given(within), retry };
        Ok(Pool::new(DeclaredPool::new(self.shared.clone(), name, options)?))
    }

    /// The pools that have members, by name; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn pools(&self, limit: usize) -> Pending {
        let shared = self.shared.clone();
        Pending::of("Client.pools", async move {
            let pools = shared.opened().await?.pools().list(limit).await?;
            Ok(Value::made(move |py| values::pools(py, &pools)))
        })
    }

    /// What is held and who waits, the most used name first.
    #[pyo3(signature = (names=None, *, limit=100, unused=false, waiters=0))]
    fn stats(
        &self,
        names: Option<Vec<String>>,
        limit: usize,
        unused: bool,
        waiters: usize,
    ) -> Pending {
        let shared = self.shared.clone();
        Pending::of("Client.stats", async move {
            let mut query = shared.opened().await?.stats().limit(limit).waiters_in(0..waiters);
            if let Some(names) = names {
                query = query.names(names);
            }
            if unused {
                query = query.unused();
            }
            let stats = query.fetch().await?;
            Ok(Value::made(move |py| values::all_stats(py, &stats)))
        })
    }

    /// The clients that use the store, by id; at most `limit`.
    #[pyo3(signature = (limit=100))]
    fn clients(&self, limit: usize) -> Pending {
        let shared = self.shared.clone();
        Pending::of("Client.clients", async move {
            let clients = shared.opened().await?.clients(limit).await?;
            Ok(Value::made(move |py| values::clients(py, &clients)))
        })
    }

    /// The outage of the store, if it cannot be reached now; None otherwise, and while the store is not open.
    fn outage(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let engine = self.shared.now()?;
        engine
            .and_then(|engine| engine.outage())
            .map(|outage| values::outage(py, &outage))
            .transpose()
    }

    /// Ends the client: those who wait get Closed, and what is held is released. Resolves when the store has done so.
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

fn from_environment() -> Result<String, Failure> {
    match std::env::var("LEASEHOLD_STORE") {
        Ok(url) if !url.is_empty() => Ok(url),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(Failure::Invalid("invalid store: $LEASEHOLD_STORE is not UTF-8".to_owned()))
        }
        _ => Ok("memory:".to_owned()),
    }
}

/// Which store a URL names. Only its scheme is repeated in an error: the rest may contain a password.
fn store_of(url: &str) -> Result<Store, Failure> {
    let invalid = |problem: String| Err(Failure::Invalid(format!("invalid store: {problem}")));
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Store::Memory),
        Some(("memory", _)) => {
            invalid("memory: has no path: every client has a store of its own".to_owned())
        }
        Some(("sqlite", rest)) => {
            let expected =
                "expected sqlite:/path/to/a/file, or sqlite:file for one in this directory";
            let path = match rest.strip_prefix("//") {
                Some(path) if path.starts_with('/') => path,
                Some(_) => {
                    return invalid(format!(
                        "sqlite:// names a host, but the file must be on this one: {expected}"
                    ));
                }
                None => rest,
            };
            match path {
                "" => invalid(format!("it has no path: {expected}")),
                ":memory:" => invalid("for a store in memory, use memory:".to_owned()),
                path => Ok(Store::File(path.into())),
            }
        }
        Some((scheme, _)) if REDIS.contains(&scheme) => Ok(Store::Redis),
        Some((scheme, _)) => {
            invalid(format!("this build supports no store \"{scheme}:\": {EXPECTED}"))
        }
        None => invalid(format!("it is not a URL: {EXPECTED}")),
    }
}

impl Settings {
    /// Settings that the store does not have are refused, instead of being ignored.
    fn check(&self) -> Result<(), Failure> {
        let (redis, remote) = match self.store {
            Store::Redis => (true, true),
            Store::File(_) => (false, true),
            Store::Memory => (false, false),
        };
        let settings = [
            ("namespace", self.namespace.is_some(), redis),
            ("lock_prefix", self.lock_prefix.is_some(), redis),
            ("ca_certificate", self.ca_certificate.is_some(), redis),
            ("connect_timeout", self.connect_timeout.is_some(), redis),
            ("read_only", self.read_only, redis),
            ("answer_timeout", self.answer_timeout.is_some(), remote),
            ("confirm_within", self.confirm_within.is_some(), remote),
        ];
        for (name, given, known) in settings {
            if given && !known {
                let url = masked(&self.url);
                return Err(Failure::Invalid(format!(
                    "invalid {name}: the store {url} has no such setting"
                )));
            }
        }
        let durations = [
            ("connect_timeout", self.connect_timeout),
            ("answer_timeout", self.answer_timeout),
            ("confirm_within", self.confirm_within),
        ];
        for (name, duration) in durations {
            if duration.is_some_and(|duration| duration.is_zero()) {
                return Err(Failure::Invalid(format!("invalid {name}: 0 seconds are not enough")));
            }
        }
        Ok(())
    }
}

/// PEM as bytes, as text, or in a file.
fn certificate(given: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(bytes) = given.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    if let Ok(text) = given.cast::<PyString>() {
        let text = text.to_string();
        if text.contains("-----BEGIN") {
            return Ok(text.into_bytes());
        }
    }
    let path: PathBuf = given.extract()?;
    Ok(std::fs::read(path)?)
}

/// The URL without its passwords.
fn masked(url: &str) -> String {
    let (base, query) = match url.split_once('?') {
        Some((base, query)) => (base, Some(query)),
        None => (url, None),
    };
    // A password may contain an @, as it should not.
    let base = match (base.split_once("://"), base.rfind('@')) {
        (Some((scheme, rest)), Some(at)) if at >= scheme.len() + 3 => {
            let (access, host) = rest.split_at(at - scheme.len() - 3);
            match access.split_once(':') {
                Some((user, _)) => format!("{scheme}://{user}:***{host}"),
                None => base.to_owned(),
            }
        }
        _ => base.to_owned(),
    };
    let Some(query) = query else { return base };
    let hide = |pair: &str| match pair.split_once('=') {
        Some((key, _)) if key.contains("pass") => format!("{key}=***"),
        _ => pair.to_owned(),
    };
    let query: Vec<_> = query.split('&').map(hide).collect();
    format!("{base}?{}", query.join("&"))
}
