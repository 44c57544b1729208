//! A real primary with two replicas for a test, monitored by three real sentinels, on loopback.
//!
//! Functions that change something return when the change has taken effect, and panic with what
//! they saw if it does not within [`TIME_LIMIT`]. They block. An async test that has work to do in
//! the meantime calls them through [`RedisSentinel::blocking`].
//!
//! Servers and sentinels are named by their indices: the servers are 0, 1 and 2, of which 0 is the
//! first primary; the sentinels are 0, 1 and 2, then the added ones.
//!
//! # Configuration
//!
//! Servers and sentinels have a configuration file, which they rewrite when a role changes. So they
//! keep their roles when they are killed and revived.
//!
//! Sentinels do some things more often than they do by default; see `PERIODS` in `members.rs`. This
//! shortens the start, and the time until the sentinels demote an old primary that comes back.
//!
//! A failover takes about three seconds. If two sentinels start one at the same time and neither gets
//! enough votes, they try again after six more seconds.
//!
//! Replicas and sentinels log in as the user of the fixture. So they work whatever passwords the
//! test asked for, and [`RedisServer::connected_clients`] leaves them out.

mod changes;
mod members;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;

use crate::redis_server::{FIXTURE, Kind, RedisServer};
use crate::wait::{TIME_LIMIT, blocking, until};

/// The name under which the sentinels monitor the primary.
pub const MASTER_NAME: &str = "mymaster";
const SERVERS: usize = 3;
const SENTINELS: usize = 3;
const QUORUM: usize = 2;

/// How the servers and the sentinels are started.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The password of the servers.
    pub password: Option<&'a str>,
    /// The password of the sentinels.
    pub sentinel_password: Option<&'a str>,
    /// How long a server may be silent before a sentinel considers it down. Longer than a busy
    /// machine makes a server wait: otherwise the sentinels fail over without being asked to.
    pub down_after_ms: u32,
    /// How long a failover may take; a sentinel waits twice as long before it tries another.
    pub failover_timeout_ms: u32,
    /// More options for every server, as in [`RedisServer::start_with`].
    pub server_options: &'a [&'a str],
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            password: None,
            sentinel_password: None,
            down_after_ms: 1500,
            failover_timeout_ms: 3000,
            server_options: &[],
        }
    }
}

/// A primary, two replicas and their sentinels on loopback, stopped when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct RedisSentinel {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    servers: Vec<Arc<RedisServer>>,
    sentinels: RwLock<Vec<Sentinel>>,
    /// The options of a sentinel, without those that say what it monitors.
    sentinel_options: Vec<String>,
    /// The settings of what a sentinel monitors.
    monitor_settings: Vec<String>,
}

#[derive(Clone, Debug)]
struct Sentinel {
    server: Arc<RedisServer>,
    /// It monitors something else than the others, and they do not know it.
    stale: bool,
}

/// The fields of a server or a sentinel, as a sentinel reports them.
type Fields = BTreeMap<String, String>;

impl RedisSentinel {
    /// Starts a primary, two replicas and three sentinels, and returns when all of them are ready.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(Options::default())
    }

    /// As [`start`](Self::start), with other options.
    #[must_use]
    pub fn start_with(options: Options<'_>) -> Self {
        let requirepass = |password: Option<&str>| {
            let words = password.map(|password| ["--requirepass".to_owned(), password.to_owned()]);
            words.into_iter().flatten().collect::<Vec<_>>()
        };
        let login = format!("--masteruser {FIXTURE} --masterauth {FIXTURE}");
        // By default, a primary waits five seconds for more replicas before it sends its data.
        let mut server_options = vec![login, "--repl-diskless-sync-delay 0".to_owned()];
        server_options.extend(requirepass(options.password));
        server_options.extend(options.server_options.iter().map(|&option| option.to_owned()));

        let mut sentinel_options: Vec<String> = [
            "resolve-hostnames no",
            "announce-ip 127.0.0.1",
            &format!("sentinel-user {FIXTURE}"),
            &format!("sentinel-pass {FIXTURE}"),
        ]
        .map(|setting| format!("--sentinel {setting}"))
        .into();
        sentinel_options.extend(requirepass(options.sentinel_password));
        let monitor_settings = vec![
            format!("auth-user {MASTER_NAME} {FIXTURE}"),
            format!("auth-pass {MASTER_NAME} {FIXTURE}"),
            format!("down-after-milliseconds {MASTER_NAME} {}", options.down_after_ms),
            format!("failover-timeout {MASTER_NAME} {}", options.failover_timeout_ms),
        ];
        let shared = Shared {
            servers: launch_servers(&server_options),
            sentinels: RwLock::default(),
            sentinel_options,
            monitor_settings,
        };
        let set = Self { shared: Arc::new(shared) };
        // A sentinel learns of the replicas when it first looks at the primary.
        until("replicas that are linked", TIME_LIMIT, || set.replicating(0));
        thread::scope(|scope| {
            let starts: Vec<_> =
                (0..SENTINELS).map(|_| scope.spawn(|| set.launch_sentinel(0, &[]))).collect();
            for start in starts {
                let server = start.join().expect("a sentinel that starts");
                set.push_sentinel(server, false);
            }
        });
        set.wait_ready();
        set
    }

    /// The URL of the first three sentinels.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of(&[0, 1, 2])
    }

    /// The URL of these sentinels, in this order.
    #[must_use]
    pub fn url_of(&self, sentinels: &[usize]) -> String {
        let addresses = self.sentinel_addresses();
        let hosts: Vec<_> = sentinels.iter().map(|&index| addresses[index].as_str()).collect();
        format!("redis-sentinel://{}/{MASTER_NAME}", hosts.join(","))
    }

    /// The address of every server, `host:port`, by index.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.shared.servers.iter().map(|server| address(server)).collect()
    }

    /// The address of every sentinel, `host:port`, by index.
    #[must_use]
    pub fn sentinel_addresses(&self) -> Vec<String> {
        self.sentinels().iter().map(|sentinel| address(&sentinel.server)).collect()
    }

    /// A server.
    #[must_use]
    pub fn server(&self, index: usize) -> &RedisServer {
        &self.shared.servers[index]
    }

    /// A sentinel. Its [`connection`](RedisServer::connection) works, and so do the counts of
    /// clients; it stores no keys.
    #[must_use]
    pub fn sentinel(&self, index: usize) -> Arc<RedisServer> {
        self.sentinels()[index].server.clone()
    }

    /// Calls a function of the fixture on a thread where it may block, and returns its result.
    pub async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let set = self.clone();
        blocking(move || call(&set)).await
    }

    /// The server that all running sentinels name as primary, once they agree.
    #[must_use]
    pub fn primary(&self) -> usize {
        until("sentinels that agree", TIME_LIMIT, || self.agreed())
    }

    /// The server that a sentinel names as primary.
    #[must_use]
    pub fn named_by(&self, sentinel: usize) -> usize {
        self.query_primary(&self.sentinel(sentinel)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits until the running sentinels agree on a primary that runs, every other running server
    /// is a replica of it, and the running sentinels consider all of them reachable.
    pub fn wait_ready(&self) {
        until("servers and sentinels that are ready", TIME_LIMIT, || self.ready());
    }

    fn ready(&self) -> Result<(), String> {
        let primary = self.agreed()?;
        self.replicating(primary)?;
        let sentinels = self.current_sentinels();
        for (index, sentinel) in &sentinels {
            let complain = |missing: &str, fields_of_all: &[Fields]| {
                let fields = ["port", "flags", "master-link-status"];
                let fields_of_all: Vec<_> =
                    fields_of_all.iter().map(|one| fields.map(|name| field(one, name))).collect();
                Err(format!("sentinel {index} does not reach {missing}, but {fields_of_all:?}"))
            };
            let master: Fields = call(sentinel, &["SENTINEL", "MASTER", MASTER_NAME])?;
            if !reaches(&[&master], self.server(primary)) {
                return complain("primary", &[master]);
            }
            let replicas: Vec<Fields> = call(sentinel, &["SENTINEL", "REPLICAS", MASTER_NAME])?;
            let linked: Vec<_> = replicas
                .iter()
                .filter(|replica| field(replica, "master-link-status") == "ok")
                .collect();
            for replica in self.running().filter(|&replica| replica != primary) {
                if !reaches(&linked, self.server(replica)) {
                    return complain(&format!("replica {replica}"), &replicas);
                }
            }
            let others: Vec<Fields> = call(sentinel, &["SENTINEL", "SENTINELS", MASTER_NAME])?;
            for (other, server) in sentinels.iter().filter(|(other, _)| other != index) {
                if !reaches(&others.iter().collect::<Vec<_>>(), server) {
                    return complain(&format!("sentinel {other}"), &others);
                }
            }
        }
        Ok(())
    }

    /// The running server that the running sentinels agree on and that is a primary.
    fn agreed(&self) -> Result<usize, String> {
        let mut named = Vec::new();
        for (index, sentinel) in self.current_sentinels() {
            named.push((index, self.query_primary(&sentinel)?));
        }
        let &(_, primary) = named.first().ok_or("no sentinel runs")?;
        if named.iter().any(|&(_, other)| other != primary) {
            return Err(format!("(sentinel, named server): {named:?}"));
        }
        if !self.server(primary).is_running() {
            return Err(format!("all name server {primary}, which does not run"));
        }
        let role = role(self.server(primary))?;
        if role[0] == "master" { Ok(primary) } else { Err(format!("{primary} says {role:?}")) }
    }

    /// Whether every other running server is a replica of `primary` and linked to it.
    fn replicating(&self, primary: usize) -> Result<(), String> {
        let port = self.server(primary).port().to_string();
        self.running().filter(|&index| index != primary).try_for_each(|index| {
            let role = role(self.server(index))?;
            let linked = role[0] == "slave" && role[2] == port && role[3] == "connected";
            if linked { Ok(()) } else { Err(format!("server {index} says {role:?}")) }
        })
    }

    fn query_primary(&self, sentinel: &RedisServer) -> Result<usize, String> {
        let named: (String, u16) =
            call(sentinel, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER_NAME])?;
        let index = self.shared.servers.iter().position(|server| server.port() == named.1);
        index.ok_or_else(|| format!("a sentinel names {named:?}"))
    }

    /// The indices of the running servers.
    fn running(&self) -> impl Iterator<Item = usize> {
        (0..SERVERS).filter(|&index| self.server(index).is_running())
    }

    /// The running sentinels that are not stale.
    fn current_sentinels(&self) -> Vec<(usize, Arc<RedisServer>)> {
        let sentinels = self.sentinels().into_iter().enumerate();
        sentinels
            .filter(|(_, sentinel)| !sentinel.stale && sentinel.server.is_running())
            .map(|(index, sentinel)| (index, sentinel.server))
            .collect()
    }

    fn sentinels(&self) -> Vec<Sentinel> {
        self.shared.sentinels.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push_sentinel(&self, server: RedisServer, stale: bool) -> usize {
        let mut sentinels = self.shared.sentinels.write().unwrap_or_else(PoisonError::into_inner);
        sentinels.push(Sentinel { server: Arc::new(server), stale });
        sentinels.len() - 1
    }
}

/// Starts the primary, and then its replicas.
fn launch_servers(options: &[String]) -> Vec<Arc<RedisServer>> {
    let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
    let primary = RedisServer::launch(Kind::Monitored, &options, None);
    let replicaof = format!("--replicaof 127.0.0.1 {}", primary.port());
    options.push(&replicaof);
    let replicas = (1..SERVERS).map(|_| RedisServer::launch(Kind::Monitored, &options, None));
    std::iter::once(primary).chain(replicas).map(Arc::new).collect()
}

fn address(server: &RedisServer) -> String {
    format!("127.0.0.1:{}", server.port())
}

/// The reply of `ROLE`: `master`, or `slave`, host, port, state.
fn role(server: &RedisServer) -> Result<Vec<String>, String> {
    let reply: Vec<redis::Value> = call(server, &["ROLE"])?;
    let words = reply.into_iter().map(|word| match word {
        // The replicas of a primary.
        redis::Value::Array(_) => String::new(),
        word => redis::from_redis_value(word).expect("a word or a number"),
    });
    Ok(words.collect())
}

fn call<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> Result<T, String> {
    server.call(command).map_err(|error| format!("{command:?} at {}: {error}", server.port()))
}

/// Whether one of the known servers is `server` and is considered reachable.
fn reaches(others: &[&Fields], server: &RedisServer) -> bool {
    let port = server.port().to_string();
    // Other flags are opinions about the primary, which sentinels keep for some seconds.
    let bad = ["s_down", "o_down", "disconnected", "failover_in_progress"];
    others.iter().any(|one| {
        let down = field(one, "flags").split(',').any(|flag| bad.contains(&flag));
        field(one, "port") == port && !down
    })
}

fn field<'a>(fields: &'a Fields, name: &str) -> &'a str {
    fields.get(name).map_or("", String::as_str)
}
