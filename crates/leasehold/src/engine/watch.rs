//! Reports the events of semaphores, locks and pools: to metrics, to an observer, and as spans of `tracing`.
//!
//! An acquire that is watched has an [`Acquiring`] from its first poll on. The permit, lock or lease that it acquires
//! has a [`HoldWatch`] until it is released or lost. Both end when they are dropped, so gauges are exact wherever a future
//! is cancelled. If nothing watches, neither is created, which costs an acquire two comparisons.
//!
//! All of this runs the user's code. It is never called while a lock is held.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::field::Empty;

use super::Core;
use super::meters::{Measurement, Meters, Waiting, failed_outcome};
use crate::callbacks::{event, guarded};
use crate::clock::Moment;
use crate::manual_clock::Clock;
use crate::name::Name;
use crate::{AcquisitionId, Error, ErrorKind, Fence, LockId, LossReason, Primitive};

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

/// The operation that a [`PoolEvent`](crate::PoolEvent) reports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operation {
    /// An acquire has ended, with a guard or without one.
    Acquire,
    /// A renewal has ended, by the guard of the lease or by [`Pool::extend`](crate::Pool::extend).
    Renew,
    /// A lease was released. If it has a guard, the store may not have confirmed the release yet.
    Release,
    /// A lease with a guard was lost.
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

impl EventResult {
    /// Returns the result of a renewal or a release. `Ok(true)` means that the lease was still held.
    fn of(result: Result<bool, ErrorKind>) -> Self {
        match result {
            Ok(true) => Self::Ok,
            Ok(false) => Self::NotHeld,
            Err(kind) => Self::Error(kind),
        }
    }
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
    pub(crate) primitive: Primitive,
    pub(crate) name: Name,
    meters: Meters,
    observer: Option<Callback>,
    pub(crate) clock: Clock,
    /// Whether there are metrics or an observer, so that events are reported even without a `tracing` subscriber.
    always: bool,
}

impl Watch {
    /// Returns what watches the object with this name. `name_in_metrics` adds the name to its metrics as a label.
    pub(crate) fn new(
        core: &Core,
        primitive: Primitive,
        name: &Name,
        name_in_metrics: bool,
        observer: Option<Callback>,
    ) -> Arc<Self> {
        let meters = core.meters.of(primitive, name_in_metrics.then_some(name));
        let always = Meters::ON || observer.is_some();
        let (name, clock) = (name.clone(), core.clock.clone());
        Arc::new(Self { primitive, name, meters, observer, clock, always })
    }

    #[inline]
    fn is_watched(&self) -> bool {
        self.always || tracing::enabled!(tracing::Level::DEBUG)
    }

    /// Whether there are metrics or an observer, which learn of renewals.
    #[inline]
    pub(crate) fn reports_renewals(&self) -> bool {
        self.always
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

    /// Watches `acquire`. `waits` says whether it may wait. `end` ends the watch if the acquire succeeds.
    pub(crate) async fn acquire<T>(
        self: &Arc<Self>,
        id: impl FnOnce() -> Id,
        waits: bool,
        acquire: impl Future<Output = Result<T, Error>>,
        end: impl FnOnce(&T, Acquiring),
    ) -> Result<T, Error> {
        let mut watched = self.begin(id, 1);
        if let Some(watched) = watched.as_mut().filter(|_| waits) {
            watched.waits();
        }
        let result = acquire.await;
        if let Some(watched) = watched {
            match &result {
                Ok(acquired) => end(acquired, watched),
                Err(error) => watched.failed(error),
            }
        }
        result
    }

    #[cold]
    fn begin_watched(self: &Arc<Self>, id: Id, weight: u32) -> Acquiring {
        let span = self.span(|name, kind| {
            tracing::debug_span!("leasehold.acquire", name, kind, weight, outcome = Empty)
        });
        Acquiring(Box::new(Watched::new(self.clone(), id, span)))
    }

    /// Returns the name as it may appear in a log. The key of a lock may be a secret, so its hash stands for it.
    pub(crate) fn public_name(&self) -> Cow<'_, str> {
        match self.primitive {
            Primitive::Lock => Cow::Owned(crate::id::hash(self.name.as_str())),
            Primitive::Semaphore | Primitive::Pool => Cow::Borrowed(self.name.as_str()),
        }
    }

    /// Creates a span, if a subscriber listens.
    fn span(&self, new: impl FnOnce(&str, &str) -> tracing::Span) -> tracing::Span {
        let mut span = tracing::Span::none();
        if tracing::enabled!(tracing::Level::DEBUG) {
            guarded(|| {
                span = new(&self.public_name(), self.primitive.as_str());
            });
        }
        span
    }

    fn notify_observer(
        &self,
        operation: Operation,
        result: EventResult,
        id: impl FnOnce() -> Id,
        (waited, held_for): (Option<Duration>, Option<Duration>),
    ) {
        if let Some(callback) = &self.observer {
            let (name, id) = (&self.name, &id());
            guarded(|| callback(&ObservedEvent { operation, result, name, id, waited, held_for }));
        }
    }

    /// Reports a loss. `report` logs it.
    pub(crate) fn lost(
        &self,
        id: impl FnOnce() -> Id,
        reason: LossReason,
        hold: Option<HoldWatch>,
        report: impl FnOnce(),
    ) {
        let held_for = if let Some(hold) = hold {
            guarded(|| hold.0.span.in_scope(report));
            Some(hold.lost(reason))
        } else {
            report();
            None
        };
        self.meters.record(Measurement::Lost(reason));
        self.notify_observer(Operation::Lose, EventResult::Lost(reason), id, (None, held_for));
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
        let outcome = match result {
            Ok(true) => "renewed",
            Ok(false) => "missing",
            Err(_) => "failed",
        };
        let latency = self.clock.now().saturating_since(sent);
        self.meters.record(Measurement::Renewed { outcome, latency });
        self.notify_observer(Operation::Renew, EventResult::of(result), id, (None, None));
    }

    /// Reports the release of something that has no guard.
    pub(crate) fn released(&self, id: impl FnOnce() -> Id, result: Result<bool, ErrorKind>) {
        self.notify_observer(Operation::Release, EventResult::of(result), id, (None, None));
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("kind", &self.primitive).finish_non_exhaustive()
    }
}

/// What is watched from its beginning to its end: an acquire, or what it has acquired.
#[derive(Debug)]
struct Watched {
    watch: Arc<Watch>,
    id: Id,
    span: tracing::Span,
    since: Moment,
    /// Counts an acquire as waiting.
    waiting: Option<Waiting>,
    ended: bool,
}

impl Watched {
    fn new(watch: Arc<Watch>, id: Id, span: tracing::Span) -> Self {
        let since = watch.clock.now();
        Self { watch, id, span, since, waiting: None, ended: false }
    }

    fn elapsed(&self) -> Duration {
        self.watch.clock.now().saturating_since(self.since)
    }
}

/// An acquire that has started and not ended. Dropping it means that the acquire was cancelled.
#[derive(Debug)]
pub(crate) struct Acquiring(Box<Watched>);

impl Acquiring {
    /// The acquire waits from now on.
    pub(crate) fn waits(&mut self) {
        if self.0.waiting.is_none() {
            // The gauge is shared with other clients, so it always uses the system's clock.
            let is_manual = self.0.watch.clock.is_manual();
            let since = if is_manual { Moment::now() } else { self.0.since };
            self.0.waiting = Some(self.0.watch.meters.waits(since));
        }
    }

    /// The acquire has returned a guard. `report` logs it.
    pub(crate) fn acquired(mut self, fence: Option<Fence>, report: impl FnOnce()) -> HoldWatch {
        guarded(|| self.0.span.in_scope(report));
        self.end("acquired", EventResult::Ok);
        let (watch, id) = (self.0.watch.clone(), self.0.id.clone());
        let span = watch.span(|name, kind| {
            let fence = fence.map(tracing::field::display);
            tracing::debug_span!("leasehold.hold", name, kind, %id, fence, ended = Empty)
        });
        watch.meters.record(Measurement::Held);
        HoldWatch(Box::new(Watched::new(watch, id, span)))
    }

    /// The acquire has succeeded, and returns no guard.
    pub(crate) fn acquired_without_guard(mut self) {
        self.end("acquired", EventResult::Ok);
    }

    /// The acquire was a try, and nothing was free.
    pub(crate) fn refused(mut self) {
        self.end("full", EventResult::Full);
    }

    pub(crate) fn failed(mut self, error: &Error) {
        let result = match error {
            Error::Lost { reason, .. } => EventResult::Lost(*reason),
            error => EventResult::Error(error.kind()),
        };
        self.end(failed_outcome(error), result);
    }

    fn end(&mut self, outcome: &'static str, result: EventResult) {
        let watched = &mut *self.0;
        watched.ended = true;
        watched.waiting = None;
        let waited = watched.elapsed();
        let (watch, id) = (&watched.watch, || watched.id.clone());
        watch.meters.record(Measurement::Acquired { outcome, waited });
        watch.notify_observer(Operation::Acquire, result, id, (Some(waited), None));
        close(&mut watched.span, "outcome", outcome);
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        if !self.0.ended {
            self.end("cancelled", EventResult::Cancelled);
        }
    }
}

/// Something that is held. Dropping it means that it was released.
#[derive(Debug)]
pub(crate) struct HoldWatch(Box<Watched>);

impl HoldWatch {
    /// It was lost: see [`Watch::lost`]. Returns how long it was held.
    pub(crate) fn lost(mut self, reason: LossReason) -> Duration {
        let held_for = self.0.elapsed();
        self.end(Some(held_for), &format_args!("lost: {reason}"));
        held_for
    }

    /// It stays held, but this client no longer tracks it.
    pub(crate) fn detached(mut self) {
        self.end(None, "detached");
    }

    fn end(&mut self, held_for: Option<Duration>, how: &(impl fmt::Display + ?Sized)) {
        self.0.ended = true;
        self.0.watch.meters.record(Measurement::NoLongerHeld { held_for });
        close(&mut self.0.span, "ended", how);
    }
}

impl Drop for HoldWatch {
    fn drop(&mut self) {
        if self.0.ended {
            return;
        }
        let held_for = Some(self.0.elapsed());
        let (name, id) = (self.0.watch.name.as_str(), &self.0.id);
        if self.0.watch.primitive == Primitive::Semaphore && !self.0.span.is_none() {
            guarded(|| self.0.span.in_scope(|| event!(debug, name, %id, "permit released")));
        }
        self.end(held_for, "released");
        let (watch, id) = (&self.0.watch, || self.0.id.clone());
        watch.notify_observer(Operation::Release, EventResult::Ok, id, (None, held_for));
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
