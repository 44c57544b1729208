//! Compares the rows of locks in memory and in SQL: the same random operations, the same injected time, the same
//! outcomes.

use proptest::prelude::*;

use super::*;
use crate::backend::differential::locks::{
    Seen, Step, by_machine, by_rows, holder, id, key, steps,
};
use crate::backend::local::database::tests::transaction;
use crate::backend::local::schema;
use crate::machine::lock::LockRef;

/// Fences are usually minted from the clock. With a clock of 0 they count, as those of the machine do.
fn at<'a>(tx: &'a Transaction<'a>, now: u64) -> LockMachine<SqlLocks<'a>> {
    LockMachine { rows: SqlLocks { tx, now, fences_from: Time::from_micros(0) } }
}

fn of_millis(now: u64) -> Time {
    Time::from_micros(now * 1000)
}

fn by_sqlite(tx: &Transaction<'_>, step: Step, now: u64) -> Seen {
    if let Step::Mislead { id: i, key: k } = step {
        let mislead = "INSERT OR REPLACE INTO lock_ids (id, key) VALUES (?1, ?2)";
        tx.execute(mislead, params![Column(id(i)), key(k)]).unwrap();
    }
    let mut locks = at(tx, now);
    locks.remove_expired(now).unwrap();
    by_rows(&mut locks, step, now).unwrap()
}

#[test]
fn rows_of_locks_in_memory_and_in_sql_agree() {
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() };
    proptest!(config, |(steps in steps())| {
        let (mut machine, connection) = (LockMachine::default(), schema::in_memory());
        let mut now = 1_700_000_000_000;
        for step in steps {
            if let Step::Pass(millis) = step {
                now += millis;
            }
            let tx = transaction(&connection, of_millis(now));
            // In SQL a record ceases to exist exactly at its TTL, for every client.
            let Ok(_) = machine.remove_expired(now);
            let expected = by_machine(&mut machine, step, now);
            prop_assert_eq!(by_sqlite(&tx, step, now), expected, "after {:?}", step);
            let listed = list(&tx, 10).unwrap();
            prop_assert_eq!(listed, machine.list(10, now), "after {:?}", step);
        }
    });
}

/// No client sees an expired record, even before it is removed.
#[test]
fn a_record_ceases_to_exist_at_its_ttl() {
    let connection = schema::in_memory();
    let tx = transaction(&connection, of_millis(1000));
    let acquired = at(&tx, 1000).acquire(&key(0), id(0), 500, &holder(0), 1000).unwrap();
    for (now, there) in [(1499, true), (1500, false)] {
        let tx = transaction(&connection, of_millis(now));
        let mut locks = at(&tx, now);
        for by in [LockRef::Key(key(0)), LockRef::Id(id(0))] {
            assert_eq!(locks.lookup(&by, now).unwrap().is_some(), there, "{by:?} at {now}");
        }
        assert_eq!(list(&tx, 10).unwrap().len(), usize::from(there));
        let verdict = locks.extend(id(0), 1500 - now, false, now).unwrap();
        assert_eq!(matches!(verdict, Verdict::Done(1500)), there, "{verdict:?} at {now}");
    }
    let next = at(&tx, 1500).acquire(&key(0), id(1), 500, &holder(0), 1500).unwrap();
    let (Acquired::Held { fence: first, .. }, Acquired::Held { fence: next, .. }) =
        (acquired, next)
    else {
        panic!("{acquired:?}, {next:?}")
    };
    assert!(next > first);
    assert_eq!(at(&tx, 1500).release(id(0), 1500).unwrap(), Verdict::NotFound);
}

/// A client that waits for a key is notified of its release once, and no other client is.
#[test]
fn a_waiting_client_finds_the_key_that_was_released() {
    let connection = schema::in_memory();
    let tx = transaction(&connection, of_millis(1000));
    let (waiting, other) = (ClientId::from_bits(1), ClientId::from_bits(2));
    let mut locks = at(&tx, 1000);
    locks.acquire(&key(0), id(0), 500, &holder(0), 1000).unwrap();
    register_waiter(&tx, &key(0), waiting).unwrap();
    register_waiter(&tx, &key(1), other).unwrap();
    assert_eq!(take_released(&tx, waiting).unwrap(), []);

    let Verdict::Done(freed) = locks.release(id(0), 1000).unwrap() else { panic!("it was held") };
    wake_waiters(&tx, &freed).unwrap();
    assert_eq!(tx.follow_up.take().wake, [waiting]);
    assert_eq!(take_released(&tx, other).unwrap(), []);
    assert_eq!(take_released(&tx, waiting).unwrap(), [key(0)]);
    assert_eq!(take_released(&tx, waiting).unwrap(), []);

    // The same holds when the record expires.
    locks.acquire(&key(1), id(1), 500, &holder(0), 1000).unwrap();
    for (now, woken) in [(1499, vec![]), (1500, vec![other])] {
        let tx = transaction(&connection, of_millis(now));
        remove_expired(&tx).unwrap();
        assert_eq!(tx.follow_up.take().wake, woken, "at {now}");
    }
}

#[test]
fn fences_go_on_above_those_that_may_have_been_lost_with_the_power() {
    let mut tx = schema::in_memory();
    let acquire = |tx: &rusqlite::Connection, number, now: Time| {
        let tx = transaction(tx, now);
        let acquired = machine(&tx).acquire(&key(0), id(number), 1, &holder(0), millis(now));
        match acquired.unwrap() {
            Acquired::Held { fence, .. } => fence.get(),
            locked @ Acquired::Locked { .. } => panic!("{locked:?}"),
        }
    };
    let clock = schema::clock(&mut tx, "this start").unwrap();
    let (start, second) = (clock.now(), crate::clock::Span::from_millis(1000));
    let fences = [acquire(&tx, 0, start), acquire(&tx, 1, start + second)];
    assert!(fences[0] < fences[1] && clock.covers(start + second), "{fences:?}");
    // No fence above the horizon was granted before. The rows in the table may be lost.
    let horizon: i64 = tx.query_row("SELECT horizon FROM meta", [], |row| row.get(0)).unwrap();
    tx.execute("DELETE FROM locks", []).unwrap();
    let clock = schema::clock(&mut tx, "the next start").unwrap();
    let next = acquire(&tx, 2, clock.now());
    assert!(next > horizon.cast_unsigned(), "{next} after {horizon}");
    // Within the same boot the clock continues.
    let again = schema::clock(&mut tx, "the next start").unwrap();
    assert!(acquire(&tx, 3, again.now() + second) > next);
    assert!(again.now().since(clock.now()) < std::time::Duration::from_secs(60));
}
