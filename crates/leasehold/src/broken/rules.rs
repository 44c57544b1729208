//! The rules that can be broken, and how one is chosen.
#![cfg_attr(not(feature = "redis"), allow(dead_code))]

#[cfg(not(test))]
use std::sync::LazyLock;

/// The rules that can be broken.
#[cfg_attr(not(leasehold_broken), allow(unreachable_pub))]
pub const RULES: [&str; 20] = [
    "ownership",
    "wakeup",
    "old-wakeup",
    "margin",
    "expiry",
    "early",
    "lifo",
    "limit",
    "weights",
    "shrink",
    "pause",
    "rate",
    "slots",
    "fence",
    "leak",
    "lost-cancel",
    "clock",
    // By the command.
    "guard",
    "blocked-guard",
    "trusting-command",
];

/// More rules, of the client core and the machine. The model checker and the simulation break them, in virtual time; the
/// torture test would find most of them only after hours.
pub(crate) const IN_VIRTUAL_TIME: [&str; 22] = [
    // The machine.
    "cancel-mark",
    "hand-over",
    "idempotence",
    "overtaking",
    "resume",
    "returned-token",
    // The client core.
    "cancelled",
    "counted-from-answer",
    "enqueued-once",
    "granted-again",
    "late-answer",
    "missing",
    "one-command",
    "queued-again",
    "reconnected",
    "released-again",
    "released-once",
    "repeated-release",
    "resent",
    "resent-in-order",
    "stays-lost",
    "taken-over",
];

fn is_known(rule: &str) -> bool {
    RULES.contains(&rule) || IN_VIRTUAL_TIME.contains(&rule)
}

/// Returns whether this rule is the one to break.
#[cfg(not(test))]
pub(crate) fn is(rule: &str) -> bool {
    static BROKEN: LazyLock<Option<String>> =
        LazyLock::new(|| std::env::var("LEASEHOLD_BROKEN").ok());
    debug_assert!(is_known(rule), "{rule} is not in the list");
    BROKEN.as_deref() == Some(rule)
}

#[cfg(test)]
std::thread_local! {
    static BROKEN: std::cell::Cell<Option<&'static str>> = const { std::cell::Cell::new(None) };
}

/// Returns whether this rule is the one to break on this thread.
#[cfg(test)]
pub(crate) fn is(rule: &str) -> bool {
    // Only while a rule is broken, because the model checker asks millions of times.
    BROKEN.get().is_some_and(|broken| {
        debug_assert!(is_known(rule), "{rule} is not in the list");
        broken == rule
    })
}

/// Breaks this rule on this thread while `work` runs.
#[cfg(test)]
#[allow(dead_code)] // see `broken.rs`
pub(crate) fn while_broken<T>(rule: Option<&'static str>, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<&'static str>);
    impl Drop for Restore {
        fn drop(&mut self) {
            BROKEN.set(self.0);
        }
    }
    let _restore = Restore(BROKEN.replace(rule));
    work()
}

/// For each rule, a text in the scripts and the text that replaces it.
pub(crate) const IN_LUA: [(&str, &str, &str); 25] = [
    // A release of an unknown id removes the longest holder.
    (
        "ownership",
        "    outcomes[n] = 'nobody'",
        "    outcomes[n] = 'nobody'; held = held - call('ZREMRANGEBYRANK', MAIN, 0, 0)",
    ),
    // The index of a lock outlives the lock, and the script does not check who holds the lock that the index leads to.
    ("ownership", "index_of(lock), 'PXAT', ends)", "index_of(lock))"),
    ("ownership", "KEYS[1], leads_to, 'PXAT', ends)", "KEYS[1], leads_to)"),
    ("ownership", "if record.lockId ~= id then return 0 end", ""),
    // A silent holder is never removed.
    ("expiry", "local dead = due(MAIN, held)", "local dead"),
    (
        "expiry",
        "local over, silent, unused = due(TTL, limited),",
        "local over, silent, unused = nil,",
    ),
    ("expiry", "math.ceil((last - NOW) / 1000) + 10000", "math.ceil((last - NOW) / 1000) + 600000"),
    ("expiry", "math.ceil(heartbeat / 1000) + 10000", "math.ceil(heartbeat / 1000) + 600000"),
    // A holder that was silent for a short time is removed, although it was promised a longer time.
    (
        "early",
        "local dead = due(MAIN, held)",
        "NOW_STAMP = stamp(NOW + 1200000) local dead = due(MAIN, held) NOW_STAMP = stamp(NOW)",
    ),
    (
        "lifo",
        "call('ZRANGE', WAITING, passed_over, last)",
        "call('ZREVRANGE', WAITING, passed_over, last)",
    ),
    ("lifo", "call('ZRANGE', waiting, 0, grants)", "call('ZREVRANGE', waiting, 0, grants)"),
    (
        "limit",
        "elseif nobody_before and fits(weight) then",
        "elseif nobody_before and fits(weight - 1) then",
    ),
    ("limit", "held + new > units", "held + new > units + 1"),
    ("limit", "math.min(capacity - held", "math.min(1 + capacity - held"),
    // A heavy permit counts as one unit.
    (
        "weights",
        "if share.weight > 1 then limits.extra, limits.changed = limits.extra + share.weight - 1, true end",
        "",
    ),
    ("pause", "return (limits.paused and 0 or capacity) - held", "return capacity - held"),
    // A smaller capacity that an operator sets has no effect.
    (
        "shrink",
        "return (limits.paused and 0 or capacity) - held",
        "return (limits.paused and 0 or math.max(capacity, tonumber(DECLARED))) - held",
    ),
    (
        "shrink",
        "local units = tonumber(capacity)",
        "local units = math.max(tonumber(capacity), tonumber(ARGV[1]))",
    ),
    // There is always a token.
    (
        "rate",
        "return not is_metered() or limits.full_at + limits.interval <= NOW + all_tokens()",
        "return true",
    ),
    // Every permit has slot number 1.
    ("slots", "local slot = call('BITPOS', SLOTS, 0) + 1", "local slot = 1"),
    (
        "fence",
        "last_fence = fence\n  unclaimed =",
        "fence = fence - fence % 1000000 last_fence = fence unclaimed =",
    ),
    ("fence", "fence = math.max(fence + 1, now)", "fence = now - now % 1000000"),
    ("fence", "last = math.max(last + 1, now)", "last = now - now % 1000000"),
    (
        "fence",
        "try('INCR', counter)",
        "try('INCRBY', counter, call('EXISTS', counter) == 1 and NOW % 2 or 1)",
    ),
    (
        "fence",
        "redis.pcall('INCR', counter)",
        "redis.pcall('INCRBY', counter, call('EXISTS', counter) == 1 and NOW % 2 or 1)",
    ),
];

/// Returns this part of a script, changed so that the rule to break is broken.
pub(crate) fn in_lua(part: String) -> String {
    let broken = IN_LUA.iter().filter(|(rule, _, _)| is(rule));
    broken.fold(part, |part, (_, stands, instead)| part.replace(stands, instead))
}
