//! The Lua scripts, each with the one function that knows the order of its KEYS and ARGV.

use std::borrow::Cow;
use std::num::NonZeroU32;

use super::command::RedisCommand;
use super::slots::{channel_end, slot_of};
use super::value::Value;
use crate::backend::Slot;
use crate::clock::Span;
use crate::machine::Reply;
use crate::machine::lock::TOLERANCE_MS;
use crate::machine::{
    Command, Declared, Held, LimitChange, LimitsChanged, Outcome, Outlook, Rate, ReleaseHint, Role,
    Share, Terms,
};
use crate::{ClientId, Fence};

#[cfg(test)]
mod tests;

const MACHINE: &str = include_str!("lua/machine.lua");

/// The script that serves a call, and with it the form of its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// All commands.
    Machine,
    /// The common cases, in the order of [`SMALL`].
    Acquire,
    Release,
    Renew,
    Query,
}

/// The scripts for the common cases.
const SMALL: [&str; 4] = [
    include_str!("lua/small/acquire.lua"),
    include_str!("lua/small/release.lua"),
    include_str!("lua/small/renew.lua"),
    include_str!("lua/small/query.lua"),
];

/// Returns the shortest script that is expected to serve a group of commands.
fn form_of(group: &[Command], outlook: Outlook) -> Form {
    use Outlook::{Queue, Quiet, Room, Special};
    match (&group[0], outlook) {
        (_, Special) => Form::Machine,
        (Command::Enqueue { declared, share: Share::ONE, .. }, Room | Quiet)
            if declared.rate.is_none() =>
        {
            Form::Acquire
        }
        (Command::Release { hint: ReleaseHint::Held { limited: false }, .. }, _)
        | (Command::Release { hint: ReleaseHint::Held { limited: true }, .. }, Room) => {
            Form::Release
        }
        (Command::Renew { holds: true, .. }, _) => Form::Renew,
        (Command::Renew { holds: false, .. }, Queue) if group.len() == 1 => Form::Query,
        _ => Form::Machine,
    }
}

/// The transitions, each with its name in the script and its code.
const TRANSITIONS: [(&str, &str); 5] = [
    ("release", include_str!("lua/release.lua")),
    ("renew", include_str!("lua/renew.lua")),
    ("sweep", include_str!("lua/sweep.lua")),
    ("change_limits", include_str!("lua/change_limits.lua")),
    ("enqueue", include_str!("lua/enqueue.lua")),
];

/// Returns the name of a command's transition in the script.
fn transition(command: &Command) -> &'static str {
    match command {
        Command::Release { .. } => "release",
        Command::Renew { .. } => "renew",
        Command::Sweep => "sweep",
        Command::ChangeLimits { .. } => "change_limits",
        Command::Enqueue { .. } => "enqueue",
    }
}

/// Whether both commands can be sent as one group: they differ only in their ids.
fn are_one_group(one: &Command, other: &Command) -> bool {
    match (one, other) {
        (
            Command::Enqueue { wait, terms, share, label, .. },
            Command::Enqueue { wait: w, terms: t, share: s, label: l, .. },
        ) => (wait, terms, share, label) == (w, t, s, l),
        (Command::Renew { terms, .. }, Command::Renew { terms: t, .. }) => terms == t,
        (Command::Release { hint, .. }, Command::Release { hint: other, .. }) => hint == other,
        _ => false,
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
    machine: Script,
    small: [Script; 4],
    pub(super) locks: Script,
    pub(super) pools: [Script; 4],
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self::with_time(str::to_owned)
    }

    /// `time` changes how a script reads the time.
    fn with_time(time: impl Fn(&str) -> String) -> Self {
        let (locks, pools) = (time(super::locks::PRELUDE), time(super::pools::PRELUDE));
        let longest = super::locks::LONGEST_RECORD;
        let constants =
            format!("local TOLERANCE_MS = {TOLERANCE_MS}\nlocal LONGEST_RECORD = {longest}");
        Self {
            machine: Script::new(&[&time(&with_transitions())]),
            small: SMALL.map(|script| Script::new(&[&time(script)])),
            locks: Script::new(&[&constants, &locks, &super::locks::with_commands()]),
            pools: super::pools::BODIES.map(|body| Script::new(&[&pools, body])),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Script> {
        [&self.machine, &self.locks].into_iter().chain(&self.small).chain(&self.pools)
    }

    /// Returns the commands that ask which scripts the server has, in the order of [`load`](Self::load). One command for
    /// all would be too long for a server that parses it before it has authenticated the client.
    pub(super) fn exist(&self) -> impl Iterator<Item = RedisCommand> {
        self.all().map(|script| RedisCommand::new("SCRIPT").arg("EXISTS").arg(&script.hash))
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

    /// Returns the calls that apply the commands of one client to one name, in order: each with the form of its answer, and
    /// the number of commands that it serves.
    ///
    /// If each group of commands has a small script, they are called one after the other. Otherwise one call of the
    /// machine serves all commands.
    pub(super) fn calls(
        &self,
        keys: &Keys<'_>,
        declared: Declared,
        commands: &[Command],
        outlook: Outlook,
    ) -> Vec<(RedisCommand, Form, usize)> {
        let groups = || commands.chunk_by(are_one_group);
        let form = |group: &[Command]| form_of(group, outlook);
        if groups().any(|group| form(group) == Form::Machine) {
            return vec![(self.apply(keys, declared, commands), Form::Machine, commands.len())];
        }
        let call = |group: &[Command]| {
            let form = form(group);
            (self.small(form, keys, declared, group, outlook), form, group.len())
        };
        groups().map(call).collect()
    }

    /// Returns the call of the machine for these commands.
    pub(super) fn apply(
        &self,
        keys: &Keys<'_>,
        declared: Declared,
        commands: &[Command],
    ) -> RedisCommand {
        let mut call = self.machine(keys, Some(keys.client));
        keys.add(&mut call, declared, commands);
        call
    }

    /// Returns the call of a small script for a group of commands.
    fn small(
        &self,
        form: Form,
        keys: &Keys<'_>,
        declared: Declared,
        group: &[Command],
        outlook: Outlook,
    ) -> RedisCommand {
        let script = &self.small[form as usize - 1];
        let mut call = RedisCommand::script_call(&script.hash);
        match &group[0] {
            Command::Enqueue { terms, label, .. } => {
                keys.add_some(&mut call, &[MAIN, TTL, MAX, WAITING, FENCE, INFO, LIMITS]);
                call.push_fmt(declared.capacity);
                call.push_fmt(u8::from(declared.is_new));
                add_terms(&mut call, *terms);
                call.push(label.as_deref().unwrap_or_default());
            }
            Command::Release { hint, .. } if outlook == Outlook::Room => {
                let with_ttl = *hint == ReleaseHint::Held { limited: true };
                let kinds = [WAITING, INFO, MAIN, TTL];
                keys.add_some(&mut call, &kinds[..3 + usize::from(with_ttl)]);
            }
            Command::Release { .. } => {
                let kinds = [WAITING, INFO, MAIN, TTL, MAX, ALIVE, FENCE, LIMITS, FOREIGN];
                keys.add_some(&mut call, &kinds);
                call.push(keys.namespace);
                call.push_fmt(keys.client);
                call.push_fmt(keys.confirm_within.micros());
                call.push(keys.slot.map(channel_end).unwrap_or_default());
                call.push(keys.name);
            }
            Command::Renew { terms, holds, .. } => {
                if *holds {
                    keys.add_some(&mut call, &[MAIN, INFO, WAITING, MAX, TTL, ALIVE, LIMITS]);
                } else {
                    let kinds = [WAITING, MAIN, TTL, MAX, ALIVE, INFO, LIMITS, FOREIGN];
                    keys.add_some(&mut call, &kinds);
                }
                call.push_fmt(terms.lease.map_or(0, Span::micros));
            }
            Command::ChangeLimits { .. } | Command::Sweep => {}
        }
        for id in group.iter().filter_map(Command::id) {
            call.push_fmt(id);
        }
        call
    }

    /// Returns the call that removes an id which may belong to another program.
    pub(super) fn release_member(&self, keys: &Keys<'_>, id: &str) -> RedisCommand {
        let call = self.machine(keys, None).args([keys.name, "0", "0"]);
        call.args(["release", "2", "unknown", id])
    }

    /// Returns the call that changes the limits of a name.
    pub(super) fn change_limits(&self, keys: &Keys<'_>, change: &Command) -> RedisCommand {
        let mut call = self.machine(keys, None);
        let capacity = match change {
            Command::ChangeLimits { capacity, .. } => capacity.unwrap_or_default(),
            _ => 0,
        };
        keys.add(&mut call, Declared::capacity(capacity, false), std::slice::from_ref(change));
        call
    }

    /// Returns the beginning of a call of the machine. Without a sender, our own waiters are woken instead of being granted
    /// in the reply.
    fn machine(&self, keys: &Keys<'_>, sender: Option<ClientId>) -> RedisCommand {
        let mut call = RedisCommand::script_call(&self.machine.hash);
        call.push_fmt(KINDS.len());
        for (kind, _) in KINDS {
            call.push_parts(&[keys.namespace, kind, &keys.written]);
        }
        keys.common(call, sender)
    }
}

/// Whether [`Scripts::release_member`] found something to remove.
pub(super) fn was_removed(answer: &Value) -> Result<bool, String> {
    match answer {
        Value::Array(fields) => Ok(removed(fields.first().unwrap_or(&Value::Nil))? != Role::Nobody),
        other => Err(unexpected(other)),
    }
}

/// Returns the machine with its transitions.
fn with_transitions() -> String {
    with_branches(MACHINE, "-- TRANSITIONS\n", "transition", &TRANSITIONS)
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

/// What the keys of one name have between the namespace and the name, and their types, in the order of KEYS.
pub(super) const KINDS: [(&str, &str); 10] = [
    (":semaphore_main:", "zset"),
    (":semaphore_ttl:", "zset"),
    (":semaphore_max:", "string"),
    (":semaphore_waiting:", "zset"),
    (":semaphore_waiting_heartbeat:", "zset"),
    (":semaphore_fence:", "string"),
    (":semaphore_info:", "hash"),
    (":semaphore_limits:", "string"),
    (":semaphore_slots:", "string"),
    (":semaphore_foreign:", "string"),
];

/// The indexes of the keys in [`KINDS`].
const MAIN: usize = 0;
const TTL: usize = 1;
const MAX: usize = 2;
const WAITING: usize = 3;
const ALIVE: usize = 4;
const FENCE: usize = 5;
const INFO: usize = 6;
const LIMITS: usize = 7;
const FOREIGN: usize = 9;

/// Returns the keys of a name, in the order of KEYS. `written` is the name as it is written in a key.
pub(super) fn storage_keys(namespace: &str, written: &str) -> [String; KINDS.len()] {
    KINDS.map(|(kind, _)| [namespace, kind, written].concat())
}

/// Returns the commands that read the types of the keys of a name, to find the one that is not ours.
pub(super) fn types(keys: &[String; KINDS.len()]) -> impl Iterator<Item = RedisCommand> {
    keys.iter().map(|key| RedisCommand::new("TYPE").arg(key))
}

/// Returns the key whose type is wrong, given the answers to [`types`].
pub(super) fn misplaced(
    keys: &[String; KINDS.len()],
    types: impl IntoIterator<Item = Value>,
) -> Option<&str> {
    let mut all = keys.iter().zip(KINDS).zip(types);
    let wrong = all.find(|((_, (_, expected)), found)| {
        !matches!(found, Value::Text(found) if found == b"none" || found == expected.as_bytes())
    });
    wrong.map(|((key, _), _)| key.as_str())
}

/// The keys of one name, and the arguments that every script gets.
#[derive(Clone, Debug)]
pub(super) struct Keys<'a> {
    namespace: &'a str,
    /// The name as it is written in a key.
    written: Cow<'a, str>,
    name: &'a str,
    client: ClientId,
    /// The slot of all keys. `None` outside of a cluster.
    slot: Option<Slot>,
    confirm_within: Span,
    foreign_heartbeat: Span,
}

impl<'a> Keys<'a> {
    /// `written` is the name as it is written in a key.
    pub(super) fn new(
        (namespace, written): (&'a str, Cow<'a, str>),
        name: &'a str,
        client: ClientId,
        confirm_within: Span,
        foreign_heartbeat: Span,
    ) -> Self {
        Self { namespace, written, name, client, slot: None, confirm_within, foreign_heartbeat }
    }

    /// Returns the same keys for a cluster.
    pub(super) fn in_cluster(mut self) -> Self {
        self.slot = Some(slot_of(&self.waiting()));
        self
    }

    /// Returns the slot of all keys.
    pub(super) fn slot(&self) -> Slot {
        self.slot.unwrap_or(Slot::ONLY)
    }

    /// Returns the channel on which a waiting client is woken. `None` outside of a cluster.
    pub(super) fn channel(&self) -> Option<String> {
        let Self { namespace, client, .. } = self;
        self.slot.map(|slot| format!("{namespace}:wake:{client}{}", channel_end(slot)))
    }

    /// Returns the key of the queue.
    pub(super) fn waiting(&self) -> String {
        format!("{}:semaphore_waiting:{}", self.namespace, self.written)
    }

    /// Adds the number of these keys, and the keys.
    fn add_some(&self, call: &mut RedisCommand, kinds: &[usize]) {
        call.push_fmt(kinds.len());
        for kind in kinds {
            call.push_parts(&[self.namespace, KINDS[*kind].0, &self.written]);
        }
    }

    /// Adds the arguments that come once in a call, after the keys. `sender` is the client that sends it.
    fn common(&self, call: RedisCommand, sender: Option<ClientId>) -> RedisCommand {
        let call = call.arg(self.namespace);
        match sender {
            Some(client) => call.arg_fmt(client),
            None => call.arg("-"),
        }
        .arg_fmt(self.confirm_within.micros())
        .arg_fmt(self.foreign_heartbeat.micros())
        .arg(self.slot.map(channel_end).unwrap_or_default())
    }

    /// Adds the part of a call that concerns this name.
    fn add(&self, call: &mut RedisCommand, declared: Declared, commands: &[Command]) {
        call.push(self.name);
        call.push_fmt(declared.capacity);
        let is_new = u8::from(declared.is_new);
        match declared.rate {
            None => call.push_fmt(is_new),
            Some(rate) => {
                let rate_is_new = u8::from(declared.rate_is_new);
                call.push_fmt(format_args!("{is_new} {rate_is_new} {}", rate_text(Some(rate))));
            }
        }
        for group in commands.chunk_by(are_one_group) {
            call.push(transition(&group[0]));
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
                Command::Release { hint, .. } => {
                    call.push(match hint {
                        ReleaseHint::Nothing => "unknown",
                        ReleaseHint::Unused => "unused",
                        ReleaseHint::Held { limited: false } => "held",
                        ReleaseHint::Held { limited: true } => "limited",
                    });
                }
                Command::ChangeLimits { change, .. } => add_limit_change(call, change),
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
        Command::ChangeLimits { .. } => 4,
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

fn add_limit_change(call: &mut RedisCommand, change: &LimitChange) {
    let none = String::new;
    let (what, capacity, by, reason) = match change {
        LimitChange::Declare(capacity) => ("declare", capacity.to_string(), "", None),
        LimitChange::Pin(capacity) => ("pin", capacity.to_string(), "", None),
        LimitChange::Unpin => ("unpin", none(), "", None),
        LimitChange::Rate(rate) => ("rate", rate_text(*rate), "", None),
        LimitChange::Pause { by, reason } => ("pause", none(), &**by, reason.as_deref()),
        LimitChange::Resume => ("resume", none(), "", None),
        LimitChange::Forget => ("forget", none(), "", None),
    };
    for argument in [what, &capacity, by, reason.unwrap_or_default()] {
        call.push(argument);
    }
}

/// Decodes the answers to the calls for one name into one reply. No tag and no sentinel value travels further inward.
pub(super) fn decode(
    commands: &[Command],
    answers: impl IntoIterator<Item = (Form, usize, Value)>,
) -> Result<Reply, String> {
    let mut decoder = Decoder { commands, reply: Reply::default() };
    for (form, count, answer) in answers {
        let (group, rest) = decoder.commands.split_at(count.min(decoder.commands.len()));
        decoder.commands = rest;
        // A small script that does not serve its case has changed nothing.
        if form != Form::Machine && answer == Value::Nil {
            decoder.reply.outcomes.extend(group.iter().map(|_| Outcome::Unapplied));
            continue;
        }
        let Value::Array(fields) = answer else { return Err(unexpected(&answer)) };
        let mut fields = fields.into_iter();
        decoder.call(form, group, &mut || {
            fields.next().ok_or_else(|| "the answer of a script is incomplete".to_owned())
        })?;
    }
    Ok(decoder.reply)
}

struct Decoder<'a> {
    /// The commands whose answers come next.
    commands: &'a [Command],
    reply: Reply,
}

impl Decoder<'_> {
    /// Decodes the answer to one call for these commands. The header of each script describes the answer.
    fn call(
        &mut self,
        form: Form,
        group: &[Command],
        next: &mut impl FnMut() -> Result<Value, String>,
    ) -> Result<(), String> {
        match form {
            Form::Machine => self.machine(group, next),
            Form::Acquire => {
                self.outlook(&next()?)?;
                let first: u64 = next()?.read()?;
                for (fence, command) in (first..).zip(group) {
                    let Command::Enqueue { terms, .. } = command else { continue };
                    let valid_for = terms.lease.into_iter().chain(terms.ttl).min();
                    self.held(Held { slot_number: None, fence: Fence::new(fence), valid_for });
                }
                Ok(())
            }
            Form::Release => {
                self.outlook(&next()?)?;
                for _ in group {
                    let was_held = next()?.read::<i64>()? == 1;
                    let role = if was_held { Role::Holder } else { Role::Nobody };
                    self.reply.outcomes.push(Outcome::Removed(role));
                }
                let Ok(delay) = next() else { return Ok(()) };
                self.reply.next_expiry = span(delay)?;
                self.granted(next)
            }
            Form::Renew => {
                for _ in group {
                    let fence = Fence::new(next()?.read()?);
                    let valid_for = Some(Span::from_micros(next()?.read()?));
                    self.held(Held { slot_number: None, fence, valid_for });
                }
                Ok(())
            }
            Form::Query => {
                let ahead = usize::try_from(next()?.read::<u64>()?).unwrap_or(usize::MAX);
                self.reply.outcomes.push(Outcome::Waiting { ahead });
                self.reply.next_expiry = span(next()?)?;
                self.reply.outlook = Some(Outlook::Queue);
                Ok(())
            }
        }
    }

    fn machine(
        &mut self,
        group: &[Command],
        next: &mut impl FnMut() -> Result<Value, String>,
    ) -> Result<(), String> {
        for command in group {
            let outcome = match command {
                Command::Sweep => Outcome::Swept,
                Command::Release { .. } => Outcome::Removed(removed(&next()?)?),
                _ => outcome(&next()?, [next()?, next()?, next()?])?,
            };
            self.reply.outcomes.push(outcome);
        }
        self.reply.next_expiry = span(next()?)?;
        self.outlook(&next()?)?;
        self.granted(next)
    }

    /// Decodes what follows: the delay until the next token, and the permits that were granted to our waiters.
    fn granted(&mut self, next: &mut impl FnMut() -> Result<Value, String>) -> Result<(), String> {
        while let Ok(id) = next() {
            if let Value::Int(_) = id {
                self.reply.next_token = span(id)?;
                continue;
            }
            let id: String = id.read()?;
            let id = id
                .parse()
                .map_err(|_| format!("a permit was granted to {id:?}, which is not an id"))?;
            self.reply.effects.granted.push((id, held([next()?, next()?, next()?])?, ()));
        }
        Ok(())
    }

    fn held(&mut self, held: Held) {
        self.reply.outcomes.push(Outcome::Held(held));
    }

    fn outlook(&mut self, outlook: &Value) -> Result<(), String> {
        self.reply.outlook = Some(match word(outlook)? {
            b"room" => Outlook::Room,
            b"full" => Outlook::Full,
            b"queue" => Outlook::Queue,
            b"special" => Outlook::Special,
            b"shared" => {
                self.reply.foreign = true;
                Outlook::Special
            }
            _ => return Err(unexpected(outlook)),
        });
        Ok(())
    }
}

/// Decodes the answer to a release.
fn removed(tag: &Value) -> Result<Role, String> {
    match word(tag)? {
        b"holder" => Ok(Role::Holder),
        b"waiter" => Ok(Role::Waiter),
        b"nobody" => Ok(Role::Nobody),
        _ => Err(unexpected(tag)),
    }
}

/// Decodes the answer to an enqueue, a renewal or a change of limits.
fn outcome(tag: &Value, numbers: [Value; 3]) -> Result<Outcome, String> {
    if word(tag)? == b"held" {
        return held(numbers).map(Outcome::Held);
    }
    let [first, second, _] = numbers;
    let (first, second): (u64, u64) = (first.read()?, second.read()?);
    let units = u32::try_from(first).unwrap_or(u32::MAX);
    let count = |number| usize::try_from(number).unwrap_or(usize::MAX);
    Ok(match word(tag)? {
        b"waiting" => Outcome::Waiting { ahead: count(first) },
        b"full" => Outcome::Full,
        b"heavy" => Outcome::TooHeavy { capacity: units },
        b"gone" => Outcome::Gone,
        b"cancelled" => Outcome::Cancelled,
        b"done" => Outcome::LimitsChanged(LimitsChanged::Done),
        b"unknown" => Outcome::LimitsChanged(LimitsChanged::Unknown),
        b"pinned" => Outcome::LimitsChanged(LimitsChanged::Pinned(units)),
        b"in use" => Outcome::LimitsChanged(LimitsChanged::InUse {
            holding: count(first),
            waiting: count(second),
        }),
        _ => return Err(unexpected(tag)),
    })
}

/// Decodes the slot number, the fence and the validity of a permit.
fn held([slot, fence, valid_for]: [Value; 3]) -> Result<Held, String> {
    Ok(Held {
        slot_number: NonZeroU32::new(u32::try_from(slot.read::<u64>()?).unwrap_or(u32::MAX)),
        fence: Fence::new(fence.read()?),
        valid_for: Some(Span::from_micros(valid_for.read()?)),
    })
}

/// Decodes a delay, which is negative if there is none.
fn span(delay: Value) -> Result<Option<Span>, String> {
    Ok(u64::try_from(delay.read::<i64>()?).ok().map(Span::from_micros))
}

fn word(value: &Value) -> Result<&[u8], String> {
    match value {
        Value::Text(word) => Ok(word),
        other => Err(format!("{other:?} is not a word")),
    }
}

pub(super) fn unexpected(value: &Value) -> String {
    format!("unexpected answer of a script: {value:?}")
}
