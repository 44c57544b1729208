//! Compares the machine with its implementation in Lua: the same random commands, the same injected time, the same
//! outcomes.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use redis::{Connection, Value};
use testkit::redis_cluster::RedisCluster;
use testkit::redis_server::RedisServer;

use super::command::RedisCommand;
use super::scripts::{Form, KINDS, Keys, Scripts, decode, storage_keys};
use super::value::Value as RedisValue;
use crate::clock::{Span, Time};
use crate::machine::tests::{declared, limit_change, share};
use crate::machine::{
    Circumstances, Command, Declared, Effects, Held, LimitChange, Machine, Outcome, Outlook, Rate,
    Reach, ReleaseHint, Row, Share, Terms, TokenBucket,
};
use crate::{AcquisitionId, ClientId};

pub(super) mod by_crate;
mod refusals;

use by_crate::query;

const CLIENTS: usize = 3;
/// The hash tag puts it into the slot of the name.
const NOW: &str = "test:{name}:now";
/// The scale of rates, relative to the time that passes in a step.
const SCALE: u64 = 200;
const CONFIRM_WITHIN: Span = Span::from_micros(5000);

#[derive(Clone, Debug)]
enum Step {
    /// A batch from one client.
    Ask(usize, Vec<Ask>),
    /// From no client.
    ChangeLimits(Option<u32>, LimitChange),
    /// A client releases an id of any client.
    Cancel {
        from: usize,
        whose: usize,
        number: u64,
    },
    Pass(u64),
    Reach(usize, bool),
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    Enqueue { number: u64, declared: Declared, wait: bool, terms: Terms, share: Share },
    Renew { number: u64, terms: Terms },
    Release { number: u64 },
    Sweep,
}

fn client(number: usize) -> ClientId {
    ClientId::from_bits(number as u64 + 1)
}

impl Ask {
    fn command(self, from: usize, machine: &Machine) -> Command {
        let id = |number| AcquisitionId::new(client(from), number);
        match self {
            Self::Enqueue { number, declared, wait, terms, share } => {
                let label = (number % 2 == 0).then(|| "a label with spaces".into());
                Command::Enqueue { id: id(number), declared, wait, terms, share, label }
            }
            Self::Renew { number, terms } => {
                let id = id(number);
                let holds = machine.holders().iter().any(|row| row.id == id);
                Command::Renew { id, terms, holds }
            }
            Self::Release { number } => {
                let holders = machine.holders();
                let ours = |row: &&Row<'_, ()>| row.id.client() == client(from);
                // Mostly an id that holds, if there is one.
                let held = holders.iter().filter(ours).map(|row| row.id).next();
                let id = held.filter(|_| number % 4 != 0).unwrap_or(id(number));
                let limited = machine.is_limited(id);
                let ordinary = |row: &&Row<'_, ()>| {
                    row.id == id && row.member.weight() == 1 && row.member.slot_number().is_none()
                };
                let holds = holders.iter().any(|row| ordinary(&row));
                let hint = match number % 4 {
                    1..=3 if holds => ReleaseHint::Held { limited },
                    0 => ReleaseHint::Nothing,
                    _ => ReleaseHint::Unused,
                };
                Command::Release { id, hint }
            }
            Self::Sweep => Command::Sweep,
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = || 0..8_u64;
    let span = || (1..20_000_u64).prop_map(Span::from_micros);
    let terms = || {
        (span(), prop::option::weighted(0.3, span()))
            .prop_map(|(heartbeat, ttl)| Terms { lease: Some(heartbeat), ttl })
    };
    let enqueue = (number(), prop::bool::weighted(0.9), terms(), share());
    let enqueue = (vec(enqueue, 1..5), declared(SCALE)).prop_map(|(mut ids, declared)| {
        ids.sort_by_key(|(number, ..)| *number);
        ids.dedup_by_key(|(number, ..)| *number);
        let ask =
            |(number, wait, terms, share)| Ask::Enqueue { number, declared, wait, terms, share };
        ids.into_iter().map(ask).collect::<Vec<_>>()
    });
    let asks = prop_oneof![
        6 => enqueue,
        4 => (0..8_u64, 1..6_u64, terms()).prop_map(|(first, length, terms)| {
            (first..first + length).map(|number| Ask::Renew { number: number % 8, terms }).collect()
        }),
        4 => number().prop_map(|number| vec![Ask::Release { number }]),
        1 => Just(vec![Ask::Sweep]),
    ];
    // In the order in which the sender sends them: releases first, enqueues last. No id is both released and enqueued.
    let batch = vec(asks, 1..4).prop_map(|asks| {
        let mut all = asks.concat();
        all.sort_by_key(|ask| match ask {
            Ask::Release { .. } => 0,
            Ask::Renew { .. } | Ask::Sweep => 1,
            Ask::Enqueue { .. } => 2,
        });
        let (mut released, mut queueing) = (BTreeSet::new(), BTreeSet::new());
        // A client declares one capacity at a time.
        let declared = all.iter().find_map(|ask| match ask {
            Ask::Enqueue { declared, .. } => Some(*declared),
            _ => None,
        });
        for ask in &mut all {
            if let (Ask::Enqueue { declared: of_ask, .. }, Some(declared)) = (ask, declared) {
                *of_ask = declared;
            }
        }
        all.retain(|ask| match ask {
            // A script releases all its ids and then grants; the machine grants after each. With one release per batch
            // they agree.
            Ask::Release { number } => released.is_empty() && released.insert(*number),
            Ask::Enqueue { number, .. } => !released.contains(number) && queueing.insert(*number),
            _ => true,
        });
        all
    });
    let step = prop_oneof![
        14 => (0..CLIENTS, batch).prop_map(|(from, asks)| Step::Ask(from, asks)),
        3 => (prop::option::of(1..5_u32), limit_change(SCALE)).prop_map(|(capacity, change)| {
            // Forgetting a name must not declare a capacity for it first.
            let capacity = capacity.filter(|_| change != LimitChange::Forget);
            Step::ChangeLimits(capacity, change)
        }),
        2 => (0..CLIENTS, 0..CLIENTS, number())
            .prop_map(|(from, whose, number)| Step::Cancel { from, whose, number }),
        3 => (0..12_000_u64).prop_map(Step::Pass),
        2 => (0..CLIENTS, any::<bool>()).prop_map(|(client, reach)| Step::Reach(client, reach)),
    ];
    (vec(step, 1..70), 0..8).prop_map(|(steps, kind)| match kind {
        0 => steps,
        1 => steps.into_iter().map(made_plain).collect(),
        _ => steps.into_iter().map(made_plain).map(made_calm).collect(),
    })
}

/// Removes weights, slot numbers and rates, because the small scripts serve only names without them.
fn made_plain(mut step: Step) -> Step {
    match &mut step {
        Step::ChangeLimits(_, change) if matches!(change, LimitChange::Rate(_)) => {
            *change = LimitChange::Resume;
        }
        Step::Ask(_, asks) => {
            for ask in asks {
                if let Ask::Enqueue { declared, share, .. } = ask {
                    (declared.rate, *share) = (None, Share::ONE);
                }
            }
        }
        _ => {}
    }
    step
}

/// Makes leases long, operators and TTLs rare, and most clients reachable, and sends one kind of command at a time.
fn made_calm(step: Step) -> Step {
    let long = |terms: &mut Terms, number: u64| {
        terms.lease = terms.lease.map(|lease| Span::from_micros(lease.micros() * 40));
        terms.ttl = terms.ttl.filter(|_| number == 0);
    };
    match step {
        Step::Ask(from, mut asks) => {
            let first = std::mem::discriminant(&asks[0]);
            asks.retain(|ask| std::mem::discriminant(ask) == first);
            asks.truncate(2);
            for ask in &mut asks {
                match ask {
                    Ask::Enqueue { number, terms, declared, .. } => {
                        long(terms, *number);
                        declared.capacity = 6;
                    }
                    Ask::Renew { number, terms } => long(terms, *number),
                    Ask::Release { .. } | Ask::Sweep => {}
                }
            }
            Step::Ask(from, asks)
        }
        Step::ChangeLimits(..) => Step::ChangeLimits(None, LimitChange::Resume),
        Step::Reach(client, _) => Step::Reach(client, true),
        step => step,
    }
}

/// The machine and Redis, side by side.
struct Both {
    machine: Machine,
    scripts: Scripts,
    keys: Vec<Keys<'static>>,
    connection: Connection,
    /// One connection for each client, and whether it has subscribed to its channel.
    listeners: Vec<Connection>,
    listening: Vec<bool>,
    now: u64,
    served: Served,
    /// What the last answer has reported.
    outlook: Outlook,
    /// The keys that are lists, of another program.
    others: BTreeSet<String>,
}

/// How many commands the scripts have served.
#[derive(Clone, Copy, Default, Debug)]
struct Served {
    by_machine: usize,
    /// By each of the small scripts.
    by_small: [usize; 4],
    /// How many commands each of the small scripts has refused.
    refused: [usize; 4],
    batches: usize,
}

/// What a test observes of a batch.
#[derive(PartialEq, Debug)]
struct Seen {
    outcomes: Vec<Outcome>,
    granted: Vec<(AcquisitionId, Held)>,
    next_expiry: Option<Span>,
    next_token: Option<Span>,
    /// The holders with their deadlines; the waiters, in order.
    holders: BTreeMap<String, u64>,
    waiters: Vec<String>,
    limits: Limits,
    /// The wake-ups of each client.
    wake_ups: Vec<Vec<String>>,
}

#[derive(Default, PartialEq, Debug)]
struct Limits {
    capacity: u32,
    pinned: Option<u32>,
    /// Only if the capacity is pinned.
    declared: Option<u32>,
    paused: Option<u64>,
    units: u32,
    meter: Option<TokenBucket>,
    /// The slot numbers that are taken.
    slots: Vec<u32>,
}

const NAME: &str = "a {name} with 'quotes' % and spaces";

/// Where the scripts run.
enum Place {
    Server(Box<RedisServer>),
    Cluster(RedisCluster),
}

impl Place {
    /// Returns a connection to the server that has the name.
    fn connection(&self) -> Connection {
        match self {
            Self::Server(server) => server.connection(),
            Self::Cluster(cluster) => cluster.connection(cluster.primary_of_key(NOW)),
        }
    }

    fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }
}

impl Both {
    fn new(place: &Place) -> Self {
        let mut connection = place.connection();
        let scripts = Scripts::with_injected_time(NOW);
        redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
        for load in scripts.load() {
            query(&load, &mut connection).checked().unwrap();
        }
        let heartbeat = Span::from_millis(180_000);
        let keys = |number| {
            let written = ("ns", NAME.into());
            let keys = Keys::new(written, NAME, client(number), CONFIRM_WITHIN, heartbeat);
            if place.is_cluster() { keys.in_cluster() } else { keys }
        };
        Self {
            machine: Machine::new(0),
            scripts,
            keys: (0..CLIENTS).map(keys).collect(),
            connection,
            listeners: (0..CLIENTS).map(|_| listener(place)).collect(),
            listening: vec![false; CLIENTS],
            now: 1_700_000_000_000_000,
            served: Served::default(),
            outlook: Outlook::Room,
            others: BTreeSet::new(),
        }
    }

    fn listen(&mut self, at: usize, listen: bool) {
        if self.listening[at] == listen {
            return;
        }
        self.listening[at] = listen;
        let (sharded, channel) = match self.keys[at].channel() {
            Some(channel) => ("S", channel),
            None => ("", format!("ns:wake:{}", client(at))),
        };
        let command = if listen { "SUBSCRIBE" } else { "UNSUBSCRIBE" };
        let mut command = redis::cmd(&format!("{sharded}{command}"));
        command.arg(channel);
        self.listeners[at].send_packed_command(&command.get_packed_command()).unwrap();
        // Earlier messages may be read first.
        loop {
            let Value::Array(answer) = self.listeners[at].recv_response().unwrap() else {
                continue;
            };
            let kind: String = redis::from_redis_value(answer[0].clone()).unwrap();
            if kind.ends_with("subscribe") {
                break;
            }
        }
    }

    fn by_machine(&mut self, from: usize, commands: &[Command]) -> Seen {
        let now = Time::from_micros(self.now);
        let mut effects = Effects::default();
        let listening = &self.listening;
        let client_of =
            |id: AcquisitionId| (0..CLIENTS).find(|number| client(*number) == id.client());
        let mut wake_ups = vec![Vec::new(); CLIENTS];
        // Under a rate, a permit must be claimed first. An enqueue may declare a rate.
        let rated = Cell::new(false);
        let mut call = Circumstances {
            from: Some(client(from)),
            now,
            confirm_within: CONFIRM_WITHIN,
            wake: &mut |id, held| {
                let Some(number) = client_of(id).filter(|number| listening[*number]) else {
                    return Reach::Silent;
                };
                let Held { slot_number, fence, valid_for } = *held;
                let (fence, claim) = (fence.get(), valid_for.map_or(0, Span::micros));
                let slot = slot_number.map_or(0, NonZeroU32::get);
                let claim = if rated.get() { 0 } else { claim };
                let wake_up = format!("{id} {} {fence} {slot} {claim} {NAME}", now.micros());
                wake_ups[number].push(wake_up);
                Reach::Reached
            },
            effects: &mut effects,
        };
        let machine = &mut self.machine;
        let mut outcomes = Vec::new();
        for command in commands {
            let mut then = machine.clone();
            if let Command::Enqueue { .. } = command {
                let (wake, effects) = (&mut |_, _: &_| Reach::Reached, &mut Effects::default());
                let (from, confirm_within) = (Some(client(from)), CONFIRM_WITHIN);
                let mut call = Circumstances { from, now, confirm_within, wake, effects };
                let Ok(_) = then.apply(command, &mut call);
            }
            rated.set(then.limits().meter().is_some());
            let Ok(outcome) = machine.apply(command, &mut call);
            outcomes.push(outcome);
        }
        let waiting = machine.waiting() > 0;
        let holders = machine.holders();
        let row = |row: &crate::machine::Row<'_, ()>| {
            (row.id.to_string(), row.member.ends().map_or(0, Time::micros))
        };
        Seen {
            outcomes,
            granted: effects.granted.iter().map(|(id, held, ())| (*id, *held)).collect(),
            next_expiry: machine.next_expiry().filter(|_| waiting).map(|at| at - now),
            next_token: machine
                .next_token(now)
                .filter(|_| {
                    machine.waiters().next().is_some_and(|row| row.id.client() == client(from))
                })
                .map(|at| at - now),
            holders: holders.iter().map(row).collect(),
            waiters: machine.waiters().map(|row| row.id.to_string()).collect(),
            limits: {
                let limits = machine.limits();
                let pinned = limits.pinned;
                let mut slots: Vec<_> = holders
                    .iter()
                    .filter_map(|row| Some(row.member.slot_number()?.get()))
                    .collect();
                slots.sort_unstable();
                Limits {
                    capacity: limits.capacity(),
                    pinned,
                    declared: pinned.map(|_| limits.declared),
                    paused: limits.paused.as_ref().map(|paused| paused.since.micros()),
                    units: machine.units(),
                    meter: limits.meter().copied(),
                    slots,
                }
            },
            wake_ups,
        }
    }

    /// `expected` says how many wake-ups to wait for.
    fn by_redis(&mut self, from: usize, commands: &[Command], expected: &Seen) -> Seen {
        redis::cmd("SET").arg(NOW).arg(self.now).exec(&mut self.connection).unwrap();
        let declared = commands.iter().find_map(|command| match command {
            Command::Enqueue { declared, .. } => Some(*declared),
            _ => None,
        });
        let declared = declared.unwrap_or(Declared::capacity(0, false));
        let calls = match commands {
            [change @ Command::ChangeLimits { .. }] => {
                let call = self.scripts.change_limits(&self.keys[0], change);
                vec![(call, Form::Machine, 1)]
            }
            _ => self.calls(from, declared, commands),
        };
        let (mut answers, mut rest, mut knows_expiry) = (Vec::new(), commands, true);
        for (call, mut form, count) in calls {
            let (group, others) = rest.split_at(count);
            rest = others;
            let before = (form != Form::Machine).then(|| self.dump());
            let mut answer = query(&call, &mut self.connection).checked().unwrap();
            if form != Form::Machine {
                let small = form as usize - 1;
                let tally = if answer == RedisValue::Nil {
                    &mut self.served.refused
                } else {
                    &mut self.served.by_small
                };
                tally[small] += count;
            }
            if answer == RedisValue::Nil {
                assert!(
                    Some(self.dump()) == before,
                    "{form:?} has changed something for {group:?}"
                );
                let call = self.scripts.apply(&self.keys[from], declared, group);
                (form, answer) = (Form::Machine, query(&call, &mut self.connection));
            }
            if form == Form::Machine {
                self.served.by_machine += count;
            }
            knows_expiry = form != Form::Renew;
            answers.push((form, count, answer));
        }
        let mut answer = decode(commands, answers).unwrap();
        if !knows_expiry {
            answer.next_expiry = expected.next_expiry;
        }
        assert!(!answer.foreign, "nobody else takes part");
        self.outlook = answer.outlook.unwrap_or(self.outlook);
        match answer.outlook {
            Some(Outlook::Room | Outlook::Full | Outlook::Quiet) => {
                assert!(expected.waiters.is_empty());
            }
            Some(Outlook::Queue) => assert!(!expected.waiters.is_empty()),
            Some(Outlook::Special) | None => {}
        }
        let wake_ups = expected.wake_ups.iter().zip(&mut self.listeners);
        let wake_ups = wake_ups.map(|(expected, listener)| {
            expected.iter().map(|_| wake_up(listener)).collect::<Vec<String>>()
        });
        let wake_ups = wake_ups.collect();
        let mut scores = |kind: &str| -> Vec<(String, f64)> {
            let key = format!("ns:semaphore_{kind}:{NAME}");
            let mut range = redis::cmd("ZRANGE");
            range.arg(key).arg(0).arg(-1).arg("WITHSCORES");
            range.query(&mut self.connection).unwrap()
        };
        let ttl: BTreeMap<_, _> = scores("ttl").into_iter().collect();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        // microseconds of this century
        let ends = |(id, renew_by): (String, f64)| {
            let ends = ttl.get(&id).map_or(renew_by, |hold_until| hold_until.min(renew_by));
            (id, (ends * 1e6).round() as u64)
        };
        Seen {
            outcomes: answer.outcomes,
            granted: answer.effects.granted.iter().map(|(id, held, ())| (*id, *held)).collect(),
            next_expiry: answer.next_expiry,
            next_token: answer.next_token,
            holders: scores("main").into_iter().map(ends).collect(),
            waiters: scores("waiting").into_iter().map(|(id, _)| id).collect(),
            limits: self.limits(),
            wake_ups,
        }
    }
}

impl Both {
    /// Returns the calls for a batch, by a client that expects something else of the name each time.
    fn calls(
        &mut self,
        from: usize,
        declared: Declared,
        commands: &[Command],
    ) -> Vec<(RedisCommand, Form, usize)> {
        use Outlook::{Full, Queue, Quiet, Room, Special};
        let (last, outlooks) = (self.outlook, [Room, Quiet, Full, Queue]);
        self.served.batches += 1;
        let at = self.served.batches % 12;
        let outlook = if at == 4 { Special } else { outlooks.get(at).copied().unwrap_or(last) };
        let calls = self.scripts.calls(&self.keys[from], declared, commands, outlook);
        // One batch of the machine remembers which clients are out of reach, and several calls do not. Then a heavy waiter
        // whose client is out of reach holds up a later call.
        if calls.len() > 1 && self.listening.contains(&false) {
            return self.scripts.calls(&self.keys[from], declared, commands, Special);
        }
        calls
    }

    /// Returns everything that is stored, with the moments when it expires.
    fn dump(&mut self) -> Vec<String> {
        let mut dump = redis::pipe();
        for (key, (_, kind)) in storage_keys("ns", NAME).into_iter().zip(KINDS) {
            match kind {
                _ if self.others.contains(&key) => dump.cmd("LRANGE").arg(&key).arg("0").arg("-1"),
                "zset" => dump.cmd("ZRANGE").arg(&key).arg("0").arg("-1").arg("WITHSCORES"),
                "hash" => dump.cmd("HGETALL").arg(&key),
                _ => dump.cmd("GET").arg(&key),
            };
            dump.cmd("PEXPIRETIME").arg(&key);
        }
        let values: Vec<Value> = dump.query(&mut self.connection).unwrap();
        // The fields of a hash have no order.
        let sorted = |value: Value| match value {
            Value::Array(values) => {
                let pairs = values.chunks(2).map(|pair| format!("{pair:?}"));
                pairs.collect::<BTreeSet<_>>().into_iter().collect()
            }
            value => format!("{value:?}"),
        };
        values.into_iter().map(sorted).collect()
    }

    fn limits(&mut self) -> Limits {
        let mut get = |kind: &str| -> Vec<u8> {
            let key = format!("ns:semaphore_{kind}:{NAME}");
            let text: Option<_> = redis::cmd("GET").arg(key).query(&mut self.connection).unwrap();
            text.unwrap_or_default()
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let capacity = text(get("max")).parse().unwrap_or(0);
        let bits = get("slots");
        let taken = |number: &u32| {
            let at = (number - 1) as usize;
            bits.get(at / 8).is_some_and(|byte| byte << (at % 8) & 0x80 > 0)
        };
        let slots = (1..=64).filter(taken).collect();
        let limits = text(get("limits"));
        let numbers = limits.lines().next().unwrap_or_default().split(' ');
        let numbers: Vec<Option<u64>> = numbers.map(|text| text.parse().ok()).collect();
        let number = |at: usize| numbers.get(at).copied().flatten();
        let small = |at| number(at).map(|number| u32::try_from(number).unwrap());
        let key = format!("ns:semaphore_main:{NAME}");
        let held: u32 = redis::cmd("ZCARD").arg(key).query(&mut self.connection).unwrap();
        // Without holders, the stored units and slot numbers are not used.
        let any = |slots: Vec<u32>| if held > 0 { slots } else { Vec::new() };
        Limits {
            capacity,
            pinned: small(0),
            declared: small(1).filter(|_| small(0).is_some()),
            paused: number(2),
            units: if held > 0 { held + small(3).unwrap_or(0) } else { 0 },
            meter: number(4).filter(|count| *count > 0).map(|count| TokenBucket {
                rate: Rate {
                    count,
                    period: Span::from_micros(number(5).unwrap()),
                    burst: small(6).unwrap(),
                },
                full_at: Time::from_micros(number(7).unwrap()),
                returns_from: number(8).unwrap(),
            }),
            slots: any(slots),
        }
    }
}

fn listener(place: &Place) -> Connection {
    let listener = place.connection();
    listener.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    listener
}

/// Returns the next wake-up about a grant that a client receives, and skips everything else.
fn wake_up(listener: &mut Connection) -> String {
    loop {
        let Value::Array(message) = listener.recv_response().expect("a wake-up") else { continue };
        if let [Value::BulkString(kind), _, Value::BulkString(wake_up)] = &message[..]
            && kind.ends_with(b"message")
        {
            let wake_up = String::from_utf8(wake_up.clone()).unwrap();
            // A wake-up without a fence only says when a token comes.
            if wake_up.split(' ').nth(2) == Some("0") {
                continue;
            }
            return wake_up;
        }
    }
}

/// Removes the time to claim the permit from a wake-up.
fn forget_claim(wake_up: &mut String) {
    let fields: Vec<_> = wake_up.splitn(6, ' ').collect();
    *wake_up = [fields[0], fields[1], fields[2], fields[3], fields[5]].join(" ");
}

/// `SCRIPTS_AGREE_TIMES` repeats this test so many times as often, on other commands.
#[test]
fn the_machine_and_lua_agree() {
    let times = std::env::var("SCRIPTS_AGREE_TIMES").map_or(1, |times| times.parse().unwrap());
    let served = agree(&Place::Server(Box::new(RedisServer::start())), 2400 * times);
    let by_small = served.by_small.iter().sum::<usize>();
    let all = served.by_machine + by_small;
    let enough = 100_000 * times as usize;
    assert!(all >= enough && by_small >= enough / 25, "{served:?}");
    assert!(served.by_small.iter().chain(&served.refused).all(|count| *count > 0), "{served:?}");
}

/// The scripts are the same, but the keys, the channels and the restrictions of a node are not.
#[test]
fn the_machine_and_lua_agree_in_a_cluster() {
    let served = agree(&Place::Cluster(RedisCluster::start_primaries(3)), 900);
    let by_small = served.by_small.iter().sum::<usize>();
    assert!(served.by_machine + by_small >= 30_000 && by_small >= 1000, "{served:?}");
}

/// A script that removed all of them at once would block the server.
#[test]
fn very_many_expired_holders_are_removed_in_parts() {
    const EXPIRED: usize = 100_000;
    let place = Place::Server(Box::new(RedisServer::start()));
    let mut both = Both::new(&place);
    let key = |kind: &str| format!("ns:semaphore_{kind}:{NAME}");
    let make = "for i = 1, ARGV[1] do
        redis.call('ZADD', KEYS[1], i, 'abcdefghijk-' .. i)
        redis.call('HSET', KEYS[2], 'abcdefghijk-' .. i, '1 1 30000000 - ')
    end";
    let make = redis::Script::new(make);
    let connection = &mut both.connection;
    make.key(key("main")).key(key("info")).arg(EXPIRED).invoke::<()>(connection).unwrap();
    // A holder whose TTL has ended is among those that the first scripts leave.
    let terms = Terms { lease: Some(Span::from_millis(60_000)), ttl: Some(Span::from_millis(1)) };
    let ended = AcquisitionId::new(client(0), 2);
    let ended_text = ended.to_string();
    let score = |kind: &str, score: &str| {
        redis::cmd("ZADD").arg(key(kind)).arg(score).arg(&ended_text).to_owned()
    };
    score("main", "2000000000").exec(&mut both.connection).unwrap();
    score("ttl", "1600000000").exec(&mut both.connection).unwrap();
    let mut many = redis::cmd("ZADD");
    many.arg(key("ttl"));
    for number in 0..6000 {
        many.arg(number).arg(format!("abcdefghijk-{number}"));
    }
    many.exec(&mut both.connection).unwrap();

    let (id, share) = (AcquisitionId::new(client(0), 1), Share::ONE);
    let declared = Declared::capacity(1, true);
    let enqueue = Command::Enqueue { id, declared, wait: true, terms, share, label: None };
    redis::cmd("SET").arg(NOW).arg(both.now).exec(&mut both.connection).unwrap();
    let mut apply = |commands: &[Command]| {
        let call = both.scripts.apply(&both.keys[0], declared, commands);
        let answer = query(&call, &mut both.connection);
        let held: usize = redis::cmd("ZCARD").arg(key("main")).query(&mut both.connection).unwrap();
        let answer = [(Form::Machine, commands.len(), answer)];
        (decode(commands, answer).unwrap(), held)
    };
    let (reply, mut left) = apply(&[enqueue]);
    assert!(matches!(reply.outcomes[..], [Outcome::Waiting { .. }]), "{:?}", reply.outcomes);
    assert!(EXPIRED - left <= 5000, "{left} are left");
    let (reply, _) = apply(&[Command::Renew { id: ended, terms, holds: true }]);
    assert_eq!(reply.outcomes, [Outcome::Gone]);
    let mut scripts = 2;
    loop {
        let (reply, now_left) = apply(&[Command::Renew { id, terms, holds: true }]);
        scripts += 1;
        if let [Outcome::Held(_)] = reply.outcomes[..] {
            assert_eq!(now_left, 1);
            break;
        }
        assert!(now_left < left, "{now_left} are left after {left}");
        assert_eq!(reply.next_expiry, Some(Span::from_micros(1)), "the client asks again at once");
        left = now_left;
    }
    assert!((20..=25).contains(&scripts), "{scripts} scripts");
}

/// Returns how many commands were compared.
fn agree(place: &Place, cases: u32) -> Served {
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let served = Cell::new(Served::default());
    proptest!(config, |(steps in steps())| {
        let mut both = Both::new(place);
        both.served = served.get();
        for step in steps {
            match step {
                Step::Pass(micros) => both.now += micros,
                Step::Reach(client, reach) => both.listen(client, reach),
                Step::ChangeLimits(capacity, change) => {
                    let command = [Command::ChangeLimits { capacity, change }];
                    let mut expected = both.by_machine(CLIENTS, &command);
                    let mut seen = both.by_redis(CLIENTS, &command, &expected);
                    if let [Command::ChangeLimits { change: LimitChange::Rate(_), .. }] = &command {
                        // Some clients are woken before the change, and some after it.
                        seen.wake_ups.iter_mut().flatten().for_each(forget_claim);
                        expected.wake_ups.iter_mut().flatten().for_each(forget_claim);
                    }
                    prop_assert_eq!(seen, expected, "after {:?}", command);
                }
                Step::Cancel { from, whose, number } => {
                    let id = AcquisitionId::new(client(whose), number);
                    let commands = [Command::Release { id, hint: ReleaseHint::Nothing }];
                    let expected = both.by_machine(from, &commands);
                    let seen = both.by_redis(from, &commands, &expected);
                    prop_assert_eq!(seen, expected, "after {:?} from {}", commands, from);
                }
                Step::Ask(from, asks) => {
                    let commands: Vec<_> =
                        asks.into_iter().map(|ask| ask.command(from, &both.machine)).collect();
                    let expected = both.by_machine(from, &commands);
                    let seen = both.by_redis(from, &commands, &expected);
                    prop_assert_eq!(seen, expected, "after {:?} from {}", commands, from);
                }
            }
        }
        served.set(both.served);
    });
    served.get()
}
