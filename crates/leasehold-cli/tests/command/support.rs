//! Starts the command, and waits for what it does.

use std::ffi::OsStr;
use std::io::Read;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use tempfile::TempDir;
use testkit::redis_server::RedisServer;

/// How long anything may take before a test fails. Far more than it should take.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(60);
pub(crate) const PAUSE: Duration = Duration::from_millis(5);

/// The time in microseconds, on a clock that all processes of this host share.
pub(crate) fn now() -> i64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
}

/// Polls `condition` until it returns true.
#[track_caller]
pub(crate) fn until(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < TIME_LIMIT, "the condition did not hold within {TIME_LIMIT:?}");
        std::thread::sleep(PAUSE);
    }
}

/// The command, without the environment variables that would change its behaviour.
pub(crate) fn leasehold(store: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    let ours = [
        "NAME",
        "ID",
        "OUTER_IDS",
        "VERBOSE",
        "NAMESPACE",
        "LOCK_PREFIX",
        "LOCK_LAYOUT",
        "CA_CERTIFICATE",
    ];
    for variable in ours {
        command.env_remove(format!("LEASEHOLD_{variable}"));
    }
    for variable in ["COLUMNS", "NO_COLOR", "RUST_BACKTRACE", "XDG_STATE_HOME"] {
        command.env_remove(variable);
    }
    command.env("LEASEHOLD_STORE", store).stdin(Stdio::null());
    command
}

/// A store that is removed when dropped.
#[derive(Debug)]
pub(crate) enum Store {
    Local(TempDir),
    Redis(Box<RedisServer>),
}

impl Store {
    pub(crate) fn local() -> Self {
        Self::Local(tempfile::tempdir().unwrap())
    }

    pub(crate) fn redis() -> Self {
        Self::Redis(Box::new(RedisServer::start()))
    }

    /// One of each.
    pub(crate) fn both() -> [Self; 2] {
        [Self::local(), Self::redis()]
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Self::Local(directory) => format!("sqlite:{}/store.db", directory.path().display()),
            Self::Redis(server) => server.url(),
        }
    }
}

/// The result of a command that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the command to its end.
pub(crate) fn run<S: AsRef<OsStr>>(store: &str, arguments: &[S]) -> Ended {
    ended(leasehold(store).args(arguments).output().unwrap())
}

pub(crate) fn ended(output: Output) -> Ended {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("the command was not killed");
    Ended { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// A running command. It is killed when dropped, and its guard cleans up.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    stdout: Captured,
    stderr: Captured,
    /// How much of the output was read.
    read: usize,
}

impl Running {
    pub(crate) fn start<S: AsRef<OsStr>>(store: &str, arguments: &[S]) -> Self {
        let mut command = leasehold(store);
        command.args(arguments);
        Self::of(command)
    }

    pub(crate) fn of(mut command: Command) -> Self {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = Captured::listen(child.stdout.take().unwrap());
        let stderr = Captured::listen(child.stderr.take().unwrap());
        Self { child, stdout, stderr, read: 0 }
    }

    pub(crate) fn input(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("a pipe")
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end. The output is what has not been read before.
    pub(crate) fn end(mut self) -> Ended {
        until(|| self.has_ended());
        let code = self.child.wait().unwrap().code().expect("the command was not killed");
        let stdout = self.stdout.all().split_off(self.read);
        Ended { code, stdout, stderr: self.stderr.all() }
    }

    /// Returns the next line of its output.
    pub(crate) fn line(&mut self) -> String {
        let mut line = None;
        until(|| {
            let rest = self.stdout.so_far().split_off(self.read);
            line = rest.split_once('\n').map(|(line, _)| line.to_owned());
            line.is_some()
        });
        let line = line.unwrap_or_default();
        self.read += line.len() + 1;
        line
    }

    /// Waits until its stderr contains `expected`.
    #[track_caller]
    pub(crate) fn says(&self, expected: &str) {
        until(|| self.stderr.so_far().contains(expected));
    }

    /// Returns the state of the process, as in `/proc/PID/stat`.
    pub(crate) fn state(&self) -> char {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", self.pid().as_raw_pid()));
        let status = status.unwrap();
        let (_, rest) = status.rsplit_once(") ").unwrap();
        rest.chars().next().unwrap()
    }

    /// Waits for the guard of its child, and returns its pid.
    pub(crate) fn guard(&self) -> Pid {
        let pid = self.pid().as_raw_pid();
        let mut guard = None;
        until(|| {
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            guard = children.unwrap().split_whitespace().next().map(|pid| pid.parse().unwrap());
            guard.is_some()
        });
        guard.and_then(Pid::from_raw).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What has arrived through a pipe or a terminal so far.
#[derive(Clone, Debug)]
pub(crate) struct Captured {
    bytes: Arc<Mutex<Vec<u8>>>,
    ended: Arc<AtomicBool>,
}

impl Captured {
    pub(crate) fn listen(mut from: impl Read + Send + 'static) -> Self {
        let output = Self { bytes: Arc::default(), ended: Arc::default() };
        let there = output.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut bytes) {
                there.bytes.lock().unwrap().extend_from_slice(&bytes[..read]);
            }
            there.ended.store(true, Ordering::Release);
        });
        output
    }

    pub(crate) fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }

    fn all(&self) -> String {
        until(|| self.ended.load(Ordering::Acquire));
        self.so_far()
    }
}

/// A client of the library that inspects a store while commands use it.
pub(crate) struct Inspector {
    runtime: tokio::runtime::Runtime,
    pub(crate) client: leasehold::Client,
}

impl Inspector {
    pub(crate) fn new(store: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(leasehold::Client::open(store)).unwrap();
        Self { runtime, client }
    }

    pub(crate) fn block_on<T>(&self, future: impl IntoFuture<Output = T>) -> T {
        let future = async { tokio::time::timeout(TIME_LIMIT, future.into_future()).await };
        self.runtime.block_on(future).expect("the call took too long")
    }

    /// Returns the number of holders and the number of waiters.
    pub(crate) fn held_and_waiting(&self, name: &str) -> (u32, usize) {
        let stats = self.block_on(self.client.stats().names([name])).unwrap();
        stats.first().map_or((0, 0), |one| (one.held, one.waiting))
    }

    /// Returns the statistics of a name that one client holds and another one waits for, once both are described.
    pub(crate) fn described(&self, name: &str) -> Option<leasehold::SemaphoreStats> {
        let stats = self.client.stats().names([name]).waiters();
        let stats = self.block_on(stats).unwrap().pop()?;
        let members = [&stats.holders[..], &stats.waiters[..]];
        let described =
            |members: &&[leasehold::SemaphoreMember]| members.iter().any(|one| one.pid.is_some());
        members.iter().all(described).then_some(stats)
    }

    pub(crate) fn holder(&self, name: &str) -> leasehold::SemaphoreMember {
        let stats = self.block_on(self.client.stats().names([name])).unwrap();
        stats[0].holders[0].clone()
    }

    /// Acquires the only permit of a name.
    pub(crate) fn hold(&self, name: &str) -> leasehold::Permit {
        let semaphore = self.client.semaphore(name, 1).label("nightly").build().unwrap();
        self.block_on(semaphore.acquire()).unwrap()
    }
}
