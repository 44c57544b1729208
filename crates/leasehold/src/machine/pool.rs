//! The machine of the lease pool.
//!
//! It is written over [`PoolRows`], which the memory store keeps in collections, and the store on one host in SQLite.
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
use std::convert::Infallible;

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
    /// The members with their instance ids.
    pub(crate) members: Vec<(String, Member)>,
}

/// A member of a pool.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Member {
    /// When it last acquired or renewed.
    pub(crate) last: Time,
    /// When the holder expires. `None` if it was removed before.
    pub(crate) holder_until: Option<Time>,
}

/// The rows of one pool, in memory or in one transaction of a store.
pub(crate) trait PoolRows {
    type Error;

    fn count(&self) -> Result<u64, Self::Error>;

    fn member(&self, instance: &Name) -> Result<Option<Member>, Self::Error>;

    /// Adds or replaces a member.
    fn put(&mut self, instance: &Name, row: Member) -> Result<(), Self::Error>;

    fn remove(&mut self, instance: &Name) -> Result<(), Self::Error>;

    /// Removes the members that last acquired or renewed at that time or before. Returns how many there were.
    fn remove_silent(&mut self, last: Time) -> Result<u64, Self::Error>;
}

/// Applies a command to its pool.
pub(crate) fn apply<R: PoolRows>(
    pool: &mut R,
    command: &PoolCommand,
    now: Time,
) -> Result<PoolOutcome, R::Error> {
    let PoolCommand { ttl, action, .. } = command;
    let mut expired = pool.remove_silent(now.minus(*ttl))?;
    let mut current = pool.count()?;
    let renewed = Member { last: now, holder_until: Some(now + *ttl) };
    let status = match action {
        PoolAction::Count => Status::Counted,
        PoolAction::Acquire { instance, capacity } => {
            let is_new = pool.member(instance)?.is_none();
            if is_new && current >= u64::from(*capacity) {
                Status::CapacityFull
            } else {
                pool.put(instance, renewed)?;
                current += u64::from(is_new);
                Status::Acquired
            }
        }
        PoolAction::Renew { instance } | PoolAction::Release { instance } => {
            let renews = matches!(action, PoolAction::Renew { .. });
            let member = pool.member(instance)?;
            let holds = |member: Member| member.holder_until.is_some_and(|until| now < until);
            let status = match member.map(holds) {
                None => Status::NotHeld,
                Some(true) if renews => Status::Renewed,
                Some(true) => Status::Released,
                Some(false) if renews => Status::Expired,
                Some(false) => Status::AlreadyExpired,
            };
            if status == Status::Renewed {
                pool.put(instance, renewed)?;
            } else if member.is_some() {
                pool.remove(instance)?;
                current -= 1;
                expired += u64::from(status != Status::Released);
            }
            status
        }
    };
    Ok(PoolOutcome { status, current, expired })
}

/// All pools of the memory store.
#[derive(Debug, Default)]
pub(crate) struct PoolMachine {
    pools: HashMap<Name, Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    members: HashMap<Name, Member>,
    by_age: BTreeSet<(Time, Name)>,
}

impl PoolRows for Pool {
    type Error = Infallible;

    fn count(&self) -> Result<u64, Infallible> {
        Ok(self.members.len() as u64)
    }

    fn member(&self, instance: &Name) -> Result<Option<Member>, Infallible> {
        Ok(self.members.get(instance).copied())
    }

    fn put(&mut self, instance: &Name, row: Member) -> Result<(), Infallible> {
        self.remove(instance)?;
        self.members.insert(instance.clone(), row);
        self.by_age.insert((row.last, instance.clone()));
        Ok(())
    }

    fn remove(&mut self, instance: &Name) -> Result<(), Infallible> {
        if let Some(row) = self.members.remove(instance) {
            self.by_age.remove(&(row.last, instance.clone()));
        }
        Ok(())
    }

    fn remove_silent(&mut self, until: Time) -> Result<u64, Infallible> {
        let mut removed = 0;
        while self.by_age.first().is_some_and(|(last, _)| *last <= until)
            && let Some((_, instance)) = self.by_age.pop_first()
        {
            self.members.remove(&instance);
            removed += 1;
        }
        Ok(removed)
    }
}

impl PoolMachine {
    pub(crate) fn apply(&mut self, command: &PoolCommand, now: Time) -> PoolOutcome {
        let pool = self.pools.entry(command.pool.clone()).or_default();
        let Ok(outcome) = apply(pool, command, now);
        if outcome.current == 0 {
            self.pools.remove(&command.pool);
        }
        outcome
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
            let by_age = pool.by_age.iter().map(|(_, instance)| instance);
            let members = by_age.map(|instance| (instance.to_string(), pool.members[instance]));
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
