//! The launcher: a process that waits until the command knows it, and then becomes the child.
//!
//! The guard forks the launcher, reports its pid to the command, and forwards the command's order to go. If the guard dies
//! before that, the launcher's socket closes and the launcher exits; no child has run. If the guard dies later, the kernel
//! kills the child (`PR_SET_PDEATHSIG`), because no process may be left that watches its deadline.

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
use super::wire::{GuardMessage, LENGTH, Message, Order};
use crate::failure::NOT_FOUND;
use crate::signals;

/// The guard's handle to a launcher.
pub(super) struct Launcher {
    socket: UnixStream,
    incoming: Incoming,
    sent: bool,
}

/// The result of [`Launcher::start`], which returns in two processes.
pub(super) enum ForkedLauncher {
    /// In the guard: the launcher and its process group.
    Launcher(Pid, Launcher),
    /// In the launcher, if it did not become the child: the exit code.
    Ended(u8),
}

impl Launcher {
    /// Starts the launcher as the leader of a process group. The launcher closes `control`, which is the guard's.
    pub(super) fn start(
        command: &[OsString],
        start: &Start,
        control: &mut Option<UnixStream>,
    ) -> io::Result<ForkedLauncher> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let guard = getpid();
        match fork()? {
            Fork::Original(pid) => {
                let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("no process"))?;
                // Before the group is reported. If this fails, the launcher is dead, and its guard reaps it.
                let _ = setpgid(Some(pid), Some(pid));
                let launcher = Self { socket, incoming: Incoming::default(), sent: false };
                Ok(ForkedLauncher::Launcher(pid, launcher))
            }
            Fork::Copy => {
                // While a copy is open, neither side notices that the other one has ended.
                drop((socket, control.take()));
                Ok(ForkedLauncher::Ended(launch(command, start, &theirs, guard)))
            }
        }
    }

    /// Orders the launcher to become the child.
    pub(super) fn go(&mut self) {
        if !self.sent {
            self.sent = true;
            // If this fails, the launcher is dead, and its guard reaps it.
            let _ = (&self.socket).write(&Order::Go.encode());
        }
    }

    /// Returns why the child could not be run, if the launcher has reported it.
    pub(super) fn error(&mut self) -> Option<GuardMessage> {
        let mut socket = &self.socket;
        self.incoming.next(|into| socket.read(into)).ok().flatten()
    }
}

/// Runs in the launcher. Returns only if the launcher did not become the child.
fn launch(command: &[OsString], start: &Start, mut guard: &UnixStream, parent: Pid) -> u8 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // The guard may have died before the signal was set up.
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
    outgoing.push(GuardMessage::NotStarted(errno));
    let _ = outgoing.flush(|bytes| guard.write(bytes));
    NOT_FOUND
}

/// Returns the fence without leading zeros, because a shell reads a number with a leading zero as octal.
fn plain(fence: &str) -> &str {
    let plain = fence.trim_start_matches('0');
    if plain.is_empty() { "0" } else { plain }
}

/// The ids of the leases around a nested command, outermost first, without its own.
const OUTER_IDS: &str = "LEASEHOLD_OUTER_IDS";

/// Returns the ids of all leases under which this command runs, outermost first. None if it is not nested.
pub(crate) fn outer_ids() -> Vec<String> {
    let words = |name| std::env::var(name).unwrap_or_default();
    let (outer, inner) = (words(OUTER_IDS), words("LEASEHOLD_ID"));
    outer.split_whitespace().chain(inner.split_whitespace()).map(str::to_owned).collect()
}

/// Returns the part of a variable that stands for a name: letters and digits of ASCII in upper case, and `_` for every
/// other character.
fn variable_part(name: &str) -> String {
    let letter = |letter: char| match letter {
        letter if letter.is_ascii_alphanumeric() => letter.to_ascii_uppercase(),
        _ => '_',
    };
    name.chars().map(letter).collect()
}

/// Replaces this process by the child. Returns only if that fails.
fn become_the_child(command: &[OsString], start: &Start) -> io::Error {
    let Some((program, arguments)) = command.split_first() else { return Errno::NOENT.into() };
    let outer = outer_ids().join(" ");
    let run = |command: &mut Command| {
        if !outer.is_empty() {
            command.env(OUTER_IDS, &outer);
        }
        // The variables with the name stay visible in nested commands for other names.
        let of_name = |what| format!("LEASEHOLD_{}_{what}", variable_part(&start.name));
        if !start.slot.is_empty() {
            command.env("LEASEHOLD_SLOT", &start.slot).env(of_name("SLOT"), &start.slot);
        }
        command
            .args(arguments)
            .env(of_name("ID"), &start.id)
            .env(of_name("FENCE"), plain(&start.fence))
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
    // A script without `#!` is run by the shell, as `execvp` does.
    run(Command::new("/bin/sh").arg(program))
}
