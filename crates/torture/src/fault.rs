//! The faults: what was done, to which processes, and for how long it exempts them from checks.
//!
//! A worker that was hit by a fault is exempt from the checks of *progress and order* while the fault lasts and until
//! its clients can have recovered (`recovery_time`). No fault exempts a worker from the limit or from fences, with two
//! exceptions: a store that lost data (`Fault::loses_data`), and a clock that was set (`Kind::ClockForward`,
//! `Kind::ClockBack`). These exempt exactly what docs/guarantees.md says: see `check::exempt`.
//!
//! A fault of one node of a cluster concerns only the names that the node serves.

use std::fmt;

use crate::clock::{Micros, SECOND};
use crate::plan::{SOCKET_TIMEOUT, Things};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $text:literal,)*) => {
        /// One kind of fault.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $text,)* }
            }
        }
    };
}

kinds! {
    /// SIGKILL. Another process takes its place.
    Kill "kill",
    /// SIGSTOP, and SIGCONT at the end.
    Stop "stop",
    /// All connections are closed in an orderly way.
    Cut "cut",
    /// All connections are reset.
    Reset "reset",
    /// All connections are reset, and so are new ones.
    Refuse "refuse",
    /// Answers are lost, connections are closed, and new ones are refused for a moment, several times in a row.
    Flap "flap",
    /// Every message is delayed.
    Delay "delay",
    /// No message passes, and all of them arrive afterwards.
    Stall "stall",
    /// No message passes, and neither side notices. Current connections never work again.
    HalfOpen "half-open",
    /// The same, for current connections only.
    Forget "forget",
    /// A command is applied and its answer is lost. The client sends it again.
    LoseReply "lose-reply",
    /// A command is lost.
    LoseRequest "lose-request",
    /// The server is shut down and restarted with its data.
    Restart "restart",
    /// The server is killed and restarted with the data that it wrote to disk.
    Crash "crash",
    /// The server is killed and restarted without data.
    RestartEmpty "restart-empty",
    /// The server is stopped (SIGSTOP), or the disk of a local store does not answer.
    Freeze "freeze",
    /// `CLIENT PAUSE`.
    ClientPause "client-pause",
    /// `CLIENT KILL` of some clients.
    ClientKill "client-kill",
    /// `SCRIPT FLUSH`.
    ScriptFlush "script-flush",
    /// A replica becomes the server. Writes that it had not copied are lost.
    Promote "promote",
    /// A primary is killed, and a replica takes its place. Writes that were not copied are lost.
    PrimaryKilled "primary-killed",
    /// The same, after a primary was stopped (SIGSTOP).
    PrimaryPaused "primary-paused",
    /// A primary that was replaced comes back, and accepts commands until it learns that it is a replica.
    OldPrimary "old-primary",
    /// `SENTINEL FAILOVER`. The old primary accepts commands for a while, and these are lost.
    SentinelFailover "sentinel-failover",
    /// `CLUSTER FAILOVER`. No write is lost.
    ManualFailover "manual-failover",
    /// No node of a cluster accepts commands, because the slots of one node are not served.
    ClusterDown "cluster-down",
    /// A slot moves to another node of a cluster with its keys.
    SlotMoved "slot-moved",
    /// A node joins a cluster.
    NodeAdded "node-added",
    /// `CLUSTER RESET` of a replica, which then joins again.
    ReplicaReset "replica-reset",
    /// A replica is stopped (SIGSTOP).
    ReplicaPaused "replica-paused",
    /// A sentinel is killed and restarted.
    SentinelKilled "sentinel-killed",
    /// All sentinels are killed, except the stale one.
    NoSentinel "no-sentinel",
    /// One sentinel names the first primary forever.
    StaleSentinel "stale-sentinel",
    /// The wall clock of the servers, and of the other program, is set forward.
    ClockForward "clock-forward",
    /// The same clock is set back.
    ClockBack "clock-back",
    /// The wall clock of the workers is set. They do not use it.
    WorkersClock "workers-clock",
    /// The machine was slow. No fault was injected.
    Slow "slow",
}

/// The processes that a fault hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    Worker(usize),
    Everybody,
    /// Every worker that uses one of these things.
    Things(Things),
    /// No worker may notice the fault.
    Nobody,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    pub kind: Kind,
    pub scope: Scope,
    pub begin: Micros,
    pub end: Micros,
}

impl Fault {
    /// Returns how long after its end clients may still be recovering from the fault. A client replaces a closed
    /// connection at once, and then queries everything. A client that waits for an answer that never arrives suspects
    /// the connection only after a socket timeout, perhaps that of the second attempt.
    #[must_use]
    pub fn recovery_time(&self) -> Micros {
        match self.kind {
            Kind::ScriptFlush => 0,
            // A client that loses its connection repeatedly waits at most a second before it connects again.
            Kind::Slow | Kind::Flap => 2 * SECOND,
            Kind::Cut | Kind::Reset | Kind::LoseReply | Kind::LoseRequest | Kind::ClientKill => {
                3 * SECOND
            }
            // The old node redirects clients at once.
            Kind::SlotMoved | Kind::ManualFailover => 3 * SECOND,
            _ => 2 * SOCKET_TIMEOUT + 3 * SECOND,
        }
    }

    /// Whether the store lost data that it had confirmed.
    #[must_use]
    pub fn loses_data(&self) -> bool {
        self.kind == Kind::RestartEmpty || self.is_failover()
    }

    /// Whether a replica took the place of a primary, perhaps without its last writes.
    #[must_use]
    pub fn is_failover(&self) -> bool {
        let gone = matches!(self.kind, Kind::Promote | Kind::PrimaryKilled | Kind::PrimaryPaused);
        gone || self.has_two_primaries()
    }

    /// Whether two servers believe that they are the primary, for longer than a moment.
    #[must_use]
    pub fn has_two_primaries(&self) -> bool {
        matches!(self.kind, Kind::OldPrimary | Kind::SentinelFailover)
    }

    /// Whether the fault can affect this thing. A fault of one worker, or of all workers, can affect all things.
    #[must_use]
    pub fn concerns(&self, thing: usize) -> bool {
        !matches!(self.scope, Scope::Things(things) if !things.contains(thing))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.begin, self.end, self.kind.as_str())?;
        match self.scope {
            Scope::Worker(worker) => write!(f, "worker {worker}"),
            Scope::Everybody => write!(f, "everybody"),
            Scope::Things(things) => write!(f, "things {things}"),
            Scope::Nobody => write!(f, "nobody"),
        }
    }
}
