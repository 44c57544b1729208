//! Statistics and information as JSON, for `serde`.
//!
//! All names of fields are here, because some values are computed. Durations are in seconds and their fields end with
//! `_seconds`, points in time are RFC 3339, fences are texts, and unknown values are null. A lock id is never written,
//! because it can release its lock.

use std::time::{Duration, SystemTime};

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::{
    ClientInfo, LockInfo, Outage, Paused, PoolMember, PoolStats, RateLimit, SemaphoreLimits,
    SemaphoreMember, SemaphoreStats, WaitsFor,
};

/// Writes `impl Serialize` with these fields, in this order.
macro_rules! serialize {
    ($type:ident, $it:ident, { $($name:literal: $value:expr),+ $(,)? }) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let $it = self;
                let mut object = serializer.serialize_struct(stringify!($type), [$($name),+].len())?;
                $(object.serialize_field($name, &$value)?;)+
                object.end()
            }
        }
    };
}

/// Returns the duration in seconds, rounded down to a millisecond, which stays readable.
#[allow(clippy::cast_precision_loss)] // exact for 285,000 years
fn seconds(duration: impl Into<Option<Duration>>) -> Option<f64> {
    duration.into().map(|duration| duration.as_millis() as f64 / 1000.0)
}

/// Returns the duration in seconds. A rate may be declared to the microsecond.
#[allow(clippy::cast_precision_loss)] // exact for 285 years
fn exact_seconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e6
}

fn timestamp(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

serialize!(SemaphoreStats, stats, {
    "name": stats.name,
    "capacity": stats.capacity,
    "declared": stats.declared,
    "pinned": stats.pinned,
    "paused": stats.paused,
    "rate": stats.rate,
    "next_token_seconds": seconds(stats.next_token),
    "held": stats.held,
    "held_units": stats.held_units,
    "waiting": stats.waiting,
    "waits_for": stats.waits_for,
    "oldest_hold_seconds": seconds(stats.oldest_hold()),
    "oldest_wait_seconds": seconds(stats.oldest_wait),
    "holders": stats.holders,
    "waiters": stats.waiters,
});

serialize!(SemaphoreLimits, limits, {
    "capacity": limits.capacity,
    "pinned": limits.pinned,
    "paused": limits.paused,
    "rate": limits.rate,
});

serialize!(Paused, paused, {
    "lasts_seconds": seconds(paused.lasts),
    "by": paused.by,
    "reason": paused.reason,
});

serialize!(RateLimit, rate, {
    "starts": rate.starts,
    "period_seconds": exact_seconds(rate.period),
    "burst": rate.burst,
    "interval_seconds": exact_seconds(rate.interval()),
});

impl Serialize for WaitsFor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

serialize!(SemaphoreMember, member, {
    "id": member.id,
    "slot_number": member.slot_number,
    "weight": member.weight,
    "host": member.host,
    "pid": member.pid,
    "label": member.label,
    "age_seconds": seconds(member.age),
    "silent_for_seconds": seconds(member.silent_for),
    "ttl_ends_in_seconds": seconds(member.ttl_ends_in),
    "expires_in_seconds": seconds(member.expires_in),
    "fence": member.fence,
});

serialize!(LockInfo, info, {
    "key": info.key,
    "key_hash": info.key_hash,
    "id_hash": info.id_hash,
    "host": info.host,
    "pid": info.pid,
    "label": info.label,
    "acquired_at": timestamp(info.acquired_at),
    "age_seconds": seconds(info.age()),
    "expires_at": timestamp(info.expires_at),
    "expires_in_seconds": seconds(info.expires_in()),
    "fence": info.fence,
});

serialize!(PoolStats, pool, {
    "name": pool.name,
    "held": pool.members.len(),
    "members": pool.members,
});

serialize!(PoolMember, member, {
    "id": member.id,
    "silent_for_seconds": seconds(member.silent_for),
    "expires_in_seconds": seconds(member.expires_in),
});

serialize!(ClientInfo, client, {
    "id": client.id,
    "host": client.host,
    "pid": client.pid,
    "program": client.program,
    "since": client.since.map(timestamp),
});

serialize!(Outage, outage, {
    "lasts_seconds": seconds(outage.since.elapsed()),
    "error": outage.error.to_string(),
});
