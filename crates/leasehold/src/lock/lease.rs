//! The lease of a lock: what is sent for one lock id, and what the store has answered.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::LockSpec;
use super::observer::{LockOperation, Reportable, report};
use crate::backend::{Answer, Part};
use crate::client_core::{Request, Rules};
use crate::clock::{Moment, Span};
use crate::engine::Core;
use crate::engine::deferred::Deferred;
use crate::engine::driver::{Driver, PendingAcquire, Protocol};
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::ticket::{Grant, Ticket};
use crate::engine::watch::{Id, Watch};
use crate::machine::lock::{Acquired, LockCommand, LockOutcome, NotifyWhen, Verdict};
use crate::machine::{
    Command, Declared, Held, Outcome, ReleaseHint, Reply, Role, Share, Subject, Terms,
};
use crate::name::Name;
use crate::{AcquisitionId, Error, Fence, LockId};

/// The lease of one lock id.
pub(super) type LockLease = Driver<LockProtocol>;

pub(super) struct LockProtocol {
    spec: Arc<LockSpec>,
    pub(super) id: LockId,
    /// Whether the client renews the lock.
    renews: AtomicBool,
    /// When the next attempt wants to be notified of a release.
    notify: Mutex<NotifyWhen>,
    /// The fence of the last grant.
    fence: AtomicU64,
    /// When the record expires, in milliseconds of the store's clock.
    expires_at: AtomicU64,
    /// How long the other holder's lease lasted when an attempt was last refused, in milliseconds.
    remaining: AtomicU64,
    /// When the last attempt was sent, in microseconds of [`Moment`].
    asked_at: AtomicU64,
    /// The end of the lease with which the lock was acquired, in microseconds of [`Moment`]; 0 once an extension was
    /// requested.
    held_until: AtomicU64,
    /// Whether observers learn of the release.
    reports_release: AtomicBool,
}

impl LockProtocol {
    pub(super) fn new(spec: Arc<LockSpec>, id: LockId) -> Self {
        let renews = AtomicBool::new(spec.auto_extend);
        let notify = Mutex::new(NotifyWhen::Never);
        let [fence, expires_at, remaining, asked_at, held_until] = Default::default();
        let reports_release = AtomicBool::new(false);
        Self {
            spec,
            id,
            renews,
            notify,
            fence,
            expires_at,
            remaining,
            asked_at,
            held_until,
            reports_release,
        }
    }

    pub(super) fn spec(&self) -> &Arc<LockSpec> {
        &self.spec
    }

    pub(super) fn expires_at(&self) -> u64 {
        self.expires_at.load(Ordering::Acquire)
    }

    pub(super) fn report<T: Reportable>(
        &self,
        operation: LockOperation,
        answer: &Result<T, Error>,
    ) {
        let about = (Some(self.spec.key.as_str()), Some(self.id));
        report(self.spec.locks.observer.as_ref(), operation, answer, about);
    }

    /// Records that the store was asked to extend the lock. So a release has to check whether the lock is still held.
    pub(super) fn asked_to_extend(&self) {
        self.held_until.store(0, Ordering::Release);
    }

    pub(super) fn extended(&self, expires_at: u64) {
        self.expires_at.store(expires_at, Ordering::Release);
    }

    fn acquired(&self, acquired: &Acquired) -> Outcome {
        match *acquired {
            Acquired::Held { fence, expires_at, remaining } => {
                let valid_for = Span::from_millis(remaining);
                let asked_at = Moment::from_micros(self.asked_at.load(Ordering::Acquire));
                self.held_until.store((asked_at + valid_for).micros(), Ordering::Release);
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
        let renews = self.spec.auto_extend;
        Rules { is_one_lease: true, renews, spreads: false, longest_interval, margin }
    }

    fn declared(&self) -> Declared {
        Declared::capacity(1, false)
    }

    fn part(&self, _declared: Declared, commands: Vec<Command>, now: Moment) -> Part {
        let (id, key) = (self.id, self.spec.key.clone());
        Part::Lock(match commands.first() {
            Some(Command::Enqueue { .. }) => {
                self.asked_at.store(now.micros(), Ordering::Release);
                let expected = match self.spec.next_fence.load(Ordering::Relaxed) {
                    0 => None,
                    next => Some(Fence::new(next)),
                };
                let notify = *self.notify.lock().unwrap_or_else(PoisonError::into_inner);
                let (ttl, holder) = (self.spec.ttl, self.spec.holder.clone());
                LockCommand::Acquire { key, id, ttl, notify, holder, expected }
            }
            Some(Command::Renew { .. }) => {
                self.asked_to_extend();
                LockCommand::Extend { id, key: Some(key), ttl: self.spec.ttl, only_longer: true }
            }
            command => {
                let known = matches!(
                    command,
                    Some(Command::Release { known: ReleaseHint::Held { .. }, .. })
                );
                let held = known && now.micros() < self.held_until.load(Ordering::Acquire);
                LockCommand::Release { id, key: Some(key), held }
            }
        })
    }

    fn with_commands(&self, part: &Part, id: AcquisitionId, work: impl FnOnce(&[Command])) {
        let Part::Lock(command) = part else { return };
        let terms = self.spec.terms();
        let (share, declared) = (Share::ONE, self.declared());
        work(&[match command {
            LockCommand::Acquire { .. } => {
                Command::Enqueue { id, declared, wait: false, terms, share, label: None }
            }
            LockCommand::Extend { .. } => Command::Renew { id, terms },
            _ => Command::Release { id, known: ReleaseHint::Nothing },
        }]);
    }

    fn reply(&self, _part: &Part, answer: Answer, deferred: &mut Deferred) -> Result<Reply, Error> {
        let outcome = match answer {
            Answer::Lock(LockOutcome::Acquire(acquired)) => self.acquired(&acquired),
            Answer::Lock(LockOutcome::Extend(verdict)) => {
                let lease = self.spec.clone();
                let about = (lease.key.clone(), self.id);
                let result = Ok(verdict.clone());
                deferred.add(move || {
                    let about = (Some(about.0.as_str()), Some(about.1));
                    report(lease.locks.observer.as_ref(), LockOperation::Extend, &result, about);
                });
                match verdict {
                    Verdict::Done(expires_at) => {
                        self.extended(expires_at);
                        let fence = Fence::new(self.fence.load(Ordering::Acquire));
                        let valid_for = Some(Span::from_millis(self.spec.ttl));
                        Outcome::Held(Held { slot_number: None, fence, valid_for })
                    }
                    _ => Outcome::Gone,
                }
            }
            Answer::Lock(LockOutcome::Release(verdict)) => {
                let held = matches!(verdict, Verdict::Done(_));
                if self.reports_release.swap(false, Ordering::AcqRel) {
                    let spec = self.spec.clone();
                    let (id, result) = (self.id, Ok(verdict.map(drop)));
                    deferred.add(move || {
                        let about = (Some(spec.key.as_str()), Some(id));
                        let observer = spec.locks.observer.as_ref();
                        report(observer, LockOperation::Release, &result, about);
                    });
                }
                if held && self.spec.locks.engine.core().is_in_process() {
                    let spec = self.spec.clone();
                    let wake = move || spec.locks.engine.core().lock_waiters.wake_one(&spec.key);
                    deferred.add(wake);
                }
                Outcome::Removed(if held { Role::Holder } else { Role::Nobody })
            }
            other => return Err(super::locks::unexpected(&other)),
        };
        Ok(Reply { outcomes: vec![outcome], ..Reply::default() })
    }
}

impl LockLease {
    /// Makes one attempt. Returns the grant with its ticket, or the time until the other holder's lease ends.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        notify: NotifyWhen,
        until: Moment,
    ) -> Result<Result<(Grant, Arc<Ticket>), Span>, Error> {
        *self.protocol.notify.lock().unwrap_or_else(PoisonError::into_inner) = notify;
        let within = Span::from_duration(until.saturating_since(self.core.now()));
        let id = self.core.next_id();
        let ticket = Ticket::waiting(id, self.clone(), Share::ONE, Some(within));
        let request = Request {
            terms: self.terms(),
            share: Share::ONE,
            queues: false,
            claims_first: false,
            gives_up_at: ticket.gives_up_at,
            label: None,
        };
        let pending = PendingAcquire::new(ticket.clone());
        let granted = match self.acquire(&ticket, request) {
            Ok(()) => pending.granted().await,
            Err(error) => Err(error),
        };
        let remaining = self.protocol.remaining.load(Ordering::Acquire);
        let acquired = match &granted {
            Ok(Some(grant)) => {
                let expires_at = self.protocol.expires_at();
                Ok(Acquired::Held { fence: grant.fence, expires_at, remaining })
            }
            Ok(None) => Ok(Acquired::Locked { remaining }),
            Err(error) => Err(error.clone()),
        };
        self.protocol.report(LockOperation::Acquire, &acquired);
        Ok(match granted? {
            Some(grant) => Ok((grant, ticket)),
            None => Err(Span::from_millis(remaining)),
        })
    }

    /// Renews the lock from now on.
    pub(super) fn start_renewals(&self, id: AcquisitionId) {
        self.protocol.renews.store(true, Ordering::Release);
        self.input(|core, now| core.start_renewals(id, now));
    }

    /// Called when the guard ends: its release is reported to observers.
    pub(super) fn reports_release(&self) {
        self.protocol.reports_release.store(true, Ordering::Release);
    }
}

impl LeaseSpec for LockLease {
    fn what(&self) -> &'static str {
        "lock"
    }

    fn name(&self) -> &Name {
        &self.protocol.spec.key
    }

    fn now(&self) -> Moment {
        self.core.now()
    }

    fn terms(&self) -> Terms {
        self.protocol.spec.terms()
    }

    fn renews(&self) -> bool {
        self.protocol.renews.load(Ordering::Acquire)
    }

    fn label(&self) -> Option<&Arc<str>> {
        None
    }

    fn watch(&self) -> &Watch {
        &self.protocol.spec.watch
    }

    fn id(&self, _id: AcquisitionId) -> Id {
        Id::Lock(self.protocol.id)
    }

    fn end(&self, id: AcquisitionId, _known: ReleaseHint) {
        self.end(id);
    }
}
