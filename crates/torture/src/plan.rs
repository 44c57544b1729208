//! The semaphores, locks and pools that the workers share. Workers and the checker read the same table, so a history
//! need not repeat it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::clock::{MILLISECOND, Micros, SECOND};

/// The time that a woken waiter has to claim its permit: `claim_within` of every worker.
pub const CONFIRM: Micros = 4 * SECOND;
/// How long a worker waits for an answer before it suspects the connection.
pub const SOCKET_TIMEOUT: Micros = 1500 * MILLISECOND;
/// How often a client whose waiter is at the head of the queue queries whether a wake-up was lost. Documented, not
/// configurable.
pub const BACKSTOP: Micros = SECOND;
/// The most by which a worker extends a lock explicitly, whatever its TTL.
pub const EXTENSION: Micros = 4 * SECOND;

/// A long lease. A permit that is not released is unavailable for a long time.
pub const LONG: Micros = 10 * SECOND;

/// The most by which the clock of a Redis server is set at a time.
pub const STEP: Micros = 3 * SECOND;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Semaphore,
    Lock,
    Pool,
}

/// The rate limit of a semaphore.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    /// The most starts in any second.
    pub starts: u32,
    /// How many of them may start at once.
    pub burst: u32,
}

impl Rate {
    /// The time in which one token arrives.
    #[must_use]
    pub fn interval(self) -> Micros {
        SECOND.div_ceil(u64::from(self.starts - self.burst + 1))
    }
}

/// One semaphore, lock or pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a trait, and all of them combine
pub struct Thing {
    pub name: &'static str,
    pub kind: Kind,
    pub capacity: u32,
    /// How long a holder may be silent before it counts as dead: the heartbeat of a semaphore, or its TTL if that is
    /// shorter; the TTL of a lock or a pool.
    pub lease: Micros,
    /// Semaphores only: the longest time that a permit may be held.
    pub ttl: Option<Micros>,
    /// Locks only: whether the lock is extended automatically.
    pub extended: bool,
    /// Whether another program takes part, which follows only the published documents.
    pub shared: bool,
    /// Whether its holders write the protected record.
    pub recorded: bool,
    /// The largest weight of a permit. Each acquire asks for 1 to this many units.
    pub heaviest: u32,
    /// Whether permits have slot numbers.
    pub numbered: bool,
    pub rate: Option<Rate>,
    /// Whether an operator pauses and resumes it, and sets its capacity. `capacity` is the largest capacity.
    pub operated: bool,
}

impl Thing {
    #[must_use]
    pub const fn semaphore(name: &'static str, capacity: u32, lease: Micros) -> Self {
        Self {
            name,
            kind: Kind::Semaphore,
            capacity,
            lease,
            ttl: None,
            extended: true,
            shared: false,
            recorded: false,
            heaviest: 1,
            numbered: false,
            rate: None,
            operated: false,
        }
    }

    #[must_use]
    pub const fn lock(name: &'static str, lease: Micros) -> Self {
        let (kind, recorded) = (Kind::Lock, true);
        Self { kind, recorded, ..Self::semaphore(name, 1, lease) }
    }

    #[must_use]
    pub const fn pool(name: &'static str, capacity: u32, lease: Micros) -> Self {
        Self { kind: Kind::Pool, ..Self::semaphore(name, capacity, lease) }
    }

    const fn ttl(self, ttl: Micros) -> Self {
        Self { ttl: Some(ttl), ..self }
    }

    const fn not_extended(self) -> Self {
        Self { extended: false, ..self }
    }

    const fn shared(self) -> Self {
        Self { shared: true, ..self }
    }

    /// For leases that are long: after a store has lost its data, holders would use their old fences for too long.
    const fn not_recorded(self) -> Self {
        Self { recorded: false, ..self }
    }

    const fn recorded(self) -> Self {
        Self { recorded: true, ..self }
    }

    #[must_use]
    pub const fn weighed(self, heaviest: u32) -> Self {
        Self { heaviest, ..self }
    }

    #[must_use]
    pub const fn numbered(self) -> Self {
        Self { numbered: true, ..self }
    }

    #[must_use]
    pub const fn paced(self, starts: u32, burst: u32) -> Self {
        Self { rate: Some(Rate { starts, burst }), ..self }
    }

    #[must_use]
    pub const fn operated(self) -> Self {
        Self { operated: true, ..self }
    }

    #[must_use]
    pub fn lease_time(&self) -> Duration {
        Duration::from_micros(self.lease)
    }

    /// Whether the capacity is its only limit and never changes, and each permit takes one unit and has no number.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.heaviest == 1 && !self.numbered && self.rate.is_none() && !self.operated
    }

    /// Whether the command uses it as the workers do: as a plain one without a TTL, held as long as the command lives.
    /// Some that the command could use are left to the workers. When workers die, or do not release what they
    /// cancelled, no other process is then the reason why a permit is unavailable.
    #[must_use]
    pub fn is_for_the_command(&self) -> bool {
        let fits =
            self.kind != Kind::Pool && self.ttl.is_none() && self.extended && self.is_plain();
        fits && self.name != "pair" && !self.is_lasting()
    }

    #[must_use]
    pub fn is_lasting(&self) -> bool {
        self.lease == LONG
    }

    /// How long its holder may believe after the last answer of the store.
    #[must_use]
    pub fn longest(&self) -> Micros {
        if self.kind == Kind::Lock { self.lease.max(EXTENSION) } else { self.lease }
    }

    /// How long after its client fell silent an acquisition may still be held in the store: the lease, then a permit
    /// that was granted just before the end of that time and never claimed, then a sweep.
    #[must_use]
    pub fn aftermath(&self) -> Micros {
        self.lease + CONFIRM.min(self.lease) + SECOND + SECOND / 2
    }
}

/// Most leases are short, so that the permits of dead processes are free again within seconds. Some are long, so that
/// renewals do not find a lost wake-up, and a permit that is not released is missed before its lease ends.
pub const THINGS: [Thing; 16] = [
    Thing::semaphore("solo", 1, 3 * SECOND).recorded(),
    Thing::semaphore("pair", 2, 2 * SECOND),
    Thing::semaphore("five", 5, 3 * SECOND),
    Thing::semaphore("slow", 1, LONG),
    Thing::semaphore("slow-pair", 2, LONG),
    Thing::semaphore("short", 1, 1500 * MILLISECOND).ttl(1500 * MILLISECOND),
    Thing::semaphore("limited", 2, 3 * SECOND).ttl(4 * SECOND),
    Thing::semaphore("mixed", 2, 3 * SECOND).shared(),
    Thing::semaphore("weighed", 4, 3 * SECOND).weighed(4).numbered(),
    Thing::semaphore("paced", 3, 3 * SECOND).paced(10, 2),
    Thing::semaphore("operated", 3, 3 * SECOND).operated(),
    Thing::lock("kept", 2 * SECOND),
    Thing::lock("brief", LONG).not_extended().not_recorded(),
    Thing::lock("common", 3 * SECOND).shared().not_extended(),
    Thing::pool("two", 2, LONG),
    Thing::pool("three", 3, 2 * SECOND).shared(),
];

/// A set of [`THINGS`], by their indices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Things(u32);

impl Things {
    #[must_use]
    pub fn contains(self, thing: usize) -> bool {
        self.0 & 1 << thing != 0
    }

    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..THINGS.len()).filter(move |thing| self.contains(*thing))
    }
}

impl FromIterator<usize> for Things {
    fn from_iter<I: IntoIterator<Item = usize>>(things: I) -> Self {
        Self(things.into_iter().fold(0, |set, thing| set | 1 << thing))
    }
}

impl fmt::Display for Things {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(|thing| THINGS[thing].name).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Things {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = text.split(',').filter(|name| !name.is_empty());
        names.map(|name| find(name).ok_or_else(|| format!("{name:?} is not in the plan"))).collect()
    }
}

/// Returns the index of the thing with that name.
#[must_use]
pub fn find(name: &str) -> Option<usize> {
    THINGS.iter().position(|thing| thing.name == name)
}
