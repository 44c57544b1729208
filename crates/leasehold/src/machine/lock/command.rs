//! The commands that clients send about locks, and the store's outcomes.

use std::sync::Arc;

use super::{Acquired, Holder, LockMachine, LockRef, LockRows, Record, Verdict};
use crate::machine::Subject;
use crate::name::Name;
use crate::{Fence, LockId};

/// One command, which the store applies in one atomic step.
#[derive(Clone, Debug)]
pub(crate) enum LockCommand {
    /// Acquires the lock for `ttl` milliseconds.
    Acquire {
        key: Name,
        id: LockId,
        ttl: u64,
        notify: NotifyWhen,
        holder: Arc<Holder>,
        /// The fence that the client expects, because it was granted the one before. If it is right, a store may save
        /// one read. `None` if the lock was held when the client last asked.
        expected: Option<Fence>,
    },
    Release {
        id: LockId,
        /// `None` if the client does not know it.
        key: Option<Name>,
        /// Whether the client acquired the key with this id, has not asked for an extension, and knows that the lease
        /// has not ended. Then a store need not look up the key or read the clock.
        held: bool,
    },
    /// Replaces the remaining time with `ttl` milliseconds.
    ///
    /// A renewal in the background must not undo an extension by the caller, even if the store applies it late. So it
    /// is `only_longer`.
    Extend {
        id: LockId,
        /// `None` if the client does not know it.
        key: Option<Name>,
        ttl: u64,
        /// Whether a later end stays as it is.
        only_longer: bool,
    },
    IsLocked {
        key: Name,
        clean_up: bool,
    },
    Lookup(LockRef),
}

impl LockCommand {
    pub(crate) fn subject(&self) -> Subject<'_> {
        match self {
            Self::Acquire { key, .. }
            | Self::IsLocked { key, .. }
            | Self::Lookup(LockRef::Key(key))
            | Self::Release { key: Some(key), .. }
            | Self::Extend { key: Some(key), .. } => Subject::Lock(key),
            Self::Release { id, .. } | Self::Extend { id, .. } | Self::Lookup(LockRef::Id(id)) => {
                Subject::LockId(id)
            }
        }
    }
}

/// When a client wants to be notified of the next release of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotifyWhen {
    Never,
    /// If this acquire finds the lock held.
    IfLocked,
    /// Whatever the outcome, because other tasks of the client wait too.
    Always,
}

/// The store's outcomes. Each answers the command of the same name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LockOutcome {
    Acquire(Acquired),
    /// Contains the key that was unlocked, if the store knows it.
    Release(Verdict<Option<Name>>),
    /// Contains the new expiry, in milliseconds of the store's clock.
    Extend(Verdict<u64>),
    IsLocked(bool),
    Lookup(Option<Record>),
}

impl<R: LockRows> LockMachine<R> {
    pub(crate) fn apply(
        &mut self,
        command: &LockCommand,
        now: u64,
    ) -> Result<LockOutcome, R::Error> {
        Ok(match command {
            LockCommand::Acquire { key, id, ttl, holder, .. } => {
                LockOutcome::Acquire(self.acquire(key, *id, *ttl, holder, now)?)
            }
            LockCommand::Release { id, .. } => {
                LockOutcome::Release(self.release(*id, now)?.map(Some))
            }
            LockCommand::Extend { id, ttl, only_longer, .. } => {
                LockOutcome::Extend(self.extend(*id, *ttl, *only_longer, now)?)
            }
            LockCommand::IsLocked { key, clean_up } => {
                LockOutcome::IsLocked(self.is_locked(key, *clean_up, now)?)
            }
            LockCommand::Lookup(by) => LockOutcome::Lookup(self.lookup(by, now)?),
        })
    }
}
