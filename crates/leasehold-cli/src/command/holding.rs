//! What `run` and `lock` have in common: whatever it is that is held, a child runs under it, and signals may come.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use nix::sys::signal::Signal;

use crate::args::Patience;
use crate::failure::{Failure, UNAVAILABLE, by_signal, complain};
use crate::guard::Charge;
use crate::guard::spare::{Spare, Started};
use crate::job::{Held, Job};
use crate::signals::{Blocked, Signals};
use crate::store::Store;
use crate::supervise::{self, End, Ended};

/// How long the store may take to be told of the end, before we go without: the lease ends by itself.
const FAREWELL: Duration = Duration::from_secs(5);
/// The same, if nothing was acquired.
const BRIEF_FAREWELL: Duration = Duration::from_millis(500);
/// How long the store may take to answer if nothing is waited for.
const NO_WAIT: Duration = Duration::from_secs(5);

/// Until when a permit or a lock has to be acquired. Counts from the start of the command, so that it bounds all of it:
/// opening the store, asking, waiting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    begun: Instant,
    patience: Patience,
}

impl Limit {
    pub(super) fn new(patience: Patience) -> Self {
        Self { begun: Instant::now(), patience }
    }

    /// How long to wait from now on.
    pub(super) fn patience(self) -> Patience {
        match self.patience {
            // Zero would be refused; the question is asked at least.
            Patience::Within(limit) => {
                let left = limit.saturating_sub(self.begun.elapsed());
                Patience::Within(left.max(Duration::from_millis(1)))
            }
            patience => patience,
        }
    }

    /// What the error says, with the limit that was asked for and not with what was left of it.
    pub(super) fn named_in(self, mut error: Error) -> String {
        if let (Error::TimedOut { limit, .. }, Patience::Within(asked)) =
            (&mut error, self.patience)
        {
            *limit = asked;
        }
        error.to_string()
    }

    /// The result of a call to the store, unless the time is over or a signal arrives first.
    pub(super) async fn bound<T>(
        self,
        store: &Store,
        signals: &mut Signals,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let limit = match self.patience {
            Patience::None => NO_WAIT,
            Patience::Within(limit) => limit,
            Patience::Endless => return unless_signalled(signals, call).await,
        };
        let left = limit.saturating_sub(self.begun.elapsed());
        let call = async {
            tokio::time::timeout(left, call).await.unwrap_or_else(|_| {
                let limit = humantime::format_duration(limit);
                let what = format!("{} did not answer within {limit}", store.place());
                Err(Failure::new(UNAVAILABLE, what))
            })
        };
        unless_signalled(signals, call).await
    }
}

/// What [`begin`] has become.
pub(super) enum Begun {
    /// In the command.
    Command(Spare, Signals),
    /// In its guard, at its end: the exit code.
    Guard(u8),
}

/// Starts the guard, and listens to signals. Before anything else: no thread may be there yet.
pub(super) fn begin(command: &[OsString], grace: Duration) -> Result<Begun, Failure> {
    let deaf = |error| Failure::internal("signals cannot be heard", error);
    let blocked = Blocked::new().map_err(deaf)?;
    let nested = std::env::var_os("LEASEHOLD_ID").is_some();
    match Spare::start(&Charge { command, grace, nested }) {
        Ok(Started::Command(spare)) => Ok(Begun::Command(spare, blocked.listen().map_err(deaf)?)),
        Ok(Started::Guard(code)) => Ok(Begun::Guard(code)),
        Err(error) => Err(Failure::internal("the guard of the child could not be started", error)),
    }
}

/// What is done before there is a place in a queue: a signal ends it at once.
pub(super) async fn unless_signalled<T>(
    signals: &mut Signals,
    future: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        done = future => done,
        signal = signals.next_to_end() => Err(signalled(signal)),
    }
}

pub(super) fn signalled(signal: Signal) -> Failure {
    Failure::silent(by_signal(signal as i32))
}

/// Another process has it. With `-E 0` that is a success, and no message is printed.
pub(super) fn taken(code: u8, what: &str) -> Failure {
    if code == 0 { Failure::silent(0) } else { Failure::new(code, what) }
}

/// Waits until the store knows of everything that was released and cancelled, if it answers in time.
pub(super) async fn farewell(client: &Client, ended: &Result<u8, Failure>, signals: &mut Signals) {
    // A command that was not to wait any longer, or was interrupted, does not wait for this either.
    let limit = if ended.is_ok() { FAREWELL } else { BRIEF_FAREWELL };
    tokio::select! {
        _ = client.close() => {}
        () = tokio::time::sleep(limit) => {}
        _ = signals.next_to_end() => {}
    }
}

/// Runs the job, and gives back what it ran under.
pub(super) async fn under(
    client: &Client,
    job: &Job,
    held: impl Held,
    spare: Spare,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let mut ended = supervise::run(job, &held, spare, client.lifeline(), signals).await;
    let given_back = tokio::select! {
        given_back = held.release() => given_back.map_err(|error| error.to_string()),
        () = tokio::time::sleep(FAREWELL) => Err("no answer in time".to_owned()),
        _ = signals.next_to_end() => Err("interrupted".to_owned()),
    };
    match given_back {
        Ok(true) if job.verbose => complain(&format!("{} given back", job.what)),
        Ok(false) if job.verbose => complain(&format!("{} was gone already", job.what)),
        Err(error) if !matches!(ended, Ok(Ended { end: End::Lost(_), .. })) => {
            complain(&format!("the {} was not given back: {error}; it ends by itself", job.what));
        }
        _ => {}
    }
    // After that: the next one does not have to wait for it.
    if let Ok(ended) = &mut ended {
        ended.reap_the_guard().await;
    }
    Ok(ended?.end.code(job))
}
