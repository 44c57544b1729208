//! Compares the rows of pools in memory and in SQL: the same random operations, the same injected time, the same
//! statuses and counts.

use proptest::prelude::*;

use super::*;
use crate::backend::differential::pools::{Step, TTL_MS, command_of, instance, pool, steps};
use crate::backend::local::database::tests::transaction;
use crate::backend::local::schema;
use crate::machine::pool::{PoolMachine, Status};

fn take_holder(tx: &rusqlite::Connection, number: usize) {
    let take = "UPDATE leases SET holder_until = NULL WHERE instance = ?1";
    tx.execute(take, [instance(number).as_str()]).unwrap();
}

#[test]
fn rows_of_pools_in_memory_and_in_sql_agree() {
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() };
    proptest!(config, |(steps in steps())| {
        let (mut machine, tx) = (PoolMachine::default(), schema::in_memory());
        let mut now = 1_700_000_000_000_000;
        for step in steps {
            match step {
                Step::Pass(micros) => now += micros,
                Step::TakeHolder { instance: number } => {
                    machine.take_holder(&pool(), &instance(number));
                    take_holder(&tx, number);
                }
                _ => {}
            }
            let Some(command) = command_of(step) else { continue };
            let at = Time::from_micros(now);
            let expected = machine.apply(&command, at);
            let tx = transaction(&tx, at);
            prop_assert_eq!(apply(&tx, &command).unwrap(), expected, "after {:?}", step);
            for query in [PoolQuery::First(10), PoolQuery::Named(pool())] {
                let listed = list(&tx, &query).unwrap();
                prop_assert_eq!(listed, machine.list(&query), "{:?} after {:?}", query, step);
            }
        }
    });
}

/// Renewals just before, at and after the TTL.
#[test]
fn the_boundary_of_a_lease() {
    let (start, ttl) = (1_700_000_000_000_000, TTL_MS * 1000);
    let acquire = command_of(Step::Acquire { instance: 0, capacity: 1, ttl: TTL_MS }).unwrap();
    let renew = command_of(Step::Renew { instance: 0, ttl: TTL_MS }).unwrap();
    let cases =
        [(ttl - 1, Status::Renewed, 1), (ttl, Status::NotHeld, 0), (ttl + 1, Status::NotHeld, 0)];
    for (after, status, current) in cases {
        let tx = schema::in_memory();
        let at = |micros| transaction(&tx, Time::from_micros(micros));
        apply(&at(start), &acquire).unwrap();
        let answer = apply(&at(start + after), &renew).unwrap();
        assert_eq!((answer.status, answer.current), (status, current), "{after}");
    }
}
