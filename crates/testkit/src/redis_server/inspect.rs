//! What a test can inspect of a server: its data, its commands, its clients.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionLike, FromRedisValue, IntoConnectionInfo,
    RedisConnectionInfo, RedisResult,
};

use super::{FIXTURE, RedisServer, lock};
use crate::wait::TIME_LIMIT;

/// Makes a query to a paused server fail the test instead of hanging it.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// `PEXPIRETIME` for Redis 6.2, which lacks it. A `PTTL` between two equal readings of the clock is exact.
const EXPIRES_AT: &str = "
    local function now()
      local time = redis.call('TIME')
      return time[1] * 1000 + math.floor(time[2] / 1000)
    end
    local before, left
    repeat before, left = now(), redis.call('PTTL', KEYS[1]) until now() == before
    return left < 0 and left or before + left";

/// The fixture's own connection, and its calls per command, which are subtracted from the counts.
#[derive(Default)]
pub(super) struct Inspector {
    connection: Option<redis::Connection>,
    calls: BTreeMap<String, u64>,
}

impl RedisServer {
    /// A blocking connection for inspecting the server, as a user with all rights, on the Unix socket.
    ///
    /// Its reads time out after ten seconds. [`connected_clients`](Self::connected_clients) leaves
    /// it out; the counts of commands do not, because its commands cannot be told from a client's.
    ///
    /// # Panics
    ///
    /// If the server refuses the connection.
    #[must_use]
    pub fn connection(&self) -> redis::Connection {
        let connection = self.try_connection();
        connection.unwrap_or_else(|error| panic!("cannot inspect redis-server: {error}"))
    }

    fn try_connection(&self) -> RedisResult<redis::Connection> {
        let settings = RedisConnectionInfo::default()
            .set_username(FIXTURE)
            .set_password(FIXTURE)
            .set_skip_set_lib_name();
        let info =
            ConnectionAddr::Unix(self.socket()).into_connection_info().expect("a valid address");
        let connection = redis::Client::open(info.set_redis_settings(settings))
            .and_then(|client| client.get_connection_with_timeout(QUERY_TIMEOUT))?;
        connection.set_read_timeout(Some(QUERY_TIMEOUT))?;
        Ok(connection)
    }

    /// A connection as any program makes it: to [`url`](Self::url), without credentials. It waits
    /// longer for a reply than redis-rs does by default, because the tests share their machine.
    ///
    /// # Panics
    ///
    /// If the server refuses the connection.
    pub async fn async_connection(&self) -> MultiplexedConnection {
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(Some(TIME_LIMIT))
            .set_connection_timeout(Some(TIME_LIMIT));
        let client = redis::Client::open(self.url()).expect("a valid address");
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        connection.unwrap_or_else(|error| panic!("cannot connect to redis-server: {error}"))
    }

    /// Returns how often each command was called since the start, by lower-case name (`config|set` for subcommands;
    /// Redis 6.2 counts all of them as `config`). A call made by a script counts under the called command, in addition
    /// to the script's own `evalsha`. Commands refused before they ran do not count.
    #[must_use]
    pub fn commandstats(&self) -> BTreeMap<String, u64> {
        let (info, fixture_calls): (String, _) = self.query(&["INFO", "commandstats"]);
        info.lines()
            .filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="))
            .filter_map(|(name, rest)| Some((name, rest.split(',').next()?.parse::<u64>().ok()?)))
            .map(|(name, calls)| (name.to_owned(), calls - calls_of(&fixture_calls, name)))
            .filter(|(_, calls)| *calls > 0)
            .collect()
    }

    /// Returns how often `command` was called since the start, with any subcommand; see
    /// [`commandstats`](Self::commandstats).
    #[must_use]
    pub fn command_count(&self, command: &str) -> u64 {
        calls_of(&self.commandstats(), &command.to_lowercase())
    }

    /// Returns how many commands ran since the start, including those called by scripts.
    ///
    /// # Panics
    ///
    /// If the server does not report it.
    #[must_use]
    pub fn total_commands_processed(&self) -> u64 {
        let (info, fixture_calls): (String, BTreeMap<String, u64>) = self.query(&["INFO", "stats"]);
        let total = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
        let total: u64 = total.and_then(|total| total.trim().parse().ok()).expect("a number");
        total - fixture_calls.values().sum::<u64>()
    }

    /// Returns the number of connections that are neither the fixture's nor for replication.
    #[must_use]
    pub fn connected_clients(&self) -> usize {
        self.client_list().len()
    }

    /// The lines of `CLIENT LIST` about connections that are neither the fixture's nor for
    /// replication.
    #[must_use]
    pub fn client_list(&self) -> Vec<String> {
        let (clients, _): (String, _) = self.query(&["CLIENT", "LIST"]);
        let fixture = format!("user={FIXTURE}");
        let excluded = |field: &str| field == fixture || field == "flags=M" || field == "flags=S";
        let others = clients.lines().filter(|client| !client.split(' ').any(excluded));
        others.map(str::to_owned).collect()
    }

    /// Every key that this server stores, in order.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        let (mut keys, _): (Vec<String>, _) = self.query(&["KEYS", "*"]);
        keys.sort();
        keys
    }

    /// The shard channels of this server that have subscribers, in order.
    #[must_use]
    pub fn shard_channels(&self) -> Vec<String> {
        let (mut channels, _): (Vec<String>, _) = self.query(&["PUBSUB", "SHARDCHANNELS"]);
        channels.sort();
        channels
    }

    pub(super) fn ping(&self) {
        let _: (String, _) = self.query(&["PING"]);
    }

    /// Calls a command on the fixture's connection. The counts leave it out if it succeeds.
    pub(crate) fn call<T: FromRedisValue>(&self, command: &[&str]) -> RedisResult<T> {
        self.try_query(command).map(|(reply, _)| reply)
    }

    fn query<T: FromRedisValue>(&self, command: &[&str]) -> (T, BTreeMap<String, u64>) {
        self.try_query(command)
            .unwrap_or_else(|error| panic!("{command:?} of redis-server: {error}"))
    }

    /// Calls a command on the fixture's connection. With the reply it returns how often the fixture
    /// called each command *before* this call, because that is what a reply about counts contains.
    fn try_query<T: FromRedisValue>(
        &self,
        command: &[&str],
    ) -> RedisResult<(T, BTreeMap<String, u64>)> {
        let mut inspector = lock(&self.inspector);
        let connection = inspector.connection.take();
        if connection.is_none() {
            *inspector.calls.entry("auth".to_owned()).or_default() += 1;
        }
        let mut connection = connection.map_or_else(|| self.try_connection(), Ok)?;
        let before = inspector.calls.clone();
        let reply = redis::cmd(command[0]).arg(&command[1..]).query(&mut connection);
        // Redis does not count a command that it rejects, for instance while it loads data.
        if reply.is_ok() {
            *inspector.calls.entry(counted_as(command)).or_default() += 1;
        }
        if connection.is_open() {
            inspector.connection = Some(connection);
        }
        Ok((reply?, before))
    }
}

/// Returns when `key` expires, in milliseconds of the server's clock; -1 if it does not expire, -2
/// if it does not exist.
#[track_caller]
pub fn expires_at(connection: &mut redis::Connection, key: &str) -> i64 {
    let answer = redis::cmd("EVAL").arg(EXPIRES_AT).arg(1).arg(key).query(connection);
    answer.unwrap_or_else(|error| panic!("the expiry of {key}: {error}"))
}

/// The name under which Redis counts a command.
fn counted_as(command: &[&str]) -> String {
    let subcommands = ["CLIENT", "CLUSTER", "PUBSUB", "SENTINEL"].contains(&command[0]);
    command[..if subcommands { 2 } else { 1 }].join("|").to_lowercase()
}

/// The sum of the calls of `name` and of its subcommands.
fn calls_of(counts: &BTreeMap<String, u64>, name: &str) -> u64 {
    let counted = |(other, _): &(&String, _)| {
        other.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('|'))
    };
    counts.iter().filter(counted).map(|(_, calls)| calls).sum()
}

impl fmt::Debug for Inspector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspector").field("calls", &self.calls).finish_non_exhaustive()
    }
}
