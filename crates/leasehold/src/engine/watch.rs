//! Reports the events of semaphores, locks and pools: to metrics, to an observer, and as spans of `tracing`.
//!
//! An acquire that is watched has an [`Acquiring`] from its first poll on. The permit, lock or lease that it acquires
//! has a [`Hold`] until it is released or lost. Both end when they are dropped, so gauges are exact wherever a future
//! is cancelled. If nothing watches, neither is created, which costs an acquire two comparisons.
//!
//! All of this runs the user's code. It is never called while a lock is held.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::field::Empty;

use super::meters::{Kind, Meters, Outcome, Renewal, Waiting};
use crate::callbacks::{event, guarded};
use crate::clock::Moment;
use crate::manual_clock::Clock;
use crate::name::Name;
use crate::{AcquisitionId, Error, ErrorKind, Fence, LockId, LossReason};

/// The id of one acquisition.
#[derive(Clone, Debug)]
pub(crate) enum Id {
    Permit(AcquisitionId),
    Lock(LockId),
    Instance(Name),
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Permit(id) => id.fmt(f),
            // A lock id is enough to release the lock, so it must not appear in a log.
            Self::Lock(id) => f.write_str(&crate::id::hash(id.as_str())),
            Self::Instance(id) => id.fmt(f),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    Acquire,
    Renew,
    Release,
    Lose,
}

/// The result of an operation on a semaphore or a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum EventResult {
    /// The operation succeeded.
    Ok,
    /// An acquire that does not wait found nothing free.
    Full,
    /// The permit or lease was no longer held when it was renewed or released.
    NotHeld,
    /// The future of the acquire was dropped.
    Cancelled,
    /// The permit or lease was lost.
    Lost(LossReason),
    /// The operation failed with an error of this kind.
    Error(ErrorKind),
}

/// The data that an observer receives.
pub(crate) struct ObservedEvent<'a> {
    pub(crate) operation: Operation,
    pub(crate) result: EventResult,
    pub(crate) name: &'a Name,
    pub(crate) id: &'a Id,
    pub(crate) waited: Option<Duration>,
    pub(crate) held_for: Option<Duration>,
}

pub(crate) type Callback = Box<dyn Fn(&ObservedEvent<'_>) + Send + Sync>;

/// Everything that watches one semaphore, lock or pool.
pub(crate) struct Watch {
    kind: Kind,
    name: Name,
    pub(crate) meters: Meters,
    observer: Option<Callback>,
    clock: Clock,
    /// Whether there are metrics or an observer, so that events are reported even without a `tracing` subscriber.
    always: bool,
}

impl Watch {
    pub(crate) fn new(
        kind: Kind,
        name: Name,
        meters: Meters,
        observer: Option<Callback>,
        clock: Clock,
    ) -> Arc<Self> {
        let always = Meters::ON || observer.is_some();
        Arc::new(Self { kind, name, meters, observer, clock, always })
    }

    #[inline]
    fn is_watched(&self) -> bool {
        self.always || tracing::enabled!(tracing::Level::DEBUG)
    }

    /// Starts to watch an acquire. Returns `None` if nothing watches.
    #[inline]
    pub(crate) fn begin(
        self: &Arc<Self>,
        id: impl FnOnce() -> Id,
        weight: u32,
    ) -> Option<Acquiring> {
        if self.is_watched() { Some(self.begin_watched(id(), weight)) } else { None }
    }

    #[cold]
    fn begin_watched(self: &Arc<Self>, id: Id, weight: u32) -> Acquiring {
        let span = self.span(|name, kind| {
            tracing::debug_span!("leasehold.acquire", name, kind, weight, outcome = Empty)
        });
        let (watch, started) = (self.clone(), self.clock.now());
        Acquiring(Box::new(Begun { watch, id, span, started, waiting: None, ended: false }))
    }

    /// Returns the name as it may appear in a log. The key of a lock may be a secret, so its hash stands for it.
    pub(crate) fn public_name(&self) -> Cow<'_, str> {
        match self.kind {
            Kind::Lock => Cow::Owned(crate::id::hash(self.name.as_str())),
            Kind::Semaphore | Kind::Pool => Cow::Borrowed(self.name.as_str()),
        }
    }

    /// Creates a span, if a subscriber listens.
    fn span(&self, new: impl FnOnce(&str, &str) -> tracing::Span) -> tracing::Span {
        let mut span = tracing::Span::none();
        if tracing::enabled!(tracing::Level::DEBUG) {
            guarded(|| {
                span = new(&self.public_name(), self.kind.as_str());
            });
        }
        span
    }

    fn notify_observer(
        &self,
        operation: Operation,
        result: EventResult,
        id: &Id,
        (waited, held_for): (Option<Duration>, Option<Duration>),
    ) {
        if let Some(callback) = &self.observer {
            let name = &self.name;
            guarded(|| callback(&ObservedEvent { operation, result, name, id, waited, held_for }));
        }
    }

    /// Reports a loss. `report` logs it.
    pub(crate) fn lost(
        &self,
        id: impl FnOnce() -> Id,
        reason: LossReason,
        hold: Option<Hold>,
        report: impl FnOnce(),
    ) {
        let held_for = if let Some(hold) = hold {
            guarded(|| hold.0.span.in_scope(report));
            Some(hold.lost(reason))
        } else {
            report();
            None
        };
        self.meters.lost(reason);
        if self.observer.is_some() {
            self.notify_observer(
                Operation::Lose,
                EventResult::Lost(reason),
                &id(),
                (None, held_for),
            );
        }
    }

    /// Reports the result of a renewal that was sent at `sent`. `Ok(true)` means that the lease is still held.
    pub(crate) fn renewed(
        &self,
        id: impl FnOnce() -> Id,
        result: Result<bool, ErrorKind>,
        sent: Moment,
    ) {
        if !self.always {
            return;
        }
        let (outcome, result) = match result {
            Ok(true) => (Renewal::Renewed, EventResult::Ok),
            Ok(false) => (Renewal::Missing, EventResult::NotHeld),
            Err(kind) => (Renewal::Failed, EventResult::Error(kind)),
        };
        self.meters.renewed(outcome, self.clock.now().saturating_since(sent));
        if self.observer.is_some() {
            self.notify_observer(Operation::Renew, result, &id(), (None, None));
        }
    }

    /// Reports the release of something that has no guard.
    pub(crate) fn released(&self, id: impl FnOnce() -> Id, result: Result<bool, &Error>) {
        if self.observer.is_some() {
            let result = match result {
                Ok(true) => EventResult::Ok,
                Ok(false) => EventResult::NotHeld,
                Err(error) => EventResult::Error(error.kind()),
            };
            self.notify_observer(Operation::Release, result, &id(), (None, None));
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// An acquire that has started and not ended. Dropping it means that the acquire was cancelled.
#[derive(Debug)]
pub(crate) struct Acquiring(Box<Begun>);

#[derive(Debug)]
struct Begun {
    watch: Arc<Watch>,
    id: Id,
    span: tracing::Span,
    started: Moment,
    waiting: Option<Waiting>,
    ended: bool,
}

impl Acquiring {
    /// The acquire waits from now on.
    pub(crate) fn waits(&mut self) {
        if self.0.waiting.is_none() {
            // The gauge is shared with other clients, so it always uses the system's clock.
            let is_manual = self.0.watch.clock.is_manual();
            let since = if is_manual { Moment::now() } else { self.0.started };
            self.0.waiting = Some(self.0.watch.meters.waits(since));
        }
    }

    /// The acquire has returned a guard. `report` logs it.
    pub(crate) fn acquired(mut self, fence: Option<Fence>, report: impl FnOnce()) -> Hold {
        guarded(|| self.0.span.in_scope(report));
        self.end(Outcome::Acquired, EventResult::Ok);
        let (watch, id, since) =
            (self.0.watch.clone(), self.0.id.clone(), self.0.watch.clock.now());
        let span = watch.span(|name, kind| {
            let fence = fence.map(tracing::field::display);
            tracing::debug_span!("leasehold.hold", name, kind, %id, fence, ended = Empty)
        });
        watch.meters.holds();
        Hold(Box::new(Held { watch, id, span, since, ended: false }))
    }

    /// The acquire has succeeded, and returns no guard.
    pub(crate) fn acquired_without_guard(mut self) {
        self.end(Outcome::Acquired, EventResult::Ok);
    }

    /// The acquire was a try, and nothing was free.
    pub(crate) fn refused(mut self) {
        self.end(Outcome::Full, EventResult::Full);
    }

    pub(crate) fn failed(mut self, error: &Error) {
        let result = match error {
            Error::Lost { reason, .. } => EventResult::Lost(*reason),
            error => EventResult::Error(error.kind()),
        };
        self.end(Outcome::from(error), result);
    }

    fn end(&mut self, outcome: Outcome, result: EventResult) {
        self.0.ended = true;
        self.0.waiting = None;
        let waited = self.0.watch.clock.now().saturating_since(self.0.started);
        self.0.watch.meters.ended(outcome, waited);
        self.0.watch.notify_observer(Operation::Acquire, result, &self.0.id, (Some(waited), None));
        close(&mut self.0.span, "outcome", outcome.as_str());
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        if !self.0.ended {
            self.end(Outcome::Cancelled, EventResult::Cancelled);
        }
    }
}

/// Something that is held. Dropping it means that it was released.
#[derive(Debug)]
pub(crate) struct Hold(Box<Held>);

#[derive(Debug)]
struct Held {
    watch: Arc<Watch>,
    id: Id,
    span: tracing::Span,
    since: Moment,
    ended: bool,
}

impl Hold {
    /// It was lost: see [`Watch::lost`]. Returns how long it was held.
    fn lost(mut self, reason: LossReason) -> Duration {
        self.0.ended = true;
        let held_for = self.0.watch.clock.now().saturating_since(self.0.since);
        self.0.watch.meters.holds_no_more(Some(held_for));
        close(&mut self.0.span, "ended", &format_args!("lost: {reason}"));
        held_for
    }

    /// It was lost before it could be watched, and the loss has been reported.
    pub(crate) fn lost_before(self, reason: LossReason) {
        self.lost(reason);
    }

    /// It stays held, but this client no longer tracks it.
    pub(crate) fn detached(mut self) {
        self.0.ended = true;
        self.0.watch.meters.holds_no_more(None);
        close(&mut self.0.span, "ended", "detached");
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.0.ended {
            return;
        }
        let held_for = self.0.watch.clock.now().saturating_since(self.0.since);
        let (name, id) = (self.0.watch.name.as_str(), &self.0.id);
        if self.0.watch.kind == Kind::Semaphore && !self.0.span.is_none() {
            guarded(|| self.0.span.in_scope(|| event!(debug, name, %id, "permit released")));
        }
        self.0.watch.meters.holds_no_more(Some(held_for));
        self.0.watch.notify_observer(
            Operation::Release,
            EventResult::Ok,
            id,
            (None, Some(held_for)),
        );
        close(&mut self.0.span, "ended", "released");
    }
}

/// Closes a span after recording its last field.
fn close(span: &mut tracing::Span, field: &'static str, value: &(impl fmt::Display + ?Sized)) {
    let span = std::mem::replace(span, tracing::Span::none());
    if !span.is_none() {
        guarded(|| {
            span.record(field, tracing::field::display(value));
            drop(span);
        });
    }
}
