//! What a client asks of the locks of a store, and what the store answers.

use std::sync::Arc;

use super::{Acquired, By, Holder, LockMachine, Record, Verdict};
use crate::name::Name;
use crate::{Fence, LockId};

/// One attempt, and one atomic step.
#[derive(Clone, Debug)]
pub(crate) enum LockCommand {
    /// For `ttl` milliseconds.
    Acquire {
        key: Name,
        id: LockId,
        ttl: u64,
        notify: NotifyWhen,
        holder: Arc<Holder>,
        /// The fence that the client expects, because it was granted the one before. A store may save a question if it
        /// is right. `None` if the client found the lock held when it last asked.
        expected: Option<Fence>,
    },
    Release {
        id: LockId,
        /// The key, if the client acquired it with this id, has not asked for an extension, and knows that the lease
        /// has not ended. Then a store need not look for it, nor at the clock.
        held: Option<Name>,
    },
    /// Replaces what is left of the TTL with `ttl` milliseconds.
    Extend {
        id: LockId,
        ttl: u64,
    },
    IsLocked {
        key: Name,
        clean_up: bool,
    },
    Lookup(By),
}

/// When a client wants to be notified of the next release of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotifyWhen {
    Never,
    /// If this acquire finds the lock held.
    IfLocked,
    /// Whatever the outcome: other tasks of the client wait, too.
    Always,
}

/// What a store answers, each to the command of the same name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LockOutcome {
    Acquire(Acquired),
    /// With the key that was unlocked, where the store knows it.
    Release(Verdict<Option<Name>>),
    /// With the new end, in milliseconds of the store's clock.
    Extend(Verdict<u64>),
    IsLocked(bool),
    Lookup(Option<Record>),
}

impl LockMachine {
    pub(crate) fn apply(&mut self, command: &LockCommand, now: u64) -> LockOutcome {
        match command {
            LockCommand::Acquire { key, id, ttl, holder, .. } => {
                LockOutcome::Acquire(self.acquire(key, *id, *ttl, holder, now))
            }
            LockCommand::Release { id, .. } => {
                LockOutcome::Release(self.release(*id, now).map(Some))
            }
            LockCommand::Extend { id, ttl } => LockOutcome::Extend(self.extend(*id, *ttl, now)),
            LockCommand::IsLocked { key, clean_up } => {
                LockOutcome::IsLocked(self.is_locked(key, *clean_up, now))
            }
            LockCommand::Lookup(by) => LockOutcome::Lookup(self.lookup(by, now).cloned()),
        }
    }
}
