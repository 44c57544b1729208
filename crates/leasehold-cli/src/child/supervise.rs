//! Runs a job under a lease: orders the guard to start the child, sends each new deadline, forwards signals, passes the
//! terminal to the child and back, and returns how the child ended.
//!
//! The guard stops the child in time. If the guard is stopped or killed, the command stops the child ([`Backstop`]).

use std::ffi::OsString;
use std::future::pending;
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::time::Duration;

use leasehold::{Guard as _, LossReason};
use nix::sys::signal::Signal;
use rustix::process::{self as processes, Pid, WaitOptions, kill_process_group};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use super::guard::mailbox::{Incoming, Outgoing};
use super::guard::process::ChildProcess;
use super::guard::spare::Spare;
use super::guard::wire::{GuardMessage, Order};
use super::guard::{self, LOOK_AGAIN, REAP_WITHIN, Start};
use super::job::{Job, JobLease};
use crate::clock::{Bridge, Moment};
use crate::failure::{self, Failure, log_line};
use crate::program;
use crate::signals::Signals;
use crate::terminal::Terminal;

/// The interval between two checks of how far a lease was extended is a quarter of the time left, within these bounds.
/// That is often enough: of the time left when the lease is extended, at least two thirds are left when we see it.
const SELDOM: Duration = Duration::from_secs(1);
const OFTEN: Duration = Duration::from_millis(5);

/// How a job ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChildEnd {
    Exited(u8),
    Killed(i32),
    /// The child could not be run; the system's error number.
    NotStarted(i32),
    /// The child was stopped, because its lease was lost.
    Lost(LossReason),
}

impl ChildEnd {
    /// Returns the exit code of the command, and prints a message if the child did not end by itself.
    pub(crate) fn code(self, job: &Job) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => failure::by_signal(signal),
            Self::NotStarted(errno) => {
                let program = job.command.first().map(OsString::as_os_str).unwrap_or_default();
                let failure = program::not_run(program, errno);
                log_line(failure.message());
                failure.code
            }
            Self::Lost(reason) => {
                let reason = match (reason, job.ttl) {
                    (LossReason::TtlEnded, Some(ttl)) => {
                        format!("its TTL of {} ended", humantime::format_duration(ttl))
                    }
                    (reason, _) => reason.to_string(),
                };
                log_line(&format!("the {} was lost: {reason}; the child was stopped", job.what));
                failure::LOST
            }
        }
    }
}

/// A job that has ended, with its child and the child's group. The guard may still have to be reaped.
#[derive(Debug)]
pub(crate) struct EndedJob {
    /// An error if the guard was killed or could not be engaged.
    pub(crate) end: Result<ChildEnd, Failure>,
    /// Whether the child may have run.
    pub(crate) started: bool,
    /// `None` if it is already reaped.
    guard: Option<Guard>,
}

impl EndedJob {
    /// Waits until the guard has ended as well.
    pub(crate) async fn reap_the_guard(&mut self) {
        if let Some(guard) = &mut self.guard {
            guard.reap().await;
        }
    }
}

/// Runs the job, and returns how it ended.
///
/// The guard and the child inherit the client's lifeline, if the store has one. Then the client's permits stay held
/// until all of these processes have ended.
pub(crate) async fn run(
    job: &Job,
    held: &impl JobLease,
    spare: Spare,
    lifeline: Option<BorrowedFd<'_>>,
    signals: &mut Signals,
) -> EndedJob {
    let ended = run_in_guard(job, held, spare, lifeline, signals).await;
    ended.unwrap_or_else(|failure| EndedJob { end: Err(failure), started: false, guard: None })
}

/// # Errors
/// If the child was never started.
async fn run_in_guard(
    job: &Job,
    held: &impl JobLease,
    spare: Spare,
    lifeline: Option<BorrowedFd<'_>>,
    signals: &mut Signals,
) -> Result<EndedJob, Failure> {
    let terminal = Terminal::open();
    let problem = "the leasehold-guard process could not be started";
    let failed = |error| Failure::internal(problem, error);
    // If the guard dies, this process must stop and reap the child and its group.
    guard::adopt_orphans().map_err(failed)?;
    let deadline = Deadline::new(job);
    let first = deadline.of(held);
    let start = Start {
        until: first,
        foreground: terminal.as_ref().is_some_and(Terminal::is_for_the_child),
        name: job.name.clone(),
        id: held.guard().id(),
        fence: held.guard().fence().map(|fence| fence.to_string()).unwrap_or_default(),
        slot: held.slot().map(|slot| slot.to_string()).unwrap_or_default(),
    };
    let Ok((process, socket)) = spare.engage(&start, lifeline) else { return Err(killed_early()) };
    let socket = UnixStream::from_std(socket).map_err(failed)?;
    let (incoming, outgoing) = (Incoming::default(), Outgoing::default());
    let guard = Guard { process, socket, incoming, outgoing };
    let backstop = Backstop::new(first, job.grace);
    let mut watch = Watch { guard, terminal, group: None, lost: None, backstop };
    let end = watch.until_it_ends(&deadline, held, signals).await;
    watch.take_the_terminal();
    // The child starts only after the command has received its group.
    let started = watch.group.is_some();
    if let Some(end) = end {
        let started = started && !matches!(end, ChildEnd::NotStarted(_));
        return Ok(EndedJob { end: Ok(end), started, guard: Some(watch.guard) });
    }
    watch.end_without_a_guard().await;
    let end = match watch.lost {
        Some(reason) => Ok(ChildEnd::Lost(reason)),
        None if started => {
            let what = "the leasehold-guard process was killed, so the child was stopped";
            Err(Failure::new(failure::INTERNAL, what))
        }
        None => return Err(killed_early()),
    };
    Ok(EndedJob { end, started, guard: None })
}

fn killed_early() -> Failure {
    let what = "the leasehold-guard process was killed before the child started";
    Failure::new(failure::INTERNAL, what)
}

/// The deadline of the child: before the end of the lease by the grace and the margin, and not after its TTL.
struct Deadline {
    before: Duration,
    ttl_ends: Moment,
}

impl Deadline {
    fn new(job: &Job) -> Self {
        let ttl_ends = job.ttl.map_or(Moment::NEVER, |ttl| Moment::now().plus(ttl));
        Self { before: job.grace + job.margin, ttl_ends }
    }

    fn of(&self, held: &impl JobLease) -> Moment {
        let bridge = Bridge::now();
        let valid_until = held.guard().valid_until().map(|instant| bridge.moment(instant));
        valid_until.map_or(Moment::NEVER, |until| until.minus(self.before)).min(self.ttl_ends)
    }

    /// Returns why the deadline has passed.
    fn reason(&self) -> LossReason {
        let ttl_ended = Moment::now() >= self.ttl_ends;
        if ttl_ended { LossReason::TtlEnded } else { LossReason::NotRenewed }
    }
}

/// The times at which the command does the guard's work, because the guard may be stopped and therefore late.
struct Backstop {
    /// When the guard must stop the child: at the deadline that it knows, or when it was ordered to.
    due: Moment,
    grace: Duration,
    /// Whether SIGTERM was sent to the child.
    stopping: bool,
}

impl Backstop {
    fn new(due: Moment, grace: Duration) -> Self {
        Self { due, grace, stopping: false }
    }

    /// Returns how late a guard may be on a busy machine. That is less than half of the margin between the end of the
    /// lease's validity and its end in the store: see [`crate::child::job::lease_to_request`].
    fn slack(&self) -> Duration {
        (self.grace / 8).clamp(Duration::from_millis(25), Duration::from_millis(250))
    }

    fn stop_at(&self) -> Moment {
        self.due.plus(self.slack())
    }

    fn kill_at(&self) -> Moment {
        self.due.plus(self.grace).plus(self.slack())
    }

    /// Returns the time of the next action.
    fn next(&self) -> Moment {
        if self.stopping { self.kill_at() } else { self.stop_at() }
    }
}

/// The command's handle to the guard.
#[derive(Debug)]
struct Guard {
    process: ChildProcess,
    socket: UnixStream,
    incoming: Incoming,
    outgoing: Outgoing,
}

impl Guard {
    /// Sends an order as soon as the guard reads. If the guard has ended, the next read of its news reports it.
    fn order(&mut self, order: Order) {
        self.outgoing.push(order);
        self.flush();
    }

    fn flush(&mut self) {
        if self.outgoing.flush(|bytes| self.socket.try_write(bytes)).is_err() {
            self.outgoing = Outgoing::default();
        }
    }

    /// Returns the next message of the guard, and sends pending orders meanwhile. Returns `None` if the guard has
    /// ended.
    ///
    /// # Cancel safety
    /// No message is lost.
    async fn news(&mut self) -> Option<GuardMessage> {
        loop {
            self.flush();
            match self.incoming.next(|into| self.socket.try_read(into)) {
                Ok(Some(news)) => return Some(news),
                Ok(None) => {}
                Err(_) => return None,
            }
            let interest = if self.outgoing.is_empty() {
                Interest::READABLE
            } else {
                Interest::READABLE | Interest::WRITABLE
            };
            self.socket.ready(interest).await.ok()?;
        }
    }

    /// Waits until the guard has ended, and reaps it. A guard that does not end by itself is killed.
    async fn reap(&mut self) {
        let ended = async { while self.news().await.is_some() {} };
        if timeout(REAP_WITHIN, ended).await.is_err() {
            self.process.signal(processes::Signal::KILL);
        }
        self.process.wait();
    }
}

/// The state of the command while the child runs.
struct Watch {
    guard: Guard,
    terminal: Option<Terminal>,
    /// The child's process group, when it is known.
    group: Option<Pid>,
    /// Why the lease was lost, if it was.
    lost: Option<LossReason>,
    backstop: Backstop,
}

impl Watch {
    /// Returns how the child ended, or `None` if its guard ended first or had to be killed.
    async fn until_it_ends(
        &mut self,
        deadline: &Deadline,
        held: &impl JobLease,
        signals: &mut Signals,
    ) -> Option<ChildEnd> {
        let mut lost = pin!(held.guard().lost());
        loop {
            let left = self.backstop.due.saturating_since(Moment::now());
            let late = self.backstop.next().saturating_since(Moment::now());
            tokio::select! {
                // News come first: if this process was paused, the guard may already have stopped the child.
                biased;
                news = self.guard.news() => match news? {
                    GuardMessage::Started(pid) => {
                        self.group = Pid::from_raw(pid);
                        // If the lease is already lost, the guard has the order to stop, and the child never starts.
                        self.guard.order(Order::Go);
                    }
                    GuardMessage::Stopped(signal) => self.child_stopped(signal),
                    GuardMessage::Overdue => {
                        self.lost.get_or_insert(deadline.reason());
                    }
                    GuardMessage::Stopping => self.backstop.stopping = true,
                    GuardMessage::NotStarted(errno) => return Some(ChildEnd::NotStarted(errno)),
                    GuardMessage::Exited(code) => {
                        let end = ChildEnd::Exited(u8::try_from(code).unwrap_or(u8::MAX));
                        return Some(self.ended(end));
                    }
                    GuardMessage::Killed(signal) => return Some(self.ended(ChildEnd::Killed(signal))),
                },
                signal = signals.next() => match signal {
                    Signal::SIGCHLD => reap(),
                    signal => self.guard.order(Order::Signal(signal as i32)),
                },
                reason = lost_once(&mut lost, self.lost.is_some()) => {
                    self.lost = Some(reason);
                    self.backstop.due = self.backstop.due.min(Moment::now());
                    self.guard.order(Order::Stop);
                }
                () = sleep((left / 4).clamp(OFTEN, SELDOM)), if self.lost.is_none() => {
                    let extended = deadline.of(held);
                    if extended > self.backstop.due {
                        self.backstop.due = extended;
                        self.guard.order(Order::Until(extended));
                    }
                }
                () = sleep(late.min(SELDOM)), if self.backstop.due != Moment::NEVER => {
                    self.keep_time(deadline)?;
                }
            }
        }
    }

    /// Does what the guard should have done by now. Returns `None` if the child must have ended by now, so that the
    /// guard is no longer waited for.
    fn keep_time(&mut self, deadline: &Deadline) -> Option<()> {
        if guard::broken("trusting-command") {
            return Some(());
        }
        let now = Moment::now();
        if now < self.backstop.next() {
            return Some(());
        }
        self.lost.get_or_insert(deadline.reason());
        if now >= self.backstop.kill_at() {
            return None;
        }
        self.backstop.stopping = true;
        // The guard may be stopped.
        self.guard.process.signal(processes::Signal::CONT);
        if let Some(group) = self.group {
            let _ = kill_process_group(group, processes::Signal::TERM);
            let _ = kill_process_group(group, processes::Signal::CONT);
        }
        Some(())
    }

    fn ended(&self, end: ChildEnd) -> ChildEnd {
        self.lost.map_or(end, ChildEnd::Lost)
    }

    /// Handles a stopped child: after Ctrl-Z, or because it uses a terminal that it does not have.
    fn child_stopped(&mut self, signal: i32) {
        let Some(group) = self.group else { return };
        let wants_terminal = [Signal::SIGTTIN as i32, Signal::SIGTTOU as i32].contains(&signal);
        // SIGSTOP is not job control: then the command does not stop with the child.
        if signal != Signal::SIGTSTP as i32 && !wants_terminal {
            return;
        }
        let may_have_it = |terminal: &Terminal| terminal.is_ours() || terminal.belongs_to(group);
        if wants_terminal && self.terminal.as_ref().is_some_and(may_have_it) {
            self.give_the_terminal(group);
        } else {
            self.take_the_terminal();
            Signals::suspend();
            // The command is in the foreground again, or was continued in the background.
            if self.terminal.as_ref().is_some_and(Terminal::is_ours) {
                self.give_the_terminal(group);
            }
        }
        self.guard.order(Order::Signal(Signal::SIGCONT as i32));
    }

    fn give_the_terminal(&self, group: Pid) {
        if let Some(terminal) = &self.terminal {
            terminal.give_to(group);
        }
    }

    fn take_the_terminal(&self) {
        if let (Some(terminal), Some(group)) = (&self.terminal, self.group) {
            terminal.take_back_from(group);
        }
    }

    /// Stops the group after the guard was killed or was late.
    async fn end_without_a_guard(&mut self) {
        self.guard.process.signal(processes::Signal::KILL);
        self.guard.process.wait();
        if let Some(group) = self.group {
            if !self.backstop.stopping {
                let _ = kill_process_group(group, processes::Signal::TERM);
                let _ = kill_process_group(group, processes::Signal::CONT);
            }
            self.backstop.due = self.backstop.due.min(Moment::now());
            let kill_at = self.backstop.due.plus(self.backstop.grace);
            // After the group has ended, its number may belong to another group.
            if !is_gone_by(group, kill_at).await {
                let _ = kill_process_group(group, processes::Signal::KILL);
                is_gone_by(group, Moment::now().plus(REAP_WITHIN)).await;
            }
        }
        // A launcher whose guard has died ends by itself, and so does the guard of a nested command.
        let by = Moment::now().plus(REAP_WITHIN);
        while guard::has_adopted_one_of_ours() && Moment::now() < by {
            reap();
            sleep(LOOK_AGAIN).await;
        }
    }
}

/// Waits until the group has ended, but not after that moment. Returns whether it has ended.
async fn is_gone_by(group: Pid, by: Moment) -> bool {
    loop {
        reap();
        if guard::is_gone(group) {
            return true;
        }
        if Moment::now() >= by {
            return false;
        }
        sleep(LOOK_AGAIN).await;
    }
}

/// Reaps processes that have ended: the guard, whose end the socket reports, or adopted orphans.
fn reap() {
    while let Ok(Some(_)) = processes::wait(WaitOptions::NOHANG) {}
}

async fn lost_once(
    lost: &mut (impl Future<Output = LossReason> + Unpin),
    done: bool,
) -> LossReason {
    if done { pending().await } else { lost.await }
}
