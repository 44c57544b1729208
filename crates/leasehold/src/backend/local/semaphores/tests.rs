//! Compares the rows of a name in memory and in SQL: the same random commands, the same injected time, the same
//! outcomes. Also tests what memory does not have: dead clients, and the cost of the SQL.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::collection::vec;
use proptest::prelude::*;
use rusqlite::{Connection, OptionalExtension};

use super::*;
use crate::Fence;
use crate::backend::local::columns::{Column, acquisition_id};
use crate::backend::local::database::{FollowUp, Peers};
use crate::backend::local::schema;
use crate::machine::tests::{declared, limit_change, share};
use crate::machine::{
    self, Declared, Effects, LimitChange, LimitsChanged, Machine, Outcome, Reach, ReleaseHint,
    Share, Terms, TokenBucket,
};

const CLIENTS: u64 = 3;
const CONFIRM_WITHIN: Span = Span::from_micros(5000);
/// The scale of rates, relative to the time that passes in a step.
const SCALE: u64 = 200;
const START: u64 = 1_700_000_000_000_000;

fn client(number: u64) -> ClientId {
    ClientId::from_bits(number + 1)
}

fn number(client: ClientId) -> usize {
    usize::try_from(client.number() - 1).unwrap()
}

fn name() -> Name {
    Name::new("name", "a 'name' with \"quotes\" and ü").unwrap()
}

fn id(client_number: u64, sequence: u64) -> AcquisitionId {
    AcquisitionId::new(client(client_number), sequence)
}

#[derive(Clone, Debug)]
enum Step {
    Ask(u64, Vec<Command>),
    Pass(u64),
    Reach(usize, bool),
}

/// Batches of any commands in any order, about ids of any client: a transaction applies one command after the other.
fn steps() -> impl Strategy<Value = Vec<Step>> {
    let id = |from: u64| {
        let whose = prop_oneof![8 => Just(from), 1 => 0..CLIENTS];
        (whose, 0..8_u64).prop_map(|(client, sequence)| id(client, sequence))
    };
    let terms = || {
        let ttl = prop::option::weighted(0.3, (1..20_000_u64).prop_map(Span::from_micros));
        ttl.prop_map(|ttl| Terms { lease: None, ttl })
    };
    let command = move |from: u64| {
        prop_oneof![
            6 => (0..8_u64, declared(SCALE), prop::bool::weighted(0.9), terms(), share()).prop_map(
                move |(sequence, declared, wait, terms, share)| {
                    let (id, label) = (self::id(from, sequence), Some("a label".into()));
                    Command::Enqueue { id, declared, wait, terms, share, label }
                }
            ),
            2 => (prop::option::of(1..5_u32), limit_change(SCALE))
                .prop_map(|(capacity, change)| Command::ChangeLimits { capacity, change }),
            5 => (id(from), terms()).prop_map(|(id, terms)| Command::Renew { id, terms, holds: true }),
            4 => (id(from), any::<bool>()).prop_map(|(id, unused)| {
                let hint = if unused { ReleaseHint::Unused } else { ReleaseHint::Nothing };
                Command::Release { id, hint }
            }),
            2 => Just(Command::Sweep),
        ]
    };
    let batch = move |from| (Just(from), vec(command(from), 1..5));
    let step = prop_oneof![
        14 => (0..CLIENTS).prop_flat_map(batch).prop_map(|(from, batch)| Step::Ask(from, batch)),
        3 => (0..12_000_u64).prop_map(Step::Pass),
        2 => (0..3_usize, any::<bool>()).prop_map(|(client, reach)| Step::Reach(client, reach)),
    ];
    vec(step, 1..80)
}

/// What a test observes of a batch.
#[derive(PartialEq, Debug)]
struct Seen {
    outcomes: Vec<Outcome>,
    granted: Vec<(AcquisitionId, Held, ())>,
    next_expiry: Option<Span>,
    next_token: Option<Span>,
    /// The holders, with deadline, fence, weight and slot number, sorted; the waiters, in the order of the queue.
    holders: Vec<Holds>,
    waiters: Vec<AcquisitionId>,
    /// The declared capacity, the pinned one, the time of the pause, and the rate.
    limits: (u32, Option<u32>, Option<u64>, Option<TokenBucket>),
}

fn by_machine(
    machine: &mut Machine,
    from: u64,
    commands: &[Command],
    now: Time,
    reached: &[bool],
) -> Seen {
    let mut effects = Effects::default();
    let mut call = machine::Circumstances {
        from: Some(client(from)),
        now,
        confirm_within: CONFIRM_WITHIN,
        wake: &mut |id, _| reached[number(id.client())].into(),
        effects: &mut effects,
    };
    let outcomes = commands.iter().map(|command| {
        let Ok(outcome) = machine.apply(command, &mut call);
        outcome
    });
    let outcomes = outcomes.collect();
    let rows = machine.holders().into_iter();
    let holds = |row: machine::Row<'_, ()>| {
        let (ends, fence) = (row.member.ends(), row.member.fence().map(Fence::get));
        let slot_number = row.member.slot_number().map(NonZeroU32::get);
        (row.id, ends.map(Time::micros), fence, row.member.weight(), slot_number)
    };
    let mut holders: Vec<_> = rows.map(holds).collect();
    holders.sort_unstable();
    let head = machine.waiters().next().map(|row| row.id.client());
    // There are so few clients that each of them watches if it waits.
    let releases = commands.iter().all(|command| matches!(command, Command::Release { .. }));
    let waits = machine.waiters().any(|row| row.id.client() == client(from));
    let watch = (waits && !releases).then_some(WATCH);
    let next_expiry = machine.next_expiry().filter(|_| machine.waiting() > 0).map(|at| at - now);
    let next_token = machine.next_token(now).filter(|_| head == Some(client(from)));
    Seen {
        outcomes,
        granted: effects.granted,
        next_expiry: next_expiry.into_iter().chain(watch).min(),
        next_token: next_token.map(|at| at - now),
        holders,
        waiters: machine.waiters().map(|row| row.id).collect(),
        limits: compared(machine.limits()),
    }
}

fn compared(limits: &machine::Limits) -> (u32, Option<u32>, Option<u64>, Option<TokenBucket>) {
    let paused = limits.paused.as_ref().map(|paused| paused.since.micros());
    (limits.declared, limits.pinned, paused, limits.meter().copied())
}

fn by_sqlite(
    tx: &Connection,
    from: u64,
    commands: &[Command],
    now: Time,
    reached: &[bool],
) -> Seen {
    struct Reached<'a>(&'a [bool]);
    impl Peers for Reached<'_> {
        fn reach(&self, client: ClientId) -> Reach {
            self.0[number(client)].into()
        }

        fn is_dead(&self, _client: ClientId) -> bool {
            false
        }
    }
    let is_query = |command: &Command| matches!(command, Command::Renew { .. } | Command::Sweep);
    let queries = commands.iter().all(is_query);
    let apply = |only_reads| {
        let peers = &Reached(reached);
        let tx = Transaction::new(tx, now, CONFIRM_WITHIN, peers, only_reads);
        tx.connection.pragma_update(None, "query_only", only_reads).unwrap();
        let reply = apply(&tx, Some(client(from)), &name(), commands);
        tx.connection.pragma_update(None, "query_only", false).unwrap();
        reply
    };
    let reply = match apply(queries) {
        Err(rusqlite::Error::InvalidQuery) if queries => apply(false),
        reply => reply,
    };
    let (holders, waiters) = rows(tx);
    let Reply { outcomes, effects, next_expiry, next_token, .. } = reply.unwrap();
    let select = concat!("SELECT 0, ", semaphore_columns!(), " FROM semaphores");
    let row = tx.query_row(select, [], semaphore).optional().unwrap();
    let limits = row.map(|(_, row)| compared(&row.limits)).unwrap_or_default();
    let granted = effects.granted;
    Seen { outcomes, granted, next_expiry, next_token, holders, waiters, limits }
}

type Holds = (AcquisitionId, Option<u64>, Option<u64>, u32, Option<u32>);
type Rows = (Vec<Holds>, Vec<AcquisitionId>);

fn rows(tx: &Connection) -> Rows {
    let select = "SELECT client, sequence, ends, fence, weight, slot FROM holders";
    let mut select = tx.prepare(select).unwrap();
    let holder = |row: &rusqlite::Row<'_>| {
        let (ends, fence) =
            (row.get::<_, Option<Time>>(2)?, row.get::<_, Option<Column<Fence>>>(3)?);
        let (ends, fence) = (ends.map(Time::micros), fence.map(|Column(fence)| fence.get()));
        Ok((acquisition_id(row, 0)?, ends, fence, row.get(4)?, row.get(5)?))
    };
    let mut holders: Vec<_> = select.query_map([], holder).unwrap().map(Result::unwrap).collect();
    holders.sort_unstable();
    let mut select = tx.prepare("SELECT client, sequence FROM waiters ORDER BY place").unwrap();
    let waiters = select.query_map([], |row| acquisition_id(row, 0)).unwrap();
    let waiters: Vec<_> = waiters.map(Result::unwrap).collect();
    let counted =
        tx.query_row("SELECT sum(held), sum(waiting), sum(units) FROM semaphores", [], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        });
    let (held, waiting, units) = counted.unwrap();
    let count = |number: Option<i64>| usize::try_from(number.unwrap_or_default()).unwrap();
    assert_eq!((count(held), count(waiting)), (holders.len(), waiters.len()), "the counters");
    let weighs: u32 = holders.iter().map(|(.., weight, _)| *weight).sum();
    assert_eq!(count(units), weighs as usize, "the units");
    (holders, waiters)
}

#[test]
fn rows_in_memory_and_in_sql_agree() {
    let config = ProptestConfig { cases: 1600, failure_persistence: None, ..Default::default() };
    let commands_sent = Cell::new(0);
    proptest!(config, |(steps in steps())| {
        let (mut machine, tx) = (Machine::new(0), schema::in_memory());

        let (mut now, mut reached) = (START, [false; 3]);
        for step in steps {
            match step {
                Step::Pass(micros) => now += micros,
                Step::Reach(client, reach) => reached[client] = reach,
                Step::Ask(from, commands) => {
                    let at = Time::from_micros(now);
                    commands_sent.set(commands_sent.get() + commands.len());
                    let expected = by_machine(&mut machine, from, &commands, at, &reached);
                    let mut seen = by_sqlite(&tx, from, &commands, at, &reached);
                    // In SQL, `ahead` is an upper bound, because gaps in the queue count.
                    for (outcome, expected) in seen.outcomes.iter_mut().zip(&expected.outcomes) {
                        if let (Outcome::Waiting { ahead: most }, Outcome::Waiting { ahead }) = (&outcome, expected) {
                            prop_assert!(most >= ahead, "{} of {}", ahead, most);
                            *outcome = *expected;
                        }
                    }
                    prop_assert_eq!(seen, expected, "after {:?} from {}", commands, from);
                }
            }
        }
    });
    assert!(commands_sent.get() >= 100_000, "{} commands", commands_sent.get());
}

/// A permit that another client granted can be claimed before its deadline only.
#[test]
fn a_permit_is_claimed_until_its_time_is_up_and_then_held_until_its_ttl_ends() {
    for (late, ttl) in [(false, None), (false, Some(Span::from_micros(9000))), (true, None)] {
        let store = TestStore::new();
        store.enqueue("a", id(0, 0), true);
        let terms = Terms { lease: None, ttl };
        let (declared, wait, label) = (Declared::capacity(1, true), true, None);
        let enqueue =
            Command::Enqueue { id: id(1, 0), declared, wait, terms, share: Share::ONE, label };
        store.apply("a", 1, &[enqueue]);
        store.apply("a", 0, &[Command::Release { id: id(0, 0), hint: ReleaseHint::Nothing }]);
        let passed = if late { CONFIRM_WITHIN } else { Span::from_micros(4999) };
        let claimed = claim(&store.at(Time::from_micros(START) + passed), client(1)).unwrap();
        let valid_for = claimed.first().map(|(_, _, held)| held.valid_for);
        let left = ttl.map(|ttl| Span::from_micros(ttl.micros() - passed.micros()));
        assert_eq!(valid_for, (!late).then_some(left));
    }
}

/// A store in which a test declares clients dead, or their lifelines inherited.
struct TestStore {
    tx: Connection,
    dead: Vec<ClientId>,
    inherited: Vec<ClientId>,
    /// The number of checks whether a client is dead.
    looked: Cell<usize>,
}

impl Peers for TestStore {
    fn reach(&self, client: ClientId) -> Reach {
        match () {
            () if self.is_dead(client) => Reach::Dead,
            () if self.inherited.contains(&client) => Reach::Inherited,
            () => Reach::Reached,
        }
    }

    fn is_dead(&self, client: ClientId) -> bool {
        self.looked.set(self.looked.get() + 1);
        self.dead.contains(&client)
    }
}

/// What a test observes of a batch and of what remains to be done after the commit.
#[derive(Debug)]
struct Applied {
    outcomes: Vec<Outcome>,
    granted: Vec<AcquisitionId>,
    watches: bool,
    wake: Vec<ClientId>,
    removed_clients: Vec<ClientId>,
}

impl TestStore {
    fn new() -> Self {
        Self {
            tx: schema::in_memory(),
            dead: Vec::new(),
            inherited: Vec::new(),
            looked: Cell::new(0),
        }
    }

    fn at(&self, now: Time) -> Transaction<'_> {
        Transaction::new(&self.tx, now, CONFIRM_WITHIN, self, false)
    }

    fn apply(&self, name: &str, from: u64, commands: &[Command]) -> Applied {
        let tx = self.at(Time::from_micros(START));
        let name = Name::new("name", name).unwrap();
        let Reply { outcomes, effects, next_expiry, .. } =
            apply(&tx, Some(client(from)), &name, commands).unwrap();
        let FollowUp { wake, removed_clients } = tx.follow_up.into_inner();
        let granted = effects.granted.into_iter().map(|(id, ..)| id).collect();
        let watches = next_expiry == Some(WATCH);
        Applied { outcomes, granted, watches, wake, removed_clients }
    }

    fn enqueue(&self, name: &str, id: AcquisitionId, wait: bool) -> Applied {
        let (terms, label) = (Terms::default(), None);
        let declared = Declared::capacity(1, true);
        let enqueue = Command::Enqueue { id, declared, wait, terms, share: Share::ONE, label };
        self.apply(name, id.client().number() - 1, &[enqueue])
    }

    fn sweep(&self, name: &str, from: u64) -> Applied {
        self.apply(name, from, &[Command::Sweep])
    }
}

#[test]
fn a_newcomer_removes_a_dead_holder_and_is_granted_its_permit() {
    for wait in [true, false] {
        let mut store = TestStore::new();
        store.enqueue("a", id(0, 0), true);
        assert!(!matches!(store.enqueue("a", id(1, 0), false).outcomes[..], [Outcome::Held(_)]));
        store.dead.push(client(0));
        let applied = store.enqueue("a", id(1, 1), wait);
        assert!(matches!(applied.outcomes[..], [Outcome::Held(_)]), "{applied:?}");
        assert_eq!(applied.removed_clients, [client(0)]);
    }
}

#[test]
fn dead_clients_are_removed_under_every_name() {
    let mut store = TestStore::new();
    for name in ["a", "b"] {
        store.enqueue(name, id(0, 0), true);
        store.enqueue(name, id(0, 1), true);
        store.enqueue(name, id(1, 0), true);
    }
    store.enqueue("b", id(2, 0), true);
    store.dead.push(client(0));
    let applied = store.sweep("a", 1);
    // The reply reports the grant under the name that was asked about. For the other name the client must be woken.
    assert_eq!(applied.granted, [id(1, 0)]);
    assert_eq!((applied.removed_clients, applied.wake), (vec![client(0)], vec![client(1)]));
    let (holders, waiters) = rows(&store.tx);
    assert_eq!(holders.len(), 2);
    assert_eq!(waiters, [id(2, 0)]);
    let tx = store.at(Time::from_micros(START));
    let claimed = claim(&tx, client(1)).unwrap();
    assert!(
        matches!(&claimed[..], [(name, granted, _)] if name.as_str() == "b" && *granted == id(1, 0)),
        "{claimed:?}"
    );
    assert_eq!(claim(&tx, client(1)).unwrap(), [], "once");
}

#[test]
fn a_queue_of_the_dead_is_passed_at_once() {
    let mut store = TestStore::new();
    store.enqueue("a", id(0, 0), true);
    for sequence in 0..100 {
        store.enqueue("a", id(1, sequence), true);
    }
    store.enqueue("a", id(2, 0), true);
    store.dead.push(client(1));
    store.looked.set(0);
    let applied =
        store.apply("a", 0, &[Command::Release { id: id(0, 0), hint: ReleaseHint::Nothing }]);
    assert_eq!((applied.wake, applied.removed_clients), (vec![client(2)], vec![client(1)]));
    let looked = store.looked.get();
    assert!(looked < 5, "one look is enough for all of them, not {looked}");
    assert_eq!(rows(&store.tx).1, []);
}

#[test]
fn a_client_with_an_inherited_lifeline_keeps_its_permits_and_loses_its_waiters() {
    let mut store = TestStore::new();
    store.enqueue("a", id(0, 0), true);
    store.enqueue("a", id(0, 1), true);
    store.enqueue("a", id(1, 0), true);
    store.inherited.push(client(0));
    assert_eq!(store.sweep("a", 1).granted, []);
    let (holders, waiters) = rows(&store.tx);
    assert_eq!((holders.len(), waiters.len()), (1, 2), "nobody asked");
    // A second permit becomes free. The process that inherited the lifeline cannot claim it; the next waiter can.
    let grow = Command::Enqueue {
        id: id(2, 0),
        declared: Declared::capacity(2, true),
        wait: true,
        terms: Terms::default(),
        share: Share::ONE,
        label: None,
    };
    let applied = store.apply("a", 2, &[grow]);
    assert_eq!((applied.wake, applied.removed_clients), (vec![client(1)], vec![]));
    assert_eq!(rows(&store.tx).1, [id(2, 0)]);
}

#[test]
fn clients_near_the_head_watch() {
    let store = TestStore::new();
    store.enqueue("a", id(100, 0), true);
    for number in 0..20 {
        let applied = store.enqueue("a", id(number, 0), true);
        assert_eq!(applied.watches, number < 8, "{number}");
    }
    // A client with many waiters does not keep the next clients from watching.
    for sequence in 0..50 {
        store.enqueue("b", id(0, sequence), true);
    }
    assert!(store.enqueue("b", id(1, 0), true).watches);
}

#[test]
fn a_client_finds_its_ids_that_another_client_released() {
    let (store, a) = (TestStore::new(), Name::new("name", "a").unwrap());
    store.enqueue("a", id(0, 0), true);
    let release = Command::Release { id: id(0, 0), hint: ReleaseHint::Nothing };
    let applied = store.apply("a", 1, std::slice::from_ref(&release));
    assert_eq!(applied.wake, [client(0)]);
    assert_eq!(
        take_evicted(&store.at(Time::from_micros(START)), client(0)).unwrap(),
        [(a.clone(), id(0, 0))]
    );
    assert_eq!(take_evicted(&store.at(Time::from_micros(START)), client(0)).unwrap(), [], "once");
    // A client is not notified of its own release.
    store.enqueue("a", id(0, 0), true);
    assert_eq!(store.apply("a", 0, &[release]).wake, []);
    assert_eq!(take_evicted(&store.at(Time::from_micros(START)), client(0)).unwrap(), []);
}

/// Without leases the client would never find out by itself.
#[test]
fn an_evicted_client_is_notified_although_the_name_was_forgotten() {
    let (store, a) = (TestStore::new(), Name::new("name", "a").unwrap());
    store.enqueue("a", id(0, 0), true);
    store.apply("a", 1, &[Command::Release { id: id(0, 0), hint: ReleaseHint::Nothing }]);
    let forget = Command::ChangeLimits { capacity: None, change: LimitChange::Forget };
    let done = Outcome::LimitsChanged(LimitsChanged::Done);
    assert_eq!(store.apply("a", 1, std::slice::from_ref(&forget)).outcomes, [done]);
    assert_eq!(
        take_evicted(&store.at(Time::from_micros(START)), client(0)).unwrap(),
        [(a.clone(), id(0, 0))]
    );
    let unknown = Outcome::LimitsChanged(LimitsChanged::Unknown);
    assert_eq!(store.apply("a", 1, &[forget]).outcomes, [unknown]);
}

/// Returns the number of steps that SQLite takes for one round: a newcomer queues, its client asks, a client near the
/// head asks, the holder releases, the next waiter claims.
fn steps_of_a_round(waiters: u64, clients: u64) -> u64 {
    let mut store = TestStore::new();
    let holder = id(1000, 0);
    store.enqueue("a", holder, true);
    for sequence in 0..waiters {
        store.enqueue("a", id(sequence % clients, sequence), true);
    }
    let counter = Arc::new(AtomicU64::new(0));
    let steps = counter.clone();
    let count = move || {
        steps.fetch_add(1, Ordering::Relaxed);
        false
    };
    let round = |store: &TestStore, turn: u64, holder: AcquisitionId| {
        let newcomer = id(2000 + turn, 0);
        store.enqueue("a", newcomer, true);
        let renew = Command::Renew { id: newcomer, terms: Terms::default(), holds: true };
        store.apply("a", 2000 + turn, &[renew, Command::Sweep]);
        store.sweep("a", turn);
        store.apply(
            "a",
            number(holder.client()) as u64,
            &[Command::Release { id: holder, hint: ReleaseHint::Nothing }],
        );
        let next = id(turn % clients, turn);
        let renew = Command::Renew { id: next, terms: Terms::default(), holds: true };
        let applied = store.apply("a", turn % clients, &[renew]);
        assert!(matches!(applied.outcomes[..], [Outcome::Held(_)]), "{applied:?}");
        next
    };
    // Run one round first, so that the statements are prepared.
    let next = round(&store, 0, holder);
    store.tx.progress_handler(1, Some(count)).unwrap();
    round(&store, 1, next);
    counter.load(Ordering::Relaxed)
}

#[test]
fn the_cost_does_not_grow_with_the_queue() {
    let (short, long) = (steps_of_a_round(20, 10), steps_of_a_round(10_000, 10));
    assert!(short > 100, "{short} steps: nothing was counted");
    assert!(long <= short + short / 20, "{short} steps with 20 waiters, {long} with 10,000");
    // If one client has all waiters, the search for other clients near the head must stop after a fixed number of
    // places.
    let (short, long) = (steps_of_a_round(300, 1), steps_of_a_round(10_000, 1));
    assert!(long <= short + short / 20, "{short} steps with 300 waiters, {long} with 10,000");
}
