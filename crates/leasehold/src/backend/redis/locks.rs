//! Locks on Redis: keys, and one script an operation.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redis::{Cmd, Value};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::link::Link;
use super::scripts::{Scripts, with_branches};
use super::stats;
use crate::engine::foreign::event;
use crate::machine::lock::{
    Acquired, By, CLEAN_UP_AFTER_MS, Holder, LockCommand, LockOutcome, NotifyWhen, Record, Verdict,
    is_live,
};
use crate::name::Name;
use crate::{ClientId, Error, Fence};

#[cfg(test)]
mod tests;

/// The longest storage key, in bytes.
const MAX_KEY_BYTES: usize = 1000;
/// What a storage key is cut down to, beside its prefix: 16 bytes in base64url.
#[cfg(test)]
const HASH_BYTES: usize = 22;

/// Above this, a fence counter is in danger of its end at 2^63.
const FENCE_WARNING: u64 = 9_000_000_000_000_000_000;

/// What stands before the commands: those that are served at once, and what the others share.
pub(super) const PRELUDE: &str =
    concat!(include_str!("lua/lock/straight.lua"), include_str!("lua/lock/prelude.lua"));

/// What serves one command after the other.
const APPLY: &str = include_str!("lua/lock/apply.lua");

/// The commands, each with its word.
const COMMANDS: [(&str, &str); 5] = [
    ("acquire", include_str!("lua/lock/acquire.lua")),
    ("release", include_str!("lua/lock/release.lua")),
    ("extend", include_str!("lua/lock/extend.lua")),
    ("is_locked", include_str!("lua/lock/is_locked.lua")),
    ("lookup", include_str!("lua/lock/lookup.lua")),
];

/// What follows the prelude.
pub(super) fn with_commands() -> String {
    with_branches(APPLY, "-- COMMANDS\n", "command", &COMMANDS)
}

/// How the keys of locks begin.
#[derive(Clone, Debug)]
pub(crate) struct Prefix(String);

impl Prefix {
    /// # Errors
    /// If it is longer than a name may be: then it would not leave room for what follows.
    pub(crate) fn new(text: &str) -> Result<Self, Error> {
        let text = Name::normalised("lock prefix", text)?.to_string();
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

/// How the keys and values of locks on Redis are spelled: as one of the two versions of `SyncGuard` does.
///
/// Both exclude each other, but they count fences in different places. A client that finds a lock or a fence of the other
/// layout under its key refuses it with [`Error::InvalidArgument`].
///
/// ```
/// use leasehold::LockLayout;
///
/// assert_eq!("syncguard-2".parse::<LockLayout>()?, LockLayout::SyncGuard2);
/// assert_eq!(LockLayout::default().to_string(), "syncguard-1");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum LockLayout {
    /// `SyncGuard` 1.x.
    #[default]
    SyncGuard1,
    /// `SyncGuard` 2.x.
    SyncGuard2,
}

impl fmt::Display for LockLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SyncGuard1 => "syncguard-1",
            Self::SyncGuard2 => "syncguard-2",
        })
    }
}

impl FromStr for LockLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let known = [Self::SyncGuard1, Self::SyncGuard2];
        let found = known.into_iter().find(|layout| layout.to_string() == text);
        found.ok_or_else(|| {
            let problem = format!("{text:?} is none: give syncguard-1 or syncguard-2");
            Error::invalid("lock layout", problem)
        })
    }
}

/// The typed calls of the script: the one place that knows the order of its KEYS and ARGV.
pub(super) struct Calls {
    prefix: Prefix,
    layout: LockLayout,
    namespace: String,
}

impl Calls {
    pub(super) fn new(prefix: Prefix, layout: LockLayout, namespace: &str) -> Self {
        Self { prefix, layout, namespace: namespace.to_owned() }
    }

    /// The one call that asks for all of these commands.
    pub(super) fn apply(
        &self,
        scripts: &Scripts,
        client: ClientId,
        commands: &[&LockCommand],
    ) -> Cmd {
        let spelled: Vec<_> = commands.iter().map(|command| self.spell(command)).collect();
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&scripts.locks.hash);
        cmd.arg(spelled.iter().map(|(_, keys, _)| keys.len()).sum::<usize>());
        for (_, keys, _) in &spelled {
            cmd.arg(keys);
        }
        cmd.arg(&self.prefix.0).arg(&self.namespace).arg(client.to_string());
        cmd.arg(self.layout.to_string());
        for (word, _, arguments) in &spelled {
            cmd.arg(*word).arg(arguments);
        }
        cmd
    }

    /// A command's word, its KEYS and its ARGV.
    fn spell(&self, command: &LockCommand) -> (&'static str, Vec<String>, Vec<String>) {
        let index = |id: &str| self.prefix.storage_key("id:", id);
        let lock = |key: &Name| self.prefix.storage_key("", key.as_str());
        match command {
            LockCommand::Acquire { key, id, ttl, notify, holder, expected } => {
                let lock = lock(key);
                let counted = match self.layout {
                    LockLayout::SyncGuard1 => key.as_str(),
                    LockLayout::SyncGuard2 => &lock,
                };
                let fence = self.prefix.storage_key("fence:", counted);
                let waiting = self.waiting(&lock);
                let json = json(key.as_str());
                let notify = match notify {
                    NotifyWhen::Never => "never",
                    NotifyWhen::IfLocked => "if_locked",
                    NotifyWhen::Always => "always",
                };
                let (id, ttl, notify) = (id.as_str(), ttl.to_string(), notify.to_owned());
                let digits = match self.layout {
                    LockLayout::SyncGuard1 => 19,
                    LockLayout::SyncGuard2 => 15,
                };
                let expected = match expected {
                    Some(fence) => format!("{:0digits$}", fence.get()),
                    None => "-".to_owned(),
                };
                let arguments = vec![id.to_owned(), ttl, json, notify, members(holder), expected];
                ("acquire", vec![lock, index(id), fence, waiting], arguments)
            }
            LockCommand::Release { id, held } => {
                let arguments = vec![id.as_str().to_owned()];
                match held.as_ref().map(lock) {
                    Some(lock) => {
                        let waiting = self.waiting(&lock);
                        ("release_held", vec![index(id.as_str()), lock, waiting], arguments)
                    }
                    None => ("release", vec![index(id.as_str())], arguments),
                }
            }
            LockCommand::Extend { id, ttl } => {
                let arguments = vec![id.as_str().to_owned(), ttl.to_string()];
                ("extend", vec![index(id.as_str())], arguments)
            }
            LockCommand::IsLocked { key, clean_up } => {
                let after = if *clean_up { CLEAN_UP_AFTER_MS.to_string() } else { "-".to_owned() };
                ("is_locked", vec![lock(key)], vec![after])
            }
            LockCommand::Lookup(By::Key(key)) => ("lookup", vec![lock(key)], vec!["-".to_owned()]),
            LockCommand::Lookup(By::Id(id)) => {
                ("lookup", vec![index(id.as_str())], vec![id.as_str().to_owned()])
            }
        }
    }

    /// Where the clients are noted that wait for a lock.
    fn waiting(&self, lock: &str) -> String {
        format!("{}:lock_waiting:{lock}", self.namespace)
    }

    /// Reads the answer to one command.
    pub(super) fn decode(
        &self,
        command: &LockCommand,
        value: &Value,
    ) -> Result<LockOutcome, Error> {
        let outcome = match command {
            LockCommand::Acquire { .. } => decode_acquired(value).map(LockOutcome::Acquire),
            // Whoever waits is notified by the script.
            LockCommand::Release { .. } => verdict(value, None).map(LockOutcome::Release),
            LockCommand::Extend { .. } => decode_extended(value).map(LockOutcome::Extend),
            LockCommand::IsLocked { .. } => {
                number(value).map(|number| LockOutcome::IsLocked(number == 1))
            }
            LockCommand::Lookup(by) => {
                // What the script takes for a lock may still have an id or a key that cannot be ours.
                return decode_record(value).map(LockOutcome::Lookup).map_err(|problem| {
                    let what = match by {
                        By::Key(key) => format!("{:?}", self.prefix.storage_key("", key.as_str())),
                        By::Id(_) => "the key of that lock id".to_owned(),
                    };
                    let problem = format!("{what} holds something that is not ours: {problem}");
                    Error::invalid("key", problem)
                });
            }
        };
        outcome.map_err(Error::internal)
    }

    /// The locks that are held, by key.
    pub(super) async fn list(&self, link: &Link, limit: usize) -> Result<Vec<Record>, Error> {
        let prefix = &self.prefix.0;
        let mut keys = stats::scan(link, &format!("{}*", stats::escaped(prefix))).await?;
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
    let fence = digits.parse().map(Fence::new).map_err(|_| format!("{digits:?} is no fence"))?;
    if fence.get() > FENCE_WARNING {
        event!(warn, %fence, "the fence counter is near its end at 2^63: use another key");
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

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// What is known of the holder, as further members of the record's JSON: each after a comma.
fn members(holder: &Holder) -> String {
    let Holder { host, pid, label } = holder;
    let host = host.as_ref().map(|host| format!(",\"host\":{}", json(host)));
    let pid = pid.map(|pid| format!(",\"pid\":{pid}"));
    let label = label.as_ref().map(|label| format!(",\"label\":{}", json(label)));
    [host, pid, label].into_iter().flatten().collect()
}

/// The holder in the JSON of a record. The layout does not know these fields, so that another program may have written
/// anything: what cannot be ours is unknown, and never an error.
fn decode_holder(record: &[u8]) -> Holder {
    let record = String::from_utf8_lossy(record);
    let record: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&record).unwrap_or_default();
    let text = |field: &str| {
        let text = Name::new("holder", record.get(field)?.as_str()?).ok()?;
        Some(text.into_text())
    };
    let pid = record.get("pid").and_then(|pid| u32::try_from(pid.as_u64()?).ok());
    Holder { host: text("host"), pid, label: text("label") }
}

pub(super) fn decode_record(value: &Value) -> Result<Option<Record>, String> {
    let text = match value {
        Value::Nil => return Ok(None),
        Value::BulkString(text) => text,
        other => return Err(format!("lookup answered {other:?}")),
    };
    let stored: Stored = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    // As the scripts have it.
    let is_time = |millis: f64| (0.0..1e14).contains(&millis);
    if !is_time(stored.acquired_at_ms) || !is_time(stored.expires_at_ms) {
        return Err("its times cannot be".to_owned());
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // milliseconds
    let millis = |number: f64| number as u64;
    Ok(Some(Record {
        key: Name::normalised("key", &stored.key).map_err(|error| error.to_string())?,
        id: stored.lock_id.parse().map_err(|error: Error| error.to_string())?,
        acquired_at: millis(stored.acquired_at_ms),
        expires_at: millis(stored.expires_at_ms),
        fence: stored
            .fence
            .parse()
            .map(Fence::new)
            .map_err(|_| format!("{:?} is no fence", stored.fence))?,
        holder: Arc::new(decode_holder(text)),
    }))
}

fn number(value: &Value) -> Result<u64, String> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|error| error.to_string()),
        other => Err(format!("{other:?} is not a number")),
    }
}
