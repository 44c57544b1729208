//! The store under test, and the proxies in front of it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue};
use testkit::proxy::{Cut, FaultProxy};
use testkit::redis_server::RedisServer;

use super::cluster::Cluster;
use super::connections;
use super::sentinel::Sentinel;
use crate::store::Store;

pub(super) enum Stage {
    Redis(Box<Redis>),
    Cluster(Cluster),
    Sentinel(Sentinel),
    Local(Local),
}

/// Two servers, one of which is the replica of the other, and one proxy for each worker.
pub(super) struct Redis {
    servers: [RedisServer; 2],
    primary: AtomicUsize,
    pub(super) proxies: Vec<FaultProxy>,
}

/// A file that every process of this host opens by its name.
pub(super) struct Local {
    path: PathBuf,
}

impl Local {
    /// Opens the file once. If that fails, the run need not start.
    fn make(path: PathBuf) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let builder = leasehold::Client::local_builder(&path).create_directories();
        let open = async { builder.open().await.map(drop) };
        let opened = runtime.map_err(|error| error.to_string())?.block_on(open);
        opened.map_err(|error| error.to_string())?;
        Ok(Self { path })
    }

    /// Blocks all writes while `during` runs, like a disk that does not answer.
    pub(super) fn hold_up(&self, during: impl FnOnce()) -> std::io::Result<()> {
        let mut turn = self.path.clone().into_os_string();
        turn.push(".clients/turn");
        let turn = File::options().read(true).write(true).open(turn)?;
        turn.lock()?;
        during();
        turn.unlock()
    }
}

impl Stage {
    pub(super) fn set(
        store: &Store,
        seed: u64,
        workers: usize,
        dir: &Path,
    ) -> Result<Self, String> {
        match store {
            Store::Redis => Ok(Self::Redis(Box::new(Redis::start(workers)))),
            Store::Cluster => Ok(Self::Cluster(Cluster::start(seed))),
            Store::Sentinel => Ok(Self::Sentinel(Sentinel::start())),
            Store::Local(path) => {
                let path = path.clone().unwrap_or_else(|| dir.join("store.sqlite"));
                Local::make(path).map(Self::Local)
            }
        }
    }

    /// Whether the store is a file that all processes write to themselves.
    pub(super) fn is_local(&self) -> bool {
        matches!(self, Self::Local(_))
    }

    /// Whether the other program takes part. It can use a single server, but neither a cluster nor sentinels.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Self::Redis(_))
    }

    pub(super) fn url(&self, worker: usize) -> String {
        match self {
            Self::Redis(redis) => redis.proxies[worker].url(),
            _ => self.direct_url(),
        }
    }

    /// The proxy between this worker and the store, if there is one.
    pub(super) fn proxy(&self, worker: usize) -> Option<&FaultProxy> {
        match self {
            Self::Redis(redis) => Some(&redis.proxies[worker]),
            _ => None,
        }
    }

    /// Closes the connections of a process at all servers. Clients of a cluster, or of sentinels, connect to the
    /// addresses that these announce, not to a proxy.
    pub(super) fn cut(&self, pid: u32) {
        match self {
            Self::Cluster(cluster) => connections::cut(pid, &cluster.running()),
            Self::Sentinel(sentinel) => connections::cut(pid, &sentinel.running()),
            Self::Redis(_) | Self::Local(_) => {}
        }
    }

    /// Returns the name of a thing as it appears in keys.
    pub(super) fn spell(&self, name: &str) -> String {
        match self {
            Self::Cluster(_) => format!("{{{name}}}"),
            _ => name.to_owned(),
        }
    }

    /// The URL that the driver itself uses, without a proxy.
    pub(super) fn direct_url(&self) -> String {
        match self {
            Self::Redis(redis) => redis.primary().url(),
            Self::Cluster(cluster) => cluster.nodes.url(),
            Self::Sentinel(sentinel) => sentinel.url(),
            Self::Local(local) => format!("sqlite:{}", local.path.display()),
        }
    }

    /// Ends every fault that is still in effect.
    pub(super) fn heal(&self) {
        if let Self::Redis(redis) = self {
            redis.proxies.iter().for_each(FaultProxy::heal);
        }
    }
}

impl Redis {
    fn start(workers: usize) -> Self {
        // `no`: answered writes have been passed to the kernel, without waiting for the disk. The run never cuts the
        // power.
        let options = ["--appendonly yes", "--appendfsync no", "--repl-diskless-sync-delay 0"];
        let servers = [RedisServer::start_with(&options), RedisServer::start_with(&options)];
        let proxies = (0..workers).map(|_| FaultProxy::start(servers[0].port())).collect();
        let redis = Self { servers, primary: AtomicUsize::new(0), proxies };
        redis.follow();
        redis
    }

    pub(super) fn primary(&self) -> &RedisServer {
        &self.servers[self.primary.load(Ordering::SeqCst)]
    }

    fn replica(&self) -> &RedisServer {
        &self.servers[1 - self.primary.load(Ordering::SeqCst)]
    }

    /// Makes the server that is not the primary replicate the primary.
    fn follow(&self) {
        let port = self.primary().port().to_string();
        redis_command::<String>(
            &mut self.replica().connection(),
            &["REPLICAOF", "127.0.0.1", &port],
        );
    }

    /// Returns whether the replica has the data of the primary, except for writes in flight. Waits a little for that.
    pub(super) fn is_copied(&self) -> bool {
        let begun = Instant::now();
        let mut connection = self.replica().connection();
        while begun.elapsed() < Duration::from_secs(3) {
            let info: String = redis_command(&mut connection, &["INFO", "replication"]);
            if info.contains("master_link_status:up") && info.contains("master_sync_in_progress:0")
            {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// The replica takes over. For a while the old primary does not know this and continues to answer.
    pub(super) fn promote(&self, split: Duration) {
        redis_command::<String>(&mut self.replica().connection(), &["REPLICAOF", "NO", "ONE"]);
        std::thread::sleep(split);
        for proxy in &self.proxies {
            proxy.redirect(self.replica().port());
        }
        for proxy in &self.proxies {
            proxy.cut_with(Cut::Reset);
        }
        self.primary.fetch_xor(1, Ordering::SeqCst);
    }

    /// The old primary comes back as the replica of the new one.
    pub(super) fn demote(&self) {
        self.replica().restart_empty();
        self.follow();
    }
}

/// Sends one command.
pub(super) fn redis_command<T: FromRedisValue>(connection: &mut Connection, words: &[&str]) -> T {
    let answer = redis::cmd(words[0]).arg(&words[1..]).query(connection);
    answer.unwrap_or_else(|error| panic!("{words:?}: {error}"))
}
