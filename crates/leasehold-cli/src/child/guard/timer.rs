//! Waits for events until a deadline on the clock of deadlines.

use std::io;

use rustix::event::{PollFd, poll};
use rustix::io::Errno;

use crate::clock::Moment;

pub(super) use on_this_system::Timer;

fn poll_once(fds: &mut [PollFd<'_>], timeout: Option<&rustix::event::Timespec>) -> io::Result<()> {
    match poll(fds, timeout) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A kernel timer that continues while the machine is suspended. The time-out of `poll` does not.
#[cfg(any(target_os = "linux", target_os = "android"))]
mod on_this_system {
    use std::os::fd::OwnedFd;

    use rustix::event::PollFlags;
    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };

    use super::{Moment, PollFd, io, poll_once};

    pub(in crate::child::guard) struct Timer(OwnedFd);

    impl Timer {
        pub(in crate::child::guard) fn new() -> io::Result<Self> {
            Ok(Self(timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?))
        }

        pub(in crate::child::guard) fn wait<'fd>(
            &'fd self,
            fds: &mut Vec<PollFd<'fd>>,
            until: Moment,
        ) -> io::Result<()> {
            // Zero disarms the timer, which is right for `NEVER`, but not for a deadline that has passed.
            let micros = if until == Moment::NEVER { 0 } else { until.micros().max(1) };
            let at = Timespec {
                tv_sec: i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX),
                tv_nsec: i64::try_from(micros % 1_000_000 * 1000).unwrap_or_default(),
            };
            let once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let time = Itimerspec { it_interval: once, it_value: at };
            timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &time)?;
            fds.push(PollFd::new(&self.0, PollFlags::IN));
            poll_once(fds, None)
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod on_this_system {
    use super::{Moment, PollFd, io, poll_once};

    pub(in crate::child::guard) struct Timer;

    impl Timer {
        #[allow(clippy::unnecessary_wraps)] // elsewhere it can fail
        pub(in crate::child::guard) fn new() -> io::Result<Self> {
            Ok(Self)
        }

        #[allow(clippy::unused_self)] // elsewhere it is needed
        pub(in crate::child::guard) fn wait<'fd>(
            &'fd self,
            fds: &mut Vec<PollFd<'fd>>,
            until: Moment,
        ) -> io::Result<()> {
            let left = until.saturating_since(Moment::now());
            let timeout = (until != Moment::NEVER).then(|| left.try_into().ok()).flatten();
            poll_once(fds, timeout.as_ref())
        }
    }
}
