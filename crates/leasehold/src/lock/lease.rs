//! The lease of a lock: what is sent for one lock id, and what the store has answered.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::locks::{outcome_of, unexpected};
use super::{HeldLock, LockGuard, LockSpec};
use crate::backend::{Answer, Part};
use crate::client_core::Rules;
use crate::clock::{Moment, Span, wall_time};
use crate::engine::Core;
use crate::engine::deferred::Deferred;
use crate::engine::driver::{Driver, Protocol};
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::sender::TakenPart;
use crate::engine::watch::{Id, Watch};
use crate::guard::LeaseGuard;
use crate::machine::lock::{Acquired, LockCommand, LockOutcome, NotifyWhen, Verdict};
use crate::machine::{Command, Declared, Held, Outcome, ReleaseHint, Reply, Role, Subject, Terms};
use crate::{AcquisitionId, Error, Fence, LockId};

/// The lease of one lock id.
pub(super) type LockLease = Driver<LockProtocol>;

pub(super) struct LockProtocol {
    pub(super) spec: Arc<LockSpec>,
    pub(super) id: LockId,
    /// When the next attempt wants to be notified of a release.
    notify: Mutex<NotifyWhen>,
    /// The fence of the last grant.
    fence: AtomicU64,
    /// When the record expires, in milliseconds of the store's clock.
    expires_at: AtomicU64,
    /// How long the other holder's lease lasted when an attempt was last refused, in milliseconds.
    remaining: AtomicU64,
    /// When the last attempt was sent, in microseconds of [`Moment`].
    sent_at: AtomicU64,
    /// The end of the lease with which the lock was acquired, in microseconds of [`Moment`]; 0 once an extension was
    /// requested.
    held_until: AtomicU64,
}

impl LockProtocol {
    pub(super) fn new(spec: Arc<LockSpec>, id: LockId) -> Self {
        Self {
            spec,
            id,
            notify: Mutex::new(NotifyWhen::Never),
            fence: AtomicU64::new(0),
            expires_at: AtomicU64::new(0),
            remaining: AtomicU64::new(0),
            sent_at: AtomicU64::new(0),
            held_until: AtomicU64::new(0),
        }
    }

    pub(super) fn expires_at(&self) -> u64 {
        self.expires_at.load(Ordering::Acquire)
    }

    /// Returns what the last answer said.
    pub(super) fn held(&self) -> HeldLock {
        let fence = Fence::new(self.fence.load(Ordering::Acquire));
        HeldLock { id: self.id, fence, expires_at: wall_time(self.expires_at()) }
    }

    /// Records that an extension was sent. So a release has to check whether the lock is still held.
    pub(super) fn extension_sent(&self) {
        self.held_until.store(0, Ordering::Release);
    }

    pub(super) fn extended(&self, expires_at: u64) {
        self.expires_at.store(expires_at, Ordering::Release);
    }

    fn acquired(&self, acquired: &Acquired) -> Outcome {
        match *acquired {
            Acquired::Held { fence, expires_at, remaining } => {
                let valid_for = Span::from_millis(remaining);
                let sent_at = Moment::from_micros(self.sent_at.load(Ordering::Acquire));
                self.held_until.store((sent_at + valid_for).micros(), Ordering::Release);
                self.fence.store(fence.get(), Ordering::Release);
                self.extended(expires_at);
                self.spec.next_fence.store(fence.get().saturating_add(1), Ordering::Relaxed);
                Outcome::Held(Held { slot_number: None, fence, valid_for: Some(valid_for) })
            }
            Acquired::Locked { remaining } => {
                self.remaining.store(remaining, Ordering::Release);
                self.spec.next_fence.store(0, Ordering::Relaxed);
                Outcome::Full
            }
        }
    }
}

impl Protocol for LockProtocol {
    const MOST_COMMANDS: usize = 1;

    fn subject(&self) -> Subject<'_> {
        Subject::Lock(&self.spec.key)
    }

    fn rules(&self, core: &Core) -> Rules {
        let longest_interval = Duration::from_secs(u64::from(u32::MAX));
        let margin = core.profile().margin_of_leases();
        let ends_with_ttl = true;
        Rules { is_one_lease: true, ends_with_ttl, spreads: false, longest_interval, margin }
    }

    fn declared(&self) -> Declared {
        Declared::capacity(1, false)
    }

    fn lock_id(&self) -> Option<LockId> {
        Some(self.id)
    }

    fn part(&self, _declared: Declared, mut commands: Vec<Command>, now: Moment) -> TakenPart {
        let (id, key) = (self.id, self.spec.key.clone());
        let part = Part::Lock(match commands.first() {
            Some(Command::Enqueue { terms, .. }) => {
                self.sent_at.store(now.micros(), Ordering::Release);
                let expected = match self.spec.next_fence.load(Ordering::Relaxed) {
                    0 => None,
                    next => Some(Fence::new(next)),
                };
                let notify = *self.notify.lock().unwrap_or_else(PoisonError::into_inner);
                let (ttl, holder) = (lease_in_millis(*terms), self.spec.holder.clone());
                LockCommand::Acquire { key, id, ttl, notify, holder, expected }
            }
            Some(Command::Renew { terms, .. }) => {
                self.extension_sent();
                let ttl = lease_in_millis(*terms);
                LockCommand::Extend { id, key: Some(key), ttl, only_longer: true }
            }
            command => {
                let is_certain = matches!(
                    command,
                    Some(Command::Release { hint: ReleaseHint::Held { .. }, .. })
                );
                let held = is_certain && now.micros() < self.held_until.load(Ordering::Acquire);
                LockCommand::Release { id, key: Some(key), held }
            }
        });
        (part, commands.pop())
    }

    fn reply(&self, part: &Part, answer: Answer, deferred: &mut Deferred) -> Result<Reply, Error> {
        let answer = outcome_of(answer)?;
        let outcome = match &answer {
            LockOutcome::Acquire(acquired) => self.acquired(acquired),
            LockOutcome::Extend(Verdict::Done(expires_at)) => {
                self.extended(*expires_at);
                let fence = Fence::new(self.fence.load(Ordering::Acquire));
                let valid_for = match part {
                    Part::Lock(LockCommand::Extend { ttl, .. }) => *ttl,
                    _ => 0,
                };
                let valid_for = Some(Span::from_millis(valid_for));
                Outcome::Held(Held { slot_number: None, fence, valid_for })
            }
            LockOutcome::Extend(_) => Outcome::Gone,
            LockOutcome::Release(verdict) => {
                let held = matches!(verdict, Verdict::Done(_));
                if held && self.spec.locks.engine.core().is_in_process() {
                    let spec = self.spec.clone();
                    let wake = move || spec.locks.engine.core().lock_waiters.wake_one(&spec.key);
                    deferred.add(wake);
                }
                Outcome::Removed(if held { Role::Holder } else { Role::Nobody })
            }
            other => return Err(unexpected(other)),
        };
        Ok(Reply { outcomes: vec![outcome], ..Reply::default() })
    }
}

impl LockLease {
    /// Makes one attempt. Returns a guard, or how long the other holder's lease lasts.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        notify: NotifyWhen,
        until: Moment,
    ) -> Result<Result<LockGuard, Span>, Error> {
        *self.protocol.notify.lock().unwrap_or_else(PoisonError::into_inner) = notify;
        let acquired = LeaseGuard::acquire(self.clone(), self.clone(), until).await?;
        let remaining = Span::from_millis(self.protocol.remaining.load(Ordering::Acquire));
        Ok(acquired.map(|(guard, grant)| LockGuard::new(guard, grant.fence)).ok_or(remaining))
    }
}

impl LeaseSpec for LockLease {
    fn watch(&self) -> &Watch {
        &self.protocol.spec.watch
    }

    fn terms(&self) -> Terms {
        self.protocol.spec.terms
    }

    fn id(&self, _id: AcquisitionId) -> Id {
        Id::Lock(self.protocol.id)
    }

    fn end(&self, id: AcquisitionId, _hint: ReleaseHint) {
        self.end(id);
    }
}

/// Returns the lease to ask for, in whole milliseconds.
pub(super) fn lease_in_millis(terms: Terms) -> u64 {
    terms.lease.map_or(0, |lease| lease.micros() / 1000).max(1)
}
