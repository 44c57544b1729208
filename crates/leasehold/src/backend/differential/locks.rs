//! Random operations on locks.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::LockId;
use crate::machine::lock::{Acquired, Holder, LockMachine, LockRef, LockRows, Record, Verdict};
use crate::name::Name;

pub(crate) const KEYS: usize = 3;
const IDS: usize = 5;
const HOLDERS: usize = 4;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Acquire {
        key: usize,
        id: usize,
        ttl: u64,
        holder: usize,
    },
    Release {
        id: usize,
    },
    Extend {
        id: usize,
        ttl: u64,
        only_longer: bool,
    },
    IsLocked {
        key: usize,
        clean_up: bool,
    },
    LookupKey {
        key: usize,
    },
    LookupId {
        id: usize,
    },
    Pass(u64),
    /// Removes records whose TTL has ended, as Redis does.
    RemoveExpired,
    /// Makes the index of an id point to the wrong lock.
    Mislead {
        id: usize,
        key: usize,
    },
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (key, id) = (|| 0..KEYS, || 0..IDS);
    // Some TTLs are so short that a record has expired but still exists.
    let ttl = || prop_oneof![1 => 1..500_u64, 3 => 1..5000_u64];
    let step = prop_oneof![
        6 => (key(), id(), ttl(), 0..HOLDERS)
            .prop_map(|(key, id, ttl, holder)| Step::Acquire { key, id, ttl, holder }),
        6 => id().prop_map(|id| Step::Release { id }),
        3 => (id(), ttl(), any::<bool>())
            .prop_map(|(id, ttl, only_longer)| Step::Extend { id, ttl, only_longer }),
        2 => (key(), any::<bool>()).prop_map(|(key, clean_up)| Step::IsLocked { key, clean_up }),
        2 => key().prop_map(|key| Step::LookupKey { key }),
        2 => id().prop_map(|id| Step::LookupId { id }),
        3 => (0..3000_u64).prop_map(Step::Pass),
        2 => Just(Step::RemoveExpired),
        1 => (id(), key()).prop_map(|(id, key)| Step::Mislead { id, key }),
    ];
    vec(step, 1..60)
}

pub(crate) fn key(number: usize) -> Name {
    let keys = ["invoice:42", "a \"key\" with / and ü", "c"];
    Name::normalised("key", keys[number]).unwrap()
}

pub(crate) fn id(number: usize) -> LockId {
    format!("{number:0>22}").parse().unwrap()
}

/// Holders with all, some and none of the optional fields.
pub(crate) fn holder(number: usize) -> Arc<Holder> {
    let text = |text: &str| Some(Arc::from(text));
    Arc::new(match number {
        0 => Holder::default(),
        1 => Holder { host: text("web-1"), pid: Some(u32::MAX), label: None },
        2 => Holder { label: text("a \"label\" with \\ / ü and \u{202e}"), ..Holder::default() },
        _ => Holder { host: text("web-2"), pid: Some(1), label: text("nightly") },
    })
}

/// Everything that a caller can observe, of the machine or of the store.
#[derive(PartialEq, Debug)]
pub(crate) enum Seen {
    Acquired(Acquired),
    Ended(Verdict<()>),
    Extended(Verdict<u64>),
    Locked(bool),
    Found(Option<Record>),
    Nothing,
}

pub(crate) fn by_machine(machine: &mut LockMachine, step: Step, now: u64) -> Seen {
    if let Step::Mislead { id: i, key: k } = step {
        machine.mislead(id(i), &key(k));
    }
    let Ok(seen) = by_rows(machine, step, now);
    seen
}

/// Takes a step on a machine, except [`Step::Mislead`].
pub(crate) fn by_rows<R: LockRows>(
    machine: &mut LockMachine<R>,
    step: Step,
    now: u64,
) -> Result<Seen, R::Error> {
    Ok(match step {
        Step::Acquire { key: k, id: i, ttl, holder: h } => {
            Seen::Acquired(machine.acquire(&key(k), id(i), ttl, &holder(h), now)?)
        }
        Step::Release { id: i } => Seen::Ended(machine.release(id(i), now)?.map(drop)),
        Step::Extend { id: i, ttl, only_longer } => {
            Seen::Extended(machine.extend(id(i), ttl, only_longer, now)?)
        }
        Step::IsLocked { key: k, clean_up } => {
            Seen::Locked(machine.is_locked(&key(k), clean_up, now)?)
        }
        Step::LookupKey { key: k } => Seen::Found(machine.lookup(&LockRef::Key(key(k)), now)?),
        Step::LookupId { id: i } => Seen::Found(machine.lookup(&LockRef::Id(id(i)), now)?),
        Step::RemoveExpired => {
            machine.remove_expired(now)?;
            Seen::Nothing
        }
        Step::Mislead { .. } | Step::Pass(_) => Seen::Nothing,
    })
}
