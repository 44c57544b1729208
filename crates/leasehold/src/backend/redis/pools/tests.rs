//! Compares the pool machine with its implementation in Lua: the same random operations, the same injected time, the
//! same statuses and counts.

use proptest::prelude::*;
use redis::Connection;
use testkit::redis_server::RedisServer;

use super::*;
use crate::backend::differential::pools::{Step, TTL_MS, command_of, instance, pool, steps};
use crate::backend::redis::tests::by_crate::query;
use crate::clock::Time;
use crate::machine::pool::PoolMachine;

const NOW: &str = "test:now";

struct Redis {
    scripts: Scripts,
    connection: Connection,
    /// When the holder key of each instance expires by the injected clock, which Redis does not use.
    holders: [u64; 5],
}

impl Redis {
    fn new(server: &RedisServer) -> Self {
        let mut connection = server.connection();
        redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
        let scripts = Scripts::with_injected_time(NOW);
        for load in scripts.load() {
            query(&load, &mut connection).checked().unwrap();
        }
        Self { scripts, connection, holders: [0; 5] }
    }

    fn take_holder(&mut self, number: usize) {
        let holder = format!("semaphores:holders:encoders:{}", instance(number));
        redis::cmd("DEL").arg(holder).exec(&mut self.connection).unwrap();
    }

    fn apply(&mut self, command: &PoolCommand, now: u64) -> PoolOutcome {
        redis::cmd("SET").arg(NOW).arg(now).exec(&mut self.connection).unwrap();
        for number in 0..5 {
            let holder = format!("semaphores:holders:encoders:{}", instance(number));
            let verb = if self.holders[number] <= now { "DEL" } else { "PERSIST" };
            redis::cmd(verb).arg(holder).exec(&mut self.connection).unwrap();
        }
        let answer = query(&call(&self.scripts, "encoders", command), &mut self.connection);
        let answer = decode(&answer).unwrap();
        let (PoolAction::Acquire { instance: touched, .. }
        | PoolAction::Renew { instance: touched }) = &command.action
        else {
            return answer;
        };
        if matches!(answer.status, Status::Acquired | Status::Renewed) {
            let number = (0..5).find(|number| instance(*number) == *touched).unwrap();
            self.holders[number] = now + command.ttl.micros();
        }
        answer
    }
}

#[test]
fn the_machine_of_pools_and_lua_agree() {
    let server = RedisServer::start();
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() };
    proptest!(config, |(steps in steps())| {
        let (mut machine, mut redis) = (PoolMachine::default(), Redis::new(&server));
        let mut now = 1_700_000_000_000_000;
        for step in steps {
            match step {
                Step::Pass(micros) => now += micros,
                Step::TakeHolder { instance: number } => {
                    machine.take_holder(&pool(), &instance(number));
                    redis.take_holder(number);
                }
                _ => {}
            }
            let Some(command) = command_of(step) else { continue };
            let expected = machine.apply(&command, Time::from_micros(now));
            prop_assert_eq!(redis.apply(&command, now), expected, "after {:?}", step);
        }
    });
}

/// Renewals and releases just before, at and after the TTL, and after the holder key was removed before its member.
#[test]
fn the_boundary_of_a_lease() {
    let server = RedisServer::start();
    let (start, ttl) = (1_700_000_000_000_000, TTL_MS * 1000);
    let acquire = command_of(Step::Acquire { instance: 0, capacity: 1, ttl: TTL_MS }).unwrap();
    let renew = command_of(Step::Renew { instance: 0, ttl: TTL_MS }).unwrap();
    let release = command_of(Step::Release { instance: 0, ttl: TTL_MS }).unwrap();
    let cases = [
        (ttl - 1, false, &renew, (Status::Renewed, 1, 0)),
        (ttl, false, &renew, (Status::NotHeld, 0, 1)),
        (ttl + 1, false, &renew, (Status::NotHeld, 0, 1)),
        (ttl / 2, true, &renew, (Status::Expired, 0, 1)),
        (ttl - 1, false, &release, (Status::Released, 0, 0)),
        (ttl, false, &release, (Status::NotHeld, 0, 1)),
        (ttl / 2, true, &release, (Status::AlreadyExpired, 0, 1)),
    ];
    for (after, holder_gone, command, (status, current, expired)) in cases {
        let (mut machine, mut redis) = (PoolMachine::default(), Redis::new(&server));
        machine.apply(&acquire, Time::from_micros(start));
        redis.apply(&acquire, start);
        if holder_gone {
            machine.take_holder(&pool(), &instance(0));
            redis.take_holder(0);
        }
        let expected = PoolOutcome { status, current, expired };
        assert_eq!(machine.apply(command, Time::from_micros(start + after)), expected, "{after}");
        assert_eq!(redis.apply(command, start + after), expected, "{after}");
    }
}
