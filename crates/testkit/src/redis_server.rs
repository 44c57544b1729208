//! A real Redis server for one test.
//!
//! The environment variable `LEASEHOLD_TEST_REDIS_SERVER` names the server program; the default is `redis-server`.
//!
//! Nothing here sleeps. A server is ready when its log says so and it then answers `PING`. It is
//! paused when the kernel reports it as stopped. It has ended when its output is closed. Each of
//! these waits has a deadline and panics when it is exceeded.
//!
//! # Ports
//!
//! A restarted server must get its port back while clients reconnect constantly. Ports are
//! therefore chosen below the kernel's ephemeral range: otherwise a reconnecting client may get
//! that port as its own source port, and TCP then connects that client to itself. A fixture claims
//! its port, also against other processes, by holding the UDP port of the same number.
//!
//! # How the fixture inspects a server
//!
//! The fixture connects through a Unix socket as its own ACL user. So it works with whatever
//! passwords, users or TLS the test asked for, and its own traffic is subtracted from every count.

mod inspect;
mod launch;
mod process;
#[cfg(test)]
mod tests;
mod tls;

use std::fs;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::Value;
use tempfile::TempDir;

use inspect::Inspector;
pub use inspect::expires_at;
pub(crate) use launch::Kind;
use launch::{ATTEMPTS, PORTS, claim_port};
use process::{Process, ProcessState, SpawnError};
pub(crate) use tls::Certificate;

/// The ACL user of the fixture, and its password.
pub(crate) const FIXTURE: &str = "fixture";

/// A Redis server on loopback with its own directory. Dropping it stops the server and removes the directory.
#[derive(Debug)]
pub struct RedisServer {
    // Before `dir`: the server must not write into a directory that is being removed.
    process: Mutex<Process>,
    dir: TempDir,
    port: u16,
    args: Vec<String>,
    ca_certificate: Option<String>,
    inspector: Mutex<Inspector>,
    /// The port of the cluster bus, and the socket that claims it.
    bus: Option<(u16, UdpSocket)>,
    _claim: UdpSocket,
}

impl RedisServer {
    /// Starts a server without persistence and returns when it answers.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or does not start.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with more options, one per element and each as in `redis.conf` with two
    /// dashes: `["--requirepass secret", "--user alice on >pw ~* +@all"]`. An element without
    /// spaces is passed on as it is; a value cannot contain spaces.
    ///
    /// The fixture adds an ACL user named `fixture`; Redis refuses that together with `--aclfile`.
    ///
    /// # Panics
    ///
    /// As [`start`](Self::start), and if the server refuses an option.
    #[must_use]
    pub fn start_with(args: &[&str]) -> Self {
        Self::launch(Kind::Plain, args, None)
    }

    /// Starts a server that speaks only TLS on its port, with certificates made for it.
    ///
    /// # Panics
    ///
    /// As [`start_with`](Self::start_with), and if the server was built without TLS.
    #[must_use]
    pub fn start_tls(args: &[&str]) -> Self {
        Self::launch(Kind::Plain, args, Some(&Certificate::make()))
    }

    /// Starts a server as `kind`, which speaks only TLS if there is a certificate.
    pub(crate) fn launch(kind: Kind, args: &[&str], certificate: Option<&Certificate>) -> Self {
        let dir = tempfile::Builder::new().prefix("leasehold-").tempdir().expect("a directory");
        for _ in 0..ATTEMPTS {
            let Some((port, claim)) = claim_port() else { continue };
            let mut bus = None;
            let mut line = launch::server_args(args, port, dir.path());
            line.extend(certificate.iter().flat_map(|made| made.args(port, dir.path())));
            if kind == Kind::ClusterNode {
                let Some(claimed) = claim_port() else { continue };
                line.extend(launch::cluster_args(claimed.0));
                bus = Some(claimed);
            }
            let line = launch::command_line(kind, line, dir.path());
            match Process::spawn(&line, dir.path()) {
                Ok(process) => {
                    let server = Self {
                        process: Mutex::new(process),
                        dir,
                        port,
                        args: line,
                        ca_certificate: certificate.map(|made| made.authority.clone()),
                        inspector: Mutex::default(),
                        bus,
                        _claim: claim,
                    };
                    server.ping();
                    return server;
                }
                Err(SpawnError::PortTaken) => {}
                Err(SpawnError::Failed(why)) => panic!("{why}"),
            }
        }
        panic!("no free port in {PORTS:?} after {ATTEMPTS} attempts")
    }

    /// The TCP port, which a restart does not change.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port of the cluster bus of a cluster node.
    pub(crate) fn bus_port(&self) -> u16 {
        self.bus.as_ref().expect("a node of a cluster").0
    }

    /// The process id of the running server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        lock(&self.process).pid()
    }

    /// The URL without credentials; `rediss:` for a server of [`start_tls`](Self::start_tls).
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme(), self.port)
    }

    /// The URL with credentials; an empty user means the default user.
    #[must_use]
    pub fn url_with(&self, user: &str, password: &str) -> String {
        let (user, password) = (escape(user), escape(password));
        format!("{}://{user}:{password}@127.0.0.1:{}", self.scheme(), self.port)
    }

    /// The URL of the Unix socket on which the server also listens.
    #[must_use]
    pub fn unix_url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// The authority, as PEM, that a client of [`start_tls`](Self::start_tls) has to trust.
    #[must_use]
    pub fn ca_certificate(&self) -> Option<&str> {
        self.ca_certificate.as_deref()
    }

    /// Kills the server with SIGKILL. [`crash`](Self::crash) starts it again.
    pub fn kill(&self) {
        lock(&self.process).kill_for_now(self.dir.path());
    }

    /// Whether the server runs: it is neither paused nor killed.
    #[must_use]
    pub fn is_running(&self) -> bool {
        lock(&self.process).state() == ProcessState::Running
    }

    /// Kills the server with SIGKILL and starts it on its port with no data.
    ///
    /// # Panics
    ///
    /// If it does not start again.
    pub fn restart_empty(&self) {
        let mut process = lock(&self.process);
        process.kill();
        // The certificates are kept: they are not data.
        for data in ["dump.rdb", "appendonly.aof"] {
            let _ = fs::remove_file(self.dir.path().join(data));
        }
        let _ = fs::remove_dir_all(self.dir.path().join("appendonlydir"));
        self.respawn(process);
    }

    /// Kills the server with SIGKILL and starts it on its port with the data on disk: everything it
    /// had acknowledged if it was started with `--appendonly yes`, and nothing otherwise.
    ///
    /// # Panics
    ///
    /// If it does not start again.
    pub fn crash(&self) {
        let mut process = lock(&self.process);
        process.kill();
        self.respawn(process);
    }

    /// Shuts the server down after saving its data, and starts it on its port with that data.
    ///
    /// # Panics
    ///
    /// If it is paused, does not end, or does not start again.
    pub fn restart(&self) {
        let mut process = lock(&self.process);
        let mut connection = self.connection();
        let reply: redis::RedisResult<Value> =
            redis::cmd("SHUTDOWN").arg("SAVE").query(&mut connection);
        // A server that obeys closes the connection instead of answering.
        if let Err(error) = &reply {
            assert!(error.is_io_error(), "SHUTDOWN SAVE was refused: {error}");
        }
        process.wait_ended();
        self.respawn(process);
    }

    fn respawn(&self, mut process: MutexGuard<'_, Process>) {
        *process = match Process::spawn(&self.args, self.dir.path()) {
            Ok(process) => process,
            Err(SpawnError::PortTaken) => panic!("port {} was taken during a restart", self.port),
            Err(SpawnError::Failed(why)) => panic!("{why}"),
        };
        drop(process);
        *lock(&self.inspector) = Inspector::default();
        self.ping();
    }

    /// Stops the server with SIGSTOP: connections stay open, nothing is answered.
    ///
    /// # Panics
    ///
    /// If the server has ended.
    pub fn pause(&self) {
        lock(&self.process).stop();
    }

    /// Continues a paused server.
    ///
    /// # Panics
    ///
    /// If the server has ended.
    pub fn resume(&self) {
        lock(&self.process).proceed();
    }

    fn scheme(&self) -> &'static str {
        if self.ca_certificate.is_some() { "rediss" } else { "redis" }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }
}

/// Locks a mutex even after a test panicked while it held it. The fixture must at least be droppable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Percent-encodes the characters that would end the user or the password in a URL.
pub(crate) fn escape(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") })
        .collect()
}
