//! Rules broken on purpose, one at a time, to see whether the torture test notices.
//!
//! Only with the feature `broken`, which nothing but that test turns on: then the environment variable `LEASEHOLD_BROKEN` names
//! the rule. Each is broken where it is kept, by a line or two that ask [`is`], or by [`in_lua`], which changes the
//! text of the scripts.
#![cfg_attr(not(feature = "redis"), allow(dead_code))]

use std::sync::LazyLock;

static RULE: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("LEASEHOLD_BROKEN").ok());

/// Whether this rule is the one that is broken.
pub(crate) fn is(rule: &str) -> bool {
    RULE.as_deref() == Some(rule)
}

/// Each with what stands in the script and what stands there instead.
pub(crate) const IN_LUA: [(&str, &str, &str); 20] = [
    // Whoever releases an id that is not there hits whoever holds longest.
    (
        "ownership",
        "    outcomes[n] = 'nobody'",
        "    outcomes[n] = 'nobody'; held = held - call('ZREMRANGEBYRANK', MAIN, 0, 0)",
    ),
    // The index of a lock outlives it, and nobody asks whose the lock is that it leads to.
    ("ownership", "index_of(lock), 'PXAT', ends)", "index_of(lock))"),
    ("ownership", "leads_to, 'PXAT', ends)", "leads_to)"),
    ("ownership", "if record.lockId ~= ARGV[first] then return 0 end", ""),
    // Whoever is silent is never removed.
    ("expiry", "local dead = due(MAIN, held)", "local dead"),
    (
        "expiry",
        "local over, silent, unused = due(TTL, limited),",
        "local over, silent, unused = nil,",
    ),
    ("expiry", "math.ceil((last - NOW) / 1000) + 10000", "math.ceil((last - NOW) / 1000) + 600000"),
    ("expiry", "math.ceil(heartbeat / 1000) + 10000", "math.ceil(heartbeat / 1000) + 600000"),
    // Whoever has not said a word for a little while is removed, though it was told that it has longer.
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
    (
        "limit",
        "elseif nobody_before and fits(weight) then",
        "elseif nobody_before and fits(weight - 1) then",
    ),
    ("limit", "and held + new <= capacity", "and held + new <= capacity + 1"),
    // A heavy permit counts as one among the holders.
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
    // No token is ever missing.
    (
        "rate",
        "return not is_metered() or limits.full_at + limits.interval <= NOW + all_tokens()",
        "return true",
    ),
    // Everybody has the first.
    ("slots", "local slot = call('BITPOS', SLOTS, 0) + 1", "local slot = 1"),
    (
        "fence",
        "local n = #infos\n  unclaimed =",
        "fence = fence - fence % 1000000 last_fence = fence local n = #infos\n  unclaimed =",
    ),
    ("fence", "fence = math.max(fence, NOW - 1)", "fence = NOW - NOW % 1000000"),
    (
        "fence",
        "redis.pcall('INCR', KEYS[keys + 3])",
        "redis.pcall('INCRBY', KEYS[keys + 3], call('EXISTS', KEYS[keys + 3]) == 1 and NOW % 2 or 1)",
    ),
];

/// A part of a script with the rule broken that it keeps, if that is the one.
pub(crate) fn in_lua(part: &str) -> String {
    let broken = IN_LUA.iter().filter(|(rule, _, _)| is(rule));
    broken.fold(part.to_owned(), |part, (_, stands, instead)| part.replace(stands, instead))
}
