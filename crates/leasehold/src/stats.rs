//! What statistics contain: the limits, holders and waiters of semaphores, the members of pools, and clients.
//!
//! The stores fill these types.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Span, Time};
use crate::machine::{self, InMemory, Machine, Rate, Row};
use crate::name::Name;
use crate::{AcquisitionId, Fence};

mod clients;
mod limits;
mod pools;

pub use clients::ClientInfo;
pub use limits::SemaphoreLimits;
pub use pools::{PoolMember, PoolStats};

/// The capacity of a semaphore that limits only its rate.
pub(crate) const UNLIMITED: u32 = u32::MAX;

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
/// assert_eq!((stats.held, stats.capacity, stats.waiting), (1, 1, 1));
/// assert_eq!(stats.waits_for, Some(WaitsFor::Room));
/// let holder = &stats.holders[0];
/// assert_eq!((holder.label.as_deref(), holder.fence), (Some("invoices"), Some(permit.fence())));
/// # drop((permit, waiting));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SemaphoreStats {
    /// The name of the semaphore.
    pub name: String,
    /// The capacity, in units.
    ///
    /// Zero if nobody has declared one yet, and [`Semaphore::UNLIMITED`](crate::Semaphore::UNLIMITED) if there is
    /// only a rate. For the number of units that may be held, see [`limited_to`](Self::limited_to).
    pub capacity: u32,
    /// The newest declaration.
    ///
    /// It is the capacity unless the semaphore is pinned.
    pub declared: u32,
    /// The capacity that was set with [`Semaphore::pin`](crate::Semaphore::pin), if the semaphore is pinned.
    pub pinned: Option<u32>,
    /// Since when, by whom and why the semaphore is paused; `None` if it is not paused.
    pub paused: Option<Paused>,
    /// The limit on the rate of grants; `None` if there is no rate.
    pub rate: Option<RateLimit>,
    /// The time until the rate allows the next grant; `None` if it allows one now.
    pub next_token: Option<Duration>,
    /// The number of permits that are held, whatever their weight.
    pub held: u32,
    /// The number of units that are held: the sum of the [weights](crate::Acquire::weight).
    ///
    /// After the capacity shrinks, the sum may exceed it.
    pub held_units: u32,
    /// The number of waiters.
    pub waiting: usize,
    /// What the first waiter waits for; `None` if nobody waits.
    pub waits_for: Option<WaitsFor>,
    /// How long the first waiter has waited.
    pub oldest_wait: Option<Duration>,
    /// The holders, the longest holder first.
    pub holders: Vec<SemaphoreMember>,
    /// The waiters, in the order of the queue.
    ///
    /// The list is empty unless the query [includes it](crate::Stats::waiters), because a queue may be long.
    pub waiters: Vec<SemaphoreMember>,
}

impl SemaphoreStats {
    /// Returns how many units may be held; `None` if any number may, or if nobody has declared a capacity yet.
    #[must_use]
    pub fn limited_to(&self) -> Option<u32> {
        (1..UNLIMITED).contains(&self.capacity).then_some(self.capacity)
    }

    /// Returns whether any number of units may be held, because there is only a [rate](crate::Client::rate).
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.capacity == UNLIMITED
    }

    /// Returns how long the longest-held permit has been held.
    #[must_use]
    pub fn oldest_hold(&self) -> Option<Duration> {
        self.holders.iter().filter_map(|holder| holder.age).max()
    }

    /// Returns how much of the capacity is held, in percent.
    #[must_use]
    pub fn percent(&self) -> f64 {
        100.0 * f64::from(self.held_units) / f64::from(self.capacity.max(1))
    }

    fn is_used(&self) -> bool {
        self.held > 0 || self.waiting > 0
    }

    /// Returns the statistics of a name that nobody holds or waits for, with these limits.
    pub(crate) fn new(name: String, limits: &machine::Limits, now: Time) -> Self {
        let SemaphoreLimits { capacity, pinned, paused, rate } = SemaphoreLimits::of(limits, now);
        let next_token = limits.meter().and_then(|meter| meter.next_in(now));
        Self {
            name,
            capacity,
            declared: limits.declared,
            pinned,
            paused,
            rate,
            next_token: next_token.map(Span::duration),
            held: 0,
            held_units: 0,
            waiting: 0,
            waits_for: None,
            oldest_wait: None,
            holders: Vec::new(),
            waiters: Vec::new(),
        }
    }

    /// Returns the statistics of a name that nobody has used yet.
    pub(crate) fn unused(name: String) -> Self {
        Self::new(name, &machine::Limits::default(), Time::from_micros(0))
    }

    pub(crate) fn of<T: Clone + Default>(
        name: &Name,
        machine: &Machine<InMemory<T>>,
        now: Time,
        waiters: Range<usize>,
        label: impl Fn(&T) -> Option<Arc<str>>,
    ) -> Self {
        let member = |row: &Row<'_, T>| SemaphoreMember {
            label: label(row.tag).map(|label| label.to_string()),
            ..SemaphoreMember::of(row.id, row.member, now)
        };
        let mut stats = Self::new(name.to_string(), machine.limits(), now);
        stats.set_holders(machine.holders().iter().map(member).collect());
        stats.waiting = machine.waiting();
        if let Some(head) = machine.waiters().next() {
            stats.set_head(head.member.weight());
            stats.oldest_wait = Some(now.since(head.member.since));
        }
        let places = machine.waiters().skip(waiters.start).take(waiters.len());
        stats.waiters = places.map(|row| member(&row)).collect();
        stats
    }

    pub(crate) fn set_holders(&mut self, holders: Vec<SemaphoreMember>) {
        self.held = u32::try_from(holders.len()).unwrap_or(u32::MAX);
        self.held_units = holders.iter().map(|holder| holder.weight).fold(0, u32::saturating_add);
        self.holders = holders;
    }

    /// Records what the first waiter, which has this weight, waits for. The holders have to be known.
    pub(crate) fn set_head(&mut self, weight: u32) {
        self.waits_for = Some(if self.paused.is_some() {
            WaitsFor::Resume
        } else if weight > self.capacity {
            WaitsFor::Capacity
        } else if weight > self.capacity.saturating_sub(self.held_units) {
            WaitsFor::Room
        } else if self.next_token.is_some() {
            WaitsFor::Rate
        } else {
            WaitsFor::Client
        });
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
    /// How many permits may start in any period, as declared.
    pub starts: u64,
    /// The period, as declared.
    pub period: Duration,
    /// How many of these permits may start at once after a quiet period.
    pub burst: u32,
}

impl RateLimit {
    fn of(rate: Rate) -> Self {
        let Rate { count: starts, period, burst } = rate;
        Self { starts, period: period.duration(), burst }
    }

    /// Returns the rate of no more than `starts` permits in any `period`, and no more than `burst` of them at once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the rate is one that
    /// [`SemaphoreBuilder::build`](crate::SemaphoreBuilder::build) does not accept.
    pub fn new(starts: u64, period: Duration, burst: u32) -> Result<Self, crate::Error> {
        Rate::new(starts, period, burst).map(Self::of)
    }

    fn rate(self) -> Rate {
        let Self { starts: count, period, burst } = self;
        Rate { count, period: Span::from_duration(period), burst }
    }

    /// Returns the time in which one token arrives: the period divided by `starts − burst + 1`.
    ///
    /// It is rounded up to a microsecond. Every grant takes a token.
    #[must_use]
    pub fn interval(self) -> Duration {
        self.rate().interval().duration()
    }
}

/// Formats the rate as it was declared, for example `100 per minute, burst 10`.
///
/// A burst of 1 is not shown.
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
        let Rate { count, period, burst } = self.rate();
        let fits = |(micros, _): &&(u64, &str)| period.micros().is_multiple_of(*micros);
        let (micros, unit) = UNITS.iter().find(fits).copied().unwrap_or((1, "microsecond"));
        match period.micros() / micros {
            1 => write!(f, "{count} per {unit}")?,
            units => write!(f, "{count} per {units} {unit}s")?,
        }
        if burst > 1 { write!(f, ", burst {burst}") } else { Ok(()) }
    }
}

/// What the first waiter of a semaphore waits for: see [`SemaphoreStats::waits_for`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum WaitsFor {
    /// A release: too many units are held.
    Room,
    /// A token: the [rate](SemaphoreStats::rate) allows the next grant after [`next_token`](SemaphoreStats::next_token).
    Rate,
    /// The end of the [pause](SemaphoreStats::paused).
    Resume,
    /// A larger capacity: the waiter weighs more than the capacity, which has shrunk since the waiter joined the queue.
    Capacity,
    /// Its client: the waiter could be granted a permit, but its client cannot be reached.
    ///
    /// Other waiters are granted permits before it.
    Client,
}

impl WaitsFor {
    /// Returns `room`, `rate`, `resume`, `capacity` or `client`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Room => "room",
            Self::Rate => "rate",
            Self::Resume => "resume",
            Self::Capacity => "capacity",
            Self::Client => "client",
        }
    }
}

/// Formats the reason as a noun, for example `free units`.
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
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Paused {
    /// How long the pause has lasted.
    pub lasts: Duration,
    /// The person or program that paused the semaphore.
    pub by: String,
    /// The reason, if one was given.
    pub reason: Option<String>,
}

/// One holder or waiter of a semaphore.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SemaphoreMember {
    /// The acquisition id.
    ///
    /// On Redis it may belong to another program that shares the semaphore, and have another form.
    pub id: String,
    /// The label of the semaphore that the permit was requested with, if any.
    pub label: Option<String>,
    /// The host that its client runs on; `None` in memory, and for other programs on Redis.
    pub host: Option<String>,
    /// The process id of its client; `None` in memory, and for other programs on Redis.
    pub pid: Option<u32>,
    /// How long it has held or waited, accurate to a few milliseconds; `None` for other programs on Redis.
    pub age: Option<Duration>,
    /// The time until it expires unless it is renewed; `None` if it does not expire.
    pub expires_in: Option<Duration>,
    /// The time until its TTL ends the permit, however often it is renewed; `None` without a TTL, and for a waiter.
    pub ttl_ends_in: Option<Duration>,
    /// The time since its client renewed it last.
    ///
    /// A holder that is alive renews its permit in the second third of its lease, and after 8 s at the latest. So a
    /// longer silence means that its process is dead or stopped, or cannot reach the store. `None` in memory and on one
    /// host, where nothing is renewed, and for other programs on Redis.
    pub silent_for: Option<Duration>,
    /// The fence of the permit; `None` for a waiter.
    ///
    /// On Redis also `None` for other programs, and for a permit that another program has granted and that is not
    /// claimed yet.
    pub fence: Option<Fence>,
    /// The number of units.
    ///
    /// Permits of other programs on Redis take one unit.
    pub weight: u32,
    /// The slot number of the permit, if it has one.
    pub slot_number: Option<u32>,
}

impl SemaphoreMember {
    /// Returns a member of a store without leases, without what is known only of its client.
    pub(crate) fn of(id: AcquisitionId, member: &machine::Member, now: Time) -> Self {
        Self {
            id: id.to_string(),
            label: None,
            host: None,
            pid: None,
            age: Some(now.since(member.since)),
            expires_in: member.ends().map(|ends| ends.since(now)),
            ttl_ends_in: member.hold_until().map(|ends| ends.since(now)),
            silent_for: None,
            fence: member.fence(),
            weight: member.weight(),
            slot_number: member.slot_number().map(NonZeroU32::get),
        }
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
