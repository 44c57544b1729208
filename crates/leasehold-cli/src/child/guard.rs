//! The guard: a process that stops the child before the store grants the lease to another process.
//!
//! The command that holds the lease may be killed or stopped at any moment, and then the lease is no longer renewed. So
//! the command does not start the child itself. It forks a guard ([`spare`]), which starts the child in a process group
//! and waits for it. The command tells the guard over a socket how long the child may run. The guard stops the group
//!
//! - when the deadline passes: the command is stopped, or cut off from its store, or the TTL has ended;
//! - when the socket closes: the command was killed;
//! - when the command orders it: the lease is lost.
//!
//! To stop the group, the guard sends SIGTERM, and SIGKILL after a grace. The deadline that the command sends is
//! earlier than the end of the lease's validity by that grace. The validity ends a margin before the lease ends in the
//! store.
//!
//! The two processes supervise each other, because either may be killed or stopped:
//!
//! - *The child starts only after the command knows its process group* ([`launcher`]). If the guard dies before that,
//!   no child has run.
//! - *The guard never blocks* ([`mailbox`]), and handles all orders that have arrived before it checks the deadline.
//! - *The command also watches the deadline* (`supervise.rs`). It stops the group itself if the guard is late.
//! - *If the guard dies, the kernel kills the child.* The command adopts the rest of the group, and stops it.
//! - *If the command dies while the guard is stopped, the kernel continues the guard.*
//!
//! After a command was killed, the guard releases what the command held ([`cleanup`]): first the group ends, then the
//! lease.
//!
//! The guard has its own process group and blocks all signals. So a signal to the command, from the keyboard or from
//! `kill`, does not reach the guard. Only SIGKILL and SIGSTOP can.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process_group, setpgid, test_kill_process_group, wait,
};

use crate::advice::with_limit;
use crate::clock::Moment;
use crate::failure::{INTERNAL, log_line};
use crate::{signals, terminal};

pub(crate) mod cleanup;
mod handover;
pub(crate) mod launcher;
pub(crate) mod mailbox;
pub(crate) mod process;
pub(crate) mod spare;
mod timer;
pub(crate) mod wire;

use cleanup::{Cleanup, LeaseRef};
use handover::EarlyMessage;
pub(crate) use handover::Start;
use launcher::{ForkedLauncher, Launcher};
use mailbox::{Incoming, Outgoing};
use timer::Timer;
use wire::{GuardMessage, Order};

/// How often to check whether a group has ended after its leader or its guard has. The kernel does not report it.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How long to wait for a killed group, because another process may have to reap its members.
pub(crate) const REAP_WITHIN: Duration = Duration::from_secs(1);

/// The name of a guard in `ps`, and of a launcher, which is forked from it.
const NAME: &str = "leasehold-guard";

/// The job of a guard.
#[derive(Clone, Copy)]
pub(crate) struct GuardJob<'a> {
    /// The command line of the child.
    pub(crate) command: &'a [OsString],
    pub(crate) grace: Duration,
    /// Whether the command is the child of another `leasehold` command.
    pub(crate) nested: bool,
    pub(crate) cleanup: Cleanup<'a>,
}

/// Runs the guard until its child has ended, or until the command has ended without a child.
fn run(job: &GuardJob<'_>, control: UnixStream) -> u8 {
    match watch(job, control) {
        Ok(code) => code,
        Err(error) => {
            log_line(&with_limit(format!("the leasehold-guard process failed: {error}")));
            INTERNAL
        }
    }
}

fn watch(job: &GuardJob<'_>, control: UnixStream) -> io::Result<u8> {
    signals::block_all()?;
    setpgid(None, None)?;
    let _ = std::fs::write("/proc/self/comm", NAME);
    adopt_orphans()?;
    // If the command dies while the guard is stopped, the guard must continue: the lease is no longer renewed.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_parent_process_death_signal(Some(Signal::CONT))?;
    let deaths = signals::deaths()?;
    let mut waits = None;
    let (start, _lifeline) = loop {
        match EarlyMessage::receive(&control)? {
            Some(EarlyMessage::Start(start, lifeline)) => break (start, lifeline),
            Some(EarlyMessage::Waits(lease)) => waits = Some(lease),
            None => {
                if let Some(lease) = &waits {
                    job.cleanup.release(lease);
                }
                return Ok(0);
            }
        }
    };
    let acquired = Moment::now();
    control.set_nonblocking(true)?;
    let mut supervised = SupervisedGroup {
        control: Some(control),
        incoming: Incoming::default(),
        outgoing: Outgoing::default(),
        launcher: None,
        approved: false,
        group: None,
        deadline: start.until,
        grace: job.grace,
        nested: job.nested,
        kill_at: None,
        killed_at: None,
        ended: None,
    };
    match Launcher::start(job.command, &start, &mut supervised.control) {
        Ok(ForkedLauncher::Launcher(group, launcher)) => {
            if start.foreground {
                terminal::give_to(group);
            }
            (supervised.group, supervised.launcher) = (Some(group), Some(launcher));
            supervised.report(GuardMessage::Started(group.as_raw_pid()));
        }
        Ok(ForkedLauncher::Ended(code)) => return Ok(code),
        Err(error) => supervised.ended = Some(not_started(&error)),
    }
    supervised.watch(&deaths)?;
    if supervised.control.is_none() && supervised.is_gone() {
        let lease = LeaseRef { name: start.name, id: start.id };
        job.cleanup.release_held(&lease, acquired, supervised.approved);
    }
    Ok(0)
}

fn not_started(error: &io::Error) -> GuardMessage {
    GuardMessage::NotStarted(error.raw_os_error().unwrap_or(Errno::NOEXEC.raw_os_error()))
}

/// Makes this process adopt the orphans of a child, so that it can reap them.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    Ok(())
}

/// Whether the process group has no members, not even zombies.
pub(crate) fn is_gone(group: Pid) -> bool {
    test_kill_process_group(group) == Err(Errno::SRCH)
}

/// Whether this process has adopted a guard or a launcher whose parent has died. Both end by themselves; a guard first
/// stops its child.
pub(crate) fn has_adopted_one_of_ours() -> bool {
    let pid = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.unwrap_or_default().split_whitespace().any(|child| {
        let name = std::fs::read_to_string(format!("/proc/{child}/comm"));
        name.is_ok_and(|name| name.trim_end() == NAME)
    })
}

/// The child's process group, as its guard supervises it.
struct SupervisedGroup {
    /// `None` after the command has ended.
    control: Option<UnixStream>,
    incoming: Incoming,
    outgoing: Outgoing,
    /// The child's pid until it has ended.
    launcher: Option<Launcher>,
    /// Whether the command knows the child's group.
    approved: bool,
    /// `None` if it could not be started.
    group: Option<Pid>,
    deadline: Moment,
    grace: Duration,
    /// Whether the command is the child of another `leasehold` command.
    nested: bool,
    /// The time of SIGKILL, after SIGTERM was sent.
    kill_at: Option<Moment>,
    killed_at: Option<Moment>,
    /// How the child ended.
    ended: Option<GuardMessage>,
}

impl SupervisedGroup {
    fn watch(&mut self, deaths: &UnixStream) -> io::Result<()> {
        let timer = Timer::new()?;
        loop {
            // Orders come first: if this process was paused, the deadline that it knows may be outdated.
            self.handle_orders();
            self.reap();
            self.keep_time();
            self.launch();
            if let Some(ended) = self.is_over() {
                self.report(ended);
                return self.deliver();
            }
            self.flush();
            let mut fds = vec![PollFd::new(deaths, PollFlags::IN)];
            if let Some(control) = &self.control {
                fds.push(PollFd::new(control, self.interest()));
            }
            timer.wait(&mut fds, self.next_look())?;
            signals::drain(deaths);
        }
    }

    fn interest(&self) -> PollFlags {
        let write = if self.outgoing.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        PollFlags::IN | write
    }

    /// Reports to the command how the child ended. The command may be stopped now, but nothing is urgent any more.
    fn deliver(&mut self) -> io::Result<()> {
        let timer = Timer::new()?;
        self.flush();
        while let Some(control) = self.control.as_ref().filter(|_| !self.outgoing.is_empty()) {
            timer.wait(&mut vec![PollFd::new(control, PollFlags::OUT)], Moment::NEVER)?;
            self.flush();
        }
        Ok(())
    }

    /// Reaps processes that have ended: the child, or its orphans.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if Some(pid) != self.group {
                continue;
            }
            if let Some(signal) = status.stopping_signal() {
                self.report(GuardMessage::Stopped(signal));
            } else if let Some(signal) = status.terminating_signal() {
                self.leader_ended(GuardMessage::Killed(signal));
            } else if let Some(code) = status.exit_status() {
                self.leader_ended(GuardMessage::Exited(code));
            }
        }
    }

    /// Gives the rest of the group the grace to end: a process may be writing the last lines of a log.
    fn leader_ended(&mut self, ended: GuardMessage) {
        let error = self.launcher.take().and_then(|mut launcher| launcher.error());
        self.ended = Some(error.unwrap_or(ended));
        self.deadline = self.deadline.min(Moment::now().plus(self.grace));
    }

    fn keep_time(&mut self) {
        let now = Moment::now();
        match self.kill_at {
            None if now >= self.deadline => {
                if self.ended.is_none() {
                    self.report(GuardMessage::Overdue);
                }
                self.end(self.deadline.plus(self.grace));
            }
            Some(kill_at) if now >= kill_at && self.killed_at.is_none() => {
                self.signal(Signal::KILL);
                self.killed_at = Some(now);
            }
            _ => {}
        }
    }

    fn launch(&mut self) {
        if self.approved
            && self.kill_at.is_none()
            && let Some(launcher) = &mut self.launcher
        {
            launcher.go();
        }
    }

    /// Sends SIGTERM now, and SIGKILL at the given time. If this process is late, the grace is shorter.
    fn end(&mut self, kill_at: Moment) {
        if broken("guard") {
            return;
        }
        if self.kill_at.is_none() {
            self.kill_at = Some(kill_at);
            self.signal(Signal::TERM);
            // A stopped process would not handle SIGTERM.
            self.signal(Signal::CONT);
            self.report(GuardMessage::Stopping);
        }
    }

    /// Handles all orders that have arrived.
    fn handle_orders(&mut self) {
        while let Some(mut control) = self.control.as_ref() {
            match self.incoming.next(|into| control.read(into)) {
                Ok(None) => return,
                Ok(Some(Order::Until(deadline))) if self.ended.is_none() => {
                    self.deadline = deadline;
                }
                Ok(Some(Order::Until(_))) => {}
                Ok(Some(Order::Go)) => self.approved = true,
                Ok(Some(Order::Signal(signal))) => {
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        self.signal(signal);
                    }
                }
                Ok(Some(Order::Stop)) => {
                    self.end(self.deadline.min(Moment::now()).plus(self.grace));
                }
                Err(_) => self.command_died(),
            }
        }
    }

    fn command_died(&mut self) {
        self.control = None;
        // In a nested command the grace has passed: the outer guard sent SIGTERM, waited, and then killed the command.
        let grace = if self.nested { Duration::ZERO } else { self.grace };
        let kill_at = self.deadline.min(Moment::now()).plus(grace);
        self.end(kill_at);
        self.kill_at = self.kill_at.map(|before| before.min(kill_at));
    }

    /// Sends a signal to the group. Only while the group exists: after that, its number may belong to another group.
    /// Until the guard has reaped the leader, the group exists for certain.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group
            && (self.ended.is_none() || !is_gone(group))
        {
            let _ = kill_process_group(group, signal);
        }
    }

    fn is_over(&self) -> Option<GuardMessage> {
        let ended = self.ended?;
        let waited_long_enough =
            self.killed_at.is_some_and(|at| Moment::now() >= at.plus(REAP_WITHIN));
        (waited_long_enough || self.is_gone()).then_some(ended)
    }

    /// Whether the group has ended, and so have the guards of nested commands, which stop their children first.
    fn is_gone(&self) -> bool {
        self.group.is_none_or(is_gone) && !has_adopted_one_of_ours()
    }

    fn next_look(&self) -> Moment {
        let next = self.kill_at.unwrap_or(self.deadline);
        let next = if self.killed_at.is_some() { Moment::NEVER } else { next };
        if self.ended.is_some() { next.min(Moment::now().plus(LOOK_AGAIN)) } else { next }
    }

    /// Adds news for the command, which the next `flush` sends.
    fn report(&mut self, news: GuardMessage) {
        self.outgoing.push(news);
        if let Some(control) = self.control.as_ref().filter(|_| broken("blocked-guard")) {
            let _ = control.set_nonblocking(false);
            self.flush();
            let _ = self.control.as_ref().map(|control| control.set_nonblocking(true));
        }
    }

    /// Sends news to the command. If the command has ended, the next read of orders reports it.
    fn flush(&mut self) {
        if let Some(mut control) = self.control.as_ref()
            && self.outgoing.flush(|bytes| control.write(bytes)).is_err()
        {
            self.outgoing = Outgoing::default();
        }
    }
}

/// Whether this build breaks that rule, so that the torture test can show that it detects it.
pub(crate) fn broken(rule: &str) -> bool {
    cfg!(leasehold_broken)
        && std::env::var_os("LEASEHOLD_BROKEN").is_some_and(|broken| broken == rule)
}
