//! Locks on Redis: their keys, and the script that applies all commands.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::command::RedisCommand;
use super::scripts::{Scripts, unexpected, with_branches};
use super::slots::{KeyTag, channel_end};
use super::stats;
use super::topology::Topology;
use super::value::Value;
use crate::backend::Slot;
use crate::callbacks::event;
use crate::machine::lock::{
    Acquired, CLEAN_UP_AFTER_MS, Holder, LockCommand, LockOutcome, LockRef, NotifyWhen, Record,
    Verdict, is_live,
};
use crate::name::Name;
use crate::{ClientId, Error, Fence, LockId};

#[cfg(test)]
mod tests;

/// The length of the hash that replaces a longer storage key after its prefix: 16 bytes in base64url.
#[cfg(test)]
const HASH_BYTES: usize = 22;

/// The length of the longest value of a lock that can be ours, in bytes. Other programs may have stored anything, so no
/// more than that is read.
pub(super) const LONGEST_RECORD: usize = 16_384;

/// The most keys of a command.
const MOST_KEYS: usize = 5;

/// Above this number, a fence counter is close to its maximum of 2^63.
const FENCE_WARNING: u64 = 9_000_000_000_000_000_000;

/// How much longer than its lock an index is kept in a cluster, in milliseconds. It is written later than the lock, and
/// expires by another server's clock.
const INDEX_LONGER: u64 = 1000;

/// The beginning of the script: the fast path for the common cases, and the functions that all commands share.
pub(super) const PRELUDE: &str =
    concat!(include_str!("lua/lock/fast_path.lua"), include_str!("lua/lock/prelude.lua"));

/// The end of the script: it applies one command after the other.
const APPLY: &str = include_str!("lua/lock/apply.lua");

/// The commands, each with its name in the script.
const COMMANDS: [(&str, &str); 5] = [
    ("acquire", include_str!("lua/lock/acquire.lua")),
    ("release", include_str!("lua/lock/release.lua")),
    ("extend", include_str!("lua/lock/extend.lua")),
    ("is_locked", include_str!("lua/lock/is_locked.lua")),
    ("lookup", include_str!("lua/lock/lookup.lua")),
];

/// Returns the part of the script that follows the prelude.
pub(super) fn with_commands() -> String {
    with_branches(APPLY, "-- COMMANDS\n", "command", &COMMANDS)
}

/// The prefix of the keys of locks.
#[derive(Clone, Debug)]
pub(crate) struct Prefix(String);

impl Prefix {
    /// # Errors
    /// [`Error::InvalidArgument`] if the prefix is empty, longer than a name may be, or contains a control character.
    pub(crate) fn new(text: &str) -> Result<Self, Error> {
        let text = Name::normalised("lock prefix", text)?.to_string();
        // A prefix that ends with a colon gets no second one.
        Ok(Self(if text.ends_with(':') { text } else { text + ":" }))
    }

    /// Returns the storage key in this layout. A key that would be too long is replaced by its hash.
    pub(super) fn storage_key(&self, layout: LockLayout, kind: &str, rest: &str) -> String {
        let Self(prefix) = self;
        let whole = [prefix, kind, rest].concat();
        if whole.len() <= layout.longest_key() {
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

/// The layout of the keys and values of locks on Redis: that of one of the two versions of `SyncGuard`.
///
/// A lock of one layout also excludes clients of the other, but the two layouts count fences in different keys. A
/// client that finds a lock or a fence counter of the other layout under its key fails with [`Error::InvalidArgument`].
///
/// ```
/// use leasehold::compat::sync_guard::LockLayout;
///
/// assert_eq!("syncguard-2".parse::<LockLayout>()?, LockLayout::SyncGuard2);
/// assert_eq!(LockLayout::default().to_string(), "syncguard-1");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum LockLayout {
    /// The layout of `SyncGuard` 1.x.
    #[default]
    SyncGuard1,
    /// The layout of `SyncGuard` 2.x.
    SyncGuard2,
}

impl LockLayout {
    /// Returns the length of the longest storage key, in bytes. A longer one is replaced by its hash.
    fn longest_key(self) -> usize {
        match self {
            Self::SyncGuard1 => 1000,
            // It leaves room for 26 bytes more.
            Self::SyncGuard2 => 974,
        }
    }

    /// Returns the number of digits of a fence.
    fn digits(self) -> usize {
        match self {
            Self::SyncGuard1 => 19,
            Self::SyncGuard2 => 15,
        }
    }
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
            let problem = format!("{text:?} is unknown: expected syncguard-1 or syncguard-2");
            Error::invalid("lock layout", problem)
        })
    }
}

/// The typed calls of the script: the only place that knows the order of its KEYS and ARGV.
pub(super) struct LockScripts {
    prefix: Prefix,
    layout: LockLayout,
    namespace: String,
    /// How keys are written, if the server is a node of a cluster.
    cluster: Option<KeyTag>,
}

/// A change to the index of a lock, which the client maintains in a cluster.
pub(super) enum IndexChange {
    Write(RedisCommand),
    Remove(RedisCommand),
}

impl LockScripts {
    pub(super) fn new(prefix: Prefix, layout: LockLayout, namespace: &str) -> Self {
        // `SyncGuard` 2 ignores all colons at the end of a prefix, and adds one.
        let prefix = match (layout, prefix.0.trim_end_matches(':')) {
            (LockLayout::SyncGuard2, rest) if !rest.is_empty() => Prefix(format!("{rest}:")),
            _ => prefix,
        };
        Self { prefix, layout, namespace: namespace.to_owned(), cluster: None }
    }

    /// Returns the same calls for a cluster.
    pub(super) fn in_cluster(self) -> Result<Self, Error> {
        let cluster = Some(KeyTag::below("lock prefix", &self.prefix.0)?);
        // The set of waiting clients must be in the slot of the lock, so the hash tag must not be the namespace's.
        let namespace = self.namespace.replace(['{', '}'], "");
        Ok(Self { namespace, cluster, ..self })
    }

    /// Returns [`Error::InvalidArgument`] if this key cannot be stored.
    pub(super) fn check(&self, key: &Name) -> Result<(), Error> {
        let Some(key_tag) = self.cluster else { return Ok(()) };
        key_tag.check("key", key.as_str())?;
        // A hashed key would have no hash tag any more.
        let (prefix, written) = (&self.prefix.0, key_tag.write(key.as_str()));
        let longest = format!("{prefix}fence:{prefix}{written}").len();
        let limit = self.layout.longest_key();
        if longest > limit {
            let problem =
                format!("with its prefix it is {longest} bytes; the limit in a cluster is {limit}");
            return Err(Error::invalid("key", problem + ": choose a shorter key or prefix"));
        }
        Ok(())
    }

    /// Returns the storage key of a lock.
    pub(super) fn lock(&self, key: &Name) -> String {
        self.lock_in(self.layout, key)
    }

    /// Returns the storage key of a lock in one of the layouts.
    fn lock_in(&self, layout: LockLayout, key: &Name) -> String {
        let written = self.cluster.map(|key_tag| key_tag.write(key.as_str()));
        self.prefix.storage_key(layout, "", written.as_deref().unwrap_or(key.as_str()))
    }

    /// Returns the storage key of the index of a lock id.
    pub(super) fn index(&self, id: &LockId) -> String {
        self.prefix.storage_key(self.layout, "id:", id.as_str())
    }

    /// Returns the fence counters of a lock, in this layout and in the other.
    fn counters(&self, key: &Name) -> [String; 2] {
        let written = self.cluster.map(|key_tag| key_tag.write(key.as_str()));
        let written = written.as_deref().unwrap_or(key.as_str());
        let lock = self.lock_in(LockLayout::SyncGuard2, key);
        let first = self.prefix.storage_key(LockLayout::SyncGuard1, "fence:", written);
        let second = self.prefix.storage_key(LockLayout::SyncGuard2, "fence:", &lock);
        match self.layout {
            LockLayout::SyncGuard1 => [first, second],
            LockLayout::SyncGuard2 => [second, first],
        }
    }

    /// Returns the channel that a client must subscribe to before it sends this command. `None` outside of a cluster.
    pub(super) fn channel(
        &self,
        command: &LockCommand,
        slot: Slot,
        client: ClientId,
    ) -> Option<String> {
        match command {
            LockCommand::Acquire { notify, .. } if *notify != NotifyWhen::Never => {
                self.cluster?;
                Some(format!("{}:wake:{client}{}", self.namespace, channel_end(slot)))
            }
            _ => None,
        }
    }

    /// Returns the change to the index that follows from an answer in a cluster.
    pub(super) fn index_after(
        &self,
        command: &LockCommand,
        outcome: &LockOutcome,
    ) -> Option<IndexChange> {
        let write = |id, key: &Name, ttl: u64| {
            let lock = self.lock(key);
            let set = RedisCommand::new("SET").arg(self.index(id)).arg(self.index_value(&lock));
            Some(IndexChange::Write(set.arg("PX").arg_fmt(ttl + INDEX_LONGER)))
        };
        match (command, outcome) {
            (
                LockCommand::Acquire { id, key, .. },
                LockOutcome::Acquire(Acquired::Held { remaining, .. }),
            ) => write(id, key, *remaining),
            (
                LockCommand::Extend { id, key: Some(key), ttl, .. },
                LockOutcome::Extend(Verdict::Done(_)),
            ) => write(id, key, *ttl),
            (LockCommand::Release { id, .. }, LockOutcome::Release(_)) => {
                Some(IndexChange::Remove(RedisCommand::new("DEL").arg(self.index(id))))
            }
            _ => None,
        }
    }

    /// Returns the value of the index of a lock.
    fn index_value<'a>(&self, lock: &'a str) -> &'a str {
        match self.layout {
            LockLayout::SyncGuard1 => &lock[self.prefix.0.len()..],
            LockLayout::SyncGuard2 => lock,
        }
    }

    /// Returns the key that the index of this id points to.
    pub(super) async fn key_of(
        &self,
        topology: &Topology,
        id: &LockId,
    ) -> Result<Option<Name>, Error> {
        let get = stats::beginning(&self.index(id), LONGEST_RECORD);
        let found: String = stats::ask_one(topology, get).await?;
        if found.is_empty() {
            return Ok(None);
        }
        let written = match self.layout {
            LockLayout::SyncGuard1 => &found[..],
            LockLayout::SyncGuard2 => found.strip_prefix(&self.prefix.0).unwrap_or(&found),
        };
        let key = self.cluster.map_or(written, |key_tag| key_tag.read(written));
        Name::normalised("key", key).map(Some).map_err(|problem| {
            Error::foreign(format!("{:?} does not contain a key: {problem}", self.index(id)))
        })
    }

    /// Returns the call that applies this command to a lock of this slot.
    pub(super) fn call(
        &self,
        scripts: &Scripts,
        client: ClientId,
        slot: Slot,
        command: &LockCommand,
    ) -> RedisCommand {
        let mut keys = Vec::with_capacity(MOST_KEYS);
        let word = self.add_keys(command, &mut keys);
        let mut call = RedisCommand::script_call(&scripts.locks.hash);
        call.push_fmt(keys.len());
        call = call.args(&keys).arg(&self.prefix.0).arg(&self.namespace);
        call = call.arg_fmt(client).arg_fmt(self.layout);
        call.push(self.cluster.map(|_| channel_end(slot)).unwrap_or_default());
        call.push(word);
        self.add_arguments(command, &mut call);
        call
    }

    /// Adds the KEYS of a command, and returns its name in the script.
    fn add_keys(&self, command: &LockCommand, keys: &mut Vec<String>) -> &'static str {
        let is_cluster = self.cluster.is_some();
        // In a cluster the index is left out, because it is in another slot.
        let index = |id: &LockId| (!is_cluster).then(|| self.index(id));
        match command {
            LockCommand::Acquire { key, id, .. } => {
                let (lock, [fence, other]) = (self.lock(key), self.counters(key));
                let waiting = self.waiting(&lock);
                keys.extend(index(id).into_iter().chain([lock, fence, waiting, other]));
                "acquire"
            }
            LockCommand::Release { id, key: Some(key), held } if *held || is_cluster => {
                let lock = self.lock(key);
                let waiting = self.waiting(&lock);
                keys.extend(index(id).into_iter().chain([lock, waiting]));
                if *held { "release_held" } else { "release" }
            }
            LockCommand::Release { id, key, .. } | LockCommand::Extend { id, key, .. } => {
                // The index, or in a cluster the lock.
                let key = key.as_ref().filter(|_| is_cluster);
                keys.push(key.map_or_else(|| self.index(id), |key| self.lock(key)));
                if matches!(command, LockCommand::Extend { .. }) { "extend" } else { "release" }
            }
            LockCommand::IsLocked { key, .. } => {
                keys.push(self.lock(key));
                "is_locked"
            }
            LockCommand::Lookup(by) => {
                keys.push(match by {
                    LockRef::Key(key) => self.lock(key),
                    LockRef::Id(id) => self.index(id),
                });
                "lookup"
            }
        }
    }

    /// Adds the ARGV of a command.
    fn add_arguments(&self, command: &LockCommand, call: &mut RedisCommand) {
        match command {
            LockCommand::Acquire { key, id, ttl, notify, holder, expected } => {
                call.push(id.as_str());
                call.push_fmt(ttl);
                call.push(json(key.as_str()));
                call.push(match notify {
                    NotifyWhen::Never => "never",
                    NotifyWhen::IfLocked => "if_locked",
                    NotifyWhen::Always => "always",
                });
                call.push(members(holder));
                let digits = self.layout.digits();
                match expected {
                    Some(fence) => call.push_fmt(format_args!("{:0digits$}", fence.get())),
                    None => call.push("-"),
                }
            }
            LockCommand::Release { id, .. } | LockCommand::Lookup(LockRef::Id(id)) => {
                call.push(id.as_str());
            }
            LockCommand::Extend { id, ttl, only_longer, .. } => {
                call.push(id.as_str());
                call.push_fmt(ttl);
                call.push_fmt(u8::from(*only_longer));
            }
            LockCommand::IsLocked { clean_up: true, .. } => call.push_fmt(CLEAN_UP_AFTER_MS),
            LockCommand::IsLocked { .. } | LockCommand::Lookup(LockRef::Key(_)) => call.push("-"),
        }
    }

    /// Returns the key of the set of clients that wait for a lock.
    fn waiting(&self, lock: &str) -> String {
        [&self.namespace, ":lock_waiting:", lock].concat()
    }

    /// Reads the answer to one command.
    pub(super) fn decode(
        &self,
        command: &LockCommand,
        value: &Value,
    ) -> Result<LockOutcome, Error> {
        let outcome = match command {
            LockCommand::Acquire { .. } => decode_acquired(value).map(LockOutcome::Acquire),
            // The script notifies the waiting clients itself.
            LockCommand::Release { .. } => self.verdict(value, None).map(LockOutcome::Release),
            LockCommand::Extend { .. } => fields(value).and_then(|[verdict, expires_at]| {
                self.verdict(verdict, number(expires_at)?).map(LockOutcome::Extend)
            }),
            LockCommand::IsLocked { .. } => {
                number(value).map(|number| LockOutcome::IsLocked(number == 1))
            }
            LockCommand::Lookup(by) => {
                // A value that the script accepts as a lock may still have an id or a key that cannot be ours.
                return decode_record(value).map(LockOutcome::Lookup).map_err(|problem| {
                    let what = match by {
                        LockRef::Key(key) => format!("{:?}", self.lock(key)),
                        LockRef::Id(_) => "the key of this lock id".to_owned(),
                    };
                    Error::foreign(format!("{what} is not a leasehold lock: {problem}"))
                });
            }
        };
        outcome.map_err(Error::internal)
    }

    fn verdict<T>(&self, value: &Value, done: T) -> Result<Verdict<T>, String> {
        match value {
            Value::Int(1) => Ok(Verdict::Done(done)),
            // In a cluster the client knows the key, so an id that does not hold the lock counts as not found.
            Value::Int(0) if self.cluster.is_none() => Ok(Verdict::NotOwner),
            Value::Int(0 | -1) => Ok(Verdict::NotFound),
            Value::Int(-2) => Ok(Verdict::Expired),
            other => Err(unexpected(other)),
        }
    }

    /// Returns the held locks, ordered by key.
    pub(super) async fn list(
        &self,
        topology: &Topology,
        limit: usize,
    ) -> Result<Vec<Record>, Error> {
        let prefix = &self.prefix.0;
        let mut keys = stats::scan(topology, &format!("{}*", stats::escaped(prefix))).await?;
        let (fences, ids) = (format!("{prefix}fence:"), format!("{prefix}id:"));
        keys.retain(|key| !key.starts_with(&fences) && !key.starts_with(&ids));
        let mut records = Vec::new();
        for keys in keys.into_iter().collect::<Vec<_>>().chunks(100) {
            for found in self.read(topology, keys).await? {
                match found {
                    // Another program's keys are skipped, and those that are being moved between servers.
                    Err(Error::ForeignData { .. } | Error::Unavailable { .. }) => {}
                    found => records.extend(found?),
                }
            }
        }
        records.sort_by(|a: &Record, b| a.key.cmp(&b.key));
        records.truncate(limit);
        Ok(records)
    }

    /// Returns the lock with this key, if it is held. It is read without a script, so read permission is enough.
    pub(super) async fn find(
        &self,
        topology: &Topology,
        key: &Name,
    ) -> Result<Option<Record>, Error> {
        let found = self.read(topology, &[self.lock(key)]).await?.pop();
        found.unwrap_or(Ok(None))
    }

    /// Returns the locks that these storage keys hold, if any.
    async fn read(
        &self,
        topology: &Topology,
        keys: &[String],
    ) -> Result<Vec<Result<Option<Record>, Error>>, Error> {
        let get = keys.iter().map(|key| stats::beginning(key, LONGEST_RECORD + 1));
        let (now, answers) = stats::ask_with_time(topology, Slot::ONLY, get).await?;
        let record = |(key, answer): (&String, Result<Value, Error>)| {
            let found = decode_record(&answer?).map_err(|problem| {
                Error::foreign(format!("{key:?} is not a leasehold lock: {problem}"))
            })?;
            Ok(found.filter(|record| is_live(record.expires_at, now.micros() / 1000)))
        };
        Ok(keys.iter().zip(answers).map(record).collect())
    }
}

fn fields<const N: usize>(value: &Value) -> Result<&[Value; N], String> {
    match value {
        Value::Array(fields) => fields[..].try_into().map_err(|_| unexpected(value)),
        _ => Err(unexpected(value)),
    }
}

fn decode_acquired(value: &Value) -> Result<Acquired, String> {
    let [held, fence, expires_at, remaining] = fields(value)?;
    let remaining = number(remaining)?;
    if number(held)? == 0 {
        return Ok(Acquired::Locked { remaining });
    }
    Ok(Acquired::Held { fence: decode_fence(fence)?, expires_at: number(expires_at)?, remaining })
}

fn decode_fence(value: &Value) -> Result<Fence, String> {
    let Value::Text(digits) = value else { return Err(format!("{value:?} is not a fence")) };
    let digits = String::from_utf8_lossy(digits);
    let fence: Fence = digits.parse().map_err(|_| format!("{digits:?} is not a fence"))?;
    if fence.get() > FENCE_WARNING {
        event!(warn, %fence, "the fence counter is near its maximum of 2^63: use another key");
    }
    Ok(fence)
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
    serde_json::to_string(text).unwrap_or_default()
}

/// Returns the known fields of the holder as further members of the record's JSON, each after a comma.
fn members(holder: &Holder) -> String {
    let Holder { host, pid, label } = holder;
    let pid = pid.map(|pid| pid.to_string());
    let text = |text: &Option<Arc<str>>| text.as_deref().map(json);
    let fields = [(",\"host\":", text(host)), (",\"pid\":", pid), (",\"label\":", text(label))];
    fields.iter().filter_map(|(name, value)| Some([name, value.as_deref()?].concat())).collect()
}

/// Reads the holder from the JSON of a record. The layout does not define these fields, so another program may have
/// written anything there. A value that cannot be ours counts as unknown, and never as an error.
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
        // The beginning of a value that does not exist.
        Value::Text(text) if text.is_empty() => return Ok(None),
        Value::Text(text) if text.len() > LONGEST_RECORD => {
            return Err(format!("it is longer than {LONGEST_RECORD} bytes"));
        }
        Value::Text(text) => text,
        other => return Err(unexpected(other)),
    };
    let stored: Stored = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    // The same bounds as in the scripts.
    let is_time = |millis: f64| (0.0..1e14).contains(&millis);
    if !is_time(stored.acquired_at_ms) || !is_time(stored.expires_at_ms) {
        return Err("its times are out of range".to_owned());
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
            .map_err(|_| format!("{:?} is not a fence", stats::cut(&stored.fence)))?,
        holder: Arc::new(decode_holder(text)),
    }))
}

fn number(value: &Value) -> Result<u64, String> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|error| error.to_string()),
        other => Err(format!("{other:?} is not a number")),
    }
}
