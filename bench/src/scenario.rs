//! The scenarios: what is measured.

mod cluster;
pub(crate) mod command;
mod command_on_redis;
mod commands;
mod contention;
mod crowd;
mod failover;
mod fairness;
pub(crate) mod fleet;
mod footprint;
mod handoff;
mod in_process;
mod limits;
mod metrics;
mod pairs;
mod python;
pub(crate) mod queue;
mod rate;
mod recovery;
mod traffic;
mod waiters;

use crate::bench::Bench;
use crate::report::Better;

/// One scenario, which can be run by itself.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Its expected duration in seconds, in a quick run and in a full one.
    expected: (u64, u64),
    /// How many steps it reports, and whether that is per repetition.
    pub(crate) steps: usize,
    pub(crate) repeated: bool,
    pub(crate) run: fn(&mut Bench),
}

impl Scenario {
    pub(crate) fn seconds(&self, quick: bool) -> u64 {
        if quick { self.expected.0 } else { self.expected.1 }
    }
}

pub(crate) static SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "limits",
        about: "what the server and the wire can do at all",
        expected: (5, 40),
        steps: 3,
        repeated: true,
        run: limits::run,
    },
    Scenario {
        name: "memory",
        about: "the semaphore in one process",
        expected: (9, 60),
        steps: 6,
        repeated: false,
        run: in_process::run,
    },
    Scenario {
        name: "metrics",
        about: "what the feature `metrics` costs: acquire and release, nobody has to wait",
        expected: (10, 80),
        steps: 3,
        repeated: true,
        run: metrics::run,
    },
    Scenario {
        name: "pairs",
        about: "semaphores on Redis: acquire and release, nobody has to wait unless said so",
        expected: (14, 190),
        steps: 7,
        repeated: true,
        run: pairs::semaphores,
    },
    Scenario {
        name: "fleet",
        about: "semaphores on Redis: many clients, each a process with one task",
        expected: (40, 160),
        steps: 5,
        repeated: true,
        run: fleet::run,
    },
    Scenario {
        name: "locks",
        about: "locks on Redis: acquire and release, each task a key of its own",
        expected: (22, 240),
        steps: 3,
        repeated: true,
        run: pairs::locks,
    },
    Scenario {
        name: "handoff",
        about: "from the release in one process until the next one runs in another",
        expected: (29, 450),
        steps: 24,
        repeated: true,
        run: handoff::run,
    },
    Scenario {
        name: "fairness",
        about: "one permit, no pause: how many grants, who waits how long, who is passed over",
        expected: (12, 280),
        steps: 24,
        repeated: true,
        run: fairness::run,
    },
    Scenario {
        name: "traffic",
        about: "what the server has to do for a grant and for those who wait",
        expected: (17, 110),
        steps: 8,
        repeated: true,
        run: traffic::run,
    },
    Scenario {
        name: "footprint",
        about: "memory of the client for each that waits on Redis",
        expected: (11, 40),
        steps: 9,
        repeated: true,
        run: footprint::run,
    },
    Scenario {
        name: "python",
        about: "the Python package against its peers, on Redis and in memory",
        expected: (110, 900),
        steps: 18,
        repeated: true,
        run: python::run,
    },
    Scenario {
        name: "rate",
        about: "a rate of 1,000 starts a second, with 200 waiters",
        expected: (4, 11),
        steps: 1,
        repeated: false,
        run: rate::run,
    },
    Scenario {
        name: "recovery",
        about: "a holder is killed with SIGKILL; its lease is 2 s",
        expected: (5, 30),
        steps: 1,
        repeated: true,
        run: recovery::run,
    },
    Scenario {
        name: "cluster",
        about: "a cluster of three primaries against one server, on the same cores",
        expected: (20, 90),
        steps: 9,
        repeated: false,
        run: cluster::run,
    },
    Scenario {
        name: "failover",
        about: "a primary is killed: behind sentinels, and in a cluster",
        expected: (15, 90),
        steps: 2,
        repeated: true,
        run: failover::run,
    },
    Scenario {
        name: "queue",
        about: "joining and leaving a queue on Redis, by its length",
        expected: (4, 60),
        steps: 5,
        repeated: true,
        run: queue::run,
    },
    Scenario {
        name: "waiters",
        about: "100,000 waiters of one process",
        expected: (7, 130),
        steps: 2,
        repeated: false,
        run: waiters::run,
    },
    Scenario {
        name: "crowd",
        about: "1,000 clients that wait for one name",
        expected: (10, 140),
        steps: 2,
        repeated: false,
        run: crowd::run,
    },
    Scenario {
        name: "command",
        about: "the command on one host, against flock and GNU sem",
        expected: (8, 60),
        steps: 4,
        repeated: false,
        run: command::run,
    },
    Scenario {
        name: "command-on-redis",
        about: "the command on Redis, against a script with redis-cli, etcdctl and flock",
        expected: (25, 150),
        steps: 6,
        repeated: true,
        run: command_on_redis::run,
    },
    Scenario {
        name: "commands",
        about: "400 commands that wait on one host",
        expected: (9, 45),
        steps: 2,
        repeated: false,
        run: commands::run,
    },
];

/// Returns the scenario of that name.
pub(crate) fn parse(name: &str) -> Result<&'static Scenario, String> {
    SCENARIOS.iter().find(|scenario| scenario.name == name).ok_or_else(|| {
        let names: Vec<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
        format!("the scenarios are {}", names.join(", "))
    })
}

const RATE: (&str, Better) = ("/s", Better::More);
const NANOS: (&str, Better) = ("ns", Better::Less);
const BYTES: (&str, Better) = ("bytes", Better::Less);
