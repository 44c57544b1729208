//! Pools in memory: the machine itself, behind a lock of ours.

use std::sync::{Mutex, PoisonError};

use crate::backend::{Later, PoolStore};
use crate::clock::{self, Time};
use crate::machine::pool::{Answer, Ask, PoolMachine};
use crate::pool::PoolStats;

#[derive(Debug, Default)]
pub(crate) struct MemoryPools {
    machine: Mutex<PoolMachine>,
}

impl PoolStore for MemoryPools {
    fn ask(&self, ask: Ask) -> Later<Answer> {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = machine.apply(&ask, Time::from_micros(clock::steady_wall_micros()));
        Box::pin(std::future::ready(Ok(answer)))
    }

    fn list(&self, limit: usize) -> Later<Vec<PoolStats>> {
        let machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let pools = machine.list(limit, Time::from_micros(clock::steady_wall_micros()));
        Box::pin(std::future::ready(Ok(pools)))
    }
}
