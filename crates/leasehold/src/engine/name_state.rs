//! One semaphore name, as the public face uses it. The two kinds of stores implement it: [`super::in_process`], where
//! the machine runs under the name's own lock, and [`super::remote`], where it runs elsewhere.

use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::Core;
use super::foreign::event;
use super::ticket::{After, Grant, Ticket};
use crate::backend::Later;
use crate::clock::{Moment, Span};
use crate::machine::{Declared, Held, Known, Rate, Steer, Steered};
use crate::name::Name;
use crate::semaphore::Declaration;
use crate::stats::SemaphoreStats;
use crate::{AcquisitionId, Error, LossReason};

/// What this client knows and does about one name.
pub(crate) trait NameState: Send + Sync + fmt::Debug {
    fn common(&self) -> &Common;

    /// Begins an acquire: a permit, a place in the queue, or neither. `waker` is the waker of its task.
    fn enter(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<Declaration>,
        weight: u32,
        wait: bool,
        within: Option<Span>,
        waker: &Waker,
    ) -> Entered;

    /// Releases a permit whose guard was dropped, or cancels an acquire whose future was dropped: then it is
    /// [`Known::Unused`]. The outcome is reported to nobody.
    fn end(&self, id: AcquisitionId, known: Known);

    /// Releases an id, which need not be one of this client's, and reports the outcome.
    fn release(&self, id: AcquisitionId, semaphore: &Arc<Declaration>, by: ReleasedBy) -> Release;

    /// The ticket of a permit that has none, so that somebody can be notified of its loss.
    fn attach(&self, id: AcquisitionId, semaphore: &Arc<Declaration>) -> Arc<Ticket>;

    /// Whether a permit that was granted without a ticket is still held.
    fn check(&self, id: AcquisitionId) -> Result<(), LossReason>;

    /// Ends everything that this client waits for and holds under this name.
    fn close(&self);

    /// Resolves when everything that had to be sent was answered, or failed, or at that moment.
    fn drained(self: Arc<Self>, until: Moment) -> Later<()>;

    /// The client is gone: what is still known here belongs to nobody. It is neither renewed nor released.
    fn abandon(&self);

    /// The engine's thread has stopped: whoever waits is told.
    fn stop(&self, error: &Error);

    /// The first in the queue is this client's, and is granted a permit when it asks after this time.
    fn token_comes(&self, _after: Span) {}

    /// Whether nothing of this client is held, queued or under way under this name.
    fn is_idle(&self) -> bool;

    /// Removes a holder or waiter of another program. True if it was there.
    fn release_member(&self, _id: &str) -> Later<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Changes the limits of the name. `declares` says whether a name that nobody has used yet begins with what this client
    /// has declared.
    fn steer(&self, steer: Steer, declares: bool) -> Later<Steered>;

    /// The number of waiters ahead of `id`.
    fn position(&self, id: AcquisitionId) -> Later<Option<usize>>;

    fn stats(&self, waiters: bool) -> Later<SemaphoreStats>;

    /// The store has granted a permit to this waiter: see [`Event::Granted`](crate::backend::Event::Granted).
    fn granted(&self, _id: AcquisitionId, _told: Option<(Held, Moment)>) {}

    /// Another client has released this id.
    fn evicted(&self, _id: AcquisitionId) {}

    /// The connection is new: answers and wake-ups may have been missed.
    fn reconnected(&self) {}

    /// The store refuses everything, and waiting does not help.
    fn refused(&self, _error: &Error) {}
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

/// What every name has, whatever its store.
pub(crate) struct Common {
    pub(crate) name: Name,
    pub(crate) core: Arc<Core>,
    /// The newest declaration in this client, with [`UNHEARD`] until the store has heard it; or what this client assumes, with
    /// [`ASSUMED`].
    declared: AtomicU64,
    capacity_changed: AtomicBool,
    /// The newest rate that was declared in this client, and whether the store has not heard it yet.
    rate: Mutex<Option<(Rate, bool)>>,
    /// Whether there is one.
    has_rate: AtomicBool,
}

/// Bits that no capacity has.
const UNHEARD: u64 = 1 << 32;
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

    /// What this client says of the limits.
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

    /// The capacity alone, and whether it is news.
    #[inline]
    pub(crate) fn declared_capacity(&self) -> (u32, bool) {
        let declared = self.declared.load(Ordering::Relaxed);
        #[allow(clippy::cast_possible_truncation)] // the rest are the bits
        let capacity = declared as u32;
        (capacity, declared & UNHEARD != 0)
    }

    /// Whether this client says anything of a rate.
    #[inline]
    pub(crate) fn has_rate(&self) -> bool {
        self.has_rate.load(Ordering::Relaxed)
    }

    fn rate(&self) -> MutexGuard<'_, Option<(Rate, bool)>> {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest declaration wins; the same rate again is no news.
    pub(crate) fn declare_rate(&self, rate: Rate) {
        let mut known = self.rate();
        if known.is_none_or(|(known, _)| known != rate) {
            *known = Some((rate, true));
            self.has_rate.store(true, Ordering::Relaxed);
        }
    }

    /// This client has set or removed the rate in the store itself: its next acquire does not declare another one.
    pub(crate) fn set_rate_as_heard(&self, rate: Option<Rate>) {
        *self.rate() = rate.map(|rate| (rate, false));
        self.has_rate.store(rate.is_some(), Ordering::Relaxed);
    }

    /// The store has heard this declaration: from now on it is no news.
    #[inline]
    pub(crate) fn heard(&self, declared: Declared) {
        if declared.is_new || declared.rate_is_new {
            self.heard_news(declared);
        }
    }

    #[cold]
    fn heard_news(&self, declared: Declared) {
        let Declared { capacity, is_new, rate, rate_is_new } = declared;
        if rate_is_new
            && let Some((known, is_new)) = &mut *self.rate()
            && rate == Some(*known)
        {
            *is_new = false;
        }
        if is_new {
            let (before, now) = (u64::from(capacity) | UNHEARD, u64::from(capacity));
            // It fails if another one has been declared meanwhile.
            let _ =
                self.declared.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// This client has set the capacity in the store itself: its next acquire does not declare it again.
    pub(crate) fn declare_as_heard(&self, capacity: u32) {
        self.declared.store(u64::from(capacity), Ordering::Relaxed);
    }

    /// What counts if the store knows no capacity. Not a declaration.
    pub(crate) fn assume(&self, capacity: u32) {
        let _ = self.declared.compare_exchange(
            0,
            u64::from(capacity) | ASSUMED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// The newest declaration wins; the same number again is no news. A change is logged once for each name, as a warning:
    /// more often than not two parts of a program disagree.
    pub(crate) fn declare(&self, capacity: u32) {
        let known = self.declared.load(Ordering::Relaxed);
        if known & !UNHEARD == u64::from(capacity) {
            return;
        }
        self.declared.store(u64::from(capacity) | UNHEARD, Ordering::Relaxed);
        // What was assumed was nobody's declaration.
        let before = if known & ASSUMED == 0 { known & !UNHEARD } else { 0 };
        if before != 0 && !self.capacity_changed.swap(true, Ordering::Relaxed) {
            let name = self.name.as_str();
            let now = capacity;
            event!(warn, name, before, now, "a second capacity was declared; the newest wins");
        }
    }
}

/// How a release ends.
pub(crate) enum Release {
    /// True if it was held until now.
    Done(bool),
    /// This ticket will know.
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

/// Who releases a permit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReleasedBy {
    Guard,
    /// By its id. Its guard or future, if there is one, is notified of the loss.
    Id,
}

impl ReleasedBy {
    pub(super) fn notify(self, ticket: &Ticket, after: &mut After) {
        match self {
            Self::Guard => ticket.cancel(after),
            Self::Id => {
                ticket.lose(LossReason::Released, after);
                ticket.fail(ticket.lost(LossReason::Released), after);
            }
        }
    }
}

/// How an acquire begins.
pub(crate) enum Entered {
    /// A permit was free. Without a ticket nothing but its guard or a release by id can end it.
    Held(Grant, Option<Arc<Ticket>>),
    /// The waker is not registered yet.
    Waiting(Arc<Ticket>),
    /// It waits, and the waker is registered.
    Registered(Arc<Ticket>),
    Full,
    /// In a box: an error is large, and every acquire would have to move it.
    Failed(Box<Error>),
}
