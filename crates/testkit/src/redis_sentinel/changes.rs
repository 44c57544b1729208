//! Faults and failovers.

use std::time::{Duration, Instant};

use super::members::shorten_periods;
use super::{Fields, MASTER_NAME, RedisSentinel, RedisServer, TIME_LIMIT, call, field, until};

impl RedisSentinel {
    /// Kills the primary with SIGKILL. Returns its index.
    #[must_use]
    pub fn kill_primary(&self) -> usize {
        let primary = self.primary();
        self.kill(primary);
        primary
    }

    /// Stops the primary with SIGSTOP: connections stay open, nothing is answered. Returns its
    /// index.
    #[must_use]
    pub fn pause_primary(&self) -> usize {
        let primary = self.primary();
        self.pause(primary);
        primary
    }

    /// Kills a server with SIGKILL. It stays dead until [`revive`](Self::revive).
    pub fn kill(&self, server: usize) {
        self.server(server).kill();
    }

    /// Starts a killed server on its port, in its last role and without data. Returns when it
    /// answers.
    ///
    /// An old primary is a primary again until the sentinels demote it, which takes them about two
    /// seconds. [`wait_ready`](Self::wait_ready) waits for that.
    pub fn revive(&self, server: usize) {
        self.server(server).crash();
    }

    /// Stops a server with SIGSTOP: connections stay open, nothing is answered.
    pub fn pause(&self, server: usize) {
        self.server(server).pause();
    }

    /// Lets a paused server go on. An old primary behaves as after [`revive`](Self::revive).
    pub fn resume(&self, server: usize) {
        self.server(server).resume();
    }

    /// Kills a sentinel with SIGKILL. It stays dead until
    /// [`revive_sentinel`](Self::revive_sentinel).
    pub fn kill_sentinel(&self, sentinel: usize) {
        self.sentinel(sentinel).kill();
    }

    /// Starts a killed sentinel on its port, with what it knew. Returns when it answers.
    pub fn revive_sentinel(&self, sentinel: usize) {
        let sentinel = self.sentinel(sentinel);
        sentinel.crash();
        shorten_periods(&sentinel);
    }

    /// Stops a sentinel with SIGSTOP.
    pub fn pause_sentinel(&self, sentinel: usize) {
        self.sentinel(sentinel).pause();
    }

    /// Lets a paused sentinel go on, with what it knew before.
    pub fn resume_sentinel(&self, sentinel: usize) {
        self.sentinel(sentinel).resume();
    }

    /// Waits until all running sentinels name another server than `from`, and it is a primary.
    /// Returns its index, and the time since `since`.
    #[must_use]
    pub fn wait_failover(
        &self,
        from: usize,
        since: Instant,
        within: Duration,
    ) -> (usize, Duration) {
        let to = until(&format!("the failover of server {from}"), within, || {
            let primary = self.agreed()?;
            if primary == from { Err(format!("all name server {from}")) } else { Ok(primary) }
        });
        (to, since.elapsed())
    }

    /// Makes a replica the primary with `SENTINEL FAILOVER`. Returns the new primary when the old
    /// one has become its replica and the sentinels agree.
    #[must_use]
    pub fn failover(&self) -> usize {
        let from = self.primary();
        let (_, sentinel) = self.current_sentinels().swap_remove(0);
        until("a failover by hand", TIME_LIMIT, || {
            self.request_failover(from, &sentinel)?;
            match self.agreed()? {
                primary if primary == from => Err(format!("all name server {from}")),
                _ => Ok(()),
            }
        });
        self.wait_ready();
        self.primary()
    }

    /// Sends `SENTINEL FAILOVER`, unless this sentinel has replaced the primary `from` or is doing
    /// so.
    ///
    /// A sentinel refuses the command while it knows no healthy replica. It also aborts a failover
    /// that it has begun if the replica does not answer in time, as on a busy machine. The command
    /// is therefore repeated. While a sentinel neither replaces `from` nor names another primary,
    /// no failover is under way that a second command could undo.
    fn request_failover(&self, from: usize, sentinel: &RedisServer) -> Result<(), String> {
        let master: Fields = call(sentinel, &["SENTINEL", "MASTER", MASTER_NAME])?;
        let in_progress = field(&master, "flags").contains("failover_in_progress");
        let is_over = field(&master, "port") != self.server(from).port().to_string();
        if in_progress || is_over {
            return Ok(());
        }
        call(sentinel, &["SENTINEL", "FAILOVER", MASTER_NAME])
    }
}
