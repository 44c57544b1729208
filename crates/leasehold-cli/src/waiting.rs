//! What is said while we wait: a line on a terminal, nothing elsewhere, unless we were told to be verbose.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::{AcquisitionId, Locks, Member, Semaphore};
use tokio::time::sleep;

use crate::failure::complain;
use crate::output::{ago, one_line, ordinal};

/// A wait that is over at once is not worth a line.
const PATIENCE: Duration = Duration::from_millis(150);
/// How often the elapsed time is drawn, and how often the store is asked.
const DRAW: Duration = Duration::from_millis(200);
const ASK: Duration = Duration::from_secs(1);

/// The line. It is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Line {
    what: String,
    since: Instant,
    bar: Option<ProgressBar>,
    verbose: bool,
    said: String,
}

impl Line {
    pub(crate) fn new(what: &str, verbose: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { what: one_line(what), since: Instant::now(), bar, verbose, said: String::new() }
    }

    /// Says who is before us in the queue, again and again. Never ends by itself.
    pub(crate) async fn show_queue(&mut self, semaphore: &Semaphore, id: AcquisitionId) {
        self.show(async || {
            let position = semaphore.position(&id).await.ok().flatten()?;
            let stats = semaphore.stats().await.ok()?;
            let place = format!("{} in the queue", ordinal(position + 1));
            let ahead = match stats.holders() {
                [] => String::new(),
                [only] => format!("; held by {}", describe(only)),
                [first, others @ ..] => {
                    format!("; held by {} and {} more", describe(first), others.len())
                }
            };
            Some(place + &ahead)
        })
        .await;
    }

    /// Says for how long somebody else has had the lock.
    pub(crate) async fn show_lock(&mut self, locks: &Locks, key: &str) {
        self.show(async || {
            let info = locks.lookup(key).await.ok().flatten()?;
            let age = info.acquired_at.elapsed().unwrap_or_default();
            Some(format!("held for {}, with fence {}", ago(age), info.fence))
        })
        .await;
    }

    /// `ask` answers nothing if the store does not: then what was known before stays.
    async fn show(&mut self, ask: impl AsyncFn() -> Option<String>) {
        if self.bar.is_none() && !self.verbose {
            return std::future::pending().await;
        }
        sleep(PATIENCE).await;
        let mut known = String::new();
        loop {
            if let Some(answer) = ask().await {
                known = one_line(&answer);
            }
            let asked = Instant::now();
            while asked.elapsed() < ASK {
                self.draw(&known);
                sleep(DRAW).await;
            }
        }
    }

    fn draw(&mut self, known: &str) {
        let elapsed = ago(self.since.elapsed());
        if let Some(bar) = &self.bar {
            bar.set_message(format!("waiting for {} ({elapsed}): {known}", self.what));
            bar.tick();
        } else if self.said.split(';').next() != known.split(';').next() {
            // Without a terminal, only when the place has changed.
            complain(&format!("waiting for {} ({elapsed}): {known}", self.what));
            known.clone_into(&mut self.said);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Host, process, label, and for how long.
fn describe(member: &Member) -> String {
    let host = member.host().unwrap_or(member.id());
    let pid = member.pid().map(|pid| format!(" pid {pid}")).unwrap_or_default();
    let label = member.label().map(|label| format!(" {label:?}")).unwrap_or_default();
    let age = member.age().map(|age| format!(" for {}", ago(age))).unwrap_or_default();
    format!("{host}{pid}{label}{age}")
}
