//! A guard that has no child yet.
//!
//! The command forks the guard before anything else, while it has a single thread and no open files. The copy is then
//! complete: it needs no `exec`, and it is ready when the lease is granted. Until then the guard waits for that moment or
//! for the end of the command, and holds nothing that other processes could wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use lone_fork::{Fork, fork};
use rustix::process::{Pid, Signal};

use super::cleanup::LeaseRef;
use super::handover::send_waits;
use super::process::ChildProcess;
use super::{GuardJob, Start};

/// The command's handle to a guard that has no child yet. Dropping it ends the guard.
#[derive(Debug)]
pub(crate) struct Spare {
    /// `None` after it has got a child.
    process: Option<ChildProcess>,
    socket: Option<UnixStream>,
}

/// The result of [`Spare::start`], which returns in two processes.
#[derive(Debug)]
pub(crate) enum ForkedGuard {
    /// In the command.
    Command(Spare),
    /// In the guard, at its end: the exit code.
    Guard(u8),
}

impl Spare {
    /// Starts the guard. Call it before there is a second thread, and with signals blocked.
    pub(crate) fn start(job: &GuardJob<'_>) -> io::Result<ForkedGuard> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok(match fork()? {
            Fork::Original(pid) => {
                let process = Pid::from_raw(pid).map(ChildProcess::new);
                ForkedGuard::Command(Self { process, socket: Some(ours) })
            }
            Fork::Copy => {
                drop(ours);
                ForkedGuard::Guard(super::run(job, theirs))
            }
        })
    }

    /// Reports that the command is about to wait for this lease, so that the guard removes it if the command is killed.
    pub(crate) fn will_wait(&self, lease: &LeaseRef) {
        // If the guard has ended, `engage` reports it.
        if let Some(socket) = &self.socket {
            let _ = send_waits(lease, socket);
        }
    }

    /// Orders the guard to start its child.
    ///
    /// # Errors
    /// If the guard has ended.
    pub(crate) fn engage(
        mut self,
        start: &Start,
        lifeline: Option<BorrowedFd<'_>>,
    ) -> io::Result<(ChildProcess, UnixStream)> {
        let socket = self.socket.take().ok_or(io::ErrorKind::NotConnected)?;
        start.send(socket.as_fd(), lifeline)?;
        let process = self.process.take().ok_or(io::ErrorKind::NotConnected)?;
        Ok((process, socket))
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some(process) = &self.process {
            process.signal(Signal::KILL);
            process.wait();
        }
    }
}
