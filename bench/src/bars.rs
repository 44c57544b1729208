//! What we hold ourselves to.

/// A promise about a figure.
#[derive(Debug)]
pub(crate) struct Bar {
    pub(crate) key: &'static str,
    pub(crate) scenario: &'static str,
    pub(crate) what: &'static str,
    pub(crate) at_most: bool,
    pub(crate) limit: f64,
    pub(crate) unit: &'static str,
}

const fn at_most(
    key: &'static str,
    scenario: &'static str,
    what: &'static str,
    limit: f64,
    unit: &'static str,
) -> Bar {
    Bar { key, scenario, what, at_most: true, limit, unit }
}

const fn at_least(
    key: &'static str,
    scenario: &'static str,
    what: &'static str,
    limit: f64,
    unit: &'static str,
) -> Bar {
    Bar { key, scenario, what, at_most: false, limit, unit }
}

pub(crate) const BARS: &[Bar] = &[
    at_most("memory/pair", "memory", "in memory: uncontended pair, against tokio", 4.0, "×"),
    at_most("memory/100", "memory", "in memory: 1 permit, 100 tasks, against tokio", 1.5, "×"),
    at_most("memory/10000", "memory", "in memory: a grant, 10,000 tasks against 100", 1.0, "×"),
    at_most("memory/queue", "memory", "in memory: a release, 100,000 queued against 10", 2.0, "×"),
    at_most(
        "memory/bytes",
        "memory",
        "in memory: a waiter of 100,000, without its task",
        600.0,
        "bytes",
    ),
    at_least("pairs/256", "pairs", "pairs, 1 name, 256 tasks, capacity 256, of EVALSHA", 0.25, "×"),
    at_least("pairs/16", "pairs", "pairs, 1 name, 256 tasks, capacity 16, of EVALSHA", 0.1, "×"),
    at_least("pairs/1000", "pairs", "pairs, 1,000 names, 256 tasks, of EVALSHA", 0.07, "×"),
    at_least("pairs/peer", "pairs", "pairs, 1 name, 256 tasks, of the best peer's", 2.0, "×"),
    at_most("handoff/p50", "handoff", "hand-off, 20 waiters, p50, against PING's", 4.0, "×"),
    at_most("handoff/p99", "handoff", "hand-off, 20 waiters, p99, against PING's", 6.0, "×"),
    at_least(
        "handoff/peer",
        "handoff",
        "hand-off, 20 waiters, p99, the best peer's",
        5.0,
        "× ours",
    ),
    at_most(
        "handoff/lock",
        "handoff",
        "hand-off of a lock, 20 waiters, p99, against PING's",
        6.0,
        "×",
    ),
    at_least("locks/200", "locks", "lock pairs, 200 tasks and keys, of EVALSHA", 0.12, "×"),
    at_most("traffic/pair", "traffic", "requests for an uncontended pair", 2.0, ""),
    at_most("recovery", "recovery", "holder killed, heartbeat 2 s: until the next runs", 2.2, "s"),
    at_most("queue", "queue", "enqueue + leave, 100,000 queued against 10", 2.0, "×"),
    at_most("waiters/connections", "waiters", "connections of 100,000 waiters", 2.0, ""),
    at_most("waiters/bytes", "waiters", "a waiter of 100,000, in the client", 1536.0, "bytes"),
    at_most("waiters/requests", "waiters", "requests a second of 100,000 waiters", 10.0, "/s"),
    at_most(
        "command/flock",
        "command",
        "`leasehold run -n 1 x -- true`, against `flock`",
        5.0,
        "×",
    ),
    at_most("command/handoff", "command", "hand-off between commands on one host, p99", 10.0, "ms"),
];
