//! Random operations on pools.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::clock::Span;
use crate::machine::pool::{PoolAction, PoolCommand};
use crate::name::Name;

pub(crate) const TTL_MS: u64 = 2000;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Acquire { instance: usize, capacity: u32, ttl: u64 },
    Renew { instance: usize, ttl: u64 },
    Release { instance: usize, ttl: u64 },
    Count { ttl: u64 },
    Pass(u64),
    TakeHolder { instance: usize },
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let instance = || 0..5_usize;
    // Mostly the pool's own TTL and capacity; sometimes a client uses other values.
    let ttl = || prop_oneof![9 => Just(TTL_MS), 1 => 1000..3000_u64];
    let capacity = || prop_oneof![9 => Just(3_u32), 1 => 1..5_u32];
    // Exactly one TTL, and one microsecond less or more, so that the boundaries are tested.
    let pass = prop_oneof![
        0..3_000_000_u64,
        Just(TTL_MS * 1000),
        Just(TTL_MS * 1000 - 1),
        Just(TTL_MS * 1000 + 1),
    ];
    let step = prop_oneof![
        6 => (instance(), capacity(), ttl())
            .prop_map(|(instance, capacity, ttl)| Step::Acquire { instance, capacity, ttl }),
        4 => (instance(), ttl()).prop_map(|(instance, ttl)| Step::Renew { instance, ttl }),
        3 => (instance(), ttl()).prop_map(|(instance, ttl)| Step::Release { instance, ttl }),
        2 => ttl().prop_map(|ttl| Step::Count { ttl }),
        4 => pass.prop_map(Step::Pass),
        2 => instance().prop_map(|instance| Step::TakeHolder { instance }),
    ];
    vec(step, 1..60)
}

pub(crate) fn pool() -> Name {
    Name::new("name", "encoders").unwrap()
}

pub(crate) fn instance(number: usize) -> Name {
    Name::new("instance id", &format!("worker {number} ü")).unwrap()
}

pub(crate) fn command_of(step: Step) -> Option<PoolCommand> {
    let (ttl, action) = match step {
        Step::Acquire { instance: i, capacity, ttl } => {
            (ttl, PoolAction::Acquire { instance: instance(i), capacity })
        }
        Step::Renew { instance: i, ttl } => (ttl, PoolAction::Renew { instance: instance(i) }),
        Step::Release { instance: i, ttl } => (ttl, PoolAction::Release { instance: instance(i) }),
        Step::Count { ttl } => (ttl, PoolAction::Count),
        Step::Pass(_) | Step::TakeHolder { .. } => return None,
    };
    Some(PoolCommand { pool: pool(), ttl: Span::from_millis(ttl), action })
}
