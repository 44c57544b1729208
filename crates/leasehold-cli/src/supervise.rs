//! Runs a job under a lease: starts its guard, tells it each new deadline, forwards signals, hands the terminal to and
//! fro, and answers how it ended.

use std::future::pending;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as Socket;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::LossReason;
use nix::sys::signal::Signal;
use rustix::io::Errno;
use rustix::process::{self as processes, Pid, WaitOptions, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::sleep;

use crate::args::GUARD;
use crate::clock::{self, Bridge, Moment};
use crate::failure::{self, Failure, complain};
use crate::guard::wire::{LENGTH, Message, News, Order};
use crate::guard::{self, BURIAL, LOOK_AGAIN};
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

/// Runs the job, and answers how it ended. When it returns, the child and its group are gone.
///
/// What the client counts as alive by, if its store knows that by a file, is inherited by the guard and the child: then what
/// it holds cannot pass on before all of them are gone.
pub(crate) async fn run(
    job: &Job,
    held: &impl Held,
    lifeline: Option<BorrowedFd<'_>>,
    signals: &mut Signals,
) -> Result<End, Failure> {
    let terminal = Terminal::open();
    let failed = |error| Failure::internal("the guard of the child could not be started", error);
    let deadline = Deadline::new(job);
    let first = deadline.of(held);
    let foreground = terminal.as_ref().is_some_and(Terminal::is_for_the_child);
    let inherited =
        lifeline.map(rustix::io::dup).transpose().map_err(|error| failed(error.into()))?;
    let guard = Guard::start(job, held, first, foreground).map_err(failed)?;
    drop(inherited);
    let mut watch = Watch { guard, terminal, group: None, lost: None };
    let end = watch.until_it_ends(&deadline, first, held, signals).await;
    watch.take_the_terminal();
    match end {
        Some(end) => Ok(end),
        None => Err(watch.end_without_a_guard(job.grace).await),
    }
}

/// Until when the child may run: the grace before the lease ends, and no longer than its TTL.
struct Deadline {
    grace: Duration,
    ttl_ends: Moment,
}

impl Deadline {
    fn new(job: &Job) -> Self {
        let ttl_ends = job.ttl.map_or(Moment::NEVER, |ttl| Moment::now().plus(ttl));
        Self { grace: job.grace, ttl_ends }
    }

    fn of(&self, held: &impl Held) -> Moment {
        let bridge = Bridge::now();
        let valid_until = held.valid_until().map(|instant| bridge.moment(instant));
        valid_until.map_or(Moment::NEVER, |until| until.minus(self.grace)).min(self.ttl_ends)
    }

    /// Why it has passed.
    fn reason(&self) -> LossReason {
        let ttl_ended = Moment::now() >= self.ttl_ends;
        if ttl_ended { LossReason::TtlEnded } else { LossReason::NotRenewed }
    }
}

/// The guard, as we see it.
struct Guard {
    pid: Pid,
    socket: UnixStream,
}

impl Guard {
    fn start(job: &Job, held: &impl Held, deadline: Moment, foreground: bool) -> io::Result<Self> {
        let (ours, theirs) = Socket::pair()?;
        let child = Command::new(own_binary()?)
            .arg0(GUARD)
            .args(["--grace", &clock::micros(job.grace).to_string()])
            .args(foreground.then_some("--foreground"))
            .arg("--")
            .args(&job.command)
            .env("LEASEHOLD_NAME", &job.name)
            .env("LEASEHOLD_ID", held.id())
            .env("LEASEHOLD_FENCE", held.fence())
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()?;
        guard::send(&ours, Order::Until(deadline), io::stdin().as_fd())?;
        ours.set_nonblocking(true)?;
        Ok(Self { pid: Pid::from_child(&child), socket: UnixStream::from_std(ours)? })
    }

    /// A guard that has gone will be noticed when it is listened to.
    async fn order(&mut self, order: Order) {
        let _ = self.socket.write_all(&order.encode()).await;
    }
}

/// The very file that runs now, whatever was installed in its place since.
fn own_binary() -> io::Result<std::path::PathBuf> {
    let own = Path::new("/proc/self/exe");
    if own.exists() { Ok(own.to_owned()) } else { std::env::current_exe() }
}

struct Watch {
    guard: Guard,
    terminal: Option<Terminal>,
    /// The child's, once it runs.
    group: Option<Pid>,
    /// Once it is clear that it is.
    lost: Option<LossReason>,
}

impl Watch {
    /// How the child ended; nothing if its guard ended first.
    async fn until_it_ends(
        &mut self,
        deadline: &Deadline,
        first: Moment,
        held: &impl Held,
        signals: &mut Signals,
    ) -> Option<End> {
        let (mut lost, mut told) = (pin!(held.lost()), first);
        let mut inbox = Inbox::default();
        loop {
            let left = told.saturating_since(Moment::now());
            tokio::select! {
                news = inbox.next(&mut self.guard.socket) => match news? {
                    News::Started(pid) => self.group = Pid::from_raw(pid),
                    News::Stopped(signal) => self.child_stopped(signal).await,
                    News::Overdue => {
                        self.lost.get_or_insert(deadline.reason());
                    }
                    News::NotStarted(errno) => return Some(End::NotStarted(errno)),
                    News::Exited(code) => {
                        let end = End::Exited(u8::try_from(code).unwrap_or(u8::MAX));
                        return Some(self.ended(end));
                    }
                    News::Killed(signal) => return Some(self.ended(End::Killed(signal))),
                },
                signal = signals.next() => match signal {
                    Signal::SIGCHLD => reap(),
                    signal => self.guard.order(Order::Signal(signal as i32)).await,
                },
                reason = lost_once(&mut lost, self.lost.is_some()) => {
                    self.lost = Some(reason);
                    self.guard.order(Order::Stop).await;
                }
                () = sleep((left / 4).clamp(OFTEN, SELDOM)), if self.lost.is_none() => {
                    let extended = deadline.of(held);
                    if extended > told {
                        told = extended;
                        self.guard.order(Order::Until(told)).await;
                    }
                }
            }
        }
    }

    fn ended(&self, end: End) -> End {
        self.lost.map_or(end, End::Lost)
    }

    /// Ctrl-Z, or the child wants a terminal that it does not have.
    async fn child_stopped(&mut self, signal: i32) {
        let Some(group) = self.group else { return };
        let wants_terminal = [Signal::SIGTTIN as i32, Signal::SIGTTOU as i32].contains(&signal);
        // Whoever stops a process with SIGSTOP wants to continue it himself.
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
        self.guard.order(Order::Signal(Signal::SIGCONT as i32)).await;
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

    /// Somebody has killed the guard. What it had to do is ours to do.
    async fn end_without_a_guard(&self, grace: Duration) -> Failure {
        let mut what = "the guard of the child ended before it";
        if let Some(group) = self.group {
            let gone = || processes::test_kill_process_group(group) == Err(Errno::SRCH);
            let _ = kill_process_group(group, processes::Signal::TERM);
            let _ = kill_process_group(group, processes::Signal::CONT);
            let kill_at = Moment::now().plus(grace);
            while !gone() && Moment::now() < kill_at {
                sleep(LOOK_AGAIN).await;
            }
            let _ = kill_process_group(group, processes::Signal::KILL);
            // As the first process of a container we have to bury them ourselves.
            let by = Moment::now().plus(BURIAL);
            while !gone() && Moment::now() < by {
                reap();
                sleep(LOOK_AGAIN).await;
            }
            what = "the guard of the child was killed; the child was stopped";
        }
        let _ = processes::waitpid(Some(self.guard.pid), WaitOptions::NOHANG);
        Failure::new(failure::INTERNAL, what)
    }
}

/// Our only child is the guard, whose end we learn from its socket. But as the first process of a container we inherit
/// everybody's children.
fn reap() {
    while let Ok(Some(_)) = processes::wait(WaitOptions::NOHANG) {}
}

async fn lost_once(
    lost: &mut (impl Future<Output = LossReason> + Unpin),
    done: bool,
) -> LossReason {
    if done { pending().await } else { lost.await }
}

/// What has come of the next message. Whoever stops listening in the middle of one loses nothing.
#[derive(Default)]
struct Inbox {
    bytes: [u8; LENGTH],
    read: usize,
}

impl Inbox {
    /// Nothing when the guard has gone.
    async fn next(&mut self, socket: &mut UnixStream) -> Option<News> {
        while self.read < LENGTH {
            match socket.read(&mut self.bytes[self.read..]).await {
                Ok(0) | Err(_) => return None,
                Ok(read) => self.read += read,
            }
        }
        self.read = 0;
        News::decode(self.bytes).ok()
    }
}
