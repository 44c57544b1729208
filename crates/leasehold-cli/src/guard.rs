//! The guard: a process that sees to it that a child ends before its lease can pass on.
//!
//! The command that holds the lease may be killed or stopped at any moment, and then nobody renews the lease. So the
//! child is not its own: a guard, which is the same binary, starts the child in a process group, waits for it and is
//! told, over a socket, until when the child may run. It ends the group
//!
//! - when the deadline passes: the command is stopped, or cut off from its store, or the TTL ran out;
//! - when the socket ends: the command was killed;
//! - when it is told to: the store has said that the lease is gone.
//!
//! To end means SIGTERM, and SIGKILL after a grace. The deadline that the guard is told lies that grace before the end
//! of the lease's validity, which in turn lies a margin before the end of the lease in the store.
//!
//! The guard has a process group of its own and heeds no signal, so that what stops or ends the command, from the
//! keyboard or by a careless `kill`, does not reach it. Only SIGKILL does: then the command ends the group itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, wait,
};

use crate::args::GuardArgs;
use crate::clock::Moment;
use crate::failure::{INTERNAL, complain};
use crate::{signals, terminal};

mod handover;
mod timer;
pub(crate) mod wire;

pub(crate) use handover::{receive, send};
use timer::Timer;
use wire::{Message, News, Order};

/// How often to look whether a group that its leader or its guard has left is gone: nobody tells us.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How long to wait for a killed group whose members somebody else may have to reap.
pub(crate) const BURIAL: Duration = Duration::from_secs(1);

/// What the binary does when it is called by the name of a guard.
pub(crate) fn run(arguments: &GuardArgs) -> u8 {
    match watch(arguments) {
        Ok(()) => 0,
        Err(error) => {
            complain(&format!("the guard failed: {error}"));
            INTERNAL
        }
    }
}

fn watch(arguments: &GuardArgs) -> io::Result<()> {
    signals::catch_all()?;
    // Who is orphaned in the child's group becomes ours, and we know when it ends.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let deaths = signals::deaths()?;
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (order, stdin) = receive(&control)?;
    let Order::Until(deadline) = order else {
        return Err(io::Error::other("the first message is not a deadline"));
    };
    if Moment::now() >= deadline {
        let _ = News::Overdue.write(&control);
        return News::Killed(Signal::TERM.as_raw()).write(&control);
    }
    let group = match start(arguments, stdin) {
        Ok(group) => group,
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(Errno::NOEXEC.raw_os_error());
            return News::NotStarted(errno).write(&control);
        }
    };
    if arguments.foreground {
        terminal::give_to(group);
    }
    let grace = Duration::from_micros(arguments.grace);
    let mut ward = Ward::new(control, group, deadline, grace);
    ward.tell(News::Started(group.as_raw_pid()));
    ward.watch(&deaths)
}

/// The child, as the leader of a process group.
fn start(arguments: &GuardArgs, stdin: OwnedFd) -> io::Result<Pid> {
    let (program, rest) = arguments.command.split_first().ok_or(Errno::NOENT)?;
    let again = stdin.try_clone()?;
    let spawn = |command: &mut Command, stdin| {
        command.args(rest).stdin(Stdio::from(stdin)).process_group(0).spawn()
    };
    let child = spawn(&mut Command::new(program), stdin).or_else(|error| {
        // A script that does not say who reads it is read by the shell, as everywhere.
        if error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) {
            return spawn(Command::new("/bin/sh").arg(program), again);
        }
        Err(error)
    })?;
    Ok(Pid::from_child(&child))
}

/// The child's group, and what is to become of it.
struct Ward {
    /// None once the command is gone.
    control: Option<UnixStream>,
    group: Pid,
    deadline: Moment,
    grace: Duration,
    /// Once it was told to end: when it has to have.
    kill_at: Option<Moment>,
    killed_at: Option<Moment>,
    /// How its leader ended.
    ended: Option<News>,
}

impl Ward {
    fn new(control: UnixStream, group: Pid, deadline: Moment, grace: Duration) -> Self {
        let control = Some(control);
        Self { control, group, deadline, grace, kill_at: None, killed_at: None, ended: None }
    }

    fn watch(&mut self, deaths: &UnixStream) -> io::Result<()> {
        let timer = Timer::new()?;
        loop {
            self.reap();
            self.keep_time();
            if let Some(ended) = self.is_over() {
                self.tell(ended);
                return Ok(());
            }
            let mut fds = vec![PollFd::new(deaths, PollFlags::IN)];
            fds.extend(self.control.as_ref().map(|control| PollFd::new(control, PollFlags::IN)));
            timer.wait(&mut fds, self.next_look())?;
            let orders = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
            signals::drain(deaths);
            if orders {
                self.obey();
            }
        }
    }

    /// Whatever has ended, ours or an orphan of the child's.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if pid != self.group {
                continue;
            }
            if let Some(signal) = status.stopping_signal() {
                self.tell(News::Stopped(signal));
            } else if let Some(signal) = status.terminating_signal() {
                self.leader_ended(News::Killed(signal));
            } else if let Some(code) = status.exit_status() {
                self.leader_ended(News::Exited(code));
            }
        }
    }

    /// Whoever it leaves behind in its group has a grace to end by himself: he may be writing the last lines of a log.
    fn leader_ended(&mut self, ended: News) {
        self.ended = Some(ended);
        self.deadline = self.deadline.min(Moment::now().plus(self.grace));
    }

    fn keep_time(&mut self) {
        let now = Moment::now();
        match self.kill_at {
            None if now >= self.deadline => {
                if self.ended.is_none() {
                    self.tell(News::Overdue);
                }
                self.end(self.deadline);
            }
            Some(kill_at) if now >= kill_at && self.killed_at.is_none() => {
                self.signal(Signal::KILL);
                self.killed_at = Some(now);
            }
            _ => {}
        }
    }

    /// `since` is when it should have been told to end: if we are late, the grace is shorter.
    fn end(&mut self, since: Moment) {
        #[cfg(feature = "broken")]
        if std::env::var_os("LEASEHOLD_BROKEN").is_some_and(|rule| rule == "guard") {
            return;
        }
        if self.kill_at.is_none() {
            self.kill_at = Some(since.plus(self.grace));
            self.signal(Signal::TERM);
            // Who is stopped would not hear of it.
            self.signal(Signal::CONT);
        }
    }

    fn obey(&mut self) {
        let Some(control) = &self.control else { return };
        match Order::read(control) {
            Ok(Some(Order::Until(deadline))) if self.ended.is_none() => self.deadline = deadline,
            Ok(Some(Order::Signal(signal))) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    self.signal(signal);
                }
            }
            Ok(Some(Order::Until(_))) => {}
            Ok(Some(Order::Stop)) => self.end(self.deadline.min(Moment::now())),
            // The command is gone, or does not make sense any more.
            Ok(None) | Err(_) => {
                self.control = None;
                self.end(self.deadline.min(Moment::now()));
            }
        }
    }

    /// Only while the group is ours: once it is gone, its number may be somebody else's.
    fn signal(&self, signal: Signal) {
        if self.ended.is_none() || !self.is_gone() {
            let _ = kill_process_group(self.group, signal);
        }
    }

    fn is_gone(&self) -> bool {
        test_kill_process_group(self.group) == Err(Errno::SRCH)
    }

    fn is_over(&self) -> Option<News> {
        let ended = self.ended?;
        let buried = self.killed_at.is_some_and(|at| Moment::now() >= at.plus(BURIAL));
        (buried || self.is_gone()).then_some(ended)
    }

    fn next_look(&self) -> Moment {
        let next = self.kill_at.unwrap_or(self.deadline);
        let next = if self.killed_at.is_some() { Moment::NEVER } else { next };
        if self.ended.is_some() { next.min(Moment::now().plus(LOOK_AGAIN)) } else { next }
    }

    /// If nobody listens any more, we will hear of that.
    fn tell(&self, news: News) {
        if let Some(control) = &self.control {
            let _ = news.write(control);
        }
    }
}
