//! A guard that has no child yet.
//!
//! The command forks it before anything else, while it has a single thread and nothing open: then the copy is a whole
//! process, which needs neither an `exec` nor anything of the command's but its arguments, and it is there when the lease is
//! granted. It waits for that moment, or for the end of the command, and holds nothing that others could wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use lone_fork::{Fork, fork};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{Charge, Start};

/// A guard that waits for its child, as the command sees it. When this is dropped, the guard is gone.
#[derive(Debug)]
pub(crate) struct Spare {
    /// None once it has a child.
    pid: Option<Pid>,
    socket: Option<UnixStream>,
}

/// What [`Spare::start`] has become.
#[derive(Debug)]
pub(crate) enum Started {
    /// In the command.
    Command(Spare),
    /// In the guard, at its end: the exit code.
    Guard(u8),
}

impl Spare {
    /// Starts the guard. To be called before there is a second thread, and with signals blocked.
    pub(crate) fn start(charge: &Charge<'_>) -> io::Result<Started> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok(match fork()? {
            Fork::Original(pid) => {
                Started::Command(Self { pid: Pid::from_raw(pid), socket: Some(ours) })
            }
            Fork::Copy => {
                drop(ours);
                Started::Guard(super::run(charge, theirs))
            }
        })
    }

    /// Lets the guard start its child.
    ///
    /// # Errors
    /// If the guard is gone.
    pub(crate) fn engage(
        mut self,
        start: &Start,
        lifeline: Option<BorrowedFd<'_>>,
    ) -> io::Result<(Pid, UnixStream)> {
        let socket = self.socket.take().ok_or(io::ErrorKind::NotConnected)?;
        start.send(socket.as_fd(), lifeline)?;
        let pid = self.pid.take().ok_or(io::ErrorKind::NotConnected)?;
        Ok((pid, socket))
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some(pid) = self.pid {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}
