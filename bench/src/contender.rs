//! The contenders, and how each of them is started.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A contender that is measured on a server. Each is a separate process that speaks the line protocol of
/// `peers/PROTOCOL.md`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    runtime: Runtime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    Rust,
    /// The same program as `Rust`, built with the feature `metrics`.
    Metered,
    /// A program of its own, in `peers/etcd`.
    Etcd,
    Node,
    /// One thread a task.
    Python,
    /// One task of asyncio a task.
    Asyncio,
}

const fn rust(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Rust }
}

const fn metered(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Metered }
}

const fn etcd(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Etcd }
}

const fn node(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Node }
}

const fn python(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Python }
}

const fn asyncio(name: &'static str) -> Contender {
    Contender { name, runtime: Runtime::Asyncio }
}

pub(crate) const SEMAPHORE: Contender = rust("leasehold");
pub(crate) const LOCK: Contender = rust("leasehold lock");
pub(crate) const MEMORY: Contender = rust("leasehold in memory");
/// The suffixes of the names of contenders with the feature `metrics`: without a recorder, and with one.
pub(crate) const NO_RECORDER: &str = ", metrics on";
pub(crate) const EXPORTED: &str = ", metrics exported";
pub(crate) const SEMAPHORE_METERED: Contender = metered("leasehold, metrics on");
pub(crate) const SEMAPHORE_EXPORTED: Contender = metered("leasehold, metrics exported");
pub(crate) const MEMORY_METERED: Contender = metered("leasehold in memory, metrics on");
pub(crate) const MEMORY_EXPORTED: Contender = metered("leasehold in memory, metrics exported");
pub(crate) const TOKIO: Contender = rust("tokio");
/// Tasks that wait for nothing.
pub(crate) const IDLE: Contender = rust("an idle task");
pub(crate) const EVALSHA: Contender = rust("EVALSHA");
pub(crate) const RSLOCK: Contender = rust("rslock");
/// etcd's lock service, with its client in Rust.
pub(crate) const ETCD: Contender = etcd("etcd");
pub(crate) const REDIS_SEMAPHORE: Contender = node("redis-semaphore");
pub(crate) const REDIS_MUTEX: Contender = node("redis-semaphore mutex");
pub(crate) const REDLOCK: Contender = node("redlock");
pub(crate) const REDIS_PY: Contender = python("redis-py");
pub(crate) const PYTHON_REDIS_LOCK: Contender = python("python-redis-lock");
pub(crate) const POTTERY: Contender = python("pottery");
pub(crate) const FOR_PYTHON: Contender = asyncio("leasehold for Python");
pub(crate) const FOR_PYTHON_THREADS: Contender = python("leasehold for Python, threads");
pub(crate) const FOR_PYTHON_MEMORY: Contender = asyncio("leasehold for Python in memory");
pub(crate) const ADVANCED_SEMAPHORES: Contender = asyncio("asyncio-advanced-semaphores");
pub(crate) const ADVANCED_MEMORY: Contender = asyncio("asyncio-advanced-semaphores in memory");
pub(crate) const ASYNCIO: Contender = asyncio("asyncio.Semaphore");

/// The name of `PING` in the tables. The bench sends it itself.
pub(crate) const PING: &str = "PING";

/// Every contender on Redis that can wait for a lock, or for a permit of a semaphore of one, which is the same for this purpose.
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

/// Whether a row of a table is ours.
pub(crate) fn is_ours(name: &str) -> bool {
    name.starts_with("leasehold")
}

/// Whether a row is a physical limit, which no contender can pass.
pub(crate) fn is_limit(name: &str) -> bool {
    name.starts_with("EVALSHA") || name.starts_with(PING) || name.starts_with("redis-benchmark")
}

/// Returns the name for a table, with the language if it is not ours.
pub(crate) fn label(name: &str) -> String {
    match name {
        "rslock" | "etcd" => format!("{name} (Rust)"),
        "redis-semaphore" | "redis-semaphore mutex" | "redlock" => format!("{name} (Node)"),
        "redis-py"
        | "python-redis-lock"
        | "pottery"
        | "asyncio-advanced-semaphores"
        | "asyncio-advanced-semaphores in memory"
        | "asyncio.Semaphore" => {
            format!("{name} (Python)")
        }
        _ => name.to_owned(),
    }
}

impl Contender {
    /// Whether its processes meet in a store.
    pub(crate) fn is_on_redis(&self) -> bool {
        ![MEMORY, TOKIO, IDLE, FOR_PYTHON_MEMORY, ADVANCED_MEMORY, ASYNCIO].contains(self)
    }

    /// Whether its driver can wait with nothing else in the task.
    pub(crate) fn is_bare(&self) -> bool {
        matches!(self.runtime, Runtime::Rust | Runtime::Metered)
    }

    /// Returns the request that warms a process up before its speed is measured. Node compiles code that has run about
    /// two thousand times; before that it is five times as slow.
    pub(crate) fn warm_up(&self, name: &str) -> Option<String> {
        (self.runtime == Runtime::Node).then(|| format!("repeat {name} 2000"))
    }

    /// Returns the command that starts its driver on this server.
    pub(crate) fn driver(&self, url: &str) -> Result<Command, String> {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (program, script): (PathBuf, Option<PathBuf>) = match self.runtime {
            Runtime::Rust => {
                (std::env::current_exe().map_err(|why| why.to_string())?, Some("driver".into()))
            }
            Runtime::Metered => {
                // It is beside our own program, because the feature is decided when the program is built.
                let this_program = std::env::current_exe().map_err(|why| why.to_string())?;
                let program = this_program.with_file_name("metrics").join("release").join("bench");
                if !program.exists() {
                    return Err("not built: bench/run does that".to_owned());
                }
                (program, Some("driver".into()))
            }
            Runtime::Etcd => {
                let this_program = std::env::current_exe().map_err(|why| why.to_string())?;
                let program = this_program.with_file_name("etcd").join("release/etcd-driver");
                if !program.exists() {
                    return Err("not built: bench/run does that, if there is a `protoc`".to_owned());
                }
                (program, None)
            }
            Runtime::Python | Runtime::Asyncio => {
                let python = bench.join(".venv/bin/python");
                if !python.exists() {
                    return Err("not installed: bench/run does that".to_owned());
                }
                let script =
                    if self.runtime == Runtime::Asyncio { "tasks.py" } else { "driver.py" };
                (python, Some(bench.join("peers/python").join(script)))
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
