//! Signals.
//!
//! The command blocks them, and a thread waits for them: so a signal never ends it between two steps, and Ctrl-Z can be
//! left to do what it always does. The guard blocks them too, and waits for none but SIGCHLD. The child begins with no
//! signal blocked. Whatever we were told to ignore (by `nohup`, or as a shell's background job) stays ignored, in the child
//! too.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::thread;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::process::kill_current_process_group;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// What the child is told, too.
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

/// Signals that are blocked, and not yet heard.
#[derive(Debug)]
pub(crate) struct Blocked(SigSet);

impl Blocked {
    /// To be called before there is a second thread, which would otherwise be killed in our place.
    pub(crate) fn new() -> io::Result<Self> {
        let ignored = ignored();
        let mut set = SigSet::empty();
        let heard = FORWARDED.into_iter().filter(|signal| !ignored.contains(signal));
        set.extend(heard.chain([Signal::SIGCHLD]));
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

    /// The next that ends somebody who waits. Ctrl-Z stops him as it stops anybody.
    pub(crate) async fn next_to_end(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => Self::stop_like_anybody(),
                Signal::SIGCHLD | Signal::SIGWINCH | Signal::SIGCONT => {}
                signal => return signal,
            }
        }
    }

    /// Stops this process and all of its group, as Ctrl-Z does, and returns when it goes on. If nobody could continue
    /// it, because no shell has it for a job, the kernel does not stop it.
    ///
    /// To be called on the main thread: of those that do not block a signal, it is the first to get it.
    pub(crate) fn stop_like_anybody() {
        let stop = SigSet::from_iter([Signal::SIGTSTP]);
        let _ = stop.thread_unblock();
        let _ = kill_current_process_group(rustix::process::Signal::TSTP);
        let _ = stop.thread_block();
    }
}

/// What this process was told to ignore when it was started.
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

/// In the guard: nothing ends or stops it but SIGKILL and SIGSTOP.
pub(crate) fn block_all() -> io::Result<()> {
    let others = [Signal::SIGALRM, Signal::SIGPIPE, Signal::SIGTTIN, Signal::SIGTTOU];
    let set: SigSet = FORWARDED.into_iter().chain(others).collect();
    Ok(set.thread_set_mask()?)
}

/// In the process that becomes the child.
pub(crate) fn unblock() -> io::Result<()> {
    Ok(SigSet::empty().thread_set_mask()?)
}

/// What would otherwise stop a process in the background: to say who is to have the terminal.
pub(crate) fn from_the_background<T>(act: impl FnOnce() -> T) -> T {
    let stop = SigSet::from_iter([Signal::SIGTTOU]);
    let before = stop.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let done = act();
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
    done
}

/// In the guard: readable when a child has ended or was stopped.
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
