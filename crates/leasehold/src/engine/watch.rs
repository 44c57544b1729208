//! Reports the events of semaphores, locks and pools: to metrics, to an observer, and as spans of `tracing`.
//!
//! An acquire that is watched has an [`Acquiring`] from its first poll on. The permit, lock or pool lease that it
//! acquires has a [`HoldWatch`] until it is released or lost. Both end when they are dropped, so gauges are exact
//! wherever a future is cancelled. If nothing watches, neither is created, which costs an acquire two comparisons.
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
use crate::id::hash;
use crate::manual_clock::Clock;
use crate::name::Name;
use crate::{
    AcquisitionId, Error, Event, Fence, LockId, LossReason, Observer, Operation, Outcome, Primitive,
};

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
            Self::Lock(id) => f.write_str(&hash(id.as_str())),
            Self::Instance(id) => id.fmt(f),
        }
    }
}

impl Id {
    /// Returns the id itself.
    fn raw(&self) -> String {
        match self {
            Self::Lock(id) => id.as_str().to_owned(),
            Self::Permit(_) | Self::Instance(_) => self.to_string(),
        }
    }
}

/// Everything that watches one semaphore, lock or pool.
pub(crate) struct Watch {
    pub(crate) primitive: Primitive,
    pub(crate) name: Name,
    meters: Meters,
    observer: Option<Observer>,
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
        observer: Option<Observer>,
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
            Primitive::Lock => Cow::Owned(hash(self.name.as_str())),
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
        outcome: impl FnOnce() -> Outcome,
        id: impl FnOnce() -> Id,
        times: (Option<Duration>, Option<Duration>),
    ) {
        if let Some(observer) = &self.observer {
            let subject = (Some(&self.name), Some(&id()));
            notify(observer, (self.primitive, operation, outcome()), subject, times);
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
        self.notify_observer(Operation::Lose, || Outcome::Lost(reason), id, (None, held_for));
    }

    /// Reports the outcome of a renewal that was sent at `sent`.
    pub(crate) fn renewed(
        &self,
        id: impl FnOnce() -> Id,
        outcome: impl FnOnce() -> Outcome,
        sent: Moment,
    ) {
        if !self.always {
            return;
        }
        let outcome = outcome();
        let measured = match &outcome {
            Outcome::Done => "renewed",
            Outcome::Failed(_) => "failed",
            _ => "missing",
        };
        let latency = self.clock.now().saturating_since(sent);
        self.meters.record(Measurement::Renewed { outcome: measured, latency });
        self.notify_observer(Operation::Renew, || outcome, id, (None, None));
    }

    /// Reports a release by id.
    pub(crate) fn released(&self, id: impl FnOnce() -> Id, outcome: impl FnOnce() -> Outcome) {
        self.notify_observer(Operation::Release, outcome, id, (None, None));
    }
}

/// Reports a call on a lock by its key or its id, to an observer and to `tracing`. If nobody listens, this costs two
/// comparisons.
pub(crate) fn lock_called(
    observer: Option<&Observer>,
    operation: Operation,
    outcome: impl FnOnce() -> Outcome,
    (key, id): (Option<&Name>, Option<LockId>),
    waited: Option<Duration>,
) {
    if observer.is_none() && !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let (outcome, id) = (outcome(), id.map(Id::Lock));
    let key_hash = key.map(|key| hash(key.as_str()));
    let lock_id_hash = id.as_ref().map(Id::to_string);
    let (key_hash, lock_id_hash) = (key_hash.as_deref(), lock_id_hash.as_deref());
    event!(debug, ?operation, outcome = ?hidden(&outcome), key_hash, lock_id_hash, "lock");
    if let Some(observer) = observer {
        let what = (Primitive::Lock, operation, outcome);
        notify(observer, what, (key, id.as_ref()), (waited, None));
    }
}

/// Notifies an observer.
fn notify(
    observer: &Observer,
    (primitive, operation, outcome): (Primitive, Operation, Outcome),
    (name, id): (Option<&Name>, Option<&Id>),
    (waited, held_for): (Option<Duration>, Option<Duration>),
) {
    let raw = observer.is_raw(primitive);
    let event = Event {
        primitive,
        operation,
        outcome: if raw { outcome } else { hidden(&outcome) },
        name: name.map(|name| if raw { name.to_string() } else { hash(name.as_str()) }),
        id: id.map(|id| if raw { id.raw() } else { id.to_string() }),
        waited,
        held_for,
    };
    guarded(|| observer.notify(&event));
}

/// Returns the outcome of an operation on a lock without the lock's key, which may be a secret.
fn hidden(outcome: &Outcome) -> Outcome {
    const HIDDEN: &str = "the description may contain the key of a lock, and was removed";
    let mut outcome = outcome.clone();
    if let Outcome::Failed(error) = &mut outcome {
        match error {
            Error::TimedOut { name, .. }
            | Error::NotDrained { name, .. }
            | Error::Lost { name, .. }
            | Error::Cancelled { name, .. }
            | Error::Pinned { name, .. }
            | Error::InUse { name, .. }
            | Error::Unknown { name }
            | Error::TooHeavy { name, .. } => *name = hash(name),
            Error::ForeignData { name, problem } => {
                *name = hash(name);
                HIDDEN.clone_into(problem);
            }
            Error::InvalidArgument { problem: text, .. } | Error::Internal { problem: text } => {
                HIDDEN.clone_into(text);
            }
            Error::Closed
            | Error::Unavailable { .. }
            | Error::Denied { .. }
            | Error::NoRoom { .. }
            | Error::Unusable { .. }
            | Error::WrongThread { .. }
            | Error::Stopped { .. } => {}
        }
    }
    outcome
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

    /// Logs an event inside the span, if a subscriber listens.
    fn log(&self, log: impl FnOnce(&str, &Id, &'static str)) {
        if !self.span.is_none() {
            let (name, grant) = (self.watch.public_name(), self.watch.primitive.grant());
            guarded(|| self.span.in_scope(|| log(&name, &self.id, grant)));
        }
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

    /// The acquire has returned a guard. `report` logs what the name, the id and the wait do not tell.
    pub(crate) fn acquired(mut self, fence: Option<Fence>, report: impl FnOnce()) -> HoldWatch {
        guarded(|| self.0.span.in_scope(report));
        if self.0.watch.primitive != Primitive::Semaphore {
            let waited = self.0.elapsed();
            self.0.log(|name, id, grant| event!(debug, name, %id, ?waited, "{grant} acquired"));
        }
        self.end("acquired", || Outcome::Done);
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
        self.end("acquired", || Outcome::Done);
    }

    /// The acquire was a try, and nothing was free.
    pub(crate) fn refused(mut self) {
        self.end("full", || Outcome::Full);
    }

    pub(crate) fn failed(mut self, error: &Error) {
        self.end(failed_outcome(error), || match error {
            Error::Cancelled { .. } => Outcome::Cancelled,
            Error::Lost { reason, .. } => Outcome::Lost(*reason),
            error => Outcome::Failed(error.clone()),
        });
    }

    /// Ends the acquire. `measured` is its outcome in metrics and spans.
    fn end(&mut self, measured: &'static str, outcome: impl FnOnce() -> Outcome) {
        let watched = &mut *self.0;
        watched.ended = true;
        watched.waiting = None;
        let waited = watched.elapsed();
        let (watch, id) = (&watched.watch, || watched.id.clone());
        watch.meters.record(Measurement::Acquired { outcome: measured, waited });
        watch.notify_observer(Operation::Acquire, outcome, id, (Some(waited), None));
        close(&mut watched.span, "outcome", measured);
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        if !self.0.ended {
            self.end("cancelled", || Outcome::Cancelled);
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
        self.0.log(|name, id, grant| event!(debug, name, %id, "{grant} released"));
        self.end(held_for, "released");
        let (watch, id) = (&self.0.watch, || self.0.id.clone());
        watch.notify_observer(Operation::Release, || Outcome::Done, id, (None, held_for));
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
