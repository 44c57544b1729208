//! Who is measured, and how each of them is started.

use std::path::{Path, PathBuf};
use std::process::Command;

/// One of those who are measured on Redis. Each is a process of its own that speaks the line protocol of
/// `peers/PROTOCOL.md`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    runtime: Runtime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    Rust,
    Node,
    Python,
}

const fn rust(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Rust }
}

const fn node(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Node }
}

const fn python(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Python }
}

pub(crate) const SEMAPHORE: Contender = rust("leasehold");
pub(crate) const LOCK: Contender = rust("leasehold lock");
pub(crate) const MEMORY: Contender = rust("leasehold in memory");
pub(crate) const TOKIO: Contender = rust("tokio");
/// Tasks that wait for nothing.
pub(crate) const IDLE: Contender = rust("an idle task");
pub(crate) const EVALSHA: Contender = rust("EVALSHA");
pub(crate) const RSLOCK: Contender = rust("rslock");
pub(crate) const REDIS_SEMAPHORE: Contender = node("redis-semaphore");
pub(crate) const REDIS_MUTEX: Contender = node("redis-semaphore mutex");
pub(crate) const REDLOCK: Contender = node("redlock");
pub(crate) const REDIS_PY: Contender = python("redis-py");
pub(crate) const PYTHON_REDIS_LOCK: Contender = python("python-redis-lock");
pub(crate) const POTTERY: Contender = python("pottery");

/// What stands for `PING` in the tables; the bench sends it itself.
pub(crate) const PING: &str = "PING";

/// Everyone who can wait for a permit of a semaphore of one, or for a lock, which is the same to them.
pub(crate) const WAITING: &[&Contender] = &[
    &SEMAPHORE,
    &LOCK,
    &RSLOCK,
    &REDIS_SEMAPHORE,
    &REDLOCK,
    &REDIS_PY,
    &PYTHON_REDIS_LOCK,
    &POTTERY,
];

/// Whether a row of a table is about us.
pub(crate) fn is_ours(name: &str) -> bool {
    name.starts_with("leasehold")
}

/// Whether a row is a physical limit, which nobody can pass.
pub(crate) fn is_limit(name: &str) -> bool {
    name.starts_with("EVALSHA") || name.starts_with(PING) || name.starts_with("redis-benchmark")
}

/// A name for a table, with the language where it is not ours.
pub(crate) fn label(name: &str) -> String {
    match name {
        "rslock" => format!("{name} (Rust)"),
        "redis-semaphore" | "redis-semaphore mutex" | "redlock" => format!("{name} (Node)"),
        "redis-py" | "python-redis-lock" | "pottery" => format!("{name} (Python)"),
        _ => name.to_owned(),
    }
}

impl Contender {
    /// Whether its processes meet anywhere.
    pub(crate) fn is_on_redis(&self) -> bool {
        ![MEMORY, TOKIO, IDLE].contains(self)
    }

    /// Whether its driver can wait with nothing in the task but the waiting.
    pub(crate) fn is_bare(&self) -> bool {
        self.runtime == Runtime::Rust
    }

    /// What its process has to do before its speed is measured. Node compiles what has run about two thousand times, and
    /// takes five times as long until then.
    pub(crate) fn warm_up(&self, name: &str) -> Option<String> {
        (self.runtime == Runtime::Node).then(|| format!("repeat {name} 2000"))
    }

    /// The command that starts its driver on this server.
    pub(crate) fn driver(&self, url: &str) -> Result<Command, String> {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (program, script): (PathBuf, Option<PathBuf>) = match self.runtime {
            Runtime::Rust => {
                (std::env::current_exe().map_err(|why| why.to_string())?, Some("driver".into()))
            }
            Runtime::Python => {
                let python = bench.join(".venv/bin/python");
                if !python.exists() {
                    return Err("not installed: bench/run does that".to_owned());
                }
                (python, Some(bench.join("peers/python/driver.py")))
            }
            Runtime::Node => {
                if !bench.join("node_modules").exists() {
                    return Err("not installed: bench/run does that".to_owned());
                }
                ("node".into(), Some(bench.join("peers/node/driver.mjs")))
            }
        };
        let mut command = Command::new(program);
        command.args(script).args([self.name, url]);
        Ok(command)
    }
}
