//! How a child runs under a lease, which is what `run` and `lock` have in common.
//!
//! This file has the steps: fork the guard, bound the wait, run the child under the lease, and release it.
//!
//! - `guard.rs`, `guard/`: the process that starts the child, and stops it before its lease can pass on
//! - `job.rs`: the job and its lease, and how long a lease it needs
//! - `supervise.rs`: the command's side while the child runs: orders to the guard, signals, the terminal
//! - `waiting.rs`: messages while the command waits

use std::ffi::OsString;
use std::time::{Duration, Instant};

use leasehold::{Client, Error, Guard as _};
use nix::sys::signal::Signal;

use crate::advice::limit_reached;
use crate::args::WaitLimit;
use crate::failure::{self, CANNOT_RUN, Failure, by_signal, log_line};
use crate::output::ago;
use crate::program;
use crate::signals::{Blocked, Signals};
use crate::store::Store;

pub(crate) mod guard;
pub(crate) mod job;
mod supervise;
pub(crate) mod waiting;

use guard::GuardJob;
use guard::cleanup::Cleanup;
use guard::launcher::outer_ids;
use guard::spare::{ForkedGuard, Spare};
use job::{Job, JobLease, Released};
use supervise::ChildEnd;
use waiting::FirstOutage;

/// How long the release may take. After that the command exits without it, and the lease expires.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);
/// The same, if nothing was acquired.
const END_WITHIN: Duration = Duration::from_millis(500);
/// A TTL counts from the start of the child, which is a little later than the grant.
pub(crate) const HEAD_START: Duration = Duration::from_millis(200);
/// How long the store may take to answer with `--no-wait`.
const NO_WAIT: Duration = Duration::from_secs(5);

/// How long the first connection is tried again if the wait has no time limit: enough for a server that restarts, and
/// short enough to notice a wrong address.
const FIRST_CONNECTION: Duration = Duration::from_secs(5);
/// The pause between two attempts to open the store.
const OPEN_AGAIN: Duration = Duration::from_millis(100);

/// The time limit for acquiring a permit or a lock. It counts from the start of the command, so that it bounds opening
/// the store, querying and waiting together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    begun: Instant,
    wait_limit: WaitLimit,
}

impl Limit {
    pub(crate) fn new(wait_limit: WaitLimit) -> Self {
        Self { begun: Instant::now(), wait_limit }
    }

    /// Returns the remaining time.
    pub(crate) fn wait_limit(self) -> WaitLimit {
        match self.wait_limit {
            // Zero would be refused, and the store must be asked at least once.
            WaitLimit::Within(limit) => {
                let left = limit.saturating_sub(self.begun.elapsed());
                WaitLimit::Within(left.max(Duration::from_millis(1)))
            }
            wait_limit => wait_limit,
        }
    }

    /// Returns the message of the error with the limit that the user gave, not with the remaining time.
    pub(crate) fn named_in(self, mut error: Error) -> String {
        if let (Error::TimedOut { limit, .. }, WaitLimit::Within(given_limit)) =
            (&mut error, self.wait_limit)
        {
            *limit = given_limit;
        }
        error.to_string()
    }

    /// Opens the store. If it cannot be reached, this tries again until the time limit, or for [`FIRST_CONNECTION`]
    /// if there is none. With `--no-wait` there is one attempt.
    pub(crate) async fn open(
        self,
        store: &Store,
        signals: &mut Signals,
    ) -> Result<Client, Failure> {
        let retry_for = match self.wait_limit {
            WaitLimit::None => Duration::ZERO,
            WaitLimit::Within(limit) => limit,
            WaitLimit::Endless => FIRST_CONNECTION,
        };
        let mut outage = FirstOutage::new(store.place());
        let opened = async {
            loop {
                let error = match store.open().await {
                    Err(error @ Error::Unavailable { .. }) => error,
                    opened => return Ok(opened?),
                };
                // A file that cannot be created will not appear, and this process keeps its limits. Another attempt must
                // have time to be answered.
                let helps = match &error {
                    Error::Unavailable { timed_out: true, .. } => true,
                    error => {
                        !store.is_on_this_host() && limit_reached(&failure::text(error)).is_none()
                    }
                };
                if !helps || self.begun.elapsed() + 2 * OPEN_AGAIN >= retry_for {
                    return Err(Failure::from(error));
                }
                outage.failed(&error);
                tokio::time::sleep(OPEN_AGAIN).await;
            }
        };
        let client = self.bound(store, signals, opened).await?;
        outage.end();
        Ok(client)
    }

    /// Returns the result of a call to the store, unless the time limit passes or a signal arrives first.
    pub(crate) async fn bound<T>(
        self,
        store: &Store,
        signals: &mut Signals,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let limit = match self.wait_limit {
            WaitLimit::None => NO_WAIT,
            WaitLimit::Within(limit) => limit,
            WaitLimit::Endless => return unless_signalled(signals, call).await,
        };
        let left = limit.saturating_sub(self.begun.elapsed());
        let call = async {
            let answered = tokio::time::timeout(left, call).await;
            answered.unwrap_or_else(|_| Err(store.silent_for(limit)))
        };
        unless_signalled(signals, call).await
    }
}

/// The result of [`begin`], which returns in two processes.
pub(crate) enum CommandOrGuard {
    /// In the command.
    Command(Spare, Signals),
    /// In its guard, at its end: the exit code.
    Guard(u8),
}

/// Starts the guard and the handling of signals. Call it first, because there must be no other thread yet.
pub(crate) fn begin(
    command: &[OsString],
    grace: Duration,
    cleanup: Cleanup<'_>,
) -> Result<CommandOrGuard, Failure> {
    program::check(command)?;
    let failed = |what, error| Failure::system(CANNOT_RUN, what, error);
    let no_signals = |error| failed("signal handlers could not be installed", error);
    let blocked = Blocked::new().map_err(no_signals)?;
    let nested = std::env::var_os("LEASEHOLD_ID").is_some();
    match Spare::start(&GuardJob { command, grace, nested, cleanup }) {
        Ok(ForkedGuard::Command(spare)) => {
            Ok(CommandOrGuard::Command(spare, blocked.listen().map_err(no_signals)?))
        }
        Ok(ForkedGuard::Guard(code)) => Ok(CommandOrGuard::Guard(code)),
        Err(error) => Err(failed("the leasehold-guard process could not be started", error)),
    }
}

/// Runs a future that a signal ends at once, because there is no place in a queue yet.
pub(crate) async fn unless_signalled<T>(
    signals: &mut Signals,
    future: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        done = future => done,
        signal = signals.next_to_end() => Err(signalled(signal)),
    }
}

pub(crate) fn signalled(signal: Signal) -> Failure {
    Failure::silent(by_signal(signal as i32))
}

/// The failure if another process holds it. With `-E 0` that is a success, and the reason is printed only with `-v`.
pub(crate) fn taken(code: u8, verbose: bool, what: &str) -> Failure {
    if code == 0 && !verbose { Failure::silent(0) } else { Failure::new(code, what) }
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct JobEnd {
    pub(crate) code: u8,
    /// Whether the store has answered the release.
    is_released: bool,
}

/// Waits until the store has applied all releases and cancellations, if it answers in time.
pub(crate) async fn close_client(
    client: &Client,
    ended: &Result<JobEnd, Failure>,
    signals: &mut Signals,
) {
    // After a time-out or an interruption, the command does not wait long for this either. If the release was not
    // answered, neither are these requests.
    let answered = ended.as_ref().is_ok_and(|end| end.is_released);
    let limit = if answered { RELEASE_WITHIN } else { END_WITHIN };
    tokio::select! {
        _ = client.close() => {}
        () = tokio::time::sleep(limit) => {}
        _ = signals.next_to_end() => {}
    }
}

/// Refuses a command inside a command that holds the same name: the inner one would wait for the outer one, which waits
/// for its child. `holders` are the ids that hold it now, so that a process that has outlived its lease is not refused.
pub(crate) fn check_nesting(
    what: &str,
    holders: impl IntoIterator<Item = String>,
) -> Result<(), Failure> {
    let outer = outer_ids();
    if holders.into_iter().any(|holder| outer.contains(&holder)) {
        let holder = "the leasehold command that started this one";
        let problem = format!("{what} is held by {holder}, and stays held until this one ends");
        return Err(Failure::usage(format!("{problem}: use another name")));
    }
    Ok(())
}

/// Whether this command runs inside another one.
pub(crate) fn is_nested() -> bool {
    !outer_ids().is_empty()
}

/// Runs the job, and releases its lease. `waited` is how long it took to acquire it.
pub(crate) async fn under(
    client: &Client,
    job: &Job,
    held: impl JobLease,
    waited: Duration,
    spare: Spare,
    signals: &mut Signals,
) -> Result<JobEnd, Failure> {
    let acquired = Instant::now();
    if job.verbose {
        let (what, waited) = (&job.what, ago(waited));
        let fence = held.guard().fence().map(|fence| format!(", with fence {fence}"));
        log_line(&format!("{what} acquired after {waited}{}", fence.unwrap_or_default()));
    }
    let mut ended = supervise::run(job, &held, spare, client.lifeline(), signals).await;
    let (started, lost) = (ended.started, matches!(ended.end, Ok(ChildEnd::Lost(_))));
    let mut interrupted = None;
    if started && !lost && ended.end.is_ok() {
        interrupted = hold_at_least(job, &held, acquired, signals).await;
    }
    let stays = held.outlives_job(started);
    let released = tokio::select! {
        released = held.release(started) => released.map_err(|error| error.to_string()),
        () = tokio::time::sleep(RELEASE_WITHIN) => Err("no answer in time".to_owned()),
        _ = signals.next_to_end() => Err("interrupted".to_owned()),
    };
    let is_released = released.is_ok();
    match released {
        Ok(released) if job.verbose => log_line(&match released {
            Released::Yes => format!("{} released", job.what),
            Released::Expired => format!("{} had expired already", job.what),
            Released::Kept(rest) => format!("{} stays locked for {}", job.what, ago(rest)),
        }),
        Err(error) if stays => {
            let problem = format!("the {} may not stay locked for --once-per: {error}", job.what);
            log_line(&format!("{problem}; it expires by itself"));
        }
        Err(error) if !lost => {
            log_line(&format!("the {} was not released: {error}; it expires by itself", job.what));
        }
        _ => {}
    }
    if let Some(signal) = interrupted {
        return Err(signalled(signal));
    }
    // After the release, so that the next process does not wait for this.
    ended.reap_the_guard().await;
    Ok(JobEnd { code: ended.end?.code(job), is_released })
}

/// Holds the lease for as long as `--at-least` says, unless it is lost. Returns the signal that ended this early.
async fn hold_at_least(
    job: &Job,
    held: &impl JobLease,
    acquired: Instant,
    signals: &mut Signals,
) -> Option<Signal> {
    let left = job.at_least?.checked_sub(acquired.elapsed())?;
    if job.verbose {
        log_line(&format!("the child has ended; the {} is held for {} more", job.what, ago(left)));
    }
    tokio::select! {
        () = tokio::time::sleep(left) => None,
        reason = held.guard().lost() => {
            log_line(&format!("the {} was lost before --at-least had passed: {reason}", job.what));
            None
        }
        signal = signals.next_to_end() => Some(signal),
    }
}
