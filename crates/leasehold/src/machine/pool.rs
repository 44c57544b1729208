//! The machine of the lease pool.
//!
//! # State
//!
//! A pool has members: a map from instance id to the time when the instance last acquired or renewed. Beside each
//! member is a *holder*, which expires one TTL after that time. There is no queue.
//!
//! # Transitions
//!
//! Nothing runs between calls. Every call first sweeps: it removes the members that have not acquired or renewed for
//! the caller's TTL, and reports how many it removed. Then it acquires, renews, releases, or counts.
//!
//! # Why it is safe
//!
//! - *Limit:* an instance is added only if, after the sweep, the pool has fewer members than the capacity.
//! - *Idempotence:* an instance that acquires again renews its lease and takes no second one.
//! - *Notification:* a member can lose its holder (evicted, deleted, or acquired with a shorter TTL). Its next renewal
//!   or release removes the member and reports that it has expired.

use std::collections::{BTreeSet, HashMap};

use crate::clock::{Span, Time};
use crate::name::Name;

/// A command of one client about one pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolCommand {
    pub(crate) pool: Name,
    pub(crate) ttl: Span,
    pub(crate) action: PoolAction,
}

#[derive(Clone, Debug)]
pub(crate) enum PoolAction {
    Acquire { instance: Name, capacity: u32 },
    Renew { instance: Name },
    Release { instance: Name },
    Count,
}

/// The store's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PoolOutcome {
    pub(crate) status: Status,
    /// The number of members after this call.
    pub(crate) current: u64,
    /// The number of expired members that this call removed.
    pub(crate) expired: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Status {
    Acquired,
    CapacityFull,
    Renewed,
    NotHeld,
    Expired,
    Released,
    AlreadyExpired,
    Counted,
}

/// The pools that a query asks for.
#[derive(Clone, Debug)]
pub(crate) enum PoolQuery {
    /// All pools, ordered by name, at most this many.
    First(usize),
    Named(Name),
}

/// A pool, as statistics show it. The member that has been silent for the longest time comes first.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PoolRow {
    pub(crate) name: String,
    pub(crate) members: Vec<PoolMemberRow>,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PoolMemberRow {
    pub(crate) instance: String,
    pub(crate) last: Time,
    /// When the holder expires. `None` if it was removed before.
    pub(crate) holder_until: Option<Time>,
}

/// All pools of one store.
#[derive(Debug, Default)]
pub(crate) struct PoolMachine {
    pools: HashMap<Name, Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    members: HashMap<Name, Member>,
    by_age: BTreeSet<(Time, Name)>,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    last: Time,
    /// When the holder expires. `None` if it was removed before.
    holder_until: Option<Time>,
}

impl PoolMachine {
    pub(crate) fn apply(&mut self, ask: &PoolCommand, now: Time) -> PoolOutcome {
        let pool = self.pools.entry(ask.pool.clone()).or_default();
        let mut expired = pool.sweep(ask.ttl, now);
        let status = match &ask.action {
            PoolAction::Acquire { instance, capacity } => {
                let known = pool.members.contains_key(instance);
                if known || pool.members.len() < usize::try_from(*capacity).unwrap_or(usize::MAX) {
                    pool.touch(instance, ask.ttl, now);
                    Status::Acquired
                } else {
                    Status::CapacityFull
                }
            }
            PoolAction::Renew { instance } => match pool.standing(instance, now) {
                Standing::Nobody => Status::NotHeld,
                Standing::WithoutHolder => {
                    expired += 1;
                    pool.remove(instance);
                    Status::Expired
                }
                Standing::Holder => {
                    pool.touch(instance, ask.ttl, now);
                    Status::Renewed
                }
            },
            PoolAction::Release { instance } => match pool.standing(instance, now) {
                Standing::Nobody => Status::NotHeld,
                Standing::WithoutHolder => {
                    expired += 1;
                    pool.remove(instance);
                    Status::AlreadyExpired
                }
                Standing::Holder => {
                    pool.remove(instance);
                    Status::Released
                }
            },
            PoolAction::Count => Status::Counted,
        };
        let current = pool.members.len() as u64;
        if current == 0 {
            self.pools.remove(&ask.pool);
        }
        PoolOutcome { status, current, expired }
    }

    /// Returns the members of each pool. The pools are ordered by name.
    pub(crate) fn list(&self, query: &PoolQuery) -> Vec<PoolRow> {
        let pools: Vec<_> = match query {
            PoolQuery::First(limit) => {
                let mut pools: Vec<_> = self.pools.iter().collect();
                pools.sort_by(|a, b| a.0.cmp(b.0));
                pools.truncate(*limit);
                pools
            }
            PoolQuery::Named(name) => self.pools.get_key_value(name).into_iter().collect(),
        };
        let rows = pools.into_iter().map(|(name, pool)| {
            let members = pool.by_age.iter().map(|(last, instance)| {
                let holder_until = pool.members.get(instance).and_then(|own| own.holder_until);
                PoolMemberRow { instance: instance.to_string(), last: *last, holder_until }
            });
            PoolRow { name: name.to_string(), members: members.collect() }
        });
        rows.collect()
    }

    /// Removes the holder of a member, as an eviction or another program might.
    #[cfg(test)]
    pub(crate) fn take_holder(&mut self, pool: &Name, instance: &Name) {
        let member = self.pools.get_mut(pool).and_then(|pool| pool.members.get_mut(instance));
        if let Some(member) = member {
            member.holder_until = None;
        }
    }
}

enum Standing {
    Nobody,
    WithoutHolder,
    Holder,
}

impl Pool {
    fn sweep(&mut self, ttl: Span, now: Time) -> u64 {
        let mut swept = 0;
        while let Some((last, instance)) = self.by_age.first().cloned()
            && last + ttl <= now
        {
            self.remove(&instance);
            swept += 1;
        }
        swept
    }

    fn standing(&self, instance: &Name, now: Time) -> Standing {
        match self.members.get(instance) {
            None => Standing::Nobody,
            Some(member) if member.holder_until.is_some_and(|until| now < until) => {
                Standing::Holder
            }
            Some(_) => Standing::WithoutHolder,
        }
    }

    fn touch(&mut self, instance: &Name, ttl: Span, now: Time) {
        self.remove(instance);
        let member = Member { last: now, holder_until: Some(now + ttl) };
        self.members.insert(instance.clone(), member);
        self.by_age.insert((now, instance.clone()));
    }

    fn remove(&mut self, instance: &Name) {
        if let Some(member) = self.members.remove(instance) {
            self.by_age.remove(&(member.last, instance.clone()));
        }
    }
}
