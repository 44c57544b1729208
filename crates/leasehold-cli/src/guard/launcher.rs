//! The launcher: a process of its own that waits until the command knows it, and then becomes the child.
//!
//! The guard forks it, reports its number to the command, and passes the command's consent on. If the guard dies before
//! that, the launcher sees the end of its socket and ends; no child has run. If the guard dies later, the kernel kills the
//! child (`PR_SET_PDEATHSIG`): there may be nobody left to keep its time.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use lone_fork::{Fork, fork};
use rustix::io::Errno;
use rustix::process::{Pid, getpid, getppid, setpgid};

use super::handover::Start;
use super::mailbox::{Incoming, Outgoing};
use super::wire::{LENGTH, Message, News, Order};
use crate::failure::NOT_FOUND;
use crate::signals;

/// A launcher, as its guard sees it.
pub(super) struct Launcher {
    socket: UnixStream,
    incoming: Incoming,
    sent: bool,
}

/// What [`Launcher::start`] has become.
pub(super) enum Started {
    /// In the guard: the launcher leads a process group of this number.
    Launcher(Pid, Launcher),
    /// In the launcher, if it did not become the child: the exit code.
    Ended(u8),
}

impl Launcher {
    /// Starts the launcher as the leader of a process group. `control` is the guard's, and of no use to the launcher.
    pub(super) fn start(
        command: &[OsString],
        start: &Start,
        control: &mut Option<UnixStream>,
    ) -> io::Result<Started> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let guard = getpid();
        match fork()? {
            Fork::Original(pid) => {
                let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("no process"))?;
                // Before anybody is told of the group. If it fails, the launcher is dead, and its guard will reap it.
                let _ = setpgid(Some(pid), Some(pid));
                let launcher = Self { socket, incoming: Incoming::default(), sent: false };
                Ok(Started::Launcher(pid, launcher))
            }
            Fork::Copy => {
                // As long as these are open, neither sees the other end.
                drop((socket, control.take()));
                Ok(Started::Ended(launch(command, start, &theirs, guard)))
            }
        }
    }

    /// Lets it become the child.
    pub(super) fn go(&mut self) {
        if !self.sent {
            self.sent = true;
            // If it fails, the launcher is dead, and its guard will reap it.
            let _ = (&self.socket).write(&Order::Go.encode());
        }
    }

    /// Why the child could not be run, if the launcher has reported that.
    pub(super) fn error(&mut self) -> Option<News> {
        let mut socket = &self.socket;
        self.incoming.next(|into| socket.read(into)).ok().flatten()
    }
}

/// In the launcher. Returns if it did not become the child.
fn launch(command: &[OsString], start: &Start, mut guard: &UnixStream, parent: Pid) -> u8 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // It may have died before that.
    if getppid() != Some(parent) || signals::unblock().is_err() {
        return NOT_FOUND;
    }
    let mut order = [0; LENGTH];
    if guard.read_exact(&mut order).is_err() || Order::decode(order).ok() != Some(Order::Go) {
        return NOT_FOUND;
    }
    let error = become_the_child(command, start);
    let errno = error.raw_os_error().unwrap_or(Errno::NOEXEC.raw_os_error());
    let mut outgoing = Outgoing::default();
    outgoing.push(News::NotStarted(errno));
    let _ = outgoing.flush(|bytes| guard.write(bytes));
    NOT_FOUND
}

/// A shell takes a number that begins with 0 for an octal one.
fn plain(fence: &str) -> &str {
    let plain = fence.trim_start_matches('0');
    if plain.is_empty() { "0" } else { plain }
}

/// Returns only if that fails.
fn become_the_child(command: &[OsString], start: &Start) -> io::Error {
    let Some((program, arguments)) = command.split_first() else { return Errno::NOENT.into() };
    let run = |command: &mut Command| {
        if !start.slot.is_empty() {
            command.env("LEASEHOLD_SLOT", &start.slot);
        }
        command
            .args(arguments)
            .env("LEASEHOLD_NAME", &start.name)
            .env("LEASEHOLD_ID", &start.id)
            .env("LEASEHOLD_FENCE", plain(&start.fence))
            .env("LEASEHOLD_FENCE_PADDED", &start.fence)
            .exec()
    };
    let error = run(&mut Command::new(program));
    if error.raw_os_error() != Some(Errno::NOEXEC.raw_os_error()) {
        return error;
    }
    // A script without `#!` is run by the shell, as everywhere.
    run(Command::new("/bin/sh").arg(program))
}
