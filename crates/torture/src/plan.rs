//! What the workers fight over. Workers and checker read the same table, so that a history need not repeat it.

use std::time::Duration;

use crate::clock::{MILLISECOND, Micros, SECOND};

/// How long a woken waiter has to claim its permit: `confirm_within` of every worker.
pub const CONFIRM: Micros = 4 * SECOND;
/// How long a worker waits for an answer before it suspects the connection.
pub const SOCKET_TIMEOUT: Micros = 1500 * MILLISECOND;
/// How often a client with waiters asks whether a wake-up was lost: documented, not configurable.
pub const BACKSTOP: Micros = SECOND;
/// A lock that is extended by hand is extended by as much as this, whatever its TTL.
pub const EXTENSION: Micros = 4 * SECOND;

/// A long lease: whatever is not released is missed for long.
pub const LONG: Micros = 10 * SECOND;

/// A Redis server's clock is set by no more than this at a time.
pub const STEP: Micros = 3 * SECOND;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Semaphore,
    Lock,
    Pool,
}

/// How often a semaphore is granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    /// So many starts in a second.
    pub starts: u32,
    /// So many of them at once.
    pub burst: u32,
}

impl Rate {
    /// The time in which one token comes.
    #[must_use]
    pub fn interval(self) -> Micros {
        SECOND / u64::from(self.starts)
    }
}

/// One semaphore, lock or pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is one of its traits, and all combine
pub struct Thing {
    pub name: &'static str,
    pub kind: Kind,
    pub capacity: u32,
    /// After how long a silent holder is dead: the heartbeat, or the TTL where that is shorter; the TTL of a lock or a
    /// pool.
    pub lease: Micros,
    /// Of a semaphore: the longest that a permit may be held.
    pub ttl: Option<Micros>,
    /// Of a lock: whether it is extended by itself.
    pub extended: bool,
    /// Whether another program, which follows the published documents alone, takes part.
    pub shared: bool,
    /// Whether its holders write the protected record.
    pub recorded: bool,
    /// The largest weight of a permit. Each acquire asks for 1 to so many units.
    pub heaviest: u32,
    /// Whether permits have slot numbers.
    pub numbered: bool,
    pub rate: Option<Rate>,
    /// Whether an operator pauses and resumes it, and sets its capacity: `capacity` is the largest.
    pub steered: bool,
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
            steered: false,
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

    /// Fences of a long lease would be remembered for too long after a store has lost its data.
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
    pub const fn steered(self) -> Self {
        Self { steered: true, ..self }
    }

    #[must_use]
    pub fn lease_time(&self) -> Duration {
        Duration::from_micros(self.lease)
    }

    /// Whether its capacity is its only limit and never changes, and each permit takes one unit of it and has no number.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.heaviest == 1 && !self.numbered && self.rate.is_none() && !self.steered
    }

    /// Whether the command uses it as the others do: as a plain one without a TTL, and kept for as long as it lives. Some
    /// that it could use are left to the workers: when those die, or do not release what they cancelled, nobody else is the
    /// reason why a permit is not to be had.
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

    /// For how long its holder may believe after the store said so for the last time.
    #[must_use]
    pub fn longest(&self) -> Micros {
        if self.kind == Kind::Lock { self.lease.max(EXTENSION) } else { self.lease }
    }

    /// How long after its client fell silent an acquisition may still be held in the store: the lease, a permit that was
    /// granted to it just before its own end and that it never claimed, and a sweep.
    #[must_use]
    pub fn aftermath(&self) -> Micros {
        self.lease + CONFIRM.min(self.lease) + SECOND + SECOND / 2
    }
}

/// Short leases, so that what dies heals within seconds; and some long ones, so that a lost wake-up is not healed by
/// renewals, and what is not released is missed before its lease ends.
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
    Thing::semaphore("steered", 3, 3 * SECOND).steered(),
    Thing::lock("kept", 2 * SECOND),
    Thing::lock("brief", LONG).not_extended().not_recorded(),
    Thing::lock("common", 3 * SECOND).shared().not_extended(),
    Thing::pool("two", 2, LONG),
    Thing::pool("three", 3, 2 * SECOND).shared(),
];

/// The thing of that name.
#[must_use]
pub fn find(name: &str) -> Option<usize> {
    THINGS.iter().position(|thing| thing.name == name)
}
