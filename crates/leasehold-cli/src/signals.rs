//! Signal handling.
//!
//! The command blocks signals, and a thread waits for them. So a signal never ends the command between two steps, and
//! Ctrl-Z keeps its usual effect. The guard blocks signals too, and waits only for SIGCHLD. The child starts with no
//! signal blocked. Signals that were ignored when the command started (by `nohup`, or in a shell's background job) stay
//! ignored, also in the child.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::thread;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::process::kill_current_process_group;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// The signals that are forwarded to the child.
const FORWARDED: [Signal; 9] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
    Signal::SIGTSTP,
];

/// Blocked signals for which no thread waits yet.
#[derive(Debug)]
pub(crate) struct Blocked(SigSet);

impl Blocked {
    /// Blocks the signals. Call it before there is a second thread, which would receive them otherwise.
    pub(crate) fn new() -> io::Result<Self> {
        let ignored = ignored();
        let mut set = SigSet::empty();
        let handled = FORWARDED.into_iter().filter(|signal| !ignored.contains(signal));
        set.extend(handled.chain([Signal::SIGCHLD]));
        set.thread_block()?;
        Ok(Self(set))
    }

    /// Starts the thread that waits for them.
    pub(crate) fn listen(self) -> io::Result<Signals> {
        let (sender, receiver) = unbounded_channel();
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            while let Ok(signal) = self.0.wait() {
                if sender.send(signal).is_err() {
                    return;
                }
            }
        })?;
        Ok(Signals(receiver))
    }
}

/// Signals to this process.
#[derive(Debug)]
pub(crate) struct Signals(UnboundedReceiver<Signal>);

impl Signals {
    pub(crate) async fn next(&mut self) -> Signal {
        match self.0.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }

    /// Returns the next signal that ends a wait. Ctrl-Z stops the process as usual.
    pub(crate) async fn next_to_end(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => Self::suspend(),
                Signal::SIGCHLD | Signal::SIGWINCH | Signal::SIGCONT => {}
                signal => return signal,
            }
        }
    }

    /// Stops this process and its group, as Ctrl-Z does, and returns when it is continued. The kernel does not stop it
    /// if no shell controls it as a job, because then no process could continue it.
    ///
    /// Call it on the main thread: of the threads that do not block a signal, the main thread receives it first.
    pub(crate) fn suspend() {
        let stop = SigSet::from_iter([Signal::SIGTSTP]);
        let _ = stop.thread_unblock();
        let _ = kill_current_process_group(rustix::process::Signal::TSTP);
        let _ = stop.thread_block();
    }
}

/// Returns the signals that were ignored when this process was started.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn ignored() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    Signal::iterator().filter(|signal| mask >> (*signal as i32 - 1) & 1 == 1).collect()
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn ignored() -> Vec<Signal> {
    Vec::new()
}

/// Blocks all signals, in the guard. Only SIGKILL and SIGSTOP can end or stop it. SIGCHLD has a handler there, and the
/// signals of faults are left to the system.
pub(crate) fn block_all() -> io::Result<()> {
    let mut set = SigSet::all();
    let faults = [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL];
    for signal in faults.into_iter().chain([Signal::SIGCHLD]) {
        set.remove(signal);
    }
    Ok(set.thread_set_mask()?)
}

/// Unblocks all signals, in the process that becomes the child.
pub(crate) fn unblock() -> io::Result<()> {
    Ok(SigSet::empty().thread_set_mask()?)
}

/// Blocks SIGTTOU, which would stop a background process that sets the terminal's foreground group.
pub(crate) fn from_the_background<T>(act: impl FnOnce() -> T) -> T {
    let stop = SigSet::from_iter([Signal::SIGTTOU]);
    let before = stop.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let done = act();
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
    done
}

/// Returns a file descriptor that is readable when a child has ended or was stopped, in the guard.
pub(crate) fn deaths() -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    write.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGCHLD, write)?;
    Ok(read)
}

pub(crate) fn drain(mut deaths: &UnixStream) {
    let mut bytes = [0; 64];
    while deaths.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
}
