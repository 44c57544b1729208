//! The launcher: a process of its own that waits until the command knows it, and then becomes the child.
//!
//! The guard starts it, reports its number to the command, and passes the command's consent on. If the guard dies before
//! that, the launcher sees the end of its socket and ends; no child has run. If the guard dies later, the kernel kills the
//! child (`PR_SET_PDEATHSIG`): there may be nobody left to keep its time.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, getpid, getppid};

use super::mailbox::{Incoming, Outgoing};
use super::wire::{News, Order};
use super::{own_binary, receive, send};
use crate::args::{LAUNCHER, LauncherArgs};
use crate::failure::NOT_FOUND;

/// A launcher, as its guard sees it.
pub(super) struct Launcher {
    socket: UnixStream,
    incoming: Incoming,
    /// The standard input of the child, until it was handed over.
    stdin: Option<OwnedFd>,
}

impl Launcher {
    /// Starts the launcher as the leader of a process group.
    pub(super) fn start(command: &[OsString], stdin: OwnedFd) -> io::Result<(Pid, Self)> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let child = Command::new(own_binary()?)
            .arg0(LAUNCHER)
            .args(["--guard", &getpid().as_raw_pid().to_string(), "--"])
            .args(command)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()?;
        let launcher = Self { socket, incoming: Incoming::default(), stdin: Some(stdin) };
        Ok((Pid::from_child(&child), launcher))
    }

    /// Lets it become the child.
    pub(super) fn go(&mut self) {
        if let Some(stdin) = self.stdin.take() {
            // If it fails, the launcher is dead, and its guard will reap it.
            let _ = send(&self.socket, Order::Go, stdin.as_fd());
        }
    }

    /// Why the child could not be run, if the launcher has reported that.
    pub(super) fn error(&mut self) -> Option<News> {
        let mut socket = &self.socket;
        self.incoming.next(|into| io::Read::read(&mut socket, into)).ok().flatten()
    }
}

/// What the binary does when it is called by the name of a launcher.
pub(crate) fn run(arguments: &LauncherArgs) -> u8 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // It may have died before that.
    if getppid() != Pid::from_raw(arguments.guard) {
        return NOT_FOUND;
    }
    let Ok(control) = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from) else {
        return NOT_FOUND;
    };
    let Ok((Order::Go, stdin)) = receive(&control) else { return NOT_FOUND };
    let error = become_the_child(&arguments.command, stdin);
    let errno = error.raw_os_error().unwrap_or(Errno::NOEXEC.raw_os_error());
    let mut outgoing = Outgoing::default();
    outgoing.push(News::NotStarted(errno));
    let _ = outgoing.flush(|bytes| io::Write::write(&mut &control, bytes));
    NOT_FOUND
}

/// Returns only if that fails.
fn become_the_child(command: &[OsString], stdin: OwnedFd) -> io::Error {
    let Some((program, arguments)) = command.split_first() else { return Errno::NOENT.into() };
    let again = match stdin.try_clone() {
        Ok(again) => again,
        Err(error) => return error,
    };
    let error = Command::new(program).args(arguments).stdin(Stdio::from(stdin)).exec();
    if error.raw_os_error() != Some(Errno::NOEXEC.raw_os_error()) {
        return error;
    }
    // A script without `#!` is run by the shell, as everywhere.
    Command::new("/bin/sh").arg(program).args(arguments).stdin(Stdio::from(again)).exec()
}
