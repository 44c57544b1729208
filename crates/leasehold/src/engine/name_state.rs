//! One semaphore name, as the public types use it. There is one implementation for each kind of store. In
//! [`super::in_process`] the machine runs under the name's own lock. In [`super::remote`] it runs in the store.

use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::Core;
use super::deferred::Deferred;
use super::registry::Listener;
use super::semaphore_spec::SemaphoreSpec;
use super::ticket::{Grant, Ticket};
use crate::backend::{BoxFuture, Slot};
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::machine::{Declared, Held, LimitChange, LimitsChanged, Rate, ReleaseHint, Terms};
use crate::name::Name;
use crate::stats::{SemaphoreLimits, SemaphoreStats};
use crate::{AcquisitionId, Error, LossReason};

/// The state of one name in this client, and the operations on it.
pub(crate) trait NameState: Listener + fmt::Debug {
    fn common(&self) -> &Common;

    /// Starts an acquire. It gets a permit, a place in the queue, or neither. `waker` is the waker of its task.
    fn enter(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<SemaphoreSpec>,
        weight: u32,
        wait: bool,
        within: Option<Span>,
        waker: &Waker,
    ) -> Entered;

    /// Releases a permit whose guard was dropped, or cancels an acquire whose future was dropped, with
    /// [`ReleaseHint::Unused`]. The outcome is not reported.
    fn end(&self, id: AcquisitionId, hint: ReleaseHint);

    /// Releases an id, which need not belong to this client, and reports the outcome.
    fn release(&self, id: AcquisitionId, semaphore: &Arc<SemaphoreSpec>, by: ReleasedBy)
    -> Release;

    /// Stops tracking a permit. The store keeps it.
    fn detach(&self, id: AcquisitionId);

    /// Renews a permit once, whether this client tracks it or not. Returns whether it is held.
    fn extend(&self, id: AcquisitionId, terms: Terms) -> BoxFuture<bool>;

    /// Creates the ticket of a permit that has none, so that a task can be notified of its loss.
    fn attach(&self, id: AcquisitionId, semaphore: &Arc<SemaphoreSpec>) -> Arc<Ticket>;

    /// Checks whether a permit that was granted without a ticket is still held.
    fn check(&self, id: AcquisitionId) -> Result<(), LossReason>;

    /// Called when the client no longer exists. The remaining acquisitions have no owner: they are neither renewed nor
    /// released.
    fn abandon(&self);

    /// Called when the first waiter in the queue belongs to this client and waits for a token. It is granted a permit
    /// if the client asks after this time.
    fn token_comes(&self, _after: Span) {}

    /// Whether this client holds nothing, waits for nothing, and has nothing to send or in flight under this name.
    fn is_idle(&self) -> bool;

    /// Removes a holder or waiter of another program. Returns whether it was there.
    fn release_member(&self, _id: &str) -> BoxFuture<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Changes the limits of the name. `declares` says whether an unused name starts with the capacity that this client
    /// has declared.
    fn change_limits(&self, change: LimitChange, declares: bool) -> BoxFuture<LimitsChanged>;

    /// Returns the number of waiters ahead of `id`.
    fn position(&self, id: AcquisitionId) -> BoxFuture<Option<usize>>;

    /// Returns the limits of the name. The capacity is 0 if no client has declared one.
    fn limits(&self) -> BoxFuture<SemaphoreLimits>;

    fn stats(&self, waiters: Range<usize>) -> BoxFuture<SemaphoreStats>;

    /// Called when the store has granted a permit to this waiter: see
    /// [`Event::Granted`](crate::backend::Event::Granted).
    fn granted(&self, _id: AcquisitionId, _grant: Option<(Held, Moment)>) {}

    /// Called when another client has released this id.
    fn evicted(&self, _id: AcquisitionId) {}

    /// Called when wake-ups for names in this slot may have been missed.
    fn wake_ups_missed(&self, _slot: Slot) {}
}

impl dyn NameState {
    pub(crate) fn name(&self) -> &Name {
        &self.common().name
    }

    #[cfg(test)]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.common().core
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.common().capacity()
    }
}

/// The part of a name's state that does not depend on the store.
pub(crate) struct Common {
    pub(crate) name: Name,
    pub(crate) core: Arc<Core>,
    /// The capacity that this client has declared last, with the flag [`UNACKNOWLEDGED`] until the store has received it. Or
    /// the capacity that this client assumes, with the flag [`ASSUMED`].
    declared: AtomicU64,
    capacity_changed: AtomicBool,
    /// The newest rate that this client declared, and whether the store has not received it yet.
    rate: Mutex<Option<(Rate, bool)>>,
    /// Whether `rate` is set.
    has_rate: AtomicBool,
}

/// Flags above the 32 bits of a capacity.
const UNACKNOWLEDGED: u64 = 1 << 32;
const ASSUMED: u64 = 1 << 33;

impl Common {
    pub(crate) fn new(name: Name, core: Arc<Core>) -> Self {
        let (declared, capacity_changed) = (AtomicU64::new(0), AtomicBool::new(false));
        let (rate, has_rate) = (Mutex::default(), AtomicBool::new(false));
        Self { name, core, declared, capacity_changed, rate, has_rate }
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.declared().capacity
    }

    /// Returns the limits that this client declares.
    #[inline]
    pub(crate) fn declared(&self) -> Declared {
        let (capacity, is_new) = self.declared_capacity();
        let mut declared = Declared::capacity(capacity, is_new);
        if self.has_rate()
            && let Some((rate, is_new)) = *self.rate()
        {
            (declared.rate, declared.rate_is_new) = (Some(rate), is_new);
        }
        declared
    }

    /// Returns the declared capacity, and whether it is new to the store.
    #[inline]
    pub(crate) fn declared_capacity(&self) -> (u32, bool) {
        let declared = self.declared.load(Ordering::Relaxed);
        #[allow(clippy::cast_possible_truncation)] // the upper bits are flags
        let capacity = declared as u32;
        (capacity, declared & UNACKNOWLEDGED != 0)
    }

    /// Whether this client declares a rate.
    #[inline]
    pub(crate) fn has_rate(&self) -> bool {
        self.has_rate.load(Ordering::Relaxed)
    }

    fn rate(&self) -> MutexGuard<'_, Option<(Rate, bool)>> {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares a rate. The newest declaration wins; repeating the same rate is not a new declaration.
    pub(crate) fn declare_rate(&self, rate: Rate) {
        let mut declared = self.rate();
        if declared.is_none_or(|(declared, _)| declared != rate) {
            *declared = Some((rate, true));
            self.has_rate.store(true, Ordering::Relaxed);
        }
    }

    /// Records that this client has set or removed the rate in the store, so that its next acquire declares no other
    /// rate.
    pub(crate) fn set_acknowledged_rate(&self, rate: Option<Rate>) {
        *self.rate() = rate.map(|rate| (rate, false));
        self.has_rate.store(rate.is_some(), Ordering::Relaxed);
    }

    /// Records that the store has received this declaration, so that it is no longer new.
    #[inline]
    pub(crate) fn acknowledged(&self, declared: Declared) {
        if declared.is_new || declared.rate_is_new {
            self.acknowledge_news(declared);
        }
    }

    #[cold]
    fn acknowledge_news(&self, declared: Declared) {
        let Declared { capacity, is_new, rate, rate_is_new } = declared;
        if rate_is_new
            && let Some((newest, is_new)) = &mut *self.rate()
            && rate == Some(*newest)
        {
            *is_new = false;
        }
        if is_new {
            let (before, now) = (u64::from(capacity) | UNACKNOWLEDGED, u64::from(capacity));
            // This fails if another capacity has been declared in the meantime.
            let _ =
                self.declared.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Records that this client has set the capacity in the store, so that its next acquire does not declare it again.
    pub(crate) fn declare_acknowledged(&self, capacity: u32) {
        self.declared.store(u64::from(capacity), Ordering::Relaxed);
    }

    /// Sets the capacity that counts if the store knows none. This is not a declaration.
    pub(crate) fn assume(&self, capacity: u32) {
        let _ = self.declared.compare_exchange(
            0,
            u64::from(capacity) | ASSUMED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// Declares a capacity. The newest declaration wins; repeating the same number is not a new declaration. A change
    /// is logged as a warning, once for each name, because it usually means that two parts of a program disagree.
    pub(crate) fn declare(&self, capacity: u32) {
        let declared = self.declared.load(Ordering::Relaxed);
        if declared & !UNACKNOWLEDGED == u64::from(capacity) {
            return;
        }
        self.declared.store(u64::from(capacity) | UNACKNOWLEDGED, Ordering::Relaxed);
        // An assumed capacity was not a declaration.
        let before = if declared & ASSUMED == 0 { declared & !UNACKNOWLEDGED } else { 0 };
        if before != 0 && !self.capacity_changed.swap(true, Ordering::Relaxed) {
            let name = self.name.as_str();
            let now = capacity;
            event!(
                warn,
                name,
                before,
                now,
                "the name was declared with another capacity; the latest declaration applies"
            );
        }
    }
}

/// The result of a release.
pub(crate) enum Release {
    /// `true` if the permit was held until now.
    Done(bool),
    /// The release was sent; this ticket receives its outcome.
    Sent(Arc<Ticket>),
    Failed(Error),
}

impl Release {
    pub(crate) async fn done(self) -> Result<bool, Error> {
        match self {
            Self::Done(held) => Ok(held),
            Self::Sent(ticket) => poll_fn(|cx| ticket.poll_released(cx)).await,
            Self::Failed(error) => Err(error),
        }
    }
}

/// How a permit is released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReleasedBy {
    Guard,
    /// By its id. Its guard or future, if there is one, is notified of the loss.
    Id,
}

impl ReleasedBy {
    pub(super) fn notify(self, ticket: &Ticket, deferred: &mut Deferred) {
        match self {
            Self::Guard => ticket.cancel(deferred),
            Self::Id => {
                ticket.lose(LossReason::Released, deferred);
                ticket.fail(ticket.cancelled(), deferred);
            }
        }
    }
}

/// The result of starting an acquire.
pub(crate) enum Entered {
    /// A permit was free. Without a ticket, only its guard or a release by id can end it.
    Held(Grant, Option<Arc<Ticket>>),
    /// It waits. The waker is not registered yet.
    Waiting(Arc<Ticket>),
    /// It waits, and the waker is registered.
    Registered(Arc<Ticket>),
    Full,
    /// In a box, because an error is large and every acquire would have to move it.
    Failed(Box<Error>),
}
