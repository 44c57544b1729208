//! What was done to whom, and until when it excuses anything.
//!
//! A fault excuses a worker from promises about *progress and order* while it lasts and until its clients can be expected
//! to be back (`settle`). It never excuses anybody from the limit or from fences, except where a store
//! lost data (`Kind::RestartEmpty`, `Kind::Promote`) or its clock was set (`Kind::ClockForward`, `Kind::ClockBack`), and there
//! from what docs/guarantees.md says, no more: see `check::exempt`.

use std::fmt;

use crate::clock::{Micros, SECOND};
use crate::plan::SOCKET_TIMEOUT;

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
    /// SIGKILL; another process takes its place.
    Kill "kill",
    /// SIGSTOP, and SIGCONT at the end.
    Stop "stop",
    /// All connections closed, in good order.
    Cut "cut",
    /// All connections reset.
    Reset "reset",
    /// All connections reset, and new ones too.
    Refuse "refuse",
    /// Answers are lost, connections are closed, and new ones refused for a moment, several times in a row.
    Flap "flap",
    /// Every message late.
    Delay "delay",
    /// Nothing passes, and everything arrives afterwards.
    Stall "stall",
    /// Nothing passes, and nobody is told; current connections never work again.
    HalfOpen "half-open",
    /// The same for current connections only.
    Forget "forget",
    /// A command is done and its answer lost: the client sends it again.
    LoseReply "lose-reply",
    /// A command is lost.
    LoseRequest "lose-request",
    /// The server is shut down, and comes back with its data.
    Restart "restart",
    /// The server is killed, and comes back with what it wrote down.
    Crash "crash",
    /// The server is killed, and comes back with nothing.
    RestartEmpty "restart-empty",
    /// The server stands still (SIGSTOP), or the disk of a store on one host.
    Freeze "freeze",
    /// `CLIENT PAUSE`.
    ClientPause "client-pause",
    /// `CLIENT KILL` of some.
    ClientKill "client-kill",
    /// `SCRIPT FLUSH`.
    ScriptFlush "script-flush",
    /// A replica becomes the server; what it had not copied is gone.
    Promote "promote",
    /// The wall clock of the servers, and of the other program, is set forward.
    ClockForward "clock-forward",
    /// It is set back.
    ClockBack "clock-back",
    /// The wall clock of the workers is set. They have no use for one.
    WorkersClock "workers-clock",
    /// The machine was slow: nobody's doing.
    Slow "slow",
}

/// Whom it befell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    Worker(usize),
    Everybody,
    /// Such a fault must not be noticed at all.
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
    /// How long after its end clients may still be busy with it. A connection that was closed is made anew at once, and
    /// everything is asked about. Whoever waits for an answer that never comes suspects the connection only after a socket
    /// timeout, perhaps of the second attempt.
    #[must_use]
    pub fn settle(&self) -> Micros {
        match self.kind {
            Kind::ScriptFlush => 0,
            // What is lost again and again is made anew a second later at most.
            Kind::Slow | Kind::Flap => 2 * SECOND,
            Kind::Cut | Kind::Reset | Kind::LoseReply | Kind::LoseRequest | Kind::ClientKill => {
                3 * SECOND
            }
            _ => 2 * SOCKET_TIMEOUT + 3 * SECOND,
        }
    }

    /// Whether the store lost what it had answered.
    #[must_use]
    pub fn loses_data(&self) -> bool {
        matches!(self.kind, Kind::RestartEmpty | Kind::Promote)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.begin, self.end, self.kind.as_str())?;
        match self.scope {
            Scope::Worker(worker) => write!(f, "worker {worker}"),
            Scope::Everybody => write!(f, "everybody"),
            Scope::Nobody => write!(f, "nobody"),
        }
    }
}
