//! Work that is done after all locks are released, because it runs the user's code: wakers are woken or dropped, and
//! observers, metrics and logs are told of what happened.

use std::fmt;
use std::task::Waker;

use crate::callbacks::guarded;

/// Usually this is one waker or nothing. That case needs no allocation, and dropping it costs nothing.
#[derive(Default)]
pub(crate) struct Deferred {
    waker: Option<Waker>,
    more_wakers: Vec<Waker>,
    work: Vec<Box<dyn FnOnce() + Send>>,
}

impl Deferred {
    /// Adds work that runs the user's code, such as a log message.
    pub(crate) fn add(&mut self, work: impl FnOnce() + Send + 'static) {
        self.work.push(Box::new(work));
    }

    #[inline]
    pub(super) fn wake(&mut self, waker: Option<Waker>) {
        match waker {
            None => {}
            Some(waker) if self.waker.is_none() => self.waker = Some(waker),
            Some(waker) => self.more_wakers.push(waker),
        }
    }

    #[inline]
    pub(crate) fn run(self) {
        if let Some(waker) = self.waker {
            guarded(|| waker.wake());
        }
        for work in self.work {
            guarded(work);
        }
        for waker in self.more_wakers {
            guarded(|| waker.wake());
        }
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").finish_non_exhaustive()
    }
}
