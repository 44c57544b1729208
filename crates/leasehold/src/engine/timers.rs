//! The timers of one client: one for each name, and one for each wait for a lock. The engine's thread fires them.
//!
//! Any thread may set or cancel a timer. A timer that is cancelled or set again leaves nothing behind.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;

use tokio::sync::Notify;

use super::Core;
use crate::callbacks::guarded;
use crate::clock::Moment;

/// The owner of a timer.
pub(crate) trait Timed: Send + Sync {
    /// Does everything that is due.
    fn fire(&self, now: Moment);
}

/// All timers that are set. The address distinguishes timers that are due at the same moment.
#[derive(Default)]
pub(crate) struct Timers(Mutex<BTreeMap<(Moment, usize), Weak<dyn Timed>>>);

fn address(target: &Weak<dyn Timed>) -> usize {
    target.as_ptr().cast::<()>() as usize
}

impl Timers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Moment, usize), Weak<dyn Timed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the timer of `target`.
    pub(crate) fn set(&self, target: Weak<dyn Timed>, before: Option<Moment>, at: Option<Moment>) {
        let address = address(&target);
        let mut timers = self.lock();
        if let Some(before) = before {
            timers.remove(&(before, address));
        }
        if let Some(at) = at {
            timers.insert((at, address), target);
        }
    }

    /// Removes and returns the targets of all timers.
    pub(super) fn take_all(&self) -> Vec<Arc<dyn Timed>> {
        let timers = std::mem::take(&mut *self.lock());
        timers.into_values().filter_map(|target| target.upgrade()).collect()
    }

    pub(crate) fn next(&self) -> Option<Moment> {
        self.lock().first_key_value().map(|((at, _), _)| *at)
    }

    /// Removes and returns the target of one timer that is due.
    pub(crate) fn pop(&self, now: Moment) -> Option<Arc<dyn Timed>> {
        let mut timers = self.lock();
        loop {
            let first = timers.first_entry().filter(|timer| timer.key().0 <= now)?;
            // The target may have been dropped.
            if let Some(target) = first.remove().upgrade() {
                return Some(target);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }
}

/// A deadline that a task can wait for in any runtime. The engine's thread fires it.
pub(crate) struct Deadline {
    core: Arc<Core>,
    passes: Arc<Notify>,
    at: Moment,
}

impl Timed for Notify {
    fn fire(&self, _now: Moment) {
        guarded(|| self.notify_waiters());
    }
}

impl Deadline {
    pub(crate) fn new(core: &Arc<Core>, at: Moment) -> Self {
        let passes = Arc::new(Notify::new());
        let target = Arc::downgrade(&passes) as Weak<dyn Timed>;
        // Without the engine's thread, the deadline passes at once.
        let _ = core.set_timer(target, None, Some(at));
        Self { core: core.clone(), passes, at }
    }

    fn has_passed(&self) -> bool {
        self.at <= self.core.now() || self.core.stopped().is_some()
    }

    /// Returns the result of `work`, or `None` if the deadline passes first.
    pub(crate) async fn unless<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        // From here on the timer is noticed, so what it changes is checked after this.
        let (mut work, mut passes) = (pin!(work), pin!(self.passes.notified()));
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if self.has_passed() => Poll::Ready(None),
            Poll::Pending => passes.as_mut().poll(cx).map(|()| None),
        })
        .await
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        let target = Arc::downgrade(&self.passes) as Weak<dyn Timed>;
        self.core.timers.set(target, Some(self.at), None);
    }
}
