//! The guard: a process that ends a child before its lease can pass on.
//!
//! The command that holds the lease may be killed or stopped at any moment, and then nobody renews the lease. So the
//! child is not a child of the command: a guard, which the command forks ([`spare`]), starts it in a process group, waits for
//! it, and learns over a socket until when it may run. The guard ends the group
//!
//! - when the deadline passes: the command is stopped, or cut off from its store, or the TTL has ended;
//! - when the socket ends: the command was killed;
//! - when the command orders it: the lease is lost.
//!
//! To end the group means SIGTERM, and SIGKILL after a grace. The deadline that the command sends lies that grace before
//! the end of the lease's validity, which in turn lies a margin before the end of the lease in the store.
//!
//! Supervision has two sides, because either process may be killed or stopped:
//!
//! - *The child begins only after the command knows it* ([`launcher`]). If the guard dies earlier, nothing has run.
//! - *The guard never blocks* ([`mailbox`]), and obeys all orders that have arrived before it judges the time.
//! - *The command keeps the time, too* (`supervise.rs`). It ends the group itself if the guard is late.
//! - *If the guard dies, the kernel kills the child*, and the command, which then inherits the rest, ends that.
//! - *If the command dies, the kernel continues the guard*, should it be stopped.
//!
//! The guard has a process group of its own and blocks all signals, so that what stops or ends the command, from the
//! keyboard or by a careless `kill`, does not reach it. Only SIGKILL and SIGSTOP do.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process_group, setpgid, test_kill_process_group, wait,
};

use crate::clock::Moment;
use crate::failure::{INTERNAL, complain};
use crate::{signals, terminal};

mod handover;
mod launcher;
pub(crate) mod mailbox;
pub(crate) mod spare;
mod timer;
pub(crate) mod wire;

pub(crate) use handover::Start;
use launcher::{Launcher, Started};
use mailbox::{Incoming, Outgoing};
use timer::Timer;
use wire::{News, Order};

/// How often to check whether a group is gone that its leader or its guard has left: the kernel does not report it.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How long to wait for a killed group whose members another process may have to reap.
pub(crate) const BURIAL: Duration = Duration::from_secs(1);

/// What the kernel and `ps` call a guard, and a launcher, which is forked from it.
const NAME: &str = "leasehold-guard";

/// What a guard is started for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge<'a> {
    /// The command line of the child.
    pub(crate) command: &'a [OsString],
    pub(crate) grace: Duration,
    /// Whether the command itself is the child of another one.
    pub(crate) nested: bool,
}

/// All that the process of a guard does, until its child has ended or the command has ended without one.
fn run(charge: &Charge<'_>, control: UnixStream) -> u8 {
    match watch(charge, control) {
        Ok(code) => code,
        Err(error) => {
            complain(&format!("the guard failed: {error}"));
            INTERNAL
        }
    }
}

fn watch(charge: &Charge<'_>, control: UnixStream) -> io::Result<u8> {
    signals::block_all()?;
    setpgid(None, None)?;
    let _ = std::fs::write("/proc/self/comm", NAME);
    adopt_orphans()?;
    // A guard that is stopped when the command dies has to go on: the lease is no longer renewed.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_parent_process_death_signal(Some(Signal::CONT))?;
    let deaths = signals::deaths()?;
    let Some((start, _lifeline)) = Start::receive(&control)? else { return Ok(0) };
    control.set_nonblocking(true)?;
    let mut ward = Ward {
        control: Some(control),
        incoming: Incoming::default(),
        outgoing: Outgoing::default(),
        launcher: None,
        approved: false,
        group: None,
        deadline: start.until,
        grace: charge.grace,
        nested: charge.nested,
        kill_at: None,
        killed_at: None,
        ended: None,
    };
    match Launcher::start(charge.command, &start, &mut ward.control) {
        Ok(Started::Launcher(group, launcher)) => {
            if start.foreground {
                terminal::give_to(group);
            }
            (ward.group, ward.launcher) = (Some(group), Some(launcher));
            ward.tell(News::Started(group.as_raw_pid()));
        }
        Ok(Started::Ended(code)) => return Ok(code),
        Err(error) => ward.ended = Some(not_started(&error)),
    }
    ward.watch(&deaths)?;
    Ok(0)
}

fn not_started(error: &io::Error) -> News {
    News::NotStarted(error.raw_os_error().unwrap_or(Errno::NOEXEC.raw_os_error()))
}

/// Orphans of a child become children of this process, which can reap them then.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    Ok(())
}

/// Whether the process group has no members, not even unreaped ones.
pub(crate) fn is_gone(group: Pid) -> bool {
    test_kill_process_group(group) == Err(Errno::SRCH)
}

/// Whether this process has adopted a guard or a launcher that has lost its own parent. It ends by itself, but a guard ends
/// its child first.
pub(crate) fn has_adopted_one_of_ours() -> bool {
    let pid = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.unwrap_or_default().split_whitespace().any(|child| {
        let name = std::fs::read_to_string(format!("/proc/{child}/comm"));
        name.is_ok_and(|name| name.trim_end() == NAME)
    })
}

/// The child's group, and what is to become of it.
struct Ward {
    /// None once the command is gone.
    control: Option<UnixStream>,
    incoming: Incoming,
    outgoing: Outgoing,
    /// Until the child has ended.
    launcher: Option<Launcher>,
    /// Whether the command knows the child.
    approved: bool,
    /// None if it could not be started.
    group: Option<Pid>,
    deadline: Moment,
    grace: Duration,
    /// Whether the command itself is the child of another one.
    nested: bool,
    /// Once the group was sent SIGTERM: when it is sent SIGKILL.
    kill_at: Option<Moment>,
    killed_at: Option<Moment>,
    /// How its leader ended.
    ended: Option<News>,
}

impl Ward {
    fn watch(&mut self, deaths: &UnixStream) -> io::Result<()> {
        let timer = Timer::new()?;
        loop {
            // All orders first: after a pause of this process the deadline that it knows may be an old one.
            self.obey();
            self.reap();
            self.keep_time();
            self.launch();
            if let Some(ended) = self.is_over() {
                self.tell(ended);
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

    /// The child is gone, and the command has to learn how. It may be stopped now, and nothing has to be done in time any
    /// more.
    fn deliver(&mut self) -> io::Result<()> {
        let timer = Timer::new()?;
        self.flush();
        while let Some(control) = self.control.as_ref().filter(|_| !self.outgoing.is_empty()) {
            timer.wait(&mut vec![PollFd::new(control, PollFlags::OUT)], Moment::NEVER)?;
            self.flush();
        }
        Ok(())
    }

    /// Reaps whatever has ended: the child, or an orphan of it.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if Some(pid) != self.group {
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

    /// The rest of its group has a grace to end by itself: it may be writing the last lines of a log.
    fn leader_ended(&mut self, ended: News) {
        let error = self.launcher.take().and_then(|mut launcher| launcher.error());
        self.ended = Some(error.unwrap_or(ended));
        self.deadline = self.deadline.min(Moment::now().plus(self.grace));
    }

    fn keep_time(&mut self) {
        let now = Moment::now();
        match self.kill_at {
            None if now >= self.deadline => {
                if self.ended.is_none() {
                    self.tell(News::Overdue);
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

    /// Sends SIGTERM, and SIGKILL at that moment. If this process is late, the grace is shorter.
    fn end(&mut self, kill_at: Moment) {
        #[cfg(feature = "broken")]
        if broken("guard") {
            return;
        }
        if self.kill_at.is_none() {
            self.kill_at = Some(kill_at);
            self.signal(Signal::TERM);
            // A stopped process would not receive it.
            self.signal(Signal::CONT);
            self.tell(News::Stopping);
        }
    }

    /// Obeys all orders that have arrived.
    fn obey(&mut self) {
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
        // Below another command the grace is over: the outer guard sent SIGTERM, waited, and then killed the inner command.
        let grace = if self.nested { Duration::ZERO } else { self.grace };
        let kill_at = self.deadline.min(Moment::now()).plus(grace);
        self.end(kill_at);
        self.kill_at = self.kill_at.map(|before| before.min(kill_at));
    }

    /// Only while the group is ours: once it is gone, its number may belong to another one.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group
            && (self.ended.is_none() || !is_gone(group))
        {
            let _ = kill_process_group(group, signal);
        }
    }

    fn is_over(&self) -> Option<News> {
        let ended = self.ended?;
        let buried = self.killed_at.is_some_and(|at| Moment::now() >= at.plus(BURIAL));
        let gone = self.group.is_none_or(is_gone) && !has_adopted_one_of_ours();
        (buried || gone).then_some(ended)
    }

    fn next_look(&self) -> Moment {
        let next = self.kill_at.unwrap_or(self.deadline);
        let next = if self.killed_at.is_some() { Moment::NEVER } else { next };
        if self.ended.is_some() { next.min(Moment::now().plus(LOOK_AGAIN)) } else { next }
    }

    fn tell(&mut self, news: News) {
        self.outgoing.push(news);
        #[cfg(feature = "broken")]
        if let Some(control) = self.control.as_ref().filter(|_| broken("blocked-guard")) {
            let _ = control.set_nonblocking(false);
            self.flush();
            let _ = self.control.as_ref().map(|control| control.set_nonblocking(true));
        }
    }

    /// If the command is gone, the next order that is read says so.
    fn flush(&mut self) {
        if let Some(mut control) = self.control.as_ref()
            && self.outgoing.flush(|bytes| control.write(bytes)).is_err()
        {
            self.outgoing = Outgoing::default();
        }
    }
}

/// Whether this build breaks that rule, for the torture test to find out.
#[cfg(feature = "broken")]
pub(crate) fn broken(rule: &str) -> bool {
    std::env::var_os("LEASEHOLD_BROKEN").is_some_and(|broken| broken == rule)
}
