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
    at_most("memory/pair", "memory", "in memory: uncontended pair, against tokio", 2.5, "×"),
    at_most(
        "memory/100/one",
        "memory",
        "in memory: 1 permit, 100 tasks, one thread, against tokio",
        1.5,
        "×",
    ),
    at_most("memory/100", "memory", "in memory: 1 permit, 100 tasks, against tokio", 1.5, "×"),
    at_most(
        "memory/10000",
        "memory",
        "in memory: a grant, 10,000 tasks against 100, of tokio's own ratio",
        1.0,
        "×",
    ),
    at_most("memory/queue", "memory", "in memory: a release, 100,000 queued against 10", 2.0, "×"),
    at_most(
        "memory/bytes",
        "memory",
        "in memory: a waiter of 100,000, without its task",
        600.0,
        "bytes",
    ),
    at_least("pairs/1/peer", "pairs", "pairs, 1 name, 1 task, of redis-semaphore's", 1.0, "×"),
    at_least("pairs/256", "pairs", "pairs, 1 name, 256 tasks, capacity 256, of EVALSHA", 0.3, "×"),
    at_least(
        "pairs/256/peer",
        "pairs",
        "pairs, 1 name, 256 tasks, capacity 256, of redis-semaphore's",
        2.5,
        "×",
    ),
    at_least("pairs/16", "pairs", "pairs, 1 name, 256 tasks, capacity 16, of EVALSHA", 0.1, "×"),
    at_least("pairs/1000", "pairs", "pairs, 1,000 names, 256 tasks, of EVALSHA", 0.07, "×"),
    at_least(
        "pairs/1000/peer",
        "pairs",
        "pairs, 1,000 names, 256 tasks, of redis-semaphore's",
        1.2,
        "×",
    ),
    at_least("fleet/one", "fleet", "50 clients, one name, of redis-semaphore's", 1.0, "×"),
    at_least("fleet/each", "fleet", "50 clients, a name each, of redis-semaphore's", 1.0, "×"),
    at_most(
        "fleet/server",
        "fleet",
        "server time of an uncontended pair, against redis-semaphore's",
        1.2,
        "×",
    ),
    at_least("locks/200", "locks", "lock pairs, 200 tasks and keys, of EVALSHA", 0.2, "×"),
    at_least("locks/200/peer", "locks", "lock pairs, 200 tasks and keys, of rslock's", 0.75, "×"),
    at_most("handoff/p50", "handoff", "hand-off, 20 waiters, p50, against PING's", 2.6, "×"),
    at_most("handoff/p99", "handoff", "hand-off, 20 waiters, p99, against PING's", 4.0, "×"),
    at_least(
        "handoff/p50/peer",
        "handoff",
        "hand-off, 20 waiters, p50, python-redis-lock's",
        1.4,
        "× ours",
    ),
    at_least(
        "handoff/p99/peer",
        "handoff",
        "hand-off, 20 waiters, p99, python-redis-lock's",
        1.1,
        "× ours",
    ),
    at_most(
        "handoff/lock",
        "handoff",
        "hand-off of a lock, 20 waiters, p99, against PING's",
        2.8,
        "×",
    ),
    at_most("traffic/pair", "traffic", "requests for an uncontended pair", 2.0, ""),
    at_most(
        "traffic/calls",
        "traffic",
        "calls in Redis for an uncontended pair of a semaphore",
        13.0,
        "",
    ),
    at_most(
        "traffic/calls/lock",
        "traffic",
        "calls in Redis for an uncontended pair of a lock",
        9.0,
        "",
    ),
    at_least("rate/kept", "rate", "1,000 starts a second, 200 waiters: of the rate", 0.98, "×"),
    at_most("rate/requests", "rate", "requests for a start at that rate", 1.0, ""),
    at_most("recovery", "recovery", "holder killed, heartbeat 2 s: until the next runs", 2.2, "s"),
    at_most("queue", "queue", "enqueue + leave, 100,000 queued against 10", 2.0, "×"),
    at_most("waiters/connections", "waiters", "connections of 100,000 waiters", 2.0, ""),
    at_most("waiters/bytes", "waiters", "a waiter of 100,000, in the client", 1536.0, "bytes"),
    at_most("waiters/requests", "waiters", "requests a second of 100,000 waiters", 10.0, "/s"),
    at_most("crowd/questions", "crowd", "questions of 1,000 clients that wait", 50.0, "/s"),
    at_most("crowd/share", "crowd", "share of a Redis core for 1,000 clients that wait", 1.0, "%"),
    at_most(
        "command/flock",
        "command",
        "`leasehold run -n 1 x -- true`, against `flock`",
        2.5,
        "×",
    ),
    at_most(
        "command/handoff",
        "command",
        "hand-off between commands on one host, p99, against `flock`'s",
        2.0,
        "×",
    ),
    at_most(
        "commands/share",
        "commands",
        "share of a core for 400 commands that wait on one host",
        2.0,
        "%",
    ),
];
