//! What statistics contain: the limits, holders and waiters of semaphores, the members of pools, and clients. The stores fill
//! these types.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::Fence;
use crate::clock::{Span, Time};
use crate::machine::{self, InMemory, Machine, Rate, Row};
use crate::name::Name;

mod clients;
mod pools;

pub use clients::ClientInfo;
pub use pools::{PoolMember, PoolStats};

/// The state of one semaphore at one moment.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// # let client = leasehold::Client::memory();
/// use leasehold::WaitsFor;
///
/// let api = client.semaphore("api", 1).label("invoices").build()?;
/// let permit = api.acquire().await?;
/// let waiting = tokio::spawn(api.acquire());
/// # tokio::task::yield_now().await;
///
/// let stats = api.stats().await?;
/// assert_eq!((stats.held(), stats.capacity(), stats.waiting()), (1, 1, 1));
/// assert_eq!(stats.waits_for(), Some(WaitsFor::Room));
/// let holder = &stats.holders()[0];
/// assert_eq!((holder.label(), holder.fence()), (Some("invoices"), Some(permit.fence())));
/// # drop((permit, waiting));
/// # Ok(())
/// # }
/// ```
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
    /// Returns the name of the semaphore.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the capacity. Zero if nobody has declared one yet.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.limits.pinned.unwrap_or(self.limits.declared)
    }

    /// Returns the newest declaration. It is the capacity unless the semaphore is [pinned](Self::pinned).
    #[must_use]
    pub fn declared(&self) -> u32 {
        self.limits.declared
    }

    /// Returns the capacity that was set with [`Semaphore::pin`](crate::Semaphore::pin), if the semaphore is pinned.
    /// Declarations of programs do not change it.
    #[must_use]
    pub fn pinned(&self) -> Option<u32> {
        self.limits.pinned
    }

    /// Returns since when, by whom and why the semaphore is paused, or `None` if it is not paused.
    #[must_use]
    pub fn paused(&self) -> Option<&Paused> {
        self.limits.paused.as_ref()
    }

    /// Returns the number of permits that are held, whatever their weight.
    #[must_use]
    pub fn held(&self) -> u32 {
        u32::try_from(self.holders.len()).unwrap_or(u32::MAX)
    }

    /// Returns the number of units that are held: the sum of the [weights](crate::Acquire::weight). After the capacity
    /// shrinks, the sum may exceed it.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Returns the limit on the rate of grants, or `None` if there is no rate.
    #[must_use]
    pub fn rate(&self) -> Option<RateLimit> {
        self.limits.rate
    }

    /// Returns the time until the [rate](Self::rate) allows the next grant, or `None` if it allows one now.
    #[must_use]
    pub fn next_token(&self) -> Option<Duration> {
        self.limits.next_token
    }

    /// Returns what the first waiter waits for, or `None` if nobody waits.
    #[must_use]
    pub fn waits_for(&self) -> Option<WaitsFor> {
        self.waits_for
    }

    /// Returns the holders, the longest holder first.
    #[must_use]
    pub fn holders(&self) -> &[Member] {
        &self.holders
    }

    /// Returns the waiters, in the order of the queue. The list is empty unless the query [asked for
    /// it](crate::Stats::waiters), because a queue may be long.
    #[must_use]
    pub fn waiters(&self) -> &[Member] {
        &self.waiters
    }

    /// Returns the number of waiters.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns how long the longest-held permit has been held.
    #[must_use]
    pub fn oldest_hold(&self) -> Option<Duration> {
        self.holders.iter().filter_map(Member::age).max()
    }

    /// Returns how long the first waiter has waited.
    #[must_use]
    pub fn oldest_wait(&self) -> Option<Duration> {
        self.oldest_wait
    }

    /// Returns how much of the capacity is held, in percent.
    #[must_use]
    pub fn percent(&self) -> f64 {
        100.0 * f64::from(self.units) / f64::from(self.capacity().max(1))
    }

    fn is_used(&self) -> bool {
        !self.holders.is_empty() || self.waiting > 0
    }

    /// Returns the statistics of a name that nobody has used yet.
    pub(crate) fn unused(name: String) -> Self {
        let (holders, waiters, oldest_wait) = (Vec::new(), Vec::new(), None);
        let (limits, units, waits_for) = (Limits::default(), 0, None);
        Self { name, limits, units, waits_for, holders, waiters, waiting: 0, oldest_wait }
    }

    pub(crate) fn of<T: Clone + Default>(
        name: &Name,
        machine: &Machine<InMemory<T>>,
        now: Time,
        waiters: Range<usize>,
        label: impl Fn(&T) -> Option<Arc<str>>,
    ) -> Self {
        let member = |row: &Row<'_, T>| Member {
            id: row.id.to_string(),
            label: label(row.kept).map(|label| label.to_string()),
            host: None,
            pid: None,
            age: Some(now.since(row.since)),
            ends_in: row.ends.map(|ends| ends.since(now)),
            // In memory only a TTL ends a permit.
            ttl_left: row.ends.map(|ends| ends.since(now)),
            silent_for: None,
            fence: row.fence,
            weight: row.weight,
            slot_number: row.slot_number.map(NonZeroU32::get),
        };
        let limits = Limits::of(machine.limits(), now);
        let (units, head) = (machine.units(), machine.waiters().next());
        let places = machine.waiters().skip(waiters.start).take(waiters.len());
        Self {
            name: name.to_string(),
            waits_for: head.as_ref().map(|head| limits.waits_for(units, head.weight)),
            limits,
            units,
            holders: machine.holders().iter().map(member).collect(),
            waiters: places.map(|row| member(&row)).collect(),
            waiting: machine.waiting(),
            oldest_wait: head.map(|head| now.since(head.since)),
        }
    }
}

/// The limits of one semaphore.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    pub(crate) declared: u32,
    pub(crate) pinned: Option<u32>,
    pub(crate) paused: Option<Paused>,
    pub(crate) rate: Option<RateLimit>,
    pub(crate) next_token: Option<Duration>,
}

impl Limits {
    /// Returns what a waiter of this weight waits for, if it is the first and this many units are held.
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

    pub(crate) fn of(limits: &machine::Limits, now: Time) -> Self {
        let paused = limits.paused().map(|paused| Paused {
            since: now.since(paused.since),
            by: paused.by.to_string(),
            reason: paused.reason.as_deref().map(str::to_owned),
        });
        let meter = limits.meter();
        let rate = meter.map(|meter| RateLimit::of(meter.rate));
        let next_token = meter.and_then(|meter| meter.next_in(now)).map(Span::duration);
        Self { declared: limits.declared(), pinned: limits.pinned(), paused, rate, next_token }
    }
}

/// A limit on the rate of grants: see [`SemaphoreBuilder::rate`](crate::SemaphoreBuilder::rate).
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// use std::time::Duration;
///
/// let rate = leasehold::RateLimit::new(100, Duration::from_secs(60), 10)?;
/// assert_eq!(rate.to_string(), "100 per minute, burst 10");
/// // 91 tokens arrive in a minute, and 9 more may be left from before: never more than 100.
/// assert_eq!(rate.interval(), Duration::from_micros(659_341));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RateLimit {
    rate: Rate,
}

impl RateLimit {
    pub(crate) fn of(rate: Rate) -> Self {
        Self { rate }
    }

    /// Returns the rate of no more than `starts` permits in any `period`, and no more than `burst` of them at once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the rate is one that
    /// [`SemaphoreBuilder::build`](crate::SemaphoreBuilder::build) does not accept.
    pub fn new(starts: u64, period: Duration, burst: u32) -> Result<Self, crate::Error> {
        Rate::new(starts, period, burst).map(Self::of)
    }

    /// Returns how many permits may start in any [`period`](Self::period), as declared.
    #[must_use]
    pub fn starts(&self) -> u64 {
        self.rate.count
    }

    /// Returns the period, as declared.
    #[must_use]
    pub fn period(&self) -> Duration {
        self.rate.period.duration()
    }

    /// Returns how many of these permits may start at once after a quiet period.
    #[must_use]
    pub fn burst(&self) -> u32 {
        self.rate.burst
    }

    /// Returns the time in which one token arrives: the period divided by `starts − burst + 1`, rounded up to a
    /// microsecond. Every grant takes a token.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.rate.interval().duration()
    }
}

/// Formats the rate as it was declared, for example `100 per minute, burst 10`. A burst of 1 is not shown.
impl std::fmt::Display for RateLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [(u64, &str); 6] = [
            (86_400_000_000, "day"),
            (3_600_000_000, "hour"),
            (60_000_000, "minute"),
            (1_000_000, "second"),
            (1000, "millisecond"),
            (1, "microsecond"),
        ];
        let Rate { count, period, burst } = self.rate;
        let fits = |(micros, _): &&(u64, &str)| period.micros().is_multiple_of(*micros);
        let (micros, unit) = UNITS.iter().find(fits).copied().unwrap_or((1, "microsecond"));
        match period.micros() / micros {
            1 => write!(f, "{count} per {unit}")?,
            units => write!(f, "{count} per {units} {unit}s")?,
        }
        if burst > 1 { write!(f, ", burst {burst}") } else { Ok(()) }
    }
}

/// What the first waiter waits for: see [`SemaphoreStats::waits_for`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WaitsFor {
    /// A release: too many units are held.
    Room,
    /// A token: the [rate](SemaphoreStats::rate) allows the next grant after
    /// [`next_token`](SemaphoreStats::next_token).
    Rate,
    /// The end of the [pause](SemaphoreStats::paused).
    Resume,
    /// A larger capacity: the waiter weighs more than the capacity, which has shrunk since the waiter joined the queue.
    Capacity,
    /// Its client: the waiter could be granted a permit, but its client cannot be reached. Other waiters are granted
    /// permits before it.
    Client,
}

impl std::fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Room => "free units",
            Self::Rate => "a token of the rate",
            Self::Resume => "the end of the pause",
            Self::Capacity => "a larger capacity",
            Self::Client => "its own client, which is unreachable",
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
    /// Returns how long the pause has lasted.
    #[must_use]
    pub fn lasts(&self) -> Duration {
        self.since
    }

    /// Returns the name of the person or program that paused the semaphore.
    #[must_use]
    pub fn by(&self) -> &str {
        &self.by
    }

    /// Returns the reason, if one was given.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
}

/// One holder or waiter of a semaphore.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Member {
    pub(crate) id: String,
    pub(crate) label: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) pid: Option<u32>,
    pub(crate) age: Option<Duration>,
    pub(crate) ends_in: Option<Duration>,
    pub(crate) ttl_left: Option<Duration>,
    pub(crate) silent_for: Option<Duration>,
    pub(crate) fence: Option<Fence>,
    pub(crate) weight: u32,
    pub(crate) slot_number: Option<u32>,
}

impl Member {
    /// Returns the acquisition id. On Redis it may belong to another program that shares the semaphore, and have
    /// another form.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the label of the semaphore that the permit was requested with, if any.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_deref()
    }

    /// Returns the host that its client runs on; `None` in memory, and for other programs on Redis.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// Returns the process id of its client; `None` in memory, and for other programs on Redis.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Returns how long it has held or waited, accurate to a few milliseconds; `None` for other programs on Redis.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        self.age
    }

    /// Returns the time until it expires unless it is renewed; `None` if it does not expire.
    #[must_use]
    pub fn ends_in(&self) -> Option<Duration> {
        self.ends_in
    }

    /// Returns the time until its TTL ends the permit, however often it is renewed; `None` if it has no TTL, and for a
    /// waiter.
    #[must_use]
    pub fn ttl_left(&self) -> Option<Duration> {
        self.ttl_left
    }

    /// Returns the time since its client renewed it last. A holder that is alive renews its permit in the second third
    /// of its lease, and after 8 s at the latest. So a longer silence means that its process is dead or stopped, or cannot
    /// reach the store. `None` in memory and on one host, where nothing is renewed, and for other programs on Redis.
    #[must_use]
    pub fn silent_for(&self) -> Option<Duration> {
        self.silent_for
    }

    /// Returns the fence of the permit; `None` for a waiter. On Redis also `None` for other programs, and for a permit
    /// that another program has granted and that is not claimed yet.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        self.fence
    }

    /// Returns the number of units. Permits of other programs on Redis take one unit.
    #[must_use]
    pub fn weight(&self) -> u32 {
        self.weight
    }

    /// Returns the slot number of the permit, if it has one.
    #[must_use]
    pub fn slot_number(&self) -> Option<u32> {
        self.slot_number
    }
}

/// What a query asks for.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    pub(crate) names: Option<Vec<String>>,
    pub(crate) limit: usize,
    pub(crate) unused: bool,
    /// The places in the queue whose waiters are listed.
    pub(crate) waiters: Range<usize>,
}

impl Query {
    /// Keeps only the names that the query asks for, and sorts them by usage, the most used name first.
    pub(crate) fn narrow(&self, stats: &mut Vec<SemaphoreStats>) {
        stats.retain(|one| self.unused || one.is_used());
        stats.sort_by(|a, b| {
            let by_use = b.percent().total_cmp(&a.percent());
            by_use.then(b.waiting.cmp(&a.waiting)).then_with(|| a.name.cmp(&b.name))
        });
        stats.truncate(self.limit);
    }
}
