//! What is said while we wait: a line on a terminal, nothing elsewhere, unless we were told to be verbose. An outage of the
//! store is always reported, in one line when it is noticed and in one when it is over.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::{AcquisitionId, Client, Error, Locks, Member, Outage, Semaphore, WaitsFor};
use tokio::time::sleep;

use crate::command::limit::paused;
use crate::failure::complain;
use crate::output::{ago, one_line, ordinal};

/// A wait that is over at once is not worth a line.
const PATIENCE: Duration = Duration::from_millis(150);
/// How often the elapsed time is drawn, and how often the store is asked.
const DRAW: Duration = Duration::from_millis(200);
const ASK: Duration = Duration::from_secs(1);
/// A connection that is replaced sooner than this is not worth a line either.
const SHORTEST_OUTAGE: Duration = Duration::from_millis(500);

/// What is said during one wait. The line on the terminal is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    line: Line,
    outages: Outages,
}

impl Waiting {
    /// `place` is the store, as people may see it.
    pub(crate) fn new(what: &str, client: &Client, place: &str, verbose: bool) -> Self {
        let line = Line::new(what, verbose);
        let (client, place, bar) = (client.clone(), place.to_owned(), line.bar.clone());
        Self { line, outages: Outages { client, place, bar, since: None } }
    }

    /// Says who is before us in the queue, again and again. Never ends by itself.
    pub(crate) async fn show_queue(&mut self, semaphore: &Semaphore, id: AcquisitionId) {
        tokio::join!(self.outages.watch(), self.line.show_queue(semaphore, id));
    }

    /// Says who has the lock, and for how long. Never ends by itself.
    pub(crate) async fn show_lock(&mut self, locks: &Locks, key: &str) {
        tokio::join!(self.outages.watch(), self.line.show_lock(locks, key));
    }

    /// The wait has ended with a grant, so that the store was reached.
    pub(crate) fn granted(&mut self) {
        self.outages.end();
    }
}

/// The outages of the store during one wait.
#[derive(Debug)]
struct Outages {
    client: Client,
    place: String,
    bar: Option<ProgressBar>,
    /// When the outage was noticed that was reported, and not yet its end.
    since: Option<Instant>,
}

impl Outages {
    async fn watch(&mut self) {
        // A store on this host is always there to be asked.
        if self.client.lifeline().is_some() {
            return std::future::pending().await;
        }
        loop {
            match self.client.outage() {
                Some(Outage { since, error, .. }) => self.begin(since, &error),
                None => self.end(),
            }
            sleep(ASK).await;
        }
    }

    fn begin(&mut self, since: Instant, error: &Error) {
        // A store that denies access ends the wait: that is no outage.
        let may_pass = matches!(error, Error::Unavailable { .. });
        if self.since.is_none() && may_pass && since.elapsed() >= SHORTEST_OUTAGE {
            self.since = Some(since);
            self.say(&format!("cannot be reached: {}", cause(error, &self.place)));
        }
    }

    fn end(&mut self) {
        if let Some(since) = self.since.take() {
            self.say(&format!("can be reached again, after {}", ago(since.elapsed())));
        }
    }

    fn say(&self, what: &str) {
        let say = || complain(&format!("waiting: {} {what}", self.place));
        match &self.bar {
            Some(bar) => bar.suspend(say),
            None => say(),
        }
    }
}

/// Why the store cannot be reached, without its address.
fn cause(error: &Error, place: &str) -> String {
    match error {
        Error::Unavailable { timed_out: true, .. } => "no answer in time".to_owned(),
        Error::Unavailable { source: Some(source), .. } => source.to_string(),
        Error::Unavailable { what, .. } => {
            let (_, why) = what.split_once(&format!("{place}: ")).unwrap_or(("", what));
            why.to_owned()
        }
        error => error.to_string(),
    }
}

/// The line on a terminal, or what is said instead.
#[derive(Debug)]
struct Line {
    what: String,
    since: Instant,
    bar: Option<ProgressBar>,
    verbose: bool,
    said: String,
}

impl Line {
    fn new(what: &str, verbose: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { what: one_line(what), since: Instant::now(), bar, verbose, said: String::new() }
    }

    async fn show_queue(&mut self, semaphore: &Semaphore, id: AcquisitionId) {
        self.show(async || {
            let position = semaphore.position(&id).await.ok().flatten()?;
            let stats = semaphore.stats().await.ok()?;
            let place = format!("{} in the queue", ordinal(position + 1));
            if let Some(paused) = paused(&stats) {
                return Some(format!("{place}; {paused}"));
            }
            match stats.waits_for() {
                Some(WaitsFor::Rate) => {
                    let next = stats.next_token().map(ago).unwrap_or_default();
                    return Some(format!("{place}; the rate allows the next start in {next}"));
                }
                Some(WaitsFor::Capacity) => {
                    let limit = stats.capacity();
                    return Some(format!(
                        "{place}; the first needs more than the limit of {limit}"
                    ));
                }
                _ => {}
            }
            let ahead = match stats.holders() {
                [] => String::new(),
                [only] => format!("; held by {}", describe_member(only)),
                [first, others @ ..] => {
                    format!("; held by {} and {} more", describe_member(first), others.len())
                }
            };
            Some(place + &ahead)
        })
        .await;
    }

    async fn show_lock(&mut self, locks: &Locks, key: &str) {
        self.show(async || {
            let info = locks.lookup(key).await.ok().flatten()?;
            let age = info.acquired_at.elapsed().ok();
            let holder = describe(info.host.as_deref(), info.pid, info.label.as_deref(), age);
            // Another program does not say who it is.
            let by = if info.host.is_some() || info.pid.is_some() { " by " } else { "" };
            Some(format!("locked with fence {}; held{by}{holder}", info.fence))
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
        } else if gist(&self.said) != gist(known) {
            // Without a terminal, only when the place has changed, or a pause begins or ends.
            complain(&format!("waiting for {} ({elapsed}): {known}", self.what));
            known.clone_into(&mut self.said);
        }
    }
}

/// The place, and whether it is paused: the rest changes all the time.
fn gist(known: &str) -> (Option<&str>, bool) {
    (known.split(';').next(), known.contains("; paused for "))
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn describe_member(member: &Member) -> String {
    let host = member.host().unwrap_or(member.id());
    describe(Some(host), member.pid(), member.label(), member.age())
}

/// Host, process, label, and for how long, as far as they are known.
fn describe(
    host: Option<&str>,
    pid: Option<u32>,
    label: Option<&str>,
    age: Option<Duration>,
) -> String {
    let host = host.unwrap_or_default();
    let pid = pid.map(|pid| format!(" pid {pid}")).unwrap_or_default();
    let label = label.map(|label| format!(" {label:?}")).unwrap_or_default();
    let age = age.map(|age| format!(" for {}", ago(age))).unwrap_or_default();
    format!("{host}{pid}{label}{age}")
}
