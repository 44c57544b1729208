//! The timer of the engine's thread.
//!
//! Tokio's timers cost no system call, so they are used for moments that are near. But they stop while the machine is
//! suspended, and the clock of the leases does not. So a kernel timer that also runs in suspend is used for moments
//! that are further away. Where there is no such timer, the thread wakes up every second to check the clock.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Sleep;

use crate::clock::Moment;

/// How late an alarm may be if the machine was suspended.
const NEAR: Duration = Duration::from_secs(1);

/// A timer for one moment. It may fire early.
#[derive(Debug)]
pub(super) struct Alarm {
    /// `None` before the first poll.
    set_for: Option<Moment>,
    near: Pin<Box<Sleep>>,
    far: far::Timer,
}

impl Alarm {
    /// Must be called in the runtime of the thread.
    pub(super) fn new() -> Self {
        Self { set_for: None, near: Box::pin(tokio::time::sleep(NEAR)), far: far::Timer::default() }
    }

    /// Resolves at `until`. It may resolve early; then poll it again.
    pub(super) fn poll(&mut self, until: Moment, now: Moment, cx: &mut Context<'_>) -> Poll<()> {
        if until == Moment::NEVER {
            return Poll::Pending;
        }
        if self.set_for != Some(until) {
            self.set_for = Some(until);
            let left = until.saturating_since(now);
            self.far.stop();
            if left <= NEAR || !self.far.set(left) {
                self.near.as_mut().reset(tokio::time::Instant::now() + left.min(NEAR));
            }
        }
        let fired = if self.far.is_set() { self.far.poll(cx) } else { self.near.as_mut().poll(cx) };
        if fired.is_ready() {
            // If this is too early, the next poll sets the timer again.
            self.set_for = None;
        }
        fired
    }
}

#[cfg(all(target_os = "linux", any(feature = "local", feature = "redis")))]
mod far {
    use std::os::fd::OwnedFd;
    use std::task::{Context, Poll, ready};
    use std::time::Duration;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;

    /// A kernel timer that also runs while the machine is suspended.
    #[derive(Debug, Default)]
    pub(super) struct Timer {
        fd: Option<AsyncFd<OwnedFd>>,
        is_set: bool,
    }

    impl Timer {
        /// Sets the timer. Returns whether that succeeded.
        pub(super) fn set(&mut self, left: Duration) -> bool {
            #[cfg(test)]
            if crate::virtual_time::is_on() {
                return false;
            }
            if self.fd.is_none() {
                let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
                let timer = timerfd_create(TimerfdClockId::Boottime, flags).ok();
                // The function that replaces this one is unsafe, because some types can change their descriptor. This
                // type cannot.
                #[allow(deprecated)]
                let register = |fd| AsyncFd::with_interest(fd, Interest::READABLE).ok();
                self.fd = timer.and_then(register);
            }
            let at = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let time = Itimerspec { it_interval: once, it_value: at };
            let fd = self.fd.as_ref();
            self.is_set =
                fd.is_some_and(|fd| timerfd_settime(fd, TimerfdTimerFlags::empty(), &time).is_ok());
            self.is_set
        }

        /// The kernel timer may still fire once, but nothing polls it then.
        pub(super) fn stop(&mut self) {
            self.is_set = false;
        }

        pub(super) fn is_set(&self) -> bool {
            self.is_set
        }

        pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
            let Some(fd) = &self.fd else { return Poll::Ready(()) };
            loop {
                let Ok(mut ready) = ready!(fd.poll_read_ready(cx)) else { return Poll::Ready(()) };
                let mut expirations = [0; 8];
                let read = ready.try_io(|fd| Ok(rustix::io::read(fd, &mut expirations)?));
                // An error means that the readiness is stale: the timer was set again since.
                if read.is_ok() {
                    return Poll::Ready(());
                }
            }
        }
    }
}

#[cfg(not(all(target_os = "linux", any(feature = "local", feature = "redis"))))]
mod far {
    use std::task::{Context, Poll};
    use std::time::Duration;

    /// No such timer exists on this platform.
    #[derive(Debug, Default)]
    pub(super) struct Timer {}

    #[allow(clippy::unused_self)] // the other implementation needs it
    impl Timer {
        pub(super) fn set(&mut self, _: Duration) -> bool {
            false
        }

        pub(super) fn stop(&mut self) {}

        pub(super) fn is_set(&self) -> bool {
            false
        }

        pub(super) fn poll(&mut self, _: &mut Context<'_>) -> Poll<()> {
            Poll::Ready(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::clock::Span;

    #[tokio::test]
    async fn it_fires_at_the_moment_that_was_set_last() {
        let mut alarm = Alarm::new();
        // Each time, the alarm is set for 1200 ms, and then for one of these: near, far, nearer than before, and far.
        for millis in [300, 1300, 20, 1100] {
            let begun = Moment::now();
            let (first, until) =
                (begun + Span::from_millis(1200), begun + Span::from_millis(millis));
            let mut asked = false;
            poll_fn(|cx| {
                if !std::mem::replace(&mut asked, true) {
                    assert!(alarm.poll(first, Moment::now(), cx).is_pending());
                }
                while alarm.poll(until, Moment::now(), cx).is_ready() {
                    if Moment::now() >= until {
                        return Poll::Ready(());
                    }
                }
                Poll::Pending
            })
            .await;
            assert!(Moment::now() >= until);
        }
    }
}
