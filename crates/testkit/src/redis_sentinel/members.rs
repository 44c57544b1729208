//! Sentinels that start.

use super::{Kind, MASTER_NAME, QUORUM, RedisSentinel, RedisServer};

/// Periods for tests, in milliseconds.
///
/// A sentinel sends its first `PING` to a new primary after `ping-period`. With the default of one
/// second, it would consider the primary down by then, and the sentinels would fail over again.
/// Five times `ping-period` must be more than a second, because a sentinel promotes only a replica
/// that it has looked at within that time.
///
/// A sentinel that the machine has not run for two seconds acts on nothing for `tilt-period`. The
/// default of 30 s is longer than a test waits.
const PERIODS: [&str; 10] = [
    "SENTINEL",
    "DEBUG",
    "publish-period",
    "200",
    "info-period",
    "1000",
    "ping-period",
    "300",
    "tilt-period",
    "2000",
];

/// Commands that a stale sentinel may not send, and `PING` in their place.
///
/// Sentinels learn from each other with `PUBLISH` and `SUBSCRIBE` at the servers that they monitor.
/// A sentinel with old information sends `REPLICAOF` to servers that it believes to be wrong.
const WITHHELD: [&str; 3] = ["PUBLISH", "SUBSCRIBE", "SLAVEOF"];

impl RedisSentinel {
    /// Starts another sentinel. Returns its index when it and the others know each other.
    #[must_use]
    pub fn add_sentinel(&self) -> usize {
        let sentinel = self.launch_sentinel(self.primary(), &[]);
        let index = self.push_sentinel(sentinel, false);
        self.wait_ready();
        index
    }

    /// Starts a sentinel that names `server` as the primary forever, whether it is one or not.
    /// Returns its index, for [`url_of`](Self::url_of).
    ///
    /// The sentinel monitors that server under the name of the primary, but cannot exchange
    /// messages with the other sentinels. So it learns of no failover, and never starts one.
    #[must_use]
    pub fn stale_sentinel(&self, server: usize) -> usize {
        let renamed = WITHHELD.map(|name| format!("rename-command {MASTER_NAME} {name} PING"));
        let sentinel = self.launch_sentinel(server, &renamed);
        self.push_sentinel(sentinel, true)
    }

    /// Starts a sentinel that monitors `primary`.
    pub(super) fn launch_sentinel(&self, primary: usize, settings: &[String]) -> RedisServer {
        let port = self.server(primary).port();
        let monitor = format!("monitor {MASTER_NAME} 127.0.0.1 {port} {QUORUM}");
        let settings = self.shared.monitor_settings.iter().chain(settings);
        let monitored = std::iter::once(&monitor).chain(settings);
        let monitored: Vec<_> = monitored.map(|setting| format!("--sentinel {setting}")).collect();
        let options = self.shared.sentinel_options.iter().chain(&monitored);
        let options: Vec<&str> = options.map(String::as_str).collect();
        let sentinel = RedisServer::launch(Kind::Sentinel, &options, None);
        shorten_periods(&sentinel);
        sentinel
    }
}

/// Makes a sentinel faster, if its version knows how.
pub(super) fn shorten_periods(sentinel: &RedisServer) {
    let _: redis::RedisResult<()> = sentinel.call(&PERIODS);
}
