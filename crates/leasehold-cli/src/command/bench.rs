//! `leasehold bench`: measures the cost of leases on a store.
//!
//! This process uses two clients with separate connections, so that hand-offs go through the store. The names are
//! always the same, because the store keeps the last fence of every name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use leasehold::{Client, Error, Semaphore, shortest_lease};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::args::BenchArgs;
use crate::child::job::shortest_option;
use crate::failure::{Failure, NOT_ACQUIRED};
use crate::output::{self, lease_text, or_dash, table};
use crate::store::{self, Store};

/// The prefix of all names.
const NAME: &str = "leasehold-bench";
const TASKS: usize = 256;
const NAMES: usize = 1000;
const FEW: usize = 20;
const MANY: usize = 5000;
/// The number of measurements. Each takes about the same time.
const PARTS: u32 = 7;

pub(crate) fn run(arguments: &BenchArgs) -> Result<u8, Failure> {
    let store = Store::new(&arguments.store)?;
    let (figures, needs_renewals) = store::block_on(async {
        let clients = [store.open().await?, store.open().await?];
        let Some(alone) = clients[0].lock(NAME).build()?.try_acquire().await? else {
            let problem = "another bench is running on this store: wait until it ends";
            return Err(Failure::new(NOT_ACQUIRED, problem));
        };
        let needs_renewals = clients[0].lifeline().is_none();
        let figures = Bench::new(clients.clone(), arguments.lasting / PARTS).measure().await?;
        alone.release().await?;
        for client in &clients {
            client.close().await?;
        }
        Ok((figures, needs_renewals))
    })?;
    if arguments.json {
        output::print_json(&as_json(&figures))?;
    } else {
        output::print(&as_text(&figures, needs_renewals))?;
    }
    Ok(0)
}

/// One measurement: the number of operations, their total time, and the time of each if that is meaningful.
struct Figure {
    what: String,
    key: &'static str,
    times: u32,
    span: Duration,
    each: Vec<Duration>,
}

impl Figure {
    fn a_second(&self) -> f64 {
        f64::from(self.times) / self.span.as_secs_f64()
    }

    fn quantile(&self, percent: usize) -> Option<Duration> {
        self.each
            .get((self.each.len() * percent / 100).min(self.each.len().checked_sub(1)?))
            .copied()
    }

    fn median(&self) -> Duration {
        self.quantile(50).unwrap_or_default()
    }
}

struct Bench {
    clients: [Client; 2],
    /// How long each part takes.
    span: Duration,
    figures: Vec<Figure>,
    progress: ProgressBar,
    /// The semaphores to forget at the end.
    used: RefCell<BTreeMap<String, Semaphore>>,
}

impl Bench {
    fn new(clients: [Client; 2], span: Duration) -> Self {
        let progress = ProgressBar::new(u64::from(PARTS));
        if let Ok(style) = ProgressStyle::with_template("{bar:20} {pos}/{len} {msg}") {
            progress.set_style(style);
        }
        Self { clients, span, figures: Vec::new(), progress, used: RefCell::default() }
    }

    async fn measure(mut self) -> Result<Vec<Figure>, Error> {
        let one = self.semaphore("one", 1)?;
        let question = async || one.locked().await.map(drop);
        self.each("question", "a query, the cheapest request", question).await?;
        let pair = async || pair(&one).await;
        self.each("pair", "a semaphore: acquire and release", pair).await?;
        let lock = self.clients[0].lock(&Self::name("lock")).build()?;
        let pair = async || match lock.try_acquire().await? {
            Some(guard) => guard.release().await.map(drop),
            None => Ok(()),
        };
        self.each("lock_pair", "a lock: acquire and release", pair).await?;
        let hot = u32::try_from(TASKS).unwrap_or(u32::MAX);
        let hot = vec![self.semaphore("hot", hot)?];
        self.crowd("hot", format!("the same by {TASKS} tasks, one semaphore"), hot).await?;
        let many = (0..NAMES)
            .map(|nth| self.semaphore(&format!("name-{nth}"), 1))
            .collect::<Result<_, _>>()?;
        self.crowd("names", format!("the same by {TASKS} tasks, {NAMES} semaphores"), many).await?;
        self.hand_off("few", FEW).await?;
        self.hand_off("many", MANY).await?;
        self.progress.set_message("forgetting the names");
        for semaphore in self.used.take().into_values() {
            // A semaphore that was never used is not known to the store, and one that another process uses stays.
            let _ = semaphore.forget().await;
        }
        self.progress.finish_and_clear();
        Ok(self.figures)
    }

    fn name(what: &str) -> String {
        format!("{NAME}-{what}")
    }

    fn semaphore(&self, what: &str, capacity: u32) -> Result<Semaphore, Error> {
        let semaphore = self.clients[0].semaphore(&Self::name(what), capacity).build()?;
        self.used.borrow_mut().insert(what.to_owned(), semaphore.clone());
        Ok(semaphore)
    }

    fn begin(&self, what: &str) -> Instant {
        self.progress.set_message(what.to_owned());
        Instant::now()
    }

    fn end(
        &mut self,
        key: &'static str,
        what: String,
        begun: Instant,
        mut each: Vec<Duration>,
        times: u32,
    ) {
        each.sort_unstable();
        self.figures.push(Figure { what, key, times, span: begun.elapsed(), each });
        self.progress.inc(1);
    }

    /// Measures operations one at a time.
    async fn each(
        &mut self,
        key: &'static str,
        what: &str,
        work: impl AsyncFn() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let begun = self.begin(what);
        let mut each = Vec::new();
        while begun.elapsed() < self.span {
            let one = Instant::now();
            work().await?;
            each.push(one.elapsed());
        }
        let times = u32::try_from(each.len()).unwrap_or(u32::MAX);
        self.end(key, what.to_owned(), begun, each, times);
        Ok(())
    }

    /// Measures many tasks at once.
    async fn crowd(
        &mut self,
        key: &'static str,
        what: String,
        semaphores: Vec<Semaphore>,
    ) -> Result<(), Error> {
        let semaphores = Arc::new(semaphores);
        let begun = self.begin(&what);
        let until = begun + self.span;
        let mut tasks = JoinSet::new();
        for first in 0..TASKS {
            let semaphores = semaphores.clone();
            tasks.spawn(async move {
                let mut times = 0_u32;
                for semaphore in semaphores.iter().cycle().skip(first * semaphores.len() / TASKS) {
                    if Instant::now() >= until {
                        break;
                    }
                    pair(semaphore).await?;
                    times += 1;
                }
                Ok::<_, Error>(times)
            });
        }
        let mut times = 0;
        while let Some(ended) = tasks.join_next().await {
            times += ended.unwrap_or(Ok(0))?;
        }
        self.end(key, what, begun, Vec::new(), times);
        Ok(())
    }

    /// Measures how fast one permit passes from one client to the other and back.
    async fn hand_off(&mut self, key: &'static str, waiters: usize) -> Result<(), Error> {
        let what = format!("hand-off with {waiters} in the queue");
        self.begin(&what);
        let name = Self::name(key);
        let round = Arc::new(Mutex::new(Round::default()));
        let semaphore = self.semaphore(key, 1)?;
        let held = semaphore.acquire().await?;
        let mut tasks = JoinSet::new();
        for nth in 0..waiters {
            let semaphore = self.clients[nth % 2].semaphore(&name, 1).build()?;
            let round = round.clone();
            tasks.spawn(async move {
                loop {
                    let permit = semaphore.acquire().await?;
                    if lock(&round).acquired() {
                        return Ok::<_, Error>(());
                    }
                    permit.release().await?;
                }
            });
        }
        while semaphore.stats().await?.waiting < waiters {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let begun = Instant::now();
        lock(&round).begin(begun + self.span);
        held.release().await?;
        // The first task that finds that the time has passed ends and releases its permit. The others leave the queue.
        if let Some(ended) = tasks.join_next().await {
            ended.unwrap_or(Ok(()))?;
        }
        tasks.shutdown().await;
        // The semaphore cannot be forgotten until all tasks have left.
        while semaphore.stats().await?.waiting > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let each = std::mem::take(&mut lock(&round).each);
        let times = u32::try_from(each.len()).unwrap_or(u32::MAX);
        self.end(key, what, begun, each, times);
        Ok(())
    }
}

async fn pair(semaphore: &Semaphore) -> Result<(), Error> {
    semaphore.acquire().await?.release().await.map(drop)
}

/// The shared state of the tasks that pass a permit on.
#[derive(Default)]
struct Round {
    released: Option<Instant>,
    until: Option<Instant>,
    each: Vec<Duration>,
}

impl Round {
    fn begin(&mut self, until: Instant) {
        (self.until, self.released) = (Some(until), Some(Instant::now()));
    }

    /// Whether the measurement has ended. If not, the permit is about to be released.
    fn acquired(&mut self) -> bool {
        let now = Instant::now();
        self.each.extend(self.released.map(|released| now - released));
        self.released = Some(now);
        self.until.is_some_and(|until| now >= until)
    }
}

fn lock(round: &Mutex<Round>) -> std::sync::MutexGuard<'_, Round> {
    round.lock().unwrap_or_else(PoisonError::into_inner)
}

fn as_text(figures: &[Figure], needs_renewals: bool) -> String {
    let time = |time: Option<Duration>| or_dash(time.map(short));
    let rows = figures.iter().map(|figure| {
        let [p50, p99] = [50, 99].map(|percent| time(figure.quantile(percent)));
        [figure.what.clone(), p50, p99, format!("{:.0}", figure.a_second())]
    });
    let mut text = table(["WHAT", "P50", "P99", "A SECOND"], &[1, 2, 3], rows);
    text.push('\n');
    for sentence in reading(figures, needs_renewals) {
        let _ = writeln!(text, "{sentence}");
    }
    text
}

/// Formats a duration with three significant digits.
fn short(time: Duration) -> String {
    match time.as_micros() {
        0..1000 => format!("{}us", time.as_micros()),
        1000..100_000 => format!("{:.1}ms", time.as_secs_f64() * 1000.0),
        100_000..1_000_000 => format!("{}ms", time.as_millis()),
        _ => format!("{:.1}s", time.as_secs_f64()),
    }
}

/// Explains the figures. `needs_renewals`: whether permits have a lease on this store.
fn reading(figures: &[Figure], needs_renewals: bool) -> Vec<String> {
    let find = |key| figures.iter().find(|figure| figure.key == key);
    let (Some(question), Some(pair), Some(hot), Some(few), Some(many)) =
        (find("question"), find("pair"), find("hot"), find("few"), find("many"))
    else {
        return Vec::new();
    };
    let times = |time: Duration, of: Duration| time.as_secs_f64() / of.as_secs_f64().max(1e-9);
    let trip = question.median();
    let mut says = vec![
        format!(
            "Acquiring and releasing a permit takes {}, {:.1} times as long as a query. Use permits for work that takes longer.",
            short(pair.median()),
            times(pair.median(), trip)
        ),
        format!(
            "One process like this one can acquire and release a semaphore {:.0} times a second.",
            hot.a_second()
        ),
        format!(
            "The median time from a release to the start of the next holder is {}, {:.1} times as long as a query.",
            short(few.median()),
            times(few.median(), trip)
        ),
        format!(
            "In 99 of 100 cases it is at most {}, {:.1} times as long as a query.",
            short(few.quantile(99).unwrap_or_default()),
            times(few.quantile(99).unwrap_or_default(), trip)
        ),
    ];
    let longer = times(many.median(), few.median());
    says.push(if longer < 2.0 {
        format!("A long queue does not slow this down: {MANY} waiters take about as long as {FEW}.")
    } else {
        format!(
            "With {MANY} waiters in this one process, this takes {longer:.1} times as long as with {FEW}: this process is the cause, not the store."
        )
    });
    let p99 = question.quantile(99).unwrap_or_default();
    says.push(format!("A query takes at most {} in 99 of 100 cases.", short(p99)));
    if needs_renewals {
        says.push(format!(
            "So do not set a lease below {} in a program, or --lease below {}: a shorter one is lost with its connection.",
            lease_text(shortest_lease(p99)),
            lease_text(shortest_option(p99))
        ));
    }
    if times(p99, trip) > 10.0 {
        says.push("One query in a hundred takes far longer than the median: the store, the network or this machine is busy at times.".to_owned());
    }
    says
}

fn as_json(figures: &[Figure]) -> Value {
    let one = |figure: &Figure| {
        let micros = |percent| figure.quantile(percent).map(|time| time.as_secs_f64() * 1e6);
        json!({
            "what": figure.key,
            "p50_us": micros(50),
            "p99_us": micros(99),
            "a_second": figure.a_second(),
        })
    };
    json!({ "figures": figures.iter().map(one).collect::<Vec<_>>() })
}
