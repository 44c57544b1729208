//! Messages while the command waits. On a terminal, one line is redrawn. Elsewhere one line is printed once, or with
//! `-v` whenever the place changes. An outage of the store is always reported, in one line at its start and one at its
//! end.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::{
    AcquisitionId, Client, Error, LockInfo, Locks, Outage, Semaphore, SemaphoreMember,
    SemaphoreStats, WaitsFor,
};
use tokio::time::sleep;
use unicode_width::UnicodeWidthStr;

use crate::command::limit::{next_start, paused};
use crate::failure::log_line;
use crate::output::{ago, one_line, ordinal};

/// A shorter wait is not worth a line on a terminal, nor in a log.
const TIME_LIMIT: Duration = Duration::from_millis(150);
const LOG_TIME_LIMIT: Duration = Duration::from_secs(1);
/// How often the elapsed time is drawn, and how often the store is queried.
const DRAW: Duration = Duration::from_millis(200);
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// A shorter outage is not reported.
const SHORTEST_OUTAGE: Duration = Duration::from_millis(500);

/// The messages of one wait. Dropping it clears the line on the terminal.
#[derive(Debug)]
pub(crate) struct Waiting {
    line: StatusLine,
    outages: Outages,
}

impl Waiting {
    /// `place` is the URL of the store without secrets.
    pub(crate) fn new(what: &str, client: &Client, place: &str, verbose: bool) -> Self {
        let line = StatusLine::new(what, verbose);
        let (client, place, bar) = (client.clone(), place.to_owned(), line.bar.clone());
        Self { line, outages: Outages { client, place, bar, since: None } }
    }

    /// Shows the place in the queue and the holders. Never returns.
    pub(crate) async fn show_queue(&mut self, semaphore: &Semaphore, id: AcquisitionId) {
        tokio::join!(self.outages.watch(), self.line.show_queue(semaphore, id));
    }

    /// Shows the holder of the lock. Never returns.
    pub(crate) async fn show_lock(&mut self, locks: &Locks, key: &str) {
        tokio::join!(self.outages.watch(), self.line.show_lock(locks, key));
    }

    /// Call it when the wait has ended with a grant, which means that an outage has ended.
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
    /// The start of an outage that was reported and has not ended.
    since: Option<Instant>,
}

impl Outages {
    async fn watch(&mut self) {
        loop {
            match self.client.outage() {
                Some(Outage { since, error, .. }) => self.begin(since, &error),
                None => self.end(),
            }
            sleep(READ_INTERVAL).await;
        }
    }

    fn begin(&mut self, since: Instant, error: &Error) {
        // If the store denies access, the wait ends with an error, so this is not an outage.
        let is_transient = matches!(error, Error::Unavailable { .. });
        if self.since.is_none() && is_transient && since.elapsed() >= SHORTEST_OUTAGE {
            self.since = Some(since);
            self.say(&unreachable(error, &self.place));
        }
    }

    fn end(&mut self) {
        if let Some(since) = self.since.take() {
            let place = &self.place;
            self.say(&format!("{place} can be reached again, after {}", ago(since.elapsed())));
        }
    }

    fn say(&self, what: &str) {
        let say = || log_line(&format!("waiting: {what}"));
        match &self.bar {
            Some(bar) => bar.suspend(say),
            None => say(),
        }
    }
}

/// The messages while the command tries to open its store.
#[derive(Debug)]
pub(crate) struct FirstOutage {
    place: String,
    since: Option<Instant>,
    reported: bool,
}

impl FirstOutage {
    /// `place` is the URL of the store without secrets.
    pub(crate) fn new(place: String) -> Self {
        Self { place, since: None, reported: false }
    }

    /// Reports the outage once, if it lasts.
    pub(crate) fn failed(&mut self, error: &Error) {
        let since = *self.since.get_or_insert_with(Instant::now);
        if !self.reported && since.elapsed() >= SHORTEST_OUTAGE {
            self.reported = true;
            log_line(&format!("waiting: {}", unreachable(error, &self.place)));
        }
    }

    /// Reports that the store is open, if the outage was reported.
    pub(crate) fn end(&self) {
        if let Some(since) = self.since.filter(|_| self.reported) {
            let (place, took) = (&self.place, ago(since.elapsed()));
            log_line(&format!("waiting: {place} can be reached now, after {took}"));
        }
    }
}

/// Returns which server cannot be reached, and why.
fn unreachable(error: &Error, place: &str) -> String {
    // In a cluster the server may be that of other names.
    let server = server(error, place).map(|server| format!("{server} of "));
    let (server, cause) = (server.unwrap_or_default(), cause(error, place));
    format!("{server}{place} cannot be reached: {cause}")
}

/// Returns the server that cannot be reached, if the store has several.
fn server<'a>(error: &'a Error, place: &str) -> Option<&'a str> {
    let Error::Unavailable { attempt, .. } = error else { return None };
    let server =
        attempt.split_whitespace().find(|word| word.contains("://"))?.trim_end_matches(':');
    (server != place).then_some(server)
}

/// Returns why the store cannot be reached, without its address.
fn cause(error: &Error, place: &str) -> String {
    match error {
        Error::Unavailable { timed_out: true, .. } => "no answer in time".to_owned(),
        Error::Unavailable { source: Some(source), .. } => source.to_string(),
        Error::Unavailable { attempt, .. } => {
            let server = server(error, place).unwrap_or(place);
            let (_, why) = attempt.split_once(&format!("{server}: ")).unwrap_or(("", attempt));
            why.to_owned()
        }
        error => error.to_string(),
    }
}

/// The line on a terminal, or the lines on stderr.
#[derive(Debug)]
struct StatusLine {
    what: String,
    since: Instant,
    bar: Option<ProgressBar>,
    verbose: bool,
    logged_gist: String,
}

impl StatusLine {
    fn new(what: &str, verbose: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self {
            what: one_line(what),
            since: Instant::now(),
            bar,
            verbose,
            logged_gist: String::new(),
        }
    }

    async fn show_queue(&mut self, semaphore: &Semaphore, id: AcquisitionId) {
        self.show(async || {
            let position = semaphore.position(&id).await.ok().flatten()?;
            let stats = semaphore.stats().await.ok()?;
            let nth = ordinal(position + 1);
            let place = format!("{nth} in the queue");
            if let Some(paused) = paused(&stats) {
                return Some(WaitStatus::new(&place, &paused, &nth, "paused"));
            }
            match stats.waits_for {
                Some(WaitsFor::Rate) => {
                    let next = stats.next_token.map(ago).unwrap_or_default();
                    let why = next_start(&stats).unwrap_or_default();
                    return Some(WaitStatus::new(&place, &why, &nth, &format!("next in {next}")));
                }
                Some(WaitsFor::Capacity) => {
                    let limit = stats.capacity;
                    let problem = "the first waiter needs more units than the limit of";
                    let why = format!("{problem} {limit}: raise the limit");
                    return Some(WaitStatus::new(&place, &why, &nth, "over the limit"));
                }
                _ => {}
            }
            let (Some(first), Some(held)) = (stats.holders.first(), held_by(&stats)) else {
                return Some(WaitStatus::new(&place, "", &nth, ""));
            };
            let short = first.label.as_ref().map(|label| format!("{label:?}"));
            let short = short.unwrap_or_else(|| describe_member(first));
            Some(WaitStatus::new(&place, &held, &nth, &short))
        })
        .await;
    }

    async fn show_lock(&mut self, locks: &Locks, key: &str) {
        self.show(async || {
            let info = locks.lookup(key).await.ok().flatten()?;
            let held = locked_by(&info);
            let place = format!("locked with fence {}", info.fence);
            let short = info.label.map_or_else(|| held.clone(), |label| format!("{label:?}"));
            Some(WaitStatus::new(&place, &held, "locked", &short))
        })
        .await;
    }

    /// Draws the answers of `read_status`. If it returns `None`, the last answer stays.
    async fn show(&mut self, read_status: impl AsyncFn() -> Option<WaitStatus>) {
        let once = self.bar.is_none() && !self.verbose;
        sleep(if once { LOG_TIME_LIMIT } else { TIME_LIMIT }).await;
        let mut status = WaitStatus::default();
        loop {
            if let Some(answer) = read_status().await {
                status = answer;
                if once {
                    self.draw(&status);
                    return std::future::pending().await;
                }
            }
            let read_at = Instant::now();
            while read_at.elapsed() < READ_INTERVAL {
                self.draw(&status);
                sleep(DRAW).await;
            }
        }
    }

    fn draw(&mut self, status: &WaitStatus) {
        let elapsed = ago(self.since.elapsed());
        let whole = format!("waiting for {} ({elapsed}): {}", self.what, status.whole);
        if let Some(bar) = &self.bar {
            let fits = columns().is_none_or(|columns| SPINNER + whole.width() <= columns);
            let short = || format!("{} ({elapsed}): {}", self.what, status.short);
            bar.set_message(if fits { whole } else { short() });
            bar.tick();
        } else if self.logged_gist != status.gist {
            // Without a terminal, print only if the place has changed, or a pause has begun or ended.
            log_line(&whole);
            self.logged_gist.clone_from(&status.gist);
        }
    }
}

/// The answer of the store about a wait.
#[derive(Default)]
struct WaitStatus {
    whole: String,
    /// The text for a terminal that is too narrow for the whole. It has the label, by which people know a job.
    short: String,
    /// The part that is worth another line in a log when it changes: the place, and whether the name is paused.
    gist: String,
}

impl WaitStatus {
    fn new(place: &str, why: &str, short_place: &str, short_why: &str) -> Self {
        let joined = |first: &str, second: &str| match second {
            "" => one_line(first),
            second => one_line(&format!("{first}; {second}")),
        };
        let pause = if short_why == "paused" { "; paused" } else { "" };
        Self {
            whole: joined(place, why),
            short: joined(short_place, short_why),
            gist: format!("{place}{pause}"),
        }
    }
}

/// The spinner of the line, and the blank after it.
const SPINNER: usize = 2;

/// Returns the width of the terminal.
fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col.into())
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Returns who holds the permits of a semaphore, or `None` if nobody does.
pub(crate) fn held_by(stats: &SemaphoreStats) -> Option<String> {
    let (first, others) = stats.holders.split_first()?;
    let more = match others.len() {
        0 => String::new(),
        1 => ", and by 1 other".to_owned(),
        more => format!(", and by {more} others"),
    };
    Some(format!("held by {}{more}", describe_member(first)))
}

/// Returns who holds a lock.
pub(crate) fn locked_by(info: &LockInfo) -> String {
    let age = info.acquired_at.elapsed().ok();
    let holder = describe(info.host.as_deref(), info.pid, info.label.as_deref(), age);
    // Another program does not record its host and pid.
    let by = if info.host.is_some() || info.pid.is_some() { " by " } else { "" };
    format!("held{by}{holder}")
}

fn describe_member(member: &SemaphoreMember) -> String {
    let host = member.host.as_deref().unwrap_or(&member.id);
    describe(Some(host), member.pid, member.label.as_deref(), member.age)
}

/// Formats the known ones of host, process, label and age.
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
