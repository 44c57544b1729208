//! The Lua scripts, each with the one function that knows the order of its KEYS and ARGV.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::command::RedisCommand;
use super::slots::{channel_end, slot_of};
use super::value::Value;
use crate::backend::Slot;
use crate::clock::Span;
use crate::machine::Reply;
use crate::machine::lock::TOLERANCE_MS;
use crate::machine::{
    Command, Declared, Held, Outcome, Rate, ReleaseHint, Role, Share, Steer, Steered, Terms,
};
use crate::name::Name;
use crate::{ClientId, Fence};

#[cfg(test)]
mod tests;

const APPLY: &str = include_str!("lua/apply.lua");
const MACHINE: &str = include_str!("lua/machine.lua");

/// One transition.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Transition {
    Release,
    Renew,
    Sweep,
    Steer,
    Enqueue,
}

impl Transition {
    pub(super) const ALL: [Self; 5] =
        [Self::Release, Self::Renew, Self::Sweep, Self::Steer, Self::Enqueue];

    pub(super) fn of(command: &Command) -> Self {
        match command {
            Command::Release { .. } => Self::Release,
            Command::Renew { .. } => Self::Renew,
            Command::Sweep => Self::Sweep,
            Command::Steer { .. } => Self::Steer,
            Command::Enqueue { .. } => Self::Enqueue,
        }
    }

    /// Returns the name of the transition in the script.
    fn word(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Renew => "renew",
            Self::Sweep => "sweep",
            Self::Steer => "steer",
            Self::Enqueue => "enqueue",
        }
    }

    fn body(self) -> &'static str {
        match self {
            Self::Release => include_str!("lua/release.lua"),
            Self::Renew => include_str!("lua/renew.lua"),
            Self::Sweep => include_str!("lua/sweep.lua"),
            Self::Steer => include_str!("lua/steer.lua"),
            Self::Enqueue => include_str!("lua/enqueue.lua"),
        }
    }

    /// Whether both commands can be sent as one group: they differ only in their ids.
    pub(super) fn shared(one: &Command, other: &Command) -> bool {
        match (one, other) {
            (
                Command::Enqueue { wait, terms, share, label, .. },
                Command::Enqueue { wait: w, terms: t, share: s, label: l, .. },
            ) => (wait, terms, share, label) == (w, t, s, l),
            (Command::Renew { terms, .. }, Command::Renew { terms: t, .. }) => terms == t,
            (Command::Release { known, .. }, Command::Release { known: k, .. }) => known == k,
            _ => false,
        }
    }
}

/// A script and its hash.
#[derive(Debug)]
pub(super) struct Script {
    source: String,
    pub(super) hash: String,
}

impl Script {
    pub(super) fn new(parts: &[&str]) -> Self {
        let source = crate::broken::in_lua(parts.join("\n"));
        let hash = sha1_smol::Sha1::from(&source).digest().to_string();
        Self { source, hash }
    }
}

/// All scripts.
#[derive(Debug)]
pub(super) struct Scripts {
    semaphores: Script,
    pub(super) locks: Script,
    pub(super) pools: [Script; 4],
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self::with_preludes(APPLY, super::locks::PRELUDE, super::pools::PRELUDE)
    }

    /// Returns scripts that read the time from a key, in microseconds, instead of the server's clock.
    #[cfg(test)]
    pub(super) fn with_injected_time(key: &str) -> Self {
        let inject = |prelude: &str, read: &str, unit: u32| {
            assert!(prelude.contains(read), "the function now() of the script was not found");
            let instead = format!("return math.floor(call('GET', '{key}') / {unit})");
            prelude.replace(read, &instead)
        };
        let time = "local time = call('TIME')\n  return time[1]";
        Self::with_preludes(
            &inject(APPLY, &format!("{time} * 1000000 + time[2]"), 1),
            &inject(
                super::locks::PRELUDE,
                &format!("{time} * 1000 + math.floor(time[2] / 1000)"),
                1000,
            ),
            &inject(super::pools::PRELUDE, &format!("{time} * 1000000 + time[2]"), 1),
        )
    }

    fn with_preludes(semaphores: &str, locks: &str, pools: &str) -> Self {
        let longest = super::locks::LONGEST_RECORD;
        let constants =
            format!("local TOLERANCE_MS = {TOLERANCE_MS}\nlocal LONGEST_RECORD = {longest}");
        Self {
            semaphores: Script::new(&[&with_machine(semaphores)]),
            locks: Script::new(&[&constants, locks, &super::locks::with_commands()]),
            pools: super::pools::BODIES.map(|body| Script::new(&[pools, body])),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Script> {
        [&self.semaphores, &self.locks].into_iter().chain(&self.pools)
    }

    /// Returns the commands that load all scripts.
    pub(super) fn load(&self) -> impl Iterator<Item = RedisCommand> {
        self.all().map(|script| RedisCommand::new("SCRIPT").arg("LOAD").arg(&script.source))
    }

    /// Returns the same call with the script itself instead of its hash, for a server that does not have the script.
    pub(super) fn in_full(&self, call: &RedisCommand) -> RedisCommand {
        let mut arguments = call.iter().skip(1);
        let hash = arguments.next().unwrap_or_default();
        let known = self.all().find(|script| script.hash.as_bytes() == hash);
        let source = known.map(|script| script.source.as_str()).unwrap_or_default();
        RedisCommand::new("EVAL").arg(source).args(arguments)
    }

    /// Returns the call that applies the commands of one client to one or more names.
    pub(super) fn apply(&self, parts: &[(Arc<Keys>, Declared, &[Command])]) -> RedisCommand {
        let mut call = RedisCommand::script_call(&self.semaphores.hash);
        call.push_fmt(parts.len() * KINDS.len());
        for (keys, ..) in parts {
            call = call.args(&keys.all);
        }
        if let Some((keys, ..)) = parts.first() {
            call = keys.common(call, &keys.client);
        }
        for (keys, declared, commands) in parts {
            keys.add(&mut call, *declared, commands);
        }
        call
    }

    /// Returns the call that removes an id which may belong to another program.
    pub(super) fn release_member(&self, keys: &Keys, id: &str) -> RedisCommand {
        let release = [Transition::Release.word(), "2", "unknown", id];
        let call = self.without_sender(keys).args([keys.name.as_str(), "0", "0"]);
        call.arg_fmt(release.len()).args(release)
    }

    /// Returns the call that changes the limits of a name.
    pub(super) fn steer(&self, keys: &Keys, steer: &Command) -> RedisCommand {
        let mut call = self.without_sender(keys);
        let capacity = match steer {
            Command::Steer { capacity, .. } => capacity.unwrap_or_default(),
            _ => 0,
        };
        keys.add(&mut call, Declared::capacity(capacity, false), std::slice::from_ref(steer));
        call
    }

    /// Returns the beginning of a call without a sender: our own waiters are woken, instead of being granted in the
    /// reply.
    fn without_sender(&self, keys: &Keys) -> RedisCommand {
        let call = RedisCommand::script_call(&self.semaphores.hash);
        keys.common(call.arg_fmt(KINDS.len()).args(&keys.all), "-")
    }
}

/// Whether [`Scripts::release_member`] found something to remove.
pub(super) fn was_removed(answer: &Value) -> Result<bool, String> {
    match answer {
        Value::Array(fields) => match fields.first() {
            Some(tag) => Ok(word(tag)? != b"nobody"),
            None => Err("the answer of a script is incomplete".to_owned()),
        },
        other => Err(format!("unexpected answer of a script: {other:?}")),
    }
}

/// Inserts the machine into the script, and the transitions into the machine.
fn with_machine(script: &str) -> String {
    let bodies = Transition::ALL.map(|transition| (transition.word(), transition.body()));
    let machine = with_branches(MACHINE, "-- TRANSITIONS\n", "transition", &bodies);
    assert!(script.contains("-- MACHINE\n"), "the script has no place for the machine");
    script.replace("-- MACHINE\n", &machine)
}

/// Inserts a branch for each value that `variable` may have. Branches are used because a script pays for every function
/// that it defines.
pub(super) fn with_branches(
    script: &str,
    place: &str,
    variable: &str,
    bodies: &[(&str, &str)],
) -> String {
    assert!(script.contains(place), "the script has no place for the branches: {place}");
    let branch = |(word, body): &(&str, &str)| format!("if {variable} == '{word}' then\n{body}");
    let branches: Vec<_> = bodies.iter().map(branch).collect();
    script.replace(place, &(branches.join("\nelse") + "\nend\n"))
}

/// The kinds of keys of one name and their types, in the order of KEYS.
pub(super) const KINDS: [(&str, &str); 10] = [
    ("main", "zset"),
    ("ttl", "zset"),
    ("max", "string"),
    ("waiting", "zset"),
    ("waiting_heartbeat", "zset"),
    ("fence", "string"),
    ("info", "hash"),
    ("limits", "string"),
    ("slots", "string"),
    ("foreign", "string"),
];

/// The keys of one name, and the arguments that every script gets.
#[derive(Debug)]
pub(super) struct Keys {
    all: [String; 10],
    /// The slot of all of them.
    pub(super) slot: Slot,
    /// The end of the names of wake-up channels.
    channel_end: String,
    namespace: String,
    name: Name,
    client: String,
    confirm_within: Span,
    foreign_heartbeat: Span,
}

impl Keys {
    /// `written` is the name as it is written in a key.
    pub(super) fn new(
        (namespace, written): (&str, &str),
        name: &Name,
        client: ClientId,
        confirm_within: Span,
        foreign_heartbeat: Span,
    ) -> Self {
        Self {
            all: KINDS.map(|(kind, _)| format!("{namespace}:semaphore_{kind}:{written}")),
            slot: Slot::ONLY,
            channel_end: String::new(),
            namespace: namespace.to_owned(),
            name: name.clone(),
            client: client.to_string(),
            confirm_within,
            foreign_heartbeat,
        }
    }

    /// Returns the same keys for a cluster.
    pub(super) fn in_cluster(self) -> Self {
        let slot = slot_of(self.waiting());
        Self { slot, channel_end: channel_end(slot), ..self }
    }

    /// Returns the channel on which a waiting client is woken. `None` outside of a cluster.
    pub(super) fn channel(&self) -> Option<String> {
        let Self { namespace, client, channel_end, .. } = self;
        (!channel_end.is_empty()).then(|| format!("{namespace}:wake:{client}{channel_end}"))
    }

    pub(super) fn waiting(&self) -> &str {
        &self.all[3]
    }

    /// Returns the commands that read the types of all our keys, to find the one that is not ours.
    pub(super) fn types(&self) -> Vec<RedisCommand> {
        self.all.iter().map(|key| RedisCommand::new("TYPE").arg(key)).collect()
    }

    /// Returns the key whose type is wrong, given the answers to [`types`](Self::types).
    pub(super) fn misplaced(&self, types: Vec<Value>) -> Option<&str> {
        let mut all = self.all.iter().zip(KINDS).zip(types);
        let wrong = all.find(|((_, (_, expected)), found)| {
            let found = text(found.clone()).unwrap_or_default();
            found != "none" && found != *expected
        });
        wrong.map(|((key, _), _)| key.as_str())
    }

    /// Adds the arguments that come once in a call, after the keys. `sender` is the client that sends it.
    fn common(&self, call: RedisCommand, sender: &str) -> RedisCommand {
        call.arg(&self.namespace)
            .arg(sender)
            .arg_fmt(self.confirm_within.micros())
            .arg_fmt(self.foreign_heartbeat.micros())
            .arg(&self.channel_end)
    }

    /// Adds the part of a call that concerns this name.
    fn add(&self, call: &mut RedisCommand, declared: Declared, commands: &[Command]) {
        let groups = || commands.chunk_by(Transition::shared);
        let counted = |group: &[Command]| 2 + count(group);
        call.push(self.name.as_str());
        call.push_fmt(declared.capacity);
        let is_new = u8::from(declared.is_new);
        match declared.rate {
            None => call.push_fmt(is_new),
            Some(rate) => {
                let rate_is_new = u8::from(declared.rate_is_new);
                call.push_fmt(format_args!("{is_new} {rate_is_new} {}", rate_text(Some(rate))));
            }
        }
        call.push_fmt(groups().map(counted).sum::<usize>());
        for group in groups() {
            call.push(Transition::of(&group[0]).word());
            call.push_fmt(count(group));
            match &group[0] {
                Command::Enqueue { wait, terms, share, label, .. } => {
                    let wait = u8::from(*wait);
                    match *share {
                        Share::ONE => call.push_fmt(wait),
                        Share { weight, numbered } => {
                            call.push_fmt(format_args!("{wait} {weight} {}", u8::from(numbered)));
                        }
                    }
                    add_terms(call, *terms);
                    call.push(label.as_deref().unwrap_or_default());
                }
                Command::Renew { terms, .. } => add_terms(call, *terms),
                Command::Release { known, .. } => {
                    call.push(match known {
                        ReleaseHint::Nothing => "unknown",
                        ReleaseHint::Unused => "unused",
                        ReleaseHint::Held { limited: false } => "held",
                        ReleaseHint::Held { limited: true } => "limited",
                    });
                }
                Command::Steer { steer, .. } => add_steer(call, steer),
                Command::Sweep => {}
            }
            for id in group.iter().filter_map(Command::id) {
                call.push_fmt(id);
            }
        }
    }
}

/// Returns the number of arguments of a group of commands.
fn count(group: &[Command]) -> usize {
    match &group[0] {
        Command::Enqueue { .. } => 4 + group.len(),
        Command::Renew { .. } => 2 + group.len(),
        Command::Release { .. } => 1 + group.len(),
        Command::Steer { .. } => 4,
        Command::Sweep => 0,
    }
}

fn add_terms(call: &mut RedisCommand, terms: Terms) {
    call.push_fmt(terms.lease.map_or(0, Span::micros));
    match terms.ttl {
        Some(ttl) => call.push_fmt(ttl.micros()),
        None => call.push("-"),
    }
}

/// Formats a rate: its count, its period in microseconds, and its burst. A count of 0 is no rate.
fn rate_text(rate: Option<Rate>) -> String {
    let Some(Rate { count, period, burst }) = rate else { return "0 0 0".to_owned() };
    format!("{count} {} {burst}", period.micros())
}

fn add_steer(call: &mut RedisCommand, steer: &Steer) {
    let none = String::new;
    let (what, capacity, by, reason) = match steer {
        Steer::Declare(capacity) => ("declare", capacity.to_string(), "", None),
        Steer::Pin(capacity) => ("pin", capacity.to_string(), "", None),
        Steer::Unpin => ("unpin", none(), "", None),
        Steer::Rate(rate) => ("rate", rate_text(*rate), "", None),
        Steer::Pause { by, reason } => ("pause", none(), &**by, reason.as_deref()),
        Steer::Resume => ("resume", none(), "", None),
        Steer::Forget => ("forget", none(), "", None),
    };
    for argument in [what, &capacity, by, reason.unwrap_or_default()] {
        call.push(argument);
    }
}

/// Decodes the answer to the commands of one name. No tag and no sentinel value travels further inward.
pub(super) fn decode(commands: &[Command], value: Value) -> Result<Reply, String> {
    let Value::Array(fields) = value else {
        return Err(format!("unexpected answer of a script: {value:?}"));
    };
    let mut fields = fields.into_iter();
    let mut next = || fields.next().ok_or("the answer of a script is incomplete");
    let mut reply = Reply::default();
    for command in commands {
        let transition = Transition::of(command);
        if transition == Transition::Sweep {
            reply.outcomes.push(Outcome::Swept);
            continue;
        }
        let tag = next()?;
        let tag = word(&tag)?;
        reply.outcomes.push(match (transition, tag) {
            (Transition::Release, b"holder") => Outcome::Removed(Role::Holder),
            (Transition::Release, b"waiter") => Outcome::Removed(Role::Waiter),
            (Transition::Release, b"nobody") => Outcome::Removed(Role::Nobody),
            (Transition::Release, _) => {
                return Err(format!("unexpected answer to {transition:?}: {tag:?}"));
            }
            (_, tag) => {
                let (first, fence, valid_for) = (next()?, next()?, next()?);
                match tag {
                    b"held" => Outcome::Held(held(&first, &fence, &valid_for)?),
                    b"waiting" => {
                        let ahead = usize::try_from(int(&first)?).unwrap_or_default();
                        Outcome::Waiting { ahead }
                    }
                    b"full" => Outcome::Full,
                    b"heavy" => {
                        let capacity = u32::try_from(int(&first)?).unwrap_or(u32::MAX);
                        Outcome::TooHeavy { capacity }
                    }
                    b"gone" => Outcome::Gone,
                    b"cancelled" => Outcome::Cancelled,
                    b"done" => Outcome::Steered(Steered::Done),
                    b"unknown" => Outcome::Steered(Steered::Unknown),
                    b"pinned" => {
                        let to = u32::try_from(int(&first)?).unwrap_or(u32::MAX);
                        Outcome::Steered(Steered::Pinned(to))
                    }
                    b"in use" => {
                        let count = |value| int(value).map(|n| usize::try_from(n).unwrap_or(0));
                        let (holding, waiting) = (count(&first)?, count(&fence)?);
                        Outcome::Steered(Steered::InUse { holding, waiting })
                    }
                    other => return Err(format!("unexpected answer to {transition:?}: {other:?}")),
                }
            }
        });
    }
    reply.next_expiry = u64::try_from(int(&next()?)?).ok().map(Span::from_micros);
    reply.foreign = int(&next()?)? != 0;
    while let Ok(id) = next() {
        if let Value::Int(delay) = id {
            reply.next_token = u64::try_from(delay).ok().map(Span::from_micros);
            continue;
        }
        let id = text(id)?;
        let id = id
            .parse()
            .map_err(|_| format!("a permit was granted to {id:?}, which is not an id"))?;
        reply.effects.granted.push((id, held(&next()?, &next()?, &next()?)?, ()));
    }
    Ok(reply)
}

fn held(slot: &Value, fence: &Value, valid_for: &Value) -> Result<Held, String> {
    let number = |value| u64::try_from(int(value)?).map_err(|error| error.to_string());
    Ok(Held {
        slot_number: NonZeroU32::new(u32::try_from(number(slot)?).unwrap_or(u32::MAX)),
        fence: Fence::new(number(fence)?),
        valid_for: Some(Span::from_micros(number(valid_for)?)),
    })
}

fn int(value: &Value) -> Result<i64, String> {
    match value {
        Value::Int(number) => Ok(*number),
        other => Err(format!("{other:?} is not a number")),
    }
}

fn word(value: &Value) -> Result<&[u8], String> {
    match value {
        Value::Text(word) => Ok(word),
        other => Err(format!("{other:?} is not a word")),
    }
}

fn text(value: Value) -> Result<String, String> {
    value.read()
}
