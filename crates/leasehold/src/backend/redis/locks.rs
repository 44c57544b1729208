//! Locks on Redis: keys, and one script an operation.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redis::{Cmd, Value};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::link::Link;
use super::scripts::Scripts;
use super::stats;
use crate::backend::{Later, LockStore, Wake};
use crate::machine::lock::{Acquired, By, CLEAN_UP_AFTER_MS, Record, Verdict, is_live};
use crate::name::Name;
use crate::{ClientId, Error, Fence, LockId};

#[cfg(test)]
mod tests;

/// The longest storage key, in bytes.
const MAX_KEY_BYTES: usize = 1000;
/// What a storage key is cut down to, beside its prefix: 16 bytes in base64url.
#[cfg(test)]
const HASH_BYTES: usize = 22;

/// Above this, a fence counter is in danger of its end at 2^63.
const FENCE_WARNING: u64 = 9_000_000_000_000_000_000;

pub(super) const PRELUDE: &str = include_str!("lua/lock/prelude.lua");

/// The scripts, in the order of their bodies.
#[derive(Clone, Copy, Debug)]
enum Script {
    Acquire,
    Release,
    Extend,
    IsLocked,
    Lookup,
}

/// What follows the prelude.
pub(super) const BODIES: [&str; 5] = [
    include_str!("lua/lock/acquire.lua"),
    include_str!("lua/lock/release.lua"),
    include_str!("lua/lock/extend.lua"),
    include_str!("lua/lock/is_locked.lua"),
    include_str!("lua/lock/lookup.lua"),
];

/// How the keys of locks begin.
#[derive(Clone, Debug)]
pub(crate) struct Prefix(String);

impl Prefix {
    /// # Errors
    /// If it is longer than a name may be: then it would not leave room for what follows.
    pub(crate) fn new(text: &str) -> Result<Self, Error> {
        let text = Name::new("lock prefix", text)?.to_string();
        // One that brings its own colon gets no second one.
        Ok(Self(if text.ends_with(':') { text } else { text + ":" }))
    }

    /// The storage key, cut down if it would be too long.
    pub(super) fn storage_key(&self, kind: &str, rest: &str) -> String {
        let Self(prefix) = self;
        let whole = format!("{prefix}{kind}{rest}");
        if whole.len() <= MAX_KEY_BYTES {
            return whole;
        }
        let hash = Sha256::digest(whole.as_bytes());
        format!("{prefix}{}", URL_SAFE_NO_PAD.encode(&hash[..16]))
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self("syncguard:".to_owned())
    }
}

/// The typed calls of the scripts: the one place that knows the order of their KEYS and ARGV.
pub(super) struct Calls {
    prefix: Prefix,
    namespace: String,
    client: ClientId,
    /// The hashes of the scripts.
    hashes: [String; 5],
}

impl Calls {
    pub(super) fn new(
        scripts: &Scripts,
        prefix: Prefix,
        namespace: &str,
        client: ClientId,
    ) -> Self {
        let hashes = std::array::from_fn(|at| scripts.locks[at].hash.clone());
        Self { prefix, namespace: namespace.to_owned(), client, hashes }
    }

    fn script(&self, script: Script, keys: &[&str]) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.hashes[script as usize]).arg(keys.len()).arg(keys);
        cmd
    }

    pub(super) fn acquire(&self, key: &Name, id: LockId, ttl: u64, wake: Wake) -> Cmd {
        let lock = self.prefix.storage_key("", key.as_str());
        let index = self.prefix.storage_key("id:", id.as_str());
        let fence = self.prefix.storage_key("fence:", key.as_str());
        let waiting = format!("{}:lock_waiting:{lock}", self.namespace);
        let mut cmd = self.script(Script::Acquire, &[&lock, &index, &fence, &waiting]);
        cmd.arg(id.as_str()).arg(ttl).arg(serde_json::Value::from(key.as_str()).to_string());
        cmd.arg(&self.prefix.0).arg(match wake {
            Wake::Never => "never",
            Wake::IfLocked => "if_locked",
            Wake::Always => "always",
        });
        if wake != Wake::Never {
            cmd.arg(self.client.to_string());
        }
        cmd
    }

    pub(super) fn release(&self, id: LockId) -> Cmd {
        let index = self.prefix.storage_key("id:", id.as_str());
        let mut cmd = self.script(Script::Release, &[&index]);
        cmd.arg(id.as_str()).arg(&self.prefix.0).arg(&self.namespace);
        cmd
    }

    pub(super) fn extend(&self, id: LockId, ttl: u64) -> Cmd {
        let index = self.prefix.storage_key("id:", id.as_str());
        let mut cmd = self.script(Script::Extend, &[&index]);
        cmd.arg(id.as_str()).arg(&self.prefix.0).arg(ttl);
        cmd
    }

    pub(super) fn is_locked(&self, key: &Name, clean_up: bool) -> Cmd {
        let lock = self.prefix.storage_key("", key.as_str());
        let mut cmd = self.script(Script::IsLocked, &[&lock]);
        if clean_up {
            cmd.arg(CLEAN_UP_AFTER_MS)
        } else {
            cmd.arg("-")
        };
        cmd.arg(format!("{}id:", self.prefix.0));
        cmd
    }

    pub(super) fn lookup(&self, by: &By) -> Cmd {
        let (key, id) = match by {
            By::Key(key) => (self.prefix.storage_key("", key.as_str()), "-"),
            By::Id(id) => (self.prefix.storage_key("id:", id.as_str()), id.as_str()),
        };
        let mut cmd = self.script(Script::Lookup, &[&key]);
        cmd.arg(id).arg(&self.prefix.0);
        cmd
    }
}

/// The locks of one server.
pub(super) struct RedisLocks {
    link: Arc<Link>,
    calls: Calls,
}

impl RedisLocks {
    pub(super) fn new(link: Arc<Link>, client: ClientId) -> Self {
        let settings = &link.settings;
        let prefix = settings.lock_prefix.clone();
        let calls = Calls::new(&link.scripts, prefix, &settings.namespace, client);
        Self { link, calls }
    }

    fn send<T: Send + 'static>(
        &self,
        cmd: Cmd,
        decode: fn(&Value) -> Result<T, String>,
    ) -> Later<T> {
        let link = self.link.clone();
        Box::pin(async move {
            let answer = link.send(vec![cmd]).await?.pop().unwrap_or(Value::Nil);
            decode(&answer).map_err(Error::internal)
        })
    }
}

impl LockStore for RedisLocks {
    fn acquire(&self, key: &Name, id: LockId, ttl: u64, wake: Wake) -> Later<Acquired> {
        self.send(self.calls.acquire(key, id, ttl, wake), decode_acquired)
    }

    fn release(&self, id: LockId) -> Later<Verdict<Option<Name>>> {
        // Who waits is told by the script.
        self.send(self.calls.release(id), |value| verdict(value, None))
    }

    fn extend(&self, id: LockId, ttl: u64) -> Later<Verdict<u64>> {
        self.send(self.calls.extend(id, ttl), decode_extended)
    }

    fn is_locked(&self, key: &Name, clean_up: bool) -> Later<bool> {
        self.send(self.calls.is_locked(key, clean_up), |value| Ok(number(value)? == 1))
    }

    fn lookup(&self, by: By) -> Later<Option<Record>> {
        // What the scripts take for a lock may still have an id or a key that cannot be ours.
        let found = self.send(self.calls.lookup(&by), |value| Ok(decode_record(value)));
        let what = match &by {
            By::Key(key) => format!("{:?}", self.calls.prefix.storage_key("", key.as_str())),
            By::Id(_) => "the key of that lock id".to_owned(),
        };
        Box::pin(async move {
            found.await?.map_err(|problem| {
                Error::invalid("key", format!("{what} holds something that is not ours: {problem}"))
            })
        })
    }

    fn list(&self, limit: usize) -> Later<Vec<Record>> {
        let (link, prefix) = (self.link.clone(), self.calls.prefix.0.clone());
        Box::pin(async move {
            let mut keys = stats::scan(&link, &format!("{}*", stats::escaped(&prefix))).await?;
            let (fences, ids) = (format!("{prefix}fence:"), format!("{prefix}id:"));
            keys.retain(|key| !key.starts_with(&fences) && !key.starts_with(&ids));
            let get = |key| {
                let mut get = redis::cmd("GET");
                get.arg(key);
                get
            };
            let mut records = Vec::new();
            for keys in keys.into_iter().collect::<Vec<_>>().chunks(100) {
                // One at a time, as some may be none of ours.
                let time = redis::cmd("TIME");
                let calls = [time].into_iter().chain(keys.iter().map(get)).collect();
                let mut answers = link.send_each(calls).await?.into_iter();
                let (seconds, micros): (u64, u64) =
                    stats::read(answers.next().unwrap_or(Ok(Value::Nil))?)?;
                let now = seconds * 1000 + micros / 1000;
                let found = answers.filter_map(|answer| decode_record(&answer.ok()?).ok()?);
                records.extend(found.filter(|record| is_live(record.expires_at, now)));
            }
            records.sort_by(|a: &Record, b| a.key.cmp(&b.key));
            records.truncate(limit);
            Ok(records)
        })
    }
}

pub(super) fn decode_acquired(value: &Value) -> Result<Acquired, String> {
    let Value::Array(fields) = value else { return Err(format!("acquire answered {value:?}")) };
    let [held, fence, expires_at, remaining] = &fields[..] else {
        return Err(format!("acquire answered {value:?}"));
    };
    let remaining = number(remaining)?;
    if number(held)? == 0 {
        return Ok(Acquired::Locked { remaining });
    }
    Ok(Acquired::Held { fence: decode_fence(fence)?, expires_at: number(expires_at)?, remaining })
}

fn decode_fence(value: &Value) -> Result<Fence, String> {
    let Value::BulkString(digits) = value else { return Err(format!("{value:?} is no fence")) };
    let digits = String::from_utf8_lossy(digits);
    let fence: Fence = digits.parse().map_err(|_| format!("{digits:?} is no fence"))?;
    if fence.get() > FENCE_WARNING {
        tracing::warn!(%fence, "the fence counter is near its end at 2^63: use another key");
    }
    Ok(fence)
}

pub(super) fn decode_extended(value: &Value) -> Result<Verdict<u64>, String> {
    match value {
        Value::Array(fields) if fields.len() == 2 => {
            let expires_at = number(&fields[1])?;
            verdict(&fields[0], expires_at)
        }
        other => Err(format!("extend answered {other:?}")),
    }
}

pub(super) fn verdict<T>(value: &Value, done: T) -> Result<Verdict<T>, String> {
    match value {
        Value::Int(1) => Ok(Verdict::Done(done)),
        Value::Int(0) => Ok(Verdict::NotOwner),
        Value::Int(-1) => Ok(Verdict::NotFound),
        Value::Int(-2) => Ok(Verdict::Expired),
        other => Err(format!("it answered {other:?}")),
    }
}

/// A record as it is stored. Another program may have written it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    lock_id: String,
    expires_at_ms: f64,
    acquired_at_ms: f64,
    key: String,
    fence: String,
}

pub(super) fn decode_record(value: &Value) -> Result<Option<Record>, String> {
    let text = match value {
        Value::Nil => return Ok(None),
        Value::BulkString(text) => text,
        other => return Err(format!("lookup answered {other:?}")),
    };
    let stored: Stored = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // milliseconds
    let millis = |number: f64| number as u64;
    Ok(Some(Record {
        key: Name::new("key", &stored.key).map_err(|error| error.to_string())?,
        id: stored.lock_id.parse().map_err(|error: Error| error.to_string())?,
        acquired_at: millis(stored.acquired_at_ms),
        expires_at: millis(stored.expires_at_ms),
        fence: stored.fence.parse().map_err(|error: Error| error.to_string())?,
    }))
}

fn number(value: &Value) -> Result<u64, String> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|error| error.to_string()),
        other => Err(format!("{other:?} is not a number")),
    }
}
