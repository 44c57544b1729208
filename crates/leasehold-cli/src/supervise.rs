//! Runs a job under a lease: lets its guard start the child, sends it each new deadline, forwards signals, hands the terminal
//! back and forth, and returns how the child ended.
//!
//! The guard ends the child in time. Should it be stopped or killed, the command does ([`Backstop`]).

use std::future::pending;
use std::io;
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::time::Duration;

use leasehold::LossReason;
use nix::sys::signal::Signal;
use rustix::io::Errno;
use rustix::process::{self as processes, Pid, WaitOptions, kill_process_group};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::clock::{Bridge, Moment};
use crate::failure::{self, Failure, complain};
use crate::guard::mailbox::{Incoming, Outgoing};
use crate::guard::spare::Spare;
use crate::guard::wire::{News, Order};
use crate::guard::{self, BURIAL, LOOK_AGAIN, Start};
use crate::job::{Held, Job};
use crate::signals::Signals;
use crate::terminal::Terminal;

/// Between two looks at how far a lease was extended. A quarter of what is left is soon enough: whatever is left when
/// it is extended, at least two thirds of that are left when we see it.
const SELDOM: Duration = Duration::from_secs(1);
const OFTEN: Duration = Duration::from_millis(5);

/// How a job ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Exited(u8),
    Killed(i32),
    /// It could not be run.
    NotStarted(i32),
    /// It was stopped, because its lease was lost.
    Lost(LossReason),
}

impl End {
    /// What the command exits with, and what it says.
    pub(crate) fn code(self, job: &Job) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => failure::by_signal(signal),
            Self::NotStarted(errno) => {
                let program = job.command.first().map(|program| program.to_string_lossy());
                let error = io::Error::from_raw_os_error(errno);
                complain(&format!("{:?} could not be run: {error}", program.unwrap_or_default()));
                let missing = errno == Errno::NOENT.raw_os_error();
                if missing { failure::NOT_FOUND } else { failure::CANNOT_RUN }
            }
            Self::Lost(reason) => {
                let reason = match (reason, job.ttl) {
                    (LossReason::TtlEnded, Some(ttl)) => {
                        format!("its TTL of {} ran out", humantime::format_duration(ttl))
                    }
                    (reason, _) => reason.to_string(),
                };
                complain(&format!("the {} was lost: {reason}; the child was stopped", job.what));
                failure::LOST
            }
        }
    }
}

/// How a job ended. The child and its group are gone; the guard has nothing left to do.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) end: End,
    /// None if it was reaped already.
    guard: Option<Guard>,
}

impl Ended {
    /// Waits until the guard is gone as well.
    pub(crate) async fn reap_the_guard(&mut self) {
        if let Some(guard) = &mut self.guard {
            guard.reap().await;
        }
    }
}

/// Runs the job, and returns how it ended.
///
/// The guard and the child inherit the client's lifeline, if its store has one: then what the client holds cannot pass on
/// before all of them are gone.
pub(crate) async fn run(
    job: &Job,
    held: &impl Held,
    spare: Spare,
    lifeline: Option<BorrowedFd<'_>>,
    signals: &mut Signals,
) -> Result<Ended, Failure> {
    let terminal = Terminal::open();
    let failed = |error| Failure::internal("the guard of the child could not be started", error);
    // Should the guard die, the child and its group become ours to end and to reap.
    guard::adopt_orphans().map_err(failed)?;
    let deadline = Deadline::new(job);
    let first = deadline.of(held);
    let start = Start {
        until: first,
        foreground: terminal.as_ref().is_some_and(Terminal::is_for_the_child),
        name: job.name.clone(),
        id: held.id(),
        fence: held.fence(),
        slot: held.slot().map(|slot| slot.to_string()).unwrap_or_default(),
    };
    let Ok((pid, socket)) = spare.engage(&start, lifeline) else { return Err(killed_early()) };
    let socket = UnixStream::from_std(socket).map_err(failed)?;
    let (incoming, outgoing) = (Incoming::default(), Outgoing::default());
    let guard = Guard { pid, socket, incoming, outgoing };
    let backstop = Backstop::new(first, job.grace);
    let mut watch = Watch { guard, terminal, group: None, lost: None, backstop };
    let end = watch.until_it_ends(&deadline, held, signals).await;
    watch.take_the_terminal();
    if let Some(end) = end {
        return Ok(Ended { end, guard: Some(watch.guard) });
    }
    watch.end_without_a_guard().await;
    match (watch.lost, watch.group) {
        (Some(reason), _) => Ok(Ended { end: End::Lost(reason), guard: None }),
        (None, Some(_)) => {
            let what = "the guard of the child was killed; the child was stopped";
            Err(Failure::new(failure::INTERNAL, what))
        }
        (None, None) => Err(killed_early()),
    }
}

fn killed_early() -> Failure {
    let what = "the guard of the child was killed before the child had begun";
    Failure::new(failure::INTERNAL, what)
}

/// Until when the child may run: the grace and the margin before the lease ends, and no longer than its TTL.
struct Deadline {
    before: Duration,
    ttl_ends: Moment,
}

impl Deadline {
    fn new(job: &Job) -> Self {
        let ttl_ends = job.ttl.map_or(Moment::NEVER, |ttl| Moment::now().plus(ttl));
        Self { before: job.grace + job.margin, ttl_ends }
    }

    fn of(&self, held: &impl Held) -> Moment {
        let bridge = Bridge::now();
        let valid_until = held.valid_until().map(|instant| bridge.moment(instant));
        valid_until.map_or(Moment::NEVER, |until| until.minus(self.before)).min(self.ttl_ends)
    }

    /// Why it has passed.
    fn reason(&self) -> LossReason {
        let ttl_ended = Moment::now() >= self.ttl_ends;
        if ttl_ended { LossReason::TtlEnded } else { LossReason::NotRenewed }
    }
}

/// When the command does itself what the guard should have done. The guard may be stopped, and then it is late.
struct Backstop {
    /// When the guard has to stop the child: at the deadline that it knows, or when it was ordered to.
    due: Moment,
    grace: Duration,
    /// Whether the child was sent SIGTERM.
    stopping: bool,
}

impl Backstop {
    fn new(due: Moment, grace: Duration) -> Self {
        Self { due, grace, stopping: false }
    }

    /// How late a guard may be on a busy machine. That is less than half the margin between the end of a lease's validity
    /// and its end in the store: see [`crate::job::asked_for`].
    fn slack(&self) -> Duration {
        (self.grace / 8).clamp(Duration::from_millis(25), Duration::from_millis(250))
    }

    fn stop_at(&self) -> Moment {
        self.due.plus(self.slack())
    }

    fn kill_at(&self) -> Moment {
        self.due.plus(self.grace).plus(self.slack())
    }

    /// When to act next.
    fn next(&self) -> Moment {
        if self.stopping { self.kill_at() } else { self.stop_at() }
    }
}

/// The guard, as the command sees it.
#[derive(Debug)]
struct Guard {
    pid: Pid,
    socket: UnixStream,
    incoming: Incoming,
    outgoing: Outgoing,
}

impl Guard {
    /// The order is sent as soon as the guard reads. A guard that is gone is noticed when its news are read.
    fn order(&mut self, order: Order) {
        self.outgoing.push(order);
        self.flush();
    }

    fn flush(&mut self) {
        if self.outgoing.flush(|bytes| self.socket.try_write(bytes)).is_err() {
            self.outgoing = Outgoing::default();
        }
    }

    /// The next message of the guard. Meanwhile, orders are sent that had to wait. Nothing if the guard is gone.
    ///
    /// # Cancel safety
    /// No message is lost.
    async fn news(&mut self) -> Option<News> {
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
        if timeout(BURIAL, ended).await.is_err() {
            self.kill();
        }
        let _ = processes::waitpid(Some(self.pid), WaitOptions::empty());
    }

    fn kill(&self) {
        let _ = processes::kill_process(self.pid, processes::Signal::KILL);
    }
}

/// What the command watches while the child runs.
struct Watch {
    guard: Guard,
    terminal: Option<Terminal>,
    /// The child's, once it is known.
    group: Option<Pid>,
    /// Why the lease was lost, if it was.
    lost: Option<LossReason>,
    backstop: Backstop,
}

impl Watch {
    /// How the child ended; nothing if its guard ended first, or had to be killed.
    async fn until_it_ends(
        &mut self,
        deadline: &Deadline,
        held: &impl Held,
        signals: &mut Signals,
    ) -> Option<End> {
        let mut lost = pin!(held.lost());
        loop {
            let left = self.backstop.due.saturating_since(Moment::now());
            let late = self.backstop.next().saturating_since(Moment::now());
            tokio::select! {
                // The news first: after a pause of this process the guard may have done everything already.
                biased;
                news = self.guard.news() => match news? {
                    News::Started(pid) => {
                        self.group = Pid::from_raw(pid);
                        // If the lease is lost already, the guard has its order to stop, and the child never begins.
                        self.guard.order(Order::Go);
                    }
                    News::Stopped(signal) => self.child_stopped(signal),
                    News::Overdue => {
                        self.lost.get_or_insert(deadline.reason());
                    }
                    News::Stopping => self.backstop.stopping = true,
                    News::NotStarted(errno) => return Some(End::NotStarted(errno)),
                    News::Exited(code) => {
                        let end = End::Exited(u8::try_from(code).unwrap_or(u8::MAX));
                        return Some(self.ended(end));
                    }
                    News::Killed(signal) => return Some(self.ended(End::Killed(signal))),
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

    /// Does what the guard should have done by now. Nothing if the child has to be gone, and the guard is not to be waited
    /// for.
    fn keep_time(&mut self, deadline: &Deadline) -> Option<()> {
        #[cfg(feature = "broken")]
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
        // It may be stopped.
        let _ = processes::kill_process(self.guard.pid, processes::Signal::CONT);
        if let Some(group) = self.group {
            let _ = kill_process_group(group, processes::Signal::TERM);
            let _ = kill_process_group(group, processes::Signal::CONT);
        }
        Some(())
    }

    fn ended(&self, end: End) -> End {
        self.lost.map_or(end, End::Lost)
    }

    /// Ctrl-Z, or the child wants a terminal that it does not have.
    fn child_stopped(&mut self, signal: i32) {
        let Some(group) = self.group else { return };
        let wants_terminal = [Signal::SIGTTIN as i32, Signal::SIGTTOU as i32].contains(&signal);
        // SIGSTOP is not job control: the command does not stop together with the child.
        if signal != Signal::SIGTSTP as i32 && !wants_terminal {
            return;
        }
        let may_have_it = |terminal: &Terminal| terminal.is_ours() || terminal.belongs_to(group);
        if wants_terminal && self.terminal.as_ref().is_some_and(may_have_it) {
            self.give_the_terminal(group);
        } else {
            self.take_the_terminal();
            Signals::stop_like_anybody();
            // Back in the foreground, or continued in the background.
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

    /// The guard was killed, or did not do in time what it had to. Ends the group.
    async fn end_without_a_guard(&mut self) {
        self.guard.kill();
        let _ = processes::waitpid(Some(self.guard.pid), WaitOptions::empty());
        if let Some(group) = self.group {
            if !self.backstop.stopping {
                let _ = kill_process_group(group, processes::Signal::TERM);
                let _ = kill_process_group(group, processes::Signal::CONT);
            }
            self.backstop.due = self.backstop.due.min(Moment::now());
            until_gone(group, self.backstop.due.plus(self.backstop.grace)).await;
            let _ = kill_process_group(group, processes::Signal::KILL);
            until_gone(group, Moment::now().plus(BURIAL)).await;
        }
        // A launcher that has lost its guard ends by itself, and so does the guard of a nested command.
        let by = Moment::now().plus(BURIAL);
        while guard::has_adopted_one_of_ours() && Moment::now() < by {
            reap();
            sleep(LOOK_AGAIN).await;
        }
    }
}

/// Waits until the group is gone, but no longer than until that moment.
async fn until_gone(group: Pid, by: Moment) {
    reap();
    while !guard::is_gone(group) && Moment::now() < by {
        sleep(LOOK_AGAIN).await;
        reap();
    }
}

/// Reaps what has ended: the guard, whose end the command learns from its socket, or an orphan that it has adopted.
fn reap() {
    while let Ok(Some(_)) = processes::wait(WaitOptions::NOHANG) {}
}

async fn lost_once(
    lost: &mut (impl Future<Output = LossReason> + Unpin),
    done: bool,
) -> LossReason {
    if done { pending().await } else { lost.await }
}
