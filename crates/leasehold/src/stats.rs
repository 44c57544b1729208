//! What is held, and who waits.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Span, Time};
use crate::engine::Engine;
use crate::machine::{self, Machine, Rate, Row};
use crate::name::Name;
use crate::{Error, Fence};

/// How many names are told of, unless told otherwise.
const LIMIT: usize = 100;

/// One semaphore at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SemaphoreStats {
    pub(crate) name: String,
    pub(crate) limits: Limits,
    pub(crate) units: u32,
    pub(crate) waits_for: Option<WaitsFor>,
    pub(crate) holders: Vec<Member>,
    pub(crate) waiters: Vec<Member>,
    pub(crate) waiting: usize,
    pub(crate) oldest_wait: Option<Duration>,
}

impl SemaphoreStats {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many permits there are. Zero if nobody has said so yet.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.limits.pinned.unwrap_or(self.limits.declared)
    }

    /// The newest declaration. It is the capacity unless the semaphore is [pinned](Self::pinned).
    #[must_use]
    pub fn declared(&self) -> u32 {
        self.limits.declared
    }

    /// The capacity that was set with [`Semaphore::pin`](crate::Semaphore::pin), whatever programs declare.
    #[must_use]
    pub fn pinned(&self) -> Option<u32> {
        self.limits.pinned
    }

    /// Since when, by whom and why no permits are granted; `None` if the semaphore is not paused.
    #[must_use]
    pub fn paused(&self) -> Option<&Paused> {
        self.limits.paused.as_ref()
    }

    /// How many permits are held, whatever they weigh.
    #[must_use]
    pub fn held(&self) -> u32 {
        u32::try_from(self.holders.len()).unwrap_or(u32::MAX)
    }

    /// How much of the capacity is held: the sum of the [weights](crate::Acquire::weight). After a shrink it may be more than the
    /// capacity.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units
    }

    /// How often permits are granted at most; `None` if there is no rate.
    #[must_use]
    pub fn rate(&self) -> Option<RateLimit> {
        self.limits.rate
    }

    /// When the next permit can be granted, if a [rate](Self::rate) does not allow it now.
    #[must_use]
    pub fn next_token(&self) -> Option<Duration> {
        self.limits.next_token
    }

    /// What the first in the queue waits for; `None` if nobody waits.
    #[must_use]
    pub fn waits_for(&self) -> Option<WaitsFor> {
        self.waits_for
    }

    /// Who holds, the longest first.
    #[must_use]
    pub fn holders(&self) -> &[Member] {
        &self.holders
    }

    /// Who waits, in the order of the queue. Empty unless it was [asked for](Stats::waiters): a queue may be long.
    #[must_use]
    pub fn waiters(&self) -> &[Member] {
        &self.waiters
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// For how long the longest held permit has been held.
    #[must_use]
    pub fn oldest_hold(&self) -> Option<Duration> {
        self.holders.iter().filter_map(Member::age).max()
    }

    /// For how long the first in the queue has waited.
    #[must_use]
    pub fn oldest_wait(&self) -> Option<Duration> {
        self.oldest_wait
    }

    /// How much of the capacity is held, in percent.
    #[must_use]
    pub fn percent(&self) -> f64 {
        100.0 * f64::from(self.units) / f64::from(self.capacity().max(1))
    }

    fn is_used(&self) -> bool {
        !self.holders.is_empty() || self.waiting > 0
    }

    /// A name that nobody has used yet.
    pub(crate) fn unused(name: String) -> Self {
        let (holders, waiters, oldest_wait) = (Vec::new(), Vec::new(), None);
        let (limits, units, waits_for) = (Limits::default(), 0, None);
        Self { name, limits, units, waits_for, holders, waiters, waiting: 0, oldest_wait }
    }

    pub(crate) fn of<T: Clone>(
        name: &Name,
        machine: &Machine<T>,
        now: Time,
        waiters: bool,
        label: impl Fn(&T) -> Option<Arc<str>>,
    ) -> Self {
        let member = |row: &Row<'_, T>| Member {
            id: row.id.to_string(),
            label: label(row.kept).map(|label| label.to_string()),
            host: None,
            pid: None,
            age: Some(now.since(row.since)),
            ends_in: row.ends.map(|ends| ends.since(now)),
            fence: row.fence,
            weight: row.weight,
            slot_number: row.slot_number.map(NonZeroU32::get),
        };
        let limits = Limits::of(machine.limits(), now);
        let (units, head) = (machine.units(), machine.waiters().next());
        Self {
            name: name.to_string(),
            waits_for: head.as_ref().map(|head| limits.waits_for(units, head.weight)),
            limits,
            units,
            holders: machine.holders().iter().map(member).collect(),
            waiters: machine.waiters().filter(|_| waiters).map(|row| member(&row)).collect(),
            waiting: machine.waiting(),
            oldest_wait: head.map(|head| now.since(head.since)),
        }
    }
}

/// How many permits there are, and whether they are granted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    pub(crate) declared: u32,
    pub(crate) pinned: Option<u32>,
    pub(crate) paused: Option<Paused>,
    pub(crate) rate: Option<RateLimit>,
    pub(crate) next_token: Option<Duration>,
}

impl Limits {
    /// What a waiter of this weight waits for, if it is the first, and so many units are held.
    pub(crate) fn waits_for(&self, units: u32, weight: u32) -> WaitsFor {
        let capacity = self.pinned.unwrap_or(self.declared);
        if self.paused.is_some() {
            WaitsFor::Resume
        } else if weight > capacity {
            WaitsFor::Capacity
        } else if weight > capacity.saturating_sub(units) {
            WaitsFor::Room
        } else if self.next_token.is_some() {
            WaitsFor::Rate
        } else {
            WaitsFor::Client
        }
    }

    fn of(limits: &machine::Limits, now: Time) -> Self {
        let paused = limits.paused().map(|paused| Paused {
            since: now.since(paused.since),
            by: paused.by.to_string(),
            reason: paused.reason.as_deref().map(str::to_owned),
        });
        let meter = limits.meter();
        let rate = meter.map(|meter| RateLimit::new(meter.rate));
        let next_token = meter.and_then(|meter| meter.next_in(now)).map(Span::duration);
        Self { declared: limits.declared(), pinned: limits.pinned(), paused, rate, next_token }
    }
}

/// How often permits are granted: see [`SemaphoreBuilder::rate`](crate::SemaphoreBuilder::rate).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RateLimit {
    interval: Duration,
    burst: u32,
}

impl RateLimit {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { interval: rate.interval.duration(), burst: rate.burst }
    }

    /// One permit is granted in this time.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// How many may be granted at once after a quiet time.
    #[must_use]
    pub fn burst(&self) -> u32 {
        self.burst
    }
}

/// What the first in a queue waits for: see [`SemaphoreStats::waits_for`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WaitsFor {
    /// Too many units are held.
    Room,
    /// The [rate](SemaphoreStats::rate) allows the next grant after [`next_token`](SemaphoreStats::next_token).
    Rate,
    /// The semaphore is [paused](SemaphoreStats::paused).
    Resume,
    /// It weighs more than the capacity, which has shrunk since it came: it can be granted only if the capacity grows.
    Capacity,
    /// It could be granted, but its client cannot be reached. Others are granted before it.
    Client,
}

impl std::fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Room => "room",
            Self::Rate => "the rate",
            Self::Resume => "the end of the pause",
            Self::Capacity => "a larger limit",
            Self::Client => "its client, which cannot be reached",
        })
    }
}

/// A pause of a semaphore: see [`Semaphore::pause`](crate::Semaphore::pause).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Paused {
    pub(crate) since: Duration,
    pub(crate) by: String,
    pub(crate) reason: Option<String>,
}

impl Paused {
    /// For how long it has lasted.
    #[must_use]
    pub fn lasts(&self) -> Duration {
        self.since
    }

    /// Who has paused it.
    #[must_use]
    pub fn by(&self) -> &str {
        &self.by
    }

    /// Why, if a reason was given.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
}

/// One holder or waiter.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Member {
    pub(crate) id: String,
    pub(crate) label: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) pid: Option<u32>,
    pub(crate) age: Option<Duration>,
    pub(crate) ends_in: Option<Duration>,
    pub(crate) fence: Option<Fence>,
    pub(crate) weight: u32,
    pub(crate) slot_number: Option<u32>,
}

impl Member {
    /// Its acquisition id. Not always one of ours: on Redis other programs may share a semaphore.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The label of the semaphore that acquired it.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_deref()
    }

    /// The host that its client runs on; `None` in memory, and for other programs on Redis.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// The process of its client; `None` in memory, and for other programs on Redis.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// For how long it has held or waited, to a few milliseconds; `None` for other programs on Redis.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        self.age
    }

    /// When it ends unless it is renewed; `None` if it does not end by itself.
    #[must_use]
    pub fn ends_in(&self) -> Option<Duration> {
        self.ends_in
    }

    /// The fence of its permit; `None` if it waits, has not yet claimed what it was granted, or is another program's.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        self.fence
    }

    /// How many units it takes. Permits of other programs on Redis take one.
    #[must_use]
    pub fn weight(&self) -> u32 {
        self.weight
    }

    /// The slot number of its permit, if it asked for one.
    #[must_use]
    pub fn slot_number(&self) -> Option<u32> {
        self.slot_number
    }
}

/// Asks for statistics: see [`Client::stats`](crate::Client::stats).
#[must_use = "nothing is asked until it is fetched"]
#[derive(Clone)]
pub struct Stats {
    engine: Arc<Engine>,
    query: Query,
}

/// Which names.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    pub(crate) names: Option<Vec<String>>,
    pub(crate) limit: usize,
    pub(crate) unused: bool,
    pub(crate) waiters: bool,
}

impl Stats {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, query: Query { names: None, limit: LIMIT, unused: false, waiters: false } }
    }

    /// Only these names, instead of all.
    pub fn names<I: IntoIterator<Item: Into<String>>>(mut self, names: I) -> Self {
        self.query.names = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// At most so many names, instead of 100.
    pub fn limit(mut self, limit: usize) -> Self {
        self.query.limit = limit;
        self
    }

    /// Also the names that nobody holds or waits for now.
    pub fn unused(mut self) -> Self {
        self.query.unused = true;
        self
    }

    /// Also who waits, and not only how many: see [`SemaphoreStats::waiters`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// for one in client.stats().names(["api"]).waiters().fetch().await? {
    ///     for waiter in one.waiters() {
    ///         println!("{} has waited for {:?}", waiter.id(), waiter.age());
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn waiters(mut self) -> Self {
        self.query.waiters = true;
        self
    }

    /// The statistics, the most used first: by how much of the capacity is held, then by how many wait.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that could not be one, and what the store has to say.
    ///
    /// # Cancel safety
    /// Only asks.
    pub async fn fetch(self) -> Result<Vec<SemaphoreStats>, Error> {
        let Self { engine, mut query } = self;
        if let Some(names) = &mut query.names {
            for name in names {
                *name = Name::new("name", name)?.to_string();
            }
        }
        let mut stats = engine.core().stats(query.clone()).await?;
        stats.retain(|one| query.unused || one.is_used());
        stats.sort_by(|a, b| {
            let by_use = b.percent().total_cmp(&a.percent());
            by_use.then(b.waiting.cmp(&a.waiting)).then_with(|| a.name.cmp(&b.name))
        });
        stats.truncate(query.limit);
        Ok(stats)
    }
}

impl std::fmt::Debug for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stats").field("query", &self.query).finish_non_exhaustive()
    }
}
